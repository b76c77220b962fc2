"""Recognize public loss functions and their arguments while a loss is computed."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from scu_trainer.train.step.batches.reduction import SUMS, Targets
from scu_trainer.train.step.batches.rows import PADDING, has_time

BY_CLASSES = frozenset({functional.cross_entropy, functional.nll_loss})
"""Functions with a mean over targets, possibly with class weights; if the targets are probabilities, over rows."""

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
"""Functions with a mean over rows, or over equally many elements of each row. CTC first divides each row by its own
number of targets."""

SIGNATURES = {function: inspect.signature(function) for function in BY_CLASSES | BY_ROWS}


@dataclass(frozen=True, eq=False)
class Call:
    """One call that returned a single number. ``arguments``: all arguments by name, including defaults."""

    function: Any
    arguments: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"torch.nn.functional.{self.function.__name__}"

    @property
    def is_of_classes(self) -> bool:
        return self.function in BY_CLASSES and not self.arguments["target"].is_floating_point()


class LossCalls(TorchFunctionMode):
    """Record calls of known loss functions that return one number, and multiply their results by ``factor``. If the
    whole loss then changes by the same factor, it consists of nothing else."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.factor = factor

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func not in SIGNATURES or not torch.is_tensor(result) or result.dim():
            return result
        if torch._C._functorch.is_functorch_wrapped_tensor(result):  # one row of a vmap, which must not escape it
            return result
        bound = SIGNATURES[func].bind(*args, **(kwargs or {}))
        bound.apply_defaults()
        self.calls.append(Call(func, bound.arguments))
        return result if self.factor == 1.0 else result * self.factor


@dataclass(frozen=True, eq=False)
class Divisor:
    """The divisor of all calls of one loss. ``kind``: "sum", "rows" or "targets". ``name``: names of the functions."""

    kind: str
    targets: Optional[Targets] = None
    name: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of ``Reduction`` that this loss may have."""
        if self.targets is not None:
            return (self.targets.kind,)
        return SUMS if self.kind == "sum" else (self.kind,)


def divisor_of(calls: Sequence[Call], inputs: Mapping[str, Any], rows: int) -> Optional[Divisor]:
    """Return the divisor that all calls share, or None. ``inputs``: the batch, in which the targets are looked up."""
    found = [_divisor(call, inputs, rows) for call in calls]
    if not found or None in found:
        return None
    have_same_kind = len({divisor.kind for divisor in found}) == 1 and all(divisor.targets is None for divisor in found)
    if not (have_same_kind or len(found) == 1):
        return None
    return replace(found[0], name=", ".join(dict.fromkeys(call.name for call in calls)))


def left_out_by(calls: Sequence[Call], inputs: Mapping[str, Any], rows: int) -> tuple[tuple[str, Optional[int]], ...]:
    """Return, for several means over one class per row (start and end of an answer), how a row is left out.

    A tuple of (input with the classes, entry that leaves a row out) pairs. The entry is None if classes are columns and
    any entry beyond the last column leaves the row out.
    """
    calls = [one for one in calls if one.is_of_classes and one.arguments["target"].numel() == rows]
    found = [(call, _input_of_targets(call.arguments["target"], inputs, rows)) for call in calls]
    if len(found) < 2:
        return ()
    ignored = {source[0]: call for call, source in found if source}
    widths = {value.size(1) for name, value in inputs.items() if name in PADDING and has_time(name, value)}
    return tuple((name, _ignored_entry(call, widths)) for name, call in ignored.items())


def _ignored_entry(call: Call, widths: set[int]) -> Optional[int]:
    entry = call.arguments["ignore_index"]
    return None if entry == call.arguments["input"].size(1) and entry in widths else entry


def _divisor(call: Call, inputs: Mapping[str, Any], rows: int) -> Optional[Divisor]:
    """Return what a single call divides by; None if that is unknown or changes."""
    if call.arguments["reduction"] == "sum":  # others: "mean", "batchmean"
        return Divisor("sum")
    if not call.is_of_classes:
        return Divisor("rows")
    weight, ignored = call.arguments["weight"], call.arguments["ignore_index"]
    if weight is not None and bool((weight == weight.flatten()[0]).all()):
        weight = None
    if weight is not None and weight.requires_grad:  # a learned weight changes, so a trial must decide instead
        return None
    found = _input_of_targets(call.arguments["target"], inputs, rows)
    return found and Divisor("targets", Targets(*found, ignored, None if weight is None else weight.detach()))


def _input_of_targets(target: torch.Tensor, inputs: Mapping[str, Any], rows: int) -> Optional[tuple[str, bool]]:
    """Return (name of the input that the targets come from, whether without its first column)."""
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
    """Yield the names of inputs that may be targets, the usual name first."""
    for name in sorted(inputs, key=lambda name: name != "labels"):
        value = inputs[name]
        if torch.is_tensor(value) and value.dim() and value.dtype in (torch.int64, torch.int32) and len(value) == rows:
            yield name
