"""What a run has answered to held-out prompts, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scu_trainer.report.files import RunFiles
from scu_trainer.report.page import Section, Table, Text

LONGEST_CHARACTERS = 600
Sample = dict[str, Any]


def sections(runs: Sequence[RunFiles]) -> list[Section]:
    """None where no run has samples."""
    with_samples = [run for run in runs if run.samples]
    if not with_samples:
        return []
    blocks = _of_one(with_samples[0]) if len(runs) == 1 else [_of_many(with_samples)]
    return [Section("Samples", blocks)]


def _of_one(run: RunFiles) -> list[Table | Text]:
    first, last = run.samples[0], run.samples[-1]
    begins = "before" if first.get("step") == 0 else f"step {first.get('step')}"
    ends = f"step {last.get('step')}" if run.is_alive else f"after, step {last.get('step')}"
    table = _table([begins, ends], [_by_prompt(row) for row in (first, last)], _by_prompt(last))
    on_the_way = run.samples[1:-1]
    if not on_the_way:
        return [table]
    lines = [f"step {row.get('step')}, {prompt!r}\n{_answer(_by_prompt(row), prompt)}\n"
             for prompt in _by_prompt(last) for row in on_the_way]  # fmt: skip
    return [table, Text("\n".join(lines), True, "during training")]


def _of_many(runs: Sequence[RunFiles]) -> Table:
    """The last answers of each run to the prompts of the first."""
    last = [_by_prompt(run.samples[-1]) for run in runs]
    return _table([run.name for run in runs], last, last[0])


def _table(titles: Sequence[str], answers: Sequence[dict[str, Sample]], asked: dict[str, Sample]) -> Table:
    """A row for each prompt in ``asked``, with the answer of each column."""
    rows = [
        [_shown(prompt), *(_answer(found, prompt) for found in answers), _shown(sample.get("reference"))]
        for prompt, sample in asked.items()
    ]
    return Table(["prompt", *titles, "reference"], rows, keeps_lines=True)


def _by_prompt(row: dict[str, Any]) -> dict[str, Sample]:
    found = row.get("samples")
    return {str(one.get("prompt")): one for one in found if isinstance(one, dict)} if isinstance(found, list) else {}


def _answer(found: dict[str, Sample], prompt: str) -> str:
    if prompt not in found:
        return "-"
    text = _shown(found[prompt].get("answer"))
    return text if text.strip() else "(blank)"


def _shown(text: Any) -> str:
    """The end of a long one is what an answer follows."""
    text = "" if text is None else str(text).strip("\n")
    return text if len(text) <= LONGEST_CHARACTERS else f"... {text[-LONGEST_CHARACTERS:]}"
