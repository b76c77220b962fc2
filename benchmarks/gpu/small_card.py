"""Does a model train on a GPU that it barely fits, and what does that cost?

    python benchmarks/gpu/small_card.py [--limit_gib 3.69] [--steps 12] [--quick]

The model is the Llama of 1 billion weights of gpu.py, with LoRA of rank 16 in bf16, activation checkpointing, and 8 x 4
rows per optimizer step. torch's allocator may use --limit_gib of the GPU. Ours, which knows the limit by
memory_limit_gb, is compared with stock, on rows of chat lengths and on rows of 1,024 tokens, with the default allocator
and with the expandable segments that our commands set. Each training runs in its own process. Out of memory: the number
of recovered events, in all steps and in the first. Held: the memory that the allocator had reserved at the end.
Seconds: the median time of an optimizer step from the second on, with a synchronization at its end.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks  # noqa: F401 - the first import: it keeps torchao quiet

# isort: split

import torch
from transformers import TrainerCallback

from benchmarks.gpu.gpu_window import Window
from benchmarks.gpu.gpu_work import LENGTHS, Point, job_of
from benchmarks.lib.common import quiet, scratch_arguments, shown
from benchmarks.lib.memory_work import counted, in_fresh_process, limit_memory
from benchmarks.lib.outcome import Figure, Grid, finish
from benchmarks.lib.text_job import LOOPS, OurTrainer, StockTrainer, padded
from scu_trainer.errors import OutOfMemory
from scu_trainer.settings import MemorySettings
from scu_trainer.train.run_directory.logs import run_log
from scu_trainer.train.step.recovery.out_of_memory import is_out_of_memory

GIB = 2**30
SEGMENTS = {"as it comes": {}, "expandable": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}}


class Looks(TrainerCallback):
    """Records the time after every optimizer step, and the number of recovered out-of-memory events so far."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seen: list[tuple[float, int]] = []
        self.trainer: Any = None

    def on_step_end(self, args, state, control, **others):
        if self.device == "cuda":
            torch.cuda.synchronize()
        statistics = counted(self.trainer)
        self.seen.append((time.perf_counter(), 0 if statistics is None else statistics.out_of_memory))


def trained(contender: str, point: Point, limit_gib: float) -> dict[str, Any]:
    """Train ``contender`` on a GPU limited to ``limit_gib``, and return its results. Runs in its own process."""
    job = replace(job_of(point, None, Window(point.device, point.steps)), steps=point.steps)
    looks, on_card = Looks(point.device), point.device == "cuda"
    if on_card:
        limit_memory(point.device, int(limit_gib * GIB))
    kind, loops = StockTrainer, {}
    if contender == "ours":
        kind, loops = OurTrainer, {**LOOPS, "memory": MemorySettings(memory_limit_gb=limit_gib)}
    end = "finished"
    with run_log(), scratch_arguments(**job.training()) as args:
        try:
            looks.trainer = kind(job.model(), args, data_collator=padded, train_dataset=job.token_rows(), **loops)
            looks.trainer.step_tokens = []
            looks.trainer.add_callback(looks)
            quiet(looks.trainer).train()
        except Exception as error:
            if not (isinstance(error, OutOfMemory) or is_out_of_memory(error)):
                raise
            end = "out of memory"
    steps = [after[0] - before[0] for before, after in zip(looks.seen, looks.seen[1:], strict=False)]
    return {
        "end": end,
        "steps": len(looks.seen),
        "out_of_memory_by_step": [events for _, events in looks.seen],
        "seconds": median(steps) if steps else None,
        "held_gib": torch.cuda.memory_reserved() / GIB if on_card else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit_gib", type=float, default=3.69)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="a tiny model on the CPU; writes nothing")
    given = parser.parse_args()
    if not given.quick and not torch.cuda.is_available():
        print("no CUDA device here; --quick tries this benchmark on the CPU without measuring", file=sys.stderr)
        return 2
    shape, device, lengths = ("tiny", "cpu", ["tiny"]) if given.quick else ("1b", "cuda", ["chat", "fixed"])
    rows, results = [], []
    for name in lengths:
        point = Point(shape, "lora", "ours", 1, name, 2 if given.quick else given.steps, accumulation=4, device=device)
        for contender in ("ours", "stock"):
            for segments, allocator in SEGMENTS.items():
                result = in_fresh_process(trained, contender, point, given.limit_gib, allocator=allocator)
                results.append({"lengths": LENGTHS[name].name, "contender": contender, "segments": segments, **result})
                events = result["out_of_memory_by_step"] or [0]
                cells = [result["end"], str(result["steps"]), f"{events[-1]} ({events[0]})"]
                cells += [shown(result["seconds"], 2), shown(result["held_gib"], 2)]
                rows.append([name, contender, segments, *cells])
                print(" | ".join(rows[-1]), flush=True)
    ours = [result for result in results if result["contender"] == "ours"]
    found = {"out of memory, all trainings of ours": sum(max([0, *one["out_of_memory_by_step"]]) for one in ours)}
    found["trainings of ours that ended early"] = sum(one["end"] != "finished" for one in ours)
    heads = ["rows", "contender", "segments", "end", "steps", "out of memory (first step)", "s per step", "held GiB"]
    place = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    figures = {name: Figure(value, "lower", target=0) for name, value in found.items()}
    title = f"{given.limit_gib} GiB of {place}"
    finish("small_card", title, Grid(heads, rows), figures, quick=given.quick, repeats=1, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
