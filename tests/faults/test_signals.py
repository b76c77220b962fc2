"""SIGTERM and Ctrl-C: a step is finished, a checkpoint written, exit 3; what comes next goes on in every digit."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import signal
import sys
import termios
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from scu_trainer.cli.main import main
from scu_trainer.run_files import read_json
from scu_trainer.stop_signals import stop_signals_to
from scu_trainer.train.checkpoints.findings import STATE
from tests.faults import campaign
from tests.faults.campaign import until
from tests.faults.test_kills import same_result


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_a_step_a_checkpoint_and_exit_3(site, tmp_path, number):
    run = tmp_path / "run"
    words = site.flags(run, save_steps=100)
    child = campaign.Child(lambda: campaign.train(words), tmp_path / "log")
    with campaign.never_left_behind([child]):
        until(child, "step  5/12")
        child.kill(number)
        ended = child.wait()
    assert ended.code == 3, ended.said
    status = read_json(run / "run.json")
    assert status["status"] == "stopped" and f"stopped by {number.name} after step" in ended.said
    assert [path.name for path in run.glob("checkpoint-*")] == [f"checkpoint-{status['step']}"]
    ended = campaign.Child(lambda: campaign.train(words), tmp_path / "log").wait()
    assert ended.code == 0 and "resuming from" in ended.said, ended.said
    same_result(site, run)


@pytest.mark.parametrize("strategies", [("epoch", "steps"), ("epoch", "epoch")], ids=["evaluates", "and saves"])
def test_an_epoch_that_is_stopped_halfway_does_not_end(site, tmp_path, strategies):
    """What is due at the end of an epoch is done once, by the resumed run: the checkpoint holds the epoch as it was."""
    whole, run, log = tmp_path / "whole", tmp_path / "run", tmp_path / "log"
    evaluates, saves = strategies
    more = {"eval_strategy": evaluates, "save_strategy": saves, "curriculum": "acmds", "scu_control_frequency": 2}
    assert campaign.Child(lambda: campaign.train(site.flags(whole, **more)), log).wait().code == 0
    child = campaign.Child(lambda: campaign.train(site.flags(run, **more)), log)
    with campaign.never_left_behind([child]):
        until(child, "step  4/12")
        child.kill(signal.SIGTERM)
        assert child.wait().code == 3
    assert campaign.Child(lambda: campaign.train(site.flags(run, **more)), log).wait().code == 0
    same_result(replace(site, whole=whole), run)
    rows, expected = (logged(folder) for folder in (run, whole))
    assert rows == expected


def logged(run: Path) -> list[tuple]:
    """(step, names that were logged, S) of every row; the first step after a resume has no throughput."""
    rows = read_json(max(run.glob("checkpoint-*"), key=lambda path: int(path.name[11:])) / STATE)["log_history"]
    names = (sorted(name for name in row if not name.startswith("throughput")) for row in rows)
    return [(row["step"], names_of_row, row.get("scu/s")) for row, names_of_row in zip(rows, names, strict=True)]


@pytest.mark.parametrize(
    "more",
    [["--no_resume"], ["--save_only_model", "true"], ["--resume_from_checkpoint", "{run}/checkpoint-3"]],
    ids=["another run was asked for", "no optimizer state", "an earlier checkpoint was named"],
)
def test_what_it_says_to_add_resumes_it(site, tmp_path, more):
    run, log = tmp_path / "run", tmp_path / "log"
    plain = [*site.flags(run, save_steps=3), "--save_total_limit", "9"]
    words = [*plain, *(word.format(run=run) for word in more)]
    if "--resume_from_checkpoint" in words:
        assert campaign.Child(lambda: campaign.train(plain), log).wait().code == 0
    child = campaign.Child(lambda: campaign.train(words), log)
    with campaign.never_left_behind([child]):
        until(child, "step  5/12")
        child.kill(signal.SIGTERM)
        ended = child.wait()
    step = read_json(run / "run.json")["step"]
    added = re.search(r"run the same command with (.*) to resume from it", ended.said)
    assert added is not None, ended.said
    again = [*words, *shlex.split(added[1].replace(" and ", " "))]
    ended = campaign.Child(lambda: campaign.train(again), log).wait()
    assert ended.code == 0 and not run.with_name("run-2").exists(), ended.said
    assert f"step {step + 1:2}/12" in ended.said and f"step {step:2}/12" not in ended.said, ended.said


def read_until(text: str) -> None:
    """From here on what this process prints goes through a pipe, whose reader leaves when it has read ``text``."""
    log, (end, into) = os.dup(1), os.pipe()
    os.dup2(into, 1)
    os.close(into)
    sys.stdout = os.fdopen(1, "w", 1, closefd=False)

    def read() -> None:
        with open(end, "rb") as lines, open(log, "wb") as copy:
            for line in lines:
                copy.write(line)
                if text.encode() in line:
                    return

    threading.Thread(target=read, daemon=True).start()


@pytest.mark.parametrize("nohup", [False, True], ids=["plain", "nohup"])
def test_a_reader_that_leaves_costs_no_step(site, tmp_path, nohup):
    """``scu-trainer train | head``, a pager that is closed, an ssh connection that breaks."""
    run = tmp_path / "run"
    words = site.flags(run, save_steps=100)

    def act() -> int:
        if nohup:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        read_until("step  5/12")
        return campaign.train(words)

    ended = campaign.Child(act, tmp_path / "log").wait()
    status = read_json(run / "run.json")
    said = "the terminal or pipe that showed this run was closed; the run"
    if nohup:
        assert ended.code == 0 and status["status"] == "finished", ended.said
        assert f"{said} continues" in (run / "logs/train.log").read_text()
        return
    assert ended.code == 3 and status["status"] == "stopped", ended.said
    assert "stopped by a closed terminal or pipe after step" in ended.said
    assert f"{said} ends after this step, with a checkpoint" in (run / "logs/train.log").read_text()
    assert [path.name for path in run.glob("checkpoint-*")] == [f"checkpoint-{status['step']}"]
    ended = campaign.Child(lambda: campaign.train(words), tmp_path / "log").wait()
    assert ended.code == 0 and "resuming from" in ended.said, ended.said
    same_result(site, run)


def test_a_reader_that_leaves_during_the_last_scores_gets_them_in_the_files(site, tmp_path):
    run = tmp_path / "run"

    def act() -> int:
        read_until("step 12/12  held-out")
        return campaign.train(site.flags(run))

    ended = campaign.Child(act, tmp_path / "log").wait()
    assert ended.code == 0 and read_json(run / "run.json")["status"] == "finished", ended.said
    same_result(site, run)


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_command_that_was_started_without_an_output(name, monkeypatch):
    """``scu-trainer train >&-``: Python has None there, to which ``print`` writes nothing."""
    monkeypatch.setattr(sys, name, None)
    with stop_signals_to(lambda number, frame: None, lambda: None):
        print("a line", file=getattr(sys, name))
        assert getattr(sys, name) is None


def test_a_terminal_that_is_closed_gets_its_signal_and_takes_the_output_with_it(site, tmp_path):
    run, (screen, line) = tmp_path / "run", pty.openpty()

    def act() -> int:
        os.close(screen)
        os.setsid()
        fcntl.ioctl(line, termios.TIOCSCTTY, 0)
        os.dup2(line, 1), os.dup2(line, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
        return main(["train", *site.flags(run, save_steps=100, dataloader_num_workers=1)])

    child = campaign.Child(act, tmp_path / "log")
    with campaign.never_left_behind([child]):
        os.close(line)
        seen = b""
        while b" 5/12" not in seen:
            seen += os.read(screen, 4096)
        os.close(screen)
        ended = child.wait()
    status = read_json(run / "run.json")
    assert ended.code == 3 and status["status"] == "stopped", (ended, status)
    assert [path.name for path in run.glob("checkpoint-*")] == [f"checkpoint-{status['step']}"]


def test_output_that_a_full_disk_does_not_take_ends_no_run(site, tmp_path):
    run = tmp_path / "run"

    def act() -> int:
        campaign.at_step(5, lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), 1))
        return campaign.train(site.flags(run))

    ended = campaign.Child(act, tmp_path / "log").wait()
    assert ended.code == 0 and read_json(run / "run.json")["status"] == "finished", ended.said
    same_result(site, run)


def test_a_terminal_that_is_closed_under_nohup_is_not_noticed(site, tmp_path):
    run = tmp_path / "run"

    def act() -> int:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return campaign.train(site.flags(run))

    child = campaign.Child(act, tmp_path / "log")
    with campaign.never_left_behind([child]):
        until(child, "step  5/12")
        child.kill(signal.SIGHUP)
        ended = child.wait()
    assert ended.code == 0 and read_json(run / "run.json")["status"] == "finished", ended.said


def slow_step(seconds: float) -> None:
    """From here on step 5 of this process takes ``seconds`` longer."""
    from scu_trainer.train.trainer import SCUTrainer

    stock = SCUTrainer.training_step

    def training_step(trainer, *args, **kwargs):
        if trainer.state.global_step == 4 and trainer.accelerator.sync_gradients:
            print("in the slow step", flush=True)
            time.sleep(seconds)
        return stock(trainer, *args, **kwargs)

    SCUTrainer.training_step = training_step


def slow(words: list[str], seconds: float) -> int:
    slow_step(seconds)
    return campaign.train(words)


def test_twice_is_now(site, tmp_path):
    run = tmp_path / "run"
    child = campaign.Child(lambda: slow(site.flags(run), 600.0), tmp_path / "log")
    with campaign.never_left_behind([child]):
        until(child, "in the slow step")
        child.kill(signal.SIGINT)
        until(child, "a second one ends it now")
        child.kill(signal.SIGINT)
        ended = child.wait()
    assert ended.code == 130 and ended.seconds < 60, ended.said
    assert read_json(run / "run.json")["status"] == "stopped"
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-3"]


def test_when_the_grace_period_is_over_it_ends_with_what_it_has(site, tmp_path):
    run = tmp_path / "run"
    words = site.flags(run, grace_period_s=0.5, dataloader_num_workers=1)
    child = campaign.Child(lambda: slow(words, 600.0), tmp_path / "log")
    with campaign.never_left_behind([child]):
        until(child, "in the slow step")
        workers = psutil.Process(child.pid).children(recursive=True)
        child.kill(signal.SIGTERM)
        ended = child.wait()
    assert ended.code == 128 + signal.SIGTERM, ended.said
    assert "the grace period of 0.5 s is over" in ended.said
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-3"]
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert workers and not alive


def test_before_the_first_step_it_ends_at_once(site, tmp_path):
    run = tmp_path / "run"

    def act() -> int:
        from scu_trainer.train.session import training

        stock = training.score

        def score(*args):
            print("scoring", flush=True)
            time.sleep(600)
            return stock(*args)

        training.score = score
        return campaign.train(site.flags(run))

    child = campaign.Child(act, tmp_path / "log")
    with campaign.never_left_behind([child]):
        until(child, "scoring")
        child.kill(signal.SIGTERM)
        ended = child.wait()
    assert ended.code == 130 and read_json(run / "run.json")["status"] == "stopped", ended.said


def test_the_whole_group_is_told_and_workers_stay_until_the_step_is_done(site, tmp_path):
    """As a batch queue does it. The step still needs two batches of the workers."""
    run = tmp_path / "run"

    def act() -> int:
        os.setpgid(0, 0)
        return slow(site.flags(run, dataloader_num_workers=2), 1.0)

    child = campaign.Child(act, tmp_path / "log")
    with campaign.never_left_behind([child]):
        until(child, "in the slow step")
        workers = psutil.Process(child.pid).children(recursive=True)
        os.killpg(child.pid, signal.SIGTERM)
        ended = child.wait()
    assert ended.code == 3 and "Traceback" not in ended.said, ended.said
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert len(workers) == 2 and not alive


def test_killed_it_leaves_no_workers(site, tmp_path):
    words = site.flags(tmp_path / "run", dataloader_num_workers=2)

    def act() -> int:
        from torch.utils.data._utils import worker

        worker.MP_STATUS_CHECK_INTERVAL = 0.2  # seconds between two looks at the parent; 5 of them are torch's own
        return slow(words, 600.0)

    child = campaign.Child(act, tmp_path / "log")
    with campaign.never_left_behind([child]):
        until(child, "in the slow step")
        workers = psutil.Process(child.pid).children(recursive=True)
        child.kill(signal.SIGKILL)
        child.wait()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert len(workers) == 2 and not alive


# -- several ranks -----------------------------------------------------------------------------------------------------


def torchrun(words: list[str]) -> int:
    """torchrun's agent, with ranks that are forks and need not import everything again."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        max_restarts=0,
    )

    def rank() -> None:
        os._exit(campaign.train(words))  # one that returned would wait for the agent to take its result

    elastic_launch(config, rank)()
    return 0


