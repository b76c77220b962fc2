"""From a name to a model: what is refused and how, what is loaded in which type, which layers get adapters."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import CLIPConfig, CLIPForImageClassification, GPT2Config, GPT2LMHeadModel, LlamaModel, ViTConfig

from scu_trainer.errors import ModelError
from scu_trainer.models.loading.adapters import adapter_targets
from scu_trainer.models.loading.load import (
    load_for_evaluation,
    load_model,
    load_tokenizer,
    prepare_for_evaluation,
    prepare_for_tuning,
)
from scu_trainer.models.loading.names import as_model_error, base_of, check_source, is_adapter, with_adapter_as_model
from scu_trainer.models.sensors.configuration_trident import TridentConfig
from scu_trainer.models.sensors.modeling_trident import TridentForSensorClassification
from scu_trainer.settings import ModelSettings
from tests import tiny


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny.saved_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter_dir(model_dir, tmp_path_factory) -> Path:
    """An adapter whose B is not zero, so that it changes the model."""
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    model = prepare_for_tuning(load_model(settings(model_dir)), settings(model_dir))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def copy_of(tmp_path):
    """``copy_of(folder)`` -> a copy to break."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / folder.name))


def settings(name, **changes) -> ModelSettings:
    return ModelSettings(model_name_or_path=str(name), **changes)


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def adapted(model) -> set[str]:
    """Names of the layers that carry adapters, without what peft puts in front."""
    marker = ".lora_A.default"
    names = [name.removesuffix(marker) for name, _ in model.named_modules() if name.endswith(marker)]
    return {name.removeprefix("base_model.model.") for name in names}


# -- which name is a model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["someone/model", "gpt2"])
def test_hub_ids_pass_without_a_look_at_the_network(name):
    check_source(name)


@pytest.mark.parametrize("name", ["./missing", "/missing/model", "~/missing", "a/b/c"])
def test_missing_paths(name):
    with pytest.raises(ModelError, match=rf"'{name}' does not exist; give a folder with a config\.json, or a Hub id"):
        check_source(name)


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "weights.bin").write_text("x")
    with pytest.raises(ModelError, match="is a file; give a folder"):
        check_source(str(tmp_path / "weights.bin"))


def test_a_folder_without_config(tmp_path):
    with pytest.raises(ModelError, match=r"without config\.json or adapter_config\.json"):
        check_source(str(tmp_path))


def test_a_folder_of_named_adapters(tmp_path):
    (tmp_path / "french").mkdir()
    (tmp_path / "french" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=rf"that save_pretrained wrote, such as the adapter {tmp_path}/french"):
        check_source(str(tmp_path))


def test_only_a_folder_of_a_near_name_is_suggested(tmp_path):
    (tmp_path / "mistral").mkdir()
    (tmp_path / "unusable").symlink_to("a" * 300)  # a look at it is an error, as at a link into a locked folder
    with pytest.raises(ModelError, match=rf"does not exist \(did you mean '{tmp_path}/mistral'\?\); give a folder"):
        check_source(str(tmp_path / "mistrl"))
    with pytest.raises(ModelError, match=r"qwen2' does not exist; give a folder"):
        check_source(str(tmp_path / "qwen2"))


def test_the_folder_of_a_stock_run_leads_to_its_newest_checkpoint(tmp_path):
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=rf"that save_pretrained wrote, such as the model {tmp_path}/checkpoint-10$"):
        check_source(str(tmp_path))


def test_models_and_adapters_are_told_apart(model_dir, adapter_dir):
    check_source(str(model_dir))
    check_source(str(adapter_dir))
    assert is_adapter(adapter_dir) and not is_adapter(model_dir)
    assert base_of(adapter_dir) == str(model_dir)


