"""The rows of a micro-batch end to end, as one row without padding, through one forward of a causal language model.

Embedding, layers and loss see (1, tokens). Positions start over with every row, and attention goes by rows, whose
lengths the host knows, so that nothing waits for the device. FlashAttention, if the model was loaded with it, takes the
borders as transformers hands them over. "sdpa" is replaced by torch's kernel for rows of unequal length
(``torch.nn.attention.varlen``) on a card from Ampere on in half precision, and by one call per length elsewhere.

Layers hand on ``ROWS``, an argument of our own, to their attention. It is one of the layer's arguments, so a layer that
is computed again in the backward pass has it then, too.

On a CPU a prefix that rows share goes through the layers once (``shared_prefixes.py``). On a card the gradients of its
copies would be summed in no fixed order, and the same training would not give the same weights twice.
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

from scu_trainer.control.splitting import few_sizes
from scu_trainer.hardware.precision import AMPERE
from scu_trainer.train.loss.rows.shared_prefixes import SharedPrefixes, shared_prefixes, with_states
from scu_trainer.train.step.batches.rows import NOT_LEARNED, on_host, on_its_way
from scu_trainer.train.step.recovery.snapshot import replaced

ROWS = "rows_end_to_end"

FLASH = ("flash_attention_2", "flash_attention_3")

MOST_FLASH_SIZE = 256
"""Numbers of a head, at most, for torch's own flash attention; a multiple of 8 in any case."""

NEEDED = {"input_ids", "attention_mask", "labels"}
"""Inputs of the model, all of which there must be, and no others: of those the layout is not known."""


@dataclass(frozen=True, eq=False)
class EndToEnd:
    """Rows that were padded on the right.

    ``lengths``: tokens of each. ``shape``: (rows, time) with the padding. ``places`` (tokens,): of the tokens in
    (rows · time,). ``positions`` (1, tokens): of the tokens in their rows. ``borders`` (rows + 1,), int32: tokens
    before each row, and all. These are on the model's device, ``known_places`` are the places on the host.
    ``prefixes``: shared by rows, where there are any. ``wants_few_sizes``: whether layers, attention and head get
    tokens that nobody reads, up to one of ``few_sizes``, the layers no more than ``token_cap``. ``seen``: tokens that
    the layers saw. ``attended``: by ``_attention``.
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
        """(rows, time) -> (1, tokens)"""
        places = self.known_places if values.device.type == "cpu" else self.places.to(values.device)
        return values.flatten().index_select(0, places).unsqueeze(0)

    def padded(self, values: Tensor) -> Tensor:
        """(tokens,) -> (rows · time,), 0 where there is padding."""
        rows, time = self.shape
        return values.new_zeros(rows * time).index_copy(0, self.places.to(values.device), values)


def end_to_end(
    inputs: Mapping[str, Any],
    most_tokens: Optional[int] = None,
    shares_prefixes: bool = False,
    wants_few_sizes: bool = False,
    token_cap: Optional[int] = None,
) -> Optional[EndToEnd]:
    """None where nothing is gained (no padding, no shared prefix), or it cannot be done: padding on the left or with
    labels in it, rows of more than ``most_tokens``, a mask that is not known on the host. ``shares_prefixes``: they may
    be computed once. ``wants_few_sizes``: as of EndToEnd; then also rows without padding."""
    mask, labels = inputs.get("attention_mask"), inputs.get("labels")
    if set(inputs) != NEEDED or not torch.is_tensor(mask) or not torch.is_tensor(labels):
        return None
    if mask.dim() != 2 or mask.shape != labels.shape:
        return None
    known, labels = (_known(each) for each in (mask, labels))
    if known is None or labels is None or (bool(known.all()) and not shares_prefixes and not wants_few_sizes):
        return None
    lengths = known.ne(0).sum(dim=1)
    is_filled = torch.arange(known.size(1)) < lengths.unsqueeze(1)
    is_right = torch.equal(is_filled, known.ne(0)) and bool(labels[~is_filled].eq(NOT_LEARNED).all())
    if not is_right or not bool(lengths.all()) or (most_tokens is not None and int(lengths.max()) > most_tokens):
        return None
    places = is_filled.flatten().nonzero().flatten()
    ids = _known(inputs["input_ids"]) if shares_prefixes else None
    prefixes = None if ids is None else shared_prefixes(ids, lengths, places)
    if prefixes is None and not wants_few_sizes and len(places) == known.numel():
        return None
    positions = (places % known.size(1)).unsqueeze(0)
    borders = functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    there = (on_its_way(tensor, mask.device) for tensor in (places, positions, borders))
    return EndToEnd(tuple(lengths.tolist()), tuple(known.shape), places, *there, prefixes, wants_few_sizes, token_cap)


def _known(tensor: Tensor) -> Optional[Tensor]:
    known = on_host(tensor)
    return tensor if known is None and tensor.device.type == "cpu" else known


@contextlib.contextmanager
def on_rows(body: torch.nn.Module, rows: Optional[EndToEnd]) -> Iterator[None]:
    """Inside, ``body`` takes the padded batch that ``rows`` are of and gives hidden states (1, tokens, size)."""
    if rows is None:
        yield
        return
    arguments = _of_flash(rows) if body.config._attn_implementation in FLASH else _of_sdpa(rows)
    forward = body.forward

    def on_tokens(*positional: Any, **others: Any) -> Any:
        names = inspect.signature(forward).parameters if positional else ()
        given = {**dict(zip(names, positional, strict=False)), **others}
        prefixes = rows.prefixes
        tokens = {"input_ids": rows.of(given["input_ids"]), "position_ids": arguments["position_ids"]}
        if prefixes is not None:
            tokens = {name: each[:, prefixes.kept] for name, each in tokens.items()}
        tail = _tail(tokens["input_ids"].size(1), rows, rows.token_cap)
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
def head_on_few_sizes(head: torch.nn.Module, rows: EndToEnd) -> Iterator[None]:
    """Inside, ``head`` gets states (1, tokens, size) that nobody reads after its own, as the layers do."""
    forward = head.forward

    def on_states(states: Tensor) -> Tensor:
        tail = _tail(states.size(1), rows)
        return forward(functional.pad(states, (0, 0, 0, tail)) if tail else states)

    with replaced(head, "forward", on_states) if rows.wants_few_sizes else contextlib.nullcontext():
        yield


def _tail(tokens: int, rows: EndToEnd, most: Optional[int] = None) -> int:
    """How many tokens that nobody reads come after ``tokens``."""
    return few_sizes(tokens, most) - tokens if rows.wants_few_sizes else 0


def _of_flash(rows: EndToEnd) -> dict[str, Any]:
    longest = max(rows.lengths)
    sides = {f"cu_seq_lens_{side}": rows.borders for side in "qk"} | {f"max_length_{side}": longest for side in "qk"}
    return {"attention_mask": None, "position_ids": rows.positions, **sides}


def _of_sdpa(rows: EndToEnd) -> dict[str, Any]:
    _take_the_place_of_sdpa()
    # A mask of four dimensions goes through to attention as it is, which does not read it.
    mask = torch.zeros(1, 1, 1, 1, device=rows.places.device)
    return {"attention_mask": mask, "position_ids": rows.positions, ROWS: rows}


# -- attention ---------------------------------------------------------------------------------------------------------


def _take_the_place_of_sdpa() -> None:
    """Each time, since somebody else may put another function there for a while, and then stock's again."""
    found = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if getattr(found, "func", None) is not _attention:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = functools.partial(_attention, found)


