"""Find the rows that cause a spike: those with a gradient far larger than that of the other rows in the step.

Every row of the undone step runs once more, forward and backward, on its own rank; the norms are compared over all
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any, Optional

import torch
from accelerate.utils import gather_object
from transformers import Trainer

from scu_trainer.data.numbered import SAMPLE_INDEX
from scu_trainer.train.loops.guard.first_nonfinite import NonFinitePlace
from scu_trainer.train.loops.guard.parts import (
    SHARDED,
    RowSubset,
    describe_rerun_failure,
    loss_of,
    row_names,
    step_parts,
    unchanged,
)
from scu_trainer.train.step.distributed.sharded import is_sharded
from scu_trainer.train.step.recovery.memory import free_memory

FAR = 3.0
"""Multiple of the median of the step's rows from which a gradient stands out."""

MOST_RUNS = 256
"""Maximum number of parts of a step that run separately; in larger steps a part has several rows, all named."""


@dataclass(frozen=True)
class _PartGradient:
    """``norm``: of the gradient of this part. ``samples``: the number of its row; () if it has none, or the part has
    several rows."""

    norm: float
    names: tuple[str, ...]
    samples: tuple[int, ...]


def find_outlier_rows(
    trainer: Trainer, batches: Sequence[Any], num_items: Any
) -> tuple[NonFinitePlace, tuple[int, ...]]:
    """Return (the rows as messages name them, their sample numbers if known), the same on all ranks.

    ``batches``: this rank's accumulation batches. ``num_items``: the divisor of their losses. If the rows cannot run
    again, ``reason`` says why.
    """
    if is_sharded(trainer):
        return NonFinitePlace(reason=SHARDED), ()
    measured, reason = _measure(trainer, batches, num_items)
    if trainer.accelerator.num_processes > 1:
        found = gather_object([(trainer.accelerator.process_index, measured, reason)])
        measured = [
            _PartGradient(part.norm, tuple(f"{name} of rank {rank}" for name in part.names), part.samples)
            for rank, parts, _ in found
            for part in parts
        ]
        reason = next((why for _, _, why in found if why), None)
    if reason is not None or not measured:
        return NonFinitePlace(reason=reason or "the step had no rows"), ()
    return _pick_far_parts(measured)


def _measure(trainer: Trainer, batches: Sequence[Any], num_items: Any) -> tuple[list[_PartGradient], Optional[str]]:
    """Return the gradient norms of all parts on this rank, and why there are none if running them failed."""
    weights = [p for p in trainer.model.parameters() if p.requires_grad]
    measured, reason = [], None
    with unchanged(trainer):
        try:
            for part in step_parts(trainer, batches, MOST_RUNS):
                names = row_names(trainer, part.whole, part.batch, part.rows)
                measured.append(_PartGradient(_gradient_norm(trainer, part, num_items, weights), names, _samples(part)))
        except Exception as error:  # the model may fail in any way on a single row, but only the undone step matters
            reason = describe_rerun_failure(error)
    free_memory(trainer.args.device)
    return measured, reason


def _gradient_norm(trainer: Trainer, part: RowSubset, num_items: Any, weights: Sequence[torch.Tensor]) -> float:
    with torch.enable_grad():
        loss = loss_of(trainer, part, num_items)
        # Not into .grad, which would trigger the reduction of gradients over ranks.
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    return float(torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None]))


def _samples(part: RowSubset) -> tuple[int, ...]:
    numbers = part.whole.get(SAMPLE_INDEX)
    return tuple(int(numbers[row]) for row in part.rows) if numbers is not None and len(part.rows) == 1 else ()


def _pick_far_parts(measured: Sequence[_PartGradient]) -> tuple[NonFinitePlace, tuple[int, ...]]:
    if len(measured) == 1:
        (part,) = measured
        if len(part.names) == 1:
            return NonFinitePlace("it has no other row", part.names), part.samples
        return NonFinitePlace("its rows affect each other, so none can be checked alone", part.names), ()
    usual = median_low(part.norm for part in measured)
    far = sorted((part for part in measured if part.norm > FAR * usual), key=lambda part: -part.norm)
    if not far:
        return NonFinitePlace(reason="no row has a gradient that stands out from the others"), ()
    place = f"the gradient of a single row is up to {far[0].norm / max(usual, 1e-30):.3g} times the usual one"
    names = tuple(name for part in far for name in part.names)
    return NonFinitePlace(place, names), tuple(sample for part in far for sample in part.samples if sample >= 0)
