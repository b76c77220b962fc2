"""Cached folders are whole or absent."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys

import pyarrow
import pytest

from scu_trainer.data import default_cache_dir
from scu_trainer.data.statistics import DataStatistics
from scu_trainer.data.store import build_once, digest_of, open_arrow, read_statistics, write_arrow, write_statistics
from scu_trainer.errors import StorageError

KILLED = """
import os, signal, sys
from pathlib import Path
from scu_trainer.data.store import build_once
def build(new):
    (new / "half").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
build_once(Path(sys.argv[1]), build)
"""


def test_cache_dir_comes_from_setting_then_environment_then_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCU_TRAINER_CACHE", str(tmp_path / "environment"))
    assert default_cache_dir(str(tmp_path / "setting")) == tmp_path / "setting"
    assert default_cache_dir(None) == tmp_path / "environment"
    monkeypatch.delenv("SCU_TRAINER_CACHE")
    assert default_cache_dir(None) == tmp_path / ".cache" / "scu_trainer"
    assert default_cache_dir("~/data") == tmp_path / "data"


def test_built_once(tmp_path):
    calls = []
    for _ in range(2):
        folder = build_once(tmp_path / "deep" / "folder", lambda new: (calls.append(new), (new / "file").touch()))
        assert (folder / "file").exists()
    assert len(calls) == 1


def test_the_folder_appears_in_one_step(tmp_path):
    inodes = []
    folder = build_once(tmp_path / "folder", lambda new: inodes.append(new.stat().st_ino))
    assert inodes == [folder.stat().st_ino]  # renamed, not copied: a copy could be seen half done


def test_a_failed_build_leaves_nothing(tmp_path):
    def build(new):
        (new / "half").touch()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build_once(tmp_path / "folder", build)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_killed_build_leaves_no_folder_and_no_lock(tmp_path):
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "folder")], check=False, timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "folder").exists()
    assert (tmp_path / "folder.part" / "half").exists()
    folder = build_once(tmp_path / "folder", lambda new: (new / "whole").touch())
    assert [path.name for path in folder.iterdir()] == ["whole"]
    assert not (tmp_path / "folder.part").exists()


def test_a_folder_that_cannot_be_written_names_cache_dir(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="set cache_dir to another folder"):
        build_once(tmp_path / "file" / "folder", os.mkdir)


def test_a_disk_that_is_full_when_rows_are_written_names_cache_dir(tmp_path):
    schema = pyarrow.schema([("row", pyarrow.int64())])
    (tmp_path / "rows.arrow").symlink_to("/dev/full")
    with pytest.raises(StorageError, match="cache_dir"):
        write_arrow(tmp_path / "rows.arrow", schema, [pyarrow.record_batch([[1, 2]], schema=schema)])


def test_a_full_disk_names_cache_dir(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"No space left on device.*free some space"):
        build_once(tmp_path / "folder", lambda new: (new / "file").touch())
    assert not (tmp_path / "folder").exists()


def test_a_limit_on_the_size_of_a_file_is_named(tmp_path, monkeypatch):
    def refuse(descriptor):
        raise OSError(27, "File too large")

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100, 100))
    with pytest.raises(StorageError, match=r"too large.*; raise the limit on the size of a file \(ulimit -f\), free"):
        build_once(tmp_path / "folder", lambda new: (new / "file").touch())


def test_a_damaged_file_says_which_folder_to_delete(tmp_path):
    (tmp_path / "rows.arrow").write_bytes(b"torn")
    with pytest.raises(StorageError, match=f"{tmp_path} cannot be read"):
        open_arrow(tmp_path / "rows.arrow")


def test_statistics_of_a_mixture_read_back_as_they_were(tmp_path):
    statistics = DataStatistics(sources=[{"name": "a", "weight": 0.5, "rows": 3, "lines": ["one"]}])
    write_statistics(tmp_path, statistics)
    assert read_statistics(tmp_path, DataStatistics) == statistics


def test_digest_depends_on_every_part():
    assert digest_of(1, {"a": 2, "b": [3]}) == digest_of(1, {"b": [3], "a": 2})
    assert len({digest_of(1, 2), digest_of(2, 1), digest_of([1, 2]), digest_of(1)}) == 4
