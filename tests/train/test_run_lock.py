"""One run directory, one run; nothing that a dead process left behind keeps anybody out."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from scu_trainer.errors import StorageError
from scu_trainer.train.run_directory.run_lock import LOCK_FILE, RunLock, holds_nothing


def elsewhere(act) -> int:
    """``act`` in another process. What it returns, or 99 where it raises StorageError."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(act())
        except StorageError:
            os._exit(99)
        finally:
            os._exit(98)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def claimed(run: Path) -> int:
    RunLock(run)
    return 0


def test_another_process_is_refused_and_told_who_has_it(tmp_path):
    said = tmp_path / "said"

    def refused() -> int:
        with pytest.raises(StorageError) as error:
            RunLock(tmp_path / "run")
        said.write_text(str(error.value))
        return 0

    with RunLock(tmp_path / "run"):
        assert elsewhere(refused) == 0
    assert f"is being written by process {os.getpid()};" in said.read_text()
    assert "another output_dir" in said.read_text()


def test_a_lock_that_was_released_is_free(tmp_path):
    (tmp_path / "run").mkdir()
    lock = RunLock(tmp_path / "run")
    assert elsewhere(lambda: claimed(tmp_path / "run")) == 99
    lock.release()
    lock.release()
    assert elsewhere(lambda: claimed(tmp_path / "run")) == 0


def test_a_process_that_was_killed_keeps_nobody_out(tmp_path):
    def dies() -> int:
        RunLock(tmp_path / "run")
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    assert elsewhere(dies) == -signal.SIGKILL
    assert (tmp_path / "run" / LOCK_FILE).is_file()
    with RunLock(tmp_path / "run"):
        assert (tmp_path / "run" / LOCK_FILE).read_text() == f"{os.getpid()}\n"


def test_a_child_does_not_hold_it(tmp_path):
    """As a loader worker that outlives its run for a moment. It inherits the open file, but not the lock."""
    read_end, write_end = os.pipe()
    lock = RunLock(tmp_path / "run")
    (tmp_path / "run" / "run.json").touch()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    lock.release()
    try:
        assert elsewhere(lambda: claimed(tmp_path / "run")) == 0
    finally:
        os.close(write_end)
        os.waitpid(child, 0)
        os.close(read_end)


def test_a_start_that_came_to_nothing_leaves_nothing(tmp_path):
    with RunLock(tmp_path / "new"):
        assert holds_nothing(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    with RunLock(tmp_path / "old"):
        pass
    assert holds_nothing(tmp_path / "old"), "a folder that was there before stays"
    with RunLock(tmp_path / "used"):
        (tmp_path / "used" / "run.json").touch()
    assert (tmp_path / "used" / LOCK_FILE).is_file() and not holds_nothing(tmp_path / "used")


def test_a_folder_that_was_taken_away_is_released_too(tmp_path):
    """Another stands in its place, whose files are not touched."""
    with RunLock(tmp_path / "run") as lock:
        assert lock.lost() is None
        (tmp_path / "run").rename(tmp_path / "away")
        assert lock.lost().endswith(f"{tmp_path / 'away'}" if Path("/proc").is_dir() else "renamed")
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / LOCK_FILE).touch()
    assert (tmp_path / "run" / LOCK_FILE).is_file() and (tmp_path / "away" / LOCK_FILE).is_file()


def test_a_place_where_no_folder_can_be_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot be written \(Not a directory\)"):
        RunLock(tmp_path / "file" / "run")


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match=rf"new/{LOCK_FILE} cannot be written \(No space left on device\)"):
        RunLock(tmp_path / "new")
    assert not (tmp_path / "new").exists()
