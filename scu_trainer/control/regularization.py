"""From measured description lengths to the strength of the decay toward the prior.

The information ratio is S = ParamBPT / (DataBPT + ParamBPT), so logit(S) = ln(ParamBPT / DataBPT) =: y. The decoupled
actuator w <- w + u (w0 - w) multiplies ParamBPT by (1 - u)^2 and leaves DataBPT alone. One optimizer step therefore
gives

    dy = growth - gain * (-ln(1 - u)),   gain = 2,

where only ``growth``, what learning adds to y in a step, is unknown. The model law estimates growth by a running
average of dy + gain * (-ln(1 - u)) and picks the u that cancels it and takes back the error y - y* within
``time_constant`` steps. The estimate uses the u that was applied, after its bounds, so nothing winds up while the
actuator is saturated.

The original law is the published Shannon Control Unit: lambda <- lambda * exp(kp * e + I) with e = S_ema - S*.

Everything here is arithmetic on immutable values; ``train/regularization/regularizer.py`` measures and acts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Optional

DECOUPLED_GAIN = 2.0
"""-d ln(ParamBPT) / d(-ln(1 - u)): exact when every trainable weight moves toward its w0 by the same fraction u."""

LARGEST_GROWTH = 0.5
"""Bound on one estimate of growth: the first steps leave y = -inf and would otherwise dominate the average."""

LARGEST_EXPONENT = 700.0
"""Where exp still fits a float: a large kp drives lambda to its bound, not the run into an OverflowError."""


@dataclass(frozen=True)
class ControllerConfig:
    """What a law needs to know, with every default resolved. Fields as in ``RegularizationSettings``."""

    name: str
    actuator: str
    target_s: Optional[float]
    ema_alpha: float
    deadband: float
    lambda_init: float
    lambda_min: float
    lambda_max: float
    lambda_final: float
    schedule: str
    time_constant: float
    growth_alpha: float
    max_shrink: float
    kp: float
    ki: float
    integral_clamp: float
    integral_leak: float
    wait_for_target: bool
    auto_patience: int
    max_steps: int


@dataclass(frozen=True)
class Measurement:
    """What one control step sees.

    ``steps``: optimizer steps since the last decision. ``data_bpt``: token-weighted training loss over those steps,
    bits per token. ``param_bpt``: description length of the weights after the last of them, bits per token.
    ``learning_rate``: of the last of them. ``gain``: measured plant gain, DECOUPLED_GAIN when all weights shrink alike.
    """

    step: int
    steps: int
    data_bpt: float
    param_bpt: float
    learning_rate: float
    gain: float = DECOUPLED_GAIN


@dataclass(frozen=True)
class ControllerState:
    """Everything that a decision depends on; JSON-safe, kept in checkpoints."""

    lam: float = 0.0
    integral: float = 0.0
    data_bpt_ema: Optional[float] = None
    s_ema: Optional[float] = None
    log_ratio: Optional[float] = None
    growth: Optional[float] = None
    decisions: int = 0
    pull: float = 0.0  # sum of -ln(1 - u) applied since the last decision
    target_s: Optional[float] = None
    reached_step: Optional[int] = None
    saturated: str = ""  # "", "low": lambda at its floor and S below target, "high": at its ceiling and S above target
    skipped: int = 0  # measurements that were not finite, over the run
    skipped_steps: int = 0  # optimizer steps of those since the last decision
    best_held_out_bpt: Optional[float] = None
    best_held_out_s: Optional[float] = None
    held_out_misses: int = 0


def initial_state(law: ControllerConfig) -> ControllerState:
    starts_at_zero = law.name == "model" or (law.name == "original" and law.target_s is None)
    return ControllerState(lam=0.0 if starts_at_zero else law.lambda_init, target_s=law.target_s)


def information_ratio(param_bpt: float, data_bpt: float) -> float:
    """S, between 0 and 1; 0 when nothing has been described yet."""
    total = param_bpt + data_bpt
    return param_bpt / total if total > 0 else 0.0


def logit(s: float) -> float:
    return math.log(s / (1.0 - s))


def shrink_of(law: ControllerConfig, state: ControllerState, learning_rate: float) -> float:
    """Fraction u of (w - w0) that the decoupled actuator removes in one optimizer step at this learning rate."""
    if law.actuator != "decoupled":
        return 0.0
    return min(state.lam * learning_rate, law.max_shrink)


def with_shrink(state: ControllerState, shrink: float) -> ControllerState:
    """Record a shrink that has been applied, so that the next estimate of growth can add it back."""
    return state if shrink <= 0 else replace(state, pull=state.pull - math.log1p(-min(shrink, 1 - 1e-12)))


def decide(law: ControllerConfig, state: ControllerState, seen: Measurement) -> ControllerState:
    """New state after one control step. A measurement that is not finite changes nothing and is counted."""
    if not (math.isfinite(seen.data_bpt) and math.isfinite(seen.param_bpt)) or seen.data_bpt <= 0:
        return replace(state, skipped=state.skipped + 1, skipped_steps=state.skipped_steps + seen.steps)
    state = _measure(law, state, seen)
    state = _LAWS[law.name](law, state, seen)
    return replace(state, pull=0.0, skipped_steps=0)


def _measure(law: ControllerConfig, state: ControllerState, seen: Measurement) -> ControllerState:
    count = state.decisions + 1
    # 1/count until it meets alpha: a plain mean at first, so that the first noisy value does not linger.
    alpha = max(_per_steps(law.ema_alpha, seen.steps), 1.0 / count)
    if law.name == "original":
        # The published law averages S itself.
        s_ema = _average(state.s_ema, information_ratio(seen.param_bpt, seen.data_bpt), alpha)
        data_ema = _average(state.data_bpt_ema, seen.data_bpt, alpha)
    else:
        data_ema = _average(state.data_bpt_ema, seen.data_bpt, alpha)
        s_ema = information_ratio(seen.param_bpt, data_ema)
    state = _estimate_growth(law, replace(state, decisions=count, data_bpt_ema=data_ema, s_ema=s_ema), seen)
    if state.reached_step is None and state.target_s is not None and s_ema >= state.target_s:
        state = replace(state, reached_step=seen.step)
    return state


def _estimate_growth(law: ControllerConfig, state: ControllerState, seen: Measurement) -> ControllerState:
    assert state.data_bpt_ema is not None  # averaged just before
    log_ratio = math.log(seen.param_bpt / state.data_bpt_ema) if seen.param_bpt > 0 else None
    growth = state.growth
    if log_ratio is not None and state.log_ratio is not None:
        newest = (log_ratio - state.log_ratio + seen.gain * state.pull) / (seen.steps + state.skipped_steps)
        newest = max(-LARGEST_GROWTH, min(LARGEST_GROWTH, newest))
        growth = _average(growth, newest, _per_steps(law.growth_alpha, seen.steps))
    return replace(state, log_ratio=log_ratio, growth=growth)


def _model_law(law: ControllerConfig, state: ControllerState, seen: Measurement) -> ControllerState:
    waiting = law.wait_for_target and state.reached_step is None
    if state.target_s is None or state.growth is None or state.log_ratio is None or waiting:
        return replace(state, lam=0.0, saturated="")
    assert state.s_ema is not None  # averaged with the ratio
    error = _outside_deadband(state.s_ema - state.target_s, law.deadband)
    excess = state.log_ratio - logit(state.target_s) if error else 0.0
    # The share of an error that tau would take back over `steps` steps, spread evenly over them.
    correction = excess * _per_steps(1.0 / max(law.time_constant, 1.0), seen.steps) / seen.steps
    growth = state.growth if state.reached_step is not None else _coming_growth(law, state.growth, seen.step)
    wanted = -math.expm1(-(growth + correction) / seen.gain) if seen.gain > 0 else 0.0
    shrink = max(0.0, min(law.max_shrink, wanted))
    free = shrink / seen.learning_rate if seen.learning_rate > 0 else state.lam
    lam = max(law.lambda_min, min(law.lambda_max, free))
    # Compared before and after each bound: lambda * rate differs from the shrink wanted by rounding alone.
    held_back = shrink < wanted or lam < free
    saturated = "high" if excess > 0 and held_back else "low" if excess < 0 and lam <= law.lambda_min else ""
    return replace(state, lam=lam, saturated=saturated)


def _coming_growth(law: ControllerConfig, growth: float, step: int) -> float:
    """Mean growth per step over the next ``time_constant`` steps of a run that nothing holds back yet.

    The distance from the start grows like a power of the steps taken, so growth falls as 1/step. Taking the present
    growth for the coming one would brake a young run long before its target.
    """
    ratio = law.time_constant / max(step, 1)
    return growth * math.log1p(ratio) / ratio


def _original_law(law: ControllerConfig, state: ControllerState, seen: Measurement) -> ControllerState:
    if state.target_s is None:
        return state
    assert state.s_ema is not None  # averaged with the measurement
    error = _outside_deadband(state.s_ema - state.target_s, law.deadband)
    integral = max(-law.integral_clamp, min(law.integral_clamp, law.integral_leak * state.integral + law.ki * error))
    wanted = state.lam * math.exp(min(law.kp * error + integral, LARGEST_EXPONENT))
    lam = max(law.lambda_min, min(law.lambda_max, wanted))
    saturated = (
        "high" if error > 0 and wanted > law.lambda_max else "low" if error < 0 and wanted < law.lambda_min else ""
    )
    # No wind-up: at a bound the integral has done its work, and what it still held would only delay the way back.
    return replace(state, lam=lam, integral=0.0 if saturated else integral, saturated=saturated)


def _schedule_law(law: ControllerConfig, state: ControllerState, seen: Measurement) -> ControllerState:
    done = min(1.0, seen.step / max(1, law.max_steps))
    weight = done if law.schedule == "linear" else (1 - math.cos(math.pi * done)) / 2
    return replace(state, lam=law.lambda_init + weight * (law.lambda_final - law.lambda_init))


_LAWS: dict[str, Callable[[ControllerConfig, ControllerState, Measurement], ControllerState]] = {
    "model": _model_law,
    "original": _original_law,
    "fixed": lambda law, state, seen: state,
    "schedule": _schedule_law,
}


def observe_held_out(law: ControllerConfig, state: ControllerState, held_out_bpt: float) -> ControllerState:
    """``target_s: auto``: S grows freely until held-out BPT has been above its best ``auto_patience`` times in a row;
    the S of the best evaluation then becomes the target, for good. ``held_out_bpt``: bits per token."""
    if not math.isfinite(held_out_bpt) or state.s_ema is None:
        return state
    if state.best_held_out_bpt is None or held_out_bpt < state.best_held_out_bpt:
        state = replace(state, best_held_out_bpt=held_out_bpt, held_out_misses=0)
        # Once S is held, a better evaluation no longer moves the target: the run would chase its own noise.
        return state if state.target_s is not None else replace(state, best_held_out_s=state.s_ema)
    state = replace(state, held_out_misses=state.held_out_misses + 1)
    if state.target_s is None and state.held_out_misses >= law.auto_patience and state.best_held_out_s:
        state = replace(state, target_s=state.best_held_out_s)
    return state


def _average(old: Optional[float], new: float, alpha: float) -> float:
    return new if old is None else old + alpha * (new - old)


def _per_steps(alpha: float, steps: int) -> float:
    """Weight that ``steps`` averages with weight alpha leave to the newest value."""
    return 1.0 - (1.0 - alpha) ** steps


def _outside_deadband(error: float, deadband: float) -> float:
    return 0.0 if abs(error) < deadband else error
