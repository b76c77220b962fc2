"""Run benchmarks of the suite again, and report which figures changed since the stored results.

    python benchmarks/headline/regressions.py [NAME ...] [--found FOLDER] [--keep FOLDER]

Each NAME.json in results/ records the command that made it. That command runs again, with its results in a scratch
folder, or in that of --keep; results/ is not changed. --found compares existing files and runs nothing. Without a NAME,
every benchmark of the suite runs, which takes about an hour.

A figure has changed if it differs by more than the spread of the repeats of both runs, and by more than 3 %.
Differences of the machine and of versions are printed first, because they may be the cause. Figures of other projects
are reported but not judged. Exit code 1 if a figure got worse, 2 if a benchmark wrote no new results or a name is
unknown, else 0.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.outcome import Figure

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LEAST_SHARE = 0.03
"""Relative change below which no figure counts as changed, because the noise of a figure measured once is unknown."""


@dataclass(frozen=True)
class Moved:
    name: str
    before: Optional[float]
    now: Optional[float]
    noise: float
    verdict: str

    @property
    def change(self) -> str:
        return "-" if not self.before or self.now is None else f"{self.now / self.before - 1:+.1%}"


def suite() -> dict[str, Path]:
    """Return the result files with figures, by the name of the benchmark."""
    paths = sorted(RESULTS.glob("*.json"))
    return {path.stem: path for path in paths if "figures" in json.loads(path.read_text())}


def compared(before: dict[str, Any], now: dict[str, Any]) -> list[Moved]:
    """Compare the figures of two records of one benchmark. A figure that only one record has is a row, too."""
    names = [*before["figures"], *(name for name in now["figures"] if name not in before["figures"])]
    return [_moved(name, before["figures"].get(name), now["figures"].get(name)) for name in names]


def _moved(name: str, before: Optional[dict[str, Any]], now: Optional[dict[str, Any]]) -> Moved:
    if before is None or now is None:
        known = before or now
        value = known["value"]
        here = (value, None, "gone") if now is None else (None, value, "new")
        return Moved(name, here[0], here[1], 0.0, here[2])
    noise = max(LEAST_SHARE, before["spread"] or 0.0, now["spread"] or 0.0)
    bound = max(noise * abs(before["value"]), before.get("tolerance", 0.0), now.get("tolerance", 0.0))
    return Moved(name, before["value"], now["value"], noise, _verdict(before, now, bound))


def _verdict(before: dict[str, Any], now: dict[str, Any], bound: float) -> str:
    difference = now["value"] - before["value"]
    if abs(difference) <= bound:
        return "as before, target now missed" if Figure(**before).is_met > Figure(**now).is_met else "as before"
    if now["better"] is None:
        return "moved, nobody's aim"
    return "better" if (difference > 0) == (now["better"] == "higher") else "WORSE"


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the other differences: machine, versions, command."""
    lines = []
    for part in ("machine", "versions"):
        names = sorted(set(before[part]) | set(now[part]))
        pairs = ((name, before[part].get(name), now[part].get(name)) for name in names)
        lines += [f"{name}: {old} before, {new} now" for name, old, new in pairs if old != new]
    if before["command"] != now["command"]:
        lines.append(f"command: {before['command']} before, {now['command']} now")
    return lines


def run_again(record: dict[str, Any], folder: Path) -> int:
    """Run the command of a record again, and return its exit code."""
    words = shlex.split(record["command"])
    script = ROOT / words[1]
    environment = {**os.environ, "BENCHMARK_RESULTS": str(folder)}
    return subprocess.run([sys.executable, str(script), *words[2:]], env=environment).returncode


def show(console: Console, name: str, before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Print the comparison of one benchmark, and return whether a figure got worse."""
    table = Table(title=f"{name}: {before['date']} and {now['date']}")
    for number, head in enumerate(("figure", "before", "now", "change", "noise", "")):
        table.add_column(head, justify="right" if 0 < number < 5 else "left")
    moved = compared(before, now)
    for one in moved:
        numbers = ("-" if value is None else f"{value:.4g}" for value in (one.before, one.now))
        table.add_row(one.name, *numbers, one.change, f"{one.noise:.0%}", one.verdict)
    console.print(*(f"not the same: {line}" for line in differences(before, now)), table, sep="\n", highlight=False)
    return any(one.verdict in ("WORSE", "gone") for one in moved)


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = suite()
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--found", type=Path, help="folder with newer results: nothing runs")
    parser.add_argument("--keep", type=Path, help="folder for the newer results; default: a scratch folder")
    given = parser.parse_args(argv)
    names = given.names or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no results with figures for {', '.join(unknown)}; there are {', '.join(known)}")
    console = Console(width=140)
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.found or given.keep or Path(scratch)
        verdicts = {name: _one(console, name, known[name], folder, runs=given.found is None) for name in names}
    worse = [name for name, verdict in verdicts.items() if verdict is True]
    absent = [name for name, verdict in verdicts.items() if verdict is None]
    console.print(f"worse: {', '.join(worse)}" if worse else "nothing got worse", highlight=False)
    if absent:
        console.print(f"no newer results of {', '.join(absent)}", highlight=False)
    return 1 if worse else 2 if absent else 0


def _one(console: Console, name: str, path: Path, folder: Path, runs: bool) -> Optional[bool]:
    """Compare one benchmark, and return whether a figure got worse; None without new results."""
    before = json.loads(path.read_text())
    newer = folder / path.name
    if runs:
        folder.mkdir(parents=True, exist_ok=True)
        newer.unlink(missing_ok=True)
        code = run_again(before, folder)
        if code:
            console.print(f"{before['command']} ended with {code}", highlight=False)
    if not newer.is_file():
        return None
    return show(console, name, before, json.loads(newer.read_text()))


if __name__ == "__main__":
    sys.exit(main())
