"""A YAML or JSON file plus flags -> settings. Flags win; an unknown key or a wrong type is an error that names it.

Our settings and the stock ``TrainingArguments`` are read by one ``HfArgumentParser``; a file's entries are turned into
flags in front of the typed ones, so both pass the same checks.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, TypeVar

import yaml

from scu_trainer.cli.configuration_file import FileEntries, checked_entries, entries_by_our_names
from scu_trainer.cli.fields import (
    check_given_once,
    check_known,
    check_names,
    field_names,
    flags_given_twice,
    given_names,
    number_advice,
    settings_parser,
)
from scu_trainer.cli.names.known import PREFIX, known_names, stock_fields, stock_number
from scu_trainer.cli.names.tools import as_word, hint
from scu_trainer.cli.names.translation import as_flags, flags_of, translated
from scu_trainer.cli.presets import preset_values
from scu_trainer.errors import RequirementError, SettingsError
from scu_trainer.figures import count_text
from scu_trainer.hardware.optimizers import FOR_BFLOAT16, STOCHASTIC
from scu_trainer.hardware.precision import DeviceFacts, PrecisionChoice, choose_precision, device_facts, tf32_default
from scu_trainer.hardware.probe import has_cuda, usable_cores
from scu_trainer.secrets import redact, redact_data
from scu_trainer.settings import DataSettings, MemorySettings, ModelSettings, RegularizationSettings, RetentionSettings
from scu_trainer.settings.base import as_typed, check_values, require, short
from scu_trainer.settings.regularization import SAMPLED
from scu_trainer.settings.safety import SAVE_STEPS, STOCK_SAVE_STEPS, early_stopping_values
from scu_trainer.settings.stock import ALLOWED
from scu_trainer.settings.tasks import TaskSettings

if TYPE_CHECKING:
    from transformers import HfArgumentParser

    from scu_trainer.train.job.job import Job

T = TypeVar("T")

STOCK_REFUSALS = (ValueError, ImportError, TypeError, KeyError, AttributeError, OverflowError, OSError, RecursionError)
"""What TrainingArguments raises for bad values: it checks some of them, and others fail somewhere inside it."""

STOCK_ADVICE = {
    "requires an eval strategy": "set eval_strategy: steps and eval_steps, for instance 20",
    "requires the save and eval strategy to match": "set eval_strategy and save_strategy to the same, steps or epoch",
}
"""Part of an error message of TrainingArguments -> which settings to type."""

# Where our command line differs from the defaults of TrainingArguments, and why.
TRAINING_DEFAULTS = {
    "output_dir": "runs/run",  # each run gets its own folder there
    "report_to": "tensorboard",  # it is a dependency, so its scalars are always written
    "logging_steps": 10,
    "logging_nan_inf_filter": False,  # a NaN loss is shown, not replaced by the last mean
    "save_steps": SAVE_STEPS,
    "save_total_limit": 3,
}


@contextlib.contextmanager
def naming_file(config: str | None, flags: Sequence[str]) -> Iterator[None]:
    """Add to an error about settings which of those that it names are set in the file ``config``."""
    try:
        yield
    except (SettingsError, RequirementError) as error:
        names = [] if config is None or config in str(error) else _named_in_file(str(error), config, flags)
        if not names:
            raise
        are = "is" if len(names) == 1 else "are"
        raise type(error)(f"{error} ({' and '.join(names)} {are} set in {config})") from error


def _naming_file(read: Callable[..., T]) -> Callable[..., T]:
    """Decorate a function of a file and flags with ``naming_file``."""

    @functools.wraps(read)
    def named(config: str | None, flags: Sequence[str], *args: Any, **options: Any) -> T:
        with naming_file(config, flags):
            return read(config, flags, *args, **options)

    return named


def _named_in_file(message: str, config: str, flags: Sequence[str]) -> list[str]:
    """Return the settings of a file, not overridden by ``flags``, that ``message`` names. Some are words of English, as
    task and seed; those count only where a value follows."""
    known = known_names()
    in_file = {*entries_by_our_names(config, known).entries} - {*given_names(translated(flags, known)[0], known)}
    found = re.finditer(r"(\w+)(:| is | has )?", message)
    named = (match[1] for match in found if match[1] in in_file and ("_" in match[1] or match[2]))
    return list(dict.fromkeys(named))


@_naming_file
def read_job(config: str | None, flags: Sequence[str], planned_for: Optional[DeviceFacts] = None) -> Job:
    """Return the job that a file and flags describe. ``planned_for``: choose the number format for this device instead
    of this machine's. Raises SettingsError."""
    if "torch" not in sys.modules:
        _check_early(config, flags)
    from scu_trainer.train.job.job import Job
    from scu_trainer.train.step.distributed.deepspeed_start import prepare_environment
    from scu_trainer.train.tasks import task_of

    parser, arguments, task, notes = _parse(config, flags)
    parser.set_defaults(bf16=None, fp16=None)  # None: neither the file nor the flags set it
    typed = parser.parse_args(arguments)
    prepare_environment(typed.deepspeed, typed.use_cpu)
    precision = _choose_precision(parser, typed, planned_for)
    given = given_names(arguments, field_names(parser))
    notes += _choose_optimizer(parser, typed, given)
    notes += _choose_evaluations(parser, typed, given)
    try:
        parts = parser.parse_args_into_dataclasses(arguments, look_for_args_file=False)
    except STOCK_REFUSALS as error:
        raise SettingsError(_stock_error_message(error)) from error
    _, model, data, scu, memory, curriculum, efficiency, safety, retention, *task_settings, training = parts
    return Job(
        dataclasses.replace(model, mixed_precision=precision.name),
        data,
        _settings_from(RegularizationSettings, scu, PREFIX) if scu.scu else None,
        training,
        MemorySettings(**vars(memory)),
        curriculum,
        task=task,
        kind=task_of(task.task),
        own=next((settings for settings in task_settings if type(settings) is task.kind.settings), None),
        efficiency=efficiency,
        safety=safety,
        retention=retention,
        notes=(f"precision: {precision.reason}", *notes),
        changed_from=_changed_from(parser, typed),
        saves_by_length="save_steps" not in given and not typed.load_best_model_at_end,
    )


