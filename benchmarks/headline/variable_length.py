"""Fine-tuning on rows of uneven length, as it comes: real tokens per second, at equal held-out loss.

    python benchmarks/headline/variable_length.py [--lengths alpaca] [--words 32000] [--steps 24] [--repeats 5]
        [--contenders stock ours] [--hidden 256] [--layers 4] [--template 0] [--precision bf16] [--quick]

A Llama of 19 million weights (with 32,000 words), all of it trained in float32, lognormal row lengths (alpaca: median
100, sigma .6; gsm8k: 150, .35; chat: 400, .9), 32 rows per optimizer step as batch 8 x accumulation 4, AdamW.
Contenders are processes of their own: the stock Trainer, also with batches grouped by length, TRL's SFTTrainer as it
comes, padding-free and packing, ours without regularization, which moves weights on purpose, and ours with all three
loops, as the commands have it. Not by default: "stock, freed memory kept", whose C library gives no memory back between
steps. They take turns of three steps: who has waited for all others starts cold, as nobody does who trains alone.
Tokens are those whose prediction is learned: padding is no work. The first six steps are left out, in five of which
ours measures every micro-batch; the ratio with them stands beside. Share of the limit: tokens per second over those
that the unavoidable multiplications and bytes alone would allow, at this machine's peaks, measured before each round
(benchmarks/lib/machine_limit.py).

--template: tokens that every row begins with and that are not learned, one of two templates by turns of which the first
half is the same, as instruction data have them; they count in a row's length. Not with TRL.

--precision bf16: autocast, which the commands choose where the processor multiplies it natively. The limit is one of
float32, so its column is left out.

Held-out loss is the proof of equal work. Packing has the tokens of each step, but other rows in it, and grouping by
length has other rows and other tokens in each, so their losses may differ. TRL as it comes takes long on a CPU: its
loss has its fast kernel on GPUs. It runs in the first round only.
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
"""One turn is measured, and the last one is not, even of a contender that packs its rows into a step less."""

TARGET_STOCK, TARGET_GROUPED, TARGET_TRL, TARGET_SHARE = 2.4, 1.0, 1.0, 0.6
EQUAL_BITS = {"no": 1e-3, "bf16": 1e-2}
"""Largest difference of held-out bits per token that rounding in another order of sums explains."""

SMALL = Shape(vocab=1_000, hidden=32, layers=1, longest_row=256)


@dataclass(frozen=True)
class Limit:
    """What each round could have been at best: ``work`` at the ``peaks`` measured before it."""

    work: Work
    peaks: Sequence[Peaks]

    @property
    def tokens_per_second(self) -> float:
        """At the highest peaks that were seen."""
        best = Peaks(max(peak.flops_per_s for peak in self.peaks), max(peak.bytes_per_s for peak in self.peaks))
        return best.tokens_per_second(self.work)

    def share(self, one: Raced) -> list[float]:
        return [speed / self.tokens_per_second for speed in one.speeds]


def figures_of(raced: dict[str, Raced], limit: Optional[Limit] = None, precision: str = "no") -> dict[str, Figure]:
    """Of the contenders that took part."""
    ours, found = raced["ours"], {}
    found["tokens per second, ours / stock"] = figure(ours.ratios, "higher", TARGET_STOCK)
    if GROUPED in raced:
        over = [mine / theirs for mine, theirs in zip(ours.ratios, raced[GROUPED].ratios, strict=True)]
        found["tokens per second, ours / stock with group_by_length"] = figure(over, "higher", TARGET_GROUPED)
    of_trl = [one for name, one in raced.items() if name.startswith("trl")]
    if of_trl:
        best = max(of_trl, key=lambda one: median(one.ratios))
        rounds = zip(ours.ratios, best.ratios, strict=False)  # a slow contender has the first one only
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
    """The median, and the lowest and highest of several."""
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
    results = [one.known() for one in raced.values()]
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
