"""Deleting stays inside one folder, whatever links lie in it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from scu_trainer import safe_paths
from scu_trainer.errors import StorageError
from scu_trainer.models.loading.offload_folder import MARKER, PREFIX, OffloadFolder
from scu_trainer.safe_paths import remove_inside, require_own_folder
from scu_trainer.train.checkpoints.format import OURS


@pytest.fixture
def run(tmp_path) -> Path:
    """A run with one checkpoint of 10 + 20 bytes; beside it a folder with something precious."""
    checkpoint = tmp_path / "run" / "checkpoint-5"
    (checkpoint / "inner").mkdir(parents=True)
    (checkpoint / "a").write_bytes(b"x" * 10)
    (checkpoint / "inner" / "b").write_bytes(b"x" * 20)
    (tmp_path / "outside" / "inner").mkdir(parents=True)
    (tmp_path / "outside" / "precious").write_text("keep")
    (tmp_path / "outside" / "inner" / "precious").write_text("keep")
    return tmp_path / "run"


@pytest.fixture
def outside(run):
    folder = run.parent / "outside"
    yield folder
    assert (folder / "precious").read_text() == (folder / "inner" / "precious").read_text() == "keep"


def test_a_checkpoint_goes_and_its_bytes_are_counted(run):
    assert remove_inside(run, "checkpoint-5", OURS) == 30
    assert list(run.iterdir()) == []
    assert remove_inside(run, "checkpoint-5", OURS) == 0  # what is not there is no error


def test_a_single_file_goes(run):
    (run / "checkpoint-6").write_bytes(b"x" * 7)
    assert remove_inside(run, "checkpoint-6", OURS) == 7


def test_a_link_in_place_of_a_checkpoint_is_unlinked_and_not_followed(run, outside):
    (run / "checkpoint-9").symlink_to(outside, target_is_directory=True)
    assert remove_inside(run, "checkpoint-9", OURS) == 0
    assert not (run / "checkpoint-9").is_symlink()


def test_links_inside_of_a_checkpoint_are_not_followed(run, outside):
    (run / "checkpoint-5" / "link").symlink_to(outside, target_is_directory=True)
    (run / "checkpoint-5" / "file").symlink_to(outside / "precious")
    assert remove_inside(run, "checkpoint-5", OURS) == 30
    assert not (run / "checkpoint-5").exists()


def test_a_hard_link_frees_nothing(run, outside):
    os.link(outside / "precious", run / "checkpoint-5" / "linked")
    assert remove_inside(run, "checkpoint-5", OURS) == 30


def test_a_folder_that_becomes_a_link_meanwhile_is_not_followed(run, outside, monkeypatch):
    """The moment between looking and deleting, when another process may swap them."""

    def count_and_swap(folder: int, name: str) -> int:
        (run / name).rename(run / "moved")
        (run / name).symlink_to(outside, target_is_directory=True)
        return 0

    monkeypatch.setattr(safe_paths, "_bytes_below", count_and_swap)
    with pytest.raises(StorageError, match=r"cannot delete .*checkpoint-5: .*symbolic link"):
        remove_inside(run, "checkpoint-5", OURS)


def test_the_run_itself_may_be_a_link(run):
    shortcut = run.parent / "shortcut"
    shortcut.symlink_to(run, target_is_directory=True)
    assert remove_inside(shortcut, "checkpoint-5", OURS) == 30
    assert shortcut.is_symlink() and run.is_dir()


@pytest.mark.parametrize(
    "name",
    ["..", ".", "", "../outside", "checkpoint-5/inner", "/etc", "checkpoint-5\n", "checkpoint-x", "run.json", "a\0"],
)
def test_other_names_are_refused(run, outside, name):
    with pytest.raises(StorageError, match="is not a name that a run may delete"):
        remove_inside(run, name, OURS)
    assert (run / "checkpoint-5" / "a").exists()


@pytest.mark.parametrize("name", ["..", ".", "../outside", "checkpoint-5/inner"])
def test_no_pattern_allows_a_name_that_leads_elsewhere(run, outside, name):
    with pytest.raises(StorageError, match="is not a name that a run may delete"):
        remove_inside(run, name, re.compile(r"[\w./-]*", re.DOTALL))
    assert (run / "checkpoint-5" / "inner").exists()


def test_folders_of_the_system_and_homes_are_refused(run, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(run))
    to_root = tmp_path / "to_root"
    to_root.symlink_to("/")
    for root in ("/", "/etc", "/usr", "/home/somebody", run, to_root):
        with pytest.raises(StorageError, match="where no run may delete files"):
            remove_inside(root, "checkpoint-5", OURS)
    assert (run / "checkpoint-5" / "a").exists()


def test_a_missing_run_and_a_file_in_its_place_are_reported(run):
    for root in (run / "missing", run / "checkpoint-5" / "a"):
        with pytest.raises(StorageError, match="cannot open the folder"):
            remove_inside(root, "checkpoint-5", OURS)


def test_what_cannot_be_deleted_is_reported(run, monkeypatch):
    def denied(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    denied.avoids_symlink_attacks = True
    monkeypatch.setattr(safe_paths.shutil, "rmtree", denied)
    with pytest.raises(StorageError, match=r"cannot delete .*checkpoint-5: Permission denied; check its permissions"):
        remove_inside(run, "checkpoint-5", OURS)


def test_a_system_that_would_follow_links_is_refused(run, monkeypatch):
    monkeypatch.setattr(safe_paths.shutil.rmtree, "avoids_symlink_attacks", False)
    with pytest.raises(StorageError, match="without following links"):
        remove_inside(run, "checkpoint-5", OURS)
    assert (run / "checkpoint-5" / "a").exists()


def test_a_link_in_the_offload_folder_is_not_followed(run, outside):
    """It looks like what a killed run has left: the marker in it is locked by nobody."""
    (outside / MARKER).touch()
    shared = run.parent / "shared"
    shared.mkdir()
    (shared / f"{PREFIX}abcdefgh").symlink_to(outside, target_is_directory=True)
    (shared / f"{PREFIX}of-my-own").symlink_to(outside, target_is_directory=True)
    folder = OffloadFolder(str(shared))
    assert sorted(shared.iterdir()) == sorted([folder.path, shared / f"{PREFIX}of-my-own"])


# -- a folder of one's own ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", ".", "..", "/", "//", "/usr", "~", "kept/..", "/dev", "loop/.."])
def test_what_is_no_folder_of_a_run(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StorageError, match="give a run a folder of its own"):
        require_own_folder(name)


@pytest.mark.parametrize("name", ["runs/mine", "kept", "./kept", "new/../other", "loop"])
def test_what_is_one(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    (tmp_path / "loop").symlink_to("loop")  # what is wrong with this one is said when it is written to
    require_own_folder(name)
