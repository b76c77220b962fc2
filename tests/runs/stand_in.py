"""A background run whose training is a loop without torch: the real detached process, line and signals, in 0.2 seconds.

The configuration says what it does: ``behave`` is one of the functions below, "train" by default.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from scu_trainer.run_files import RunStatus, write_json
from scu_trainer.runs.control import RunBackend
from scu_trainer.runs.process import spawn_detached
from scu_trainer.runs.store import Run
from scu_trainer.runs.supervisor import SupervisorBackend, supervise

STEPS = 10_000


def spawn(words: Sequence[str], cwd: str, environment: Mapping[str, str], log: Path) -> Any:
    """In place of ``spawn_detached``: the same, with another program."""
    return spawn_detached([sys.executable, __file__, words[-1]], cwd, environment, log)


def hands(**more: Any) -> RunBackend:
    return RunBackend(spawn=spawn, **more)


def kept_for_its_owner(patch: Any, folder: Path) -> None:
    """What another user may not look into: rights do not hinder root, who runs these tests in a container."""

    def refusing(stock: Any) -> Any:
        def ask(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            if isinstance(path, (str, os.PathLike)) and folder in Path(path).absolute().parents:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return stock(path, *arguments, **options)

        return ask

    for name in ("stat", "scandir", "listdir"):
        patch.setattr(os, name, refusing(getattr(os, name)))
    patch.setattr("builtins.open", refusing(open))


def training(words: list[str]) -> int:
    options = dict(zip(words[::2], words[1::2], strict=True))
    settings = yaml.safe_load(Path(options["--config"]).read_text())
    behave = {"train": _train, "refuse": _refuse, "crash": _crash, "die": _die, "child": _with_child, "launch": _launch}
    behave["load"] = _load_again
    return behave[settings.get("behave", "train")](Path(options["--output_dir"]), settings)


def _train(run: Path, settings: dict) -> int:
    wanted: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: wanted.append(number))
    status = RunStatus(run / "run.json", min_interval_s=0.0)
    newest = max((int(path.name.partition("-")[2]) for path in run.glob("checkpoint-*")), default=0)
    print(f"begins at {newest}", flush=True)
    max_steps = settings.get("max_steps", STEPS)
    for step in range(newest + 1, max_steps + 1):
        status.update(status="running", pid=os.getpid(), step=step, max_steps=max_steps, loss=1.0)
        while Path(settings.get("hold_file", run / "nothing")).exists():
            time.sleep(0.02)
        if wanted:
            (run / f"checkpoint-{step}").mkdir()
            write_json(run / f"checkpoint-{step}" / "trainer_state.json", {"signals": len(wanted)})
            status.update(status="stopped")
            return 3
        time.sleep(0.02)
    status.update(status="finished", eta_s=0.0)
    return 0


def _refuse(run: Path, settings: dict) -> int:
    print("error: unknown key 'behave' (did you mean 'behaves'?)", file=sys.stderr)
    return 2


def _crash(run: Path, settings: dict) -> int:
    raise RuntimeError("a fault of ours")


def _die(run: Path, settings: dict) -> int:
    RunStatus(run / "run.json").update(status="running", pid=os.getpid(), step=5)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def _with_child(run: Path, settings: dict) -> int:
    """A child in a session of its own, as ranks of some launchers are."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (run / "child").write_text(str(child.pid))
    return _train(run, settings)


def _launch(run: Path, settings: dict) -> int:
    """As a launcher whose patience with its rank has ended when the signal comes."""
    rank = os.fork()
    if rank == 0:
        os._exit(_train(run, settings))
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(rank, signal.SIGKILL))
    return os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])


def _load_again(run: Path, settings: dict) -> int:
    """A start that resumes ends by a signal while it still loads, and nobody notes an exit code, as of a launcher."""
    if not any(run.glob("checkpoint-*")):
        return _train(run, settings)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    (run / "loads").touch()
    time.sleep(600)
    return 1


def main(path: Path) -> int:
    return supervise(
        Run(path, path.name), SupervisorBackend(training, devices=lambda: ["cpu"], sleep=lambda s: time.sleep(0.02))
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
