"""Is it a causal language model? transformers would load some others as one, and train them on a task that they do not
have: BERT sees the words that it is to predict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scu_trainer.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NOT_CAUSAL = (
    ("ForSequenceClassification", "a classifier of texts"),
    ("ForTokenClassification", "a classifier of words"),
    ("ForQuestionAnswering", "a finder of answers in a text"),
    ("ForMultipleChoice", "a model for multiple choice"),
    ("ForImageClassification", "a classifier of images"),
    ("ForCTC", "a recognizer of speech"),
    ("ForSpeechSeq2Seq", "a recognizer of speech"),
    ("ForAudioClassification", "a classifier of sounds"),
)
"""How the names of architectures end whose heads are none for words, and what such a model is."""

IMAGES = "train it with --task image-classification"
ELSEWHERE = (
    "this task trains models that predict the next token, such as Llama, Qwen or GPT-2; the stock Trainer with our "
    "loops trains others (see docs/own_model.md)"
)


def require_causal(config: PretrainedConfig, name: str) -> None:
    """Raise ModelError for a model that is none for the next token, by what its config.json declares."""
    found = _other_kind(config)
    if found is not None:
        what, instead = found
        raise ModelError(
            f"{name} is {what} ({config.model_type}), which cannot be trained as a causal language model; {instead}"
        )


def _other_kind(config: PretrainedConfig) -> tuple[str, str] | None:
    """What it is, and what to do instead; None for a causal language model, and where nothing is declared."""
    from transformers.models.auto import modeling_auto as auto

    kind, architectures = config.model_type, config.architectures or ()
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return None  # code of its own says so
    for ending, what in NOT_CAUSAL:
        if any(architecture.endswith(ending) for architecture in architectures):
            return what, IMAGES if "Image" in ending else ELSEWHERE
    is_causal = kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder model", "with_loops(Seq2SeqTrainer) trains it, in Python (see docs/any_trainer.md)"
    is_decoder = any(architecture.endswith(("LMHeadModel", "ForCausalLM")) for architecture in architectures)
    if kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not (is_decoder and getattr(config, "is_decoder", False)):
        return "an encoder, trained to fill in masked words", ELSEWHERE
    sees = kind in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES or getattr(config, "vision_config", None) is not None
    if not is_causal and sees:
        return "a model of images and text", f"{ELSEWHERE}. Its images are not supported"
    if not is_causal and kind in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        return "a model of images", IMAGES
    if not is_causal and kind in auto.CONFIG_MAPPING_NAMES:
        return "no causal language model for transformers", ELSEWHERE
    return None
