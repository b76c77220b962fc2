"""A disk that is full, or cannot be written: nothing that was whole is lost, and with room again the run goes on."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Optional

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import Trainer, TrainerCallback

from scu_trainer.run_files import read_json, write_json
from scu_trainer.train.checkpoints.findings import examine
from scu_trainer.train.checkpoints.format import checkpoints, step_of
from scu_trainer.train.checkpoints.writer import is_write_error
from scu_trainer.train.trainer import SCUTrainer
from tests import tiny
from tests.faults import campaign
from tests.faults.campaign import Child, Ended
from tests.faults.test_kills import same_result

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 1 << 12, 1 << 14, 1 << 18
LARGE_BYTES = 1 << 26
FILLER = "of another program"


class SmallDisk:
    """A file system in memory at ``folder``, which only this process and its children see. Raises OSError."""

    def __init__(self, folder: Path, size_bytes: int = LARGE_BYTES) -> None:
        self.folder = folder
        folder.mkdir()
        _see_own_mounts()
        _mount(b"tmpfs", folder, 0, size_bytes)

    def resize(self, size_bytes: int) -> None:
        _mount(b"tmpfs", self.folder, MS_REMOUNT, size_bytes)

    def protect(self) -> None:
        """No new file from here on; those that are open may go on, as after a remount by hand."""
        _mount(bytes(self.folder), self.folder, MS_BIND)
        _mount(b"none", self.folder, MS_REMOUNT | MS_BIND | MS_RDONLY)

    def fill(self) -> Path:
        """As another program would: not a byte is left. Returns the file that takes them."""
        free_bytes = os.statvfs(self.folder).f_bavail * os.statvfs(self.folder).f_frsize
        filler = self.folder / FILLER
        filler.write_bytes(bytes(free_bytes))
        return filler


def _see_own_mounts() -> None:
    user, group = os.getuid(), os.getgid()
    _require(_libc().unshare(CLONE_NEWNS | (CLONE_NEWUSER if user else 0)))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _require(_libc().mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))


def _mount(source: bytes, folder: Path, flags: int, size_bytes: Optional[int] = None) -> None:
    options = None if size_bytes is None else f"size={size_bytes}".encode()
    _require(_libc().mount(source, bytes(folder), b"tmpfs", flags, options))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _require(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def may_mount() -> bool:
    """Containers may forbid both, to root and to users."""
    child = os.fork()
    if child == 0:
        try:
            _see_own_mounts()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


pytestmark = pytest.mark.skipif(not may_mount(), reason="this system lets nobody mount a disk of one's own")


def on_a_disk(scene: Callable[[], None], log: Path) -> None:
    """``scene`` in a process of its own, which may mount what it likes; what fails there fails here."""
    ended = Child(lambda: scene() or 0, log).wait()
    assert ended.code == 0, ended.said


def started(words: list[str], log: Path, before: Callable[[], None] = lambda: None) -> Ended:
    return Child(lambda: before() or campaign.train(words), log).wait()


def under_a_quota() -> None:
    """Which nobody can see: the disk says that there is room."""
    from scu_trainer.train.checkpoints import writer as checkpoint_writer

    checkpoint_writer.free_bytes = lambda path: 1 << 40


def require_clean(ended: Ended, run: Path, there: list[int]) -> None:
    """It went on or stopped, in plain words; checkpoints ``there`` are whole, and nothing half-written is left."""
    assert ended.code in (0, 2) and "Traceback" not in ended.said, ended.said
    assert {step_of(path): examine(path, 1).fault for path in checkpoints(run)} == dict.fromkeys(there)
    assert not list(run.glob("staging-*"))


def used_bytes(folder: Path) -> int:
    """In whole pages, as a file system takes them."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(("of_checkpoint", "there"), [(0.75, []), (1.3, [3]), (2.5, [3, 6])])
