"""Every kind of adapter against peft and the stock Trainer; S on what it computes with; saved, resumed, merged."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import AdaLoraConfig, IA3Config, LoraConfig, PeftModel, VeraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from peft.tuners.lora import KasaConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM, Trainer

from scu_trainer import SCUTrainer
from scu_trainer.cli import main as cli
from scu_trainer.errors import ControlError, ModelError, SettingsError
from scu_trainer.models.loading.adapters import CAUSAL, AdapterPlan, add_tokens, grow_embeddings
from scu_trainer.models.loading.load import load_for_evaluation, load_tokenizer, prepare_for_tuning
from scu_trainer.run_files import read_rows
from scu_trainer.settings import MemorySettings, ModelSettings, RegularizationSettings
from scu_trainer.train.regularization.penalty import Prior
from scu_trainer.train.session.building import own_optimizer
from scu_trainer.train.session.session import _digests_of_fixed_weights
from tests import tiny

TARGETS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
METHODS = {
    "rslora": ({"use_rslora": True}, {"use_rslora": True}),
    "dora": ({"use_dora": True}, {"use_dora": True}),
    "gaussian": ({"init_lora_weights": "gaussian"}, {"init_lora_weights": "gaussian"}),
    "pissa": ({"init_lora_weights": "pissa"}, {"init_lora_weights": "pissa"}),
    "olora": ({"init_lora_weights": "olora"}, {"init_lora_weights": "olora"}),
    "whole head": ({"modules_to_save": ["lm_head"]}, {"modules_to_save": ["lm_head"]}),
    "one layer": ({"layers_to_transform": [1]}, {"layers_to_transform": [1]}),
    "without values": ({"exclude_modules": ["v_proj"]}, {"exclude_modules": ["v_proj"]}),
    "loraplus": ({"loraplus_lr_ratio": 16.0}, {}),
    "vera": ({"peft_type": "vera"}, None),
}
"""Name -> our settings, and peft's own words for it; None: not LoRA."""

RATE = 5e-3


def _llama(name: str):
    """With the second layer for the methods that tell layers apart."""
    return tiny.llama(layers=2 if name == "one layer" else 1)


def _ours(name: str, seed: int = 1):
    settings = ModelSettings(lora_r=4, lora_alpha=8, **METHODS[name][0])
    torch.manual_seed(seed)
    return prepare_for_tuning(_llama(name), settings), settings


def _of_peft(name: str):
    words = METHODS[name][1]
    shared = {"task_type": "CAUSAL_LM", "target_modules": TARGETS, "r": 4}
    torch.manual_seed(1)
    if words is None:
        return get_peft_model(_llama(name), VeraConfig(**shared))
    return get_peft_model(_llama(name), LoraConfig(**shared, lora_alpha=8, **words))


def _optimizer(kind, name: str, model, training):
    """Of our trainer what a run makes, of the stock one what peft does."""
    if kind is SCUTrainer:
        return own_optimizer(SimpleNamespace(model=ModelSettings(**METHODS[name][0]), training=training), model)
    if name != "loraplus":
        return None
    kind, words = Trainer.get_optimizer_cls_and_kwargs(training, model)
    return create_loraplus_optimizer(model, kind, loraplus_lr_ratio=16.0, loraplus_weight_decay=0.0, **words)


def _train(kind, name: str, model, folder, **loops):
    training = tiny.arguments(folder, max_steps=3, learning_rate=RATE, per_device_train_batch_size=4)
    trainer = kind(
        model=model,
        args=training,
        train_dataset=tiny.Rows(),
        optimizers=(_optimizer(kind, name, model, training), None),
        **loops,
    )
    trainer.train()
    return {key: weight.detach().clone() for key, weight in model.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("name", METHODS)
def test_the_weights_are_those_of_peft_and_the_stock_trainer(name, tmp_path):
    stock = _train(Trainer, name, _of_peft(name), tmp_path / "stock")
    off = _train(SCUTrainer, name, _ours(name)[0], tmp_path / "off")
    assert stock.keys() == off.keys() and all(torch.equal(stock[key], off[key]) for key in stock)
    measured = RegularizationSettings(law="fixed", lambda_init=0.0)
    loops = {"memory": MemorySettings(max_batch_size=2), "regularization": measured, "regularization_tokens": 1000}
    # in float64, or Adam would make steps of what rounding leaves of gradients near zero
    exact = _train(Trainer, name, _of_peft(name).double(), tmp_path / "exact")
    on = _train(SCUTrainer, name, _ours(name)[0].double(), tmp_path / "on", **loops)
    assert all(torch.allclose(exact[key], on[key], rtol=1e-6, atol=1e-6) for key in stock)
    assert any(not torch.equal(stock[key], start) for key, start in _starts(name).items())


def _starts(name: str):
    return {key: weight for key, weight in _ours(name)[0].named_parameters() if weight.requires_grad}


# -- S -----------------------------------------------------------------------------------------------------------------


def _effective(model) -> dict[str, torch.Tensor]:
    """The weights that the model computes with, by merging a copy."""
    import copy

    merged = copy.deepcopy(model).merge_and_unload()
    return {key: weight.detach() for key, weight in merged.named_parameters()}


def _move(model) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn_like(weight))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "whole head"])
def test_the_distance_is_that_of_the_weights_it_computes_with(name):
    model, _ = _ours(name)
    if name == "vera":
        _move(model)  # from a start that is not zero, as an adapter that is gone on with
    prior, before = Prior(model), _effective(model)
    assert float(prior.squared_distance()) == pytest.approx(0.0, abs=1e-9)
    _move(model)
    after = _effective(model)
    expected = sum(float((after[key] - before[key]).double().square().sum()) for key in after)
    assert float(prior.squared_distance()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["dora", "vera", "pissa"])
