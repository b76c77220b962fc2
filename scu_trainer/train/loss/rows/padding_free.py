"""Run the rows of a micro-batch end to end, as one row without padding, through a causal language model.

Embedding, layers and loss see (1, tokens). Positions start over with every row, and attention stays within rows, whose
lengths are known on the host, so nothing waits for the device. FlashAttention, if the model was loaded with it, gets
the borders in the way transformers passes them. "sdpa" is replaced by torch's variable-length kernel
(``torch.nn.attention.varlen``) on GPUs from Ampere on in half precision, and elsewhere by one call per row length.

Layers pass ``ROWS``, an argument of our own, on to their attention. Because it is an argument of the layer, gradient
checkpointing has it too when it recomputes a layer in the backward pass.

On a CPU, a prefix that rows share goes through the layers once (``shared_prefixes.py``). On a GPU the gradients of its
copies would be summed in no fixed order, so repeating the same training would not give the same weights.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn import functional
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from scu_trainer.control.splitting import rounded_up_size
from scu_trainer.hardware.precision import AMPERE
from scu_trainer.train.loss.rows.shared_prefixes import SharedPrefixes, shared_prefixes, with_states
from scu_trainer.train.step.batches.rows import NOT_LEARNED, copied_async, on_host
from scu_trainer.train.step.recovery.snapshot import replaced

ROWS = "rows_end_to_end"

FLASH = ("flash_attention_2", "flash_attention_3")

MOST_FLASH_SIZE = 256
"""Maximum head size for torch's own flash attention; it must also be a multiple of 8."""

NEEDED = {"input_ids", "attention_mask", "labels"}
"""The inputs that a batch must have, and no others, because the layout of other inputs is not known."""


@dataclass(frozen=True, eq=False)
class EndToEnd:
    """The layout of rows that were padded on the right.

    ``lengths``: number of tokens of each row. ``shape``: (rows, time) with padding. ``places`` (tokens,): index of each
    token in (rows · time,). ``positions`` (1, tokens): position of each token in its row. ``borders`` (rows + 1,),
    int32: number of tokens before each row, and of all. They are on the model's device; ``known_places`` are the places
    on the host. ``prefixes``: prefixes that rows share, if any. ``wants_few_sizes``: whether layers, attention and head
    get filler tokens, up to ``rounded_up_size``; the layers at most up to ``token_cap``. ``seen``: number of tokens in
    each pass through the layers. ``attended``: gets an entry from each ``_attention`` call that uses these rows.
    """

    lengths: tuple[int, ...]
    shape: tuple[int, int]
    known_places: Tensor
    places: Tensor
    positions: Tensor
    borders: Tensor
    prefixes: Optional[SharedPrefixes] = None
    wants_few_sizes: bool = False
    token_cap: Optional[int] = None
    seen: list[int] = field(default_factory=list)
    attended: list[bool] = field(default_factory=list)

    def of(self, values: Tensor) -> Tensor:
        """Remove the padding: (rows, time) -> (1, tokens)."""
        places = self.known_places if values.device.type == "cpu" else self.places.to(values.device)
        return values.flatten().index_select(0, places).unsqueeze(0)

    def padded(self, values: Tensor) -> Tensor:
        """Restore the padding with zeros: (tokens,) -> (rows · time,)."""
        rows, time = self.shape
        return values.new_zeros(rows * time).index_copy(0, self.places.to(values.device), values)


