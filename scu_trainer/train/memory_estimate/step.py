"""Training steps on tensors without content: what they hold at their highest moment, by part."""

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
from scu_trainer.train.loss.rows.kernels import chunks_as_on_card
from scu_trainer.train.loss.rows.model_loss import head_of, headless, opened
from scu_trainer.train.memory_estimate.compiled import CompiledProducts
from scu_trainer.train.memory_estimate.events import GRADIENTS, WEIGHTS, Events
from scu_trainer.train.memory_estimate.layers import marked
from scu_trainer.train.memory_estimate.live import LiveBytes
from scu_trainer.train.step.recovery.snapshot import replaced

LossKind = Literal["headless", "opened", "returned"]
"""How the loss is taken, see ``loss_path.py``."""

ALSO_LOGGED = logging.getLogger("torch._subclasses.fake_tensor")
"""Where torch logs a traceback of what cannot run on tensors without content, beside raising it."""

PASSES = 3
"""Forward and backward passes until the heap has about the size that it will keep."""


@dataclass(frozen=True)
class EstimatedStep:
    """What is traced. ``mode``: of the tensors without content. ``batch(rows, length)``: what the model gets, with
    labels. ``autocast``: the type of half precision arithmetic, if any. ``card_bytes``: what may be used of the card
    for whose tensors those of the CPU stand; None where a CPU trains."""

    model: nn.Module
    mode: FakeTensorMode
    batch: Callable[[int, int], Mapping[str, Any]]
    loss: LossKind
    autocast: Optional[torch.dtype]
    card_bytes: Optional[int] = None

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
    """Bytes by part (see events.py) at the highest moment of a pass; ``events``: of the first one.
    ``compiled_bytes``: what every further number of tokens adds where products are compiled. ``heap_bytes``: to which
    the C library's heap grows for all but the weights; None where it was not asked, or has no addresses for so much."""

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
    """Forward and backward over ``rows`` rows of ``length``.

    Args:
        after_others: an earlier micro-batch of the same optimizer step has left its gradients.
        kept: sizes of blocks that stay from the first optimizer step on, where the heap is to be looked at.
        stepping: sizes of blocks that the optimizer's step takes beside them for a moment.
        layers: whose borders are marked among the events.

    Raises whatever a model raises that makes tensors whose shape depends on content.
    """
    with contextlib.nullcontext() if kept is None else UntouchedHeap() as heap:
        products = CompiledProducts(rows * length)
        live = LiveBytes(getattr(head_of(subject.model), "out_features", None), heap, products)
        live.count(tensors_of(subject.model), WEIGHTS)
        with subject.mode, _trained(subject, live, after_others), replaced(ALSO_LOGGED, "disabled", True):
            events = live.events
            with marked(layers, events):
                _pass(subject, subject.inputs(rows, length), live)
            for index, size_bytes in enumerate(kept or ()):
                heap.take(("kept", index), size_bytes)
            if heap is not None:
                _step(heap, stepping)
            if not after_others:
                _drop_gradients(subject.trained)
            if heap is not None:
                heap.repeat(PASSES - 1)
        known = heap is not None and not heap.failed_bytes
        return Traced(live.peak, events, products.size_bytes, heap.peak_bytes if known else None)


@contextlib.contextmanager
def _trained(subject: EstimatedStep, live: LiveBytes, after_others: bool) -> Iterator[None]:
    """Inside, gradients are counted as gradients; afterwards they are gone."""
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


def _step(heap: UntouchedHeap, blocks: Sequence[int]) -> None:
    """The optimizer's, while gradients are there."""
    for index, size_bytes in enumerate(blocks):
        heap.take(("stepping", index), size_bytes)
    for index in range(len(blocks)):
        heap.give(("stepping", index))


def _drop_gradients(weights: Sequence[nn.Parameter]) -> None:
    for weight in weights:
        weight.grad = None


def _pass(subject: EstimatedStep, inputs: Mapping[str, Any], live: LiveBytes) -> None:
    with live, chunks_as_on_card(subject.card_bytes), _loss_of(subject):
        with torch.autocast("cpu", subject.autocast, enabled=subject.autocast is not None):
            loss = subject.model(**inputs)["loss"]
        loss.backward()


def _loss_of(subject: EstimatedStep) -> contextlib.AbstractContextManager:
    if subject.loss == "returned":
        return contextlib.nullcontext()
    take = headless if subject.loss == "headless" else opened
    return take(subject.model, None, lambda losses: None)
