"""The controller of the micro-batch size: a cap in padded tokens, updated once per optimizer step from memory use.

A PID controller moves the cap. With the error e = aim - peak / limit, as fractions of the memory limit,

    cap <- cap * exp(clip(kp * e + ki * sum(e) + kd * (e - previous e)))

Once a cost model has learned how many bytes micro-batches take, it computes the cap that fills memory to its target.
The integral grows only while the output takes effect and is not clipped (conditional integration, Åström and Hägglund,
Advanced PID Control, 2006, 3.5), and it is reset when the error changes sign (Clegg, 1958).

The cap shrinks in the step that shows pressure, and grows only after several calm steps with enough free memory.
Between the two is a deadband in which the cap does not change. Without pressure there is no cap (None) and none is ever
set: with enough memory a run is the same whatever the memory gauge reads.

The following example uses the controller in a custom loop. There, ``used_bytes``, ``peak_bytes`` and ``limit_bytes``
would come from a memory gauge. Here the model takes 100 bytes and a micro-batch 2 bytes per token, on a device of 2000
bytes, and another process takes 600 bytes for three steps:

>>> from scu_trainer.control import splitting, microbatch
>>> config, state = microbatch.SizerConfig(headroom_share=0.1), microbatch.SizerState()
>>> lengths, sizes = [50] * 16, []
>>> for step in range(12):
...     used_bytes = 100 + (600 if step in (2, 3, 4) else 0)
...     cap = microbatch.applied_cap(state, ceiling_tokens=800, floor_tokens=50)
...     planned = splitting.cut(lengths, cap)
...     for plan in planned:
...         micro_batch_bytes = 2 * plan.tokens  # run it forward and backward; measure the peak above the use before it
...         state = microbatch.with_observation(state, plan.tokens, plan.quadratic, micro_batch_bytes)
...     largest = max(plan.tokens for plan in planned)
...     measurement = microbatch.MemoryMeasurement(
...         step, limit_bytes=2000, used_bytes=used_bytes, peak_bytes=used_bytes + 2 * largest,
...         ceiling_tokens=800, floor_tokens=50, longest_row=50, largest_micro_batch_tokens=largest)
...     decision = microbatch.decide(config, state, measurement)
...     state = decision.state
...     sizes.append(largest)
...     if decision.reason:
...         print(f"step {step}: {decision.reason}")
step 2: used 115 % of 2.0 KiB, target 90 %
step 7: pressure is gone
>>> sizes
[800, 800, 800, 500, 500, 500, 500, 500, 800, 800, 800, 800]
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Optional

from scu_trainer.control.memory_values import Decision, MemoryMeasurement, Pressure, SizerConfig, SizerState, pressure

SAFE_SHARE_OF_FAILED = 0.75
"""Largest share of a size that ran out of memory to which the cap grows, as long as ``_blocked_tokens`` applies."""

URGENT_GROWTH = 1.5
"""Growth by this factor or more waits ``patience_steps``; less gains little, may come from noise, and waits longer."""

LONG_PATIENCE = 8
"""Growth by less than URGENT_GROWTH waits this many times ``patience_steps``."""

UNRESTRICTED = 2**62
"""The value of ``cap_to_share`` on a rank without a cap: larger than any cap, and still an int64."""


def applied_cap(state: SizerState, ceiling_tokens: int, floor_tokens: int) -> int:
    """Return the padded tokens allowed per micro-batch in this step. The floor overrides cap and ceiling."""
    cap = ceiling_tokens if state.cap_tokens is None else min(state.cap_tokens, ceiling_tokens)
    return max(cap, floor_tokens)


def decide(config: SizerConfig, state: SizerState, measurement: MemoryMeasurement) -> Decision:
    """Return the decision, with the cap for the next optimizer step."""
    pressure_level = pressure(config, measurement.limit_bytes, measurement.peak_bytes)
    after = _next_state(config, _with_measurement(config, state, measurement, pressure_level), measurement)
    changed = after.cap_tokens != state.cap_tokens
    reason = _log_reason(config, after, measurement) if changed else None
    return Decision(after, reason, pressure_level == "critical", pressure_level)


def after_oom(
    config: SizerConfig,
    state: SizerState,
    failed_tokens: int,
    floor_tokens: int,
    limit_bytes: int,
    used_bytes: int,
    row_length: int,
) -> SizerState:
    """Return the state after a micro-batch of ``failed_tokens`` (rows of ``row_length``) ran out of memory.

    The new cap is half of the failed size, or the size that fits by the cost model if that is smaller. Measure
    ``used_bytes`` after the failed micro-batch has been freed.
    """
    room_bytes = limit_bytes - used_bytes
    half = min(failed_tokens // 2, cap_to_share(state))
    room_to_target_bytes = room_bytes - config.free_bytes_wanted(limit_bytes)
    fit = state.cost.largest_tokens(room_to_target_bytes, row_length, config.margin)
    return replace(
        _with_failure(state, failed_tokens, room_bytes),
        cap_tokens=max(1, floor_tokens, half if fit is None else min(half, fit)),
        integral=0.0,
        calm_steps=0,
        steps_since_oom=0,
        oom_count=state.oom_count + 1,
        proven_tokens=0 if _contradicts_proof(config, state, room_bytes) else state.proven_tokens,
    )


def fitting_tokens(config: SizerConfig, state: SizerState, room_bytes: float, length: int) -> Optional[int]:
    """Return the padded tokens, in rows of ``length``, that fit in ``room_bytes`` with the margin; None if unknown."""
    fit = state.cost.largest_tokens(room_bytes, length, config.margin)
    blocked = None if fit is None else _blocked_tokens(config, state, room_bytes, fit)
    return fit if fit is None or blocked is None else int(min(fit, blocked))


def with_observation(state: SizerState, tokens: int, quadratic: int, micro_batch_bytes: int) -> SizerState:
    """Record the memory of a micro-batch: its peak minus the bytes in use before it."""
    return replace(state, cost=state.cost.observe(tokens, quadratic, micro_batch_bytes))


def cap_to_share(state: SizerState) -> int:
    """Return the cap as an int. After each decision all ranks take the minimum and pass it to ``with_shared_cap``."""
    return UNRESTRICTED if state.cap_tokens is None else state.cap_tokens


def with_shared_cap(state: SizerState, smallest: int) -> SizerState:
    """Adopt the smallest ``cap_to_share`` of all ranks. Everything else in the state stays local to its rank."""
    return _replaced_if_different(state, cap_tokens=None if smallest >= UNRESTRICTED else smallest)


def _with_measurement(
    config: SizerConfig, state: SizerState, measurement: MemoryMeasurement, pressure_level: Pressure
) -> SizerState:
    """Return the state with the step's measurement recorded, before any decision."""
    quiet = pressure_level in ("low", "moderate") and not _oom_is_fresh(state)
    state = _replaced_if_different(state, pressure=pressure_level, calm_steps=state.calm_steps if quiet else 0)
    if _failed_size_has_run(config, state, measurement):
        state = replace(state, failed_tokens=None)
    if state.cap_tokens is None:
        return _with_proven_size(config, state, measurement) if quiet else state
    return _replaced_if_different(state, former_tokens=max(state.former_tokens or 0, measurement.ceiling_tokens))


