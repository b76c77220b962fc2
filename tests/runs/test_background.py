"""Start, stop, resume of real detached processes (tests/runs/stand_in.py trains in place of torch)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from scu_trainer.errors import SettingsError, StorageError
from scu_trainer.run_files import read_json, write_json
from scu_trainer.runs import control, supervisor
from scu_trainer.runs.control import RunBackend, StartRequest, resume, start, stop
from scu_trainer.runs.process import System, is_alive, processes_of_run, send_signal, spawn_detached
from scu_trainer.runs.state import report
from scu_trainer.runs.store import Options, Run, all_runs, check_name, find_run, free_name
from scu_trainer.runs.supervisor import SupervisorBackend, supervise, training_words
from tests.runs import stand_in
from tests.runs.test_process import until

OPTIONS = Options(device="cpu", nice=1, max_ram_percent=100)
HANDS = stand_in.hands()


@pytest.fixture
def root(tmp_path, monkeypatch):
    """No process of a test outlives it."""
    monkeypatch.setenv("SCU_TRAINER_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "runs"
    yield root
    for run in all_runs(root):
        record = run.record()
        for member in processes_of_run(record.process, record.token, System()) if record and record.process else ():
            send_signal(member, signal.SIGKILL, System())


def begun(root: Path, name: str, config: str = "{}", options: Options = OPTIONS) -> Run:
    start(StartRequest(name, config, options=options), root, HANDS)
    return Run(root / name, name)


def status(run: Run) -> str:
    return report(run, System()).state.status


def reaches(run: Run, wanted: str) -> None:
    until(lambda: status(run) == wanted)


# -- a life ------------------------------------------------------------------------------------------------------------


def test_start_stop_resume_to_the_end(root):
    run = begun(root, "a", "max_steps: 40")
    record = run.record()
    assert record.process.pid == os.getsid(record.process.pid) != os.getpid()
    until(lambda: (report(run, System()).progress.step or 0) >= 3)
    assert status(run) == "running" and report(run, System()).pid == record.process.pid
    with pytest.raises(SettingsError, match="a is running already"):
        resume(run, HANDS)
    after = stop(run, HANDS, 20)
    assert after.state.status == "stopped" and after.progress.checkpoint == f"checkpoint-{after.progress.step}"
    assert run.record().exit_code == 3 and not is_alive(record.process, System())
    assert stop(run, HANDS, 20).state.status == "stopped"  # once more harms nothing
    again, checkpoint = resume(run, HANDS)
    assert again.starts == 2 and again.token != record.token and checkpoint == after.progress.checkpoint
    assert training_words(run, again)[-2:] == ["--resume_from_checkpoint", "auto"]
    reaches(run, "finished")
    until(lambda: run.record().exit_code == 0)
    assert f"begins at {after.progress.step}" in run.console.read_text()
    with pytest.raises(SettingsError, match="cannot be resumed: it is finished"):
        resume(run, HANDS)


def test_the_configuration_is_that_of_the_start(root):
    run = begun(root, "a", "max_steps: 1\n# a remark\n")
    words = training_words(run, run.record())
    assert words[:4] == ["--config", str(run.config.absolute()), "--output_dir", str(run.path.absolute())]
    assert run.config.read_text() == "max_steps: 1\n# a remark\n"
    assert words[-2:] == ["--use_cpu", "true"]


def test_a_second_request_to_stop_is_no_second_signal(root):
    """Training would take that for "now", and write no checkpoint."""
    hold_file = root.parent / "held"
    hold_file.touch()
    run = begun(root, "a", f"hold_file: {hold_file}")
    reaches(run, "running")
    assert stop(run, HANDS, 0.05).state.status == stop(run, HANDS, 0.05).state.status == "stopping"
    hold_file.unlink()
    after = stop(run, HANDS, 20)
    assert after.state.status == "stopped"
    assert read_json(run.path / after.progress.checkpoint / "trainer_state.json") == {"signals": 1}


def test_a_launcher_cannot_cut_the_checkpoint_short(root):
    run = begun(root, "a", "behave: launch")
    until(lambda: (report(run, System()).progress.step or 0) >= 3)
    after = stop(run, HANDS, 20)
    assert after.state.status == "stopped" and after.progress.checkpoint == f"checkpoint-{after.progress.step}"


def test_a_launcher_that_resumes_can_be_stopped_before_training_begins(root):
    run = begun(root, "a", "behave: load")
    until(lambda: (report(run, System()).progress.step or 0) >= 3)
    stop(run, HANDS, 20)
    resume(run, HANDS)
    until((run.path / "loads").exists)
    after = stop(run, HANDS, 20)
    assert (after.state.status, after.state.detail) == ("stopped", "stopped before training began")


def test_now_ends_children_that_left_the_session_too(root):
    run = begun(root, "a", "behave: child")
    reaches(run, "running")
    child = int((run.path / "child").read_text())
    assert os.getsid(child) == child
    after = stop(run, HANDS, now=True)
    assert after.state.status == "stopped" and "--now" in after.state.detail
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_killed_with_children_left_it_is_not_resumed_beside_them(root, monkeypatch):
    monkeypatch.setattr(control, "ENDS_WITHIN_S", 0.1)
    run = begun(root, "a", "behave: child")
    reaches(run, "running")
    os.kill(run.record().process.pid, signal.SIGKILL)
    reaches(run, "killed")
    with pytest.raises(SettingsError, match="processes of a are still ending"):
        resume(run, HANDS)
    stop(run, HANDS, now=True)
    assert resume(run, HANDS)[0].starts == 2


def test_a_copy_of_a_living_run_is_not_taken_for_it(root):
    hold_file = root.parent / "held"
    hold_file.touch()
    run = begun(root, "a", f"hold_file: {hold_file}\nmax_steps: 3")
    reaches(run, "running")
    copy = Run(shutil.copytree(run.path, root / "b"), "b")
    found = report(copy, System())
    assert found.state.status == "copied" and f"a copy of {run.path}" in found.state.detail and found.pid is None
    for now in (False, True):
        with pytest.raises(SettingsError, match=f"b is a copy of {run.path} and has no process of its own"):
            stop(copy, HANDS, 0.05, now)
    assert status(run) == "running" and not run.stop_request.exists()
    resume(copy, HANDS)  # waits in the line behind the other one
    assert status(copy) == "queued" and status(run) == "running"
    hold_file.unlink()
    for one in (run, copy):
        reaches(one, "finished")


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "told", "cause", "detail", "code"),
    [
        ("behave: refuse", "failed", "error", "unknown key 'behave'", 2),
        ("behave: crash", "failed", "error", "RuntimeError: a fault of ours", 1),
        ("behave: die", "killed", "killed", "killed, or out of memory", None),
    ],
)
def test_how_it_ended_is_told(root, config, told, cause, detail, code):
    run = begun(root, "a", config)
    until(lambda: not report(run, System()).state.is_alive)
    found = report(run, System())
    assert (found.state.status, found.state.cause) == (told, cause) and detail in found.state.detail
    assert run.record().exit_code == code
    assert "a.b" not in run.console.read_text() and (code != 1 or "Traceback" in run.console.read_text())


def test_a_process_that_dies_before_it_registers_is_one_message(root):
    def spawn(words, cwd, environment, log):
        return spawn_detached(["sh", "-c", "echo cannot begin; exit 1"], cwd, environment, log)

    with pytest.raises(StorageError, match=r"ended at once: [^;]*cannot begin"):
        start(StartRequest("a", "{}"), root, RunBackend(spawn=spawn))
    found = report(Run(root / "a", "a"), System(), now_s=time.time() + 10)
    assert found.state.status in ("starting", "killed")


# -- the line ----------------------------------------------------------------------------------------------------------


def test_one_trains_and_the_others_wait_their_turn(root):
    first, second, third = (begun(root, name) for name in "abc")
    reaches(first, "running")
    until(lambda: [report(run, System()).ahead for run in (second, third)] == [1, 2])
    assert [status(run) for run in (first, second, third)] == ["running", "queued", "queued"]
    after = stop(second, HANDS, 20)
    assert (after.state.status, after.state.detail) == ("stopped", "left the queue before it began")
    os.kill(first.record().process.pid, signal.SIGKILL)
    reaches(third, "running")
    assert status(first) == "killed"


def test_killed_in_the_line_it_is_dead_and_holds_nobody_up(root):
    first, second, third = (begun(root, name) for name in "abc")
    until(lambda: report(third, System()).ahead == 2)
    os.kill(second.record().process.pid, signal.SIGKILL)
    reaches(second, "killed")
    assert "waited in the queue" in report(second, System()).state.detail
    stop(first, HANDS, 20)
    reaches(third, "running")
    resume(second, HANDS)
    reaches(second, "queued")


def test_a_device_that_is_not_there_is_told_by_the_status(root):
    run = begun(root, "a", options=Options(device="gpu-3", nice=0))
    reaches(run, "failed")
    assert "there is no device 'gpu-3' here; devices: cpu" in report(run, System()).state.detail


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (StartRequest("../a", "{}"), "cannot be the name of a run"),
        (StartRequest("a", "{}", options=Options(nice=20)), "nice is 20; allowed: 0"),
        (StartRequest("a", "{}", options=Options(threads=0)), "threads is 0"),
        (StartRequest("a", "{}", options=Options(max_ram_percent=0)), "max_ram_percent is 0"),
        (StartRequest("a", "{}", options=Options(max_gpu_percent=101)), "max_gpu_percent is 101"),
        (
            StartRequest("a", f"hub_token: hf_{'a1' * 15}"),
            "the configuration would be stored in the directory of the background",
        ),
        (
            StartRequest("a", "{}", ("--hub_token", f"hf_{'a1' * 15}")),
            "the flags would be stored in the directory of the background",
        ),
    ],
)
def test_cheap_mistakes_are_told_at_once(root, wish, words):
    with pytest.raises(SettingsError, match=words):
        start(wish, root, HANDS)
    assert not root.exists()


def test_a_run_whose_folder_is_renamed_says_why_it_ended(root):
    run = begun(root, "a")
    until(lambda: (report(run, System()).progress.step or 0) >= 3)
    record = run.record()
    moved = Run(run.path.rename(root / "b"), "b")
    until(lambda: not is_alive(record.process, System()))
    seen = report(moved, System()).state
    assert (seen.status, seen.cause) == ("failed", "error") and "cannot write" in seen.detail
    assert moved.record().exit_code == 2 and not run.path.exists()


def test_a_run_that_is_renamed_while_it_waits_trains_where_it_is_now(root):
    first, second = begun(root, "a"), begun(root, "b", "max_steps: 2")
    reaches(first, "running")
    until(lambda: second.record().waiting is not None)
    until(lambda: psutil.Process(second.record().process.pid).status() == psutil.STATUS_SLEEPING)  # has written it all
    moved = Run(second.path.rename(root / "c"), "c")
    stop(first, HANDS, 20)
    reaches(moved, "finished")
    until(lambda: moved.record().exit_code == 0)
    assert not second.path.exists()


def test_a_name_in_use_and_a_full_disk(root, monkeypatch):
    begun(root, "a", "max_steps: 1")
    with pytest.raises(SettingsError, match="the name 'a' is in use"):
        start(StartRequest("a", "{}"), root, HANDS)
    monkeypatch.setattr("scu_trainer.run_files.free_bytes", lambda path: 1000)
    with pytest.raises(StorageError, match=r"64\.0 MiB are needed"):
        start(StartRequest("b", "{}"), root, HANDS)


def test_of_two_starts_at_once_one_gets_the_name(root, monkeypatch):
    monkeypatch.setattr(control, "check", lambda wish, root: None)  # as when both have passed it
    outcomes = []

    def act():
        try:
            outcomes.append(start(StartRequest("a", "max_steps: 1"), root, HANDS).process.pid)
        except SettingsError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=act) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = [outcome for outcome in outcomes if isinstance(outcome, int)]
    assert len(numbers) == 1 and any("taken just now" in str(outcome) for outcome in outcomes)


def test_names(root, tmp_path):
    run = begun(root, "first", "max_steps: 1")
    assert find_run("first", root) == run and find_run(str(run.path), Path("nowhere")).name == "first"
    with pytest.raises(SettingsError, match=r"no run 'frist' in .* \(did you mean 'first'\?\); runs: first"):
        find_run("frist", root)
    with pytest.raises(SettingsError, match="there is none yet"):
        find_run("x", tmp_path / "nowhere")
    assert free_name("first", ["first", "first-2"]) == "first-3"
    check_name("a.b-c_1")
    check_name("läufe")
    for name in ("_a", ".a", "a b", "a/b", "a\n", ""):
        with pytest.raises(SettingsError, match="cannot be the name of a run"):
            check_name(name)


def test_a_run_by_hand_is_neither_stopped_nor_resumed(tmp_path):
    write_json(tmp_path / "run.json", {"status": "running", "pid": os.getpid()})
    for act in (lambda: stop(Run(tmp_path, "a"), HANDS), lambda: resume(Run(tmp_path, "a"), HANDS)):
        with pytest.raises(SettingsError, match="was not started by runs start"):
            act()


def test_what_a_resume_finds_again_holds_no_secret(monkeypatch):
    for name, value in {"HF_HOME": "/x", "HF_TOKEN": "hf_1234", "WANDB_API_KEY": "k", "SHELL": "sh"}.items():
        monkeypatch.setenv(name, value)
    found = control.environment()
    assert found["HF_HOME"] == "/x" and not {"HF_TOKEN", "WANDB_API_KEY", "SHELL"} & set(found)
    assert "TOKENIZERS_PARALLELISM" in found


# -- the supervisor, in this process -----------------------------------------------------------------------------------


@pytest.fixture
def alone(root):
    """A run that only lacks its process; signals of this one are as before afterwards."""
    before = signal.getsignal(signal.SIGTERM)

    class Started(Exception):
        pass

    def spawn(*_):
        raise Started

    with contextlib.suppress(Started):
        start(StartRequest("a", "{}", options=OPTIONS), root, RunBackend(spawn=spawn))
    yield Run(root / "a", "a")
    signal.signal(signal.SIGTERM, before)


def outside(train, **more) -> SupervisorBackend:
    said = ["nice 1 was not possible: no"]
    quiet = {"lower_priority": lambda nice: said, "lacking": lambda *_: None}
    return SupervisorBackend(train, devices=lambda: ["gpu-0", "gpu-1"], **quiet, **more)


def test_what_was_not_possible_is_kept_and_the_gpu_is_the_only_one_seen(alone, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    alone.change(options=Options(nice=0))
    seen = []
    assert supervise(alone, outside(lambda words: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]) or 3)) == 3
    assert seen == ["0"] and alone.record().notes == ("nice 1 was not possible: no",)
    assert alone.status()["status"] == "stopped" and report(alone, System()).state.status == "stopped"


def test_training_that_wrote_elsewhere_is_not_told_as_finished(alone):
    assert supervise(alone, outside(lambda words: 0)) == 0
    assert alone.status()["status"] == "failed" and "another directory" in alone.status()["error"]


@contextlib.contextmanager
def printing_to(console: Path):
    """As the process of a run does."""
    stdout = os.dup(1)
    with open(console, "a") as file:
        os.dup2(file.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def test_a_run_that_took_the_name_of_a_renamed_one_is_left_alone(alone):
    moved, words = Run(alone.path.with_name("moved")), []

    def rename(*_):
        alone.path.rename(moved.path)
        shutil.copytree(moved.path, alone.path)

    with printing_to(alone.console):
        assert supervise(alone, replace(outside(lambda given: words.extend(given) or 3), lacking=rename)) == 3
    assert words[1] == str(moved.config) and moved.record().exit_code == 3
    assert (alone.record().phase, alone.record().exit_code, alone.status()["status"]) == ("queued", None, "queued")


def test_a_run_below_a_link_is_named_as_it_was_typed(alone):
    typed, words = Run(alone.path.parent.with_name("link") / "a"), []
    typed.path.parent.symlink_to(alone.path.parent)
    with printing_to(alone.console):
        supervise(typed, outside(lambda given: words.extend(given) or 3))
    assert words[1] == str(typed.config)


def test_a_launcher_takes_the_place_of_the_process_and_gets_all_gpus(alone, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    became = []

    def become(words):
        became.append((words, os.environ["CUDA_VISIBLE_DEVICES"]))
        raise KeyboardInterrupt

    alone.change(options=Options(launcher="torchrun", nice=0))
    supervise(alone, outside(None, become=become))
    ((words, visible),) = became
    assert words[3:7] == ["scu_trainer.cli.main", "launch", "torchrun", "--config"] and visible == "0,1"


def test_a_full_disk_at_the_end_hides_nothing(alone, monkeypatch, capsys):
    def refuse(*_, **__):
        raise StorageError("the disk is full: x cannot be written")

    def train(words):
        monkeypatch.setattr(supervisor, "record_final_status", refuse)
        return 2

    assert supervise(alone, outside(train)) == 2
    assert "the last message was not written: the disk is full" in capsys.readouterr().err


def test_a_request_before_training_listens_ends_it(alone):
    def train(words):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)

    assert supervise(alone, outside(train)) == supervisor.INTERRUPTED
    assert alone.status()["status"] == "stopped" and alone.record().exit_code == supervisor.INTERRUPTED


def test_the_record_is_json_and_reads_back(alone):
    content = json.loads((alone.folder / "start.json").read_text())
    assert content["options"]["nice"] == 1 and alone.record() == alone.write(alone.record())
