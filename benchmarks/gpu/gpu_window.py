"""The measurements of one contender on one device: steps between two synchronizations, peaks, padding, host syncs."""

from __future__ import annotations

import time
import warnings
from typing import Any, Optional
from unittest.mock import patch

import torch

from scu_trainer.train.step.recovery.memory import free_memory

WARM_UP_STEPS = 4
"""Unmeasured steps: they choose kernels, create optimizer state, and measure micro-batches one by one."""
EXTRA_STEPS = 2
"""Steps after the measured ones, for work that would cost time: host waits are counted in the first one, and after the
second one training ends and waits for its statistics."""
SYNC = "synchronizing CUDA operation"


class Window:
    """Replaces turns: ``steps`` optimizer steps after the warm-up, with synchronization only before and after them.

    ``seconds``: of these steps. ``processed``: the tokens that the model processed in them, including padding.
    ``syncs``: how often the host waited for the device in one extra step; None without CUDA.
    """

    def __init__(self, device: str, steps: int) -> None:
        self.device, self.peaks = torch.device(device), Peaks(device)
        self._last = WARM_UP_STEPS + steps
        self._steps, self._begun_s = 0, 0.0
        self._is_open = False
        self._models: list[torch.nn.Module] = []
        self._syncs = _Syncs()
        self.seconds, self.processed = 0.0, 0

    @property
    def syncs(self) -> Optional[int]:
        return self._syncs.count

    def watch(self, model: torch.nn.Module) -> torch.nn.Module:
        """Count the tokens that enter ``model`` from now on, and return it."""
        model.get_input_embeddings().register_forward_pre_hook(self._entered)
        self._models.append(model)
        return model

    def _entered(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if self._is_open:
            self.processed += inputs[0].numel()

    def begin(self) -> None:
        """Start counting, after everything is set up."""
        for model in self._models:
            restore_adapters(model)
        free_memory(self.device)
        self.peaks.start()

    def step(self) -> None:
        self._steps += 1
        if self._steps == WARM_UP_STEPS:
            self._wait()
            self._begun_s, self._is_open = time.perf_counter(), True
        elif self._steps == self._last:
            self._wait()
            self.seconds, self._is_open = time.perf_counter() - self._begun_s, False
            if self.device.type == "cuda":
                self._syncs.start()
        elif self._steps == self._last + 1:
            self._syncs.stop()

    def end(self) -> None:
        """Check that training lasted long enough. Raises RuntimeError if it ended before the last measured step."""
        self._syncs.stop()
        self.peaks.read()
        if self._steps < self._last:
            raise RuntimeError(f"the training ended after {self._steps + 1} steps, before the last measured one")

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def restore_adapters(model: torch.nn.Module) -> None:
    """Convert adapters back to float32, which all contenders use: TRL makes those on a quantized base bfloat16."""
    for name, weight in model.named_parameters():
        if weight.requires_grad and "lora_" in name:
            weight.data = weight.data.float()


class Peaks:
    """The highest memory over all resets of torch's peak statistics, which the memory loop resets during training.

    ``allocated``, ``reserved``: in bytes; None without CUDA. Resets are noticed only inside this context manager.
    """

    def __init__(self, device: str) -> None:
        self._is_cuda = torch.device(device).type == "cuda"
        self.allocated: Optional[int] = None
        self.reserved: Optional[int] = None
        self._restart = torch.cuda.reset_peak_memory_stats
        self._patch = patch.object(torch.cuda, "reset_peak_memory_stats", self._noticed)

    def __enter__(self) -> Peaks:
        self._patch.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._patch.stop()

    def start(self) -> None:
        """Reset the peaks."""
        if self._is_cuda:
            self._restart()
            self.allocated = self.reserved = 0

    def read(self) -> None:
        if self.allocated is not None:
            self.allocated = max(self.allocated, torch.cuda.max_memory_allocated())
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())

    def _noticed(self, *arguments: Any) -> None:
        self.read()
        self._restart(*arguments)


class _Syncs:
    """Counts torch's warnings about waits of the host. Waits that torch does not know of are not counted."""

    def __init__(self) -> None:
        self.count: Optional[int] = None
        self._warnings = warnings.catch_warnings(record=True)
        self._seen: Optional[list[Any]] = None

    def start(self) -> None:
        self._seen = self._warnings.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

    def stop(self) -> None:
        if self._seen is None:
            return
        torch.cuda.set_sync_debug_mode("default")
        self.count = sum(SYNC in str(one.message) for one in self._seen)
        self._warnings.__exit__(None, None, None)
        self._seen = None
