"""Finds the model behind a name (run, checkpoint, adapter, model, Hub id), and documents that it has not learned."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Optional, Union

from scu_trainer.errors import DataError, ModelError, SettingsError
from scu_trainer.hub.facts import read_made_file, run_directory_of
from scu_trainer.models.loading.load import config_of
from scu_trainer.models.loading.names import (
    check_source,
    downloaded_adapter,
    is_adapter,
    nearest_folder_hint,
    prompt_positions_of,
)
from scu_trainer.report.comparison.report import COMPARISON_FILE
from scu_trainer.report.files import CONFIG_FILE, STATUS_FILE
from scu_trainer.run_files import read_object, read_object_or_empty, resolve_from_run
from scu_trainer.runs.process import System
from scu_trainer.runs.state import report
from scu_trainer.runs.store import ROOT, Run
from scu_trainer.settings import DataSettings, ModelSettings
from scu_trainer.settings.mixture import dataset_names, is_same_dataset
from scu_trainer.settings.tasks import KINDS, TEXT

BASE, MERGED = "base", "merged"
"""Words for models derived from a subject: the model it was tuned from, and that model with the adapter merged in."""

WHICH_DOCUMENTS = (
    "dataset_config_name",
    "dataset_split",
    "eval_dataset",
    "validation_split_percentage",
    "max_eval_documents",
    "streaming",
    "stopping_strategy",
    "text_column",
    "prompt_column",
    "response_column",
    "system_column",
    "messages_column",
    "dataset_size",
)
"""Data settings that belong to one dataset. For another ``dataset`` they are reset to their defaults."""

MODEL_TYPES = {"cadence": "word-generation", "trident": "sensor-classification"}
"""Task of each of our own model types."""

SPLIT_RULES = (*WHICH_DOCUMENTS, "skip_bad_rows", "completion_only_loss", "assistant_only_loss")
"""Data settings that decide which documents are held out. Dropped rows change the split as well."""


@dataclass(frozen=True)
class Subject:
    """A trained model or a base model. ``name``: as typed. ``model.model_name_or_path``: its path or Hub id.

    ``run``: content of the training_config.json of its run; None without a run. ``word``: BASE or MERGED if it was
    named by such a word. ``merge_dtype``: the type in which the adapter is merged into its base before use.
    """

    name: str
    model: ModelSettings
    run: Optional[dict[str, Any]] = None
    word: Optional[str] = None
    merge_dtype: Optional[str] = None

    @property
    def source(self) -> str:
        return self.model.model_name_or_path

    @property
    def averages(self) -> Optional[str]:
        """Name of the file of moving averages in a checkpoint, if there is one. The averages are not used."""
        from scu_trainer.train.loops.weight_average import EMA_FILE

        return EMA_FILE if (Path(self.source) / EMA_FILE).is_file() else None

    @property
    def is_of_hub(self) -> bool:
        """Whether it was named by its Hub id. Nothing is written next to an adapter in the download cache."""
        return not Path(self.name).expanduser().exists()

    @property
    def mixed_precision(self) -> Optional[str]:
        """The mixed precision of its run: bf16, fp16, or None for the type of the weights."""
        precision = self.run["configuration"].get("mixed_precision") if self.run else None
        return precision if precision in ("bf16", "fp16") else None

    @property
    def task(self) -> str:
        """The task of its run; without a run, the task that its config.json implies."""
        return self.run["configuration"].get("task", TEXT) if self.run else _task_in(Path(self.source) / "config.json")

    @property
    def answers_plain_text(self) -> bool:
        """Whether its run, or the run that its weights were made from, learned to answer questions with a tokenizer
        that had no chat template."""
        from scu_trainer.data.records import AS_PLAIN_TEXT

        if self.run is None:
            return bool(read_made_file(Path(self.source)).get("answers_plain_text"))
        formats = self.run.get("data", {}).get("formats", {})
        return any(AS_PLAIN_TEXT in name for name in formats)

    def with_consent(self, options: Any, **changes: Any) -> Subject:
        """Return a copy with the consent that the user gave in ``options``, which is never taken from a run, and with
        ``changes`` to other model settings."""
        consent = {"trust_remote_code": options.trust_remote_code, "allow_pickle": options.allow_pickle}
        return replace(self, model=replace(self.model, **consent, **changes))

    def own(self, task: str) -> Any:
        """Return the settings that only ``task`` has, from its run or with their defaults; None if there are none."""
        kind = KINDS[task].settings
        return None if kind is None else _settings_from(kind, self.run or {"configuration": {}}, self.source)

    @property
    def data(self) -> DataSettings:
        data = _settings_from(DataSettings, self.run, self.source)
        return replace(data, dataset=self._resolved(data.dataset), eval_dataset=self._resolved(data.eval_dataset))

    def _resolved(self, dataset: Any) -> Any:
        """Return the path of a dataset, searched in the folders above the run. A bare name is an embedded or a Hub
        dataset, even if there is a folder of that name."""
        is_path = isinstance(dataset, str) and (len(Path(dataset).parts) > 1 or Path(dataset).suffix != "")
        return resolve_from_run(dataset, Path(self.source)) if is_path else dataset


def _task_in(config_file: Path) -> str:
    config = read_object_or_empty(config_file)
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in MODEL_TYPES:
        return MODEL_TYPES[kind]
    names = config.get("architectures")
    is_image = isinstance(names, list) and any(str(name).endswith("ForImageClassification") for name in names)
    return "image-classification" if is_image else TEXT


def subject_of(name: str) -> Subject:
    """Return the subject of a run, checkpoint, adapter, model or Hub id, without consent to run its code or read its
    pickle files (``Subject.with_consent``), because anybody may have written the run. Raises ModelError if nothing can
    be loaded or the run is not finished, StorageError for torn run files."""
    path = Path(name).expanduser().resolve()
    run_folder = path if (path / STATUS_FILE).is_file() else run_directory_of(path)
    if run_folder is None:
        _refuse_comparison(path)
        check_source(name, typed="")
        refuse_name_of_run(name)
        source = path if path.is_dir() else downloaded_adapter(name) or name
        return Subject(name, ModelSettings(model_name_or_path=str(source)))
    if path == run_folder:
        _require_finished(path)
    check_source(str(path), typed="")
    run = description_of(run_folder)
    overrides = {"model_name_or_path": str(path), "trust_remote_code": False, "allow_pickle": False}
    return Subject(name, replace(_settings_from(ModelSettings, run, path), **overrides), run)


def _refuse_comparison(path: Path) -> None:
    runs = sorted(folder.name for folder in (path / "runs").glob("*") if folder.is_dir())
    if (path / COMPARISON_FILE).is_file() and runs:
        raise ModelError(f"{path} is a comparison of runs; give one of its {len(runs)}, such as {path}/runs/{runs[0]}")


def refuse_name_of_run(name: str) -> None:
    """Raise ModelError for a name that ``runs list`` shows, which would otherwise be looked up on the Hub."""
    run = ROOT / name
    if not Path(name).exists() and (run / STATUS_FILE).is_file():
        raise ModelError(f"{name} is not a folder here, but {run} is a run; give {run}")


def _require_finished(run: Path) -> None:
    status = Run(run).status().get("status") if (run / STATUS_FILE).is_file() else "finished"
    has_model = is_adapter(run) or (run / "config.json").is_file()
    if status == "finished" and has_model:
        return
    state = report(Run(run, run.name), System()).state  # a killed run left "running" behind
    reason = "its model files are gone" if status == "finished" else f"its status is {state.status}"
    error = f" ({state.detail})" if state.detail else ""
    checkpoints = sorted(run.glob("checkpoint-*"), key=lambda path: (len(path.name), path.name))
    advice = f"name its newest checkpoint, {checkpoints[-1]}" if checkpoints else "train it to the end first"
    raise ModelError(f"run {run} holds no finished model, {reason}{error}; {advice}")


def description_of(run: Path) -> dict[str, Any]:
    """Return the training_config.json of ``run``. Raises ModelError if it is not ours, StorageError if it is torn."""
    content = read_object(run / CONFIG_FILE)
    settings = content.get("configuration")
    is_ours = (
        isinstance(settings, dict) and isinstance(content.get("data"), dict) and isinstance(content.get("seed"), int)
    )
    if not is_ours or settings.get("task", TEXT) not in list(KINDS):
        raise ModelError(f"{run / CONFIG_FILE} was not written by scu-trainer train; move it away and give --dataset")
    return content


def _settings_from(kind: type, run: dict[str, Any], folder: Union[str, Path]) -> Any:
    names = {item.name for item in fields(kind)}
    try:
        return kind(**{name: value for name, value in run["configuration"].items() if name in names})
    except SettingsError as error:
        raise SettingsError(f"in the {CONFIG_FILE} of {folder}, {error}") from error


def merged_subject(subject: Subject, dtype: str) -> Subject:
    """Return ``subject`` with its adapter merged into its base, in ``dtype``. Raises ModelError if there is nothing to
    merge or the model is not a language model."""
    if subject.task != TEXT:
        raise ModelError(f"{subject.name} has task {subject.task}, but merged needs {TEXT}; drop merged from --against")
    if not is_adapter(Path(subject.source)):
        raise ModelError(f"{subject.name} is not an adapter, so there is nothing to merge; drop merged from --against")
    return replace(subject, name=f"{subject.name} ({MERGED})", word=MERGED, merge_dtype=dtype)


# -- documents it has not learned --------------------------------------------------------------------------------------


def held_out_settings(subject: Subject, typed: dict[str, Any], seed: int) -> tuple[DataSettings, int]:
    """Return the data settings and the seed of the split. They are those of the run of ``subject``, overridden by
    ``typed``; without a run, ``seed`` is used. Raises DataError if the data is unknown."""
    if subject.run:
        # The tokenizer of the run has its chat template, and the file that it was read from may be gone.
        own = {**asdict(subject.data), "chat_template": None}
        if "dataset" in typed:
            replaced = ("eval_dataset",) if _is_dataset_of(subject, typed["dataset"]) else WHICH_DOCUMENTS
            own = {name: value for name, value in own.items() if name not in replaced}
        return DataSettings(**{**own, **typed}), split_seed(subject.run)
    if not {"dataset", "eval_dataset"} & {*typed}:
        reason = "belongs to no run"
        if not Path(subject.source).exists():
            reason = f"is not a folder here{nearest_folder_hint(subject.name)}, and a Hub id has no run"
        raise DataError(
            f"{subject.name} {reason}, so it is unknown which documents were held out; add --dataset NAME_OR_PATH to "
            "score a split of it, or --eval_dataset NAME_OR_PATH to score all of it"
        )
    return DataSettings(**{"dataset": typed.get("eval_dataset"), **typed}), seed


def _is_dataset_of(subject: Subject, dataset: Any) -> bool:
    trained = subject.data.dataset
    is_name = isinstance(dataset, str) and isinstance(trained, str)
    return is_same_dataset(dataset, trained) if is_name else dataset == trained


def own_split(subject: Subject) -> dict[str, Any]:
    """Return the settings of its task that decide which rows its run held out."""
    return {name: getattr(subject.own(subject.task), name) for name in KINDS[subject.task].split_fields}


def split_seed(run: dict[str, Any]) -> int:
    """Return the seed that decided what ``run`` held out. Older runs had one seed for everything."""
    return run.get("split_seed", run["seed"])


def may_have_learned(subject: Subject, settings: DataSettings, seed: int, own: dict[str, Any]) -> bool:
    """Whether ``subject`` may have learned documents that ``settings`` and ``own`` (see ``own_split``) hold out."""
    if subject.run is None or not _share_a_dataset(settings.eval_dataset or settings.dataset, subject.data.dataset):
        return False
    is_mixed = settings.is_mixture or subject.data.is_mixture
    if is_mixed and (settings.eval_dataset is not None or settings.dataset != subject.data.dataset):
        return True  # each source is split separately
    if subject.task == TEXT and _scores_fewer_documents(settings, subject.data):
        settings = replace(settings, max_eval_documents=subject.data.max_eval_documents)
    own_rules = _split_rules(subject.data, own_split(subject)), split_seed(subject.run)
    return own_rules != (_split_rules(settings, own), seed)


def _scores_fewer_documents(settings: DataSettings, trained: DataSettings) -> bool:
    """Whether fewer documents are scored than the run held out. They are the first in the same order, so the run
    learned none of them. Streams are excluded, because they have a cap even if none is set."""
    cap, limit = settings.max_eval_documents, trained.max_eval_documents
    return cap is not None and not trained.streaming and (limit is None or cap < limit)


def _share_a_dataset(dataset: Any, other: Any) -> bool:
    """Whether both are the same dataset or, if they are mixtures, have a source in common."""
    return any(
        is_same_dataset(first, second)
        for first, second in itertools.product(dataset_names(dataset), dataset_names(other))
    )


def _split_rules(settings: DataSettings, own: dict[str, Any]) -> list[Any]:
    return [*(getattr(settings, name) for name in SPLIT_RULES), own]


def positions_of(subject: Subject) -> Optional[int]:
    """Return the model's positions as ``models/fit.py`` does, but without reading weights; None without a limit."""
    positions = getattr(config_of(subject.model).get_text_config(), "max_position_embeddings", None)
    return None if positions is None else positions - prompt_positions_of(subject.model.model_name_or_path)
