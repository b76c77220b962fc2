"""Every ``optim`` that runs on a CPU, in whole trainings: out of memory inside its steps, and resumed."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers.training_args import OptimizerNames

from scu_trainer.errors import UserError
from scu_trainer.hardware.optimizer_bytes import state_bytes, uncounted_state
from scu_trainer.hardware.optimizers import OPTIMIZERS, check_optimizer
from scu_trainer.settings import MemorySettings
from scu_trainer.settings.efficiency import EfficiencySettings
from tests.tiny import llama, same, trained, weights_of
from tests.train.test_optimizers import FailingSteps, StopAt, state_of


def runs(name: str) -> bool:
    try:
        check_optimizer(name, "cpu")
    except UserError:
        return False
    return not OPTIMIZERS[name].in_backward


NAMES = [one.value for one in OptimizerNames if runs(one.value)] + ["muon"]
WITH_ARGUMENTS = {
    "sgd": "momentum=0.9",
    "adamw_torch_8bit": "bf16_stochastic_round=False",
}
every_optimizer = pytest.mark.parametrize("optim", NAMES)


@pytest.fixture(autouse=True)
def without_compiling():
    """torchao's arithmetic operation by operation: compiling it takes longer than all tests here together."""
    with torch.compiler.set_stance("force_eager"):
        yield


def train(folder, optim: str, **changes):
    options = {"optim": optim, "memory": MemorySettings(), "max_steps": 6, "learning_rate": 3e-3}
    if optim == "muon":
        options |= {"optim": "adamw_torch_fused", "efficiency": EfficiencySettings(use_muon=True)}
    if optim.startswith(("galore", "apollo")):  # projections change every second step
        options |= {"optim_target_modules": "all-linear", "optim_args": "rank=4,update_proj_gap=2"}
    if optim in WITH_ARGUMENTS:
        options["optim_args"] = WITH_ARGUMENTS[optim]
    if not optim.startswith("schedule_free"):
        options["lr_scheduler_type"] = "linear"
    return trained(llama(hidden=64, layers=1), folder, **options, **changes)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """optim -> weights and state after a whole training; each trainer that is kept would slow garbage collections."""

    @functools.cache
    def of(optim: str):
        trainer = train(tmp_path_factory.mktemp("undisturbed"), optim)
        return weights_of(trainer.model), state_of(trainer)

    return of


pytestmark = pytest.mark.filterwarnings("ignore:This implementation of AdamW:FutureWarning")  # galore-torch, of itself


def test_the_list_is_of_those_that_people_name():
    assert {"adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop", "muon"} <= set(NAMES)


@every_optimizer
def test_out_of_memory_in_its_steps_changes_no_bit(optim, undisturbed, tmp_path):
    faults = FailingSteps()
    recovered = train(tmp_path, optim, callbacks=[faults])
    assert faults.raised or optim == "adamw_torch_fused"  # which allocates nothing that could fail
    weights, state = undisturbed(optim)
    assert same(weights_of(recovered.model), weights) and same(state_of(recovered), state)


@every_optimizer
def test_resumed_is_uninterrupted(optim, undisturbed, tmp_path):
    train(tmp_path, optim, callbacks=[StopAt(3)])
    resumed = train(tmp_path, optim, resume=True)
    assert resumed.state.global_step == 6
    weights, state = undisturbed(optim)
    assert same(weights_of(resumed.model), weights) and same(state_of(resumed), state)


@every_optimizer
def test_what_the_plan_counts_is_in_its_state(optim, undisturbed):
    weights, state = undisturbed(optim)
    sizes = [tensor.nbytes for tensor in state.values() if tensor.numel() > 1]
    count = sum(weight.numel() for weight in weights.values())
    counted = state_bytes(optim, 4 * count, count)
    assert counted <= sum(sizes)
    if counted and optim != "muon" and not optim.endswith(("8bit", "4bit")):  # which keep small weights in 32
        assert sum(sizes) == pytest.approx(counted, rel=0.03)
    assert counted or uncounted_state(optim) or "sgd" in optim or optim == "adafactor"
