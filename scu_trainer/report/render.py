"""Plots as SVG and PNG by matplotlib. One drawing serves light and dark pages: its colours are names until the end.

Text stays text: it can be searched and copied, and is as sharp as the page around it.
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

# Okabe and Ito's colours, distinguished by colour-blind readers too; on dark ground its light ones.
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
TOLD_APART = COLORS * len(DASHES)
"""Of more lines some look alike, and no legend can name them."""

NAMES = tuple(THEMES["light"])
HELD_PLACES = {name: f"#0a0b{number:02x}" for number, name in enumerate(NAMES)}
"""Colours that stand for names until a theme is chosen."""

FONTS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif'
WIDE_IN, NARROW_IN = 9.6, 4.7
PANEL_IN = {WIDE_IN: 2.35, NARROW_IN: 2.15}
FONT_PT = {WIDE_IN: 10.0, NARROW_IN: 10.5}
LETTER, MARK, AXIS_PT = 0.58, 4.6, 60
"""Widths: of a letter and of the mark before a name, both in sizes of the font, and of what stands left of the axes."""

ROW_IN = 0.34
LEAST_SPAN = 0.01
"""Of a y axis, as a share of its values."""

SMALL = 1e-3
"""An axis whose values are all below reads 4e-05, without a factor above it, where the legend is."""

PNG_DPI = 140
AS_IT_STANDS = {"text.parse_math": False}
"""A name with two dollar signs is a name."""


def svg(plot: Plot, width_in: float) -> str:
    """The drawing as an ``<svg>`` element whose colours are CSS variables (``var(--c0)``)."""
    import matplotlib

    options = {"svg.fonttype": "none", "svg.hashsalt": plot.key, "font.size": FONT_PT[width_in], **AS_IT_STANDS}
    buffer = io.StringIO()
    with matplotlib.rc_context(options), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a browser has the letters that the measuring font lacks
        drawn = figure(plot, width_in, HELD_PLACES, with_title=False)
        drawn.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for name, color in HELD_PLACES.items():
        text = text.replace(color, f"var(--{name})")
    return _own_names(_own_fonts(text), f"{plot.key}-{round(width_in)}")


def in_theme(text: str, theme: str, plot: Plot) -> str:
    """An SVG file of its own: the colours of ``theme`` on its ground, with the description inside."""
    for name, color in THEMES[theme].items():
        text = text.replace(f"var(--{name})", color)
    head = text.index(">") + 1
    title, alt = (html.escape(said, quote=False) for said in (plot.title, plot.alt))
    ground = f"<title>{title}</title><desc>{alt}</desc>"
    ground += f'<rect width="100%" height="100%" fill="{THEMES[theme]["ground"]}"/>'
    return '<?xml version="1.0" encoding="utf-8"?>\n' + text[:head] + ground + text[head:]


def png(plot: Plot, theme: str) -> bytes:
    """The drawing as an image, with its title."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"font.size": FONT_PT[WIDE_IN], **AS_IT_STANDS}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # reported by boxed_letters
        drawn = figure(plot, WIDE_IN, THEMES[theme], with_title=True)
        metadata = {"Software": None, "Description": plot.alt}
        drawn.savefig(buffer, format="png", dpi=PNG_DPI, facecolor=THEMES[theme]["ground"], metadata=metadata)
    return buffer.getvalue()


def boxed_letters(plots: Sequence[Plot]) -> str:
    """Letters of the plots that their PNG files show as boxes: the font lacks them."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))
    panels = [panel for plot in plots for panel in plot.panels]
    text = "".join(item.label for panel in panels for item in [*panel.lines, *panel.levels, *panel.intervals])
    return "".join(letter for letter in dict.fromkeys(text) if not font.get_char_index(ord(letter)))


def _own_fonts(text: str) -> str:
    """The page's fonts in the place of the one that widths were measured with, which is a wide one."""
    text = re.sub(r"(font: [^;\"]*?)'[^;\"]*", rf"\1{FONTS.replace(chr(34), chr(39))}", text)
    return re.sub(r'(<svg [^>]*?) width="[^"]*" height="[^"]*"|(<svg [^>]*?) height="[^"]*" width="[^"]*"',
                  lambda found: found[1] or found[2], text, count=1)  # fmt: skip


