"""``scu-trainer eval``: held-out bits per token, or accuracy, of a run, a checkpoint, an adapter or a model, alone or
beside another.

A run says itself which documents it held out. Two models are scored on the same rows, and each resample of the
documents is drawn for both alike: what makes a document hard cancels in the difference.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional

from scu_trainer.cli import configuration
from scu_trainer.cli.main import guarded
from scu_trainer.cli.subjects import (
    Subject,
    base_subject,
    held_out_settings,
    may_have_learned,
    own_split,
    subject_of,
)
from scu_trainer.errors import DataError, ModelError, SettingsError
from scu_trainer.models.load import load_tokenizer
from scu_trainer.settings import DataSettings
from scu_trainer.settings.tasks import KINDS, TEXT, TaskSettings

if TYPE_CHECKING:
    from transformers import HfArgumentParser

    from scu_trainer.train.evaluate import DocumentScores, Interval
    from scu_trainer.train.parts import Parts
    from scu_trainer.train.tasks.task import Task

BASE = "base"

DESCRIPTION = """\
RUN_OR_MODEL is the folder of a run, of one of its checkpoints, of an adapter or of a model, or a Hub id. A run and its
checkpoints are scored on the documents that the run held out; any other model needs --dataset (a split of it is scored,
by the data settings below) or --eval_dataset (all of it is scored). Flags override the data settings of a run."""

MAY_HAVE_LEARNED = "it may have learned some of these documents"

BATCH_TOKENS = 8192

FEW_DOCUMENTS = 10
"""Below this a percentile bootstrap is clearly too narrow."""


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class EvalOptions:
    """How to score, and what to compare with."""

    _argument_group_name = "evaluation"

    task: Optional[str] = _option(None, f"of {', '.join(KINDS)}; default: that of the run, {TEXT} without one")
    against: Optional[str] = _option(None, "a second model, or the word base: what RUN_OR_MODEL was tuned from")
    batch_tokens: Optional[int] = _option(None, f"padded tokens per forward pass; default: {BATCH_TOKENS}")
    confidence: float = _option(0.95, "level of the intervals, above 0 and below 1")
    resamples: int = _option(2000, "resamples of the documents behind each interval")
    seed: int = _option(0, "seed of the resampling; where no run tells one, also of the held-out split")
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = _option(
        "auto", "arithmetic: bf16 or fp16 autocast, or no: that of the weights. auto: that of the run, no without one"
    )
    trust_remote_code: bool = _option(False, "run Python code that comes with a model")
    allow_pickle: bool = _option(False, "also read weights that are stored as pickle files: tensors only")

    def __post_init__(self) -> None:
        for name, least in (("batch_tokens", 1), ("resamples", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise SettingsError(f"{name} is {value}; it must be {least} or more")
        if self.task is not None:
            TaskSettings(self.task)
        if not 0 < self.confidence < 1:
            raise SettingsError(f"confidence is {self.confidence}; it must lie between 0 and 1, for instance 0.95")


def main(argv: Optional[Sequence[str]] = None) -> int:
    return guarded(_main, list(sys.argv[1:] if argv is None else argv))


def _main(argv: list[str]) -> int:
    parser = _parser()
    if {"-h", "--help"} & {*argv}:
        print(parser.format_help())
        return 0
    name, as_json, options, typed = _read(parser, argv)
    subjects = _subjects(name, options)
    with _quiet_stdout():
        report = _evaluate(subjects, typed, options)
    print(json.dumps(report, allow_nan=False) if as_json else as_text(report))
    return 0


# -- the command line --------------------------------------------------------------------------------------------------


def _parser() -> HfArgumentParser:
    from transformers.hf_argparser import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message: str):
            raise SettingsError(message)

    class DataFlags(DataSettings):
        _argument_group_name = "data"

    parser = Parser(
        [EvalOptions, DataFlags],
        prog="scu-trainer eval",
        usage="%(prog)s RUN_OR_MODEL [--against OTHER] [--json] [--FIELD VALUE ...]",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="RUN_OR_MODEL")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def _read(parser: HfArgumentParser, argv: list[str]) -> tuple[str, bool, EvalOptions, dict[str, Any]]:
    """RUN_OR_MODEL, --json, the options, and the data settings that were typed."""
    configuration.check_names(argv, configuration.field_names(parser))
    data_names = [item.name for item in fields(DataSettings)]
    parser.set_defaults(**dict.fromkeys(data_names))  # None: not typed
    values = vars(parser.parse_args(argv))
    options = EvalOptions(**{item.name: values[item.name] for item in fields(EvalOptions)})
    typed = {name: values[name] for name in data_names if values[name] is not None}
    return values["model"], values["json"], options, typed


def _subjects(name: str, options: EvalOptions) -> list[Subject]:
    """What is scored, and what it is compared with if anything."""
    if name == BASE:
        raise ModelError(f"{BASE} is a word of --against; give a path or a Hub id first (./{BASE} for a folder)")
    subjects = [subject_of(name)]
    if options.against is not None:
        subjects.append(base_subject(subjects[0]) if options.against == BASE else subject_of(options.against))
    # A run that came from elsewhere must not bring the consent with it.
    consent = {"trust_remote_code": options.trust_remote_code, "allow_pickle": options.allow_pickle}
    return [replace(subject, model=replace(subject.model, **consent)) for subject in subjects]


@contextlib.contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Standard output is for the result alone."""
    with contextlib.redirect_stdout(sys.stderr):
        from scu_trainer.train.logs import run_log

        with run_log():
            yield


