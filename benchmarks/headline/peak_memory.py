"""Peak memory of a step with the same optimizer batch, for vocabularies of 32,000 and of 128,000 words.

    python benchmarks/headline/peak_memory.py [--vocab 32000 128000] [--quick]

The model is a Llama of hidden size 256 with 4 layers, full tuning in float32, on rows of lognormal length (median 100,
sigma .6), 32 per optimizer step as batch 8 x accumulation 4, for two steps. Contenders: the stock Trainer, TRL's
SFTTrainer with its defaults (once, because it is slow on a CPU and not the best of TRL), padding-free and packing, and
ours with its defaults; with the first vocabulary also with activation checkpointing, which is TRL's default. Stock and
padding-free also run with one row at a time and more accumulation, as a user would do if the batch did not fit. Packing
takes one row of 1,024 tokens at a time anyway. Each runs in a fresh process that returns freed memory immediately.

The figure is the peak above what the same contender holds between steps (weights, optimizer) after a step on rows of
eight tokens, measured in a separate process. It includes gradients.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.memory_work import DISTRIBUTIONS, Shape
from benchmarks.lib.outcome import Figure, Grid, finish
from benchmarks.lib.text_job import Job
from benchmarks.lib.text_race import BASE, mib, peak_over_own

ONE_ROW = ", 1 row at a time"
FIRST = (BASE, BASE + ONE_ROW, "trl", "trl, padding-free", "trl, padding-free" + ONE_ROW, "trl, packing", "ours")
"""The contenders with the first vocabulary and without checkpointing. The other cases run only TRL's leanest contender
and those it is compared with."""
THEN = (BASE, BASE + ONE_ROW, "trl, padding-free" + ONE_ROW, "trl, packing", "ours")
TARGET_STOCK, TARGET_TRL = 0.2, 1.0
STEPS = 2
SMALL = Shape(vocab=1_000, hidden=32, layers=1, longest_row=256)


def peaks(shape: Shape, contenders: Sequence[str], checkpointing: bool) -> list[dict[str, Any]]:
    job = Job(shape, DISTRIBUTIONS["alpaca"], STEPS, checkpointing=checkpointing)
    by_hand = replace(job, batch_rows=1, accumulation=job.step_rows)
    found = []
    for contender in contenders:
        peak_bytes = peak_over_own(contender.removesuffix(ONE_ROW), by_hand if contender.endswith(ONE_ROW) else job)
        found.append(
            {"vocab": shape.vocab, "contender": contender, "checkpointing": checkpointing, "peak_bytes": peak_bytes}
        )
        print(f"{shape.vocab} words, {contender}, checkpointing {checkpointing}: {mib(peak_bytes)} MiB", flush=True)
    return found


def figures_of(results: list[dict[str, Any]]) -> dict[str, Figure]:
    groups: dict[tuple[int, bool], dict[str, int]] = {}
    for row in results:
        groups.setdefault((row["vocab"], row["checkpointing"]), {})[row["contender"]] = row["peak_bytes"]
    figures = {}
    for (vocab, checkpointing), peak in groups.items():
        where = f"{vocab:,} words{', checkpointing' if checkpointing else ''}"
        best_trl = min(value for contender, value in peak.items() if contender.startswith("trl"))
        figures[f"peak, ours / stock, {where}"] = Figure(peak["ours"] / peak[BASE], "lower", target=TARGET_STOCK)
        figures[f"peak, ours / best of TRL, {where}"] = Figure(peak["ours"] / best_trl, "lower", target=TARGET_TRL)
        figures[f"peak, ours / stock by hand, 1 row at a time, {where}"] = Figure(
            peak["ours"] / peak[BASE + ONE_ROW], "lower"
        )
    return figures


def grid_of(results: list[dict[str, Any]]) -> Grid:
    base = {(row["vocab"], row["checkpointing"]): row["peak_bytes"] for row in results if row["contender"] == BASE}
    rows = [
        (
            row["contender"],
            f"{row['vocab']:,}",
            "yes" if row["checkpointing"] else "no",
            mib(row["peak_bytes"]),
            f"{row['peak_bytes'] / base[row['vocab'], row['checkpointing']]:.2f}",
        )
        for row in results
    ]
    return Grid(("contender", "words", "activation checkpointing", "peak over the model's own, MiB", "/ stock"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", nargs="+", type=int, default=[32_000, 128_000])
    parser.add_argument("--quick", action="store_true", help="every path on a tiny model; writes nothing")
    given = parser.parse_args()
    vocabularies = [SMALL.vocab] if given.quick else given.vocab
    results = []
    for number, vocab in enumerate(vocabularies):
        shape = replace(SMALL if given.quick else Shape(), vocab=vocab)
        results += peaks(shape, THEN if number else FIRST, checkpointing=False)
        results += [] if number else peaks(shape, THEN, checkpointing=True)
    title = "peak memory above the model's own, 32 rows per optimizer step"
    finish("peak_memory", title, grid_of(results), figures_of(results), quick=given.quick, repeats=1, results=results)


if __name__ == "__main__":
    main()
