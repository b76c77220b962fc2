"""The plots of one run, or of several overlaid, from their files. A run without rows for a plot is listed in a note
with the reason. A plot without any rows consists of these notes only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Optional

from scu_trainer.figures import bits_of, first_few
from scu_trainer.report.drawing import MUTED, Band, HorizontalLine, Line, Panel, Plot
from scu_trainer.report.files import LOG_FILE, Row, RunFiles, newest, points
from scu_trainer.report.render import MOST_DISTINCT_LINES
from scu_trainer.report.statistics_plots import curriculum_panels

GIB = 2**30
SAME_SCORE = 0.002
"""Relative difference up to which an evaluation in batches and the scoring of documents count as the same score: they
round and average differently."""
FAR_LIMIT = 2.5
"""A limit of this many times the peak is written in the title, because drawing it would flatten all other lines."""
MOST_NAMED = 8
SCORES = ("eval_bpt", "eval_loss")

Draw = Callable[[Sequence[RunFiles]], list[Panel]]


def run_plots(runs: Sequence[RunFiles]) -> list[Plot]:
    """Return all plots of a report, in the order of the page."""
    kinds: tuple[tuple[str, str, Draw, Callable[[RunFiles], str]], ...] = (
        ("loss", "Loss and held-out bits", _loss_panels, why_no_loss),
        ("s", "S: the share of the trained weights", _s_panels, why_no_s),
        ("memory", "Memory and micro-batches", _memory_panels, why_no_memory),
        ("throughput", "Throughput", partial(_logged_panels, figures=SPEEDS), why_no_throughput),
        ("curriculum", "Curriculum statistics", curriculum_panels, why_no_curriculum),
        ("rate", "Learning rate and gradient", partial(_logged_panels, figures=RATES), why_no_loss),
    )
    loss, *others = (_plot(key, title, draw, why, runs) for key, title, draw, why in kinds)
    said = _notes(runs, why_half_a_loss, is_alone=len(runs) == 1)
    return [replace(loss, notes=[*dict.fromkeys([*loss.notes, *said])]), *others]


def _plot(key: str, title: str, draw: Draw, why: Callable[[RunFiles], str], runs: Sequence[RunFiles]) -> Plot:
    panels = [panel for panel in draw(runs) if panel.lines or panel.bands]
    empty = [run for run in runs if not draw([run])]
    notes = _notes(empty, why, is_alone=len(runs) == 1)
    shown = (
        panels
        if 1 < len(runs) <= MOST_DISTINCT_LINES
        else [_without_needless_legend(panel, len(runs)) for panel in panels]
    )
    return Plot(key, title, shown, _alt_text(title, panels, runs), notes)


def _notes(runs: Sequence[RunFiles], why: Callable[[RunFiles], str], is_alone: bool) -> list[str]:
    """Return each reason once, after the names of the runs that it applies to. Runs without a reason are left out."""
    names: dict[str, list[str]] = {}
    for run in runs:
        names.setdefault(why(run), []).append(run.name)
    return [reason if is_alone else f"{first_few(of, MOST_NAMED)}: {reason}" for reason, of in names.items() if reason]


def _without_needless_legend(panel: Panel, runs: int) -> Panel:
    """Remove the legend of a panel with a single line, which the title names, and of more than MOST_DISTINCT_LINES
    runs, whose legend would be unreadable and take most of the time that a report takes."""
    if runs == 1 and (len(panel.lines) > 1 or panel.levels or panel.bands):
        return panel
    return replace(panel, lines=[replace(line, label="") for line in panel.lines])


def _alt_text(title: str, panels: Sequence[Panel], runs: Sequence[RunFiles]) -> str:
    """Describe a plot: its panels, and the last value of each line."""
    said = [f"{title} of {', '.join(run.name for run in runs)}."]
    for panel in panels:
        ends = [f"{line.label or 'line'} ends at {number(line.y[-1])}" for line in panel.lines if line.label and line.y]
        said.append(f"{panel.title}: {'; '.join(ends)}." if ends else f"{panel.title}.")
    return " ".join(said)


def number(value: Optional[float]) -> str:
    """Format a number for people: four digits, and commas in thousands; "-" if it is missing or not finite."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


class Style:
    """The looks of lines: they differ by quantity in plots of one run, and by run in plots of several."""

    def __init__(self, runs: Sequence[RunFiles]) -> None:
        self.is_alone = len(runs) == 1
        self._runs = list(runs)

    def line(
        self, run: RunFiles, label: str, xy: tuple[Sequence[float], Sequence[float]], color: int = 0, **looks
    ) -> Line:
        place = 0 if self.is_alone else self._runs.index(run)
        name = label if self.is_alone else run.name if label else ""
        return Line(name, *xy, color=color if self.is_alone else place, dash=0 if self.is_alone else place, **looks)