def _replaced_if_different(state: SizerState, **values: Any) -> SizerState:
    """Call ``replace`` only if a value differs, because ``replace`` takes as long as the rest of a calm step."""
    return state if all(getattr(state, name) == value for name, value in values.items()) else replace(state, **values)


def _next_state(config: SizerConfig, state: SizerState, measurement: MemoryMeasurement) -> SizerState:
    if _oom_is_fresh(state):
        # The failed micro-batch caused this step's peak, and the cap has already been reduced for it.
        return replace(state, steps_since_oom=1, previous_error=None)
    error = _error(config, measurement)
    after = state
    if state.pressure in ("high", "critical"):
        after = _shrink_cap(config, state, measurement, error)
    elif state.cap_tokens is not None:
        after = _grow_cap(config, state, measurement, error)
    settled = after.cap_tokens is None or state.pressure == "moderate"
    return replace(
        after,
        integral=0.0 if settled else after.integral,
        previous_error=error,
        steps_since_oom=state.steps_since_oom + 1,
    )


def _error(config: SizerConfig, measurement: MemoryMeasurement) -> float:
    """Return the aim, which is the middle of the deadband below the target, minus the used fraction."""
    target_fraction = 1.0 - config.free_bytes_wanted(measurement.limit_bytes) / measurement.limit_bytes
    return (1.0 - config.deadband / 2) * target_fraction - measurement.peak_fraction


