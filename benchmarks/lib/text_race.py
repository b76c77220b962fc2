"""Contenders of text_job.py in turns, round after round: what each of them is worth against the stock Trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Optional

from benchmarks.lib.memory_work import EXACT_MEMORY, MIB, in_fresh_process
from benchmarks.lib.text_job import Job, contender_of, memory, tiny
from benchmarks.lib.turns import Ended, another_first, in_turns, shown

BASE = "stock"


@dataclass
class Raced:
    """The results of one contender over all rounds. Ratios are to ``BASE`` in the same round; above 1 is faster."""

    contender: str
    speeds: list[float] = field(default_factory=list)
    """Tokens per second, without the first steps."""
    ratios: list[float] = field(default_factory=list)
    paired_ratios: list[float] = field(default_factory=list)
    """In each round, the median over turns of the ratio of the speeds in the same turn."""
    whole_ratios: list[float] = field(default_factory=list)
    """Ratios over all steps, including the first ones."""
    held_out_bits: Optional[float] = None
    tokens: int = 0
    optimizer_steps: int = 0


def race(
    names: Sequence[str],
    job: Job,
    repeats: int,
    *,
    steps_per_turn: int = 1,
    warm_up_steps: int = 5,
    once: Sequence[str] = (),
    before_round: Callable[[], object] = lambda: None,
) -> dict[str, Raced]:
    """Run all contenders. ``once``: those that run in the first round only, because they take long."""
    raced = {name: Raced(name) for name in names}
    for number in range(repeats):
        before_round()
        present = [name for name in names if number == 0 or name not in once]
        order = another_first([contender_of(name, job) for name in present], number)
        turns = -(-job.steps // steps_per_turn) * len(order)
        with shown(f"round {number + 1} of {repeats}", turns) as on_turn:
            found = in_turns(order, steps_per_turn, warm_up_turns=0, on_turn=on_turn)
        _record_round(raced, found, steps_per_turn, warm_up_steps // steps_per_turn)
    return raced


def _record_round(raced: dict[str, Raced], found: dict[str, Ended], steps_per_turn: int, warm_up_turns: int) -> None:
    pace = {name: _paces(ended, steps_per_turn) for name, ended in found.items()}
    for name, ended in found.items():
        one, mine, base = raced[name], pace[name], pace[BASE]
        one.speeds.append(_speed(mine[warm_up_turns:]))
        one.ratios.append(one.speeds[-1] / _speed(base[warm_up_turns:]))
        one.whole_ratios.append(_speed(mine) / _speed(base))
        pairs = zip(mine[warm_up_turns:], base[warm_up_turns:], strict=False)
        one.paired_ratios.append(median(a[0] / a[1] / (b[0] / b[1]) for a, b in pairs))
        one.held_out_bits = ended.said["held_out_bits"]
        one.tokens, one.optimizer_steps = sum(ended.said["step_tokens"]), len(ended.said["step_tokens"])


def _paces(ended: Ended, steps_per_turn: int) -> list[tuple[int, float]]:
    """Return (tokens, seconds) of each turn."""
    tokens = ended.said["step_tokens"]
    turns = [sum(tokens[at : at + steps_per_turn]) for at in range(0, len(tokens), steps_per_turn)]
    return list(zip(turns, ended.seconds, strict=False))  # the last turn ends the training and was not timed


def _speed(turns: Sequence[tuple[int, float]]) -> float:
    return sum(tokens for tokens, _ in turns) / sum(seconds for _, seconds in turns)


def peak_over_own(name: str, job: Job) -> int:
    """Return the peak of a run in bytes, minus what the same contender holds between steps on rows of eight tokens.

    Both are measured in fresh processes that return freed memory to the system immediately. The difference includes
    gradients, but not weights and optimizer state.
    """
    allocator = {**EXACT_MEMORY, "OMP_NUM_THREADS": str(os.cpu_count())}
    own = in_fresh_process(memory, name, tiny(job), allocator=allocator)
    return in_fresh_process(memory, name, job, allocator=allocator)["peak_bytes"] - own["level_bytes"]


def mib(size_bytes: Optional[int]) -> str:
    return "-" if size_bytes is None else f"{size_bytes / MIB:,.0f}"
