"""Check on short rows, before it is used, whether another way to compute a causal model's loss gives the stock loss.

The loss is computed as in training, so user code between the model and the loss is included.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Optional

import torch
from transformers import Trainer

from scu_trainer.models.loading.offloaded import input_device
from scu_trainer.train.loss.analysis import has_drawn, restored_on_exit, rng_state, tolerance
from scu_trainer.train.loss.analysis.measuring import tolerance_of
from scu_trainer.train.loss.rows.model_loss import head_of, headless, inner_model, opened
from scu_trainer.train.loss.rows.padding_free import FLASH, EndToEnd, end_to_end
from scu_trainer.train.loss.rows.row_readings import RowLosses, row_scores
from scu_trainer.train.loss.rows.shared_prefixes import FEWEST_TOKENS
from scu_trainer.train.step.batches.rows import NOT_LEARNED, PADDING, has_time, placed
from scu_trainer.train.step.recovery.out_of_memory import forget_traceback, is_out_of_memory

Found = tuple[Optional[bool], Optional[str]]
"""(whether it gives the stock loss, why it does not). None: the loss is not finite, or the model cannot run yet."""

MOST_COLUMNS = 32

LENGTHS = (8, 5)
"""Tokens of the two rows for the padding-free check, which share a prefix if shared prefixes are checked. They do not
depend on the data, so a resumed run and every rank come to the same result."""

MOST_VALUES, MOST_WEIGHTS = 2**20, 32
"""Maximum size of a trained weight, and maximum number of weights, for which gradients are compared."""

HIDDEN_ROUNDING, GRADIENT_ROUNDING = 2.5, 20
"""Multiples of the tolerance of a loss, which is a mean over many values."""

OWN_ATTENTION = "the model has its own attention code, which does not know where rows end"

LARGE_LOGIT = 100.0
"""Size of the largest logit at which a model that bounds its logits (soft-capping) gives another loss than one that
does not; far below the bound, as in an untrained model, both give the same."""

LEAK_TOLERANCE = 1e-4
"""Relative change of a row caused by another row that still counts as rounding, because both are computed alike."""


def agrees_headless(trainer: Trainer, inputs: Mapping[str, Any]) -> Found:
    """Check the loss without materialized logits on the first columns of the first row, with every token learned, for
    logits as they are and for large ones."""
    model, short_row = trainer.model, _short_row(trainer.model, inputs)
    if short_row is None:
        return False, "the batch has no input_ids of shape (rows, time) with labels to compare it on"

    def compare() -> Found:
        stock, ours = (
            float(_loss(trainer, short_row, context))
            for context in (contextlib.nullcontext(), headless(model, None, _ignore_losses))
        )
        return _compare_losses(tolerance_of(trainer), stock, ours)

    return _run_check(model, lambda: _compare_at_two_sizes(model, compare), "a short row without its output head")


def agrees_padding_free(trainer: Trainer, inputs: Mapping[str, Any], shares_prefixes: bool = False) -> Found:
    """Check rows without padding on two rows of different length.

    Compares the loss, the states before the output head and the gradients of some small weights, and requires that the
    first row does not change the second. ``shares_prefixes``: the rows begin with the same tokens, which are computed
    once. Then the model must not draw random numbers either, because each row should get its own.
    """
    model, shared_tokens = trainer.model, FEWEST_TOKENS if shares_prefixes else 0

    def compare() -> Found:
        batch = type(inputs)(_two_rows(model, inputs["input_ids"].device, shared_tokens))
        if shares_prefixes and _draws_random_numbers(trainer, batch):
            return False, "the model draws random numbers (dropout)"
        rows = end_to_end(batch, shares_prefixes=shares_prefixes)
        stock, states, gradient = _measure(trainer, batch, rows, contextlib.nullcontext())
        ours, our_states, our_gradient = _measure(trainer, batch, rows, opened(model, None, _ignore_losses, rows))
        bound = tolerance_of(trainer)
        same, reason = _compare_losses(bound, stock, ours)
        if not same:
            return same, reason
        if (distance := _relative_distance(our_states, states)) > HIDDEN_ROUNDING * bound:
            return False, f"the states before the output head differ from the model's own by {distance:.2g} (relative)"
        if (distance := _relative_distance(our_gradient, gradient)) > GRADIENT_ROUNDING * bound:
            return False, f"the gradient differs from the model's own by {distance:.2g} (relative)"
        if _looks_past_borders(model, rows):
            return False, OWN_ATTENTION
        changed = _with_changed_first_row(batch, shared_tokens)
        _, other_states, _ = _measure(trainer, changed, rows, opened(model, None, _ignore_losses, rows))
        return _compare_states(other_states[LENGTHS[0] :], our_states[LENGTHS[0] :])

    return _run_check(model, compare, "two short rows without padding")


def _looks_past_borders(model: torch.nn.Module, rows: EndToEnd) -> bool:
    """Return whether the attention ignores the borders of ``rows``; in half precision small weights would hide that."""
    return inner_model(model).config._attn_implementation not in FLASH and not rows.attended


def _draws_random_numbers(trainer: Trainer, batch: Any) -> bool:
    """Return whether a training forward draws random numbers. Leaves the model in evaluation mode."""
    model = trainer.model.train()
    before = rng_state(model)
    _loss(trainer, batch, contextlib.nullcontext())
    model.eval()
    return has_drawn(model, before)


def scales_with_row_weights(trainer: Trainer, inputs: Mapping[str, Any]) -> bool:
    """Return whether the training loss scales with the model's own loss: twice the row weight gives twice the loss.
    Checked on the first columns of the first row, with every token learned."""
    model, short_row = trainer.model, _short_row(trainer.model, inputs)
    if short_row is None:
        return False
    items = short_row["labels"].ne(NOT_LEARNED).sum()

    def compare() -> Found:
        weights = (short_row["labels"].new_full((1,), factor, dtype=torch.float32) for factor in (1, 2))
        once, twice = (
            float(_loss(trainer, short_row, opened(model, one, _ignore_losses), num_items=items)) for one in weights
        )
        return _compare_losses(tolerance_of(trainer), 2 * once, twice)

    return bool(_run_check(model, compare, "a short row")[0])


def agrees_on_rows(
    model: torch.nn.Module, kind: Callable, low_precision: bool, padding_free: bool, shares_prefixes: bool
) -> Found:
    """Check on two rows of different length, in evaluation mode, that all losses equal those that the logits give.

    ``kind``: ``opened`` or ``headless``. With ``padding_free``, the first row must not change the second.
    ``shares_prefixes``: the rows begin with the same tokens, which are computed once.
    """
    device, shared_tokens = input_device(model), FEWEST_TOKENS if shares_prefixes else 0

    def losses_and_states(
        batch: Mapping[str, torch.Tensor], rows: Optional[EndToEnd]
    ) -> tuple[list[float], list[torch.Tensor]]:
        seen: list[RowLosses] = []
        with kind(model, None, seen.append, rows), _record_states(model) as states:
            loss = model(**batch, use_cache=False).loss
        return [float(loss), *seen[-1].sums.tolist()], states

    def compare() -> Found:
        batch = _two_rows(model, device, shared_tokens)
        rows = end_to_end(batch, shares_prefixes=shares_prefixes) if padding_free else None
        stock = model(**batch, use_cache=False)
        wanted = [float(stock.loss), *row_scores(stock.logits, batch["labels"])[:, 0].tolist()]
        losses, states = losses_and_states(batch, rows)
        for one, other in zip(wanted, losses, strict=True):
            same, reason = _compare_losses(tolerance(model, low_precision), one, other)
            if not same:
                return same, reason
        if rows is None:
            return True, None
        if _looks_past_borders(model, rows):
            return False, OWN_ATTENTION
        _, others = losses_and_states(_with_changed_first_row(batch, shared_tokens), rows)
        return _compare_states(*(kept[0].flatten(0, 1)[LENGTHS[0] :].cpu().double() for kept in (others, states)))

    with torch.no_grad():
        at_sizes = functools.partial(_compare_at_two_sizes, model, compare) if kind is headless else compare
        return _run_check(model, at_sizes, "two short rows")


def _run_check(model: torch.nn.Module, compare: Callable[[], Found], what: str) -> Found:
    """Run a check without changing the model. If the model fails on such rows, the failure is the reason."""
    try:
        with restored_on_exit(model):
            return compare()
    except Exception as error:  # the model may fail on such short rows in any way, but training must continue
        if is_out_of_memory(error):
            raise
        forget_traceback(error)
        # A hook may read attributes that the user's loss only sets on the trainer in the first step.
        found = None if isinstance(error, AttributeError) else False
        return found, f"the model fails on {what}: {type(error).__name__}: {error}"


def _compare_at_two_sizes(model: torch.nn.Module, compare: Callable[[], Found]) -> Found:
    """Compare once more with enlarged states before the output head, so that the largest logit is ``LARGE_LOGIT``."""
    head, sizes = head_of(model), []
    with head.register_forward_hook(lambda module, given, output: sizes.append(float(output.detach().abs().max()))):
        found = compare()
    if not found[0]:
        return found
    # a power of two, which enlarges without rounding; the first pass through the head is the model's own
    factor = 2.0 ** max(0, math.ceil(math.log2(LARGE_LOGIT / max(sizes[0], 1e-6))))
    with head.register_forward_pre_hook(lambda module, given: (given[0] * factor, *given[1:])):
        return compare()


def _ignore_losses(losses: Any) -> None:
    """Discard the losses of rows."""


def _compare_losses(bound: float, stock: float, ours: float) -> Found:
    if not math.isfinite(stock):
        return None, None
    same = abs(stock - ours) <= bound * max(abs(stock), 1e-6)
    return same, None if same else f"it gives {ours:.6g} where this model's own loss is {stock:.6g}"


def _compare_states(found: torch.Tensor, wanted: torch.Tensor) -> Found:
    """Compare the states of the second row before and after the first row was changed."""
    distance = _relative_distance(found, wanted)
    return (
        distance <= LEAK_TOLERANCE,
        None if distance <= LEAK_TOLERANCE else f"one row changes the states of the next by {distance:.2g} (relative)",
    )


def _relative_distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    distance = float(torch.dist(found, wanted) / wanted.norm().clamp(min=1e-12))
    return distance if math.isfinite(distance) else math.inf


def _loss(
    trainer: Trainer,
    batch: Any,
    context: contextlib.AbstractContextManager[None],
    with_gradient: bool = False,
    num_items: Any = None,
) -> torch.Tensor:
    with torch.set_grad_enabled(with_gradient), context, trainer.compute_loss_context_manager():
        return trainer._stock_loss(trainer.model, type(batch)(batch), False, num_items)


def _measure(
    trainer: Trainer, batch: Any, rows: EndToEnd, context: contextlib.AbstractContextManager[None]
) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Return (loss, states (tokens, size) of the rows one after the other, gradient of some small weights)."""
    model = trainer.model
    few = [p for p in model.parameters() if p.requires_grad and p.numel() <= MOST_VALUES][:MOST_WEIGHTS]
    with _record_states(model) as outputs:
        loss = _loss(trainer, batch, context, with_gradient=bool(few))
    found = torch.autograd.grad(loss, few, allow_unused=True) if few else ()
    gradient = [torch.zeros(1, dtype=torch.float64), *(g.flatten().cpu().double() for g in found if g is not None)]
    states = outputs[0].detach().flatten(0, 1).cpu().double()
    states = states if len(states) == len(rows.known_places) else states[rows.known_places]
    return float(loss.detach()), states, torch.cat(gradient)


