"""fp16: a step that the loss scaler skips is skipped by the schedule and by every loop, whatever the optimizer.

The scaler is torch's own for the CPU, given to accelerate as it would make one on a GPU.
"""

from __future__ import annotations

import math

import pytest
import torch
from transformers import TrainerCallback

from scu_trainer.run_files import read_rows
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings, SafetySettings
from scu_trainer.settings.efficiency import EfficiencySettings
from scu_trainer.train.loops.overflow import OverflowWatch
from scu_trainer.train.trainer import SCUTrainer
from tests import tiny
from tests.faults import FakeGauge, oom

STEPS, SKIPPED_STEP = 5, 3
LOOPS = {
    "memory": {"memory": MemorySettings()},
    "regularization": {"regularization": RegularizationSettings(target_s=1e-6), "regularization_tokens": 1e4},
    "average of weights": {"efficiency": EfficiencySettings(ema_decay=0.9)},
    "curriculum": {"curriculum": CurriculumSettings("noise_guard")},
    "safety": {"safety": SafetySettings()},
}
ALL = {name: value for loop in LOOPS.values() for name, value in loop.items()}


class Overflow(TrainerCallback):
    """The gradient of step ``SKIPPED_STEP`` is infinite. ``scales`` and ``weights`` after every step."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.skipped: list[bool] = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        def overflows(gradient: torch.Tensor) -> torch.Tensor:
            return gradient * math.inf if state.global_step + 1 == SKIPPED_STEP else gradient

        next(p for p in model.parameters() if p.requires_grad).register_hook(overflows)

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.skipped.append(self.trainer.accelerator.optimizer_step_was_skipped)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.scales.append(self.trainer.accelerator.scaler.get_scale())
        self.weights.append(tiny.weights_of(model))


def run(folder, optim: str, **loops):
    seen = Overflow()

    def with_scaler(trainer) -> None:
        seen.trainer = trainer
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        if trainer.micro_batches is not None:
            trainer.micro_batches.loop.gauge = FakeGauge(2**40)

    changes = {"optim": optim, "max_steps": STEPS, "lr_scheduler_type": "linear", "max_grad_norm": 0.0}
    trainer = tiny.trained(
        tiny.llama(layers=1), folder, prepare=with_scaler, callbacks=[seen], dataset=tiny.Rows(), **changes, **loops
    )
    assert seen.scales == [1024.0] * (SKIPPED_STEP - 1) + [512.0] * (STEPS - SKIPPED_STEP + 1)
    return trainer, seen


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("loop", [*LOOPS, "all"])
def test_a_step_that_overflows_is_skipped_by_all(tmp_path, optim, loop):
    trainer, seen = run(tmp_path, optim, **(ALL if loop == "all" else LOOPS[loop]))
    assert seen.skipped == [step == SKIPPED_STEP for step in range(1, STEPS + 1)]
    assert trainer.lr_scheduler.last_epoch == STEPS - 1
    assert tiny.same(seen.weights[SKIPPED_STEP - 1], seen.weights[SKIPPED_STEP - 2]), "lambda has pulled"
    assert not tiny.same(seen.weights[-1], seen.weights[SKIPPED_STEP - 1])
    if trainer.regularizer is not None:
        rows = read_rows(tmp_path / "scu_history.json")
        assert [row["step"] for row in rows] == [step for step in range(1, STEPS + 1) if step != SKIPPED_STEP]
        assert rows[-1]["shrink"] > 0
    if trainer.loop("weight_average") is not None:
        assert trainer.loop("weight_average")._count == STEPS - 1


def test_clipping_that_ran_out_of_memory_under_a_scaler_is_repeated(tmp_path, monkeypatch):
    """Taking the scale out writes to the gradients: that is done first, and once."""
    clip, norms, failures = torch.nn.utils.clip_grad_norm_, [], iter([oom(), None, None])

    def failing(*args, **kwargs):
        if (error := next(failures)) is not None:
            raise error
        norms.append(clip(*args, **kwargs))
        return norms[-1]

    def trained(folder):
        def unscaling(trainer) -> None:  # as accelerate does it on a GPU
            scaler = trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            trainer.accelerator.unscale_gradients = lambda optimizer=None: scaler.unscale_(trainer.optimizer.optimizer)

        changes = {"max_steps": 2, "max_grad_norm": 0.5, "memory": MemorySettings(), "memory_gauge": FakeGauge(2**40)}
        return tiny.trained(tiny.llama(layers=1), folder, prepare=unscaling, dataset=tiny.Rows(), **changes)

    expected = trained(tmp_path / "plain")
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", failing)
    found = trained(tmp_path / "faulty")
    assert len(norms) == 2 and float(norms[0]) < 100, "the norm is that of scaled gradients"
    assert tiny.same(tiny.weights_of(found.model), tiny.weights_of(expected.model))


def test_every_loop_off_is_stock(tmp_path):
    """The stock loop moves its schedule there; that is its own affair."""
    trainer, seen = run(tmp_path, "adamw_torch_fused")
    assert seen.skipped == [False] * STEPS and trainer.lr_scheduler.last_epoch == STEPS
    assert not any(isinstance(callback, OverflowWatch) for callback in trainer.callback_handler.callbacks)


def test_the_optimizer_is_left_as_it_was(tmp_path):
    trainer, _ = run(tmp_path, "adamw_torch_fused", **ALL)
    assert not trainer.optimizer.optimizer._optimizer_step_pre_hooks


def test_the_scale_is_read_once_in_a_step(tmp_path, monkeypatch):
    """Reading it waits for the device."""
    reads, read = [], SCUTrainer._loss_scale
    monkeypatch.setattr(SCUTrainer, "_loss_scale", lambda trainer: reads.append(1) or read(trainer))
    run(tmp_path, "adamw_torch", **ALL)
    assert len(reads) == STEPS
