"""How does it scale: the arithmetic of the tables, files of documents, and that both contenders do the same work."""

from __future__ import annotations

import json

import numpy
import pytest

from benchmarks.studies.scaling_parts import commands, documents, ranks, sizes
from scu_trainer.data.store import open_arrow


def ranks_run(seconds: float, bits: float = 5.0) -> dict:
    steps = ranks.WARM_UP_STEPS + 4
    return {
        "step_s": [9.0] * ranks.WARM_UP_STEPS + [seconds] * 3,
        "step_tokens": [100] * steps,
        "held_out_bits": bits,
    }


def test_two_ranks_against_one_and_ours_against_stock():
    seconds = {"stock 1": 1.0, "stock 2": 0.625, "ours 1": 0.5, "ours 2": 0.25}
    grid, figures = ranks.summary([{name: ranks_run(s) for name, s in seconds.items()}])
    found = {name: one.value for name, one in figures.items()}
    assert found == pytest.approx(
        {
            "2 ranks over 1, ours": 2.0,
            "2 ranks over 1, stock": 1.6,
            "1 rank, ours / stock": 2.0,
            "2 ranks, ours / stock": 2.5,
        }
    )
    assert [row[0] for row in grid.rows] == ["stock, 1 rank", "stock, 2 ranks", "ours, 1 rank", "ours, 2 ranks"]
    assert grid.rows[3][1:3] == ["2.00", "2.50"]


def test_ranks_share_the_rows_of_one():
    whole = ranks.FULL
    shared = whole.among(2)
    assert shared.token_rows().lengths == whole.token_rows().lengths
    assert shared.step_rows * 2 == whole.step_rows and shared.batch_rows == whole.batch_rows


def test_turns_are_told_apart_by_job():
    early = [9.0] * sizes.WARM_UP_TURNS
    first, second = ([*early, *(sizes.STEPS_PER_TURN * step_s for step_s in found)] for found in ([1.0, 2.0], [3.0]))
    assert sizes.by_job([*first, None, *second]) == [[1.0, 2.0], [3.0]]


def test_tokens_per_second_relative_to_the_first_point_of_stock():
    def result(size: int, tokens: int, stock_s: float, ours_s: float) -> dict:
        seconds = {"stock": [[stock_s] * 3] * 2, "ours": [[ours_s] * 3] * 2}
        bits = {"stock": 5.0, "ours": 5.0}
        return {"series": "block", "size": size, "step_tokens": tokens, "step_s": seconds, "held_out_bits": bits}

    grid, figures = sizes.summary([result(128, 100, 1.0, 2.0), result(256, 200, 1.0, 0.5)])
    assert [row[1:4] for row in grid.rows] == [["1.00", "0.50", "0.50"], ["2.00", "4.00", "2.00"]]
    assert figures["ours / stock at the largest block"].value == 2.0


def test_every_point_takes_whole_rows_of_its_block():
    for point in sizes.points(quick=True):
        assert set(point.job.token_rows().lengths) == {int(point.job.lengths.median)}


def test_the_file_holds_as_many_documents_as_asked_for(tmp_path):
    count = documents.MOST_ROWS_PER_BATCH + 7
    documents.write_documents(tmp_path / "rows.arrow", count)
    rows = open_arrow(tmp_path / "rows.arrow")
    assert len(rows) == count and rows[count - 1]["documents"] == [count - 1]
    assert all(len(row["input_ids"]) == row["length"] for row in rows.select([0, count // 2, count - 1]))


@pytest.mark.parametrize("contender", documents.CONTENDERS)
def test_a_contender_trains_saves_and_goes_on(tmp_path, contender):
    documents.write_documents(tmp_path / "rows.arrow", 200)
    found = documents.trained(contender, str(tmp_path / "rows.arrow"))
    assert found["first_step_s"] > 0 and found["resumed_s"] > 0
    assert (found["checkpoint_bytes"] > 200 * 20) == (contender == "ours")


def test_bytes_per_document_are_above_the_smallest_number():
    results = [
        {"path": contender, "documents": count, "held_bytes": 500 + count * each, "peak_bytes": 900 + count * each}
        | {"first_step_s": 1.0, "resumed_s": 1.0, "checkpoint_bytes": 0}
        for contender, each in (("stock", 40), ("ours", 20))
        for count in (10, 1000)
    ]
    _, figures = documents.summary(results)
    assert figures["held bytes per document, ours"].value == 20
    assert figures["peak bytes per document, stock"].value == 40


@pytest.mark.parametrize("kind", commands.FORMATS)
def test_a_file_repeats_the_distinct_documents(tmp_path, kind):
    path, count = tmp_path / f"documents.{kind}", commands.DISTINCT + 3
    commands.write_texts(path, count)
    if kind == "jsonl":
        texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    else:
        from pyarrow import parquet

        texts = parquet.read_table(path)["text"].to_pylist()
    assert len(texts) == count and texts[:3] == texts[-3:]
    assert len(numpy.unique(texts)) == commands.DISTINCT
