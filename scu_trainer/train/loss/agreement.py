"""Whether another way to a causal model's loss gives the stock one: asked on a short row before it is taken.

The loss is computed as training computes it, so code of somebody's own between the model and the loss takes part.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Optional

import torch
from transformers import Trainer

from scu_trainer.train.loss.analysis import tolerance, untouched
from scu_trainer.train.loss.rows.model_loss import head_of, inner_model
from scu_trainer.train.loss.rows.padding_free import EndToEnd, end_to_end
from scu_trainer.train.step.batches.rows import NOT_LEARNED, PADDING, has_time
from scu_trainer.train.step.recovery.memory import forget_traceback, is_out_of_memory

MOST_COLUMNS = 32

MOST_VALUES, MOST_WEIGHTS = 2**20, 32
"""Of a trained weight, and how many of them, by which the gradient is compared."""

HIDDEN_ROUNDING, GRADIENT_ROUNDING = 2.5, 20
"""Times the tolerance of a loss, which is a mean over many. Rows that see each other change hidden states by 6 % in a
GPT-2 and by 16 % in a Llama that have learned nothing."""


@dataclass(frozen=True)
class AskedLoss:
    """``loss``; with two rows ``hidden`` states (tokens, size) of the model, and ``gradient`` by some weights."""

    loss: float
    hidden: Optional[torch.Tensor] = None
    gradient: Optional[torch.Tensor] = None


def gives_the_stock_loss(
    trainer: Trainer, way: Callable, inputs: Any, is_padding_free: bool
) -> tuple[Optional[bool], Optional[str]]:
    """(whether ``way``, such as ``model_loss.headless``, does; None if the stock loss is not finite; why it does not).

    ``is_padding_free``: on two rows of different length, end to end; also their hidden states and gradient.
    """
    model = trainer.model
    short = _short(inputs, head_of(model).out_features, 2 if is_padding_free else 1)
    if short is None:
        return False, "a batch has no input_ids of shape (rows, time) with labels beside them to compare it on"
    rows = end_to_end(short) if is_padding_free else None
    try:
        with untouched(model):
            stock = _asked_loss(trainer, short, rows, contextlib.nullcontext())
            found = _asked_loss(trainer, short, rows, way(model, None, lambda losses: None, rows))
    except Exception as error:  # whatever a model says to so short a row: training shall go on
        if is_out_of_memory(error):
            raise
        forget_traceback(error)
        without = "two short rows without padding" if is_padding_free else "a short row without its output head"
        return False, f"the model fails on {without}: {error}"
    if not math.isfinite(stock.loss):
        return None, None
    difference = _difference(stock, found, tolerance(model, trainer.accelerator.mixed_precision != "no"))
    return difference is None, difference


def _difference(stock: AskedLoss, found: AskedLoss, bound: float) -> Optional[str]:
    if abs(stock.loss - found.loss) > bound * max(abs(stock.loss), 1e-6):
        return f"it gives {found.loss:.6g} where this model's own loss is {stock.loss:.6g}"
    for name, rounding in (("hidden", HIDDEN_ROUNDING), ("gradient", GRADIENT_ROUNDING)):
        wanted, given = getattr(stock, name), getattr(found, name)
        apart = 0.0 if wanted is None else float(torch.dist(wanted, given) / wanted.norm().clamp(min=1e-12))
        if not apart <= rounding * bound:
            what = {"hidden": "the states before the output head are", "gradient": "the gradient is"}[name]
            return f"{what} {apart:.2g} of the model's own apart"
    return None


def _asked_loss(
    trainer: Trainer, short: Any, rows: Optional[EndToEnd], way: contextlib.AbstractContextManager[None]
) -> AskedLoss:
    model = trainer.model
    few = [p for p in model.parameters() if p.requires_grad and p.numel() <= MOST_VALUES][:MOST_WEIGHTS]
    few = few if rows is not None else []
    with _kept_output(inner_model(model).base_model) as outputs, torch.set_grad_enabled(bool(few)):
        with way, trainer.compute_loss_context_manager():
            loss = trainer._stock_loss(model, short, False, None)
    if rows is None:
        return AskedLoss(float(loss.detach()))
    found = torch.autograd.grad(loss, few, allow_unused=True) if few else ()
    gradient = [torch.zeros(1, dtype=torch.float64), *(g.flatten().double().cpu() for g in found if g is not None)]
    hidden = outputs[0].detach().flatten(0, 1).double().cpu()
    hidden = hidden if len(hidden) == len(rows.known_places) else hidden[rows.known_places]
    return AskedLoss(float(loss.detach()), hidden, torch.cat(gradient))


@contextlib.contextmanager
def _kept_output(module: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    kept: list[torch.Tensor] = []
    handle = module.register_forward_hook(lambda module, given, output: kept.append(output[0]))
    try:
        yield kept
    finally:
        handle.remove()


def _short(inputs: Any, words: int, rows: int) -> Any:
    """The first columns of the first row, every one of them learned. ``rows`` 2: half as many columns, and the first
    half of these as a second row, so that both together are no more than the row. None where that cannot be made."""
    ids = inputs.get("input_ids")
    if not torch.is_tensor(ids) or ids.dim() != 2 or not has_time("labels", inputs.get("labels")):
        return None
    columns = min(MOST_COLUMNS, ids.size(1)) // rows
    if columns < rows:
        return None
    short = {
        name: value[:1, :columns].repeat(rows, *[1] * (value.dim() - 1))
        for name, value in inputs.items()
        if name in PADDING and has_time(name, value)
    }
    if "attention_mask" in short:
        short["attention_mask"] = torch.ones_like(short["attention_mask"])
    short["labels"] = short["input_ids"].clamp(max=words - 1)
    if rows == 2:
        short["attention_mask"][1, columns // 2 :] = 0
        short["labels"][1, columns // 2 :] = NOT_LEARNED
    return type(inputs)(short)
