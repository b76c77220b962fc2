"""Out of memory at each operation of training, evaluation and prediction: does the run recover, and exactly?

    python benchmarks/loops/fault_table.py [--every 1] [--processes 2]

Eight tiny models, each with some of the loops, train for two optimizer steps of two accumulation batches, are evaluated
(loss only) and predict (logits, single rows joined). In run k, operation number k that returns a new tensor raises out
of memory. A run has recovered if it ends normally. It is exact if weights, averages, buffers and the statistics of
every loop, or figures and logits, equal bit for bit those of a run without a fault on the same micro-batches.

All operations of our code, and those that it calls, are covered: reading and collating rows, counting labels, planning,
the loss analysis, restoring the state before a micro-batch, forward, backward, clipping, S and lambda, averages, row
losses, the search for non-finite values, the optimizer; and every operation of evaluation and prediction. The
operations of the stock training loop between our calls are not covered: drawing the order of the rows, and summing the
logged loss.
"""

from __future__ import annotations

import argparse
import collections
import functools
import gc
import logging
import multiprocessing
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks  # noqa: F401 - the first import: it keeps torchao quiet

# isort: split

import numpy
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table
from transformers import BertForSequenceClassification

from benchmarks.lib.common import quiet, write_result
from scu_trainer.data.sensors.collate import SensorCollator
from scu_trainer.data.sensors.synthetic import synthetic
from scu_trainer.run_files import read_rows
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings, SafetySettings
from scu_trainer.settings.efficiency import EfficiencySettings
from scu_trainer.train.loss.wrap import wrap
from scu_trainer.train.trainer import SCUTrainer
from tests import recordings, tiny
from tests.faults import FakeGauge
from tests.train import test_words
from tests.train.sites import CountedRows, Sites
from tests.train.stepwise import Recorder, record_micro_batches, replay_micro_batches

EVERYTHING_FITS_BYTES = 2**40
STEPS, BATCHES, ROWS_PER_BATCH = 2, 2, 2
ROWS = BATCHES * ROWS_PER_BATCH
MODES = ("train", "evaluate", "predict")


def uneven(rows) -> tiny.Examples:
    """Return rows of 5 and of 9 tokens, which make few micro-batches, so that all operations of each can be tested."""
    return tiny.Examples({name: value[: 5 + 4 * (i % 2)] for name, value in rows[i].items()} for i in range(ROWS))


def labelled() -> tiny.Examples:
    return tiny.Examples(
        {**row, "input_ids": row["input_ids"][: 5 + 4 * (i % 2)]} for i, row in enumerate(tiny.labelled(ROWS))
    )


def own_module() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    return wrap(torch.nn.Sequential(*layers), loss=torch.nn.CrossEntropyLoss())


def pairs_of_numbers() -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(0))
    return [(row, torch.tensor(i % 3)) for i, row in enumerate(drawn)]


@dataclass(frozen=True)
class Subject:
    """A model to test. ``collate``: None uses that of the model. ``loops``: the loops besides memory."""

    make: Callable[[], torch.nn.Module]
    rows: Callable[[], Any]
    collate: Optional[Callable] = tiny.pad
    loops: dict[str, Any] = field(default_factory=dict)
    optim: str = "adamw_torch"


SCU = {"regularization": RegularizationSettings(target_s=1e-6), "regularization_tokens": 1e4}
PENALTY = {**SCU, "regularization": RegularizationSettings(law="original", target_s=1e-6)}
GUARD, AVERAGE = {"safety": SafetySettings()}, {"efficiency": EfficiencySettings(ema_decay=0.9)}
NOISE = {"curriculum": CurriculumSettings("noise_guard")}

SUBJECTS = {
    "padded language model (Llama)": Subject(
        lambda: tiny.llama(hidden=8, layers=1), lambda: uneven(tiny.Rows(ROWS)), loops={**NOISE, **AVERAGE, **GUARD}
    ),
    "LoRA (Llama)": Subject(
        lambda: tiny.lora(tiny.llama(hidden=8, layers=1)), lambda: uneven(tiny.Rows(ROWS)), loops={**SCU, **GUARD}
    ),
    "seq2seq (T5)": Subject(tiny.t5, lambda: uneven(tiny.pairs(ROWS)), loops={**PENALTY, **GUARD}),
    "text classifier (BERT)": Subject(
        lambda: tiny.bert(BertForSequenceClassification), labelled, loops={**NOISE, **SCU}, optim="adamw_torch_fused"
    ),
    "images (ViT)": Subject(tiny.vit, lambda: tiny.images(ROWS), loops={**AVERAGE, **SCU}),
    "words (GRU)": Subject(
        test_words.cadence, lambda: test_words.sequences(ROWS), test_words.COLLATE, {**SCU, **NOISE}
    ),
    "sensors (TRIDENT)": Subject(
        recordings.trident,
        lambda: tiny.Examples(recordings.rows_of(synthetic(ROWS, 4, seed=0))),
        SensorCollator(recordings.SHAPES),
        GUARD,
    ),
    "own module with BatchNorm (wrap)": Subject(own_module, pairs_of_numbers, None, {**AVERAGE, **GUARD}, "sgd"),
}
TRAINING = {
    "max_steps": STEPS,
    "per_device_train_batch_size": ROWS_PER_BATCH,
    "per_device_eval_batch_size": ROWS_PER_BATCH,
    "gradient_accumulation_steps": BATCHES,
    "max_grad_norm": 0.5,
    "logging_steps": 10_000,
}
TRIED = re.compile(r"out of memory at (\d+ rows? x \d+).*; (?:again|retrying) as (\d+ x \d+ rows? x \d+)")


