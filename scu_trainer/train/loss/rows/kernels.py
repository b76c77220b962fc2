"""Compute the cross-entropy per token and per row, with and without the whole logits in memory.

``chunked_linear_cross_entropy`` combines output layer and loss. For one chunk of rows after the other, it multiplies
the hidden states by the layer's weight, computes the losses, turns the logits into their gradient in place, and adds to
the gradients of hidden states, weight and bias. Only the logits of one chunk exist, and at most a block of them twice.

The gradient of sum(token_weights · losses) is computed during the forward; the backward multiplies it by grad_output /
divisor. So half precision never holds values divided by a large number of tokens, and a loss scale acts as on the stock
loss.
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
    from_words,
    goes_through_onednn,
    pad_to_aligned,
    to_words,
)
from scu_trainer.train.loss.rows.softmax import kernel_for, reads_half, with_soft_cap
from scu_trainer.train.step.batches.rows import NOT_LEARNED

ROWS = 256
"""Rows of a chunk, except on CUDA. With fewer, the weight is read and its gradient written too often (64 rows with a
vocabulary of 128,000 take 1.3 times as long per row); more save no time."""

WEIGHT = 1
"""Position of the weight among the inputs of the autograd function."""

CARD_SHARE, MOST_ROWS_ON_CARD = 64, 2048
"""On a GPU, many small chunks are bound by kernel launches, so a chunk has up to this many rows and takes up to 1/64 of
the memory. That is memory this process may use, not free memory: otherwise each run would sum in another order."""

_CARD_BYTES: ContextVar[Optional[int]] = ContextVar("usable_gpu_bytes", default=None)


def rows_in_chunk(vocab: int, device: Optional[torch.device] = None) -> int:
    """Return ROWS or, on a CUDA ``device``, up to MOST_ROWS_ON_CARD if their float32 logits fit its allowed share."""
    allowed_bytes = _CARD_BYTES.get() or usable_gpu_bytes(device)
    if allowed_bytes is None:
        return ROWS
    return min(MOST_ROWS_ON_CARD, max(ROWS, allowed_bytes // CARD_SHARE // (4 * vocab)))


def usable_gpu_bytes(device: Optional[torch.device]) -> Optional[int]:
    """Return how much memory of a CUDA ``device`` this process may use; None for other devices."""
    if device is None or device.type != "cuda" or not torch.cuda.is_available():
        return None
    share = torch.cuda.get_per_process_memory_fraction(device)
    return int(share * torch.cuda.get_device_properties(device).total_memory)


@contextlib.contextmanager
def chunks_as_on_gpu(allowed_bytes: Optional[int]) -> Iterator[None]:
    """Use the chunk size of a GPU with this much usable memory on any device; None changes nothing. For estimates
    (train/memory_estimate), where tensors without content on the CPU stand for those of a GPU."""
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
    soft_cap: Optional[float] = None,
) -> tuple[Tensor, Tensor]:
    """Return (sum(token_weights · token_losses) / divisor, token_losses in nats).

    hidden (tokens, size), weight (vocab, size), bias (vocab,), targets and token_weights (tokens,): already shifted.
    ``divisor``: None for the number of valid targets, or the number to divide by (num_items_in_batch). Without a valid
    target (-100 is not valid) the loss is 0 / divisor and all gradients are 0. ``soft_cap``: the loss is that of
    soft_cap · tanh(logits / soft_cap).

    The loss can be differentiated once with respect to hidden, weight and bias. token_losses (tokens,) is not
    differentiable and 0 for ignored targets. Both are float32, or float64 if the weight is. A token of weight 0 still
    has a loss, even an infinite or NaN one, but does not contribute to the gradient. Waits for the device once; not at
    all without token_weights if ``host_targets``, the same targets on the host, are given. Raises IndexError for
    targets outside the vocabulary.
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
        soft_cap=soft_cap,
    )
    return _LinearCrossEntropy.apply(hidden, weight, bias, work)


