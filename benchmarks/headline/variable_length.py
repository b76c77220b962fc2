"""Fine-tuning on rows of uneven length, as it comes: real tokens per second, at equal held-out loss.

    python benchmarks/headline/variable_length.py [--lengths alpaca] [--steps 24] [--repeats 2] [--quick]

A Llama of 19 million weights with 32,000 words, all of it trained in float32, lognormal row lengths (alpaca: median
100, sigma .6; chat: 400, .9), 32 rows per optimizer step as batch 8 x accumulation 4, AdamW. Contenders are processes
of their own: the stock Trainer, also with batches grouped by length, TRL's SFTTrainer as it comes, padding-free and
packing, ours without regularization, which moves weights on purpose, and ours with all three loops, as the commands
have it. They take turns of three steps: who has waited for all others starts cold, as nobody does who trains alone.
Tokens are those whose prediction is learned: padding is no work. The first six steps are left out, in five of which
ours measures every micro-batch; the ratio with them stands beside.

Held-out loss is the proof of equal work. Packing has the tokens of each step, but other rows in it, and grouping by
length has other rows and other tokens in each, so their losses may differ. TRL as it comes takes long on a CPU: its
loss has its fast kernel on GPUs. It runs in the first round only.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.memory_work import DISTRIBUTIONS, Shape
from benchmarks.lib.outcome import Figure, Grid, figure, finish
from benchmarks.lib.text_job import Job
from benchmarks.lib.text_race import BASE, Raced, race

CONTENDERS = (BASE, "stock, group_by_length", "trl", "trl, padding-free", "trl, packing", "ours", "ours, all loops")
SLOW = ("trl",)
STEPS_PER_TURN, WARM_UP_STEPS = 3, 6
FEWEST_STEPS = WARM_UP_STEPS + 2 * STEPS_PER_TURN + 1
"""One turn is measured, and the last one is not, even of a contender that packs its rows into a step less."""

TARGET_STOCK, TARGET_TRL = 2.4, 1.0
EQUAL_BITS = 1e-3
"""Largest difference of held-out bits per token that rounding in another order of sums explains."""

SMALL = Shape(vocab=1_000, hidden=32, layers=1, longest_row=256)


def figures_of(raced: dict[str, Raced]) -> dict[str, Figure]:
    ours = raced["ours"]
    best_trl = max((one for name, one in raced.items() if name.startswith("trl")), key=lambda one: median(one.ratios))
    rounds = zip(ours.ratios, best_trl.ratios, strict=False)  # a slow contender has the first one only
    over_trl = [mine / theirs for mine, theirs in rounds]
    return {
        "tokens per second, ours / stock": figure(ours.ratios, "higher", TARGET_STOCK),
        "tokens per second, ours / best of TRL": figure(over_trl, "higher", TARGET_TRL),
        "tokens per second with the first steps, ours / stock": figure(ours.whole_ratios, "higher"),
        "tokens per second, ours with all loops / stock": figure(
            raced["ours, all loops"].ratios, "higher", TARGET_STOCK
        ),
        "held-out bits per token, distance of ours from stock": Figure(
            abs(ours.held_out_bits - raced[BASE].held_out_bits), "lower", target=EQUAL_BITS, tolerance=EQUAL_BITS
        ),
    }


def grid_of(raced: dict[str, Raced]) -> Grid:
    heads = ("contender", "tokens/s, ratio to stock", "with the first steps", "held-out bits", "steps", "tokens")
    rows = []
    for one in raced.values():
        found = figure(one.ratios, "higher")
        apart = "" if found.spread is None else f" ±{found.spread / 2:.0%}"
        rows.append(
            (
                one.contender,
                f"{found.value:.2f}{apart}",
                f"{figure(one.whole_ratios, 'higher').value:.2f}",
                f"{one.held_out_bits:.4f}",
                str(one.optimizer_steps),
                f"{one.tokens:,}",
            )
        )
    return Grid(heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", choices=list(DISTRIBUTIONS), default="alpaca")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="every path on a tiny model; writes nothing")
    given = parser.parse_args()
    if given.steps < FEWEST_STEPS:
        parser.error(f"--steps is {given.steps}; {FEWEST_STEPS} or more leave steps to be measured")
    repeats, steps = (1, FEWEST_STEPS) if given.quick else (given.repeats, given.steps)
    job = Job(SMALL if given.quick else Shape(), DISTRIBUTIONS[given.lengths], steps)
    raced = race(CONTENDERS, job, repeats, steps_per_turn=STEPS_PER_TURN, warm_up_steps=WARM_UP_STEPS, once=SLOW)
    title = f"{given.lengths} lengths, {job.step_rows} rows per optimizer step"
    name = "variable_length" if given.lengths == "alpaca" else f"variable_length_{given.lengths}"
    results = [one.known() for one in raced.values()]
    finish(name, title, grid_of(raced), figures_of(raced), quick=given.quick, repeats=repeats, results=results)


if __name__ == "__main__":
    main()
