"""A YAML or JSON file plus flags -> settings. Flags win; an unknown key or a wrong type is an error that names it.

Our settings and the stock ``TrainingArguments`` are read by one ``HfArgumentParser``; a file's entries are turned into
flags in front of the typed ones, so both meet the same checks.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import yaml

from scu_trainer import shipped
from scu_trainer.cli.names.known import PREFIX, SETTINGS, known_names, stock_fields, stock_number
from scu_trainer.cli.names.tools import TOOLS, as_word, hint, imported, owner_of, signs_of
from scu_trainer.cli.names.translation import (
    as_flags,
    flags_of,
    is_mixture,
    name_of,
    notes_of,
    translated,
    translated_entries,
)
from scu_trainer.cli.parsing import with_choice
from scu_trainer.cli.presets import fitted
from scu_trainer.errors import SettingsError, nearest
from scu_trainer.hardware.probe import usable_cores
from scu_trainer.run_files import read_regular
from scu_trainer.secrets import redact, redact_data
from scu_trainer.settings import (
    DataSettings,
    MemorySettings,
    ModelSettings,
    RegularizationSettings,
    RetentionSettings,
)
from scu_trainer.settings.base import check_text, check_values, hints_of, plain, require, short
from scu_trainer.settings.mixture import FILE_SUFFIXES, dataset_of
from scu_trainer.settings.regularization import SAMPLED
from scu_trainer.settings.safety import SAVE_STEPS, STOCK_SAVE_STEPS, beside_early_stopping
from scu_trainer.settings.stock import ALLOWED
from scu_trainer.settings.tasks import KINDS, TaskSettings

if TYPE_CHECKING:
    from transformers import HfArgumentParser

    from scu_trainer.hardware.precision import DeviceFacts, PrecisionChoice
    from scu_trainer.train.job.job import Job

MOST_BYTES, MOST_VALUES, DEEPEST = 2**20, 100_000, 50
"""Limits of a configuration: size of the file, values with all aliases expanded, depth of nesting."""

STOCK_REFUSALS = (ValueError, ImportError, TypeError, KeyError, AttributeError, OverflowError, OSError, RecursionError)
"""What TrainingArguments raises for bad values: it checks some, others fail somewhere inside."""

STOCK_ADVICE = {
    "requires an eval strategy": "set eval_strategy: steps and eval_steps, for instance 20",
    "requires the save and eval strategy to match": "set eval_strategy and save_strategy to the same, steps or epoch",
}
"""What its words mean to somebody who types: a part of them -> what to add."""

SAYS_NO = ("mixed_precision", "logging_strategy", "eval_strategy", "evaluation_strategy", "save_strategy")
"""Fields with a choice ``no``, which is false in YAML unless it stands in quotes."""

APPENDED = {"resume_from_checkpoint": "auto", "use_cpu": "true"}
"""What a background run appends to the typed flags to override them (runs/supervisor.py)."""

DATA_SUFFIXES = {*FILE_SUFFIXES} - {".txt", ".json"}
"""Of files that hold data and are never a configuration."""

# Where our command line differs from the defaults of TrainingArguments, and why.
TRAINING_DEFAULTS = {
    "output_dir": "runs/run",  # a run has a place of its own
    "report_to": "tensorboard",  # it is a dependency, so its scalars are always there
    "logging_steps": 10,
    "logging_nan_inf_filter": False,  # a NaN loss is shown, not replaced by the last mean
    "save_steps": SAVE_STEPS,
    "save_total_limit": 3,
}


@dataclasses.dataclass
class InFile:
    """Entries of a file by our names, and notes on those that were translated. ``defaults``: entries that are not in
    the file but defaults of the program that it is for."""

    entries: dict[str, Any] = dataclasses.field(default_factory=dict)
    read_as: list[str] = dataclasses.field(default_factory=list)
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)


@functools.cache
def regularization_flags() -> type:
    """``RegularizationSettings`` as flags: ``scu`` and every field with the prefix ``scu_``."""
    about = "S is measured, and with scu_target_s steered; false: neither"
    switch = ("scu", bool, dataclasses.field(default=True, metadata={"help": about}))
    texts = {"target_s": Optional[str]}  # a number or a word; RegularizationSettings tells them apart
    return _flags("RegularizationFlags", RegularizationSettings, texts, [switch], PREFIX)


@functools.cache
def memory_flags() -> type:
    """``MemorySettings`` as flags; numbers that may also be a word are read as text, the settings tell them apart."""
    texts = {"token_cap": Optional[str], "target_headroom_gb": str}
    texts |= {"max_gpu_mem": Optional[str], "cpu_mem": Optional[str]}
    return _flags("MemoryFlags", MemorySettings, texts)


def _flags(name: str, kind: type, texts: Mapping[str, Any], first: Sequence[tuple] = (), prefix: str = "") -> type:
    """The dataclass ``kind`` with other types of the fields ``texts``, after the fields ``first``."""
    hints = {**hints_of(kind), **texts}
    fields = [
        (prefix + item.name, hints[item.name], dataclasses.field(default=item.default, metadata=dict(item.metadata)))
        for item in dataclasses.fields(kind)
    ]
    return dataclasses.make_dataclass(name, [*first, *fields])


def our_parser(*more: type) -> HfArgumentParser:
    from transformers.hf_argparser import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message: str):
            raise SettingsError(plain_words(message))

    otherwise = {"regularization": regularization_flags(), "memory": memory_flags()}
    kinds = [_grouped(otherwise.get(title, kind), title) for title, kind in SETTINGS.items()]
    kinds += [_grouped(kind.settings, f"task {name}") for name, kind in KINDS.items() if kind.settings is not None]
    kinds += more
    parser = Parser(
        kinds, prog="scu-trainer train", allow_abbrev=False, usage="%(prog)s [--config FILE] [--FIELD VALUE ...]"
    )
    parser._option_string_actions["--dataset"].type = dataset_of  # a name, or a JSON list
    if "--deepspeed" in parser._option_string_actions:
        parser._option_string_actions["--deepspeed"].type = shipped.deepspeed
    if "--liger_kernel_config" in parser._option_string_actions:  # transformers reads its other dicts from JSON
        parser._option_string_actions["--liger_kernel_config"].type = _json_object
    return parser


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{short(text)} is no JSON object, such as '{{\"rope\": true}}'")
    return found


def _grouped(kind: type, title: str) -> type:
    kind._argument_group_name = title
    return kind


def read_job(config: str | None, flags: Sequence[str], planned_for: Optional[DeviceFacts] = None) -> Job:
    """Settings from a file and flags. ``planned_for``: plan for the number formats of this device instead of this
    machine's. Raises SettingsError."""
    if "torch" not in sys.modules:
        _check_early(config, flags)
    from scu_trainer.train.job.job import Job
    from scu_trainer.train.step.distributed.deepspeed_start import prepare_environment
    from scu_trainer.train.tasks import task_of

    parser, arguments, task, note = _read(config, flags)
    parser.set_defaults(bf16=None, fp16=None)  # None: nobody said anything
    typed = parser.parse_args(arguments)
    prepare_environment(typed.deepspeed, typed.use_cpu)
    precision = _choose_precision(parser, typed, planned_for)
    note += _choose_optimizer(parser, typed, arguments)
    given = _given(arguments, field_names(parser))
    note += _choose_evaluations(parser, typed, given)
    try:
        parts = parser.parse_args_into_dataclasses(arguments, look_for_args_file=False)
    except STOCK_REFUSALS as error:
        raise SettingsError(_stock_refusal(error)) from error
    _, model, data, scu, memory, curriculum, efficiency, safety, retention, *own, training = parts
    return Job(
        dataclasses.replace(model, mixed_precision=precision.name),
        data,
        _made_of(RegularizationSettings, scu, PREFIX) if scu.scu else None,
        training,
        MemorySettings(**vars(memory)),
        curriculum,
        task=task,
        kind=task_of(task.task),
        own=next((settings for settings in own if type(settings) is task.kind.settings), None),
        efficiency=efficiency,
        safety=safety,
        retention=retention,
        notes=(f"precision: {precision.reason}", *note),
        changed_from=_changed_from(parser, typed),
        saves_by_length="save_steps" not in given and not typed.load_best_model_at_end,
    )


