"""Chooses the micro-batches of each accumulation window: plans them, learns their memory cost, moves the cap.

The cap is decided in one place, when the local work of a window is done and before gradients are reduced over ranks; it
holds from the next window on. Within a window, only an out-of-memory error or a prediction cuts micro-batches. Every
change is written to the history and the log.
"""

from __future__ import annotations

import logging
import math
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Optional

import torch

from scu_trainer.control import microbatch as control
from scu_trainer.control import splitting
from scu_trainer.errors import OutOfMemory
from scu_trainer.figures import count_text
from scu_trainer.hardware.presets import device_name
from scu_trainer.run_files import format_bytes
from scu_trainer.settings import MemorySettings
from scu_trainer.train.step.batches.logical_batch import LogicalBatches
from scu_trainer.train.step.batches.rows import Row
from scu_trainer.train.step.batches.window import AccumulationWindow, MicroBatch
from scu_trainer.train.step.recovery.memory import Gauge, MemoryReading, free_memory
from scu_trainer.train.step.recovery.second_try import CatchOutOfMemory

logger = logging.getLogger("scu_trainer")

WITHOUT_ROWS = "a batch that cannot be cut by rows"

BUSY_TOKENS = {"cpu": 768, "mps": 2048}
BUSY_TOKENS_OF_COMPILED, BUSY_TOKENS_ELSEWHERE = 2048, 16_384
"""Tokens per micro-batch above which a device gains nothing from larger ones, because the matrices already fill it."""

MOST_DOUBLINGS = 16

LEARNING_WINDOWS = 3
"""Windows in which every micro-batch is measured: the first ones, and those after an unpredicted out-of-memory error.
In all other windows one measurement keeps watch."""

STEPS_BETWEEN_COLLECTIONS = 20
"""A garbage collection takes 0.3 s, and if it did not relieve the pressure, the next one will not either."""

LEAST_PADDING = 1 / 16
"""Share of padding in the tokens of the stock loop so far from which on rows count as uneven."""

AllReduceMax = Callable[[list[int]], list[int]]
"""Element-wise maximum over ranks; every rank must call it at the same place."""


def has_own_memory(device: str) -> bool:
    """Return whether ``device`` has memory of its own, and each micro-batch costs kernel launches: micro-batches may
    then become larger than the batch that the user asked for."""
    return device not in BUSY_TOKENS


def may_grow(device: torch.device, weights: Iterable[torch.Tensor]) -> bool:
    """Return whether micro-batches may exceed the batch asked for: not if ``device_map`` uses several GPUs, of which
    only one is read, nor on an integrated GPU, where running out of the machine's memory kills this process or
    another."""
    cards = {weight.device for weight in weights if weight.device.type not in ("cpu", "meta")}
    is_shared = device.type == "cuda" and torch.cuda.get_device_properties(device).is_integrated
    return has_own_memory(device.type) and len(cards) < 2 and not is_shared


def busy_tokens(device: str, is_compiled: bool = False) -> int:
    """Return the tokens per micro-batch that fill ``device``. ``is_compiled``: ``compiles_shapes``. Half precision is
    faster there, and each micro-batch casts all weights."""
    if is_compiled:
        return BUSY_TOKENS_OF_COMPILED
    return BUSY_TOKENS.get(device, BUSY_TOKENS_ELSEWHERE)


@dataclass
class MemoryStatistics:
    """Counts of what was processed, in tokens (rows, for inputs without a length). JSON-safe, kept in checkpoints.

    real_tokens: without padding.
    processed_tokens: with the padding that was left or added; a prefix that rows share counts once.
    stock_tokens: what the stock loop would have processed.
    out_of_memory: micro-batches that ran out of memory, on all ranks; all other counts are of this rank.
    failed_tokens: tokens in the failed micro-batches of this rank.
    predicted: micro-batches that were cut because they were predicted not to fit.
    chunks: micro-batches with a forward and backward that were kept.
    peak_bytes: the most that this process used in a step.
    """

    windows: int = 0
    chunks: int = 0
    real_tokens: int = 0
    processed_tokens: int = 0
    stock_tokens: int = 0
    out_of_memory: int = 0
    failed_tokens: int = 0
    predicted: int = 0
    changes: int = 0
    peak_bytes: int = 0


