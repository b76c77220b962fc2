"""``scu-trainer eval``: measures held-out bits per token, or accuracy, of runs, checkpoints, adapters and models, and
runs tasks of lm-evaluation-harness on them.

The files of a run determine which documents it held out. All models are scored on the same rows, and each resample of
the documents is the same for all models, so that the difficulty of a document cancels in the differences.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from scu_trainer.cli.evaluation.options import BATCH_SIZE, BATCH_TOKENS, EvalOptions, HarnessOptions
from scu_trainer.cli.evaluation.report import held_out_report, models_report, notes_of, tasks_report
from scu_trainer.cli.evaluation.scoring import EvaluationRequest
from scu_trainer.cli.evaluation.screen import as_text
from scu_trainer.cli.fields import check_names, field_names, flags_of_fields, readable_message, show_defaults_in_help
from scu_trainer.cli.main import guarded, stdout_to_stderr
from scu_trainer.cli.origin import base_subject, with_source_run
from scu_trainer.cli.parsing import with_explicit_switches
from scu_trainer.cli.subjects import (
    BASE,
    MERGED,
    Subject,
    held_out_settings,
    merged_subject,
    positions_of,
    subject_of,
)
from scu_trainer.errors import ModelError, SettingsError
from scu_trainer.models.loading.load import load_tokenizer
from scu_trainer.settings import DataSettings
from scu_trainer.settings.base import require
from scu_trainer.settings.tasks import TEXT, TaskSettings, require_mixable
from scu_trainer.train.tasks import task_of

if TYPE_CHECKING:
    from transformers import HfArgumentParser

    from scu_trainer.train.evaluation.harness import Harness
    from scu_trainer.train.evaluation.sliding import Windows
    from scu_trainer.train.job.job import Task

MISSPELLING_SIMILARITY = 0.75
"""Similarity at which a name counts as a misspelled keyword: "bsae" does, the Hub id "bert-base" does not."""

TRAINING_ONLY = ("sample_prompts", "sample_max_new_tokens")
"""Data settings that have no effect here, because no sample answers are generated."""

DESCRIPTION = """\
RUN_OR_MODEL is the folder of a run, of one of its checkpoints, of an adapter or of a model, or a Hub id. A run, its
checkpoints and what merge, export or prune made from them are scored on the documents that the run held out. Any other
model needs --dataset (a split of it is scored, by the data settings below), --eval_dataset (all of it is scored) or
--tasks (only the tasks are run). Flags override the data settings of a run."""


@guarded
def main(argv: list[str]) -> int:
    parser = _parser()
    if {"-h", "--help"} & {*argv}:
        print(parser.format_help())
        return 0
    name, as_json, options, harness_options, typed_data = _parse(parser, argv)
    subjects = _subjects(name, options)
    if typed_data or not harness_options.names or any(subject.run for subject in subjects):
        subjects = [with_source_run(subject) for subject in subjects]
    with stdout_to_stderr():
        report = _evaluate(subjects, typed_data, options, harness_options)
    print(json.dumps(report, allow_nan=False) if as_json else as_text(report))
    return 0


# -- the command line --------------------------------------------------------------------------------------------------


def _parser() -> HfArgumentParser:
    from transformers.hf_argparser import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message: str):
            where = "; give it before --against, which takes all names after it" if "RUN_OR_MODEL" in message else ""
            raise SettingsError(readable_message(message) + where)

    parser = Parser(
        [EvalOptions, HarnessOptions, _data_flags()],
        prog="scu-trainer eval",
        usage="%(prog)s RUN_OR_MODEL [--against OTHER ...] [--tasks NAMES] [--json] [--FIELD VALUE ...]",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="RUN_OR_MODEL")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    show_defaults_in_help(parser)
    return parser


def _data_flags() -> type:
    kind = flags_of_fields("DataFlags", DataSettings, {}, without=TRAINING_ONLY)
    kind._argument_group_name = "data"
    return kind


def _parse(parser: HfArgumentParser, argv: list[str]) -> tuple[str, bool, EvalOptions, HarnessOptions, dict[str, Any]]:
    """Return RUN_OR_MODEL, --json, the options, those of the harness, and the data settings that were typed."""
    check_names(argv, field_names(parser))
    data_names = [item.name for item in fields(DataSettings) if item.name not in TRAINING_ONLY]
    parser.set_defaults(**dict.fromkeys(data_names))  # None: not typed
    values = vars(parser.parse_args(with_explicit_switches(parser, argv)))
    options, harness_options = (
        kind(**{item.name: values[item.name] for item in fields(kind)}) for kind in (EvalOptions, HarnessOptions)
    )
    typed_data = {name: values[name] for name in data_names if values[name] is not None}
    return values["model"], values["json"], options, harness_options, typed_data


def _subjects(name: str, options: EvalOptions) -> list[Subject]:
    """Return the subject to score, followed by those to compare it with."""
    if name in (BASE, MERGED):
        raise ModelError(f"{name} is a keyword of --against; give a path or a Hub id first (./{name} for a folder)")
    first = subject_of(name)
    words = {BASE: base_subject, MERGED: lambda subject: merged_subject(subject, options.merge_dtype)}
    for other in options.against or []:
        _refuse_misspelled_keyword(other)
    others = [words[other](first) if other in words else subject_of(other) for other in options.against or []]
    if options.merge_dtype != "auto" and MERGED not in (options.against or []):
        raise SettingsError("merge_dtype is for --against merged; add that, or drop it")
    return [subject.with_consent(options) for subject in (first, *others)]


def _refuse_misspelled_keyword(name: str) -> None:
    """Raise ModelError for a misspelled keyword, which would otherwise be looked up on the Hub."""
    slip = get_close_matches(name, (BASE, MERGED), n=1, cutoff=MISSPELLING_SIMILARITY)
    if slip and name not in (BASE, MERGED) and not Path(name).exists():
        raise ModelError(f"--against {name} is not a folder here; did you mean the keyword {slip[0]}?")


# -- the evaluation ----------------------------------------------------------------------------------------------------


def _evaluate(
    subjects: list[Subject], typed_data: dict[str, Any], options: EvalOptions, harness_options: HarnessOptions
) -> dict[str, Any]:
    """Score all subjects and return the report, which holds only JSON values."""
    request = evaluation_request(subjects, typed_data, options, harness_options)
    results = [request.ask(subject) for subject in subjects]
    has_documents = request.settings is not None
    return {
        "task": request.task.name,
        **(held_out_report(request, results[0].scores) if has_documents else {"documents": None}),
        "mixed_precision": request.precision,
        "resamples": options.resamples,
        "seed": options.seed,
        **models_report(subjects, results, options, request.data),
        "tasks": tasks_report(subjects, results, harness_options, options) if harness_options.names else None,
        "notes": notes_of(request, subjects, results, typed_data),
    }


def evaluation_request(
    subjects: list[Subject], typed_data: dict[str, Any], options: EvalOptions, harness_options: HarnessOptions
) -> EvaluationRequest:
    """Return what to score all ``subjects`` on. Raises UserError for all that can be checked before loading a model."""
    owner = next((subject for subject in subjects if subject.run), subjects[0])
    task = task_of(options.task or owner.task)
    _require_task(task, subjects, typed_data, options, harness_options)
    _refuse_windows(options, task.name, typed_data)
    precision = (owner.mixed_precision or "no") if options.mixed_precision == "auto" else options.mixed_precision
    request = EvaluationRequest(task, None, owner, options.seed, precision, options.batch_tokens or BATCH_TOKENS)
    if owner.run or typed_data or not harness_options.names:
        request.settings, request.seed = held_out_settings(owner, typed_data, options.seed)
        require_mixable(request.settings, task.name)
        is_given = owner.run is not None or "block_size" in typed_data
        request.windows = _windows_for(options, request.settings, subjects, is_given)
    elif options.stride is not None or options.batch_tokens is not None:
        name = "stride" if options.stride is not None else "batch_tokens"
        raise SettingsError(
            f"{name} is for held-out documents, but you asked only for tasks; add --dataset, or drop it"
        )
    tokenizers = [load_tokenizer(subject.model) for subject in subjects] if task.name == TEXT else []
    if tokenizers and request.settings is not None:
        _require_same_tokens(subjects, tokenizers)
    request.harness = _harness_for(harness_options, options, subjects, tokenizers)
    return request


def _require_task(
    task: Task,
    subjects: list[Subject],
    typed_data: dict[str, Any],
    options: EvalOptions,
    harness_options: HarnessOptions,
) -> None:
    other = next((subject for subject in subjects if subject.run and subject.task != task.name), None)
    if other is not None:
        raise ModelError(f"{other.name} is a run of task: {other.task}, but task is {task.name}; score each separately")
    TaskSettings(task.name).check_given(typed_data)
    if options.batch_tokens is not None and task.unit == "label":
        raise SettingsError(f"batch_tokens has no effect on task: {task.name}; drop it")
    if harness_options.names and task.name != TEXT:
        raise SettingsError(f"tasks of lm-evaluation-harness need task: {TEXT}, but task is {task.name}; drop --tasks")


def _require_same_tokens(subjects: list[Subject], tokenizers: list[Any]) -> None:
    for subject, tokenizer in zip(subjects[1:], tokenizers[1:], strict=True):
        if tokenizer.get_vocab() == tokenizers[0].get_vocab():
            continue
        first, second = (
            f"{s.name} ({len(t):,} tokens)" for s, t in ((subjects[0], tokenizers[0]), (subject, tokenizer))
        )
        raise ModelError(
            f"{first} and {second} have different tokenizers, so a token is not the same amount of text for "
            f"both; score each separately: scu-trainer eval {shlex.quote(subjects[0].name)}, and scu-trainer eval "
            f"{shlex.quote(subject.name)}"
        )


def _harness_for(
    harness_options: HarnessOptions, options: EvalOptions, subjects: list[Subject], tokenizers: list[Any]
) -> Optional[Harness]:
    if not harness_options.names:
        return None
    from scu_trainer.train.evaluation.harness import Harness

    shared = ("num_fewshot", "limit", "include_path", "apply_chat_template")
    harness = Harness(
        harness_options.names,
        harness_options.batch_size or BATCH_SIZE,
        max_length=options.max_length,
        resamples=options.resamples,
        **{name: getattr(harness_options, name) for name in shared},
    )
    for subject, tokenizer in zip(subjects, tokenizers, strict=True):
        harness.require_template(tokenizer, subject.name)
    harness.check()
    return harness


# -- windows: --max_length and --stride --------------------------------------------------------------------------------


def _windows_for(
    options: EvalOptions, settings: DataSettings, subjects: list[Subject], is_block_size_given: bool
) -> Optional[Windows]:
    """Return the windows to score; None if neither option was typed: the rows that training evaluates are scored.
    ``is_block_size_given``: whether a run or a flag sets block_size. Raises SettingsError for impossible windows and
    for windows that exceed the positions of a model."""
    if options.max_length is None and options.stride is None:
        return None
    from scu_trainer.train.evaluation.sliding import Windows

    limits = {subject.name: positions_of(subject) for subject in subjects}
    known = [] if is_block_size_given else [positions for positions in limits.values() if positions is not None]
    max_length = options.max_length or min([settings.block_size, *known])
    stride = options.stride or max_length
    for name, positions in limits.items():
        require(
            positions is None or max_length <= positions,
            f"windows of {max_length} tokens exceed the {positions} positions of {name}; use --max_length {positions} "
            "or less",
        )
    require(
        stride <= max_length,
        f"stride {stride} exceeds max_length {max_length}, so tokens would be left out; use --stride {max_length} or "
        "less",
    )
    return Windows(max_length, stride)


def _refuse_windows(options: EvalOptions, task_name: str, typed_data: dict[str, Any]) -> None:
    """Raise SettingsError if the options for windows have no effect, or if the length is given twice."""
    given = [name for name in ("max_length", "stride") if getattr(options, name) is not None]
    if given and task_name != TEXT:
        raise SettingsError(f"{given[0]} only has an effect on task: {TEXT}, but task is {task_name}; drop it")
    if options.max_length is not None and "block_size" in typed_data:
        raise SettingsError("max_length and block_size both set the length of a row; drop --block_size")
