"""The measurements of splitting.py and real_memory.py on a CUDA device.

    python benchmarks/gpu/gpu_memory.py [--hidden 1024] [--layers 8] [--windows 8] [--steps 20] [--share 0.6]

Rows of different lengths: wall time per optimizer step (synchronized at both ends), processed tokens, equality of
gradients, and the peak of ``torch.cuda.max_memory_allocated`` above the level after a first small step. Stock with
batch 8 x accumulation 4 is compared with ours with its defaults and with ours at each cap of --caps.

A real limit: the same training with and without ``torch.cuda.set_per_process_memory_fraction``, set after the first
optimizer step to what the allocator holds then, plus --share of what ours needed above that. Ours, the stock Trainer
and ``auto_find_batch_size`` each run in their own process.

Exit code 2 means that there is no CUDA device. ``--device cpu`` runs all code paths except the CUDA calls, with small
sizes, and writes no result.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.headline import splitting
from benchmarks.lib.common import write_result
from benchmarks.lib.memory_work import DISTRIBUTIONS, Shape
from benchmarks.studies import real_memory

GIB = 2**30
QUICK = {"vocab": 512, "hidden": 32, "layers": 1}


def main() -> int:
    parser = splitting.options(__doc__, windows=8, hidden=1024, layers=8)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps under the limit")
    parser.add_argument("--share", type=float, default=0.6, help="headroom as a share of what ours needs unlimited")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a test run without CUDA")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu tries this benchmark without measuring anything", file=sys.stderr)
        return 2
    is_small = given.device == "cpu"
    sizes = QUICK if is_small else {"vocab": given.vocab, "hidden": given.hidden, "layers": given.layers}
    shape = Shape(**sizes, longest_row=512 if is_small else 2048)
    console = Console(width=170)
    console.print(what_is_measured(given.device))
    work = [_work(console, name, shape, given) for name in given.lengths]
    limited = _limited(console, shape, given)
    if not is_small:
        device = what_is_measured("cuda")
        write_result("gpu_memory", {"device": device, "work": work, "limited": limited})
    return 0


def what_is_measured(device: str) -> str:
    if device == "cpu":
        return "test run on the CPU: CPU time, peaks of the process, RLIMIT_DATA; small sizes, no result is kept"
    card = torch.cuda.get_device_properties(device)
    size = f"{card.name}, {card.total_memory / GIB:.1f} GiB"
    return f"{size}: float32, wall time with the device waited for, max_memory_allocated"


def _work(console: Console, name: str, shape: Shape, given) -> dict:
    plan = splitting.SplitPlan(DISTRIBUTIONS[name], shape, given.windows, given.device)
    result = splitting.measured(plan, given.caps)
    unit = "CPU s" if given.device == "cpu" else "s"
    console.print(splitting.work_table(result, unit))
    if given.device == "cuda":  # the sizes of a test run are too small for any verdict
        console.print(*splitting.summary_lines(result["summary"]), sep="\n")
    return result


def _limited(console: Console, shape: Shape, given) -> dict:
    job = real_memory.Job(given.steps, shape, DISTRIBUTIONS[given.lengths[0]], given.device)
    compared = real_memory.compare(job, given.share)
    console.print(
        real_memory.table_of(compared, job), *real_memory.notes(compared), sep="\n", highlight=False, markup=False
    )
    return compared


if __name__ == "__main__":
    sys.exit(main())
