"""Merged weights are the base and its adapter: in float32 to the last digits, and never packed again."""

from __future__ import annotations

import json

import pytest
import torch
from peft import (
    AdaptionPromptConfig,
    LoraConfig,
    PolyConfig,
    PromptTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, ResNetConfig, ResNetForImageClassification

from scu_trainer.errors import ModelError
from scu_trainer.models.export import export_dtype, read_back, require_same_logits
from scu_trainer.models.loading.adapters import adapter_targets
from scu_trainer.models.loading.load import load_model
from scu_trainer.models.merge import (
    MERGE_TOLERANCE,
    _loaded_from_state,
    _merged,
    check_merge,
    merge_adapter,
    merge_tolerance,
)
from scu_trainer.settings import ModelSettings
from tests import tiny
from tests.offloading import saved, with_adapters


def biased():
    model = tiny.llama(hidden=64, attention_bias=True, mlp_bias=True)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(weight, std=0.1)
    return model


FAMILIES = {
    "llama": lambda: tiny.llama(hidden=64),
    "biased": biased,
    "granite": tiny.granite_hybrid,  # tied head, convolutions, mamba
    "gpt2": lambda: tiny.gpt2(n_embd=64),  # layers that lie the other way round on disk
}
IDS = torch.randint(3, tiny.VOCAB, (4, 24), generator=torch.Generator().manual_seed(0))


def adapted(make, folder, is_quantized: bool = True, adapter=None, **changes):
    """A model of ``make`` with an adapter whose effect is as large as the base's own."""
    if not (folder / "config.json").is_file():
        make().save_pretrained(folder)
    tuning = "qlora" if is_quantized else "lora"
    model = load_model(ModelSettings(model_name_or_path=str(folder), tuning=tuning, **changes))
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=adapter_targets(model), **(adapter or {}))
    model = get_peft_model(model, config)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)
        elif "bias" in name and weight.requires_grad:
            nn.init.normal_(weight)
    return model


# -- the same logits ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize("is_quantized", [True, False], ids=["qlora", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_merged_in_float32_is_the_adapter_in_float32(tmp_path, family, is_quantized):
    model = adapted(FAMILIES[family], tmp_path, is_quantized, mixed_precision="no")
    merged = merge_adapter(model, torch.float32)
    assert check_merge(model, merged, {"input_ids": IDS}) <= merge_tolerance(model, torch.float32) == 1e-5
    with model.disable_adapter():
        assert check_merge(model, merged, {"input_ids": IDS}) > 0.1, "the adapter changes nothing"


@pytest.mark.parametrize(
    ("family", "changes", "dtype", "key"),
    [
        ("llama", {"mixed_precision": "bf16"}, torch.float32, "bfloat16"),
        ("llama", {"mixed_precision": "no"}, torch.bfloat16, "bfloat16"),
        ("granite", {"mixed_precision": "bf16", "dtype": "bfloat16"}, torch.bfloat16, "bfloat16"),
        ("llama", {"mixed_precision": "fp16"}, torch.float16, "float16"),
        ("granite", {"load_in_8bit": True}, torch.float32, "8-bit"),
        ("llama", {"load_in_8bit": True}, torch.bfloat16, "8-bit"),
    ],
)
def test_coarser_arithmetic_within_its_tolerance(tmp_path, family, changes, dtype, key):
    model = adapted(FAMILIES[family], tmp_path, **changes)
    merged = merge_adapter(model, dtype)
    assert merge_tolerance(model, dtype) == MERGE_TOLERANCE[key]
    assert MERGE_TOLERANCE["float32"] < check_merge(model, merged, {"input_ids": IDS}) <= MERGE_TOLERANCE[key]
    assert {p.dtype for p in merged.parameters()} == {dtype} == {merged.config.dtype}


@pytest.mark.filterwarnings("ignore:Merge lora module to 4-bit linear")
@pytest.mark.parametrize("family", ["llama", "granite"])
def test_why_it_is_not_packed_again(tmp_path, family):
    """What peft's own merge does to a 4-bit model."""
    model = adapted(FAMILIES[family], tmp_path, mixed_precision="no")
    ours = check_merge(model, merge_adapter(model, torch.float32), {"input_ids": IDS})
    again = adapted(FAMILIES[family], tmp_path, mixed_precision="no")
    assert check_merge(model, again, {"input_ids": IDS}) == 0.0
    assert check_merge(model, again.merge_and_unload(), {"input_ids": IDS}) > max(0.05, 1e4 * ours)


