"""Detection of rows that look wrong: labels that the model contradicts, and texts with a far higher loss than the rest.

For classification, the criterion is a row's mean loss since the start of training, in units of its chance loss. The
newest loss of a wrong label becomes small once the model has memorized it, but the mean over all epochs still contains
the losses from when the model generalized. If the data has wrong labels, these values form two groups. Otsu's
threshold (1979) divides any values into two groups, so it is used only if the upper group is on average worse than
chance, which clean rows are not, however hard they are. No noise rate has to be known.

For everything else (text, regression), a row is suspect if its running mean loss is more than three robust standard
deviations above the median.

The chance loss of a row is -ln of its label's share, but at least ln(classes), because a rare class is hard just
because it is rare. With one chance loss for all classes, the rows of rare classes would be excluded.
"""

from __future__ import annotations

import math

import numpy as np

from scu_trainer.control.curriculum_config import CurriculumConfig
from scu_trainer.control.difficulty import Snapshot

CLIP = 4.0
"""Relative losses are clipped to this many units of chance, so that a single extreme value does not move the cut."""

BINS = 1024
"""Number of bins of the histogram for Otsu's threshold."""

FEWEST_ROWS = 16
"""With fewer known rows, no groups are distinguished."""

MAD_TO_SIGMA = 1.4826
"""Factor from the median absolute deviation of normally distributed values to their standard deviation."""

DEVIATIONS = 3.0
CLASS_OBSERVATIONS, OTHER_OBSERVATIONS = 3, 2
"""Number of losses of a row that must be known before it can be suspect: more for a mean than for a running average."""

CLASS_FRACTION = 0.5
"""At most this share of the rows of one class is left out."""


def suspects(snapshot: Snapshot, ids: np.ndarray, config: CurriculumConfig) -> tuple[np.ndarray, int]:
    """Return (samples among ``ids`` that look wrong, worst first; how many more are kept by the limit per class)."""
    classes, labels = config.classes or 0, snapshot.labels
    by_class = classes > 1 and labels is not None
    values = relative_losses(snapshot, classes)[ids] if by_class else snapshot.scores[ids].astype(np.float64)
    known = (snapshot.observations[ids] >= observations_needed(config, by_class)) & np.isfinite(values)
    bar = class_bar(values[known]) if by_class else robust_bar(values[known])
    above = np.flatnonzero(known & (values > bar))
    suspect_ids = ids[above][np.lexsort((ids[above], -values[above]))]
    return _limited_per_class(suspect_ids, labels, ids) if classes > 1 and labels is not None else (suspect_ids, 0)


def observations_needed(config: CurriculumConfig, by_class: bool) -> int:
    return config.guard_observations or (CLASS_OBSERVATIONS if by_class else OTHER_OBSERVATIONS)


def relative_losses(snapshot: Snapshot, classes: int) -> np.ndarray:
    """Return the mean loss of every sample in units of its chance loss, float64 (samples,); NaN where unseen."""
    assert snapshot.labels is not None and snapshot.means is not None
    return snapshot.means.astype(np.float64) / chance_losses(snapshot.labels, classes)


def chance_losses(labels: np.ndarray, classes: int) -> np.ndarray:
    """Return -ln of the share of each sample's label among the known ones (>= 0), at least ln(classes); (samples,)."""
    counts = np.bincount(labels[labels >= 0], minlength=classes)
    shares = counts / max(1, counts.sum())
    losses = np.maximum(math.log(classes), -np.log(np.maximum(shares, 1e-12)))
    return np.where(labels >= 0, losses[labels], math.log(classes))


def class_bar(values: np.ndarray) -> float:
    """Return the relative loss above which a row is suspect; infinite if the rows form no right and wrong group."""
    if values.size < FEWEST_ROWS or values.min() == values.max():
        return math.inf
    clipped = np.clip(values, 0.0, CLIP)
    cut = _otsu_threshold(clipped)
    worse = clipped[clipped > cut]
    return cut if worse.size and worse.mean() > 1.0 else math.inf


def robust_bar(values: np.ndarray) -> float:
    """Return the median plus 3 robust standard deviations; infinite if there are no values or most are the same."""
    if not values.size:
        return math.inf
    median = float(np.median(values))
    deviation = float(np.median(np.abs(values - median)))
    return median + DEVIATIONS * MAD_TO_SIGMA * deviation if deviation > 0 else math.inf


def _otsu_threshold(values: np.ndarray) -> float:
    """Return the threshold for values in [0, CLIP] with the largest variance between its two sides."""
    counts = np.bincount((values * (BINS / CLIP)).astype(np.int64), minlength=BINS + 1)
    mass, weighted = np.cumsum(counts), np.cumsum(counts * np.arange(BINS + 1))
    below, above = mass[:-1].astype(np.float64), (mass[-1] - mass[:-1]).astype(np.float64)
    gap = (weighted[-1] - weighted[:-1]) / np.maximum(above, 1) - weighted[:-1] / np.maximum(below, 1)
    between = np.where((below > 0) & (above > 0), below * above * gap * gap, -1.0)
    best = np.flatnonzero(between == between.max())  # all bins of an empty range are tied: take its middle
    return float((best.mean() + 1.0) * CLIP / BINS)


def _limited_per_class(suspect_ids: np.ndarray, labels: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, int]:
    """Return (the worst suspects of each class up to its limit, in the given order; how many exceed the limits)."""
    of_class = labels[suspect_ids]
    by_class = np.argsort(of_class, kind="stable")
    sorted_labels = of_class[by_class]
    rank = np.empty(suspect_ids.size, dtype=np.int64)
    rank[by_class] = np.arange(suspect_ids.size) - np.searchsorted(sorted_labels, sorted_labels)
    known_labels = labels[ids]
    sizes = np.bincount(known_labels[known_labels >= 0], minlength=int(of_class.max(initial=0)) + 1)
    keep = (of_class < 0) | (rank < CLASS_FRACTION * sizes[of_class])
    return suspect_ids[keep], int(np.count_nonzero(~keep))