@pytest.mark.parametrize(
    "trained",
    [{}, {"modules_to_save": ["embed_tokens", "lm_head"]}, {"trainable_token_indices": {"embed_tokens": [3, 9]}}],
    ids=["", "modules", "tokens"],
)
def test_an_adapter_whose_embedding_has_grown_is_what_peft_reads(model_dir, tmp_path, trained):
    """As other programs save one after they have added tokens, in reserve of those of the tokenizer too."""
    model = tiny.LlamaForCausalLM.from_pretrained(model_dir)
    rows = len(load_tokenizer(settings(model_dir))) + 5
    model.resize_token_embeddings(rows)
    model = tiny.lora(model, **trained)
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    model.save_pretrained(tmp_path, save_embedding_layers=True)
    base = tiny.LlamaForCausalLM.from_pretrained(model_dir)
    base.resize_token_embeddings(rows)
    tokens = torch.arange(rows - 9, rows)[None]
    with torch.no_grad():
        expected = PeftModel.from_pretrained(base, str(tmp_path))(tokens).logits
        chosen = settings(tmp_path)
        assert torch.equal(load_for_evaluation(str(tmp_path), chosen)(tokens).logits, expected)
        continued = prepare_for_tuning(load_model(chosen), chosen).eval()
        assert torch.equal(continued(tokens).logits, expected)
        with pytest.warns(UserWarning, match="Setting `save_embedding_layers` to `True`"):
            continued.save_pretrained(tmp_path / "again")
        assert torch.equal(load_for_evaluation(str(tmp_path / "again"), chosen)(tokens).logits, expected)


