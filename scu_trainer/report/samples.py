"""Tables of the answers of runs to held-out prompts, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scu_trainer.report.files import RunFiles
from scu_trainer.report.page import Section, Table, TextBlock

LONGEST_CHARACTERS = 600
Sample = dict[str, Any]


def sections(runs: Sequence[RunFiles]) -> list[Section]:
    """Return the section with the samples, or [] if no run has any."""
    with_samples = [run for run in runs if run.samples]
    if not with_samples:
        return []
    blocks = _blocks_of_one_run(with_samples[0]) if len(runs) == 1 else [_table_of_runs(with_samples)]
    return [Section("Samples", blocks)]


def _blocks_of_one_run(run: RunFiles) -> list[Table | TextBlock]:
    first, last = run.samples[0], run.samples[-1]
    first_title = "before" if first.get("step") == 0 else f"step {first.get('step')}"
    last_title = f"step {last.get('step')}" if run.is_alive else f"after, step {last.get('step')}"
    table = _table([first_title, last_title], [_by_prompt(row) for row in (first, last)], _by_prompt(last))
    in_between = run.samples[1:-1]
    if not in_between:
        return [table]
    lines = [f"step {row.get('step')}, {prompt!r}\n{_answer_text(_by_prompt(row), prompt)}\n"
             for prompt in _by_prompt(last) for row in in_between]  # fmt: skip
    return [table, TextBlock("\n".join(lines), True, "during training")]


def _table_of_runs(runs: Sequence[RunFiles]) -> Table:
    """Return a table with the last answers of each run to the prompts of the first run."""
    last = [_by_prompt(run.samples[-1]) for run in runs]
    return _table([run.name for run in runs], last, last[0])


def _table(titles: Sequence[str], answers: Sequence[dict[str, Sample]], asked: dict[str, Sample]) -> Table:
    """Return a table with a row for each prompt in ``asked``, and the answer of each column."""
    rows = [
        [_shortened(prompt), *(_answer_text(found, prompt) for found in answers), _shortened(sample.get("reference"))]
        for prompt, sample in asked.items()
    ]
    return Table(["prompt", *titles, "reference"], rows, keeps_lines=True)


def _by_prompt(row: dict[str, Any]) -> dict[str, Sample]:
    found = row.get("samples")
    if not isinstance(found, list):
        return {}
    return {str(sample.get("prompt")): sample for sample in found if isinstance(sample, dict)}


def _answer_text(found: dict[str, Sample], prompt: str) -> str:
    if prompt not in found:
        return "-"
    text = _shortened(found[prompt].get("answer"))
    return text if text.strip() else "(blank)"


def _shortened(text: Any) -> str:
    """Strip blank lines around a text, and cut a long one to its end, which is what an answer continues."""
    text = "" if text is None else str(text).strip("\n")
    return text if len(text) <= LONGEST_CHARACTERS else f"... {text[-LONGEST_CHARACTERS:]}"
