"""The plan of an epoch: which samples, how much each counts, in which micro-batches, on which rank.

A plan follows from its arguments alone, bit for bit: every rank makes the same one.
A selection in a loop of one's own:

>>> import numpy as np
>>> from scu_trainer.control import curriculum, difficulty
>>> law = curriculum.CurriculumConfig(methods=("noise_guard",), rows_per_batch=4)
>>> known = difficulty.Difficulty(samples=6, alpha=0.3, window_epochs=law.window_epochs)
>>> losses = np.array([0.2, 0.1, 3.0, 0.4, 0.3, 2.0])
>>> for epoch in range(3):
...     permutation = np.random.default_rng(epoch).permutation(6)
...     plan = curriculum.plan(law, known.snapshot(), epoch, 3, permutation, np.full(6, 10), world=1, seed=1)
...     for ids in plan.batches_of(rank=0, world=1):
...         known.update(ids, losses[ids], epoch)  # the losses that training on these rows gave
...     print(plan.rows, plan.suspects.tolist(), plan.readmitted.size)
6 [] 0
6 [] 0
5 [2, 5] 1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Optional

import numpy as np

from scu_trainer.control import batches as cutting
from scu_trainer.control import selection
from scu_trainer.control.batches import Batches
from scu_trainer.control.curriculum_config import CurriculumConfig
from scu_trainer.control.difficulty import Snapshot
from scu_trainer.control.selection import Selection

POOL_BATCHES = 100
"""Micro-batches' worth of rows that ``token_budget`` sorts together: few enough to mix again every epoch."""

GUARD, CHOICE, CUT, CUT_REST, FOLLOW = range(5)
"""Streams of random numbers, one per use, so that a method draws the same whatever else is on."""

WARMUP_MULTIPLE = 8
"""Sequence lengths grow in steps of this many tokens."""


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """One epoch. Sample numbers are int32 or int64, as those of the permutation."""

    epoch: int
    batches: Batches
    """Micro-batches of all ranks: rank r of w takes r, r + w, r + 2w, ..."""
    weights: Optional[np.ndarray]
    """float32 (samples,), how much a sample's loss counts. None: all 1."""
    skipped: Mapping[str, np.ndarray]
    """Samples that the epoch does not see, by reason."""
    suspects: np.ndarray
    """What looks mislabeled or broken, worst first."""
    readmitted: np.ndarray
    """Suspects that the epoch sees all the same."""
    repeated: np.ndarray
    """Rows that are in once more, because there are fewer rows than micro-batches are needed."""
    notes: tuple[str, ...]
    """Sentences for the user."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches over all ranks."""
        return len(self.batches)

    @property
    def rows(self) -> int:
        """Rows over all ranks, repeated ones included."""
        return self.batches.order.size

    def to_arrays(self) -> dict[str, np.ndarray]:
        """All of it but ``epoch`` and ``notes``, for a checkpoint."""
        arrays = {"order": self.batches.order, "ends": self.batches.ends}
        arrays |= {name: getattr(self, name) for name in ("suspects", "readmitted", "repeated")}
        arrays |= {f"skipped.{reason}": ids for reason, ids in self.skipped.items()}
        return arrays if self.weights is None else {**arrays, "weights": self.weights}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], epoch: int, notes: Iterable[str]) -> EpochPlan:
        """The plan that ``to_arrays`` wrote. Raises KeyError if an array is missing."""
        skipped = {name.removeprefix("skipped."): arrays[name] for name in arrays if name.startswith("skipped.")}
        named = {name: arrays[name] for name in ("suspects", "readmitted", "repeated")}
        batches = Batches(arrays["order"], arrays["ends"])
        return cls(epoch, batches, arrays.get("weights"), skipped, **named, notes=tuple(notes))

    def batches_of(self, rank: int, world: int) -> list[np.ndarray]:
        """Sample numbers of each micro-batch of one rank."""
        return [self.batches[batch] for batch in range(rank, self.micro_batches, world)]


def plan(
    law: CurriculumConfig,
    snapshot: Snapshot,
    epoch: int,
    epochs: Optional[float],
    permutation: np.ndarray,
    lengths: np.ndarray,
    world: int,
    seed: int,
) -> EpochPlan:
    """The plan of ``epoch`` (from 0) of ``epochs`` (None: not known) for ``world`` ranks.

    ``permutation``: this epoch's random order of all samples, shape (samples,); what is selected keeps it. ``lengths``:
    tokens by sample number. Raises ValueError with a sentence if no row is left.
    """
    chosen = selection.without_quarantined(snapshot, np.asarray(permutation))
    if "noise_guard" in law.methods:
        rng = _stream(seed, epoch, GUARD)
        chosen = _then(chosen, selection.noise_guard(snapshot, chosen.ids, law, epoch, rng))
    if "infobatch" in law.methods:
        rng = _stream(seed, epoch, CHOICE)
        chosen = _then(chosen, selection.infobatch(snapshot, chosen.ids, law, epoch, epochs, rng))
    if "acmds" in law.methods:
        rng = _stream(seed, epoch, CHOICE)
        chosen = _then(chosen, selection.acmds(snapshot, chosen.ids, law, epoch, epochs, rng, lengths))
    if not chosen.ids.size:
        raise ValueError(_nothing_left(chosen))
    cut = _cut(law, chosen.ids, lengths, _stream(seed, epoch, CUT))
    batches, repeated = cutting.for_ranks(cut, world)
    return EpochPlan(
        epoch=epoch,
        batches=batches,
        weights=chosen.weights,
        skipped=chosen.skipped,
        suspects=chosen.suspects,
        readmitted=_still_in(chosen.readmitted, chosen.ids),
        repeated=repeated,
        notes=chosen.notes + _repeat_notes(epoch, chosen.ids.size, repeated.size, world),
    )


