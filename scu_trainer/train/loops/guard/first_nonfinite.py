"""Find where a loss or a gradient stopped being finite: the weight, the input, the module and the rows.

Used only after a failure. The failed step's rows run once more, in at most ``MOST_RUNS`` parts, without anything that
other ranks would have to join; random state, statistics and gradients are restored. In this order:

    weights     a weight or a BatchNorm statistic is not finite itself
    inputs      a number in the batch is not finite
    forward     the first module, by order of execution, with a non-finite output; if its input was already not
                finite, the code of the module around it
    loss        every module's output is finite, the loss is not
    backward    of the weights with a non-finite gradient, the one that was used last, because backward starts there
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer

from scu_trainer.figures import first_few
from scu_trainer.models.quantize import is_of_torchao
from scu_trainer.train.loops.guard.parts import (
    SHARDED,
    RowSubset,
    describe_rerun_failure,
    loss_of,
    row_names,
    step_parts,
    unchanged,
)
from scu_trainer.train.loss.analysis.trials import batch_norm_statistics
from scu_trainer.train.step.batches.rows import rows_of
from scu_trainer.train.step.distributed.sharded import is_sharded
from scu_trainer.train.step.recovery.memory import free_memory
from scu_trainer.train.step.recovery.optimizer_parts import by_device_and_dtype

MOST_NAMED = 8
"""Maximum number of rows that a message names."""


@dataclass(frozen=True)
class NonFinitePlace:
    """Where a value is not finite. ``place``: a phrase, or None if it was not found; then ``reason`` says why.

    ``rows``: as messages name them. ``is_weight``: whether a weight or statistic itself is not finite, so that no later
    step can be better.
    """

    place: Optional[str] = None
    rows: tuple[str, ...] = ()
    is_weight: bool = False
    reason: Optional[str] = None

    @property
    def text(self) -> str:
        if self.place is None:
            return f"the source was not found: {self.reason}"
        if not self.rows:
            return self.place
        return f"{self.place}, in {first_few(self.rows, MOST_NAMED)}"


def locate_nonfinite(trainer: Trainer, batches: Sequence[Any], num_items: Any) -> NonFinitePlace:
    """Return where the failed step stopped being finite.

    ``batches``: this rank's accumulation batches of the failed step. ``num_items``: the divisor of its losses. If the
    rows cannot run again, ``reason`` says why.
    """
    weight = nonfinite_weight(trainer.model)
    if weight is not None:
        return NonFinitePlace(f"{weight} is not finite itself", is_weight=True)
    if num_items is not None and not torch.as_tensor(num_items).any():  # not int(): class weights may add up to 0.5
        return NonFinitePlace("no label of the step is learned (all are -100), which makes it 0 / 0")
    bad_input = _find_bad_input(trainer, batches)
    if bad_input is not None:
        return bad_input
    if is_sharded(trainer):
        return NonFinitePlace(reason=SHARDED)
    not_by_names = next((inputs for inputs in batches if not isinstance(inputs, Mapping)), None)
    if not_by_names is not None:
        return NonFinitePlace(reason=rows_of(trainer.model, not_by_names).obstacle)
    with unchanged(trainer):
        try:
            parts = list(step_parts(trainer, batches))
            found = _search_forward(trainer, parts, num_items) or _search_backward(trainer, parts, num_items)
        except Exception as error:  # the model may fail in any way on some rows, but only the failed step matters
            found = NonFinitePlace(reason=describe_rerun_failure(error))
    free_memory(trainer.args.device)
    return found or NonFinitePlace(reason="every value is finite when its rows run again")


# -- weights -----------------------------------------------------------------------------------------------------------


def nonfinite_weight(model: nn.Module) -> Optional[str]:
    """Name the first weight or BatchNorm statistic that is not finite; of sharded ones, only this rank's part."""
    for name, tensor in _named_tensors(model):
        if not bool(torch.isfinite(tensor).all()):
            return name
    return None


def weights_are_finite(model: nn.Module) -> bool:
    """Return whether every weight and BatchNorm statistic is finite; of sharded ones, only this rank's part. Takes one
    pass over them and waits for the device once."""
    kinds = by_device_and_dtype(tensor.detach() for _, tensor in _named_tensors(model) if tensor.numel())
    # The largest magnitude, unlike a sum of squares, is only infinite if a number is.
    largest = [torch.stack(torch._foreach_norm(tensors, float("inf"))).float().max() for tensors in kinds]
    return all(bool(torch.isfinite(norm)) for norm in largest)


def has_nonfinite(value: Any) -> bool:
    """Return whether ``value`` (a tensor, a float or a container of them) contains a number that is not finite."""
    return next(_iterate_nonfinite(value), None) is not None


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights and BatchNorm statistics with phrases that name them; of sharded ones, this rank's part."""
    for name, parameter in model.named_parameters():
        own = _local_zero3_part(parameter) if hasattr(parameter, "ds_tensor") else parameter
        own = own.to_local() if hasattr(own, "to_local") else own
        # torch has no norm for 8-bit types; such weights (of a model stored in FP8 or by torchao) are frozen.
        if own.is_floating_point() and own.dtype.itemsize > 1 and not own.is_meta and not is_of_torchao(own):
            yield f"the weight {name}", own
    for name, statistic in batch_norm_statistics(model):
        yield f"the statistic {name}", statistic


