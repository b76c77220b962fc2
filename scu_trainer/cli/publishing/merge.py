"""``scu-trainer merge``: merges an adapter into its base, for stock transformers, and compares the logits of both."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Self

from scu_trainer.cli.fields import parse_checked
from scu_trainer.cli.main import guarded
from scu_trainer.cli.origin import adapter_hash, source_run_of
from scu_trainer.cli.parsing import Parser, add_consent
from scu_trainer.cli.subjects import MERGED, Subject, positions_of, split_seed, subject_of
from scu_trainer.errors import DataError, ModelError, RequirementError, SettingsError, StorageError
from scu_trainer.hardware.probe import probe
from scu_trainer.hub.card import CARD, base_license, card_of
from scu_trainer.hub.facts import MERGE_FILE, facts_of
from scu_trainer.hub.local_paths import public_name
from scu_trainer.models.export import CLASSES, export_dtype, needed_bytes, read_back, require_same_logits, write_model
from scu_trainer.models.loading.names import is_adapter, nearest_folder_hint
from scu_trainer.models.loading.sizes import weight_counts
from scu_trainer.models.merge import merge_adapter
from scu_trainer.run_files import (
    format_bytes,
    free_space_hint,
    require_room,
    require_writable,
    write_json,
    write_text,
)
from scu_trainer.safe_paths import safe_argument
from scu_trainer.settings import DataSettings
from scu_trainer.settings.mixture import dataset_names
from scu_trainer.settings.tasks import TEXT
from scu_trainer.train.run_directory.logs import run_log
from scu_trainer.train.tasks import task_of

if TYPE_CHECKING:
    from torch import nn

    from scu_trainer.train.job.components import TrainingComponents

logger = logging.getLogger("scu_trainer")

BYTES = {"auto": None, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
DTYPES = tuple(BYTES)
CHECKED_ROWS, CHECKED_TOKENS = 4, 128
FALLBACK_DATASET = "python_docs"
"""Text to check on without a run, or if the data of the run are gone."""

DESCRIPTION = """\
RUN is the folder of a run, of one of its checkpoints, or of an adapter. The result is a folder that
AutoModelForCausalLM.from_pretrained reads: full weights in safetensors files, tokenizer, generation config, card. Its
logits are compared with those of the adapter on rows that the run held out; if they differ, nothing is written. For
QLoRA, the base is dequantized from 4 or 8 bits, and the result is not quantized again."""


@dataclass(frozen=True)
class MergeOptions:
    """How to write the merged model."""

    dtype: str = "auto"
    max_shard_size: str = "5GB"
    license: Optional[str] = None
    trust_remote_code: bool = False
    allow_pickle: bool = False


def add_merge_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="type of the merged weights; auto: as in the base"
    )
    parser.add_argument("--max_shard_size", default="5GB", help="largest file of weights (default: 5GB)")
    parser.add_argument(
        "--license", help="license of the model, for its card; default: that of the base, if it states one"
    )
    add_consent(parser)


def merge_options(typed: argparse.Namespace) -> MergeOptions:
    require_size(typed.max_shard_size)
    return MergeOptions(**{item.name: getattr(typed, item.name) for item in fields(MergeOptions)})


def require_size(text: str) -> None:
    if not re.fullmatch(r"0*[1-9]\d*[KMGT]B", text, re.IGNORECASE | re.ASCII):
        raise SettingsError(f"max_shard_size is {text!r}; give a size with its unit, for instance 5GB or 500MB")


def _parser() -> Parser:
    parser = Parser(prog="scu-trainer merge", description=DESCRIPTION)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--output", help="folder to write (default: RUN-merged); it must not exist yet")
    add_merge_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


@guarded
def main(argv: list[str]) -> int:
    typed = parse_checked(_parser(), argv)
    options, subject = merge_options(typed), subject_of(typed.run)
    facts = merge(subject, output_of(typed, subject, MERGED), options)
    print(json.dumps(facts) if typed.json else screen(facts))
    return 0


def output_of(typed: argparse.Namespace, subject: Subject, ending: str) -> Path:
    """Return the absolute path of ``--output``, or the default."""
    return Path(typed.output).expanduser().absolute() if typed.output is not None else default_output(subject, ending)


def default_output(subject: Subject, ending: str = MERGED) -> Path:
    """Return ``runs/mine-merged`` or ``runs/mine-checkpoint-80-merged``, next to the run. For a Hub id, it is in the
    current folder."""
    if subject.is_of_hub:
        return Path.cwd() / f"{subject.name.rpartition('/')[2]}-{ending}"
    source = Path(subject.source)
    is_checkpoint = subject.run is not None and source.name.startswith("checkpoint-")
    name = f"{source.parent.name}-{source.name}" if is_checkpoint else source.name
    return (source.parent.parent if is_checkpoint else source.parent) / f"{name}-{ending}"


def screen(facts: dict[str, Any]) -> str:
    tokens = "" if facts["tokens"] is None else f" ({facts['tokens']:,} tokens)"
    return "\n".join(
        [
            f"merged: {shown_path(facts['output'])}",
            f"  {facts['weights']:,} weights in {facts['dtype']}, {format_bytes(facts['size_bytes'])}",
            f"  checked on {facts['rows']} rows{tokens} of {facts['checked_on']}:",
            f"  logits differ by {facts['difference']:.1e} of the largest, {facts['tolerance']:g} is allowed",
            f"next: scu-trainer push {shlex.quote(shown_path(facts['output']))} --repo_id OWNER/NAME --dry_run",
        ]
    )


def shown_path(output: str) -> str:
    """Return a path as the user would type it in the current folder."""
    path = Path(output)
    return safe_argument(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else output)


# -- merging -----------------------------------------------------------------------------------------------------------


def merge(subject: Subject, output: Path, options: MergeOptions) -> dict[str, Any]:
    """Write the merged model of ``subject`` to ``output`` atomically, and return what merge.json holds. Raises
    UserError before anything is loaded if the merge cannot work."""
    _require_adapter(subject)
    require_new(output)
    subject = subject.with_consent(options, device_map=None)
    about = {
        "adapter": subject.source,
        "adapter_sha256": adapter_hash(Path(subject.source)),
    }
    with run_log():
        require_space(subject, output, options)
        merging = _Merging.of(subject, output, options, about)
        write_new(output, merging.build)
    return merging.facts


def require_new(output: Path) -> None:
    """Raise StorageError if ``output`` exists or cannot be written."""
    if output.exists():
        raise StorageError(f"{output} already exists; remove it, or give another folder with --output")
    require_writable(output.parent, "--output")


def write_new(output: Path, build: Callable[[Path], None]) -> None:
    """Create ``output`` atomically with ``build(folder)``. Raises StorageError if it cannot be written, or if another
    process was faster."""
    from scu_trainer.data.store import build_once

    built: list[Path] = []

    def build_here(folder: Path) -> None:
        build(folder)
        built.append(folder)

    try:
        build_once(output, build_here)
    finally:
        output.with_name(f"{output.name}.lock").unlink(missing_ok=True)
    if not built:
        raise StorageError(f"another process has written {output} in the meantime; check it, or give another folder")


def _require_adapter(subject: Subject) -> None:
    source = Path(subject.source)
    if not source.is_dir():
        raise ModelError(
            f"{subject.name} is neither a folder{nearest_folder_hint(subject.name)} nor an adapter on the Hub; give a "
            "run, checkpoint or adapter"
        )
    if not is_adapter(source):
        raise ModelError(
            f"{subject.name} holds full weights and no adapter, so there is nothing to merge. Load or push it as it is "
            f"(scu-trainer push)"
        )
    if subject.task not in CLASSES:
        raise ModelError(f"{subject.name} is an adapter of task: {subject.task}; merge is for {' and '.join(CLASSES)}")


def require_space(subject: Subject, output: Path, options: MergeOptions, beside_bytes: float = 0) -> None:
    """Raise RequirementError or StorageError if memory or disk do not suffice, judged only by the configuration of the
    base. ``beside_bytes``: bytes per weight of a second file that is written while the first ones exist."""
    if subject.task != TEXT or subject.model.trust_remote_code:
        return  # small, or of unknown size before its code has run
    counts = weight_counts(subject.source)
    memory, disk = needed_bytes(counts["weights"], counts["stored_bytes"], BYTES[options.dtype])
    available = probe().ram_available_bytes
    if memory > available:
        raise RequirementError(
            f"merging {counts['weights']:,.0f} weights takes about {format_bytes(memory)} of main memory (two "
            f"float32 copies and the model), but only {format_bytes(available)} are free; merge on a machine with more"
        )
    require_room(output.parent, disk + int(counts["weights"] * beside_bytes), "--output")


@dataclass
class Conversion:
    """The conversion of a model into a folder of full weights. ``inputs``: rows on which the logits of both are
    compared. ``facts``: the content of a JSON file in that folder."""

    subject: Subject
    options: MergeOptions
    parts: TrainingComponents
    inputs: dict[str, Any]
    dtype: Any
    facts: dict[str, Any]

    @classmethod
    def of(cls, subject: Subject, output: Path, options: MergeOptions, about: dict[str, Any]) -> Self:
        """Load the model and the rows to check on. ``about``: the first facts."""
        if subject.averages is not None:
            logger.warning("%s: its weights are taken, not their moving averages (%s)", subject.name, subject.averages)
        parts, checked_on = load_with_rows(subject)
        dtype, inputs = export_dtype(parts.model, options.dtype), rows_to_check_on(parts)
        facts = {
            "format": 1,
            **about,
            "run": source_run_of(Path(subject.source)),
            "answers_plain_text": subject.answers_plain_text,
            "output": str(output),
            "dtype": str(dtype).removeprefix("torch."),
            "rows": len(next(iter(inputs.values()))),
            "tokens": int(inputs["attention_mask"].sum()) if "attention_mask" in inputs else None,
            "checked_on": checked_on,
        }
        return cls(subject, options, parts, inputs, dtype, facts)

    def read_back(self, folder: Path) -> nn.Module:
        """Return the written model as stock transformers loads it. Raises ModelError if its logits differ from ours."""
        device = next(self.parts.model.parameters()).device
        model = read_back(folder, self.subject.task, device, self.options.trust_remote_code)
        if self.subject.task != TEXT:  # images are bytes until the model gets them
            from scu_trainer.models.vision.models import attach_pixel_inputs

            attach_pixel_inputs(model, self.parts.processor)
        difference, tolerance = require_same_logits(self.parts.model, model, self.inputs, self.dtype)
        self.facts |= {"difference": difference, "tolerance": tolerance}
        return model


class _Merging(Conversion):
    """The merge of an adapter into its base. Its facts are those of merge.json."""

    def build(self, folder: Path) -> None:
        with disk_errors_reported(folder):
            merged = merge_adapter(self.parts.model, self.dtype)
            write_model(merged, self.parts.processor, folder, self.options.max_shard_size)
        del merged
        model = self.read_back(folder)
        self.facts["weights"] = sum(weight.numel() for weight in model.parameters())
        self.facts["size_bytes"] = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        write_json(folder / MERGE_FILE, self.facts)
        self._write_card(folder)

    def _write_card(self, folder: Path) -> None:
        facts, _ = facts_of(Path(self.subject.source), self.facts)
        license = self.options.license or base_license(facts.base)
        write_text(folder / CARD, card_of(facts, self.facts["output"], license))


@contextlib.contextmanager
def disk_errors_reported(folder: Path) -> Iterator[None]:
    from scu_trainer.train.checkpoints.writer import is_write_error

    try:
        yield
    except Exception as error:  # the tokenizers library raises nothing more specific
        if not is_write_error(error):
            raise
        raise StorageError(f"{folder.parent} cannot hold the model: {error}; {free_space_hint()} there") from error


# -- rows to check on --------------------------------------------------------------------------------------------------


def load_with_rows(subject: Subject) -> tuple[TrainingComponents, str]:
    """Load the model with the data of its run or, for text if they are gone, with ``FALLBACK_DATASET``. Returns the
    components, and a description of the rows to check on."""
    from scu_trainer.train.job.components import EvaluationSource

    task, seed = task_of(subject.task), split_seed(subject.run) if subject.run else 0
    task_settings = subject.own(subject.task)
    shortest = min(CHECKED_TOKENS, positions_of(subject) or CHECKED_TOKENS)
    fallback = DataSettings(dataset=FALLBACK_DATASET, block_size=shortest)
    data = replace(subject.data, chat_template=None) if subject.run else fallback
    try:
        parts = task.load_scored(EvaluationSource(subject.model, data, task_settings, seed))
    except DataError as error:
        if subject.task != TEXT or data is fallback:
            raise
        print(f"the data of the run cannot be read ({error}); checked on {FALLBACK_DATASET} instead", file=sys.stderr)
        data = fallback
        parts = task.load_scored(EvaluationSource(subject.model, data, task_settings, seed))
    name = " + ".join(map(public_name, dataset_names(data.dataset)))
    if data is fallback:
        return parts, f"{name} (comes with Python)"
    return parts, f"{name} ({'held out' if parts.data.eval is not None else 'trained on'})"


def rows_to_check_on(parts: TrainingComponents) -> dict[str, Any]:
    """Return the inputs of the first rows, without their labels."""
    rows = parts.data.train if parts.data.eval is None else parts.data.eval
    batch = parts.collator([rows[index] for index in range(min(CHECKED_ROWS, len(rows)))])
    names = ("input_ids", "attention_mask", "pixel_values")
    inputs = {name: batch[name] for name in names if name in batch}
    return {name: value[:, :CHECKED_TOKENS] if name != "pixel_values" else value for name, value in inputs.items()}
