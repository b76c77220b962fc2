"""The rows of one optimizer step: how long each is, and how to build a batch from any of them.

A batch is what the collator returns: a mapping of tensors with one entry per row along dimension 0. Rows can move
between batches if every value can be cut by rows, and if the padding of the time axis is known, so that it can be cut
off (on the right, where attention_mask is 0 and there is no label) or added.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Optional

import torch

from scu_trainer.control.splitting import rounded_up_size
from scu_trainer.train.step.batches.media import entries_of, entries_per_row, find_entries, with_entries, without_empty

NOT_LEARNED = -100
CPU = torch.device("cpu")

PADDING = {
    "input_ids": None,  # the pad token; any value works, because attention_mask hides it
    "decoder_input_ids": None,
    "labels": NOT_LEARNED,
    "shift_labels": NOT_LEARNED,
    "attention_mask": 0,
    "decoder_attention_mask": 0,
    "token_type_ids": 0,
    "mm_token_type_ids": 0,
    "position_ids": 0,
    "inputs_embeds": 0,
}
"""Inputs with a time axis (dimension 1) and known padding."""

DECODER_SIDE = ("labels", "decoder_input_ids", "decoder_attention_mask")
"""Inputs that follow the target's time axis in an encoder-decoder model."""


@dataclass
class Batch:
    """One accumulation batch and its layout.

    rows: 0 if it cannot be cut by rows; ``obstacle`` then says why.
    width: columns of the time axis, 0 without one.
    trimmable: padding may be cut off and added.
    needed, needed_decoder: the columns of each row that must stay (the full width if unknown; [] without a decoder
    side).
    real_tokens: of all rows, as measured.
    """

    inputs: Any
    rows: int = 0
    obstacle: Optional[str] = None
    obstacle_name: Optional[str] = None
    width: int = 0
    decoder_width: int = 0
    trimmable: bool = False
    needed: list[int] = field(default_factory=list)
    needed_decoder: list[int] = field(default_factory=list)
    real_tokens: int = 0
    main_input_name: str = "input_ids"
    is_encoder_decoder: bool = False

    def keep_padding(self) -> None:
        """Treat padding as content, because the loss of this model depends on it."""
        self.trimmable = False
        _measure(self)

    def take_few_sizes(self, most_tokens: int, token_cap: Optional[int] = None) -> None:
        """Pad rows to one of few sizes: at most ``most_tokens`` on each time axis, and within ``token_cap``."""

        def rounded(tokens: int, beside: int) -> int:
            most = max(tokens, most_tokens)
            is_within = token_cap is not None and tokens + beside <= token_cap
            return rounded_up_size(tokens, min(most, token_cap - beside) if is_within else most)

        if not self.needed_decoder:
            self.needed = [rounded(own, 0) for own in self.needed]
            return
        self.needed = [rounded(own, other) for own, other in zip(self.needed, self.needed_decoder, strict=True)]
        self.needed_decoder = [rounded(other, own) for own, other in zip(self.needed, self.needed_decoder, strict=True)]

    @property
    def is_padded(self) -> bool:
        short = any(length < self.width for length in self.needed)
        return short or any(length < self.decoder_width for length in self.needed_decoder)

    @property
    def is_padded_right(self) -> bool:
        """Whether every row is its tokens followed by padding without labels, as far as the host knows."""
        mask = self.inputs.get("attention_mask") if self.trimmable else None
        return mask is not None and mask.device == CPU and mask.ne(0).sum(dim=1).tolist() == self.needed

    def length(self, row: int) -> int:
        """Return the tokens that the row needs on both time axes; 1 for rows without a time axis."""
        return max(1, self.needed[row] + (self.needed_decoder[row] if self.needed_decoder else 0))

    @property
    def longest(self) -> int:
        return max((self.length(row) for row in range(self.rows)), default=1)

    @property
    def padded_tokens(self) -> int:
        """The tokens of a step on the unchanged batch; the rows, for batches without a time axis."""
        return self.rows * max(1, self.width + self.decoder_width)


