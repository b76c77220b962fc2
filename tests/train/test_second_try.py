"""Out of memory beside the micro-batches: done again with the same result to the bit, or told in one line."""

from __future__ import annotations

import errno
import functools
import importlib
import os
import pkgutil
import random
import re
import resource
from collections import UserDict
from functools import partial

import numpy
import pytest
import torch

import scu_trainer.train
from scu_trainer.data.numbered import Numbered
from scu_trainer.errors import OutOfMemory, RequirementError
from scu_trainer.run_files import read_rows
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings, SafetySettings
from scu_trainer.settings.efficiency import EfficiencySettings
from scu_trainer.train.step.recovery.loader_workers import RetryingRows, collate_with_retry, loader_with_retries
from scu_trainer.train.step.recovery.second_try import out_of_memory_reported, second_try
from scu_trainer.train.trainer import SCUTrainer
from tests import tiny
from tests.faults import CPU_TEXT, CUDA_TEXT, FakeGauge, oom
from tests.train.sites import CountedRows, Sites

LOOPS = {
    "memory": MemorySettings(),
    "regularization": RegularizationSettings(target_s=1e-6, control_frequency=2),
    "regularization_tokens": 1e4,
    "curriculum": CurriculumSettings("noise_guard"),
    "efficiency": EfficiencySettings(ema_decay=0.9),
    "safety": SafetySettings(),
}
PENALTY = RegularizationSettings(law="original", target_s=1e-6)
WINDOW = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2, "max_grad_norm": 0.5}


SUBJECTS = {
    "language": (partial(tiny.llama, layers=1, hidden=8), tiny.UnevenRows),
    "half precision": (lambda: tiny.llama(layers=1, hidden=8).bfloat16(), tiny.UnevenRows),
    "seq2seq": (tiny.t5, tiny.pairs),
    "pictures": (tiny.conv_net, tiny.images),
}


def trained(folder, sites: Sites, subject: str = "language", max_grad_norm: float = 0.5, **loops) -> SCUTrainer:
    make, rows = SUBJECTS[subject]
    trainer = SCUTrainer(
        make(),
        tiny.arguments(folder, **{**WINDOW, "max_grad_norm": max_grad_norm}),
        train_dataset=CountedRows(rows(), sites),
        data_collator=sites.inside(tiny.pad, "collator"),
        memory_gauge=FakeGauge(2**40),
        **{**LOOPS, **loops},
    )
    sites.watch_all(trainer)
    trainer.train()
    return trainer


def outcome(trainer: SCUTrainer, folder):
    """All that a run leaves: weights and their average, buffers, statistics of every loop."""
    rows = read_rows(folder / "scu_history.json") if trainer.regularizer is not None else None
    curriculum = None
    if trainer.curriculum is not None:
        curriculum = trainer.difficulty.scores.tolist(), read_rows(folder / "curriculum.json")
    average = trainer.loop("weight_average")
    tensors = [*trainer.model.state_dict().values(), *(average._averages if average is not None else [])]
    return [tensor.clone() for tensor in tensors], rows, curriculum, trainer.state.log_history[-1].get("train_loss")


def is_same(found, expected) -> bool:
    tensors, wanted = found[0], expected[0]
    same = len(tensors) == len(wanted) and all(torch.equal(*pair) for pair in zip(tensors, wanted, strict=True))
    return same and repr(found[1:]) == repr(expected[1:])


KINDS = {
    "rows": {"curriculum": None},  # which reads their lengths before the loader does
    "collator": {},
    "counting labels": {},
    "reading the window": {},
    "planning": {"subject": "seq2seq", "curriculum": None},
    "snapshots": {"subject": "pictures", "regularization": None, "curriculum": None},
    "training step": {"memory": MemorySettings(token_cap=16)},
    "clip": {},
    "gradient norm": {"max_grad_norm": 0.0},
    "bad numbers": {},
    "measuring S": {},
    "penalty": {"regularization": PENALTY},
    "average": {"subject": "half precision"},  # of float32 weights it takes no memory
    "losses of rows": {},
    "tokens": {"efficiency": EfficiencySettings(ema_decay=0.9, throughput=True, peak_tflops=1.0)},
}


