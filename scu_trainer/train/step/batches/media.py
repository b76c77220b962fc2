"""Images, videos and audio of a batch, whose entries replace special tokens of the text: which row has which of them.

A processor joins the media of all rows along dimension 0, so their number is not that of the rows. Models put them in
place of the tokens in order. How many tokens each replaces is known for two layouts: a grid (Qwen) counts patches, of
which ``spatial_merge_size`` squared make a token, and images of one size (LLaVA, Gemma 3, InternVL) replace equally
many. So the tokens of each row show which media it has, and must come out even.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import torch

PLACED = {"pixel_values": "image", "pixel_values_videos": "video", "input_features": "audio"}
"""Inputs with entries that replace special tokens of the text, and the kind of these tokens in a configuration."""

PER_MEDIUM = {"pixel_values": ["image_grid_thw"], "pixel_values_videos": ["video_grid_thw", "second_per_grid_ts"]}
"""The inputs with one entry for each image or video whose patches are entries of ``PLACED``: first its grid, which is
(times, rows, columns)."""

IMAGES_OF_ONE_SIZE = 4
"""Dimensions of (images, channels, height, width); with five, a row has several, or an image several parts."""


def entries_per_row(value: Any) -> Optional[list[int]]:
    """Return how many entries of ``value`` along dimension 0 each row has; None if it has one, as far as known."""
    return getattr(value, "entries_per_row", None)


def with_entries(value: torch.Tensor, counts: Optional[list[int]]) -> torch.Tensor:
    """Return ``value``, of which each row has so many entries; None if it has one, as far as known."""
    value.entries_per_row = counts
    return value


def entries_of(value: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return the entries of these rows, in their order. ``value``: as from ``with_entries``."""
    counts = value.entries_per_row
    ends = list(itertools.accumulate(counts))
    chosen = [value[ends[row] - counts[row] : ends[row]] for row in rows]
    # of one row a view: images are not copied
    return with_entries(torch.cat(chosen) if len(chosen) > 1 else chosen[0], [counts[row] for row in rows])


def without_empty(inputs: Any) -> Any:
    """Return ``inputs`` without the media of which its rows have none; models take no empty ones."""
    empty = [name for name, value in inputs.items() if entries_per_row(value) is not None and not len(value)]
    for name in empty:
        del inputs[name]
    return inputs


def first_missing(inputs: Mapping[str, Any]) -> Optional[str]:
    """Return the name of an input of which some row has no entry; None if every row has some of each."""
    return next((name for name, value in inputs.items() if 0 in (entries_per_row(value) or ())), None)


def find_entries(model: Any, inputs: Any) -> Optional[str]:
    """Find out which media belong to which row, and note it at the tensors for ``entries_per_row``. Returns why that is
    not known where it would matter although there are as many entries as rows: only some rows have media."""
    text = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    if not torch.is_tensor(text) or text.dim() != 2 or "cross_attention_mask" in inputs:
        return None  # with the mask, each row attends to its own images, or to padding (Mllama)
    for name, kind in PLACED.items():
        value = inputs.get(name)
        token = _token(model, kind) if torch.is_tensor(value) else None
        if token is None:
            continue
        tokens = text.eq(token).sum(dim=1).tolist()
        others = [other for other in map(inputs.get, PER_MEDIUM.get(name, ())) if torch.is_tensor(other)]
        entries, media = _shared(value, others, tokens, _patches_per_token(model))
        with_entries(value, entries)  # None too: the tensor may have been in another batch
        for other in others:
            with_entries(other, media)
        if entries is None and len(value) == len(text) and 0 < sum(map(bool, tokens)) < len(text):
            return f"{name} has as many entries as there are rows, but some rows have no {kind}"
    return None


def _token(model: Any, kind: str) -> Optional[int]:
    config = getattr(model, "config", None)
    tokens = (getattr(config, f"{kind}_token_{end}", None) for end in ("id", "index"))
    return next((token for token in tokens if isinstance(token, int)), None)


def _patches_per_token(model: Any) -> int:
    vision = getattr(getattr(model, "config", None), "vision_config", None)
    return getattr(vision, "spatial_merge_size", 1) ** 2


def _shared(
    value: torch.Tensor, others: Sequence[torch.Tensor], tokens: list[int], patches_per_token: int
) -> tuple[Optional[list[int]], Optional[list[int]]]:
    """Return how many entries of ``value`` and of each of ``others`` belong to each row; None if that is not known, or
    if each row has one. ``tokens``: of each row, to be replaced."""
    if others:
        patches = others[0].prod(dim=-1).reshape(-1).tolist()
        if sum(patches) != len(value) or any(count % patches_per_token for count in patches):
            return None, None
        media = _media_per_row(tokens, [count // patches_per_token for count in patches])
        if media is None:
            return None, None
        own = iter(patches)
        return [sum(itertools.islice(own, count)) for count in media], media
    if value.dim() != IMAGES_OF_ONE_SIZE or not len(value) or sum(tokens) % len(value):
        return None, None
    images = _media_per_row(tokens, [sum(tokens) // len(value)] * len(value))
    return None if images and set(images) == {1} else images, None


def _media_per_row(tokens: Sequence[int], sizes: Sequence[int]) -> Optional[list[int]]:
    """Return how many media, in their order, make up each row's tokens; None if a row ends within one."""
    counts, left = [], list(reversed(sizes))
    for wanted in tokens:
        before = len(left)
        while wanted > 0 and left:
            wanted -= left.pop()
        if wanted != 0:
            return None
        counts.append(before - len(left))
    return None if left else counts
