"""Block, rows per batch and LoRA rank grow: see scaling.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any, Optional

from benchmarks.lib.memory_work import Lengths, Shape
from benchmarks.lib.outcome import Figure, Grid, figure
from benchmarks.lib.text_job import Job, run
from benchmarks.lib.turns import Contender, Turns, rounds

REPEATS = 2
CONTENDERS = ("stock", "ours")
STEPS_PER_TURN = 5
"""Steps per turn. The first step of a turn starts with cold caches, unlike in a normal training; with few steps per
turn, that would hide the fixed cost of small steps."""

WARM_UP_TURNS = 3
"""Turns that are not counted. In the first one ours measures every micro-batch."""

STEPS = 100
"""Optimizer steps of each point."""


@dataclass(frozen=True)
class Point:
    """One measurement. ``series``: the size that grows; ``size``: its value."""

    series: str
    size: int
    job: Job


def job(block: int, rows: int, shape: Shape, lora_rank: Optional[int] = None) -> Job:
    """Return a job with rows of exactly ``block`` tokens."""
    return Job(shape, Lengths("block", block, 0.0), STEPS, batch_rows=rows, accumulation=1, lora_rank=lora_rank)


def points(quick: bool) -> list[Point]:
    shape = Shape(64, 32, 1, 64) if quick else Shape(2048, 128, 2, 1024)
    blocks = (16, 32) if quick else (128, 256, 512, 1024)
    batches, ranks = ((1, 4), (2, 4)) if quick else ((1, 4, 16, 32), (4, 16, 64))
    rows, short = (2, 16) if quick else (2, 64)
    found = [Point("block", block, job(block, rows, shape)) for block in blocks]
    found += [Point("rows per batch", batch, job(short, batch, shape)) for batch in batches]
    return found + [Point("LoRA rank", rank, job(2 * short, rows, shape, rank)) for rank in ranks]


def all_of(turns: Turns, name: str, jobs: Sequence[Job]) -> dict[str, Any]:
    """Run one job after the other. Runs in its own process."""
    return {"runs": [run(turns, name, one) for one in jobs]}


def by_job(seconds: Sequence[Optional[float]]) -> list[list[float]]:
    """Return the seconds per optimizer step in the turns of each job, without the first turns. In ``seconds``, None
    separates the jobs."""
    parts = [list(part) for is_between, part in groupby(seconds, lambda turn: turn is None) if not is_between]
    return [[turn_s / STEPS_PER_TURN for turn_s in part[WARM_UP_TURNS:]] for part in parts]


def measure(repeats: int, quick: bool) -> tuple[str, Grid, dict[str, Figure], list[Any]]:
    asked = points(quick)
    contenders = [Contender(name, all_of, (name, [point.job for point in asked])) for name in CONTENDERS]
    found = rounds(contenders, STEPS_PER_TURN, repeats, warm_up_turns=0)
    results = [
        {
            "series": point.series,
            "size": point.size,
            "step_tokens": point.job.step_rows * (point.job.lengths.median - 1),
            "step_s": {name: [by_job(one[name].seconds)[number] for one in found] for name in CONTENDERS},
            "held_out_bits": {name: found[-1][name].said["runs"][number]["held_out_bits"] for name in CONTENDERS},
        }
        for number, point in enumerate(asked)
    ]
    grid, figures = summary(results)
    return "tokens per second as a step grows", grid, figures, results


def ratios(result: dict[str, Any]) -> list[float]:
    """Return the ratio of ours to stock for each repeat, as the median over its pairs of turns."""
    pairs = zip(result["step_s"]["stock"], result["step_s"]["ours"], strict=True)
    return [median(theirs / own for theirs, own in zip(*pair, strict=True)) for pair in pairs]


def rate(result: dict[str, Any], contender: str) -> float:
    """Return the predicted tokens per second."""
    return result["step_tokens"] / median(second for one in result["step_s"][contender] for second in one)


def summary(results: Sequence[dict[str, Any]]) -> tuple[Grid, dict[str, Figure]]:
    rows, figures = [], {}
    for series, group in groupby(results, lambda result: result["series"]):
        members = list(group)
        base = rate(members[0], "stock")
        for one in members:
            relative = [f"{rate(one, contender) / base:.2f}" for contender in CONTENDERS]
            bits = [f"{one['held_out_bits'][contender]:.4f}" for contender in CONTENDERS]
            rows.append([f"{series} {one['size']}", *relative, f"{median(ratios(one)):.2f}", *bits])
        for what, one in (("smallest", members[0]), ("largest", members[-1])):
            figures[f"ours / stock at the {what} {series}"] = figure(ratios(one), "higher")
    heads = ["", "stock, relative", "ours, relative", "ours / stock", "held-out bits, stock", "held-out bits, ours"]
    return Grid(heads, rows), figures
