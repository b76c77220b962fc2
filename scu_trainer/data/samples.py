"""Prepared labelled samples (images, recordings), and statistics of what was dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Optional

import numpy

from scu_trainer.data.statistics import DropCounts
from scu_trainer.figures import count_text

MOST_NAMES = 10  # classes that one line lists


class Contents(NamedTuple):
    """``digests``: equal for samples with the same content. ``places``: the name of each sample in messages."""

    digests: numpy.ndarray
    labels: numpy.ndarray
    places: Sequence[str]


@dataclass
class SampleStatistics(DropCounts):
    """Counts of one preparation. ``item``: the word for a sample, in the singular.

    read: samples that were read. train, eval: training and held-out samples. per_class: training samples by class name,
    including classes without any. dropped: counts by reason; examples: the first places of each reason.
    heldout_duplicates: held-out samples with the same content as a training sample.
    """

    item: str = "sample"
    read: int = 0
    train: int = 0
    eval: int = 0
    per_class: dict[str, int] = field(default_factory=dict)
    heldout_duplicates: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def compare(self, train: Contents, held_out: Contents) -> None:
        """Count held-out samples that are also trained on, and note samples of the same content and other classes."""
        self.heldout_duplicates = int(numpy.isin(held_out.digests, train.digests).sum())
        digests = numpy.concatenate([train.digests, held_out.digests])
        labels = numpy.concatenate([train.labels, held_out.labels])
        _, first, group = numpy.unique(digests, return_index=True, return_inverse=True)
        odd = numpy.flatnonzero(labels != labels[first[group]])
        if len(odd):
            places = [*train.places, *held_out.places]
            self.notes.append(
                f"{count_text(len(odd), f'{self.item} has', f'{self.item}s have')} the same content as one of another "
                f"class, so one of the two labels is wrong, first: {places[odd[0]]} and {places[first[group[odd[0]]]]}"
            )

    @property
    def supervised_tokens(self) -> int:
        """The number of labels in one pass over the training samples, one for each."""
        return self.train

    def lines(self) -> list[str]:
        lines = [f"{self.item}s: {self.read:,} read, {self.train:,} for training, {self.eval:,} held out"]
        if self.per_class:
            counts = self.per_class.values()
            names = ", ".join([*islice(self.per_class, MOST_NAMES), *(["..."] if len(counts) > MOST_NAMES else [])])
            fewest = f"{min(counts):,} to " if min(counts) < max(counts) else ""
            lines.append(f"classes: {len(counts)} ({names}), {fewest}{count_text(max(counts), self.item)} each")
        lines += self.lines_of_dropped()
        if self.heldout_duplicates:
            seen = count_text(self.heldout_duplicates, f"held-out {self.item} is", f"held-out {self.item}s are")
            lines.append(f"{seen} also in the training data")
        return [*lines, *self.notes]


@dataclass(frozen=True)
class PreparedSamples:
    """``train``, ``eval``: map-style datasets of rows with ``labels``; ``eval`` is None if nothing is held out.
    ``label_names``: names by label, from 0. ``fingerprint`` changes with data or settings. ``report_words``: if rows of
    recordings have ``report_ids``, the word of each id."""

    train: Any
    eval: Optional[Any]
    statistics: SampleStatistics
    fingerprint: str
    label_names: Sequence[str]
    report_words: Sequence[str] = ()
