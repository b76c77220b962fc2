"""Out of memory at every operation of a training, one run for each: what is recovered, and is it exact?

    PYTHONPATH=. python benchmarks/fault_table.py [--every 1] [--processes 2]

Three tiny models train for two optimizer steps of two accumulation batches. In run k, operation number k that returns a
new tensor raises out of memory. A run is recovered if it ends, and exact if the weights after both steps are bit for
bit those of a run without a fault on the same chunks.

Counted is the work of a step: reading the batches, asking the model how its loss adds up, forward, backward, clipping,
optimizer. Not counted is what the stock loop does around it: collating, counting labels, adding up the logged loss.
"""

from __future__ import annotations

import argparse
import collections
import functools
import gc
import logging
import multiprocessing
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch
from common import command_line, quiet, write_result
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from scu_trainer.run_files import read_rows
from scu_trainer.settings import MemorySettings
from scu_trainer.train.memory import is_out_of_memory
from tests import tiny
from tests.train.sites import Sites
from tests.train.stepwise import compared, record_pieces, replay_pieces


def uneven(rows) -> tiny.Examples:
    """Rows of 5 and of 9 tokens: few chunks, so that all places of each can be visited."""
    return tiny.Examples({name: value[: 5 + 4 * (i % 2)] for name, value in rows[i].items()} for i in range(len(rows)))


SUBJECTS = {
    "language model (Llama)": (lambda: tiny.llama(hidden=8, layers=1), lambda: uneven(tiny.Rows(4))),
    "padded seq2seq (T5)": (tiny.t5, lambda: uneven(tiny.pairs(4))),
    "images (ViT)": (tiny.vit, lambda: tiny.images(4)),
}
STEPS, ROWS_PER_BATCH = 2, 2
TRAINING = {
    "max_steps": STEPS,
    "per_device_train_batch_size": ROWS_PER_BATCH,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "optim": "adamw_torch",
    "logging_steps": 10_000,
}
TRIED = re.compile(r"out of memory at (\d+ rows x \d+).*; again as (\d+ x \d+ rows x \d+)")


@dataclass(frozen=True)
class Outcome:
    """``kind``: where operation ``number`` is, None if there is none. ``tried``: sizes, as the history tells them."""

    subject: str
    number: int
    kind: Optional[str]
    recovered: bool
    exact: bool
    tried: tuple[str, ...]


def train(subject: str, folder: str, prepare):
    make, rows = SUBJECTS[subject]

    def arrange(trainer) -> None:
        prepare(quiet(trainer))

    return compared(make(), folder, MemorySettings(), rows(), prepare=arrange, **TRAINING)


def count_sites(subject: str) -> int:
    sites = Sites()
    with tempfile.TemporaryDirectory() as folder:
        train(subject, folder, functools.partial(watch, sites))
    return sites.count


def watch(sites: Sites, trainer) -> None:
    sites.watch(trainer, _window="reading the batch", _ask="asking the loss")


def outcome(case: tuple[str, int]) -> Outcome:
    subject, number = case
    sites, steps = Sites(number), []

    def arrange(trainer) -> None:
        steps.append(record_pieces(trainer))
        watch(sites, trainer)

    with tempfile.TemporaryDirectory() as folder:
        try:
            _, found = train(subject, folder, arrange)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return Outcome(subject, number, sites.failed_kinds[0], recovered=False, exact=False, tried=())
        rows = read_rows(Path(folder) / "memory_history.json")
    wanted = weights_of_chunks(subject, tuple(map(tuple, steps[0])))
    exact = all(tiny.same(*pair) for pair in zip(found.weights, wanted, strict=True)) and every_row_once(steps[0])
    tried = tuple(" -> ".join(match.groups()) for row in rows if (match := TRIED.match(row["reason"])))
    return Outcome(subject, number, next(iter(sites.failed_kinds), None), True, exact, tried)


def every_row_once(steps) -> bool:
    expected = [(batch, row) for batch in range(2) for row in range(ROWS_PER_BATCH)]
    return len(steps) == STEPS and all(sorted(row for p in pieces for row in p.rows) == expected for pieces in steps)


@functools.cache
def weights_of_chunks(subject: str, steps: tuple) -> list[dict[str, torch.Tensor]]:
    """Weights after each step of a run without a fault on these chunks."""
    with tempfile.TemporaryDirectory() as folder:
        return train(subject, folder, lambda trainer: replay_pieces(trainer, steps))[1].weights


def start_quietly() -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # every recovery collects: not all that was imported
    logging.getLogger("scu_trainer").setLevel(logging.ERROR)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="one operation in so many fails")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    start_quietly()
    cases = [(subject, k) for subject in SUBJECTS for k in range(0, count_sites(subject), options.every)]
    with multiprocessing.get_context("spawn").Pool(options.processes, start_quietly) as pool:
        found = list(track(pool.imap(outcome, cases, chunksize=8), "runs", len(cases)))
    rows = summary([one for one in found if one.kind is not None])
    show(rows)
    write_result("fault_table", command_line(), {"every": options.every, "steps": STEPS, "rows": rows})


def summary(found: list[Outcome]) -> list[dict[str, Any]]:
    rows = []
    for subject in SUBJECTS:
        for kind in ("reading the batch", "asking the loss", "forward", "backward", "clip", "optimizer"):
            here = [one for one in found if (one.subject, one.kind) == (subject, kind)]
            tried = collections.Counter(size for one in here for size in one.tried)
            rows.append(
                {
                    "model": subject,
                    "site": kind,
                    "sites": len(here),
                    "recovered": sum(one.recovered for one in here),
                    "bitwise_equal": sum(one.exact for one in here),
                    "sizes_tried": dict(tried.most_common()),
                }
            )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("model", "site", "sites", "recovered", "bitwise equal", Column("sizes tried", no_wrap=True))
    for row in rows:
        sizes = "\n".join(f"{count} times {size}" for size, count in row["sizes_tried"].items()) or "-"
        table.add_row(*map(str, list(row.values())[:-1]), sizes)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
