"""A clock that jumps by a year: what is newest is known by numbers, and no result depends on the time of day."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scu_trainer.run_files import read_json
from tests.faults import campaign
from tests.faults.campaign import Child, Ended
from tests.faults.test_kills import same_result

YEAR_S = 365 * 86_400.0


class Clock:
    """The time of day of this process, from here on. ``jump_s`` is added to it."""

    def __init__(self, jump_s: float) -> None:
        from scu_trainer.run_files import RunStatus

        self.jump_s, self._stock = jump_s, time.time
        time.time = self
        RunStatus.__init__.__defaults__ = (self, *RunStatus.__init__.__defaults__[1:])

    def __call__(self) -> float:
        return self._stock() + self.jump_s


def started(words: list[str], log: Path, before: Callable[[], object]) -> Ended:
    return Child(lambda: (before(), campaign.train(words))[1], log).wait()


def jump_then_die(first_s: float, second_s: float) -> None:
    """A jump in step 5, a kill in step 8."""
    clock = Clock(first_s)
    campaign.at_step(5, lambda: setattr(clock, "jump_s", second_s))
    campaign.at_step(8, lambda: os.kill(os.getpid(), 9))


def set_times(run: Path, newest_s: float, others_s: float) -> None:
    """Of all files, as another clock would have left them."""
    for folder in run.glob("checkpoint-*"):
        when_s = newest_s if folder.name == "checkpoint-6" else others_s
        for path in (folder, *folder.iterdir()):
            os.utime(path, (when_s, when_s))


@pytest.mark.parametrize("jump_s", [-YEAR_S, YEAR_S], ids=["back", "forth"])
def test_within_a_run_and_between_two_starts(site, tmp_path, jump_s):
    run, words = tmp_path / "run", site.flags(tmp_path / "run")
    assert started(words, tmp_path / "log", lambda: jump_then_die(0.0, jump_s)).code == -9
    status = read_json(run / "run.json")
    assert status["step"] >= 6 and status["updated"][:4] != status["started"][:4]
    set_times(run, time.time() - jump_s, time.time() + jump_s)
    ended = started(words, tmp_path / "log", lambda: Clock(-jump_s))
    assert ended.code == 0 and f"resuming from {run / 'checkpoint-6'}" in ended.said, ended.said
    same_result(site, run)


def test_the_run_that_made_way_is_found_although_it_seems_older(site, tmp_path):
    """A finished run, then the clock is set back, and the next run beside it is killed."""
    run, second = Path(shutil.copytree(site.whole, tmp_path / "run")), tmp_path / "run-2"
    words = site.flags(run)
    assert started(words, tmp_path / "log", lambda: jump_then_die(-YEAR_S, -YEAR_S)).code == -9
    ended = started(words, tmp_path / "log", lambda: Clock(-YEAR_S))
    assert ended.code == 0 and f"resuming from {second / 'checkpoint-6'}" in ended.said, ended.said
    same_result(site, second)
