from __future__ import annotations

from itertools import pairwise

import numpy
import pytest

from scu_trainer.data.statistics import DataStatistics
from scu_trainer.data.text.packing import (
    MOST_ROWS_PER_BATCH,
    MOST_VALUES_PER_BATCH,
    NumberedDocument,
    held_out_schema,
    packed,
    record_batches,
    training_rows,
    windows,
)
from scu_trainer.settings import DataSettings

LENGTHS = (5, 30, 8, 1, 17, 64)


@pytest.fixture
def documents():
    starts = numpy.cumsum([0, *LENGTHS])
    tokens = [
        numpy.arange(first, first + length, dtype=numpy.int32) for first, length in zip(starts, LENGTHS, strict=False)
    ]
    return [NumberedDocument(10 + number, ids, ids) for number, ids in enumerate(tokens)]


@pytest.mark.parametrize("isolate", [False, True])
def test_blocks_hold_every_token_in_order(documents, isolate):
    rows = list(packed(documents, 16, isolate))
    assert {len(row.input_ids) for row in rows[:-1]} == {16}
    assert len(rows[-1].input_ids) == sum(LENGTHS) % 16
    assert numpy.concatenate([row.input_ids for row in rows]).tolist() == list(range(sum(LENGTHS)))
    assert rows[0].documents == [10, 11]
    assert rows[2].documents == [11, 12, 13, 14]


def test_only_the_first_label_of_a_block_is_masked(documents):
    for row in packed(documents, 16, isolate=False):
        assert row.labels[0] == -100
        assert (row.labels[1:] == row.input_ids[1:]).all()


def test_isolated_documents_start_at_position_0_without_a_label(documents):
    rows = list(packed(documents, 16, isolate=True))
    assert rows[0].position_ids.tolist() == [0, 1, 2, 3, 4, *range(11)]
    firsts = numpy.cumsum([0, *LENGTHS[:-1]])
    for row in rows:
        begins = row.position_ids == 0
        assert begins[0]
        assert (numpy.isin(row.input_ids, firsts)[1:] == begins[1:]).all()
        assert ((row.labels == -100) == begins).all()


def test_windows_predict_every_token_but_the_first_once(documents):
    rows = list(windows(documents, 16))
    assert all(len(row.documents) == 1 and 1 <= len(row.input_ids) <= 16 for row in rows)
    for document in documents:
        own = [row for row in rows if row.documents == [document.number]]
        predicted = numpy.concatenate([row.labels[row.labels != -100] for row in own])
        assert predicted.tolist() == document.input_ids[1:].tolist()
        for before, after in pairwise(own):
            assert before.input_ids[-1] == after.input_ids[0]


@pytest.mark.parametrize("length", [2, 15, 16, 17, 31, 32])
def test_windows_of_any_length(length):
    ids = numpy.arange(length, dtype=numpy.int32)
    rows = list(windows([NumberedDocument(0, ids, ids)], 16))
    assert sum(row.learned_tokens for row in rows) == length - 1
    assert all(row.learned_tokens for row in rows)


@pytest.mark.parametrize(("tokens", "rows"), [(4, 2 * MOST_ROWS_PER_BATCH + 1), (MOST_VALUES_PER_BATCH // 8, 10)])
def test_arrow_batches_are_few_for_short_rows_and_small_for_long_ones(tokens, rows):
    ids = numpy.arange(tokens, dtype=numpy.int32)
    given = ({"input_ids": ids, "labels": ids, "length": tokens, "document": number} for number in range(rows))
    batches = list(record_batches(given, held_out_schema()))
    numbers = [number for batch in batches for number in batch["document"].to_pylist()]
    assert numbers == list(range(rows)) and len(batches) == 3


@pytest.mark.parametrize("packing", [True, False])
def test_conversations_whose_answer_goes_on_elsewhere_are_counted_as_conversations(packing):
    def conversation(number: int, asked: int, answered: int) -> NumberedDocument:
        ids = numpy.arange(asked + answered, dtype=numpy.int32)
        return NumberedDocument(number, ids, numpy.where(ids < asked, -100, ids).astype(numpy.int32))

    sizes = [(4, 12), (4, 60), (40, 4), (0, 50)]  # whole; cut four times; only its question is cut; plain text
    documents = [conversation(number, *size) for number, size in enumerate(sizes)]
    statistics = DataStatistics()
    rows = list(training_rows(documents, DataSettings(block_size=16, packing=packing), statistics))
    assert len(rows) == statistics.blocks > 4
    assert statistics.answers_cut == 2
    said = "\n".join(statistics.lines())
    assert "2 conversations are cut" in said and "so does packing: false if rows are packed" in said
