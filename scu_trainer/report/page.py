"""One self-contained HTML page: its content as data, and its rendering by a template."""

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
    """A table. ``head``: titles of all columns. Rows begin with their name. ``keeps_lines``: cells keep line breaks."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    keeps_lines: bool = False
    kind: str = "table"


@dataclass(frozen=True)
class TextBlock:
    """A sentence, or with ``is_code`` a block to copy. ``fold``: the title of a fold that hides it until clicked."""

    text: str
    is_code: bool = False
    fold: str = ""
    kind: str = "text"


@dataclass(frozen=True)
class MarkedText:
    """A text of which parts are highlighted. ``parts``: (text, whether it is highlighted)."""

    caption: str
    parts: Sequence[tuple[str, bool]]
    kind: str = "stretches"


@dataclass(frozen=True)
class Drawing:
    """A plot as SVG in two widths. A plot without panels is shown as its notes."""

    plot: Plot
    wide: str = ""
    narrow: str = ""
    kind: str = "drawing"


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Table | TextBlock | MarkedText | Drawing]


@dataclass(frozen=True)
class Page:
    """The content of a page. ``lead``: the text below the title. ``pills``: (text, style) of the labels next to the
    title, where the style is good, bad, live or calm. ``written``: the text of the footer. ``reload_s``: seconds after
    which an open page reloads itself; None if it does not."""

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
    """Render the page. All text from runs is escaped; only our own drawings, styles and script are not."""
    return environment("scu_trainer.report").get_template("page.html").render(page=page, generator=GENERATOR)


@functools.cache
def environment(*packages: str) -> Environment:
    """Return the Jinja environment for the templates in ``packages``, with the colours and fonts of our drawings."""
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
