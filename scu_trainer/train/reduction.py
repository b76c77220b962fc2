"""How does this loss put the rows of a batch together? Asked of the model itself, once, on two short rows.

Splitting a batch is exact when the loss of the whole is a known sum over its rows. Signatures do not tell: many
forwards take ``num_items_in_batch`` among their ``**kwargs`` and ignore it. So the loss of two rows together is
compared with the losses of each alone under every reading, without gradients, in evaluation mode, with RNG and buffers
left as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch
from torch import nn

from scu_trainer.train.memory import free_memory, is_out_of_memory
from scu_trainer.train.optimizer_guard import retry_unchanged
from scu_trainer.train.rows import (
    NOT_LEARNED,
    PADDING,
    Batch,
    Row,
    follows_time,
    has_time,
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
    ``trims``: cutting padding off leaves the loss as it was; else ``reads_padding`` may say how that was seen.
    """

    kind: str
    trims: bool = True
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
) -> Optional[Reduction]:
    """``num_items``: what the stock loop counted for this window, None where the loss is not told. ``training`` False:
    modules that mix rows in training mode only do not count. None: there are no two rows to compare.

    Raises what the loss raises on whole rows.
    """
    rows = _two_rows(batches)
    if rows is None:
        return None
    both, layout = take(batches, rows, pad_token_id), batches[rows[0][0]]
    device = next(model.parameters()).device
    question = _Question(loss_of, _tolerance(model), num_items, layout, pad_token_id, device)
    found = mixing_modules(model) if training else None
    with _untouched(model), torch.no_grad():
        answer = _ask(question, both, layout, lambda: take(batches, rows, pad_token_id, trim=False))
    return replace(answer, mixes=f"{found} put the whole batch together") if found else answer


def _ask(question: _Question, both: Any, layout: Batch, untrimmed: Callable[[], Any]) -> Reduction:
    if not layout.trimmable:
        return question.answer(both)
    try:
        trims = question.trims(_short(both, layout))
        answer = question.answer(_short(both, layout))
        return replace(answer, trims=trims, reads_padding=None if trims else "more of it gives another loss")
    except (RuntimeError, ValueError, IndexError) as error:
        if is_out_of_memory(error):
            raise
        reason = f"it fails on shorter rows: {error}"
    # A model for one fixed length. Whether it adds up over rows can still be asked.
    return replace(question.answer(untrimmed()), trims=False, reads_padding=reason)


@dataclass
class _Question:
    loss_of: LossOf
    tolerance: float
    num_items: Any
    layout: Batch
    pad_token_id: int
    device: torch.device

    def loss(self, inputs: Any, items: float = 8.0) -> float:
        """``items``: not the count of the window, by which a small loss would drown in rounding."""

        def ask() -> float:
            device = getattr(self.num_items, "device", None)
            given = None if self.num_items is None else torch.as_tensor(items, device=device)
            return float(self.loss_of(dict(inputs), given))

        # A wrong belief about the loss would train something else: one failed allocation is no reason to take it up.
        return retry_unchanged(ask, (), is_out_of_memory, lambda: free_memory(self.device))

    def trims(self, both: Any) -> bool:
        """Whether two rows, of which the first is padded, lose nothing by less padding and win nothing by more."""
        first = _narrow(both, 0)
        wide = {name: _wider(name, value, self.layout, self.pad_token_id) for name, value in both.items()}
        same = [(self.loss(first), self.loss(self._trimmed(first))), (self.loss(both), self.loss(wide))]
        return all(self._equal(a, b, max(abs(a), abs(b))) for a, b in same)

    def _trimmed(self, one: Any) -> Any:
        layout = read_layout(one, self.layout.main_input_name, self.layout.is_encoder_decoder)
        return take([layout], [(0, 0)], self.pad_token_id)

    def _equal(self, a: float, b: float, scale: float) -> bool:
        return abs(a - b) <= self.tolerance * max(scale, 1e-12)

    def answer(self, both: Any) -> Reduction:
        both = _uneven(both)
        alone = [_narrow(both, i) for i in range(2)]
        whole, parts = self.loss(both), [self.loss(one) for one in alone]
        scale = max(abs(whole), *map(abs, parts))
        guesses = _guesses(both, alone, parts)
        if self.num_items is not None and abs(halved := self.loss(both, 16.0)) < 0.75 * abs(whole):
            # Told twice the count it gives half the loss (or nearly, with a part of its own that nobody counts).
            guesses = {"num_items": sum(parts)}
            scale = scale if self._equal(2 * halved, whole, scale) else 0.0
        kind = min(guesses, key=lambda name: abs(guesses[name] - whole))
        exact = scale > 0 and self._equal(guesses[kind], whole, scale)
        return Reduction(kind, mixes=None if exact else "the loss of two rows does not follow from the losses of each")