def test_lambda_shrinks_the_distance(name):
    model, _ = _ours(name)
    prior = Prior(model)
    _move(model)
    before = float(prior.squared_distance())
    for step in range(40):
        prior.decay(0.1, seed=step)
    assert float(prior.squared_distance()) < 0.01 * before
    assert prior.measured_gain() > 0


def _mixtral():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    return MixtralForCausalLM(MixtralConfig(vocab_size=tiny.VOCAB, num_key_value_heads=2, num_local_experts=4, **sizes))


OTHER_KINDS = {
    "AdaLoRA": (tiny.llama, AdaLoraConfig(init_r=4, target_r=2, total_step=8, target_modules=TARGETS)),
    "KasaLinearVariant": (tiny.llama, LoraConfig(kasa_config=KasaConfig(), target_modules=TARGETS)),
    "LoRA with A or B frozen": (tiny.llama, LoraConfig(init_lora_weights="mica", r=4, target_modules=TARGETS)),
    "target_parameters of 4 experts": (_mixtral, LoraConfig(r=2, target_parameters=["experts.down_proj"])),
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_another_update_of_a_and_b_is_not_taken_for_their_product(kind, tmp_path):
    make, config = OTHER_KINDS[kind]
    model = get_peft_model(make(), config)
    with pytest.raises(ControlError, match=f"not for {kind}; set scu_measure: factors"):
        Prior(model)
    prior, starts = Prior(model, measure="factors"), tiny.weights_of(model)
    _move(model)
    moved = sum(float((weight - starts[name]).square().sum()) for name, weight in tiny.weights_of(model).items())
    assert float(prior.squared_distance()) == pytest.approx(moved, rel=1e-4)
    trainer = SCUTrainer(model, tiny.arguments(tmp_path), regularization=RegularizationSettings())
    assert kind in trainer.loop("regularization").notices[0]  # where nothing is steered, it is said


def test_dora_has_no_prior_at_zero():
    with pytest.raises(ControlError, match="scu_prior: zero would shrink the lengths"):
        Prior(_ours("dora")[0], prior="zero")


# -- a run by the command ----------------------------------------------------------------------------------------------

ONE_STEP = ["--max_steps", "1"]
TOKENS = ["<tool>", "<result>"]
RUNS = {
    "rslora": ["--use_rslora"],
    "dora": ["--use_dora"],
    "pissa": ["--init_lora_weights", "pissa"],
    "olora": ["--init_lora_weights", "olora"],
    "loraplus": ["--loraplus_lr_ratio", "8"],
    "vera": ["--peft_type", "vera"],
    "whole head": ["--modules_to_save", "lm_head"],
    "new tokens": ["--new_tokens", *TOKENS],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.saved_llama(tmp_path_factory.mktemp("base"), layers=1)


@pytest.fixture(scope="module")
def flags(base, tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("rows")
    rows = [{"text": f"A call <tool> of number {i} gives a <result> of {i * i}. " * 3} for i in range(16)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "model_name_or_path": base, "dataset": folder / "rows.jsonl", "block_size": 64, "max_steps": 4,
        "validation_split_percentage": 25, "per_device_train_batch_size": 2, "learning_rate": 0.01, "lora_r": 4,
        "logging_steps": 1, "save_steps": 2, "use_cpu": "true", "predict_memory": "false", "report_to": "none",
        "mixed_precision": "no", "cache_dir": folder / "cache", "preflight": "off",
        "sample_prompts": 0,
    }  # fmt: skip
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def whole_run(flags, tmp_path_factory) -> Callable[[str], Path]:
    """Name of an adapter -> the folder of its whole run, which is made when it is first asked for."""

    @functools.cache
    def folder_of(name: str) -> Path:
        folder = tmp_path_factory.mktemp("whole") / "run"
        assert cli.main(["train", *flags, *RUNS[name], "--output_dir", str(folder)]) == 0
        return folder

    return folder_of


def _logits(model) -> torch.Tensor:
    ids = torch.arange(3, 40).unsqueeze(0)
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumes_exactly_loads_with_plain_peft_and_merges(name, flags, base, whole_run, tmp_path, capsys):
    whole, parts = whole_run(name), tmp_path / "parts"
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoint-4")
    for left in ("adapter_model.safetensors", "scu_metrics.json"):
        (parts / left).unlink()
    words = ["train", *flags, *RUNS[name], "--output_dir", str(parts), "--resume_from_checkpoint", "true"]
    assert cli.main(words) == 0
    assert (parts / "adapter_model.safetensors").read_bytes() == (whole / "adapter_model.safetensors").read_bytes()
    assert read_rows(parts / "scu_history.json") == read_rows(whole / "scu_history.json")
    assert read_rows(whole / "scu_history.json")[-1]["param_bpt"] > 0

    ours = _logits(load_for_evaluation(str(whole), ModelSettings(model_name_or_path=str(whole))))
    plain = AutoModelForCausalLM.from_pretrained(base)
    plain.resize_token_embeddings(max(len(AutoTokenizer.from_pretrained(whole)), plain.config.vocab_size))
    assert torch.allclose(_logits(PeftModel.from_pretrained(plain, whole)), ours, atol=1e-4)
    base_alone = _logits(AutoModelForCausalLM.from_pretrained(base))
    assert not torch.allclose(base_alone, ours[..., : base_alone.shape[-1]], atol=1e-3)

    capsys.readouterr()
    assert cli.main(["merge", str(whole), "--output", str(tmp_path / "merged")]) == 0
    merged = _logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert torch.allclose(merged, ours, atol=1e-3)


def test_the_logits_of_a_saved_adapter_are_those_that_were_trained(tmp_path):
    """An adapter that has taken its start out of the base takes the same out of it when it is loaded."""
    tiny.saved_llama(tmp_path / "base")
    for name in ("pissa", "olora"):
        settings = ModelSettings(
            model_name_or_path=str(tmp_path / "base"), lora_r=4, dtype="float32", init_lora_weights=name
        )
        model = prepare_for_tuning(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), settings)
        _move(model)
        model.save_pretrained(tmp_path / name)
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / name)
        assert torch.allclose(_logits(loaded), _logits(model), atol=1e-4), name


@pytest.mark.parametrize("name", ["pissa", "olora", "rslora"])
def test_rounding_of_what_is_left_of_a_layer_is_no_other_base(name):
    """It depends on the device and the number of threads. The embedding is as it was read."""
    model = _ours(name)[0]
    parts = SimpleNamespace(model=model, teacher=None)
    before = _digests_of_fixed_weights(parts)["base"]
    model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.data *= 1 + 1e-6
    assert (_digests_of_fixed_weights(parts)["base"] == before) == (name != "rslora")
    model.get_input_embeddings().weight.data *= 1.01
    assert None is not _digests_of_fixed_weights(parts)["base"] != before


def test_new_tokens_are_trained_and_nothing_else_of_the_embedding(flags, whole_run, tmp_path):
    run = whole_run("new tokens")
    assert AutoTokenizer.from_pretrained(run).tokenize("a<tool>b")[1] == "<tool>"
    saved = load_file(run / "adapter_model.safetensors")
    rows = [tensor for key, tensor in saved.items() if "trainable_tokens" in key or "token_adapter" in key]
    assert rows and all(len(tensor) == len(TOKENS) for tensor in rows)
    again = ["train", *flags, *ONE_STEP, "--adapter_name_or_path", str(run), "--output_dir", str(tmp_path / "on")]
    assert cli.main(again) == 0
    assert (tmp_path / "on" / "adapter_model.safetensors").is_file()


def test_an_adapter_is_gone_on_with_and_said(flags, base, tmp_path, capsys):
    first, one_step = tmp_path / "first", ["train", *flags, *ONE_STEP]
    assert cli.main([*one_step, "--output_dir", str(first)]) == 0
    capsys.readouterr()
    assert cli.main([*one_step, "--adapter_name_or_path", str(first), "--output_dir", str(tmp_path / "second")]) == 0
    assert f"continues training the adapter {first}: rank 4, of {base}" in capsys.readouterr().out.replace("\n", "")
    other = tiny.saved_llama(tmp_path / "other", seed=5)
    words = [*flags, "--model_name_or_path", str(other), "--adapter_name_or_path", str(first)]
    assert cli.main(["train", *words, "--output_dir", str(tmp_path / "third")]) == 2
    assert f"was trained on {base}, but model_name_or_path is {other}" in capsys.readouterr().err


def test_an_adapter_without_a_rank_is_gone_on_with(flags, base, tmp_path, capsys):
    words = {"task_type": "CAUSAL_LM", "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    adapter = get_peft_model(AutoModelForCausalLM.from_pretrained(base), IA3Config(**words))
    adapter.save_pretrained(tmp_path / "first")
    goes_on = ["--adapter_name_or_path", str(tmp_path / "first"), "--output_dir", str(tmp_path / "on")]
    assert cli.main(["train", *flags, *ONE_STEP, *goes_on]) == 0
    assert f"first: IA3, of {base}" in capsys.readouterr().out.replace("\n", "")


# -- all weights, by name ----------------------------------------------------------------------------------------------


def test_weights_are_trained_and_frozen_by_pattern():
    settings = ModelSettings(tuning="full", trainable_parameters=[r"layers\.1\.", "norm"], frozen_parameters=["mlp"])
    model = prepare_for_tuning(tiny.llama(), settings)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert "model.layers.1.self_attn.q_proj.weight" in trained and "model.layers.0.input_layernorm.weight" in trained
    assert not any("mlp" in name or "layers.0.self_attn" in name or "embed" in name for name in trained)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tuning": "full", "trainable_parameters": ["layers.9."]}, "matches no weight; there are model.embed_tokens"),
        ({"tuning": "full", "frozen_parameters": [""]}, "leave nothing to train"),
        ({"modules_to_save": ["lm_haed"]}, "no module 'lm_haed' .did you mean 'lm_head'"),
        ({"exclude_modules": ["q_porj"]}, "exclude_modules: the model has no module 'q_porj' .did you mean 'q_proj'"),
        ({"layers_to_transform": [0, 2]}, "layers_to_transform: the model has no layer 2; its layers: 0 to 1"),
    ],
)
def test_names_that_the_model_does_not_have_are_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        prepare_for_tuning(tiny.llama(), ModelSettings(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tuning": "full", "use_dora": True}, "use_dora is for adapters, but tuning is full"),
        ({"peft_type": "vera", "use_rslora": True}, "use_rslora is for LoRA, but peft_type is vera"),
        ({"trainable_parameters": ["a"]}, "trainable_parameters is for tuning: full"),
        ({"tuning": "full", "trainable_parameters": ["("]}, "is not a regular expression"),
        ({"tuning": "full", "frozen_parameters": ['["norm"]']}, "a list as one word; .* type --frozen_parameters"),
        ({"init_lora_weights": "pissa_niter_16"}, "random decomposition.*use pissa, which is exact"),
        ({"init_lora_weights": "pisa"}, "allowed: true, gaussian, olora, pissa, loftq .did you mean 'pissa'"),
        ({"init_lora_weights": "pissa", "tuning": "qlora"}, "but tuning: qlora quantizes them before"),
        ({"loraplus_lr_ratio": 0.5}, "loraplus_lr_ratio is 0.5; it must be 1 or more"),
        ({"new_tokens": ["<a>", "<a>"]}, "new_tokens lists a token twice"),
        ({"layers_to_transform": [-1]}, "layers_to_transform is -1; it must be 0 or more"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(SettingsError, match=message):
        ModelSettings(**changes)


def test_loftq_needs_a_gpu(flags, tmp_path, capsys):
    words = [*flags, "--init_lora_weights", "loftq", "--output_dir", str(tmp_path / "run")]
    assert cli.main(["train", *words]) == 2
    assert "init_lora_weights: loftq is computed by peft on CUDA or XPU only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("token", "message"),
    [("<|im_start|>", "which the tokenizer already has"), ('["<a>", "<b>"]', "a list as one word")],
    ids=["known", "list"],
)
def test_a_token_that_is_there_or_no_token_is_refused(base, token, message):
    settings = ModelSettings(model_name_or_path=str(base), new_tokens=[token])
    with pytest.raises(ModelError, match=message):
        add_tokens(load_tokenizer(settings), settings)


def test_new_rows_lie_where_the_tokenizer_counts_them():
    """A model may keep rows in reserve: the new tokens are not its last ones."""
    model = tiny.llama()
    grow_embeddings(model, tiny.VOCAB + 10)
    plan = AdapterPlan(new_rows=(tiny.VOCAB, tiny.VOCAB + 1))
    adapted = prepare_for_tuning(model, ModelSettings(new_tokens=["<a>", "<b>"]), plan)
    indices = adapted.peft_config["default"].trainable_token_indices
    assert indices == {"embed_tokens": [tiny.VOCAB, tiny.VOCAB + 1], "lm_head": [tiny.VOCAB, tiny.VOCAB + 1]}
    assert CAUSAL.new_rows == ()
