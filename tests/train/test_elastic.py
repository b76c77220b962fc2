"""A machine of two dies in the middle: the launcher starts again, and the run ends as if nothing had happened.

Two torchrun agents on loopback are the two machines. This file is also the program that their processes execute.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from scu_trainer.run_files import read_json, read_rows
from tests import processes, tiny

ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVE_EVERY, DIES_AT = 8, 2, 5
DEADLINE_S = 250
FIRST, SECOND = "127.0.0.1", "127.0.0.2"
"""Ranks follow the addresses of machines."""


# -- what each process does --------------------------------------------------------------------------------------------


def main(hold: Path, flags: list[str]) -> int:
    """``scu-trainer train``. While the file ``hold`` is there, rank 0 takes it away at step DIES_AT and waits."""
    from scu_trainer.cli import train
    from scu_trainer.train.session import building

    class Held(building.SCUTrainer):
        def training_step(self, *args, **kwargs):
            if os.environ["RANK"] == "0" and self.state.global_step == DIES_AT and hold.exists():
                hold.unlink()
                signal.pause()
            return super().training_step(*args, **kwargs)

    building.SCUTrainer = Held
    return train.main(flags)


# -- the machines ------------------------------------------------------------------------------------------------------


class Machine:
    """A torchrun agent and its processes."""

    def __init__(self, log: Path, launcher: list[str], program: list[str]) -> None:
        self._log = log
        # Without the first, torchrun hands survivors the address of the dead rank 0 again.
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": str(ROOT)}
        environment["GLOO_SOCKET_IFNAME"] = "lo"
        self.agent = processes.Started(["-m", "torch.distributed.run", *launcher, *program], log, environment)

    @property
    def said(self) -> str:
        return self._log.read_text()

    def workers(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return [process for process in self.agent.children(recursive=True) if process.is_running()]
        return []

    def die(self) -> None:
        """As by a power cut. The agent first, so that it can tell nobody; its workers lead sessions of their own."""
        workers = self.workers()
        for process in (self.agent, *workers):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.agent.wait(DEADLINE_S)
        psutil.wait_procs(workers, DEADLINE_S)

    def end(self) -> None:
        assert self.agent.wait(DEADLINE_S) == 0, self.said[-3000:]


def wait_until(happened: Callable[[], bool], machines: list[Machine]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not happened():
        assert all(machine.agent.poll() is None for machine in machines), [machine.said[-3000:] for machine in machines]
        assert time.monotonic() < deadline_s, [machine.said[-3000:] for machine in machines]
        time.sleep(0.02)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Cluster:
    """Starts machines, and leaves none of their processes behind."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        self._folder, self._flags, self._port = folder, flags, free_port()
        self.hold = folder / "hold"
        self.machines: list[Machine] = []

    def start_both_ranks(self, run: str) -> Machine:
        return self._start(["--standalone", "--nproc_per_node", "2"], run, hold=self._folder / "never")

    def start_one_rank(self, run: str, address: str) -> Machine:
        """The second machine answers for the rendezvous, as the one that is not to die."""
        agreed = ["--rdzv_backend", "c10d", "--rdzv_id", "job", "--rdzv_endpoint", f"{SECOND}:{self._port}"]
        # A machine that is silent for 3 s is dead; by default it has 15.
        rules = f"is_host={int(address == SECOND)},keep_alive_interval=1"
        launcher = ["--nnodes", "2", "--nproc_per_node", "1", "--max_restarts", "3", "--local_addr", address]
        return self._start([*launcher, *agreed, "--rdzv_conf", rules], run, self.hold)

    def _start(self, launcher: list[str], run: str, hold: Path) -> Machine:
        program = [str(Path(__file__).resolve()), str(hold), *self._flags, "--output_dir", str(self._folder / run)]
        machine = Machine(self._folder / f"{run}-{len(self.machines)}.log", launcher, program)
        self.machines.append(machine)
        return machine


@pytest.fixture
def flags(tmp_path) -> list[str]:
    documents = tmp_path / "documents.jsonl"
    rows = [{"text": f"The cat sat on mat number {i} and looked at door {i * i}. " * 4} for i in range(24)]
    documents.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model_name_or_path": str(tiny.saved_llama(tmp_path)),
        "dataset": str(documents),
        "block_size": 64,
        "validation_split_percentage": 0,
        "max_steps": STEPS,
        "scu_target_s": 0.1,
        "save_steps": SAVE_EVERY,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "report_to": "none",
        "cache_dir": str(tmp_path / "cache"),
        "use_cpu": True,
        "predict_memory": False,
    }
    (tmp_path / "job.yaml").write_text(json.dumps(config))
    return ["--config", str(tmp_path / "job.yaml")]


@pytest.fixture
def cluster(tmp_path, flags) -> Iterator[Cluster]:
    started = Cluster(tmp_path, flags)
    yield started
    for machine in started.machines:
        machine.die()


@pytest.mark.timeout(600)  # five trainings; on a busy machine each takes long
def test_a_machine_dies_and_the_run_ends_as_if_it_had_not(tmp_path, cluster):
    """The one that dies has rank 0: its successor is the one to decide, and has never been restarted itself."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    unbroken = cluster.start_both_ranks(whole.name)
    unbroken.end()
    cluster.hold.touch()
    survivor = cluster.start_one_rank(broken.name, SECOND)
    dying = cluster.start_one_rank(broken.name, FIRST)
    wait_until(lambda: not cluster.hold.exists(), [survivor, dying])
    left = survivor.workers()
    dying.die()
    psutil.wait_procs(left, DEADLINE_S)  # the survivor's launcher has seen its process fail
    successor = cluster.start_one_rank(broken.name, FIRST)
    for machine in (survivor, successor):
        machine.end()

    last = broken / f"checkpoint-{DIES_AT - 1}"
    assert successor.said.count(f"restarted by the launcher: resuming from {last}") == 1
    assert [path.name for path in tmp_path.glob("broken-?")] == []
    for name in ("adapter_model.safetensors", "scu_history.json", f"checkpoint-{STEPS}/optimizer.pt"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes(), name
    assert [row["step"] for row in read_rows(broken / "scu_history.json")] == list(range(1, STEPS + 1))
    status = read_json(broken / "run.json")
    assert (status["status"], status["step"], status["error"]) == ("finished", STEPS, None)
    assert not any(machine.workers() for machine in cluster.machines)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
