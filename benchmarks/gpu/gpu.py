"""How fast, in how much memory, and at what share of the peak of the GPU are models of 1 to 8 billion weights tuned?

    python benchmarks/gpu/gpu.py [--shapes 8b 1b 3b] [--tuning lora qlora full] [--contenders stock ours ...]
                             [--lengths chat|alpaca|fixed] [--steps 12] [--repeats 3] [--minutes 60]

The models are Llamas of the sizes of Llama 3 with random weights (gpu_shapes.py describes their precision), with rows
of different lengths up to 2048 tokens, LoRA of rank 16 on all linear layers, QLoRA or full tuning, bf16, and activation
checkpointing. The contenders are the stock Trainer, TRL with its defaults and with its fast options (padding-free rows,
packing, flash attention, Liger), ours, Unsloth and Axolotl (gpu_work.py describes each). All take the same optimizer
steps on the same rows, except for packing, which fills rows up. The held-out loss afterwards proves that.

A point is one contender with one model. It runs in its own process: 4 warm-up steps, then --steps steps with a device
synchronization only before and after them, then one step in which waits of the host are counted. The points run one
after the other, with all contenders of a model in turn, and everything --repeats times. Real tokens are predicted
tokens, without padding. Peaks are those of torch's allocator during training, and the memory that it reserved. MFU is
our count of model FLOPs (scu_trainer/train/loops/flops.py, without padding and recomputation) at the measured tokens
per second, divided by the bf16 peak that the manufacturer states (scu_trainer/hardware/presets.py, or --peak_tflops);
"-" for a GPU without a known peak.

The first entries of --shapes, --tuning and --contenders are measured first. When --minutes are over, the points that
were not measured are listed. The result file is written after every point; points of an earlier run on the same GPU
with the same work are kept. A contender that cannot run, or runs out of memory, is a row with the reason; one that
fails also causes exit code 1. Exit code 2 means that there is no CUDA device. --quick runs all code paths on tiny
models, on the CPU (or with --device cuda), and writes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu import gpu_table
from benchmarks.gpu.gpu_shapes import SHAPES, TUNINGS
from benchmarks.gpu.gpu_work import CONTENDERS, LENGTHS, Point, obstacle, result_of
from benchmarks.lib.common import not_repeated
from benchmarks.lib.outcome import finish

NAME = "gpu"
RAN = ("measured", "out of memory", "failed")
KEYS = ("card", "work", "shape", "tuning", "contender")
SUBJECT = ("shape", "tuning", "contender")
TINY = {"lengths": "tiny", "steps": 2, "batch_rows": 4, "accumulation": 2}
SHOWN_ERROR = 2000
"""Number of characters of the output of a failed process that are shown."""


def points_of(given: argparse.Namespace) -> list[Point]:
    """Return the points in the order in which they are measured."""
    work = TINY if given.quick else {name: getattr(given, name) for name in TINY}
    fixed = {
        "device": given.device,
        "checkpointing": given.gradient_checkpointing,
        "full_dtype": given.full_dtype,
        "flash": given.flash,
    }
    return [
        Point(shape, tuning, contender, repeat, **work, **fixed)
        for repeat in range(1, given.repeats + 1)
        for shape in (["tiny"] if given.quick else given.shapes)
        for tuning in given.tuning
        for contender in given.contenders
    ]


# -- one after the other -----------------------------------------------------------------------------------------------


def measured(points: Sequence[Point], seconds: float, in_this_process: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the result of each point, which is "not run" for points that do not fit into ``seconds``.

    ``in_this_process``: run points in this process to save imports, except the first, and those that change libraries.
    """
    ends_s = time.monotonic() + seconds
    for number, point in enumerate(points):
        reason = obstacle(point)
        left_s = ends_s - time.monotonic()
        if reason is not None:
            numbers = {"status": "cannot run", "reason": reason}
        elif left_s <= 0:
            numbers = {"status": "not run", "reason": "the time was over"}
        elif in_this_process and number and not CONTENDERS[point.contender].needs_cuda:
            numbers = result_of(point)
        else:
            numbers = in_own_process(point, left_s)
        yield {**asdict(point), "work": point.work(), "card": "", **numbers}


