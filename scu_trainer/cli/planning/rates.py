"""``scu-trainer plan --find_lr``: what was found, on a screen and as JSON."""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scu_trainer.control.rate_search import rate_of
from scu_trainer.errors import SettingsError

if TYPE_CHECKING:
    from scu_trainer.train.session.find_rate import FoundRate, Tried

ELSEWHERE = ("gpu", "ram", "limit", "output")
"""Options of a plan that nothing is trained for."""


def find(options: argparse.Namespace, flags: Sequence[str]) -> int:
    from rich.console import Console

    from scu_trainer.cli.configuration import read_job
    from scu_trainer.train.session.find_rate import find_rate

    odd = next((name for name in ELSEWHERE if getattr(options, name) is not None), None)
    if odd is not None:
        raise SettingsError(f"--find_lr trains on this machine, and --{odd} is of a memory plan; leave one of them out")
    console = Console(file=sys.stderr if options.json else sys.stdout, highlight=False)
    found = find_rate(read_job(options.config, flags), console)
    print(json.dumps(as_dict(found), indent=2) if options.json else screen(found))
    return 0


def as_dict(found: FoundRate) -> dict[str, Any]:
    """JSON-like. Losses in bits per token (or label); null where a training ended without a finite one."""
    return {
        "learning_rate": rate_of(found.asked, found.advice.chosen),
        "lowest": rate_of(found.asked, found.advice.lowest),
        "highest": rate_of(found.asked, found.advice.highest),
        "is_open": found.advice.is_open,
        "steps_of_training": found.all_steps,
        "share_of_training": round(found.share, 3),
        "seconds": round(found.seconds, 1),
        "tried": [_row(found, rung, exponent) for rung in found.rungs for exponent in sorted(rung.losses)],
    }


def _row(found: FoundRate, rung: Tried, exponent: int) -> dict[str, Any]:
    difference = rung.differences.get(exponent)
    return {
        "steps": rung.steps,
        "learning_rate": rate_of(found.asked, exponent),
        "held_out_bits": None if difference is None else rung.bits(exponent),
        "above_best_bits": None if difference is None else difference.value,
        "low": None if difference is None else difference.low,
        "high": None if difference is None else difference.high,
    }


def screen(found: FoundRate) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("steps", "learning_rate", "held out, bits", "above the best", "95 % interval"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in as_dict(found)["tried"]:
        table.add_row(*_cells(row))
    console = Console(file=io.StringIO(), width=80, color_system=None, highlight=False, markup=False)
    console.print(table)
    console.print(_advice(found))
    return console.file.getvalue().rstrip("\n")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    head = str(row["steps"]), f"{row['learning_rate']:.2e}"
    if row["held_out_bits"] is None:
        return *head, "not finite", "-", "-"
    if row["above_best_bits"] == 0:
        return *head, f"{row['held_out_bits']:.4f}", "the best", "-"
    interval = f"{row['low']:+.4f} to {row['high']:+.4f}"
    return *head, f"{row['held_out_bits']:.4f}", f"{row['above_best_bits']:+.4f}", interval


def _advice(found: FoundRate) -> str:
    chosen, lowest, highest = (
        f"{rate_of(found.asked, exponent):.2e}"
        for exponent in (found.advice.chosen, found.advice.lowest, found.advice.highest)
    )
    among = "no other is that good" if lowest == highest else f"between {lowest} and {highest} are not told apart"
    open_end = (
        f"\nThe best is at the end of what was tried; begin the search there: --learning_rate {chosen}"
        if found.advice.is_open
        else ""
    )
    return (
        f"\nlearning_rate: {chosen} ({among})"
        f"\nIt took {sum(len(rung.losses) for rung in found.rungs)} short trainings: {found.share:.0%} of the steps of the "
        f"whole training, {math.ceil(found.seconds)} s.{open_end}"
    )
