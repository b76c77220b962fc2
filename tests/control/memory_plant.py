"""A toy device for the memory law: a micro-batch takes a + b * tokens + c * rows * length^2 above what is in use."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Optional

from scu_trainer.control.microbatch import (
    Decision,
    MemoryMeasurement,
    SizerConfig,
    SizerState,
    after_oom,
    applied_cap,
    decide,
    fitting_tokens,
    with_observation,
)
from scu_trainer.control.splitting import MicroBatchPlan, cut

MB = 10**6


def equal_rows(step: int, chance: random.Random) -> list[int]:
    return [100] * 64


def lognormal_rows(step: int, chance: random.Random) -> list[int]:
    return [min(900, max(1, round(chance.lognormvariate(math.log(200), 0.8)))) for _ in range(64)]


def smaller(plan: MicroBatchPlan, lengths: list[int], token_cap: int, min_rows: int) -> list[MicroBatchPlan]:
    """``plan`` cut again under a smaller cap, and in two where that does not ask for it."""
    own = [lengths[row] for row in plan.rows]
    parts = cut(own, token_cap, min_rows=min_rows)
    if len(parts) == 1 and len(own) >= 2 * min_rows:
        parts = cut(own, None, max_rows=(len(own) + 1) // 2, min_rows=min_rows)
    return [MicroBatchPlan(tuple(plan.rows[i] for i in part.rows), part.length) for part in parts]


@dataclass
class Plant:
    """``limit_bytes(step)``; ``tenants_bytes(step)``: others on the device. ``noise``: relative, on what is measured.

    60 MB hold the ceiling with room to spare: 4 + 0.5 + 6400 * 0.006 = 42.9 MB.
    """

    limit_bytes: Callable[[int], int] = lambda step: 60 * MB
    tenants_bytes: Callable[[int], int] = lambda step: 0
    rows: Callable[[int, random.Random], list[int]] = equal_rows
    base_bytes: int = 4 * MB
    fixed_bytes: int = MB // 2
    bytes_per_token: int = 6_000
    bytes_per_square: float = 0.0
    ceiling_tokens: int = 6_400
    min_rows: int = 1
    noise: float = 0.0
    predicts: bool = True
    seed: int = 0
    law: SizerConfig = field(default_factory=SizerConfig)

    def run(self, steps: int, state: Optional[SizerState] = None) -> Run:
        chance, run = random.Random(self.seed), Run()
        state = SizerState() if state is None else state
        for step in range(steps):
            lengths = self.rows(step, chance)
            state, seen = self._step(step, lengths, state, run, chance)
            decision = decide(self.law, state, seen)
            state = decision.state
            run.seen.append(seen)
            run.decisions.append(decision)
        return run

    def _step(self, step: int, lengths: list[int], state: SizerState, run: Run, chance: random.Random):
        limit, used = self.limit_bytes(step), self.base_bytes + self.tenants_bytes(step)
        floor = self.min_rows * max(lengths)
        cap = applied_cap(state, self.ceiling_tokens, floor)
        run.caps.append(cap)
        waiting, largest, peak = deque(cut(lengths, cap, min_rows=self.min_rows)), 1, used
        while waiting:
            micro_batch = waiting.popleft()
            most = self._most_tokens(micro_batch, state, limit - used, cap)
            if micro_batch.tokens > most and len(micro_batch.rows) >= 2 * self.min_rows:
                waiting.extendleft(reversed(smaller(micro_batch, lengths, most, self.min_rows)))
                continue
            took = self._bytes_of(micro_batch)
            if used + took > limit:
                run.ooms.append((step, micro_batch.tokens))
                state = after_oom(self.law, state, micro_batch.tokens, floor, limit, used, micro_batch.length)
                cap = applied_cap(state, self.ceiling_tokens, floor)
                waiting.extendleft(reversed(smaller(micro_batch, lengths, cap, self.min_rows)))
                peak = limit
                continue
            run.chunks += 1
            state = with_observation(state, micro_batch.tokens, micro_batch.quadratic, self._observed(took))
            largest, peak = max(largest, micro_batch.tokens), max(peak, used + took)
        measured = round(peak * chance.uniform(1 - self.noise, 1 + self.noise))
        return state, MemoryMeasurement(step, limit, used, measured, self.ceiling_tokens, floor, max(lengths), largest)

    def _most_tokens(self, micro_batch: MicroBatchPlan, state: SizerState, room_bytes: int, cap: int) -> int:
        fit = fitting_tokens(self.law, state, room_bytes, micro_batch.length) if self.predicts else None
        return cap if fit is None else max(1, min(cap, fit))

    def _bytes_of(self, micro_batch: MicroBatchPlan) -> int:
        quadratic = self.bytes_per_square * micro_batch.quadratic
        return round(self.fixed_bytes + self.bytes_per_token * micro_batch.tokens + quadratic)

    def _observed(self, took_bytes: int) -> int:
        """What the gauge around one micro-batch sees of it."""
        return took_bytes


class Run:
    """What happened: ``caps`` in force, by step; ``ooms`` as (step, tokens); ``chunks``: micro-batches that ran."""

    def __init__(self) -> None:
        self.caps: list[int] = []
        self.ooms: list[tuple[int, int]] = []
        self.chunks = 0
        self.seen: list[MemoryMeasurement] = []
        self.decisions: list[Decision] = []

    @property
    def state(self) -> SizerState:
        return self.decisions[-1].state

    def changes(self, first: int = 0, last: Optional[int] = None) -> list[float]:
        """ln of every change of the cap in the steps ``first`` to ``last``, in order."""
        caps = self.caps[first:last]
        return [math.log(after / before) for before, after in pairwise(caps) if after != before]

    def turns(self, first: int = 0, last: Optional[int] = None) -> int:
        """How often the cap changed its direction."""
        return sum(one * other < 0 for one, other in pairwise(self.changes(first, last)))
