"""One start of ``scu-trainer compare``: locks the folder, runs what is not done, and updates comparison.json."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Optional

from scu_trainer.cli.comparison import screen as screens
from scu_trainer.errors import Stopped, StorageError
from scu_trainer.report.comparison.report import COMPARISON_FILE, is_comparison, read_record
from scu_trainer.report.comparison.report import record as record_of
from scu_trainer.report.comparison.text import document
from scu_trainer.run_files import read_object_or_empty, require_writable, write_json, write_text
from scu_trainer.runs.studies import comparison
from scu_trainer.runs.studies.comparison_plan import (
    ComparisonPlan,
    read_plan,
    require_same,
    run_name,
    write_plan,
    write_recipes,
)
from scu_trainer.runs.studies.comparison_state import NOT_STARTED, ArmState, Key, read_states

PAGE_FILE = "comparison.md"
CONFIDENCE = 0.95
FAILED = 1
"""Exit code if a run failed or could not be compared. The table still shows the others."""


class ComparisonSession:
    """One start of the command, from the lock on its folder to the final table."""

    what = "runs"

    def __init__(
        self,
        plan: ComparisonPlan,
        reference: str,
        devices: list[str],
        console: Any,
        backend: Any,
        confidence: float = CONFIDENCE,
        retry_failed: bool = True,
    ) -> None:
        self.plan, self.reference, self.devices = plan, reference, devices
        self.confidence, self.retry_failed = confidence, retry_failed
        self.screen, self.console = screens.Screen(console), console
        self.backend = replace(backend, say=self.screen.say)
        self.began_s, self.done_before = time.monotonic(), 0

    def run(self) -> int:
        require_writable(self.plan.folder)
        with comparison.exclusive_comparison(self.plan.folder):
            self._take_plan()
            comparison.stop_remaining_runs(self.plan.folder, self.backend)
            states = read_states(self.plan, known_runs(self.plan.folder), self.retry_failed)
            self._report_start(states)
            runner = comparison.Runner(self.plan, states, self.devices, self.write, self.look, self.backend)
            with self.screen.status:
                runner.run()
            record = self.write(states)
        missing = sum(state.status == "missing" for state in states.values())
        if missing:
            raise Stopped(
                f"stopped: {missing} of {len(states)} {self.what} are not done; run the same command to continue"
            )
        return self._end(record)

    def _take_plan(self) -> None:
        """Continue with the plan in the folder, or write a new one. Raises StorageError if it holds other files."""
        existing_plan, folder = read_plan(self.plan.folder), self.plan.folder
        if existing_plan is None:
            other_files = sorted(path.name for path in folder.iterdir() if path.name != comparison.LOCK_FILE)
            if [name for name in other_files if name not in ("arms", "console", "runs")]:
                raise StorageError(
                    f"{folder} holds other files ({', '.join(other_files[:3])}); give another --output_dir"
                )
            write_plan(self.plan)
            return
        require_same(existing_plan, self.plan)
        if existing_plan.threads != self.plan.threads:
            self.screen.say(f"threads per run: {existing_plan.threads}, as when this comparison started")
        self.plan = replace(existing_plan, texts=self.plan.texts)
        write_recipes(self.plan)  # they may have been changed since

    def _report_start(self, states: Mapping[Key, ArmState]) -> None:
        self.screen.say(screens.start_line(self.plan, self.devices))
        by_status = {name: [key for key in states if states[key].status == name] for name in ("finished", "failed")}
        started = [key for key, state in states.items() if state.status == "missing" and state.error != NOT_STARTED]
        self.done_before = len(by_status["finished"]) + len(by_status["failed"])
        if by_status["finished"] or started:
            kept = f"finished runs kept: {len(by_status['finished'])}"
            self.screen.say(f"{kept}; runs that resume from their checkpoints: {len(started)}")
        if by_status["failed"]:
            self.screen.say(f"runs that failed before: {len(by_status['failed'])}; --retry_failed tries them again")

    def look(self, states: Mapping[Key, ArmState]) -> None:
        ended = sum(state.status in ("finished", "failed") for state in states.values())
        ended_here, elapsed_s = ended - self.done_before, time.monotonic() - self.began_s
        left_s = elapsed_s / ended_here * (len(states) - ended) if ended_here else None
        self.screen.look(self.plan, states, left_s)

    def write(self, states: Mapping[Key, ArmState]) -> dict[str, Any]:
        """Write comparison.json and comparison.md, each atomically, if the results changed, and return the record."""
        path = self.plan.folder / COMPARISON_FILE
        facts = {
            "command": self.plan.command,
            "config": self.plan.config,
            "seeds": list(self.plan.seeds),
            "reference": self.reference,
            "confidence": self.confidence,
            "arms": [asdict(arm) for arm in self.plan.arms],
        }
        content = record_of(facts, [_run_entry(key, state) for key, state in states.items()], self.plan.folder)
        old_record = read_object_or_empty(path)
        if {name: old_record.get(name) for name in content} == json.loads(json.dumps(content)):
            return old_record
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        record = {"format": content["format"], "created": old_record.get("created", now), "updated": now, **content}
        write_json(path, record)
        write_text(self.plan.folder / PAGE_FILE, document(record))
        return record

    def _end(self, record: Mapping[str, Any]) -> int:
        screens.print_record(self.console, record)
        screens.print_wrapped(self.console, f"written: {self.plan.folder / COMPARISON_FILE}, {PAGE_FILE}")
        return exit_code(record)


def _run_entry(key: Key, state: ArmState) -> dict[str, Any]:
    folder = f"runs/{run_name(*key)}"
    return {"arm": key[0], "seed": key[1], "status": state.status, "folder": folder, "error": state.error}


def known_runs(folder: Path) -> list[dict[str, Any]]:
    return read_record(folder)["runs"] if is_comparison(folder) else []


def exit_code(record: Mapping[str, Any], ignored: Optional[str] = None) -> int:
    """Return ``FAILED`` if a run failed or could not be compared, otherwise 0. ``ignored``: an error that is
    allowed."""
    errors = [run["error"] for run in record["runs"] if run["status"] in ("failed", "finished")]
    return 0 if all(error in (None, ignored) for error in errors) else FAILED
