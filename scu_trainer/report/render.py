"""Draw plots as SVG and PNG with matplotlib. One SVG serves light and dark pages: its colours are variables.

Text in an SVG stays text, so that it can be searched and copied, and is as sharp as the page around it.
"""

from __future__ import annotations

import functools
import html
import io
import math
import re
import textwrap
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scu_trainer.report.drawing import DASHES, INK, MUTED, Panel, Plot, ValueRange, thinned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colours of Okabe and Ito, which colour-blind readers can distinguish too; the light ones on a dark ground.
THEMES: dict[str, dict[str, str]] = {
    "light": {
        "c0": "#0072b2", "c1": "#d55e00", "c2": "#009e73", "c3": "#cc79a7", "c4": "#e69f00", "c5": "#56b4e9",
        "c6": "#000000", "ink": "#1b1f24", "muted": "#59636e", "grid": "#d8dde3", "ground": "#ffffff",
    },
    "dark": {
        "c0": "#56b4e9", "c1": "#e69f00", "c2": "#009e73", "c3": "#cc79a7", "c4": "#f0e442", "c5": "#d55e00",
        "c6": "#ffffff", "ink": "#e8eaed", "muted": "#a3adb8", "grid": "#333a42", "ground": "#15181c",
    },
}  # fmt: skip
COLORS = 7
MOST_DISTINCT_LINES = COLORS * len(DASHES)
"""How many lines look different. With more, a legend could not name them."""

NAMES = tuple(THEMES["light"])
HELD_PLACES = {name: f"#0a0b{number:02x}" for number, name in enumerate(NAMES)}
"""Placeholder colours, which ``svg`` replaces by CSS variables."""

FONTS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif'
WIDE_IN, NARROW_IN = 9.6, 4.7
PANEL_IN = {WIDE_IN: 2.35, NARROW_IN: 2.15}
FONT_PT = {WIDE_IN: 10.0, NARROW_IN: 10.5}
LETTER, MARK, AXIS_PT = 0.58, 4.6, 60
"""Widths: of a letter and of a legend mark, in multiples of the font size; of the space left of the axes, in pt."""

ROW_IN = 0.34
LEAST_SPAN = 0.01
"""Smallest span of a y axis, as a share of its values."""

SMALL = 1e-3
"""The ticks of an axis with only smaller values read 4e-05, because a common factor would overlap the legend."""

PNG_DPI = 140
AS_IT_STANDS = {"text.parse_math": False}
"""Options that keep dollar signs in names from being read as formulas."""


def svg(plot: Plot, width_in: float) -> str:
    """Return the plot as an ``<svg>`` element whose colours are CSS variables (``var(--c0)``)."""
    import matplotlib

    options = {"svg.fonttype": "none", "svg.hashsalt": plot.key, "font.size": FONT_PT[width_in], **AS_IT_STANDS}
    buffer = io.StringIO()
    with matplotlib.rc_context(options), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the browser has letters that matplotlib's font lacks
        drawn = figure(plot, width_in, HELD_PLACES, with_title=False)
        drawn.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for name, color in HELD_PLACES.items():
        text = text.replace(color, f"var(--{name})")
    return _with_unique_ids(_with_page_fonts(text), f"{plot.key}-{round(width_in)}")


def in_theme(text: str, theme: str, plot: Plot) -> str:
    """Return ``text``, an SVG element, as a standalone SVG file with the colours of ``theme`` and a description."""
    for name, color in THEMES[theme].items():
        text = text.replace(f"var(--{name})", color)
    head = text.index(">") + 1
    title, alt = (html.escape(said, quote=False) for said in (plot.title, plot.alt))
    ground = f"<title>{title}</title><desc>{alt}</desc>"
    ground += f'<rect width="100%" height="100%" fill="{THEMES[theme]["ground"]}"/>'
    return '<?xml version="1.0" encoding="utf-8"?>\n' + text[:head] + ground + text[head:]


def png(plot: Plot, theme: str) -> bytes:
    """Return the plot as a PNG image, with its title."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"font.size": FONT_PT[WIDE_IN], **AS_IT_STANDS}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # reported by boxed_letters
        drawn = figure(plot, WIDE_IN, THEMES[theme], with_title=True)
        metadata = {"Software": None, "Description": plot.alt}
        drawn.savefig(buffer, format="png", dpi=PNG_DPI, facecolor=THEMES[theme]["ground"], metadata=metadata)
    return buffer.getvalue()


def boxed_letters(plots: Sequence[Plot]) -> str:
    """Return the letters in ``plots`` that PNG files show as boxes, because the font lacks them."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))
    panels = [panel for plot in plots for panel in plot.panels]
    text = "".join(item.label for panel in panels for item in [*panel.lines, *panel.levels, *panel.intervals])
    return "".join(letter for letter in dict.fromkeys(text) if not font.get_char_index(ord(letter)))