def _stock_refusal(error: Exception) -> str:
    text = " ".join(str(error).split())[:1000]
    if isinstance(error, (ValueError, ImportError)):
        return "; ".join([text, *(advice for part, advice in STOCK_ADVICE.items() if part in text)])
    return f"transformers.TrainingArguments does not accept these settings: {type(error).__name__}: {text}"


def read_values(config: str | None, flags: Sequence[str]) -> dict[str, Any]:
    """Every field of the command line by name, given or default, without checking that they go together or that this
    machine supports them. Raises SettingsError for unknown names and wrong types."""
    check_given_once(flags)
    parser, arguments, _, _ = _read(config, flags)
    return vars(parser.parse_args(arguments))


def typed_entries(config: str | None, flags: Sequence[str]) -> dict[str, Any]:
    """What a file and flags set, by field; flags win. Raises SettingsError."""
    values = read_values(config, flags)
    in_file = [] if config is None else _named_as_here(config, values).entries
    return {name: values[name] for name in dict.fromkeys([*in_file, *_given(translated(flags, values)[0], values)])}


def check_early(config: str | None, flags: Sequence[str]) -> None:
    """Check all names, and the values of our own fields, before torch is imported; ``flags`` as a person typed them.
    Raises SettingsError."""
    _check_early(config, flags)
    check_given_once(flags)


