"""How often per optimizer step does the host wait for the device? Stock Trainer, TRL and ours, counted by place.

    python benchmarks/gpu/host_syncs.py [--steps 4]

A host that waits cannot prepare the next kernels, and a device without prepared kernels is idle. The host waits when a
number is read (``item``, ``tolist``, ``bool``, ``nonzero``, a boolean mask as an index, ``cpu``), and when something is
copied to the device without ``non_blocking``. Both are counted here without a device, with the CPU in its role. Tensors
created on the host (by a factory without ``device=``, or in a batch of the loader) are remembered until they are moved;
all others count as on the device, so a doubtful case counts against the contender. Only calls from Python are counted,
not those inside a kernel of torch; in a backward, which autograd runs, all calls are.

Work: documents of different lengths, batches of eight, four of them accumulated, and a small model with a vocabulary
large enough for the chunked loss: the number of waits does not depend on the size of the model. The first steps, in
which ours measures every micro-batch, are left out. Waits per step depend on the number of micro-batches per step,
which is shown next to them; micro-batches are as large as on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks  # noqa: F401 - the first import: it keeps torchao quiet

# isort: split

import accelerate.data_loader
import torch
import trl  # noqa: F401  by its first import, which is not to be counted
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.lib.memory_work import Lengths, Shape
from benchmarks.lib.outcome import Figure, Grid, finish
from benchmarks.lib.text_job import LOOPS, WORKERS, Job, ours
from scu_trainer.settings import MemorySettings, RegularizationSettings
from scu_trainer.train.run_directory.logs import run_log
from scu_trainer.train.step import micro_batch_sizer

SETTLED_STEPS = 5
"""Steps that are not counted: during them ours measures every micro-batch, and analyses the loss of the model."""

AS_THE_COMMANDS = (("logging_nan_inf_filter", False),)
"""A default of ``scu-trainer train``, used for all contenders here. Otherwise the stock loop checks twice per batch
whether its loss is finite."""

CONTENDERS = {
    "stock": WORKERS["stock"],
    "TRL": WORKERS["trl"],
    "ours, memory": (ours, {"memory": MemorySettings()}),
    "ours, all loops": (ours, {**LOOPS, "regularization": RegularizationSettings(target_s=0.1)}),
}

ANSWERS = {
    "item", "tolist", "numpy", "cpu", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "equal",
    "allclose", "is_nonzero", "bincount", "__bool__", "__int__", "__float__", "__index__", "__contains__",
}  # fmt: skip
"""Operations that wait for the device: they return a number, or a tensor with a shape that depends on values."""

OPERATIONS_THAT_ANSWER = {
    torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select, torch.ops.aten.equal,
}  # fmt: skip
"""The lower-level operations that they consist of, which a backward shows instead."""

MAKERS_FROM_HOST = {"tensor", "as_tensor", "asarray"}
"""Factories that, with ``device=``, create a tensor on the host and copy it."""

READS, COPIES = "reads", "copies"
PACKAGES = ("scu_trainer", "transformers", "accelerate", "trl", "torch")


@dataclass
class Waits:
    """Counts waits while ``is_on``. ``by_place``: number by (kind, place in the code)."""

    is_on: bool = False
    by_place: Counter = field(default_factory=Counter)

    def note(self, kind: str) -> None:
        if self.is_on:
            self.by_place[kind, place()] += 1


def place() -> str:
    """Return ``package/file.py: function`` of the nearest caller outside of torch and this file."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        owner = next((name for name in PACKAGES if name in path.parts), None)
        if owner not in (None, "torch"):
            return f"{owner}/{path.name}: {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


