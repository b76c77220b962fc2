"""Laws with every number written out, and a toy plant for them: logit(S) grows, the actuator takes some of it back."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Optional

from scu_trainer.control.regularization import (
    ControllerConfig,
    ControllerState,
    Measurement,
    decide,
    initial_state,
    shrink_fraction,
    with_applied_shrink,
)
from scu_trainer.control.tracking import Tracking, assess

MODEL = ControllerConfig(
    name="model",
    actuator="decoupled",
    target_s=0.1,
    ema_alpha=0.05,
    deadband=0.0,
    lambda_init=1.0,
    lambda_min=0.0,
    lambda_max=math.inf,
    lambda_final=0.0,
    schedule="linear",
    time_constant=10.0,
    growth_alpha=0.2,
    max_shrink=0.1,
    kp=0.8,
    ki=0.15,
    integral_clamp=0.2,
    integral_leak=0.995,
    wait_for_target=False,
    auto_patience=2,
    max_steps=400,
)
ORIGINAL = replace(
    MODEL, name="original", actuator="penalty", ema_alpha=0.1, deadband=0.002, lambda_min=1e-4, lambda_max=10.0
)
FIXED = replace(MODEL, name="fixed", lambda_init=3.0)
SCHEDULE = replace(MODEL, name="schedule", lambda_init=8.0, lambda_final=2.0, max_steps=100)

Growth = Callable[[int, float], float]
"""(step, y) -> what learning adds to y = logit(S) in this step."""


def straight_walk(step: int, y: float) -> float:
    """Every step carries the weights 0.01 further from their start: uncontrolled, y grows like 2 ln(step)."""
    return 2.0 * math.log1p(0.01 / math.exp(y / 2.0))


def constant(step: int, y: float) -> float:
    return 0.05


def decaying(step: int, y: float) -> float:
    return 0.5 / (1.0 + step / 10.0)


def logarithm_of_time(step: int, y: float) -> float:
    """Growth that comes from outside and does not feel the pull."""
    return 2.0 * math.log((step + 1) / step)


@dataclass
class Plant:
    """DataBPT follows ``data_bpt(step)`` times lognormal noise; ParamBPT = DataBPT exp(y); a pull u multiplies ParamBPT
    by (1 - u)^gain."""

    growth: Growth = straight_walk
    gain: float = 2.0
    noise: float = 0.0
    data_bpt: Callable[[int], float] = lambda step: 4.0
    learning_rate: Callable[[int], float] = lambda step: 1e-3
    param_bpt: float = 4.0 * math.exp(-9.0)
    seed: int = 0

    def run(self, law: ControllerConfig, steps: int = 400, control_frequency: int = 1) -> Run:
        chance, state, run, losses = random.Random(self.seed), initial_state(law), Run(law.target_s), []
        for step in range(1, steps + 1):
            rate, bpt = self.learning_rate(step), self.data_bpt(step)
            self.param_bpt *= math.exp(self.growth(step, math.log(self.param_bpt / bpt)))
            shrink = shrink_fraction(law, state, rate)
            self.param_bpt *= (1.0 - shrink) ** self.gain
            state = with_applied_shrink(state, shrink)
            losses.append(bpt * math.exp(chance.gauss(0.0, self.noise)))
            if step % control_frequency == 0:
                mean = sum(losses) / len(losses)
                state = decide(law, state, Measurement(step, len(losses), mean, self.param_bpt, rate, self.gain))
                losses.clear()
                run.steps.append(step)
                run.states.append(state)
                run.shrinks.append(shrink)
        return run


class Run:
    def __init__(self, target_s: Optional[float]) -> None:
        self.target_s, self.steps, self.states, self.shrinks = target_s, [], [], []

    def tracking(self, first: int = 0, last: Optional[int] = None) -> Tracking:
        """Figures over the decisions ``first`` to ``last`` (positions)."""
        part: list[ControllerState] = self.states[first:last]
        return assess(self.steps[first:last], [s.s_ema for s in part], self.target_s, [s.saturated for s in part])
