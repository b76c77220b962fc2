"""All fields as one command line: settings of ours by concern, and the stock ``TrainingArguments`` beside them."""

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
from scu_trainer.cli.names.tools import ANYWHERE, as_word
from scu_trainer.cli.names.translation import flags_of, name_of, translated
from scu_trainer.cli.parsing import unknown_option, with_choice
from scu_trainer.errors import SettingsError
from scu_trainer.secrets import redact
from scu_trainer.settings import MemorySettings, RegularizationSettings
from scu_trainer.settings.base import hints_of, short
from scu_trainer.settings.mixture import dataset_of
from scu_trainer.settings.tasks import KINDS

if TYPE_CHECKING:
    from transformers import HfArgumentParser


APPENDED = {"resume_from_checkpoint": "auto", "use_cpu": "true"}
"""What a background run appends to the typed flags to override them (runs/supervisor.py)."""


@functools.cache
def regularization_flags() -> type:
    """``RegularizationSettings`` as flags: ``scu`` and every field with the prefix ``scu_``."""
    about = "S is measured, and with scu_target_s steered; false: neither"
    switch = ("scu", bool, dataclasses.field(default=True, metadata={"help": about}))
    texts = {"target_s": Optional[str]}  # a number or a word; RegularizationSettings tells them apart
    return flags_of_fields("RegularizationFlags", RegularizationSettings, texts, [switch], PREFIX)


@functools.cache
def memory_flags() -> type:
    """``MemorySettings`` as flags; numbers that may also be a word are read as text, the settings tell them apart."""
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
    """The dataclass ``kind`` with other types of the fields ``texts``, after the fields ``first``, less those of
    ``without``."""
    hints = {**hints_of(kind), **texts}
    fields = [
        (prefix + item.name, hints[item.name], dataclasses.field(default=item.default, metadata=dict(item.metadata)))
        for item in dataclasses.fields(kind)
        if item.name not in without
    ]
    return dataclasses.make_dataclass(name, [*first, *fields])


def our_parser(*more: type) -> HfArgumentParser:
    from transformers.hf_argparser import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message: str):
            raise SettingsError(plain_words(message))

        def parse_args(self, args=None, namespace=None):
            typed, left = self.parse_known_args(args, namespace)
            if left:  # other programs take a file of settings without a flag
                file = next((word for word in left if word.endswith((".yaml", ".yml", ".json"))), None)
                where = f"; a file of settings is given by --config {shlex.quote(file)}" if file else ""
                self.error(f"unrecognized arguments: {' '.join(left)}{where}")
            return typed

    otherwise = {"regularization": regularization_flags(), "memory": memory_flags()}
    kinds = [_grouped(otherwise.get(title, kind), title) for title, kind in SETTINGS.items()]
    kinds += [_grouped(kind.settings, f"task {name}") for name, kind in KINDS.items() if kind.settings is not None]
    kinds += more
    parser = Parser(
        kinds, prog="scu-trainer train", allow_abbrev=False, usage="%(prog)s [--config FILE] [--FIELD VALUE ...]"
    )
    actions = parser._option_string_actions
    say_defaults(parser)
    for flag in READ_BY.keys() & actions.keys():
        actions[flag].type = READ_BY[flag]
    for flag in TEXT_OR_LIST & actions.keys():
        actions[flag].nargs, actions[flag].__class__ = "+", _TextOrList
    return parser


def say_defaults(parser: HfArgumentParser) -> None:
    """In its help. Of a default that is None the text itself says what happens; transformers repeats the text of a
    switch for the flag that turns it off."""

    class Formatter(argparse.ArgumentDefaultsHelpFormatter):
        def _get_help_string(self, action):
            return action.help if action.default is None else super()._get_help_string(action)

    parser.formatter_class = Formatter
    for flag, action in parser._option_string_actions.items():
        if flag.startswith("--no_") and action.const is False:
            action.help, action.default = f"the same as {flag.replace('no_', '', 1)} false", argparse.SUPPRESS


class _TextOrList(argparse.Action):
    """One value is itself: a text and a list of it differ for transformers."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


TEXT_OR_LIST = {"--optim_target_modules", "--report_to"}
"""HfArgumentParser reads one value of what is a text or a list."""


def _text_or_list(text: str) -> Any:
    """A list as it comes from a file, or as JSON."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, list) else text


