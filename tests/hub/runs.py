"""Small finished runs for the tests of what is shared."""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = "the file of a list is read by some function that returns values and writes them back".split()


def documents(path: Path, count: int = 24) -> Path:
    generator = random.Random(0)
    texts = [" ".join(generator.choices(WORDS, k=24)) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def flags(folder: Path, name: str, **changes) -> list[str]:
    """Of ``scu-trainer train`` for a run called ``name`` beside the model and documents in ``folder``."""
    options = {
        "model_name_or_path": folder / "model",
        "dataset": folder / "documents.jsonl",
        "output_dir": folder / name,
        "block_size": 32,
        "validation_split_percentage": 25,
        "max_steps": 2,
        "save_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.05,
        "report_to": "none",
        "use_cpu": "true",
        "mixed_precision": "no",
        "preflight": "off",
        "predict_memory": "false",
        "sample_max_new_tokens": 1,
        "cache_dir": folder / "cache",
        **changes,
    }
    return [word for key, value in options.items() for word in (f"--{key}", str(value))]


def train(folder: Path, name: str, **changes) -> Path:
    from scu_trainer.cli.train import main
    from tests import tiny

    if not (folder / "model").is_dir():
        tiny.saved_llama(folder / "model")
        documents(folder / "documents.jsonl")
    assert main(flags(folder, name, **changes)) == 0
    return folder / name
