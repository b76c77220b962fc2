"""The cost of atomic checkpoints: saves of the stock Trainer and of ours take turns in one process.

    python benchmarks/loops/checkpoint_cost.py [--rounds 15] [--folder DIR]

Each round saves the same state in all ways, in a rotating order, after the disk has become idle. "manifest and hashes"
is ours without a sync; "whole" is ours with everything, which hashes while the disk writes. The cost of syncing depends
on the disk and is listed separately, because the stock save returns while the system still writes. Medians over rounds
are printed: seconds, and the ratio to the stock save of the same round, of CPU time for computation and of wall-clock
time for waiting; and by how much hashing makes the whole save longer.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks  # noqa: F401 - the first import: it keeps torchao quiet

# isort: split

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from benchmarks.lib.common import quiet, write_result
from benchmarks.lib.turns import another_first
from scu_trainer import SCUTrainer
from scu_trainer.train.checkpoints import format as checkpoint
from scu_trainer.train.run_directory.logs import run_log

TARGET_RATIO = 1.10
VOCABULARY = 4096
WAYS = ("stock", "no hashes", "manifest and hashes", "whole, no hashes", "whole")


def model_of(tuning: str) -> torch.nn.Module:
    """Return a model of 13.8 million weights, with LoRA another 3.4 million of rank 64."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    if tuning == "full":
        return model
    return get_peft_model(model, LoraConfig(r=64, lora_alpha=64, target_modules="all-linear"))


def trained(tuning: str, folder: Path) -> SCUTrainer:
    """Return a trainer after one step, so that there is an optimizer state to save."""
    tokens = torch.randint(0, VOCABULARY, (4, 16))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        max_steps=1,
        save_strategy="no",
        logging_steps=1000,
    )
    trainer = quiet(SCUTrainer(model_of(tuning), arguments, train_dataset=rows))
    trainer.train()
    return trainer


def save(trainer: SCUTrainer, way: str) -> None:
    if way == "stock":
        Trainer._save_checkpoint(trainer, trainer.model, None)
        return
    with contextlib.ExitStack() as stack:
        if not way.startswith("whole"):
            stack.enter_context(patch.object(os, "fsync", lambda descriptor: None))
        if way.endswith("no hashes"):
            stack.enter_context(patch.object(checkpoint, "_hash_of_new", lambda path: ""))
        trainer._save_checkpoint(trainer.model, None)


@dataclass(frozen=True)
class Took:
    clock_s: float
    cpu_s: float


def timed(act: Callable[[], None]) -> Took:
    clock_s, cpu_s = time.perf_counter(), time.process_time()
    act()
    return Took(time.perf_counter() - clock_s, time.process_time() - cpu_s)


def measure(tuning: str, rounds: int, folder: Path) -> dict[str, Any]:
    trainer, final = trained(tuning, folder), folder / "checkpoint-1"
    took: dict[str, list[Took]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way in another_first(WAYS, number):
            os.sync()
            found = timed(lambda way=way: save(trainer, way))
            size_bytes = checkpoint.size_bytes(final)
            shutil.rmtree(final)
            if number:  # the first round is a warm-up
                took[way].append(found)
    return {
        "tuning": tuning,
        "mib": round(size_bytes / 2**20, 1),
        "rounds": rounds,
        "median_clock_s": {way: round(median(each.clock_s for each in took[way]), 4) for way in WAYS},
        "median_cpu_s": {way: round(median(each.cpu_s for each in took[way]), 4) for way in WAYS},
        "cpu_ratio_to_stock": {way: _ratio(took[way], took["stock"], "cpu_s") for way in WAYS},
        "clock_ratio_to_stock": {way: _ratio(took[way], took["stock"], "clock_s") for way in WAYS},
        "hashes_in_whole_save": _ratio(took["whole"], took["whole, no hashes"], "clock_s"),
    }


def _ratio(ours: list[Took], stock: list[Took], clock: str) -> float:
    return round(median(getattr(a, clock) / getattr(b, clock) for a, b in zip(ours, stock, strict=True)), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", help="where to save; default: the system's folder for temporary files")
    options, results = parser.parse_args(), []
    with run_log():
        for tuning in ("lora", "full"):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                results.append(measure(tuning, options.rounds, Path(folder)))
    table = Table("tuning", "MiB", "way", "clock, s", "CPU, s", "CPU / stock", "clock / stock")
    for result in results:
        for way in WAYS:
            figures = (result[name][way] for name in ("median_clock_s", "median_cpu_s"))
            ratios = (result[name][way] for name in ("cpu_ratio_to_stock", "clock_ratio_to_stock"))
            texts = [f"{figure:.3f}" for figure in (*figures, *ratios)]
            table.add_row(result["tuning"], f"{result['mib']:.0f}", way, *texts)
    Console(width=120).print(table)
    for result in results:
        ratio = result["hashes_in_whole_save"]
        print(f"{result['tuning']}: a whole save with hashes takes {ratio:.3f} of one without (target {TARGET_RATIO})")
    write_result("checkpoint_cost", {"target_ratio": TARGET_RATIO, "results": results})


if __name__ == "__main__":
    main()
