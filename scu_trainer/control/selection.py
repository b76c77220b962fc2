"""Which samples an epoch sees, and how much each counts.

``noise_guard`` leaves out what looks mislabeled or broken; ``infobatch`` leaves out part of what is well learned and
lets the rest of it count more (Qin et al., ICLR 2024, arXiv 2303.04947); ``acmds`` moves the epoch from easy to hard
and keeps every stratum of difficulty in it. Each takes the sample numbers that are still in, keeps their order, and
says what it skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Optional

import numpy as np

from scu_trainer.control import noise
from scu_trainer.control.curriculum_config import CurriculumConfig
from scu_trainer.control.difficulty import Snapshot

STRATA = 8
"""Bins of difficulty in ``acmds``, of equal numbers of rows."""

KERNEL_WIDTH = 0.25
"""Standard deviation, in quantiles of difficulty, of what ``acmds`` takes around its target."""

FIRST_TARGET = 0.25
"""Quantile of difficulty at which ``acmds`` starts; it ends at 1."""


def _no_ids() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Selection:
    """What one rule decided. Sample numbers are int32 or int64, as those that came in."""

    ids: np.ndarray
    """Seen in the epoch, in the order in which they came."""
    skipped: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Not seen, by reason: quarantined, noise_guard, infobatch, acmds."""
    weights: Optional[np.ndarray] = None
    """float32 (samples,), how much a sample's loss counts. None: all 1."""
    suspects: np.ndarray = field(default_factory=_no_ids)
    """What looks mislabeled or broken, worst first, re-admitted ones included."""
    readmitted: np.ndarray = field(default_factory=_no_ids)
    """Suspects that this epoch sees, to renew their scores."""
    notes: tuple[str, ...] = ()
    """Sentences for the user."""


def without_quarantined(snapshot: Snapshot, ids: np.ndarray) -> Selection:
    """All but the samples that gave a loss that is not finite."""
    if not snapshot.quarantined.any():
        return Selection(ids, {"quarantined": _no_ids()})
    out = snapshot.quarantined[ids]
    return Selection(ids[~out], {"quarantined": ids[out]})


def noise_guard(
    snapshot: Snapshot, ids: np.ndarray, law: CurriculumConfig, epoch: int, rng: np.random.Generator
) -> Selection:
    """Leave out rows that look wrong (``noise.py``), but never more than ``law.guard_max_fraction`` of the rows.

    Of what is left out, ``law.guard_readmit`` comes back each epoch, longest unseen first, so that scores are renewed.
    """
    suspects, spared = noise.suspects(snapshot, ids, law)
    cap = min(int(law.guard_max_fraction * ids.size), max(0, ids.size - 1))
    excluded = suspects[:cap]
    readmitted = _longest_unseen(snapshot, excluded, law.guard_readmit, rng)
    out = _members(snapshot, excluded) & ~_members(snapshot, readmitted)
    notes = tuple(_guard_notes(suspects.size, cap, ids.size, spared, epoch))
    skipped = {"noise_guard": ids[out[ids]]}
    return Selection(ids[~out[ids]], skipped, suspects=suspects, readmitted=readmitted, notes=notes)


def infobatch(
    snapshot: Snapshot,
    ids: np.ndarray,
    law: CurriculumConfig,
    epoch: int,
    epochs: Optional[float],
    rng: np.random.Generator,
) -> Selection:
    """Leave out each row below the mean score with probability r = ``law.prune_ratio``; the others of them count
    1 / (1 - r), so that the expected sum of losses stays. The first and the last epochs are full."""
    scores = snapshot.scores[ids]
    known = ~np.isnan(scores)
    if epoch == 0 or _in_final_epochs(law, epoch, epochs) or not known.any():
        return Selection(ids)
    easy = known & (scores < np.mean(scores[known], dtype=np.float64))
    pruned = easy & (rng.random(ids.size) < law.prune_ratio)
    weights = np.ones(snapshot.scores.size, dtype=np.float32)
    weights[ids[easy & ~pruned]] = 1 / (1 - law.prune_ratio)
    return Selection(ids[~pruned], {"infobatch": ids[pruned]}, weights=weights)


def acmds(
    snapshot: Snapshot,
    ids: np.ndarray,
    law: CurriculumConfig,
    epoch: int,
    epochs: Optional[float],
    rng: np.random.Generator,
    lengths: Optional[np.ndarray] = None,
    rows: Optional[int] = None,
) -> Selection:
    """A share ``law.acmds_fraction`` of the rows, around a difficulty that grows with the epochs and with free memory.

    A row that was never seen, or not in the last ``law.window_epochs`` epochs, is always in: any that many epochs in a
    row show every row, and an epoch may hold more than its share for it. Where memory is short, cheap rows of a stratum
    go first, by ``lengths`` (by sample number) where the snapshot has no costs. ``rows``: exactly so many instead of a
    share.
    """
    scores = snapshot.scores[ids]
    overdue = snapshot.last_epoch[ids] <= epoch - law.window_epochs
    costs = lengths if snapshot.costs is None else snapshot.costs
    keys = rng.random(ids.size) + (1 - snapshot.availability) * _dearness(ids, costs)
    keys[overdue] = -1.0
    taken = np.isnan(scores)
    unscored = int(np.count_nonzero(taken))
    strata = np.array_split(np.argsort(scores, kind="stable")[: ids.size - unscored], STRATA)
    wanted = math.ceil(law.acmds_fraction * ids.size) if rows is None else rows
    slots = max(0, wanted - unscored)
    overdue_rows = [int(np.count_nonzero(overdue[stratum])) for stratum in strata]
    target = difficulty_target(law, epoch, epochs, snapshot.availability)
    for stratum, share in zip(strata, _rows_per_stratum(strata, overdue_rows, slots, target), strict=True):
        taken[_lowest(keys, stratum, share)] = True
    if rows is not None and (excess := np.count_nonzero(taken) - rows) > 0:  # the least shares of the strata
        spare = np.flatnonzero(taken & ~overdue)
        taken[spare[np.argsort(keys[spare])[-excess:]]] = False
    return Selection(ids[taken], {"acmds": ids[~taken]})


