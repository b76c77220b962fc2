"""Checkpoints that somebody has edited, copied, renamed or written with the stock Trainer, and such as are broken.

What the stock Trainer goes on from, ours goes on from, and says what differs; what is torn is never chosen."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer

from scu_trainer.cli import train
from scu_trainer.errors import CheckpointError
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings, SafetySettings
from scu_trainer.train.checkpoints import format as files
from scu_trainer.train.checkpoints.findings import examine
from scu_trainer.train.checkpoints.selection import newest_checkpoint
from scu_trainer.train.run_directory.directory_lock import RunDirectoryLock
from scu_trainer.train.run_directory.resume import AUTO, Request, decide
from scu_trainer.train.trainer import SCUTrainer
from tests.tiny import Rows, arguments, same, saved_llama, small_llama, trained, weights_of

STEPS = {"max_steps": 6, "lr_scheduler_type": "linear"}
SAVED = {**STEPS, "save_strategy": "steps", "save_steps": 2}
LOOPS = {
    "regularization": RegularizationSettings(target_s=0.02),
    "memory": MemorySettings(),
    "curriculum": CurriculumSettings("token_budget"),
    "safety": SafetySettings(),
}


def folder_of(tmp_path_factory, name: str, train: Callable[[Path], Any]) -> Path:
    """Checkpoints 2, 4 and 6."""
    folder = tmp_path_factory.mktemp(name)
    train(folder)
    return folder


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    return folder_of(tmp_path_factory, "ours", lambda folder: trained(small_llama(), folder, **SAVED))


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> Path:
    def train(folder: Path) -> None:
        Trainer(small_llama(), arguments(folder, **SAVED), train_dataset=Rows()).train()

    return folder_of(tmp_path_factory, "stock", train)


@pytest.fixture(scope="module")
def looped(tmp_path_factory) -> Path:
    return folder_of(tmp_path_factory, "looped", lambda folder: trained(small_llama(), folder, **SAVED, **LOOPS))


def copied(run: Path, to: Path, *steps: int) -> Path:
    for step in steps:
        shutil.copytree(run / f"checkpoint-{step}", to / f"checkpoint-{step}")
    return to


# -- what is wrong with a wish -----------------------------------------------------------------------------------------

WISHES = {
    "a folder that is not there": lambda folder: str(folder / "checkpoint-9"),
    "a path of one": lambda folder: folder / "checkpoint-9",
    "the newest of none": lambda folder: True,
    "a number": lambda folder: 5,
    "nothing": lambda folder: "",
    "a list": lambda folder: [1],
}


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("loops", [{}, LOOPS], ids=["off", "on"])
def test_a_wrong_wish_is_told_as_the_stock_trainer_tells_it(tmp_path, wish, exists, loops):
    told, folder = [], tmp_path / "run"
    for kind, extra in ((Trainer, {}), (SCUTrainer, loops)):
        trainer = kind(small_llama(), arguments(folder), train_dataset=Rows(), **extra)
        folder.mkdir() if exists and not folder.exists() else None
        with pytest.raises(Exception) as caught:
            trainer.train(resume_from_checkpoint=WISHES[wish](folder))
        told.append((type(caught.value), str(caught.value)))
    assert told[0] == told[1]


def test_our_refusals_are_what_callers_of_the_stock_trainer_catch():
    assert issubclass(CheckpointError, ValueError)


# -- what the stock Trainer goes on from -------------------------------------------------------------------------------


def cut_into_shards(folder: Path) -> None:
    """The names of two files of weights where there was one."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, inside in parts.items():
        save_file({name: weights[name] for name in inside}, folder / file, metadata={"format": "pt"})
    places = {name: file for file, inside in parts.items() for name in inside}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def edit_state(folder: Path) -> None:
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "log_history": [{"step": 1, "note": "x"}]}))


