"""Writes the tables of docs/paths.md from benchmarks/results/variants.json: what a path costs, which loops act in it.

    make test-smoke ARGS="--json benchmarks/results/variants.json" && python docs/write_tables.py

A table stands between two comments that name it; everything else in the page is left alone.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from scu_trainer.cli.variants import rows_of
from scu_trainer.runs.variant_table import BY_NAME, LOOPS
from scu_trainer.runs.variants import Outcome

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "paths.md", ROOT / "benchmarks" / "results" / "variants.json"
CELLS = {"acts": "acts", "refused": "refused", "idle": "idle", "off": "off"}


def tables(record: dict[str, Any]) -> dict[str, str]:
    """Markdown by the name of the table. ``record``: content of the results file."""
    outcomes = [Outcome(**outcome) for outcome in record["outcomes"]]
    return {"costs": _costs(outcomes), "loops": _loops(outcomes), "elsewhere": _elsewhere(outcomes)}


def _costs(outcomes: list[Outcome]) -> str:
    heads = ("path", "saves", "peak memory (ratio)", "step time ratio", "held-out bits per token")
    rows = [(f"`{row[0]}`", BY_NAME[row[0]].saves, *row[1:4]) for row in rows_of(outcomes)]
    return _markdown(heads, rows)


def _loops(outcomes: list[Outcome]) -> str:
    ran = [outcome for outcome in outcomes if outcome.status == "ran"]
    rows = [(f"`{outcome.name}`", *(CELLS[outcome.loops[loop]] for loop in LOOPS)) for outcome in ran]
    return _markdown(("path", *LOOPS), rows)


def _elsewhere(outcomes: list[Outcome]) -> str:
    rows = [(f"`{outcome.name}`", outcome.message) for outcome in outcomes if outcome.status == "missing"]
    return _markdown(("path", "not run here"), rows)


def _markdown(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def written(page: str, found: dict[str, str]) -> str:
    """``page`` with each table in its place. Raises KeyError for a place whose table nobody makes."""

    def put(match: re.Match) -> str:
        return f"{match[1]}\n{found[match[2]]}\n{match[4]}"

    return re.sub(r"(<!-- table (\w+) -->)\n(.*?)(<!-- end -->)", put, page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), tables(json.loads(RESULTS.read_text()))))
    print(f"written: {PAGE.relative_to(ROOT)}")