class MicroBatchSizer:
    """The memory control of one training run.

    gauge: None without ``memory_control``.
    gradient_bytes: the most that gradients add within a window.
    on_row: receives every row for memory_history.json.
    first_cap_tokens: a cap for micro-batches from the first step on, set if more is predicted not to fit and running
    out of memory would end the process.
    """

    def __init__(self, settings: MemorySettings, gauge: Optional[Gauge], device: torch.device) -> None:
        self.settings = settings
        self.gauge = gauge
        self.config = sizer_config_of(settings)
        self.first_cap_tokens: Optional[int] = None
        self.reset()
        self.on_row: Callable[[dict[str, Any]], None] = lambda row: None
        self.step = 0
        self.logical: Optional[LogicalBatches] = None
        self._window: Optional[AccumulationWindow] = None
        self.has_length = True
        self._ceiling = 1
        self.busy_tokens = busy_tokens(device.type)
        self.grows, self._device = has_own_memory(device.type), device
        self._retried: set[MicroBatch] = set()
        self._processed_tokens: dict[tuple[Row, ...], int] = {}
        self._before: Optional[MemoryReading] = None
        self._base: Optional[MemoryReading] = None
        self.gradient_bytes = self._growth_bytes = 0
        self._peak_fraction = 0.0
        self._attempts = self._planned = self.local_failures = 0
        self._last_reading: Optional[MemoryReading] = None
        self._rests = self._measures = False

    def reset(self) -> None:
        """Forget everything that was learned: sizes that fitted in an earlier training may not fit now."""
        self.state, self.statistics = control.SizerState(cap_tokens=self.first_cap_tokens), MemoryStatistics()
        self._predicted_least = math.inf
        self._told_uncuttable: set[str] = set()
        self._first_window, self._learning_until = 0, LEARNING_WINDOWS
        self._measured_up_to = (0, 0)
        self._collected_step = -STEPS_BETWEEN_COLLECTIONS
        self._logged_peak_bytes = 0
        self._last_window: dict[str, int] = {}
        self._read_at_s = -math.inf

    # -- one window ----------------------------------------------------------------------------------------------------

    def begin(
        self, window: AccumulationWindow, step: int, keep_step: Optional[AllReduceMax] = None
    ) -> list[MicroBatch]:
        """Return the planned micro-batches of this window; ``fit`` may still cut each of them. ``keep_step``: the
        reduction with which ranks agree, if all must run the same number of micro-batches."""
        self._window, self.step, self._attempts, self.local_failures = window, step, 0, 0
        self.has_length = window.has_length
        self._retried.clear()
        self._processed_tokens.clear()
        has_rested, self._rests = self._rests, self._may_rest
        if self.gauge is not None and not self._rests:
            # After steps without a reading the peak is theirs; otherwise it may be that of an evaluation, not a step.
            reading = self._read_gauge() if has_rested else self.gauge.read()
            # If memory is short, live memory must be told apart from freed memory that the allocator still caches.
            exact = self._is_learning or self.state.pressure != "low" or self.state.cap_tokens is not None
            self.gauge.reset(exact=exact)
            self._before = self._base = self._read_gauge() if exact else reading
        if self.first_cap_tokens is not None and self.statistics.windows == self._first_window:
            self._apply_first_cap()
        micro_batches = self._plan(window) if keep_step is None else self._plan_on_all_ranks(window, keep_step)
        self._planned = len(micro_batches)
        return micro_batches

    def _apply_first_cap(self) -> None:
        """Report the first cap, but drop it if a split would change the gradient: memory has not run short yet, and the
        prediction may be wrong."""
        if self._window.can_pool:
            reason = "larger ones were predicted not to fit into main memory"
            self._note(reason, self._before, self.state.pressure, tokens=self.first_cap_tokens)
        else:
            self.state = replace(self.state, cap_tokens=None)

    def _plan_on_all_ranks(self, window: AccumulationWindow, all_reduce_max: AllReduceMax) -> list[MicroBatch]:
        """Return the same number of micro-batches on every rank. If a split would change the gradient, only short
        memory cuts batches; if a batch cannot be cut, nothing does."""
        self._ceiling, wished = max(window.largest_batch_tokens, 1), self.settings.resolved_token_cap
        if isinstance(wished, int) and window.can_pool:
            self._ceiling = min(self._ceiling, wished)
        largest = max(window.whole_batches(), key=lambda micro_batch: micro_batch.tokens)
        room = self._predicted_limit(largest)
        cap = max(1, min(self._cap, self._ceiling if room is None else room))
        most = self.settings.max_batch_size if window.can_pool else None
        wanted = max(-(-largest.tokens // cap), 1 if most is None else -(-len(largest.rows) // most))
        fewest_rows = 1 if window.uncuttable else min(max(1, batch.rows) for batch in window.batches)
        parts, negative_rows = all_reduce_max([wanted, -max(1, fewest_rows // self.settings.min_batch_size)])
        return window.in_parts(min(parts, -negative_rows))

    def _plan(self, window: AccumulationWindow) -> list[MicroBatch]:
        cap, settings = self.settings.resolved_token_cap, self.settings
        self._ceiling = max(window.largest_batch_tokens, 1)
        if self.logical is not None:  # here the batch size adapts to memory, and micro-batches are the batches
            self._ceiling = self.logical.nominal_rows * window.longest_row
            return window.whole_batches()
        sorts = window.can_pool and (isinstance(cap, int) or (cap == "auto" and (window.is_uneven or self._was_uneven)))
        if not sorts:
            return window.whole_batches()
        if isinstance(cap, int):
            self._ceiling = cap
        else:
            asked_tokens = window.largest_batch_tokens
            self._ceiling = splitting.auto_cap(window.longest_row, self.busy_tokens, asked_tokens * self._growth)
            if self._ceiling > max(asked_tokens, window.longest_row):
                room = self._fitting_tokens(window.longest_row, is_calm=False)
                self._ceiling = max(asked_tokens, window.longest_row, min(self._ceiling, room or 0))
        bounds = [bound for bound in (settings.max_batch_size, window.most_rows) if bound is not None]
        most = max(min(bounds), settings.min_batch_size) if bounds else None
        return window.pooled(self._cap, most, settings.min_batch_size)

    @property
    def _growth(self) -> int:
        """How many times the batch that the user asked for a micro-batch may hold.

        0 in the first step, in which the longest rows show their cost, then 1, and twice as many in each further step,
        because memory use has stayed below half by then. Starts over after running out of memory and on another device.
        """
        if not self.grows or self.gauge is None:
            return 1
        learned = self.statistics.windows + LEARNING_WINDOWS - self._learning_until
        return 2 ** min(learned, MOST_DOUBLINGS) // 2

    @property
    def _was_uneven(self) -> bool:
        """Whether rows were uneven so far. A window of rows that have similar lengths by chance is then cut as well:
        whole, it would be the highest peak of the training, which nothing has planned for."""
        padding = self.statistics.stock_tokens - self.statistics.real_tokens
        return padding > LEAST_PADDING * self.statistics.stock_tokens

    @property
    def _cap(self) -> int:
        return control.applied_cap(self.state, self._ceiling, self._floor)

    @property
    def _floor(self) -> int:
        """Padded tokens of the smallest micro-batch of the longest rows, or of a whole batch if that is smaller."""
        return min(self.settings.min_batch_size * self._window.longest_row, self._ceiling)

    def end(self, done: Sequence[tuple[MicroBatch, torch.Tensor]], all_reduce_max: AllReduceMax) -> None:
        """Update the statistics and decide the next cap. ``all_reduce_max``: element-wise maximum over ranks."""
        window, statistics = self._window, self.statistics
        statistics.windows += 1
        statistics.chunks += len(done)
        statistics.real_tokens += window.real_tokens
        statistics.stock_tokens += window.padded_tokens
        counted = [micro_batch for micro_batch, _ in done if micro_batch.rows]  # the others have no known tokens
        statistics.processed_tokens += sum(map(self._processed, counted))
        self._last_window = {"chunks": len(done)}
        if counted:
            self._last_window["tokens_per_chunk"] = max(micro_batch.tokens for micro_batch in counted)
            self._last_window["rows_per_chunk"] = max(len(micro_batch.rows) for micro_batch in counted)
        if self.gauge is None:
            return
        was, pressure, reason = self.state.cap_tokens, self.state.pressure, None
        if not self._rests:
            decision = self._decision(done)
            self.state, pressure, reason = decision.state, decision.pressure, decision.reason
        smallest = -all_reduce_max([-control.cap_to_share(self.state)])[0]
        self.state = control.with_shared_cap(self.state, smallest)
        if self.logical is not None:
            rows = min(self.logical.nominal_rows, max(self._cap // window.longest_row, self.settings.min_batch_size))
            self.logical.rows = -all_reduce_max([-rows])[0]
        if self.state.cap_tokens != was:
            self._predicted_least = math.inf
            self._note(reason or "another rank has less memory", self._last_reading, pressure)
        if not self._rests:
            self.gauge.reset()
            self._peak_fraction = 0.0

    def _decision(self, done: Sequence[tuple[MicroBatch, torch.Tensor]]) -> control.Decision:
        """Decide from the memory of this window, and collect garbage if the decision asks for it."""
        reading = self._read_gauge()
        seen = control.MemoryMeasurement(
            step=self.step,
            limit_bytes=reading.limit_bytes,
            used_bytes=(self._base if reading.limit_name == self._base.limit_name else reading).used_bytes,
            peak_bytes=round(self._peak_fraction * reading.limit_bytes),
            ceiling_tokens=self._ceiling,
            floor_tokens=self._floor,
            longest_row=self._window.longest_row,
            largest_micro_batch_tokens=max((micro_batch.tokens for micro_batch, _ in done), default=1),
        )
        decision = control.decide(self.config, self.state, seen)
        if decision.collect and self.step - self._collected_step >= STEPS_BETWEEN_COLLECTIONS:
            self._collected_step = self.step
            free_memory()
        return decision

    def stepped(self) -> None:
        """Read memory after the optimizer's step, which can be the highest peak of all."""
        if self.gauge is not None and not self._rests:
            self._read_gauge()

    @property
    def _may_rest(self) -> bool:
        """Whether the last reading is still valid: memory was never short, and ``good_for_s`` has not passed."""
        state = self.state
        is_calm = state.pressure == "low" and state.cap_tokens is None and state.failed_tokens is None
        if not is_calm or self.gauge is None or self._is_learning or self._before is None:
            return False
        return time.monotonic() - self._read_at_s < self.gauge.good_for_s

    def end_rest(self) -> None:
        """Record the peak before work that is not a step (an evaluation, a save), and read again in the next step."""
        if self._rests:
            self._read_gauge()
            self.gauge.reset()
            self._rests = False
        self._read_at_s = -math.inf

    # -- called by attempts.run ----------------------------------------------------------------------------------------

    def fit(self, micro_batch: MicroBatch) -> Sequence[MicroBatch]:
        """Return [micro_batch], or smaller micro-batches if it would not fit."""
        if self._window.uncuttable is not None:
            return [micro_batch]
        limit = self._cap
        room = self._predicted_limit(micro_batch)
        if room is not None and room < min(limit, micro_batch.tokens) and not self._fits_at_upper_bound(micro_batch):
            limit = min(limit, max(room, self._floor))
            self._note_prediction(micro_batch, limit)
        return self._cut_to(micro_batch, limit)

    def _fits_at_upper_bound(self, micro_batch: MicroBatch) -> bool:
        """Return whether a micro-batch that is too large for a prediction fits even with the most that it can take."""
        cost, shape = self.state.cost, (micro_batch.tokens, micro_batch.quadratic)
        if self.state.failed_tokens is not None or cost.predict(*shape) is not None:
            return False
        room_bytes = self._room_bytes(self.state.cap_tokens is None)
        return cost.upper_bound_bytes(*shape) * (1 + self.config.margin) <= room_bytes

    def bounded(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches as ``fit`` will cut them, except for cuts that depend on memory at that time."""
        return [part for micro_batch in micro_batches for part in self._cut_to(micro_batch, self._cap)]

    def _cut_to(self, micro_batch: MicroBatch, limit: int) -> Sequence[MicroBatch]:
        # If rows affect each other, only short memory may cut them: max_batch_size would change what is trained.
        most = self.settings.max_batch_size if self._window.can_pool else None
        if micro_batch.tokens <= limit and (most is None or len(micro_batch.rows) <= most):
            return [micro_batch]
        return self._window.split(micro_batch, limit, most, self.settings.min_batch_size)

    def _note_prediction(self, micro_batch: MicroBatch, limit: int) -> None:
        """Report a prediction once for each lower limit, because tight memory makes one in every window."""
        self.statistics.predicted += 1
        if limit < min(micro_batch.tokens, 0.9 * self._predicted_least):
            self._predicted_least = limit
            is_measured = self.state.cost.predict(micro_batch.tokens, micro_batch.quadratic) is not None
            what = "is predicted to" if is_measured else "is much larger than any micro-batch that ran, and may"
            reason = f"{self._size(micro_batch)} {what} use part of the headroom"
            self._note(reason, self._before, self.state.pressure, tokens=limit)

    def _predicted_limit(self, micro_batch: MicroBatch) -> Optional[int]:
        # Pressure is decided at the end of a step; until then, cut only what would come near the limit itself.
        return self._fitting_tokens(micro_batch.length, is_calm=self.state.cap_tokens is None)

    def _fitting_tokens(self, length: int, is_calm: bool) -> Optional[int]:
        """Return how many tokens of rows of ``length`` are predicted to fit now; None if the cost is not known yet.
        ``is_calm``: they may use the headroom."""
        if self.gauge is None or self._before is None:
            return None
        return control.fitting_tokens(self.config, self.state, self._room_bytes(is_calm), length)

    def _room_bytes(self, is_calm: bool) -> float:
        limit = self._before.limit_bytes
        keep_free = self.config.gc_threshold_of(limit) if is_calm else self.config.free_bytes_wanted(limit)
        return limit - keep_free - self._base.used_bytes - self._growth_bytes

    def before(self, micro_batch: MicroBatch) -> None:
        self._attempts += 1
        self._measures = self._is_learning or (self.gauge is not None and self._is_worth_measuring(micro_batch))
        if self._measures:
            self._read_gauge()
            self.gauge.reset(exact=True)
            self._before = self.gauge.read()

    def _is_worth_measuring(self, micro_batch: MicroBatch) -> bool:
        """Return whether to measure a micro-batch after the first windows: it is much larger than any that ran, or
        sizes cannot grow because their cost is unknown. Larger ones only once: with a shared prefix, the model learns
        from the fewer tokens that the layers saw."""
        cost, shape = self.state.cost, (micro_batch.tokens, micro_batch.quadratic)
        if cost.fitted:
            return cost.is_worth_measuring(*shape) and any(map(operator.gt, shape, self._measured_up_to))
        return self.grows and self._planned > 1 and self._window.is_uneven

    def after(self, micro_batch: MicroBatch) -> None:
        if not self._measures:
            return
        reading, is_first = self._read_gauge(), self._attempts == 1
        if is_first:  # the first one also allocates the gradients
            self._growth_bytes = min(self.gradient_bytes, max(0, reading.own_bytes - self._before.own_bytes))
        if not is_first or self._planned == 1:
            shape = micro_batch.tokens, micro_batch.quadratic
            self._measured_up_to = tuple(map(max, shape, self._measured_up_to))
            cost = reading.own_peak_bytes - self._before.own_bytes - (self._growth_bytes if is_first else 0)
            self.state = control.with_observation(
                self.state, self._processed(micro_batch), micro_batch.quadratic, max(0, cost)
            )

    def record_processed_tokens(self, micro_batch: MicroBatch, tokens: int) -> None:
        """Record the ``tokens`` that layers saw of a micro-batch: a shared prefix once, and a tail that fills it up."""
        self._processed_tokens[micro_batch.rows] = tokens

    def _processed(self, micro_batch: MicroBatch) -> int:
        return self._processed_tokens.get(micro_batch.rows, micro_batch.tokens)

    @property
    def _is_learning(self) -> bool:
        return self.gauge is not None and self.statistics.windows < self._learning_until

    def _read_gauge(self) -> MemoryReading:
        """Read the gauge, and keep the peak of the step across the resets between its micro-batches."""
        reading, self._read_at_s = self.gauge.read(), time.monotonic()
        # As a fraction, because the tightest limit on a CPU may change between readings.
        self._peak_fraction = max(self._peak_fraction, reading.peak_bytes / reading.limit_bytes)
        self._last_reading, self._logged_peak_bytes = reading, max(self._logged_peak_bytes, reading.peak_bytes)
        if self._before is not None:  # otherwise the peak comes from loading the model
            self.statistics.peak_bytes = max(self.statistics.peak_bytes, reading.own_peak_bytes)
        return reading

    def failed(self, micro_batch: MicroBatch, caught: CatchOutOfMemory) -> Sequence[MicroBatch]:
        """Return smaller micro-batches of the same rows. Raises OutOfMemory if they cannot be cut."""
        settings, reading = self.settings, self._read_gauge()
        wanted = f" ({format_bytes(caught.wanted_bytes)} wanted)" if caught.wanted_bytes else ""
        if self._rests:  # nothing was read before this step, so take what is in use now, after freeing
            self._rests = False
            self._before = self._base = reading
        self.statistics.out_of_memory += 1
        self.local_failures += 1
        self._learning_until = self.statistics.windows + LEARNING_WINDOWS
        self.statistics.failed_tokens += micro_batch.tokens
        is_whole = not self._window.can_pool or self._window.uncuttable is not None
        if is_whole and micro_batch not in self._retried:
            # Parts would give another gradient or none, so first retry it unchanged, now that memory has been freed.
            self._retried.add(micro_batch)
            reason = f"out of memory at {self._size(micro_batch)}{wanted}; retrying it unchanged, after freeing memory"
            self._write_row(reason, reading, "critical", micro_batch.tokens)
            logger.warning("step %d: %s", self.step, reason)
            return [micro_batch]
        floor, used_bytes = min(self._floor, micro_batch.tokens), self._base.used_bytes
        self.state = control.after_oom(
            self.config, self.state, micro_batch.tokens, floor, reading.limit_bytes, used_bytes, micro_batch.length
        )
        smaller = self._window.split(micro_batch, self._cap, settings.max_batch_size, settings.min_batch_size)
        if smaller == [micro_batch]:
            if micro_batch in self._retried:
                # The cap never falls below the longest row of all, but these rows together may be shorter than it.
                most, fewest = settings.max_batch_size, settings.min_batch_size
                smaller = self._window.split(micro_batch, micro_batch.length, most, fewest)
                if smaller == [micro_batch]:
                    raise OutOfMemory(self._message_of_failure(micro_batch, caught, reading))
            self._retried.add(micro_batch)  # retry it unchanged, because memory has been freed since it failed
        reason = (
            f"out of memory at {self._size(micro_batch)}{wanted}; retrying as "
            f"{len(smaller)} x {self._size(smaller[-1])}"
        )
        self._note(reason, reading, "critical")
        return smaller

    def _message_of_failure(self, micro_batch: MicroBatch, caught: CatchOutOfMemory, reading: MemoryReading) -> str:
        names = ", ".join(self._window.name_of(row) for row in micro_batch.rows[:3]) or WITHOUT_ROWS
        more = len(micro_batch.rows) - 3
        names += f" and {more} more row{'s' if more > 1 else ''}" if more > 0 else ""
        names += f" ({micro_batch.length} tokens)" if self.has_length else ""
        problem = "does not fit in memory even alone" if len(micro_batch.rows) < 2 else "do not fit in memory together"
        obstacle = self._window.batches[micro_batch.batch].obstacle or self._window.uncuttable
        wanted = f", {format_bytes(caught.wanted_bytes)} wanted" if caught.wanted_bytes else ""
        is_kept = len(micro_batch.rows) > 1 and obstacle is None
        is_setting = self.settings.min_batch_size >= self._window.fewest_rows
        keeper = "min_batch_size" if is_setting else "BatchNorm, which has no statistics of one row,"
        fewer = (
            "per_device_train_batch_size (and raise gradient_accumulation_steps by the same factor), "
            if obstacle
            else ""
        )
        return (
            f"step {self.step}: {names} {problem}{wanted}; "
            f"{format_bytes(reading.used_bytes)} of {format_bytes(reading.limit_bytes)} were in use before"
            + (f"; it could not be cut: {obstacle}" if obstacle else "")
            + (f"; {keeper} keeps {len(micro_batch.rows)} rows together" if is_kept else "")
            + f". Lower {fewer}block_size, use gradient checkpointing (activation_checkpointing: true), LoRA or a "
            f"smaller model. The failed allocation said: {caught.text}"
        )

    # -- reports -------------------------------------------------------------------------------------------------------

    def amount(self, tokens: int) -> str:
        return f"{tokens:,} tokens" if self.has_length else count_text(tokens, "row")

    def _size(self, micro_batch: MicroBatch) -> str:
        rows = count_text(len(micro_batch.rows), "row") if micro_batch.rows else WITHOUT_ROWS
        if not self.has_length or not micro_batch.rows:
            return rows
        is_even = micro_batch.tokens == len(micro_batch.rows) * micro_batch.length
        return f"{rows} x {micro_batch.length}" if is_even else f"{rows} of {micro_batch.tokens} tokens"

    def _note(self, reason: str, reading: MemoryReading, pressure: str, tokens: Optional[int] = None) -> None:
        """Write a row of the history and a line of the log. ``tokens``: the largest micro-batch from now on, if not the
        cap."""
        if self._window.uncuttable is not None:
            self._warn_about_whole_batches(reason, self._window.uncuttable)
            return
        tokens = self._cap if tokens is None else tokens
        if not self._window.can_pool:
            reason = f"{reason}; rows affect each other, so the parts do not give the gradient of the whole batch"
        self.statistics.changes += 1
        rows_per_chunk = self._write_row(reason, reading, pressure, tokens)
        logger.warning(
            "step %d: micro-batches of at most %s from now on: %s; the optimizer still sees %d rows of this device per "
            "step",
            self.step,
            f"{tokens} tokens ({rows_per_chunk} of the longest rows)" if self.has_length else count_text(tokens, "row"),
            reason,
            sum(batch.rows for batch in self._window.batches),
        )

    def _write_row(self, reason: str, reading: MemoryReading, pressure: str, tokens: int) -> int:
        """Write a row of the history, and return how many of the longest rows are in a micro-batch of ``tokens``."""
        rows_per_chunk = max(1, tokens // max(1, self._window.longest_row))
        self.on_row(
            {
                "step": self.step,
                "rows_per_chunk": rows_per_chunk,
                "tokens_per_chunk": tokens,
                "used_bytes": reading.used_bytes,
                "peak_bytes": round(max(self._peak_fraction * reading.limit_bytes, reading.peak_bytes)),
                "limit_bytes": reading.limit_bytes,
                "pressure": pressure,
                "reason": reason,
            }
        )
        return rows_per_chunk

    def _warn_about_whole_batches(self, reason: str, uncuttable: str) -> None:
        """Warn, once per reason why batches run whole, that memory is short."""
        if uncuttable not in self._told_uncuttable:
            self._told_uncuttable.add(uncuttable)
            logger.warning(
                "step %d: %s, but batches run whole (%s); if memory runs out, lower per_device_train_batch_size and "
                "raise gradient_accumulation_steps by the same factor",
                self.step,
                reason,
                uncuttable,
            )

    def scalars(self) -> dict[str, float]:
        """Return values for a log row: the largest micro-batch of the last window, all out-of-memory errors so far, the
        memory in use now and the most since the last call. Without a gauge there are no bytes."""
        self.end_rest()
        values: dict[str, float] = {**self._last_window, "out_of_memory": self.statistics.out_of_memory}
        if self._last_reading is not None:
            used, limit = self._last_reading.used_bytes, self._last_reading.limit_bytes
            values |= {"used_bytes": used, "peak_bytes": max(self._logged_peak_bytes, used), "limit_bytes": limit}
        self._logged_peak_bytes = 0
        return {f"memory/{name}": value for name, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": asdict(self.settings),
            "state": self.state.to_dict(),
            "books": asdict(self.statistics),
            "learning_until": self._learning_until,
            "device": device_name(self._device),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.statistics = MemoryStatistics(**saved["books"])
        device = device_name(self._device)
        if saved.get("device", device) == device:
            self.state = control.SizerState.from_dict(saved["state"])
            self._learning_until = saved["learning_until"]
        else:  # what fitted on another device, and its cost, do not apply here
            self._first_window = self.statistics.windows
            self._learning_until = self._first_window + LEARNING_WINDOWS

    def forget_window(self) -> None:
        """Drop the batches of the last window."""
        self._window = None


def sizer_config_of(settings: MemorySettings) -> control.SizerConfig:
    """Return the settings in the form that the controller's arithmetic uses."""

    def in_bytes(gib: Optional[float]) -> Optional[int]:
        return None if gib is None else round(gib * 2**30)

    share = settings.headroom_share
    return control.SizerConfig(
        **{"headroom_bytes": in_bytes(settings.target_headroom_gb)} if share is None else {"headroom_share": share},
        gc_threshold_bytes=in_bytes(settings.gc_threshold_gb),
        kp=settings.pid_kp,
        ki=settings.pid_ki,
        kd=settings.pid_kd,
    )