def rest_of(
    old: EpochPlan, done_micro_batches: int, world: int, law: CurriculumConfig, lengths: np.ndarray, seed: int
) -> EpochPlan:
    """What an interrupted epoch still has to deliver, cut again for another number of ranks or rows per micro-batch.

    ``done_micro_batches`` of all ranks of the ``old`` plan were delivered. Raises ValueError if nothing is left.
    """
    start = int(old.batches.ends[done_micro_batches - 1]) if done_micro_batches else 0
    done, rest = np.split(old.batches.order, [start])
    left = rest[np.sort(np.unique(rest, return_index=True)[1])]  # a repeated row once
    left = left[~np.isin(left, done)]
    cut = _cut(law, left, lengths, _stream(seed, old.epoch, CUT_REST, done_micro_batches))
    batches, repeated = cutting.for_ranks(cut, world)
    return replace(
        old, batches=batches, repeated=repeated, notes=_repeat_notes(old.epoch, left.size, repeated.size, world)
    )


def followed(
    old: EpochPlan,
    done_micro_batches: int,
    law: CurriculumConfig,
    snapshot: Snapshot,
    epochs: Optional[float],
    lengths: np.ndarray,
    seed: int,
) -> EpochPlan:
    """What ``acmds`` would choose now for the rows that come behind ``done_micro_batches`` (of all ranks).

    As many rows, in micro-batches of the same sizes: the epoch keeps its length. The ``old`` plan itself where there is
    nothing to choose: another method, batches of equal tokens, or no row that was left out.
    """
    start = int(old.batches.ends[done_micro_batches - 1]) if done_micro_batches else 0
    rest, left_out = old.batches.order[start:], old.skipped.get("acmds")
    if not rest.size or left_out is None or not left_out.size or "token_budget" in law.methods or old.repeated.size:
        return old
    pool = np.sort(np.append(rest, left_out))
    usable = pool[~snapshot.quarantined[pool]]
    pool = usable if usable.size >= rest.size else pool
    rng = _stream(seed, old.epoch, FOLLOW, done_micro_batches)
    pool = rng.permutation(pool)
    chosen = selection.acmds(snapshot, pool, law, old.epoch, epochs, rng, lengths, rows=rest.size).ids
    out = np.setdiff1d(np.append(rest, left_out), chosen)
    order = np.append(old.batches.order[:start], chosen)
    return replace(old, batches=Batches(order, old.batches.ends), skipped={**old.skipped, "acmds": out})


def warmup_limit(law: CurriculumConfig, step: int, max_steps: int, longest: int) -> Optional[int]:
    """Tokens per row that sequence-length warm-up allows at ``step`` (from 0); None once it no longer limits.

    Linear from ``law.warmup_start_tokens`` to ``longest`` (Li et al. 2022, arXiv 2108.06084).
    """
    warmup_steps = law.warmup_share * max_steps
    if step >= warmup_steps or longest <= law.warmup_start_tokens:
        return None
    tokens = law.warmup_start_tokens + (longest - law.warmup_start_tokens) * step / warmup_steps
    limit = max(1, round(tokens / WARMUP_MULTIPLE)) * WARMUP_MULTIPLE
    return limit if limit < longest else None


def check_methods(methods: Iterable[str]) -> Optional[str]:
    """Why these methods cannot be used together; None if they can."""
    names = list(methods)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        return f"{twice[0]!r} is named {names.count(twice[0])} times; name it once"
    if "none" in names and len(names) > 1:
        others = ", ".join(repr(name) for name in names if name != "none")
        return f"'none' switches the curriculum off, but {others} is set too; remove one of them"
    if "acmds" in names and "infobatch" in names:
        return (
            "'acmds' and 'infobatch' both choose samples by difficulty: infobatch lets the samples that it keeps count "
            "more for those that it drops, which is exact only if no other method drops easy ones; keep one of them"
        )
    return None


def _still_in(readmitted: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return readmitted[np.isin(readmitted, ids)] if readmitted.size else readmitted  # which sorts all ``ids``


def _then(earlier: Selection, later: Selection) -> Selection:
    """Both decisions as one; at most one method gives weights and one gives suspects."""
    return Selection(
        ids=later.ids,
        skipped={**earlier.skipped, **later.skipped},
        weights=earlier.weights if later.weights is None else later.weights,
        suspects=np.append(earlier.suspects, later.suspects),
        readmitted=np.append(earlier.readmitted, later.readmitted),
        notes=earlier.notes + later.notes,
    )


def _cut(law: CurriculumConfig, ids: np.ndarray, lengths: np.ndarray, rng: np.random.Generator) -> Batches:
    if "token_budget" not in law.methods:
        return cutting.uniform(ids, law.rows_per_batch, law.fewest_rows)
    rows = law.rows_per_batch
    return cutting.token_budget(ids, lengths, law.token_budget, rows, POOL_BATCHES * rows, rng)


def _stream(seed: int, epoch: int, *use: int) -> np.random.Generator:
    return np.random.default_rng([seed, epoch, *use])


def _nothing_left(chosen: Selection) -> str:
    quarantined = chosen.skipped["quarantined"].size
    if quarantined:
        return f"no row is left to train on: all {quarantined} gave a loss that is not a finite number"
    return "the dataset has no row; at least 1 is needed"


def _repeat_notes(epoch: int, rows: int, repeated: int, world: int) -> tuple[str, ...]:
    if not repeated:
        return ()
    return (
        f"epoch {epoch}: {rows} rows cannot be dealt evenly to {world} ranks; {repeated} of them "
        f"{'is' if repeated == 1 else 'are'} used once more",
    )