def _tokens_seen(text: str) -> str | bool:
    from transformers.hf_argparser import string_to_bool

    return text if text in ("all", "non_padding") else string_to_bool(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{short(text)} is no JSON object, such as '{{\"name\": true}}'")
    return found


OF_JSON = ("accelerator_config", "fsdp_config")
KEYWORDS = (
    "activation_checkpointing_kwargs",
    "gradient_checkpointing_kwargs",
    "liger_kernel_config",
    "lr_scheduler_kwargs",
)
"""These are never in a file, and transformers keeps a text that does not begin like an object, for which the run ends
with a traceback."""


def _read_by_transformers(text: str) -> str:
    """Its dicts are JSON, or the name of a file; of broken JSON it does not say whose it is."""
    if text.startswith("{"):
        _json_object(text)
    return text


READ_BY = {
    "--dataset": dataset_of,  # a name, or a JSON list
    **{f"--{name}": _read_by_transformers for name in OF_JSON},
    "--deepspeed": lambda text: shipped.deepspeed(_read_by_transformers(text)),
    **{f"--{name}": _json_object for name in KEYWORDS},
    **dict.fromkeys(TEXT_OR_LIST, _text_or_list),
    "--include_num_input_tokens_seen": _tokens_seen,  # of its words transformers reads two alone
}
"""What reads the value of a flag, where that is not by the type of its field."""


def _grouped(kind: type, title: str) -> type:
    kind._argument_group_name = title
    return kind


def given_names(arguments: Iterable[str], names: Collection[str]) -> list[str]:
    """Fields that were given a value; ``--no_scu`` gives one to ``scu``."""
    given = [name_of(word) for word in arguments if word.startswith("--")]
    return [name.removeprefix("no_") if name.startswith("no_") and name[3:] in names else name for name in given]


def field_names(parser: argparse.ArgumentParser) -> set[str]:
    """Every flag without its dashes, with underscores: ``learning_rate``, ``no_scu``."""
    return {name_of(flag) for action in parser._actions for flag in action.option_strings if flag.startswith("--")}


def check_names(arguments: Iterable[str], names: Collection[str], read_before: Collection[str] = ()) -> None:
    """Raise SettingsError at the first flag that nobody knows. ``read_before``: more that may have been meant."""
    for argument in arguments:
        if argument.startswith("--") and name_of(argument) not in names:
            raise unknown_option(argument, [*names, *read_before])


def parse_with_fields(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of ``parser``, and the words that are flags of training. Raises SettingsError, as ``check_known``."""
    options, flags = parser.parse_known_args(argv)
    check_known(flags, parser._option_string_actions)
    return options, flags


def check_known(flags: Sequence[str], read_before: Iterable[str] = ()) -> None:
    """Raise SettingsError at the first flag that is no field, neither of ours nor of the stock arguments, by any of its
    names. ``read_before``: as for ``check_names``."""
    known = known_names()
    if not stock_fields():  # then only the class itself can tell
        return
    for name in given_names(translated(flags, known)[0], known):
        if name not in known:  # only then: looking for a near name among all of them takes a while
            near = [*(one for one in known if not one.startswith("no_")), *ANYWHERE, *read_before]
            raise unknown_option(f"--{name}", near)


def check_given_once(flags: Sequence[str]) -> None:
    """Raise SettingsError for data given twice, of which argparse would take the last, or as several words."""
    for name, first, second in given_twice(flags):
        if name == "dataset":
            both = json.dumps([{name: redact(first)}, {name: redact(second)}])
            raise SettingsError(f"--{name} is given twice; give it once, or both as a list: --{name} '{both}'")
    for name, value in flags_of(translated(flags, known_names())[0]):
        if name in ("dataset", "eval_dataset") and isinstance(value, list):
            several = json.dumps([redact(one) for one in value[:2]])[:-1] + (", ...]" if len(value) > 2 else "]")
            listed = f", or several as a list: --dataset '{several}'" if name == "dataset" else ""
            raise SettingsError(f"--{name} has {len(value)} values; give one file or the folder of all{listed}")


def given_twice(flags: Sequence[str]) -> list[tuple[str, str, str]]:
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


def plain_words(message: str) -> str:
    """argparse's "argument --lora_r/--lora-r: invalid int value: 'x'" without the second spelling, and with the choice
    that was probably meant."""
    text = re.sub(r"argument (--\w+)(/--[\w-]+)*", r"\1", message)
    text = re.sub(r"'([^']{60})[^']{100,}'", r"'\1...'", text)
    number = re.search(r"--(\w+): invalid (int|float) value: .*", text)
    return with_choice(text + (such_as(number[1], number[2]) if number else ""))


def such_as(name: str, kind: str) -> str:
    """What to type in the place of a word where a number belongs."""
    said = f"; give a {'whole ' if kind == 'int' else ''}number"
    return f"{said}; scu-trainer plan says which one fits this machine" if name.endswith("_batch_size") else said
