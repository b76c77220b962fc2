"""Trained weights in bfloat16: small steps act, by chance in the mean; and who loses them is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from scu_trainer.cli import configuration, train
from scu_trainer.errors import SettingsError
from scu_trainer.hardware.optimizers import preserves_small_updates
from scu_trainer.settings import MemorySettings, RegularizationSettings
from tests import tiny
from tests.tiny import llama, same, trained, weights_of
from tests.train.test_resume import StopAt

pytest.importorskip("torchao", reason="torchao is not installed")

STOCHASTIC = {"optim": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=True"}
SMALL = {"learning_rate": 2e-5, "max_steps": 12, "weight_decay": 0.0}
"""A step of this size is less than half of the last digit of most weights."""


@pytest.fixture(autouse=True)
def without_compiling():
    with torch.compiler.set_stance("force_eager"):
        yield


def moved(folder, **changes) -> dict[str, torch.Tensor]:
    """How far each weight has come, in float32."""
    model = llama().to(changes.pop("dtype"))
    start = {name: weight.float() for name, weight in weights_of(model).items()}
    trainer = trained(model, folder, **SMALL, **changes)
    return {name: weight.float() - start[name] for name, weight in weights_of(trainer.model).items()}


def test_small_steps_act_in_the_mean(tmp_path):
    """Along the way of float32 weights: a step that is lost makes it shorter, rounding by chance only adds noise."""
    exact = moved(tmp_path / "exact", dtype=torch.float32, optim="adamw_torch_8bit")
    naive = moved(tmp_path / "naive", dtype=torch.bfloat16, optim="adamw_torch_8bit")
    chance = moved(tmp_path / "chance", dtype=torch.bfloat16, **STOCHASTIC)
    names = [name for name in exact if "norm" not in name]  # weights of 1: their digits are coarser still

    def share(found: dict[str, torch.Tensor]) -> float:
        return float(sum((found[n] * exact[n]).sum() for n in names) / sum(exact[n].square().sum() for n in names))

    assert share(naive) < 0.6
    assert share(chance) == pytest.approx(1.0, abs=0.1)


def test_a_resumed_run_rounds_alike(tmp_path):
    """Bit for bit: the state of torch's random numbers is a part of a checkpoint."""
    run = {**STOCHASTIC, "max_steps": 6, "memory": MemorySettings()}
    whole = trained(llama().bfloat16(), tmp_path / "whole", **run)
    trained(llama().bfloat16(), tmp_path / "parts", callbacks=[StopAt(3)], **run)
    again = trained(llama(seed=3).bfloat16(), tmp_path / "parts", resume=True, **run)
    assert {weight.dtype for weight in again.model.parameters()} == {torch.bfloat16}
    assert same(weights_of(again.model), weights_of(whole.model))


class OwnMoments(torch.optim.Optimizer):
    """Keeps its average in float32, as people write it for weights in 16 bits."""

    def __init__(self, weights, lr):
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for weight in (weight for group in self.param_groups for weight in group["params"]):
            mean = self.state[weight].setdefault("mean", torch.zeros_like(weight, dtype=torch.float32))
            mean.lerp_(weight.grad.float(), 0.1)
            weight.sub_(mean.to(weight.dtype))


class OwnLists(OwnMoments):
    """Keeps several in a list, as Shampoo and SOAP do."""

    @torch.no_grad()
    def step(self, closure=None):
        for weight in (weight for group in self.param_groups for weight in group["params"]):
            (mean,) = self.state[weight].setdefault("means", [torch.zeros_like(weight, dtype=torch.float32)])
            mean.mul_(0.9).add_(weight.grad, alpha=0.1)
            weight.sub_(mean.to(weight.dtype))


IN_32_BITS = {
    "adafactor": {"optim": "adafactor"},
    "nadam": {"optimizer_cls_and_kwargs": (torch.optim.NAdam, {"lr": 1e-2})},
    "one's own": {"optimizer_cls_and_kwargs": (OwnMoments, {"lr": 1e-2})},
    "in lists": {"optimizer_cls_and_kwargs": (OwnLists, {"lr": 1e-2})},
}


