"""Writes the tables of docs/preflight.md: every check, and every mistake that the tests seed.

    python docs/write_preflight.py

A table stands between two comments that name it; everything else in the page is left alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]  # the mistakes are in tests/

from write_tables import markdown, written  # noqa: E402

from scu_trainer.train.preflight import CHECKS  # noqa: E402
from tests.train.seeded_mistakes import MISTAKES, Mistake  # noqa: E402

PAGE = ROOT / "docs" / "preflight.md"


def tables() -> dict[str, str]:
    """Markdown by the name of the table."""
    return {"checks": _checks(), "mistakes": _mistakes()}


def _checks() -> str:
    rows = [(f"`{check.id}`", check.level, check.says, check.fix or "-") for check in CHECKS.values()]
    return markdown(("check", "level", "what it says", "fix"), rows)


def _mistakes() -> str:
    rows = [(mistake.did, mistake.source, _reported(mistake)) for mistake in MISTAKES]
    return markdown(("mistake", "met in", "reported as"), rows)


def _reported(mistake: Mistake) -> str:
    return f"refused: “… {mistake.expected} …”" if mistake.refused else f"`{mistake.expected}`"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), tables()))
    print(f"written: {PAGE.relative_to(ROOT)}")