def _check_early(config: str | None, flags: Sequence[str]) -> None:
    """Also for flags that our own programs put together, where the later of two wins."""
    known = known_names()
    if not stock_fields():  # then only the class itself can tell
        return
    flags, _ = translated(flags, known)
    entries = {} if config is None else _named_as_here(config, known).entries
    for name in entries:
        if name not in known:  # only then: looking for a near name among all of them takes a while
            raise SettingsError(f"{config}: unknown key {short(name)}{hint(name, known)}")
    for name in _given(flags, known):
        if name not in known:
            raise SettingsError(f"unknown option --{name}{hint(name, known)}")
    require(
        not {"seed", "seeds"} <= {*entries, *_given(flags, known)}, "seed and seeds are both given; keep one of them"
    )
    for name, value in [*entries.items(), *flags_of(flags)]:
        _check_stock_number(name, value)
    check_values_early(entries, flags)


def _check_stock_number(name: str, value: Any) -> None:
    kind = stock_number(name)
    if kind is None or value is None or isinstance(value, (bool, list)):
        return
    try:
        kind(value)
    except (TypeError, ValueError) as error:
        raise SettingsError(
            f"--{name}: invalid {kind.__name__} value: {short(value)}{_such_as(name, kind.__name__)}"
        ) from error


def check_values_early(entries: Mapping[str, Any], flags: Sequence[str] = ()) -> None:
    """Values of our own fields, by name and in ``flags``. Raises SettingsError."""
    parser = our_parser()
    names = field_names(parser)
    words = as_flags({name: value for name, value in entries.items() if name in names})
    typed = parser.parse_known_args([*words, *flags])[0] if flags else parser.parse_args(words)
    _check_typed(parser, vars(typed))


def _check_typed(parser: HfArgumentParser, typed: Mapping[str, Any]) -> None:
    _made_of(TaskSettings, argparse.Namespace(**typed))
    for kind in parser.dataclass_types:
        check_values(kind, typed, ALLOWED)


def read_data(config: str | None, flags: Sequence[str]) -> tuple[str, ModelSettings, DataSettings]:
    """Task, model and data of a job, without torch: fields of TrainingArguments are not checked. Raises
    SettingsError."""
    check_given_once(flags)
    parser = our_parser()
    names = field_names(parser)
    entries = {} if config is None else _named_as_here(config, names).entries
    flags, _ = translated(flags, names)
    known = {name: value for name, value in entries.items() if name in names}
    given = _given(flags, names)
    typed, _ = parser.parse_known_args([*as_flags(known), *flags])
    task = _made_of(TaskSettings, typed)
    if "mode" in given:  # a typed one goes before the file
        known = {name: value for name, value in known.items() if name not in task.mode_values}
    parser.set_defaults(**{name: value for name, value in task.defaults.items() if name in names})
    typed, _ = parser.parse_known_args([*as_flags(known), *flags])
    return typed.task, _made_of(ModelSettings, typed), _made_of(DataSettings, typed)


def _read(
    config: str | None, flags: Sequence[str]
) -> tuple[HfArgumentParser, list[str], TaskSettings, tuple[str, ...]]:
    """A parser with the defaults of the task, the command line for it, the task, lines for the user."""
    from transformers import TrainingArguments

    parser = our_parser(TrainingArguments)
    parser.set_defaults(**TRAINING_DEFAULTS, use_cpu=not _has_accelerator())
    names = field_names(parser)
    flags, read_as = translated(flags, names)
    arguments, notes = _arguments(parser, config, flags, names)
    if read_as:
        notes = (f"read: {'; '.join(read_as)}", *notes)
    task, about_preset = _task(parser, arguments, names)
    typed = vars(parser.parse_args(arguments))
    for action in parser._actions:  # argparse takes "--" for the end of the flags, and leaves nothing behind
        found = typed.get(action.dest)
        require(found != [] or found == action.default, f"--{action.dest} needs a value; write --{action.dest} VALUE")
    _check_typed(parser, typed)
    _require_training(arguments, flags, typed)
    return parser, arguments, task, (*notes, *about_preset)


def _require_training(arguments: Sequence[str], flags: Sequence[str], typed: Mapping[str, Any]) -> None:
    """A resolved configuration holds all three fields, at their defaults, and trains."""
    given, by_flags = _given(arguments, typed), _given(flags, typed)
    is_resolved = "do_train" not in by_flags and {"do_eval", "do_predict"} <= {*given}
    require(
        typed["do_train"] or "do_train" not in given or is_resolved,
        "do_train is false, and this command trains; leave do_train out to train, or type scu-trainer eval "
        "RUN_OR_MODEL, which evaluates without training",
    )


def _arguments(
    parser: HfArgumentParser, config: str | None, flags: Sequence[str], names: set[str]
) -> tuple[list[str], tuple[str, ...]]:
    """File and flags as one command line, and notes, such as where a typed mode overrides the file."""
    in_file = InFile() if config is None else _entries(config, parser, names)
    entries = in_file.entries
    check_names(flags, names, read_before=("config",))
    typed_names = _given(flags, names)
    note: tuple[str, ...] = ()
    if "mode" in typed_names:
        typed = parser.parse_args([*as_flags(entries), *flags])
        task = _made_of(TaskSettings, typed)
        meant = {name: value for name, value in task.mode_values.items() if name not in typed_names}
        replaced = {name: entries[name] for name in meant if name in entries and entries[name] != meant[name]}
        entries = {name: value for name, value in entries.items() if name not in meant}
        words = [f"{name} {_word(meant[name])} instead of {_word(value)}" for name, value in replaced.items()]
        note += (f"mode {task.mode} overrides {config}: {', '.join(words)}",) if words else ()
    read_as = [*in_file.read_as, *_said_defaults(in_file.defaults, entries.keys() - {*typed_names}, parser)]
    note = (f"read in {config}: {'; '.join(read_as)}", *note) if read_as else note
    anchor = _anchor_of_a_budget(entries, typed_names)
    if anchor:
        note += (f"retain: {SAMPLED}, what the model writes before training, because retain_budget_bits names no text",)
    for name, first, second in _given_twice(flags):
        note += (f"--{name} is given twice: {redact(second)} counts, not {redact(first)}",)
    return [*as_flags(entries), *flags, *anchor], note


def _said_defaults(defaults: Mapping[str, Any], effective: Collection[str], parser: HfArgumentParser) -> list[str]:
    """A note on the defaults of another program that apply and differ from ours."""
    others = [name for name, value in defaults.items() if name in effective and value != parser.get_default(name)]
    said = ", ".join(f"{name}: {as_word(defaults[name])}" for name in others)
    return [f"its defaults count: {said}"] if others else []


