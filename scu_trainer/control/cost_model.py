"""A model of the memory of a micro-batch, fitted to those that ran: bytes ≈ a + b * tokens + c * rows * length^2.

The bytes are those above the memory in use before the micro-batch. On small language models, three micro-batches of at
least an eighth of the largest one's tokens predicted all others within 6 % with a and b alone, and within 0.5 % with c
where attention scores are kept. Smaller micro-batches mislead the fit (errors of 27 to 1,000 %), because allocators
round up and buffers of a fixed size dominate.

Coefficients are never negative, because a larger micro-batch never takes less memory. c is used only if the observed
micro-batches distinguish it from b, which requires rows of different lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from typing import Any, Optional

import numpy as np

CAPACITY = 32
"""Number of observations that are kept."""

SMALLEST_SHARE = 1 / 8
"""Observations of fewer tokens than this share of the largest one's are left out of the fit."""

SMALLEST_SPAN = 1.5
"""The fit needs observations that differ by this factor in tokens, or slope and offset cannot be distinguished."""

WORTH_MEASURING = 2.0
"""A micro-batch is worth measuring if it is this many times the largest so far, in tokens or rows * length^2."""

LARGEST_EXTRAPOLATION = 8.0
"""Predictions reach this many times beyond the largest observation, in tokens and in rows * length^2."""

WORTHWHILE_RESIDUAL = 0.01
"""c is fitted only if a and b alone leave at least this relative error (root mean square)."""

SMALLEST_DIFFERENCE = 1e-5
"""Columns count as distinguishable if their smallest singular value is at least this share of the largest."""

RECENT = 16
"""Number of newest observations whose residuals enter the margin."""

LARGEST_SHORTFALL = 0.5
"""Bound on the part of the margin that comes from residuals: one outlier must not rule out every size."""


@dataclass(frozen=True)
class MicroBatchCost:
    """One micro-batch that ran. ``quadratic``: rows * length^2. ``bytes``: its peak minus the use before it."""

    tokens: int
    quadratic: int
    bytes: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.tokens, self.quadratic)


@dataclass(frozen=True)
class Coefficients:
    """``fixed`` in bytes, ``per_token`` in bytes per padded token, ``per_square`` in bytes per rows * length^2."""

    fixed: float
    per_token: float
    per_square: float

    def bytes_of(self, tokens: float, quadratic: float) -> float:
        return self.fixed + self.per_token * tokens + self.per_square * quadratic