def end_to_end(
    inputs: Mapping[str, Any],
    most_tokens: Optional[int] = None,
    shares_prefixes: bool = False,
    wants_few_sizes: bool = False,
    token_cap: Optional[int] = None,
) -> Optional[EndToEnd]:
    """Return the rows of a batch end to end, or None if that is useless or impossible.

    It is useless without padding or shared prefixes. It is impossible with inputs other than ``NEEDED``, padding on the
    left or labels in it, rows of more than ``most_tokens`` tokens, or a mask or labels that are not known on the host.
    ``shares_prefixes``: whether shared prefixes may be computed once. ``wants_few_sizes``: as in EndToEnd; then rows
    without padding are laid out, too.
    """
    mask, labels = inputs.get("attention_mask"), inputs.get("labels")
    if set(inputs) != NEEDED or not torch.is_tensor(mask) or not torch.is_tensor(labels):
        return None
    if mask.dim() != 2 or mask.shape != labels.shape:
        return None
    known, labels = (_on_host(each) for each in (mask, labels))
    if known is None or labels is None or (bool(known.all()) and not shares_prefixes and not wants_few_sizes):
        return None
    lengths = known.ne(0).sum(dim=1)
    is_filled = torch.arange(known.size(1)) < lengths.unsqueeze(1)
    is_right = torch.equal(is_filled, known.ne(0)) and bool(labels[~is_filled].eq(NOT_LEARNED).all())
    if not is_right or not bool(lengths.all()) or (most_tokens is not None and int(lengths.max()) > most_tokens):
        return None
    places = is_filled.flatten().nonzero().flatten()
    ids = _on_host(inputs["input_ids"]) if shares_prefixes else None
    prefixes = None if ids is None else shared_prefixes(ids, lengths, places)
    if prefixes is None and not wants_few_sizes and len(places) == known.numel():
        return None
    positions = (places % known.size(1)).unsqueeze(0)
    borders = functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    on_device = (copied_async(tensor, mask.device) for tensor in (places, positions, borders))
    return EndToEnd(
        tuple(lengths.tolist()), tuple(known.shape), places, *on_device, prefixes, wants_few_sizes, token_cap
    )


def _on_host(tensor: Tensor) -> Optional[Tensor]:
    known = on_host(tensor)
    return tensor if known is None and tensor.device.type == "cpu" else known


@contextlib.contextmanager
def on_rows(body: torch.nn.Module, rows: Optional[EndToEnd]) -> Iterator[None]:
    """Let ``body`` take the padded batch of ``rows`` and return hidden states (1, tokens, size)."""
    if rows is None:
        yield
        return
    arguments = _flash_arguments(rows) if body.config._attn_implementation in FLASH else _sdpa_arguments(rows)
    forward = body.forward

    def on_tokens(*positional: Any, **others: Any) -> Any:
        names = inspect.signature(forward).parameters if positional else ()
        given = {**dict(zip(names, positional, strict=False)), **others}
        prefixes = rows.prefixes
        tokens = {"input_ids": rows.of(given["input_ids"]), "position_ids": arguments["position_ids"]}
        if prefixes is not None:
            tokens = {name: each[:, prefixes.kept] for name, each in tokens.items()}
        tail = _filler_tokens(tokens["input_ids"].size(1), rows, rows.token_cap)
        rows.seen.append(tokens["input_ids"].size(1) + tail)
        if tail:
            tokens = {name: functional.pad(each, (0, tail)) for name, each in tokens.items()}
        output = forward(**{**given, **arguments, **tokens})
        if tail:
            output = with_states(output, output[0][:, :-tail])
        return output if prefixes is None else prefixes.of_rows(output)

    with replaced(body, "forward", on_tokens):
        yield


@contextlib.contextmanager
def fill_up_head_inputs(head: torch.nn.Module, rows: EndToEnd) -> Iterator[None]:
    """Append filler states to the states (1, tokens, size) that ``head`` gets, as is done for the layers."""
    forward = head.forward

    def on_states(states: Tensor) -> Tensor:
        tail = _filler_tokens(states.size(1), rows)
        return forward(functional.pad(states, (0, 0, 0, tail)) if tail else states)

    with replaced(head, "forward", on_states) if rows.wants_few_sizes else contextlib.nullcontext():
        yield


def _filler_tokens(tokens: int, rows: EndToEnd, most: Optional[int] = None) -> int:
    """Return the number of filler tokens to append to ``tokens``."""
    return rounded_up_size(tokens, most) - tokens if rows.wants_few_sizes else 0


def _flash_arguments(rows: EndToEnd) -> dict[str, Any]:
    longest = max(rows.lengths)
    sides = {f"cu_seq_lens_{side}": rows.borders for side in "qk"} | {f"max_length_{side}": longest for side in "qk"}
    return {"attention_mask": None, "position_ids": rows.positions, **sides}


def _sdpa_arguments(rows: EndToEnd) -> dict[str, Any]:
    _install_attention()
    # transformers passes a four-dimensional mask on to attention unchanged; our attention does not read it.
    mask = torch.zeros(1, 1, 1, 1, device=rows.places.device)
    return {"attention_mask": mask, "position_ids": rows.positions, ROWS: rows}


# -- attention ---------------------------------------------------------------------------------------------------------


def _install_attention() -> None:
    """Install our attention for "sdpa". Checked every time, because other code may replace it for a while."""
    found = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if getattr(found, "func", None) is not _attention:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = functools.partial(_attention, found)