def read_layout(inputs: Any, main_input_name: str = "input_ids", is_encoder_decoder: bool = False) -> Batch:
    """Return rows and time axes of ``inputs``. Measuring the lengths waits for the device once."""
    batch = Batch(inputs, *_count_rows(inputs, main_input_name))
    batch.main_input_name, batch.is_encoder_decoder = main_input_name, is_encoder_decoder
    if batch.obstacle is not None:
        return batch
    tokens = inputs.get(main_input_name)
    mask = inputs.get("attention_mask")
    if torch.is_tensor(mask) and mask.dim() == 2:
        batch.width = mask.size(1)
    elif torch.is_tensor(tokens) and tokens.dim() == 2 and not tokens.is_floating_point():
        batch.width = tokens.size(1)
    if is_encoder_decoder:
        sides = [inputs[name] for name in DECODER_SIDE if has_time(name, inputs.get(name))]
        batch.decoder_width = sides[0].size(1) if sides else 0
    batch.trimmable = _is_trimmable(batch)
    _measure(batch)
    return batch


def layout_for(model: Any, inputs: Any, not_by_rows: Collection[str] = ()) -> Batch:
    """Return ``read_layout`` of ``inputs`` for ``model``. ``not_by_rows``: inputs that did not have one entry per
    row in an earlier batch (images of a conversation); if the numbers agree in this batch, that is a coincidence."""
    mismatch = find_entries(model, inputs)
    is_encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    batch = read_layout(inputs, getattr(model, "main_input_name", "input_ids"), is_encoder_decoder)
    if batch.obstacle is None and mismatch is not None:
        return Batch(inputs, obstacle=mismatch)
    by_chance = (name for name in not_by_rows if name in inputs and entries_per_row(inputs[name]) is None)
    name = next(by_chance, None) if batch.obstacle is None else None
    if name is None:
        return batch
    return Batch(inputs, obstacle=f"{name} does not always have one entry per row", obstacle_name=name)


def rows_of(model: Any, inputs: Any) -> Batch:
    """Return the rows of ``inputs`` without lengths, which waits for no device."""
    return Batch(inputs, *_count_rows(inputs, getattr(model, "main_input_name", "input_ids")))


def _count_rows(inputs: Any, main_input_name: str) -> tuple[int, Optional[str], Optional[str]]:
    """Return (rows, why the batch cannot be cut by rows, the input that prevents it)."""
    if not isinstance(inputs, Mapping):
        return 0, f"the collator returns a {type(inputs).__name__}, not a mapping of tensors", None
    tensors = {name: value for name, value in inputs.items() if torch.is_tensor(value) and value.dim() > 0}
    reference = next((name for name in (main_input_name, "labels", *tensors) if name in tensors), None)
    if reference is None:
        return 0, "the batch holds no tensor with rows", None
    rows = tensors[reference].size(0)
    for name, value in inputs.items():
        if torch.is_tensor(value) and value.dim() > 0 and len(entries_per_row(value) or value) != rows:
            return 0, f"{name} has {value.size(0)} entries for {rows} rows of {reference}", name
        if isinstance(value, (list, tuple)) and len(value) != rows:
            return 0, f"{name} has {len(value)} entries for {rows} rows of {reference}", name
        if isinstance(value, Mapping):
            return 0, f"{name} is a mapping, and its rows are not known", name
    return rows, None, None


def has_time(name: str, value: Any) -> bool:
    """Return whether an input has a second dimension, and is not a matrix of numeric targets."""
    if not torch.is_tensor(value) or value.dim() < 2:
        return False
    return not (name == "labels" and value.is_floating_point())  # targets of a regression or of several classes


def follows_time(name: str, value: Any, batch: Batch) -> bool:
    """Return whether an input of a trimmable batch is cut and padded along dimension 1."""
    return batch.trimmable and name in PADDING and has_time(name, value)


def _is_trimmable(batch: Batch) -> bool:
    """Return whether columns may be cut off and added: there is a mask, and every input with this axis is known."""
    mask = batch.inputs.get("attention_mask")
    if not (torch.is_tensor(mask) and mask.dim() == 2):
        return False
    for name, value in batch.inputs.items():
        if not has_time(name, value) or entries_per_row(value) is not None:
            continue
        width = batch.decoder_width if batch.is_encoder_decoder and name in DECODER_SIDE else batch.width
        if name in PADDING:
            if value.size(1) != width:
                return False
        elif width in value.shape[1:]:
            return False  # an input that may follow the time axis, and its padding is unknown
    return True


def _measure(batch: Batch) -> None:
    _measure_rows(batch)
    batch.real_tokens = sum(map(batch.length, range(batch.rows)))


