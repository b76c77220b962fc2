"""Counts over the token rows in one vectorized pass; large data is sampled in evenly spaced blocks of rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Optional

import numpy
import xxhash
from transformers.trainer_utils import has_length

from scu_trainer.data.text.encode import NOT_LEARNED

MOST_TOKENS = 100_000_000
MOST_DOCUMENTS = 500_000
"""Most documents that are compared with each other; each takes a microsecond and a few hundred bytes."""
BLOCK_ROWS = 1024
STREAMED_ROWS = 32
LONG_RUN = 128
"""Shortest run of the same token that is reported. Lines that are drawn with one character are usually much shorter."""
EXAMPLES, LONGEST_EXAMPLE = 64, 256


class SpecialTokens(NamedTuple):
    """Token ids to count. ``ends``: tokens that end a document or generation. ``start``, ``unknown``: None if the
    tokenizer has no separate token for it."""

    ends: frozenset[int]
    start: Optional[int] = None
    unknown: Optional[int] = None


@dataclass
class TokenCounts:
    """Counts over the scanned rows, ``rows`` of ``all_rows`` (None: a stream).

    ``ends``: tokens that end a document or a turn. ``ends_learned``: those of them that have a label.
    ``doubled_starts``: positions with two start tokens in a row. ``documents``: documents, each up to an end token, at
    most MOST_DOCUMENTS. ``repeated``: documents whose tokens occurred before. ``run_tokens``: learned tokens in runs of
    at least LONG_RUN equal tokens. ``longest_run``: (length, token) of the longest one. ``examples``: token ids of the
    first documents, truncated to LONGEST_EXAMPLE.
    """

    all_rows: Optional[int]
    rows: int = 0
    tokens: int = 0
    learned: int = 0
    largest_id: int = 0
    ends: int = 0
    ends_learned: int = 0
    unknown: int = 0
    doubled_starts: int = 0
    documents: int = 0
    repeated: int = 0
    run_tokens: int = 0
    longest_run: tuple[int, int] = (0, -1)
    examples: list[numpy.ndarray] = field(default_factory=list)
    _digests: set[int] = field(default_factory=set, repr=False)

    def sample_phrase(self) -> str:
        """Return a phrase with the number of scanned rows, for messages."""
        if self.rows == self.all_rows:
            return f"of {self.rows:,} rows"
        return f"in a sample of {self.rows:,} rows" + ("" if self.all_rows is None else f" of {self.all_rows:,}")


def scan(rows: Any, marks: SpecialTokens) -> TokenCounts:
    """Count over ``rows``, a dataset with input_ids and labels that has a length or is streamed."""
    facts = TokenCounts(len(rows) if has_length(rows) else None)
    for count, ids, labels in _blocks(rows):
        facts.rows += count
        _count_tokens(facts, ids, labels, marks)
        _count_runs(facts, ids, labels)
        _count_documents(facts, ids, marks.ends)
    return facts


def _blocks(rows: Any) -> Iterator[tuple[int, numpy.ndarray, numpy.ndarray]]:
    """Yield (number of rows, their concatenated token ids, their concatenated labels) for each scanned block."""
    if not has_length(rows):
        taken = list(islice(iter(rows), STREAMED_ROWS))
        if taken:
            yield len(taken), *(numpy.concatenate([row[name] for row in taken]) for name in ("input_ids", "labels"))
        return
    table = rows.select_columns(["input_ids", "labels"]).with_format("arrow")
    for start in _block_starts(rows):
        block = table[start : start + BLOCK_ROWS]
        columns = (block[name].combine_chunks().flatten().to_numpy() for name in ("input_ids", "labels"))
        yield block.num_rows, *columns


def _block_starts(rows: Any) -> list[int]:
    """Return the starts of the blocks to scan: all blocks, or as many evenly spaced ones as MOST_TOKENS allows."""
    starts = range(0, len(rows), BLOCK_ROWS)
    first = rows.select_columns(["length"])[:BLOCK_ROWS]["length"]
    most = max(1, int(MOST_TOKENS / (BLOCK_ROWS * max(1.0, float(numpy.mean(first))))))
    if len(starts) <= most:
        return list(starts)
    return [starts[index] for index in numpy.linspace(0, len(starts) - 1, most, dtype=int)]


def _count_tokens(facts: TokenCounts, ids: numpy.ndarray, labels: numpy.ndarray, marks: SpecialTokens) -> None:
    facts.tokens += len(ids)
    facts.learned += int(numpy.count_nonzero(labels != NOT_LEARNED))
    facts.largest_id = max(facts.largest_id, int(ids.max(initial=0)))
    for end in marks.ends:
        facts.ends += int(numpy.count_nonzero(ids == end))
        facts.ends_learned += int(numpy.count_nonzero(labels == end))
    if marks.unknown is not None:
        facts.unknown += int(numpy.count_nonzero(ids == marks.unknown))
    if marks.start is not None:
        is_start = ids == marks.start
        facts.doubled_starts += int(numpy.count_nonzero(is_start[1:] & is_start[:-1]))


def _count_runs(facts: TokenCounts, ids: numpy.ndarray, labels: numpy.ndarray) -> None:
    """Count runs of one token, also across rows, if most of a run is learned (the first token of a row never is)."""
    borders = numpy.flatnonzero(ids[1:] != ids[:-1]) + 1
    starts, ends = numpy.append(0, borders), numpy.append(borders, len(ids))
    for run in numpy.flatnonzero(ends - starts >= LONG_RUN):
        start, end = int(starts[run]), int(ends[run])
        learned = int(numpy.count_nonzero(labels[start:end] != NOT_LEARNED))
        if 2 * learned > end - start:
            facts.run_tokens += learned
            facts.longest_run = max(facts.longest_run, (end - start, int(ids[start])))


def _count_documents(facts: TokenCounts, ids: numpy.ndarray, ends: Collection[int]) -> None:
    """Count documents and repeated ones. Packed rows are contiguous, so a document may continue over their borders."""
    borders = numpy.flatnonzero(numpy.isin(ids, list(ends))) + 1
    begin = 0
    for end in borders[: MOST_DOCUMENTS - facts.documents].tolist():
        document, begin = ids[begin:end], end
        if len(document) < 2:
            continue
        facts.documents += 1
        digest = xxhash.xxh3_64_intdigest(document)
        facts.repeated += digest in facts._digests
        facts._digests.add(digest)
        if len(facts.examples) < EXAMPLES:
            facts.examples.append(document[:LONGEST_EXAMPLE])
