"""Memory as a loop: connects the engine that runs windows in micro-batches to a training, and reports what it did."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, Optional

import torch

from scu_trainer.run_files import format_bytes
from scu_trainer.settings.base import require
from scu_trainer.train.loop import Loop
from scu_trainer.train.step.micro_batches import MicroBatchStep
from scu_trainer.train.step.recovery.memory import CpuGauge, Gauge, free_memory

logger = logging.getLogger("scu_trainer")

LOOKS_EVERY_STEPS = 20
"""Collecting takes some tenths of a second, and memory that is still referenced is not worth trying at every step."""

FULL_SHARE = 0.92
"""Default threshold, as a share of main memory or of the container's limit."""


class HostMemory:
    """Collects garbage when main memory is nearly full, before other processes run short. ``threshold_gb``: GiB in use,
    by all processes, from which on it collects; None: ``FULL_SHARE`` of the limit."""

    def __init__(
        self,
        threshold_gb: Optional[float],
        gauge: Optional[Gauge] = None,
        collect: Callable[[torch.device], int] = free_memory,
    ) -> None:
        self._threshold_gb, self._gauge, self._collect = threshold_gb, gauge or CpuGauge(), collect
        self.collections = 0

    def collect_if_full(self, step: int) -> None:
        """Collect garbage after optimizer step ``step`` if memory is full; checked every LOOKS_EVERY_STEPS steps."""
        if step % LOOKS_EVERY_STEPS:
            return
        reading = self._gauge.read()
        share = FULL_SHARE * reading.limit_bytes
        threshold_bytes = share if self._threshold_gb is None else self._threshold_gb * 2**30
        if reading.used_bytes < threshold_bytes:
            return
        self.collections += 1
        freed_bytes = self._collect(torch.device("cpu"))
        logger.warning(
            "step %d: %s of main memory are in use, more than the threshold of %s; this run freed %s by garbage "
            "collection",
            step,
            format_bytes(reading.used_bytes),
            format_bytes(threshold_bytes),
            format_bytes(freed_bytes),
        )


class MemoryLoop(Loop):
    """Starts and stops the micro-batch engine with training; writes ``memory_history.json``."""

    name = "memory"
    state_file = "memory_state.json"
    history_file = "memory_history.json"

    def __init__(self, micro_batches: MicroBatchStep) -> None:
        self.micro_batches = micro_batches
        self._window: Sequence[Any] = ()
        micro_batches.loop.on_row = self.record

    def begin(self) -> None:
        self.micro_batches.reset()
        self._host = self._host_memory()

    def end(self) -> None:
        self.micro_batches.loop.end_rest()
        self.micro_batches.finish()  # hand the optimizer back unchanged

    def on_train_begin(self, args, state, control, **kwargs):
        self.micro_batches.start()

    def batches(self, batches: Iterator[Any], count: int) -> Iterator[Any]:
        logical = self.micro_batches.loop.logical
        return batches if logical is None else iter(logical.window(batches, count))

    def on_window(self, batches: Sequence[Any], num_items: Any) -> None:
        self._window = batches
        self.micro_batches.prefetched(())

    def on_step_begin(self, args, state, control, **kwargs):
        """Use the batches of the window, unless it began within the previous step, as when gradient_accumulation_steps
        changes. Then its batches belong to two steps and run one by one, as in the stock loop."""
        self.micro_batches.prefetched(self._window)

    def on_batch(self, inputs: Any, num_items: Any) -> None:
        self._window = ()

    @property
    def rate_factor(self) -> float:
        logical = self.micro_batches.loop.logical
        return 1.0 if logical is None else logical.factor

    def on_step_end(self, args, state, control, **kwargs):
        self.micro_batches.loop.stepped()
        if self._host is not None:
            self._host.collect_if_full(state.global_step)

    def evaluation(self) -> AbstractContextManager:
        self.micro_batches.loop.end_rest()
        return super().evaluation()

    def before_save(self) -> None:
        self.micro_batches.loop.end_rest()

    def _host_memory(self) -> Optional[HostMemory]:
        """Return the monitor of main memory; None on a CPU, where main memory limits micro-batches anyway. Raises
        SettingsError for ``ram_threshold_gb`` there."""
        settings = self.micro_batches.settings
        if self.micro_batches.trainer.args.device.type != "cpu":
            return HostMemory(settings.ram_threshold_gb) if settings.memory_control else None
        require(
            settings.ram_threshold_gb is None,
            "ram_threshold_gb limits main memory when training on a GPU, but this run trains on the CPU, where "
            "target_headroom_gb and gc_threshold_gb apply; drop it",
        )
        return None

    def state_dict(self) -> dict[str, Any]:
        own_step = self.micro_batches.analysis.own_step
        seen = {"own_step_seen": own_step.is_seen, "own_step_deviation": own_step.deviation} if own_step.owner else {}
        return {**self.micro_batches.loop.state_dict(), "padding_free": self._is_padding_free, **seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.micro_batches.loop.load_state_dict(state)
        own_step = self.micro_batches.analysis.own_step
        if own_step.owner:
            own_step.is_seen = state.get("own_step_seen", False)
            own_step.deviation = state.get("own_step_deviation")
        path = self.micro_batches.trainer.loss_path
        if path is not None and state.get("padding_free") is False:  # if it was on, it is checked again
            path.stay_padded()

    @property
    def _is_padding_free(self) -> Optional[bool]:
        path = self.micro_batches.trainer.loss_path
        return None if path is None else path.is_padding_free

    # -- reports -------------------------------------------------------------------------------------------------------

    @property
    def notices(self) -> Sequence[str]:
        return self.micro_batches.analysis.notices

    def scalars(self) -> dict[str, float]:
        return self.micro_batches.loop.scalars()

    def figures(self) -> dict[str, Any]:
        """Return the tokens processed per real token, compared with the stock order, and what memory did to the
        micro-batches."""
        loop, statistics = self.micro_batches.loop, self.micro_batches.loop.statistics
        real = max(1, statistics.real_tokens)
        memory = {
            **asdict(statistics),
            "processed_per_real": statistics.processed_tokens / real,
            "stock_per_real": statistics.stock_tokens / real,
            "final_cap_tokens": loop.state.cap_tokens,
            "padding_free": bool(self._is_padding_free),
        }
        if self._host is not None:
            memory["host_collections"] = self._host.collections
        return {self.name: memory, "loss_analysis": self.micro_batches.analysis.figures()}

    def lines(self, figures: Mapping[str, Any]) -> list[tuple[str, str]]:
        memory, lines = figures[self.name], []
        if memory["stock_per_real"] > memory["processed_per_real"] + 0.005:
            processed, delivered = memory["processed_per_real"], memory["stock_per_real"]
            lines.append(("tokens processed per real token", f"{processed:.2f} (as delivered: {delivered:.2f})"))
        if memory["out_of_memory"] or memory["changes"]:
            cap = memory["final_cap_tokens"]
            at_the_end = "unrestricted" if cap is None else self.micro_batches.loop.amount(cap)
            lines.append(
                (
                    "memory",
                    f"{memory['changes']} changes of the micro-batch, at the end {at_the_end}; out of memory and "
                    f"recovered: {memory['out_of_memory']}",
                )
            )
        return lines
