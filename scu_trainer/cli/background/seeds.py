"""``seeds`` of a background job: one queued run ``NAME-seedN`` for each seed, and the spread of their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from scu_trainer.cli.comparison.plan import refuse_push
from scu_trainer.cli.names.translation import flags_of, without
from scu_trainer.run_files import read_object_or_empty
from scu_trainer.runs.state import Report
from scu_trainer.runs.store import Run, all_runs

SEED_INFIX = "-seed"


def seeds_of(entries: Mapping[str, Any], flags: Sequence[str]) -> list[int]:
    """Return the seeds of a job that ``check_early`` accepted; flags override the file. Raises SettingsError if several
    seeds would push to the Hub."""
    typed = dict(flags_of(flags))
    given = typed.get("seeds", entries.get("seeds"))
    values = given if isinstance(given, list) else [] if given is None else [given]
    if len(values) > 1:
        refuse_push(typed.get("push_to_hub", entries.get("push_to_hub")), "seed")
    return [int(value) for value in values]


def configuration_with_seed(
    entries: Mapping[str, Any], text: str, flags: Sequence[str], seed: int
) -> tuple[str, tuple[str, ...]]:
    """Return the text of the configuration and the flags of the run with ``seed``."""
    if "seeds" in entries:
        text = yaml.safe_dump({name: value for name, value in entries.items() if name != "seeds"}, sort_keys=False)
    return text, (*without(flags, {"seeds"}), "--seed", str(seed))


def runs_of(name: str, root: Path) -> list[Run]:
    """Return the runs of a job with seeds, ordered by seed."""
    candidates = [run for run in all_runs(root) if run.name.startswith(name + SEED_INFIX)]
    numbered = [run for run in candidates if run.name.removeprefix(name + SEED_INFIX).lstrip("-").isdigit()]
    return sorted(numbered, key=lambda run: int(run.name.removeprefix(name + SEED_INFIX)))


def spread_lines(reports: Sequence[Report]) -> list[str]:
    """Return lines with the mean and spread of the held-out figure over the finished seeds."""
    from scu_trainer.cli.comparison.seeds import seed_spread_lines

    return seed_spread_lines(list(_figures(reports)))


def _figures(reports: Sequence[Report]) -> Iterator[dict[str, Any]]:
    for report in reports:
        metrics = read_object_or_empty(report.run.path / "scu_metrics.json")
        values = {
            f"held_out_{key}": (metrics.get(f"held_out_{key}_after") or {}).get("value") for key in ("bpt", "accuracy")
        }
        yield {"status": report.state.status, "metrics": values}
