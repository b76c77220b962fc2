"""Weights counted from a config alone."""

from __future__ import annotations

import pytest

from scu_trainer.errors import ModelError
from scu_trainer.models.loading.sizes import weight_counts
from tests.tiny import llama


@pytest.mark.parametrize(("dtype", "stored"), [("float32", 4.0), ("bfloat16", 2.0), (None, 2.0)])
def test_counts_are_those_of_the_loaded_model(tmp_path, dtype, stored):
    model = llama()
    model.config.dtype = dtype
    model.config.save_pretrained(tmp_path)
    layers = [model.get_submodule(f"model.layers.{i}") for i in range(2)]
    linear = sum(weight.numel() for layer in layers for name, weight in layer.named_parameters() if "norm" not in name)
    counts = weight_counts(str(tmp_path))
    assert counts["weights"] == sum(weight.numel() for weight in model.parameters())
    assert 0 < counts["linear_weights"] <= linear
    assert counts["stored_bytes"] == stored


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ModelError, match=r"without config.json"):
        weight_counts(str(tmp_path))


def test_a_checkpoint_in_shards_is_called_one(tmp_path):
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    with pytest.raises(ModelError, match=r"a checkpoint that FSDP wrote in shards.* resume that run"):
        weight_counts(str(tmp_path))


def test_an_adapter_of_a_base_that_is_not_here(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "gone_base"}')
    with pytest.raises(ModelError, match=r"load the configuration of 'gone_base'.*adapter_config.json names that base"):
        weight_counts(str(tmp_path))