def in_own_process(point: Point, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        answer, errors = Path(folder) / "answer.json", Path(folder) / "errors.txt"
        command = [sys.executable, str(Path(__file__).parent / "gpu_point.py"), json.dumps(asdict(point)), str(answer)]
        with errors.open("w") as file:
            try:
                ended = subprocess.run(command, stdout=file, stderr=file, env=_environment(), timeout=seconds)
            except subprocess.TimeoutExpired:
                return {"status": "not run", "reason": "the time was over while it ran"}
        numbers = json.loads(answer.read_text()) if answer.is_file() else {"status": "failed"}
        if numbers["status"] == "failed":
            print(errors.read_text()[-SHOWN_ERROR:], file=sys.stderr)
            numbers.setdefault("reason", f"its process ended with {ended.returncode}; its last words are above")
        return numbers


def _environment() -> dict[str, str]:
    """Return an environment with one visible GPU, because Trainers would spread the batch over several."""
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return {**os.environ, "CUDA_VISIBLE_DEVICES": card, "TOKENIZERS_PARALLELISM": "false"}


# -- all of it ---------------------------------------------------------------------------------------------------------


def run(given: argparse.Namespace) -> int:
    points = points_of(given)
    results: list[dict[str, Any]] = []
    for number, result in enumerate(measured(points, given.minutes * 60, given.one_process), start=1):
        results.append(result)
        print(f"{number}/{len(points)} {gpu_table.line_of(result)}", flush=True)
        if not given.quick and result["status"] in RAN:
            with contextlib.redirect_stdout(io.StringIO()):
                _write_results(results, len(points) - number, given)
    if given.quick:
        gpu_table.show(results, given.peak_tflops)
        print("test run: nothing is written")
    else:
        _write_results(results, 0, given)
    broken = [result for result in results if result["status"] == "failed"]
    return 1 if broken or (given.quick and gpu_table.differences(results)) else 0


def _write_results(results: list[dict[str, Any]], still_to_come: int, given: argparse.Namespace) -> None:
    """Write the result file, with the points that only an earlier run has measured."""
    found = [result for result in results if result["status"] != "not run"]
    kept = _earlier_results(found)
    everything = [*results, *kept]
    finish(
        NAME,
        gpu_table.title_of(everything),
        gpu_table.grid_of(everything, given.peak_tflops),
        gpu_table.figures_of(everything),
        repeats=given.repeats,
        notes=gpu_table.differences(everything),
        not_run=sum(result["status"] == "not run" for result in results) + still_to_come,
        results=[*found, *kept],
    )
    for note in gpu_table.notes_of(everything):
        print(note)


def _earlier_results(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of an earlier run with the same GPU and work that this run has not measured again."""
    ran = [result for result in found if result["status"] in RAN]
    now = next((result for result in ran if result["card"]), None)
    if now is None:
        return []
    same = (now["card"], now["work"])
    again = {tuple(result[key] for key in SUBJECT) for result in found}  # a failure, too, replaces an earlier result
    earlier = not_repeated(NAME, ran, KEYS)
    alike = [one for one in earlier if (one["card"], one["work"]) == same and one["status"] in RAN]
    return [one for one in alike if tuple(one[key] for key in SUBJECT) not in again]


def options(words: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [name for name in SHAPES if name != "tiny"]
    parser.add_argument("--shapes", nargs="+", choices=sizes, default=["8b", "1b", "3b"])
    parser.add_argument("--tuning", nargs="+", choices=TUNINGS, default=list(TUNINGS))
    parser.add_argument("--contenders", "--sides", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--lengths", choices=[name for name in LENGTHS if name != "tiny"], default="chat")
    parser.add_argument("--steps", type=int, default=12, help="measured optimizer steps of a point")
    parser.add_argument("--batch_rows", type=int, default=8, help="rows per device and batch")
    parser.add_argument("--accumulation", type=int, default=2, help="batches per optimizer step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=60, help="after these, nothing more is started or waited for")
    parser.add_argument("--gradient_checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--full_dtype", choices=("float32", "bfloat16"), default="float32", help="weights of tuning full"
    )
    parser.add_argument("--flash", help="attn_implementation of the others that lay rows end to end")
    parser.add_argument("--peak_tflops", type=float, help="of the card in bf16")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda, and cpu for --quick")
    parser.add_argument(
        "--one_process",
        action="store_true",
        help="spare the imports of every point, where the host is slow: no repeats",
    )
    parser.add_argument("--quick", action="store_true", help="a test run of all paths on tiny models, in one process")
    given = parser.parse_args(words)
    given.device = given.device or ("cpu" if given.quick else "cuda")
    given.one_process |= given.quick
    if given.one_process:
        given.repeats = 1
    if given.device == "cpu" and not given.quick:
        parser.error("--device cpu only tries: add --quick")
    return given


def main() -> int:
    given = options()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --quick tries this benchmark on the CPU without measuring", file=sys.stderr)
        return 2
    gc.freeze()  # excludes imported objects, because collecting them repeatedly takes half of the time of a test run
    return run(given)


if __name__ == "__main__":
    sys.exit(main())
