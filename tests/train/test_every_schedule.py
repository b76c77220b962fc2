"""Every ``lr_scheduler_type``, interrupted: rates, weights and scheduler are those of a training that was not."""

from __future__ import annotations

import pytest
from transformers.trainer_utils import SchedulerType

from scu_trainer.settings import MemorySettings, RegularizationSettings
from tests.tiny import Rows, llama, same, trained, weights_of
from tests.train.test_optimizers import StopAt

NEEDS = {
    "warmup_stable_decay": {"num_decay_steps": 3},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_with_restarts": {"num_cycles": 2},
    "reduce_lr_on_plateau": {"patience": 0, "factor": 0.5, "threshold": 10.0},  # nothing is good enough for it
    "greedy": {"patience": 0},
}
every_schedule = pytest.mark.parametrize("kind", [one.value for one in SchedulerType])


def train(folder, kind: str, **changes):
    options = {"lr_scheduler_type": kind, "max_steps": 8, "logging_steps": 1, "memory": MemorySettings()}
    options |= {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": Rows(8, seed=4)}
    if kind not in ("constant", "reduce_lr_on_plateau"):
        options["warmup_steps"] = 2
    if kind in NEEDS:
        options["lr_scheduler_kwargs"] = NEEDS[kind]
    return trained(llama(layers=1), folder, RegularizationSettings(target_s=0.02, sigma=0.5), **options, **changes)


def rates(trainer) -> list[float]:
    return [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]


@every_schedule
def test_resumed_is_uninterrupted(kind, tmp_path):
    whole = train(tmp_path / "whole", kind)
    train(tmp_path / "parts", kind, callbacks=[StopAt(4)])
    resumed = train(tmp_path / "parts", kind, resume=True)
    assert rates(resumed) == rates(whole) and len(rates(whole)) == 8
    assert (len(set(rates(whole))) > 1) == (kind != "constant")
    assert same(weights_of(resumed.model), weights_of(whole.model))
    assert resumed.lr_scheduler.state_dict() == whole.lr_scheduler.state_dict()


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_share_of_the_run_to_warm_up_is_as_many_steps(kind, tmp_path):
    shares = trained(llama(layers=1), tmp_path / "a", lr_scheduler_type=kind, warmup_steps=0.5, logging_steps=1)
    steps = trained(llama(layers=1), tmp_path / "b", lr_scheduler_type=kind, warmup_steps=3, logging_steps=1)
    assert rates(shares) == rates(steps)
