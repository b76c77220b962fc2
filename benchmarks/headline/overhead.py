"""The overhead of the loops when they cannot save anything: rows of one length, with all three loops on.

    python benchmarks/headline/overhead.py [--steps 35] [--repeats 2] [--quick]

The model is a Llama of hidden size 256 with 4 layers and 2,048 words, on 8 rows of 256 tokens per optimizer step, in
float32 with AdamW, with LoRA of rank 8 and with full tuning. There is no padding to save, and too few words for the
chunked loss, so only the cost of the loops remains. Each contender runs in its own process, in turns of five steps: a
plain PyTorch loop as the lower bound, the stock Trainer, ours with every loop off, and ours with all three loops, which
measure and decay at every step and record the loss of each row. Ratios are medians over pairs of turns, and the medians
over the repeats are shown.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.memory_work import Lengths, Shape
from benchmarks.lib.outcome import Figure, Grid, figure, finish
from benchmarks.lib.text_job import Job
from benchmarks.lib.text_race import BASE, Raced, race

CONTENDERS = ("plain", BASE, "ours, no loop", "ours, all loops")
STEPS_PER_TURN, WARM_UP_STEPS = 5, 10
TARGET = 0.98
TUNINGS = {"LoRA": 8, "full": None}
JOB = Job(Shape(vocab=2_048, longest_row=256), Lengths("fixed", 256, 0.0), steps=35, accumulation=1)


def figures_of(raced: dict[str, dict[str, Raced]]) -> dict[str, Figure]:
    return {
        f"tokens per second, {contender} / stock, {tuning}": figure(
            contenders[contender].paired_ratios,
            None if contender == "plain" else "higher",
            TARGET if contender == "ours, all loops" else None,
        )
        for tuning, contenders in raced.items()
        for contender in ("ours, all loops", "ours, no loop", "plain")
    }


def grid_of(raced: dict[str, dict[str, Raced]]) -> Grid:
    rows = []
    for tuning, contenders in raced.items():
        for one in contenders.values():
            found = figure(one.paired_ratios, "higher")
            apart = "" if found.spread is None else f" ±{found.spread / 2:.1%}"
            rows.append((f"{tuning}: {one.contender}", f"{found.value:.3f}{apart}", f"{one.held_out_bits:.4f}"))
    return Grid(("contender", "tokens/s, ratio to stock", "held-out bits"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=JOB.steps)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="every path on a tiny model; writes nothing")
    given = parser.parse_args()
    fewest = WARM_UP_STEPS + 2 * STEPS_PER_TURN
    if given.steps < fewest:
        parser.error(f"--steps is {given.steps}; {fewest} or more leave turns to be measured")
    job, repeats = replace(JOB, steps=given.steps), given.repeats
    if given.quick:
        job, repeats = replace(JOB, shape=Shape(256, 32, 1, 64), lengths=Lengths("fixed", 64, 0.0), steps=20), 1
    raced = {}
    for tuning, rank in TUNINGS.items():
        tuned = replace(job, lora_rank=rank)
        raced[tuning] = race(CONTENDERS, tuned, repeats, steps_per_turn=STEPS_PER_TURN, warm_up_steps=WARM_UP_STEPS)
    results = [{"tuning": tuning, **asdict(one)} for tuning, contenders in raced.items() for one in contenders.values()]
    title = "rows of one length: nothing to gain, what do the loops cost?"
    finish("overhead", title, grid_of(raced), figures_of(raced), quick=given.quick, repeats=repeats, results=results)


if __name__ == "__main__":
    main()
