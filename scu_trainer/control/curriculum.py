"""The plan of an epoch: which samples it has, their weights, their micro-batches, and the rank of each micro-batch.

A plan depends only on its arguments, bit for bit, so all ranks compute the same one. An example of its use in a custom
training loop:

>>> import numpy as np
>>> from scu_trainer.control import curriculum, difficulty
>>> config = curriculum.CurriculumConfig(methods=("noise_guard",), rows_per_batch=4)
>>> known = difficulty.Difficulty(samples=6, alpha=0.3, window_epochs=config.window_epochs)
>>> losses = np.array([0.2, 0.1, 3.0, 0.4, 0.3, 2.0])
>>> for epoch in range(3):
...     permutation = np.random.default_rng(epoch).permutation(6)
...     plan = curriculum.plan(config, known.snapshot(), epoch, 3, permutation, np.full(6, 10), world=1, seed=1)
...     for ids in plan.batches_of(rank=0, world=1):
...         known.update(ids, losses[ids], epoch)  # the training losses of these rows
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

from scu_trainer.control import batches as batch_cutting
from scu_trainer.control import selection
from scu_trainer.control.batches import Batches
from scu_trainer.control.curriculum_config import CurriculumConfig
from scu_trainer.control.difficulty import Snapshot
from scu_trainer.control.selection import Selection

POOL_BATCHES = 100
"""``token_budget`` sorts the rows of this many micro-batches together: few enough for a new mixture in every epoch."""

GUARD, CHOICE, CUT, CUT_REST, FOLLOW = range(5)
"""Streams of random numbers, one per use, so that a method draws the same numbers whichever other methods are on."""

WARMUP_MULTIPLE = 8
"""Sequence lengths grow in steps of this many tokens."""


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The plan of one epoch. Sample numbers are int32 or int64, as in the permutation."""

    epoch: int
    batches: Batches
    """Micro-batches of all ranks: rank r of w takes micro-batches r, r + w, r + 2w, ..."""
    weights: Optional[np.ndarray]
    """Weight of each sample's loss, float32 (samples,). None: all 1."""
    skipped: Mapping[str, np.ndarray]
    """Samples that the epoch leaves out, by reason."""
    suspects: np.ndarray
    """Samples that look mislabeled or broken, worst first."""
    readmitted: np.ndarray
    """Suspects that the epoch includes nevertheless, to renew their scores."""
    repeated: np.ndarray
    """Repeated rows, once per repetition, because there are fewer rows than needed micro-batches."""
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
        """Return everything except ``epoch`` and ``notes`` as arrays, for a checkpoint."""
        arrays = {"order": self.batches.order, "ends": self.batches.ends}
        arrays |= {name: getattr(self, name) for name in ("suspects", "readmitted", "repeated")}
        arrays |= {f"skipped.{reason}": ids for reason, ids in self.skipped.items()}
        return arrays if self.weights is None else {**arrays, "weights": self.weights}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], epoch: int, notes: Iterable[str]) -> EpochPlan:
        """Return the plan that ``to_arrays`` wrote. Raises KeyError if an array is missing."""
        skipped = {name.removeprefix("skipped."): arrays[name] for name in arrays if name.startswith("skipped.")}
        named = {name: arrays[name] for name in ("suspects", "readmitted", "repeated")}
        batches = Batches(arrays["order"], arrays["ends"])
        return cls(epoch, batches, arrays.get("weights"), skipped, **named, notes=tuple(notes))

    def batches_of(self, rank: int, world: int) -> list[np.ndarray]:
        """Return the sample numbers of each micro-batch of one rank."""
        return [self.batches[batch] for batch in range(rank, self.micro_batches, world)]


def plan(
    config: CurriculumConfig,
    snapshot: Snapshot,
    epoch: int,
    epochs: Optional[float],
    permutation: np.ndarray,
    lengths: np.ndarray,
    world: int,
    seed: int,
) -> EpochPlan:
    """Return the plan of ``epoch`` (counted from 0) of ``epochs`` (None if unknown) for ``world`` ranks.

    ``permutation``: this epoch's random order of all samples, shape (samples,); selected samples keep that order.
    ``lengths``: tokens by sample number. Raises ValueError if no row is left.
    """
    chosen = selection.without_quarantined(snapshot, np.asarray(permutation))
    if "noise_guard" in config.methods:
        rng = _random_stream(seed, epoch, GUARD)
        chosen = _combined(chosen, selection.noise_guard(snapshot, chosen.ids, config, epoch, rng))
    if "infobatch" in config.methods:
        rng = _random_stream(seed, epoch, CHOICE)
        chosen = _combined(chosen, selection.infobatch(snapshot, chosen.ids, config, epoch, epochs, rng))
    if "acmds" in config.methods:
        rng = _random_stream(seed, epoch, CHOICE)
        chosen = _combined(chosen, selection.acmds(snapshot, chosen.ids, config, epoch, epochs, rng, lengths))
    if not chosen.ids.size:
        raise ValueError(_no_rows_message(chosen))
    cut = _cut(config, chosen.ids, lengths, _random_stream(seed, epoch, CUT))
    batches, repeated = batch_cutting.for_ranks(cut, world)
    return EpochPlan(
        epoch=epoch,
        batches=batches,
        weights=chosen.weights,
        skipped=chosen.skipped,
        suspects=chosen.suspects,
        readmitted=_intersection(chosen.readmitted, chosen.ids),
        repeated=repeated,
        notes=chosen.notes + _repeat_notes(epoch, chosen.ids.size, repeated.size, world),
    )


