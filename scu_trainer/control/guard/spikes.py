"""Does the loss or the gradient of a step lie far outside of where they have been? A running band of their logarithms.

    band       = median + threshold x max(spread around, spread above, FLOOR), of the last SPAN steps without spikes
    spreads    : standard deviations of a normal distribution with the same median absolute deviation, and with the same
                 distance from the median to the upper quartile: the upper tail of sound steps is the longer one, and up
                 to a quarter of the steps of a band may be bad ones
    a spike    : the logarithm of the loss, or that of the gradient's norm, lies above its band
    a shift    : MOST_IN_A_ROW spikes one after the other, and then one more; the band starts over where it is now

Only what is too large is a spike. Logarithms, because norms of sound steps spread by factors. Median and median
absolute deviation instead of mean and variance (ZClip, arXiv 2504.02507): sound norms have heavy tails, and one of them
shall not widen the band for those that follow. A band of the whole gradient and not of each weight (AdaGC, arXiv
2502.11034): the question is which step, and of which rows, not which weight. Nothing is judged before FEWEST values are
known. A loss that is not above zero has no logarithm and is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Literal, Optional

from scu_trainer.control.noise import MAD_TO_SIGMA

SPAN = 128
"""Steps whose values are the band."""

FEWEST = 20
"""Values from which on there is a band."""

QUARTILE, TO_SIGMA = 0.75, 0.6745
"""A quantile, and how many standard deviations it lies above the median of a normal distribution."""

MOST_IN_A_ROW = 3
"""Spikes one after the other; one more is no spike but another level: other data, another rate."""

FLOORS = {"loss": 0.05, "gradient": 0.1}
"""Least standard deviation of the logarithms: in a run whose steps are all alike a trifle is no spike."""


@dataclass(frozen=True)
class SpikeState:
    """JSON-safe. ``losses``, ``norms``: logarithms of the newest SPAN steps that were no spikes, the oldest first.

    ``in_a_row``: spikes up to now. ``shifts``: how often the band has started over.
    """

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
    """``value``: of ``name``, which usually is about ``usual``; ``deviations``: how far above, in those of the band."""

    name: Literal["loss", "gradient"]
    value: float
    usual: float
    deviations: float


@dataclass(frozen=True)
class Verdict:
    """``excess``: what lies outside of its band the farthest, None where nothing does. ``is_shift``: it lies there for
    so long that the band has started over, and the step stands."""

    excess: Optional[Excess] = None
    is_shift: bool = False

    @property
    def is_spike(self) -> bool:
        return self.excess is not None and not self.is_shift


def observe(threshold: float, state: SpikeState, *, loss: float, norm: float) -> tuple[SpikeState, Verdict]:
    """``threshold``: standard deviations above the median at which the band ends. ``loss``, ``norm``: finite, of one
    optimizer step, the norm before clipping."""
    found = (_excess("loss", loss, state.losses), _excess("gradient", norm, state.norms))
    worst = max((one for one in found if one is not None), key=lambda one: one.deviations, default=None)
    if worst is None or worst.deviations <= threshold:
        kept = replace(state, losses=_with(state.losses, loss), norms=_with(state.norms, norm), in_a_row=0)
        return kept, Verdict()
    if state.in_a_row < MOST_IN_A_ROW:
        return replace(state, in_a_row=state.in_a_row + 1), Verdict(worst)
    fresh = SpikeState(_with((), loss), _with((), norm), shifts=state.shifts + 1)
    return fresh, Verdict(worst, is_shift=True)


def _excess(name: Literal["loss", "gradient"], value: float, band: Sequence[float]) -> Optional[Excess]:
    if value <= 0 or len(band) < FEWEST:
        return None
    middle = median(band)
    around = MAD_TO_SIGMA * median(abs(one - middle) for one in band)
    above = (sorted(band)[int(QUARTILE * len(band))] - middle) / TO_SIGMA
    deviations = (math.log(value) - middle) / max(around, above, FLOORS[name])
    return Excess(name, value, math.exp(middle), deviations)


def _with(band: tuple[float, ...], value: float) -> tuple[float, ...]:
    return (*band, math.log(value))[-SPAN:] if value > 0 else band