@pytest.mark.parametrize("how", ["preempted", "launcher killed", "one rank told"])
def test_ranks_stop_after_the_same_step(site, tmp_path, how):
    """torchrun passes SIGTERM on to its ranks; a launcher that is killed cannot, and the system tells them."""
    run = tmp_path / "run"
    words = site.flags(run, max_steps=400, save_steps=1000, eval_strategy="no", num_train_epochs=400)

    def act() -> int:
        return torchrun(words) if how == "preempted" else campaign.launch(lambda: campaign.train(words), ranks=2)

    child = campaign.Child(act, tmp_path / "log")
    with campaign.never_left_behind([child]):
        until(child, "step   3/400")
        ranks = psutil.Process(child.pid).children(recursive=True)
        if how == "one rank told":
            ranks[-1].terminate()
        else:
            child.kill(signal.SIGTERM if how == "preempted" else signal.SIGKILL)
        child.wait()
        _, alive = psutil.wait_procs(ranks, timeout=60)
    assert len(ranks) >= 2 and not alive
    status = read_json(run / "run.json")
    assert status["status"] == "stopped", child.log.read_text()[-3000:]
    folder = run / f"checkpoint-{status['step']}"
    assert (folder / "manifest.json").is_file() and (folder / "rng_state_1.pth").is_file()
