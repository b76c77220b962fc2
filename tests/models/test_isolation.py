"""Whether packed documents see each other: what a configuration lets expect, and what the model itself says."""

from __future__ import annotations

import numpy
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from scu_trainer.data.text.collate import Collator
from scu_trainer.data.text.packing import NumberedDocument, packed, windows
from scu_trainer.errors import ModelError
from scu_trainer.models.isolation import MEASURED, TOLERANCE, declared_leak, has_all_weights, isolates, leak
from scu_trainer.settings import DataSettings
from scu_trainer.train.tasks.packing import Packing
from tests import tiny

VOCAB = 64
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 16},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "stablelm": {},
    "starcoder2": {},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "gpt_neox": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 2, "n_head": 4},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mamba": {"state_size": 8},
    "mamba2": {"head_dim": 8, "num_heads": 8, "n_groups": 1, "state_size": 8},
    "rwkv": {"attention_hidden_size": 32},
    "recurrent_gemma": {"lru_width": 32, "head_dim": 8, "num_hidden_layers": 3},
    "jamba": {"num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8,
              "use_mamba_kernels": False},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "num_experts": 0,
                   "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
                   "linear_value_head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}  # fmt: skip
DECLARED = {"mamba", "mamba2", "rwkv", "recurrent_gemma", "jamba", "qwen3_next", "lfm2", "bloom"}
NOT_PACKED = DECLARED | {"opt"}


def model_of(family: str, **changes) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def second_document_loss(model: torch.nn.Module, rows: list[dict], start: int) -> float:
    """Mean loss of the last document of the rows, whose labels begin at ``start`` of the last row."""
    batch = Collator(pad_token_id=0)(rows)
    labels = batch.pop("labels")
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits[-1]
    return float(torch.nn.functional.cross_entropy(logits[start:-1], labels[-1, start + 1 :]))


def columns(row) -> dict:
    return {"input_ids": row.input_ids, "labels": row.labels, "position_ids": row.position_ids}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_is_learned_as_if_it_stood_alone(family):
    """Through the rows and the collator of a training that says nothing of packing."""
    model, chance = model_of(family), numpy.random.default_rng(0)
    first, second = (
        NumberedDocument(number, ids, ids)
        for number, ids in enumerate(chance.integers(3, VOCAB, (2, 14)).astype("int32"))
    )
    settings = DataSettings(block_size=64)
    chosen = Packing.expected(settings, model.config).tested_on(model, VOCAB)
    assert (declared_leak(model.config) is not None) == (family in DECLARED)
    applied = chosen.applied(settings)
    assert applied.packing == applied.isolate_documents == isolates(model, VOCAB) == (family not in NOT_PACKED)
    rows = list(packed([first, second], 64, isolate=True) if applied.packing else windows([first, second], 64))
    alone = [columns(row) for row in (packed([second], 64, True) if applied.packing else windows([second], 64))]
    together = [columns(row) for row in rows]
    if not applied.packing:
        together, alone = ([{**row, "position_ids": None} for row in part] for part in (together, alone))
        for row in (*together, *alone):
            del row["position_ids"]
    start = len(first.input_ids) if applied.packing else 0
    expected, found = second_document_loss(model, alone, 0), second_document_loss(model, together, start)
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_keeps_packed_documents_apart(attention):
    model = tiny.llama(attn_implementation=attention)
    assert leak(model, tiny.VOCAB)[0] < TOLERANCE / 10, "rounding alone should be far below the tolerance"


def test_isolation_that_is_demanded_and_not_there_is_an_error():
    model, data = tiny.granite_hybrid(), DataSettings(isolate_documents=True)
    with pytest.raises(ModelError, match=r"isolate_documents: GraniteMoeHybridForCausalLM.*set packing: false"):
        Packing.expected(data, model.config).tested_on(model, tiny.VOCAB)


def test_what_was_chosen_is_said_with_the_reason():
    llama, hybrid = tiny.llama(), tiny.granite_hybrid()
    data = DataSettings()
    assert Packing.expected(data, llama.config).tested_on(llama, tiny.VOCAB).line() == (
        "rows: packed, documents isolated: LlamaForCausalLM keeps packed documents apart"
    )
    assert "rows: one document each, not packed, because granitemoehybrid has layers that carry their state" in (
        Packing.expected(data, hybrid.config).tested_on(hybrid, tiny.VOCAB).line()
    )


def test_the_old_way_by_one_flag():
    data = DataSettings(isolate_documents=False)
    chosen = Packing.expected(data, tiny.granite_hybrid().config)
    assert chosen.applied(data) == data and "isolate_documents: false" in chosen.line()


def test_a_model_that_lies_in_parts_is_not_asked():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny.llama().config)
    assert not has_all_weights(model)
    chosen = Packing.expected(DataSettings(), model.config).tested_on(model, tiny.VOCAB)
    assert chosen.isolates and "cannot be tested; others of its family" in chosen.line()
    unknown = AutoConfig.for_model("cohere")
    chosen = Packing.expected(DataSettings(), unknown).tested_on(model, tiny.VOCAB)
    assert not chosen.isolates and "its family was not tested" in chosen.line()


def test_the_measured_families_are_those_of_this_file():
    assert set(FAMILIES) - NOT_PACKED == MEASURED


def test_a_configuration_that_is_wrong_about_the_model_is_not_believed():
    """Positions that never restart: the model sees the whole row."""
    model = tiny.llama()

    def one_document(module, arguments, inputs):
        inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1])[None]
        return arguments, inputs

    model.register_forward_pre_hook(one_document, with_kwargs=True)
    assert leak(model, tiny.VOCAB)[0] > 10 * TOLERANCE
    expected = Packing.expected(DataSettings(), model.config)
    assert expected.isolates and not expected.tested_on(model, tiny.VOCAB).isolates


@pytest.mark.parametrize("family", ["llama", "olmo2", "phi3", "gpt2", "opt"])
def test_in_16_bits_rounding_is_no_leak(family):
    assert isolates(model_of(family).bfloat16(), VOCAB) == (family not in NOT_PACKED)


def test_adapters_change_nothing_and_the_mode_stays():
    model = tiny.lora(tiny.llama()).train()
    assert isolates(model, tiny.VOCAB) and model.training


def test_vocabularies_smaller_than_the_probe_are_fine():
    assert isolates(tiny.llama(), 5)
