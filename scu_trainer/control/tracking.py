"""Assessment of how well S followed its target: metrics and verdict of a run, and a forecast while it runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from scu_trainer.control.regularization import logit

BAND = 0.10
"""S counts as on target within this fraction of it."""

SMALLEST_GAIN = 0.5
"""A measured plant gain below this means that the weights did not follow the actuator; the expected gain is 2."""


@dataclass(frozen=True)
class Tracking:
    """How S followed its target; fractions are relative to the target, steps are optimizer steps.

    ``settling_step``: first step from which S stays within BAND until the end. ``overshoot``: largest excess after the
    target was first reached. ``bias``: mean error over the second half of the steps since S first entered the band.
    ``saturated_fraction``: share of the decisions since S first entered the band that had lambda at a bound.
    """

    target_s: float
    final_s: float
    reached: bool
    settling_step: Optional[int]
    overshoot: Optional[float]
    bias: Optional[float]
    saturated_fraction: float
    verdict: str


def assess(steps: Sequence[int], s_values: Sequence[float], target_s: float, saturated: Sequence[str] = ()) -> Tracking:
    """Assess a period with a constant target. ``s_values``: averaged S, one per entry of ``steps``."""
    errors = [s / target_s - 1.0 for s in s_values]
    inside = [abs(error) <= BAND for error in errors]
    entered = inside.index(True) if True in inside else None
    overshot = next((i for i, error in enumerate(errors) if error >= 0), None)
    overshoot = None if overshot is None else max(errors[overshot:])
    bias = None
    if entered is not None:
        late = errors[(entered + len(errors)) // 2 :]
        bias = sum(late) / len(late)
    # While S rises toward the target, lambda is at its minimum because nothing has to be slowed down yet.
    since_entry = saturated[entered or 0 :]
    saturated_fraction = sum(bool(word) for word in since_entry) / len(since_entry) if since_entry else 0.0
    first_inside = 1 + max((i for i, ok in enumerate(inside) if not ok), default=-1)
    settled = first_inside if first_inside < len(inside) else None
    return Tracking(
        target_s=target_s,
        final_s=s_values[-1] if s_values else 0.0,
        reached=entered is not None or overshot is not None,
        settling_step=None if settled is None else steps[settled],
        overshoot=overshoot,
        bias=bias,
        saturated_fraction=saturated_fraction,
        verdict=_verdict(settled, entered, overshot, errors),
    )


def _verdict(settled: Optional[int], entered: Optional[int], overshot: Optional[int], errors: Sequence[float]) -> str:
    if settled is not None:
        return "on target"
    if not errors or (entered is None and overshot is None):
        return "target not reached"
    return "left above target" if errors[-1] > 0 else "left below target"


def forecast_s(early: tuple[int, float], now: tuple[int, float], last_step: int, target_s: float) -> tuple[float, bool]:
    """Return (predicted S at the last step without control, whether it reaches the band around ``target_s``).

    ``early``, ``now``: (step, logit(S)) at two steps of the run. The distance of the weights from their initial values
    grows like a power of the number of steps, so logit(S) is nearly linear in ln(step). A decaying learning rate slows
    this growth, so the prediction is an upper estimate, and a target above it will be missed.
    """
    (early_step, early_y), (now_step, now_y) = early, now
    slope = max(0.0, (now_y - early_y) / math.log(now_step / early_step))
    predicted = now_y + slope * math.log(max(last_step, now_step) / now_step)
    predicted_s = 1.0 / (1.0 + math.exp(-predicted))
    return predicted_s, predicted >= logit(target_s * (1.0 - BAND))