class CountsWaits(TorchFunctionMode):
    """Intercepts every call of torch from Python, and records those in ``waits`` for which a host would wait."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits
        self._on_host: dict[int, StorageWeakRef] = {}  # a weak reference keeps the number from being given again
        self._backward, self._is_counted = SeesBackward(self), False

    def __enter__(self):
        self._backward.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._backward.__exit__(*error)

    def read_in_backward(self, tensor: Any) -> None:
        """Count a read in a backward, unless Python code made it, which is counted already."""
        if not self._is_counted and not self.is_on_host(tensor):
            self.waits.note(READS)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("to", "copy_"):
            return self._moved(func, name, args, kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
        is_made = not given
        from_host = is_made or all(map(self.is_on_host, given))
        if self._waits_for_answer(name, args, kwargs, from_host):
            self.waits.note(READS)
        if self._waits_for_copy(name, args, kwargs):
            self.waits.note(COPIES)
        self._is_counted = name in ANSWERS or name in ("where", "repeat_interleave", "__getitem__")
        made = func(*args, **kwargs)
        self._is_counted = False
        if name == "cpu":
            made = made.clone()
        if name == "cpu" or (from_host and not (is_made and kwargs.get("device") is not None)):
            self.keep_on_host(made)
        return made

    def _moved(self, func: Callable, name: str, args: tuple, kwargs: dict) -> Any:
        """Handle ``to`` and ``copy_``. A torch.device, or a tensor on it, means the device; "cpu" means the host."""
        tensor, others = args[0], [*args[1:], *kwargs.values()]
        is_blocking = not kwargs.get("non_blocking") and not any(other is True for other in others)
        was_on_host = self.is_on_host(tensor)
        like = next((other for other in others if torch.is_tensor(other)), None)
        if like is not None:
            to_host = self.is_on_host(like)
        elif any(isinstance(other, (str, torch.device)) for other in others):
            to_host = any(isinstance(other, str) and other == "cpu" for other in others)
        else:
            to_host = was_on_host
        if name == "copy_":
            was_on_host, to_host = to_host, was_on_host
        if was_on_host != to_host and (is_blocking or to_host):
            self.waits.note(READS if to_host else COPIES)
        made = func(*args, **kwargs)
        if name == "copy_":
            return made
        if was_on_host != to_host:  # without a device it is the same tensor, with one it would be a copy
            made = made.clone()
        if to_host:
            self.keep_on_host(made)
        return made

    def _waits_for_answer(self, name: str, args: tuple, kwargs: dict, from_host: bool) -> bool:
        if from_host:
            return False
        if name == "where":
            return len(args) + len(kwargs) == 1
        if name == "repeat_interleave":
            return torch.is_tensor((*args, None)[1]) and kwargs.get("output_size") is None
        if name == "__getitem__":
            return any(index.dtype == torch.bool for index in _indices(args[1]) if torch.is_tensor(index))
        return name in ANSWERS

    def _waits_for_copy(self, name: str, args: tuple, kwargs: dict) -> bool:
        if name in MAKERS_FROM_HOST:
            is_new = not torch.is_tensor(args[0])
            return kwargs.get("device") is not None and (is_new or self.is_on_host(args[0]))
        if name not in ("__getitem__", "__setitem__") or self.is_on_host(args[0]):
            return False
        return any(
            isinstance(index, list) or (torch.is_tensor(index) and index.dim() > 0 and self.is_on_host(index))
            for index in _indices(args[1])
        )

    # -- where a tensor lives ------------------------------------------------------------------------------------------

    def is_on_host(self, tensor: Any) -> bool:
        return torch.is_tensor(tensor) and tensor.untyped_storage()._cdata in self._on_host

    def keep_on_host(self, made: Any) -> None:
        for tensor in tree_leaves(made):
            if torch.is_tensor(tensor):
                reference = StorageWeakRef(tensor.untyped_storage())
                self._on_host[reference.cdata] = reference


class SeesBackward(TorchDispatchMode):
    """Reports every read of a number in a backward to ``counts``. On a CPU, the calling thread runs the backward."""

    def __init__(self, counts: CountsWaits) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in OPERATIONS_THAT_ANSWER and torch._C._current_graph_task_id() != -1:
            self._counts.read_in_backward(args[0])
        return func(*args, **(kwargs or {}))


def _indices(given: Any) -> Sequence[Any]:
    return given if isinstance(given, tuple) else (given,)


class Counting:
    """Replaces turns: counts the waits of ``steps`` settled steps. Another one follows, because the end waits too."""

    def __init__(self, waits: Waits, steps: int) -> None:
        self.waits, self.done, self.last = waits, 0, SETTLED_STEPS + steps

    def begin(self) -> None:
        """Start counting, after everything is set up."""

    def step(self) -> None:
        self.done += 1
        self.waits.is_on = SETTLED_STEPS <= self.done < self.last


def counted(name: str, steps: int) -> dict[str, Any]:
    """Run a contender, and return its waits by place and its forward passes in ``steps`` settled steps."""
    work, settings = CONTENDERS[name]
    job = job_of(steps, AS_THE_COMMANDS)
    mode, forwards = CountsWaits(Waits()), Counter()

    def moved(batch: Any, *args: Any, **kwargs: Any) -> Any:
        mode.keep_on_host(batch)  # a loader makes batches on the host
        return send_to_device(batch, *args, **kwargs)

    send_to_device = accelerate.data_loader.send_to_device
    made = job.model()
    made.register_forward_hook(lambda *_: forwards.update([mode.waits.is_on]))
    with (
        run_log(),
        patch.object(accelerate.data_loader, "send_to_device", moved),
        patch.object(Job, "model", lambda _: made),
        patch.dict(micro_batch_sizer.BUSY_TOKENS, {"cpu": micro_batch_sizer.BUSY_TOKENS_ELSEWHERE}),
        mode,
    ):
        work(job, Counting(mode.waits, steps), **settings)
    return {
        "contender": name,
        "steps": steps,
        "forwards": forwards[True],
        "waits": [{"kind": kind, "place": where, "count": n} for (kind, where), n in mode.waits.by_place.items()],
    }


def total(result: dict[str, Any], kind: Optional[str] = None, owner: str = "") -> float:
    """Return the number of waits per optimizer step."""
    chosen = [w for w in result["waits"] if kind in (None, w["kind"]) and w["place"].startswith(owner)]
    return sum(w["count"] for w in chosen) / result["steps"]


def grid(results: Sequence[dict[str, Any]]) -> Grid:
    """Return a table with a row per place, the most frequent first, and a column per contender."""

    def row(name: str, numbers: Sequence[float]) -> list[str]:
        return [name, *(f"{number:g}" if number else "" for number in numbers)]

    rows = [
        row("all", [total(result) for result in results]),
        row("forward passes", [result["forwards"] / result["steps"] for result in results]),
    ]
    places = {(wait["kind"], wait["place"]) for result in results for wait in result["waits"]}
    by_place = {place: [_of(result, *place) for result in results] for place in places}
    for (kind, where), numbers in sorted(by_place.items(), key=lambda item: (-max(item[1]), item[0])):
        rows.append(row(f"{kind}: {where}", numbers))
    return Grid(["the host waits, times per optimizer step", *(result["contender"] for result in results)], rows)


def _of(result: dict[str, Any], kind: str, where: str) -> float:
    found = sum(w["count"] for w in result["waits"] if (w["kind"], w["place"]) == (kind, where))
    return found / result["steps"]


def figures(results: Sequence[dict[str, Any]]) -> dict[str, Figure]:
    contenders = {result["contender"]: result for result in results}
    found = {}
    for name in ("ours, memory", "ours, all loops"):
        found[f"waits per step, {name} / stock"] = Figure(total(contenders[name]) / total(contenders["stock"]), "lower")
        found[f"waits per step in scu_trainer, {name}"] = Figure(total(contenders[name], owner="scu_trainer"), "lower")
    return found


def job_of(steps: int, arguments: tuple) -> Job:
    """Return a job small in all but its vocabulary, for the chunked loss. ``arguments``: further TrainingArguments."""
    shape, lengths = Shape(vocab=17_000, hidden=64, layers=2), Lengths("uneven", 30, 0.6)
    return Job(shape, lengths, steps=SETTLED_STEPS + steps + 1, arguments=arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps that are counted")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; nothing is written")
    options = parser.parse_args()
    results = [counted(name, 1 if options.quick else options.steps) for name in CONTENDERS]
    title = "how often the host waits for the device, per optimizer step"
    finish("host_syncs", title, grid(results), figures(results), quick=options.quick, repeats=1, results=results)


if __name__ == "__main__":
    main()
