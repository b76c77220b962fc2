"""What may be removed, and above all what may not: whatever somebody uses, is making, or could not make again."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

import scu_trainer
from scu_trainer.cli.machine import hardware
from scu_trainer.cli.machine import optimize as hardware_optimize
from scu_trainer.hardware.watching import leftovers as subject
from scu_trainer.hardware.watching.leftovers import InUse, Leftover, Users, build_locks, cached, remove, scratch, users
from scu_trainer.models.loading.offload_folder import OURS as OFFLOADED
from scu_trainer.models.loading.offload_folder import OffloadFolder
from scu_trainer.train.checkpoints.format import seal
from scu_trainer.train.run_directory.run_lock import RunLock

NOBODY = Users({}, {}, is_complete=True)
UNKNOWN = Users({}, {}, is_complete=False)
USES = "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)"
MAPS = f"{USES}; f.close(); print('ready', flush=True); sys.stdin.read()"


def open_files() -> Users:
    """What is open on this machine; other processes of this project (tests beside this one) do not count."""
    return replace(users(), ours={})


def filled(path: Path, size: int = 1000) -> Path:
    path.mkdir(parents=True)
    (path / "rows.arrow").write_bytes(bytes(size))
    return path


@pytest.fixture
def cache(tmp_path) -> Path:
    filled(tmp_path / "cache" / "tokenized" / "abc")
    filled(tmp_path / "cache" / "tokenized" / "def.part", 500)
    filled(tmp_path / "cache" / "of_somebody" / "else")
    return tmp_path / "cache"


class Outsider:
    """Another process that holds a file mapped, with the file itself closed, or holds a lock."""

    def __init__(self, code: str, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self):
        assert self.process.stdout.readline() == "ready\n"
        return self.process

    def __exit__(self, *exception):
        self.process.communicate()


def test_entries_of_our_cache_go_and_nothing_beside_them(cache):
    found = list(cached(cache, ["tokenized", "images"], NOBODY))
    assert [(item.name, item.size_bytes, item.used_by) for item in found] == [
        ("abc", 1000, None),
        ("def.part", 500, None),
    ]
    assert [remove(item, lambda: NOBODY) for item in found] == [1000, 500]
    assert [path.name for path in (cache / "tokenized").iterdir() if path.is_dir()] == []
    assert (cache / "of_somebody" / "else" / "rows.arrow").is_file()


def test_a_file_that_another_process_has_mapped_is_in_use(cache):
    with Outsider(MAPS, cache / "tokenized" / "abc" / "rows.arrow") as other:
        who = open_files()
        assert who.is_complete and who.of(cache / "tokenized" / "abc") == f"in use by process {other.pid}"
        first, second = cached(cache, ["tokenized"], who)
        assert first.used_by == f"in use by process {other.pid}" and second.used_by is None
        with pytest.raises(InUse, match="in use by process"):
            remove(replace(first, used_by=None), open_files)
    assert open_files().of(cache / "tokenized" / "abc") is None


def test_what_is_taken_between_finding_and_removing_stays(cache):
    (item, _) = cached(cache, ["tokenized"], NOBODY)
    with Outsider(MAPS, item.path / "rows.arrow"), pytest.raises(InUse, match="in use by process"):
        remove(item, open_files)
    assert (item.path / "rows.arrow").is_file()


def test_an_entry_that_is_being_made_stays(cache):
    lock = FileLock(cache / "tokenized" / "def.lock")
    with lock:
        code = (
            "import sys; from scu_trainer.hardware.watching.leftovers import *; from pathlib import Path\n"
            "print([i.used_by for i in cached(Path(sys.argv[1]), ['tokenized'], Users({}, {}, True))])"
        )
        told = subprocess.run([sys.executable, "-c", code, str(cache)], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[None, 'another process is building it']"


def test_a_killed_removal_leaves_no_entry_that_looks_whole(cache, monkeypatch):
    (item, _) = cached(cache, ["tokenized"], NOBODY)
    calls = []

    def killed(folder, name, pattern):
        calls.append(name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return 0

    monkeypatch.setattr(subject, "remove_inside", killed)
    with pytest.raises(KeyboardInterrupt):
        remove(item, lambda: NOBODY)
    assert not item.path.exists() and (item.folder / "abc.part").is_dir()


def test_nothing_of_the_cache_goes_while_a_process_of_ours_lives(cache):
    who = Users({}, {41: "python scripts/train.py"}, is_complete=True)
    assert {item.used_by for item in cached(cache, ["tokenized"], who)} == {
        "may be in use by process 41 (python scripts/train.py)"
    }


def test_a_run_that_has_begun_since_keeps_the_cache(cache):
    (item, _) = cached(cache, ["tokenized"], NOBODY)
    with pytest.raises(InUse, match="may be in use by process 41"):
        remove(item, lambda: Users({}, {41: "python train.py"}, is_complete=True))
    assert item.path.is_dir()


def test_where_nobody_tells_who_uses_what_everything_stays(cache, tmp_path):
    filled(tmp_path / "scu-test-run-abcdefgh")
    found = [*cached(cache, ["tokenized"], UNKNOWN), *scratch(tmp_path, subject.SCRATCH, UNKNOWN)]
    assert len(found) == 3 and all(item.used_by for item in found)
    assert not users(tmp_path / "no_proc").is_complete


def test_processes_of_ours_are_known_by_their_command(tmp_path):
    for pid, command in ((5, "python\0-m\0scu_trainer.cli.main"), (6, "vim\0scu_trainer/x.py"), (7, "python\0x.py")):
        folder = tmp_path / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "cmdline").write_text(command)
        (folder / "maps").write_text(
            f"7f00-7f01 r--p 00000000 08:01 11 /data/{pid}/with space.arrow\n7f02-7f03 rw-p 0 0 0\n"
        )
        (folder / "fd" / "3").symlink_to(f"/data/{pid}/open.txt")
    who = users(tmp_path)
    assert who.ours == {5: "python -m scu_trainer.cli.main"}
    assert who.files == {Path(f"/data/{n}/{name}"): n for n in (5, 6, 7) for name in ("open.txt", "with space.arrow")}


def test_scratch_folders_by_their_whole_name(tmp_path):
    for name in ("scu-test-run-abcdefgh", "scu-test-run-mine", "scu-variants-a_b_c_d1", "other-abcdefgh"):
        filled(tmp_path / name, 10)
    (tmp_path / "scu-test-run-linkslin").symlink_to(tmp_path / "other-abcdefgh")
    found = [item for item in scratch(tmp_path, subject.SCRATCH, NOBODY) if not item.path.is_symlink()]
    assert [item.name for item in found] == ["scu-test-run-abcdefgh", "scu-variants-a_b_c_d1"]
    assert sum(remove(item, lambda: NOBODY) for item in scratch(tmp_path, subject.SCRATCH, NOBODY)) == 20
    assert (tmp_path / "other-abcdefgh" / "rows.arrow").is_file(), "a link is removed, not what it leads to"


def test_a_build_lock_that_nobody_has_open(tmp_path):
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "lock").write_text("x")
    (item,) = build_locks([tmp_path], open_files())
    assert item.used_by is None
    with open(tmp_path / "cpu_adam" / "lock") as mine, Outsider(MAPS, tmp_path / "cpu_adam" / "lock"):
        (held,) = build_locks([tmp_path], open_files())
        assert held.used_by and mine.readable()
    assert remove(item) == 1 and not (tmp_path / "cpu_adam" / "lock").exists()


def test_offloaded_weights_of_a_living_run_stay(tmp_path):
    living = OffloadFolder(str(tmp_path))
    dead = filled(tmp_path / "scu-trainer-deadrun1")
    (dead / "in_use").touch()
    filled(tmp_path / "weights")
    found = {item.name: item for item in subject.offloaded([tmp_path], OFFLOADED, "in_use")}
    assert found[living.path.name].used_by == "in use by a run that is still running"
    assert found[dead.name].used_by is None and set(found) == {living.path.name, dead.name}
    assert remove(found[dead.name]) == 1000 and living.path.is_dir()


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def words(tmp_path, cache, monkeypatch) -> list[str]:
    """The command on folders of our own: not the cache, the temporary folder and the builds of this machine."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(hardware_optimize.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setattr(hardware_optimize, "_extension_folders", lambda: [])
    monkeypatch.setattr(hardware_optimize, "users", lambda: NOBODY)
    monkeypatch.setattr(hardware_optimize, "remove", lambda item: remove(item, lambda: NOBODY))
    run = tmp_path / "runs" / "a"
    for step, is_sealed in ((1, False), (2, True)):
        staged = filled(run / f"staging-checkpoint-{step}" / f"checkpoint-{step}")
        if is_sealed:
            seal(staged, {})
    filled(run / "checkpoint-1")
    (run / "run.json").write_text('{"status": "failed", "pid": 1}')
    (run / "training_config.json").write_text('{"configuration": {"offload_folder": "%s"}}' % (tmp_path / "off"))
    (filled(tmp_path / "off" / "scu-trainer-deadrun1") / "in_use").touch()
    return ["optimize", "--runs", str(tmp_path / "runs"), "--cache_dir", str(cache)]