def other_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({k: 0.5 * w for k, w in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def shorter_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({k: w.bfloat16() for k, w in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def without(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names]


EDITS: dict[str, tuple[Callable[[Path], Any], str, bool]] = {
    "in two files": (cut_into_shards, "model.safetensors is missing", False),
    "no random state": (without("rng_state.pth"), "rng_state.pth is missing", False),
    "an edited state": (edit_state, "trainer_state.json has", False),
    "other weights": (other_weights, "model.safetensors was changed", False),
    "weights in half the bytes": (shorter_weights, "model.safetensors has", False),
    "no optimizer": (without("optimizer.pt", "scheduler.pt"), "optimizer.pt is missing", False),
    "no schedule": (without("scheduler.pt"), "scheduler.pt is missing", False),
    "without what is not needed": (without("training_args.bin", "config.json"), "training_args.bin is missing", True),
}
"""What was done to it, what is said of that, and whether it is chosen all the same where an older one is whole."""


def resumed(kind: type, checkpoint: Any, folder: Path, **loops) -> Trainer:
    trainer = kind(small_llama(seed=3), arguments(folder, **STEPS), train_dataset=Rows(), **loops)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


@pytest.mark.parametrize("edit", EDITS)
def test_edited_it_resumes_as_with_the_stock_trainer(ours, tmp_path, caplog, edit):
    change, said, _ = EDITS[edit]
    checkpoint = copied(ours, tmp_path, 4) / "checkpoint-4"
    change(checkpoint)
    expected = resumed(Trainer, str(checkpoint), tmp_path / "stock")
    caplog.clear()
    found = resumed(SCUTrainer, str(checkpoint), tmp_path / "ours")
    assert same(weights_of(found.model), weights_of(expected.model))
    assert found.state.global_step == expected.state.global_step
    assert [
        r for r in caplog.records if r.levelname == "WARNING" and said in r.message and str(checkpoint) in r.message
    ]


@pytest.mark.parametrize("missing", ["optimizer.pt", "scheduler.pt"])
def test_an_optimizer_that_starts_over_is_said(stock, tmp_path, caplog, missing):
    """The stock Trainer reads both or, without a word, neither."""
    checkpoint = copied(stock, tmp_path, 4) / "checkpoint-4"
    (checkpoint / missing).unlink()
    resumed(SCUTrainer, str(checkpoint), tmp_path / "off")
    assert f"checkpoint-4 holds no {missing}: the optimizer and its schedule start over" in caplog.text


def test_weights_alone_are_refused_with_what_takes_them_in_python(tmp_path):
    trained(small_llama(), tmp_path, **SAVED, save_only_model=True, memory=MemorySettings())
    with pytest.raises(CheckpointError, match=r"in Python safety=SafetySettings\(weights_only=True\)"):
        trained(small_llama(), tmp_path, resume=True, **STEPS, memory=MemorySettings())
    more = {**STEPS, "max_steps": 8, "safety": SafetySettings(weights_only=True)}
    assert trained(small_llama(), tmp_path, resume=True, **more, memory=MemorySettings()).state.global_step == 8


class SecondRank(SCUTrainer):
    def is_world_process_zero(self):
        return False


def test_one_rank_says_what_a_checkpoint_lacks(ours, tmp_path, caplog):
    newest = copied(ours, tmp_path, 4) / "checkpoint-4"
    (newest / "optimizer.pt").unlink()
    for asked in (str(newest), True):
        assert resumed(SecondRank, asked, newest.parent).state.global_step > 4
    assert "checkpoint-4" not in caplog.text


@pytest.mark.parametrize("edit", EDITS)
def test_unasked_an_edited_one_comes_after_a_whole_one(ours, tmp_path, caplog, edit):
    change, said, is_chosen = EDITS[edit]
    run = copied(ours, tmp_path, 2, 4)
    change(run / "checkpoint-4")
    assert newest_checkpoint(run, 1, weights_only=True)[0] == run / f"checkpoint-{4 if is_chosen else 2}"
    assert said in caplog.text
    shutil.rmtree(run / "checkpoint-2")
    chosen, reasons = newest_checkpoint(run, 1, weights_only=True)
    assert chosen == run / "checkpoint-4"
    assert [reason.partition(": ")[0] for reason in reasons] == ["checkpoint-4 itself was changed"] * (not is_chosen)


@pytest.mark.parametrize("edit", ["in two files", "no random state", "an edited state", "without what is not needed"])
def test_with_loops_it_resumes_too(looped, tmp_path, caplog, edit):
    change, said, _ = EDITS[edit]
    checkpoint = copied(looped, tmp_path, 4) / "checkpoint-4"
    change(checkpoint)
    assert resumed(SCUTrainer, str(checkpoint), tmp_path / "on", **LOOPS | FROM_THE_START).state.global_step == 6
    assert said in caplog.text


FROM_THE_START = {"regularization": None}
"""Lambda decays weights toward the weights at the start, which ``resumed`` has made others of."""


@pytest.mark.parametrize("name", ["checkpoint-4", "mine", "checkpoint-0004"])
@pytest.mark.parametrize("writer", ["stock", "ours", "looped"])
def test_written_by_whom_and_called_what_it_may(request, tmp_path, writer, name):
    copied(request.getfixturevalue(writer), tmp_path, 4)
    checkpoint = (tmp_path / "checkpoint-4").rename(tmp_path / name)
    expected = resumed(Trainer, str(checkpoint), tmp_path / "a")
    found = resumed(SCUTrainer, checkpoint, tmp_path / "b")
    assert same(weights_of(found.model), weights_of(expected.model)) and found.state.global_step == 6
    if name != "mine":
        assert newest_checkpoint(tmp_path, 1)[0] == checkpoint


def test_one_step_more_than_there_are_is_what_the_stock_trainer_does(ours, tmp_path):
    """Resumed in the middle of an epoch, at its last step."""
    checkpoint = copied(ours, tmp_path, 6) / "checkpoint-6"
    ends = [
        resumed(kind, str(checkpoint), tmp_path / kind.__name__).state.global_step for kind in (Trainer, SCUTrainer)
    ]
    assert ends[0] == ends[1]


def test_a_number_that_is_not_its_step_is_not_the_newest(ours, tmp_path, caplog):
    run = copied(ours, tmp_path, 2, 4)
    huge = (run / "checkpoint-2").rename(run / f"checkpoint-{10**40}")
    assert newest_checkpoint(run, 1)[0] == run / "checkpoint-4"
    assert "trainer_state.json is of step 2" in caplog.text
    shutil.rmtree(run / "checkpoint-4")
    assert newest_checkpoint(run, 1)[0] == huge


def test_what_is_put_aside_goes_by_the_step_inside(ours, tmp_path):
    run = copied(ours, tmp_path / "run", 2, 4, 6)
    mine = (run / "checkpoint-4").rename(run / "checkpoint-5")
    (run / "run.json").write_text("{}")
    with RunDirectoryLock(arguments(run, resume_from_checkpoint=str(mine))) as directory:
        assert directory.put_aside() == ["checkpoint-6"]
    mine = mine.rename(run / "mine")
    shutil.copytree(ours / "checkpoint-6", run / "checkpoint-6")
    with RunDirectoryLock(arguments(run, resume_from_checkpoint=str(mine))) as directory:
        assert directory.put_aside() == ["checkpoint-6"]
    assert (run / "checkpoint-2").is_dir()


@pytest.mark.parametrize(
    "content",
    [
        {"run.json": '{"updated": 3, "step": "x"}'},
        {"run.json": '{"updated": "yesterday"}', "training_config.json": '{"start_number": "x", "world_size": []}'},
        {"run.json": "{}", "training_config.json": '{"configuration": [], "data": 1}'},
    ],
)
def test_wrong_types_beside_it_do_not_count(ours, tmp_path, content):
    run = copied(ours, tmp_path / "run", 2)
    for name, text in content.items():
        (run / name).write_text(text)
    assert decide(Request(AUTO, run, 1)).checkpoint == str(run / "checkpoint-2")
    assert decide(Request(None, run, 1, configuration={"seed": 1})).checkpoint is None


# -- what is broken ----------------------------------------------------------------------------------------------------

NO_FOLDERS: dict[str, Callable[[Path], Any]] = {
    "a file": lambda path: path.write_text("x"),
    "a pipe": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to nowhere": lambda path: path.symlink_to(path.with_name("nowhere")),
}


@pytest.mark.parametrize("entry", NO_FOLDERS)
def test_what_is_no_folder_is_passed_over(ours, tmp_path, caplog, entry):
    run = copied(ours, tmp_path, 2)
    NO_FOLDERS[entry](run / "checkpoint-6")
    assert newest_checkpoint(run, 1, False) == (run / "checkpoint-2", ["checkpoint-6 is skipped: it is not a folder"])
    with pytest.raises(CheckpointError, match="checkpoint-6 cannot be resumed from: it is not a folder"):
        resumed(SCUTrainer, str(run / "checkpoint-6"), run)
    NO_FOLDERS[entry](run / "checkpoint-4")
    trainer = trained(small_llama(), run, resume=True, **SAVED)  # and its own checkpoints take their names
    assert trainer._initial_global_step == 2
    assert [examine(run / f"checkpoint-{step}", 1).fault for step in (2, 4, 6)] == [None] * 3


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def with_value(*place: Any, value: Any = "x") -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = json.loads(path.read_text())
        inside = content
        for key in place[:-1]:
            inside = inside[key]
        if value is None:
            del inside[place[-1]]
        else:
            inside[place[-1]] = value
        path.write_text(json.dumps(content))

    return change


def written(text: str) -> Callable[[Path], Any]:
    return lambda path: path.write_text(text)


HARMS: dict[str, list[Callable[[Path], Any]]] = {
    "trainer_state.json": [
        cut, written(""), written("[]"), written("[" * 100_000), with_value("global_step", value="four"),
        with_value("log_history", value={}), with_value("unheard_of", value=1), with_value("global_step", value=None),
    ],
    "scu_state.json": [
        cut, written(""), written("[1]"), written("{}"), with_value("state", "lam"), with_value("progress", "tokens_n"),
        with_value("state", "unheard_of", value=1), with_value("interval", value=[[1]]),
        with_value("settings", value=3),
    ],
    "memory_state.json": [
        cut, written("null"), with_value("books", value=None), with_value("books", "windows"),
        with_value("state", "cost", value=None), with_value("state", "cost", "observations", value=[["a", 1, 2]]),
        with_value("state", "pressure", value="none"),
    ],
    "safety_state.json": [
        cut, written("no JSON"), with_value("records"), with_value("skipped_steps"),
        with_value("divergence", "state", "steps"), with_value("divergence", value=[]),
    ],
    "curriculum_state.json": [
        cut, written("[]"), with_value("micro_batches"), with_value("steps", value=None), with_value("counts", "rows"),
    ],
    "curriculum_state.safetensors": [cut, written("")],
    "model.safetensors": [cut, written("")],
    "optimizer.pt": [cut, written("")],
    "scheduler.pt": [cut],
    "rng_state.pth": [cut],
}  # fmt: skip
BROKEN = [(name, number) for name, harms in HARMS.items() for number in range(len(harms))]


@pytest.mark.parametrize("has_manifest", [True, False], ids=["manifest", "none"])
@pytest.mark.parametrize(("name", "number"), BROKEN)
def test_a_broken_file_sends_to_the_older_one(looped, tmp_path, name, number, has_manifest):
    run = copied(looped, tmp_path, 2, 4)
    HARMS[name][number](run / "checkpoint-4" / name)
    if not has_manifest:
        (run / "checkpoint-4" / files.MANIFEST).unlink()
    chosen, skipped = newest_checkpoint(run, 1, False)
    assert chosen == run / "checkpoint-2"
    assert len(skipped) == 1 and name in skipped[0] and "\n" not in skipped[0]


@pytest.mark.parametrize(("name", "number"), BROKEN)
def test_a_broken_file_of_one_that_is_named_is_one_line(looped, tmp_path, name, number):
    checkpoint = copied(looped, tmp_path, 4) / "checkpoint-4"
    HARMS[name][number](checkpoint / name)
    (checkpoint / files.MANIFEST).unlink()
    with pytest.raises(CheckpointError) as caught:
        trained(small_llama(), tmp_path / "run", resume=str(checkpoint), **STEPS, **LOOPS)
    assert name in str(caught.value) and "\n" not in str(caught.value)


MANIFESTS = {
    "a list": "[]",
    "cut": '{"files": {',
    "empty": "",
    "no files": "{}",
    "files are a list": '{"files": []}',
    "an entry is a number": '{"files": {"optimizer.pt": 3}}',
    "a size is text": '{"files": {"optimizer.pt": {"bytes": "3", "xxh3_128": "x"}}}',
    "outside": '{"files": {"../run.json": {"bytes": 3, "xxh3_128": "x"}}}',
    "absolute": '{"files": {"/etc/passwd": {"bytes": 3, "xxh3_128": "x"}}}',
}


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_a_broken_manifest(ours, tmp_path, manifest):
    run = copied(ours, tmp_path, 2, 4)
    (run / "checkpoint-4" / files.MANIFEST).write_text(MANIFESTS[manifest])
    chosen, skipped = newest_checkpoint(run, 1, False)
    assert chosen == run / "checkpoint-2" and "manifest.json is damaged" in skipped[0]
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        resumed(SCUTrainer, str(run / "checkpoint-4"), tmp_path / "new")


@pytest.mark.parametrize("change", [{"configuration": []}, {"configuration": {"seed": 1}, "data": [], "versions": 3}])
def test_facts_of_a_manifest_that_are_none_do_not_count(ours, tmp_path, change):
    from scu_trainer.train.checkpoints.compatibility import check_compatibility

    checkpoint = copied(ours, tmp_path, 4) / "checkpoint-4"
    path = checkpoint / files.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    now = {"configuration": {"seed": 1}, "data": {"fingerprint": "a"}, "world_size": 1, "versions": {"torch": "2"}}
    assert check_compatibility(checkpoint, now) == []


@pytest.mark.parametrize("is_cut", [True, False], ids=["a shard", "all weights"])
def test_weights_that_are_gone(ours, tmp_path, is_cut):
    run = copied(ours, tmp_path, 2, 4)
    if is_cut:
        cut_into_shards(run / "checkpoint-4")
    lost = "model-00002-of-00002.safetensors" if is_cut else "model.safetensors"
    (run / "checkpoint-4" / lost).unlink()
    with pytest.raises(CheckpointError, match=f"{lost} is missing"):
        resumed(SCUTrainer, str(run / "checkpoint-4"), tmp_path / "new")
    shutil.rmtree(run / "checkpoint-2")
    assert newest_checkpoint(run, 1)[0] is None


def test_a_rotten_optimizer_is_not_an_edited_one(ours, tmp_path):
    """One bit: the archive's own checksum tells it from one that somebody has saved."""
    checkpoint = copied(ours, tmp_path, 4) / "checkpoint-4"
    path = checkpoint / "optimizer.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"optimizer\.pt was changed after it was written, and .* is damaged"):
        resumed(SCUTrainer, str(checkpoint), tmp_path / "new")
    torch.save(torch.load(copied(ours, tmp_path / "b", 4) / "checkpoint-4" / "optimizer.pt"), path)
    assert resumed(SCUTrainer, str(checkpoint), tmp_path / "new").state.global_step == 6


# -- a checkpoint that cannot be written -------------------------------------------------------------------------------

FAILURES = {
    "no room": ("optimizer", OSError(28, "No space left on device")),
    "torch has no room": ("optimizer", RuntimeError("PytorchStreamWriter failed writing file data/0")),
    "read only": ("folder", OSError(30, "Read-only file system")),
    "a bug of somebody": ("optimizer", KeyError("x")),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_one_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path, monkeypatch, failure):
    where, error = FAILURES[failure]

    def fails(trainer):
        stock_save = trainer._save_optimizer_and_scheduler

        def save(folder):
            stock_save(folder)
            if trainer.state.global_step == 4:
                raise error

        if where == "optimizer":
            trainer._save_optimizer_and_scheduler = save
        else:
            make = Path.mkdir

            def refused(path, *args, **kwargs):
                if "checkpoint-4" in path.name:
                    raise error
                make(path, *args, **kwargs)

            monkeypatch.setattr(Path, "mkdir", refused)

    with pytest.raises(type(error)) as caught:
        trained(small_llama(), tmp_path, prepare=fails, **SAVED)
    assert caught.value is error
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2"}
    assert newest_checkpoint(tmp_path, 1)[0] == tmp_path / "checkpoint-2"


# -- on the command line -----------------------------------------------------------------------------------------------


def test_the_command_ends_in_one_line_or_takes_the_older(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "The cat sat on mat {i}."}}\n' * 3 for i in range(9)))
    options = {
        "model_name_or_path": saved_llama(tmp_path / "model", layers=1),
        "dataset": tmp_path / "rows.jsonl",
        "block_size": 32,
        "max_steps": 4,
        "save_steps": 2,
        "per_device_train_batch_size": 2,
        "output_dir": tmp_path / "run",
        "cache_dir": tmp_path / "cache",
        "use_cpu": "true",
        "predict_memory": "false",
        "preflight": "off",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert train.main(words) == 0
    run, broken = tmp_path / "run", tmp_path / "run" / "checkpoint-4"
    with_value("books", value=None)(broken / "memory_state.json")
    (broken / files.MANIFEST).unlink()
    os.mkfifo(run / "checkpoint-6")

    capsys.readouterr()
    assert train.main([*words, "--max_steps", "8", "--resume_from_checkpoint", str(broken)]) == 2
    said = capsys.readouterr().err
    told = next(line for line in said.splitlines() if line.startswith("error: "))
    assert "memory_state.json is not what a run writes there (books is missing)" in told and "Traceback" not in said
    with_step = json.loads((run / "run.json").read_text()) | {"step": 9}
    (run / "run.json").write_text(json.dumps(with_step))
    assert train.main([*words, "--max_steps", "3", "--resume_from_checkpoint", "true"]) == 0
    said = "".join(capsys.readouterr())
    assert f"resuming from {run / 'checkpoint-2'}" in said and "checkpoint-6 is skipped: it is not a folder" in said