def test_a_save_that_does_not_fit(site, tmp_path, of_checkpoint, there):
    """The first checkpoint, the second, the third; nor does the trained model at the end."""
    disk_bytes = int(of_checkpoint * used_bytes(site.whole / "checkpoint-12"))

    def scene() -> None:
        disk = SmallDisk(tmp_path / "disk", disk_bytes)
        run, log = disk.folder / "run", tmp_path / "log"
        ended = started(site.flags(run), log, under_a_quota)
        require_clean(ended, run, there)
        assert f"checkpoint-{3 + max([0, *there])} could not be written" in ended.said
        assert ended.code == 2 and "the trained model could not be written" in ended.said, ended.said
        assert read_json(run / "run.json")["status"] == "failed"
        disk.resize(LARGE_BYTES)
        ended = started(site.flags(run), log)
        assert ended.code == 0, ended.said
        same_result(site, run)

    on_a_disk(scene, tmp_path / "scene")


def test_without_room_a_run_still_ends_with_its_model(site, tmp_path):
    """Another program takes what the next checkpoint would need, but for the room that the model itself takes."""

    def scene() -> None:
        disk = SmallDisk(tmp_path / "disk")
        run, log = disk.folder / "run", tmp_path / "log"

        def leave_little() -> None:
            little_bytes = int(0.85 * used_bytes(run / "checkpoint-3"))
            os.truncate(disk.fill(), LARGE_BYTES - used_bytes(run) - little_bytes)

        ended = started(site.flags(run), log, lambda: campaign.at_step(5, leave_little))
        require_clean(ended, run, [3])
        assert ended.code == 0 and "checkpoint-6 could not be written: the disk has" in ended.said, ended.said
        assert "checkpoint-6 could not be written" in " ".join(read_json(run / "run.json")["notices"])
        same_result(site, run)

    on_a_disk(scene, tmp_path / "scene")


