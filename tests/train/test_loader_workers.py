"""Loader workers: what they draw at random, and what they do about signals."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import subprocess
import sys

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from scu_trainer.errors import DataError
from scu_trainer.settings import CurriculumSettings
from scu_trainer.train.step.recovery.loader_workers import IgnoreSignals, protect_workers
from scu_trainer.train.step.recovery.out_of_memory import is_out_of_memory_in_loader
from tests.tiny import Rows, llama, same, trained, weights_of
from tests.train.test_resume import StopAt


class NoisyRows(Rows):
    """Each look at a row gives other tokens, drawn from all three generators that people use."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        position = random.randrange(len(row["input_ids"]))
        row["input_ids"] = row["input_ids"].roll(int(torch.randint(0, 8, ())) + numpy.random.randint(8))
        row["input_ids"][position] = 5
        return row


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_rows_with_random_changes_are_those_of_the_uninterrupted_run(tmp_path, workers):
    common = {"max_steps": 6, "dataloader_num_workers": workers, "curriculum": CurriculumSettings()}
    common |= {"dataset": NoisyRows(), "per_device_train_batch_size": 4}
    whole = trained(llama(), tmp_path / "whole", **common)
    trained(llama(), tmp_path / "parts", callbacks=[StopAt(3)], **common)
    resumed = trained(llama(), tmp_path / "parts", resume=True, **common)
    assert resumed.state.global_step == 6
    assert same(weights_of(resumed.model), weights_of(whole.model))


def test_only_workers_need_shared_memory(tmp_path, monkeypatch):
    """Some containers have no /dev/shm, or one that cannot be written."""

    def refused(_):
        raise RuntimeError("unable to open shared memory object </torch_1> in read-write mode: Read-only file system")

    monkeypatch.setattr(torch.Tensor, "share_memory_", refused)
    common = {"max_steps": 1, "curriculum": CurriculumSettings()}
    assert trained(llama(), tmp_path, **common).state.global_step == 1
    with pytest.raises(DataError, match=r"need shared memory .* Read-only file system; .*dataloader_num_workers: 0"):
        trained(llama(), tmp_path, dataloader_num_workers=1, **common)


def test_epochs_and_samples_draw_differently():
    from scu_trainer.data.numbered import Numbered

    class Draw(torch.utils.data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return torch.rand(()).item()

    numbered, seen = Numbered(Draw(), seed=7), []
    for epoch in (0, 1, 0):
        numbered.set_epoch(epoch)
        seen.append([value for _, value in DataLoader(numbered, num_workers=1, batch_size=None)])
    assert seen[0] == seen[2]
    assert len({*seen[0], *seen[1]}) == 6


class Signalled(torch.utils.data.Dataset):
    """The second row sends its own worker what a batch queue sends to all."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 1:
            os.kill(os.getpid(), self.number)
        return index


class Unsendable:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self):
        raise self.error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_goes_on_when_its_group_is_told_to_stop(number):
    initialized = []
    loader = protect_workers(
        DataLoader(Signalled(number), num_workers=1, batch_size=1, worker_init_fn=initialized.append)
    )
    assert [int(batch) for batch in loader] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [(RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_3>"), True), (TypeError("no"), False)],
)
def test_a_batch_that_a_worker_cannot_send_is_an_error_and_not_awaited_forever(error, is_memory):
    def collate(rows):
        return Unsendable(error) if 1 in rows else rows

    loader = protect_workers(
        DataLoader(range(4), num_workers=1, collate_fn=collate, multiprocessing_context="fork", timeout=20)
    )
    batches = iter(loader)
    assert next(batches) == [0]
    with pytest.raises(type(error), match=f"(?s)^Caught .* worker process 0.*{re.escape(str(error))}") as caught:
        next(batches)
    assert is_out_of_memory_in_loader(caught.value) == is_memory


def test_an_error_of_a_class_that_cannot_be_sent_is_told_in_words():
    class Odd(Exception):
        pass

    def collate(rows):
        raise Odd("an odd row")

    loader = protect_workers(
        DataLoader(range(4), num_workers=1, collate_fn=collate, multiprocessing_context="fork", timeout=20)
    )
    batches = iter(loader)
    with pytest.raises(RuntimeError, match=r"(?s)worker process 0.*Odd: an odd row"):
        next(batches)


def test_workers_end_with_their_loader():
    """By the garbage collector: what reads from a loader and the loader refer to each other."""
    loader = protect_workers(
        DataLoader(range(4), num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    )
    assert [int(batch) for batch in loader] == [0, 1, 2, 3]
    (worker,), loader.itself = loader._iterator._workers, loader
    del loader
    gc.collect()
    assert worker.exitcode == 0


def test_without_workers_nothing_is_changed():
    loader = DataLoader(Rows(), num_workers=0)
    assert protect_workers(loader).worker_init_fn is None
    assert protect_workers([1, 2]) == [1, 2]


WORKERS_AT_THE_END = """
from torch.utils.data import DataLoader
from scu_trainer.train.step.recovery.loader_workers import protect_workers
forked = {"num_workers": 1, "multiprocessing_context": "fork"}
persistent = protect_workers(DataLoader(range(4), persistent_workers=True, **forked))
print(sum(int(batch) for batch in persistent), flush=True)
held = iter(protect_workers(DataLoader(range(4), **forked)))
print(int(next(held)), flush=True)
"""
"""Persistent ones, and those of an iterator that is held, as the traceback of an error that ends a run holds it."""


def test_a_process_with_workers_comes_to_its_end():
    """Started from nothing, so that the whole interpreter ends. Either kind of workers alone would hold it up."""
    words = [sys.executable, "-c", WORKERS_AT_THE_END]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "6\n0\n")


def test_a_second_sigterm_ends_a_worker_that_hangs():
    child = os.fork()
    if child == 0:
        IgnoreSignals(None)(0)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGTERM
