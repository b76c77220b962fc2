"""10 thousand -> 10 million documents through the loader: see scaling.py."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any

import numpy
import torch
from transformers import Trainer, TrainerCallback

from benchmarks.lib.common import quiet, scratch_arguments
from benchmarks.lib.memory_work import MIB, Shape, in_fresh_process
from benchmarks.lib.outcome import Figure, Grid, figure
from benchmarks.lib.text_job import LOOPS, padded
from benchmarks.studies.scaling_parts.commands import FORMATS, anonymous_bytes_of, streamed
from scu_trainer import SCUTrainer
from scu_trainer.data.store import open_arrow, write_arrow
from scu_trainer.data.text.packing import MOST_ROWS_PER_BATCH, training_schema
from scu_trainer.settings import RegularizationSettings
from scu_trainer.train.run_directory.logs import run_log

REPEATS = 1
CONTENDERS = ("stock", "ours")
DOCUMENTS, QUICK_DOCUMENTS = (10_000, 100_000, 1_000_000, 10_000_000), (1_000, 50_000)
SHORTEST, LONGEST = 4, 8
"""Tokens of a document, so that ten million documents take about 700 MB."""

VOCAB, ROWS_PER_BATCH = 256, 8
STEPS = 4
"""Optimizer steps. A checkpoint follows, and one more step of a run that is resumed from it."""

READ_EVERY_S = 0.005


# -- the file ----------------------------------------------------------------------------------------------------------


def write_documents(path: Path, count: int) -> None:
    """Write rows as ``scu_trainer.data`` stores them, drawing the tokens of a whole Arrow batch at a time."""
    write_arrow(path, training_schema(isolate=False), _batches(count))


def _batches(count: int) -> Iterator[Any]:
    import pyarrow

    random = numpy.random.default_rng(0)
    for start in range(0, count, MOST_ROWS_PER_BATCH):
        rows = min(MOST_ROWS_PER_BATCH, count - start)
        lengths = random.integers(SHORTEST, LONGEST + 1, rows, dtype=numpy.int32)
        tokens = random.integers(3, VOCAB, int(lengths.sum()), dtype=numpy.int32)
        ends = numpy.concatenate([[0], lengths.cumsum()]).astype(numpy.int32)
        ids = pyarrow.ListArray.from_arrays(ends, tokens)
        numbers = numpy.arange(start, start + rows, dtype=numpy.int32)
        documents = pyarrow.ListArray.from_arrays(numpy.arange(rows + 1, dtype=numpy.int32), numbers)
        columns = [ids, ids, pyarrow.array(lengths), documents]
        yield pyarrow.RecordBatch.from_arrays(columns, schema=training_schema(isolate=False))


# -- one contender in a fresh process ----------------------------------------------------------------------------------


class Highest:
    """Records the highest anonymous memory, which a thread samples."""

    def __init__(self) -> None:
        self.bytes = 0
        self._end = Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        thread = Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()

    def _watch(self) -> None:
        while not self._end.wait(READ_EVERY_S):
            self.bytes = max(self.bytes, anonymous_bytes_of("self"))


class Notes(TrainerCallback):
    """Records the seconds until the end of the first step, and the memory at the last step, as after all documents."""

    def __init__(self, begun_s: float) -> None:
        self._begun_s = begun_s
        self.first_step_s = 0.0
        self.held_bytes = 0

    def on_step_end(self, args, state, control, train_dataloader=None, **kwargs):
        self.first_step_s = self.first_step_s or time.perf_counter() - self._begun_s
        if state.global_step == STEPS:
            self.held_bytes = anonymous_bytes_of("self")


def trained(contender: str, path: str) -> dict[str, Any]:
    """Train one run of ``STEPS`` steps with a checkpoint, and one that is resumed from it."""
    torch.set_num_threads(1)
    watch = Highest()
    loops = {} if contender == "stock" else {**LOOPS, "regularization": RegularizationSettings(target_s=0.1)}
    save = {"save_strategy": "steps", "save_steps": STEPS, "per_device_train_batch_size": ROWS_PER_BATCH}
    before_bytes = anonymous_bytes_of("self")
    with run_log(), watch.watching(), scratch_arguments(max_steps=STEPS, **save) as args:
        first = _run(contender, args, path, loops)
        gc.collect()  # frees the first trainer before the second one is created
        args.max_steps = STEPS + 1
        checkpoint = Path(args.output_dir) / f"checkpoint-{STEPS}"
        again = _run(contender, args, path, loops, resume_from_checkpoint=str(checkpoint))
        statistics = checkpoint / "curriculum_state.safetensors"
        statistics_bytes = statistics.stat().st_size if statistics.is_file() else 0
    return {
        "first_step_s": first.first_step_s,
        "resumed_s": again.first_step_s,
        "held_bytes": first.held_bytes - before_bytes,
        "peak_bytes": watch.bytes - before_bytes,
        "checkpoint_bytes": statistics_bytes,
    }


def _run(contender: str, args: Any, path: str, loops: dict[str, Any], **given: Any) -> Notes:
    model, notes = Shape(VOCAB, 32, 1, LONGEST).model(), Notes(time.perf_counter())
    kind = Trainer if contender == "stock" else SCUTrainer
    trainer = quiet(kind(model, args, data_collator=_padded, train_dataset=open_arrow(Path(path)), **loops))
    if contender == "ours":
        trainer.add_callback(AllSeen(trainer))
    trainer.add_callback(notes)
    trainer.train(**given)
    return notes


class AllSeen(TrainerCallback):
    """Writes the unchanged statistics of all documents, because pages that were never written take no memory."""

    def __init__(self, trainer: SCUTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == STEPS:
            for array in self.trainer.difficulty.arrays().values():
                array[:] = array


def _padded(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return padded([{"input_ids": torch.tensor(row["input_ids"]), "sample_index": 0} for row in rows])


# -- the table ---------------------------------------------------------------------------------------------------------


def measure(repeats: int, quick: bool) -> tuple[str, Grid, dict[str, Figure], list[Any]]:
    counts = QUICK_DOCUMENTS if quick else DOCUMENTS
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            path = Path(folder) / "documents.arrow"
            write_documents(path, count)
            for number in range(repeats):
                for contender in CONTENDERS if number % 2 == 0 else CONTENDERS[::-1]:
                    found = in_fresh_process(trained, contender, str(path))
                    results.append({"path": contender, "documents": count, **found})
            path.unlink()
        for kind in FORMATS[:1] if quick else FORMATS:
            for count in (counts[0], counts[-1]):
                found = [streamed(kind, count, Path(folder)) for _ in range(repeats)]
                results += [{"path": f"streamed {kind}", "documents": count, **one} for one in found]
    grid, figures = summary(results)
    return "10 thousand to 10 million documents through the loader", grid, figures, results


def values(results: Sequence[dict[str, Any]], path: str, documents: int, name: str) -> list[float]:
    """Return a value of each repeat of a run."""
    return [one[name] for one in results if (one["path"], one["documents"]) == (path, documents)]


FLAT_BYTES = 1.0
"""Bytes per document below which memory counts as independent of the number of documents."""


def bytes_per_document(results: Sequence[dict[str, Any]], path: str, name: str) -> list[float]:
    """Return the extra memory of the largest number of documents over the smallest, per document."""
    counts = sorted({one["documents"] for one in results if one["path"] == path})
    least, most = (values(results, path, count, name) for count in (counts[0], counts[-1]))
    return [(large - small) / (counts[-1] - counts[0]) for small, large in zip(least, most, strict=True)]


def summary(results: Sequence[dict[str, Any]]) -> tuple[Grid, dict[str, Figure]]:
    rows = [_row(results, path, count) for path, count in dict.fromkeys((r["path"], r["documents"]) for r in results)]
    heads = ["run", "documents", "s to 1st step", "s, resumed", "held, MiB", "peak, MiB", "checkpoint, MiB"]
    most = max(one["documents"] for one in results)
    pairs = zip(*(values(results, contender, most, "first_step_s") for contender in ("ours", "stock")), strict=True)
    figures = {
        f"seconds to the first step at {most:,} documents, ours": figure(
            values(results, "ours", most, "first_step_s"), "lower", 10.0
        ),
        "the same, ours / stock": figure([own / theirs for own, theirs in pairs], "lower"),
    }
    for contender in reversed(CONTENDERS):
        name = f"held bytes per document, {contender}"
        better, most_bytes = ("lower", 30) if contender == "ours" else (None, None)
        figures[name] = figure(bytes_per_document(results, contender, "held_bytes"), better, most_bytes)
        figures[f"peak bytes per document, {contender}"] = figure(
            bytes_per_document(results, contender, "peak_bytes"), better
        )
    for path in dict.fromkeys(one["path"] for one in results if one["path"] not in CONTENDERS):
        found = figure(bytes_per_document(results, path, "peak_bytes"), "lower", FLAT_BYTES)
        figures[f"peak bytes per document, {path}"] = replace(found, tolerance=FLAT_BYTES)
    return Grid(heads, rows), figures


def _row(results: Sequence[dict[str, Any]], path: str, count: int) -> list[str]:
    cells = [path, f"{count:,}", f"{median(values(results, path, count, 'first_step_s')):.1f}"]
    if path not in CONTENDERS:
        return [*cells, "", "", f"{median(values(results, path, count, 'peak_bytes')) / MIB:.0f}", ""]
    cells.append(f"{median(values(results, path, count, 'resumed_s')):.1f}")
    sizes = [median(values(results, path, count, name)) for name in ("held_bytes", "peak_bytes", "checkpoint_bytes")]
    return cells + [f"{size / MIB:.0f}" for size in sizes]
