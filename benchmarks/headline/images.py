"""Images on a CPU: how much faster is the efficient recipe than a plain loop, and which of its ingredients matter?

    python benchmarks/headline/images.py [--steps 60] [--repeats 2] [--quick]

The work is recipes/resnet.yaml: a ResNet-18 from scratch on handwritten digits of 32 x 32 pixels, in batches of 32.
Contenders:

    plain loop, stock Trainer   float32, the same optimizer (fused AdamW), schedule, clipping and augmentation
    plain loop, bf16            the same loop with autocast
    recipe                      as the command trains: bf16, keep_freed_memory, fused AdamW, its three loops
    recipe without ...          one ingredient removed
    recipe with ...             one added: channels_last, torch_compile, a loader worker, or one that also augments

Each contender is a separate process, as its user would start it. They take turns of 10 optimizer steps; the time of a
turn includes loading. A loader worker is started again in every epoch (45 steps), and prefetches two batches while
others have their turn, which makes it look slightly faster. Ratios are of paired turns after the first turn of each
contender, as medians over turns and repeats. Held-out accuracies are compared after the same number of steps and
images. Peak memory is resident memory above what the process held with model and data loaded: gradients, optimizer
state and activations. The first repeat compiles without a cache, later ones use the cache of inductor. Turns of more
than twice the usual time count as compiling.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.images_contenders import RECIPE, WAYS, contender_of, tiny, tried_out
from benchmarks.lib.outcome import Figure, Grid, figure, finish
from benchmarks.lib.turns import Ended, in_turns, rounds
from benchmarks.studies.families import speed

STEPS_PER_TURN = 10
WARM_UP_TURNS = 1
FEWEST_STEPS = (WARM_UP_TURNS + 2) * STEPS_PER_TURN
"""Fewest steps of a run. The turn that ends a training is not timed."""
QUICK_STEPS = 4
COMPILES_ABOVE = 2.0
"""A turn that takes this many times longer than usual includes a compilation."""

PLAIN, PLAIN_BF16, OURS, COMPILED = "plain loop", "plain loop, bf16", "recipe", "recipe with torch_compile"
LOADS = "recipe with a loader worker"
WITHOUT = ("bf16", "keep_freed_memory", "fused AdamW")
WITH = ("channels_last", "a loader worker", "torch_compile")
TITLE = "ResNet-18 on 32 x 32 digits, CPU: images per second as a ratio, and what they cost"

Round = Mapping[str, Ended]


# -- what was found ----------------------------------------------------------------------------------------------------


def settled(found: Round) -> dict[str, Ended]:
    """Return the results without the first turn of each contender."""
    return {name: Ended(ended.seconds[WARM_UP_TURNS:], ended.said) for name, ended in found.items()}


def ratios(found: Sequence[Round], own: str, other: str) -> list[float]:
    """Return the images per second of ``own`` relative to ``other``, one ratio per repeat."""
    return [speed(settled(one), own, other) for one in found]


def peaks(found: Sequence[Round], name: str) -> list[float]:
    """Return the peak memory of a contender relative to the plain loop, one ratio per repeat."""
    return [one[name].said["peak_bytes"] / one[PLAIN].said["peak_bytes"] for one in found]


def said(found: Sequence[Round], name: str, key: str) -> float:
    """Return the median over the repeats of a number that a contender reported."""
    return median(one[name].said[key] for one in found)


@dataclass(frozen=True)
class Compiling:
    """The cost of compilation. ``seconds``: by repeat. ``saved_s``: seconds that an optimizer step saves compared with
    the recipe; negative if it is slower."""

    seconds: list[float]
    saved_s: float

    def pays_after_steps(self, repeat: int) -> Optional[int]:
        """Return the number of steps after which compiling pays off; None if it never does."""
        return round(self.seconds[repeat] / self.saved_s) if self.saved_s > 0 else None

    @property
    def line(self) -> str:
        """Describe the first start, and a start with a filled cache."""
        starts = ("", "from its cache ")[: len(self.seconds)]
        return "; ".join(f"{start}{self._cost(repeat)}" for repeat, start in enumerate(starts))

    def _cost(self, repeat: int) -> str:
        steps = self.pays_after_steps(repeat)
        return f"{self.seconds[repeat]:.0f} s, " + ("never paid" if steps is None else f"paid after {steps:,} steps")


def compiling(found: Sequence[Round], steps_per_turn: int) -> Compiling:
    """Return the cost of compilation: the excess over the usual time, in turns of more than twice that."""
    pairs = [
        turns for one in map(settled, found) for turns in zip(one[OURS].seconds, one[COMPILED].seconds, strict=True)
    ]
    usual_s, seconds = median(mine for _, mine in pairs), []
    for one in found:
        long = [turn for turn in one[COMPILED].seconds if turn > COMPILES_ABOVE * usual_s]
        seconds.append(sum(long) - len(long) * usual_s)
    return Compiling(seconds, median(recipe - mine for recipe, mine in pairs) / steps_per_turn)


# -- what is shown -----------------------------------------------------------------------------------------------------


def grid(found: Sequence[Round], compiled: Compiling) -> Grid:
    heads = ("contender", "arithmetic", "images/s / plain", "/ recipe", "held out", "peak memory / plain", "compiling")
    return Grid(heads, [(*_row(found, name), compiled.line if name == COMPILED else "") for name in WAYS])


def _row(found: Sequence[Round], name: str) -> tuple[str, ...]:
    precision = found[0][name].said["mixed_precision"]
    return (
        name,
        "float32" if precision == "no" else precision,
        f"{median(ratios(found, name, PLAIN)):.2f}",
        f"{median(ratios(found, name, OURS)):.2f}",
        f"{said(found, name, 'accuracy'):.1%}",
        f"{median(peaks(found, name)):.2f}",
    )


SAME_ACCURACY = 0.02
"""Difference of held-out accuracies that counts as equal, because the plain loop trains on rows in another order."""


def figures(found: Sequence[Round]) -> dict[str, Figure]:
    """Return the figures. An ingredient helps if its ratio is above 1, whether the recipe has it or not."""
    per_second = "images per second, recipe"
    shown = {f"{per_second} / {other}": figure(ratios(found, OURS, other), "higher") for other in (PLAIN, PLAIN_BF16)}
    for name in WITHOUT:
        shown[f"{per_second} / without {name}"] = figure(ratios(found, OURS, f"recipe without {name}"), "higher")
    for name in WITH:
        shown[f"{per_second} with {name} / recipe"] = figure(ratios(found, f"recipe with {name}", OURS), "higher")
    accuracy = said(found, OURS, "accuracy") - said(found, PLAIN, "accuracy")
    shown["held-out accuracy, recipe - plain loop"] = Figure(accuracy, "higher", tolerance=SAME_ACCURACY)
    shown["peak memory, recipe / plain loop"] = figure(peaks(found, OURS), "lower")
    return shown


def results(found: Sequence[Round]) -> list[dict[str, Any]]:
    """Return the raw numbers of each contender."""
    return [
        {
            "contender": name,
            "kind": WAYS[name].kind,
            "flags": list(WAYS[name].flags),
            "turn_seconds": [one[name].seconds for one in found],
            **{key: [one[name].said[key] for one in found] for key in found[0][name].said},
        }
        for name in WAYS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=60, help=f"optimizer steps of each contender, {FEWEST_STEPS} or more"
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a few small steps of each contender, nothing is written")
    options = parser.parse_args()
    if options.steps < FEWEST_STEPS:
        parser.error(f"--steps {options.steps} leaves no turn to measure; give {FEWEST_STEPS} or more")
    steps_per_turn = 1 if options.quick else STEPS_PER_TURN
    found = measured(options)
    compiled = compiling(found, steps_per_turn)
    finish(
        "images",
        TITLE,
        grid(found, compiled),
        figures(found),
        quick=options.quick,
        recipe=RECIPE,
        steps=options.steps,
        repeats=options.repeats,
        steps_per_turn=steps_per_turn,
        compiling=asdict(compiled),
        results=results(found),
    )


def measured(options: argparse.Namespace) -> list[dict[str, Ended]]:
    """Run all rounds. A test run is one round in this process, with one contender in a process with a loader worker."""
    with tempfile.TemporaryDirectory() as compiled:
        if options.quick:
            small = {name: contender_of(name, QUICK_STEPS, tiny(name), compiled) for name in WAYS}
            loads = in_turns([small.pop(LOADS)], steps_per_turn=1, warm_up_turns=0)
            return [{**tried_out(list(small.values())), **loads}]
        contenders = [contender_of(name, options.steps, (), compiled) for name in WAYS]
        return rounds(contenders, STEPS_PER_TURN, options.repeats, warm_up_turns=0)


if __name__ == "__main__":
    main()