@pytest.mark.parametrize("kind", IN_32_BITS)
def test_state_in_32_bits_is_resumed_in_32_bits(tmp_path, kind):
    run = {**IN_32_BITS[kind], "max_steps": 6, "memory": MemorySettings()}
    whole = trained(llama().bfloat16(), tmp_path / "whole", **run)
    trained(llama().bfloat16(), tmp_path / "parts", callbacks=[StopAt(3)], **run)
    again = trained(llama(seed=3).bfloat16(), tmp_path / "parts", resume=True, **run)
    assert same(weights_of(again.model), weights_of(whole.model))


def test_state_is_cast_with_weights_that_are_resumed_in_another_type(tmp_path):
    run = {"optim": "adamw_torch", "max_steps": 6, "memory": MemorySettings()}
    trained(llama(), tmp_path, callbacks=[StopAt(3)], **run)
    again = trained(llama().bfloat16(), tmp_path, resume=True, **run)
    assert {entry["exp_avg"].dtype for entry in again.optimizer.state.values()} == {torch.bfloat16}


def test_all_loops_act(tmp_path):
    scu = RegularizationSettings(law="fixed", lambda_init=0.5, control_frequency=1)
    run = {**STOCHASTIC, "memory": MemorySettings(max_batch_size=2), "max_steps": 4}
    trainer = trained(llama().bfloat16(), tmp_path, scu, **run)
    assert trainer.regularizer.state.lam > 0 and trainer.micro_batches.loop.statistics.chunks > 4


@pytest.mark.parametrize(
    ("optim", "optim_args", "keeps"),
    [
        ("adamw_torch_8bit", "bf16_stochastic_round=True", True),
        ("adamw_torch_4bit", "block_size=128, bf16_stochastic_round=yes", True),
        ("adamw_torch_8bit", "bf16_stochastic_round=False", False),
        ("adamw_torch_8bit", None, False),
        ("adamw_bnb_8bit", "bf16_stochastic_round=True", False),
        ("stable_adamw", None, True),
        ("sgd", None, False),
    ],
)
def test_which_optimizers_preserve_small_updates(optim, optim_args, keeps):
    assert preserves_small_updates(optim, optim_args) is keeps


FULL = ["--tuning", "full", "--dtype", "bfloat16", "--use_cpu", "true"]


def test_an_optimizer_is_chosen_where_none_is_named():
    job = configuration.read_job(None, FULL)
    assert (job.training.optim, job.training.optim_args) == ("adamw_torch_8bit", "bf16_stochastic_round=True")
    assert any("small steps would round away" in note for note in job.notes)
    for other in (["--tuning", "lora", *FULL[2:]], [*FULL, "--dtype", "float32"]):
        assert configuration.read_job(None, other).training.optim != "adamw_torch_8bit"


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_8bit", "sgd"])
def test_one_that_loses_them_is_refused(optim):
    job = configuration.read_job(None, [*FULL, "--optim", optim])
    with pytest.raises(SettingsError, match=f"optim: {optim} loses the steps .* drop optim"):
        job.check()


def test_a_run_keeps_its_weights_in_16_bits(tmp_path, capsys):
    model = tiny.saved_llama(tmp_path / "model")
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": f"The cat saw number {i}. " * 8}) + "\n" for i in range(24)))
    words = {"model_name_or_path": model, "dataset": documents, "block_size": 64, "max_steps": 3, "dtype": "bfloat16"}
    words |= {"tuning": "full", "output_dir": tmp_path / "run", "cache_dir": tmp_path / "cache", "use_cpu": "true"}
    words |= {"validation_split_percentage": 25, "learning_rate": 1e-3}
    assert train.main([word for name, value in words.items() for word in (f"--{name}", str(value))]) == 0
    assert "optimizer: adamw_torch_8bit, bf16_stochastic_round=True" in capsys.readouterr().out
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    parts = json.loads((tmp_path / "run" / "scu_metrics.json").read_text())["memory_estimate"]["predicted_parts"]
    assert parts["weights"] == pytest.approx(parts["optimizer"], rel=0.1), "two bytes and two for each weight"


@pytest.mark.parametrize("task", ["image-classification", "word-generation"])
def test_new_models_are_made_in_the_type(tmp_path, task):
    words = ["--task", task, "--max_steps", "1", "--dataset_size", "60", "--output_dir", str(tmp_path / "run"), *FULL]
    words += ["--predict_memory", "false"]
    assert train.main(words) == 0
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values() if tensor.is_floating_point()} == {torch.bfloat16}
