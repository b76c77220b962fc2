"""Checks of columns: chosen wrongly, judging from the first rows of a local dataset; not read although their name
suggests that they matter; and parts of conversations that the chat template leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Optional

from scu_trainer.data import formats
from scu_trainer.data.readers import READERS, kind_of, read_file
from scu_trainer.data.sources import files_and_links, is_saved
from scu_trainer.data.statistics import DataStatistics
from scu_trainer.data.text.chat import AROUND_ANSWERS
from scu_trainer.figures import count_text
from scu_trainer.settings import DataSettings
from scu_trainer.settings.tasks import TEXT
from scu_trainer.train.job.job import Job
from scu_trainer.train.preflight.finding import Check, Finding, percent

EMPTY_PROMPTS = Check(
    "prompts-empty",
    "warning",
    "nearly all prompts are empty, so the model learns the completions without any prompt",
    "check the column prompt: its text may be in another column",
)
SAME_BOTH = Check(
    "prompt-is-completion",
    "warning",
    "prompt and completion are the same text in most rows, so the model learns to copy",
    "check how the columns were filled",
)

ANSWER_NOT_READ = Check(
    "answer-not-read",
    "warning",
    "a column that looks like an answer is not read",
    "set prompt_column and response_column, or remove the column from the data",
)
QUESTION_NOT_READ = Check(
    "question-not-read",
    "warning",
    "a column that looks like a question or an instruction is not read",
    "set prompt_column and response_column, or remove the column from the data",
)
LABEL_NOT_READ = Check(
    "label-not-read",
    "warning",
    "a column that looks like a label or a rating is not read, so bad rows are learned like good ones",
    "remove the rows that should not be learned, or train a reward model or a classifier with them",
)
WEIGHT_NOT_READ = Check(
    "weight-not-read",
    "warning",
    "a column that looks like the weight of a row is not read, so every row counts the same, even with weight 0",
    "remove the rows that should not be learned; in a list of datasets, each can have a weight (docs/data.md)",
)
PREFERENCE_NOT_READ = Check(
    "preference-not-read",
    "warning",
    "a column of preferred or rejected answers is not read",
    "train with TRL's DPOTrainer and our loops (docs/any_trainer.md), or remove the column from the data",
)
MEDIA_NOT_READ = Check(
    "media-not-read",
    "warning",
    "a column of images, audio or videos is not read, so the text is learned without what it is about",
    "make sure that the text is worth learning without them, or remove the column from the data",
)
RENDERED_AWAY = Check(
    "rendered-away",
    "warning",
    "the chat template leaves out a part of the conversations",
    "use a template that renders it (--chat_template qwen renders tools, tool calls and reasoning)",
)
OF_REASONING_MODELS = "none if the template is the model's own; otherwise use one that renders it for every answer"

LOOKS_LIKE = (
    (ANSWER_NOT_READ, (*formats.ANSWERS, "answers", "target", "targets", "reply", "reasoning", "tool_calls")),
    (
        QUESTION_NOT_READ,
        (*formats.PROMPTS, *formats.CONTEXTS, *formats.SYSTEMS, *formats.CHAT_COLUMNS, *formats.TOOLS, "history"),
    ),
    (
        LABEL_NOT_READ,
        (*formats.LABELS, "labels", "score", "rating", "reward", "rank", "correct", "is_correct", "is_bad"),
    ),
    (WEIGHT_NOT_READ, ("weight", "weights", "sample_weight", "loss_weight")),
    (PREFERENCE_NOT_READ, (*formats.PREFERENCES, "preferred", "dispreferred", "preference")),
    (MEDIA_NOT_READ, formats.IMAGES),
)

ROWS_LOOKED_AT = 64
MOST = 0.9


def before_loading(job: Job) -> Iterator[Finding]:
    if job.task.task != TEXT:
        return
    for data in [job.data.settings_of_source(source) for source in job.data.sources] or [job.data]:
        yield from _check_dataset(data)


def _check_dataset(data: DataSettings) -> Iterator[Finding]:
    file = _first_file(Path(data.dataset).expanduser())
    if file is None:
        return
    records = islice(read_file(file, *formats.Columns.of(data).named), ROWS_LOOKED_AT)
    rows = [record.value for record in records if not record.problem]
    if rows:
        yield from _check_pairs(rows)


def before_training(statistics: Any) -> Iterator[Finding]:
    """Check the ``statistics`` of the prepared data, whatever source it was read from."""
    if not isinstance(statistics, DataStatistics):
        return
    for check, names in LOOKS_LIKE:
        for column in (column for column in statistics.columns_not_used if column.lower() in names):
            rows = statistics.columns_not_used[column]
            yield check.found(
                f"{column!r} has a value in {count_text(rows, 'row')} and is not read", f"column {column}"
            )
    for what, count in statistics.rendered_away.items():
        fix = OF_REASONING_MODELS if AROUND_ANSWERS in what else None
        yield RENDERED_AWAY.found(f"{what}: left out of {count_text(count, 'conversation')}", "chat_template", fix)


def _first_file(path: Path) -> Optional[Path]:
    """Return the first file with columns that is cheap to open; None without one and for `save_to_disk` folders."""
    if not path.is_dir():
        return path if path.is_file() and kind_of(path) in READERS else None
    if is_saved(path):
        return None
    return next((file for file in files_and_links(path)[0] if kind_of(file) in READERS), None)


def _check_pairs(rows: list[dict[str, Any]]) -> Iterator[Finding]:
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