def _local_zero3_part(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's numbers; the parameter itself is empty. Parts have equal sizes, and the memory after the last
    number is not initialized."""
    own = parameter.ds_tensor
    before = own.numel() * dist.get_rank(parameter.ds_process_group)
    return own.flatten()[: max(0, parameter.ds_numel - before)]


# -- rows --------------------------------------------------------------------------------------------------------------


def _find_bad_input(trainer: Trainer, batches: Sequence[Any]) -> Optional[NonFinitePlace]:
    for number, inputs in enumerate(batches):
        count = rows_of(trainer.model, inputs).rows
        for name, value in inputs.items() if isinstance(inputs, Mapping) else ():
            if not (torch.is_tensor(value) and value.is_floating_point()) or "mask" in name:
                continue  # a mask may be minus infinity
            if not bool(torch.isfinite(value).all()):
                rows = _bad_rows(value, count) or range(count)
                return NonFinitePlace(f"{name} of the data is not finite", row_names(trainer, inputs, number, rows))
    return None


def _bad_rows(tensor: torch.Tensor, count: int) -> list[int]:
    """Return the rows of ``tensor`` with a non-finite number; [] if its first axis does not have ``count`` rows."""
    if not count or tensor.dim() == 0 or tensor.shape[0] != count:
        return []
    return (~torch.isfinite(tensor.detach())).reshape(count, -1).any(dim=1).nonzero().flatten().tolist()


def _summarize_rows(names: Sequence[str], parts: Sequence[RowSubset]) -> tuple[str, ...]:
    total = sum(len(part.rows) for part in parts)
    return ("every row",) if len(names) == total > 1 else tuple(names)


# -- running them again ------------------------------------------------------------------------------------------------


@torch.no_grad()
def _search_forward(trainer: Trainer, parts: Sequence[RowSubset], num_items: Any) -> Optional[NonFinitePlace]:
    """Run the parts forward, and return the first module with a non-finite output; None if all are finite."""
    place, rows = None, []
    for part in parts:
        watch = _OutputWatch(trainer.model, len(part.rows))
        with watch.attached():
            loss = loss_of(trainer, part, num_items)
        if watch.place is None and bool(torch.isfinite(loss).all()):
            continue
        place = place or watch.place or "the loss itself (the output of every module is finite)"
        bad = [part.rows[i] for i in watch.rows] or part.rows
        rows += row_names(trainer, part.whole, part.batch, bad)
    return None if place is None else NonFinitePlace(place, _summarize_rows(rows, parts))


def _search_backward(trainer: Trainer, parts: Sequence[RowSubset], num_items: Any) -> Optional[NonFinitePlace]:
    """Run the parts backward, and return the weight where backward first gave a non-finite gradient."""
    named = [(name, p) for name, p in trainer.model.named_parameters() if p.requires_grad]
    weights, place, rows = [p for _, p in named], None, []
    for part in parts:
        watch = _OutputWatch(trainer.model, len(part.rows))
        with torch.enable_grad():
            with watch.attached():
                loss = loss_of(trainer, part, num_items)
            # Not into .grad, which would trigger the reduction of gradients over ranks.
            gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        bad = [
            name
            for (name, _), gradient in zip(named, gradients, strict=True)
            if gradient is not None and not bool(torch.isfinite(gradient).all())
        ]
        if bad:
            place = place or f"the first non-finite gradient is that of {max(bad, key=watch.order_of)}"
            rows += row_names(trainer, part.whole, part.batch, part.rows)
    return None if place is None else NonFinitePlace(place, _summarize_rows(rows, parts))


class _OutputWatch:
    """Checks every module's output in one forward. ``place``: the first non-finite one. ``rows``: in which rows."""

    def __init__(self, model: nn.Module, count: int) -> None:
        self.place: Optional[str] = None
        self.rows: list[int] = []
        self._count = count
        self._order: dict[str, int] = {}
        # Without the outermost module: its output contains the loss, which has its own phrase.
        self._names = {module: name for name, module in model.named_modules() if name}

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        with contextlib.ExitStack() as hooks:
            for module in self._names:
                hooks.enter_context(module.register_forward_hook(self._check_output, with_kwargs=True))
            yield

    def order_of(self, weight: str) -> int:
        """Return the position in the forward of the module with this weight, from 0; -1 if it did not run."""
        return self._order.get(weight.rpartition(".")[0], -1)

    def _check_output(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        self._order[self._names[module]] = len(self._order)
        if self.place is not None:
            return
        bad = next(filter(torch.is_tensor, _iterate_nonfinite(output)), None)
        if bad is None:
            return
        name, self.rows = self._names[module], _bad_rows(bad, self._count)
        given = (args, {key: value for key, value in kwargs.items() if "mask" not in key})
        if not any(map(torch.is_tensor, _iterate_nonfinite(given))):
            self.place = f"the first non-finite output is that of {name} ({type(module).__name__})"
        else:
            around = name.rpartition(".")[0] or "the model itself"
            self.place = f"the first non-finite value comes from {around}, before it calls {name}"


def _iterate_nonfinite(value: Any) -> Iterator[torch.Tensor | float]:
    """Yield the tensors and floats in ``value`` that are not finite, in order. A container may contain itself."""
    waiting, seen = [value], {}
    while waiting:
        item = waiting.pop()
        if isinstance(item, (Mapping, list, tuple, deque)) and id(item) not in seen:
            seen[id(item)] = item  # kept alive, so that no other object gets its id
            waiting += reversed([*(item.values() if isinstance(item, Mapping) else item)])
        elif isinstance(item, float) and not math.isfinite(item):
            yield item
        # Detached, because checkpointed layers run again in backward, without hooks, and must save the same tensors.
        elif torch.is_tensor(item) and item.is_floating_point() and not bool(torch.isfinite(item.detach()).all()):
            yield item