@pytest.fixture(scope="module")
def without_fault(tmp_path_factory):
    """kind -> (what the run leaves, how many operations could fail)."""

    @functools.cache
    def of(kind: str):
        folder, sites = tmp_path_factory.mktemp("dry"), Sites(only=kind)
        return outcome(trained(folder, sites, **KINDS[kind]), folder), sites.count

    return of


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_beside_the_micro_batches_changes_nothing(tmp_path, without_fault, kind):
    expected, count = without_fault(kind)
    assert count > 0, "this place has no operation that could fail"
    for number in sorted({0, count - 1}):
        folder, sites = tmp_path / str(number), Sites(number, only=kind)
        found = outcome(trained(folder, sites, **KINDS[kind]), folder)
        assert sites.failed_kinds == [kind], f"{number} of {count}"
        assert is_same(found, expected), f"{number} of {count}: {sites.raised}"


def without_second_tries(monkeypatch) -> None:
    """Every recovery of this file is taken away, and only these: micro-batches and the optimizer keep theirs."""
    for module in pkgutil.walk_packages(scu_trainer.train.__path__, "scu_trainer.train."):
        if module.name.endswith(".triton_softmax"):  # a kernel alone, and Triton is not installed everywhere
            continue
        loaded = importlib.import_module(module.name)
        if hasattr(loaded, "second_try"):
            monkeypatch.setattr(loaded, "second_try", lambda function, *args, **kwargs: function())
    again = "scu_trainer.train.step.recovery.loader_workers._with_one_retry"
    monkeypatch.setattr(again, lambda first, second=None, draws=True: first())


# The window's rows are read again in two places, one in the other.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reading the window"])
def test_each_of_these_recoveries_is_needed(tmp_path, monkeypatch, without_fault, kind):
    """Without it the run ends, with one line that says what to change."""
    _, count = without_fault(kind)
    without_second_tries(monkeypatch)
    sites = Sites(count - 1, only=kind)
    with pytest.raises(OutOfMemory) as caught:
        trained(tmp_path, sites, **KINDS[kind])
    text = str(caught.value)
    assert sites.failed_kinds == [kind] and "\n" not in text
    advised = "dataloader_num_workers" if kind in ("rows", "collator") else "max_batch_size"
    assert "of training ran out of memory" in text and advised in text and "CUDA out of memory" in text


@pytest.mark.parametrize("kind", ["counting labels", "snapshots", "clip", "bad numbers", "measuring S", "average"])
def test_what_fails_twice_ends_in_one_line(tmp_path, without_fault, kind):
    _, count = without_fault(kind)
    with pytest.raises(OutOfMemory) as caught:
        trained(tmp_path, Sites(range(count - 1, 10 * count), only=kind), **KINDS[kind])
    text = str(caught.value)
    assert "\n" not in text and "even after memory was freed" in text and "max_batch_size" in text
    assert "Tried to allocate 20.00 MiB" in text
    assert not list(tmp_path.glob("checkpoint-*"))


# -- the pieces --------------------------------------------------------------------------------------------------------


def test_other_errors_are_not_repeated():
    calls = []

    def fails():
        calls.append(1)
        raise ValueError("no")

    with pytest.raises(ValueError):
        second_try(fails, "this")
    assert calls == [1]


def test_what_has_written_is_not_repeated():
    tensor, calls = torch.zeros(1), []

    def writes():
        calls.append(tensor.add_(1))
        raise oom()

    with pytest.raises(OutOfMemory, match="writing does not fit"):
        second_try(writes, "writing", unchanged=[tensor])
    assert len(calls) == 1


WORKER = "Caught {} in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File x\n{}"
LOADER_ERRORS = {
    "torch": RuntimeError(WORKER.format("RuntimeError", f"RuntimeError: {CPU_TEXT}")),
    "numpy": MemoryError(WORKER.format("MemoryError", "MemoryError: Unable to allocate 2.00 GiB")),
    "system": OSError(WORKER.format("OSError", "OSError: [Errno 12] Cannot allocate memory")),
    "killed": RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed. "),
    "shared memory": RuntimeError(
        "DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that dataloader's workers are out "
        "of shared memory. Please try to raise your shared memory limit."
    ),
    "pinning": torch.OutOfMemoryError(f"Caught OutOfMemoryError in pin memory thread for device 0.\n{CUDA_TEXT}"),
}


