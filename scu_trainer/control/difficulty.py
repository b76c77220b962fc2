"""The difficulty of each sample: a moving average of its training loss, and the epoch of its newest loss.

>>> import numpy as np
>>> difficulty = Difficulty(samples=4, alpha=0.5, window_epochs=3)
>>> difficulty.update(np.array([0, 1, 1, 3]), np.array([2.0, 4.0, 2.0, np.nan]), epoch=0)
>>> difficulty.scores.tolist()
[2.0, 3.0, nan, nan]
>>> difficulty.counts(epoch=0)
{'unseen': 1, 'stale': 0, 'quarantined': 1}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Optional

import numpy as np

LARGEST_SCORE = float(np.finfo(np.float32).max)
"""A loss above this would be infinite as a float32 score, so it counts as not finite."""

QUANTILES = (0, 10, 25, 50, 75, 90, 100)
STATE_TYPES = {
    "scores": np.float32,
    "observations": np.int32,
    "last_epoch": np.int32,
    "quarantined": np.bool_,
    "means": np.float32,
    "labels": np.int32,
}


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The statistics of all samples at one moment, from which an epoch is planned: read-only arrays (samples,)."""

    scores: np.ndarray
    """float32, nats; NaN where no finite loss was seen."""
    observations: np.ndarray
    """int32, number of finite losses seen."""
    last_epoch: np.ndarray
    """int32, epoch of the newest finite loss; -1 for none."""
    quarantined: np.ndarray
    """bool, whether the sample had a loss that is not finite."""
    means: Optional[np.ndarray] = None
    """float32, nats: plain mean of all finite losses seen; NaN where unseen. None: use the scores."""
    labels: Optional[np.ndarray] = None
    """int32, class of the sample; -1 where it is not known. None: the task is not a classification."""
    availability: float = 1.0
    """Free share of memory, 0 to 1."""
    costs: Optional[np.ndarray] = None
    """float32, memory that a sample takes, in any unit (tokens, bytes). None: use its length."""

    def __post_init__(self) -> None:
        if self.means is None:
            object.__setattr__(self, "means", self.scores)
        for name, dtype in {**STATE_TYPES, "costs": np.float32}.items():
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _read_only(getattr(self, name), dtype))