def test_an_adapter_of_a_classifier_with_embeddings_of_its_own_is_loaded(tmp_path):
    """Of places in an image, or of the words of a report: those that transformers asks for it may not have."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    places = CLIPConfig(vision_config={**sizes, "image_size": 8, "patch_size": 4}, text_config=sizes)
    words = TridentConfig(report_words=["<pad>", "<unk>", "<begin>", "<end>"], report_length=2)
    makers = (lambda: CLIPForImageClassification(places), lambda: TridentForSensorClassification(words))
    for number, make in enumerate(makers):
        folder = tmp_path / str(number)
        tiny.lora(make(), modules_to_save=["classifier"]).save_pretrained(folder)
        assert isinstance(prepare_for_evaluation(make(), str(folder), ModelSettings()), PeftModel)
        assert isinstance(prepare_for_tuning(make(), settings(folder)), PeftModel)


def test_a_base_that_was_named_from_a_folder_above_is_found_from_anywhere(
    adapter_dir, model_dir, tmp_path, monkeypatch
):
    (tmp_path / "elsewhere" / "base").mkdir(parents=True)
    run = shutil.copytree(adapter_dir, tmp_path / "project" / "runs" / "mine")
    base = shutil.copytree(model_dir, tmp_path / "project" / "base")
    edit_json(run / "adapter_config.json", base_model_name_or_path="base")
    monkeypatch.chdir(tmp_path / "project")
    assert base_of(run) == "base"
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert base_of(run) == str(base), "not the folder of that name here, which the run has never seen"
    edit_json(run / "adapter_config.json", base_model_name_or_path="someone/base")
    assert base_of(run) == "someone/base"


@pytest.mark.parametrize("name", ["mine", "gpt2"])
def test_a_run_is_not_the_base_of_those_beside_it_or_of_itself(adapter_dir, model_dir, tmp_path, name):
    """Which were trained from a model of the Hub that is called as the run."""
    run = shutil.copytree(adapter_dir, tmp_path / "runs" / "mine")
    other = shutil.copytree(model_dir, tmp_path / "runs" / "gpt2")
    for folder in (run, other):
        (folder / "run.json").write_text("{}")
    edit_json(run / "adapter_config.json", base_model_name_or_path=name)
    assert base_of(run) == name


def test_a_folder_that_is_not_there_is_not_the_hub_id_of_the_same_words(adapter_dir, copy_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = copy_of(adapter_dir)
    edit_json(folder / "adapter_config.json", base_model_name_or_path="someone/base")
    given = ModelSettings(adapter_name_or_path=str(folder), model_name_or_path="someone/base")
    assert with_adapter_as_model(given).model_name_or_path == str(folder)
    with pytest.raises(ModelError, match="was trained on someone/base"):
        with_adapter_as_model(replace(given, model_name_or_path="./someone/base"))


def test_a_base_in_the_home_folder_gives_its_tokenizer_too(adapter_dir, model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    base = shutil.copytree(model_dir, tmp_path / "base")
    adapter = shutil.copytree(adapter_dir, tmp_path / "mine")
    for file in adapter.glob("*token*"):
        file.unlink()
    edit_json(adapter / "adapter_config.json", base_model_name_or_path="~/base")
    assert base_of("~/mine") == str(base)
    assert load_tokenizer(ModelSettings(model_name_or_path=str(adapter)))("a")["input_ids"]


def test_a_base_that_moved_is_set_in_the_file_that_names_it(adapter_dir, copy_of, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = copy_of(adapter_dir)
    edit_json(folder / "adapter_config.json", base_model_name_or_path="gone_base")
    said = re.escape(f"{folder / 'adapter_config.json'} names that base; set base_model_name_or_path there")
    for load in (load_model, load_tokenizer):
        with pytest.raises(ModelError, match=said):
            load(settings(folder))


def test_the_home_directory_may_be_written_as_tilde(model_dir, monkeypatch):
    monkeypatch.setenv("HOME", str(model_dir.parent))
    name = f"~/{model_dir.name}"
    assert load_model(settings(name)).config.model_type == "llama"
    assert len(load_tokenizer(settings(name))) == 2048


# -- broken folders ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", ["", "{", "{}", "[1]", '{"model_type": "nonsense"}'])
def test_configs_that_name_no_language_model(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match="cannot load the model of"):
        load_model(settings(tmp_path))
    with pytest.raises(ModelError, match="cannot load the tokenizer of"):
        load_tokenizer(settings(tmp_path))


def test_a_folder_without_a_tokenizer(model_dir, copy_of):
    folder = copy_of(model_dir)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json and no tokenizer_config\.json in that folder; copy"):
        load_tokenizer(settings(folder))


def test_a_folder_with_the_settings_of_a_tokenizer_alone(model_dir, copy_of):
    folder = copy_of(model_dir)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"there is no tokenizer\.json in that folder"):
        load_tokenizer(settings(folder))


def test_a_model_of_images_is_named_before_its_tokenizer_is_missed(tmp_path):
    ViTConfig(architectures=["ViTForImageClassification"]).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"is an image classifier \(vit\).*--task image-classification"):
        load_tokenizer(settings(tmp_path))


def test_a_name_that_is_no_folder_here_says_so(tmp_path, monkeypatch):
    (tmp_path / "m" / "chatty").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    expected = r"there is no folder m/chaty here \(did you mean 'm/chatty'\?\); if it is a Hub id"
    for load in (load_model, load_tokenizer):
        with pytest.raises(ModelError, match=expected):
            load(settings("m/chaty"))


@pytest.mark.parametrize("kept_bytes", [0, 7, 5000])
def test_torn_weights_are_called_damaged(model_dir, copy_of, kept_bytes):
    weights = copy_of(model_dir) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept_bytes])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or cut off: copy or download it again"):
        load_model(settings(weights.parent))


@pytest.mark.parametrize(("name", "load"), [("model.safetensors", load_model), ("tokenizer.json", load_tokenizer)])
def test_a_folder_that_was_cloned_without_git_lfs_is_told_what_to_type(model_dir, copy_of, name, load):
    file = copy_of(model_dir) / name
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 269060552\n")
    with pytest.raises(ModelError, match=rf"{name} holds only the address of its content.*git lfs pull in its folder$"):
        load(settings(file.parent))


@pytest.mark.parametrize("kept_bytes", [None, 0, 7, 5000])
def test_missing_and_torn_weights(model_dir, copy_of, kept_bytes):
    weights = copy_of(model_dir) / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    if kept_bytes is not None:
        weights.write_bytes(content[:kept_bytes])
    with pytest.raises(ModelError, match="cannot load the model of"):
        load_model(settings(weights.parent))


def test_weights_of_another_size(model_dir, copy_of):
    folder = copy_of(model_dir)
    edit_json(folder / "config.json", hidden_size=64)
    with pytest.raises(ModelError, match=r"lm_head\.weight and \d+ more"):
        load_model(settings(folder))


def test_a_value_of_another_type_in_the_config(model_dir, copy_of):
    folder = copy_of(model_dir)
    edit_json(folder / "config.json", hidden_size="wide")
    with pytest.raises(ModelError, match="hidden_size"):
        load_model(settings(folder))


def test_weights_without_an_output_head_are_not_filled_up_at_random(model_dir, tmp_path):
    LlamaModel.from_pretrained(model_dir).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        load_model(settings(tmp_path))


def test_tied_output_heads_are_complete(tmp_path):
    tiny.llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    model = load_model(settings(tmp_path))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_attention_that_is_not_installed(model_dir):
    with pytest.raises(ModelError, match="cannot load the model of"):
        load_model(settings(model_dir, attn_implementation="flash_attention_2"))


def test_hub_ids_that_cannot_be_reached(monkeypatch):
    for load in (load_model, load_tokenizer):
        with pytest.raises(ModelError, match="if it is a Hub id, check its spelling and the connection"):
            load(settings("nobody/nothing"))


@pytest.mark.parametrize("content", ["", "{", "{}", "[]"])
def test_torn_tokenizers(model_dir, copy_of, content):
    folder = copy_of(model_dir)
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match="cannot load the tokenizer of"):
        load_tokenizer(settings(folder))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"base_model_name_or_path": null}'])
def test_adapters_that_do_not_tell_their_base(tmp_path, content):
    (tmp_path / "adapter_config.json").write_text(content)
    for load in (load_tokenizer, lambda found: load_for_evaluation(found.model_name_or_path, ModelSettings())):
        with pytest.raises(ModelError, match="adapter"):
            load(settings(tmp_path))


def test_an_adapter_whose_base_is_gone(adapter_dir, copy_of):
    folder = copy_of(adapter_dir)
    edit_json(folder / "adapter_config.json", base_model_name_or_path="/gone/base")
    with pytest.raises(ModelError, match=r"adapter .* needs its base model: .*/gone/base.* does not exist"):
        load_for_evaluation(str(folder), ModelSettings())


def test_an_adapter_without_weights(adapter_dir, copy_of):
    folder = copy_of(adapter_dir)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot load the adapter of"):
        load_for_evaluation(str(folder), ModelSettings())


def test_an_adapter_with_torn_weights(adapter_dir, copy_of):
    weights = copy_of(adapter_dir) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:3000])
    with pytest.raises(ModelError, match="cannot load the adapter of"):
        load_for_evaluation(str(weights.parent), ModelSettings())


def test_an_adapter_that_lacks_a_weight_is_not_scored_as_if_it_had_it(adapter_dir, copy_of):
    weights = copy_of(adapter_dir) / "adapter_model.safetensors"
    kept = load_file(weights)
    kept.pop(next(name for name in kept if "lora_B" in name))
    save_file(kept, weights)
    with pytest.raises(ModelError, match="missing adapter keys"):
        load_for_evaluation(str(weights.parent), ModelSettings())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"alora_invocation_tokens": "x"},
            'alora_invocation_tokens is "x"; it must be a list of token ids, correct it',
        ),
        ({"alora_invocation_tokens": [1.5]}, "alora_invocation_tokens is [1.5]; it must be a list of token ids"),
        ({"alora_invocation_tokens": [10**30]}, "is not the id of a token; correct it"),
        ({"trainable_token_indices": 3}, "trainable_token_indices is 3; it must be a list of token ids, or one per"),
        ({"trainable_token_indices": {"embed_tokens": ["x"]}}, "trainable_token_indices is {"),
        ({"trainable_token_indices": [-1]}, "-1 is not the id of a token"),
        ({"base_model_name_or_path": -1}, "base_model_name_or_path is -1; it must be text, correct it"),
        ({"base_model_name_or_path": "\ud800"}, "does not name the base model; set base_model_name_or_path in it"),
    ],
)
def test_an_adapter_whose_description_holds_another_type(adapter_dir, copy_of, wrong, said):
    folder = copy_of(adapter_dir)
    edit_json(folder / "adapter_config.json", **wrong)
    with pytest.raises(ModelError, match=re.escape(said)):
        load_for_evaluation(str(folder), ModelSettings())


def test_an_adapter_of_another_rank(adapter_dir, copy_of):
    folder = copy_of(adapter_dir)
    edit_json(folder / "adapter_config.json", r=7)
    with pytest.raises(ModelError, match="cannot load the adapter of"):
        load_for_evaluation(str(folder), ModelSettings())


# -- what is loaded ----------------------------------------------------------------------------------------------------


def test_the_end_of_text_doubles_as_padding(model_dir, copy_of):
    folder = copy_of(model_dir)
    edit_json(folder / "tokenizer_config.json", pad_token=None)
    tokenizer = load_tokenizer(settings(folder))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == load_tokenizer(settings(model_dir)).eos_token_id


def test_a_tokenizer_without_end_of_text(model_dir, copy_of):
    folder = copy_of(model_dir)
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ModelError, match=r"no end-of-text token; set eos_token in its tokenizer_config\.json"):
        load_tokenizer(settings(folder))


def test_layers_that_the_configuration_does_not_count_are_named(model_dir, copy_of, caplog):
    folder = copy_of(model_dir)
    edit_json(folder / "config.json", num_hidden_layers=1)
    with caplog.at_level(logging.WARNING, "scu_trainer"):
        load_model(settings(model_dir))
        assert not caplog.text
        load_model(settings(folder))
    assert "9 weights in its files are left out (model.layers.1.input_layernorm.weight, " in caplog.text


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"eos_token_id": "</s>"}, r'eos_token_id is "</s>", which cannot be used to generate'),
        ({"bos_token_id": [1, None]}, r"bos_token_id is \[1, null\], "),
        ({"pad_token_id": 10**30}, "pad_token_id has 10{30}, "),
        ({"temperature": "hot"}, 'temperature is "hot", '),
    ],
)
def test_a_generation_config_with_which_no_answer_could_be_generated(model_dir, copy_of, wrong, said):
    folder = copy_of(model_dir)
    edit_json(folder / "generation_config.json", **wrong)
    with pytest.raises(ModelError, match=said):
        load_model(settings(folder))


@pytest.mark.parametrize("wrong", [{"model_max_length": []}, {"unk_token": ""}])
def test_a_tokenizer_that_loads_but_cannot_be_used(tmp_path, wrong):
    folder = tiny.saved_llama(tmp_path / "model", layers=1)
    edit_json(folder / "tokenizer_config.json", **wrong)
    with pytest.raises(ModelError, match="cannot load the tokenizer of"):
        load_tokenizer(ModelSettings(model_name_or_path=str(folder)))


def test_an_adapter_without_tokenizer_takes_that_of_its_base(model_dir, adapter_dir):
    assert load_tokenizer(settings(adapter_dir)).get_vocab() == load_tokenizer(settings(model_dir)).get_vocab()


@pytest.mark.parametrize(
    ("tuning", "dtype", "expected"),
    [
        ("lora", "auto", torch.bfloat16),
        ("lora", "float32", torch.float32),
        ("full", "auto", torch.float32),
        ("full", "bfloat16", torch.bfloat16),
    ],
)
def test_type_of_the_weights(tmp_path, tuning, dtype, expected):
    tiny.llama().bfloat16().save_pretrained(tmp_path)
    model = load_model(settings(tmp_path, tuning=tuning, dtype=dtype))
    assert {weight.dtype for weight in model.parameters()} == {expected}


def test_an_adapter_is_scored_on_top_of_its_base_frozen(model_dir, adapter_dir):
    tokens = torch.arange(3, 19)[None]
    base, tuned = (load_for_evaluation(str(folder), ModelSettings()) for folder in (model_dir, adapter_dir))
    assert not tuned.training and not any(weight.requires_grad for weight in tuned.parameters())
    with torch.no_grad():
        change = (tuned(tokens).logits - base(tokens).logits).abs().max()
        with tuned.disable_adapter():
            assert torch.equal(tuned(tokens).logits, base(tokens).logits)
    assert change > 0.1


# -- adapters ----------------------------------------------------------------------------------------------------------


def test_granite_hybrid_gets_adapters_wherever_a_layer_is_really_called():
    layers = adapted(prepare_for_tuning(tiny.granite_hybrid(), ModelSettings()))
    mlp = {f"model.layers.{i}.shared_mlp.{name}" for i in range(4) for name in ("input_linear", "output_linear")}
    attention = {f"model.layers.2.self_attn.{name}_proj" for name in "qkvo"}
    mamba = {f"model.layers.{i}.mamba.in_proj" for i in (0, 1, 3)}
    assert layers == mlp | attention | mamba, "no mamba out_proj, no lm_head"


def test_names_are_spelled_out_only_where_a_bypassed_layer_bears_them_too():
    model = tiny.granite_hybrid()
    model.model.layers[2].self_attn.out_proj = torch.nn.Linear(4, 4)
    targets = adapter_targets(model)
    assert "model.layers.2.self_attn.out_proj" in targets and "out_proj" not in targets
    assert not any("mamba.out_proj" in name for name in adapted(prepare_for_tuning(model, ModelSettings())))


def test_gpt2_layers_are_convolutions_of_width_one():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=tiny.VOCAB, n_embd=32, n_layer=1, n_head=2, n_positions=32, eos_token_id=1)
    model = prepare_for_tuning(GPT2LMHeadModel(config), ModelSettings())
    block = "transformer.h.0"
    assert adapted(model) == {f"{block}.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    tokens = torch.arange(3, 19)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    reached = [weight.grad.abs().max() > 0 for name, weight in model.named_parameters() if "lora_B" in name]
    assert len(reached) == 4 and all(reached)


def test_lora_trains_float32_adapters_on_a_frozen_bfloat16_base():
    model = prepare_for_tuning(tiny.llama().bfloat16(), ModelSettings(lora_r=4))
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    frozen = [weight for weight in model.parameters() if not weight.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    assert {weight.dtype for weight in frozen} == {torch.bfloat16}
    assert {weight.shape[0] for name, weight in trained.items() if "lora_A" in name} == {4}
    assert model.base_model.model.model.layers[0].mlp.up_proj.scaling["default"] == 16.0 / 4


def test_full_tuning_trains_everything():
    model = tiny.llama()
    assert prepare_for_tuning(model, ModelSettings(tuning="full")) is model
    assert all(weight.requires_grad for weight in model.parameters())


def test_chosen_targets():
    model = prepare_for_tuning(tiny.llama(), ModelSettings(lora_target_modules=["q_proj", "up_proj"]))
    assert {name.rsplit(".", 1)[-1] for name in adapted(model)} == {"q_proj", "up_proj"}


def test_all_linear_means_the_default():
    chosen = adapted(prepare_for_tuning(tiny.granite_hybrid(), ModelSettings(lora_target_modules=["all-linear"])))
    assert chosen == adapted(prepare_for_tuning(tiny.granite_hybrid(), ModelSettings()))


def test_unknown_targets_name_the_nearest_layer():
    with pytest.raises(ModelError, match=r"no module 'q_prj'; its linear layers: .*up_proj.*did you mean 'q_proj'"):
        prepare_for_tuning(tiny.llama(), ModelSettings(lora_target_modules=["v_proj", "q_prj"]))


def test_targets_that_a_fused_kernel_bypasses_are_said(caplog):
    with caplog.at_level(logging.WARNING, "scu_trainer"):
        prepare_for_tuning(tiny.granite_hybrid(), ModelSettings(lora_target_modules=["out_proj"]))
    assert "3 mamba projections (for instance model.layers.0.mamba.out_proj)" in caplog.text


def test_a_model_without_linear_layers():
    with pytest.raises(ModelError, match="no linear layers for LoRA; use tuning: full"):
        adapter_targets(torch.nn.Sequential(torch.nn.Embedding(4, 4)))


def test_weights_of_another_user_are_not_said_to_be_missing(tmp_path, monkeypatch):
    """transformers writes them for their owner alone, and safetensors says "No such file or directory"."""
    folder = tiny.saved_llama(tmp_path / "model")
    file = folder / "model.safetensors"
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != file)
    with pytest.raises(ModelError, match=rf"{file} exists, but this user may not read it; chmod a\+r {file}$"):
        with as_model_error(str(folder), "model"):
            raise FileNotFoundError(f"No such file or directory: {file}")
