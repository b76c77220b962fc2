"""How long does preflight take before training? Seconds in addition to loading, for many rows.

    python benchmarks/loops/preflight.py [--rows 200000] [--length 512]

Synthetic rows of tokens are written to a scratch folder and memory-mapped, as prepared data are, with the embedded base
and adapters. Printed are the seconds of ``before_loading`` and of ``before_training`` (for the first time after writing
the file, then again), and of the pass over the tokens, which is the only part that grows with the data. For more than
MOST_TOKENS tokens the pass uses a sample; ``looked at`` is the share of the rows in it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.common import collator, embedded_model, shown, write_result
from scu_trainer.cli.configuration import read_job
from scu_trainer.data import DataStatistics, PreparedData, default_cache_dir, embedded_tokenizer
from scu_trainer.data.store import open_arrow, write_arrow
from scu_trainer.data.text.packing import record_batches, training_schema
from scu_trainer.train.job.components import TrainingComponents
from scu_trainer.train.preflight import before_loading, before_training, rows

TARGET_SECONDS = 10
ROWS_AT_ONCE = 1000
TOKENS_PER_DOCUMENT = 100


class Timed(NamedTuple):
    seconds: float
    result: Any


def timed(call: Callable[[], Any]) -> Timed:
    begun_s = time.perf_counter()
    result = call()
    return Timed(time.perf_counter() - begun_s, result)


def synthetic_rows(count: int, length: int, end: int, vocabulary: int) -> Iterator[dict[str, Any]]:
    rng = numpy.random.default_rng(0)
    for _ in range(0, count, ROWS_AT_ONCE):
        tokens = rng.integers(4, vocabulary, (ROWS_AT_ONCE, length), dtype=numpy.int32)
        tokens[rng.random(tokens.shape) < 1 / TOKENS_PER_DOCUMENT] = end
        for row in tokens:
            labels = row.copy()
            labels[0] = -100
            yield {"input_ids": row, "labels": labels, "length": length, "documents": [0]}


def prepared(folder: Path, count: int, length: int, tokenizer: Any) -> PreparedData:
    schema = training_schema(isolate=False)
    rows_of_tokens = synthetic_rows(count, length, tokenizer.eos_token_id, len(tokenizer))
    write_arrow(folder / "train.arrow", schema, record_batches(rows_of_tokens, schema))
    train = open_arrow(folder / "train.arrow")
    tokens = len(train) * length
    statistics = DataStatistics(
        rows_read=count,
        documents=tokens // TOKENS_PER_DOCUMENT,
        blocks=len(train),
        train_tokens=tokens,
        supervised_tokens=tokens - len(train),
    )
    return PreparedData(train, None, statistics, "synthetic", ())


def measure(folder: Path, count: int, length: int) -> dict[str, Any]:
    tokenizer = embedded_tokenizer(default_cache_dir(None))
    job = read_job(None, ["--use_cpu", "true", "--output_dir", str(folder / "run")])
    data = prepared(folder, count, length, tokenizer)
    parts = TrainingComponents(tokenizer, data, embedded_model(0, tuning="lora"), collator())
    early = timed(lambda: before_loading(job))
    first = timed(lambda: before_training(job, parts, folder / "run"))
    again = timed(lambda: before_training(job, parts, folder / "run"))
    scan = timed(lambda: rows.facts_of(parts))
    return {
        "rows": len(data.train),
        "tokens": data.statistics.train_tokens,
        "before_loading_seconds": early.seconds,
        "before_training_seconds": first.seconds,
        "before_training_again_seconds": again.seconds,
        "scan_seconds": scan.seconds,
        "looked_at_share": scan.result.rows / len(data.train),
        "findings": [finding.line() for finding in [*early.result, *again.result]],
    }


def table(result: dict[str, Any]) -> Table:
    shown_table = Table(title=f"preflight of {result['rows']:,} rows (aim: below {TARGET_SECONDS} s before training)")
    for name in ("before_loading", "before_training", "before_training_again", "scan"):
        shown_table.add_column(name.replace("_", " "), justify="right")
    shown_table.add_column("looked at", justify="right")
    names = ("before_loading", "before_training", "before_training_again", "scan")
    shown_table.add_row(*(f"{shown(result[f'{n}_seconds'])} s" for n in names), f"{result['looked_at_share']:.0%}")
    return shown_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options.rows, options.length)
    Console(width=110).print(table(result))
    write_result("preflight", {"target_seconds": TARGET_SECONDS, **result})


if __name__ == "__main__":
    main()