def _pid_factor(config: SizerConfig, state: SizerState, error: float) -> tuple[float, float]:
    """Return the PID controller's factor for the cap, and the new integral."""
    integral_before = 0.0 if state.integral * error < 0 else state.integral
    integral = max(-config.integral_clamp, min(config.integral_clamp, integral_before + error))
    change = 0.0 if state.previous_error is None else error - state.previous_error
    wanted = config.kp * error + config.ki * integral + config.kd * change
    bounded = max(math.log(config.max_shrink), min(math.log(config.max_growth), wanted))
    return math.exp(bounded), integral if bounded == wanted else integral_before


def _shrink_cap(config: SizerConfig, state: SizerState, measurement: MemoryMeasurement, error: float) -> SizerState:
    current = applied_cap(state, measurement.ceiling_tokens, measurement.floor_tokens)
    factor, integral = _pid_factor(config, state, error)
    # Start from the largest micro-batch that ran: a cap far above it did not cause this peak.
    wanted = min(current, measurement.largest_micro_batch_tokens) * min(factor, 1.0 - config.deadband)
    fit = _predicted_fit(config, state, measurement)
    cap = max(1, measurement.floor_tokens, int(wanted if fit is None else min(wanted, fit)))
    if cap >= current:
        return state
    if state.cap_tokens is None and _contradicts_proof(config, state, measurement.room_bytes):
        state = replace(state, proven_tokens=0)
    former = max(state.former_tokens or 0, measurement.ceiling_tokens)
    return replace(state, cap_tokens=cap, integral=integral, former_tokens=former)


def _grow_cap(config: SizerConfig, state: SizerState, measurement: MemoryMeasurement, error: float) -> SizerState:
    cap, former = _cap_and_former(state)
    room_tokens = _attainable_cap(config, state, measurement, error)
    if room_tokens < former and room_tokens < (1.0 + config.deadband) * cap:
        return replace(state, calm_steps=0)
    state = replace(state, calm_steps=state.calm_steps + 1)
    if state.calm_steps < _required_calm_steps(config, state, room_tokens):
        return state
    if _is_proven(state, measurement):
        return _without_cap(state)
    factor, integral = _pid_factor(config, state, error)
    if state.cost.fitted:
        factor = config.max_growth  # the cost model limits the growth
    step_tokens = max(cap + 1, int(cap * max(factor, 1.0 + config.deadband)))
    if min(step_tokens, room_tokens) >= former:
        return _without_cap(state)
    return replace(state, cap_tokens=min(step_tokens, room_tokens), integral=integral)


def _cap_and_former(state: SizerState) -> tuple[int, int]:
    """Return the cap and the former size, of which either both exist or neither."""
    assert state.cap_tokens is not None and state.former_tokens is not None
    return state.cap_tokens, state.former_tokens


def _attainable_cap(config: SizerConfig, state: SizerState, measurement: MemoryMeasurement, error: float) -> int:
    """Return the cap that fits into free memory, at most the former size; 0 if there is no reason to grow."""
    _, former = _cap_and_former(state)
    if _is_proven(state, measurement):
        return former
    if state.pressure != "low":
        return 0
    fit = _predicted_fit(config, state, measurement)
    room = _proportional_fit(measurement, error) if fit is None else fit
    # While only the smallest size runs, the cost model learns nothing and could never lift the bound.
    is_smallest = measurement.largest_micro_batch_tokens <= measurement.floor_tokens
    blocked = _blocked_tokens(config, state, measurement.room_bytes, room if is_smallest else fit)
    return int(min(former, room, math.inf if blocked is None else blocked))


def _required_calm_steps(config: SizerConfig, state: SizerState, room_tokens: int) -> int:
    """Return how many calm steps in a row are needed before the cap grows to ``room_tokens``."""
    cap, former = _cap_and_former(state)
    urgent = room_tokens == former or room_tokens >= URGENT_GROWTH * cap
    return config.patience_steps if urgent else LONG_PATIENCE * config.patience_steps


def _without_cap(state: SizerState) -> SizerState:
    return replace(state, cap_tokens=None, former_tokens=None, calm_steps=0)


def _predicted_fit(config: SizerConfig, state: SizerState, measurement: MemoryMeasurement) -> Optional[int]:
    """Return the cap that fills memory to the target according to the cost model; None if the model cannot tell.

    The base is the peak minus the predicted bytes of the largest micro-batch. It therefore includes gradients and
    everything else that exists only during a step, and it corrects a constant error of the prediction.
    """
    largest = measurement.largest_micro_batch_tokens
    micro_batch_bytes = state.cost.predict(largest, largest * measurement.longest_row)
    if micro_batch_bytes is None:
        return None
    base_bytes = max(measurement.used_bytes, measurement.peak_bytes - micro_batch_bytes)
    budget_bytes = measurement.limit_bytes - config.free_bytes_wanted(measurement.limit_bytes) - base_bytes
    return state.cost.largest_tokens(budget_bytes, measurement.longest_row, config.margin)