def _with_page_fonts(text: str) -> str:
    """Replace the font that matplotlib measured widths with, a wide one, by the fonts of the page."""
    text = re.sub(r"(font: [^;\"]*?)'[^;\"]*", rf"\1{FONTS.replace(chr(34), chr(39))}", text)
    return re.sub(r'(<svg [^>]*?) width="[^"]*" height="[^"]*"|(<svg [^>]*?) height="[^"]*" width="[^"]*"',
                  lambda found: found[1] or found[2], text, count=1)  # fmt: skip


def _with_unique_ids(text: str, prefix: str) -> str:
    """Prefix all ids of an SVG, because several drawings in one page must not share them."""
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", text)


# -- figures -----------------------------------------------------------------------------------------------------------


@functools.cache
def _figure_class() -> type[Figure]:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    class DrawnOnce(Figure):
        """A figure whose first drawing computes the layout only: saving draws it twice, the first time for that."""

        def draw(self, renderer):
            engine = self.get_layout_engine()
            if isinstance(engine, ConstrainedLayoutEngine):
                engine.execute(self)
            else:
                super().draw(renderer)

    return DrawnOnce


def figure(plot: Plot, width_in: float, colors: dict[str, str], with_title: bool) -> Figure:
    heights = [_height_in(panel, width_in) for panel in plot.panels]
    drawn = _figure_class()(figsize=(width_in, sum(heights) + 0.35 * with_title), layout="constrained")
    drawn.get_layout_engine().set(h_pad=0.09, w_pad=0.03, hspace=0.02)
    axes = drawn.subplots(len(plot.panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for place, panel in zip(axes, plot.panels, strict=True):
        _draw(place, panel, width_in, colors)
    steps = [place for place, panel in zip(axes, plot.panels, strict=True) if not panel.whole_x and not panel.intervals]
    if len(steps) > 1:  # panels below each other show the same steps
        ends = [place.get_xlim() for place in steps]
        for place in steps:
            place.set_xlim(min(low for low, _ in ends), max(high for _, high in ends))
    drawn.align_ylabels(axes)
    if with_title:
        drawn.suptitle(plot.title, x=0.01, ha="left", fontweight="bold", color=colors["ink"])
    return drawn


def _height_in(panel: Panel, width_in: float) -> float:
    more_lines = len(_title_lines(panel, width_in)) - 1
    if panel.intervals:
        return 1.15 + ROW_IN * len(panel.intervals) + 0.2 * more_lines
    rows = _legend_size(panel, width_in)[0]
    return PANEL_IN[width_in] * panel.height + 0.2 * more_lines + max(0, rows - 1) * _legend_line_pt(width_in) / 72


def _title_lines(panel: Panel, width_in: float) -> list[str]:
    """Wrap the title to the width of the axes: it begins where they do, to the right of their tick labels."""
    rows = [_row_name(item, width_in) for item in panel.intervals]
    names = max((len(line) for row in rows for line in row.split("\n")), default=8)
    room_pt = width_in * 72 - 20 - names * 0.6 * FONT_PT[width_in]
    return textwrap.wrap(panel.title, max(12, int(room_pt / (0.55 * (FONT_PT[width_in] + 1)))))


def _draw(axes: Axes, panel: Panel, width_in: float, colors: dict[str, str]) -> None:
    from matplotlib.ticker import MaxNLocator

    _style(axes, colors)
    if panel.intervals:
        _draw_intervals(axes, panel, width_in, colors)
    else:
        _draw_lines(axes, panel, colors)
        nice = {"steps": [1, 2, 2.5, 5, 10]}
        whole = {"integer": True, "min_n_ticks": 1}  # with two ticks, those around a single step would be fractions
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8 if width_in == WIDE_IN else 5, **whole, **nice))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=panel.whole_x and _has_whole_values(panel), **nice))
        if _largest_value(panel) < SMALL or _largest_value(panel) >= 10_000:
            axes.yaxis.set_major_formatter("{x:g}" if _largest_value(panel) < SMALL else "{x:,.0f}")
    rows, columns = _legend_size(panel, width_in)
    size = FONT_PT[width_in]
    title = "\n".join(_title_lines(panel, width_in))
    axes.set_title(title, loc="left", fontsize=size + 1, pad=7 + rows * _legend_line_pt(width_in), color=colors["ink"])
    axes.set_xlabel(panel.x_label, color=colors["muted"])
    axes.set_ylabel(panel.y_label, color=colors["muted"])
    if rows:
        named = [item for item in [*axes.collections, *axes.lines] if item.get_label() in _labels(panel)]
        axes.legend(
            named, [_wrapped_label(item.get_label(), width_in) for item in named],
            loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, frameon=False, borderaxespad=0.1,
            labelcolor=colors["ink"], fontsize=size - 0.5, handlelength=2.4, columnspacing=1.4, borderpad=0.1,
        )  # fmt: skip


