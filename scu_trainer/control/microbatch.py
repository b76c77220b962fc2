"""How large a micro-batch may be, in padded tokens, decided once per optimizer step from how full memory was.

A PID law moves the cap: with e = aim - peak / limit, the used fraction that is missing to the aim,

    cap <- cap * exp(clip(kp * e + ki * sum(e) + kd * (e - e before)))

and a cost model, once it has learned what micro-batches take, says at once which cap would fill memory to its target.
The integral grows only while the output acts and no bound holds it (conditional integration, Åström and Hägglund,
Advanced PID Control, 2006, 3.5), and starts over where the error changes its sign (Clegg, 1958).

The cap shrinks in the step that shows pressure; it grows after some calm steps, into room that is there. Between the
two lies a band in which nothing moves. Without pressure there is no cap (None) and nothing here ever makes one: runs on
a machine with memory to spare are the same runs, whatever the gauge reads.

In a loop of one's own; ``used_bytes``, ``peak_bytes`` and ``limit_bytes`` would come from a gauge. Here a micro-batch
takes 2 bytes per token over 100 for the model, on a device of 2000 bytes of which a neighbour takes 600 for a while:

>>> from scu_trainer.control import splitting, microbatch
>>> law, state = microbatch.SizerConfig(headroom_share=0.1), microbatch.SizerState()
>>> lengths, sizes = [50] * 16, []
>>> for step in range(12):
...     used_bytes = 100 + (600 if step in (2, 3, 4) else 0)
...     cap = microbatch.applied_cap(state, ceiling_tokens=800, floor_tokens=50)
...     planned = splitting.cut(lengths, cap)
...     for plan in planned:
...         micro_batch_bytes = 2 * plan.tokens  # run it forward and backward; measure the peak above the use before it
...         state = microbatch.with_observation(state, plan.tokens, plan.quadratic, micro_batch_bytes)
...     largest = max(plan.tokens for plan in planned)
...     seen = microbatch.MemoryMeasurement(
...         step, limit_bytes=2000, used_bytes=used_bytes, peak_bytes=used_bytes + 2 * largest,
...         ceiling_tokens=800, floor_tokens=50, longest_row=50, largest_micro_batch_tokens=largest)
...     decision = microbatch.decide(law, state, seen)
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
"""A cap grows no further than this share of a size that ran out of memory, while the room is what it was."""

URGENT_GROWTH = 1.5
"""Room for a cap this many times as large is taken after ``patience_steps``; less is worth little and may be noise."""

LONG_PATIENCE = 8
"""Times ``patience_steps`` that smaller growth waits."""

UNRESTRICTED = 2**62
"""``cap_to_share`` of a rank without a cap: larger than any cap, and an int64."""


def applied_cap(state: SizerState, ceiling_tokens: int, floor_tokens: int) -> int:
    """Padded tokens per micro-batch in a step with this ceiling and floor; the floor wins over both."""
    cap = ceiling_tokens if state.cap_tokens is None else min(state.cap_tokens, ceiling_tokens)
    return max(cap, floor_tokens)


def decide(law: SizerConfig, state: SizerState, seen: MemoryMeasurement) -> Decision:
    """The cap for the next optimizer step."""
    level = pressure(law, seen.limit_bytes, seen.peak_bytes)
    after = _decide(law, _booked(law, state, seen, level), seen)
    changed = after.cap_tokens != state.cap_tokens
    reason = _reason(law, after, seen) if changed else None
    return Decision(after, reason, level == "critical", level)


def after_oom(
    law: SizerConfig,
    state: SizerState,
    failed_tokens: int,
    floor_tokens: int,
    limit_bytes: int,
    used_bytes: int,
    row_length: int,
) -> SizerState:
    """The state once a micro-batch of ``failed_tokens`` (rows of ``row_length``) did not fit: half of it, or what the
    cost model sees fit if that is less. ``used_bytes``: after the failed micro-batch has been freed."""
    room_bytes = limit_bytes - used_bytes
    half = min(failed_tokens // 2, cap_to_share(state))
    room_to_target_bytes = room_bytes - law.free_bytes_wanted(limit_bytes)
    fit = state.cost.largest_tokens(room_to_target_bytes, row_length, law.margin)
    return replace(
        _with_failure(state, failed_tokens, room_bytes),
        cap_tokens=max(1, floor_tokens, half if fit is None else min(half, fit)),
        integral=0.0,
        calm_steps=0,
        steps_since_oom=0,
        oom_count=state.oom_count + 1,
        proven_tokens=0 if _contradicts(law, state, room_bytes) else state.proven_tokens,
    )


def fitting_tokens(law: SizerConfig, state: SizerState, room_bytes: float, length: int) -> Optional[int]:
    """Most padded tokens of rows of ``length`` that will fit in ``room_bytes``, margin included. None: cannot say."""
    fit = state.cost.largest_tokens(room_bytes, length, law.margin)
    blocked = None if fit is None else _blocked_tokens(law, state, room_bytes, fit)
    return fit if fit is None or blocked is None else int(min(fit, blocked))


def with_observation(state: SizerState, tokens: int, quadratic: int, micro_batch_bytes: int) -> SizerState:
    """Record what a micro-batch took: its peak above what was in use before it."""
    return replace(state, cost=state.cost.observe(tokens, quadratic, micro_batch_bytes))


def cap_to_share(state: SizerState) -> int:
    """The cap as a number whose minimum over ranks every rank adopts, by ``with_shared_cap``, after each decision."""
    return UNRESTRICTED if state.cap_tokens is None else state.cap_tokens


def with_shared_cap(state: SizerState, smallest: int) -> SizerState:
    """Adopt the smallest ``cap_to_share`` of all ranks. What a rank learned alone stays its own."""
    return _changed(state, cap_tokens=None if smallest >= UNRESTRICTED else smallest)


def _booked(law: SizerConfig, state: SizerState, seen: MemoryMeasurement, level: Pressure) -> SizerState:
    """What the step showed, before any decision."""
    quiet = level in ("low", "moderate") and not _oom_is_fresh(state)
    state = _changed(state, pressure=level, calm_steps=state.calm_steps if quiet else 0)
    if _has_run_since(law, state, seen):
        state = replace(state, failed_tokens=None)
    if state.cap_tokens is None:
        return _with_proof(law, state, seen) if quiet else state
    return _changed(state, former_tokens=max(state.former_tokens or 0, seen.ceiling_tokens))


def _changed(state: SizerState, **values: Any) -> SizerState:
    """``replace``, which takes as long as all else of a calm step, only where a value is another one."""
    return state if all(getattr(state, name) == value for name, value in values.items()) else replace(state, **values)


def _decide(law: SizerConfig, state: SizerState, seen: MemoryMeasurement) -> SizerState:
    if _oom_is_fresh(state):
        # This step's peak is the failed micro-batch's, and the cap has been cut for it already.
        return replace(state, steps_since_oom=1, previous_error=None)
    error = _error(law, seen)
    after = state
    if state.pressure in ("high", "critical"):
        after = _shrunk(law, state, seen, error)
    elif state.cap_tokens is not None:
        after = _grown(law, state, seen, error)
    settled = after.cap_tokens is None or state.pressure == "moderate"
    return replace(
        after,
        integral=0.0 if settled else after.integral,
        previous_error=error,
        steps_since_oom=state.steps_since_oom + 1,
    )


def _error(law: SizerConfig, seen: MemoryMeasurement) -> float:
    """Used fraction missing to the aim, the middle of the band under the target."""
    target_fraction = 1.0 - law.free_bytes_wanted(seen.limit_bytes) / seen.limit_bytes
    return (1.0 - law.deadband / 2) * target_fraction - seen.peak_fraction


def _output(law: SizerConfig, state: SizerState, error: float) -> tuple[float, float]:
    """Factor on the cap, and the integral that goes with it."""
    before = 0.0 if state.integral * error < 0 else state.integral
    integral = max(-law.integral_clamp, min(law.integral_clamp, before + error))
    change = 0.0 if state.previous_error is None else error - state.previous_error
    wanted = law.kp * error + law.ki * integral + law.kd * change
    given = max(math.log(law.max_shrink), min(math.log(law.max_growth), wanted))
    return math.exp(given), integral if given == wanted else before


def _shrunk(law: SizerConfig, state: SizerState, seen: MemoryMeasurement, error: float) -> SizerState:
    current = applied_cap(state, seen.ceiling_tokens, seen.floor_tokens)
    factor, integral = _output(law, state, error)
    # From the micro-batch that ran: a cap far above it had no part in this peak.
    wanted = min(current, seen.largest_micro_batch_tokens) * min(factor, 1.0 - law.deadband)
    fit = _predicted_fit(law, state, seen)
    cap = max(1, seen.floor_tokens, int(wanted if fit is None else min(wanted, fit)))
    if cap >= current:
        return state
    if state.cap_tokens is None and _contradicts(law, state, seen.room_bytes):
        state = replace(state, proven_tokens=0)
    former = max(state.former_tokens or 0, seen.ceiling_tokens)
    return replace(state, cap_tokens=cap, integral=integral, former_tokens=former)


def _grown(law: SizerConfig, state: SizerState, seen: MemoryMeasurement, error: float) -> SizerState:
    cap, former = _sizes(state)
    room_tokens = _room_tokens(law, state, seen, error)
    if room_tokens < former and room_tokens < (1.0 + law.deadband) * cap:
        return replace(state, calm_steps=0)
    state = replace(state, calm_steps=state.calm_steps + 1)
    if state.calm_steps < _patience(law, state, room_tokens):
        return state
    if _is_proven(state, seen):
        return _released(state)
    factor, integral = _output(law, state, error)
    if state.cost.fitted:
        factor = law.max_growth  # the model knows where to stop
    step_tokens = max(cap + 1, int(cap * max(factor, 1.0 + law.deadband)))
    if min(step_tokens, room_tokens) >= former:
        return _released(state)
    return replace(state, cap_tokens=min(step_tokens, room_tokens), integral=integral)


def _sizes(state: SizerState) -> tuple[int, int]:
    """The cap and the size before it was cut: both are there, or neither."""
    assert state.cap_tokens is not None and state.former_tokens is not None
    return state.cap_tokens, state.former_tokens


def _room_tokens(law: SizerConfig, state: SizerState, seen: MemoryMeasurement, error: float) -> int:
    """The cap that memory has room for, at most the former size; 0 where nothing speaks for a larger one."""
    _, former = _sizes(state)
    if _is_proven(state, seen):
        return former
    if state.pressure != "low":
        return 0
    fit = _predicted_fit(law, state, seen)
    room = _proportional_fit(seen, error) if fit is None else fit
    # Where the smallest size alone runs, the cost model learns nothing, and could never agree.
    is_smallest = seen.largest_micro_batch_tokens <= seen.floor_tokens
    blocked = _blocked_tokens(law, state, seen.room_bytes, room if is_smallest else fit)
    return int(min(former, room, math.inf if blocked is None else blocked))


def _patience(law: SizerConfig, state: SizerState, room_tokens: int) -> int:
    """Steps in a row that must have had room before the cap grows into it."""
    cap, former = _sizes(state)
    urgent = room_tokens == former or room_tokens >= URGENT_GROWTH * cap
    return law.patience_steps if urgent else LONG_PATIENCE * law.patience_steps


def _released(state: SizerState) -> SizerState:
    return replace(state, cap_tokens=None, former_tokens=None, calm_steps=0)


def _predicted_fit(law: SizerConfig, state: SizerState, seen: MemoryMeasurement) -> Optional[int]:
    """The cap that fills memory to the target, by the cost model.

    The base is what the peak leaves after the largest micro-batch's predicted bytes: it counts gradients and whatever
    else is there during a step but not between steps, and takes back an offset of the prediction.
    """
    largest = seen.largest_micro_batch_tokens
    micro_batch_bytes = state.cost.predict(largest, largest * seen.longest_row)
    if micro_batch_bytes is None:
        return None
    base_bytes = max(seen.used_bytes, seen.peak_bytes - micro_batch_bytes)
    budget_bytes = seen.limit_bytes - law.free_bytes_wanted(seen.limit_bytes) - base_bytes
    return state.cost.largest_tokens(budget_bytes, seen.longest_row, law.margin)


def _proportional_fit(seen: MemoryMeasurement, error: float) -> float:
    """The cap that meets the aim if bytes above the use between steps are proportional to tokens. Growing by it is
    safe: a fixed part only makes the truth cheaper."""
    above_bytes = seen.peak_bytes - seen.used_bytes
    if above_bytes <= 0:
        return math.inf
    return seen.largest_micro_batch_tokens * (1.0 + error * seen.limit_bytes / above_bytes)


def _oom_is_fresh(state: SizerState) -> bool:
    return state.failed_tokens is not None and state.steps_since_oom == 0


def _has_run_since(law: SizerConfig, state: SizerState, seen: MemoryMeasurement) -> bool:
    """Whether the size that failed has run in no more room. A long row by itself says nothing of several together."""
    if state.failed_tokens is None or _oom_is_fresh(state):
        return False
    is_as_large = seen.largest_micro_batch_tokens >= max(state.failed_tokens, seen.floor_tokens + 1)
    return is_as_large and seen.room_bytes <= (1.0 + law.deadband) * state.failed_room_bytes


def _with_failure(state: SizerState, tokens: int, room_bytes: int) -> SizerState:
    """Remember the failure, unless a smaller size failed in more room: that says more."""
    known = state.failed_tokens is not None and state.failed_tokens <= tokens
    if known and state.failed_room_bytes >= room_bytes:
        return state
    return replace(state, failed_tokens=tokens, failed_room_bytes=room_bytes)


def _blocked_tokens(law: SizerConfig, state: SizerState, room_bytes: float, fit: Optional[float]) -> Optional[float]:
    """Bound on the cap from the last out-of-memory; None where there is none. ``fit``: by the cost model."""
    if state.failed_tokens is None or room_bytes > (1.0 + law.deadband) * state.failed_room_bytes:
        return None
    if fit is not None and fit >= state.failed_tokens and state.steps_since_oom >= law.forget_oom_steps:
        return None
    return max(1.0, SAFE_SHARE_OF_FAILED * state.failed_tokens)


def _with_proof(law: SizerConfig, state: SizerState, seen: MemoryMeasurement) -> SizerState:
    """Remember the largest ceiling that micro-batches filled without pressure, and the smallest room in which they
    did."""
    ceiling, room_bytes = seen.ceiling_tokens, seen.room_bytes
    if ceiling < state.proven_tokens or seen.largest_micro_batch_tokens < (1.0 - law.deadband) * ceiling:
        return state
    if ceiling == state.proven_tokens:
        room_bytes = min(room_bytes, state.proven_room_bytes)
    return _changed(state, proven_tokens=ceiling, proven_room_bytes=room_bytes)


def _is_proven(state: SizerState, seen: MemoryMeasurement) -> bool:
    """Whether the former size has run without pressure in no more room than there is now."""
    return state.proven_tokens >= _sizes(state)[1] and seen.room_bytes >= state.proven_room_bytes


def _contradicts(law: SizerConfig, state: SizerState, room_bytes: int) -> bool:
    """Trouble in the room in which the size was proven: the proof was luck."""
    return room_bytes >= (1.0 - law.deadband) * state.proven_room_bytes


def _reason(law: SizerConfig, state: SizerState, seen: MemoryMeasurement) -> str:
    if state.cap_tokens is None:
        return "pressure is gone"
    target = 1.0 - law.free_bytes_wanted(seen.limit_bytes) / seen.limit_bytes
    used = f"used {100 * seen.peak_fraction:.0f} % of {_size(seen.limit_bytes)}, target {100 * target:.0f} %"
    return used if state.pressure in ("high", "critical") else f"{used}: room for more"


def _size(size_bytes: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.1f} {unit}"
    return f"{size_bytes} B"