def _not_empty(lines: Iterable[Line]) -> list[Line]:
    return [line for line in lines if len(line.x)]


# -- loss --------------------------------------------------------------------------------------------------------------


def in_bits(run: RunFiles) -> bool:
    """Whether the losses of the run can be drawn in bits. Only the command writes a unit to run.json."""
    is_scored = any("eval_bpt" in row for row in run.logs) or any("data_bpt" in row for row in run.control[:1])
    return is_scored or bool(run.status.get("unit"))


def _loss_panels(runs: Sequence[RunFiles]) -> list[Panel]:
    style = Style(runs)
    is_bits = all(in_bits(run) for run in runs if run.logs or run.control)
    unit = f"bits per {' or '.join(dict.fromkeys(run.unit for run in runs))}" if is_bits else "loss"
    factor = bits_of(1.0) if is_bits else 1.0
    training = Panel("Training loss", unit, lines=_not_empty(_training_lines(runs, style, factor, is_bits)))
    held_out = Panel(_held_out_title(runs), unit, lines=_not_empty(_held_out_lines(runs, style, is_bits)))
    right = [style.line(run, "accuracy", points(run.logs, "eval_accuracy", factor=100), 2, marker="o") for run in runs]
    accuracy = Panel("Held-out accuracy", "%", lines=_not_empty(right))
    return [panel for panel in (training, held_out, accuracy) if panel.lines]


def _held_out_title(runs: Sequence[RunFiles]) -> str:
    names = dict.fromkeys("documents" if run.unit in ("token", "word") else "samples" for run in runs)
    return f"Held-out {' and '.join(names)}: a dot for each score; the last one is of the model that was kept"


def _training_lines(runs: Sequence[RunFiles], style: Style, factor: float, is_bits: bool) -> Iterator[Line]:
    for run in runs:
        logged = points(run.logs, "loss", factor=factor)
        each = points(run.control, "data_bpt") if is_bits else points(run.control, "loss")
        if (style.is_alone and not only_measured(run)) or not logged[0]:
            yield style.line(run, "each step", each, 0, faint=bool(logged[0]))
        yield style.line(run, "mean since the last log", logged, 0)


def _held_out_lines(runs: Sequence[RunFiles], style: Style, is_bits: bool) -> Iterator[Line]:
    for run in runs:
        x, y = points(run.logs, "eval_bpt" if is_bits else "eval_loss")
        before = (run.metrics.get("held_out_bpt_before") or {}).get("value")
        if is_bits and before is not None:
            x, y = [0, *x], [before, *y]
        x, y = _with_final(run, x, y) if is_bits else (x, y)
        yield style.line(run, "held out", (x, y), 1, marker="o")


