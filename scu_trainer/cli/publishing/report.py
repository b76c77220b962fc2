"""``scu-trainer report``: shows runs or a comparison as plots and one HTML page; ``--watch`` follows them."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scu_trainer.cli.main import guarded
from scu_trainer.cli.parsing import Parser
from scu_trainer.errors import SettingsError, did_you_mean, require_packages
from scu_trainer.figures import first_few
from scu_trainer.report.ablation import Comparison, read_comparison
from scu_trainer.report.comparison.report import COMPARISON_FILE, is_comparison
from scu_trainer.report.files import BEGUN, STATUS_FILE, RunFiles, has_begun, is_run, read_run
from scu_trainer.report.page import Drawing, drawing, html
from scu_trainer.report.pages import page_of, plots_of
from scu_trainer.report.render import THEMES, boxed_letters, in_theme, png
from scu_trainer.report.settings_table import repeat_yaml
from scu_trainer.report.write import PAGE, check_folder, forget_old, plot_files, repeat_file, write_files
from scu_trainer.run_files import format_bytes
from scu_trainer.runs.process import System
from scu_trainer.runs.state import report
from scu_trainer.runs.store import ROOT, Run, all_runs

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
LOCK_FILE = "_run.lock"
QUIET_S = 60.0
"""A comparison with unfinished runs counts as stopped if none is alive and its file did not change for this time."""


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
    wanted = find_subjects(options.runs, options.root, waits=options.watch is not None)
    folder = options.output or (wanted.runs[0].path / "report" if len(wanted.runs) == 1 else Path("report"))
    if options.watch is not None:
        return _watch(wanted, folder, options.watch, sleep)
    require_begun(wanted, folder)
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


def _write_all(wanted: ReportSubjects, folder: Path) -> list[str]:
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


def _repeat_files(wanted: ReportSubjects, subject) -> dict[str, str]:
    """Return the settings of each run as files that ``scu-trainer train --config`` reads."""
    if wanted.is_comparison:
        return {}
    single = len(subject) == 1
    names = ["repeat.yaml" if single else repeat_file(number, run.name) for number, run in enumerate(subject, 1)]
    return {name: repeat_yaml(run) for name, run in zip(names, subject, strict=True)}


def _write_page(wanted: ReportSubjects, folder: Path, every_s: float) -> None:
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


def _watch(wanted: ReportSubjects, folder: Path, every_s: float, sleep: Callable[[float], None]) -> int:
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


# -- which runs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReportSubjects:
    """What a report is about: ``runs``, with their names in the report, or the folder of one comparison."""

    runs: tuple[Run, ...]

    @property
    def is_comparison(self) -> bool:
        """Whether this is a comparison. Checked each time, because the report may be waiting for it to start."""
        return is_comparison(self.runs[0].path)

    def read(self) -> list[RunFiles] | Comparison:
        if self.is_comparison:
            return read_comparison(self.runs[0].path)
        return [read_run(run.path, run.name, *_state(run)) for run in self.runs]

    def is_alive(self) -> bool:
        """Whether a run is still running or expected."""
        if self.is_comparison:
            return _is_under_way(read_comparison(self.runs[0].path))
        return any(_state(run)[2] for run in self.runs)

    def may_write(self, folder: Path) -> bool:
        """Whether a report may be written to ``folder``. It must not be inside a run that has not started, because
        training needs that folder to be empty."""
        place = folder.resolve()
        inside = [run.path for run in self.runs if run.path.resolve() in (place, *place.parents)]
        return self.is_comparison or all(has_begun(run) for run in inside)


def find_subjects(words: Sequence[str], root: Path, waits: bool) -> ReportSubjects:
    """Return what the report is about. ``waits``: whether a run may not exist yet. Raises SettingsError for anything
    that is not a run or a comparison."""
    folders = [_folder(word, root) for word in words]
    if any(is_comparison(folder) for folder in folders):
        if len(folders) > 1:
            raise SettingsError("a comparison cannot be combined with others: give only its folder, or only runs")
        return ReportSubjects((Run(folders[0], folders[0].name),))
    for folder, word in zip(folders, words, strict=True):
        if not is_run(folder) and not (waits and _may_become_run(folder)):
            raise SettingsError(_not_a_run_message(folder, word, root))
    absolute = [Path(os.path.abspath(folder)) for folder in folders]  # unlike ``resolve``, keeps the names of links
    repeated = next((word for word, path in zip(words, absolute, strict=True) if absolute.count(path) > 1), None)
    if repeated is not None:
        raise SettingsError(f"{repeated} is given twice; give each run once")
    return ReportSubjects(tuple(map(Run, folders, _distinct_names(absolute))))


def require_begun(wanted: ReportSubjects, folder: Path) -> None:
    """Raise SettingsError if the report would be written into a run that has not started."""
    if not wanted.may_write(folder):
        raise SettingsError(
            f"{folder} belongs to a run that has not started to train, and needs to be empty for it; add "
            f"--watch to wait for it, or give another --output"
        )


def _may_become_run(folder: Path) -> bool:
    """Whether a training may be about to start in ``folder``. It locks the folder while it loads."""
    return not folder.exists() or (folder.is_dir() and {path.name for path in folder.iterdir()} <= {LOCK_FILE})


def _folder(word: str, root: Path) -> Path:
    path = Path(word)
    return path if path.exists() or not (root / word).is_dir() else root / word


def _distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return the names of the folders, with parent folders if two have the same name."""
    names, depth = [folder.name for folder in folders], 1
    while len(set(names)) < len(names):
        depth += 1
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
    return names


def _not_a_run_message(folder: Path, word: str, root: Path) -> str:
    if not folder.exists():
        known = [run.name for run in all_runs(root)]
        listed = f"; runs in {root}: {first_few(known, 8)}" if known else ""
        return f"{word} does not exist{did_you_mean(Path(word).name, known)}{listed}; give the directory of a run"
    below = folder / "runs" if (folder / "runs").is_dir() else folder  # a sweep has its runs in there
    inside = [path.name for path in sorted(below.iterdir()) if is_run(path)] if below.is_dir() else []
    runs = f"; it holds runs: {first_few(inside, 8)}; give one of them, as {below / inside[0]}" if inside else ""
    files = ", ".join((STATUS_FILE, *BEGUN[:3], COMPARISON_FILE))
    return f"{folder} is not the directory of a run or comparison: it holds none of {files} and the like" + (
        runs or "; give a directory that scu-trainer train or compare wrote"
    )


def _is_under_way(comparison: Comparison) -> bool:
    """Whether a comparison has unfinished runs and is still being worked on."""
    if not comparison.is_alive:
        return False
    is_recent = time.time() - (comparison.folder / COMPARISON_FILE).stat().st_mtime < QUIET_S
    return is_recent or any(_state(Run(run.folder, run.name))[2] for run in comparison.runs.values())


def _state(run: Run) -> tuple[str, str, bool]:
    """Return (state, its description, whether something is still to come)."""
    if not is_run(run.path):
        return "not there yet", "its folder does not exist yet", True
    if not (run.path / STATUS_FILE).is_file() and not run.folder.is_dir():
        return "unknown", "without run.json, which your own script does not write, its end is unknown", False
    state = report(run, System()).state
    return state.status, state.detail, state.is_alive
