"""What a small search moves, and between which values."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from scu_trainer.errors import SettingsError, nearest

FORM = "NAME=LOW:HIGH, NAME=LOW:HIGH:log, or NAME=A,B,C"
NOT_SEARCHED = frozenset(
    "seed seeds data_seed output_dir resume_from_checkpoint resume dataset eval_dataset dataset_size "
    "validation_split_percentage max_eval_documents".split()
)
"""Fields that say which run it is, or what it is scored on."""

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class Axis:
    """``values``: to choose among; else numbers from ``low`` to ``high``, whole ones where both are."""

    name: str
    low: Optional[float] = None
    high: Optional[float] = None
    is_log: bool = False
    values: Sequence[str] = ()

    def suggest(self, trial: Any) -> Any:
        """``trial``: Optuna's."""
        if self.values:
            return trial.suggest_categorical(self.name, list(self.values))
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(self.name, self.low, self.high, log=self.is_log)
        return trial.suggest_float(self.name, float(self.low), float(self.high), log=self.is_log)

    @property
    def ends(self) -> list[Any]:
        """Values that must be usable if any is."""
        return list(self.values) or [self.low, self.high]


def axes_of(words: Sequence[str], known: Collection[str]) -> list[Axis]:
    """Raises SettingsError for a name that nobody knows or a range that is none."""
    found = [_axis(word, known) for word in words]
    names = [axis.name for axis in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SettingsError(f"--search moves {twice} twice; give it once")
    if not found:
        raise SettingsError(f"--search is missing: say what to move, as {FORM}")
    return found


def _axis(word: str, known: Collection[str]) -> Axis:
    name, equals, span = word.removeprefix("--").partition("=")
    name = name.replace("-", "_")
    if not equals or not span:
        raise SettingsError(f"--search {word!r} is not a search axis; write {FORM}")
    if name not in known:
        raise SettingsError(f"--search moves {name}, which is not a field{nearest(name, known)}")
    if name in NOT_SEARCHED:
        raise SettingsError(f"--search cannot move {name}: trials would not be comparable; drop it")
    if ":" in span:
        return _range(name, span)
    values = [value.strip() for value in span.split(",")]
    if len(values) < 2 or not all(values) or len({*values}) < len(values):
        raise SettingsError(f"--search {word!r} needs two different values or more; write {FORM}")
    return Axis(name, values=values)


def _range(name: str, span: str) -> Axis:
    low, high, *rest = span.split(":")
    if rest not in ([], ["log"]) or not (NUMBER.fullmatch(low) and NUMBER.fullmatch(high)):
        raise SettingsError(f"--search {name}={span} is not a range; write {FORM}")
    first, last = _number(low), _number(high)
    if first >= last:
        raise SettingsError(f"--search {name}: {low} is not below {high}; write the smaller one first")
    if rest and first <= 0:
        raise SettingsError(f"--search {name}: a range in logarithms begins above 0, this one at {low}")
    return Axis(name, first, last, bool(rest))


def _number(text: str) -> float:
    return int(text) if text.lstrip("+-").isdigit() else float(text)
