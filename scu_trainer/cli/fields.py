"""The command line: a flag for each field of our settings, and for each field of the stock ``TrainingArguments``."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

from scu_trainer import shipped
from scu_trainer.cli.names.known import PREFIX, SETTINGS, known_names, stock_fields
from scu_trainer.cli.names.tools import ALL_KEYS, as_word
from scu_trainer.cli.names.translation import flags_of, name_of, translated
from scu_trainer.cli.parsing import unknown_option, with_choice
from scu_trainer.errors import SettingsError
from scu_trainer.secrets import redact
from scu_trainer.settings import MemorySettings, RegularizationSettings
from scu_trainer.settings.base import field_types_of, short
from scu_trainer.settings.mixture import parsed_dataset
from scu_trainer.settings.tasks import KINDS

if TYPE_CHECKING:
    from transformers import HfArgumentParser


APPENDED = {"resume_from_checkpoint": "auto", "use_cpu": "true"}
"""Flags that a background run appends to the typed ones to override them (runs/supervisor.py)."""


@functools.cache
def regularization_flags() -> type:
    """``RegularizationSettings`` as flags: ``scu`` and every field with the prefix ``scu_``."""
    about = "measure S, and steer it if scu_target_s is given; false: do neither"
    switch = ("scu", bool, dataclasses.field(default=True, metadata={"help": about}))
    texts = {"target_s": Optional[str]}  # a number or a word; RegularizationSettings distinguishes them
    return flags_of_fields("RegularizationFlags", RegularizationSettings, texts, [switch], PREFIX)


@functools.cache
def memory_flags() -> type:
    """``MemorySettings`` as flags. A number that may also be a word is read as text; the settings distinguish them."""
    texts = {"token_cap": Optional[str], "target_headroom_gb": str}
    texts |= {"max_gpu_mem": Optional[str], "cpu_mem": Optional[str]}
    return flags_of_fields("MemoryFlags", MemorySettings, texts)


def flags_of_fields(
    name: str,
    kind: type,
    texts: Mapping[str, Any],
    first: Sequence[tuple] = (),
    prefix: str = "",
    without: Collection[str] = (),
) -> type:
    """Return a dataclass with the fields ``first`` and then those of ``kind``, except ``without``. ``texts``: types
    that replace those of ``kind``, by field."""
    hints = {**field_types_of(kind), **texts}
    fields = [
        (prefix + item.name, hints[item.name], dataclasses.field(default=item.default, metadata=dict(item.metadata)))
        for item in dataclasses.fields(kind)
        if item.name not in without
    ]
    return dataclasses.make_dataclass(name, [*first, *fields])


def settings_parser(*more: type) -> HfArgumentParser:
    """Return the parser for all our settings, and for the dataclasses ``more``."""
    from transformers.hf_argparser import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message: str):
            raise SettingsError(readable_message(message))

        def parse_args(self, args=None, namespace=None):
            typed, unparsed = self.parse_known_args(args, namespace)
            if unparsed:  # other programs accept a file of settings without a flag
                file = next((word for word in unparsed if word.endswith((".yaml", ".yml", ".json"))), None)
                where = f"; to read settings from a file, write --config {shlex.quote(file)}" if file else ""
                self.error(f"unrecognized arguments: {' '.join(unparsed)}{where}")
            return typed

    replaced = {"regularization": regularization_flags(), "memory": memory_flags()}
    kinds = [_grouped(replaced.get(title, kind), title) for title, kind in SETTINGS.items()]
    kinds += [_grouped(kind.settings, f"task {name}") for name, kind in KINDS.items() if kind.settings is not None]
    kinds += more
    parser = Parser(
        kinds, prog="scu-trainer train", allow_abbrev=False, usage="%(prog)s [--config FILE] [--FIELD VALUE ...]"
    )
    actions = parser._option_string_actions
    show_defaults_in_help(parser)
    for flag in VALUE_READERS.keys() & actions.keys():
        actions[flag].type = VALUE_READERS[flag]
    for flag in TEXT_OR_LIST & actions.keys():
        actions[flag].nargs, actions[flag].__class__ = "+", _TextOrList
    return parser


def show_defaults_in_help(parser: HfArgumentParser) -> None:
    """Show defaults in the help of ``parser``, except None, for which the help text itself says what happens. The flag
    that turns a switch off gets a short text, where transformers would repeat the text of the switch."""

    class Formatter(argparse.ArgumentDefaultsHelpFormatter):
        def _get_help_string(self, action):
            return action.help if action.default is None else super()._get_help_string(action)

    parser.formatter_class = Formatter
    for flag, action in parser._option_string_actions.items():
        if flag.startswith("--no_") and action.const is False:
            action.help, action.default = f"the same as {flag.replace('no_', '', 1)} false", argparse.SUPPRESS


class _TextOrList(argparse.Action):
    """Store one value as it is, and several as a list: to transformers, a text and a list of one text differ."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


TEXT_OR_LIST = {"--optim_target_modules", "--report_to"}
"""Flags that take a text or a list, of which HfArgumentParser would read only one value."""


def _text_or_list(text: str) -> Any:
    """Return the list if ``text`` is a JSON list, otherwise ``text`` itself."""
    try:
        loaded = json.loads(text)
    except ValueError:
        return text
    return loaded if isinstance(loaded, list) else text