# -- scoring -----------------------------------------------------------------------------------------------------------


def _evaluate(subjects: list[Subject], typed: dict[str, Any], options: EvalOptions) -> dict[str, Any]:
    """Everything that is reported, JSON-like."""
    from scu_trainer.train.tasks import task_of

    owner = next((subject for subject in subjects if subject.run), subjects[0])
    task = task_of(options.task or owner.task)
    _require_task(task, subjects, typed, options)
    settings, seed = held_out_settings(owner, typed, options.seed)
    if task.name == TEXT:
        _require_same_tokens(subjects, [load_tokenizer(subject.model) for subject in subjects])
    precision = (owner.mixed_precision or "no") if options.mixed_precision == "auto" else options.mixed_precision
    ask = _Question(task, settings, owner, seed, precision, options.batch_tokens or BATCH_TOKENS)
    scores = [ask.scores(subject) for subject in subjects]
    notes = [*_notes_on_data(ask.data, task.item), *_notes_on_training(subjects, settings, seed, owner)]
    if owner.run and not typed and ask.data.fingerprint != owner.run["data"]["fingerprint"]:
        notes.append(f"the data have another fingerprint than when {owner.name} was trained: {MAY_HAVE_LEARNED}")
    return {
        "task": task.name,
        "item": task.item,
        "unit": task.unit,
        "dataset": settings.eval_dataset or settings.dataset,
        "fingerprint": ask.data.fingerprint,
        "split_seed": seed,
        "documents": len(scores[0].tokens),
        "tokens": int(scores[0].tokens.sum()),
        "mixed_precision": precision,
        "resamples": options.resamples,
        "seed": options.seed,
        **_figures(subjects, scores, options),
        "notes": notes,
    }


def _require_task(task: Task, subjects: list[Subject], typed: dict[str, Any], options: EvalOptions) -> None:
    other = next((subject for subject in subjects if subject.run and subject.task != task.name), None)
    if other is not None:
        raise ModelError(f"{other.name} is a run of task: {other.task}, and task is {task.name}; score each by itself")
    TaskSettings(task.name).check_typed(typed)
    if options.batch_tokens is not None and task.unit == "label":
        raise SettingsError(f"batch_tokens has no effect on task: {task.name}; drop it")


