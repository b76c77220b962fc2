"""Compare the memory that ``scu-trainer plan`` predicts for a run with the memory that the run needs.

    python benchmarks/headline/memory_estimate.py                        # CPU: about 25 minutes on two cores
    python benchmarks/headline/memory_estimate.py --limits               # and under hard limits: an hour more
    python benchmarks/headline/memory_estimate.py --device cuda --limits  # one card of 24 GB or more
    python benchmarks/headline/memory_estimate.py --cases cuda --tiny    # the same trainings, tiny: do they all run?
    python benchmarks/headline/memory_estimate.py --predict_only         # new predictions for the stored measurements

Each training is the real command on rows that fill ``block_size``, run --repeats times in a fresh process. Measured is
the peak of the process during an optimizer step, above what it held before the model was loaded: resident memory on a
CPU, live tensors (torch.cuda.max_memory_allocated) on a GPU. Other columns: the same with a C library that returns
freed blocks immediately (--exact), so that only live memory counts; and the peak that a thread next to the run
observes.

--limits: some of the trainings again, without recovery from out-of-memory, under a limit relative to their measured
need: RLIMIT_DATA on a CPU (float32, one thread, without oneDNN), the memory fraction of the allocator on CUDA. If a run
fails although ``plan --limit`` says that it fits, the plan is wrong; if it succeeds although the plan says that it does
not fit, the plan is only cautious.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, Optional

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.common import earlier, write_result
from benchmarks.lib.memory_estimate.bench import Bench
from benchmarks.lib.memory_estimate.cases import CASES, named, tiny
from benchmarks.lib.memory_work import MIB

NAME = "memory_estimate"
MEDIAN_TARGET, WORST_TARGET = 0.10, 0.25
LIMITED = {
    "cpu": [
        "llama full",
        "gpt2 full",
        "qwen2 full adafactor",
        "llama wide lora",
        "llama 64k tied lora whole logits",
        "gru full",
    ],
    "cuda": ["1b lora", "1b qlora checkpointed", "1b full", "gpt2 full float32", "resnet50 full", "gru full"],
}


# -- report ------------------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(title="peak of a step above what the process held before there was a model, MiB")
    for name in ("training", "measured", "noise", "exact", "predicted", "error", "parts"):
        shown.add_column(name, justify="left" if name in ("training", "parts") else "right")
    for row in rows:
        parts = ", ".join(f"{name} {_mib(size)}" for name, size in row.get("parts", {}).items() if size >= MIB)
        error = _percent(row.get("error"), "+")
        figures = (_mib(row["measured_bytes"]), _percent(row["noise"]), _mib(row["exact_bytes"]))
        shown.add_row(row["name"], *figures, _mib(row.get("predicted_bytes")), error, parts)
    return shown


def limit_table(rows: list[dict[str, Any]]) -> Table:
    heads = ("training", "limit", "MiB", "ended", "plan", "")
    shown = Table(*heads, title="under a hard limit, as a share of what the run takes without one")
    for row in rows:
        says = {None: "-", True: "fits", False: "does not fit"}[row["plan_fits"]]
        wrong = "WRONG" if is_wrong(row) else ""
        shown.add_row(row["name"], f"{row['share']:.2f}", _mib(row["limit_bytes"]), row["ended"], says, wrong)
    return shown


def is_wrong(row: dict[str, Any]) -> bool:
    return bool(row["plan_fits"]) and row["ended"] != "finished"


def _percent(share: Optional[float], sign: str = "") -> str:
    return "-" if share is None else f"{share:{sign}.1%}"


def _mib(size: Optional[int]) -> str:
    return "-" if size is None else f"{size / MIB:.0f}"


def summary(rows: list[dict[str, Any]], limits: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(row["error"]) for row in rows if "error" in row]
    noises = [row["noise"] for row in rows if row["noise"] is not None]
    return {
        "targets": {"median_error": MEDIAN_TARGET, "worst_error": WORST_TARGET},
        "compared": len(errors),
        "median_error": median(errors) if errors else None,
        "worst_error": max(errors) if errors else None,
        "median_noise": median(noises) if noises else None,
        "fits_said_of_runs_that_died": sum(map(is_wrong, limits)),
    }


def merged(key: str, rows: list[dict[str, Any]], names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Merge ``rows`` into the stored rows, and replace those of the same runs."""
    now = {tuple(row[name] for name in names): row for row in rows}
    before = {tuple(row[name] for name in names): row for row in earlier(NAME).get(key, [])}
    return list((before | now).values())


def write(rows: list[dict[str, Any]], limits: list[dict[str, Any]]) -> None:
    rows = merged("results", rows, ("name", "device"))
    limits = merged("limits", limits, ("name", "device", "share"))
    write_result(NAME, {**summary(rows, limits), "results": rows, "limits": limits})


def report(given: argparse.Namespace, bench: Bench) -> None:
    cases = named(CASES[given.cases or given.device], given.only)
    cases = [tiny(case) for case in cases] if given.tiny else cases
    known = {(row["name"], row["device"]): row for row in earlier(NAME).get("results", [])}
    rows, limits = [], []
    for case in cases:
        if given.predict_only:
            row = known.get((case.name, given.device))
        else:
            row = bench.measure(case, given.repeats, given.exact)
        if row is None:
            continue
        rows.append(bench.compared(row, case))
        if not given.tiny:
            write(rows, limits)
    Console(width=160).print(table(rows))
    for case in cases if given.limits else ():
        if case.name in LIMITED[given.device]:
            limits += bench.limited(case)
            if not given.tiny:
                write(rows, limits)
    if limits:
        Console(width=160).print(limit_table(limits))
    Console(width=160).print(summary(rows, limits))


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--cases", choices=list(CASES), help="default: those of the device")
    parser.add_argument("--only", nargs="+", default=[], help="parts of the names of the trainings")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--exact", action="store_true", help="also with a C library that keeps nothing")
    parser.add_argument("--tiny", action="store_true", help="next to no work; nothing is written")
    parser.add_argument("--limits", action="store_true", help="also under hard limits")
    parser.add_argument("--predict_only", action="store_true", help="measure nothing, take the stored figures")
    parser.add_argument("--no_prediction", action="store_true", help="measure only")
    parser.add_argument("--scratch", type=Path, help="folder that keeps the models; default: a temporary one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = given.scratch or Path(folder)
        scratch.mkdir(parents=True, exist_ok=True)
        report(given, Bench(given.device, scratch, not given.no_prediction))


if __name__ == "__main__":
    main()