def _own_names(text: str, prefix: str) -> str:
    """Several drawings in one page must not share ids."""
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", text)


# -- figures -----------------------------------------------------------------------------------------------------------


@functools.cache
def _figure_class() -> type[Figure]:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    class DrawnOnce(Figure):
        """To save a figure is to draw it twice, first into nothing, for its layout: here for that alone."""

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
    """The title begins where the axes do, right of the names of their ticks."""
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
        whole = {"integer": True, "min_n_ticks": 1}  # two ticks beside a single step would be parts of it
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8 if width_in == WIDE_IN else 5, **whole, **nice))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=panel.whole_x and _is_whole(panel), **nice))
        if _largest(panel) < SMALL or _largest(panel) >= 10_000:
            axes.yaxis.set_major_formatter("{x:g}" if _largest(panel) < SMALL else "{x:,.0f}")
    rows, columns = _legend_size(panel, width_in)
    size = FONT_PT[width_in]
    title = "\n".join(_title_lines(panel, width_in))
    axes.set_title(title, loc="left", fontsize=size + 1, pad=7 + rows * _legend_line_pt(width_in), color=colors["ink"])
    axes.set_xlabel(panel.x_label, color=colors["muted"])
    axes.set_ylabel(panel.y_label, color=colors["muted"])
    if rows:
        named = [item for item in [*axes.collections, *axes.lines] if item.get_label() in _labels(panel)]
        axes.legend(
            named, [_folded(item.get_label(), width_in) for item in named],
            loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, frameon=False, borderaxespad=0.1,
            labelcolor=colors["ink"], fontsize=size - 0.5, handlelength=2.4, columnspacing=1.4, borderpad=0.1,
        )  # fmt: skip


def _largest(panel: Panel) -> float:
    return max((abs(value) for line in panel.lines for value in line.y), default=0.0)


def _is_whole(panel: Panel) -> bool:
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
    elif high - low < LEAST_SPAN * abs(high):  # else noise in the last digit would look like an event
        middle = (low + high) / 2
        axes.set_ylim(middle - LEAST_SPAN * abs(middle), middle + LEAST_SPAN * abs(middle))


def _draw_intervals(axes: Axes, panel: Panel, width_in: float, colors: dict[str, str]) -> None:
    """One row per interval, the first on top; every single result is a point."""
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
    """At most a third of the width."""
    label = "\n".join(textwrap.wrap(item.label, int(width_in * 24 / (LETTER * FONT_PT[width_in])))) or item.label
    return f"{label}\n{item.note}" if item.note else label


def _color(number: int, colors: dict[str, str]) -> str:
    named: dict[int, str] = {INK: "ink", MUTED: "muted"}
    return colors[named.get(number, f"c{number % COLORS}")]


def _labels(panel: Panel) -> list[str]:
    shown: list[Any] = [*panel.bands, *panel.levels, *panel.lines]
    return [item.label for item in shown if item.label]


def _legend_size(panel: Panel, width_in: float) -> tuple[int, int]:
    """(lines of text, columns) of a legend above the panel; (0, 1) where the title says it all."""
    labels = [_folded(label, width_in).split("\n") for label in _labels(panel)]
    if not labels:
        return 0, 1
    entry_pt = (max(len(line) for label in labels for line in label) * LETTER + MARK) * FONT_PT[width_in]
    columns = max(1, min(len(labels), int((width_in * 72 - AXIS_PT) / entry_pt)))
    return math.ceil(len(labels) / columns) if columns > 1 else sum(map(len, labels)), columns


def _legend_line_pt(width_in: float) -> float:
    return 1.55 * FONT_PT[width_in]


def _folded(label: str, width_in: float) -> str:
    """A name that is wider than the panel, on several lines: it is not to push the axes aside."""
    most = int(((width_in * 72 - AXIS_PT) / FONT_PT[width_in] - MARK) / LETTER)
    return "\n".join(textwrap.wrap(label, most)) or label