def _require_same_tokens(subjects: list[Subject], tokenizers: list[Any]) -> None:
    if tokenizers[0].get_vocab() == tokenizers[-1].get_vocab():
        return
    first, second = (f"{s.name} ({len(t):,} tokens)" for s, t in zip(subjects, tokenizers, strict=True))
    raise ModelError(
        f"{first} and {second} have different tokenizers, so a token is not the same amount of text to both; score "
        f"each by itself: scu-trainer eval {subjects[0].name}, and scu-trainer eval {subjects[1].name}"
    )


@dataclass
class _Question:
    """What all models of a comparison are asked. One ``precision``: they round alike, as the figures of the run did.

    ``data``: the rows of the ``owner``, once it was asked.
    """

    task: Task
    settings: DataSettings
    owner: Subject
    seed: int
    precision: str
    batch_tokens: int
    data: Any = None
    held_out: Optional[list[str]] = None

    def scores(self, subject: Subject) -> DocumentScores:
        """One model is in memory at a time."""
        import numpy
        import torch

        parts = self._parts(subject)
        dtype = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]
        try:
            with torch.autocast(next(parts.model.parameters()).device.type, dtype, enabled=dtype is not None):
                scores = self.task.score(parts.model, parts)
        except torch.OutOfMemoryError as error:
            smaller = f"at batch_tokens {self.batch_tokens}; give a smaller --batch_tokens"
            raise ModelError(
                f"out of GPU memory {smaller if self.task.unit != 'label' else 'on a single row'}"
            ) from error
        broken = int((~numpy.isfinite(scores.nats)).sum())
        if broken:
            found = f"no finite loss on {broken} of {len(scores.nats)} {self.task.item}s"
            raise ModelError(f"{subject.name}: {found}, broken weights")
        return scores

    def _parts(self, subject: Subject) -> Parts:
        from scu_trainer.train.tasks.task import Source

        source = Source(subject.model, self.settings, self._own(subject), self.seed)
        parts = replace(self.task.load_scored(source), batch_tokens=self.batch_tokens)
        if parts.data.eval is None:
            raise DataError(
                f"no {self.task.item} of {self.settings.dataset} is held out; add --eval_dataset NAME_OR_PATH"
            )
        self._require_same_rows(subject, parts.data.eval)
        if self.data is None or subject is self.owner:
            self.data = parts.data
        return parts

    def _own(self, subject: Subject) -> Any:
        """What the task alone asks about ``subject``; which rows are held out is for the owner to say."""
        own = subject.own(self.task.name)
        return own if own is None else replace(own, **own_split(self.owner))

    def _require_same_rows(self, subject: Subject, rows: Any) -> None:
        keys = list(rows.keys()) if hasattr(rows, "keys") else None
        if self.held_out not in (None, keys):
            same = f"on the same {self.task.item}s"
            raise ModelError(f"{subject.name} and the other model cannot be scored {same}; score each by itself")
        self.held_out = keys


# -- the report --------------------------------------------------------------------------------------------------------


def _figures(subjects: list[Subject], scores: list[DocumentScores], options: EvalOptions) -> dict[str, Any]:
    from scu_trainer.train.evaluate import bootstrap_accuracy_difference, bootstrap_difference

    how = {"resamples": options.resamples, "confidence": options.confidence, "seed": options.seed}
    rows = [_figures_of(subject, score, how) for subject, score in zip(subjects, scores, strict=True)]
    if len(scores) == 1:
        return {"model": rows[0]}
    is_classifier = scores[0].correct is not None
    difference = (bootstrap_accuracy_difference if is_classifier else bootstrap_difference)(scores[1], scores[0], **how)
    found = {**_bounds(difference, scores[0]), "verdict": verdict(difference, len(scores[0].tokens))}
    return {"model": rows[0], "against": rows[1], "difference": found}


