"""``seeds`` of a background job: a run for each, ``NAME-seedN``, all in the waiting line, and what they reached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from scu_trainer.cli.comparison.plan import refuse_push
from scu_trainer.cli.names.translation import flags_of, without
from scu_trainer.run_files import read_json
from scu_trainer.runs.state import Report
from scu_trainer.runs.store import Run, all_runs

INFIX = "-seed"


def seeds_of(entries: Mapping[str, Any], flags: Sequence[str]) -> list[int]:
    """Of a job that ``check_early`` has seen; flags come before the file. Raises SettingsError for a push."""
    typed = dict(flags_of(flags))
    given = typed.get("seeds", entries.get("seeds"))
    words = given if isinstance(given, list) else [] if given is None else [given]
    if len(words) > 1:
        refuse_push(typed.get("push_to_hub", entries.get("push_to_hub")), "seed")
    return [int(word) for word in words]


def one_seed(entries: Mapping[str, Any], text: str, flags: Sequence[str], seed: int) -> tuple[str, tuple[str, ...]]:
    """Configuration and flags of the run with ``seed``."""
    if "seeds" in entries:
        text = yaml.safe_dump({name: value for name, value in entries.items() if name != "seeds"}, sort_keys=False)
    return text, (*without(flags, {"seeds"}), "--seed", str(seed))


def runs_of(name: str, root: Path) -> list[Run]:
    """The runs of a job with seeds, by seed."""
    found = [run for run in all_runs(root) if run.name.startswith(name + INFIX)]
    numbered = [run for run in found if run.name.removeprefix(name + INFIX).lstrip("-").isdigit()]
    return sorted(numbered, key=lambda run: int(run.name.removeprefix(name + INFIX)))


def spread_lines(reports: Sequence[Report]) -> list[str]:
    """Mean and spread of the held-out figure over the seeds that are finished."""
    from scu_trainer.cli.comparison.seeds import spread

    return spread(list(_figures(reports)))


def _figures(reports: Sequence[Report]) -> Iterator[dict[str, Any]]:
    for report in reports:
        file = report.run.path / "scu_metrics.json"
        found = read_json(file) if file.is_file() else {}
        values = {
            f"held_out_{key}": (found.get(f"held_out_{key}_after") or {}).get("value") for key in ("bpt", "accuracy")
        }
        yield {"status": report.state.status, "metrics": values}
