"""Cross-entropy per token and per row, with and without the whole logits in memory.

``chunked_linear_cross_entropy`` is output layer and loss in one: it takes some rows of the hidden states through the
layer, reads their losses, turns their logits in place into the gradient, adds that to those of hidden states, weight
and bias, and goes on with the next rows. Only the logits of one chunk exist, and at most a block of them twice.

The gradient is that of sum(token_weights · losses), made during the forward; the backward multiplies it by
grad_output / divisor. So no division by a large number of tokens comes near half precision, and a loss scale acts as
it does on the stock loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Optional, Union

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import cross_entropy

from scu_trainer.train.loss.rows.gradient_sums import may_add_to_gradient
from scu_trainer.train.loss.rows.pages import new_empty, new_zeros
from scu_trainer.train.loss.rows.products import (
    ALIGNED_ROWS,
    PART_BYTES,
    add_product,
    aligned,
    compiles_shapes,
    filled_up,
    from_words,
    goes_through_onednn,
    to_words,
)
from scu_trainer.train.loss.rows.softmax import kernel_for, reads_half
from scu_trainer.train.step.batches.rows import NOT_LEARNED

ROWS = 256
"""Of a chunk, except on CUDA: with fewer the weight is read and its gradient written too often (64 rows of 128,000
words take 1.3 times as long per row), more save no time."""

WEIGHT = 1
"""Its position among the inputs of the autograd function."""

CARD_SHARE, MOST_ROWS_ON_CARD = 64, 2048
"""On a card many small chunks wait for their launches: up to this many rows, in a 64th of its memory. Of all that
this process may use, not of what is free: sums in another order for every run would be another run."""

_CARD_BYTES: ContextVar[Optional[int]] = ContextVar("card_bytes", default=None)


def rows_in_chunk(vocab: int, device: Optional[torch.device] = None) -> int:
    """ROWS, on a CUDA ``device`` those whose float32 logits take a share of its memory where those are more."""
    allowed_bytes = _CARD_BYTES.get() or card_bytes(device)
    if allowed_bytes is None:
        return ROWS
    return min(MOST_ROWS_ON_CARD, max(ROWS, allowed_bytes // CARD_SHARE // (4 * vocab)))


def card_bytes(device: Optional[torch.device]) -> Optional[int]:
    """What this process may use of the memory of a CUDA ``device``; None for others."""
    if device is None or device.type != "cuda" or not torch.cuda.is_available():
        return None
    share = torch.cuda.get_per_process_memory_fraction(device)
    return int(share * torch.cuda.get_device_properties(device).total_memory)


@contextlib.contextmanager
def chunks_as_on_card(allowed_bytes: Optional[int]) -> Iterator[None]:
    """Inside, chunks have as many rows as on a card of which so much may be used, wherever the tensors are: those
    without content are on the CPU and stand for a card's (train/memory_estimate). None: as it is outside."""
    before = _CARD_BYTES.set(allowed_bytes)
    try:
        yield
    finally:
        _CARD_BYTES.reset(before)


# -- losses from hidden states -----------------------------------------------------------------------------------------


def chunked_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    targets: Tensor,
    *,
    token_weights: Optional[Tensor] = None,
    divisor: Union[Tensor, float, None] = None,
    rows_per_chunk: Optional[int] = None,
    host_targets: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """(sum(token_weights · token_losses) / divisor, token_losses in nats).

    hidden (tokens, size), weight (vocab, size), bias (vocab,), targets and token_weights (tokens,): already shifted.
    ``divisor``: None for the number of valid targets, or what stands for it (num_items_in_batch); without a valid
    target (of -100 is none) the loss is 0 / divisor and all gradients are 0.

    The loss can be differentiated once by hidden, weight and bias. token_losses (tokens,) cannot; they are 0 where
    ignored. Both float32, float64 if the weight is. A token of weight 0 has its loss, be it infinite or NaN, and takes
    no part in the gradient at all. Waits for the device once, not at all without token_weights where ``host_targets``
    are given, the same targets on the host. Raises IndexError for targets outside the vocabulary.
    """
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        found = f"hidden {tuple(hidden.shape)}, targets {tuple(targets.shape)}"
        raise ValueError(f"{found} found; (tokens, size) and (tokens,) allowed: flatten both alike")
    work = _Work(
        *_order(targets, token_weights, weight, host_targets),
        targets=targets,
        token_weights=token_weights,
        divisor=divisor,
        rows_per_chunk=rows_per_chunk or rows_in_chunk(weight.size(0), weight.device),
        compute_dtype=_compute_dtype(weight),
        with_gradient=torch.is_grad_enabled(),
    )
    return _LinearCrossEntropy.apply(hidden, weight, bias, work)


