"""Optimizers with 8-bit state, in whole trainings: small, learning, steered by all loops, recoverable, resumable."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import TrainerCallback

from scu_trainer.run_files import read_rows
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings
from tests.faults import OutOfMemoryAt
from tests.tiny import UnevenRows, llama, pad, same, trained, weights_of

OPTIMIZERS = ["adamw_8bit", "adamw_torch_8bit"]
every_optimizer = pytest.mark.parametrize("optim", OPTIMIZERS)


@pytest.fixture(autouse=True)
def without_compiling(request):
    """torchao's arithmetic operation by operation: compiling it takes longer than all tests here together."""
    module = "torchao" if "adamw_torch_8bit" in request.node.name else "bitsandbytes"
    pytest.importorskip(module, reason=f"{module} is not installed")
    with torch.compiler.set_stance("force_eager"):
        yield


def model(seed: int = 0):
    """Its matrices have 4,096 elements and more: smaller ones are kept in float32 by both libraries."""
    return llama(seed, hidden=64, layers=1)


def parts(value) -> list[torch.Tensor]:
    """The plain tensors that a value of the state consists of."""
    if is_traceable_wrapper_subclass(value):
        return [part for name in value.__tensor_flatten__()[0] for part in parts(getattr(value, name))]
    return [value] if isinstance(value, torch.Tensor) else []


def state_of(trainer) -> dict[str, torch.Tensor]:
    """Copies of all tensors of the optimizer's state, by parameter and place. bitsandbytes nests its state_dict()."""
    held = trainer.optimizer.state
    found = {
        f"{parameter}.{name}.{place}": part.detach().clone()
        for parameter, weight in trainer.model.named_parameters()
        for name, value in held.get(weight, {}).items()
        for place, part in enumerate(parts(value))
    }
    assert found or not any(held.values()), "a state that is not looked at"
    return found


def matrices(trainer) -> list[torch.nn.Parameter]:
    """Weights whose state is quantized: transformers has bitsandbytes keep that of embeddings in float32."""
    return [p for name, p in trainer.model.named_parameters() if p.numel() >= 4096 and "embed" not in name]


def state_bytes(trainer) -> int:
    """Of the matrices; the table of 256 values that all of them share is not counted."""
    tensors = [
        part for p in matrices(trainer) for value in trainer.optimizer.state[p].values() for part in parts(value)
    ]
    return sum(tensor.nbytes for tensor in tensors if tensor.numel() != 256)


def train(folder, optim: str, regularization=None, **changes):
    return trained(
        model(), folder, regularization, **{"optim": optim, "learning_rate": 3e-3, "max_steps": 8, **changes}
    )


@every_optimizer
def test_the_state_is_a_quarter_and_the_loss_falls_as_with_32_bits(optim, tmp_path):
    small = train(tmp_path / "8", optim, max_steps=24, logging_steps=8)
    full = train(tmp_path / "32", "adamw_torch", max_steps=24, logging_steps=8)
    for matrix in matrices(small):
        kinds = [part.dtype for value in small.optimizer.state[matrix].values() for part in parts(value)]
        assert kinds.count(torch.uint8) == 2
    assert 0.25 <= state_bytes(small) / state_bytes(full) <= 0.3
    losses, expected = ([row["loss"] for row in t.state.log_history if "loss" in row] for t in (small, full))
    assert losses[-1] < losses[0] - 0.5
    assert losses == pytest.approx(expected, rel=0.02)


# -- the three loops ---------------------------------------------------------------------------------------------------


@every_optimizer
def test_regularization_holds_s_at_its_target(optim, tmp_path):
    target = 0.02
    laws = {"free": {"law": "fixed", "lambda_init": 0.0}, "held": {"target_s": target}}
    last = {}
    for name, law in laws.items():
        train(tmp_path / name, optim, RegularizationSettings(sigma=0.5, **law), max_steps=30)
        last[name] = read_rows(tmp_path / name / "scu_history.json")[-1]
    assert last["free"]["s"] > 4 * target
    assert last["held"]["s"] == pytest.approx(target, rel=0.35)  # the loss still falls fast, so S still moves
    assert last["held"]["lambda"] > 0


class FailingSteps(TrainerCallback):
    """One allocation fails inside each optimizer step, at another place each time.

    ``allocated``: tensors in the optimizer's state before the first step.
    """

    def __init__(self) -> None:
        self.allocated: int | None = None
        self.modes = contextlib.ExitStack()
        self.raised: list[str] = []

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        if self.allocated is None:
            self.allocated = sum(len(parts(value)) for entry in optimizer.state.values() for value in entry.values())

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.fault = OutOfMemoryAt(state.global_step)
        self.modes.enter_context(self.fault)

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.modes.close()
        self.raised += self.fault.raised


@every_optimizer
def test_out_of_memory_in_the_optimizer_step_changes_no_bit(optim, tmp_path, caplog):
    options = {"memory": MemorySettings(), "data_collator": pad, "dataset": UnevenRows(), "max_steps": 6}
    undisturbed = train(tmp_path / "a", optim, **options)
    faults = FailingSteps()
    with caplog.at_level(logging.WARNING):
        recovered = train(tmp_path / "b", optim, callbacks=[faults], **options)
    assert faults.allocated > 20
    assert len(faults.raised) >= 5
    assert caplog.text.count("out of memory in the optimizer step") == len(faults.raised)
    assert same(weights_of(recovered.model), weights_of(undisturbed.model))
    assert same(state_of(recovered), state_of(undisturbed))


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


@every_optimizer
def test_with_all_loops_resumed_is_uninterrupted_bit_for_bit(optim, tmp_path):
    """With a schedule, so that a learning rate that is not carried over shows."""
    settings = RegularizationSettings(target_s=0.02, sigma=0.5)
    options = {"memory": MemorySettings(), "curriculum": CurriculumSettings("token_budget"), "num_train_epochs": 2}
    options |= {"max_steps": -1, "lr_scheduler_type": "linear", "dataset": UnevenRows(), "data_collator": pad}
    whole = train(tmp_path / "whole", optim, settings, **options)
    train(tmp_path / "parts", optim, settings, callbacks=[StopAt(3)], **options)
    resumed = train(tmp_path / "parts", optim, settings, resume=True, **options)
    assert resumed.state.global_step == whole.state.global_step > 3
    assert same(weights_of(resumed.model), weights_of(whole.model))
    assert same(state_of(resumed), state_of(whole))
    assert resumed.regularizer.state == whole.regularizer.state
    assert resumed.difficulty.scores.tolist() == whole.difficulty.scores.tolist()
