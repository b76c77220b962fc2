"""The gradients of one optimizer step: micro-batches that run out of memory are undone, cut and run again.

    for each micro-batch:   cut it first if it is above the cap or predicted not to fit
                            snapshot (random states, buffers, gradients) -> forward, backward
                            out of memory? restore the snapshot; if gradients were touched, run the micro-batches of
                            this window again

This module does not know the Trainer: ``attempt`` runs one micro-batch, ``sizes`` decides how large one may be.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from scu_trainer.train.step.batches.window import MicroBatch
from scu_trainer.train.step.micro_batch_sizer import MicroBatchSizer
from scu_trainer.train.step.recovery.memory import free_memory
from scu_trainer.train.step.recovery.second_try import CatchOutOfMemory, second_try
from scu_trainer.train.step.recovery.snapshot import ChangingBuffers, WindowSnapshot


@dataclass
class AttemptSite:
    """Where micro-batches run: what a snapshot must hold, and how to start the gradients of the window over.

    counting: returns the modules and the trainer, whose attributes may count what runs, such as the tokens that TRL
    logs.
    kept: gradients from before this window (the short last window of a stream leaves its gradients to the next epoch).
    """

    device: torch.device
    buffers: ChangingBuffers
    parameters: Sequence[nn.Parameter]
    drop_gradients: Callable[[], None]
    counting: Callable[[], tuple[Sequence[nn.Module], Any]] = lambda: ((), None)

    def __post_init__(self) -> None:
        self.devices = list({self.device, *(p.device for p in self.parameters)})
        self.kept: list[tuple[nn.Parameter, torch.Tensor]] = []

    def snapshot(self) -> WindowSnapshot:
        take = functools.partial(WindowSnapshot, self.devices, self.buffers, self.parameters, self.counting())
        return second_try(take, "a copy of the model's buffers, which are restored if memory runs out,")

    def keep_gradients(self) -> None:
        def copy_gradients() -> list[tuple[nn.Parameter, torch.Tensor]]:
            return [(p, p.grad.detach().clone()) for p in self.parameters if p.grad is not None]

        self.kept = second_try(copy_gradients, "a copy of the gradients from before this step")

    def restore(self, snapshot: WindowSnapshot, with_gradients: bool) -> None:
        """Free memory, then restore ``snapshot``; if ``with_gradients``, also the gradients from before this window."""
        if with_gradients:
            self.drop_gradients()
        free_memory()
        if with_gradients:
            second_try(self._restore_gradients, "restoring the gradients from before this step")
        second_try(snapshot.restore_surroundings, "restoring the model's buffers")

    def _restore_gradients(self) -> None:
        for parameter, gradient in self.kept:
            parameter.grad = gradient.clone()


def run(
    micro_batches: Sequence[MicroBatch],
    attempt: Callable[[MicroBatch, bool], torch.Tensor],
    sizes: MicroBatchSizer,
    place: AttemptSite,
    held: Any = None,
) -> list[tuple[MicroBatch, torch.Tensor]]:
    """Run every row once and return the micro-batches in the order in which they ran, with their losses.

    attempt: ``attempt(micro_batch, last)`` runs forward and backward of one micro-batch; ``last``: no other follows.
    Gradients add up in ``.grad``.
    held: a ``LossPath`` that checks once, after all have run, whether the losses of rows are finite, instead of after
    each. If they are not, all run again, with a check after each.

    Raises what ``attempt`` raises, except out-of-memory; OutOfMemory (from ``sizes``) for a micro-batch that fails and
    cannot be cut, with gradients, random states and buffers as they were before it.
    """
    waiting, done = deque(micro_batches), []
    window_start = place.snapshot()
    place.keep_gradients()
    snapshot: WindowSnapshot | None = window_start
    held = held if window_start.is_whole else None
    if held is not None:
        held.hold()
    while waiting:
        micro_batch = waiting.popleft()
        if not micro_batch.has_run:
            fitting = sizes.fit(micro_batch)
            if list(fitting) != [micro_batch]:
                waiting.extendleft(reversed(fitting))
                continue
        snapshot = snapshot or place.snapshot()
        sizes.before(micro_batch)
        with CatchOutOfMemory() as caught:
            loss = attempt(micro_batch, not waiting)
        if caught.text is None:
            sizes.after(micro_batch)
            done.append((micro_batch, loss))
            snapshot = None
            continue
        touched = snapshot.gradients_touched()
        place.restore(window_start if touched else snapshot, with_gradients=touched)
        rerun = _marked_as_run(done) if touched else []
        waiting.extendleft(reversed([*rerun, *sizes.failed(micro_batch, caught)]))
        if touched:
            done.clear()
            snapshot = None
    if held is None or held.settle():
        return done
    place.restore(window_start, with_gradients=True)
    return run(_marked_as_run(done), attempt, sizes, place)


def _marked_as_run(done: Sequence[tuple[MicroBatch, torch.Tensor]]) -> list[MicroBatch]:
    """Return the micro-batches of ``done``, marked so that they are not cut again."""
    return [replace(micro_batch, has_run=True) for micro_batch, _ in done]


def run_once(
    micro_batches: Sequence[MicroBatch], attempt: Callable[[MicroBatch, bool], torch.Tensor], sizes: MicroBatchSizer
) -> list[tuple[MicroBatch, torch.Tensor]]:
    """Like ``run``, but without recovery: memory is measured, and an out-of-memory error is raised."""
    done = []
    for number, micro_batch in enumerate(micro_batches, start=1):
        sizes.before(micro_batch)
        done.append((micro_batch, attempt(micro_batch, number == len(micro_batches))))
        sizes.after(micro_batch)
    return done
