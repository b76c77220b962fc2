"""Moments in which a kill, a copy or an older past leaves more than one folder that could be a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from scu_trainer.errors import CheckpointError
from scu_trainer.run_files import write_json
from scu_trainer.settings import CurriculumSettings
from scu_trainer.train.checkpoints import format as subject
from scu_trainer.train.checkpoints.findings import examine
from scu_trainer.train.run_directory.directory_lock import RunDirectoryLock
from tests import tiny
from tests.train.test_checkpoint import numbered
from tests.train.test_run_lock import claimed, elsewhere


def staged_checkpoint(run: Path, step: int, mark: str) -> Path:
    """Sealed, and not yet named."""
    staged = subject.staging_of(run, step) / f"checkpoint-{step}"
    staged.mkdir(parents=True)
    (staged / "trainer_state.json").write_text(json.dumps({"global_step": step, "mark": mark}))
    subject.seal(staged, {"step": step})
    return staged


def mark_of(checkpoint: Path) -> str:
    return json.loads((checkpoint / "trainer_state.json").read_text()).get("mark")


def test_folders_inside_are_synced_too(tmp_path, monkeypatch):
    (tmp_path / "checkpoint-1" / "global_step1").mkdir(parents=True)
    (tmp_path / "checkpoint-1" / "global_step1" / "states.pt").write_bytes(b"states")
    synced, fsync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda number: (synced.append(os.readlink(f"/proc/self/fd/{number}")), fsync(number))
    )
    subject.seal(tmp_path / "checkpoint-1", {})
    assert str(tmp_path / "checkpoint-1" / "global_step1") in synced
    assert "global_step1/states.pt" in subject.read_manifest(tmp_path / "checkpoint-1")["files"]


@pytest.mark.parametrize("killed_at", [1, 2])
def test_killed_while_one_is_replaced_there_is_one_of_the_two(tmp_path, monkeypatch, killed_at):
    """A rename of the old one, then a rename of the new one; the new one is adopted where only the first took place."""

    class Killed(BaseException):
        pass

    numbered(tmp_path, 3)
    staged, rename, seen = staged_checkpoint(tmp_path, 3, "new"), Path.rename, []

    def dies(path: Path, to: Path) -> Path:
        seen.append(path)
        if len(seen) == killed_at:
            raise Killed
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", dies)
    with pytest.raises(Killed):
        subject.publish(staged, tmp_path / "checkpoint-3")
    monkeypatch.undo()
    subject.clear_staging(tmp_path)
    assert mark_of(tmp_path / "checkpoint-3") == (None if killed_at == 1 else "new")
    assert subject.fault_of_files(tmp_path / "checkpoint-3") is None
    assert not list(tmp_path.glob("staging-*"))


def test_one_that_has_its_name_is_not_replaced_by_what_a_killed_run_left(tmp_path):
    numbered(tmp_path, 3)
    staged_checkpoint(tmp_path, 3, "left behind")
    assert subject.clear_staging(tmp_path) == ([], ["staging-checkpoint-3"])
    assert mark_of(tmp_path / "checkpoint-3") is None


@pytest.mark.parametrize("harm", ["no manifest", "torn manifest", "changed", "missing"])
def test_only_what_was_sealed_and_is_whole_gets_a_name(tmp_path, harm):
    staged = staged_checkpoint(tmp_path, 3, "x")
    if harm == "no manifest":
        (staged / subject.MANIFEST).unlink()
    elif harm == "torn manifest":
        (staged / subject.MANIFEST).write_text('{"files"')
    elif harm == "changed":
        (staged / "trainer_state.json").write_text(json.dumps({"global_step": 3, "mark": "y"}))
    else:
        (staged / "trainer_state.json").unlink()
    assert subject.clear_staging(tmp_path) == ([], ["staging-checkpoint-3"])
    assert subject.checkpoints(tmp_path) == []


def test_a_file_of_the_same_size_is_found_by_its_hash_alone(tmp_path):
    numbered(tmp_path, 3)
    folder = tmp_path / "checkpoint-3"
    content = (folder / "trainer_state.json").read_bytes()
    (folder / "trainer_state.json").write_bytes(content.replace(b"3", b"4"))
    assert subject.fault_of_files(folder) == "trainer_state.json was changed after it was written"
    assert subject.fault_of_files(folder, hashes=False) is None


@pytest.mark.parametrize("size_bytes", [0, 1, subject.BYTES_PER_READ, 3 * subject.BYTES_PER_READ + 7])
def test_what_is_hashed_when_it_is_new_and_later_is_the_same(tmp_path, size_bytes):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size_bytes))
    assert subject._hash_of_new(path) == subject._hash(path)


def test_sizes_and_missing_files_are_told_without_hashes(tmp_path):
    numbered(tmp_path, 3)
    path = tmp_path / "checkpoint-3" / "trainer_state.json"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b" ")
    assert subject.fault_of_files(path.parent, hashes=False) == f"trainer_state.json has {size + 1} of {size} bytes"
    path.unlink()
    assert subject.fault_of_files(path.parent, hashes=False) == "trainer_state.json is missing"


def test_a_stock_checkpoint_has_no_manifest_and_no_fault(tmp_path):
    numbered(tmp_path, 3)
    (tmp_path / "checkpoint-3" / subject.MANIFEST).unlink()
    shutil.copy(tmp_path / "checkpoint-3" / "trainer_state.json", tmp_path / "checkpoint-3" / "optimizer.pt")
    assert examine(tmp_path / "checkpoint-3", None).fault is None


# -- a directory that is locked ----------------------------------------------------------------------------------------


def unfinished(run: Path, *steps: int) -> Path:
    """A run at its last step, whose checkpoints can be gone on from."""
    for step in steps:
        complete(run / f"checkpoint-{step}", step)
    write_json(run / "run.json", {"status": "running", "step": max(steps)})
    return run


def complete(folder: Path, step: int) -> None:
    folder.mkdir(parents=True)
    for name in ("optimizer.pt", "rng_state.pth"):
        torch.save({}, folder / name)
    write_json(folder / "trainer_state.json", {"global_step": step})
    subject.seal(folder, {"step": step})


def test_going_on_from_an_earlier_one_puts_the_later_aside(tmp_path):
    run = unfinished(tmp_path / "run", 2, 4, 6)
    with RunDirectoryLock(tiny.arguments(run, resume_from_checkpoint=str(run / "checkpoint-2"))) as directory:
        assert directory.start.checkpoint == str(run / "checkpoint-2")
        assert len(subject.checkpoints(run)) == 3, "nothing is moved before it is certain that the run goes on"
        assert directory.put_aside() == ["checkpoint-4", "checkpoint-6"]
    assert [path.name for path in subject.checkpoints(run)] == ["checkpoint-2"]
    assert {path.name for path in run.glob("superseded-*")} == {"superseded-checkpoint-4", "superseded-checkpoint-6"}


def test_the_one_that_only_lacked_its_name_is_gone_on_from(tmp_path):
    run = unfinished(tmp_path / "run", 2, 4)
    complete(subject.staging_of(run, 6) / "checkpoint-6", 6)
    write_json(run / "run.json", {"status": "running", "step": 6})
    with RunDirectoryLock(tiny.arguments(run, resume_from_checkpoint="auto")) as directory:
        assert directory.start.checkpoint == str(run / "checkpoint-6")


def test_what_was_being_written_is_removed_and_named(tmp_path):
    run = unfinished(tmp_path / "run", 2)
    (subject.staging_of(run, 4) / "checkpoint-4").mkdir(parents=True)
    with RunDirectoryLock(tiny.arguments(run, resume_from_checkpoint="auto")) as directory:
        assert "removed files that a killed run had left half-written: staging-checkpoint-4" in directory.start.line
    assert not subject.staging_of(run, 4).exists()


def test_a_claim_that_is_refused_holds_nothing(tmp_path):
    run = unfinished(tmp_path / "run", 2)
    (run / "checkpoint-2" / "optimizer.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt has 0 of"):
        RunDirectoryLock(tiny.arguments(run, resume_from_checkpoint=str(run / "checkpoint-2")))
    assert elsewhere(lambda: claimed(run)) == 0


# -- a run that has no step left ---------------------------------------------------------------------------------------


def test_no_step_is_added_to_a_run_whose_epochs_became_shorter(tmp_path):
    """Its end is known from the plan of its last epoch, not from that of its first."""
    loops = {"curriculum": CurriculumSettings(curriculum="acmds")}
    common = {
        "max_steps": -1,
        "num_train_epochs": 3.5,
        "lr_scheduler_type": "linear",
        "per_device_train_batch_size": 2,
        "save_strategy": "steps",
    }
    whole = tiny.trained(tiny.llama(), tmp_path, dataset=tiny.Rows(30), save_steps=1, **common, **loops)
    last = whole.state.global_step
    assert last < 3.5 * whole.curriculum.length.nominal_steps
    again = tiny.trained(tiny.llama(), tmp_path, dataset=tiny.Rows(30), resume=True, save_steps=99, **common, **loops)
    assert again.state.global_step == last
    assert tiny.same(tiny.weights_of(again.model), tiny.weights_of(whole.model))
    assert again.curriculum.totals == whole.curriculum.totals
