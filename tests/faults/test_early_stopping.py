"""SIGKILL on the way to an early stop, and after it: the same command ends at the same step with the same model."""

from __future__ import annotations

import os
import random
import signal

import pytest

from scu_trainer.run_files import read_json
from tests.faults import campaign

STOPS_EARLY = {
    "early_stopping_patience": 2, "eval_steps": 1, "save_steps": 1, "max_steps": 30, "learning_rate": 0.2,
    "lr_scheduler_type": "constant", "divergence": "off", "ema_decay": 0.3, "save_total_limit": 1,
    "lora_r": 2, "lora_target_modules": ["all-linear"],
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(site, tmp_path_factory):
    """The run that nobody kills."""
    run = tmp_path_factory.mktemp("whole") / "run"
    ended = campaign.Child(lambda: campaign.train(site.flags(run, **STOPS_EARLY)), run.with_name("log")).wait()
    assert ended.code == 0 and "early stopping" in ended.said, ended.said
    figures = read_json(run / "scu_metrics.json")["early_stopping"]
    assert 2 < figures["best_step"] == figures["step"] - 2 < 28
    assert (run / f"checkpoint-{figures['best_step']}").is_dir()  # also with a save_total_limit of 1
    return run


def _same_end(run, whole) -> None:
    assert campaign.differences(run, whole) == []
    first, second = (read_json(place / "scu_metrics.json")["early_stopping"] for place in (run, whole))
    assert first == second


def test_killed_between_evaluations_it_ends_at_the_same_step(site, whole, tmp_path):
    """Without its count in the checkpoints the run would wait for both evaluations again."""
    run, last = tmp_path / "run", read_json(whole / "scu_metrics.json")["early_stopping"]["step"]

    def act() -> int:
        campaign.at_step(last, lambda: os.kill(os.getpid(), signal.SIGKILL))
        return campaign.train(site.flags(run, **STOPS_EARLY))

    assert campaign.Child(act, tmp_path / "log").wait().code == -signal.SIGKILL
    plan = [("time", random.Random(1).uniform(0, 0.5)), ("none", 0)]
    done = campaign.killed_until_done(site.flags(run, **STOPS_EARLY), run, tmp_path / "log", plan.__getitem__)
    assert done.resumed and not done.missed
    _same_end(run, whole)


def test_killed_after_the_checkpoint_at_which_it_stops_it_takes_no_step_more(site, whole, tmp_path):
    """One step more could be another best."""
    run = tmp_path / "run"

    def act() -> int:
        from scu_trainer.train.loops.curriculum import CurriculumLoop

        stock = CurriculumLoop.on_epoch_end

        def on_epoch_end(loop, args, state, control, **others) -> None:
            if control.should_training_stop:
                os.kill(os.getpid(), signal.SIGKILL)
            stock(loop, args, state, control, **others)

        CurriculumLoop.on_epoch_end = on_epoch_end
        return campaign.train(site.flags(run, **STOPS_EARLY))

    assert campaign.Child(act, tmp_path / "log").wait().code == -signal.SIGKILL
    ended = campaign.Child(lambda: campaign.train(site.flags(run, **STOPS_EARLY)), tmp_path / "log").wait()
    assert ended.code == 0 and "resuming from" in ended.said, ended.said
    _same_end(run, whole)