def _measure_rows(batch: Batch) -> None:
    if not batch.trimmable or _is_full(batch):
        batch.needed = [batch.width] * batch.rows
        batch.needed_decoder = [batch.decoder_width] * batch.rows if batch.decoder_width else []
        return
    inputs, labels = batch.inputs, batch.inputs.get("labels")
    own = _last_used(inputs["attention_mask"].ne(0))
    target = None
    if has_time("labels", labels):
        learned = _last_used(labels.ne(NOT_LEARNED))
        if batch.decoder_width:
            target = learned
        elif labels.size(1) == batch.width:
            own = torch.maximum(own, learned)  # never cut off a label, even if the mask hides it
    if torch.is_tensor(inputs.get("decoder_attention_mask")):
        attended = _last_used(inputs["decoder_attention_mask"].ne(0))
        target = attended if target is None else torch.maximum(target, attended)
    if target is None and batch.decoder_width:
        target = torch.full_like(own, batch.decoder_width)
    both = torch.stack([own] if target is None else [own, target]).clamp(min=1).tolist()
    batch.needed = both[0]
    batch.needed_decoder = both[1] if target is not None else []


def _is_full(batch: Batch) -> bool:
    """Return whether no row is padded. False on a device, where finding out costs more than measuring the rows."""
    mask = batch.inputs["attention_mask"]
    has_decoder = batch.decoder_width > 0 or "decoder_attention_mask" in batch.inputs
    return mask.device.type == "cpu" and not has_decoder and bool(mask.all())


def _last_used(used: torch.Tensor) -> torch.Tensor:
    """Return the column after the last True of each row. ``used``: (rows, time)."""
    return (used * torch.ones_like(used, dtype=torch.int64).cumsum(dim=1)).amax(dim=1)


# -- building a batch from rows ----------------------------------------------------------------------------------------

Row = tuple[int, int]
"""(number of the batch in the window, row in it)"""


def signature(batch: Batch) -> tuple:
    """Return a key; batches with equal keys may share a micro-batch."""
    parts: list[Any] = []
    if batch.rows == 1 and "position_ids" in batch.inputs and "attention_mask" not in batch.inputs:
        parts.append(id(batch.inputs))  # packed documents: flash attention finds their boundaries in a single row only
    for name, value in sorted(batch.inputs.items()):
        if torch.is_tensor(value) and value.dim() > 0:
            shape = tuple(value.shape[1:])
            flexible = follows_time(name, value, batch)
            parts.append((name, value.dtype, shape[1:] if flexible else shape))
        elif isinstance(value, (list, tuple)):
            parts.append((name, "rows"))
        elif torch.is_tensor(value):
            parts.append((name, id(value)))  # one value for the whole batch, which only its own rows may share
        else:
            parts.append((name, repr(value)))
    return tuple(parts)


def take(batches: Sequence[Batch], rows: Sequence[Row], pad_token_id: int = 0, trim: bool = True) -> Any:
    """Return a batch of ``rows``, grouped by their batch, with padding cut to the longest row. Returns the inputs of
    the batch itself if the result would equal them."""
    groups: dict[int, list[int]] = {}
    for number, row in rows:
        groups.setdefault(number, []).append(row)
    first = batches[next(iter(groups))]
    trim = trim and first.trimmable
    width = _needed_width(batches, groups, trim)
    is_whole = len(groups) == 1 and sorted(*groups.values()) == list(range(first.rows))
    if is_whole and (not trim or width == (first.width, first.decoder_width)):
        return first.inputs

    @functools.cache  # made once for all inputs, without a wait for the device
    def index(number: int, device: torch.device) -> torch.Tensor:
        made = torch.tensor(groups[number])
        return made if device == CPU else copied_async(made, device)

    def rows_of_batch(name: str, number: int) -> torch.Tensor:
        tensor, own = batches[number].inputs[name], groups[number]
        if entries_per_row(tensor) is not None:
            return entries_of(tensor, own)
        if own == list(range(own[0], own[0] + len(own))):
            return tensor[own[0] : own[0] + len(own)]  # a view: images are not copied
        return tensor[index(number, tensor.device)]

    def gathered(name: str, value: Any) -> Any:
        if torch.is_tensor(value) and value.dim() > 0:
            parts = [rows_of_batch(name, number) for number in groups]
            if follows_time(name, value, first):
                on_decoder = first.decoder_width > 0 and name in DECODER_SIDE
                fill = PADDING[name] if PADDING[name] is not None else pad_token_id
                parts = [_fit(part, width[1] if on_decoder else width[0], fill) for part in parts]
            if len(parts) == 1:
                return parts[0]
            counts = [entries_per_row(part) for part in parts]
            return torch.cat(parts) if None in counts else with_entries(torch.cat(parts), [*chain(*counts)])
        if isinstance(value, (list, tuple)):
            return type(value)([batches[n].inputs[name][row] for n, rows in groups.items() for row in rows])
        return value

    # a loss may read attributes of a BatchEncoding
    return without_empty(type(first.inputs)({name: gathered(name, value) for name, value in first.inputs.items()}))


