"""The runs of memory_estimate.py: the memory that a training needs, its prediction, and training under a limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Optional

import psutil

from benchmarks.lib.memory_estimate.cases import Case, flags_of, make_model
from benchmarks.lib.memory_work import EXACT_MEMORY, MIB

ROOT = Path(__file__).parents[3]
SHARES = (0.8, 0.9, 0.95, 1.05, 1.2)
OUT_OF_MEMORY = (
    "can't allocate memory",
    "Cannot allocate memory",
    "MemoryError",
    "out of memory",
    "bad_alloc",
    "failed to map segment",
)
SAMPLED_EVERY_S = 0.02

NO_SPINNING = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads that spin while they wait make a step ten times as slow on a machine with other load."""


class Bench:
    """Runs trainings. ``device``: cpu or cuda. ``scratch``: folder of models and runs. ``predicts``: predict too."""

    def __init__(self, device: str, scratch: Path, predicts: bool = True) -> None:
        self.device, self.scratch, self.predicts = device, scratch, predicts

    def flags(self, case: Case) -> list[str]:
        folder = None if case.model is None else self.scratch / case.model
        if folder is not None and not folder.is_dir():
            make_model(case.model, folder, self.device)
        return [*flags_of(case, folder), *(["--use_cpu", "true"] if self.device == "cpu" else [])]

    # -- measured --

    def run(
        self, flags: Sequence[str], *options: str, allocator: Optional[dict[str, str]] = None, threads: int = 2
    ) -> dict[str, Any]:
        """Run a training in a fresh process. Returns ``code``, ``error`` (the last output) and on success ``bytes``."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            facts, output_dir = Path(folder) / "facts.json", Path(folder) / "run"
            script = str(Path(__file__).with_name("run.py"))
            command = [sys.executable, script, str(facts), *options, *flags, "--output_dir", str(output_dir)]
            environment = {**os.environ, **(allocator or {}), "OMP_NUM_THREADS": str(threads), **NO_SPINNING}
            begun_s = time.monotonic()
            process = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            sampler = Sampler(process.pid)
            _, words = process.communicate()
            found = {"code": process.returncode, "error": words[-3000:], "seconds": time.monotonic() - begun_s}
            if process.returncode or not facts.is_file():
                return found
            seen = json.loads(facts.read_text())
            costs = json.loads((output_dir / "scu_metrics.json").read_text())["costs"]
        before = costs["before_model_bytes"]
        return {
            **found,
            "bytes": seen["step_peak_bytes"] - before,
            "sampled_bytes": sampler.highest_bytes() - before if self.device == "cpu" else None,
            "before_model_bytes": before,
            **seen,
        }

    def measure(self, case: Case, repeats: int, exact: bool) -> dict[str, Any]:
        """Measure the memory of a training. Raises RuntimeError if the training fails."""
        flags = self.flags(case)
        runs = [self._good(flags) for _ in range(repeats)]
        taken = [run["bytes"] for run in runs]
        require_full_rows(case, flags, runs[0]["longest_row"])
        return {
            "name": case.name,
            "device": self.device,
            "flags": shown_flags(flags),
            "measured_bytes": int(median(taken)),
            "repeats": taken,
            "noise": (max(taken) - min(taken)) / median(taken) if repeats > 1 else None,
            "exact_bytes": self._good(flags, allocator=EXACT_MEMORY)["bytes"] if exact else None,
            "sampled_bytes": max((run["sampled_bytes"] for run in runs if run["sampled_bytes"]), default=None),
            **{
                name: runs[0][name]
                for name in ("weight_bytes", "trained_bytes", "optimizer_bytes", "before_model_bytes", "longest_row")
            },
            "steps": runs[0]["steps"],
            "seconds": runs[0]["seconds"],
        }

    def _good(self, flags: Sequence[str], **changes: Any) -> dict[str, Any]:
        found = self.run(flags, **changes)
        if "bytes" not in found:
            raise RuntimeError(f"exit code {found['code']} of {' '.join(flags)}: {found['error']}")
        return found

    # -- predicted --

    def predicted(self, flags: Sequence[str], limit_bytes: Optional[int] = None) -> dict[str, Any]:
        """Return the output of ``plan --json``. Raises RuntimeError if there is none."""
        limit = [] if limit_bytes is None else ["--limit", f"{limit_bytes / MIB:.1f}MiB"]
        command = [str(Path(sys.executable).with_name("scu-trainer")), "plan", "--json", *limit, *flags]
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if not answer.stdout.lstrip().startswith("{"):
            raise RuntimeError(f"exit code {answer.returncode} of {' '.join(command)}: {answer.stderr[-2000:]}")
        return json.loads(answer.stdout)

    def compared(self, row: dict[str, Any], case: Case) -> dict[str, Any]:
        if not self.predicts:
            return row
        found = self.predicted(self.flags(case))["predicted"]
        error = found["peak_bytes"] / row["measured_bytes"] - 1
        return {**row, "predicted_bytes": found["peak_bytes"], "parts": found["parts"], "error": error}

    # -- under a limit --

    def limited(self, case: Case) -> list[dict[str, Any]]:
        """Measure the need of the training without a limit, then test whether it succeeds under each share of that."""
        flags = [*self.flags(case), "--memory_control", "false"]
        plain = {"threads": 1} if self.device == "cpu" else {}
        whole = self.run(flags, "--limitable", **plain)
        if "bytes" not in whole:
            raise RuntimeError(f"exit code {whole['code']} of {' '.join(flags)}: {whole['error']}")
        return [self._under(case, flags, share, whole["bytes"], plain) for share in SHARES]

    def _under(
        self, case: Case, flags: list[str], share: float, whole_bytes: int, plain: dict[str, int]
    ) -> dict[str, Any]:
        limit_bytes = int(share * whole_bytes)
        run = self.run(flags, "--limitable", "--limit_bytes", str(limit_bytes), **plain)
        plan = self.predicted(flags, limit_bytes) if self.predicts else None
        return {
            "name": case.name,
            "device": self.device,
            "share": share,
            "limit_bytes": limit_bytes,
            "ended": ended(run),
            "plan_fits": None if plan is None else plan["fits"],
            "predicted_bytes": None if plan is None else plan["predicted"]["peak_bytes"],
        }


class Sampler:
    """Samples the resident memory of another process, including loading and saving."""

    def __init__(self, pid: int) -> None:
        self._process, self._highest_bytes = psutil.Process(pid), 0
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        try:
            while self._process.status() != psutil.STATUS_ZOMBIE:
                self._highest_bytes = max(self._highest_bytes, self._process.memory_info().rss)
                time.sleep(SAMPLED_EVERY_S)
        except psutil.NoSuchProcess:  # the process has ended, which is the usual end of sampling
            return

    def highest_bytes(self) -> int:
        self._thread.join()
        return self._highest_bytes


def ended(run: dict[str, Any]) -> str:
    if run["code"] == 0:
        return "finished"
    if run["code"] < 0:
        return f"killed by {signal.Signals(-run['code']).name}"
    return "out of memory" if any(text in run["error"] for text in OUT_OF_MEMORY) else f"failed: {run['error'][-300:]}"


def require_full_rows(case: Case, flags: Sequence[str], longest_row: int) -> None:
    """Raise RuntimeError if the rows are shorter than the plan must assume."""
    if "--block_size" not in flags:
        return
    length = int(flags[len(flags) - 1 - flags[::-1].index("--block_size") + 1])
    if longest_row != length:
        raise RuntimeError(f"{case.name}: the longest row has {longest_row} tokens, and block_size is {length}")


def shown_flags(flags: Sequence[str]) -> str:
    """Return the flags as text, without the scratch folder."""
    words = list(flags)
    if "--model_name_or_path" in words:
        place = words.index("--model_name_or_path") + 1
        words[place] = Path(words[place]).name
    return " ".join(words)
