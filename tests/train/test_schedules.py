"""Steps of the learning rate: those of torch's own schedules, in the trainer, with warm-up and with shorter epochs."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR, StepLR
from transformers import TrainerCallback

from scu_trainer.errors import SettingsError
from scu_trainer.run_files import read_rows
from scu_trainer.settings import CurriculumSettings
from scu_trainer.settings.efficiency import EfficiencySettings, check_efficiency
from scu_trainer.train.loops.rate_steps import RateSteps
from scu_trainer.train.trainer import SCUTrainer
from tests.tiny import Rows, arguments, llama, trained

EPOCHS, PER_EPOCH = 7, 3


def sgd(rate: float = 0.5):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)


def rates_of(optimizer, scheduler, steps: int) -> list[float]:
    """Before each of ``steps``."""
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def ours(settings: EfficiencySettings, warmup: int = 0, total: int = EPOCHS * PER_EPOCH) -> list[float]:
    optimizer = sgd()
    loop = RateSteps(settings)
    loop.trainer = SimpleNamespace(args=SimpleNamespace(get_warmup_steps=lambda total_steps: warmup))
    return rates_of(optimizer, loop.scheduler(optimizer, total, PER_EPOCH), total)


@pytest.mark.parametrize(
    ("settings", "torch_schedule"),
    [
        (EfficiencySettings(lr_step_size=2), lambda o: StepLR(o, 2)),
        (EfficiencySettings(lr_step_size=3, lr_gamma=0.5), lambda o: StepLR(o, 3, gamma=0.5)),
        (EfficiencySettings(lr_milestones=[1, 4], lr_gamma=0.2), lambda o: MultiStepLR(o, [1, 4], gamma=0.2)),
    ],
)
def test_epochs_are_those_of_torch(settings, torch_schedule):
    optimizer = sgd()
    by_epoch = rates_of(optimizer, torch_schedule(optimizer), EPOCHS)
    assert len(set(by_epoch)) > 1
    assert ours(settings) == pytest.approx([rate for rate in by_epoch for _ in range(PER_EPOCH)])


def test_shares_of_the_run():
    optimizer = sgd()
    expected = rates_of(optimizer, MultiStepLR(optimizer, [10, 15]), 20)
    assert ours(EfficiencySettings(lr_milestones=[0.5, 0.75]), total=20) == pytest.approx(expected)


def test_warm_up_is_part_of_the_first_epochs():
    plain, warm = ours(EfficiencySettings(lr_step_size=1)), ours(EfficiencySettings(lr_step_size=1), warmup=5)
    assert warm == pytest.approx([rate * min(1.0, step / 5) for step, rate in enumerate(plain)])


def test_a_rate_that_never_falls_is_said(caplog):
    with caplog.at_level(logging.WARNING, "scu_trainer"):
        ours(EfficiencySettings(lr_step_size=EPOCHS))
        assert "never drops" in caplog.text
        caplog.clear()
        ours(EfficiencySettings(lr_step_size=EPOCHS - 1))
    assert not caplog.text


class Rates(TrainerCallback):
    def __init__(self) -> None:
        self.by_step: list[float] = []

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        self.by_step.append(optimizer.param_groups[0]["lr"])


EPOCHWISE = {"max_steps": -1, "num_train_epochs": 3, "lr_scheduler_type": "linear", "save_strategy": "steps"}


def test_in_a_training_that_is_interrupted(tmp_path):
    """32 rows, 4 at a time, 2 batches per step: 4 steps per epoch."""
    settings = EfficiencySettings(lr_milestones=[1, 2])
    changes = {**EPOCHWISE, "save_steps": 5, "gradient_accumulation_steps": 2, "warmup_steps": 2}
    whole, rest = Rates(), Rates()
    trainer = trained(llama(layers=1), tmp_path, efficiency=settings, callbacks=[whole], **changes)
    assert isinstance(trainer.lr_scheduler, LambdaLR)
    expected = [0.0, 0.005, 0.01, 0.01, *[0.001] * 4, *[0.0001] * 4]
    assert whole.by_step == pytest.approx(expected)
    resume = str(tmp_path / "checkpoint-5")
    trained(llama(layers=1), tmp_path, efficiency=settings, callbacks=[rest], resume=resume, **changes)
    assert rest.by_step == whole.by_step[5:]


def test_epochs_stay_epochs_under_a_curriculum_that_shortens_them(tmp_path):
    """The rate falls every two epochs, however many steps they have."""
    rates, changes = Rates(), {**EPOCHWISE, "num_train_epochs": 6, "save_strategy": "no"}
    settings = {"efficiency": EfficiencySettings(lr_step_size=2), "curriculum": CurriculumSettings("infobatch")}
    trained(llama(layers=1), tmp_path, dataset=Rows(64), callbacks=[rates], **settings, **changes)
    steps = [row["steps"] for row in read_rows(tmp_path / "curriculum.json")]
    assert len(steps) == 6 and min(steps) < steps[0], "no epoch became shorter"
    expected = [0.01 * 0.1 ** (epoch // 2) for epoch, count in enumerate(steps) for _ in range(count)]
    assert rates.by_step == pytest.approx(expected)


def test_without_steps_the_stock_schedule_stays(tmp_path):
    stock, found = Rates(), Rates()
    trained(llama(layers=1), tmp_path, callbacks=[stock], lr_scheduler_type="cosine", warmup_steps=2)
    changes = {"efficiency": EfficiencySettings(), "lr_scheduler_type": "cosine", "warmup_steps": 2}
    trained(llama(layers=1), tmp_path, callbacks=[found], **changes)
    assert found.by_step == stock.by_step


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lr_step_size": 0}, "lr_step_size is 0"),
        ({"lr_step_size": 2, "lr_milestones": [3.0]}, "two schedules"),
        ({"lr_milestones": []}, "empty"),
        ({"lr_milestones": [3.0, 2.0]}, "rise"),
        ({"lr_milestones": [False]}, "has False, which must be a number"),
        ({"lr_milestones": [0.0, 2.0]}, "above 0 and rise"),
        ({"lr_milestones": [0.5, 2.0]}, "not both"),
        ({"lr_gamma": 0.5}, "needs lr_step_size"),
        ({"lr_gamma": -1.0, "lr_step_size": 1}, "lr_gamma is -1"),
        ({"ema_decay": 1.0}, "ema_decay is 1"),
        ({"peak_tflops": 0.0, "throughput": True}, "peak_tflops is 0"),
        ({"peak_tflops": 1.0}, "throughput: true"),
        ({"profile_steps": -1}, "profile_steps is -1"),
    ],
)
def test_settings_that_are_refused(fields, words):
    with pytest.raises(SettingsError, match=words):
        EfficiencySettings(**fields)


def test_two_schedules_are_refused(tmp_path):
    settings = EfficiencySettings(lr_step_size=2)
    for kind in ("linear", "constant", "constant_with_warmup"):
        check_efficiency(settings, arguments(tmp_path, lr_scheduler_type=kind))
    with pytest.raises(SettingsError, match=r"lr_scheduler_type: cosine are .* add lr_scheduler_type: constant"):
        check_efficiency(settings, arguments(tmp_path, lr_scheduler_type="cosine"))
    check_efficiency(EfficiencySettings(), arguments(tmp_path, lr_scheduler_type="cosine"))
    with pytest.raises(SettingsError, match="lr_scheduler_kwargs"):
        check_efficiency(settings, arguments(tmp_path, lr_scheduler_kwargs={"num_cycles": 2}))
    in_file = SimpleNamespace(get_value=lambda name: {"type": "WarmupLR"} if name == "scheduler" else None)
    args = SimpleNamespace(lr_scheduler_type="linear", lr_scheduler_kwargs=None, hf_deepspeed_config=in_file)
    with pytest.raises(SettingsError, match="DeepSpeed"):
        check_efficiency(settings, args)


def test_a_schedule_outside_of_train_is_refused(tmp_path):
    """Its epochs have no length there."""
    parts = {"train_dataset": Rows(), "efficiency": EfficiencySettings(lr_step_size=1)}
    trainer = SCUTrainer(llama(layers=1), arguments(tmp_path), **parts)
    with pytest.raises(SettingsError, match=r"let train\(\) create the schedule"):
        trainer.create_optimizer_and_scheduler(10)
