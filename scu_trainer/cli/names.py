"""What other programs call our settings: taken where the meaning is the same, and said; else explained.

>>> translated(["--epochs", "3", "--qlora", "--lr=1e-4"], {"num_train_epochs", "tuning", "learning_rate"})
(['--num_train_epochs', '3', '--tuning', 'qlora', '--learning_rate', '1e-4'], \
['epochs as num_train_epochs', 'qlora as tuning: qlora', 'lr as learning_rate'])
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, Union, get_args, get_type_hints

from scu_trainer.errors import SettingsError
from scu_trainer.settings.images import ImageSettings

ARCHITECTURES = get_args(get_type_hints(ImageSettings)["architecture"])
TRUE, FALSE = ("true", "yes", "1"), ("false", "no", "0")

NEEDED = object()
"""In the place of a value that the user has to give beside."""


@dataclass(frozen=True)
class Same:
    """Another name of ``name``, or of what that makes of a value. ``values``: those that are written otherwise here.
    ``form``: into which a value goes."""

    name: Union[str, Callable[[str], str]]
    values: Mapping[str, Any] = field(default_factory=dict)
    form: Optional[str] = None

    def settings(self, value: Any) -> dict[str, Any]:
        name = self.name if isinstance(self.name, str) else self.name(str(value))
        value = self.values.get(str(value).lower(), value)
        words = WORDS.get(name, {}).get(str(value).lower())
        if isinstance(words, str):
            raise SettingsError(f"{name}: {value} names nothing here: {words}")
        return dict(words) if words else {name: value if self.form is None else self.form.format(value)}


@dataclass(frozen=True)
class Switch:
    """A flag without a value, or with true or false, that stands for these settings."""

    means: Mapping[str, Any]


OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw8bit": "adamw_8bit", "pagedadamw8bit": "paged_adamw_8bit"}

WORDS: dict[str, dict[str, Union[str, dict[str, Any]]]] = {
    "dataset": {
        "cifar10": {"dataset": "uoft-cs/cifar10"},
        "cifar100": {"dataset": "uoft-cs/cifar100"},
        "imagenet": {"dataset": "ILSVRC/imagenet-1k"},
        "custom": "give the path of your own: a folder with a folder per class, a saved dataset, or a Hub id",
    },
    "optim": {
        # Adam and AdamW are the same where no weight decays; with weight decay Adam's is another method.
        "adam": {"optim": "adamw_torch_fused", "weight_decay": 0.0},
        "muon": {"use_muon": True},
        **{word: {"optim": name} for word, name in OPTIMIZERS.items()},
    },
    "lr_scheduler_type": {
        "step": {"lr_scheduler_type": "constant", "lr_step_size": NEEDED},
        "multi_step": {"lr_scheduler_type": "constant", "lr_milestones": NEEDED},
    },
}
"""Values of our own names that are written otherwise elsewhere, and what they are here; a sentence says what to do. Of
datasets only where no file or folder has that name."""
ZERO = {"2": "ds_configs/zero2_offload.json", "3": "ds_configs/zero3_offload.json"}

NAMES: dict[str, Union[Same, Switch, str]] = {
    "batch_size": Same("per_device_train_batch_size"),
    "checkpoint_dir": Same("output_dir"),
    "enable_amp": Switch({"mixed_precision": "auto"}),
    "epochs": Same("num_train_epochs"),
    "fused_optimizer": Switch({"optim": "adamw_torch_fused"}),
    "grad_accum_steps": Same("gradient_accumulation_steps"),
    "log_interval": Same("logging_steps"),
    "lr": Same("learning_rate"),
    "model": Same(lambda value: "architecture" if value in ARCHITECTURES else "model_name_or_path"),
    "no_amp": Switch({"mixed_precision": "no"}),
    "no_checkpointing": Switch({"checkpoint_every_layer": False}),
    "momentum": Same("optim_args", form="momentum={}"),
    "optimizer": Same("optim"),
    "qlora": Switch({"tuning": "qlora"}),
    "use_bf16": Switch({"mixed_precision": "bf16"}),
    "use_fp16": Switch({"mixed_precision": "fp16"}),
    "zero_stage": Same("deepspeed", ZERO),
    "4bit_quantization": Switch({"tuning": "qlora"}),
    "checkpoint_interval": "write save_strategy: epoch with save_epochs: N, or save_steps: N",
    "log_file": "the log of a run is logs/train.log in its output_dir",
    "multi_gpu": "start one process per GPU: torchrun --nproc_per_node 2 scripts/train.py ..., or accelerate launch",
}
"""Names without a dash in front, hyphens as underscores. A sentence says what to do instead."""

PATHS = {"resume": "resume_from_checkpoint"}
"""Switches of ours that take a path elsewhere."""


def translated(flags: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """The same command line in our own names, and what was read as what. ``known``: names of our flags.

    Raises SettingsError for a name that has no counterpart, and where the counterpart is given as well.
    """
    words, notes, rest = [], [], list(flags)
    given = {word.removeprefix("--").partition("=")[0].replace("-", "_") for word in flags if word.startswith("--")}
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        values = [value] if equals else list(_values_of(rest))
        if not word.startswith("--") or not _is_other(name, values[0] if values else None, known):
            words.append(word)
            continue
        del rest[: 0 if equals else len(values)]
        settings = _settings(name, values)
        for setting, meant in _checked(name, settings, given).items():
            words += [f"--{setting}", *map(_as_word, meant if isinstance(meant, list) else [meant])]
        notes.append(_note(name, settings, values))
    return words, notes


def translated_entries(entries: Mapping[str, Any], known: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """The same of a file's entries, whose names have underscores."""
    found, notes = {}, []
    for name, value in entries.items():
        if not _is_other(name, value, known):
            found[name] = value
            continue
        settings = _settings(name, [] if value is True else [value])
        found |= _checked(name, settings, entries)
        notes.append(_note(name, settings, [value]))
    return found, notes


