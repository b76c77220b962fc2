"""Detection of steps with an unusually large loss or gradient norm, by a running band of their logarithms.

    band       = median + threshold x max(spread around, spread above, FLOOR), of the last SPAN steps without spikes
    spreads    : standard deviations of a normal distribution with the same median absolute deviation, and with the same
                 distance from the median to the upper quartile; the second one is used because the upper tail of normal
                 steps is longer, and because up to a quarter of the steps of a band may be bad
    a spike    : the logarithm of the loss or of the gradient norm is above its band
    a shift    : the spike after MOST_IN_A_ROW consecutive ones; the band starts over at the new level

Only large values are spikes. It uses logarithms, because the norms of normal steps vary by factors. It uses median
and median absolute deviation instead of mean and variance (ZClip, arXiv 2504.02507), because norms of normal steps have
heavy tails and a single one must not widen the band for the following steps. It is a band of the whole gradient and not
of each weight (AdaGC, arXiv 2502.11034), because the question is which step is bad and from which rows, not which
weight. Nothing is a spike before FEWEST values are known. A loss that is not above zero has no logarithm and is never a
spike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Literal, Optional

from scu_trainer.control.noise import MAD_TO_SIGMA

SPAN = 128
"""Number of newest steps whose values form the band."""

FEWEST = 20
"""Number of values from which on there is a band."""

QUARTILE, TO_SIGMA = 0.75, 0.6745
"""A quantile, and its distance from the median of a normal distribution in standard deviations."""

MOST_IN_A_ROW = 3
"""Most consecutive spikes; the next one counts as a new level, such as that of other data or another learning rate."""

FLOORS = {"loss": 0.05, "gradient": 0.1}
"""Lower bound on the standard deviation of the logarithms: among nearly equal steps, a tiny increase is no spike."""


@dataclass(frozen=True)
class SpikeState:
    """State of the detector; JSON-safe. ``losses``, ``norms``: logarithms of the newest SPAN steps without spikes, the
    oldest first. ``in_a_row``: consecutive spikes up to now. ``shifts``: how often the band has started over."""

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    in_a_row: int = 0
    shifts: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> SpikeState:
        return cls(**{**saved, "losses": tuple(saved["losses"]), "norms": tuple(saved["norms"])})


@dataclass(frozen=True)
class Excess:
    """A value far above its band. ``value``: the value of ``name``. ``usual``: the median of the band. ``deviations``:
    how far the value is above the median, in standard deviations of the band."""

    name: Literal["loss", "gradient"]
    value: float
    usual: float
    deviations: float


@dataclass(frozen=True)
class Verdict:
    """The result for one step. ``excess``: the larger excess of loss and gradient norm, None if both are in their
    bands. ``is_shift``: so many spikes preceded it that the band has started over, and the step is kept."""

    excess: Optional[Excess] = None
    is_shift: bool = False

    @property
    def is_spike(self) -> bool:
        return self.excess is not None and not self.is_shift


def observe(threshold: float, state: SpikeState, *, loss: float, norm: float) -> tuple[SpikeState, Verdict]:
    """Return (state, verdict) after one optimizer step. ``threshold``: upper end of the band, in standard deviations
    above the median. ``loss``, ``norm``: finite; the norm is that of the gradient before clipping."""
    excesses = (_excess("loss", loss, state.losses), _excess("gradient", norm, state.norms))
    worst = max((item for item in excesses if item is not None), key=lambda item: item.deviations, default=None)
    if worst is None or worst.deviations <= threshold:
        kept = replace(state, losses=_appended(state.losses, loss), norms=_appended(state.norms, norm), in_a_row=0)
        return kept, Verdict()
    if state.in_a_row < MOST_IN_A_ROW:
        return replace(state, in_a_row=state.in_a_row + 1), Verdict(worst)
    fresh = SpikeState(_appended((), loss), _appended((), norm), shifts=state.shifts + 1)
    return fresh, Verdict(worst, is_shift=True)


def _excess(name: Literal["loss", "gradient"], value: float, band: Sequence[float]) -> Optional[Excess]:
    if value <= 0 or len(band) < FEWEST:
        return None
    middle = median(band)
    around = MAD_TO_SIGMA * median(abs(item - middle) for item in band)
    above = (sorted(band)[int(QUARTILE * len(band))] - middle) / TO_SIGMA
    deviations = (math.log(value) - middle) / max(around, above, FLOORS[name])
    return Excess(name, value, math.exp(middle), deviations)


def _appended(band: tuple[float, ...], value: float) -> tuple[float, ...]:
    return (*band, math.log(value))[-SPAN:] if value > 0 else band
