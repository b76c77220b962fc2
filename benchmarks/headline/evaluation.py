"""The cost of an evaluation, with the stock Trainer and with ours, on held-out rows of different lengths.

    python benchmarks/headline/evaluation.py [--rows 64] [--repeats 5] [--quick]

The model is a Llama of 19 million weights (with 32,000 words) in float32, on rows with the lengths of Alpaca, 8 at a
time, which is the default of per_device_eval_batch_size. "loss": evaluate() without metrics. "bits per token": with the
metrics of the commands, for which the stock Trainer computes two numbers per row from the logits
(preprocess_logits_for_metrics). Both contenders use the same model and take turns in one process; ratios are medians
over turns. The peak is measured in a separate process, above what it held before. Both must return the same losses.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.common import quiet, scratch_arguments
from benchmarks.lib.memory_work import DISTRIBUTIONS, MIB, Shape, TokenRows, Witness, in_fresh_process
from benchmarks.lib.outcome import Figure, Grid, figure, finish
from benchmarks.lib.text_job import padded
from scu_trainer.settings import MemorySettings
from scu_trainer.train.evaluation.scoring import bpt_metrics
from scu_trainer.train.loss.rows.row_readings import preprocess_logits
from scu_trainer.train.trainer import SCUTrainer

WORDS = (2_048, 32_000, 128_000)
ASKED = {
    "loss": {},
    "bits per token": {"compute_metrics": bpt_metrics, "preprocess_logits_for_metrics": preprocess_logits},
}
CONTENDERS = {"stock": None, "ours": MemorySettings()}
SAME = 1e-5
"""Relative difference of two losses that rounding explains."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few rows, few words; writes nothing")
    given = parser.parse_args()
    words, rows, repeats = (WORDS[:1], 8, 1) if given.quick else (WORDS, given.rows, given.repeats)
    results = [measured(count, asked, rows, repeats) for count in words for asked in ASKED]
    finish(
        "evaluation",
        f"{rows} held-out rows, 8 at a time",
        Grid(
            [
                "asked for",
                "words",
                "time, ours / stock",
                "peak, stock, MiB",
                "peak, ours, MiB",
                "loss, stock",
                "loss, ours",
            ],
            [_cells(one) for one in results],
        ),
        dict(_figures(results)),
        quick=given.quick,
        repeats=repeats,
        results=results,
    )


def measured(words: int, asked: str, rows: int, repeats: int) -> dict[str, Any]:
    found = in_fresh_process(seconds, words, asked, rows, repeats, allocator={"OMP_NUM_THREADS": "2"})
    peaks = {name: in_fresh_process(peak_bytes, words, asked, rows, name) for name in CONTENDERS}
    return {"words": words, "asked": asked, **found, "peak_bytes": peaks}


def seconds(words: int, asked: str, rows: int, repeats: int) -> dict[str, Any]:
    """Return the seconds and the loss of each evaluation. Runs in its own process."""
    taken: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    losses: dict[str, float] = {}
    with scratch_arguments(remove_unused_columns=False) as args:
        model = Shape(vocab=words).model()
        trainers = {name: trainer_of(name, model, args, asked, rows) for name in CONTENDERS}
        for _ in range(repeats + 1):
            for name, trainer in trainers.items():
                begun_s = time.perf_counter()
                losses[name] = trainer.evaluate()["eval_loss"]
                taken[name].append(time.perf_counter() - begun_s)
    if not math.isclose(losses["stock"], losses["ours"], rel_tol=SAME):
        raise RuntimeError(f"the losses are {losses}: they must be the same")
    return {"seconds": {name: each[1:] for name, each in taken.items()}, "losses": losses}


def peak_bytes(words: int, asked: str, rows: int, name: str) -> int:
    """Return the peak of an evaluation above what the process held before. Runs in its own process."""
    with scratch_arguments(remove_unused_columns=False) as args:
        trainer = trainer_of(name, Shape(vocab=words).model(), args, asked, rows)
        witness = Witness("cpu")
        before = witness.start()
        trainer.evaluate()
        witness.read()
    return witness.highest_bytes - before


def trainer_of(name: str, model: Any, args: Any, asked: str, rows: int) -> SCUTrainer:
    """Return the trainer of a contender. Without any loop, SCUTrainer is the stock Trainer."""
    shape = Shape(vocab=model.config.vocab_size)
    held_out = TokenRows(DISTRIBUTIONS["alpaca"].draw(rows, shape.longest_row), shape.vocab)
    loops = {"memory": CONTENDERS[name]}
    return quiet(SCUTrainer(model, args, data_collator=padded, eval_dataset=held_out, **loops, **ASKED[asked]))


def _ratios(one: dict[str, Any]) -> list[float]:
    pairs = zip(one["seconds"]["ours"], one["seconds"]["stock"], strict=True)
    return [ours / stock for ours, stock in pairs]


def _cells(one: dict[str, Any]) -> list[str]:
    peaks = (f"{one['peak_bytes'][name] / MIB:,.0f}" for name in CONTENDERS)
    losses = (f"{one['losses'][name]:.6f}" for name in CONTENDERS)
    return [one["asked"], f"{one['words']:,}", f"{median(_ratios(one)):.2f}", *peaks, *losses]


def _figures(results: list[dict[str, Any]]) -> Iterator[tuple[str, Figure]]:
    for one in results:
        target = 1.0 if one["asked"] == "loss" else None
        subject, peaks = f"{one['asked']}, {one['words']:,} words", one["peak_bytes"]
        yield f"time, ours / stock, {subject}", figure(_ratios(one), "lower", target)
        yield f"peak, ours / stock, {subject}", Figure(peaks["ours"] / peaks["stock"], "lower", target=target)


if __name__ == "__main__":
    main()
