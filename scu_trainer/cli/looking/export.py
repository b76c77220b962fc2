"""Writes the rows as training reads them, one JSON object per line."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

from scu_trainer.data.text.encode import NOT_LEARNED
from scu_trainer.errors import StorageError


def export(path: Path, rows: Any, tokenizer: Any) -> int:
    """Write every row with ``input_ids``, ``labels``, ``documents``, ``text``, and ``learned``, the parts of the text
    that are learned. Returns the number of rows. Raises StorageError if the file cannot be written."""
    count = 0
    try:
        with path.open("x", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(_row_entry(row, tokenizer), ensure_ascii=False) + "\n")
                count += 1
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; give --export a path with free space") from error
    return count


def _row_entry(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    labels = [int(label) for label in row["labels"]]
    parts = [list(group) for is_learned, group in groupby(labels, NOT_LEARNED.__ne__) if is_learned]
    return {
        "input_ids": [int(token) for token in row["input_ids"]],
        "labels": labels,
        "documents": [int(number) for number in row["documents"]],
        "text": tokenizer.decode(row["input_ids"]),
        "learned": [tokenizer.decode(part) for part in parts],
    }