def _proportional_fit(measurement: MemoryMeasurement, error: float) -> float:
    """Return the cap that meets the aim if the bytes above the use between steps are proportional to the tokens.
    Growing to it is safe: if part of these bytes is constant, a larger micro-batch takes less than assumed."""
    above_bytes = measurement.peak_bytes - measurement.used_bytes
    if above_bytes <= 0:
        return math.inf
    return measurement.largest_micro_batch_tokens * (1.0 + error * measurement.limit_bytes / above_bytes)


def _oom_is_fresh(state: SizerState) -> bool:
    return state.failed_tokens is not None and state.steps_since_oom == 0


def _failed_size_has_run(config: SizerConfig, state: SizerState, measurement: MemoryMeasurement) -> bool:
    """Whether the size that ran out of memory has since run in no more free memory. A single long row does not count,
    because it does not show that several rows fit together."""
    if state.failed_tokens is None or _oom_is_fresh(state):
        return False
    is_as_large = measurement.largest_micro_batch_tokens >= max(state.failed_tokens, measurement.floor_tokens + 1)
    return is_as_large and measurement.room_bytes <= (1.0 + config.deadband) * state.failed_room_bytes


def _with_failure(state: SizerState, tokens: int, room_bytes: int) -> SizerState:
    """Remember the failure, unless a smaller size is known to have failed with more free memory, which is stricter."""
    known = state.failed_tokens is not None and state.failed_tokens <= tokens
    if known and state.failed_room_bytes >= room_bytes:
        return state
    return replace(state, failed_tokens=tokens, failed_room_bytes=room_bytes)


def _blocked_tokens(config: SizerConfig, state: SizerState, room_bytes: float, fit: Optional[float]) -> Optional[float]:
    """Return the bound on the cap after an out-of-memory error; None without one, with more free memory, or once the
    cost model (``fit``) allows the failed size and ``forget_oom_steps`` have passed."""
    if state.failed_tokens is None or room_bytes > (1.0 + config.deadband) * state.failed_room_bytes:
        return None
    if fit is not None and fit >= state.failed_tokens and state.steps_since_oom >= config.forget_oom_steps:
        return None
    return max(1.0, SAFE_SHARE_OF_FAILED * state.failed_tokens)


def _with_proven_size(config: SizerConfig, state: SizerState, measurement: MemoryMeasurement) -> SizerState:
    """Remember the largest ceiling that micro-batches reached without pressure, and the least free memory for it."""
    ceiling, room_bytes = measurement.ceiling_tokens, measurement.room_bytes
    if ceiling < state.proven_tokens or measurement.largest_micro_batch_tokens < (1.0 - config.deadband) * ceiling:
        return state
    if ceiling == state.proven_tokens:
        room_bytes = min(room_bytes, state.proven_room_bytes)
    return _replaced_if_different(state, proven_tokens=ceiling, proven_room_bytes=room_bytes)


def _is_proven(state: SizerState, measurement: MemoryMeasurement) -> bool:
    """Whether the former size has run without pressure in no more free memory than there is now."""
    return state.proven_tokens >= _cap_and_former(state)[1] and measurement.room_bytes >= state.proven_room_bytes


def _contradicts_proof(config: SizerConfig, state: SizerState, room_bytes: int) -> bool:
    """Whether memory ran short with as much of it free as when the size was proven, which refutes the proof."""
    return room_bytes >= (1.0 - config.deadband) * state.proven_room_bytes


def _log_reason(config: SizerConfig, state: SizerState, measurement: MemoryMeasurement) -> str:
    if state.cap_tokens is None:
        return "pressure is gone"
    target = 1.0 - config.free_bytes_wanted(measurement.limit_bytes) / measurement.limit_bytes
    used = (
        f"used {100 * measurement.peak_fraction:.0f} % of {_format_bytes(measurement.limit_bytes)}, "
        f"target {100 * target:.0f} %"
    )
    return used if state.pressure in ("high", "critical") else f"{used}: room for more"


def _format_bytes(size_bytes: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.1f} {unit}"
    return f"{size_bytes} B"
