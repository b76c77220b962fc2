"""How does this loss put the rows of a batch together? Asked of the model itself, once, on two short rows.

Splitting a batch is exact when the loss of the whole is a known sum over its rows. Signatures do not tell: many
forwards take ``num_items_in_batch`` among their ``**kwargs`` and ignore it. So the loss of two rows together is
compared with the losses of each alone under every reading, without gradients, in evaluation mode, with RNG and buffers
left as they were.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch
from torch import nn

from scu_trainer.models.offloaded import input_device
from scu_trainer.train.memory import forget_traceback, free_memory, is_out_of_memory
from scu_trainer.train.optimizer_guard import retry_unchanged
from scu_trainer.train.rows import (
    NOT_LEARNED,
    Batch,
    Row,
    follows_time,
    has_time,
    pick,
    read_layout,
    signature,
    take,
)

EXACT = 1e-4
"""Largest relative difference that counts as equal in float32."""

ROUGH = 2e-2
"""The same where matrices are multiplied in 16 bits or less."""


@dataclass(frozen=True)
class Reduction:
    """``kind``: what the loss divides its sum by.

    ``num_items``: by the ``num_items_in_batch`` that it is given. ``shifted_labels``, ``labels``, ``rows``: by the
    batch's own number of labels (without the first of each row; with it) or of rows. ``sum``: by nothing.
    ``mixes``: why no split is exact, where rows act on each other; ``kind`` is then the nearest that there is.
    ``trims``: cutting padding off leaves the loss as it was; None while no padded row has been seen. ``reads_padding``
    says how it was seen that it does not.
    """

    kind: str
    trims: Optional[bool] = True
    mixes: Optional[str] = None
    reads_padding: Optional[str] = None

    @property
    def is_exact(self) -> bool:
        return self.mixes is None

    def items(self, inputs: Any, rows: int) -> float:
        """What a mean over ``inputs`` is divided by; 1 where the loss is not such a mean."""
        return float(_items(self.kind, inputs, rows))


def _items(kind: str, inputs: Any, rows: int) -> float | torch.Tensor:
    if kind == "rows":
        return rows
    if kind in ("labels", "shifted_labels"):
        labels = inputs["labels"]
        return _valid(labels[..., 1:] if kind == "shifted_labels" else labels)
    return 1


def _valid(labels: torch.Tensor) -> torch.Tensor:
    return labels.ne(NOT_LEARNED).sum()


LossOf = Callable[[Any, Optional[torch.Tensor]], torch.Tensor]
"""(inputs, num_items_in_batch) -> loss; inputs are copied before, because a loss may take its labels out of them."""


def probe(
    loss_of: LossOf,
    model: nn.Module,
    batches: Sequence[Batch],
    num_items: Any,
    pad_token_id: int,
    training: bool = True,
    low_precision: bool = False,
    shifts: bool = False,
) -> Optional[Reduction]:
    """``num_items``: what the stock loop counted for this window, None where the loss is not told. ``training`` False:
    modules that mix rows in training mode only do not count. ``low_precision``: autocast will be on.
    ``shifts``: the stock loop takes the loss for one over shifted labels, which decides where rounding leaves a doubt.

    Only rows of the batches are used, cut and padded as training would; of long ones their beginnings, if the model
    takes these: whole, with all logits, they could need more memory than training does. None: these rows do not tell;
    ask with others.
    """
    rows = _two_rows(batches)
    if rows is None:
        return None
    device = input_device(model)
    question = _Question(
        loss_of, tolerance(model, low_precision), num_items, batches, rows, pad_token_id, device, shifts
    )
    found = mixing_modules(model) if training else None
    with untouched(model), torch.no_grad():
        answer = _ask_of_beginnings(question) or _ask(question)
    return replace(answer, mixes=f"{found} put the whole batch together") if found and answer else answer


def _ask_of_beginnings(question: _Question) -> Optional[Reduction]:
    """None where rows are short already, or where their beginnings do not tell."""
    short = _beginnings(question.batches, question.rows, question.pad_token_id)
    if short is None:
        return None
    try:
        return replace(question, batches=[short], rows=[(0, 0), (0, 1)]).answer(trim=True)
    except Exception as error:  # a model that takes whole rows only; they are asked next
        forget_traceback(error)
        return None


def _ask(question: _Question) -> Optional[Reduction]:
    reasons = []
    for trim in (True, False):
        try:
            answer = question.answer(trim)
        except Exception as error:  # whatever a model says to rows that it does not take: training shall go on
            if is_out_of_memory(error):
                reasons.append("two rows do not fit in memory together")
                forget_traceback(error)
                break
            reasons.append(f"it fails on few or shorter rows: {error}")
        else:
            return replace(answer, trims=False, reads_padding=reasons[0]) if answer and reasons else answer
    free_memory(question.device)
    return question.answer_of_one(reasons[-1])


@dataclass
class _Question:
    loss_of: LossOf
    tolerance: float
    num_items: Any
    batches: Sequence[Batch]
    rows: Sequence[Row]
    pad_token_id: int
    device: torch.device
    shifts: bool

    def loss(self, inputs: Any, items: float = 8.0) -> float:
        """``items``: not the count of the window, by which a small loss would drown in rounding."""

        def ask() -> float:
            device = getattr(self.num_items, "device", None)
            given = None if self.num_items is None else torch.as_tensor(items, device=device)
            return float(self.loss_of(type(inputs)(inputs), given))

        # A wrong belief about the loss would train something else: one failed allocation is no reason to take it up.
        return retry_unchanged(ask, (), is_out_of_memory, lambda: free_memory(self.device))

    def _equal(self, a: float, b: float, scale: float) -> bool:
        return abs(a - b) <= self.tolerance * max(scale, 1e-12)

    def _trims(self, first: Any) -> Optional[bool]:
        """Whether a row loses nothing by losing its padding; None if it has none. ``first``: padded for the second."""
        short = take(self.batches, self.rows[:1], self.pad_token_id)
        if not self.batches[self.rows[0][0]].trimmable or _shapes(first) == _shapes(short):
            return None
        padded, short = self.loss(first), self.loss(short)
        return self._equal(padded, short, max(abs(padded), abs(short)))

    def answer(self, trim: bool) -> Optional[Reduction]:
        both = take(self.batches, self.rows, self.pad_token_id, trim=trim)
        number, row = self.rows[0]
        is_their_batch = both is self.batches[number].inputs  # then its rows stand in its own order
        trims = self._trims(pick(both, torch.tensor([row if is_their_batch else 0]), 2)) if trim else False
        both = _uneven(both)
        alone = [pick(both, torch.tensor([i]), 2) for i in range(2)]
        whole, parts = self.loss(both), [self.loss(one) for one in alone]
        scale = max(abs(whole), *map(abs, parts))
        if not math.isfinite(whole + sum(parts)) or scale == 0.0:
            return None
        guesses = _guesses(both, alone, parts, self.shifts)
        exact, halved = True, self._with_twice_the_count(both)
        if halved is not None and abs(halved) < FOLLOWS * abs(whole):
            guesses = {"num_items": sum(parts)}
            exact = self._equal(2 * halved, whole, scale)
        kind = self._likeliest({name: abs(guess - whole) / scale for name, guess in guesses.items()})
        exact = exact and self._equal(guesses[kind], whole, scale)
        return Reduction(
            kind,
            trims,
            mixes=None if exact else "the loss of two rows does not follow from the losses of each",
            reads_padding="less of it gives another loss" if trims is False else None,
        )

    def _likeliest(self, errors: dict[str, float]) -> str:
        """The first reading that is as near as the nearest one, up to rounding."""
        bound = min(errors.values()) + self.tolerance / 300
        return next(kind for kind, error in errors.items() if error <= bound)

    def _with_twice_the_count(self, inputs: Any) -> Optional[float]:
        return None if self.num_items is None else self.loss(inputs, 16.0)

    def answer_of_one(self, reason: str) -> Reduction:
        """What a single row tells where two cannot be asked: a loss that follows the count adds up over rows."""
        follows = None
        try:
            one = take(self.batches, self.rows[:1], self.pad_token_id)
            halved = self._with_twice_the_count(one)
            follows = halved is not None and abs(halved) < FOLLOWS * abs(self.loss(one))
        except Exception as error:  # training itself will say why, if it fails there too
            forget_traceback(error)
        mixes = None if follows else f"it could not be asked: {reason}"
        return Reduction("num_items" if follows else "rows", self._trims_alone(), mixes)

    def _trims_alone(self) -> Optional[bool]:
        """Whether the first row loses nothing by losing its padding; believed where it does not fit with it."""
        padded = take(self.batches, self.rows[:1], self.pad_token_id, trim=False)
        try:
            return self._trims(padded)
        except Exception as error:
            forget_traceback(error)
            return True if is_out_of_memory(error) else False


FOLLOWS = 0.75
"""Told twice the count, a loss that is divided by it halves; nearly so with a part of its own that nobody counts."""


def _shapes(inputs: Any) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in inputs.values() if torch.is_tensor(value)]


def _guesses(both: Any, alone: list[Any], parts: list[float], shifts: bool) -> dict[str, float]:
    """The loss of both rows from the losses of each, by reading; the likelier reading first."""
    kinds = ["rows", "sum"]
    labels = both.get("labels")
    if torch.is_tensor(labels) and not labels.is_floating_point():
        by_labels = ["labels", "shifted_labels"] if labels.dim() >= 2 else ["labels"]
        kinds = [*(reversed(by_labels) if shifts else by_labels), *kinds]
    guesses = {}
    for kind in kinds:
        counts = [float(_items(kind, one, 1)) for one in alone]
        weighted = sum(count * part for count, part in zip(counts, parts, strict=True) if count)
        guesses[kind] = weighted if kind == "sum" else weighted / max(sum(counts), 1.0)
    return guesses


# -- the two rows ------------------------------------------------------------------------------------------------------


def _two_rows(batches: Sequence[Batch]) -> Optional[list[Row]]:
    """The shortest row in which something is learned, and the next longer one that may stand in one batch with it."""
    learned = {
        (number, row): count
        for number, batch in enumerate(batches)
        if not batch.obstacle
        for row, count in enumerate(_learned(batch))
    }
    candidates = [row for row, count in learned.items() if count >= ENOUGH_LABELS]
    if len(candidates) < 2:
        candidates = [row for row, count in learned.items() if count]
    if not candidates:
        return None

    def length(row: Row) -> int:
        return batches[row[0]].length(row[1])

    first = min(candidates, key=length)
    kind = signature(batches[first[0]])
    others = [row for row in candidates if row != first and signature(batches[row[0]]) == kind]
    longer = [row for row in others if length(row) > length(first)]
    return [first, min(longer or others, key=length)] if others else None


BEGINNING_TOKENS = 64
"""Tokens that rows are cut to, at the right, before the model is asked about them."""


def _beginnings(batches: Sequence[Batch], rows: Sequence[Row], pad_token_id: int) -> Optional[Batch]:
    """The first columns of two rows as a batch of their own, the shorter row before the longer and shorter here too;
    as many columns as it takes for both to learn something. None if that would not be less."""
    owner = batches[rows[0][0]]
    if not owner.trimmable or owner.decoder_width or not has_time("labels", owner.inputs.get("labels")):
        return None
    both = take(batches, sorted(rows), pad_token_id)
    shorter = sorted(rows).index(rows[0])
    lengths = [batches[number].length(row) for number, row in rows]
    learned = both["labels"].ne(NOT_LEARNED).cumsum(1)
    # A label more than enough: the first may be shifted out.
    start = int((learned < ENOUGH_LABELS + 1).sum(1).max()) + 1
    width = max(start, BEGINNING_TOKENS)
    if width >= lengths[0] or width >= both["labels"].size(1):
        return None
    cut = {
        name: value[:, :width].clone() if follows_time(name, value, owner) else value for name, value in both.items()
    }
    if lengths[0] < lengths[1]:
        cut["attention_mask"][shorter, start:] = 0
        cut["labels"][shorter, start:] = NOT_LEARNED
    ordered = {
        name: value[[shorter, 1 - shorter]] if torch.is_tensor(value) and value.dim() and len(value) == 2 else value
        for name, value in cut.items()
    }
    return read_layout(type(both)(ordered), owner.main_input_name)


ENOUGH_LABELS = 3
"""Learned positions per row that tell means over rows and over labels apart; fewer only if there are no such rows."""


def _learned(batch: Batch) -> list[int]:
    labels = batch.inputs.get("labels")
    if not has_time("labels", labels):
        return [ENOUGH_LABELS] * batch.rows
    return labels.ne(NOT_LEARNED).reshape(batch.rows, -1).sum(dim=1).tolist()


def _uneven(inputs: Any) -> Any:
    """With most labels of the first row taken away, where some are anyway: means over rows and labels then differ."""
    labels = inputs.get("labels")
    if not has_time("labels", labels) or bool(labels.ne(NOT_LEARNED).all()):
        return inputs
    labels = labels.clone()
    learned = labels[0].ne(NOT_LEARNED)
    keep = learned.cumsum(0).flatten()[-1] // 2 + 1
    labels[0] = torch.where(learned & (learned.cumsum(0) >= keep), labels[0], NOT_LEARNED)
    return type(inputs)({**inputs, "labels": labels})


# -- leaving no trace --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every module's mode and all RNG are as before."""
    modes = [(module, module.training) for module in model.modules()]
    devices = [p.device for p in model.parameters() if p.device.type == "cuda"]
    with torch.random.fork_rng(devices=sorted({device.index for device in devices})):
        model.eval()
        try:
            yield
        finally:
            for module, was_training in modes:
                module.training = was_training


def tolerance(model: nn.Module, low_precision: bool) -> float:
    low = any(p.dtype not in (torch.float32, torch.float64) for p in model.parameters())
    return ROUGH if low or low_precision else EXACT


def mixing_modules(model: nn.Module) -> Optional[str]:
    """Names of the modules through which rows of a batch act on each other in training, as a phrase; None without."""
    batch_norm = nn.modules.batchnorm._BatchNorm
    names = [name for name, module in model.named_modules() if isinstance(module, batch_norm) and module.training]
    if names:
        return f"{_few(names)} (BatchNorm)"
    config = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0):
        return "the router's auxiliary losses (config.router_aux_loss_coef)"
    return None


def _few(names: Sequence[str], most: int = 3) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
