"""SIGKILL at any moment: the same command goes on, and ends with the weights of the run that nobody interrupted."""

from __future__ import annotations

import os
import random
import signal

from scu_trainer.run_files import read_json
from tests.faults import campaign


def same_result(site, run) -> None:
    """Weights, histories of lambda and of the curriculum, and figures, in every digit."""
    assert campaign.differences(run, site.whole) == []
    assert read_json(run / "run.json")["status"] == "finished"
    assert not list(run.glob("staging-*"))


def test_a_run_that_is_killed_again_and_again(site, tmp_path):
    """Inside the second checkpoint, twice early at a random step on the disk, once at a random time; then no more."""
    chance, run = random.Random(0), tmp_path / "run"
    plan = [("disk", chance.choice(site.inside(6)))]
    plan += [("disk", chance.randint(1, site.disk_steps // 4)) for _ in range(2)]
    plan += [("time", chance.uniform(0, 0.5)), ("none", 0)]
    done = campaign.killed_until_done(site.flags(run), run, tmp_path / "log", plan.__getitem__)
    assert sum(done.kills.values()) >= 3 and done.kills["inside a checkpoint"], done.kills
    assert done.resumed and not done.missed
    same_result(site, run)


def test_killed_after_its_last_checkpoint_it_only_ends(site, tmp_path):
    """No step is left, but rows, figures and the trained model are: in the middle of an epoch, as it stands."""
    run = tmp_path / "run"

    def act() -> int:
        from scu_trainer.train.loops.curriculum import CurriculumLoop

        CurriculumLoop.on_epoch_end = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        return campaign.train(site.flags(run))

    ended = campaign.Child(act, tmp_path / "log").wait()
    assert ended.code == -signal.SIGKILL and (run / "checkpoint-12").is_dir(), ended.said
    ended = campaign.Child(lambda: campaign.train(site.flags(run)), tmp_path / "log").wait()
    assert ended.code == 0 and "checkpoint-12" in ended.said and "step 12/12" not in ended.said, ended.said
    same_result(site, run)