def _tokens_seen(text: str) -> str | bool:
    from transformers.hf_argparser import string_to_bool

    return text if text in ("all", "non_padding") else string_to_bool(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        loaded = json.loads(text)
    except ValueError:
        loaded = None
    if not isinstance(loaded, dict):
        raise argparse.ArgumentTypeError(f"{short(text)} is not a JSON object such as '{{\"name\": true}}'")
    return loaded


JSON_OR_FILE = ("accelerator_config", "fsdp_config")
JSON_ONLY = (
    "activation_checkpointing_kwargs",
    "gradient_checkpointing_kwargs",
    "liger_kernel_config",
    "lr_scheduler_kwargs",
)
"""Fields that take JSON, never a file name. With other text, which transformers keeps, a run ends in a traceback."""


def _checked_json_or_path(text: str) -> str:
    """Return ``text``, JSON or a file name. Broken JSON is refused here: transformers' error does not name the flag."""
    if text.startswith("{"):
        _json_object(text)
    return text


VALUE_READERS = {
    "--dataset": parsed_dataset,  # a name, or a JSON list
    **{f"--{name}": _checked_json_or_path for name in JSON_OR_FILE},
    "--deepspeed": lambda text: shipped.deepspeed(_checked_json_or_path(text)),
    **{f"--{name}": _json_object for name in JSON_ONLY},
    **dict.fromkeys(TEXT_OR_LIST, _text_or_list),
    "--include_num_input_tokens_seen": _tokens_seen,  # HfArgumentParser would read only a boolean
}
"""Function that reads the value of a flag, where the type of the field is not enough."""


def _grouped(kind: type, title: str) -> type:
    kind._argument_group_name = title
    return kind


def given_names(arguments: Iterable[str], names: Collection[str]) -> list[str]:
    """Return the fields that ``arguments`` set; ``--no_scu`` sets ``scu``."""
    given = [name_of(word) for word in arguments if word.startswith("--")]
    return [name.removeprefix("no_") if name.startswith("no_") and name[3:] in names else name for name in given]


def field_names(parser: argparse.ArgumentParser) -> set[str]:
    """Return the names of all flags, without dashes and with underscores: ``learning_rate``, ``no_scu``."""
    return {name_of(flag) for action in parser._actions for flag in action.option_strings if flag.startswith("--")}


def check_names(arguments: Iterable[str], names: Collection[str], read_before: Collection[str] = ()) -> None:
    """Raise SettingsError at the first unknown flag. ``read_before``: flags parsed before, which are suggested, too."""
    for argument in arguments:
        if argument.startswith("--") and name_of(argument) not in names:
            raise unknown_option(argument, [*names, *read_before])


def parse_with_fields(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of ``parser`` and the other words, flags of training. Raises SettingsError for unknown
    flags."""
    options, flags = parser.parse_known_args(argv)
    check_known(flags, parser._option_string_actions)
    return options, flags


def check_known(flags: Sequence[str], read_before: Iterable[str] = ()) -> None:
    """Raise SettingsError at the first flag that is neither a field of ours nor a stock one, under any of its names.
    ``read_before``: as for ``check_names``."""
    known = known_names()
    if not stock_fields():  # without them, an unknown name is found once TrainingArguments is imported
        return
    for name in given_names(translated(flags, known)[0], known):
        if name not in known:  # checked first, because looking for a similar name takes a while
            suggestions = [*(item for item in known if not item.startswith("no_")), *ALL_KEYS, *read_before]
            raise unknown_option(f"--{name}", suggestions)


def check_given_once(flags: Sequence[str]) -> None:
    """Raise SettingsError for a dataset given twice, of which argparse would take the last, or as several words."""
    for name, first, second in flags_given_twice(flags):
        if name == "dataset":
            both = json.dumps([{name: redact(first)}, {name: redact(second)}])
            raise SettingsError(f"--{name} is given twice; give it once, or both as a list: --{name} '{both}'")
    for name, value in flags_of(translated(flags, known_names())[0]):
        if name in ("dataset", "eval_dataset") and isinstance(value, list):
            several = json.dumps([redact(item) for item in value[:2]])[:-1] + (", ...]" if len(value) > 2 else "]")
            listed = f", or several as a list: --dataset '{several}'" if name == "dataset" else ""
            raise SettingsError(f"--{name} has {len(value)} values; give one file, or the folder of all files{listed}")


def flags_given_twice(flags: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return (name, earlier value, later value that counts) of each flag that is given two values."""
    seen: dict[str, str] = {}
    repeated, known = [], known_names()
    for name, value in flags_of(flags):
        target, word = name, as_word(value).strip()
        if name.startswith("no_") and name[3:] in known and value is True:
            target, word = name[3:], "false"
        if seen.get(target, word) != word and APPENDED.get(target) != word:
            repeated.append((target, seen[target], word))
        seen[target] = word
    return repeated


def parse_checked(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse ``argv``. Raises SettingsError for an unknown flag, unless help is asked for."""
    if not {"-h", "--help"} & {*argv}:
        check_names(argv, field_names(parser))
    return parser.parse_args(argv)


def readable_message(message: str) -> str:
    """Return a message of argparse, such as "argument --lora_r/--lora-r: invalid int value: 'x'", without the second
    spelling of the flag, and with the choice that was probably meant."""
    text = re.sub(r"argument (--\w+)(/--[\w-]+)*", r"\1", message)
    text = re.sub(r"'([^']{60})[^']{100,}'", r"'\1...'", text)
    number = re.search(r"--(\w+): invalid (int|float) value: .*", text)
    return with_choice(text + (number_advice(number[1], number[2]) if number else ""))


def number_advice(name: str, kind: str) -> str:
    """Return what to type for a flag that takes a number and got a word."""
    advice = f"; give a {'whole ' if kind == 'int' else ''}number"
    return f"{advice}; scu-trainer plan says which one fits this machine" if name.endswith("_batch_size") else advice