@contextlib.contextmanager
def _record_states(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    kept: list[torch.Tensor] = []
    body = inner_model(model).base_model
    with body.register_forward_hook(lambda module, given, output: kept.append(output[0])):
        yield kept


def _short_row(model: torch.nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Return the first columns of the first row, with every token learned; None if the batch is not text."""
    ids, words = inputs.get("input_ids"), head_of(model).out_features
    if not torch.is_tensor(ids) or ids.dim() != 2 or not has_time("labels", inputs.get("labels")):
        return None
    short_row = {
        name: value[:1, :MOST_COLUMNS] for name, value in inputs.items() if name in PADDING and has_time(name, value)
    }
    if "attention_mask" in short_row:
        short_row["attention_mask"] = torch.ones_like(short_row["attention_mask"])
    return type(inputs)({**short_row, "labels": short_row["input_ids"].clamp(max=words - 1)})


def _two_rows(model: torch.nn.Module, device: torch.device, shared_tokens: int) -> dict[str, torch.Tensor]:
    """Return two rows of made-up tokens: the first ``shared_tokens`` are the same, and the second row is padded."""
    words = min(head_of(model).out_features, len(model.get_input_embeddings().weight))  # both read and predicted
    shape = len(LENGTHS), max(LENGTHS)
    ids = (torch.arange(shape[0] * shape[1]) * 7 + 1).reshape(shape) % words
    ids[1, :shared_tokens] = ids[0, :shared_tokens]
    mask = (torch.arange(shape[1]) < torch.tensor(LENGTHS).unsqueeze(1)).long()
    labels = ids.masked_fill(mask == 0, NOT_LEARNED)
    return placed({"input_ids": ids, "attention_mask": mask, "labels": labels}, device)


def _with_changed_first_row(batch: Mapping[str, torch.Tensor], shared_tokens: int) -> Any:
    changed = type(batch)({**batch, "input_ids": batch["input_ids"].clone()})
    changed["input_ids"][0, shared_tokens:] = changed["input_ids"][0, shared_tokens:].flip(0)
    return changed
