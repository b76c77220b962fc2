"""What a micro-batch will take, learned from those that ran: bytes above its base ≈ a + b * tokens + c * rows *
length^2.

Measured on small language models, three micro-batches of at least an eighth of the largest predict the rest within 6 %
with a and b alone, within 0.5 % where attention scores are kept and c belongs in. Micro-batches smaller than that
mislead (by 27 to 1,000 %): allocators round, and buffers of a fixed size outweigh what grows.

Coefficients are never negative: a micro-batch does not get cheaper by growing. c joins only where the micro-batches
that ran tell it apart from b, which takes rows of different lengths.
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
"""Observations kept."""

SMALLEST_SHARE = 1 / 8
"""Observations of fewer tokens than this share of the largest one's are left out of the fit."""

SMALLEST_SPAN = 1.5
"""The fit needs observations that differ by this factor in tokens, or slope and offset cannot be distinguished."""

WORTH_MEASURING = 2.0
"""Times as large as all that ran, in tokens or rows * length^2: from there on a micro-batch tells something new."""

LARGEST_EXTRAPOLATION = 8.0
"""Predictions reach this many times beyond the largest observation, in tokens and in rows * length^2."""

WORTHWHILE_RESIDUAL = 0.01
"""c is looked for only if a and b alone leave this relative error (root mean square)."""

SMALLEST_DIFFERENCE = 1e-5
"""Smallest singular value, as a share of the largest, of columns that can be told apart."""

RECENT = 16
"""Observations whose residuals count for the margin."""

LARGEST_SHORTFALL = 0.5
"""Bound on the part of the margin that comes from residuals: one outlier must not rule out every size."""


