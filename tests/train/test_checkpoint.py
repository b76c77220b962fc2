"""Checkpoints are whole or absent; the newest whole one is found, and others are refused with a reason."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, Trainer
from transformers.trainer_utils import get_last_checkpoint

from scu_trainer.errors import CheckpointError
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings, SafetySettings
from scu_trainer.train.checkpoints import findings
from scu_trainer.train.checkpoints import format as subject
from scu_trainer.train.checkpoints.findings import examine
from scu_trainer.train.checkpoints.selection import newest_checkpoint
from scu_trainer.train.trainer import SCUTrainer
from tests.tiny import Rows, arguments, llama, same, trained, weights_of

LOOPS = {
    "regularization": RegularizationSettings(target_s=0.02),
    "memory": MemorySettings(),
    "curriculum": CurriculumSettings(),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Checkpoints 2 and 4 of a run with all loops."""
    folder = tmp_path_factory.mktemp("run")
    trained(llama(), folder, max_steps=4, save_steps=2, save_strategy="steps", **LOOPS)
    return folder


@pytest.fixture
def copy(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


# -- what is written ---------------------------------------------------------------------------------------------------


def test_the_manifest_lists_every_file(run):
    for folder in subject.checkpoints(run):
        manifest = json.loads((folder / subject.MANIFEST).read_text())
        files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert set(manifest["files"]) == files - {subject.MANIFEST}
        assert manifest["complete"] is True and manifest["step"] == subject.step_of(folder)
        assert {"optimizer.pt", "model.safetensors", "trainer_state.json", "rng_state.pth"} <= files
    assert not list(run.glob("staging-*"))


def test_weights_may_be_read_by_those_who_may_read_the_other_files(run):
    for folder in subject.checkpoints(run):
        assert len({path.stat().st_mode for path in folder.rglob("*") if path.is_file()}) == 1


def test_stock_programs_read_it(run, tmp_path):
    newest = run / "checkpoint-4"
    assert get_last_checkpoint(str(run)) == str(newest)
    model = AutoModelForCausalLM.from_pretrained(newest)
    stock = Trainer(model, arguments(tmp_path / "stock", max_steps=5), train_dataset=Rows())
    stock.train(resume_from_checkpoint=str(newest))
    assert stock.state.global_step == 5


def test_killed_while_writing_there_is_no_checkpoint_but_the_older(tmp_path):
    class Killed(BaseException):
        pass

    def torn(trainer):
        stock = trainer._save_rng_state

        def save(folder):
            if trainer.state.global_step == 4:
                raise Killed
            stock(folder)

        trainer._save_rng_state = save

    with pytest.raises(Killed):
        trained(llama(), tmp_path, max_steps=4, save_steps=2, save_strategy="steps", prepare=torn)
    assert [path.name for path in subject.checkpoints(tmp_path)] == ["checkpoint-2"]
    assert (tmp_path / "staging-checkpoint-4" / "checkpoint-4" / "optimizer.pt").is_file()
    assert subject.clear_staging(tmp_path) == ([], ["staging-checkpoint-4"])
    assert not (tmp_path / "staging-checkpoint-4").exists()


def test_killed_before_the_last_rename_it_gets_its_name(copy):
    staging = copy / "staging-checkpoint-4"
    staging.mkdir()
    (copy / "checkpoint-4").rename(staging / "checkpoint-4")
    assert subject.clear_staging(copy) == (["checkpoint-4"], [])
    assert examine(copy / "checkpoint-4", 1).fault is None and not staging.exists()


def test_a_checkpoint_is_replaced_whole(copy):
    staged = copy / "staging-checkpoint-4" / "checkpoint-4"
    shutil.copytree(copy / "checkpoint-2", staged)
    subject.seal(staged, {"step": 4})
    subject.publish(staged, copy / "checkpoint-4")
    assert json.loads((copy / "checkpoint-4" / "trainer_state.json").read_text())["global_step"] == 2
    assert not staged.parent.exists()


def test_everything_is_synced_before_it_is_named(copy, monkeypatch):
    staged, events = copy / "staging-checkpoint-9" / "checkpoint-9", []
    shutil.copytree(copy / "checkpoint-4", staged)
    rename, fsync = Path.rename, os.fsync
    monkeypatch.setattr(Path, "rename", lambda path, to: (events.append("rename"), rename(path, to))[1])
    monkeypatch.setattr(
        os, "fsync", lambda number: (events.append(os.readlink(f"/proc/self/fd/{number}")), fsync(number))
    )
    files = {str(path) for path in staged.rglob("*")}
    subject.seal(staged, {"step": 9})
    subject.publish(staged, copy / "checkpoint-9")
    before, after = events[: events.index("rename")], events[events.index("rename") :]
    assert files | {str(staged), str(staged / subject.MANIFEST)} <= set(before)
    assert str(copy) in after


# -- which ones stay ---------------------------------------------------------------------------------------------------


def numbered(run: Path, *steps: int) -> None:
    for step in steps:
        folder = run / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        subject.seal(folder, {"step": step})


def left(run: Path) -> list[int]:
    return sorted(subject.step_of(path) for path in subject.checkpoints(run))


@pytest.mark.parametrize(
    ("limit", "best", "stay"),
    [
        (None, None, [1, 2, 3, 4]),
        (3, None, [2, 3, 4]),
        (1, None, [4]),
        (2, 1, [1, 4]),
        (1, 1, [1, 4]),  # as the stock Trainer: the newest to go on from, the best to end with
        (3, 4, [2, 3, 4]),
    ],
)
def test_rotation_keeps_the_newest_and_the_best(tmp_path, limit, best, stay):
    numbered(tmp_path, 1, 2, 3, 4)
    best_path = None if best is None else tmp_path / f"checkpoint-{best}"
    removed = subject.rotate(tmp_path, tmp_path / "checkpoint-4", limit, best_path)
    assert left(tmp_path) == stay
    assert sorted(removed) == [f"checkpoint-{step}" for step in range(1, 5) if step not in stay]


def test_a_torn_one_takes_nobodys_place(tmp_path):
    numbered(tmp_path, 1, 2, 3, 4)
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("{")
    subject.rotate(tmp_path, tmp_path / "checkpoint-4", 2, None)
    assert left(tmp_path) == [2, 4]


def test_the_newest_is_by_number_and_never_removed(tmp_path):
    """Times of files jump with the clock; a later number is of another past."""
    numbered(tmp_path, 1, 2, 3, 9)
    for step, age_s in ((1, 5e9), (2, 4e9), (3, 1.0), (9, 0.0)):
        os.utime(tmp_path / f"checkpoint-{step}", (age_s, age_s))
    subject.rotate(tmp_path, tmp_path / "checkpoint-3", 1, None)
    assert left(tmp_path) == [3, 9]


def test_a_link_is_not_followed_when_it_is_rotated_away(tmp_path):
    outside = tmp_path / "outside"
    numbered(outside, 1)
    run = tmp_path / "run"
    numbered(run, 2, 3)
    (run / "checkpoint-1").symlink_to(outside / "checkpoint-1")
    subject.rotate(run, run / "checkpoint-3", 2, None)
    assert left(run) == [2, 3] and left(outside) == [1]


def test_the_limit_holds_in_a_run(tmp_path):
    trained(llama(), tmp_path, max_steps=5, save_steps=1, save_strategy="steps", save_total_limit=2)
    assert left(tmp_path) == [4, 5]


def test_the_best_one_is_named_where_it_stays(tmp_path):
    changes = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    trainer = trained(
        llama(),
        tmp_path,
        max_steps=3,
        save_steps=1,
        save_strategy="steps",
        eval_dataset=Rows(8, seed=3),
        learning_rate=1e-9,  # so that the first one stays within rounding of the best
        metric_for_best_model="loss",
        **changes,
    )
    best = Path(trainer.state.best_model_checkpoint)
    assert best.parent == tmp_path and best.is_dir()
    state = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert Path(state["best_model_checkpoint"]).is_dir()


@pytest.mark.parametrize("full_from", [1, 3])
def test_the_best_one_is_one_that_was_written(tmp_path, monkeypatch, full_from):
    """The loss falls, so each is the best, and the disk is full just when the list of its files is written."""
    seal = subject.seal

    def full(folder, facts):
        if facts["step"] >= full_from:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        seal(folder, facts)

    monkeypatch.setattr(subject, "seal", full)
    trainer = trained(
        llama(),
        tmp_path,
        max_steps=4,
        save_steps=1,
        save_strategy="steps",
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=Rows(8),
        load_best_model_at_end=True,
        safety=SafetySettings(),
    )
    assert len(trainer.checkpoints.notices) == 5 - full_from
    assert (trainer.state.best_global_step, trainer.state.best_model_checkpoint) == (4, None)
    whole = trained(llama(), tmp_path / "whole", max_steps=4, safety=SafetySettings())
    assert same(weights_of(trainer.model), weights_of(whole.model))  # of the last step, which is the best


@pytest.mark.parametrize(("last", "taken"), [(2.9, None), (3.1, "checkpoint-1")])
def test_without_the_best_the_better_of_the_last_and_those_that_were_written_is_taken(
    tmp_path, monkeypatch, last, taken
):
    seal, losses = subject.seal, iter([3.0, 2.0, last])

    def full(folder, facts):
        if facts["step"] == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        seal(folder, facts)

    class Told(SCUTrainer):
        def evaluation_loop(self, *args, **kwargs):
            found = super().evaluation_loop(*args, **kwargs)
            return found._replace(metrics={**found.metrics, "eval_loss": next(losses)})

    monkeypatch.setattr(subject, "seal", full)
    changes = {"save_steps": 1, "save_strategy": "steps", "eval_strategy": "steps", "eval_steps": 1, "max_steps": 3}
    changes |= {"eval_dataset": Rows(8), "load_best_model_at_end": True, "safety": SafetySettings(), "kind": Told}
    trainer = trained(llama(), tmp_path, **changes)
    best = trainer.state.best_model_checkpoint
    assert best == (None if taken is None else str(tmp_path / taken))
    weights = weights_of(AutoModelForCausalLM.from_pretrained(tmp_path / (taken or "checkpoint-3")))
    assert same(weights_of(trainer.model), weights)


# -- which one is gone on from -----------------------------------------------------------------------------------------


def cut_at(folder: Path, position: int) -> None:
    """As if the disk had only taken the first ``position`` bytes of all files, in the order of their names."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        if position <= 0:
            path.unlink()
        elif position < size:
            os.truncate(path, position)
        position -= size


def test_cut_at_any_twentieth_the_older_one_is_taken(run, tmp_path, caplog):
    total = subject.size_bytes(run / "checkpoint-4")
    for part in range(20):
        copy = Path(shutil.copytree(run, tmp_path / str(part)))
        cut_at(copy / "checkpoint-4", total * part // 20)
        caplog.clear()
        assert newest_checkpoint(copy, 1)[0] == copy / "checkpoint-2", f"cut at {part}/20"
        assert "checkpoint-4 is skipped" in caplog.text
    assert newest_checkpoint(run, 1)[0] == run / "checkpoint-4"


@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors", "trainer_state.json", "scu_state.json"])
def test_one_changed_byte_is_found(copy, name):
    path = copy / "checkpoint-4" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert examine(copy / "checkpoint-4", 1).fault is not None
    assert newest_checkpoint(copy, 1)[0] == copy / "checkpoint-2"


@pytest.mark.parametrize("from_end", [-38, -26])
def test_one_changed_byte_of_an_archives_last_record_is_found(copy, from_end):
    """Of the number of disks: zipfile raises already when it is asked whether this is a zip."""
    path = copy / "checkpoint-4" / "optimizer.pt"
    content = bytearray(path.read_bytes())
    content[from_end] ^= 2
    path.write_bytes(content)
    assert "optimizer.pt" in (examine(copy / "checkpoint-4", 1).fault or "")


@pytest.mark.parametrize("offset", [8, 10, 12, 46])
def test_one_changed_byte_of_an_archives_directory_is_found(copy, offset):
    """Of an entry's flags, its method, its time, its name: not what zipfile says of itself (BadZipFile)."""
    path = copy / "checkpoint-4" / "optimizer.pt"
    content = bytearray(path.read_bytes())
    start = content.index(b"PK\x01\x02")
    content[start + offset] ^= 0xC1
    path.write_bytes(content)
    assert examine(copy / "checkpoint-4", 1).fault is not None
    assert newest_checkpoint(copy, 1)[0] == copy / "checkpoint-2"


def test_one_that_is_removed_while_it_is_examined_has_a_fault(copy, monkeypatch):
    """As the rotation of a run that trains does while another command asks for its status."""
    names = ("differences", "read_object_or_none", "is_safetensors", "has_optimizer", "read_state", "random_states")
    for moment in range(30):
        one, calls = Path(shutil.copytree(copy / "checkpoint-4", copy / f"copy-{moment}" / "checkpoint-4")), []

        def removing(real, one=one, calls=calls, moment=moment):
            def act(*args, **kwargs):
                calls.append(real)
                if len(calls) == moment + 1:
                    shutil.rmtree(one)
                return real(*args, **kwargs)

            return act

        for name in names:
            monkeypatch.setattr(findings, name, removing(getattr(findings, name)))
        fault = examine(one, 1).fault
        monkeypatch.undo()
        if len(calls) <= moment:
            break
        assert fault is not None, f"removed before call {moment} of {calls}"
    assert moment > 5 and fault is None


def test_the_trainer_takes_the_newest_whole_one(copy):
    cut_at(copy / "checkpoint-4", 1000)
    resumed = trained(llama(), copy, max_steps=5, resume=True, save_strategy="no", **LOOPS)
    assert resumed._initial_global_step == 2 and resumed.state.global_step == 5


def test_without_a_whole_one_it_is_refused(copy):
    for folder in subject.checkpoints(copy):
        cut_at(folder, 1000)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint to resume from \(checkpoint-4 is skipped: .*checkpoint-2"
    ):
        trained(llama(), copy, max_steps=5, resume=True, **LOOPS)
    with pytest.raises(CheckpointError, match=r"cannot be resumed from: .*start over without it \(--no_resume\)"):
        trained(llama(), copy, max_steps=5, resume=str(copy / "checkpoint-4"), **LOOPS)


def test_a_torn_one_that_is_named_is_refused(copy):
    cut_at(copy / "checkpoint-4", 1000)
    with pytest.raises(CheckpointError, match="cannot be resumed from"):
        trained(llama(), copy, max_steps=5, resume=str(copy / "checkpoint-4"), **LOOPS)


def test_later_ones_are_put_aside(copy):
    numbered(copy, 9)
    (copy / "superseded-checkpoint-9").mkdir()
    assert subject.set_aside(copy, 2) == ["checkpoint-4", "checkpoint-9"]
    assert left(copy) == [2]
    assert (copy / "superseded-checkpoint-4" / "optimizer.pt").is_file()
    assert (copy / "superseded-checkpoint-9.2" / "trainer_state.json").is_file()


# -- weights only ------------------------------------------------------------------------------------------------------


def test_without_optimizer_state_only_when_told(tmp_path, caplog):
    loops = {**LOOPS, "curriculum": CurriculumSettings(curriculum="token_budget")}
    common = {"lr_scheduler_type": "linear", "max_steps": 6, "learning_rate": 0.01, **loops}
    trained(llama(), tmp_path, save_only_model=True, save_steps=4, save_strategy="steps", **common)
    assert not (tmp_path / "checkpoint-4" / "optimizer.pt").exists()
    with pytest.raises(CheckpointError, match=r"holds no optimizer state .*--weights_only"):
        trained(llama(), tmp_path, resume=str(tmp_path / "checkpoint-4"), **common)
    seen = {}

    def look(trainer):
        stock = trainer.get_batch_samples

        def first_batch(*args):
            if not seen:
                seen["rate"] = trainer.lr_scheduler.get_last_lr()[0]
                seen["state"] = sum(int(entry["step"]) for entry in trainer.optimizer.state.values())
                seen["weights"] = weights_of(trainer.model)
            return stock(*args)

        trainer.get_batch_samples = first_batch

    resumed = trained(
        llama(),
        tmp_path / "second",
        resume=str(tmp_path / "checkpoint-4"),
        safety=SafetySettings(weights_only=True),
        prepare=look,
        **common,
    )
    assert resumed.state.global_step == 6
    assert seen["rate"] == pytest.approx(0.01 * 2 / 6)  # of step 5 of 6
    assert "no scheduler.pt: the optimizer starts over, and its schedule continues from this step" in caplog.text
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4").float()
    assert same(seen["weights"], weights_of(saved))
    assert seen["state"] == 0
