"""The cost of the data loop: recording the loss of every row, and planning an epoch.

    python benchmarks/loops/curriculum_cost.py [--steps 24] [--samples 1000000]

Tracking: two trainers of the same model take turns step by step on the same rows, one without a curriculum, one with
``CurriculumSettings("none")``, which changes no gradient but tracks the loss of every row and keeps statistics. The
median CPU seconds of a step and the median of the paired ratios are printed, and, from the same run, the seconds that
were spent in tracking (reading row losses, recording, counting deliveries, gathering, planning). "control" is the same
without tracking on either side: its difference from 1 is noise of the machine. "loss" compares forward and backward of
the loss of the model itself with the replaced one, which keeps token losses, in turn on the same batch. Each model has
its own process, which returns no memory, because page faults would hide a difference this small. Models: the text model
of ``curriculum.py`` with the stock loss, and one of 32k words with the chunked loss on both sides.

Planning: CPU seconds per million samples of one epoch for 8 ranks with all losses known, as the median of several.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Optional

import numpy
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.common import Stopwatch, shown, write_result
from benchmarks.lib.curriculum_work import TEXT, text_model
from benchmarks.lib.memory_work import (
    DISTRIBUTIONS,
    KEPT_MEMORY,
    Ours,
    Shape,
    TokenRows,
    Turns,
    in_fresh_process,
    trainer_for,
)
from benchmarks.lib.outcome import Grid
from scu_trainer import SCUTrainer
from scu_trainer.control import curriculum as control
from scu_trainer.control.difficulty import Snapshot
from scu_trainer.settings import CurriculumSettings, MemorySettings
from scu_trainer.train.curriculum.deliveries import Deliveries
from scu_trainer.train.loops.curriculum import CurriculumLoop
from scu_trainer.train.loss.rows import model_loss
from scu_trainer.train.loss.rows.row_readings import RowLossReading
from scu_trainer.train.run_directory.logs import run_log

TARGETS = {"tracking_over_none": 1.02, "planning_seconds_per_million": 0.5}
WARM_UP_STEPS = 3
BATCH_ROWS = 8
CHUNKED = MemorySettings(memory_control=False, chunked_loss="always")
PLANNED = (
    ("none",),
    ("token_budget",),
    ("noise_guard",),
    ("acmds",),
    ("infobatch",),
    ("token_budget", "noise_guard"),
)
PLANS = 5
LOSS_NATS = 2.0


class Model(NamedTuple):
    """The model of both contenders. ``memory``: settings of both trainers; None uses the stock loss. ``repeats``: the
    run takes this many times --steps steps."""

    name: str
    make: Callable[[], torch.nn.Module]
    vocab: int
    longest_row: int
    memory: Optional[MemorySettings]
    repeats: int


MODELS = (
    Model(f"{TEXT['hidden']} wide, 2k words, stock loss", text_model, 2048, TEXT["longest"], None, 4),
    Model("256 wide, 32k words, chunked loss", Shape(32_000, 256, 4).model, 32_000, 512, CHUNKED, 1),
)


# -- tracking ----------------------------------------------------------------------------------------------------------


TRACKING = (
    (RowLossReading, "rows"),
    (model_loss, "row_losses"),
    (Deliveries, "cut_and_count"),
    *((CurriculumLoop, name) for name in ("see", "gather", "end_epoch", "begin_epoch", "set_row_loss_reading")),
)


def tracking(model: Model, steps: int) -> dict[str, Any]:
    return {
        **_turns(model, steps, (False, True)),
        "control_paired_ratio": _turns(model, steps, (False, False))["median_of_paired_ratios"],
        "loss_paired_ratio": _opened_over_stock(model, steps),
    }


def _opened_over_stock(model: Model, steps: int) -> Optional[float]:
    """Return the ratio of the replaced loss to the stock one; None if both contenders use the chunked loss."""
    if model.memory is not None:
        return None
    module, ratios = model.make(), []
    for width in DISTRIBUTIONS["alpaca"].draw(WARM_UP_STEPS + steps * model.repeats, model.longest_row):
        words = torch.randint(3, model.vocab, (BATCH_ROWS, max(8, int(width))))
        seconds = []
        for context in (contextlib.nullcontext(), model_loss.opened(module, None, lambda losses: None)):
            module.zero_grad()
            begun_s = time.process_time()
            with context:
                loss = module(input_ids=words, labels=words, num_items_in_batch=torch.tensor(words.numel())).loss
            loss.backward()
            seconds.append(time.process_time() - begun_s)
        ratios.append(seconds[1] / seconds[0])
    return median(ratios[WARM_UP_STEPS:])


def _turns(model: Model, steps: int, contenders: tuple[bool, bool]) -> dict[str, Any]:
    steps *= model.repeats
    count = BATCH_ROWS * (WARM_UP_STEPS + steps)
    rows = TokenRows(DISTRIBUTIONS["alpaca"].draw(count, model.longest_row), model.vocab)
    watch = Stopwatch()
    with run_log(), contextlib.ExitStack() as stack, watch.on(*TRACKING):
        trainers = [stack.enter_context(_trainer(model, rows, tracked)) for tracked in contenders]
        seconds = Turns(trainers, "cpu").run()
    off, on = (of_trainer[WARM_UP_STEPS:] for of_trainer in seconds)
    return {
        "model": model.name,
        "steps": steps,
        "step_seconds_off": median(off),
        "step_seconds_on": median(on),
        "ratio_of_medians": median(on) / median(off),
        "ratio_of_sums": sum(on) / sum(off),
        "median_of_paired_ratios": median(a / b for a, b in zip(on, off, strict=True)),
        "share_inside_tracking": watch.seconds / sum(seconds[1]),
    }


@contextlib.contextmanager
def _trainer(model: Model, rows: TokenRows, tracked: bool) -> Iterator[Any]:
    torch.manual_seed(0)
    kind = Tracked if tracked else Ours
    arguments = {"num_train_epochs": 1, "per_device_train_batch_size": BATCH_ROWS}
    with trainer_for(
        "cpu", model.make(), rows, model.memory, kinds=(kind, kind), train_sampling_strategy="random", **arguments
    ) as trainer:
        yield trainer


class Tracked(SCUTrainer):
    """Tracks the loss of every row, and selects nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, curriculum=CurriculumSettings("none"), **kwargs)


