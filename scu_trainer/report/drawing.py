"""Plots as data: a plot has a title and panels below each other; a panel has lines over one axis.

Colours are indices into a palette, so that the same plot can be drawn for light and dark pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Optional

DASHES: tuple[str | tuple, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
"""Line styles, which distinguish lines without colours."""

INK, MUTED = -1, -2
"""Colours outside the palette: of text, and of lines that are only references."""

MOST_POINTS = 700
"""Points that are drawn of a line: more cannot be distinguished on a screen."""


@dataclass(frozen=True)
class Line:
    """A line through points. ``label``: "" leaves it out of the legend. ``color``: index in the palette. ``faint``:
    drawn thin, as noise behind another line. ``is_step``: each value holds until the next one. ``is_joined``: False
    draws the points only."""

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
class HorizontalLine:
    """A horizontal line over the whole width, with a label."""

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
    """A row with one value: the interval ``low`` to ``high`` around ``value``, and single ``points``. ``value`` None:
    there is no interval. ``note``: a line below ``label``."""

    label: str
    value: Optional[float] = None
    low: Optional[float] = None
    high: Optional[float] = None
    points: Sequence[float] = ()
    note: str = ""
    color: int = 0


@dataclass(frozen=True)
class Panel:
    """One panel. ``from_zero``: the y axis begins at 0. ``whole_x``: all x are whole numbers, such as epochs.
    ``intervals``: rows instead of lines; then ``x_label`` describes their values, and ``zero_line`` marks 0.
    ``height``: relative to the usual one."""

    title: str
    y_label: str = ""
    x_label: str = "optimizer step"
    lines: Sequence[Line] = ()
    levels: Sequence[HorizontalLine] = ()
    bands: Sequence[Band] = ()
    intervals: Sequence[ValueRange] = ()
    from_zero: bool = False
    whole_x: bool = False
    zero_line: bool = False
    height: float = 1.0


@dataclass(frozen=True)
class Plot:
    """One plot. ``key``: the name of its files. ``alt``: a description for readers who cannot see it. ``notes``: what
    is missing, and why; without panels the notes are shown instead of the plot."""

    key: str
    title: str
    panels: Sequence[Panel] = ()
    alt: str = ""
    notes: Sequence[str] = field(default_factory=tuple)


def thinned(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return at most MOST_POINTS of the points: the lowest and the highest of each stretch, so that no peak is lost."""
    if len(x) <= MOST_POINTS:
        return list(x), list(y)
    stretches = max(1, (MOST_POINTS - 2) // 2)
    kept = {0, len(x) - 1}
    for number in range(stretches):
        indices = range(number * len(x) // stretches, (number + 1) * len(x) // stretches)
        kept |= {min(indices, key=lambda i: y[i]), max(indices, key=lambda i: y[i])}
    order = sorted(kept)
    return [x[i] for i in order], [y[i] for i in order]