@dataclass(frozen=True)
class _Work:
    """One call. ``order`` (valid,): indices of valid tokens, first the ``learned`` ones, then those of weight 0."""

    order: Tensor
    learned: int
    targets: Tensor
    token_weights: Optional[Tensor]
    divisor: Union[Tensor, float, None]
    rows_per_chunk: int
    compute_dtype: torch.dtype
    with_gradient: bool
    soft_cap: Optional[float]

    @property
    def loss_dtype(self) -> torch.dtype:
        return torch.float64 if self.compute_dtype == torch.float64 else torch.float32

    def chunks(self, with_gradient: bool) -> Iterator[tuple[Tensor, bool]]:
        """Yield (tokens, whether they have a gradient) for each chunk."""
        sections = (self.order[: self.learned], with_gradient), (self.order[self.learned :], False)
        for section, has_gradient in sections:
            for tokens in section.split(self.longest_chunk(len(section))) if len(section) else ():
                yield tokens, has_gradient

    def longest_chunk(self, tokens: int) -> int:
        """Return the maximum chunk size; chunks have nearly equal sizes, because short ones are inefficient."""
        count = max(1, -(-tokens // self.rows_per_chunk))
        return min(self.rows_per_chunk, aligned(-(-tokens // count)))

    def weights_of(self, tokens: Tensor) -> Optional[Tensor]:
        """Return the weights of ``tokens``, (rows, 1); None if all are 1."""
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
    """Return ``order`` and ``learned`` of _Work. Waits for the device once unless ``host_targets`` suffice."""
    if host_targets is not None and token_weights is None:
        order, learned = _order(host_targets, None, weight)
        return (order.pin_memory() if targets.is_cuda else order).to(targets.device, non_blocking=True), learned
    vocab = weight.size(0)
    if isinstance(targets, FakeTensor):  # only shapes (train/memory_estimate): two chunks show all sizes
        shown = min(len(targets), 2 * rows_in_chunk(vocab, weight.device))
        return torch.arange(shown), shown
    valid = targets != NOT_LEARNED
    learned = valid if token_weights is None else valid & (token_weights != 0)
    outside = valid & ((targets < 0) | (targets >= vocab))
    counts = torch.stack([learned.sum(), valid.sum(), outside.sum()]).tolist()
    if counts[2]:
        raise IndexError(
            f"{counts[2]} targets, the first of them {int(targets[outside][0])}, are outside the vocabulary; allowed "
            f"are 0 to {vocab - 1}, and {NOT_LEARNED} for tokens that are not learned"
        )
    group = 2 - valid.to(torch.int8) - learned.to(torch.int8)
    return torch.argsort(group, stable=True)[: counts[1]], counts[0]


def _compute_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype in which a stock linear layer would multiply in the current context."""
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
        if torch.is_grad_enabled():  # create_graph; once_differentiable would silently give a constant
            raise RuntimeError(
                "the chunked cross-entropy has no second derivative: use the stock loss, or create_graph=False"
            )
        inputs, work = ctx.saved_tensors, ctx.work
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:  # a second backward: the first one scaled and returned the tensors without a copy
            _, gradients = _losses_and_gradients(*inputs, work, ctx.wanted)
        factor = work.divided(loss_gradient)
        results: list[Optional[Tensor]] = []
        for position, (gradient, like) in enumerate(zip(gradients, inputs, strict=True)):
            if gradient is None:
                results.append(None)
            elif not work.learned:  # the factor may be 1 / 0
                results.append(gradient.to(like.dtype))
            elif position == WEIGHT and gradient.dtype == like.dtype and may_add_to_gradient(like, ctx, position):
                like.grad.addcmul_(gradient, factor)  # one pass instead of two
                results.append(None)
            else:
                results.append(gradient.mul_(factor).to(like.dtype))
        return *results, None


def _losses_and_gradients(
    hidden: Tensor, weight: Tensor, bias: Optional[Tensor], work: _Work, wanted: list[bool]
) -> tuple[Tensor, list[Optional[Tensor]]]:
    """Return the losses (tokens,) and the ``wanted`` gradients of sum(token_weights · losses), in the losses' dtype."""
    losses = hidden.new_zeros(len(hidden), dtype=work.loss_dtype)
    with torch.autocast(hidden.device.type, enabled=False):  # float32 tensors must stay float32
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
    """The output layer with buffers that all chunks reuse, because new buffers would cost page faults each time."""

    def __init__(self, weight: Tensor, bias: Optional[Tensor], work: _Work) -> None:
        self.weight = weight.to(work.compute_dtype)
        self.bias = None if bias is None else bias.to(work.compute_dtype)
        self.kernel = kernel_for(weight.device, work.compute_dtype)
        is_compiled = compiles_shapes(weight.device.type, work.compute_dtype)
        self.fills = is_compiled and work.rows_per_chunk >= ALIGNED_ROWS
        longest = max(map(work.longest_chunk, (work.learned, len(work.order) - work.learned)))
        most_rows = min(longest, len(work.order))
        shape = (aligned(most_rows) if self.fills or goes_through_onednn(self.weight) else most_rows, weight.size(0))
        self.product = new_empty(weight, shape, work.compute_dtype)
        is_read = work.compute_dtype == work.loss_dtype or reads_half(self.kernel)
        self.logits = self.product if is_read else new_empty(weight, shape, work.loss_dtype)
        if work.soft_cap is not None:
            self.kernel = with_soft_cap(self.kernel, work.soft_cap)

    def losses(self, rows: Tensor, targets: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor]:
        """Return the losses (rows,) and, if wanted, their gradient with respect to the logits (rows, vocab)."""
        logits, filled = self.logits[: len(rows)], self.filled(rows)
        to_words(filled, self.weight, self.bias, self.product[: len(filled)])
        if logits.dtype != self.product.dtype:
            logits.copy_(self.product[: len(rows)])
        return self.kernel(logits, targets, with_gradient)

    def filled(self, rows: Tensor) -> Tensor:
        """Append rows of zeros if products should have few different numbers of rows."""
        return pad_to_aligned(rows) if self.fills else rows

    def as_factor(self, signal: Tensor) -> Tensor:
        """Return the gradient with respect to the logits in the dtype of products, ``filled``."""
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
    """Add the gradients of one chunk. Token weights multiply (rows, size), which is smaller than (rows, vocab)."""
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
    """Return the cross-entropy of each token in nats, (tokens,); 0 where nothing is learned.

    The result is float32, or float64 if the logits are.

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
