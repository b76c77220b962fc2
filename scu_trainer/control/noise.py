"""Which rows look wrong: labels that the model would rather guess than believe, texts far worse than the rest.

Classification: a row's mean loss since the start of training, in units of its chance loss. Memorizing brings the newest
loss of a wrong label down, the mean over all epochs keeps what the model thought of it when it still generalized.
Where wrong labels are among them these values form two groups; Otsu's threshold (1979) parts any values in two groups,
so the cut counts only if the upper group is on average worse than chance: clean rows are not, however hard. No noise
rate has to be known.

Everything else (text, numbers): the running mean loss against the median and three robust standard deviations.

The chance loss of a row is -ln of its label's share, but at least ln(classes): a rare class is hard because it is rare.
With one chance loss for all classes the rows of rare ones would be thrown out.
"""

from __future__ import annotations

import math

import numpy as np

from scu_trainer.control.curriculum_config import CurriculumConfig
from scu_trainer.control.difficulty import Snapshot

CLIP = 4.0
"""Units of chance above which a loss is only large: one absurd value must not draw the cut up to itself."""

BINS = 1024
"""Of the histogram that is cut."""

FEWEST_ROWS = 16
"""With fewer known rows there are no groups to be distinguished."""

MAD_TO_SIGMA = 1.4826
"""The median absolute deviation of normal values times this is their standard deviation."""

DEVIATIONS = 3.0
CLASS_OBSERVATIONS, OTHER_OBSERVATIONS = 3, 2
"""Losses of a row that must be known before it can be suspect: a mean needs more of them than a running average."""

CLASS_FRACTION = 0.5
"""At most this share of the rows of one class is left out."""


def suspects(snapshot: Snapshot, ids: np.ndarray, law: CurriculumConfig) -> tuple[np.ndarray, int]:
    """(samples among ``ids`` that look wrong, worst first; how many more the cap on a class keeps in)."""
    classes, labels = law.classes or 0, snapshot.labels
    by_class = classes > 1 and labels is not None
    values = relative_losses(snapshot, classes)[ids] if by_class else snapshot.scores[ids].astype(np.float64)
    known = (snapshot.observations[ids] >= observations_needed(law, by_class)) & np.isfinite(values)
    bar = class_bar(values[known]) if by_class else robust_bar(values[known])
    above = np.flatnonzero(known & (values > bar))
    found = ids[above][np.lexsort((ids[above], -values[above]))]
    return _within_classes(found, labels, ids) if classes > 1 and labels is not None else (found, 0)


def observations_needed(law: CurriculumConfig, by_class: bool) -> int:
    return law.guard_observations or (CLASS_OBSERVATIONS if by_class else OTHER_OBSERVATIONS)


def relative_losses(snapshot: Snapshot, classes: int) -> np.ndarray:
    """Mean loss of every sample in units of its chance loss, float64 (samples,); NaN where unseen."""
    assert snapshot.labels is not None and snapshot.means is not None
    return snapshot.means.astype(np.float64) / chance_losses(snapshot.labels, classes)


def chance_losses(labels: np.ndarray, classes: int) -> np.ndarray:
    """-ln of the share of each sample's label among the known labels (0 or more), at least ln(classes); (samples,)."""
    counts = np.bincount(labels[labels >= 0], minlength=classes)
    shares = counts / max(1, counts.sum())
    losses = np.maximum(math.log(classes), -np.log(np.maximum(shares, 1e-12)))
    return np.where(labels >= 0, losses[labels], math.log(classes))


def class_bar(values: np.ndarray) -> float:
    """Units of chance above which a row is suspect; infinite where the rows do not part into right and wrong."""
    if values.size < FEWEST_ROWS or values.min() == values.max():
        return math.inf
    clipped = np.clip(values, 0.0, CLIP)
    cut = _otsu(clipped)
    worse = clipped[clipped > cut]
    return cut if worse.size and worse.mean() > 1.0 else math.inf


def robust_bar(values: np.ndarray) -> float:
    """Median + 3 robust standard deviations; infinite where the values give no scale: none, or most are the same."""
    if not values.size:
        return math.inf
    median = float(np.median(values))
    deviation = float(np.median(np.abs(values - median)))
    return median + DEVIATIONS * MAD_TO_SIGMA * deviation if deviation > 0 else math.inf


def _otsu(values: np.ndarray) -> float:
    """The cut of values in [0, CLIP] with the largest variance between its two sides."""
    counts = np.bincount((values * (BINS / CLIP)).astype(np.int64), minlength=BINS + 1)
    mass, weighted = np.cumsum(counts), np.cumsum(counts * np.arange(BINS + 1))
    below, above = mass[:-1].astype(np.float64), (mass[-1] - mass[:-1]).astype(np.float64)
    gap = (weighted[-1] - weighted[:-1]) / np.maximum(above, 1) - weighted[:-1] / np.maximum(below, 1)
    between = np.where((below > 0) & (above > 0), below * above * gap * gap, -1.0)
    best = np.flatnonzero(between == between.max())  # an empty stretch is one long tie: cut in its middle
    return float((best.mean() + 1.0) * CLIP / BINS)


def _within_classes(found: np.ndarray, labels: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, int]:
    """The worst of each class up to its cap, worst first as they came."""
    of_class = labels[found]
    by_class = np.argsort(of_class, kind="stable")
    sorted_labels = of_class[by_class]
    rank = np.empty(found.size, dtype=np.int64)
    rank[by_class] = np.arange(found.size) - np.searchsorted(sorted_labels, sorted_labels)
    own = labels[ids]
    sizes = np.bincount(own[own >= 0], minlength=int(of_class.max(initial=0)) + 1)
    keep = (of_class < 0) | (rank < CLASS_FRACTION * sizes[of_class])
    return found[keep], int(np.count_nonzero(~keep))
