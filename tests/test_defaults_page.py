"""docs/defaults.md names each default that acts, with the value that the code has."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments

from scu_trainer.cli.configuration import TRAINING_DEFAULTS
from scu_trainer.cli.fields import settings_parser
from scu_trainer.settings.tasks import KINDS

PAGE = Path(__file__).parents[1] / "docs" / "defaults.md"
NAMED = {
    "scu",
    "scu_target_s",
    "memory_control",
    "curriculum",
    "dtype",
    "mixed_precision",
    "tuning",
    "keep_freed_memory",
}


def table(heading: str) -> dict[str, list[str]]:
    """Cells behind the name of each row of the table below ``heading``."""
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) == len(dict(rows)), "a setting stands there twice"
    return {name: [cell.strip().strip("`") for cell in cells.split(" | ")] for name, cells in rows}


def test_defaults_of_every_task_are_those_of_the_code():
    parser, shown = settings_parser(TrainingArguments), table("Of every task")
    stock = {item.name: item.default for item in fields(TrainingArguments)}
    ours = {name: TRAINING_DEFAULTS.get(name, parser.get_default(name)) for name in shown}
    assert {name: cells[0] for name, cells in shown.items()} == {name: str(value) for name, value in ours.items()}
    assert set(TRAINING_DEFAULTS) | NAMED <= set(shown)
    assert all(shown[name][1] == "-" for name in shown if name not in stock)
    known = {name for name in TRAINING_DEFAULTS if name not in ("output_dir", "report_to")}  # made up when it is None
    assert {name: shown[name][1] for name in known} == {name: str(stock[name]) for name in known}
    assert all(cells[-1] for cells in shown.values()), "each has its reason"


@pytest.mark.parametrize("task", [name for name, kind in KINDS.items() if kind.defaults])
def test_defaults_of_a_task_are_those_of_the_code(task):
    shown = table(f"task: {task}")
    assert {name: cells[0] for name, cells in shown.items()} == {n: str(v) for n, v in KINDS[task].defaults.items()}
