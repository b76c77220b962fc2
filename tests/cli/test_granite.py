"""Granite 4.0 H 1B: what it takes of cards, by shapes; and its architecture at 1/64 of the width, in
eight layers, trained."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.studies.granite_plan import ATTENTION, CARDS, RECIPE, granite_h_1b, planned
from scu_trainer.cli import train
from scu_trainer.data import default_cache_dir, embedded_tokenizer
from scu_trainer.train.memory_estimate.plan import FromConfiguration

STEPS = 2


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The configuration alone: no weight of 1.46 billion is read by a plan."""
    folder = tmp_path_factory.mktemp("granite")
    granite_h_1b().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def traces():
    return {}


@pytest.fixture
def traced_once(traces, monkeypatch):
    """What a step takes depends on no card: cards that are asked about the same settings share it."""
    trace = FromConfiguration._trace

    def shared(self, choice, length):
        if (choice, length) not in traces:
            traces[choice, length] = trace(self, choice, length)
        return traces[choice, length]

    monkeypatch.setattr(FromConfiguration, "_trace", shared)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("small")
    tokenizer = embedded_tokenizer(default_cache_dir(None))
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 8, "mamba_d_state": 16, "mamba_chunk_size": 32, "dtype": "float32"}
    layers = ["attention" if layer in ATTENTION else "mamba" for layer in range(8)]
    config = granite_h_1b(64, vocab_size=len(tokenizer), layer_types=layers, **sizes, **ids)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("card", CARDS)
def test_the_recipe_fits_the_card_with_what_plan_says(whole, traced_once, card):
    report = planned(whole, card)
    assert report["recommended"] is not None
    fits = next(choice for choice in report["choices"] if choice["fits"])
    assert fits["peak_bytes"] * (1 + report["margin"]) <= report["limit_bytes"] * 1.001
    weights = report["predicted"]["parts"]["weights"]
    assert weights == pytest.approx(2 * 1.4615e9, rel=0.03), "bfloat16 as it is stored, and adapters"


@pytest.mark.parametrize(
    "flags",
    [
        {"tuning": "qlora"},
        {"checkpoint_every_layer": "true", "mixed_precision": "bf16"},
        {"torch_compile": "true", "torch_compile_backend": "eager"},
    ],
    ids=lambda flags: "-".join(flags),
)
def test_its_architecture_trains_every_way(small, tmp_path, flags):
    metrics = run(small, tmp_path / "run", **flags)
    assert metrics["steps"] == STEPS and metrics["costs"]["seconds_per_step"] > 0


def test_it_goes_on_bit_for_bit(small, tmp_path):
    run(small, tmp_path / "whole", save_strategy="steps", save_steps=1, save_total_limit=5)
    checkpoint = tmp_path / "whole" / "checkpoint-1"
    run(small, tmp_path / "again", resume_from_checkpoint=checkpoint)
    from safetensors.torch import load_file

    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "again"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def run(model, folder, **flags) -> dict:
    changes = {
        "model_name_or_path": model,
        "block_size": 32,
        "sample_prompts": 0,
        "predict_memory": "false",
        "dataset_size": 8,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "eval_strategy": "no",
        "validation_split_percentage": 0,
        "save_strategy": "no",
        "warmup_steps": 0,
        "mixed_precision": "no",
        "use_cpu": "true",
        "output_dir": folder,
        **flags,
    }
    words = [word for name, value in changes.items() for word in (f"--{name}", str(value))]
    assert train.main(["--config", str(RECIPE), *words]) == 0
    return json.loads((folder / "scu_metrics.json").read_text())
