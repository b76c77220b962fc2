"""One word for one thing, and the field's: what older versions called by names of their own does not come back."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

OLD = {
    r"\b(class|import) (Law|Seen|State|Plan|Interval|Parts|Footprint|Mark|Chunk|Question|Answer)\b": "a name that says "
    "what of: ControllerConfig, Measurement, MemoryEstimate, WindowSnapshot, MicroBatch",
    r"\b(every|largest|smallest|memory) chunks?\b|\bchunks? (ran|runs|shrinks?)\b|trainer\.chunked\b": "micro-batch",
    r"\brecord_pieces\b|\bSavedPiece\b|\bpiece_bytes\b": "micro-batch, part",
    r"\b(is|are) no numbers?\b|loss(es)? without a number": "not finite",
    r"\bask_of\b|\b_Question\b|loss probe|probe of the loss": "loss analysis, trial",
    r"\b(ranks|self)\.agree\b": "all_reduce_max",
    r"\b[Ll]eaders?\b": "main process; supervisor of a background run",
    r"\b(lambda|Lambda|it) pulls\b|\b_pull\b|\bpull toward\b": "decoupled decay toward the initial weights",
    r"\.bad_numbers\b": "nonfinite_guard",
    r"\bclaim(s|ed)? (a|the) (run|directory|folder)\b": "run-directory lock",
    r"\bcontinuity\b": "resume compatibility",
    r"\b[Rr]ehears\w*": "test run",
    r"\byardsticks?\b": "reference model",
    r"\bfootprints?\b": "memory estimate",
    r"\b(the|its|has|keeps|of) books\b|_books\b": "statistics",
    r"\banew\b": "again, starts over",
    r"\b(is|are|was|were) told\b": "is reported",
    r"\btwice is now\b|\bout-numbered\b": "plain English",
}
"""Pattern -> the word that says it."""


def lines() -> list[tuple[str, int, str]]:
    """(file, number, text) of all that is tracked, but the history of changes, results, and this list."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    found = []
    for name in filter(None, names):
        is_text = name.endswith((".py", ".md", ".yaml", ".cfg", ".toml", ".html", ".j2")) or name == "Makefile"
        if is_text and name not in ("CHANGELOG.md", "tests/test_vocabulary.py", "tests/english/rules.yaml"):
            text = (ROOT / name).read_text(encoding="utf-8")
            found += [(name, number, line) for number, line in enumerate(text.split("\n"), start=1)]
    return found


@pytest.fixture(scope="module")
def tracked() -> list[tuple[str, int, str]]:
    return lines()


@pytest.mark.parametrize("pattern", OLD)
def test_an_old_word_is_gone(tracked, pattern):
    assert [line for line in tracked if re.search(pattern, line[2])] == [], OLD[pattern]