class Difficulty:
    """Moving average of each sample's loss: starts at the first loss, then ``score += alpha * (loss - score)``.

    ``scores``, ``observations``, ``last_epoch``, ``quarantined``, ``means`` and ``labels`` are the live arrays that
    ``Snapshot`` describes. They take 17 bytes per sample, and 21 once a label is known.
    """

    def __init__(self, samples: int, alpha: float, window_epochs: int):
        self.alpha = alpha
        self.window_epochs = window_epochs
        self.scores = np.full(samples, np.nan, dtype=np.float32)
        self.observations = np.zeros(samples, dtype=np.int32)
        self.last_epoch = np.full(samples, -1, dtype=np.int32)
        self.quarantined = np.zeros(samples, dtype=np.bool_)
        self.means = np.full(samples, np.nan, dtype=np.float32)
        self.labels: Optional[np.ndarray] = None  # until the first label is known

    def update(self, ids: np.ndarray, losses: np.ndarray, epoch: int, labels: Optional[np.ndarray] = None) -> None:
        """Record losses (nats, shape (k,)) of the samples ``ids`` (shape (k,)), in this order if an id occurs twice.

        ``labels``: their classes, shape (k,), below 0 where there is none. A loss that is not finite quarantines its
        sample and does not change its score. Raises ValueError for an unknown id.
        """
        ids, losses = np.asarray(ids, dtype=np.int64), np.asarray(losses, dtype=np.float64)
        self._check(ids, losses)
        if labels is not None and (self.labels is not None or np.any(np.asarray(labels) >= 0)):
            self.labels = np.full(self.scores.size, -1, dtype=np.int32) if self.labels is None else self.labels
            self.labels[ids] = labels
        finite = np.abs(losses) <= LARGEST_SCORE
        self.quarantined[ids[~finite]] = True
        ids, losses = ids[finite], losses[finite]
        for part in _positions_without_repeats(ids):
            self._record(ids[part], losses[part], epoch)

    def mark_seen(self, ids: np.ndarray, epoch: int) -> None:
        """Record the epoch of samples that were trained on if their losses are not known."""
        self.last_epoch[ids] = np.maximum(self.last_epoch[ids], epoch)

    def stale(self, epoch: int) -> np.ndarray:
        """Return a mask (samples,): not quarantined, seen, but not for more than ``window_epochs`` epochs."""
        return (self.last_epoch >= 0) & (epoch - self.last_epoch > self.window_epochs) & ~self.quarantined

    def quantiles(self) -> dict[str, Optional[float]]:
        """Return the quantiles p0 to p100 of the known scores, in nats; None if no score is known."""
        known = self.scores[~np.isnan(self.scores)]
        values = np.percentile(known, QUANTILES).tolist() if known.size else [None] * len(QUANTILES)
        return {f"p{share}": value for share, value in zip(QUANTILES, values, strict=True)}

    def counts(self, epoch: int) -> dict[str, int]:
        """Return the number of samples that are unseen, stale, and quarantined; each sample is counted at most once."""
        return {
            "unseen": int(np.count_nonzero((self.last_epoch < 0) & ~self.quarantined)),
            "stale": int(np.count_nonzero(self.stale(epoch))),
            "quarantined": int(np.count_nonzero(self.quarantined)),
        }

    def snapshot(self, availability: float = 1.0, costs: Optional[np.ndarray] = None) -> Snapshot:
        """Return a copy that later updates do not change."""
        copies = {name: array.copy() for name, array in self._known().items()}
        return Snapshot(**copies, availability=availability, costs=None if costs is None else costs.copy())

    def view(self, availability: float = 1.0, costs: Optional[np.ndarray] = None) -> Snapshot:
        """Return a snapshot of the live arrays without copying, for decisions before the next update."""
        return Snapshot(**self._known(), availability=availability, costs=costs)

    def _known(self) -> dict[str, np.ndarray]:
        """Return the live arrays by name, ``labels`` only if at least one label is known."""
        arrays = self.arrays()
        if self.labels is not None and not (self.labels >= 0).any():
            del arrays["labels"]
        return arrays

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the live arrays by name, ``labels`` only if that array exists."""
        arrays = {name: getattr(self, name) for name in STATE_TYPES}
        return {name: array for name, array in arrays.items() if array is not None}

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return copies of the arrays by name."""
        return {name: array.copy() for name, array in self.arrays().items()}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Load what ``state_dict`` returned, bit for bit.

        Raises ValueError if an array (other than ``labels``) is missing, or for another number of samples. If reading
        ``state`` from storage fails halfway, some arrays are already replaced.
        """
        for name in STATE_TYPES:
            if name == "labels" and name not in state:
                continue
            if name not in state or np.shape(state[name]) != self.scores.shape:
                found = f"shape {np.shape(state[name])}" if name in state else "missing"
                raise ValueError(f"difficulty state {name!r}: {found}; {self.scores.shape} is needed")
        if "labels" not in state:
            self.labels = None
        elif self.labels is None:
            self.labels = np.full(self.scores.size, -1, dtype=np.int32)
        for name, array in self.arrays().items():
            array[:] = state[name]  # in place: a lazy ``state`` then reads one array at a time

    def _check(self, ids: np.ndarray, losses: np.ndarray) -> None:
        samples = self.scores.size
        if ids.ndim != 1 or ids.shape != losses.shape:
            raise ValueError(f"{ids.shape} sample numbers for {losses.shape} losses; one loss per number is needed")
        if ids.size and (ids.min() < 0 or ids.max() >= samples):
            raise ValueError(f"sample numbers {ids.min()} to {ids.max()}; 0 to {samples - 1} are known")

    def _record(self, ids: np.ndarray, losses: np.ndarray, epoch: int) -> None:
        before = self.scores[ids].astype(np.float64)
        moved = before + self.alpha * (losses - before)
        self.scores[ids] = np.where(self.observations[ids] == 0, losses, moved)
        self.observations[ids] += 1
        mean = np.where(np.isnan(self.means[ids]), 0.0, self.means[ids]).astype(np.float64)
        self.means[ids] = mean + (losses - mean) / self.observations[ids]
        self.last_epoch[ids] = np.maximum(self.last_epoch[ids], epoch)


def _read_only(values: np.ndarray, dtype: type) -> np.ndarray:
    view: np.ndarray = np.asarray(values, dtype=dtype).view()
    view.setflags(write=False)
    return view


def _positions_without_repeats(ids: np.ndarray) -> Iterator[np.ndarray]:
    """Yield positions in ``ids``: the first occurrences of all ids, then the second occurrences, and so on."""
    left = np.arange(ids.size)
    while left.size:
        _, first = np.unique(ids[left], return_index=True)
        yield np.sort(left[first])
        left = np.delete(left, first)
