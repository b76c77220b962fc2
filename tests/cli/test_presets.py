"""What of a preset follows from the machine: loader processes by cores, CUDA graphs where batches keep one size."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from scu_trainer.cli import configuration
from scu_trainer.cli.presets import preset_values
from scu_trainer.settings.images import PRESETS
from scu_trainer.settings.tasks import TaskSettings

GPU = TaskSettings("image-classification", preset="gpu")
ONE_SIZE = {
    "use_cpu": False, "torch_compile": True, "memory_control": False, "token_cap": None,
    "gradient_accumulation_steps": 1, "dataloader_drop_last": True, "dataloader_num_workers": 8,
}  # fmt: skip


def fit(given=(), cores=4, has_cuda=True, task=GPU, **changes):
    return preset_values(task, SimpleNamespace(**{**ONE_SIZE, **changes}), given, cores=cores, has_cuda=has_cuda)


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (4, 4), (8, 8), (64, 8)])
def test_a_process_reads_for_each_core_eight_at_most(cores, expected):
    values, notes = fit(cores=cores)
    assert values["dataloader_num_workers"] == expected
    assert f"dataloader_num_workers: {expected} (preset gpu: one for each of {cores} cores, 8 at most)" in notes


def test_other_presets_keep_their_numbers():
    assert fit(task=TaskSettings("image-classification", preset="cpu")) == ({}, [])
    values, _ = fit(task=TaskSettings("image-classification", preset="memory_efficient"), cores=64)
    assert values["dataloader_num_workers"] == PRESETS["memory_efficient"]["dataloader_num_workers"] == 1


def test_what_was_given_stays():
    values, notes = fit(given=["dataloader_num_workers", "torch_compile_mode"], cores=1)
    assert (values, notes) == ({}, [])


def test_no_processes_need_no_persistence():
    assert fit(given=["dataloader_num_workers"], dataloader_num_workers=0)[0]["dataloader_persistent_workers"] is False


def test_graphs_where_every_batch_has_one_size():
    values, notes = fit()
    assert "torch_compile_mode" not in values, "that of the preset stays"
    assert any(note.startswith("torch_compile_mode: reduce-overhead, because every step runs") for note in notes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"has_cuda": False}, "CUDA graphs need a CUDA device"),
        ({"use_cpu": True}, "CUDA graphs need a CUDA device"),
        ({"memory_control": True}, "memory_control: false"),
        ({"token_cap": 128}, "memory_control: false"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps: 1"),
        ({"dataloader_drop_last": False}, "dataloader_drop_last: true"),
    ],
)
def test_the_default_mode_and_why(changes, reason):
    values, notes = fit(**changes)
    assert values["torch_compile_mode"] is None
    assert any(note.startswith("torch_compile_mode: default, because ") and reason in note for note in notes)


def test_without_compiling_there_is_no_mode_which_would_turn_it_on():
    values, notes = fit(torch_compile=False)
    assert values["torch_compile_mode"] is None and not any("compile" in note for note in notes)


def read(*flags: str):
    return configuration.read_job(None, ["--task", "image-classification", "--use_cpu", "true", *flags])


def test_the_command_has_the_cores_of_this_machine(monkeypatch):
    monkeypatch.setattr(configuration, "usable_cores", lambda: 2.5)
    flags = ["--preset", "gpu", "--torch_compile", "false"]
    job = read(*flags)
    assert job.training.dataloader_num_workers == 2 and job.training.dataloader_persistent_workers
    assert job.training.torch_compile is False and job.training.torch_compile_mode is None
    assert any(note.startswith("dataloader_num_workers: 2 (preset gpu") for note in job.notes)
    assert read(*flags, "--dataloader_num_workers", "5").training.dataloader_num_workers == 5
    monkeypatch.setitem(os.environ, "LOCAL_WORLD_SIZE", "2")
    assert read(*flags).training.dataloader_num_workers == 1