def _stock_error_message(error: Exception) -> str:
    text = " ".join(str(error).split())[:1000]
    if isinstance(error, (ValueError, ImportError)):
        return "; ".join([text, *(advice for part, advice in STOCK_ADVICE.items() if part in text)])
    return f"transformers.TrainingArguments does not accept these settings: {type(error).__name__}: {text}"


@_naming_file
def read_values(config: str | None, flags: Sequence[str]) -> dict[str, Any]:
    """Return the values of all fields by name, given or default, without checking that they fit together or that this
    machine supports them. Raises SettingsError for unknown names and wrong types."""
    check_given_once(flags)
    parser, arguments, _, _ = _parse(config, flags)
    return vars(parser.parse_args(arguments))


def typed_entries(config: str | None, flags: Sequence[str]) -> dict[str, Any]:
    """Return the fields that a file and flags set, with their values; flags win. Raises SettingsError."""
    values = read_values(config, flags)
    in_file = [] if config is None else entries_by_our_names(config, values).entries
    return {
        name: values[name] for name in dict.fromkeys([*in_file, *given_names(translated(flags, values)[0], values)])
    }


@_naming_file
def check_early(config: str | None, flags: Sequence[str]) -> None:
    """Check all names, and the values of our own fields, before torch is imported. ``flags``: as the user typed them,
    so none may be given twice. Raises SettingsError."""
    _check_early(config, flags)
    check_given_once(flags)


def _check_early(config: str | None, flags: Sequence[str]) -> None:
    """Do the checks that are also valid for flags that our own programs put together, where the later of two wins."""
    check_known(flags)
    known = known_names()
    if not stock_fields():  # without them, an unknown name is found once TrainingArguments is imported
        return
    flags, _ = translated(flags, known)
    entries = {} if config is None else entries_by_our_names(config, known).entries
    for name in entries:
        if name not in known:  # checked first, because looking for a similar name takes a while
            raise SettingsError(f"{config}: unknown key {short(name)}{hint(name, known)}")
    require(
        not {"seed", "seeds"} <= {*entries, *given_names(flags, known)},
        "seed and seeds are both given; keep one of them",
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
            f"--{name}: invalid {kind.__name__} value: {short(value)}{number_advice(name, kind.__name__)}"
        ) from error


def check_values_early(entries: Mapping[str, Any], flags: Sequence[str] = ()) -> None:
    """Check the values of our own fields, in ``entries`` and in ``flags``. Raises SettingsError."""
    parser = settings_parser()
    names = field_names(parser)
    words = as_flags({name: value for name, value in entries.items() if name in names})
    typed = parser.parse_known_args([*words, *flags])[0] if flags else parser.parse_args(words)
    _check_typed(parser, vars(typed))


def _check_typed(parser: HfArgumentParser, typed: Mapping[str, Any]) -> None:
    _settings_from(TaskSettings, argparse.Namespace(**typed))
    for kind in parser.dataclass_types:
        check_values(kind, typed, ALLOWED)


@_naming_file
def read_data(config: str | None, flags: Sequence[str]) -> tuple[str, ModelSettings, DataSettings]:
    """Return the task, model settings and data settings of a job without importing torch; fields of TrainingArguments
    are not checked. Raises SettingsError."""
    check_given_once(flags)
    parser = settings_parser()
    names = field_names(parser)
    all_names = {*names, *known_names()}  # stock fields such as do_train are keys of other programs, too
    entries = {} if config is None else entries_by_our_names(config, all_names).entries
    flags, _ = translated(flags, all_names)
    known = {name: value for name, value in entries.items() if name in names}
    given = given_names(flags, names)
    typed, _ = parser.parse_known_args([*as_flags(known), *flags])
    task = _settings_from(TaskSettings, typed)
    if "mode" in given:  # a typed mode overrides the file
        known = {name: value for name, value in known.items() if name not in task.mode_values}
    parser.set_defaults(**{name: value for name, value in task.defaults.items() if name in names})
    typed, _ = parser.parse_known_args([*as_flags(known), *flags])
    return typed.task, _settings_from(ModelSettings, typed), _settings_from(DataSettings, typed)


def _parse(
    config: str | None, flags: Sequence[str]
) -> tuple[HfArgumentParser, list[str], TaskSettings, tuple[str, ...]]:
    """Return a parser with the defaults of the task, the command line for it, the task, and notes for the user."""
    import torch
    from transformers import TrainingArguments

    parser = settings_parser(TrainingArguments)
    has_accelerator = has_cuda() or torch.backends.mps.is_available()
    parser.set_defaults(**TRAINING_DEFAULTS, use_cpu=not has_accelerator)
    names = field_names(parser)
    flags, read_as = translated(flags, names)
    arguments, notes = _command_line(parser, config, flags, names)
    if read_as:
        notes = (f"read: {'; '.join(read_as)}", *notes)
    task, preset_notes = _apply_task_defaults(parser, arguments, names)
    typed = vars(parser.parse_args(arguments))
    for action in parser._actions:  # argparse drops a value of "--", which it reads as the end of the flags
        value = typed.get(action.dest)
        require(value != [] or value == action.default, f"--{action.dest} needs a value; write --{action.dest} VALUE")
    _check_typed(parser, typed)
    _require_training(arguments, flags, typed)
    return parser, arguments, task, (*notes, *preset_notes)


def _require_training(arguments: Sequence[str], flags: Sequence[str], typed: Mapping[str, Any]) -> None:
    """Raise SettingsError if ``do_train`` was set to false. A resolved configuration is allowed to hold it: there all
    three of ``do_train``, ``do_eval`` and ``do_predict`` are at their defaults."""
    given, by_flags = given_names(arguments, typed), given_names(flags, typed)
    is_resolved = "do_train" not in by_flags and {"do_eval", "do_predict"} <= {*given}
    require(
        typed["do_train"] or "do_train" not in given or is_resolved,
        "do_train is false, but this command always trains; leave do_train out, or evaluate without training: "
        "scu-trainer eval RUN_OR_MODEL",
    )


def _command_line(
    parser: HfArgumentParser, config: str | None, flags: Sequence[str], names: set[str]
) -> tuple[list[str], tuple[str, ...]]:
    """Return file and flags as one command line, and notes, for example on a typed mode that overrides the file."""
    in_file = FileEntries() if config is None else checked_entries(config, parser, names)
    entries = in_file.entries
    check_names(flags, names, read_before=("config",))
    typed_names = given_names(flags, names)
    notes: tuple[str, ...] = ()
    if "mode" in typed_names:
        typed = parser.parse_args([*as_flags(entries), *flags])
        task = _settings_from(TaskSettings, typed)
        mode_values = {name: value for name, value in task.mode_values.items() if name not in typed_names}
        replaced = {
            name: entries[name] for name in mode_values if name in entries and entries[name] != mode_values[name]
        }
        entries = {name: value for name, value in entries.items() if name not in mode_values}
        words = [
            f"{name} {_shown_value(mode_values[name])} instead of {_shown_value(value)}"
            for name, value in replaced.items()
        ]
        notes += (f"mode {task.mode} overrides {config}: {', '.join(words)}",) if words else ()
    read_as = [*in_file.read_as, *_notes_on_defaults(in_file.defaults, entries.keys() - {*typed_names}, parser)]
    notes = (f"read in {config}: {'; '.join(read_as)}", *notes) if read_as else notes
    anchor = _default_anchor_flags(entries, typed_names)
    if anchor:
        notes += (
            f"retain: {SAMPLED}, what the model writes before training, because retain_budget_bits names no text",
        )
    for name, first, second in flags_given_twice(flags):
        notes += (f"--{name} is given twice: {redact(second)} counts, not {redact(first)}",)
    return [*as_flags(entries), *flags, *anchor], notes


def _notes_on_defaults(defaults: Mapping[str, Any], effective: Collection[str], parser: HfArgumentParser) -> list[str]:
    """Return a note on the defaults of another program that apply and differ from ours, if there are any."""
    others = [name for name, value in defaults.items() if name in effective and value != parser.get_default(name)]
    listed = ", ".join(f"{name}: {as_word(defaults[name])}" for name in others)
    return [f"its defaults apply: {listed}"] if others else []


def _default_anchor_flags(entries: Mapping[str, Any], typed_names: Collection[str]) -> list[str]:
    """Return the flags that add a sampled text to retain, if a budget is given without a text. A budget in a file that
    a run or a comparison wrote does not count as given, because such files hold every default."""
    is_known = "retain" in typed_names or entries.get("retain") is not None
    defaults = {item.name for item in dataclasses.fields(RetentionSettings) if item.default is not None}
    is_in_file = entries.get("retain_budget_bits") is not None and not defaults <= set(entries)
    return ["--retain", SAMPLED] if ("retain_budget_bits" in typed_names or is_in_file) and not is_known else []


def _settings_from(kind: type, typed: Any, prefix: str = "") -> Any:
    return kind(**{item.name: getattr(typed, prefix + item.name) for item in dataclasses.fields(kind)})


def _shown_value(value: Any) -> str:
    return "the default" if value is None else str(value)


def _apply_task_defaults(
    parser: HfArgumentParser, arguments: Sequence[str], names: Collection[str]
) -> tuple[TaskSettings, list[str]]:
    """Set the defaults of ``parser`` to those of the task, its preset and its mode. Returns the task, and notes on
    preset values that depend on this machine."""
    typed, given = parser.parse_args(arguments), given_names(arguments, names)
    task = _settings_from(TaskSettings, typed)
    task.check_given(given)
    parser.set_defaults(**task.defaults)
    if task.preset is None:
        return task, []
    so_far = parser.parse_args(arguments)
    cores = max(1, int(usable_cores()) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    values, notes = preset_values(task, so_far, given, cores=cores, has_cuda=has_cuda())
    parser.set_defaults(**values)
    return task, notes


def _choose_optimizer(parser: HfArgumentParser, typed: Any, given: Collection[str]) -> tuple[str, ...]:
    """Choose the optimizer for weights trained in bfloat16, unless the user named one, and return a note. With
    DeepSpeed there is nothing to choose, because it trains a float32 copy of the weights."""
    is_deepspeed = typed.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    if (typed.dtype, typed.tuning) != ("bfloat16", "full") or is_deepspeed or "optim" in given:
        return ()
    parser.set_defaults(optim=FOR_BFLOAT16, optim_args=STOCHASTIC)
    return (f"optimizer: {FOR_BFLOAT16}, {STOCHASTIC}: weights are bfloat16, and small steps would round away",)


def _choose_evaluations(parser: HfArgumentParser, typed: Any, given: Collection[str]) -> tuple[str, ...]:
    """Set the fields that early stopping and the best model need, unless ``given``, and return a note."""
    chosen = {} if typed.early_stopping_patience is None else early_stopping_values(vars(typed), given)
    together = {**vars(typed), **chosen}
    defaults = dict(chosen)
    if (
        together["load_best_model_at_end"]
        and as_typed(together["save_strategy"]) == "steps"
        and "save_steps" not in given
    ):
        defaults.setdefault("save_steps", STOCK_SAVE_STEPS)  # a share cannot be a multiple of eval_steps
    parser.set_defaults(**defaults)
    vars(typed).update(defaults)
    listed = ", ".join(f"{name}: {as_word(value)}" for name, value in chosen.items())
    return (f"early stopping: {listed}",) if chosen else ()


def _choose_precision(parser: HfArgumentParser, typed: Any, planned_for: Optional[DeviceFacts]) -> PrecisionChoice:
    """Set bf16, fp16 and tf32 to what the device supports, unless given: TrainingArguments reads them when created."""
    turned_off = [name for name in ("bf16", "fp16") if getattr(typed, name) is False]
    wanted = typed.mixed_precision
    if wanted in turned_off:
        raise SettingsError(f"mixed_precision: {wanted} and {wanted}: false contradict each other; keep one of them")
    if wanted == "auto" and turned_off and not (typed.bf16 or typed.fp16):
        wanted = "no"
    device = device_facts(typed.use_cpu)
    _require_own_card(device)
    launcher = os.environ.get("ACCELERATE_MIXED_PRECISION")
    choice = choose_precision(wanted, bool(typed.bf16), bool(typed.fp16), launcher, planned_for or device)
    parser.set_defaults(bf16=choice.name == "bf16", fp16=choice.name == "fp16", tf32=tf32_default(device, typed.tf32))
    return choice


def _require_own_card(device: DeviceFacts) -> None:
    """Raise RequirementError if there are more processes than GPUs. This runs before the process group is created,
    because the error of torch would only name a device ordinal."""
    import torch

    rank, cards = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if device.kind == "cuda" and rank >= cards:
        raise RequirementError(
            f"this is process {rank + 1} on this machine, and it sees {count_text(cards, 'GPU')}; start {cards} "
            f"(--nproc_per_node, --num_processes or --num_gpus {cards}), let each process see the GPUs of all "
            "(CUDA_VISIBLE_DEVICES; SLURM: --gpu-bind=none), or add --use_cpu true"
        )


def _changed_from(parser: HfArgumentParser, typed: Any) -> dict[str, Any]:
    """Return the default of each field that file or flags changed. Secrets are redacted."""
    given = {name: value for name, value in vars(typed).items() if value is not None}
    changed = {name: parser.get_default(name) for name, value in given.items() if value != parser.get_default(name)}
    return redact_data(json_values(changed))


def json_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON holds them, in which a value that is not of JSON is a text."""
    return json.loads(json.dumps(settings, default=str))


def as_yaml(job: Job) -> str:
    """Return the resolved configuration as YAML; reading it back gives the same configuration."""
    content = json_values(redact_data(job.as_dict()))
    content["report_to"] = content["report_to"] or "none"  # an empty list in a file means the default
    return yaml.safe_dump({key: value for key, value in content.items() if value is not None}, sort_keys=False)
