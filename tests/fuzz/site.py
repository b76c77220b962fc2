"""What every case may use: a tiny model with its tokenizer, rows to train on, and a finished run."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from tests import tiny
from tests.fuzz.verdict import ACCEPTED, run_case

ROWS = [{"text": f"the quick brown fox number {number} jumps over the lazy dog"} for number in range(12)]


@dataclass(frozen=True)
class Site:
    """``model``: a folder of a Llama of one layer. ``rows``: a .jsonl of 12 texts. ``run``: a run of one step."""

    folder: Path
    model: Path
    rows: Path
    run: Path

    def train(self, *more: str, **changes: Optional[str]) -> list[str]:
        """Words of a training of one step that works; ``changes`` replace its flags, None takes one out."""
        flags = {
            "model_name_or_path": str(self.model),
            "dataset": str(self.rows),
            "output_dir": "out",
            "max_steps": "1",
            "use_cpu": "true",
            "block_size": "16",
            "per_device_train_batch_size": "2",
            "report_to": "none",
            "save_strategy": "no",
            "optim": "adamw_torch",
            "predict_memory": "false",
            **changes,
        }
        return ["train", *(f"--{name}={value}" for name, value in flags.items() if value is not None), *more]


def make_site(folder: Path) -> Site:
    """Below ``folder``, which must be there. Raises RuntimeError if the run does not train."""
    model, rows, run = folder / "model", folder / "rows.jsonl", folder / "made"
    tiny.saved_llama(model, layers=1)
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    site = Site(folder, model, rows, run)
    made = run_case(site.train(save_strategy="steps", save_steps="1"), _fresh(run), patience_s=120)
    if made.what != ACCEPTED:
        raise RuntimeError(f"the run that cases start from did not train: {made.said[-3000:]}")
    return Site(folder, model, rows, run / "out")


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
