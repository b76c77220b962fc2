"""The arms of a comparison: what each controller is, which training settings it sets, and how the user names it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import yaml

from scu_trainer.errors import SettingsError, did_you_mean
from scu_trainer.settings.base import as_typed

DEFAULT_ARMS = ("none", "fixed", "weight_decay", "schedule", "original", "model")
FORMS = "none, fixed[:LAMBDA], weight_decay[:VALUE], schedule[:linear|cosine], original, model[:TARGET]"
SHAPES = ("linear", "cosine")

FIXED_DECAYS, WEIGHT_DECAY_GRID = (1.0, 3.0, 10.0), (1.0, 5.0, 20.0)
"""Default grids, as the total decay over a run: learning rate x steps x value. Without gradients, weights would shrink
by a factor of e to this power. The control loop ends at about 3 on recipes/scu_lora.yaml."""

SCHEDULE_DECAY = 6.0
"""Total decay at the end of a ramp from 0. Its average over the run is the middle value of the fixed grid."""

ORIGINAL = {
    "scu": True,
    "scu_law": "original",
    "scu_sigma": 0.01,
    "scu_target_s": 0.01,
    "scu_kp": 0.8,
    "scu_ki": 0.15,
    "scu_actuator": "penalty",
}
"""The published defaults of the original law for small models, whatever the job sets. Its bounds and averages are those
of our defaults."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")


@dataclass(frozen=True)
class Arm:
    """One arm. ``settings``: the training settings that this arm sets; all others are the same in every arm."""

    name: str
    label: str
    what: str
    settings: dict[str, Any]

    @property
    def flags(self) -> list[str]:
        return [f"--{name}={as_typed(value)}" for name, value in self.settings.items()]


def chosen_arms(words: Sequence[str], own: Sequence[str], rate_times_steps: Callable[[], Optional[float]]) -> list[Arm]:
    """Return the arms in the order in which they were named. ``words``: arms of FORMS; ``own``: "NAME:field=value,...".

    ``rate_times_steps`` returns learning rate x steps of the job, or None if that is not known; it is called only for
    arms with a default grid. Raises SettingsError.
    """
    found: list[Arm] = []
    for word in words:
        found += _parse_form(word, rate_times_steps)
    found += [_parse_own_arm(text) for text in own]
    names = [arm.name for arm in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SettingsError(f"arm {twice[0]} is named twice; name each arm once")
    if len(found) < 2:
        raise SettingsError(f"there is 1 arm ({', '.join(names)}); a comparison needs 2 or more, such as none,model")
    return found


def _parse_form(word: str, rate_times_steps: Callable[[], Optional[float]]) -> list[Arm]:
    kind, _, value = word.partition(":")
    if kind not in DEFAULT_ARMS:
        raise SettingsError(f"unknown arm {word!r}{did_you_mean(kind, DEFAULT_ARMS)}; arms: {FORMS}")
    if kind in ("none", "original") and value:
        raise SettingsError(f"arm {word!r}: {kind} takes no value; arms: {FORMS}")
    if kind == "none":
        return [Arm("none", "none", "no regularization loop", {"scu": False})]
    if kind == "original":
        return [Arm("original", "original law", "the published PI law, its defaults, penalty that acts", ORIGINAL)]
    if kind == "model":
        return [_model_arm(word, value)]
    if kind == "schedule":
        unit = _value_per_decay(rate_times_steps)
        return [_schedule_arm(word, shape, unit) for shape in ([value] if value else SHAPES)]
    if value:
        return [_constant_arm(kind, _parse_positive(word, value))]
    unit, decays = _value_per_decay(rate_times_steps), FIXED_DECAYS if kind == "fixed" else WEIGHT_DECAY_GRID
    return [_constant_arm(kind, _rounded(decay * unit)) for decay in decays]


def _value_per_decay(rate_times_steps: Callable[[], Optional[float]]) -> float:
    known = rate_times_steps()
    if not known:
        raise SettingsError(
            "the default strengths of fixed, weight_decay and schedule depend on learning rate and steps: give "
            "max_steps, or your own values, such as --arms none,fixed:3,weight_decay:5,model"
        )
    return 1.0 / known


def _rounded(value: float) -> float:
    """Round to one significant digit, as a person would type the value."""
    return float(f"{value:.1g}")


def _parse_positive(word: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise SettingsError(f"arm {word!r}: {text!r} is not a number above 0, such as {word.partition(':')[0]}:3")
    return value


def _constant_arm(kind: str, value: float) -> Arm:
    if kind == "fixed":
        settings = {"scu": True, "scu_law": "fixed", "scu_lambda_init": value}
        return Arm(f"fixed_{value:g}", f"fixed lambda {value:g}", f"lambda is {value:g} throughout", settings)
    what = f"AdamW's weight decay {value:g}, no loop"
    return Arm(f"weight_decay_{value:g}", f"weight decay {value:g}", what, {"scu": False, "weight_decay": value})


def _schedule_arm(word: str, shape: str, unit: float) -> Arm:
    if shape not in SHAPES:
        raise SettingsError(
            f"arm {word!r}: unknown shape {shape!r}{did_you_mean(shape, SHAPES)}; shapes: linear, cosine"
        )
    final = _rounded(SCHEDULE_DECAY * unit)
    ramp = {"scu_schedule": shape, "scu_lambda_init": 0.0, "scu_lambda_final": final}
    settings = {"scu": True, "scu_law": "schedule", **ramp}
    return Arm(f"schedule_{shape}", f"{shape} ramp", f"lambda goes from 0 to {final:g}, {shape}", settings)


def _model_arm(word: str, value: str) -> Arm:
    settings: dict[str, Any] = {"scu": True, "scu_law": "model"}
    if not value:
        return Arm("model", "model law", "the loop of this package, at scu_target_s", settings)
    target = _parse_positive(word, value)
    what = f"the loop of this package, at S = {target:g}"
    return Arm(f"model_{target:g}", f"model law, S {target:g}", what, {**settings, "scu_target_s": target})


def _parse_value(arm: str, text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    if isinstance(value, bool) and text.strip().lower() not in ("true", "false"):
        return text.strip()  # YAML 1.1 reads "no" as false, but mixed_precision=no is a word
    if value is None or isinstance(value, (list, dict)):
        raise SettingsError(
            f"--arm {arm!r}: {text!r} is not a number, word, true or false; put it into the configuration"
        )
    return value


def _parse_own_arm(text: str) -> Arm:
    """Parse an arm of the form NAME:field=value,field=value. Values are read as YAML, as in a recipe."""
    name, _, fields = text.partition(":")
    settings = {}
    for field in filter(None, fields.split(",")):
        key, equals, value = field.partition("=")
        if not equals or not key.strip():
            raise SettingsError(f"--arm {text!r}: {field!r} is not field=value; write NAME:field=value,field=value")
        settings[key.strip().replace("-", "_")] = _parse_value(text, value)
    if NAME.fullmatch(name) is None or not settings:
        raise SettingsError(
            f"--arm {text!r} must read NAME:field=value,field=value, with a name of letters, digits, '.', '_', '-'"
        )
    return Arm(name, name, "set by --arm", settings)
