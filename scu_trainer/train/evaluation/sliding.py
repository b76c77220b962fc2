"""Overlapping windows over long documents: every token is predicted once, with as much context as possible.

    tokens    0  1  2  3  4  5  6  7  8  9      max_length 6, stride 2
    window 0  .  1  2  3  4  5                  a number: predicted in this window
    window 1        .  .  .  .  6  7            a dot: only context
    window 2              .  .  .  .  8  9

This is the strided perplexity of Hugging Face's guide "Perplexity of fixed-length models", except for one detail. In
the guide, a window that begins with a new token never predicts it, so tokens are lost at stride = max_length. Here
consecutive windows share at least one token, so the predicted tokens are the same for every stride. The first token of
a document is never predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from scu_trainer.data.text.encode import NOT_LEARNED

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class Windows:
    """Size and stride of the windows. ``max_length``: tokens in a window, 2 or more. ``stride``: tokens from the start
    of one window to that of the next, 1 to ``max_length``; the largest stride gives windows with the least overlap."""

    max_length: int
    stride: int

    @property
    def step(self) -> int:
        """Tokens by which windows advance, below ``max_length``, because a window cannot predict its first token."""
        return min(self.stride, self.max_length - 1)

    @property
    def least_context(self) -> int:
        """Smallest number of tokens before a predicted one, if the document has as many."""
        return self.max_length - self.step

    def spans(self, length: int) -> Iterator[tuple[int, int, int]]:
        """Yield (start, first predicted token, end) of every window over a document of ``length`` tokens."""
        start, predicted = 0, 1
        while True:
            end = min(start + self.max_length, length)
            yield start, predicted, end
            if end == length:
                return
            start, predicted = start + self.step, end


class SlidingRows:
    """Windows over documents that are sliced on access. Supports what ``score_documents`` needs of a dataset: the
    columns ``document`` and ``length`` by name, and rows by number."""

    def __init__(self, documents: datasets.Dataset, windows: Windows) -> None:
        """``documents``: rows of input_ids, labels and document; each row is a whole document. Windows without a
        predicted token (parts of prompts) are left out."""
        self._numbers = np.asarray(documents["document"])
        arrays = documents.with_format("numpy")
        self._tokens = [np.asarray(row["input_ids"]) for row in arrays]
        self._labels = [np.asarray(row["labels"]) for row in arrays]
        self._windows = [  # index of the document, and its span
            (row, *span)
            for row, labels in enumerate(self._labels)
            for span in windows.spans(len(labels))
            if (labels[span[1] : span[2]] != NOT_LEARNED).any()
        ]

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, key: Union[int, str]) -> Any:
        if key == "document":
            return [int(self._numbers[row]) for row, _, _, _ in self._windows]
        if key == "length":
            return [end - start for _, start, _, end in self._windows]
        if isinstance(key, str):
            raise KeyError(key)
        row, start, predicted, end = self._windows[key]
        labels = self._labels[row][start:end].copy()
        labels[: predicted - start] = NOT_LEARNED
        return {
            "input_ids": self._tokens[row][start:end],
            "labels": labels,
            "length": end - start,
            "document": int(self._numbers[row]),
        }