@dataclass(frozen=True)
class Observation:
    """One micro-batch that ran. ``bytes``: its peak above what was in use before it."""

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
    """Observations, oldest first, one per shape; everything else follows from them."""

    observations: tuple[Observation, ...] = ()

    def observe(self, tokens: int, quadratic: int, bytes_: int) -> CostModel:
        """The model after one more micro-batch. A micro-batch that took nothing new, within memory held already, says
        nothing."""
        newest = Observation(tokens, quadratic, bytes_)
        if min(tokens, quadratic, bytes_) <= 0 or newest in self.observations:
            return self
        kept = [old for old in self.observations if old.shape != newest.shape]
        return CostModel(tuple(_spread([*kept, newest])))

    @property
    def fitted(self) -> bool:
        return self.coefficients is not None

    @cached_property
    def coefficients(self) -> Optional[Coefficients]:
        """Least squares over the usable observations; None while they are too few or too alike."""
        usable = self._usable
        if len(usable) < 3 or usable[-1].tokens < SMALLEST_SPAN * usable[0].tokens:
            return None
        linear = _least_squares(usable, (0, 1))
        if len(usable) < 4 or _relative_error(linear, usable) < WORTHWHILE_RESIDUAL:
            return linear
        curved = _least_squares(usable, (0, 1, 2))
        # A third coefficient always fits a little better; it has to earn its place.
        return curved if _squares(curved, usable) < 0.5 * _squares(linear, usable) else linear

    @cached_property
    def shortfall(self) -> float:
        """Largest relative excess of a recent observation over its prediction: how far the fit may be too low."""
        if self.coefficients is None:
            return 0.0
        recent = [seen for seen in self.observations[-RECENT:] if seen.tokens >= self._usable[0].tokens]
        excess = [seen.bytes / self.coefficients.bytes_of(*seen.shape) - 1.0 for seen in recent]
        return min(LARGEST_SHORTFALL, max([0.0, *excess]))

    def predict(self, tokens: int, quadratic: int) -> Optional[float]:
        """Bytes above the base, without any margin. None before the fit, and for micro-batches far beyond those that
        ran."""
        if self.coefficients is None or tokens > self._tokens_in_reach or quadratic > self._quadratic_in_reach:
            return None
        return self.coefficients.bytes_of(tokens, quadratic)

    def is_news(self, tokens: int, quadratic: int) -> bool:
        """Whether a micro-batch is much larger than all that ran."""
        share = WORTH_MEASURING / LARGEST_EXTRAPOLATION
        return tokens > share * self._tokens_in_reach or quadratic > share * self._quadratic_in_reach

    def most(self, tokens: int, quadratic: int) -> float:
        """Bytes above the base that are not exceeded, however large the micro-batch: as coefficients are not negative,
        nothing grows faster than both tokens and rows * length^2."""
        bounds = (seen.bytes * max(1.0, tokens / seen.tokens, quadratic / seen.quadratic) for seen in self._usable)
        return min(bounds, default=math.inf)

    def largest_tokens(self, budget_bytes: float, length: int, margin: float = 0.08) -> Optional[int]:
        """Most padded tokens, in rows of ``length`` tokens, that take at most ``budget_bytes`` with ``margin`` added.

        The margin is relative and grows by ``shortfall``. 0 if nothing fits; None if the model cannot say; never more
        than the model's reach.
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
        return {"observations": [[seen.tokens, seen.quadratic, seen.bytes] for seen in self.observations]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CostModel:
        return cls(tuple(Observation(*numbers) for numbers in values["observations"]))

    @cached_property
    def _usable(self) -> list[Observation]:
        """Observations large enough to be trusted, by ascending tokens."""
        largest = max((seen.tokens for seen in self.observations), default=0)
        usable = [seen for seen in self.observations if seen.tokens >= SMALLEST_SHARE * largest]
        return sorted(usable, key=lambda seen: seen.shape)

    @cached_property
    def _tokens_in_reach(self) -> float:
        return LARGEST_EXTRAPOLATION * max((seen.tokens for seen in self.observations), default=0)

    @cached_property
    def _quadratic_in_reach(self) -> float:
        return LARGEST_EXTRAPOLATION * max((seen.quadratic for seen in self.observations), default=0)


def _spread(observations: list[Observation]) -> list[Observation]:
    """At most CAPACITY observations: the older of the two most alike goes, so that many alike never push out the rest.

    ``observations``: oldest first.
    """
    if len(observations) <= CAPACITY:
        return observations
    by_size = sorted(range(len(observations)), key=lambda i: observations[i].shape)
    alike = min(pairwise(by_size), key=lambda pair: _distance(observations[pair[0]], observations[pair[1]]))
    dropped = min(alike)
    return [seen for i, seen in enumerate(observations) if i != dropped]


def _distance(one: Observation, other: Observation) -> float:
    return abs(math.log(one.tokens / other.tokens)) + abs(math.log(max(1, one.quadratic) / max(1, other.quadratic)))


def _least_squares(observations: Sequence[Observation], columns: Sequence[int]) -> Coefficients:
    """Non-negative least squares in the named ``columns`` of (1, tokens, quadratic).

    Where the plain solution has a negative coefficient, or cannot tell the columns apart, one of them is left out.
    """
    table = np.array([(1.0, *seen.shape, seen.bytes) for seen in observations], dtype=float)
    scales = table.max(axis=0)
    scaled, used = table / scales, list(columns)
    solution, _, rank, _ = np.linalg.lstsq(scaled[:, used], scaled[:, 3], rcond=SMALLEST_DIFFERENCE)
    if rank < len(used) or solution.min() < 0:
        fits = [_least_squares(observations, fewer) for fewer in combinations(used, len(used) - 1)]
        return min(fits, key=lambda fit: _squares(fit, observations))
    found = np.zeros(3)
    found[used] = solution * scales[3] / scales[used]
    return Coefficients(*found.tolist())


def _squares(fit: Coefficients, observations: Iterable[Observation]) -> float:
    return sum((fit.bytes_of(*seen.shape) - seen.bytes) ** 2 for seen in observations)


def _relative_error(fit: Coefficients, observations: Sequence[Observation]) -> float:
    """Root mean square of the residuals over the mean of what was observed."""
    mean_bytes = sum(seen.bytes for seen in observations) / len(observations)
    return math.sqrt(_squares(fit, observations) / len(observations)) / mean_bytes