def are_on_host(batches: Sequence[Any]) -> bool:
    """Return whether all tensors of ``batches`` are on the host, so that reading them does not wait."""
    mappings = [inputs for inputs in batches if isinstance(inputs, Mapping)]
    tensors = (value for inputs in mappings for value in inputs.values() if torch.is_tensor(value))
    return len(mappings) == len(batches) and all(tensor.device == CPU for tensor in tensors)


def placed(inputs: Any, device: torch.device) -> Any:
    """Return ``inputs`` on ``device``, copied while the host continues. ``on_host`` still finds the host copies of the
    inputs that hold the lengths and the labels of the rows."""
    if not isinstance(inputs, Mapping):
        return inputs
    moved = {name: copied_async(value, device) if torch.is_tensor(value) else value for name, value in inputs.items()}
    if all(moved[name] is value for name, value in inputs.items()):
        return inputs
    for name in ("input_ids", "labels", "attention_mask"):
        value = inputs.get(name)
        if torch.is_tensor(value) and moved[name] is not value:
            moved[name].on_host = value, moved[name]._version
    for name, value in inputs.items():
        if (counts := entries_per_row(value)) is not None:
            with_entries(moved[name], counts)
    return type(inputs)(moved)


def with_host_copies(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``inputs`` with the host copies that ``placed`` would have left for ``on_host``. Waits for the device."""
    for name in ("labels", "attention_mask"):
        value = inputs.get(name)
        if torch.is_tensor(value) and value.device != CPU and not value.is_inference() and on_host(value) is None:
            value.on_host = value.cpu(), value._version
    return inputs


def copied_async(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor`` on ``device``, copied while the host continues."""
    if device.type == "cuda" and tensor.device == CPU and not tensor.is_pinned():
        tensor = tensor.pin_memory()  # otherwise the driver copies it first, and may wait for the device
    return tensor.to(device, non_blocking=True)


def on_host(tensor: torch.Tensor) -> Optional[torch.Tensor]:
    """Return the host copy of ids, labels or a mask; None if they were not ``placed``, or written to since."""
    known, version = getattr(tensor, "on_host", (None, 0))
    return known if known is not None and tensor._version == version else None


def pick(inputs: Any, rows: torch.Tensor, count: int) -> Any:
    """Return a batch of some rows of ``inputs``, with their padding. Values without ``count`` entries stay whole."""

    def select_rows(value: Any) -> Any:
        if entries_per_row(value) is not None:
            return entries_of(value, rows.tolist())
        if torch.is_tensor(value) and value.dim() > 0 and value.size(0) == count:
            picked, known = value[rows.to(value.device)], on_host(value)
            if known is not None:
                picked.on_host = known[rows.to(known.device)], picked._version
            return picked
        if isinstance(value, (list, tuple)) and len(value) == count:
            return type(value)([value[row] for row in rows.tolist()])
        return value

    return without_empty(type(inputs)({name: select_rows(value) for name, value in inputs.items()}))


def _needed_width(batches: Sequence[Batch], groups: dict[int, list[int]], trim: bool) -> tuple[int, int]:
    if not trim:
        return max(batches[n].width for n in groups), max(batches[n].decoder_width for n in groups)
    own = max(max(batches[n].needed[r] for r in rows) for n, rows in groups.items())
    if not next(batches[n] for n in groups).needed_decoder:
        return own, 0
    return own, max(max(batches[n].needed_decoder[r] for r in rows) for n, rows in groups.items())


def _fit(part: torch.Tensor, width: int, fill: int) -> torch.Tensor:
    """Return ``part`` (rows, time, ...) with its time axis cut, or padded on the right, to ``width``."""
    if part.size(1) >= width:
        # Contiguous as from a collator, because models flatten labels with view. A copy even of one row, because
        # torch.compile makes another graph for rows that begin elsewhere in memory.
        return part[:, :width].clone(memory_format=torch.contiguous_format)
    padding = part.new_full((part.size(0), width - part.size(1), *part.shape[2:]), fill)
    return torch.cat([part, padding], dim=1)
