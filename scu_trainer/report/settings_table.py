"""How runs differ from each other or from the defaults, their hardware, and the command that repeats a run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from scu_trainer.figures import NONE
from scu_trainer.report.files import RunFiles
from scu_trainer.report.run_plots import number
from scu_trainer.run_files import format_bytes

PLACES = ("output_dir", "run_name", "logging_dir")
"""Settings that say where a run is stored, not how it trains."""


def differences(runs: Sequence[RunFiles]) -> list[list[str]]:
    """Return a row (name, value of each run) for each setting, data, commit or version in which the runs differ."""
    facts = [_facts(run) for run in runs]
    shown = as_rows([{name: show(value) for name, value in known.items() if name not in PLACES} for known in facts])
    return [row for row in shown if len(set(row[1:])) > 1]


def changed(run: RunFiles) -> list[tuple[str, str, str]]:
    """Return (name, value, default) of each setting of a run that differs from the default of its version."""
    defaults, settings = run.config.get("changed_from") or {}, run.settings
    rows = [(name, show(settings[name]), show(defaults[name])) for name in defaults if name in settings]
    return [row for row in rows if row[0] not in PLACES and row[1] != row[2]]


def _facts(run: RunFiles) -> dict[str, Any]:
    versions = run.config.get("versions") or {}
    return {
        **run.settings,
        "data fingerprint": (run.config.get("data") or {}).get("fingerprint", NONE),
        "processes": run.config.get("world_size", NONE),
        "git commit": run.config.get("git_commit") or NONE,
        **{f"version of {name}": version for name, version in versions.items()},
    }


def show(value: Any) -> str:
    """Format a setting as a user would type it."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else json.dumps(value)


def hardware(run: RunFiles) -> list[tuple[str, str]]:
    """Return the names and values that describe the machine and versions; [] if the files of the run hold none."""
    found, versions = run.config.get("hardware") or {}, run.config.get("versions") or {}
    rows = []
    if found:
        gpus = [f"{gpu.get('name')}, {_size(gpu.get('total_bytes'))}" for gpu in found.get("gpus") or []]
        rows = [
            ("trained on", str(found.get("device", NONE))),
            ("GPUs", "; ".join(gpus) or "none"),
            (
                "CPU",
                f"{found.get('cpu')}, {number(found.get('cores'))} cores usable, "
                f"{found.get('threads')} thread{'' if found.get('threads') == 1 else 's'}",
            ),
            ("main memory", _size(found.get("ram_bytes"))),
        ]
    elif (run.metrics.get("costs") or {}).get("device"):
        rows = [("trained on", str(run.metrics["costs"]["device"]))]
    rows += [("processes", str(run.config["world_size"]))] if "world_size" in run.config else []
    rows += [("system", str(versions["platform"]))] if versions.get("platform") else []
    packages = [f"{name} {version}" for name, version in versions.items() if version and name != "platform"]
    rows += [("versions", ", ".join(packages))] if packages else []
    return rows + ([("git commit", run.config["git_commit"])] if run.config.get("git_commit") else [])


def _size(size_bytes: Optional[float]) -> str:
    return NONE if size_bytes is None else format_bytes(size_bytes)


def repeat_yaml(run: RunFiles) -> str:
    """Return the resolved configuration as YAML for ``scu-trainer train --config``; "" if the run has none."""
    import yaml

    kept = {name: value for name, value in run.settings.items() if value is not None and value != []}
    kept.pop("resume_from_checkpoint", None)  # a repeated run starts from the beginning
    if run.settings.get("report_to") == []:
        kept["report_to"] = "none"  # an empty list in a file means the default
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True) if kept else ""


def repeat_command(run: RunFiles, config: Path) -> str:
    """Return the command that repeats the run in a new directory next to it."""
    again = run.folder if run.folder.name not in ("", "..") else run.folder.resolve()
    words = ["--config", str(config), "--output_dir", f"{again}-again"]
    processes = int(run.config.get("world_size") or 1)
    launcher = ["torchrun", "--nproc_per_node", str(processes), "scripts/train.py"]
    return shlex.join([*(launcher if processes > 1 else ["scu-trainer", "train"]), *words])


def as_rows(columns: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Merge the values of several runs into rows: a name, then the value of each run, or a dash if a run lacks it."""
    names = list(dict.fromkeys(name for column in columns for name in column))
    return [[name, *(column.get(name, NONE) for column in columns)] for name in names]
