"""The axes of a small hyperparameter search: which settings it varies, and over which values."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from scu_trainer.errors import SettingsError, did_you_mean

FORM = "NAME=LOW:HIGH, NAME=LOW:HIGH:log, or NAME=A,B,C"
NOT_SEARCHED = frozenset(
    "seed seeds data_seed output_dir resume_from_checkpoint resume dataset eval_dataset dataset_size "
    "validation_split_percentage max_eval_documents".split()
)
"""Fields that identify a run, or determine what it is scored on. A search must not vary them."""

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class Axis:
    """A setting that the search varies: among ``values`` if there are any, otherwise from ``low`` to ``high``, as whole
    numbers if both are whole."""

    name: str
    low: Optional[float] = None
    high: Optional[float] = None
    is_log: bool = False
    values: Sequence[str] = ()

    def suggest(self, trial: Any) -> Any:
        """Return the value of this axis for ``trial``, an Optuna trial."""
        if self.values:
            return trial.suggest_categorical(self.name, list(self.values))
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(self.name, self.low, self.high, log=self.is_log)
        return trial.suggest_float(self.name, float(self.low), float(self.high), log=self.is_log)

    @property
    def ends(self) -> list[Any]:
        """The values to check: if they are valid, so are all others."""
        return list(self.values) or [self.low, self.high]


def parse_axes(words: Sequence[str], known: Collection[str]) -> list[Axis]:
    """Parse the axes of a search. ``known``: the names of all settings. Raises SettingsError for an unknown name, a
    repeated name or an invalid range."""
    found = [_parse_axis(word, known) for word in words]
    names = [axis.name for axis in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SettingsError(f"--search varies {twice} twice; give it once")
    if not found:
        raise SettingsError(f"--search is missing: say what to vary, as {FORM}")
    return found


def _parse_axis(word: str, known: Collection[str]) -> Axis:
    name, equals, span = word.removeprefix("--").partition("=")
    name = name.replace("-", "_")
    if not equals or not span:
        raise SettingsError(f"--search {word!r} is not a search axis; write {FORM}")
    if name not in known:
        raise SettingsError(f"--search varies {name}, which is not a field{did_you_mean(name, known)}")
    if name in NOT_SEARCHED:
        raise SettingsError(f"--search cannot vary {name}: trials would not be comparable; drop it")
    if ":" in span:
        return _parse_range(name, span)
    values = [value.strip() for value in span.split(",")]
    if len(values) < 2 or not all(values) or len({*values}) < len(values):
        raise SettingsError(f"--search {word!r} needs two or more different values; write {FORM}")
    return Axis(name, values=values)


def _parse_range(name: str, span: str) -> Axis:
    low, high, *rest = span.split(":")
    if rest not in ([], ["log"]) or not (NUMBER.fullmatch(low) and NUMBER.fullmatch(high)):
        raise SettingsError(f"--search {name}={span} is not a range; write {FORM}")
    first, last = _parse_number(low), _parse_number(high)
    if first >= last:
        raise SettingsError(f"--search {name}: {low} is not below {high}; write the smaller one first")
    if rest and first <= 0:
        raise SettingsError(f"--search {name}: a logarithmic range must begin above 0, but this one begins at {low}")
    return Axis(name, first, last, bool(rest))


def _parse_number(text: str) -> float:
    return int(text) if text.lstrip("+-").isdigit() else float(text)
