"""Write ``suspects.jsonl``: rows that the noise guard considers wrong, one JSON object per line, worst first.

The file is for a person who reads and fixes the rows. It has the number of the row, its running loss, its mean loss
since the start, its label, the documents that are in it, and the beginning of its text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Optional

import numpy
import torch

from scu_trainer.control.difficulty import Difficulty
from scu_trainer.run_files import write_text

SUSPECTS_FILE = "suspects.jsonl"
MOST_SUSPECTS = 10_000
PREVIEW_TOKENS = 48


def write_suspects(folder: Path, ids: numpy.ndarray, difficulty: Difficulty, rows: Any, tokenizer: Any) -> None:
    """Replace the file by the first ``MOST_SUSPECTS`` of ``ids``, which are sorted worst first. ``rows``: all rows."""
    lines = [json.dumps(line) for line in _lines(ids[:MOST_SUSPECTS], difficulty, rows, tokenizer)]
    write_text(Path(folder) / SUSPECTS_FILE, "".join(f"{line}\n" for line in lines))


def _lines(ids: numpy.ndarray, difficulty: Difficulty, rows: Any, tokenizer: Any) -> Iterator[dict[str, Any]]:
    for sample in ids.tolist():
        row = rows[sample]
        line = {
            "sample_index": sample,
            "loss": round(float(difficulty.scores[sample]), 4),
            "mean_loss": round(float(difficulty.means[sample]), 4),
            "observations": int(difficulty.observations[sample]),
        }
        if isinstance(row, Mapping):
            line |= {name: _to_python(row[name]) for name in ("documents", "label") if name in row}
            line |= _single_label(row.get("labels"))
            line |= _preview(row.get("input_ids"), tokenizer)
        yield line


def _single_label(labels: Any) -> dict[str, Any]:
    """Return a row's label, if it has a single one; the labels of a sequence are its text."""
    plain = _to_python(labels)
    return {} if plain is None or isinstance(plain, list) else {"label": plain}


def _preview(input_ids: Any, tokenizer: Any) -> dict[str, str]:
    decode: Optional[Any] = getattr(tokenizer, "decode", None)
    if input_ids is None or decode is None:
        return {}
    return {"text": decode(_to_python(input_ids[:PREVIEW_TOKENS]), skip_special_tokens=True)}


def _to_python(value: Any) -> Any:
    return value.tolist() if torch.is_tensor(value) or isinstance(value, (numpy.ndarray, numpy.generic)) else value
