"""Fine-tuning on rows of different lengths, with default settings: real tokens per second at equal held-out loss.

    python benchmarks/headline/variable_length.py [--lengths alpaca] [--words 32000] [--steps 24] [--repeats 5]
        [--contenders stock ours] [--hidden 256] [--layers 4] [--template 0] [--precision bf16] [--quick]

The model is a Llama of 19 million weights (with 32,000 words), full tuning in float32, on rows of lognormal lengths
(alpaca: median 100, sigma .6; gsm8k: 150, .35; chat: 400, .9), 32 rows per optimizer step as batch 8 x accumulation 4,
AdamW. Each contender is a separate process: the stock Trainer, also with batches grouped by length; TRL's SFTTrainer
with its defaults, padding-free, and packing; ours without regularization, which changes weights on purpose; and ours
with all three loops, as the commands train. Not by default: "stock, freed memory kept", with a C library that returns
no memory between steps. They take turns of three steps, because a contender starts with cold caches after it has waited
for the others. Tokens are those with a learned prediction, without padding. The first six steps are left out, because
ours measures every micro-batch in five of them; the ratio with them is shown as well. Share of the limit: tokens per
second relative to what the unavoidable operations and bytes would allow at the peak rates of this machine, measured
before each round (benchmarks/lib/machine_limit.py).

--template: the number of tokens at the start of every row that are not learned, from one of two alternating templates
with the same first half, as in instruction data. They are part of the length of a row. Not available for TRL.

--precision bf16: autocast, which the commands choose if the processor supports bf16 natively. The limit is computed for
float32, so its column is left out.

The held-out loss proves that the work is equal. Packing trains on the same number of tokens per step but on other rows,
and grouping by length trains on other rows and tokens in each step, so their losses may differ. TRL with its defaults
is slow on a CPU, because the fast kernel of its loss needs a GPU. It runs in the first round only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.machine_limit import Peaks, Work, measured_peaks, unavoidable
from benchmarks.lib.memory_work import DISTRIBUTIONS, Shape
from benchmarks.lib.outcome import Figure, Grid, figure, finish
from benchmarks.lib.text_job import Job
from benchmarks.lib.text_race import BASE, Raced, race

GROUPED = "stock, group_by_length"
KEEPING = "stock, freed memory kept"
CONTENDERS = (BASE, GROUPED, "trl", "trl, padding-free", "trl, packing", "ours", "ours, all loops")
SLOW = ("trl",)
STEPS_PER_TURN, WARM_UP_STEPS = 3, 6
FEWEST_STEPS = WARM_UP_STEPS + 2 * STEPS_PER_TURN + 1
"""Fewest steps of a run, so that one turn is measured even if packing needs a step less. The last turn is not timed."""

TARGET_STOCK, TARGET_GROUPED, TARGET_TRL, TARGET_SHARE = 2.4, 1.0, 1.0, 0.6
EQUAL_BITS = {"no": 1e-3, "bf16": 1e-2}
"""Largest difference of held-out bits per token that another order of summation explains."""

SMALL = Shape(vocab=1_000, hidden=32, layers=1, longest_row=256)


@dataclass(frozen=True)
class Limit:
    """The limit of each round: ``work`` at the ``peaks`` that were measured before it."""

    work: Work
    peaks: Sequence[Peaks]

    @property
    def tokens_per_second(self) -> float:
        """Return the limit at the highest measured peaks."""
        best = Peaks(max(peak.flops_per_s for peak in self.peaks), max(peak.bytes_per_s for peak in self.peaks))
        return best.tokens_per_second(self.work)

    def share(self, one: Raced) -> list[float]:
        return [speed / self.tokens_per_second for speed in one.speeds]


def figures_of(raced: dict[str, Raced], limit: Optional[Limit] = None, precision: str = "no") -> dict[str, Figure]:
    """Return the figures of the contenders that took part."""
    ours, found = raced["ours"], {}
    found["tokens per second, ours / stock"] = figure(ours.ratios, "higher", TARGET_STOCK)
    if GROUPED in raced:
        over = [mine / theirs for mine, theirs in zip(ours.ratios, raced[GROUPED].ratios, strict=True)]
        found["tokens per second, ours / stock with group_by_length"] = figure(over, "higher", TARGET_GROUPED)
    of_trl = [one for name, one in raced.items() if name.startswith("trl")]
    if of_trl:
        best = max(of_trl, key=lambda one: median(one.ratios))
        rounds = zip(ours.ratios, best.ratios, strict=False)  # a slow contender has only the first round
        over = [mine / theirs for mine, theirs in rounds]
        found["tokens per second, ours / best of TRL"] = figure(over, "higher", TARGET_TRL)
    found["tokens per second with the first steps, ours / stock"] = figure(ours.whole_ratios, "higher")
    if "ours, all loops" in raced:
        all_loops = raced["ours, all loops"].ratios
        found["tokens per second, ours with all loops / stock"] = figure(all_loops, "higher", TARGET_STOCK)
    if limit is not None:
        found["share of the machine's limit, ours"] = figure(limit.share(ours), "higher", TARGET_SHARE)
        found["share of the machine's limit, stock"] = figure(limit.share(raced[BASE]), None)
    found["held-out bits per token, distance of ours from stock"] = Figure(
        abs(ours.held_out_bits - raced[BASE].held_out_bits),
        "lower",
        target=EQUAL_BITS[precision],
        tolerance=EQUAL_BITS[precision],
    )
    return found


def grid_of(raced: dict[str, Raced], limit: Optional[Limit] = None) -> Grid:
    heads = ["contender", "tokens/s, ratio to stock", "with the first steps", "held-out bits", "steps", "tokens"]
    if limit is not None:
        heads.insert(2, "share of the limit")
    rows = []
    for one in raced.values():
        cells = [
            one.contender,
            ranged(one.ratios),
            f"{figure(one.whole_ratios, 'higher').value:.2f}",
            f"{one.held_out_bits:.4f}",
            str(one.optimizer_steps),
            f"{one.tokens:,}",
        ]
        if limit is not None:
            cells.insert(2, ranged(limit.share(one)))
        rows.append(cells)
    return Grid(heads, rows)


def ranged(values: Sequence[float]) -> str:
    """Format the median of several values, with the lowest and the highest."""
    middle = f"{median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", choices=list(DISTRIBUTIONS), default="alpaca")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--words", type=int, default=Shape.vocab, help="size of the vocabulary")
    parser.add_argument("--hidden", type=int, default=Shape.hidden, help="size of a token's states")
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--template", type=int, default=0, help="tokens of a prefix that rows share, not learned")
    parser.add_argument("--precision", choices=list(EQUAL_BITS), default="no")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--contenders", nargs="+", choices=(*CONTENDERS, KEEPING), default=CONTENDERS, metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="every path on a tiny model; writes nothing")
    given = parser.parse_args()
    if given.steps < FEWEST_STEPS:
        parser.error(f"--steps is {given.steps}; {FEWEST_STEPS} or more leave steps to be measured")
    repeats, steps = (1, FEWEST_STEPS) if given.quick else (given.repeats, given.steps)
    if not {BASE, "ours"} <= set(given.contenders):
        parser.error(f"--contenders lacks {BASE!r} or 'ours', which every figure is about")
    if given.template and any(name.startswith("trl") for name in given.contenders):
        parser.error("--template is not for TRL: name other --contenders")
    shape = SMALL if given.quick else Shape(vocab=given.words, hidden=given.hidden, layers=given.layers)
    job = Job(shape, DISTRIBUTIONS[given.lengths], steps, template_tokens=given.template, precision=given.precision)
    peaks: list[Peaks] = []
    raced = race(
        given.contenders,
        job,
        repeats,
        steps_per_turn=STEPS_PER_TURN,
        warm_up_steps=WARM_UP_STEPS,
        once=SLOW,
        before_round=lambda: peaks.append(measured_peaks(job)) if given.precision == "no" else None,
    )
    limit = Limit(unavoidable(job), peaks) if peaks else None
    title = f"{given.lengths} lengths, {job.step_rows} rows per optimizer step, {job.shape.vocab:,} words"
    if given.precision != "no":
        title += f", {given.precision}"
    if given.template:
        title += f", {given.template} of each row a template"
    others = {"words": Shape.vocab, "hidden": Shape.hidden, "layers": Shape.layers, "template": 0, "precision": "no"}
    parts = [f"{part}_{value}" for part, usual in others.items() if (value := getattr(given, part)) != usual]
    name = "_".join(["variable_length", *[given.lengths] * (given.lengths != "alpaca"), *parts])
    results = [asdict(one) for one in raced.values()]
    finish(
        name,
        title,
        grid_of(raced, limit),
        figures_of(raced, limit, given.precision),
        quick=given.quick,
        repeats=repeats,
        results=results,
        work=None if limit is None else asdict(limit.work),
        peaks=[asdict(peak) for peak in peaks],
    )


if __name__ == "__main__":
    main()
