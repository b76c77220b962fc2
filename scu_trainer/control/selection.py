"""Methods that select the samples of an epoch and weight their losses.

``noise_guard`` leaves out samples that look mislabeled or broken. ``infobatch`` leaves out some of the well-learned
samples and gives the remaining ones of them a larger weight (Qin et al., ICLR 2024, arXiv 2303.04947). ``acmds`` moves
from easy to hard samples over the epochs while it keeps every stratum of difficulty in each epoch. Each method takes
the sample numbers that are still selected, keeps their order, and returns which ones it skipped.
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
"""Number of strata of difficulty in ``acmds``, with equally many rows each."""

KERNEL_WIDTH = 0.25
"""Standard deviation, in quantiles of difficulty, of the kernel with which ``acmds`` selects around its target."""

FIRST_TARGET = 0.25
"""Quantile of difficulty at which ``acmds`` starts; it ends at 1."""


def _no_ids() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Selection:
    """The result of one method. Sample numbers have the type of the given ones, int32 or int64."""

    ids: np.ndarray
    """Selected samples, in the given order."""
    skipped: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Samples left out, by reason: quarantined, noise_guard, infobatch, acmds."""
    weights: Optional[np.ndarray] = None
    """Weight of each sample's loss, float32 (samples,). None: all 1."""
    suspects: np.ndarray = field(default_factory=_no_ids)
    """Samples that look mislabeled or broken, worst first, including the readmitted ones."""
    readmitted: np.ndarray = field(default_factory=_no_ids)
    """Suspects that this epoch includes, to renew their scores."""
    notes: tuple[str, ...] = ()
    """Sentences for the user."""


def without_quarantined(snapshot: Snapshot, ids: np.ndarray) -> Selection:
    """Leave out the samples that had a loss that is not finite."""
    if not snapshot.quarantined.any():
        return Selection(ids, {"quarantined": _no_ids()})
    out = snapshot.quarantined[ids]
    return Selection(ids[~out], {"quarantined": ids[out]})


def noise_guard(
    snapshot: Snapshot, ids: np.ndarray, config: CurriculumConfig, epoch: int, rng: np.random.Generator
) -> Selection:
    """Leave out rows that look wrong (see ``noise.py``), at most ``config.guard_max_fraction`` of all rows. Each epoch
    readmits ``config.guard_readmit`` of the excluded rows, longest unseen first, to renew their scores."""
    suspects, spared = noise.suspects(snapshot, ids, config)
    cap = min(int(config.guard_max_fraction * ids.size), max(0, ids.size - 1))
    excluded = suspects[:cap]
    readmitted = _longest_unseen(snapshot, excluded, config.guard_readmit, rng)
    out = _mask_of(snapshot, excluded) & ~_mask_of(snapshot, readmitted)
    notes = tuple(_guard_notes(suspects.size, cap, ids.size, spared, epoch))
    skipped = {"noise_guard": ids[out[ids]]}
    return Selection(ids[~out[ids]], skipped, suspects=suspects, readmitted=readmitted, notes=notes)


def infobatch(
    snapshot: Snapshot,
    ids: np.ndarray,
    config: CurriculumConfig,
    epoch: int,
    epochs: Optional[float],
    rng: np.random.Generator,
) -> Selection:
    """Leave out each row below the mean score with probability r = ``config.prune_ratio``; the other rows below it get
    the weight 1 / (1 - r), which keeps the expected sum of losses. The first and the last epochs include all rows."""
    scores = snapshot.scores[ids]
    known = ~np.isnan(scores)
    if epoch == 0 or _in_final_epochs(config, epoch, epochs) or not known.any():
        return Selection(ids)
    easy = known & (scores < np.mean(scores[known], dtype=np.float64))
    pruned = easy & (rng.random(ids.size) < config.prune_ratio)
    weights = np.ones(snapshot.scores.size, dtype=np.float32)
    weights[ids[easy & ~pruned]] = 1 / (1 - config.prune_ratio)
    return Selection(ids[~pruned], {"infobatch": ids[pruned]}, weights=weights)


def acmds(
    snapshot: Snapshot,
    ids: np.ndarray,
    config: CurriculumConfig,
    epoch: int,
    epochs: Optional[float],
    rng: np.random.Generator,
    lengths: Optional[np.ndarray] = None,
    rows: Optional[int] = None,
) -> Selection:
    """Select the share ``config.acmds_fraction`` of the rows, around a difficulty that grows with the epochs and with
    free memory.

    A row that was never seen, or not in the last ``config.window_epochs`` epochs, is always selected, so that every row
    is in at least one of that many consecutive epochs; an epoch may therefore exceed its share. If memory is short,
    the cheap rows of each stratum are preferred; costs are ``lengths`` (by sample number) if the snapshot has none.
    ``rows``: select exactly this many rows instead of the share.
    """
    scores = snapshot.scores[ids]
    overdue = snapshot.last_epoch[ids] <= epoch - config.window_epochs
    costs = lengths if snapshot.costs is None else snapshot.costs
    keys = rng.random(ids.size) + (1 - snapshot.availability) * _relative_costs(ids, costs)
    keys[overdue] = -1.0
    taken = np.isnan(scores)
    unscored = int(np.count_nonzero(taken))
    strata = np.array_split(np.argsort(scores, kind="stable")[: ids.size - unscored], STRATA)
    wanted = math.ceil(config.acmds_fraction * ids.size) if rows is None else rows
    slots = max(0, wanted - unscored)
    overdue_rows = [int(np.count_nonzero(overdue[stratum])) for stratum in strata]
    target = difficulty_target(config, epoch, epochs, snapshot.availability)
    for stratum, share in zip(strata, _rows_per_stratum(strata, overdue_rows, slots, target), strict=True):
        taken[_lowest_keys(keys, stratum, share)] = True
    if rows is not None and (excess := np.count_nonzero(taken) - rows) > 0:  # from the minimum shares of the strata
        spare = np.flatnonzero(taken & ~overdue)
        taken[spare[np.argsort(keys[spare])[-excess:]]] = False
    return Selection(ids[taken], {"acmds": ids[~taken]})