@pytest.mark.parametrize("name", LOADER_ERRORS)
def test_a_worker_without_memory_is_told_in_one_line(name):
    with pytest.raises(OutOfMemory) as caught:
        with out_of_memory_reported(lambda: "step 7 of training"):
            raise LOADER_ERRORS[name]
    text = str(caught.value)
    assert text.startswith("step 7 of training: a worker of the data loader ran out of memory. Lower")
    assert "dataloader_num_workers" in text and "\n" not in text


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Too many open files. Communication with the workers is no longer possible. Please increase"),
        OSError(errno.EMFILE, os.strerror(errno.EMFILE), "rows.bin"),
        RuntimeError(WORKER.format("OSError", "OSError: [Errno 24] Too many open files")),
        RuntimeError("received 0 items of ancdata"),
    ],
)
def test_too_few_files_are_told_in_one_line(error):
    words = r"^step 7 needs more open files than the \d+ .*; raise that \("
    with pytest.raises(RequirementError, match=words) as found:
        with out_of_memory_reported(lambda: "step 7"):
            raise error
    now, wanted = re.search(r"than the (\d+) that .*ulimit -n (\d+)\)", str(found.value)).groups()
    assert int(wanted) > int(now) == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@pytest.mark.parametrize(
    "error",
    [ValueError("no"), RuntimeError(WORKER.format("RuntimeError", "RuntimeError: shapes")), KeyboardInterrupt()],
)
def test_the_last_word_leaves_other_errors_alone(error):
    with pytest.raises(type(error)) as caught, out_of_memory_reported(lambda: "training"):
        raise error
    assert caught.value is error


class FailsOnce:
    """A collator that runs out of memory at its first call in a worker."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, rows):
        assert torch.utils.data.get_worker_info() is not None
        self.calls += 1
        if self.calls == 1:
            raise oom(CPU_TEXT)
        return tiny.pad(rows)


class Unreadable(tiny.Rows):
    def __getitem__(self, index: int):
        raise oom(CPU_TEXT)


def with_workers(folder, rows, collate) -> SCUTrainer:
    settings = {"memory": MemorySettings(), "memory_gauge": FakeGauge(2**40), "data_collator": collate}
    return tiny.trained(tiny.llama(layers=1), folder, dataset=rows, dataloader_num_workers=1, max_steps=3, **settings)


def test_a_worker_collates_once_more(tmp_path):
    found, expected = (with_workers(tmp_path, tiny.Rows(), collate) for collate in (FailsOnce(), tiny.pad))
    assert tiny.same(tiny.weights_of(found.model), tiny.weights_of(expected.model))


def test_a_row_that_no_worker_can_read_is_told():
    loader = loader_with_retries(torch.utils.data.DataLoader(Unreadable(), num_workers=1))
    with pytest.raises(OutOfMemory, match=r"step 1 of training.*dataloader_num_workers") as caught:
        with out_of_memory_reported(lambda: "step 1 of training"):
            next(iter(loader))
    assert "\n" not in str(caught.value)


def test_a_collator_that_writes_into_its_rows_and_draws_gets_both_as_they_were():
    calls = []

    def collate(rows):
        calls.append(len(rows))
        drawn = torch.rand(1)
        found = [row.pop("x") for row in rows]
        if len(calls) == 1:
            raise oom()
        return found, drawn

    rows = [{"x": 1}, UserDict(x=2)]
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert collate_with_retry(collate, rows) == ([1, 2], expected) and calls == [2, 2]
    with pytest.raises(torch.OutOfMemoryError):
        collate_with_retry(lambda rows: (_ for _ in ()).throw(oom()), rows)


def test_numbered_rows_need_no_copy_of_the_generators():
    """They seed their own and put those of the process back, also where reading fails half-way."""

    class Drawing(torch.utils.data.Dataset):
        fails = False

        def __getitem__(self, index):
            value = torch.rand(()).item(), numpy.random.rand(), random.random()
            if index == 2 and self.fails:
                self.fails = False
                raise oom()
            return value

    rows = Drawing()
    expected = Numbered(rows).__getitems__([1, 2, 3])
    before = torch.get_rng_state(), numpy.random.get_state()[1].tolist(), random.getstate()
    rows.fails = True
    assert RetryingRows(Numbered(rows)).__getitems__([1, 2, 3]) == expected and not rows.fails
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (numpy.random.get_state()[1].tolist(), random.getstate()) == before[1:]
