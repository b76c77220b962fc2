"""Which rows a spike comes from: those whose own gradient is far larger than that of the others in the step.

Every row of the undone step runs once more by itself, forward and backward, on its own rank; the norms are compared
over all ranks.
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
from scu_trainer.train.loops.guard.parts import SHARDED, Part, loss_of, row_names, step_parts, unchanged, why_it_failed
from scu_trainer.train.step.distributed.sharded import is_sharded
from scu_trainer.train.step.recovery.memory import free_memory

FAR = 3.0
"""Times the median of the step's rows from which on a gradient stands out."""

MOST_RUNS = 256
"""Parts of a step that run alone; of larger steps a part is several rows, and the whole part is named."""


@dataclass(frozen=True)
class _Measured:
    """``norm``: of the gradient of this part alone. ``samples``: the number of its row; () where it has none, or the
    part is several rows."""

    norm: float
    names: tuple[str, ...]
    samples: tuple[int, ...]


def far_rows(trainer: Trainer, batches: Sequence[Any], num_items: Any) -> tuple[NonFinitePlace, tuple[int, ...]]:
    """(the rows as messages name them, their sample numbers where they are known), the same on all ranks.

    ``batches``: this rank's accumulation batches. ``num_items``: what their losses were divided by. Raises nothing of
    its own: what goes wrong while looking is in ``reason``.
    """
    if is_sharded(trainer):
        return NonFinitePlace(reason=SHARDED), ()
    measured, reason = _measured(trainer, batches, num_items)
    if trainer.accelerator.num_processes > 1:
        found = gather_object([(trainer.accelerator.process_index, measured, reason)])
        measured = [
            _Measured(one.norm, tuple(f"{name} of rank {rank}" for name in one.names), one.samples)
            for rank, parts, _ in found
            for one in parts
        ]
        reason = next((said for _, _, said in found if said), None)
    if reason is not None or not measured:
        return NonFinitePlace(reason=reason or "the step had no rows"), ()
    return _far(measured)


def _measured(trainer: Trainer, batches: Sequence[Any], num_items: Any) -> tuple[list[_Measured], Optional[str]]:
    weights = [p for p in trainer.model.parameters() if p.requires_grad]
    measured, reason = [], None
    with unchanged(trainer):
        try:
            for part in step_parts(trainer, batches, MOST_RUNS):
                names = row_names(trainer, part.whole, part.batch, part.rows)
                measured.append(_Measured(_norm(trainer, part, num_items, weights), names, _samples(part)))
        except Exception as error:  # whatever a model says to a row alone: the undone step is what is reported
            reason = why_it_failed(error)
    free_memory(trainer.args.device)
    return measured, reason


def _norm(trainer: Trainer, part: Part, num_items: Any, weights: Sequence[torch.Tensor]) -> float:
    with torch.enable_grad():
        loss = loss_of(trainer, part, num_items)
        # Not into .grad: that would wake up whatever reduces gradients over ranks.
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    return float(torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None]))


def _samples(part: Part) -> tuple[int, ...]:
    numbers = part.whole.get(SAMPLE_INDEX)
    return tuple(int(numbers[row]) for row in part.rows) if numbers is not None and len(part.rows) == 1 else ()


def _far(measured: Sequence[_Measured]) -> tuple[NonFinitePlace, tuple[int, ...]]:
    if len(measured) == 1:
        (one,) = measured
        if len(one.names) == 1:
            return NonFinitePlace("it has no other row", one.names), one.samples
        return NonFinitePlace("its rows affect each other, so none can be checked alone", one.names), ()
    usual = median_low(one.norm for one in measured)
    far = sorted((one for one in measured if one.norm > FAR * usual), key=lambda one: -one.norm)
    if not far:
        return NonFinitePlace(reason="no row has a gradient that stands out from the others"), ()
    place = f"the gradient of a single row is up to {far[0].norm / max(usual, 1e-30):.3g} times the usual one"
    names = tuple(name for one in far for name in one.names)
    return NonFinitePlace(place, names), tuple(sample for one in far for sample in one.samples if sample >= 0)