def test_stopped_without_room_it_does_not_say_that_it_can_go_on(site, tmp_path):
    def scene() -> None:
        disk = SmallDisk(tmp_path / "disk")
        run, log = disk.folder / "run", tmp_path / "log"

        def stop_without_room() -> None:
            os.truncate(disk.fill(), LARGE_BYTES - used_bytes(run) - used_bytes(run / "checkpoint-3") // 2)
            os.kill(os.getpid(), signal.SIGTERM)

        ended = started(site.flags(run), log, lambda: campaign.at_step(5, stop_without_room))
        require_clean(ended, run, [3])
        assert ended.code == 2 and "stopped at step 5, but checkpoint-5 could not be written" in ended.said, ended.said

    on_a_disk(scene, tmp_path / "scene")


def test_a_full_disk_ends_the_run_which_goes_on_with_room(site, tmp_path):
    """Not a byte for the next row of a history, or for run.json."""

    def scene() -> None:
        disk = SmallDisk(tmp_path / "disk")
        run, log = disk.folder / "run", tmp_path / "log"
        ended = started(site.flags(run), log, lambda: campaign.at_step(5, disk.fill))
        require_clean(ended, run, [3])
        assert ended.code == 2 and "error: the disk is full" in ended.said, ended.said
        (disk.folder / FILLER).unlink()
        ended = started(site.flags(run), log)
        assert ended.code == 0 and f"resuming from {run / 'checkpoint-3'}" in ended.said, ended.said
        same_result(site, run)

    on_a_disk(scene, tmp_path / "scene")


class At(TrainerCallback):
    """Something that happens to the disk after a step."""

    def __init__(self, step: int, event: Callable[[], object]) -> None:
        self.step, self.event = step, event

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.event()


@pytest.mark.parametrize("event", ["fill", "protect"])
def test_without_a_loop_it_is_the_error_of_the_stock_trainer(tmp_path, event):
    def scene() -> None:
        raised = []
        for kind in (Trainer, SCUTrainer):
            disk = SmallDisk(tmp_path / kind.__name__)
            run = disk.folder / "run"
            args = tiny.arguments(run, max_steps=6, save_strategy="steps", save_steps=2)
            trainer = kind(tiny.llama(), args, train_dataset=tiny.Rows(), callbacks=[At(3, getattr(disk, event))])
            with pytest.raises(Exception) as caught:
                trainer.train()
            raised.append(type(caught.value))
        assert raised[0] is raised[1] and is_write_error(caught.value)
        assert [path.name for path in run.iterdir()] == ["checkpoint-2"]
        assert examine(run / "checkpoint-2", 1).fault is None

    on_a_disk(scene, tmp_path / "scene")


def test_a_directory_that_cannot_be_written_from_the_beginning(site, tmp_path):
    def scene() -> None:
        disk = SmallDisk(tmp_path / "disk")
        disk.protect()
        ended = started(site.flags(disk.folder / "run"), tmp_path / "log")
        assert ended.code == 2 and "is not writable" in ended.said and "Traceback" not in ended.said, ended.said
        assert "documents:" not in ended.said, "it was found only after the data had been read"

    on_a_disk(scene, tmp_path / "scene")


def test_a_directory_that_can_no_longer_be_written(site, tmp_path):
    """What was open stays open, as it does after a remount."""

    def scene() -> None:
        disk = SmallDisk(tmp_path / "disk")
        run, log = disk.folder / "run", tmp_path / "log"
        ended = started(site.flags(run), log, lambda: campaign.at_step(5, disk.protect))
        require_clean(ended, run, [3])
        assert ended.code == 2 and "Read-only file system" in ended.said, ended.said

    on_a_disk(scene, tmp_path / "scene")


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_directory_that_is_no_longer_there(site, tmp_path, is_kept):
    """Renamed, and put back; or deleted, so that the run starts over."""
    run, log, away = tmp_path / "run", tmp_path / "log", tmp_path / "away"
    take_away = (lambda: run.rename(away)) if is_kept else (lambda: shutil.rmtree(run))
    ended = started(site.flags(run), log, lambda: campaign.at_step(5, take_away))
    what = f"is now at {away}; move it back, and run" if is_kept else "was deleted while it was being written; run"
    assert ended.code == 2 and f"error: the folder of this run, {run}, {what} the same" in ended.said, ended.said
    assert "Traceback" not in ended.said
    if is_kept:
        assert not run.exists()
        away.rename(run)
    ended = started(site.flags(run), log)
    assert ended.code == 0 and (f"resuming from {run / 'checkpoint-3'}" in ended.said) == is_kept, ended.said
    same_result(site, run)


def test_a_directory_beside_which_nothing_can_be_written(site, tmp_path):
    """A run is finished there; the next one would go beside it, to where the disk is not mounted."""

    def scene() -> None:
        run = tmp_path / "run"
        shutil.copytree(site.whole, run)
        parent = SmallDisk(tmp_path / "disk")
        inner = parent.folder / "run"
        inner.mkdir()
        parent.protect()
        _mount(bytes(run), inner, MS_BIND)
        ended = started(site.flags(inner), tmp_path / "log")
        assert ended.code == 2 and "run-2 cannot be written" in ended.said and "Traceback" not in ended.said, ended.said

    on_a_disk(scene, tmp_path / "scene")


def test_what_libraries_say_of_a_full_disk_is_known(site, tmp_path):
    """Each of them has words of its own, and torch several, by how far it came."""
    tokenizer = Tokenizer.from_file(str(site.model / "tokenizer.json"))
    tensor = {"a": torch.ones(20_000)}
    writers = {
        "torch": lambda path: torch.save(tensor, path),
        "torch, a small file": lambda path: torch.save(torch.ones(300), path),
        "safetensors": lambda path: save_file(tensor, path),
        "tokenizers": lambda path: tokenizer.save(str(path)),
        "json": lambda path: write_json(path, list(range(20_000))),
    }

    def scene() -> None:
        for name, write in writers.items():
            said = _said_of_full_disks(tmp_path / name, write)
            assert said and all(is_known for _, is_known in said), f"{name}: {said}"

    on_a_disk(scene, tmp_path / "scene")


def _said_of_full_disks(folder: Path, write: Callable[[Path], object]) -> list[tuple[str, bool]]:
    """Errors of writing with 0 to 19 free pages, and whether each is known as one."""
    disk, said = SmallDisk(folder, 1 << 18), []
    for pages in range(20):
        filler = disk.fill()
        os.truncate(filler, filler.stat().st_size - 4096 * pages)
        try:
            write(folder / "file")
        except Exception as error:  # kept, it would keep files open
            said.append((repr(error), is_write_error(error)))
        for path in folder.iterdir():
            path.unlink()
    return said