def difficulty_target(law: CurriculumConfig, epoch: int, epochs: Optional[float], availability: float) -> float:
    """Quantile of difficulty, 0 to 1, around which ``acmds`` takes rows: linear in the epochs, times free memory.

    Where the number of epochs is not known, it comes near 1 within a few windows.
    """
    last = None if epochs is None else math.ceil(epochs) - 1
    progress = epoch / (epoch + law.window_epochs) if last is None else min(1.0, epoch / max(1, last))
    return (FIRST_TARGET + (1 - FIRST_TARGET) * progress) * availability


def _longest_unseen(snapshot: Snapshot, ids: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """At least one, or the only suspects of a small dataset would never be looked at again."""
    rows = math.ceil(share * ids.size - 1e-9)
    return ids[np.lexsort((rng.random(ids.size), snapshot.last_epoch[ids]))][:rows]


def _members(snapshot: Snapshot, ids: np.ndarray) -> np.ndarray:
    """Mask by sample number, shape (samples,)."""
    mask = np.zeros(snapshot.scores.size, dtype=np.bool_)
    mask[ids] = True
    return mask


def _guard_notes(suspects: int, cap: int, rows: int, spared: int, epoch: int) -> Iterator[str]:
    if suspects > cap:
        yield (
            f"epoch {epoch}: {suspects} of {rows} rows look noisy, but noise_guard excludes {cap} at most; the other "
            f"{suspects - cap}, those with the lowest loss, stay in. So many suspects may mean that the model has not "
            "learned yet, or that the labels are wrong throughout"
        )
    if spared:
        yield (
            f"epoch {epoch}: {spared} rows that look noisy stay in, because half of their class is already left out: "
            "look at the labels of that class"
        )


def _in_final_epochs(law: CurriculumConfig, epoch: int, epochs: Optional[float]) -> bool:
    if epochs is None:
        return False
    final = max(1, math.ceil(law.final_full_fraction * epochs - 1e-9))
    return epoch >= epochs - final


def _dearness(ids: np.ndarray, costs: Optional[np.ndarray]) -> np.ndarray | float:
    """0 for a row that costs nothing, 1/2 for the mean, near 1 for the dearest."""
    if costs is None or not ids.size:
        return 0.0
    own = costs[ids].astype(np.float64)
    return own / np.maximum(own + own.mean(), np.finfo(np.float64).tiny)


def _rows_per_stratum(strata: list[np.ndarray], overdue_rows: list[int], slots: int, target: float) -> list[int]:
    """Rows that each stratum gives, ``slots`` in all where overdue rows and half of every uniform share leave room."""
    sizes = np.array([stratum.size for stratum in strata])
    half_share = np.minimum(sizes, math.ceil(slots / STRATA / 2))
    least = np.maximum(half_share, overdue_rows)
    middles = (np.arange(STRATA) + 0.5) / STRATA
    kernel = np.exp(-0.5 * ((middles - target) / KERNEL_WIDTH) ** 2)
    return _filled_to(slots, least, sizes, half_share, kernel)


def _filled_to(slots: int, least: np.ndarray, sizes: np.ndarray, base: np.ndarray, kernel: np.ndarray) -> list[int]:
    """``clip(base + height * kernel, least, sizes)`` for the height at which its sum is ``slots``, in whole rows."""
    low, high = 0.0, float(sizes.sum()) / float(kernel.min()) + 1.0
    for _ in range(100):
        height = (low + high) / 2
        enough = np.floor(np.clip(base + height * kernel, least, sizes)).sum() >= slots
        low, high = (low, height) if enough else (height, high)
    rows = np.floor(np.clip(base + low * kernel, least, sizes)).astype(np.int64)
    for stratum in np.argsort(-kernel, kind="stable"):
        rows[stratum] += min(max(0, slots - rows.sum()), sizes[stratum] - rows[stratum])
    return rows.tolist()


def _lowest(keys: np.ndarray, positions: np.ndarray, rows: int) -> np.ndarray:
    """The ``rows`` positions with the lowest keys, in no particular order."""
    if rows >= positions.size:
        return positions
    return positions[np.argpartition(keys[positions], rows)[:rows]] if rows else positions[:0]