def _is_other(name: str, value: Any, known: Collection[str]) -> bool:
    if name in PATHS:
        return isinstance(value, str) and value.lower() not in (*TRUE, *FALSE)
    if name not in known and name in NAMES:
        return True
    is_word = isinstance(value, str) and value.lower() in WORDS.get(name, {})
    return is_word and not (name == "dataset" and Path(value).exists())


def _settings(name: str, values: Sequence[Any]) -> dict[str, Any]:
    meant = Same(PATHS[name]) if name in PATHS else NAMES.get(name, Same(name))
    if isinstance(meant, str):
        raise SettingsError(f"{name} is unknown here: {meant}")
    if isinstance(meant, Switch):
        word = str(values[0]).lower() if values else "true"
        if word not in (*TRUE, *FALSE):
            raise SettingsError(f"{name} is a switch and takes no {values[0]!r}; leave the value out")
        return dict(meant.means) if word in TRUE else {}
    if not values:
        raise SettingsError(f"{name} is given no value; write --{name} VALUE")
    return meant.settings(values[0] if len(values) == 1 else list(values))


def _values_of(words: Sequence[str]) -> Sequence[str]:
    end = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    return words[:end]


def _checked(name: str, settings: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Those that are to be set: none is given a second time, and those that are needed are given."""
    for setting, meant in settings.items():
        if meant is NEEDED and setting not in given:
            raise SettingsError(f"this {name} needs {setting}; give it beside, in the same place")
        if meant is not NEEDED and setting in given and setting != name:
            raise SettingsError(f"{name} sets {setting} here, and both are given; keep one of them")
    return {setting: meant for setting, meant in settings.items() if meant is not NEEDED}


def _note(name: str, settings: Mapping[str, Any], values: Sequence[Any]) -> str:
    if not settings:
        return f"{name} as nothing to do"
    said = [
        setting if [meant] == list(values) else f"{setting}: {_as_word(meant)}"
        for setting, meant in settings.items()
        if meant is not NEEDED
    ]
    return f"{name} as {', '.join(said)}"


def _as_word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