def _attention(stock, module, query, key, value, attention_mask, dropout=0.0, scaling=None, **others):
    """``stock``, transformers' own, but where ``ROWS`` are among the arguments.

    query (1, heads, tokens, size), key and value (1, their heads, tokens, size) -> (1, tokens, heads, size).
    """
    rows: Optional[EndToEnd] = others.pop(ROWS, None)
    if rows is None:
        return stock(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others)
    rows.attended.append(True)
    prefixes, given = rows.prefixes, query.size(2)
    tokens = len(rows.places if prefixes is None else prefixes.kept)
    query, key, value = in_one_type(query, key, value)
    if given > tokens:
        query, key, value = (each[:, :, :tokens] for each in (query, key, value))
    if prefixes is not None:
        query, key, value = (prefixes.copied(each, 2) for each in (query, key, value))
    has_one_size = value.size(-1) == query.size(-1)  # latent attention (DeepSeek) has two
    by = _by_kernel if has_kernel(query) and has_one_size and not dropout else _by_length
    made = by(query, key, value, dropout, scaling, rows)
    made = made if prefixes is None else made.index_select(1, prefixes.kept)
    if given > tokens:
        made = functional.pad(made, (0, 0, 0, 0, 0, given - tokens))
    return made, None


def in_one_type(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast, rotary positions in float32 make queries and keys float32, which stock attention casts, too."""
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        return query, key, value
    kind = torch.get_autocast_dtype(device)
    return query.to(kind), key.to(kind), value.to(kind)


def has_kernel(query: Tensor) -> bool:
    """Whether torch has a kernel for rows of unequal length of these queries."""
    return has_flash(query) and varlen_kernel() is not None


def has_flash(query: Tensor) -> bool:
    """Whether torch's flash attention takes these queries (..., size)."""
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    has_size = query.size(-1) <= MOST_FLASH_SIZE and query.size(-1) % 8 == 0
    return has_size and torch.cuda.get_device_capability(query.device) >= AMPERE


def takes_groups(query: Tensor) -> bool:
    """Whether keys may have fewer heads than these queries. On a card without flash attention that would leave the one
    kernel that holds (length, length) for each head."""
    return not query.is_cuda or has_flash(query)


@functools.cache
def varlen_kernel() -> Any:
    """The kernel, causal; None where that of this torch takes no scale and no window."""
    from torch.nn.attention import varlen

    takes = inspect.signature(varlen.varlen_attn).parameters
    if not {"scale", "window_size"} <= set(takes):
        return None
    # Where it need not be told, fewer heads of keys than of queries are taken as they are.
    grouped = {"enable_gqa": True} if "enable_gqa" in takes else {}
    return functools.partial(varlen.varlen_attn, window_size=(-1, 0), **grouped)


def _by_kernel(query, key, value, dropout, scaling, rows: EndToEnd) -> Tensor:
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    borders, longest = rows.borders.to(query.device), max(rows.lengths)
    return varlen_kernel()(query, key, value, borders, borders, longest, longest, scale=scaling).unsqueeze(0)


def _by_length(query, key, value, dropout, scaling, rows: EndToEnd) -> Tensor:
    """One call for neighbours of one length, of which sorted micro-batches have many."""
    if not takes_groups(query):
        key, value = (repeat_kv(each, query.size(1) // each.size(1)) for each in (key, value))
    groups = [(length, len(list(same))) for length, same in itertools.groupby(rows.lengths)]
    sizes = [length * count for length, count in groups]
    made = []
    parts = (each[0].split(sizes, dim=1) for each in (query, key, value))
    for (length, count), *part in zip(groups, *parts, strict=True):
        tail = _tail(length, rows)  # causal: no token looks behind itself
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
        made.append(out[:, :, :length].transpose(1, 2).flatten(0, 1))
    return torch.cat(made).unsqueeze(0)