def _figures_of(subject: Subject, scores: DocumentScores, how: dict[str, Any]) -> dict[str, Any]:
    from scu_trainer.train.evaluate import bootstrap_accuracy, bootstrap_bpt

    bits = {"name": subject.name, "bpt": _bounds(bootstrap_bpt(scores, **how), scores)}
    if scores.correct is None:
        return {**bits, "perplexity": scores.perplexity}
    return {**bits, "accuracy": _bounds(bootstrap_accuracy(scores, **how), scores)}


def _bounds(interval: Interval, scores: DocumentScores) -> dict[str, Any]:
    """One document cannot be resampled: it has a value and no bounds."""
    return {**asdict(interval), **({"low": None, "high": None} if len(scores.tokens) < 2 else {})}


def verdict(difference: Interval, documents: int) -> str:
    """What the interval of "model minus other" says about the model."""
    if documents < 2:
        return "one document cannot tell"
    if difference.high < 0:
        return "lower"
    return "higher" if difference.low > 0 else "no difference found"


def _notes_on_data(data: Any, item: str) -> list[str]:
    count, books = len(data.eval_documents) if item == "document" else len(data.eval), data.books
    notes = [] if count >= FEW_DOCUMENTS else [f"{_count(count, item)} held out: too few to trust an interval"]
    if books.is_anything_dropped:
        notes.append(f"left out while reading: {books.dropped_in_words()}")
    return notes


def _notes_on_training(subjects: list[Subject], settings: DataSettings, seed: int, owner: Subject) -> list[str]:
    from scu_trainer.train.ema import EMA_FILE  # beside the weights of a checkpoint whose run evaluated averages

    suspects = [subject for subject in subjects if may_have_learned(subject, settings, seed, own_split(owner))]
    averaged = [subject for subject in subjects if (Path(subject.source) / EMA_FILE).is_file()]
    return [
        *(f"{s.name} was trained on another split: {MAY_HAVE_LEARNED}" for s in suspects),
        *(f"{s.name}: its weights are scored, not their moving averages ({EMA_FILE})" for s in averaged),
    ]


def as_text(report: dict[str, Any]) -> str:
    models = [report[key] for key in ("model", "against") if key in report]
    level = f"{100 * models[0]['bpt']['confidence']:g} % interval"
    held_out = f"held out: {_count(report['documents'], report['item'])} of {report['dataset']}"
    per = f"bits per {report['unit']}"
    if "accuracy" in models[0]:
        rows = [f"{'accuracy':>14}  {level:^20}  {per:>14}"]
        rows += [
            f"{m['accuracy']['value']:>14.4f}  {_range(m['accuracy']):^20}  {m['bpt']['value']:>14.4f}  {m['name']}"
            for m in models
        ]
    else:
        held_out += f", {report['tokens']:,} {report['unit']}s predicted"
        rows = [f"{per:>14}  {level:^20}  {'perplexity':>10}"]
        rows += [
            f"{m['bpt']['value']:>14.4f}  {_range(m['bpt']):^20}  {m['perplexity']:>10.4g}  {m['name']}" for m in models
        ]
    computed = "" if report["mixed_precision"] == "no" else f"computed in {report['mixed_precision']} autocast"
    lines = [held_out, computed, *rows]
    if "difference" in report:
        what = "accuracy" if "accuracy" in models[0] else per
        lines += ["", _difference_line(report["difference"], level, what, *(model["name"] for model in models))]
    return "\n".join([*lines, *(f"note: {note}" for note in report["notes"])])


def _difference_line(difference: dict[str, Any], level: str, what: str, name: str, other: str) -> str:
    found = difference["verdict"]
    summary = f"{name} is {found} than {other}" if found in ("lower", "higher") else found
    return f"{summary}: {difference['value']:+.4f} {what} ({level} {_range(difference, '+')})"


def _count(count: int, item: str) -> str:
    return f"{count:,} {item}{'s' if count != 1 else ''}"


def _range(interval: dict[str, Any], sign: str = "") -> str:
    return "none" if interval["low"] is None else f"{interval['low']:{sign}.4f} to {interval['high']:{sign}.4f}"