def _guesses(both: Any, alone: list[Any], parts: list[float]) -> dict[str, float]:
    """The loss of both rows from the losses of each, by reading; the likelier reading first."""
    kinds = ["rows", "sum"]
    labels = both.get("labels")
    if torch.is_tensor(labels) and not labels.is_floating_point():
        kinds = ["labels", *(["shifted_labels"] if labels.dim() >= 2 else []), *kinds]
    guesses = {}
    for kind in kinds:
        counts = [float(_items(kind, one, 1)) for one in alone]
        weighted = sum(count * part for count, part in zip(counts, parts, strict=True) if count)
        guesses[kind] = weighted if kind == "sum" else weighted / max(sum(counts), 1.0)
    return guesses


# -- the two rows ------------------------------------------------------------------------------------------------------


SHORT = 8
"""Columns of the two rows that are compared: enough to tell, and small beside any row that is trained on."""


def _two_rows(batches: Sequence[Batch]) -> Optional[list[Row]]:
    """The two shortest rows that may stand in one batch."""
    candidates = [
        (number, row) for number, batch in enumerate(batches) if not batch.obstacle for row in range(batch.rows)
    ]
    if not candidates:
        return None

    def length(row: Row) -> int:
        return batches[row[0]].length(row[1])

    first = min(candidates, key=length)
    kind = signature(batches[first[0]])
    others = [row for row in candidates if row != first and signature(batches[row[0]]) == kind]
    return [first, min(others, key=length)] if others else None


def _short(inputs: Any, layout: Batch) -> Any:
    """The first columns of both rows, the first row shorter than the second; something to learn in each."""
    short = {
        name: value[:, :SHORT].contiguous() if follows_time(name, value, layout) else value
        for name, value in inputs.items()
    }
    mask, labels, tokens = short["attention_mask"], short.get("labels"), short.get("input_ids")
    width = mask.size(1)
    own = torch.ones_like(mask)
    own[0, max(2, width * 5 // 8) :] = 0
    short["attention_mask"] = own
    if follows_time("labels", labels, layout) and not layout.is_encoder_decoder:
        # What is learned in the first columns is often nothing (a prompt): any token will do for the question.
        targets = tokens if torch.is_tensor(tokens) and tokens.shape == labels.shape else labels.clamp(min=0)
        short["labels"] = torch.where(own.bool(), targets.to(labels.dtype), NOT_LEARNED)
    return short


def _wider(name: str, value: Any, layout: Batch, pad_token_id: int) -> Any:
    if not follows_time(name, value, layout):
        return value
    fill = PADDING[name] if PADDING[name] is not None else pad_token_id
    return torch.cat([value, value.new_full((value.size(0), 3, *value.shape[2:]), fill)], dim=1)


def _uneven(inputs: Any) -> Any:
    """With most labels of the first row taken away: means over rows and over labels then differ."""
    labels = inputs.get("labels")
    if not has_time("labels", labels):
        return inputs
    labels = labels.clone()
    learned = labels[0].ne(NOT_LEARNED)
    keep = learned.cumsum(0).flatten()[-1] // 2 + 1
    labels[0] = torch.where(learned & (learned.cumsum(0) >= keep), labels[0], NOT_LEARNED)
    return {**inputs, "labels": labels}


def _narrow(inputs: Any, row: int) -> Any:
    return {
        name: value[row : row + 1]
        if (torch.is_tensor(value) and value.dim() > 0) or isinstance(value, (list, tuple))
        else value
        for name, value in inputs.items()
    }


# -- leaving no trace --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
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


def _tolerance(model: nn.Module) -> float:
    low = any(p.dtype not in (torch.float32, torch.float64) for p in model.parameters())
    return ROUGH if low or torch.is_autocast_enabled() else EXACT


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
