"""What was tried to make training faster or smaller, and what of it paid? Each thing with its prediction, and measured.

    python benchmarks/studies/tried.py [--only NAME ...] [--steps 8] [--job alpaca]

The register (lib/tried_register.py) says what, what was predicted before the first measurement, and whether it
is kept. Every entry is a training by SCUTrainer with one thing changed, beside one without the change; of what ours has
already, the change takes it away, and the gain is turned round. Same model, rows and order, 16 rows per optimizer step.

    speed     tokens per second with it / without it: both take turns of one optimizer step, in processes of their own;
              the median of the turns' ratios, after the first ones in which ours measures every chunk
    memory    highest memory with it / without it, in fresh processes, less what the process held before training
    loss      held-out bits per token with it less without it: near nothing is the proof of equal work

Several entries run beside one baseline, some at a time, so that memory suffices. An entry of another kind of training
(LoRA) has a baseline of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib import text_job
from benchmarks.lib.common import shown
from benchmarks.lib.memory_work import DISTRIBUTIONS, EXACT_MEMORY, Lengths, Shape, in_fresh_process
from benchmarks.lib.outcome import Figure, Grid, finish
from benchmarks.lib.text_job import Job, Watches, held_out_bits
from benchmarks.lib.tried_register import ENTRIES, Entry
from benchmarks.lib.turns import Ended, Side, Turns, in_turns
from scu_trainer.settings import MemorySettings, SafetySettings
from scu_trainer.train.run_directory.logs import run_log

WARM_UP_TURNS = 4
AT_A_TIME = 9
"""Entries beside one baseline: their processes hold about 1 GiB each."""

MEMORY_STEPS = 2
WITHOUT = ""
"""In the place of an entry's name: the baseline."""

BY_NAME = {entry.name: entry for entry in ENTRIES}


def job_of(name: str, steps: int) -> Job:
    return Job(Shape(), DISTRIBUTIONS[name], steps=steps, accumulation=2)


def rehearsal() -> Job:
    return Job(Shape(vocab=17_000, hidden=32, layers=1), Lengths("short", 12, 0.6), steps=4, accumulation=2)


# -- one side ----------------------------------------------------------------------------------------------------------


def trained(turns: Any, name: str, job: Job, **loops: Any) -> text_job.Trained:
    """In a process of its own: ours, with one entry's change or without any."""
    entry = BY_NAME.get(name)
    memory = {} if entry is None else entry.memory
    if entry is not None:
        job = replace(job, **entry.job, arguments=tuple(entry.arguments.items()))
    with run_log(), contextlib.nullcontext() if entry is None else entry.change():
        return text_job.ours(job, turns, memory=MemorySettings(**memory), safety=SafetySettings(), **loops)


def timed(turns: Turns, name: str, job: Job) -> dict[str, Any]:
    model, step_tokens = trained(turns, name, job)
    return {"held_out_bits": held_out_bits(model, job), "step_tokens": step_tokens}


class WatchesAll(Watches):
    """Also what the process held before the first step."""

    begun_bytes = 0

    def begin(self) -> None:
        self.begun_bytes = self.witness.start()


def peak_bytes(name: str, job: Job) -> int:
    """In a process of its own: the highest memory, less what was held before training."""
    watches = WatchesAll(job.device)
    trained(watches, name, job, memory_gauge=watches.witness)
    watches.witness.read()
    return watches.witness.highest_bytes - watches.begun_bytes


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """``ratios``: time of a turn of the baseline / of the entry's side. Bytes None where nothing was measured."""

    entry: Entry
    ratios: list[float] = field(default_factory=list)
    loss_difference: Optional[float] = None
    peak_bytes: Optional[int] = None
    baseline_bytes: Optional[int] = None

    @property
    def speed(self) -> Optional[float]:
        """With / without."""
        if not self.ratios:
            return None
        found = median(self.ratios)
        found = 1 / found if self.entry.is_used else found
        # What costs something in each step costs so much less when it is done once in many.
        return 1 + (found - 1) / self.entry.per_steps

    @property
    def memory(self) -> Optional[float]:
        if self.peak_bytes is None:
            return None
        found = self.peak_bytes / self.baseline_bytes
        return 1 / found if self.entry.is_used else found

    def book_memory(self, baselines: _Baselines, job: Job) -> None:
        self.peak_bytes, self.baseline_bytes = baselines.peaks(self.entry, job)


