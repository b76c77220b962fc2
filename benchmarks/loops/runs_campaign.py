"""Is the status of a background run ever wrong, and is anything lost or left behind? Random starts, stops and kills.

    python benchmarks/loops/runs_campaign.py [--cycles 100] [--seed 0]

Each cycle has two detached runs of a tiny model (tests/runs/background.py) on one device: one trains, the other waits
in the queue. After random times each is stopped, stopped with --now, killed with SIGKILL, or left alone; later cycles
resume stopped and killed runs. After every event the status is compared with the state of the system, and the
checkpoints are compared with the earlier ones. At the end every run is resumed until it is finished, and compared with
an uninterrupted run. A fifth of the runs have a loader worker. Exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a pool of threads does not survive the fork of a start
os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.common import write_result
from tests.faults import campaign
from tests.faults.conftest import Site, make_site
from tests.runs import background

STATUS_CALLS = 10


def run_all(site: Site, cycles: int, seed: int, longest_s: float, console: Console) -> dict[str, Any]:
    chance, root, begun_s = random.Random(seed), site.folder / "runs", time.monotonic()
    config = background.configuration(site.model, site.documents, site.folder / "cache")
    tried = background.Campaign(root, config, chance, longest_s, with_worker=0.2)
    try:
        for number in range(1, cycles + 1):
            tried.cycle()
            if number % 10 == 0:
                console.print(f"{number} cycles, {tried.names} runs, {len(tried.found.wrong)} wrong")
        names = tried.finish()
        harmed = {name: found for name in names if (found := campaign.differences(root / name, site.whole))}
        status_s = seconds_of_status(root, root / names[0])
    finally:
        tried.end_all()
    return {
        "cycles": cycles,
        "runs": len(names),
        "starts": len(tried.supervisors),
        "events": dict(sorted(tried.found.events.items())),
        "looks": tried.found.looks,
        "longest_look_s": round(tried.found.longest_look_s, 4),
        "status_command_s": status_s,
        "wrong": tried.found.wrong,
        "runs_as_the_unbroken_one": len(names) - len(harmed),
        "harmed": harmed,
        "wall_s": round(time.monotonic() - begun_s, 1),
    }


def seconds_of_status(root: Path, run: Path) -> dict[str, float]:
    """Return the median seconds of the status command, including the interpreter, for one run and for all."""
    found = {}
    for what, words in (("one", [str(run)]), ("all", ["--root", str(root)])):
        times = []
        for _ in range(STATUS_CALLS):
            begun_s = time.perf_counter()
            script = Path(__file__).resolve().parents[2] / "scripts" / "runs.py"
            subprocess.run([sys.executable, str(script), "status", *words], check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - begun_s)
        found[what] = round(sorted(times)[STATUS_CALLS // 2], 3)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest_s", type=float, default=1.0, help="a random time between two events is at most this")
    options, console = parser.parse_args(), Console(width=100)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SCU_TRAINER_CACHE"] = str(Path(folder) / "lines")
        result = run_all(make_site(Path(folder)), options.cycles, options.seed, options.longest_s, console)
    table = Table("what", "count", title=f"{options.cycles} cycles, seed {options.seed}")
    for name, count in result["events"].items():
        table.add_row(name, str(count))
    for name in ("runs", "starts", "looks", "longest_look_s", "status_command_s", "runs_as_the_unbroken_one", "wall_s"):
        table.add_row(name.replace("_", " "), str(result[name]))
    table.add_row("wrong", str(len(result["wrong"])))
    console.print(table)
    for line in result["wrong"][:20]:
        console.print(line)
    write_result("runs_campaign", {"seed": options.seed, **result})
    return 1 if result["wrong"] or result["harmed"] else 0


if __name__ == "__main__":
    sys.exit(main())
