"""The control laws that set the strength of the decay toward the prior from measured description lengths.

The information ratio is S = ParamBPT / (DataBPT + ParamBPT), so logit(S) = ln(ParamBPT / DataBPT) =: y. The decoupled
actuator w <- w + u (w0 - w) multiplies ParamBPT by (1 - u)^2 and does not change DataBPT. One optimizer step therefore
changes y by

    dy = growth - gain * (-ln(1 - u)),   gain = 2,

where only ``growth``, the increase of y by learning, is unknown. The model law estimates growth as a running average of
dy + gain * (-ln(1 - u)). It chooses the u that cancels this growth and removes the error y - y* within
``time_constant`` steps. The estimate uses the u that was applied, after its bounds, so nothing winds up while the
actuator is saturated.

The original law is that of the published Shannon Control Unit: lambda <- lambda * exp(kp * e + I) with e = S_ema - S*.

This module only computes with immutable values; ``train/regularization/regularizer.py`` measures and acts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Optional

DECOUPLED_GAIN = 2.0
"""-d ln(ParamBPT) / d(-ln(1 - u)). Exact if every trainable weight moves toward its w0 by the same fraction u."""

LARGEST_GROWTH = 0.5
"""Bound on one estimate of growth. In the first steps y rises from -inf, which would otherwise dominate the average."""

LARGEST_EXPONENT = 700.0
"""Bound that keeps exp within a float, so that a large kp moves lambda to its bound without an OverflowError."""


@dataclass(frozen=True)
class ControllerConfig:
    """Parameters of a control law, with every default resolved. The fields are those of ``RegularizationSettings``."""

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
    """The input of one control step.

    ``steps``: optimizer steps since the last decision. ``data_bpt``: token-weighted training loss over those steps,
    bits per token. ``param_bpt``: description length of the weights after the last of these steps, bits per token.
    ``learning_rate``: of the last of these steps. ``gain``: measured plant gain; DECOUPLED_GAIN if all weights shrink
    by the same fraction.
    """

    step: int
    steps: int
    data_bpt: float
    param_bpt: float
    learning_rate: float
    gain: float = DECOUPLED_GAIN


@dataclass(frozen=True)
class ControllerState:
    """State of the controller; JSON-safe, saved in checkpoints."""

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
    saturated: str = ""  # "", "low": lambda is at its minimum and S below target, "high": at its maximum, S above it
    skipped: int = 0  # measurements in the run that were not finite
    skipped_steps: int = 0  # optimizer steps of skipped measurements since the last decision
    best_held_out_bpt: Optional[float] = None
    best_held_out_s: Optional[float] = None
    held_out_misses: int = 0


def initial_state(config: ControllerConfig) -> ControllerState:
    starts_at_zero = config.name == "model" or (config.name == "original" and config.target_s is None)
    return ControllerState(lam=0.0 if starts_at_zero else config.lambda_init, target_s=config.target_s)


def information_ratio(param_bpt: float, data_bpt: float) -> float:
    """Return S, between 0 and 1; 0 if both description lengths are 0."""
    total = param_bpt + data_bpt
    return param_bpt / total if total > 0 else 0.0


def logit(s: float) -> float:
    return math.log(s / (1.0 - s))


def shrink_fraction(config: ControllerConfig, state: ControllerState, learning_rate: float) -> float:
    """Return the fraction u of (w - w0) that the decoupled actuator removes per step; 0 for another actuator."""
    if config.actuator != "decoupled":
        return 0.0
    return min(state.lam * learning_rate, config.max_shrink)


def with_applied_shrink(state: ControllerState, shrink: float) -> ControllerState:
    """Record a shrink that was applied, so that the next estimate of growth adds it back."""
    return state if shrink <= 0 else replace(state, pull=state.pull - math.log1p(-min(shrink, 1 - 1e-12)))


def decide(config: ControllerConfig, state: ControllerState, measurement: Measurement) -> ControllerState:
    """Return the state after one control step. A measurement that is not finite is counted and otherwise ignored."""
    if not (math.isfinite(measurement.data_bpt) and math.isfinite(measurement.param_bpt)) or measurement.data_bpt <= 0:
        return replace(state, skipped=state.skipped + 1, skipped_steps=state.skipped_steps + measurement.steps)
    state = _with_averages(config, state, measurement)
    state = _LAWS[config.name](config, state, measurement)
    return replace(state, pull=0.0, skipped_steps=0)


def _with_averages(config: ControllerConfig, state: ControllerState, measurement: Measurement) -> ControllerState:
    count = state.decisions + 1
    # 1/count until that is below alpha: a plain mean at first, so that the first noisy value does not dominate.
    alpha = max(_weight_over_steps(config.ema_alpha, measurement.steps), 1.0 / count)
    if config.name == "original":
        # The published law averages S, all others DataBPT.
        s_ema = _average(state.s_ema, information_ratio(measurement.param_bpt, measurement.data_bpt), alpha)
        data_ema = _average(state.data_bpt_ema, measurement.data_bpt, alpha)
    else:
        data_ema = _average(state.data_bpt_ema, measurement.data_bpt, alpha)
        s_ema = information_ratio(measurement.param_bpt, data_ema)
    state = _estimate_growth(config, replace(state, decisions=count, data_bpt_ema=data_ema, s_ema=s_ema), measurement)
    if state.reached_step is None and state.target_s is not None and s_ema >= state.target_s:
        state = replace(state, reached_step=measurement.step)
    return state


def _estimate_growth(config: ControllerConfig, state: ControllerState, measurement: Measurement) -> ControllerState:
    assert state.data_bpt_ema is not None  # averaged just before
    log_ratio = math.log(measurement.param_bpt / state.data_bpt_ema) if measurement.param_bpt > 0 else None
    growth = state.growth
    if log_ratio is not None and state.log_ratio is not None:
        newest = (log_ratio - state.log_ratio + measurement.gain * state.pull) / (
            measurement.steps + state.skipped_steps
        )
        newest = max(-LARGEST_GROWTH, min(LARGEST_GROWTH, newest))
        growth = _average(growth, newest, _weight_over_steps(config.growth_alpha, measurement.steps))
    return replace(state, log_ratio=log_ratio, growth=growth)


def _model_law(config: ControllerConfig, state: ControllerState, measurement: Measurement) -> ControllerState:
    waiting = config.wait_for_target and state.reached_step is None
    if state.target_s is None or state.growth is None or state.log_ratio is None or waiting:
        return replace(state, lam=0.0, saturated="")
    assert state.s_ema is not None  # averaged with the ratio
    error = _outside_deadband(state.s_ema - state.target_s, config.deadband)
    excess = state.log_ratio - logit(state.target_s) if error else 0.0
    # The share of the error that a time constant removes within `steps` steps, spread evenly over these steps.
    correction = (
        excess * _weight_over_steps(1.0 / max(config.time_constant, 1.0), measurement.steps) / measurement.steps
    )
    growth = state.growth if state.reached_step is not None else _coming_growth(config, state.growth, measurement.step)
    wanted = -math.expm1(-(growth + correction) / measurement.gain) if measurement.gain > 0 else 0.0
    shrink = max(0.0, min(config.max_shrink, wanted))
    free = shrink / measurement.learning_rate if measurement.learning_rate > 0 else state.lam
    lam = max(config.lambda_min, min(config.lambda_max, free))
    # Compare the values before and after each bound, because lambda * rate differs from the shrink by rounding.
    held_back = shrink < wanted or lam < free
    saturated = "high" if excess > 0 and held_back else "low" if excess < 0 and lam <= config.lambda_min else ""
    return replace(state, lam=lam, saturated=saturated)


def _coming_growth(config: ControllerConfig, growth: float, step: int) -> float:
    """Return the expected mean growth per step over the next ``time_constant`` steps of a run before its target.

    The distance from the initial weights grows like a power of the number of steps, so growth falls as 1/step. If the
    present growth were used instead, the law would brake a young run long before its target.
    """
    ratio = config.time_constant / max(step, 1)
    return growth * math.log1p(ratio) / ratio


def _original_law(config: ControllerConfig, state: ControllerState, measurement: Measurement) -> ControllerState:
    if state.target_s is None:
        return state
    assert state.s_ema is not None  # averaged with the measurement
    error = _outside_deadband(state.s_ema - state.target_s, config.deadband)
    integral = max(
        -config.integral_clamp, min(config.integral_clamp, config.integral_leak * state.integral + config.ki * error)
    )
    wanted = state.lam * math.exp(min(config.kp * error + integral, LARGEST_EXPONENT))
    lam = max(config.lambda_min, min(config.lambda_max, wanted))
    saturated = (
        "high"
        if error > 0 and wanted > config.lambda_max
        else "low"
        if error < 0 and wanted < config.lambda_min
        else ""
    )
    # Anti-windup: at a bound the integral is reset, because it would only delay the return from the bound.
    return replace(state, lam=lam, integral=0.0 if saturated else integral, saturated=saturated)


def _schedule_law(config: ControllerConfig, state: ControllerState, measurement: Measurement) -> ControllerState:
    done = min(1.0, measurement.step / max(1, config.max_steps))
    weight = done if config.schedule == "linear" else (1 - math.cos(math.pi * done)) / 2
    return replace(state, lam=config.lambda_init + weight * (config.lambda_final - config.lambda_init))


_LAWS: dict[str, Callable[[ControllerConfig, ControllerState, Measurement], ControllerState]] = {
    "model": _model_law,
    "original": _original_law,
    "fixed": lambda config, state, measurement: state,
    "schedule": _schedule_law,
}


def observe_held_out(config: ControllerConfig, state: ControllerState, held_out_bpt: float) -> ControllerState:
    """Return the state after an evaluation with ``target_s: auto``: S grows freely until the held-out bits per token
    have been above their best ``auto_patience`` times in a row; then the S of the best evaluation is the target."""
    if not math.isfinite(held_out_bpt) or state.s_ema is None:
        return state
    if state.best_held_out_bpt is None or held_out_bpt < state.best_held_out_bpt:
        state = replace(state, best_held_out_bpt=held_out_bpt, held_out_misses=0)
        # Once there is a target, a better evaluation no longer moves it, because it would follow the noise.
        return state if state.target_s is not None else replace(state, best_held_out_s=state.s_ema)
    state = replace(state, held_out_misses=state.held_out_misses + 1)
    if state.target_s is None and state.held_out_misses >= config.auto_patience and state.best_held_out_s:
        state = replace(state, target_s=state.best_held_out_s)
    return state


def _average(old: Optional[float], new: float, alpha: float) -> float:
    return new if old is None else old + alpha * (new - old)


def _weight_over_steps(alpha: float, steps: int) -> float:
    """Return the weight of a value that enters a running average of weight ``alpha`` for ``steps`` steps."""
    return 1.0 - (1.0 - alpha) ** steps


def _outside_deadband(error: float, deadband: float) -> float:
    return 0.0 if abs(error) < deadband else error
