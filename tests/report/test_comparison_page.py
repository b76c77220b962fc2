"""docs/compare.md holds the tables of two files of benchmarks/results, each the comparison.json of its command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scu_trainer.report.comparison.statistics import notes, overall

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def records(tables):
    return [json.loads((tables.RESULTS.parent / f"{name}.json").read_text()) for name in ("compare", "compare_one_set")]


def test_the_page_holds_the_results(tables, records):
    page = tables.COMPARE_PAGE.read_text()
    assert page.count("<!-- table ") == 6
    assert tables.written(page, tables.comparison_tables(*records)) == page, "run: python docs/write_tables.py"


@pytest.mark.parametrize("which", [0, 1])
def test_a_changed_result_changes_the_page(tables, records, which):
    changed = json.loads(json.dumps(records))
    changed[which]["table"][1]["held_out_bpt"]["value"] += 1.0
    page = tables.COMPARE_PAGE.read_text()
    assert tables.written(page, tables.comparison_tables(*changed)) != page


@pytest.mark.parametrize("which", [0, 1])
def test_the_verdict_follows_from_the_runs_that_are_recorded(records, which):
    record = records[which]
    counted = {
        arm["name"]: {
            run["seed"]: run["metrics"]["held_out_bpt"]
            for run in record["runs"]
            if run["arm"] == arm["name"] and run["status"] == "finished" and run["error"] is None
        }
        for arm in record["arms"]
    }
    assert len(record["seeds"]) >= 3
    assert record["verdict"].endswith(overall(counted, record["reference"], record["confidence"]))
    expected = notes(counted, record["reference"], record["confidence"], len(record["seeds"]))
    assert record["notes"][-len(expected) :] == expected