def test_all_that_is_free_goes_and_results_stay(words, tmp_path, cache, capsys):
    assert hardware.main([*words, "--yes"]) == 0
    printed = capsys.readouterr().out
    assert "sum" in printed and "freed  3,500 bytes in all" in printed
    assert re.search(r"the filesystem at \S+ has [+-][\d,]+ bytes free", printed)
    run = tmp_path / "runs" / "a"
    assert {path.name for path in run.iterdir()} - {"_run.lock"} == {
        "checkpoint-1",
        "staging-checkpoint-2",
        "run.json",
        "training_config.json",
    }
    assert not (tmp_path / "off" / "scu-trainer-deadrun1").exists() and not (cache / "tokenized" / "abc").exists()
    assert hardware.main([*words, "--yes"]) == 0
    assert capsys.readouterr().out == "0 bytes: scu-trainer has nothing to free\n"


@pytest.mark.parametrize(
    "content", ["[]", "{}", "3", '{"configuration": "x"}', '{"configuration": {"offload_folder": 3}}']
)
def test_a_description_of_another_shape_names_no_folder(words, tmp_path, content, capsys):
    (tmp_path / "runs" / "a" / "training_config.json").write_text(content)
    assert hardware.main([*words, "--dry_run"]) == 0
    assert "scu-trainer-deadrun1" not in capsys.readouterr().out