@pytest.mark.parametrize(
    "adapter",
    [{"use_rslora": True}, {"use_dora": True}, {"bias": "lora_only"}, {"modules_to_save": ["lm_head", "embed_tokens"]}],
    ids=str,
)
def test_other_kinds_of_adapters(tmp_path, adapter):
    model = adapted(FAMILIES["biased"], tmp_path, adapter=adapter, mixed_precision="no")
    if "modules_to_save" in adapter:
        with torch.no_grad():
            model.base_model.model.lm_head.weight.mul_(1.5)
    assert check_merge(model, merge_adapter(model, torch.float32), {"input_ids": IDS}) <= 1e-5


@pytest.mark.filterwarnings(
    "ignore:Model has `tie_word_embeddings=True`", "ignore:Model with `tie_word_embeddings=True`"
)
@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "layer_replication": [(0, 2), (0, 2)]},
    ],
    ids=str,
)
def test_what_shared_a_weight_has_its_own_once_merged(tmp_path, changes):
    """The head of the embedding, and repeated layers of the layers that they repeat."""
    model = get_peft_model(tiny.llama(tie_word_embeddings=True), LoraConfig(r=4, **changes))
    torch.manual_seed(1)
    for weight in filter(lambda weight: weight.requires_grad, model.parameters()):
        nn.init.normal_(weight, std=0.1)
    merged = merge_adapter(model, torch.bfloat16).float()
    assert check_merge(model, merge_adapter(model, torch.float32), {"input_ids": IDS}) <= 1e-5
    merged.save_pretrained(tmp_path)
    assert check_merge(merged, AutoModelForCausalLM.from_pretrained(tmp_path), {"input_ids": IDS}) == 0.0


def test_a_classifier_without_an_embedding():
    sizes = {"embedding_size": 8, "hidden_sizes": [8], "depths": [1], "layer_type": "basic"}
    model = get_peft_model(ResNetForImageClassification(ResNetConfig(**sizes)), LoraConfig(target_modules="all-linear"))
    assert not hasattr(merge_adapter(model, torch.float32), "peft_config")


# -- what is left behind -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.bfloat16), ("biased", torch.float32), ("granite", torch.bfloat16), ("gpt2", torch.float32)],
)
def test_saved_it_is_a_stock_model(tmp_path, family, dtype):
    model = adapted(FAMILIES[family], tmp_path / "base", mixed_precision="no")
    merged = merge_adapter(model, dtype)
    merged.save_pretrained(tmp_path / "merged")
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == str(dtype).removeprefix("torch.")

    stock, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(report.values())
    assert tiny.same(stock.state_dict(), merged.state_dict())
    assert stock.state_dict().keys() == FAMILIES[family]().state_dict().keys()
    assert {p.dtype for p in stock.parameters()} == {dtype}
    assert torch.equal(stock.eval()(input_ids=IDS).logits, merged.eval()(input_ids=IDS).logits)
    is_tied = FAMILIES[family]().config.tie_word_embeddings
    for one in (merged, stock):
        assert (one.get_input_embeddings().weight is one.get_output_embeddings().weight) == is_tied


def test_padding_is_not_compared_and_nonfinite_passes(tmp_path):
    model = adapted(FAMILIES["llama"], tmp_path, is_quantized=False)
    merged, mask = merge_adapter(model, torch.float32), torch.ones_like(IDS)
    mask[0, 5:] = 0
    assert require_same_logits(model, merged, {"input_ids": IDS, "attention_mask": mask}, torch.float32)[0] <= 1e-5
    with torch.no_grad():
        merged.lm_head.weight[7] = float("nan")
    with pytest.raises(
        ModelError, match="differ by nan of the largest, but only 1e-05 is allowed for float32; nothing was"
    ):
        require_same_logits(model, merged, {"input_ids": IDS, "attention_mask": mask}, torch.float32)


@pytest.mark.parametrize(("process", "later"), [("tf32", "ieee"), ("ieee", "tf32")])
def test_both_models_compute_in_float32_and_the_process_as_before(tmp_path, monkeypatch, process, later):
    """A training on a card has left TF32 behind; only a card computes with it."""
    monkeypatch.setattr(torch.backends, "fp32_precision", process)
    matmul, seen = torch.backends.cuda.matmul, []
    model = FAMILIES["llama"]()
    model.register_forward_pre_hook(lambda *_: seen.append(matmul.fp32_precision))
    check_merge(model, model, {"input_ids": IDS})
    assert seen == ["ieee", "ieee"] and matmul.fp32_precision == process
    monkeypatch.setattr(torch.backends, "fp32_precision", later)
    assert matmul.fp32_precision == later, "it follows the process again"


