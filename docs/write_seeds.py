"""Writes docs/seeds.md from docs/seeds.yaml.

python docs/write_seeds.py
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, Optional

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

from write_tables import markdown  # noqa: E402

TABLE, PAGE = ROOT / "docs" / "seeds.yaml", ROOT / "docs" / "seeds.md"

PRESENT, DIFFERENT, NOT_HERE = "present", "different", "not here"
MEANINGS = {
    PRESENT: "does what the document says, as written or under the name in the table",
    DIFFERENT: "done another way, for the reason in the table",
    NOT_HERE: "cannot be shown on the machines at hand, or is written and was never run on the hardware it is for",
}

HEAD = """\
# The five documents that this grew from

This project grew from five documents, on ACMDS, TRIDENT-Net, CADENCE, SCU-Granite and an efficient ResNet-18. This
page lists each statement of these documents, whether it is true here, and the command that shows it.

`python docs/write_seeds.py` writes this page from `docs/seeds.yaml`. `python -m pytest tests/test_seeds.py` runs each
command below once, on two CPU cores, and checks that its output has what the rows claim. The tests among the commands
also run with all other tests."""


class Row(NamedTuple):
    """``command``: by its name; ``holds``: what it prints. Both None where nothing can be shown here."""

    number: int
    document: str
    promise: str
    verdict: str
    here: str
    command: Optional[str] = None
    holds: Optional[str] = None


def table() -> tuple[dict[str, str], list[Row]]:
    """(commands by name, rows)"""
    content: dict[str, Any] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return content["commands"], [Row(*row) for row in content["rows"]]


def page() -> str:
    commands, rows = table()
    counts = Counter(row.verdict for row in rows)
    summary = markdown(
        ("verdict", "statements", "meaning"), [(name, str(counts[name]), MEANINGS[name]) for name in MEANINGS]
    )
    parts = [HEAD, summary]
    for document in dict.fromkeys(row.document for row in rows):
        cells = [
            (str(row.number), row.promise, row.verdict, row.here, f"`{row.command}`" if row.command else "")
            for row in rows
            if row.document == document
        ]
        parts += [f"## {document}", markdown(("no.", "the document says", "verdict", "here", "shown by"), cells)]
    listed = "\n".join(f"{name}:\n    {command}" for name, command in commands.items())
    parts += ["## The commands", f"`$OUT` is an empty folder, `$MODEL` one with a small Llama.\n\n```\n{listed}\n```"]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