def remaining_plan(
    old: EpochPlan, done_micro_batches: int, world: int, config: CurriculumConfig, lengths: np.ndarray, seed: int
) -> EpochPlan:
    """Return the plan of the rest of an interrupted epoch, for another number of ranks or rows per micro-batch.
    ``done_micro_batches`` of the ``old`` plan were delivered, over all ranks. Raises ValueError if nothing is left."""
    start = int(old.batches.ends[done_micro_batches - 1]) if done_micro_batches else 0
    done, rest = np.split(old.batches.order, [start])
    left = rest[np.sort(np.unique(rest, return_index=True)[1])]  # each row once, repeated ones too
    left = left[~np.isin(left, done)]
    cut = _cut(config, left, lengths, _random_stream(seed, old.epoch, CUT_REST, done_micro_batches))
    batches, repeated = batch_cutting.for_ranks(cut, world)
    return replace(
        old, batches=batches, repeated=repeated, notes=_repeat_notes(old.epoch, left.size, repeated.size, world)
    )


def reselected_plan(
    old: EpochPlan,
    done_micro_batches: int,
    config: CurriculumConfig,
    snapshot: Snapshot,
    epochs: Optional[float],
    lengths: np.ndarray,
    seed: int,
) -> EpochPlan:
    """Return ``old`` with the rows after ``done_micro_batches`` (of all ranks) selected again by ``acmds``.

    The number of rows and the sizes of the micro-batches stay, so the epoch keeps its length. Returns ``old`` itself if
    there is nothing to select: with another method, batches of equal tokens or repeated rows, or if no row is left out.
    """
    start = int(old.batches.ends[done_micro_batches - 1]) if done_micro_batches else 0
    rest, left_out = old.batches.order[start:], old.skipped.get("acmds")
    if not rest.size or left_out is None or not left_out.size or "token_budget" in config.methods or old.repeated.size:
        return old
    pool = np.sort(np.append(rest, left_out))
    usable = pool[~snapshot.quarantined[pool]]
    pool = usable if usable.size >= rest.size else pool
    rng = _random_stream(seed, old.epoch, FOLLOW, done_micro_batches)
    pool = rng.permutation(pool)
    chosen = selection.acmds(snapshot, pool, config, old.epoch, epochs, rng, lengths, rows=rest.size).ids
    out = np.setdiff1d(np.append(rest, left_out), chosen)
    order = np.append(old.batches.order[:start], chosen)
    return replace(old, batches=Batches(order, old.batches.ends), skipped={**old.skipped, "acmds": out})


def warmup_limit(config: CurriculumConfig, step: int, max_steps: int, longest: int) -> Optional[int]:
    """Return the tokens per row that sequence-length warm-up allows at ``step`` (from 0); None once it has ended. They
    grow linearly from ``config.warmup_start_tokens`` to ``longest`` (Li et al. 2022, arXiv 2108.06084)."""
    warmup_steps = config.warmup_share * max_steps
    if step >= warmup_steps or longest <= config.warmup_start_tokens:
        return None
    tokens = config.warmup_start_tokens + (longest - config.warmup_start_tokens) * step / warmup_steps
    limit = max(1, round(tokens / WARMUP_MULTIPLE)) * WARMUP_MULTIPLE
    return limit if limit < longest else None


def check_methods(methods: Iterable[str]) -> Optional[str]:
    """Return why these methods cannot be used together; None if they can."""
    names = list(methods)
    repeated_names = sorted({name for name in names if names.count(name) > 1})
    if repeated_names:
        return f"{repeated_names[0]!r} is named {names.count(repeated_names[0])} times; name it once"
    if "none" in names and len(names) > 1:
        others = ", ".join(repr(name) for name in names if name != "none")
        return f"'none' switches the curriculum off, but {others} is set too; remove one of them"
    if "acmds" in names and "infobatch" in names:
        return (
            "'acmds' and 'infobatch' both choose samples by difficulty: infobatch gives the easy samples that it keeps "
            "a larger weight, which is unbiased only if no other method drops easy ones; keep one of them"
        )
    return None


def _intersection(readmitted: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return readmitted[np.isin(readmitted, ids)] if readmitted.size else readmitted  # isin sorts all ``ids``


def _combined(earlier: Selection, later: Selection) -> Selection:
    """Return both selections as one. At most one of them has weights, and at most one has suspects."""
    return Selection(
        ids=later.ids,
        skipped={**earlier.skipped, **later.skipped},
        weights=earlier.weights if later.weights is None else later.weights,
        suspects=np.append(earlier.suspects, later.suspects),
        readmitted=np.append(earlier.readmitted, later.readmitted),
        notes=earlier.notes + later.notes,
    )


def _cut(config: CurriculumConfig, ids: np.ndarray, lengths: np.ndarray, rng: np.random.Generator) -> Batches:
    if "token_budget" not in config.methods:
        return batch_cutting.uniform(ids, config.rows_per_batch, config.fewest_rows)
    rows = config.rows_per_batch
    return batch_cutting.token_budget(ids, lengths, config.token_budget, rows, POOL_BATCHES * rows, rng)


def _random_stream(seed: int, epoch: int, *use: int) -> np.random.Generator:
    return np.random.default_rng([seed, epoch, *use])


def _no_rows_message(chosen: Selection) -> str:
    quarantined = chosen.skipped["quarantined"].size
    if quarantined:
        return f"no row is left to train on: all {quarantined} had a loss that is not a finite number"
    return "the dataset has no rows; at least 1 is needed"


def _repeat_notes(epoch: int, rows: int, repeated: int, world: int) -> tuple[str, ...]:
    if not repeated:
        return ()
    return (
        f"epoch {epoch}: {rows} rows cannot be divided evenly among {world} ranks; {repeated} repeated "
        f"{'row fills' if repeated == 1 else 'rows fill'} the gap",
    )
