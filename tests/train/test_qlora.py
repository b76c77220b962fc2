"""QLoRA through the real trainer: it learns, the packed base stays, and every loop acts as it does elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from scu_trainer.models.loading.load import load_model, prepare_for_tuning
from scu_trainer.models.quantize import quantizable_layers, quantized_modules
from scu_trainer.run_files import read_rows
from scu_trainer.settings import CurriculumSettings, MemorySettings, ModelSettings, RegularizationSettings
from scu_trainer.train.loss.rows.model_loss import obstacle_to_headless
from tests import tiny
from tests.faults import fail_above_tokens, fail_in_backward
from tests.tiny import UnevenRows, pad, same, trained, weights_of
from tests.train.test_resume import StopAt

BITS = {"nf4": {}, "int8": {"load_in_8bit": True}}
UNEVEN = {"dataset": UnevenRows(), "data_collator": pad}


@pytest.fixture(scope="session")
def bases(tmp_path_factory) -> dict[str, Path]:
    folders = {"llama": tiny.llama(hidden=64), "granite": tiny.granite_hybrid()}
    for name, model in folders.items():
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
    return folders


@pytest.fixture(params=BITS)
def qlora(request, bases) -> Callable:
    """``qlora()`` -> a Llama whose layers are packed, with new adapters of a seed."""
    return lambda seed=0, **changes: adapted(bases["llama"], seed, **BITS[request.param], **changes)


def adapted(base: Path, seed: int = 0, **changes):
    settings = ModelSettings(str(base), tuning="qlora", mixed_precision="no", **changes)
    torch.manual_seed(seed)
    return prepare_for_tuning(load_model(settings), settings)


def base_of(model) -> dict[str, torch.Tensor]:
    """Everything but the adapters, with the scales of packed weights."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if "lora_" not in name}


def held_out_loss(model) -> float:
    rows = tiny.Rows(seed=5).tokens
    with torch.no_grad():
        return float(model.eval()(input_ids=rows, labels=rows).loss)


# -- it learns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("family", ["llama", "granite"])
def test_the_loss_falls_and_the_base_stays(bases, tmp_path, family, bits):
    """An evaluation comes first, as in a run: it must not disturb the training after it."""
    model = adapted(bases[family], **BITS[bits])
    before, loss = base_of(model), held_out_loss(model)
    assert any(tensor.dtype in (torch.uint8, torch.int8) for tensor in before.values())
    trainer = trained(model, tmp_path, max_steps=12)
    assert held_out_loss(trainer.model) < loss - 0.2
    assert same(base_of(trainer.model), before)
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in weights_of(trainer.model).items())


def test_an_8_bit_optimizer_on_top(qlora, tmp_path):
    """From 4,096 weights on its state has 8 bits; the largest adapters here have that many."""
    model = qlora(lora_r=32)
    loss = held_out_loss(model)
    trainer = trained(model, tmp_path, optim="adamw_8bit", max_steps=12)
    assert torch.uint8 in {state["state1"].dtype for state in trainer.optimizer.state.values()}
    assert held_out_loss(trainer.model) < loss - 0.2


def size_of_b(model) -> float:
    return sum(float(weight.square().sum()) for name, weight in weights_of(model).items() if "lora_B" in name)


# -- the loops ---------------------------------------------------------------------------------------------------------


def test_regularization_tracks_and_acts(qlora, tmp_path):
    settings = RegularizationSettings(target_s=0.01)
    free = trained(qlora(), tmp_path / "free", None, max_steps=12)
    held = trained(qlora(), tmp_path / "held", settings, max_steps=12)
    rows = read_rows(tmp_path / "held" / "scu_history.json")
    assert rows[0]["lambda"] == 0 < rows[-1]["lambda"] and 0 < rows[0]["s"] < rows[-1]["s"]
    assert not same(weights_of(held.model), weights_of(free.model))
    sizes = [
        sum(float(w.square().sum()) for n, w in weights_of(t.model).items() if "lora_B" in n) for t in (held, free)
    ]
    assert sizes[0] < sizes[1]


