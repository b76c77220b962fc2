"""Which weights are packed, which are not, what is refused, and that no forward pass changes a frozen weight."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    MambaConfig,
    MixtralConfig,
    TorchAoConfig,
    ViTConfig,
    ViTForImageClassification,
)

from scu_trainer.errors import ModelError, RequirementError
from scu_trainer.models.loading.adapters import adapter_targets
from scu_trainer.models.loading.load import load_for_evaluation, load_model, prepare_for_tuning, read_model
from scu_trainer.models.merge import check_merge, merge_adapter
from scu_trainer.models.quantize import (
    compute_dtype_of,
    meta_model,
    prepare_quantized,
    prevent_repacking,
    quantizable_layers,
    quantization_config,
    quantized_line,
    quantized_modules,
    require_quantization,
    stored_bits,
    stored_bytes,
    weight_count_of,
)
from scu_trainer.models.vision import models as vision
from scu_trainer.settings import ModelSettings
from scu_trainer.train.loops.guard.first_nonfinite import weights_are_finite
from scu_trainer.train.preflight import weights
from tests import tiny
from tests.train.test_preflight_checks import ids as ids_of
from tests.train.test_preflight_checks import job_of

CPU = torch.device("cpu")
IDS = torch.arange(32).reshape(2, 16)


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny.llama(hidden=64).save_pretrained(folder)
    return folder


def qlora(name: object = None, **changes) -> ModelSettings:
    return ModelSettings(model_name_or_path=str(name), tuning="qlora", **changes)


def on_meta(kind: type, config) -> nn.Module:
    with torch.device("meta"):
        return kind(config)


def packed(model: nn.Module) -> set[str]:
    return {name for name, _ in quantized_modules(model)}


def leaves(names) -> set[str]:
    return {name.rsplit(".", 1)[-1] for name in names}


# -- which layers ------------------------------------------------------------------------------------------------------


def test_attention_and_mlp_of_a_transformer(llama_dir):
    projections = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    names = quantizable_layers(tiny.llama(hidden=64))
    assert leaves(names) == projections and len(names) == 2 * len(projections)
    model = load_model(qlora(llama_dir))
    assert packed(model) == {*names}
    assert type(model.lm_head) is nn.Linear and model.lm_head.weight.dtype == torch.float32


def test_what_a_mamba_kernel_reads_is_not_packed():
    model = tiny.granite_hybrid()
    names = quantizable_layers(model)
    assert sum(name.endswith("mamba.in_proj") for name in names) == 3
    assert not any(name.endswith("mamba.out_proj") for name in names)
    assert leaves(names) == {"in_proj", "input_linear", "output_linear", "q_proj", "k_proj", "v_proj", "o_proj"}


def test_of_the_first_mamba_only_the_input_projection_is_called():
    config = MambaConfig(vocab_size=64, hidden_size=64, state_size=16, num_hidden_layers=1, time_step_rank=32)
    assert quantizable_layers(meta_model(config)) == ["backbone.layers.0.mixer.in_proj"]


def test_routers_and_stacked_experts_stay():
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    mixtral = meta_model(MixtralConfig(vocab_size=64, num_hidden_layers=1, num_local_experts=16, **sizes))
    assert leaves(quantizable_layers(mixtral)) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with_router = tiny.llama(hidden=64)
    with_router.model.layers[0].mlp.router = nn.Linear(64, 64)
    assert quantizable_layers(with_router) == quantizable_layers(tiny.llama(hidden=64))


def test_of_a_vision_transformer_the_classifier_and_the_patches_stay():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = on_meta(ViTForImageClassification, ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=32))
    names = quantizable_layers(model)
    assert names and "classifier" not in names and all(".0." in name or ".1." in name for name in names)
    assert model.classifier.weight.numel() >= 1024, "it is not its size that keeps it"


def test_gpt2_layers_count_as_linear(tmp_path):
    tiny.gpt2(n_embd=64).save_pretrained(tmp_path)
    assert leaves(packed(load_model(qlora(tmp_path)))) == {"c_attn", "c_proj", "c_fc"}


def test_tiny_layers_stay():
    """Keys and values of this model have 512 weights."""
    names = leaves(quantizable_layers(tiny.llama(hidden=32)))
    assert "q_proj" in names and not names & {"k_proj", "v_proj"}


def test_adapters_find_packed_layers(tmp_path):
    tiny.granite_hybrid().save_pretrained(tmp_path)
    settings = qlora(tmp_path)
    model = load_model(settings)
    assert adapter_targets(model) == adapter_targets(tiny.granite_hybrid())
    adapted = prepare_for_tuning(model, settings)
    wrapped = {name for name, _ in adapted.named_modules() if name.endswith("lora_A.default")}
    assert len(wrapped) == len(quantizable_layers(tiny.granite_hybrid()))
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert trained and all(p.dtype == torch.float32 for p in trained)


# -- how they are stored -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("nf4", True)),
        ({"bnb_4bit_quant_type": "fp4"}, ("fp4", True)),
        ({"bnb_4bit_use_double_quant": False}, ("nf4", False)),
    ],
)
def test_four_bits_as_asked_for(llama_dir, changes, expected):
    model = load_model(qlora(llama_dir, mixed_precision="bf16", **changes))
    for _, module in quantized_modules(model):
        assert stored_bits(module) == 4 and module.compute_dtype == torch.bfloat16
        assert (module.weight.quant_state.quant_type, module.weight.quant_state.nested) == expected


def test_eight_bits(llama_dir):
    model = load_model(qlora(llama_dir, load_in_8bit=True))
    assert {stored_bits(module) for _, module in quantized_modules(model)} == {8}
    assert len(packed(model)) == 14


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mixed_precision": "bf16"}, torch.bfloat16),
        ({"mixed_precision": "fp16"}, torch.float16),
        ({"mixed_precision": "no"}, torch.float32),
        ({"mixed_precision": "no", "dtype": "bfloat16"}, torch.bfloat16),
    ],
)
def test_arithmetic_is_that_of_training(changes, expected):
    assert compute_dtype_of(qlora(**changes), CPU) == expected


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_arithmetic_that_the_device_has(monkeypatch, has_bfloat16):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bfloat16)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bfloat16)
    assert compute_dtype_of(qlora(), CPU) == (torch.bfloat16 if has_bfloat16 else torch.float32)
    cuda = compute_dtype_of(qlora(), torch.device("cuda"))
    assert cuda == (torch.bfloat16 if has_bfloat16 else torch.float16)


@pytest.mark.parametrize(("dtype", "expected"), [("auto", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32")])
def test_what_is_not_packed_keeps_its_type_but_for_float16(llama_dir, dtype, expected):
    model = load_model(qlora(llama_dir, dtype=dtype))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    for part in (model.lm_head, model.model.norm, model.model.embed_tokens):
        assert part.weight.dtype == getattr(torch, expected)


# -- no forward pass changes a weight ----------------------------------------------------------------------------------


def gradients(model) -> list[torch.Tensor]:
    model.train().zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("eight", [False, True], ids=["nf4", "int8"])
def test_an_evaluation_changes_neither_weights_nor_gradients(llama_dir, eight):
    settings = qlora(llama_dir, load_in_8bit=eight)
    model = tiny.lora(load_model(settings))
    expected, before = gradients(model), {name: t.clone() for name, t in model.state_dict().items()}
    with torch.no_grad():
        model.eval()(input_ids=IDS)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True))
    assert tiny.same(model.state_dict(), before)


def test_an_evaluation_of_a_model_stored_in_4_bits_leaves_the_gradients_of_plain_lora(llama_dir, tmp_path):
    load_model(qlora(llama_dir)).save_pretrained(tmp_path)
    settings = ModelSettings(model_name_or_path=str(tmp_path), tuning="lora")
    model = prepare_for_tuning(load_model(settings), settings)
    expected, before = gradients(model), {name: t.clone() for name, t in model.state_dict().items()}
    with torch.no_grad():
        model.eval()(input_ids=IDS)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True))
    assert tiny.same(model.state_dict(), before)


def test_a_model_of_any_kind_that_is_stored_in_4_bits_is_not_repacked(llama_dir, tmp_path):
    load_model(qlora(llama_dir)).base_model.save_pretrained(tmp_path)
    model, _ = read_model(
        AutoModel, str(tmp_path), AutoConfig.from_pretrained(tmp_path), ModelSettings(tuning="lora"), torch.float32
    )
    assert {module.support_avx512bf16_for_cpu for _, module in quantized_modules(model)} == {False}


def test_a_model_that_was_evaluated_before_gets_its_gradients_back(llama_dir, caplog):
    model = load_model(qlora(llama_dir))
    for module in dict(quantized_modules(model)).values():
        module.support_avx512bf16_for_cpu = type(module)(2, 2).support_avx512bf16_for_cpu  # as one of one's own
    model = tiny.lora(model)
    expected = torch.cat([gradient.flatten() for gradient in gradients(model)])
    with torch.no_grad():
        model.eval()(input_ids=IDS)
    states = [module.weight.quant_state for _, module in quantized_modules(model)]
    was_packed = any(getattr(state, "packing_format_for_cpu", False) for state in states)
    prevent_repacking(model)
    found = torch.cat([gradient.flatten() for gradient in gradients(model)])
    assert float((found - expected).norm() / expected.norm()) < 0.05
    assert ("load the model again" in caplog.text) == was_packed


def test_a_bias_has_the_type_of_the_arithmetic_from_the_start(tmp_path):
    full = tiny.llama(hidden=64, attention_bias=True)
    for layer in full.model.layers:
        nn.init.normal_(layer.self_attn.q_proj.bias)
    full.save_pretrained(tmp_path)
    model = load_model(qlora(tmp_path, mixed_precision="bf16"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(input_ids=IDS)
    assert tiny.same({name: p.detach() for name, p in model.named_parameters()}, before)


def test_evaluation_and_training_give_the_same_logits(llama_dir):
    model = load_model(qlora(llama_dir))
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=IDS).logits, model.train()(input_ids=IDS).logits)


def test_an_adapter_is_scored_on_the_base_it_was_trained_on(llama_dir, tmp_path):
    settings = qlora(llama_dir)
    model = prepare_for_tuning(load_model(settings), settings)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    model.save_pretrained(tmp_path)
    again = load_for_evaluation(str(tmp_path), settings)
    assert packed(again) and torch.equal(again(input_ids=IDS).logits, model.eval()(input_ids=IDS).logits)


# -- what the user sees ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("eight", "bits", "share"), [(False, 4, 0.16), (True, 8, 0.28)])
def test_the_line_counts_every_weight_once(tmp_path, eight, bits, share):
    full = tiny.granite_hybrid()
    full.save_pretrained(tmp_path)
    model = load_model(qlora(tmp_path, load_in_8bit=eight))
    total = sum(p.numel() for p in full.parameters())
    inside = sum(full.get_submodule(name).weight.numel() for name in packed(model))
    assert sum(map(weight_count_of, model.parameters())) == total
    line = quantized_line(model)
    assert line.startswith(f"quantized: {inside:,} weights in {bits} bits; {total - inside:,} unchanged (")
    kinds = re.search(r"\((.*?)\)", line)[1]
    assert {"linear", "embeddings", "convolutions", "norms"} <= {*re.findall(r"[a-z]+", kinds)}
    assert sum(int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", kinds)) == total - inside
    assert line.endswith(f"instead of {4 * total / 2**20:,.1f} in float32")
    in_full = sum(p.nbytes for p in full.parameters()) - 4 * inside
    assert inside * bits / 8 < stored_bytes(model) - in_full <= share * 4 * inside, "scales are part of it"


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_without_bitsandbytes(monkeypatch, llama_dir):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "bitsandbytes" else found(name)
    )
    with pytest.raises(RequirementError, match="needs bitsandbytes, which is not installed; pip install 'scu-trainer"):
        load_model(qlora(llama_dir))
    require_quantization(ModelSettings(), CPU)


def test_a_device_that_is_neither_cuda_nor_cpu():
    with pytest.raises(RequirementError, match="the device here is mps; use tuning: lora, or use_cpu: true"):
        require_quantization(qlora(), torch.device("mps"))


def test_nothing_to_quantize():
    skeleton = meta_model(tiny.llama(hidden=8, head_dim=2).config)
    with pytest.raises(ModelError, match=r"would quantize nothing in LlamaForCausalLM.*; use tuning: lora or full"):
        quantization_config(qlora(), skeleton, CPU)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            r"quantized \(gptq\).*; give the folder or Hub id of the full model$",
        ),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, r"8 bits of bitsandbytes.*set load_in_8bit: true$"),
    ],
)
def test_a_model_that_is_quantized_in_another_way(llama_dir, tmp_path, stored, message):
    config = json.loads((llama_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    with pytest.raises(ModelError, match=message):
        load_model(qlora(tmp_path))


def test_a_model_that_is_stored_in_the_bits_asked_for(llama_dir, tmp_path):
    settings = qlora(llama_dir)
    model = load_model(settings)
    model.save_pretrained(tmp_path)
    again = load_model(qlora(tmp_path))
    assert packed(again) == packed(model)
    assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_a_stored_model_whose_mamba_projections_are_packed(tmp_path):
    tiny.granite_hybrid().save_pretrained(tmp_path / "full")
    packing = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["lm_head"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "full", quantization_config=packing)
    with pytest.raises(ModelError, match=r"mamba\.out_proj quantized, a weight that mamba kernels read"):
        prepare_quantized(model)


def test_weights_that_are_missing_are_found_in_quantized_loading_too(llama_dir, tmp_path):
    kept = load_file(llama_dir / "model.safetensors")
    gone = kept.pop("model.layers.1.mlp.up_proj.weight")
    assert gone.numel()
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((llama_dir / "config.json").read_text())
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight missing or of another shape"):
        load_model(qlora(tmp_path))


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_of_another_shape_are_found_in_quantized_loading_too(llama_dir, tmp_path, bits):
    shutil.copytree(llama_dir, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 2 * config["intermediate_size"]}))
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.down_proj\.weight and 5 more missing or of another shape"):
        load_model(qlora(tmp_path, load_in_8bit=bits == 8))


# -- stored in the formats of others -----------------------------------------------------------------------------------


def test_adapters_on_a_model_that_torchao_has_packed(llama_dir, tmp_path):
    """It can be trained and merged; its tensors say that they are float32, and no sum or norm of them can be taken."""
    packing = TorchAoConfig(Int8WeightOnlyConfig(version=2))
    AutoModelForCausalLM.from_pretrained(llama_dir, quantization_config=packing).save_pretrained(tmp_path)
    settings = ModelSettings(str(tmp_path))
    model = prepare_for_tuning(load_model(settings), settings)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert ids_of(weights.before_training(job_of(), model)) == [] and weights_are_finite(model)
    assert check_merge(model, merge_adapter(model, torch.float32), {"input_ids": IDS}) < 1e-5
    found = [*weights.before_training(job_of(tuning="full"), load_model(replace(settings, tuning="full")))]
    assert "quantized-trained" in ids_of(found)
    fix = next(finding.fix for finding in found if finding.check == "quantized-trained")
    assert "tuning: lora" in fix and "qlora" not in fix, "that is refused:"
    with pytest.raises(ModelError, match="the model is stored quantized"):
        load_model(replace(settings, tuning="qlora"))


def in_eighths(source: Path, folder: Path, is_packed: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """The weights of ``source`` in FP8, beside others in bfloat16."""
    eighths = {name: weight.bfloat16() for name, weight in load_file(source / "model.safetensors").items()}
    for name in [name for name in eighths if is_packed(name)]:
        eighths[name] = eighths[name].to(torch.float8_e4m3fn)
        eighths[f"{name}_scale_inv"] = torch.full((1, 1), 0.5)
    save_file(eighths, folder / "model.safetensors", metadata={"format": "pt"})
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = json.loads((source / "config.json").read_text())
    config = {**config, "dtype": "bfloat16", "quantization_config": stored}
    (folder / "config.json").write_text(json.dumps(config))
    return eighths


def test_beside_what_is_unpacked_for_want_of_fp8_the_rest_has_the_type_asked_for_too(llama_dir, tmp_path):
    eighths = in_eighths(llama_dir, tmp_path, lambda name: "_proj" in name)
    model = load_model(ModelSettings(str(tmp_path), tuning="full"))
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert torch.equal(
        model.model.layers[1].mlp.up_proj.weight, eighths["model.layers.1.mlp.up_proj.weight"].float() / 2
    )
    assert model(input_ids=IDS, labels=IDS).loss.isfinite()


def test_a_model_of_images_has_the_type_asked_for_too(tmp_path):
    tiny.vit().save_pretrained(tmp_path)
    in_eighths(tmp_path, tmp_path, lambda name: name.endswith("attention.query.weight"))
    settings = ModelSettings(str(tmp_path), tuning="full")
    model, _ = vision._loaded(settings, [str(number) for number in range(tiny.vit().config.num_labels)])
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
