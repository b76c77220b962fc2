"""``scu-trainer report``: shows runs or a comparison as plots and one HTML page; ``--watch`` follows them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scu_trainer.cli.main import guarded
from scu_trainer.cli.parsing import Parser
from scu_trainer.cli.publishing import report_subjects as subjects
from scu_trainer.errors import SettingsError, require_packages
from scu_trainer.report.page import Drawing, drawing, html
from scu_trainer.report.pages import page_of, plots_of
from scu_trainer.report.render import THEMES, boxed_letters, in_theme, png
from scu_trainer.report.settings_table import repeat_yaml
from scu_trainer.report.write import PAGE, check_folder, forget_old, plot_files, repeat_file, write_files
from scu_trainer.run_files import format_bytes
from scu_trainer.runs.store import ROOT

DESCRIPTION = """\
Plots runs together, or a comparison that `scu-trainer compare` has
written: one self-contained HTML page, and every plot as PNG and
SVG for light and dark backgrounds."""

EPILOG = """\
RUN is a run directory, or the name of one below --root (runs); it may be
running, failed, killed or not started yet. The report goes to RUN/report, for
several runs to ./report. Files that no report wrote are never overwritten.
Exit codes: 0 done, also after Ctrl-C in --watch; 2 you can fix it."""

EVERY_S = 30.0
LEAST_S = 0.5


@guarded
def main(argv: list[str], sleep: Callable[[float], None] = time.sleep) -> int:
    options = _parser().parse_args(argv)
    if (
        options.output is not None
        and options.output.suffix.lower() in (".html", ".htm")
        and not options.output.is_dir()
    ):
        raise SettingsError(
            f"--output {options.output} names the folder of the report, not its page, which is {PAGE} in it; give a "
            f"folder, such as --output {options.output.with_suffix('')}"
        )
    require_packages("a report", "report", ("matplotlib",), loads=True)
    wanted = subjects.find_subjects(options.runs, options.root, waits=options.watch is not None)
    folder = options.output or (wanted.runs[0].path / "report" if len(wanted.runs) == 1 else Path("report"))
    if options.watch is not None:
        return _watch(wanted, folder, options.watch, sleep)
    subjects.require_begun(wanted, folder)
    _print_summary(folder, _write_all(wanted, folder))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="scu-trainer report",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories, or one folder of a comparison")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder of the report")
    parser.add_argument(
        "--watch", nargs="?", type=_seconds, const=EVERY_S, metavar="SECONDS",
        help=f"rewrite the page every SECONDS ({EVERY_S:g}) until all runs have ended; an open page follows",
    )  # fmt: skip
    parser.add_argument("--root", type=Path, default=ROOT, help="directory that holds the runs (runs)")
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not LEAST_S <= value < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds of {LEAST_S:g} or more; give the runs before --watch"
        )
    return value


# -- writing -----------------------------------------------------------------------------------------------------------


def _write_all(wanted: subjects.ReportSubjects, folder: Path) -> list[str]:
    """Write the final page, and every plot as files. Returns what is not drawn, with the reason."""
    subject = wanted.read()
    plots, repeats = plots_of(subject), _repeat_files(wanted, subject)
    drawn = [plot for plot in plots if plot.panels]
    names = [f"{plot.key}-{theme}.{kind}" for plot in drawn for theme in THEMES for kind in ("png", "svg")]
    names += [PAGE, *repeats]
    check_folder(folder, names)
    drawings = [drawing(plot) for plot in plots]
    files: dict[str, str | bytes] = dict(repeats)
    for item in drawings:
        files |= _plot_files(item)
    files[PAGE] = html(page_of(subject, drawings, _written_line(), [folder / name for name in repeats]))
    write_files(folder, files)
    forget_old(folder, names)
    letters = boxed_letters(drawn)
    boxes = (
        [f"{letters} are missing from the font of the PNG files; the page and SVG files have them"] if letters else []
    )
    return [f"{plot.key}: {note}" for plot in plots for note in plot.notes] + boxes


def _plot_files(item: Drawing) -> dict[str, str | bytes]:
    """Return the files of one plot; none if nothing is drawn."""
    files: dict[str, str | bytes] = {}
    for theme in THEMES if item.wide else ():
        files[f"{item.plot.key}-{theme}.svg"] = in_theme(item.wide, theme, item.plot)
        files[f"{item.plot.key}-{theme}.png"] = png(item.plot, theme)
    return files


def _repeat_files(wanted: subjects.ReportSubjects, subject) -> dict[str, str]:
    """Return the settings of each run as files that ``scu-trainer train --config`` reads."""
    if wanted.is_comparison:
        return {}
    single = len(subject) == 1
    names = ["repeat.yaml" if single else repeat_file(number, run.name) for number, run in enumerate(subject, 1)]
    return {name: repeat_yaml(run) for name, run in zip(names, subject, strict=True)}


def _write_page(wanted: subjects.ReportSubjects, folder: Path, every_s: float) -> None:
    subject = wanted.read()
    repeats = _repeat_files(wanted, subject)
    check_folder(folder, [PAGE, *repeats])
    drawings = [drawing(plot) for plot in plots_of(subject)]
    page = page_of(subject, drawings, _written_line(), [folder / name for name in repeats], max(2.0, every_s))
    write_files(folder, {**repeats, PAGE: html(page)})


def _written_line() -> str:
    return f"Written by scu-trainer report on {time.strftime('%Y-%m-%d at %H:%M:%S %Z')} from the files of the runs."


def _print_summary(folder: Path, notes: Sequence[str]) -> None:
    page = folder / PAGE
    print(f"report: {page} ({format_bytes(page.stat().st_size)}, self-contained)")
    print(f"        {len(plot_files(folder))} plot files next to it: PNG and SVG, light and dark")
    for note in notes:
        print(f"not drawn: {note}")


# -- watching ----------------------------------------------------------------------------------------------------------


def _watch(wanted: subjects.ReportSubjects, folder: Path, every_s: float, sleep: Callable[[float], None]) -> int:
    """Rewrite the page until all runs have ended or Ctrl-C is pressed, then write the final page."""
    print(f"watching every {every_s:g} s until all runs have ended, Ctrl-C ends it: {folder / PAGE}", flush=True)
    for run in wanted.runs:
        if not run.path.exists():
            print(f"{run.path} does not exist yet: waiting for it", flush=True)
    try:
        while not wanted.may_write(folder) or wanted.is_alive():
            if wanted.may_write(folder):
                _write_page(wanted, folder, every_s)
            sleep(every_s)
    except KeyboardInterrupt:
        if not wanted.may_write(folder):
            print("no run has started yet, so there is no report")
            return 0
    _print_summary(folder, _write_all(wanted, folder))
    return 0
