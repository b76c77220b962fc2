"""The page of one run: the plots and tables of its report, its memory, the end of its output; and that of its rows."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from scu_trainer.board.folders import file_stamps
from scu_trainer.errors import DataError, SettingsError
from scu_trainer.report.files import (
    BEGUN,
    CONFIG_FILE,
    METRICS_FILE,
    STATUS_FILE,
    SUSPECTS_FILE,
    RunFiles,
    points,
    read_run,
)
from scu_trainer.report.page import Drawing, Page, Section, Table, TextBlock, drawing
from scu_trainer.report.pages import NOTICES, page_of, plots_of
from scu_trainer.report.settings_table import repeat_yaml
from scu_trainer.run_files import format_bytes
from scu_trainer.runs.monitor import log_of
from scu_trainer.runs.progress import last_lines
from scu_trainer.runs.state import Report
from scu_trainer.runs.store import Run

LOG_LINES = 40
HEAD_BYTES = 65_536
ROWS, SAMPLE, LONGEST_S = 5, 200, 300.0
KEPT_PAGES = 16
FILES = (*BEGUN, METRICS_FILE, STATUS_FILE, SUSPECTS_FILE)
PREDICTED = "memory: "


class Pages:
    """Cached report pages, drawn again only if the files of a run changed: drawing takes about a second."""

    def __init__(self) -> None:
        self._kept: dict[Path, tuple[tuple, Page]] = {}
        self._one_at_a_time = threading.Lock()  # matplotlib's settings are global to the process

    def page(self, row: Report) -> Page:
        """Return the page of ``scu-trainer report``, curves first, with predicted and measured memory."""
        signs = (row.state, *file_stamps(row.run, FILES))
        with self._one_at_a_time:
            kept = self._kept.pop(row.run.path, None)
            if kept is None or kept[0] != signs:
                kept = signs, _page(row)
            self._kept[row.run.path] = kept
            while len(self._kept) > KEPT_PAGES:
                del self._kept[next(iter(self._kept))]
        return kept[1]


def _page(row: Report) -> Page:
    run = row.run
    try:
        files = read_run(run.path, run.name, row.state.status, row.state.detail, row.state.is_alive)
        drawings: Sequence[Drawing] = [drawing(plot) for plot in plots_of([files])]
        page = page_of([files], drawings, _written(), [run.path / CONFIG_FILE])
        plots = [section for section in page.sections if isinstance(section.blocks[0], Drawing)]
        figures, *rest = (section for section in page.sections if section not in plots)
        memory = Section("Memory: predicted and measured", _memory(run, files))
        notices = next(section for section in rest if section.title == NOTICES)
        sections = [*plots, memory, notices, figures, *(section for section in rest if section is not notices)]
    except Exception as error:  # an incomplete file, or one of another program: show the rest of the page anyway
        message = f"Its files cannot be drawn: {type(error).__name__}: {error}"
        return Page(run.name, "", [], [Section("Report", [TextBlock(message)])], _written())
    return Page(page.title, page.lead, page.pills, sections, page.written)


def _written() -> str:
    return f"Read from the files of the run at {time.strftime('%H:%M:%S')}."


def _memory(run: Run, files: RunFiles) -> list[Table | TextBlock]:
    """Return predicted and measured peak memory; before the end of a run, what it logged, and its highest peak."""
    estimate = files.metrics.get("memory_estimate") or {}
    predicted, measured = estimate.get("predicted_peak_bytes"), estimate.get("measured_peak_bytes")
    if predicted and measured:
        figures = [format_bytes(predicted), format_bytes(measured), f"{predicted / measured - 1:+.1%}"]
        return [Table(["predicted peak", "measured peak", "difference"], [figures])]
    peaks = points(files.logs, "memory/peak_bytes")[1]
    highest = f"Highest so far: {format_bytes(max(peaks))} (all that counts toward the limit)." if peaks else ""
    why = f"Not predicted: {estimate['reason']}." if estimate.get("reason") else "Its files have no memory prediction."
    return [TextBlock(_logged_prediction(run) or why), *([TextBlock(highest)] if highest else [])]


def _logged_prediction(run: Run) -> str:
    """Return the memory prediction that the run logged before its first step, or ""."""
    try:
        with open(run.path / "logs" / "train.log", "rb") as file:
            lines = file.read(HEAD_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line[line.index(PREDICTED) :] for line in lines if PREDICTED in line), "")


def log_lines(run: Run) -> list[str]:
    """Return the last lines of the run's output; none if there is no log."""
    try:
        return last_lines(log_of(run), LOG_LINES)
    except OSError:
        return []


def learned_page(run: Run) -> str:
    """Return the page of ``scu-trainer data``, which shows rows with the learned tokens marked, made in a separate
    process. Raises SettingsError if the run has not written its settings yet, and DataError if the command fails, with
    its error, or takes too long."""
    settings = repeat_yaml(read_run(run.path, run.name))
    if not settings:
        raise SettingsError(f"{run.name} has no training_config.json yet, which names its data; wait until it trains")
    record = run.record()
    with tempfile.TemporaryDirectory() as folder:
        config, page = Path(folder) / f"{run.path.name}.yaml", Path(folder) / "page.html"
        config.write_text(settings, encoding="utf-8")
        words = ["data", "--config", str(config), "--rows", str(ROWS), "--sample", str(SAMPLE), "--html", str(page)]
        command = [sys.executable, "-P", "-m", "scu_trainer.cli.main", *words]
        cwd = record.cwd if record is not None and Path(record.cwd).is_dir() else None
        try:
            process = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=LONGEST_S)
        except subprocess.TimeoutExpired as error:
            raise DataError(f"the data of {run.name} could not be read within {LONGEST_S:g} s") from error
        if process.returncode or not page.is_file():
            errors = process.stderr.strip().splitlines() or [f"the command ended with code {process.returncode}"]
            raise DataError(errors[-1].removeprefix("error: "))
        return page.read_text(encoding="utf-8")
