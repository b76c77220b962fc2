"""Whether there is a launcher, and that a rank ends with it from its first moment on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from scu_trainer.cli import configuration
from scu_trainer.errors import ControlError
from scu_trainer.train.checkpoints.compatibility import MACHINE_SETTINGS, changed_settings
from scu_trainer.train.session import session
from scu_trainer.train.step.distributed import launched
from tests import processes

LAUNCHER = """
import os, subprocess, sys, time
rank = subprocess.Popen(sys.argv[1:], env={**os.environ, "LOCAL_RANK": "0"})
print(rank.pid, flush=True)
time.sleep(600)
"""
PATIENCE_S = 60.0

PARTED = """
import os, torch.distributed as dist, torch
from scu_trainer.errors import ControlError
from scu_trainer.train.step.distributed.launched import lost_ranks_reported
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    os._exit(0)
try:
    with lost_ranks_reported():
        dist.all_reduce(torch.ones(1))
except ControlError as error:
    print(error)
os._exit(0)
"""

OWN_WORDS = """
import os, sys
from scu_trainer.cli import configuration
from scu_trainer.errors import SettingsError
from scu_trainer.train.session.session import look_only
steps, folder = {"0": "3", "1": "9"}[os.environ["RANK"]], sys.argv[1]
words = {"dataset": "python_docs", "use_cpu": "true", "max_steps": steps, "output_dir": f"{folder}/of_rank_{steps}"}
words |= {"preflight": "off"} if steps == "3" else {"max_batch_size": "4"}
try:
    look_only(configuration.read_job(None, [word for name, value in words.items() for word in (f"--{name}", value)]))
except SettingsError as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["TORCHELASTIC_RUN_ID", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"])
def test_what_launchers_leave_in_the_environment(monkeypatch, name):
    for other in ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(other, raising=False)
    assert not launched.is_launched()
    monkeypatch.setenv(name, "0")
    assert launched.is_launched()


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_a_rank_that_is_still_starting_does_not_outlive_its_launcher(tmp_path):
    """Killed like this, launchers left ranks that waited half an hour for each other."""
    config = tmp_path / "config.yaml"
    config.write_text(f"output_dir: {tmp_path / 'run'}\nmax_steps: 100000\n")
    start = f"from scu_trainer.cli.train import main; main(['--config', {str(config)!r}])"
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, sys.executable, "-c", start], stdout=subprocess.PIPE, text=True
    )
    rank = psutil.Process(int(launcher.stdout.readline()))
    try:
        wait_for(lambda: "libtorch" in Path(f"/proc/{rank.pid}/maps").read_text())
        launcher.kill()
        launcher.wait()
        wait_for(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE, 3.0)
    finally:
        launcher.kill()
        launcher.stdout.close()
        if rank.is_running():
            os.kill(rank.pid, signal.SIGKILL)


def test_a_rank_says_in_words_that_another_one_is_gone(tmp_path):
    (tmp_path / "parted.py").write_text(PARTED)
    said = processes.run([tmp_path / "parted.py"], ranks=2).stdout
    assert said.startswith("another rank (process) ended or does not answer, and its own output says why; ")
    assert "or starts over if none was written" in said and "gloo" in said


def test_ranks_that_were_started_otherwise_all_say_what_differs(tmp_path):
    (tmp_path / "own_words.py").write_text(OWN_WORDS)
    said = processes.run([tmp_path / "own_words.py", tmp_path], ranks=2).stdout
    odd = "preflight: 'stop' on rank 1, 'off' on rank 0; max_steps: 9 on rank 1, 3 on rank 0"
    assert said.count(f"of this run differ in {odd}. Start the same command") == 2


def test_ranks_compare_what_none_of_them_may_have_alone(tmp_path, monkeypatch):
    compared = {}
    monkeypatch.setattr(session, "require_equal_ranks", lambda found, training: compared.update(found))
    words = ["--dataset", "python_docs", "--use_cpu", "true", "--output_dir", str(tmp_path), "--preflight", "off"]
    job, console = configuration.read_job(None, words), session.console_of_run()
    session._check_before_loading(job, console)
    data = SimpleNamespace(train=range(5), eval=range(3))
    kind = SimpleNamespace(load=lambda *_: SimpleNamespace(data=data))
    known = {"training": job.training, "saves_by_length": False, "check_rows": job.check_rows}
    session._load(SimpleNamespace(kind=kind, **known), console)
    assert (compared["training rows"], compared["held-out rows"]) == (5, 3)
    (scaled,) = (name for name in compared if name.startswith("fp16 (mixed_precision"))
    assert changed_settings({scaled: True}, {scaled: False}, MACHINE_SETTINGS)


def test_other_errors_are_left_alone():
    with pytest.raises(RuntimeError, match="a shape") as raised, launched.lost_ranks_reported():
        raise RuntimeError("a shape")
    assert not isinstance(raised.value, ControlError)


def wait_for(is_so, patience_s: float = PATIENCE_S) -> None:
    end_s = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)