# -- planning ----------------------------------------------------------------------------------------------------------


def planning(methods: tuple[str, ...], samples: int) -> dict[str, Any]:
    rng = numpy.random.default_rng(0)
    law = control.CurriculumConfig(methods=methods, rows_per_batch=16)
    snapshot = Snapshot(
        scores=rng.lognormal(numpy.log(LOSS_NATS), 0.5, samples),
        observations=numpy.full(samples, 3),
        last_epoch=rng.integers(1, 3, samples),
        quarantined=numpy.zeros(samples, dtype=bool),
    )
    lengths = rng.lognormal(numpy.log(100), 0.6, samples).round().clip(4, 2048).astype(numpy.int64)
    seconds = []
    for seed in range(PLANS):
        permutation = rng.permutation(samples)
        begun_s = time.process_time()
        control.plan(law, snapshot, 3, 8, permutation, lengths, world=8, seed=seed)
        seconds.append(time.process_time() - begun_s)
    return {"methods": "+".join(methods), "samples": samples, "seconds_per_million": median(seconds) / samples * 1e6}


# -- report ------------------------------------------------------------------------------------------------------------


def tracking_table(results: list[dict[str, Any]]) -> Table:
    heads = ("model", "CPU ms without", "CPU ms with", "paired", "control", "loss", "inside tracking")
    rows = [
        (
            row["model"],
            *(f"{1e3 * row[name]:.1f}" for name in ("step_seconds_off", "step_seconds_on")),
            *(shown(row[name]) for name in ("median_of_paired_ratios", "control_paired_ratio", "loss_paired_ratio")),
            f"{row['share_inside_tracking']:.2%}",
        )
        for row in results
    ]
    title = f"tracking the loss of every row (aim: ratio at most {TARGETS['tracking_over_none']:g})"
    return Grid(heads, rows).table(title)


def planning_table(results: list[dict[str, Any]]) -> Table:
    aim = f"aim: at most {TARGETS['planning_seconds_per_million']:g}"
    rows = [(row["methods"], f"{row['seconds_per_million']:.3f}") for row in results]
    return Grid(("methods", "seconds"), rows).table(f"planning an epoch, CPU seconds per million samples ({aim})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps",
        type=int,
        default=24,
        help="timed steps of the large model; of the small one 4 times as many",
    )
    parser.add_argument("--samples", type=int, default=1_000_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=130)
    plans = [planning(methods, options.samples) for methods in PLANNED]
    console.print(planning_table(plans))
    tracked = [in_fresh_process(tracking, model, options.steps, allocator=KEPT_MEMORY) for model in MODELS]
    console.print(tracking_table(tracked))
    write_result("curriculum_cost", {"targets": TARGETS, "tracking": tracked, "planning": plans})


if __name__ == "__main__":
    main()
