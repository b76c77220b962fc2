"""1 -> 2 ranks: see scaling.py. As a script, with ``contender ranks quick file``, it is one rank under torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.lib.memory_work import Lengths, Shape, TokenRows
from benchmarks.lib.outcome import Figure, Grid, figure
from benchmarks.lib.text_job import WORKERS, Job, held_out_bits
from benchmarks.lib.turns import StepSeconds
from scu_trainer.train.run_directory.logs import run_log

REPEATS = 2
CONTENDERS, RANKS = ("stock", "ours"), (1, 2)
WARM_UP_STEPS = 3
LONGEST_S = 300


@dataclass(frozen=True)
class RankJob(Job):
    """The job of one of ``ranks`` processes. Rows are drawn for all processes together."""

    ranks: int = 1

    def token_rows(self) -> TokenRows:
        return TokenRows(
            self.lengths.draw(self.steps * self.step_rows * self.ranks, self.shape.longest_row), self.shape.vocab
        )

    def among(self, ranks: int) -> RankJob:
        """Return the job with the same rows per optimizer step, distributed to ``ranks`` processes."""
        return replace(self, accumulation=self.accumulation // ranks, ranks=ranks)


FULL = RankJob(Shape(2048, 256, 3, 256), Lengths("alpaca", 100, 0.6), steps=14, batch_rows=8, accumulation=2)
QUICK = RankJob(Shape(64, 32, 1, 32), Lengths("quick", 16, 0.6), steps=6, batch_rows=2, accumulation=2)

Run = dict[str, Any]
"""``step_s``: seconds of each optimizer step; ``step_tokens``: predicted tokens of each; ``held_out_bits``."""


def rank(contender: str, ranks: int, quick: bool, answer: Path) -> None:
    """Run one process of a run. The main process writes the results to ``answer``."""
    torch.set_num_threads(1)
    job, clock = (QUICK if quick else FULL).among(ranks), StepSeconds()
    work, settings = WORKERS[contender]
    with run_log():
        model, step_tokens = work(job, clock, **settings)
    if int(os.environ["RANK"]) == 0:
        found = {"step_s": clock.seconds, "step_tokens": step_tokens, "held_out_bits": held_out_bits(model, job)}
        answer.write_text(json.dumps(found))
    if ranks > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def launched(contender: str, ranks: int, quick: bool) -> Run:
    """Launch a run with torchrun, and return its results. Raises RuntimeError if a rank fails."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += [__file__, contender, str(ranks), str(int(quick)), str(answer)]
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
        launcher = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=one_thread,
            start_new_session=True,
        )
        try:
            _, said = launcher.communicate(timeout=LONGEST_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # otherwise its ranks would outlive it
                os.killpg(launcher.pid, signal.SIGKILL)
        if launcher.returncode:
            raise RuntimeError(f"{contender} with {ranks} ranks ended with {launcher.returncode}: {said[-2000:]}")
        return json.loads(answer.read_text())


def measure(repeats: int, quick: bool) -> tuple[str, Grid, dict[str, Figure], list[Any]]:
    rounds = []
    for number in range(repeats):
        contenders = CONTENDERS if number % 2 == 0 else CONTENDERS[::-1]
        rounds.append(
            {f"{contender} {ranks}": launched(contender, ranks, quick) for ranks in RANKS for contender in contenders}
        )
    grid, figures = summary(rounds)
    results = [{"run": name, "round": number, **run} for number, one in enumerate(rounds) for name, run in one.items()]
    return "1 -> 2 ranks, the same rows per optimizer step", grid, figures, results


def rate(run: Run) -> float:
    """Return the median over steps of the predicted tokens per second, because steps differ in their tokens."""
    seconds, tokens = run["step_s"][WARM_UP_STEPS:], run["step_tokens"][WARM_UP_STEPS:]
    return median(count / second for count, second in zip(tokens, seconds, strict=False))


def summary(rounds: list[Mapping[str, Run]]) -> tuple[Grid, dict[str, Figure]]:
    """Return the table and the figures. ``rounds``: the runs of each round, by "contender ranks"."""
    gain = {
        contender: [rate(one[f"{contender} 2"]) / rate(one[f"{contender} 1"]) for one in rounds]
        for contender in CONTENDERS
    }
    against = {ranks: [rate(one[f"ours {ranks}"]) / rate(one[f"stock {ranks}"]) for one in rounds] for ranks in RANKS}
    last = rounds[-1]
    rows = []
    for contender in CONTENDERS:
        for ranks in RANKS:
            rows.append(
                [
                    f"{contender}, {ranks} rank{'s' if ranks > 1 else ''}",
                    "1" if ranks == 1 else f"{median(gain[contender]):.2f}",
                    f"{median(against[ranks]):.2f}" if contender == "ours" else "",
                    f"{last[f'{contender} {ranks}']['held_out_bits']:.4f}",
                ]
            )
    heads = ["contender", "tokens per second over 1 rank", "ours / stock", "held-out bits per token"]
    figures = {
        f"2 ranks over 1, {contender}": figure(gain[contender], "higher" if contender == "ours" else None)
        for contender in reversed(CONTENDERS)
    }
    figures |= {f"{ranks} rank{'s' if ranks > 1 else ''}, ours / stock": figure(against[ranks], "higher", 1.0)
                for ranks in RANKS}  # fmt: skip
    return Grid(heads, rows), figures


if __name__ == "__main__":
    rank(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1", Path(sys.argv[4]))