@dataclass(frozen=True)
class Case:
    subject: str
    mode: str
    number: int


@dataclass(frozen=True)
class Outcome:
    """The result of one run. ``kind``: where operation ``number`` is; None if there is none. ``tried``: the micro-batch
    sizes in the history. ``error``: what ended the run."""

    case: Case
    kind: Optional[str]
    operation: str = ""
    recovered: bool = False
    exact: bool = False
    tried: tuple[str, ...] = ()
    error: str = ""


# -- one run -----------------------------------------------------------------------------------------------------------


def trainer_of(case: Case, folder: str, sites: Sites, recorder: Recorder) -> SCUTrainer:
    subject = SUBJECTS[case.subject]
    with sites.paused():  # operations during the construction of a trainer are not part of a run
        rows = subject.rows()
        # Neither is the reading of lengths by a curriculum before the first step.
        counted = rows if "curriculum" in subject.loops and case.mode == "train" else CountedRows(rows, sites)
        arguments = tiny.arguments(folder, **TRAINING, optim=subject.optim)
        trainer = SCUTrainer(
            subject.make(),
            arguments,
            train_dataset=counted,
            eval_dataset=counted,
            data_collator=subject.collate,
            callbacks=[recorder],
            memory=MemorySettings(),
            memory_gauge=FakeGauge(EVERYTHING_FITS_BYTES),
            compute_metrics=position_weighted if case.mode == "predict" else None,
            **subject.loops,
        )
    trainer.data_collator = sites.inside(trainer.data_collator, "collator")
    return quiet(trainer)


def position_weighted(prediction: Any) -> dict[str, float]:
    """Return a figure of the first logits that depends on the order of the rows."""
    logits = next(leaves(prediction.predictions))
    return {"score": float((logits.reshape(len(logits), -1).sum(axis=1) * numpy.arange(1, len(logits) + 1)).sum())}


def leaves(value: Any) -> Iterator[numpy.ndarray]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif value is not None:
        yield value


def run(case: Case, folder: str, sites: Sites, prepare: Callable[[SCUTrainer], None]) -> list[Any]:
    """Run a case, and return everything that must be equal: tensors, arrays and texts."""
    recorder = Recorder()
    trainer = trainer_of(case, folder, sites, recorder)
    prepare(trainer)
    if case.mode == "train":
        sites.watch_all(trainer)
        trainer.train()
        return trained_state(trainer, recorder, folder)
    if case.mode == "predict":
        trainer.prediction.halving.largest_rows = 1  # as after an out-of-memory error, so that parts have to be joined
    sites.watch_evaluation(trainer)
    if case.mode == "evaluate":
        return [figures(trainer.evaluate())]
    found = trainer.predict(trainer.eval_dataset)
    return [figures(found.metrics), *leaves(found.predictions), *leaves(found.label_ids)]


def figures(metrics: dict[str, float]) -> str:
    return repr(
        {name: value for name, value in metrics.items() if not name.endswith(("runtime", "per_second", "time"))}
    )


def trained_state(trainer: SCUTrainer, recorder: Recorder, folder: str) -> list[Any]:
    average = trainer.loop("weight_average")
    state: list[Any] = [tensor for step in (*recorder.weights, *recorder.buffers) for tensor in step.values()]
    state += [] if average is None else average._averages
    state += [] if trainer.regularizer is None else [repr(read_rows(Path(folder) / "scu_history.json"))]
    state += [] if trainer.curriculum is None else [trainer.difficulty.scores]
    return [*state, len(recorder.weights), trainer.state.global_step]


def same(found: list[Any], wanted: list[Any]) -> bool:
    def equal(one: Any, other: Any) -> bool:
        if torch.is_tensor(one):
            return torch.equal(one, other)
        return numpy.array_equal(one, other, equal_nan=True) if isinstance(one, numpy.ndarray) else one == other

    return len(found) == len(wanted) and all(map(equal, found, wanted))


# -- micro-batches of training, parts of evaluation: noted, and run again ----------------------------------------------


def record(case: Case, trainer: SCUTrainer) -> list:
    if case.mode == "train":
        return record_micro_batches(trainer)
    parts, halving = [], trainer.prediction.halving
    halve = halving.run

    def recording(count, attempt):
        results = halve(count, attempt)
        parts.append(tuple(part for part, _ in results))
        return results

    halving.run = recording
    return parts