def _with_final(run: RunFiles, x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Add the score of the model that was kept, at the last step, unless the last evaluation gave the same score."""
    after, step = (run.metrics.get("held_out_bpt_after") or {}).get("value"), run.metrics.get("steps")
    if after is None or step is None or (x and x[-1] >= step and math.isclose(y[-1], after, rel_tol=SAME_SCORE)):
        return [*x], [*y]
    return [*x, step], [*y, after]


# -- S -----------------------------------------------------------------------------------------------------------------


def _s_panels(runs: Sequence[RunFiles]) -> list[Panel]:
    style, found = Style(runs), [run for run in runs if run.control]
    if not found:
        return []
    targets = sorted({target for run in found for target in points(run.control[-1:], "s_target")[1] if target})
    levels = [HorizontalLine(target, f"target {target:g}") for target in targets] if len(targets) <= 3 else []
    band = _target_band(found, targets)
    lines = _not_empty(_s_lines(runs, style))
    steered = [run for run in found if not only_measured(run)]
    strength = [style.line(run, "lambda", points(run.control, "lambda"), 1) for run in steered]
    return [
        Panel("Information ratio S", "S", lines=lines, levels=levels, bands=band, from_zero=True),
        Panel("Lambda: decay toward the start", "lambda", lines=_not_empty(strength),
              from_zero=True, height=0.85),
    ]  # fmt: skip


def only_measured(run: RunFiles) -> bool:
    """Whether S was measured but not controlled: lambda stayed 0, and there was no target."""
    has_goal = run.settings.get("scu_target_s") is not None
    return not has_goal and not any(row.get("lambda") or row.get("s_target") for row in run.control)


def _s_lines(runs: Sequence[RunFiles], style: Style) -> Iterator[Line]:
    for run in runs:
        if style.is_alone and not only_measured(run):  # if it is only measured, each step logs the average
            yield style.line(run, "S of each step", points(run.control, "s"), 0, faint=True)
        yield style.line(run, "S, averaged", points(run.control, "s_ema"), 0)


def _target_band(runs: Sequence[RunFiles], targets: Sequence[float]) -> list[Band]:
    if len(targets) != 1:
        return []
    steps = [step for run in runs for step in points(run.control, "step")[0]]
    span = [min(steps), max(steps)]
    return [Band("within 10 %", span, [0.9 * targets[0]] * 2, [1.1 * targets[0]] * 2, MUTED)]


# -- memory ------------------------------------------------------------------------------------------------------------


def _memory_panels(runs: Sequence[RunFiles]) -> list[Panel]:
    style = Style(runs)
    found = [run for run in runs if run.memory or newest(run.logs, "memory/chunks") is not None]
    if not found:
        return []
    used, sizes = _not_empty(_memory_lines(found, style)), _not_empty(_size_lines(found, style))
    limits = _limits(found)
    far = " and ".join(f"{limit / GIB:.1f} GiB" for limit in limits if not _is_near(limit, used))
    levels = [HorizontalLine(limit / GIB, f"limit {limit / GIB:.1f} GiB") for limit in limits if _is_near(limit, used)]
    is_shared = all(
        (run.config.get("hardware") or {}).get("device") == "cpu" and run.settings.get("memory_limit_gb") is None
        for run in found  # with memory_limit_gb, the memory in use is that of the process only
    )
    title = "Memory in use" + (", all programs" if is_shared else "") + (f" (limit {far}, far above)" if far else "")
    count = sum(len(ooms(run.memory)) for run in found)
    counted = " or ".join(sorted({_size_unit(run) for run in found}, reverse=True))
    crosses = f"crosses: out of memory, {count} in all" if count else "never out of memory"
    return [
        Panel(title, "GiB", lines=used, levels=levels, from_zero=True),
        Panel(f"Micro-batch size ({crosses})", f"{counted} per micro-batch", lines=sizes, from_zero=True),
    ]


def _size_unit(run: RunFiles) -> str:
    """Return the unit of micro-batch sizes: tokens, or rows, which count as one token each if they have no length."""
    tokens, rows = (points(run.logs, f"memory/{name}_per_chunk")[1] for name in ("tokens", "rows"))
    return "rows" if tokens and tokens == rows else "tokens"


def _limits(runs: Sequence[RunFiles]) -> list[float]:
    found = {newest(run.logs, "memory/limit_bytes") or newest(run.memory, "limit_bytes") for run in runs}
    limits: list[float] = []
    for limit in sorted(limit for limit in found if limit):
        limits = [*limits, limit] if not limits or limit > 1.01 * limits[-1] else [*limits[:-1], limit]
    return limits


def _is_near(limit_bytes: float, used: Sequence[Line]) -> bool:
    return limit_bytes / GIB < FAR_LIMIT * max((max(line.y) for line in used), default=1.0)


def _memory_lines(runs: Sequence[RunFiles], style: Style) -> Iterator[Line]:
    for run in runs:
        for name, label, color in (("peak_bytes", "peak since the last point", 1), ("used_bytes", "in use", 0)):
            logged = points(run.logs, f"memory/{name}", factor=1 / GIB)
            noted = points(run.memory, name, factor=1 / GIB)
            if style.is_alone or name == "peak_bytes":
                yield style.line(run, label, merged(logged, noted), color, marker="." if len(logged[0]) < 60 else "")


def _size_lines(runs: Sequence[RunFiles], style: Style) -> Iterator[Line]:
    for run in runs:
        yield style.line(run, "largest micro-batch that ran", points(run.logs, "memory/tokens_per_chunk"), 0)
        if style.is_alone:
            yield style.line(run, "largest allowed", _extended(points(run.memory, "tokens_per_chunk"), run), 2,
                             is_step=True)  # fmt: skip
        yield style.line(run, "out of memory" if style.is_alone else "", points(ooms(run.memory), "tokens_per_chunk"),
                         1, marker="x", is_joined=False)  # fmt: skip


def _extended(xy: tuple[list[float], list[float]], run: RunFiles) -> tuple[list[float], list[float]]:
    """Extend a step function to the newest step of the run."""
    x, y = xy
    newest_step = newest(run.logs, "step")
    return ([*x, newest_step], [*y, y[-1]]) if x and newest_step and newest_step > x[-1] else xy


def ooms(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of memory_history.json that an out-of-memory error caused."""
    return [row for row in rows if str(row.get("reason", "")).startswith("out of memory")]


def merged(first: tuple[list[float], list[float]], second: tuple[list[float], list[float]]) -> tuple[list, list]:
    """Merge the points of two files, sorted by step."""
    pairs = sorted([*zip(*first, strict=True), *zip(*second, strict=True)])
    return [x for x, _ in pairs], [y for _, y in pairs]


# -- throughput, learning rate -----------------------------------------------------------------------------------------


SPEEDS = (("throughput/tokens_per_second", "Tokens per second", "tokens / s"),
          ("throughput/samples_per_second", "Rows per second", "rows / s"))  # fmt: skip
RATES = (("learning_rate", "Learning rate", "rate"), ("grad_norm", "Gradient norm before clipping", "norm"))


def _logged_panels(runs: Sequence[RunFiles], figures: Sequence[tuple[str, str, str]]) -> list[Panel]:
    """Return a panel for each (name in the logs, title, unit) of ``figures`` that the logs contain."""
    style, found = Style(runs), []
    for color, (name, title, unit) in enumerate(figures):
        lines = _not_empty(style.line(run, title, points(run.logs, name), color) for run in runs)
        found.append(Panel(title, unit, lines=lines, from_zero=True, height=0.85))
    return [panel for panel in found if panel.lines]


# -- why a plot is missing ---------------------------------------------------------------------------------------------


def why_no_log(run: RunFiles) -> str:
    """Return why a run has no log rows."""
    if run.has_torn_logs:
        return f"{LOG_FILE} holds no complete row: it is torn, or is not a log"
    if run.is_alive or run.state in ("queued", "starting"):
        return "nothing has been logged yet"
    return "it ended before its first log"


def why_no_row(run: RunFiles) -> str:
    """Return why no training step was logged; "" if one was."""
    if not run.logs or _is_logged(run, "loss"):
        return ""
    interval = run.settings.get("logging_steps")
    return "no training step was logged" + (f" (logging_steps: {interval:g})" if interval else "")


def why_half_a_loss(run: RunFiles) -> str:
    """Return why a run has only a training loss or only evaluations to draw; "" if it has both, or neither. The reason
    may also be that its logs are torn, or that all values are NaN."""
    if run.has_torn_logs:
        return why_no_log(run)
    kinds = (("training loss", ("loss",)), ("score of an evaluation", SCORES))
    not_finite = [kind for kind, names in kinds if _is_logged(run, *names) and not _is_drawn(run, *names)]
    if not_finite:
        return f"no {' and no '.join(not_finite)} in its logs is finite"
    is_trained, is_evaluated = _is_drawn(run, "loss") or bool(run.control), _is_drawn(run, *SCORES)
    if is_trained == is_evaluated:
        return ""
    if is_evaluated:
        return why_no_row(run)
    strategy = f" (eval_strategy: {run.settings['eval_strategy']})" if "eval_strategy" in run.settings else ""
    subject = "scores of intermediate steps, because there was " if run.metrics.get("held_out_bpt_before") else ""
    return f"{subject}no evaluation {'yet' if run.is_alive else 'during training'}{strategy}"


def _is_logged(run: RunFiles, *names: str) -> bool:
    return any(name in row for row in run.logs for name in names)


def _is_drawn(run: RunFiles, *names: str) -> bool:
    return any(points(run.logs, name)[0] for name in names)


def why_no_loss(run: RunFiles) -> str:
    if run.logs:
        return why_no_row(run) or "its logs have no finite number for these figures"
    return why_no_log(run)


def why_no_s(run: RunFiles) -> str:
    if run.settings.get("scu") is False:
        return "regularization was off (scu: false)"
    if (run.metrics.get("regularization") or {}).get("verdict") == "not measured":
        return "S could not be measured (see the notices)"
    return (
        "no control step has been taken yet"
        if run.is_alive
        else "it has no scu_history.json with rows: no control step was taken, or regularization was off"
    )


def why_no_memory(run: RunFiles) -> str:
    if run.settings.get("memory_control") is False:
        return "the memory loop was off (memory_control: false)"
    if run.is_alive or not run.logs:
        return why_no_log(run)
    return why_no_row(run) or "its files have no memory rows: the micro-batch never changed, and no memory was logged"


def why_no_throughput(run: RunFiles) -> str:
    if not run.logs:
        return why_no_log(run)
    return why_no_row(run) or "its logs have no rows or tokens per second"


def why_no_curriculum(run: RunFiles) -> str:
    if run.is_alive or run.state in ("queued", "starting"):
        return "no epoch has been recorded yet"
    return "it has no curriculum.json with rows: no epoch was recorded, or no statistics were kept"