@pytest.mark.parametrize("more", [["--dry_run"], ["--dry-run", "--yes"], []])
def test_without_a_yes_nothing_goes(words, more, cache, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert hardware.main([*words, *more]) == 0
    printed = capsys.readouterr().out
    assert "nothing was removed" in printed and "4 entries" in printed
    assert ("--yes" in printed) == (not more) and (cache / "tokenized" / "abc").is_dir()


@pytest.mark.parametrize(("answer", "gone"), [("y", True), ("", False), ("n", False), (None, False)])
def test_at_a_terminal_it_asks(words, answer, gone, cache, monkeypatch):
    def asked(prompt):
        if answer is None:
            raise EOFError
        return answer

    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setattr(hardware_optimize.sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    assert hardware.main(words) == 0
    assert (cache / "tokenized" / "abc").is_dir() != gone


def test_caches_can_be_kept(words, cache):
    assert hardware.main([*words, "--yes", "--keep_caches"]) == 0
    assert (cache / "tokenized" / "abc").is_dir()


def test_what_a_living_run_is_writing_stays(words, tmp_path, capsys):
    run = tmp_path / "runs" / "a"
    code = (
        "import sys; from pathlib import Path; from scu_trainer.train.run_directory.run_lock import RunLock\n"
        "lock = RunLock(Path(sys.argv[1])); print('ready', flush=True); sys.stdin.read()"
    )
    with Outsider(code, run):
        assert hardware.main([*words, "--yes"]) == 0
    assert "is being written by process" in capsys.readouterr().out
    assert (run / "staging-checkpoint-1").is_dir()
    with RunLock(run):
        pass


def test_what_cannot_be_removed_is_said_and_the_rest_goes(words, cache, capsys, monkeypatch):
    real = subject.remove_inside

    def fails(folder, name, pattern):
        if "scu-trainer" in name:
            raise subject.StorageError(f"cannot delete {name}: no")
        return real(folder, name, pattern)

    monkeypatch.setattr(subject, "remove_inside", fails)
    assert hardware.main([*words, "--yes"]) == 2
    assert "cannot delete scu-trainer-deadrun1" in capsys.readouterr().err
    assert not (cache / "tokenized" / "abc").exists()


def test_an_item_that_is_in_use_is_never_removed(tmp_path):
    filled(tmp_path / "abc")
    with pytest.raises(InUse, match="somebody"):
        remove(Leftover("cache", tmp_path, "abc", subject.CACHE_ENTRY, 1000, used_by="somebody"), lambda: NOBODY)
    assert (tmp_path / "abc").is_dir()


def test_every_folder_that_the_cache_gets_is_known():
    """A new kind of cached data must be named here, or it is never freed."""
    root = Path(scu_trainer.__file__).parent
    sources = [path.read_text() for path in (root / "data").rglob("*.py")]
    sources += [path.read_text() for path in (root / "train").rglob("*.py")]
    kinds = {kind for text in sources for kind in re.findall(r'cache_dir\s*/ "(\w+)"', text)}
    assert kinds == {*hardware_optimize.CACHE_KINDS}
