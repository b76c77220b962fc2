"""Public loss functions, recognized by identity while a loss is computed, with the arguments that they were given."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from scu_trainer.train.step.batches.reduction import Targets
from scu_trainer.train.step.batches.rows import PADDING, has_time

BY_CLASSES = frozenset({functional.cross_entropy, functional.nll_loss})
"""Means over targets, with weights of classes; with probabilities as targets over rows."""

BY_ROWS = frozenset(
    {
        functional.binary_cross_entropy,
        functional.binary_cross_entropy_with_logits,
        functional.cosine_embedding_loss,
        functional.ctc_loss,
        functional.gaussian_nll_loss,
        functional.hinge_embedding_loss,
        functional.huber_loss,
        functional.kl_div,
        functional.l1_loss,
        functional.margin_ranking_loss,
        functional.mse_loss,
        functional.multi_margin_loss,
        functional.multilabel_margin_loss,
        functional.multilabel_soft_margin_loss,
        functional.poisson_nll_loss,
        functional.smooth_l1_loss,
        functional.soft_margin_loss,
        functional.triplet_margin_loss,
    }
)
"""Means over rows, or over elements of which each row has as many. CTC divides each row by its own targets first."""

SIGNATURES = {function: inspect.signature(function) for function in BY_CLASSES | BY_ROWS}


@dataclass(frozen=True, eq=False)
class Call:
    """One call that gave a single number. ``arguments``: all of them by name, defaults included."""

    function: Any
    arguments: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"torch.nn.functional.{self.function.__name__}"

    @property
    def is_of_classes(self) -> bool:
        return self.function in BY_CLASSES and not self.arguments["target"].is_floating_point()


class LossCalls(TorchFunctionMode):
    """Inside, calls of known loss functions that give one number are kept in ``calls``, and their results come out
    ``factor`` times as large: a loss that then is so too consists of nothing else."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.factor = factor

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func not in SIGNATURES or not torch.is_tensor(result) or result.dim():
            return result
        if torch._C._functorch.is_functorch_wrapped_tensor(result):  # one row of a vmap, which must not leave it
            return result
        bound = SIGNATURES[func].bind(*args, **(kwargs or {}))
        bound.apply_defaults()
        self.calls.append(Call(func, bound.arguments))
        return result if self.factor == 1.0 else result * self.factor


@dataclass(frozen=True, eq=False)
class Divisor:
    """Of all calls of one loss. ``kind``: "sum", "rows" or "targets". ``name``: of the functions."""

    kind: str
    targets: Optional[Targets] = None
    name: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those of ``Reduction`` that such a loss may come out as."""
        if self.targets is not None:
            return (self.targets.kind,)
        return ("sum", "num_items") if self.kind == "sum" else (self.kind,)


def divisor_of(calls: Sequence[Call], inputs: Mapping[str, Any], rows: int) -> Optional[Divisor]:
    """What the calls divide by, if all by the same. ``inputs``: of the batch; the targets are looked for among them."""
    found = [_divisor(call, inputs, rows) for call in calls]
    if not found or None in found:
        return None
    alike = len({one.kind for one in found}) == 1 and all(one.targets is None for one in found)
    if not (alike or len(found) == 1):
        return None
    return replace(found[0], name=", ".join(dict.fromkeys(call.name for call in calls)))


def left_out_by(calls: Sequence[Call], inputs: Mapping[str, Any], rows: int) -> tuple[tuple[str, Optional[int]], ...]:
    """Of several means over one class of each row (start and end of an answer): the inputs with the classes, and the
    entry that leaves a row out; None where classes are columns, and that is any behind the last one."""
    calls = [one for one in calls if one.is_of_classes and one.arguments["target"].numel() == rows]
    found = [(call, _source(call.arguments["target"], inputs, rows)) for call in calls]
    if len(found) < 2:
        return ()
    ignored = {source[0]: call for call, source in found if source}
    widths = {value.size(1) for name, value in inputs.items() if name in PADDING and has_time(name, value)}
    return tuple((name, _entry_that_is_left_out(call, widths)) for name, call in ignored.items())


def _entry_that_is_left_out(call: Call, widths: set[int]) -> Optional[int]:
    entry = call.arguments["ignore_index"]
    return None if entry == call.arguments["input"].size(1) and entry in widths else entry


def _divisor(call: Call, inputs: Mapping[str, Any], rows: int) -> Optional[Divisor]:
    if call.arguments["reduction"] == "sum":  # others: "mean", "batchmean"
        return Divisor("sum")
    if not call.is_of_classes:
        return Divisor("rows")
    weight, ignored = call.arguments["weight"], call.arguments["ignore_index"]
    if weight is not None and bool((weight == weight.flatten()[0]).all()):
        weight = None
    if weight is not None and weight.requires_grad:  # what is learned changes; it is asked instead
        return None
    found = _source(call.arguments["target"], inputs, rows)
    return found and Divisor("targets", Targets(*found, ignored, None if weight is None else weight.detach()))


def _source(target: torch.Tensor, inputs: Mapping[str, Any], rows: int) -> Optional[tuple[str, bool]]:
    """(name of the input that the targets are, whether without its first column)."""
    wanted = target.reshape(-1)
    for name in _candidates(inputs, rows):
        value = inputs[name].to(wanted.device)
        if value.numel() == wanted.numel() and torch.equal(value.reshape(-1), wanted):
            return name, False
        if value.dim() < 2:
            continue
        tail = value[..., 1:]
        padded = functional.pad(tail, (0, 1), value=-100)
        for shifted in (tail, padded):
            if shifted.numel() == wanted.numel() and torch.equal(shifted.reshape(-1), wanted):
                return name, True
    return None


def _candidates(inputs: Mapping[str, Any], rows: int) -> Iterable[str]:
    """Inputs that may be targets, the usual name first."""
    for name in sorted(inputs, key=lambda name: name != "labels"):
        value = inputs[name]
        if torch.is_tensor(value) and value.dim() and value.dtype in (torch.int64, torch.int32) and len(value) == rows:
            yield name
