"""The facts in the files of a run, read once: everything that a model card may state."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from scu_trainer.errors import HubError, StorageError
from scu_trainer.hub.local_paths import is_local
from scu_trainer.json_types import first_misfit, misfit
from scu_trainer.models.loading.names import adapter_config_in, is_adapter
from scu_trainer.run_files import read_json, read_rows
from scu_trainer.settings.tasks import TEXT

IMAGES = "image-classification"

MERGE_FILE, EXPORT_FILE, PRUNE_FILE = "merge.json", "scu_export.json", "prune.json"
MADE_FILES = {MERGE_FILE: "merge", EXPORT_FILE: "export", PRUNE_FILE: "prune"}
"""Files that describe how weights next to them were made from those of a run, each with the command that writes it."""


@dataclass(frozen=True)
class SourceRun:
    """The run that weights were made from, as MADE_FILES store it. ``sha256``: of what decided which rows it held out;
    None if it is unknown."""

    folder: str
    sha256: Optional[str]


MADE_TYPES = {"adapter": str, "source": str, "run": Optional[SourceRun]}


@dataclass(frozen=True)
class RunFacts:
    """The content of the files of a run.

    Fields:
        weights: folder of the weights. run: the run directory that they come from; None if there is none.
        description: training_config.json. control: scu_config.json.
        metrics: scu_metrics.json; empty for a checkpoint, because it describes only the final weights.
        adapter: adapter_config.json. config: config.json. merge: merge.json.
        step: step of a checkpoint. samples: prompts, answers and references after training.
    """

    weights: Path
    run: Optional[Path] = None
    description: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    control: dict[str, Any] = field(default_factory=dict)
    adapter: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    merge: dict[str, Any] = field(default_factory=dict)
    step: Optional[int] = None
    samples: list[dict[str, str]] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, Any]:
        return self.description.get("configuration", {})

    @property
    def task(self) -> str:
        return self.settings.get("task", TEXT)

    @property
    def is_adapter(self) -> bool:
        return bool(self.adapter) and not self.merge

    @property
    def base(self) -> Optional[str]:
        """The base model as the files name it; None for a model from scratch and for the embedded base."""
        if self.settings and not self._start:
            return None
        return self.adapter.get("base_model_name_or_path") or self._start

    @property
    def is_embedded_base(self) -> bool:
        """Whether it was trained from the embedded base, which every installation makes for itself."""
        return bool(self.settings) and self.task == TEXT and not self._start

    @property
    def _start(self) -> Optional[str]:
        """The model or adapter from which training started."""
        return self.settings.get("model_name_or_path") or self.settings.get("adapter_name_or_path")

    @property
    def base_id(self) -> Optional[str]:
        """Id of the base on the Hub; None if its name is a local path."""
        return self.base if self.base and not is_local(self.base, self.weights) else None


def read_facts(weights: Path, run: Optional[Path], merge: Optional[dict[str, Any]] = None) -> RunFacts:
    """Read the facts about ``weights``: of ``run`` or a checkpoint in it. Raises StorageError for damaged files."""
    is_checkpoint = run is not None and weights != run
    return RunFacts(
        weights,
        run,
        description=_content(run, "training_config.json"),
        metrics={} if is_checkpoint else _content(run, "scu_metrics.json"),
        control=_content(run, "scu_config.json"),
        adapter=adapter_config_in(weights) if is_adapter(weights) else {},
        config=_content(weights, "config.json"),
        merge=merge or {},
        step=int(weights.name.rpartition("-")[2]) if is_checkpoint else None,
        samples=[] if is_checkpoint else _last_samples(run),
    )


def _last_samples(run: Optional[Path]) -> list[dict[str, str]]:
    if run is None or not (run / "samples.json").is_file():
        return []
    rows = [row for row in read_rows(run / "samples.json") if isinstance(row, dict) and row.get("samples")]
    return rows[-1]["samples"] if rows else []


def facts_of(path: Path, merge: Optional[dict[str, Any]] = None) -> tuple[RunFacts, Optional[Path]]:
    """Return the facts of a run, checkpoint, adapter or merged weights, and the folder of merged weights or None.
    ``merge`` is for a merge.json not yet written. Raises HubError if the adapter of merged weights is gone."""
    made = read_made_file(path)
    merged = path if "adapter" in made else None
    if merged is not None:
        merge, path = made, Path(str(made["adapter"]))
        if not path.is_dir():
            raise HubError(f"the adapter that {merged} was made from is no longer in {path}; merge it again")
    return read_facts(path, run_directory_of(path), merge), merged


def read_made_file(folder: Path) -> dict[str, Any]:
    """Return what merge, export or prune wrote next to weights; {} if nothing, or if it is of another program. Raises
    StorageError for a damaged file."""
    for name, command in MADE_FILES.items():
        made = _content(folder, name)
        if made.get("format") == 1 and {"adapter", "source"} & {*made}:
            given = [misfit(made[field], kind, field) for field, kind in MADE_TYPES.items() if field in made]
            if wrong := first_misfit(given):
                raise StorageError(f"{folder / name}: {wrong}, which nothing writes there; {command} it again")
            return made
    return {}


def run_directory_of(weights: Path) -> Optional[Path]:
    """Return the run directory that ``weights`` is, or of which it is a checkpoint; None if there is none."""
    if (weights / "training_config.json").is_file():
        return weights
    in_run = weights.name.startswith("checkpoint-") and (weights.parent / "training_config.json").is_file()
    return weights.parent if in_run else None


def _content(folder: Optional[Path], name: str) -> dict[str, Any]:
    if folder is None or not (folder / name).is_file():
        return {}
    content = read_json(folder / name)
    return content if isinstance(content, dict) else {}
