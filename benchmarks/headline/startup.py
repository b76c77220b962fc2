"""How long does start-up take? Seconds from the start of a process, for ours and stock in turn.

    python benchmarks/headline/startup.py [--repeats 5] [--quick]

Four measurements: until the trainer class is imported; until --help has been printed; until the first optimizer step of
a small LoRA job has been logged (the embedded base and the same documents, already tokenized by an earlier start; the
stock contender is startup_stock.py); and until a typing mistake is reported, which should take a second at most. Ours
checks settings, data, memory and disk first, and the ratio includes that. Our commands that do not need torch are
measured too. Absolute times mean little on a shared machine; ratios are medians over repeats.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.outcome import Figure, Grid, figure, finish
from scu_trainer.data import default_cache_dir
from scu_trainer.data.embedded import python_docs
from scu_trainer.train.fixtures.base_model import embedded_base

HERE = Path(__file__).parent
DOCUMENTS = 64
JOB = (
    "--max_steps 2 --per_device_train_batch_size 8 --logging_steps 1 --save_strategy no --eval_strategy no "
    "--report_to none --use_cpu true --learning_rate 1e-3"
).split()
LONGEST_S = 300
MISTAKES, MISTAKE_S = "a mistake is named", 1.0

Contenders = Mapping[str, tuple[Sequence[str], str]]
"""The command of each contender, and the text to wait for in its output; "" waits for its end."""


def questions(scratch: Path) -> dict[str, Contenders]:
    python, ours = [sys.executable, "-c"], [sys.executable, "-m", "scu_trainer.cli.main"]
    base = str(embedded_base(default_cache_dir(None), 240))
    documents = scratch / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in _texts()))
    stock = [sys.executable, str(HERE / "startup_stock.py"), "--model", base, "--documents", str(documents), *JOB]
    train = [*ours, "train", "--model_name_or_path", base, "--dataset", str(documents), "--block_size", "256", *JOB]
    train += ["--mixed_precision", "no", "--validation_split_percentage", "0"]
    return {
        "import the trainer": {
            "ours": ([*python, "from scu_trainer import SCUTrainer"], ""),
            "stock": ([*python, "from transformers import Trainer"], ""),
        },
        "help of training": {
            "ours": ([*ours, "train", "--help"], ""),
            "stock": ([sys.executable, str(HERE / "startup_stock.py"), "--help"], ""),
        },
        "first step logged": {
            "ours": ([*train, "--output_dir", str(scratch / "ours")], "step 1/2"),
            "stock": ([*stock, "--output_dir", str(scratch / "stock")], "'loss'"),
        },
        MISTAKES: {
            "ours, a name": (_failing([*ours, "train", "--learning_rat", "1e-4"]), ""),
            "ours, a value": (_failing([*ours, "train", "--lora_r", "many"]), ""),
            "stock, a value": (_failing([*stock, "--learning_rate", "many"]), ""),
        },
        "commands without torch": {
            "scu-trainer --help": ([*ours, "--help"], ""),
            "scu-trainer runs list": ([*ours, "runs", "list", "--root", str(scratch)], ""),
        },
    }


def _failing(words: Sequence[str]) -> list[str]:
    """Return a command that is expected to end with exit code 2."""
    return ["sh", "-c", '"$@"; test $? = 2', "sh", *words]


def _texts() -> list[str]:
    return [text for _, text in itertools.islice(python_docs(), DOCUMENTS)]


def seconds_until(command: Sequence[str], text: str) -> float:
    """Return the wall-clock seconds until ``text`` appears on standard output, or until the end. Raises RuntimeError if
    it never appears or the command fails."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    begun_s = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        seen_s = None
        limit = threading.Timer(LONGEST_S, process.kill)
        limit.start()
        for line in process.stdout:
            if text and seen_s is None and text in line:
                seen_s = time.perf_counter() - begun_s
        code = process.wait()
        limit.cancel()
        if code or (text and seen_s is None):
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended with {code}: {errors.read()[-2000:]}")
    return time.perf_counter() - begun_s if seen_s is None else seen_s


def measured(contenders: Contenders, repeats: int) -> dict[str, list[float]]:
    """Return the seconds by contender, without the first start of each, which fills caches."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name, (command, text) in contenders.items():
            seconds = seconds_until(command, text)
            if repeat:
                found[name].append(seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one start of each; writes nothing")
    given = parser.parse_args()
    repeats = 1 if given.quick else given.repeats
    with tempfile.TemporaryDirectory() as folder:
        results = [
            {"question": question, "seconds": measured(contenders, repeats)}
            for question, contenders in questions(Path(folder)).items()
        ]
    title = "seconds from the start of a process"
    finish("startup", title, grid_of(results), figures_of(results), quick=given.quick, repeats=repeats, results=results)


def figures_of(results: list[dict[str, Any]]) -> dict[str, Figure]:
    """Return the ratios of ours to stock, by repeat."""
    both = [(one["question"], one["seconds"]) for one in results if "stock" in one["seconds"]]
    ratios = {
        f"seconds until: {question}, ours / stock": figure(
            [ours / stock for ours, stock in zip(seconds["ours"], seconds["stock"], strict=True)], "lower"
        )
        for question, seconds in both
    }
    mistakes = next(one["seconds"] for one in results if one["question"] == MISTAKES)
    named = {
        f"seconds until a mistake in {name.removeprefix('ours, ')} is named": figure(seconds, "lower", MISTAKE_S)
        for name, seconds in mistakes.items()
        if name.startswith("ours")
    }
    return ratios | named


def grid_of(results: list[dict[str, Any]]) -> Grid:
    figures = {name: one for name, one in figures_of(results).items() if ": " in name}
    ratios = {name.split(": ")[1].split(",")[0]: one.value for name, one in figures.items()}
    rows = []
    for one in results:
        question, medians = one["question"], {name: statistics.median(s) for name, s in one["seconds"].items()}
        contenders = ", ".join(f"{name} {value:.2f}" for name, value in medians.items())
        rows.append((question, contenders, f"{ratios[question]:.2f}" if question in ratios else ""))
    return Grid(("until", "median seconds", "ours / stock"), rows)


if __name__ == "__main__":
    main()
