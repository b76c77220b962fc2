"""Is anything lost when a run is killed? SIGKILL at random moments, then the same command again until it finishes.

    python benchmarks/loops/kill_campaign.py [--kills 100] [--seed 0]

The run has all three loops on (tests/faults/campaign.py: a tiny model, 12 steps, a checkpoint every 3 steps). Half of
the kills come just before a random disk operation (open for writing, rename, sync, remove), usually of a checkpoint;
the others come after a random time. A run is killed up to 8 times, then it may finish. It counts as unharmed if its
weights, its histories of lambda and of the curriculum, and its held-out figure equal those of an uninterrupted run in
every digit. Exit code 1 if one does not, or if a start did not resume from a complete checkpoint.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a pool of threads does not survive the fork of a start
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.common import write_result
from tests.faults import campaign
from tests.faults.conftest import Site, make_site

KILLS_PER_RUN = 8


class Chooser:
    """Chooses when the next start is killed: half by disk operation, half by time, while kills are ``left``."""

    def __init__(self, chance: random.Random, site: Site, whole_s: float, left: int) -> None:
        self._chance, self._site, self._whole_s, self._left = chance, site, whole_s, left
        self._is_disk = bool(chance.getrandbits(1))

    def __call__(self, start: int) -> tuple[str, float]:
        if start >= min(KILLS_PER_RUN, self._left):
            return "none", 0
        self._is_disk = not self._is_disk
        if self._is_disk:
            return "disk", self._chance.randint(1, self._site.disk_steps // 2)
        return "time", self._chance.uniform(0, self._whole_s / 2)


def run_all(site: Site, kills: int, seed: int, console: Console) -> dict[str, Any]:
    """Run the campaign. ``whole_s`` in the result: the time from the first output of an uninterrupted run to its end,
    measured on this machine."""
    chance, places, harmed = random.Random(seed), Counter(), []
    whole_s = seconds_of(site)
    starts = resumed = missed = runs = 0
    while sum(places.values()) < kills:
        run = site.folder / f"run_of_{runs}"
        choose = Chooser(chance, site, whole_s, kills - sum(places.values()))
        done = campaign.killed_until_done(site.flags(run), run, site.folder / "log", choose)
        places.update(done.kills)
        runs, starts = runs + 1, starts + done.starts
        resumed, missed = resumed + done.resumed, missed + done.missed
        different = campaign.differences(run, site.whole)
        harmed += [{"run": runs, "differs": different}] if different else []
        console.print(f"run {runs}: {sum(done.kills.values())} kills, {', '.join(different) or 'as the unbroken one'}")
    return {
        "kills": dict(sorted(places.items())),
        "runs": runs,
        "starts": starts,
        "starts_that_went_on": resumed,
        "starts_that_missed_a_checkpoint": missed,
        "runs_as_the_unbroken_one": runs - len(harmed),
        "harmed": harmed,
    }


def seconds_of(site: Site) -> float:
    run = site.folder / "timed"
    return campaign.Child(lambda: campaign.train(site.flags(run)), site.folder / "log").wait().seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options, console = parser.parse_args(), Console(width=100)
    with tempfile.TemporaryDirectory() as folder:
        result = run_all(make_site(Path(folder)), options.kills, options.seed, console)
    table = Table("what", "count", title=f"{options.kills} kills, seed {options.seed}")
    for place, count in result["kills"].items():
        table.add_row(f"killed {place}", str(count))
    for name in ("starts", "starts_that_went_on", "starts_that_missed_a_checkpoint", "runs"):
        table.add_row(name.replace("_", " "), str(result[name]))
    table.add_row("runs whose weights, histories and figure are those of the unbroken one, in every digit",
                  str(result["runs_as_the_unbroken_one"]))  # fmt: skip
    console.print(table)
    write_result("kill_campaign", {"seed": options.seed, **result})
    return 1 if result["harmed"] or result["starts_that_missed_a_checkpoint"] else 0


if __name__ == "__main__":
    sys.exit(main())