def replay(case: Case, trainer: SCUTrainer, cuts: tuple) -> None:
    if case.mode == "train":
        replay_micro_batches(trainer, cuts)
        return
    batches = iter(cuts)
    trainer.prediction.halving.run = lambda count, attempt: [(part, attempt(part)) for part in next(batches)]


def count_sites(subject: str, mode: str) -> int:
    sites = Sites()
    with tempfile.TemporaryDirectory() as folder:
        run(Case(subject, mode, 0), folder, sites, lambda trainer: None)
    return sites.count


def outcome(case: Case) -> Outcome:
    sites, noted = Sites(case.number), []
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = run(case, folder, sites, lambda trainer: noted.append(record(case, trainer)))
        except Exception as error:  # the table shows every error that the fault leads to
            if not sites.raised:
                raise
            text = f"{type(error).__name__}: {str(error)[:200]}"
            return Outcome(case, sites.failed_kinds[0], sites.raised[0], error=text)
        history = Path(folder) / "memory_history.json"
        rows = read_rows(history) if history.is_file() else []
    if not sites.raised:
        return Outcome(case, None)
    cuts = tuple(tuple(part) for part in noted[0][-(STEPS if case.mode == "train" else BATCHES) :])
    exact = covers_every_row(case, cuts) and same(found, without_fault(case.subject, case.mode, cuts))
    tried = tuple(" -> ".join(match.groups()) for row in rows if (match := TRIED.match(row["reason"])))
    return Outcome(case, sites.failed_kinds[0], sites.raised[0], True, exact, tried)


def covers_every_row(case: Case, cuts: tuple) -> bool:
    if case.mode == "train":
        expected = [(batch, row) for batch in range(BATCHES) for row in range(ROWS_PER_BATCH)]
        return len(cuts) == STEPS and all(sorted(r for piece in cut for r in piece.rows) == expected for cut in cuts)
    return len(cuts) == BATCHES and all(
        [r for part in cut for r in part] == list(range(ROWS_PER_BATCH)) for cut in cuts
    )


@functools.cache
def without_fault(subject: str, mode: str, cuts: tuple) -> list[Any]:
    case = Case(subject, mode, -1)
    with tempfile.TemporaryDirectory() as folder:
        return run(case, folder, Sites(), lambda trainer: replay(case, trainer, cuts))


# -- the table ---------------------------------------------------------------------------------------------------------


def start_quietly() -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # every recovery collects garbage, which should not include imported objects
    logging.getLogger("scu_trainer").setLevel(logging.ERROR)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="one operation in so many fails")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    start_quietly()
    counts = {(subject, mode): count_sites(subject, mode) for subject in SUBJECTS for mode in MODES}
    cases = [Case(*key, number) for key, count in counts.items() for number in range(0, count, options.every)]
    Console().print(f"{sum(counts.values())} places, {len(cases)} runs")
    with multiprocessing.get_context("spawn").Pool(options.processes, start_quietly) as pool:
        found = list(track(pool.imap(outcome, cases, chunksize=8), "runs", len(cases)))
    found = [one for one in found if one.kind is not None]
    rows = summary(found)
    show(rows)
    totals = {
        "runs": len(found),
        "recovered": sum(one.recovered for one in found),
        "bitwise_equal": sum(one.exact for one in found),
    }
    Console().print(totals)
    failures = [
        {**vars(one.case), "site": one.kind, "operation": one.operation, "recovered": one.recovered, "error": one.error}
        for one in found
        if not (one.recovered and one.exact)
    ]
    for failure in failures:
        Console(width=200).print(failure)
    result = {"every": options.every, "steps": STEPS, "places": sum(counts.values()), **totals}
    write_result("fault_table", {**result, "failures": failures, "rows": rows})


def summary(found: list[Outcome]) -> list[dict[str, Any]]:
    rows = []
    for subject in SUBJECTS:
        for mode in MODES:
            of_run = [one for one in found if (one.case.subject, one.case.mode) == (subject, mode)]
            for kind in sorted({one.kind for one in of_run}):
                here = [one for one in of_run if one.kind == kind]
                tried = collections.Counter(size for one in here for size in one.tried)
                rows.append(
                    {
                        "model": subject,
                        "run": mode,
                        "site": kind,
                        "sites": len(here),
                        "recovered": sum(one.recovered for one in here),
                        "bitwise_equal": sum(one.exact for one in here),
                        "sizes_tried": dict(tried.most_common()),
                    }
                )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    names = ("model", "run", "site", "sites", "recovered", "bitwise equal")
    table = Table(*names, Column("sizes tried", no_wrap=True))
    for row in rows:
        sizes = "\n".join(f"{count} times {size}" for size, count in list(row["sizes_tried"].items())[:3]) or "-"
        table.add_row(*map(str, list(row.values())[:-1]), sizes)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
