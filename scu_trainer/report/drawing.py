"""What is drawn, as data: a plot is a title and panels below each other; a panel is lines over one axis.

Colours are numbers into a palette, so that the same plot is drawn for light and dark pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Optional

DASHES: tuple[str | tuple, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
"""Told apart without colours."""

INK, MUTED = -1, -2
"""Colours beside the palette: of text, and of what is only there to compare with."""

MOST_POINTS = 700
"""Of a line: more cannot be distinguished on a screen."""


@dataclass(frozen=True)
class Line:
    """Points joined by a line. ``label``: "" leaves it out of the legend. ``color``: number in the palette. ``faint``:
    noise behind another line. ``is_step``: a value holds until the next one."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    dash: int = 0
    marker: str = ""
    faint: bool = False
    is_step: bool = False
    is_joined: bool = True


@dataclass(frozen=True)
class Level:
    """A horizontal line over the whole width, with its name."""

    y: float
    label: str


@dataclass(frozen=True)
class Band:
    """An area between ``low`` and ``high``."""

    label: str
    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    color: int = 0


@dataclass(frozen=True)
class ValueRange:
    """A value in a row of its own: ``low`` to ``high`` around ``value``, and single ``points``. ``value`` None: only
    ``label``, with ``note`` in the place of the figure."""

    label: str
    value: Optional[float] = None
    low: Optional[float] = None
    high: Optional[float] = None
    points: Sequence[float] = ()
    note: str = ""
    color: int = 0


@dataclass(frozen=True)
class Panel:
    """``from_zero``: the y axis begins at 0. ``intervals``: rows instead of lines; then ``x_label`` is of their values
    and ``zero_line`` marks 0."""

    title: str
    y_label: str = ""
    x_label: str = "optimizer step"
    lines: Sequence[Line] = ()
    levels: Sequence[Level] = ()
    bands: Sequence[Band] = ()
    intervals: Sequence[ValueRange] = ()
    from_zero: bool = False
    whole_x: bool = False
    zero_line: bool = False
    height: float = 1.0


@dataclass(frozen=True)
class Plot:
    """``key``: names its files. ``alt``: what it shows, for those who cannot see it. ``notes``: what is not in it, and
    why. Without panels the notes stand in its place."""

    key: str
    title: str
    panels: Sequence[Panel] = ()
    alt: str = ""
    notes: Sequence[str] = field(default_factory=tuple)


def thinned(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most MOST_POINTS of them, with the lowest and highest of every stretch: no peak is lost."""
    if len(x) <= MOST_POINTS:
        return list(x), list(y)
    stretches = max(1, (MOST_POINTS - 2) // 2)
    kept = {0, len(x) - 1}
    for number in range(stretches):
        indices = range(number * len(x) // stretches, (number + 1) * len(x) // stretches)
        kept |= {min(indices, key=lambda i: y[i]), max(indices, key=lambda i: y[i])}
    order = sorted(kept)
    return [x[i] for i in order], [y[i] for i in order]
