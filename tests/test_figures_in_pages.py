"""The figures in README and docs are those of benchmarks/results/, and each of them is declared or explained."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.headline.front_door import said
from docs import figures
from docs.write_tables import readme_tables, written

TYPED = {
    "3.11": "of Python",
    "4.46": "of transformers",
    "4.0": "Granite 4.0 H",
    "0.1": "a target of S",
    "0.5": "how a ratio is read",
    "0.05": "a budget in a command",
    "0.02": "a budget in a command",
    "0.25": "an amount in a command",
    "0.693": "bits in a nat",
    **dict.fromkeys(("0.85", "0.98", "0.90", "0.95"), "shares of the peak: a profile that was taken once"),
    **dict.fromkeys(("0.7", "1.35", "0.115"), "the second look at the kernel, taken once"),
}
"""Decimals that are no figure of a results file."""


@pytest.fixture(scope="module")
def results() -> figures.Results:
    return figures.Results()


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_figures_are_those_of_the_results(page, results):
    assert figures.written(page.read_text(), results) == page.read_text(), "type python docs/write_tables.py"


def test_every_declared_sentence_stands_somewhere():
    """One that was reworded would be held by nothing: change it in docs/figures.py as well."""
    found = {sentence for page in figures.PAGES for sentence, _ in figures.found_in(page.read_text())}
    assert [sentence for sentence, _ in figures.SENTENCES if sentence not in found] == []


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_a_decimal_in_a_sentence_is_declared(page):
    text = page.read_text()
    for _, match in [*figures.found_in(text)][::-1]:
        text = text.replace(match[0], "")
    prose = re.sub(r"^ *```.*?^ *```|^\|.*?$|`[^`]*`|\]\([^)]*\)", "", text, flags=re.MULTILINE | re.DOTALL)
    assert {*re.findall(r"(?<![\w.])\d+\.\d+(?![\w.]*\w)", prose)} - {*TYPED} == set()


def test_a_new_result_changes_the_pages_and_a_stale_figure_is_seen(tmp_path):
    for path in figures.RESULTS.glob("*.json"):
        (tmp_path / path.name).symlink_to(path)
    changed = json.loads((figures.RESULTS / "splitting.json").read_text())
    changed["work"][0]["summary"] |= {"cpu_over_stock": 0.512, "peak_over_stock": 0.1}
    (tmp_path / "splitting.json").unlink()
    (tmp_path / "splitting.json").write_text(json.dumps(changed))
    for page in figures.PAGES[:3]:
        new = figures.written(page.read_text(), figures.Results(tmp_path))
        (match,) = re.findall(r"(\S+) × the CPU time and (\S+) × the\s+peak\s+memory\s+of\s+stock", new)
        assert match == ("0.51", "0.10")
        assert figures.written(new, figures.Results()) == page.read_text()


def test_the_readme_shows_what_the_main_job_printed():
    readme = figures.PAGES[0].read_text()
    record = json.loads((figures.RESULTS / "front_door.json").read_text())
    assert readme.count("<!-- table ") == 1
    assert written(readme, readme_tables(record)) == readme, "type python docs/write_tables.py"


def test_what_the_main_job_said_is_cut_out_of_its_output():
    table = ["trained 2 steps", "┌──┬──┐", "│  │  │", "└──┴──┘"]
    assert said("\n".join(["step 2/2", table[0] + "    ", *table[1:], "┌──┐", "└──┘", "next: eval"])) == table
    with pytest.raises(RuntimeError, match="no table"):
        said("step 1/2")
