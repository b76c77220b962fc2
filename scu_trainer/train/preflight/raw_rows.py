"""The first rows of a local dataset as they stand in the file: columns that were chosen wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Optional

from scu_trainer.data.readers import kind_of, read_file
from scu_trainer.data.sources import visible_files
from scu_trainer.settings import DataSettings
from scu_trainer.settings.tasks import TEXT
from scu_trainer.train.job.job import Job
from scu_trainer.train.preflight.finding import Check, Finding, percent

PROMPT_LEFT_OUT = Check(
    "prompt-left-out",
    "warning",
    "text_column names the column of the answers, and what they answer to stands in another one that is not read",
    "name the columns prompt and completion, or put both into one column",
)
EMPTY_PROMPTS = Check(
    "prompts-empty",
    "warning",
    "nearly all prompts are empty, so the completions are learned as answers to nothing",
    "look at the column prompt: perhaps its text stands in another one",
)
SAME_BOTH = Check(
    "prompt-is-completion",
    "warning",
    "prompt and completion are the same text in most rows: the model learns to copy",
    "look at how the columns were filled",
)

ANSWERS = ("output", "response", "answer", "completion", "target")
QUESTIONS = ("instruction", "prompt", "question", "input", "query")
READ_ROW_BY_ROW = (".jsonl", ".csv", ".parquet")
ROWS_LOOKED_AT = 64
MOST = 0.9


def before_loading(job: Job) -> Iterator[Finding]:
    if job.task.task != TEXT:
        return
    for data in [job.data.of_source(source) for source in job.data.sources] or [job.data]:
        yield from _of_one(data)


def _of_one(data: DataSettings) -> Iterator[Finding]:
    file = _first_file(Path(data.dataset).expanduser())
    if file is None:
        return
    records = islice(read_file(file, data.text_column), ROWS_LOOKED_AT)
    rows = [record.value for record in records if not record.problem]
    if rows:
        yield from _left_out(rows, data.text_column)
        yield from _pairs(rows)


def _first_file(path: Path) -> Optional[Path]:
    """With columns, and cheap to begin. None where there is none, and for folders of the datasets library."""
    if not path.is_dir():
        return path if path.is_file() and kind_of(path) in READ_ROW_BY_ROW else None
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return None
    return next((file for file in visible_files(path) if kind_of(file) in READ_ROW_BY_ROW), None)


def _left_out(rows: list[dict[str, Any]], column: str) -> Iterator[Finding]:
    if column not in ANSWERS:
        return
    beside = [name for name in QUESTIONS if all(_is_text(row.get(name)) for row in rows)]
    if beside and all(column in row for row in rows):
        what = f"only column {column!r} is read; {', '.join(map(repr, beside))} beside it is not"
        yield PROMPT_LEFT_OUT.found(what, "text_column")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _pairs(rows: list[dict[str, Any]]) -> Iterator[Finding]:
    pairs = [(row.get("prompt"), row.get("completion")) for row in rows]
    pairs = [pair for pair in pairs if all(isinstance(side, str) for side in pair)]
    if not pairs:
        return
    among = f"of the first {len(pairs)} rows"
    empty = sum(not prompt.strip() for prompt, _ in pairs) / len(pairs)
    if empty >= MOST:
        yield EMPTY_PROMPTS.found(f"{percent(empty)} {among} have an empty prompt", "column prompt")
    same = sum(prompt.strip() == completion.strip() != "" for prompt, completion in pairs) / len(pairs)
    if same >= MOST:
        yield SAME_BOTH.found(f"{percent(same)} {among} repeat the prompt as completion", "columns prompt, completion")
