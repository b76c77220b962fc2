"""``scu-trainer prune``: makes a trained model smaller, and measures the cost on rows that it has not learned."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from scu_trainer.cli.fields import parse_checked
from scu_trainer.cli.main import guarded
from scu_trainer.cli.origin import lost_run_message, source_run_of, with_source_run
from scu_trainer.cli.parsing import Parser, add_consent
from scu_trainer.cli.publishing.merge import default_output, require_new, shown_path, write_new
from scu_trainer.cli.subjects import Subject, held_out_settings, subject_of
from scu_trainer.errors import DataError, ModelError, SettingsError
from scu_trainer.hub.facts import PRUNE_FILE
from scu_trainer.models.export import write_model
from scu_trainer.models.loading.names import is_adapter
from scu_trainer.models.loading.offloaded import input_device
from scu_trainer.models.prune import plan_pruning, pruned, recompute_batchnorm_statistics
from scu_trainer.run_files import format_bytes, write_json
from scu_trainer.settings.tasks import TEXT
from scu_trainer.train.run_directory.logs import run_log
from scu_trainer.train.tasks import task_of

if TYPE_CHECKING:
    from scu_trainer.train.evaluation.scoring import DocumentScores
    from scu_trainer.train.job.components import TrainingComponents

logger = logging.getLogger("scu_trainer")

TASKS = (TEXT, "image-classification")
MEASURED_ROWS, ROWS_AT_ONCE = 256, 32
"""Training rows on which the contribution of units and the statistics of BatchNorm are measured."""

DESCRIPTION = """\
RUN_OR_MODEL is the folder of a run with full weights, of one of its checkpoints, or of a model. The units that
contribute least are removed from the weights, the same number in each layer: MLP neurons and groups of heads of a
language model built like Llama, channels of a ResNet. The result is a folder that stock transformers reads, and that
can be trained further like any model: scu-trainer train --model_name_or_path DIR --tuning full, best with --teacher
RUN."""


def _parser() -> Parser:
    parser = Parser(prog="scu-trainer prune", description=DESCRIPTION)
    parser.add_argument("run", metavar="RUN_OR_MODEL")
    parser.add_argument("--amount", type=float, default=0.25, help="share of the units to remove (default: 0.25)")
    parser.add_argument(
        "--units",
        nargs="+",
        choices=("neurons", "heads", "channels"),
        default=(),
        help="kinds of units to remove; default: all that the model has",
    )
    parser.add_argument("--output", help="folder to write (default: RUN-pruned); it must not exist yet")
    parser.add_argument(
        "--dataset", help="for a model without a run: the data to measure units on; a split of it is scored"
    )
    parser.add_argument("--block_size", type=int, help="tokens in a row of that dataset")
    parser.add_argument("--seed", type=int, help="for a model without a run: seed of that split; default: 0")
    add_consent(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


@guarded
def main(argv: list[str]) -> int:
    typed = parse_checked(_parser(), argv)
    if not 0 < typed.amount < 1:
        raise SettingsError(f"amount is {typed.amount:g}; allowed: above 0 and below 1, such as 0.25")
    subject = subject_of(typed.run).with_consent(typed, device_map=None, tuning="lora")  # keeps the type of the files
    _require_prunable(subject, typed.dataset)
    if typed.seed is not None and with_source_run(subject).run is not None:
        raise SettingsError(f"seed has no effect on {subject.name}: its run determines what is held out; drop it")
    source = Path(subject.source)
    output = source.parent / f"{source.name}-pruned" if typed.output is None else Path(typed.output)
    output = output.expanduser().absolute()
    require_new(output)
    data_options = {
        name: getattr(typed, name) for name in ("dataset", "block_size") if getattr(typed, name) is not None
    }
    facts = prune(subject, output, typed.amount, typed.units, data_options, typed.seed or 0)
    print(json.dumps(facts) if typed.json else screen(facts, _job_flags(subject, typed.dataset)))
    return 0


def _require_prunable(subject: Subject, dataset: Optional[str]) -> None:
    source = Path(subject.source)
    if not source.is_dir():
        raise ModelError(f"{subject.name} is not a folder here; download the model and give its folder")
    if is_adapter(source):
        adapter, merged = shlex.quote(subject.name), shlex.quote(shown_path(str(default_output(subject))))
        raise ModelError(
            f"{subject.name} is an adapter; merge it first: scu-trainer merge {adapter}, then scu-trainer prune "
            f"{merged} --dataset NAME, with the data to score it on"
        )
    if subject.task not in TASKS:
        raise ModelError(f"{subject.name} is of task: {subject.task}; prune is for {' and '.join(TASKS)}")
    if dataset is None and with_source_run(subject).run is None:
        raise DataError(f"{subject.name} belongs to no run here, so its data are unknown; add --dataset NAME")


def _job_flags(subject: Subject, dataset: Optional[str]) -> str:
    """Return the flags with which ``train`` uses the task and the data of the model."""
    flags = "" if dataset is None else f" --dataset {shlex.quote(dataset)}"
    if subject.run is None and dataset is not None:
        return flags if subject.task == TEXT else f" --task {subject.task}{flags}"
    settings = shown_path(str(Path(source_run_of(Path(subject.source))["folder"]) / "training_config.json"))
    return f" --config {shlex.quote(settings)}{flags}"


def screen(facts: dict[str, Any], job_flags: str) -> str:
    before, after = facts["before"], facts["after"]
    output, source = shown_path(facts["output"]), shown_path(facts["source"])
    units = "; ".join(
        f"{kind} {', '.join(f'{count} to {kept}' for count, kept in sizes)}" for kind, sizes in facts["units"].items()
    )
    change = facts["change"]
    bounds = "" if change["low"] is None else f"; 95 % interval {change['low']:+.3f} to {change['high']:+.3f}"
    lines = [
        f"pruned: {output}",
        f"  {units}",
        f"  weights: {before['weights']:,} before, {after['weights']:,} after",
        f"  bytes: {format_bytes(before['size_bytes'])} before, {format_bytes(after['size_bytes'])} after",
        f"  held-out bits per {facts['unit']}: {before['bits']:.3f} before, {after['bits']:.3f} after "
        f"({change['value']:+.3f}{bounds})",
    ]
    if "accuracy" in before:
        lines.append(f"  held-out accuracy: {before['accuracy']:.1%} before, {after['accuracy']:.1%} after")
    return "\n".join(
        [
            *lines,
            f"next: scu-trainer train{job_flags} --model_name_or_path {shlex.quote(output)} --tuning full --teacher "
            f"{shlex.quote(source)} --output_dir {shlex.quote(output + '-trained')}",
        ]
    )


def prune(
    subject: Subject, output: Path, amount: float, kinds: Sequence[str], data_options: dict[str, Any], seed: int
) -> dict[str, Any]:
    """Write the pruned model of ``subject`` to ``output`` atomically, and return what prune.json holds.

    ``amount``: share of the units to remove. ``kinds``: kinds of units; () means all that the model has.
    ``data_options``: data settings that override those of the run. ``seed``: seed of the split if there is no run.
    Raises UserError.
    """
    from scu_trainer.train.evaluation.scoring import bootstrap_difference
    from scu_trainer.train.job.components import EvaluationSource

    learned, task = with_source_run(subject), task_of(subject.task)
    data, seed = held_out_settings(learned, data_options, seed)
    source = EvaluationSource(subject.model, data, learned.own(subject.task), seed)
    facts: dict[str, Any] = {
        "format": 1,
        "source": subject.source,
        "run": source_run_of(Path(subject.source)),
        "answers_plain_text": subject.answers_plain_text,
        "output": str(output),
        "amount": amount,
        "unit": task.unit,
    }

    def scores_of(parts: TrainingComponents) -> DocumentScores:
        if parts.data.eval is None:
            raise DataError(f"nothing of {data.shown_dataset} is held out; give more data")
        return task.score(parts.model, parts)

    def build(folder: Path) -> None:
        parts = task.load_scored(source)
        plan = plan_pruning(parts.model, amount, kinds)
        before = scores_of(parts)
        pruned_model = pruned(parts.model, plan, _batches(parts))
        recompute_batchnorm_statistics(
            pruned_model, ({k: v.cpu() for k, v in batch.items()} for batch in _batches(parts))
        )
        write_model(pruned_model, parts.processor, folder, "5GB")
        reloaded = task.load_scored(replace(source, model=replace(source.model, model_name_or_path=str(folder))))
        after = scores_of(reloaded)
        facts.update(
            units=plan.sizes,
            before=_model_figures(parts, before),
            after=_model_figures(reloaded, after),
            change=bootstrap_difference(before, after).over(before),
        )
        write_json(folder / PRUNE_FILE, facts)

    with run_log():
        if (lost := lost_run_message(learned)) is not None:
            logger.warning("%s: it may have learned some of the documents that it is scored on", lost)
        write_new(output, build)
    return facts


def _model_figures(parts: TrainingComponents, scores: DocumentScores) -> dict[str, Any]:
    weights = list(parts.model.parameters())
    accuracy = {} if scores.correct is None else {"accuracy": scores.accuracy}
    return {
        "weights": sum(weight.numel() for weight in weights),
        "size_bytes": sum(weight.nbytes for weight in weights),
        "bits": scores.bpt,
        **accuracy,
    }


def _batches(parts: TrainingComponents) -> Iterator[dict[str, Any]]:
    """Yield batches of training rows, on which nothing is scored."""
    from scu_trainer.models.vision.inputs import process_images_for
    from scu_trainer.train.evaluation.scoring import MODEL_INPUTS

    rows, device = parts.data.train, input_device(parts.model)
    for start in range(0, min(MEASURED_ROWS, len(rows)), ROWS_AT_ONCE):
        batch = parts.collator([rows[number] for number in range(start, min(start + ROWS_AT_ONCE, len(rows)))])
        batch = {name: batch[name].to(device) for name in (*MODEL_INPUTS, "pixel_values") if name in batch}
        yield process_images_for(parts.model, batch)
