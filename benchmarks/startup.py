"""How long until it does something? Seconds from the start of a process, ours beside stock, in turn.

    python benchmarks/startup.py [--repeats 7]

Three questions: until the trainer class is imported, until --help has been printed, and until the first optimizer step
of a small LoRA job has been logged (the embedded base, the same documents, tokenized before by an earlier start). The
stock side of the last is benchmarks/startup_stock.py. Ours looks at settings, data, memory and disk first; what that
costs is in the ratio. Beside them our commands that need no torch. Absolute times mean little on a shared machine;
ratios are of medians.
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
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from common import command_line, write_result
from rich.console import Console
from rich.table import Table

from scu_trainer.data import default_cache_dir
from scu_trainer.data.embedded import python_docs
from scu_trainer.train.base_model import embedded_base

HERE = Path(__file__).parent
DOCUMENTS = 64
JOB = (
    "--max_steps 2 --per_device_train_batch_size 8 --logging_steps 1 --save_strategy no --eval_strategy no "
    "--report_to none --use_cpu true --learning_rate 1e-3"
).split()
LONGEST_S = 300

Sides = Mapping[str, tuple[Sequence[str], str]]
"""Command by side, and the text whose appearance on its output is waited for; "" waits for the end."""


def questions(scratch: Path) -> dict[str, Sides]:
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
        "commands without torch": {
            "scu-trainer --help": ([*ours, "--help"], ""),
            "scu-trainer runs list": ([*ours, "runs", "list", "--root", str(scratch)], ""),
        },
    }


def _texts() -> list[str]:
    return [text for _, text in itertools.islice(python_docs(), DOCUMENTS)]


def seconds_until(command: Sequence[str], text: str) -> float:
    """Wall-clock seconds until ``text`` stands on standard output, or until the end. Raises RuntimeError if it never
    does or the command fails."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    begun_s = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        seen_s = None
        for line in process.stdout:
            if text and seen_s is None and text in line:
                seen_s = time.perf_counter() - begun_s
        code = process.wait(LONGEST_S)
        if code or (text and seen_s is None):
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended with {code}: {errors.read()[-2000:]}")
    return time.perf_counter() - begun_s if seen_s is None else seen_s


def measured(sides: Sides, repeats: int) -> dict[str, list[float]]:
    """Seconds by side; the first start of each, which fills caches, is left out."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, (command, text) in sides.items():
            seconds = seconds_until(command, text)
            if repeat:
                found[name].append(seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for question, sides in questions(Path(folder)).items():
            seconds = measured(sides, repeats)
            medians = {name: statistics.median(values) for name, values in seconds.items()}
            ratio = medians["ours"] / medians["stock"] if "stock" in medians else None
            results.append({"question": question, "median_s": medians, "ratio": ratio, "seconds": seconds})
    table = Table("question", "side", "median s", "ours / stock")
    for result in results:
        for name, median in result["median_s"].items():
            ratio = f"{result['ratio']:.2f}" if result["ratio"] and name == "ours" else ""
            table.add_row(result["question"], name, f"{median:.2f}", ratio)
    Console().print(table)
    write_result("startup", command_line(), {"repeats": repeats, "results": results})


if __name__ == "__main__":
    main()
