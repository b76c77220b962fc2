"""A config.json that asks for the impossible is refused before anything is built."""

from __future__ import annotations

import json

import pytest
from transformers import LlamaConfig

from scu_trainer.errors import ModelError
from scu_trainer.models.loading import possible
from scu_trainer.models.loading.possible import require_room_for, require_sane_config


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**9},
        {"n_layer": 5000},
        {"text_config": {"num_hidden_layers": 10**12}},
        {"num_local_experts": 10**6},
        {"hidden_size": 10**30},
        {"vocab_size": -(10**30)},
        {"num_hidden_layers": -1},
        {"text_config": {"n_layer": -2}},
    ],
    ids=str,
)
def test_counts_that_nobody_counts(tmp_path, change):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **change}))
    with pytest.raises(ModelError, match=r"must be .* or (less|more), correct it"):
        require_sane_config(tmp_path / "config.json")


def test_ordinary_numbers_pass(tmp_path):
    LlamaConfig(vocab_size=200_000, max_position_embeddings=2**20, rope_theta=5e8).save_pretrained(tmp_path)
    require_sane_config(tmp_path / "config.json")


@pytest.mark.parametrize("content", [b"", b"[", b"[]", b"3", b"\xff\xfe", b"[" * 5000])
def test_no_config_at_all(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match="cannot load the tokenizer of"):
        require_sane_config(tmp_path / "config.json", "tokenizer")


def test_weights_are_compared_with_the_memory_there_is(monkeypatch):
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=100, num_attention_heads=2
    )
    monkeypatch.setattr(possible, "_memory_bytes", lambda: 1000)
    with pytest.raises(ModelError, match=r"it has [0-9,]+ weights, which take .* device_map: auto"):
        require_room_for(config, "mine", 4.0, False)
    monkeypatch.setattr(possible, "_memory_bytes", lambda: 2**40)
    require_room_for(config, "mine", 4.0, False)
