"""How long does the list of `scu-trainer board` take with many runs? Measured with real run files and the real app.

    python benchmarks/headline/board.py [--runs 1000] [--steps 1000] [--quick]

Writes run directories with histories, then requests the list as a browser does: the first time, when every run is read;
again, when nothing has changed; and after one run has changed. One page of a run is drawn, too. The figures are
absolute seconds on this machine, with warm disk caches, because the files have just been written.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import httpx

from benchmarks.lib.common import write_result
from scu_trainer.board.acts import RunActions
from scu_trainer.board.app import Board
from tests.report.made_runs import make_run

MOST_S = 2.0
REPEATS = 5


def make(root: Path, runs: int, steps: int) -> None:
    first = make_run(root / "run-0000", steps=steps)
    for number in range(1, runs):
        shutil.copytree(first, root / f"run-{number:04d}")


def seconds(board: Board, path: str) -> float:
    async def ask() -> float:
        transport = httpx.ASGITransport(board.application())
        async with httpx.AsyncClient(transport=transport, base_url="http://board") as client:
            begun_s = time.perf_counter()
            answer = await client.get(path)
            assert answer.status_code == 200, answer.text
            return time.perf_counter() - begun_s

    return asyncio.run(ask())


def measure(root: Path, runs: int) -> dict[str, float]:
    # Each time a new board, with an empty cache.
    first = [seconds(Board(root, RunActions([], None)), "/") for _ in range(REPEATS)]
    board = Board(root, RunActions([], None))
    seconds(board, "/")
    again, changed = [], []
    for _ in range(REPEATS):
        again.append(seconds(board, "/"))
        (root / f"run-{runs - 1:04d}" / "run.json").touch()
        changed.append(seconds(board, "/"))
    return {
        "first_s": statistics.median(first),
        "first_slowest_s": max(first),
        "again_s": statistics.median(again),
        "one_changed_s": statistics.median(changed),
        "filtered_s": seconds(board, "/?name=run-00&state=finished"),
        "one_run_s": seconds(board, "/run/run-0000"),
        "one_run_again_s": seconds(board, "/run/run-0000"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="50 runs of 60 steps; writes no result")
    options = parser.parse_args()
    runs, steps = (50, 60) if options.quick else (options.runs, options.steps)
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), runs, steps)
        found = measure(Path(folder), runs)
    for name, value in found.items():
        print(f"{name:<16} {value:.3f}")
    print(f"{runs} runs of {steps} steps: first list in {found['first_slowest_s']:.2f} s at most")
    if not options.quick:
        write_result("board", {"runs": runs, "steps": steps, **found})
    return int(found["first_slowest_s"] > MOST_S)


if __name__ == "__main__":
    sys.exit(main())
