"""One self-contained HTML page: what is on it as data, and the template that lays it out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

from scu_trainer.report.drawing import Plot
from scu_trainer.report.render import FONTS, NARROW_IN, THEMES, WIDE_IN, svg

if TYPE_CHECKING:
    from jinja2 import Environment

GENERATOR = "scu-trainer report"


@dataclass(frozen=True)
class Table:
    """``head``: of all columns. Each row begins with its name. ``keeps_lines``: cells are texts with lines."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    keeps_lines: bool = False
    kind: str = "table"


@dataclass(frozen=True)
class Text:
    """A sentence, or with ``is_code`` a block that is copied as it stands; with ``fold`` behind a line to click."""

    text: str
    is_code: bool = False
    fold: str = ""
    kind: str = "text"


@dataclass(frozen=True)
class Stretches:
    """A text in stretches: (text, whether it is marked)."""

    caption: str
    parts: Sequence[tuple[str, bool]]
    kind: str = "stretches"


@dataclass(frozen=True)
class Drawing:
    """A plot in two widths; without panels its notes alone."""

    plot: Plot
    wide: str = ""
    narrow: str = ""
    kind: str = "drawing"


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Table | Text | Stretches | Drawing]


@dataclass(frozen=True)
class Page:
    """``pills``: (text, mood) beside the title, mood one of good, bad, live, calm. ``reload_s``: seconds after which an
    open page reads itself again; None for one that stays as it is."""

    title: str
    lead: str
    pills: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    written: str
    reload_s: Optional[float] = None


def drawing(plot: Plot) -> Drawing:
    if not plot.panels:
        return Drawing(plot)
    return Drawing(plot, svg(plot, WIDE_IN), svg(plot, NARROW_IN))


def html(page: Page) -> str:
    """The whole page. Every word of a run is escaped; only our own drawings, styles and script are not."""
    return environment("scu_trainer.report").get_template("page.html").render(page=page, generator=GENERATOR)


@functools.cache
def environment(*packages: str) -> Environment:
    """Of the templates in ``packages``; the theme is that of our drawings."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    found = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.globals |= {"themes": THEMES, "fonts": FONTS}
    return found