def test_chunks_and_a_recovery_give_the_gradients_of_the_whole(qlora, tmp_path):
    changes = {"gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.3, "max_steps": 3, **UNEVEN}
    stock = trained(qlora(), tmp_path / "stock", **changes)
    chunked = trained(qlora(), tmp_path / "chunked", memory=MemorySettings(token_cap=20), **changes)
    statistics = chunked.micro_batches.loop.statistics
    assert statistics.processed_tokens < statistics.stock_tokens, "nothing was cut"
    for name, weight in weights_of(stock.model).items():
        assert (weights_of(chunked.model)[name] - weight).abs().max() <= 1e-5


@pytest.mark.parametrize("site", ["forward", "backward"])
def test_out_of_memory_is_recovered(qlora, tmp_path, site):
    changes = {"memory": MemorySettings(), "optim": "sgd", "learning_rate": 0.3, "max_steps": 3, **UNEVEN}
    unbroken = trained(qlora(), tmp_path / "unbroken", **changes)
    with contextlib.ExitStack() as faults:

        def fail(trainer) -> None:
            names = dict(trainer.model.named_parameters())
            weight = next(p for name, p in names.items() if "layers.0.mlp.up_proj.lora_B" in name)
            fault = fail_above_tokens(trainer.model, 20) if site == "forward" else fail_in_backward(weight, 1)
            faults.enter_context(fault)

        broken = trained(qlora(), tmp_path / "broken", prepare=fail, **changes)
    assert broken.micro_batches.loop.statistics.out_of_memory >= 1
    for name, weight in weights_of(unbroken.model).items():
        assert (weights_of(broken.model)[name] - weight).abs().max() <= 1e-5
    assert same(base_of(broken.model), base_of(unbroken.model))


def test_the_curriculum_keeps_its_statistics(qlora, tmp_path):
    trainer = trained(
        qlora(), tmp_path, curriculum=CurriculumSettings("token_budget"), max_steps=-1, num_train_epochs=2, **UNEVEN
    )
    epochs = read_rows(tmp_path / "curriculum.json")
    assert [epoch["seen"] for epoch in epochs] == 2 * [len(UNEVEN["dataset"])]
    assert torch.isfinite(torch.as_tensor(trainer.difficulty.scores)).all()


def test_the_chunked_loss_may_act_and_is_exact(qlora, tmp_path):
    changes = {"optim": "sgd", "learning_rate": 0.3, "max_steps": 3, **UNEVEN}
    stock = trained(qlora(), tmp_path / "stock", **changes)
    assert obstacle_to_headless(stock) is None
    ours = trained(qlora(), tmp_path / "ours", memory=MemorySettings(chunked_loss="always"), **changes)
    assert ours.loss_path.kind == "headless"
    for name, weight in weights_of(stock.model).items():
        assert (weights_of(ours.model)[name] - weight).abs().max() <= 1e-5


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_resumed_is_uninterrupted_bit_for_bit(qlora, tmp_path):
    settings, changes = RegularizationSettings(target_s=0.01), {"lr_scheduler_type": "linear", "max_steps": 6}
    whole = trained(qlora(lora_dropout=0.1), tmp_path / "whole", settings, **changes)
    trained(qlora(lora_dropout=0.1), tmp_path / "parts", settings, callbacks=[StopAt(3)], **changes)
    resumed = trained(qlora(seed=7, lora_dropout=0.1), tmp_path / "parts", settings, resume=True, **changes)
    assert resumed.state.global_step == 6
    assert same(weights_of(resumed.model), weights_of(whole.model))
    assert same(base_of(resumed.model), base_of(whole.model))


@pytest.mark.parametrize("bits", BITS)
def test_stock_peft_reads_the_adapter(bases, tmp_path, bits):
    """On a base that is packed alike; a checkpoint holds the adapters alone."""
    trainer = trained(adapted(bases["llama"], **BITS[bits]), tmp_path, max_steps=4)
    trainer.save_model(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert same(saved, {n: t.contiguous() for n, t in get_peft_model_state_dict(trainer.model).items()})

    kept = ["lm_head"]
    how = {"load_in_8bit": True} if bits == "int8" else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    nf4 = {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
    packing = BitsAndBytesConfig(llm_int8_skip_modules=kept, **how, **({} if bits == "int8" else nf4))
    base = AutoModelForCausalLM.from_pretrained(bases["llama"], quantization_config=packing, device_map={"": "cpu"})
    stock = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert len(list(quantized_modules(stock))) == len(quantizable_layers(tiny.llama(hidden=64)))
    ids = tiny.Rows(seed=5).tokens
    # In training mode: stock bitsandbytes evaluates in bfloat16 on some CPUs.
    assert torch.equal(stock.train()(input_ids=ids).logits, trainer.model.train()(input_ids=ids).logits)


@pytest.mark.parametrize("evaluates", [False, True], ids=["", "evaluates"])
def test_a_model_of_ones_own_trains_as_by_the_stock_trainer(bases, tmp_path, evaluates):
    """Which on a CPU with avx512_bf16 an evaluation would change: the memory loop tests the loss without a gradient."""
    packing = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)

    def run(name: str, **given) -> dict[str, torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(bases["llama"], quantization_config=packing)
        torch.manual_seed(0)
        trainer = trained(tiny.lora(model), tmp_path / name, max_steps=4, learning_rate=1e-2, **UNEVEN, **given)
        return weights_of(trainer.model)

    evaluation = {"eval_dataset": UnevenRows(8, seed=3), "eval_strategy": "steps", "eval_steps": 1} if evaluates else {}
    expected, found = run("stock"), run("memory", memory=MemorySettings(), **evaluation)
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected if "lora_" in name) < 1e-5


# -- checkpointing of activations --------------------------------------------------------------------------------------


def test_checkpointing_gives_the_same_gradients(qlora):
    ids = tiny.Rows(4).tokens

    def gradients(checkpointed: bool) -> dict[str, torch.Tensor]:
        model = qlora(lora_dropout=0.1)
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(3)
        model.train()(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    assert same(gradients(True), gradients(False))
