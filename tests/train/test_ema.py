"""The moving average of the weights: what it is, who sees it, and that training does not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import TrainerCallback

from scu_trainer.errors import CheckpointError, ControlError, SettingsError
from scu_trainer.settings import RegularizationSettings
from scu_trainer.settings.efficiency import EfficiencySettings
from scu_trainer.train.loops.weight_average import WeightAverage
from tests import processes
from tests.tiny import Rows, conv_net, images, llama, lora, same, trained, weights_of
from tests.train.stepwise import Recorder
from tests.train.test_resume import StopAt

ROOT = Path(__file__).resolve().parents[2]

EMA = EfficiencySettings(ema_decay=0.9)
LONG = {"max_steps": 6, "gradient_accumulation_steps": 2}


def by_hand(weights: list[dict[str, torch.Tensor]], decay: float = 0.9) -> dict[str, torch.Tensor]:
    """The average of weights after each step, from the definition."""
    average = {name: tensor.double() for name, tensor in weights[0].items()}
    for n, step in enumerate(weights[1:], start=1):
        d = min(decay, (1 + n) / (10 + n))
        average = {name: d * tensor + (1 - d) * step[name].double() for name, tensor in average.items()}
    return average


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].double(), tensor.double(), rtol=1e-5, atol=1e-7)


class Recorded(TrainerCallback):
    """Weights of the model at each evaluation's first batch, seen from a hook, and after it."""

    def __init__(self, model) -> None:
        self.inside: list[dict[str, torch.Tensor]] = []
        model.register_forward_pre_hook(lambda module, args: None if module.training else self._note(module))

    def _note(self, module) -> None:
        self.inside.append(weights_of(module))


MODELS = {"full": lambda: llama(layers=1), "lora": lambda: lora(llama(layers=1), lora_dropout=0.1)}


@pytest.mark.parametrize("kind", MODELS)
def test_it_is_the_average_and_training_does_not_see_it(tmp_path, kind):
    """Also with S under control: the average follows the pulled weights."""
    scu, off, on = RegularizationSettings(target_s=0.02), Recorder(), Recorder()
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": Rows(4)}
    stock = trained(MODELS[kind](), tmp_path / "off", scu, callbacks=[off], **LONG, **evaluated)
    found = trained(MODELS[kind](), tmp_path / "on", scu, callbacks=[on], efficiency=EMA, **LONG, **evaluated)
    assert all(same(a, b) for a, b in zip(off.weights, on.weights, strict=True))
    assert found.regularizer.state.lam > 0, "nothing was pulled"
    assert_close(weights_of(found.model), by_hand(on.weights))
    assert not same(weights_of(found.model), weights_of(stock.model))


def test_evaluations_use_it_and_give_the_weights_back(tmp_path):
    model, steps = llama(layers=1), Recorder()
    seen, evaluated = Recorded(model), {"eval_strategy": "steps", "eval_steps": 3, "eval_dataset": Rows(4)}
    trainer = trained(model, tmp_path, efficiency=EMA, callbacks=[steps], max_steps=6, **evaluated)
    assert_close(seen.inside[0], by_hand(steps.weights[:3]))
    assert_close(seen.inside[-1], by_hand(steps.weights))
    last = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry][-1]
    assert trainer.evaluate()["eval_loss"] == last


def test_statistics_of_batch_norm_are_averaged_too(tmp_path):
    steps = Recorder()
    trainer = trained(conv_net(), tmp_path, efficiency=EMA, dataset=images(), callbacks=[steps])
    names = ["norm.running_mean", "norm.running_var"]
    found = {name: dict(trainer.model.named_buffers())[name] for name in names}
    assert_close(found, by_hand([{name: step[name] for name in names} for step in steps.buffers]))


