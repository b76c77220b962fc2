"""Training steps on fake tensors, to measure their peak memory by part."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Optional

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from scu_trainer.hardware.heap import UntouchedHeap
from scu_trainer.train.loss.rows.kernels import chunks_as_on_gpu
from scu_trainer.train.loss.rows.model_loss import head_of, headless, opened
from scu_trainer.train.memory_estimate.events import GRADIENTS, WEIGHTS, Events
from scu_trainer.train.memory_estimate.layers import marked
from scu_trainer.train.memory_estimate.live import CompiledProducts, LiveBytes
from scu_trainer.train.step.recovery.snapshot import replaced

LossKind = Literal["headless", "opened", "returned"]
"""How the loss is computed, see ``loss_path.py``."""

ALSO_LOGGED = logging.getLogger("torch._subclasses.fake_tensor")
"""The logger to which torch writes a traceback of errors on fake tensors, in addition to raising them."""

PASSES = 3
"""Forward and backward passes until the heap has about its final size."""


@dataclass(frozen=True)
class EstimatedStep:
    """The model and the batches to trace. ``mode``: the mode of the fake tensors. ``batch(rows, length)``: the inputs
    of the model, with labels. ``autocast``: the type of half precision arithmetic, if any. ``usable_gpu_bytes``: usable
    memory of the GPU that the traced CPU tensors represent; None if training is on a CPU."""

    model: nn.Module
    mode: FakeTensorMode
    batch: Callable[[int, int], Mapping[str, Any]]
    loss: LossKind
    autocast: Optional[torch.dtype]
    usable_gpu_bytes: Optional[int] = None

    @property
    def trained(self) -> list[nn.Parameter]:
        return [weight for weight in self.model.parameters() if weight.requires_grad]

    def inputs(self, rows: int, length: int) -> dict[str, Any]:
        found = self.batch(rows, length).items()
        return {name: self.mode.from_tensor(value) if torch.is_tensor(value) else value for name, value in found}


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


@dataclass(frozen=True)
class Traced:
    """The result of ``trace``. ``parts``: bytes by part (see events.py) at the peak of a pass. ``events``: events of
    the first pass. ``compiled_bytes``: bytes that every further number of tokens adds if products are compiled.
    ``heap_bytes``: size to which the C library's heap grows for everything except the weights; None if it was not
    traced or has no address space for so much."""

    parts: dict[str, int]
    events: Events
    compiled_bytes: int
    heap_bytes: Optional[int] = None


def trace(
    subject: EstimatedStep,
    rows: int,
    length: int,
    *,
    after_others: bool,
    kept: Optional[Sequence[int]] = None,
    stepping: Sequence[int] = (),
    layers: Sequence[nn.Module] = (),
) -> Traced:
    """Trace forward and backward over ``rows`` rows of ``length`` tokens.

    Args:
        after_others: whether gradients of an earlier micro-batch of the same optimizer step exist.
        kept: sizes of blocks that are kept from the first optimizer step on; None if the heap is not traced.
        stepping: sizes of blocks that the optimizer step allocates temporarily.
        layers: layers for which marks are added to the events.

    Passes on the exceptions of models that create tensors with data-dependent shapes.
    """
    with contextlib.nullcontext() if kept is None else UntouchedHeap() as heap:
        products = CompiledProducts(rows * length)
        live = LiveBytes(getattr(head_of(subject.model), "out_features", None), heap, products)
        live.count(tensors_of(subject.model), WEIGHTS)
        with subject.mode, _counted_gradients(subject, live, after_others), replaced(ALSO_LOGGED, "disabled", True):
            events = live.events
            with marked(layers, events):
                _forward_and_backward(subject, subject.inputs(rows, length), live)
            for index, size_bytes in enumerate(kept or ()):
                heap.take(("kept", index), size_bytes)
            if heap is not None:
                _simulate_optimizer_step(heap, stepping)
            if not after_others:
                _drop_gradients(subject.trained)
            if heap is not None:
                heap.repeat(PASSES - 1)
        known = heap is not None and not heap.failed_bytes
        return Traced(live.peak, events, products.size_bytes, heap.peak_bytes if known else None)


@contextlib.contextmanager
def _counted_gradients(subject: EstimatedStep, live: LiveBytes, after_others: bool) -> Iterator[None]:
    """Count gradients as gradients in this context, and drop them at its end."""
    subject.model.train()
    with contextlib.ExitStack() as stack:
        stack.callback(_drop_gradients, subject.trained)
        for hook in live.hold_gradients(subject.trained):
            stack.enter_context(hook)
        if after_others:
            for weight in subject.trained:
                weight.grad = torch.empty_like(weight)
                live.count([weight.grad], GRADIENTS)
        live.forget_peak()
        yield


def _simulate_optimizer_step(heap: UntouchedHeap, blocks: Sequence[int]) -> None:
    """Allocate and free the temporary blocks of the optimizer step, while gradients exist."""
    for index, size_bytes in enumerate(blocks):
        heap.take(("stepping", index), size_bytes)
    for index in range(len(blocks)):
        heap.give(("stepping", index))


def _drop_gradients(weights: Sequence[nn.Parameter]) -> None:
    for weight in weights:
        weight.grad = None


def _forward_and_backward(subject: EstimatedStep, inputs: Mapping[str, Any], live: LiveBytes) -> None:
    with live, chunks_as_on_gpu(subject.usable_gpu_bytes), _loss_context(subject):
        with torch.autocast("cpu", subject.autocast, enabled=subject.autocast is not None):
            loss = subject.model(**inputs)["loss"]
        loss.backward()


def _loss_context(subject: EstimatedStep) -> contextlib.AbstractContextManager:
    if subject.loss == "returned":
        return contextlib.nullcontext()
    take = headless if subject.loss == "headless" else opened
    return take(subject.model, None, lambda losses: None)