@dataclass(frozen=True)
class _Work:
    """One call. ``order`` (valid,): tokens for the layer, first the ``learned``, then those of weight 0."""

    order: Tensor
    learned: int
    targets: Tensor
    token_weights: Optional[Tensor]
    divisor: Union[Tensor, float, None]
    rows_per_chunk: int
    compute_dtype: torch.dtype
    with_gradient: bool

    @property
    def loss_dtype(self) -> torch.dtype:
        return torch.float64 if self.compute_dtype == torch.float64 else torch.float32

    def chunks(self, with_gradient: bool) -> Iterator[tuple[Tensor, bool]]:
        """(tokens, whether they have a gradient) of each chunk."""
        sections = (self.order[: self.learned], with_gradient), (self.order[self.learned :], False)
        for section, has_gradient in sections:
            for tokens in section.split(self.longest_chunk(len(section))) if len(section) else ():
                yield tokens, has_gradient

    def longest_chunk(self, tokens: int) -> int:
        """Of so many tokens, in chunks of nearly one length: a short one is slow for its size."""
        count = max(1, -(-tokens // self.rows_per_chunk))
        return min(self.rows_per_chunk, aligned(-(-tokens // count)))

    def weights_of(self, tokens: Tensor) -> Optional[Tensor]:
        """(rows, 1), or None for all ones."""
        if self.token_weights is None:
            return None
        return self.token_weights.index_select(0, tokens).to(self.loss_dtype).unsqueeze(1)

    def sum_of(self, losses: Tensor) -> Tensor:
        learned = self.order[: self.learned]
        chosen = losses.index_select(0, learned)
        weights = self.weights_of(learned)
        return chosen.sum() if weights is None else (chosen * weights.squeeze(1)).sum()

    def divided(self, value: Tensor) -> Tensor:
        divisor = len(self.order) if self.divisor is None else self.divisor
        return value / (divisor.detach().to(value.device) if torch.is_tensor(divisor) else divisor)


def _order(
    targets: Tensor, token_weights: Optional[Tensor], weight: Tensor, host_targets: Optional[Tensor] = None
) -> tuple[Tensor, int]:
    """``order`` and ``learned`` of _Work, at the price of one wait for the device."""
    if host_targets is not None and token_weights is None:
        order, learned = _order(host_targets, None, weight)
        return (order.pin_memory() if targets.is_cuda else order).to(targets.device, non_blocking=True), learned
    vocab = weight.size(0)
    if isinstance(targets, FakeTensor):  # shapes alone (train/memory_estimate): after two chunks all have been seen
        few = min(len(targets), 2 * rows_in_chunk(vocab, weight.device))
        return torch.arange(few), few
    valid = targets != NOT_LEARNED
    learned = valid if token_weights is None else valid & (token_weights != 0)
    outside = valid & ((targets < 0) | (targets >= vocab))
    counts = torch.stack([learned.sum(), valid.sum(), outside.sum()]).tolist()
    if counts[2]:
        raise IndexError(
            f"{counts[2]} targets, the first of them {int(targets[outside][0])}, are outside the vocabulary; allowed "
            f"are 0 to {vocab - 1}, and {NOT_LEARNED} for tokens that are not learned"
        )
    place = 2 - valid.to(torch.int8) - learned.to(torch.int8)
    return torch.argsort(place, stable=True)[: counts[1]], counts[0]


def _compute_dtype(weight: Tensor) -> torch.dtype:
    """What a stock linear layer would multiply in, here and now."""
    device = weight.device.type
    if weight.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return weight.dtype
    return torch.get_autocast_dtype(device)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, work):
        wanted = [work.with_gradient and needed for needed in ctx.needs_input_grad[:3]]
        losses, gradients = _losses_and_gradients(hidden, weight, bias, work, wanted)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.mark_non_differentiable(losses)
        ctx.work, ctx.wanted, ctx.gradients = work, wanted, gradients
        return work.divided(work.sum_of(losses)), losses

    @staticmethod
    def backward(ctx, loss_gradient, _):
        if torch.is_grad_enabled():  # create_graph; once_differentiable would give a constant without a word
            raise RuntimeError(
                "the chunked cross-entropy has no second derivative: use the stock loss, or create_graph=False"
            )
        inputs, work = ctx.saved_tensors, ctx.work
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:  # a second backward: the first gave the tensors away, scaled, without copying them
            _, gradients = _losses_and_gradients(*inputs, work, ctx.wanted)
        factor = work.divided(loss_gradient)
        made: list[Optional[Tensor]] = []
        for position, (gradient, like) in enumerate(zip(gradients, inputs, strict=True)):
            if gradient is None:
                made.append(None)
            elif not work.learned:  # the factor may be 1 / 0
                made.append(gradient.to(like.dtype))
            elif position == WEIGHT and gradient.dtype == like.dtype and may_add_to_gradient(like, ctx, position):
                like.grad.addcmul_(gradient, factor)  # one pass over both instead of two
                made.append(None)
            else:
                made.append(gradient.mul_(factor).to(like.dtype))
        return *made, None


def _losses_and_gradients(
    hidden: Tensor, weight: Tensor, bias: Optional[Tensor], work: _Work, wanted: list[bool]
) -> tuple[Tensor, list[Optional[Tensor]]]:
    """Losses (tokens,), and the gradients of sum(token_weights · losses) that are ``wanted``, in the losses' dtype."""
    losses = hidden.new_zeros(len(hidden), dtype=work.loss_dtype)
    with torch.autocast(hidden.device.type, enabled=False):  # what is float32 here stays it
        layer = _OutputLayer(weight, bias, work)
        sums = [
            new_zeros(tensor, tensor.shape, work.loss_dtype) if is_wanted else None
            for tensor, is_wanted in zip((hidden, weight, bias), wanted, strict=True)
        ]
        for tokens, has_gradient in work.chunks(any(wanted)):
            rows = hidden.index_select(0, tokens).to(work.compute_dtype)
            chunk_losses, signal = layer.losses(rows, work.targets.index_select(0, tokens), has_gradient)
            losses.index_copy_(0, tokens, chunk_losses)
            if has_gradient:
                _add_chunk(sums, layer, tokens, rows, signal, work.weights_of(tokens))
    return losses, sums


class _OutputLayer:
    """The layer, and the buffers in which it meets one chunk after the other: fresh ones cost page faults each time."""

    def __init__(self, weight: Tensor, bias: Optional[Tensor], work: _Work) -> None:
        self.weight = weight.to(work.compute_dtype)
        self.bias = None if bias is None else bias.to(work.compute_dtype)
        self.kernel = kernel_for(weight.device, work.compute_dtype)
        is_compiled = compiles_shapes(weight.device.type, work.compute_dtype)
        self.fills = is_compiled and work.rows_per_chunk >= ALIGNED_ROWS
        longest = max(map(work.longest_chunk, (work.learned, len(work.order) - work.learned)))
        most = min(longest, len(work.order))
        shape = aligned(most) if self.fills or goes_through_onednn(self.weight) else most, weight.size(0)
        self.product = new_empty(weight, shape, work.compute_dtype)
        is_read = work.compute_dtype == work.loss_dtype or reads_half(self.kernel)
        self.logits = self.product if is_read else new_empty(weight, shape, work.loss_dtype)

    def losses(self, rows: Tensor, targets: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor]:
        """Losses (rows,), and their gradient by the logits (rows, vocab) where that is asked for."""
        logits, filled = self.logits[: len(rows)], self.filled(rows)
        to_words(filled, self.weight, self.bias, self.product[: len(filled)])
        if logits.dtype != self.product.dtype:
            logits.copy_(self.product[: len(rows)])
        return self.kernel(logits, targets, with_gradient)

    def filled(self, rows: Tensor) -> Tensor:
        """With rows of zeros at the end where few numbers of rows are to be multiplied."""
        return filled_up(rows) if self.fills else rows

    def as_factor(self, signal: Tensor) -> Tensor:
        """The gradient by the logits in the dtype that is multiplied in, ``filled``."""
        if signal.dtype == self.product.dtype:
            return signal
        factor = self.product[: aligned(len(signal)) if self.fills else len(signal)]
        factor[len(signal) :].zero_()
        factor[: len(signal)].copy_(signal)
        return factor


def _add_chunk(
    sums: list[Optional[Tensor]],
    layer: _OutputLayer,
    tokens: Tensor,
    rows: Tensor,
    signal: Tensor,
    token_weights: Optional[Tensor],
) -> None:
    """Token weights meet the narrow side of each product: (rows, size), not (rows, vocab)."""
    hidden, weight, bias = sums
    if bias is not None:
        dtype, weightless = bias.dtype, token_weights is None
        bias += signal.sum(0, dtype=dtype) if weightless else signal.t().to(dtype).mv(token_weights.squeeze(1))
    factor = layer.as_factor(signal)
    if hidden is not None:
        part = from_words(factor, layer.product, layer.weight)[: len(rows)].to(hidden.dtype)
        hidden.index_copy_(0, tokens, part if token_weights is None else part.mul_(token_weights))
    if weight is not None:
        weighted = rows if token_weights is None else (rows * token_weights).to(rows.dtype)
        add_product(weight, factor, layer.filled(weighted))


# -- losses from logits ------------------------------------------------------------------------------------------------


@torch.no_grad()
def token_losses_of_logits(logits: Tensor, targets: Tensor, rows_per_chunk: Optional[int] = None) -> Tensor:
    """Cross-entropy of each token in nats, (tokens,), float32 (float64 if the logits are); 0 where nothing is learned.

    logits (..., vocab), targets (...): already shifted. Converts one chunk of rows at a time. Logits that are a slice
    (``logits[:, :-1]``) would be copied: shift the targets instead.
    """
    flat, targets = logits.reshape(-1, logits.size(-1)), targets.reshape(-1)
    losses = flat.new_zeros(len(flat), dtype=torch.float64 if flat.dtype == torch.float64 else torch.float32)
    vocab = flat.size(1)
    step = rows_per_chunk or max(rows_in_chunk(vocab, flat.device), PART_BYTES // (4 * vocab))
    for start in range(0, len(flat), step):
        chunk = flat[start : start + step].to(losses.dtype)
        chunk_targets = targets[start : start + step]
        losses[start : start + step] = cross_entropy(chunk, chunk_targets, ignore_index=NOT_LEARNED, reduction="none")
    return losses
