"""One start of ``scu-trainer compare``: locks the folder, runs what is not done, keeps comparison.json up to date."""

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
from scu_trainer.run_files import read_json, require_writable, write_json, write_text
from scu_trainer.runs.studies import comparison
from scu_trainer.runs.studies.comparison_plan import ComparisonPlan, read_plan, require_same, run_name, write_plan
from scu_trainer.runs.studies.comparison_state import NOT_STARTED, ArmState, Key, found_states

PAGE_FILE = "comparison.md"
CONFIDENCE = 0.95
FAILED = 1
"""Exit code if a run failed or could not be compared; the others are in the table all the same."""


class Start:
    """One start of the command, from its lock to its table."""

    what = "runs"

    def __init__(
        self,
        plan: ComparisonPlan,
        reference: str,
        devices: list[str],
        console: Any,
        hands: Any,
        confidence: float = CONFIDENCE,
        retry_failed: bool = True,
    ) -> None:
        self.plan, self.reference, self.devices = plan, reference, devices
        self.confidence, self.retry_failed = confidence, retry_failed
        self.screen, self.console = screens.Screen(console), console
        self.hands = replace(hands, say=self.screen.say)
        self.began_s, self.done_before = time.monotonic(), 0

    def run(self) -> int:
        require_writable(self.plan.folder)
        with comparison.only_one(self.plan.folder):
            self._lock()
            comparison.stop_left_behind(self.plan.folder, self.hands)
            states = found_states(self.plan, known_runs(self.plan.folder), self.retry_failed)
            self._tell_start(states)
            runner = comparison.Runner(self.plan, states, self.devices, self.write, self.look, self.hands)
            with self.screen.status:
                runner.run()
            record = self.write(states)
        missing = sum(state.status == "missing" for state in states.values())
        if missing:
            raise Stopped(
                f"stopped: {missing} of {len(states)} {self.what} are not done; run the same command to continue"
            )
        return self._end(record)

    def _lock(self) -> None:
        """Take over the plan in the folder, or write a new one."""
        before, folder = read_plan(self.plan.folder), self.plan.folder
        if before is None:
            others = sorted(path.name for path in folder.iterdir() if path.name != comparison.LOCK_FILE)
            if [name for name in others if name not in ("arms", "console", "runs")]:
                raise StorageError(f"{folder} holds other files ({', '.join(others[:3])}); give another --output_dir")
            write_plan(self.plan)
            return
        require_same(before, self.plan)
        if before.threads != self.plan.threads:
            self.screen.say(f"threads per run: {before.threads}, as when this comparison started")
        self.plan = before

    def _tell_start(self, states: Mapping[Key, ArmState]) -> None:
        self.screen.say(screens.start_line(self.plan, self.devices))
        count = {name: [key for key in states if states[key].status == name] for name in ("finished", "failed")}
        begun = [key for key, state in states.items() if state.status == "missing" and state.error != NOT_STARTED]
        self.done_before = len(count["finished"]) + len(count["failed"])
        if count["finished"] or begun:
            kept = f"finished runs kept: {len(count['finished'])}"
            self.screen.say(f"{kept}; runs that resume from their checkpoints: {len(begun)}")
        if count["failed"]:
            self.screen.say(f"runs that failed before: {len(count['failed'])}; --retry_failed tries them again")

    def look(self, states: Mapping[Key, ArmState]) -> None:
        ended = sum(state.status in ("finished", "failed") for state in states.values())
        here, elapsed_s = ended - self.done_before, time.monotonic() - self.began_s
        left_s = elapsed_s / here * (len(states) - ended) if here else None
        self.screen.look(self.plan, states, left_s)

    def write(self, states: Mapping[Key, ArmState]) -> dict[str, Any]:
        """Write comparison.json and comparison.md, each whole or not at all, if they changed."""
        path = self.plan.folder / COMPARISON_FILE
        facts = {
            "command": self.plan.command,
            "config": self.plan.config,
            "seeds": list(self.plan.seeds),
            "reference": self.reference,
            "confidence": self.confidence,
            "arms": [asdict(arm) for arm in self.plan.arms],
        }
        content = record_of(facts, [_described(key, state) for key, state in states.items()], self.plan.folder)
        before = read_json(path) if path.is_file() else {}
        if {name: before.get(name) for name in content} == json.loads(json.dumps(content)):
            return before
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        record = {"format": content["format"], "created": before.get("created", now), "updated": now, **content}
        write_json(path, record)
        write_text(self.plan.folder / PAGE_FILE, document(record))
        return record

    def _end(self, record: Mapping[str, Any]) -> int:
        screens.print_record(self.console, record)
        screens.print_wrapped(self.console, f"written: {self.plan.folder / COMPARISON_FILE}, {PAGE_FILE}")
        return exit_code(record)


def _described(key: Key, state: ArmState) -> dict[str, Any]:
    folder = f"runs/{run_name(*key)}"
    return {"arm": key[0], "seed": key[1], "status": state.status, "folder": folder, "error": state.error}


def known_runs(folder: Path) -> list[dict[str, Any]]:
    return read_record(folder)["runs"] if is_comparison(folder) else []


def exit_code(record: Mapping[str, Any], fine: Optional[str] = None) -> int:
    """``fine``: what a run may be left out for."""
    errors = [run["error"] for run in record["runs"] if run["status"] in ("failed", "finished")]
    return 0 if all(error in (None, fine) for error in errors) else FAILED
