"""The state of each run of a comparison, read from its files: finished, failed, or missing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from scu_trainer.errors import SettingsError
from scu_trainer.figures import first_few
from scu_trainer.run_files import read_object
from scu_trainer.runs.progress import START_LINE, tail
from scu_trainer.runs.store import Run
from scu_trainer.runs.studies.comparison_plan import ComparisonPlan, differences, run_name

Key = tuple[str, int]
"""Arm and seed."""

NOT_STARTED = "not started yet"


@dataclass(frozen=True)
class ArmState:
    """The state of a run. ``status``: finished, failed, running, or missing (to do). ``error``: why it is not done."""

    status: str
    error: Optional[str] = None


def read_states(plan: ComparisonPlan, before: Sequence[Mapping[str, Any]], retry_failed: bool) -> dict[Key, ArmState]:
    """Return the state of each run. ``before``: the runs in comparison.json, which also records failures that left no
    run directory. Raises SettingsError if a directory holds a run with other settings."""
    known = {(run["arm"], run["seed"]): run for run in before}
    return {key: _state_of(plan, key, known.get(key, {}), retry_failed) for key in plan.runs}


def _state_of(plan: ComparisonPlan, key: Key, before: Mapping[str, Any], retry_failed: bool) -> ArmState:
    folder = plan.run_folder(*key)
    _require_same_settings(plan, key, folder)
    if is_finished(folder):
        return ArmState("finished")
    if before.get("status") == "failed" and not retry_failed:
        return ArmState("failed", before["error"])
    status = Run(folder).status()
    if not status:
        return ArmState("missing", NOT_STARTED)
    return ArmState("missing", f"ended at step {status.get('step') or 0} of {status.get('max_steps') or '?'}")


def is_finished(folder: Path) -> bool:
    return Run(folder).status().get("status") == "finished" and (folder / "scu_metrics.json").is_file()


def _require_same_settings(plan: ComparisonPlan, key: Key, folder: Path) -> None:
    path = folder / "training_config.json"
    if not path.is_file():
        return
    content = read_object(path)
    found, expected = dict(content.get("configuration", {})), plan.resolved[key[0]]
    wrong = differences(found, expected)
    if content.get("seed") != key[1]:
        wrong.append(f"seed was {content.get('seed')}, now {key[1]}")
    if wrong:
        raise SettingsError(
            f"{folder} holds a run with other settings than arm {key[0]}: {first_few(wrong, between='; ')}; move it "
            "away, or give another --output_dir"
        )


def progress_line(plan: ComparisonPlan, states: Mapping[Key, ArmState]) -> str:
    """Return how many runs are done and how far the running ones are: "7 of 33 runs done; none-seed1 120/160, ..."."""
    done = sum(state.status == "finished" for state in states.values())
    failed = sum(state.status == "failed" for state in states.values())
    running = [_progress_of(plan, key) for key, state in states.items() if state.status == "running"]
    failures = f", {failed} failed" if failed else ""
    return f"{done} of {len(states)} runs done{failures}; {', '.join(running) or 'none is running'}"


def _progress_of(plan: ComparisonPlan, key: Key) -> str:
    status = Run(plan.run_folder(*key)).status()
    if not status.get("max_steps"):
        return f"{run_name(*key)} starts"
    return f"{run_name(*key)} {status.get('step') or 0}/{status['max_steps']}"


def failure_reason(console: Path, code: int) -> str:
    """Return why the newest start of a run failed, in one line: the signal that killed it, or its exit code with the
    error message, else with the last line that it printed."""
    _, mark, printed = tail(console).rpartition(START_LINE)
    lines = [line.strip() for line in printed.splitlines()[1 if mark else 0 :] if line.strip()]
    said = next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), None)
    if code < 0:
        return f"killed by signal {-code}"
    if said is None and lines:
        said = re.sub(r"\s+", " ", lines[-1])
    return f"exit code {code}: {said or 'it printed nothing'}"
