"""One pass over the token rows, whole arrays at a time; of large data over blocks of rows that lie evenly apart."""

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
"""That are compared with each other: a microsecond and some hundred bytes each."""
BLOCK_ROWS = 1024
STREAMED_ROWS = 32
LONG_RUN = 128
"""Places in which the same token stands; lines drawn of one character are shorter, most of them by far."""
EXAMPLES, LONGEST_EXAMPLE = 64, 256


class Marks(NamedTuple):
    """Token ids that are counted. ``ends``: whatever stops generation. ``start``, ``unknown``: None where there is
    none of its own."""

    ends: frozenset[int]
    start: Optional[int] = None
    unknown: Optional[int] = None


@dataclass
class TokenFacts:
    """Counts over the rows looked at, ``rows`` of ``all_rows`` (None: a stream).

    ends: tokens that end a document or a turn, ends_learned: those with a label. doubled_starts: places with two start
    tokens in a row. documents: stretches up to an end, the first MOST_DOCUMENTS; repeated: those whose tokens were seen
    before. run_tokens: learned tokens of stretches of at least LONG_RUN that are all the same; longest_run: (places,
    token) of the longest.
    examples: token ids of the first documents, cut after some.
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
    _seen: set[int] = field(default_factory=set, repr=False)

    def among(self) -> str:
        """Phrase: of how many rows this was found."""
        if self.rows == self.all_rows:
            return f"of {self.rows:,} rows"
        return f"in a sample of {self.rows:,} rows" + ("" if self.all_rows is None else f" of {self.all_rows:,}")


def scan(rows: Any, marks: Marks) -> TokenFacts:
    """``rows``: a dataset with input_ids and labels, with a length or streamed."""
    facts = TokenFacts(len(rows) if has_length(rows) else None)
    for count, ids, labels in _blocks(rows):
        facts.rows += count
        _count(facts, ids, labels, marks)
        _runs(facts, ids, labels)
        _documents(facts, ids, marks.ends)
    return facts


def _blocks(rows: Any) -> Iterator[tuple[int, numpy.ndarray, numpy.ndarray]]:
    """(rows, their tokens one after the other, their labels)."""
    if not has_length(rows):
        taken = list(islice(iter(rows), STREAMED_ROWS))
        if taken:
            yield len(taken), *(numpy.concatenate([row[name] for row in taken]) for name in ("input_ids", "labels"))
        return
    table = rows.select_columns(["input_ids", "labels"]).with_format("arrow")
    for start in _starts(rows):
        block = table[start : start + BLOCK_ROWS]
        columns = (block[name].combine_chunks().flatten().to_numpy() for name in ("input_ids", "labels"))
        yield block.num_rows, *columns


def _starts(rows: Any) -> list[int]:
    """Where blocks of rows begin: all of them, or as many as MOST_TOKENS allow, evenly apart."""
    starts = range(0, len(rows), BLOCK_ROWS)
    first = rows.select_columns(["length"])[:BLOCK_ROWS]["length"]
    most = max(1, int(MOST_TOKENS / (BLOCK_ROWS * max(1.0, float(numpy.mean(first))))))
    if len(starts) <= most:
        return list(starts)
    return [starts[index] for index in numpy.linspace(0, len(starts) - 1, most, dtype=int)]


def _count(facts: TokenFacts, ids: numpy.ndarray, labels: numpy.ndarray, marks: Marks) -> None:
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


def _runs(facts: TokenFacts, ids: numpy.ndarray, labels: numpy.ndarray) -> None:
    """Stretches of one token, over the borders of rows; most of it is learned (the first token of a row never is)."""
    borders = numpy.flatnonzero(ids[1:] != ids[:-1]) + 1
    starts, ends = numpy.append(0, borders), numpy.append(borders, len(ids))
    for run in numpy.flatnonzero(ends - starts >= LONG_RUN):
        start, end = int(starts[run]), int(ends[run])
        learned = int(numpy.count_nonzero(labels[start:end] != NOT_LEARNED))
        if 2 * learned > end - start:
            facts.run_tokens += learned
            facts.longest_run = max(facts.longest_run, (end - start, int(ids[start])))


def _documents(facts: TokenFacts, ids: numpy.ndarray, ends: Collection[int]) -> None:
    """Packed rows follow each other, so stretches up to an end are documents again, over the borders of rows."""
    borders = numpy.flatnonzero(numpy.isin(ids, list(ends))) + 1
    begin = 0
    for end in borders[: MOST_DOCUMENTS - facts.documents].tolist():
        document, begin = ids[begin:end], end
        if len(document) < 2:
            continue
        facts.documents += 1
        digest = xxhash.xxh3_64_intdigest(document)
        facts.repeated += digest in facts._seen
        facts._seen.add(digest)
        if len(facts.examples) < EXAMPLES:
            facts.examples.append(document[:LONGEST_EXAMPLE])