@dataclass(frozen=True)
class CostModel:
    """The observations, oldest first, one per shape; everything else is computed from them."""

    observations: tuple[MicroBatchCost, ...] = ()

    def observe(self, tokens: int, quadratic: int, bytes_: int) -> CostModel:
        """Return the model with one more observation. One of 0 bytes fitted into memory held already and is ignored."""
        newest = MicroBatchCost(tokens, quadratic, bytes_)
        if min(tokens, quadratic, bytes_) <= 0 or newest in self.observations:
            return self
        kept = [old for old in self.observations if old.shape != newest.shape]
        return CostModel(tuple(_most_diverse([*kept, newest])))

    @property
    def fitted(self) -> bool:
        return self.coefficients is not None

    @cached_property
    def coefficients(self) -> Optional[Coefficients]:
        """The least-squares fit to the usable observations; None while there are too few or they are too similar."""
        usable = self._usable
        if len(usable) < 3 or usable[-1].tokens < SMALLEST_SPAN * usable[0].tokens:
            return None
        linear = _least_squares(usable, (0, 1))
        if len(usable) < 4 or _relative_error(linear, usable) < WORTHWHILE_RESIDUAL:
            return linear
        curved = _least_squares(usable, (0, 1, 2))
        # A third coefficient always fits slightly better, so it must halve the squared error.
        return curved if _squared_error(curved, usable) < 0.5 * _squared_error(linear, usable) else linear

    @cached_property
    def shortfall(self) -> float:
        """Largest relative amount by which a recent observation exceeded its prediction."""
        if self.coefficients is None:
            return 0.0
        recent = [item for item in self.observations[-RECENT:] if item.tokens >= self._usable[0].tokens]
        excess = [item.bytes / self.coefficients.bytes_of(*item.shape) - 1.0 for item in recent]
        return min(LARGEST_SHORTFALL, max([0.0, *excess]))

    def predict(self, tokens: int, quadratic: int) -> Optional[float]:
        """Return the predicted bytes of a micro-batch, without margin; None without a fit or far beyond it."""
        if self.coefficients is None or tokens > self._tokens_in_reach or quadratic > self._quadratic_in_reach:
            return None
        return self.coefficients.bytes_of(tokens, quadratic)

    def is_worth_measuring(self, tokens: int, quadratic: int) -> bool:
        """Whether a micro-batch is so much larger than all observed ones that measuring it improves the fit."""
        share = WORTH_MEASURING / LARGEST_EXTRAPOLATION
        return tokens > share * self._tokens_in_reach or quadratic > share * self._quadratic_in_reach

    def upper_bound_bytes(self, tokens: int, quadratic: int) -> float:
        """Return an upper bound on the bytes of a micro-batch of any size; infinite without observations.

        Coefficients are not negative, so bytes grow no faster than the faster of tokens and rows * length^2.
        """
        bounds = (item.bytes * max(1.0, tokens / item.tokens, quadratic / item.quadratic) for item in self._usable)
        return min(bounds, default=math.inf)

    def largest_tokens(self, budget_bytes: float, length: int, margin: float = 0.08) -> Optional[int]:
        """Return how many padded tokens, in rows of ``length`` tokens, fit in ``budget_bytes`` with ``margin`` added.

        The margin is relative, and ``shortfall`` is added to it. The result is 0 if nothing fits, None if the model
        cannot tell, and never beyond the range in which the model extrapolates.
        """
        reach = min(self._tokens_in_reach, self._quadratic_in_reach / length)
        if self.coefficients is None or reach < 1:
            return None
        bytes_per_token = self.coefficients.per_token + self.coefficients.per_square * length
        room_bytes = budget_bytes / (1.0 + margin + self.shortfall) - self.coefficients.fixed
        if room_bytes < 0:
            return 0
        return int(min(reach, room_bytes / bytes_per_token)) if bytes_per_token > 0 else int(reach)

    def to_dict(self) -> dict[str, Any]:
        return {"observations": [[item.tokens, item.quadratic, item.bytes] for item in self.observations]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CostModel:
        return cls(tuple(MicroBatchCost(*numbers) for numbers in values["observations"]))

    @cached_property
    def _usable(self) -> list[MicroBatchCost]:
        """Observations that are large enough for the fit, by ascending tokens."""
        largest = max((item.tokens for item in self.observations), default=0)
        usable = [item for item in self.observations if item.tokens >= SMALLEST_SHARE * largest]
        return sorted(usable, key=lambda item: item.shape)

    @cached_property
    def _tokens_in_reach(self) -> float:
        return LARGEST_EXTRAPOLATION * max((item.tokens for item in self.observations), default=0)

    @cached_property
    def _quadratic_in_reach(self) -> float:
        return LARGEST_EXTRAPOLATION * max((item.quadratic for item in self.observations), default=0)


def _most_diverse(observations: list[MicroBatchCost]) -> list[MicroBatchCost]:
    """Return at most CAPACITY of ``observations`` (oldest first), without the older one of the two most similar, so
    that many similar ones never displace the rest."""
    if len(observations) <= CAPACITY:
        return observations
    by_size = sorted(range(len(observations)), key=lambda i: observations[i].shape)
    alike = min(pairwise(by_size), key=lambda pair: _log_distance(observations[pair[0]], observations[pair[1]]))
    dropped = min(alike)
    return [item for i, item in enumerate(observations) if i != dropped]


def _log_distance(a: MicroBatchCost, b: MicroBatchCost) -> float:
    return abs(math.log(a.tokens / b.tokens)) + abs(math.log(max(1, a.quadratic) / max(1, b.quadratic)))


def _least_squares(observations: Sequence[MicroBatchCost], columns: Sequence[int]) -> Coefficients:
    """Fit non-negative coefficients for the given ``columns`` of (1, tokens, quadratic).

    If the plain solution has a negative coefficient or the columns are not distinguishable, one column is left out: the
    one whose removal gives the smallest squared error.
    """
    table = np.array([(1.0, *item.shape, item.bytes) for item in observations], dtype=float)
    scales = table.max(axis=0)
    scaled, used = table / scales, list(columns)
    solution, _, rank, _ = np.linalg.lstsq(scaled[:, used], scaled[:, 3], rcond=SMALLEST_DIFFERENCE)
    if rank < len(used) or solution.min() < 0:
        fits = [_least_squares(observations, fewer) for fewer in combinations(used, len(used) - 1)]
        return min(fits, key=lambda fit: _squared_error(fit, observations))
    coefficients = np.zeros(3)
    coefficients[used] = solution * scales[3] / scales[used]
    return Coefficients(*coefficients.tolist())


def _squared_error(fit: Coefficients, observations: Iterable[MicroBatchCost]) -> float:
    return sum((fit.bytes_of(*item.shape) - item.bytes) ** 2 for item in observations)


def _relative_error(fit: Coefficients, observations: Sequence[MicroBatchCost]) -> float:
    """Return the root mean square of the residuals, relative to the mean of the observed bytes."""
    mean_bytes = sum(item.bytes for item in observations) / len(observations)
    return math.sqrt(_squared_error(fit, observations) / len(observations)) / mean_bytes