def difficulty_target(config: CurriculumConfig, epoch: int, epochs: Optional[float], availability: float) -> float:
    """Return the quantile of difficulty, 0 to 1, around which ``acmds`` selects: linear in the epochs (approaching 1 in
    a few windows if their number is not known), times the free share of memory."""
    last = None if epochs is None else math.ceil(epochs) - 1
    progress = epoch / (epoch + config.window_epochs) if last is None else min(1.0, epoch / max(1, last))
    return (FIRST_TARGET + (1 - FIRST_TARGET) * progress) * availability


def _longest_unseen(snapshot: Snapshot, ids: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Return the longest unseen ``share`` of ``ids``, at least one, or few suspects would never be seen again."""
    rows = math.ceil(share * ids.size - 1e-9)
    return ids[np.lexsort((rng.random(ids.size), snapshot.last_epoch[ids]))][:rows]


def _mask_of(snapshot: Snapshot, ids: np.ndarray) -> np.ndarray:
    """Return a mask over all samples, shape (samples,), that is true at ``ids``."""
    mask = np.zeros(snapshot.scores.size, dtype=np.bool_)
    mask[ids] = True
    return mask


def _guard_notes(suspects: int, cap: int, rows: int, spared: int, epoch: int) -> Iterator[str]:
    if suspects > cap:
        yield (
            f"epoch {epoch}: {suspects} of {rows} rows look noisy, but noise_guard excludes {cap} at most; the other "
            f"{suspects - cap}, those with the lowest loss, stay in. So many suspects may mean that the model has not "
            "learned enough yet, or that labels are wrong throughout the dataset"
        )
    if spared:
        yield (
            f"epoch {epoch}: {spared} rows that look noisy stay in, because half of their class is already left out: "
            "check the labels of that class"
        )


def _in_final_epochs(config: CurriculumConfig, epoch: int, epochs: Optional[float]) -> bool:
    if epochs is None:
        return False
    final = max(1, math.ceil(config.final_full_fraction * epochs - 1e-9))
    return epoch >= epochs - final


def _relative_costs(ids: np.ndarray, costs: Optional[np.ndarray]) -> np.ndarray | float:
    """Return the cost of each row between 0 (no cost) and 1 (far above the mean), with 1/2 for the mean cost."""
    if costs is None or not ids.size:
        return 0.0
    row_costs = costs[ids].astype(np.float64)
    return row_costs / np.maximum(row_costs + row_costs.mean(), np.finfo(np.float64).tiny)


def _rows_per_stratum(strata: list[np.ndarray], overdue_rows: list[int], slots: int, target: float) -> list[int]:
    """Return how many rows to take from each stratum: ``slots`` in total, unless overdue rows and half of the uniform
    share of each stratum already exceed that."""
    sizes = np.array([stratum.size for stratum in strata])
    half_share = np.minimum(sizes, math.ceil(slots / STRATA / 2))
    least = np.maximum(half_share, overdue_rows)
    middles = (np.arange(STRATA) + 0.5) / STRATA
    kernel = np.exp(-0.5 * ((middles - target) / KERNEL_WIDTH) ** 2)
    return _rows_summing_to(slots, least, sizes, half_share, kernel)


def _rows_summing_to(
    slots: int, least: np.ndarray, sizes: np.ndarray, base: np.ndarray, kernel: np.ndarray
) -> list[int]:
    """Return ``clip(base + height * kernel, least, sizes)`` in whole rows, with the height for the sum ``slots``."""
    low, high = 0.0, float(sizes.sum()) / float(kernel.min()) + 1.0
    for _ in range(100):
        height = (low + high) / 2
        enough = np.floor(np.clip(base + height * kernel, least, sizes)).sum() >= slots
        low, high = (low, height) if enough else (height, high)
    rows = np.floor(np.clip(base + low * kernel, least, sizes)).astype(np.int64)
    for stratum in np.argsort(-kernel, kind="stable"):
        rows[stratum] += min(max(0, slots - rows.sum()), sizes[stratum] - rows[stratum])
    return rows.tolist()


def _lowest_keys(keys: np.ndarray, positions: np.ndarray, rows: int) -> np.ndarray:
    """Return the ``rows`` positions with the lowest keys, in no particular order."""
    if rows >= positions.size:
        return positions
    return positions[np.argpartition(keys[positions], rows)[:rows]] if rows else positions[:0]