def _attention(stock, module, query, key, value, attention_mask, dropout=0.0, scaling=None, **others):
    """Call ``stock``, transformers' own attention, unless ``ROWS`` is among the arguments. query (1, heads, tokens,
    size), key and value (1, key heads, tokens, size) -> (1, tokens, heads, size)."""
    rows: Optional[EndToEnd] = others.pop(ROWS, None)
    if rows is None:
        return stock(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others)
    rows.attended.append(True)
    prefixes, given = rows.prefixes, query.size(2)
    tokens = len(rows.places if prefixes is None else prefixes.kept)
    query, key, value = cast_to_autocast_type(query, key, value)
    if given > tokens:
        query, key, value = (each[:, :, :tokens] for each in (query, key, value))
    if prefixes is not None:
        query, key, value = (prefixes.copied(each, 2) for each in (query, key, value))
    has_one_size = value.size(-1) == query.size(-1)  # latent attention (DeepSeek) has two sizes
    attend = _attend_with_kernel if has_kernel(query) and has_one_size and not dropout else _attend_by_length
    output = attend(query, key, value, dropout, scaling, rows)
    output = output if prefixes is None else output.index_select(1, prefixes.kept)
    if given > tokens:
        output = functional.pad(output, (0, 0, 0, 0, 0, given - tokens))
    return output, None


def cast_to_autocast_type(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast to autocast's dtype like stock attention: float32 rotary positions make queries and keys float32."""
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        return query, key, value
    kind = torch.get_autocast_dtype(device)
    return query.to(kind), key.to(kind), value.to(kind)


def has_kernel(query: Tensor) -> bool:
    """Return whether torch has a variable-length kernel for these queries."""
    return has_flash(query) and varlen_kernel() is not None


def has_flash(query: Tensor) -> bool:
    """Return whether torch's flash attention supports these queries (..., size)."""
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    has_size = query.size(-1) <= MOST_FLASH_SIZE and query.size(-1) % 8 == 0
    return has_size and torch.cuda.get_device_capability(query.device) >= AMPERE


def supports_grouped_keys(query: Tensor) -> bool:
    """Return whether keys may have fewer heads than these queries. On a GPU without flash attention, only the kernel
    that materializes (length, length) for each head supports that."""
    return not query.is_cuda or has_flash(query)


@functools.cache
def varlen_kernel() -> Any:
    """Return torch's causal variable-length kernel; None if this version of torch supports no scale or no window."""
    from torch.nn.attention import varlen

    takes = inspect.signature(varlen.varlen_attn).parameters
    if not {"scale", "window_size"} <= set(takes):
        return None
    # Versions without this argument accept fewer key heads than query heads anyway.
    grouped = {"enable_gqa": True} if "enable_gqa" in takes else {}
    return functools.partial(varlen.varlen_attn, window_size=(-1, 0), **grouped)


def _attend_with_kernel(query, key, value, dropout, scaling, rows: EndToEnd) -> Tensor:
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    borders, longest = rows.borders.to(query.device), max(rows.lengths)
    return varlen_kernel()(query, key, value, borders, borders, longest, longest, scale=scaling).unsqueeze(0)


def _attend_by_length(query, key, value, dropout, scaling, rows: EndToEnd) -> Tensor:
    """Call attention once for each run of neighboring rows of equal length; sorted micro-batches have long runs."""
    if not supports_grouped_keys(query):
        key, value = (repeat_kv(each, query.size(1) // each.size(1)) for each in (key, value))
    groups = [(length, len(list(same))) for length, same in itertools.groupby(rows.lengths)]
    sizes = [length * count for length, count in groups]
    output = []
    parts = (each[0].split(sizes, dim=1) for each in (query, key, value))
    for (length, count), *part in zip(groups, *parts, strict=True):
        tail = _filler_tokens(length, rows)  # no effect on the tokens before it, because attention is causal
        of_rows = [each.unflatten(1, (count, length)).transpose(0, 1) for each in part]
        if tail:
            of_rows = [functional.pad(each, (0, 0, 0, tail)) for each in of_rows]
        out = functional.scaled_dot_product_attention(
            *of_rows,
            is_causal=length + tail > 1,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=query.size(1) != key.size(1),
        )
        output.append(out[:, :, :length].transpose(1, 2).flatten(0, 1))
    return torch.cat(output).unsqueeze(0)
