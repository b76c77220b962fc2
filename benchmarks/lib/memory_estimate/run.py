"""One training of memory_estimate.py, in its own process, optionally under a memory limit.

    python benchmarks/lib/memory_estimate/run.py FACTS [--limitable] [--limit_bytes N] FLAGS...

FLAGS are those of ``scu-trainer train``. FACTS: the file for the results. ``--limitable``: without oneDNN, which may
crash when memory runs out, and with a warm-up that creates the threads. ``--limit_bytes``: the memory that the process
may use above what it holds before the model is loaded.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any, Optional

import torch
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.lib.memory_work import limit_memory
from scu_trainer.cli.train import main as train
from scu_trainer.train.session import session
from scu_trainer.train.step.costs import step_peaks
from scu_trainer.train.tasks import common


class Watch(TrainerCallback):
    """Records the memory at the start and end of each step, and how much of it is tensors."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.peaks = trainer, step_peaks(trainer)
        self.steps: list[dict[str, int]] = []
        self.before: dict[str, int] = {}
        self.longest_row = 0
        trainer.add_callback(self.peaks)

    def on_train_begin(self, args, state, control, **kwargs):
        self.before = held(args.device)
        self.longest_row = longest_row(self.trainer.train_dataset)

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append({**held(args.device), "tensor_bytes": tensor_bytes(args.device)})

    def figures(self) -> dict[str, Any]:
        model, optimizer = self.trainer.model, self.trainer.optimizer
        states = [value for state in optimizer.state.values() for value in state.values()]
        return {
            "step_peak_bytes": self.peaks.peak_bytes,
            "at_train_begin": self.before,
            "steps": self.steps,
            "longest_row": self.longest_row,
            "weight_bytes": sum(p.nbytes for p in model.parameters()),
            "trained_bytes": sum(p.nbytes for p in model.parameters() if p.requires_grad),
            "optimizer_bytes": sum(state.nbytes for state in states if isinstance(state, torch.Tensor)),
        }


def held(device: torch.device) -> dict[str, int]:
    """Return the memory of the process on the device; on CUDA also that of torch's allocator and of all processes."""
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return {
            "held_bytes": torch.cuda.memory_allocated(device),
            "reserved_bytes": torch.cuda.memory_reserved(device),
            "most_reserved_bytes": torch.cuda.max_memory_reserved(device),
            "card_bytes": total_bytes - free_bytes,
        }
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    fields = {"held_bytes": "VmRSS", "highest_bytes": "VmHWM", "anonymous_bytes": "RssAnon", "data_bytes": "VmData"}
    return {name: int(status[field].split()[0]) * 1024 for name, field in fields.items()}


def tensor_bytes(device: torch.device) -> int:
    """Return the bytes of all tensors that Python can reach, counting each storage once."""
    found = {}
    for thing in gc.get_objects():
        # type(), because isinstance would make lazy modules of libraries import themselves
        if issubclass(type(thing), torch.Tensor) and thing.device == device:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def longest_row(rows: Any) -> int:
    """Return the tokens of the longest row; 0 for rows without tokens."""
    if "input_ids" not in rows[0]:
        return 0
    return max(len(rows[number]["input_ids"]) for number in range(len(rows)))


def watched() -> list[Watch]:
    """Add a Watch to every trainer that the session builds from now on, and return the list that collects them."""
    build, watches = session.build_trainer, []

    def built(*arguments: Any) -> Any:
        trainer = build(*arguments)
        watches.append(Watch(trainer))
        trainer.add_callback(watches[-1])
        return trainer

    session.build_trainer = built
    return watches


def limit_before_model(limit_bytes: Optional[int]) -> None:
    """Limit the memory of this process from the moment when its memory before the model is recorded."""
    noted = common.bytes_before_model

    def limited(device: torch.device) -> Optional[int]:
        warm_up(device)
        if limit_bytes is not None:
            limit_memory(str(device), limit_bytes)
        return noted(device)

    common.bytes_before_model = limited


def warm_up(device: torch.device) -> None:
    """Make torch create its threads and load its kernels."""
    weight = torch.randn(256, 256, device=device, requires_grad=True)
    (weight @ weight).sum().backward()
    torch.optim.AdamW([weight]).step()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("facts", type=Path)
    parser.add_argument("--limitable", action="store_true")
    parser.add_argument("--limit_bytes", type=int)
    given, flags = parser.parse_known_args()
    watches = watched()
    if given.limitable:
        torch.backends.mkldnn.enabled = False
        limit_before_model(given.limit_bytes)
    code = train(flags)
    given.facts.write_text(json.dumps(watches[-1].figures()))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
