"""What is measured of one contender on one device: some steps between two waits, its peaks, its padding, its host
syncs."""

from __future__ import annotations

import time
import warnings
from typing import Any, Optional
from unittest.mock import patch

import torch

from scu_trainer.train.step.recovery.memory import free_memory

WARM_UP_STEPS = 4
"""Left out: kernels are chosen, optimizer state is made, micro-batches are measured one by one."""
EXTRA_STEPS = 2
"""After the measured ones, for what would cost time in them: waits are counted in the first of them, and the end of the
training, which waits for its statistics, comes after the second."""
SYNC = "synchronizing CUDA operation"


class Window:
    """In the place of turns: ``steps`` optimizer steps after the warm-up, with the device waited for at both ends only.

    ``seconds``: of these steps. ``processed``: tokens that entered the model in them, padding included. ``syncs``:
    how often the host waited for the device in one extra step, None off CUDA.
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
        """``model``, whose tokens are counted from here on, where they enter it."""
        model.get_input_embeddings().register_forward_pre_hook(self._entered)
        self._models.append(model)
        return model

    def _entered(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if self._is_open:
            self.processed += inputs[0].numel()

    def begin(self) -> None:
        """All is set up by now."""
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
        """The training is over. Raises RuntimeError where it was over before the last measured step."""
        self._syncs.stop()
        self.peaks.read()
        if self._steps < self._last:
            raise RuntimeError(f"the training ended after {self._steps + 1} steps, before the last measured one")

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def restore_adapters(model: torch.nn.Module) -> None:
    """TRL makes adapters over a packed base bfloat16; here they are float32 on every contender."""
    for name, weight in model.named_parameters():
        if weight.requires_grad and "lora_" in name:
            weight.data = weight.data.float()


class Peaks:
    """Highest bytes over all restarts of torch's own peaks: the memory loop restarts them as it goes.

    ``allocated``, ``reserved``: None off CUDA. A context manager: inside, restarts are noticed.
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
        """Forget what was before."""
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
    """Counts torch's warnings about waits of the host. What waits below torch is not seen."""

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
