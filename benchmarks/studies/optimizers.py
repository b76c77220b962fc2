"""The cost of an optimizer step, and the size of its state, compared with fused AdamW.

    python benchmarks/studies/optimizers.py [--device cpu] [--steps 9] [--million_weights 20]

All optimizers get the float32 matrices and vectors of a Llama of that size, with fixed gradients. Each is created by
transformers from its ``optim`` name. In each round all optimizers take a step in turn, so that all see the same load on
the machine; the ratio is the median over rounds of the step time to that of adamw_torch_fused in the same round. Times
are CPU seconds on a CPU, otherwise wall time until the device has finished. ``first_s`` is the wall time of the first
step, in which torchao's optimizers compile their update once for each shape; a cache on disk from an earlier run
(TORCHINDUCTOR_CACHE_DIR) shortens it.

On a CPU the paged optimizers are left out, because bitsandbytes does not page there.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks  # noqa: F401 - the first import: it keeps torchao quiet

# isort: split

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import Trainer, TrainingArguments

from benchmarks.lib.common import write_result
from scu_trainer.errors import RequirementError
from scu_trainer.hardware.optimizers import check_optimizer

BASELINE = "adamw_torch_fused"
NAMES = (
    BASELINE,
    "adamw_torch",
    "adamw_bnb_8bit",
    "adafactor",
    "lion_8bit",
    "adamw_torch_8bit",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
)
HIDDEN, INNER, LAYERS_PER_MILLION = 384, 1024, 0.564


def weights(million_weights: float, device: str) -> list[torch.nn.Parameter]:
    """Return parameters: for each layer four square matrices, three matrices of the MLP, and two norms."""
    generator = torch.Generator().manual_seed(0)
    layer = [(HIDDEN, HIDDEN)] * 4 + [(INNER, HIDDEN)] * 2 + [(HIDDEN, INNER)] + [(HIDDEN,)] * 2
    shapes = layer * max(1, round(million_weights * LAYERS_PER_MILLION))
    made = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]
    for weight in made:
        weight.grad = 0.01 * torch.randn(weight.shape, generator=generator).to(device)
    return made


def made(optim: str, parameters: list[torch.nn.Parameter], device: str) -> torch.optim.Optimizer:
    """Return the optimizer that transformers creates for this name; adamw_torch is the one that is not fused."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, optim=optim, use_cpu=device == "cpu", report_to="none")
        kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
    return kind(parameters, **options)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all tensors of the state. Quantization tables that parameters share count once."""
    values = (value for entry in optimizer.state.values() for value in entry.values())
    tensors = [tensor for value in values for tensor in plain(value)]
    return sum({tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in tensors}.values())


def plain(value: Any) -> list[torch.Tensor]:
    if is_traceable_wrapper_subclass(value):
        return [tensor for name in value.__tensor_flatten__()[0] for tensor in plain(getattr(value, name))]
    return [value] if isinstance(value, torch.Tensor) else []


def seconds(step: Callable[[], Any], device: str, clock: Callable[[], float]) -> float:
    begun_s = clock()
    step()
    if device != "cpu":
        torch.accelerator.synchronize()
    return clock() - begun_s


def measure(names: list[str], device: str, steps: int, million_weights: float) -> list[dict[str, Any]]:
    optimizers = {name: made(name, weights(million_weights, device), device) for name in names}
    first = {name: seconds(optimizer.step, device, time.perf_counter) for name, optimizer in optimizers.items()}
    clock = time.process_time if device == "cpu" else time.perf_counter
    rounds = [{name: seconds(o.step, device, clock) for name, o in optimizers.items()} for _ in range(steps)]
    sizes = {name: state_bytes(optimizer) for name, optimizer in optimizers.items()}
    return [
        {
            "optim": name,
            "step_time_ratio": median(times[name] / times[BASELINE] for times in rounds),
            "step_ms": 1e3 * median(times[name] for times in rounds),
            "state_bytes_ratio": sizes[name] / sizes[BASELINE],
            "state_bytes": sizes[name],
            "first_s": first[name],
        }
        for name in names
    ]


def runnable(device: str, console: Console) -> list[str]:
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    found = []
    for name in NAMES:
        try:
            check_optimizer(name, device, capability)
            found.append(name)
        except RequirementError as error:
            console.print(f"left out: {error}")
    return found


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table("optim", "step time ratio", "state bytes ratio", "step ms", "first step s")
    for row in rows:
        numbers = (row["step_time_ratio"], row["state_bytes_ratio"], row["step_ms"], row["first_s"])
        shown.add_row(row["optim"], *(f"{number:.2f}" for number in numbers))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda", "mps"])
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--million_weights", type=float, default=20)
    options = parser.parse_args()
    console = Console()
    if options.device == "cpu":
        torch.set_num_threads(1)
    names = runnable(options.device, console)
    rows = measure(names, options.device, options.steps, options.million_weights)
    console.print(table(rows))
    count = sum(weight.numel() for weight in weights(options.million_weights, "cpu"))
    name = "optimizers" if options.device == "cpu" else f"optimizers_{options.device}"
    write_result(name, {"device": options.device, "weights": count, "optimizers": rows})


if __name__ == "__main__":
    main()