def groups(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Entries that share a baseline, at most ``AT_A_TIME`` of them."""
    ordered = sorted((entry for entry in entries if entry.needs is None), key=_baseline)
    found = []
    for _, alike in itertools.groupby(ordered, key=_baseline):
        members = list(alike)
        found += [members[at : at + AT_A_TIME] for at in range(0, len(members), AT_A_TIME)]
    return found


def _baseline(entry: Entry) -> str:
    return repr((entry.is_slow, sorted(entry.both.items())))


def measured(entries: Sequence[Entry], job: Job) -> list[Measured]:
    """In the order of ``entries``."""
    found = {entry.name: Measured(entry) for entry in entries}
    for group in groups(entries):
        own = replace(job, **group[0].both)
        sides = [Side(name, timed, (name, own), _environment(name)) for name in (WITHOUT, *(e.name for e in group))]
        _book_speed(in_turns(sides, steps_per_turn=1, warm_up_turns=WARM_UP_TURNS), [found[e.name] for e in group])
    in_processes = _Baselines(
        lambda name, own, environment: in_fresh_process(peak_bytes, name, own, allocator=environment)
    )
    for one in found.values():
        if one.entry.has_memory:
            one.book_memory(in_processes, replace(job, **one.entry.both, steps=MEMORY_STEPS))
    return list(found.values())


def rehearsed(entries: Sequence[Entry], job: Job) -> list[Measured]:
    """The same in this process, one after the other: figures without a meaning."""
    found = [Measured(entry) for entry in entries]
    here = _Baselines(lambda name, own, environment: peak_bytes(name, own))
    for one in found:
        if one.entry.needs is None and not one.entry.is_slow:
            own = replace(job, **one.entry.both)
            _book_speed({name: _Alone().ended(name, own) for name in (WITHOUT, one.entry.name)}, [one])
            if one.entry.has_memory:
                one.book_memory(here, replace(own, steps=MEMORY_STEPS))
    return found


class _Alone:
    """In the place of turns: nobody else has one."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def ended(self, name: str, job: Job) -> Ended:
        said = timed(self, name, job)
        return Ended(self.seconds, said)

    def begin(self) -> None:
        self._begun_s = time.perf_counter()

    def step(self) -> None:
        self.seconds.append(time.perf_counter() - self._begun_s)
        self.begin()


def _environment(name: str) -> tuple[tuple[str, str], ...]:
    entry = BY_NAME.get(name)
    return () if entry is None else tuple(entry.environment.items())


def _book_speed(ended: dict[str, Ended], group: Sequence[Measured]) -> None:
    base = ended[WITHOUT]
    for one in group:
        theirs = ended[one.entry.name]
        if theirs.said["step_tokens"] != base.said["step_tokens"]:
            raise RuntimeError(f"{one.entry.name} trained on other tokens than its baseline")
        one.ratios = [a / b for a, b in zip(base.seconds, theirs.seconds, strict=True)]
        one.loss_difference = theirs.said["held_out_bits"] - base.said["held_out_bits"]


class _Baselines:
    """Peaks, those of the baselines once each. ``peak_of(name, job, environment)``"""

    def __init__(self, peak_of: Callable[[str, Job, dict[str, str]], int]) -> None:
        self.peak_of = peak_of
        self._known: dict[Any, int] = {}

    def peaks(self, entry: Entry, job: Job) -> tuple[int, int]:
        """(of the entry, of its baseline)"""
        usual = {"OMP_NUM_THREADS": str(os.cpu_count()), **({} if entry.as_users else EXACT_MEMORY)}
        key = entry.as_users, repr(job)
        if key not in self._known:
            self._known[key] = self.peak_of(WITHOUT, job, usual)
        return self.peak_of(entry.name, job, {**usual, **entry.environment}), self._known[key]


# -- result ------------------------------------------------------------------------------------------------------------


def grid(found: Sequence[Measured]) -> Grid:
    rows = []
    for one in found:
        entry = one.entry
        digits = 4 if entry.per_steps > 1 else 2
        rows.append(
            [
                entry.name,
                entry.predicted,
                f"needs {entry.needs}" if entry.needs else shown(one.speed, digits),
                shown(one.memory, 2),
                "-" if one.loss_difference is None else f"{one.loss_difference:+.4f}",
                f"{entry.verdict}: {entry.why}",
            ]
        )
    return Grid(["what", "predicted", "speed with / without", "memory with / without", "loss, bits", "kept?"], rows)


TURN_NOISE = 0.1
"""Of a median over a few turns of one run: less than this tells nothing on two shared cores."""

FIGURES = ("chunked cross-entropy", "exact split by length", "fused AdamW, against a loop", "bf16 autocast")


def figures(found: Sequence[Measured]) -> dict[str, Figure]:
    named = {}
    for one in found:
        if one.entry.name not in FIGURES:
            continue
        named[f"tokens per second with / without: {one.entry.name}"] = Figure(one.speed, "higher", TURN_NOISE)
        if one.entry.is_used and one.memory is not None:
            named[f"peak memory with / without: {one.entry.name}"] = Figure(one.memory, "lower")
    return named


SAID = ("name", "what", "predicted", "verdict", "why", "needs")


def raw(one: Measured) -> dict[str, Any]:
    return {
        **{name: getattr(one.entry, name) for name in SAID},
        "speed": one.speed,
        "memory": one.memory,
        "turn_ratios_as_run": one.ratios,
        "peak_bytes": one.peak_bytes,
        "baseline_bytes": one.baseline_bytes,
        "held_out_bits_difference": one.loss_difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(BY_NAME), metavar="NAME", help="entries by their names")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of each side")
    parser.add_argument("--job", choices=list(DISTRIBUTIONS), default="alpaca", help="lengths of the documents")
    parser.add_argument("--quick", action="store_true", help="rehearse on a tiny model; nothing is written")
    options = parser.parse_args()
    if not options.quick and options.steps < WARM_UP_TURNS + 3:
        parser.error(f"--steps is {options.steps}; {WARM_UP_TURNS + 3} or more leave turns to be measured")
    entries = [entry for entry in ENTRIES if options.only is None or entry.name in options.only]
    found = rehearsed(entries, rehearsal()) if options.quick else measured(entries, job_of(options.job, options.steps))
    if options.quick or options.only:
        print(*(" | ".join(row) for row in grid(found).rows), sep="\n")
        print("test run: nothing is written" if options.quick else "a part of the register: nothing is written")
        return
    title = "what was tried to make training faster or smaller"
    results = [raw(one) for one in found]
    finish(
        "tried", title, grid(found), figures(found), repeats=1, steps=options.steps, job=options.job, results=results
    )


if __name__ == "__main__":
    main()
