"""Which models the task of causal language models refuses, by what their config.json declares."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from scu_trainer.errors import ModelError
from scu_trainer.models.loading.causal import require_causal
from scu_trainer.models.loading.load import causal_config
from scu_trainer.settings import ModelSettings
from tests import tiny

CAUSAL = {
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "mamba": "MambaForCausalLM",
    "rwkv": "RwkvForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "bloom": "BloomForCausalLM",
    "opt": "OPTForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
OTHERS = {
    ("bert", "BertForMaskedLM"): "an encoder",
    ("roberta", "RobertaForMaskedLM"): "an encoder",
    ("electra", "ElectraForPreTraining"): "an encoder",
    ("modernbert", "ModernBertForMaskedLM"): "an encoder",
    ("deberta-v2", None): "an encoder",
    ("t5", "T5ForConditionalGeneration"): "an encoder-decoder",
    ("bart", "BartForConditionalGeneration"): "an encoder-decoder",
    ("whisper", "WhisperForConditionalGeneration"): "an encoder-decoder",
    ("llama", "LlamaForSequenceClassification"): "a text classifier",
    ("bert", "BertForTokenClassification"): "a token classifier",
    ("qwen2_vl", "Qwen2VLForConditionalGeneration"): "an image-text model",
    ("llava", "LlavaForConditionalGeneration"): "an image-text model",
    ("vit", "ViTForImageClassification"): "an image classifier.*--task image-classification",
    ("resnet", "ResNetModel"): "an image model.*--task image-classification",
    ("wav2vec2", "Wav2Vec2ForCTC"): "a speech recognition model",
    ("clip", "CLIPModel"): "not a causal language model in transformers|an image-text model",
}


@pytest.mark.parametrize("kind", CAUSAL)
def test_models_of_the_next_token_pass(kind):
    for architectures in ([CAUSAL[kind]], None):
        require_causal(AutoConfig.for_model(kind, architectures=architectures), "it")


@pytest.mark.parametrize("kind", OTHERS, ids=str)
def test_another_kind_of_model_is_named(kind):
    name, architecture = kind
    config = AutoConfig.for_model(name, architectures=None if architecture is None else [architecture])
    with pytest.raises(ModelError, match=rf"it is ({OTHERS[kind]}).*"):
        require_causal(config, "it")


def test_an_encoder_that_was_made_a_decoder_passes():
    config = AutoConfig.for_model("bert", architectures=["BertLMHeadModel"], is_decoder=True)
    require_causal(config, "it")
    with pytest.raises(ModelError, match="an encoder"):
        require_causal(AutoConfig.for_model("bert", architectures=["BertLMHeadModel"]), "it")


def test_code_of_its_own_is_believed():
    config = AutoConfig.for_model("bert", auto_map={"AutoModelForCausalLM": "model.Model"})
    require_causal(config, "it")


def test_a_folder_with_an_encoder_is_refused_before_its_weights_are_read(tmp_path):
    tiny.t5().config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"is an encoder-decoder model \(t5\).*cannot be trained.*Seq2SeqTrainer"):
        causal_config(ModelSettings(model_name_or_path=str(tmp_path)))


@pytest.mark.parametrize("classes", [[5], "LlamaForCausalLM", {"a": 1}])
def test_architectures_that_are_no_names_are_refused(tmp_path, classes):
    tiny.llama().config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": classes}))
    with pytest.raises(ModelError, match=r"as architectures; it must be a list of class names"):
        causal_config(ModelSettings(model_name_or_path=str(tmp_path)))
