"""Show rows of a run with the learned tokens marked: the page of ``scu-trainer data``, made in a separate process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from scu_trainer.errors import DataError, SettingsError
from scu_trainer.report.files import read_run
from scu_trainer.report.settings_table import repeat_yaml
from scu_trainer.runs.store import Run

ROWS, SAMPLE = 5, 200
LONGEST_S = 300.0


def learned_page(run: Run) -> str:
    """Return the page as HTML. Raises SettingsError if the run has not written its settings yet, and DataError if the
    command fails, with its error, or takes too long."""
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
