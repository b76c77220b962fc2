from __future__ import annotations

import datasets
import pytest

from scu_trainer.data.text.encode import EMPTY
from scu_trainer.errors import DataError

ROWS = [{"text": f"Cup number {number}."} for number in range(40)]


def documents_of(rows):
    return {number for row in rows for number in row["documents"]}


def test_rows_come_packed_and_every_pass_is_the_same(prepared, jsonl):
    data = prepared(jsonl(ROWS), streaming=True, max_eval_documents=4)
    assert isinstance(data.train, datasets.IterableDataset)
    first, second = list(data.train), list(data.train)
    assert first == second
    assert list(data.train.skip(3)) == first[3:]
    assert {row["length"] for row in first[:-1]} == {32}


def test_the_first_documents_are_held_out(prepared, jsonl):
    data = prepared(jsonl(ROWS), streaming=True, max_eval_documents=4)
    assert data.eval["document"][:] == [0, 1, 2, 3]
    assert [item.name for item in data.eval_documents] == [f"rows.jsonl row {n}" for n in (1, 2, 3, 4)]
    assert documents_of(data.train) == set(range(4, 40))


def test_rows_equal_those_of_the_stored_way(prepared, jsonl):
    path = jsonl(ROWS)
    stored = prepared(path, packing=False, validation_split_percentage=0).train.to_list()
    streamed = list(prepared(path, packing=False, streaming=True, validation_split_percentage=0).train)
    by_document = {row["documents"][0]: row for row in stored}
    assert streamed == [by_document[number] for number in range(40)]


def test_nothing_is_read_ahead_of_training(prepared, jsonl):
    data = prepared(jsonl([*ROWS * 40, "{torn"]), streaming=True, max_eval_documents=4)
    assert next(iter(data.train))["documents"][0] == 4
    with pytest.raises(DataError, match="row 1601: not readable as JSON"):
        list(data.train)


def test_statistics_grow_as_rows_are_read_and_start_again(prepared, jsonl):
    data = prepared(jsonl([*ROWS, {"text": ""}]), streaming=True, max_eval_documents=4)
    assert (data.statistics.documents, data.statistics.eval_documents) == (0, 4)
    for _ in range(2):
        rows = list(data.train)
        statistics = data.statistics
        assert (statistics.documents, statistics.rows_dropped, statistics.rows_read) == (36, {EMPTY: 1}, 41)
        assert statistics.blocks == len(rows)
        assert statistics.supervised_tokens == sum(label != -100 for row in rows for label in row["labels"])
    assert "streaming: the first 4 documents are held out" in statistics.lines()


def test_the_format_is_known_before_training_reads_and_counted_once(prepared, jsonl):
    """By it a model without a chat template is asked as it was trained."""
    others = jsonl([{"text": "Tea."}], "other.jsonl")
    for changes in ({"validation_split_percentage": 0}, {"eval_dataset": str(others)}):
        data = prepared(jsonl([{"question": "Tea?", "answer": "Yes."}] * 9), streaming=True, **changes)
        (before,) = [name for name in data.statistics.formats if name.startswith("question")]
        list(data.train)
        assert data.statistics.formats[before] == 9


def test_own_held_out_data(prepared, jsonl):
    others = jsonl([{"text": "Tea."}, {"text": ""}], "other.jsonl")
    data = prepared(jsonl(ROWS), streaming=True, eval_dataset=str(others), dataset_size=10)
    assert documents_of(data.train) == set(range(10))
    assert (data.statistics.eval_documents, data.statistics.rows_dropped, data.statistics.rows_read) == (
        1,
        {EMPTY: 1},
        12,
    )


def test_a_stream_that_is_all_held_out_is_refused(prepared, jsonl):
    with pytest.raises(DataError, match=r"has 40 documents .* lower max_eval_documents below 40"):
        prepared(jsonl(ROWS), streaming=True)
    with pytest.raises(DataError, match="no usable document; dropped: 1 × empty text"):
        prepared(jsonl([{"text": ""}]), streaming=True)


def test_a_pass_that_learns_nothing_is_an_error(prepared, jsonl):
    data = prepared(jsonl([{"text": ""}] * 3), streaming=True, validation_split_percentage=0)
    with pytest.raises(DataError, match="nothing to learn after the 0 held-out documents; dropped: 3 × empty text"):
        list(data.train)


def test_isolated_documents(prepared, jsonl):
    data = prepared(jsonl(ROWS), streaming=True, max_eval_documents=4, isolate_documents=True)
    row = next(iter(data.train))
    assert row["position_ids"].count(0) == len(row["documents"])