def test_bfloat16_weights_are_averaged_in_float32(tmp_path):
    """With 0.999 a bfloat16 average would never move."""
    trainer = trained(llama(layers=1).bfloat16(), tmp_path, efficiency=EMA, save_strategy="steps", save_steps=6)
    saved = load_file(tmp_path / "checkpoint-6" / "ema.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert same(weights_of(trainer.model), {name: saved[name].bfloat16() for name in weights_of(trainer.model)})


def test_it_does_not_wait_for_a_card(tmp_path):
    average = trained(llama(layers=1), tmp_path, efficiency=EMA, max_steps=1).loop("weight_average")
    with FakeTensorMode():  # asked for its content, a tensor raises
        average._averages = [torch.empty(3, device="cuda")]
        for _ in range(2):
            average._add([torch.empty(3, device="cuda", dtype=torch.bfloat16)])
    assert average._count == 3


def test_frozen_weights_have_no_second_copy(tmp_path):
    model = lora(llama(layers=1))
    trainer = trained(model, tmp_path, efficiency=EMA)
    averaged = sum(p.numel() for p in trainer.loop("weight_average")._averages)
    assert averaged == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("kind", MODELS)
def test_resumed_is_uninterrupted_bit_for_bit(tmp_path, kind):
    whole = trained(MODELS[kind](), tmp_path / "whole", efficiency=EMA, **LONG)
    stopped = trained(MODELS[kind](), tmp_path / "parts", efficiency=EMA, callbacks=[StopAt(3)], **LONG)
    assert not same(weights_of(stopped.model), weights_of(whole.model))
    resumed = trained(MODELS[kind](), tmp_path / "parts", efficiency=EMA, resume=True, **LONG)
    assert same(weights_of(resumed.model), weights_of(whole.model))


def test_checkpoints_keep_the_weights_themselves(tmp_path):
    steps = Recorder()
    trained(llama(layers=1), tmp_path, efficiency=EMA, callbacks=[steps], save_strategy="steps", save_steps=6)
    saved = load_file(tmp_path / "checkpoint-6" / "model.safetensors")
    raw = {name: tensor for name, tensor in steps.weights[-1].items() if name in saved}
    assert raw and same({name: saved[name] for name in raw}, raw)


def test_the_best_model_is_the_average_of_its_step(tmp_path):
    steps = Recorder()
    best = {"load_best_model_at_end": True, "metric_for_best_model": "step", "greater_is_better": False}
    every = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    numbers = iter(range(10))
    changes = {"compute_metrics": lambda p: {"step": next(numbers)}, "eval_dataset": Rows(4), **best, **every}
    trainer = trained(llama(layers=1), tmp_path, efficiency=EMA, callbacks=[steps], **changes)
    assert trainer.state.best_global_step == 2
    assert_close(weights_of(trainer.model), by_hand(steps.weights[:2]))


def test_the_best_model_without_averages_in_checkpoints_is_refused(tmp_path):
    every = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    changes = {"load_best_model_at_end": True, "save_only_model": True, "eval_dataset": Rows(4), **every}
    with pytest.raises(SettingsError, match="drop save_only_model"):
        trained(llama(layers=1), tmp_path, efficiency=EMA, **changes)
    average = trained(llama(layers=1), tmp_path, efficiency=EMA, max_steps=1).loop("weight_average")
    with pytest.raises(CheckpointError, match=r"holds no ema\.safetensors"):
        average._load_averages(tmp_path)


def test_it_says_whose_s_it_is(tmp_path):
    lines = [
        trained(llama(layers=1), tmp_path, scu, efficiency=EMA, max_steps=1).loop("weight_average").opening_lines()[0]
        for scu in (None, RegularizationSettings(target_s=0.02))
    ]
    assert "S is" not in lines[0] and lines[1].endswith(
        "S is measured on the weights in training, not on their average"
    )


def test_off_keeps_no_file(tmp_path):
    trained(llama(layers=1), tmp_path, efficiency=EfficiencySettings(), save_strategy="steps", save_steps=6)
    assert not list(tmp_path.rglob("ema*"))


def test_a_checkpoint_without_averages_is_refused(tmp_path):
    trained(llama(layers=1), tmp_path, save_strategy="steps", save_steps=3)
    with pytest.raises(CheckpointError, match=r"holds no ema\.safetensors"):
        trained(llama(layers=1), tmp_path, efficiency=EMA, resume=str(tmp_path / "checkpoint-3"))


def test_averages_of_other_weights_are_refused(tmp_path):
    trained(llama(layers=1), tmp_path, efficiency=EMA, save_strategy="steps", save_steps=3)
    average = trained(llama(layers=2), tmp_path / "other", efficiency=EMA).loop("weight_average")
    with pytest.raises(CheckpointError, match="a different set of weights"):
        average._load_averages(tmp_path / "checkpoint-3")


class Unfreeze(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.lm_head.weight.requires_grad_(True)


def test_weights_that_join_on_the_way_are_refused(tmp_path):
    model = llama(layers=1)
    model.lm_head.weight.requires_grad_(False)
    with pytest.raises(ControlError, match="set of trained weights changed"):
        trained(model, tmp_path, efficiency=EMA, callbacks=[Unfreeze()])


def test_sharded_weights_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("scu_trainer.train.loops.weight_average.is_sharded", lambda trainer: True)
    with pytest.raises(ControlError, match="ZeRO-3 and FSDP"):
        WeightAverage(None, 0.9)


# -- two ranks; this file is also the program that both execute --------------------------------------------------------

BATCH_NORM = {"dataset": images(), "per_device_train_batch_size": 4, "max_steps": 4}


def state_of(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def main(folder: Path) -> None:
    settings = EfficiencySettings(ema_decay=0.9, throughput=True, peak_tflops=1.0)
    saves = {"save_strategy": "steps", "save_steps": 2, "ddp_timeout": 60}
    whole = trained(conv_net(), folder, efficiency=settings, **saves, **BATCH_NORM)
    torch.distributed.barrier()
    resume = str(folder / "checkpoint-2")
    resumed = trained(conv_net(seed=3), folder / "resumed", efficiency=settings, resume=resume, **saves, **BATCH_NORM)
    found = {
        "whole": state_of(whole.model),
        "resumed": state_of(resumed.model),
        "figures": whole.loop("throughput").measured(),
    }
    torch.save(found, folder / f"rank{os.environ['RANK']}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_ranks_have_one_average(tmp_path):
    done = processes.run([__file__, tmp_path], ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in (0, 1))
    assert same(first["whole"], second["whole"])
    for rank in (first, second):
        trained_names = [name for name in rank["whole"] if "running" not in name]
        assert same({n: rank["resumed"][n] for n in trained_names}, {n: rank["whole"][n] for n in trained_names})
    rates = first["figures"]
    assert rates["devices"] == 2 and rates["mfu"] == pytest.approx(rates["tflops"] / 2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