def _largest_value(panel: Panel) -> float:
    return max((abs(value) for line in panel.lines for value in line.y), default=0.0)


def _has_whole_values(panel: Panel) -> bool:
    return all(float(value).is_integer() for line in panel.lines for value in line.y)


def _style(axes: Axes, colors: dict[str, str]) -> None:
    axes.set_facecolor("none")
    axes.grid(color=colors["grid"], linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(colors["grid"])
    axes.tick_params(color=colors["grid"], labelcolor=colors["muted"])
    axes.ticklabel_format(style="plain", useOffset=False)


def _draw_lines(axes: Axes, panel: Panel, colors: dict[str, str]) -> None:
    for band in panel.bands:
        paint = _color(band.color, colors)
        axes.fill_between(band.x, band.low, band.high, color=paint, alpha=0.16, linewidth=0, label=band.label or None)
    for level in panel.levels:
        axes.axhline(level.y, color=colors["muted"], linewidth=1.2, linestyle=(0, (4, 3)), label=level.label or None)
    for line in panel.lines:
        x, y = thinned(line.x, line.y)
        axes.plot(
            x, y, color=_color(line.color, colors), linestyle=DASHES[line.dash % len(DASHES)] if line.is_joined else "",
            marker="o" if len(x) == 1 and line.is_joined else line.marker, markersize=7 if not line.is_joined else 4,
            linewidth=0.9 if line.faint else 1.8, alpha=0.4 if line.faint else 1.0, label=line.label or None,
            drawstyle="steps-post" if line.is_step else "default", zorder=2 if line.faint else 3,
        )  # fmt: skip
    axes.margins(x=0.02)
    low, high = axes.get_ylim()
    if panel.from_zero:
        axes.set_ylim(0, 1.04 * high if high > 0 and any(max(line.y) > 0 for line in panel.lines) else 1)
    elif high - low < LEAST_SPAN * abs(high):  # otherwise noise in the last digit would look like a change
        middle = (low + high) / 2
        axes.set_ylim(middle - LEAST_SPAN * abs(middle), middle + LEAST_SPAN * abs(middle))


def _draw_intervals(axes: Axes, panel: Panel, width_in: float, colors: dict[str, str]) -> None:
    """Draw one row per interval, the first on top, and each single result as a point."""
    for row, item in enumerate(panel.intervals):
        paint = _color(item.color, colors)
        axes.plot(item.points, [row + 0.2] * len(item.points), "o", color=paint, alpha=0.55, markersize=4.5, mew=0)
        if item.value is not None:
            if item.low is not None and item.high is not None:
                axes.plot([item.low, item.high], [row, row], color=paint, linewidth=2.2, solid_capstyle="butt")
            axes.plot([item.value], [row], "D", color=paint, markersize=6)
    axes.set_yticks(range(len(panel.intervals)), [_row_name(item, width_in) for item in panel.intervals])
    axes.tick_params(axis="y", labelcolor=colors["ink"], length=0)
    axes.set_ylim(len(panel.intervals) - 0.4, -0.6)
    if panel.zero_line:
        axes.axvline(0, color=colors["ink"], linewidth=1.2)
    axes.margins(x=0.05)


def _row_name(item: ValueRange, width_in: float) -> str:
    """Return the label of a row, wrapped to a third of the width, and its note."""
    label = "\n".join(textwrap.wrap(item.label, int(width_in * 24 / (LETTER * FONT_PT[width_in])))) or item.label
    return f"{label}\n{item.note}" if item.note else label


def _color(number: int, colors: dict[str, str]) -> str:
    named: dict[int, str] = {INK: "ink", MUTED: "muted"}
    return colors[named.get(number, f"c{number % COLORS}")]


def _labels(panel: Panel) -> list[str]:
    shown: list[Any] = [*panel.bands, *panel.levels, *panel.lines]
    return [item.label for item in shown if item.label]


def _legend_size(panel: Panel, width_in: float) -> tuple[int, int]:
    """Return (lines of text, columns) of the legend above a panel; (0, 1) without a legend."""
    labels = [_wrapped_label(label, width_in).split("\n") for label in _labels(panel)]
    if not labels:
        return 0, 1
    entry_pt = (max(len(line) for label in labels for line in label) * LETTER + MARK) * FONT_PT[width_in]
    columns = max(1, min(len(labels), int((width_in * 72 - AXIS_PT) / entry_pt)))
    return math.ceil(len(labels) / columns) if columns > 1 else sum(map(len, labels)), columns


def _legend_line_pt(width_in: float) -> float:
    return 1.55 * FONT_PT[width_in]


def _wrapped_label(label: str, width_in: float) -> str:
    """Wrap a name that is wider than the panel, because it would shrink the axes otherwise."""
    most = int(((width_in * 72 - AXIS_PT) / FONT_PT[width_in] - MARK) / LETTER)
    return "\n".join(textwrap.wrap(label, most)) or label