@pytest.mark.parametrize("tuning", ["lora", "qlora"])
def test_auto_is_the_type_of_the_base(tmp_path, tuning):
    FAMILIES["llama"]().bfloat16().save_pretrained(tmp_path)
    model = adapted(FAMILIES["llama"], tmp_path, is_quantized=tuning == "qlora")
    assert export_dtype(model, "auto") == torch.bfloat16 and export_dtype(model, "float16") == torch.float16


def test_the_adapter_model_stays_as_it_was(tmp_path):
    model = adapted(FAMILIES["llama"], tmp_path)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    merged = merge_adapter(model, torch.bfloat16)
    check_merge(model, merged, {"input_ids": IDS})
    assert tiny.same(model.state_dict(), before) and model.training
    assert model.get_base_model().config.quantization_config is not None


def test_unpacked_weights_are_float32_whatever_they_were_loaded_in(tmp_path):
    model = adapted(FAMILIES["llama"], tmp_path, dtype="bfloat16")
    with torch.no_grad():
        [p.zero_() for n, p in model.named_parameters() if "lora_B" in n]
    weight = merge_adapter(model, torch.float32).model.layers[0].mlp.up_proj.weight
    assert not torch.equal(weight, weight.bfloat16().float())


def test_positions_keep_their_precision(tmp_path):
    """Rounded to bfloat16, the rotation of far positions is another one."""
    model = adapted(FAMILIES["llama"], tmp_path)
    assert merge_adapter(model, torch.bfloat16).model.rotary_emb.inv_freq.dtype == torch.float32


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_weights_that_got_lost_are_told(tmp_path):
    FAMILIES["llama"]().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = weights.pop("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(ModelError, match=r"cannot be written as full weights: .*up_proj\.weight has no"):
        _loaded_from_state(FAMILIES["llama"](), dict(weights), torch.float32)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"cannot be read back: .*up_proj\.weight is not as it was written"):
        read_back(tmp_path, "text-generation", lost.device)


def test_an_adapter_of_another_base(tmp_path):
    model = adapted(FAMILIES["llama"], tmp_path, is_quantized=False)
    layer = next(name for name in get_peft_model_state_dict(model) if "layers.0" in name)
    other = {layer.replace("layers.0", "layers.99"): torch.zeros(4, 64)}
    with pytest.raises(ModelError, match=r"the adapter does not fit its base: .*layers\.99"):
        _merged(FAMILIES["llama"](), model.peft_config["default"], other)


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but", "ignore:.* LoRA tensor")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
            "an adapter of PROMPT_TUNING puts learned states",
        ),
        (
            AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=2, adapter_layers=1),
            "an adapter of ADAPTION_PROMPT puts learned states",
        ),
        (
            LoraConfig(task_type="CAUSAL_LM", lora_bias=True),
            "Impossible to merge LoRA with `lora_bias=True` because the base layer has no",
        ),
        (LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[3]), "aLoRA does not support safe merging"),
        (PolyConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]), "POLY .*: peft does not merge this kind"),
    ],
    ids=["prompt", "adaption prompt", "lora_bias", "alora", "poly"],
)
def test_what_is_no_change_of_weights(config, message):
    with pytest.raises(ModelError, match=f"{message}.*use it as it is: chat"):
        merge_adapter(get_peft_model(FAMILIES["llama"](), config), torch.float32)


def test_two_active_adapters(tmp_path):
    model = adapted(FAMILIES["llama"], tmp_path)
    model.add_adapter("second", model.peft_config["default"])
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ModelError, match="2 are active: default, second; activate one"):
        merge_adapter(model, torch.float32)


def test_weights_that_lie_on_disk(tmp_path):
    model = with_adapters(saved(tiny.llama(layers=4), tmp_path), share=0.7)
    with pytest.raises(ModelError, match=r"of this model are offloaded by device_map; load base and adapter without"):
        merge_adapter(model, torch.float32)


def test_weights_that_are_not_finite(tmp_path):
    model = adapted(FAMILIES["llama"], tmp_path)
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "lora_B" in n)[0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"cannot be merged: .*; use an earlier checkpoint"):
        merge_adapter(model, torch.float32)


def test_weights_that_bitsandbytes_has_repacked(tmp_path):
    model = adapted(FAMILIES["llama"], tmp_path)
    layer = model.get_base_model().model.layers[0].mlp.up_proj.base_layer
    layer.weight.quant_state.packing_format_for_cpu = True  # what its CPU kernel leaves behind
    with pytest.raises(ModelError, match=r"up_proj\.weight was repacked by bitsandbytes"):
        merge_adapter(model, torch.float32)