def _anchor_of_a_budget(entries: Mapping[str, Any], typed_names: Collection[str]) -> list[str]:
    """Flags for a budget that is given without the text to retain. Files that a run or a comparison wrote hold every
    default, so there it does not count as given."""
    is_known = "retain" in typed_names or entries.get("retain") is not None
    defaults = {item.name for item in dataclasses.fields(RetentionSettings) if item.default is not None}
    is_in_file = entries.get("retain_budget_bits") is not None and not defaults <= set(entries)
    return ["--retain", SAMPLED] if ("retain_budget_bits" in typed_names or is_in_file) and not is_known else []


def _made_of(kind: type, typed: Any, prefix: str = "") -> Any:
    return kind(**{item.name: getattr(typed, prefix + item.name) for item in dataclasses.fields(kind)})


def _word(value: Any) -> str:
    return "the default" if value is None else str(value)


def _task(parser: HfArgumentParser, arguments: Sequence[str], names: Collection[str]) -> tuple[TaskSettings, list[str]]:
    """The task, after its defaults, preset and mode became defaults of ``parser``; notes on preset values that depend
    on this machine."""
    typed, given = parser.parse_args(arguments), _given(arguments, names)
    task = _made_of(TaskSettings, typed)
    task.check_typed(given)
    parser.set_defaults(**task.defaults)
    if task.preset is None:
        return task, []
    so_far = parser.parse_args(arguments)
    cores = max(1, int(usable_cores()) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    values, notes = fitted(task, so_far, given, cores=cores, has_cuda=_has_cuda())
    parser.set_defaults(**values)
    return task, notes


def _given(arguments: Iterable[str], names: Collection[str]) -> list[str]:
    """Fields that were given a value; ``--no_scu`` gives one to ``scu``."""
    given = [name_of(word) for word in arguments if word.startswith("--")]
    return [name.removeprefix("no_") if name.startswith("no_") and name[3:] in names else name for name in given]


def _choose_optimizer(parser: HfArgumentParser, typed: Any, arguments: Sequence[str]) -> tuple[str, ...]:
    """Choose the optimizer for weights trained in bfloat16, unless one is named; returns a note. DeepSpeed trains a
    copy in float32."""
    from scu_trainer.hardware.optimizers import FOR_BFLOAT16, STOCHASTIC

    is_deepspeed = typed.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    if (typed.dtype, typed.tuning) != ("bfloat16", "full") or is_deepspeed:
        return ()
    if "optim" in _given(arguments, field_names(parser)):
        return ()
    parser.set_defaults(optim=FOR_BFLOAT16, optim_args=STOCHASTIC)
    return (f"optimizer: {FOR_BFLOAT16}, {STOCHASTIC}: weights are bfloat16, and small steps would round away",)


def _choose_evaluations(parser: HfArgumentParser, typed: Any, given: Collection[str]) -> tuple[str, ...]:
    """Set what early stopping and the best model need as well, unless ``given``; returns a note."""
    chosen = {} if typed.early_stopping_patience is None else beside_early_stopping(vars(typed), given)
    together = {**vars(typed), **chosen}
    unsaid = dict(chosen)
    if together["load_best_model_at_end"] and plain(together["save_strategy"]) == "steps" and "save_steps" not in given:
        unsaid.setdefault("save_steps", STOCK_SAVE_STEPS)  # a share cannot be a multiple of eval_steps
    parser.set_defaults(**unsaid)
    vars(typed).update(unsaid)
    said = ", ".join(f"{name}: {as_word(value)}" for name, value in chosen.items())
    return (f"early stopping: {said}",) if chosen else ()


def _choose_precision(parser: HfArgumentParser, typed: Any, planned_for: Optional[DeviceFacts]) -> PrecisionChoice:
    """Set bf16, fp16 and tf32 to what fits the device, unless given: TrainingArguments needs them when it is made."""
    from scu_trainer.hardware.precision import choose_precision, device_facts, tf32_default

    said_no = [name for name in ("bf16", "fp16") if getattr(typed, name) is False]
    wanted = typed.mixed_precision
    if wanted in said_no:
        raise SettingsError(f"mixed_precision: {wanted} and {wanted}: false contradict each other; keep one of them")
    if wanted == "auto" and said_no and not (typed.bf16 or typed.fp16):
        wanted = "no"
    here = device_facts(typed.use_cpu)
    launcher = os.environ.get("ACCELERATE_MIXED_PRECISION")
    choice = choose_precision(wanted, bool(typed.bf16), bool(typed.fp16), launcher, planned_for or here)
    parser.set_defaults(bf16=choice.name == "bf16", fp16=choice.name == "fp16", tf32=tf32_default(here, typed.tf32))
    return choice


def _changed_from(parser: HfArgumentParser, typed: Any) -> dict[str, Any]:
    """Field -> default, of the fields that file or flags changed. Secrets are redacted."""
    given = {name: value for name, value in vars(typed).items() if value is not None}
    changed = {name: parser.get_default(name) for name, value in given.items() if value != parser.get_default(name)}
    return redact_data(json.loads(json.dumps(changed, default=str)))


def _has_accelerator() -> bool:
    import torch

    return _has_cuda() or torch.backends.mps.is_available()


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def field_names(parser: argparse.ArgumentParser) -> set[str]:
    """Every flag without its dashes, with underscores: ``learning_rate``, ``no_scu``."""
    return {name_of(flag) for action in parser._actions for flag in action.option_strings if flag.startswith("--")}


def check_names(arguments: Iterable[str], names: Collection[str], read_before: Collection[str] = ()) -> None:
    """Raise SettingsError at the first flag that nobody knows. ``read_before``: more that may have been meant."""
    for argument in arguments:
        if argument.startswith("--") and name_of(argument) not in names:
            near = nearest(name_of(argument), [*names, *read_before])
            raise SettingsError(f"unknown option {argument.split('=')[0]}{near}")


def check_given_once(flags: Sequence[str]) -> None:
    """Raise SettingsError for data given twice, of which argparse would take the last, or as several words."""
    for name, first, second in _given_twice(flags):
        if name == "dataset":
            both = json.dumps([{name: redact(first)}, {name: redact(second)}])
            raise SettingsError(f"--{name} is given twice; give it once, or both as a list: --{name} '{both}'")
    for name, value in flags_of(translated(flags, known_names())[0]):
        if name in ("dataset", "eval_dataset") and isinstance(value, list):
            several = json.dumps([redact(one) for one in value[:2]])[:-1] + (", ...]" if len(value) > 2 else "]")
            listed = f", or several as a list: --dataset '{several}'" if name == "dataset" else ""
            raise SettingsError(f"--{name} has {len(value)} values; give one file or the folder of all{listed}")


def _given_twice(flags: Sequence[str]) -> list[tuple[str, str, str]]:
    """(name, earlier value, later value that counts) of each flag that has two."""
    seen: dict[str, str] = {}
    found, known = [], known_names()
    for name, value in flags_of(flags):
        target, word = name, as_word(value).strip()
        if name.startswith("no_") and name[3:] in known and value is True:
            target, word = name[3:], "false"
        if seen.get(target, word) != word and APPENDED.get(target) != word:
            found.append((target, seen[target], word))
        seen[target] = word
    return found


def parse_checked(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse ``argv``, after ``check_names`` where nobody asks for help."""
    if not {"-h", "--help"} & {*argv}:
        check_names(argv, field_names(parser))
    return parser.parse_args(argv)


def _entries(config: str, parser: HfArgumentParser, names: set[str]) -> InFile:
    """Checked entries of a file by field."""
    takes_list, takes_mapping = _containers(parser)
    found = _named_as_here(config, names)
    for name, value in found.entries.items():
        if name not in names:
            raise SettingsError(f"{config}: unknown key {short(name)}{nearest(name, names)}")
        if is_mixture(name, value):
            _check_content(f"{config}: {name}", value)
        else:
            _check_shape(f"{config}: {name}", value, name in takes_list, name in takes_mapping)
    return found


def _named_as_here(config: str, names: Collection[str]) -> InFile:
    """Entries of a file by our names, and what was read as what. Raises SettingsError."""
    entries: dict[str, Any] = {}
    for key, value in _content(config).items():
        name = str(key).replace("-", "_")
        if name in entries:
            raise SettingsError(f"{config}: {name} appears twice, once with hyphens; keep one of them")
        entries[name] = "no" if value is False and name in SAYS_NO else value
    try:
        tool = owner_of(entries, names)
        return _of_us(entries, names, config) if tool is None else _of_another(tool, entries, names, config)
    except SettingsError as error:
        raise SettingsError(f"{config}: {error}") from error


def _of_us(entries: Mapping[str, Any], names: Collection[str], config: str) -> InFile:
    found, read_as = translated_entries(entries, names)
    for tool in signs_of(entries, names):
        title = TOOLS[tool].title
        command = f"scu-trainer import {shlex.quote(config)} --from {tool}"
        read_as.append(f"scu-trainer's defaults apply; for those of {title}: {command}")
    return InFile(found, read_as)


def _of_another(tool: str, entries: Mapping[str, Any], names: Collection[str], config: str) -> InFile:
    """A file of another program, where all that it asks for is here as well."""
    found = imported(tool, entries, {*names, *known_names()}, Path(config).parent)
    if found.lost:
        lost = "; ".join(f"{key.name}: {key.meaning.said}" for key in found.lost)
        raise SettingsError(
            f"of {found.tool.title}, with {len(found.lost)} of {len(found.keys)} keys that have no counterpart "
            f"({lost}); take them out, or write what carries over: scu-trainer import {shlex.quote(config)}"
        )
    read_as = [f"a file of {found.tool.title}", *notes_of(found.keys), *found.differences]
    return InFile(found.settings, read_as, found.defaults)


def _content(config: str) -> dict[str, Any]:
    """The mapping of a file, or of the configuration that a run was made with."""
    content = read_file(Path(config))
    if {"configuration", "versions", "data"} <= {*content}:  # training_config.json of a run
        content = content["configuration"]
        if not isinstance(content, dict):
            raise SettingsError(
                f"{config}: configuration is a {type(content).__name__}; it must be a mapping of fields"
            )
        content["report_to"] = content.get("report_to") or "none"  # an empty list in a file means the default
        content.pop("seeds", None)  # a run has one seed, and its file names both fields
    return content


def _containers(parser: HfArgumentParser) -> tuple[set[str], set[str]]:
    """Fields that take several values, and fields that take a mapping."""
    several = {action.dest for action in parser._actions if action.nargs in ("+", "*")}
    hints = {name: hint for kind in parser.dataclass_types for name, hint in hints_of(kind).items()}
    return several, {name for name, hint in hints.items() if "dict" in str(hint)}


def _check_shape(place: str, value: Any, takes_list: bool, takes_mapping: bool) -> None:
    """Raise SettingsError for a value that no flag could give."""
    if isinstance(value, dict):
        require(takes_mapping, f"{place} is a mapping; it takes {'a list of values' if takes_list else 'one value'}")
        _check_content(place, value)
    elif isinstance(value, list):
        require(
            takes_list or len(value) <= 1,
            f"{place} is a list of {len(value)}; it takes {'a mapping' if takes_mapping else 'one value'}",
        )
        require(all(map(_is_word, value)), f"{place} has an entry that is neither text nor a number; take it out")
    else:
        require(
            value is None or _is_word(value),
            f"{place} is a {type(value).__name__}; it takes text, a number, true or false",
        )


def _check_content(place: str, value: Any) -> None:
    """Raise SettingsError for content that JSON cannot hold."""
    if isinstance(value, dict):
        require(all(isinstance(key, str) for key in value), f"{place} has a key that is not text; put it in quotes")
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _check_content(place, item)
    else:
        is_finite = not isinstance(value, float) or math.isfinite(value)
        is_plain = value is None or (_is_word(value) and not isinstance(value, date))
        require(is_plain and is_finite, f"{place} holds {short(value)}; it takes text, finite numbers, true or false")


def _is_word(value: Any) -> bool:
    return isinstance(value, (str, int, float, date))


def read_file(path: Path) -> dict[str, Any]:
    """Top-level entries of a YAML or JSON file. Raises SettingsError, also for a key that stands there twice."""
    check_text("config", str(path), is_name=True)
    is_data = path.suffix.lower() in DATA_SUFFIXES
    require(not is_data, f"{path} is named like data, not like a configuration{_as_data(path)}")
    try:
        content = read_regular(path, MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"cannot read the configuration {path}: {reason}{_another_file(path)}") from error
    try:
        entries = _loaded(content)
    except RecursionError as error:
        raise SettingsError(f"{path} nests too deeply; at most {DEEPEST} levels are allowed") from error
    except (yaml.YAMLError, ValueError, TypeError) as error:  # the latter two for what a tag such as !!int says
        said = " ".join(str(error).split())[:1000]
        raise SettingsError(f"{path} is not valid YAML or JSON: {said}{_as_text(path)}") from error
    if not isinstance(entries, dict):
        found = "nothing" if entries is None else type(entries).__name__
        raise SettingsError(f"{path} holds {found}; it must hold lines like 'learning_rate: 2e-4'{_as_text(path)}")
    return entries


def _another_file(path: Path) -> str:
    """What to type instead of a path that cannot be read."""
    settings = path / "training_config.json"
    if os.path.isfile(settings):  # unlike pathlib's, it has no error of its own where nothing may be looked at
        return f"; give {settings}, the settings of that run"
    beside = [] if os.path.exists(path) else [other.name for other in path.parent.glob("*") if os.path.isfile(other)]
    return f"{nearest(path.name, beside)}; give a YAML or JSON file"


def _as_data(path: Path) -> str:
    return f"; to use it as data, write --dataset {path}"


def _as_text(path: Path) -> str:
    """Only for .txt and .json, which may be a configuration as well."""
    return _as_data(path) if path.suffix.lower() in (".txt", ".json") else ""


def _loaded(content: str) -> Any:
    loader = _UniqueKeys(content)
    try:
        root = loader.get_single_node()
        _require_small(root)
        return None if root is None else loader.construct_document(root)
    finally:
        loader.dispose()


def _require_small(root: Optional[yaml.Node]) -> None:
    """Raise YAMLError for too many values, counting what aliases expand to."""
    values, level = 0, [root]
    for _ in range(DEEPEST):
        level = [child for node in level for child in _children(node)]
        values += len(level)
        if values > MOST_VALUES:
            raise yaml.YAMLError(f"its aliases stand for more than {MOST_VALUES:,} values; write out what is needed")
        if not level:
            return
    raise yaml.YAMLError(f"it nests deeper than {DEEPEST} levels, or an alias is inside the value that it names")


def _children(node: Optional[yaml.Node]) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        yield from (part for pair in node.value for part in pair)
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


class _UniqueKeys(yaml.SafeLoader):
    """Refuses duplicate keys, of which YAML would silently take the last."""

    def construct_mapping(self, node, deep=False):
        seen: set[Any] = set()
        for key_node, _ in getattr(node, "value", ()):
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.YAMLError(f"a key is not a word, line {key_node.start_mark.line + 1}; write NAME: VALUE")
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.YAMLError(f"key {key!r} appears twice, line {key_node.start_mark.line + 1}")
            seen.add(key)
        return super().construct_mapping(node, deep)


def plain_words(message: str) -> str:
    """argparse's "argument --lora_r/--lora-r: invalid int value: 'x'" without the second spelling, and with the choice
    that was probably meant."""
    text = re.sub(r"argument (--\w+)(/--[\w-]+)*", r"\1", message)
    text = re.sub(r"'([^']{60})[^']{100,}'", r"'\1...'", text)
    number = re.search(r"--(\w+): invalid (int|float) value: .*", text)
    return with_choice(text + (_such_as(number[1], number[2]) if number else ""))


def _such_as(name: str, kind: str) -> str:
    """What to type in the place of a word where a number belongs."""
    said = f"; give a {'whole ' if kind == 'int' else ''}number"
    return f"{said}; scu-trainer plan says which one fits this machine" if name.endswith("_batch_size") else said


def as_yaml(job: Job) -> str:
    """The resolved configuration; reading it back gives the same one."""
    plain = json.loads(json.dumps(redact_data(job.as_dict()), default=str))
    plain["report_to"] = plain["report_to"] or "none"  # an empty list in a file means the default
    return yaml.safe_dump({key: value for key, value in plain.items() if value is not None}, sort_keys=False)
