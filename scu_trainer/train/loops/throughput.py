"""Samples and tokens per second of a training, and its model FLOPs utilization.

Model FLOPs utilization as in PaLM (arXiv:2204.02311, appendix B): the operations per second that the model needs, over
the device's peak; padding and recomputed activations are not needed operations. They are counted once, on a few rows of
the first batch, and scaled by tokens if the input is tokens, else by rows; then rows of other lengths are treated like
the counted ones. The time of evaluations and checkpoints is left out.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

from scu_trainer.train.loop import Loop
from scu_trainer.train.loops.flops import COUNTED, FlopCount, Peak, count_flops, find_peak, tokens_of
from scu_trainer.train.step.batches.rows import rows_of
from scu_trainer.train.step.costs import wait_for
from scu_trainer.train.step.distributed.sharded import is_sharded
from scu_trainer.train.step.recovery.second_try import second_try

RATES = ("samples_per_second", "seconds_per_step", "slowest_step_s", "tokens_per_second", "tflops", "mfu")


@dataclass
class Work:
    """What one rank did. ``tokens``: without padding, still on the device; None if rows are not tokens. ``slowest_s``:
    time of the slowest step; on a GPU as the host sees it."""

    seconds: float = 0.0
    rows: int = 0
    tokens: Any = None
    steps: int = 0
    slowest_s: float = 0.0

    def add(self, more: Work) -> None:
        if more.tokens is not None:  # first, because it may run out of memory and is then repeated
            self.tokens = more.tokens if self.tokens is None else self.tokens + more.tokens
        self.seconds += more.seconds
        self.rows += more.rows
        self.steps += more.steps
        self.slowest_s = max(self.slowest_s, more.slowest_s)


class Throughput(Loop):
    """Measures throughput. ``peak_tflops``: None to find the device's peak. ``counts_flops``: False to leave out the
    operations and utilization; then scu_metrics.json has no such section.

    The first step of a ``train`` call is left out, because kernels are chosen and operations counted in it.
    """

    name = "throughput"

    def __init__(self, peak_tflops: Optional[float] = None, counts_flops: bool = True) -> None:
        self._stated_tflops = peak_tflops
        self.count: Optional[FlopCount] = None
        self.peak: Optional[Peak] = None
        self.reasons: list[str] = []
        self._has_counted_flops, self._counts_flops = not counts_flops, counts_flops

    # -- events --------------------------------------------------------------------------------------------------------

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._current_step, self._since_last_log, self._whole_training = Work(), Work(), Work()
        self._is_first = True

    def on_batch(self, inputs: Any, num_items: Any) -> None:
        second_try(functools.partial(self._count, inputs, num_items), "counting the tokens of a step")

    def _count(self, inputs: Any, num_items: Any) -> None:
        model = self.trainer.model
        if not self._has_counted_flops:
            self._count_flops_once(inputs, num_items)
            self._has_counted_flops = True
        self._current_step.add(Work(rows=rows_of(model, inputs).rows, tokens=tokens_of(model, inputs, padding=False)))

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if control.should_log or control.should_evaluate or control.should_save or self._is_first:
            wait_for(args.device)  # pending work belongs to the steps and not to what follows
        if not self._is_first:
            self._current_step.seconds = self._current_step.slowest_s = time.perf_counter() - self._started_s
            self._current_step.steps = 1
            for interval in (self._since_last_log, self._whole_training):
                second_try(functools.partial(interval.add, self._current_step), "counting the tokens of a step")
        self._is_first = False
        self._start_timing()

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        self._start_timing()

    def on_save(self, args, state, control, **kwargs) -> None:
        self._start_timing()

    def _start_timing(self) -> None:
        self._current_step, self._started_s = Work(), time.perf_counter()

    def _count_flops_once(self, inputs: Any, num_items: Any) -> None:
        if is_sharded(self.trainer):
            self.reasons.append("the weights are sharded: operations are not counted")
            return
        self.count, no_count = count_flops(self.trainer, inputs, num_items)
        self.peak, no_peak = find_peak(self.trainer, self._stated_tflops)
        self.reasons += [reason for reason in (no_count, no_peak) if reason]

    # -- figures -------------------------------------------------------------------------------------------------------

    def scalars(self) -> dict[str, float]:
        """Return the rates since the last call, for the logs; empty if no step was timed."""
        figures, self._since_last_log = self._rates(self._since_last_log), Work()
        return {f"throughput/{name}": value for name, value in figures.items() if value is not None}

    def figures(self) -> dict[str, Any]:
        return {self.name: self.measured()} if self._counts_flops else {}

    def lines(self, figures: Mapping[str, Any]) -> list[tuple[str, str]]:
        found = figures.get(self.name)
        if found is None:
            return []
        if found["samples_per_second"] is None:
            return [("throughput", "not measured: a run of one step")]
        rates = f"{found['samples_per_second']:,.1f} samples per second"
        if found["tokens_per_second"] is not None:
            rates += f", {found['tokens_per_second']:,.0f} tokens per second"
        return [("throughput", rates), ("model FLOPs utilization", _utilization(found))]

    def measured(self) -> dict[str, Any]:
        """Return the rates of this ``train`` call, for scu_metrics.json, over all ranks. ``mfu``: a fraction."""
        peak, count = self.peak, self.count
        return {
            **self._rates(self._whole_training),
            "devices": self.trainer.accelerator.num_processes,
            "peak_tflops": None if peak is None else peak.tflops,
            "peak_source": None if peak is None else peak.source,
            "flops_per_sample": None if count is None else count.flops / count.rows,
            "flops_per_token": None if count is None or not count.tokens else count.flops / count.tokens,
            "counted": COUNTED,
            "notices": list(self.reasons),
        }

    def _rates(self, interval: Work) -> dict[str, Optional[float]]:
        """Return the rates of an interval, named as in ``RATES``; None for those that are unknown."""
        if not interval.seconds:
            return dict.fromkeys(RATES)
        seconds, ranks = interval.seconds, self.trainer.accelerator.num_processes
        tokens = None if interval.tokens is None else float(interval.tokens)
        tflops = None if self.count is None else self.count.of(interval.rows, tokens) / seconds / 1e12
        return {
            # 0: rows of unknown number
            "samples_per_second": interval.rows * ranks / seconds if interval.rows else None,
            "seconds_per_step": seconds / interval.steps,
            "slowest_step_s": interval.slowest_s,
            "tokens_per_second": None if tokens is None else tokens * ranks / seconds,
            "tflops": None if tflops is None else tflops * ranks,
            "mfu": None if tflops is None or self.peak is None else tflops / self.peak.tflops,
        }


def _utilization(figures: dict[str, Any]) -> str:
    if figures["tflops"] is None:
        return "; ".join(figures["notices"])
    sample = "sample" if figures["flops_per_token"] else "sample of the first batch"
    reached = f"{_in_flops(figures['tflops'])} ({figures['flops_per_sample']:.3g} operations per {sample})"
    if figures["mfu"] is None:
        return f"{reached}; {'; '.join(figures['notices'])}"
    devices = f"{figures['devices']} x " if figures["devices"] > 1 else ""
    return f"{figures['mfu']:.1%}: {reached} of {devices}{_in_flops(figures['peak_tflops'])} ({figures['peak_source']})"


def _in_flops(tflops: float) -> str:
    return f"{tflops:.4g} TFLOP/s" if tflops >= 1 else f"{1000 * tflops:.3g} GFLOP/s"
