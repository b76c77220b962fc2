"""The tables of docs/paths.md and docs/families.md are those of the results files, which is what the runs gave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scu_trainer.runs.studies.variant_table import BY_NAME, LOOPS
from scu_trainer.runs.studies.variants import VariantResult, find_violations

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def record(tables):
    return json.loads(tables.RESULTS.read_text())


def test_the_page_holds_the_results(tables, record):
    page = tables.PAGE.read_text()
    assert page.count("<!-- table ") == 3
    assert tables.written(page, tables.tables(record)) == page, "run: python docs/write_tables.py"


def test_a_changed_result_changes_the_page(tables, record):
    changed = json.loads(json.dumps(record))
    ran = next(outcome for outcome in changed["outcomes"] if outcome["status"] == "ran")
    ran["loops"]["memory"] = "idle"
    page = tables.PAGE.read_text()
    assert tables.written(page, tables.tables(changed)) != page


def test_every_path_is_in_the_results_and_kept_its_promises(record):
    assert [outcome["name"] for outcome in record["outcomes"]] == list(BY_NAME)
    assert find_violations([VariantResult(**outcome) for outcome in record["outcomes"]]) == []
    for outcome in record["outcomes"]:
        variant = BY_NAME[outcome["name"]]
        if outcome["status"] == "missing":
            assert variant.needs
            continue
        expected = {loop: "refused" if loop in variant.refused else "acts" for loop in LOOPS}
        assert (outcome["status"], outcome["loops"]) == ("ran", expected)
        assert outcome["bpt"][1] < outcome["bpt"][0]


def test_the_page_of_families_holds_the_results(tables):
    found = [json.loads((tables.RESULTS.parent / f"{name}.json").read_text()) for name in ("recipes", "families")]
    page = tables.FAMILIES_PAGE.read_text()
    assert page.count("<!-- table ") == 2
    assert tables.written(page, tables.family_tables(*found)) == page, "run: python docs/write_tables.py"


def test_the_page_of_retention_holds_the_results(tables):
    record = json.loads((tables.RESULTS.parent / "retention.json").read_text())
    page = tables.RETAIN_PAGE.read_text()
    assert page.count("<!-- table ") == 2
    assert tables.written(page, tables.retention_tables(record)) == page, "run: python docs/write_tables.py"


def test_the_page_of_searches_holds_the_results(tables):
    record = json.loads((tables.RESULTS.parent / "find_rate.json").read_text())
    page = tables.SEARCH_PAGE.read_text()
    assert "<!-- table find_rate -->" in page
    assert tables.written(page, tables.rate_tables(record)) == page, "run: python docs/write_tables.py"


def test_the_page_of_regularization_holds_the_results(tables):
    record = json.loads((tables.RESULTS.parent / "early_stop.json").read_text())
    page = tables.REGULARIZATION_PAGE.read_text()
    assert "<!-- table early_stop -->" in page
    assert tables.written(page, tables.stop_tables(record)) == page, "run: python docs/write_tables.py"


def test_the_page_of_plans_holds_the_results(tables):
    record = json.loads((tables.RESULTS.parent / "memory_estimate.json").read_text())
    page = tables.PLAN_PAGE.read_text()
    assert page.count("<!-- table ") == 1
    assert tables.written(page, tables.estimate_tables(record)) == page, "run: python docs/write_tables.py"


def test_predictions_of_memory_kept_their_targets(tables):
    record = json.loads((tables.RESULTS.parent / "memory_estimate.json").read_text())
    assert record["compared"] >= 12
    assert record["median_error"] <= 0.10
    assert record["worst_error"] <= 0.25
    assert record["fits_said_of_runs_that_died"] == 0
    assert record["limits"]


def test_the_page_of_benchmarks_holds_the_results(tables):
    page = tables.BENCHMARKS_PAGE.read_text()
    records = [json.loads((tables.RESULTS.parent / f"{name}.json").read_text()) for name in tables.suite_names()]
    assert page.count("<!-- table ") == len(records)
    assert tables.written(page, tables.suite_tables(*records)) == page, "run: python docs/write_tables.py"
