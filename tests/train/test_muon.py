"""Muon for matrices and AdamW for the rest: torch's own updates, with all loops, recoverable, resumable."""

from __future__ import annotations

import pytest
import torch

from scu_trainer.errors import ControlError, SettingsError
from scu_trainer.settings import MemorySettings, RegularizationSettings
from scu_trainer.settings.efficiency import EfficiencySettings
from scu_trainer.train.step.muon import MuonWithAdamW, muon_for
from scu_trainer.train.step.recovery.optimizer_state import preallocate
from tests.tiny import llama, lora, same, trained, weights_of
from tests.train.test_optimizers import FailingSteps, StopAt, state_of

MUON = {"efficiency": EfficiencySettings(use_muon=True)}


def train(folder, regularization=None, **changes):
    return trained(llama(layers=1), folder, regularization, **{**MUON, "memory": MemorySettings(), **changes})


def names_in(model, optimizer, with_muon: bool) -> set[str]:
    chosen = {id(p) for g in optimizer.param_groups if ("ns_steps" in g) == with_muon for p in g["params"]}
    return {name for name, p in model.named_parameters() if id(p) in chosen}


def test_hidden_matrices_are_muons_and_the_rest_adams():
    model = llama(layers=1)
    optimizer = muon_for(model, {"model.layers.0.mlp.up_proj.weight"}, 1e-2, 0.1)
    muon, adam = names_in(model, optimizer, True), names_in(model, optimizer, False)
    assert all("proj" in name for name in muon) and len(muon) == 7
    assert adam == {name for name, _ in model.named_parameters()} - muon
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} <= adam
    assert sorted(g["weight_decay"] for g in optimizer.param_groups) == [0.0, 0.0, 0.1]


def test_factors_of_lora_are_matrices():
    model = lora(llama(layers=1))
    optimizer = muon_for(model, (), 1e-2, 0.0)
    assert names_in(model, optimizer, True) == set(weights_of(model))


def test_nothing_for_muon_is_refused():
    with pytest.raises(ControlError, match="none of them is trained; remove use_muon"):
        muon_for(torch.nn.Embedding(4, 4), (), 1e-2, 0.0)


def test_steps_are_those_of_torch_with_state_made_ahead():
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((8, 4), (4, 6), (5,))]
    ours, theirs = ([torch.nn.Parameter(t.clone()) for t in start] for _ in range(2))
    optimizer = MuonWithAdamW([{"params": ours[:2], "weight_decay": 0.1}], [{"params": ours[2:]}], 1e-2)
    muon = torch.optim.Muon(theirs[:2], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(theirs[2:], lr=1e-2)
    assert preallocate(optimizer) == 4 * (32 + 24 + 2 * 5 + 1)
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        for one in (optimizer, muon, adam):
            one.step()
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def test_out_of_memory_in_the_step_changes_no_bit(tmp_path):
    undisturbed, faults = train(tmp_path / "a"), FailingSteps()
    recovered = train(tmp_path / "b", callbacks=[faults])
    assert faults.allocated > 7 and len(faults.raised) >= 5
    assert same(weights_of(recovered.model), weights_of(undisturbed.model))
    assert same(state_of(recovered), state_of(undisturbed))


def test_resumed_is_uninterrupted_with_regularization_and_a_schedule(tmp_path):
    settings = RegularizationSettings(target_s=0.02, sigma=0.5)
    options = {"lr_scheduler_type": "linear", "weight_decay": 0.1}
    whole = train(tmp_path / "whole", settings, **options)
    train(tmp_path / "parts", settings, callbacks=[StopAt(3)], **options)
    resumed = train(tmp_path / "parts", settings, resume=True, **options)
    assert same(weights_of(resumed.model), weights_of(whole.model))
    assert same(state_of(resumed), state_of(whole))
    assert resumed.regularizer.state == whole.regularizer.state


@pytest.mark.parametrize("changes", [{"optim": "sgd"}, {"optim_args": "momentum=0.9"}])
def test_two_optimizers_are_refused(changes, tmp_path):
    with pytest.raises(SettingsError, match="leave optim and optim_args out"):
        train(tmp_path, **changes)


def test_an_optimizer_of_ones_own_beside_is_refused(tmp_path):
    with pytest.raises(
        SettingsError, match="use_muon and your own optimizer were both passed to the trainer; drop one of them"
    ):
        train(tmp_path, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}))
