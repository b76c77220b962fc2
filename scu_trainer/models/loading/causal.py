"""Refuse models that are not causal language models: transformers would load some of them as one, but train them on the
wrong task. BERT, for example, sees the words that it has to predict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scu_trainer.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NOT_CAUSAL = (
    ("ForSequenceClassification", "a text classifier"),
    ("ForTokenClassification", "a token classifier"),
    ("ForQuestionAnswering", "a question answering model"),
    ("ForMultipleChoice", "a multiple choice model"),
    ("ForImageClassification", "an image classifier"),
    ("ForCTC", "a speech recognition model"),
    ("ForSpeechSeq2Seq", "a speech recognition model"),
    ("ForAudioClassification", "an audio classifier"),
)
"""Endings of the names of architectures without a language model head, and what such a model is."""

USE_IMAGE_TASK = "train it with --task image-classification"
USE_OWN_TRAINER = (
    "this task trains models that predict the next token, such as Llama, Qwen or GPT-2; the stock Trainer with our "
    "loops trains others (see docs/own_model.md)"
)


def require_causal(config: PretrainedConfig, name: str) -> None:
    """Raise ModelError if ``config`` declares a model that does not predict the next token."""
    other_kind = _other_kind(config)
    if other_kind is not None:
        what, instead = other_kind
        raise ModelError(
            f"{name} is {what} ({config.model_type}), which cannot be trained as a causal language model; {instead}"
        )


def _other_kind(config: PretrainedConfig) -> tuple[str, str] | None:
    """Return the kind of model and what to do instead; None for a causal language model, or if nothing is declared."""
    from transformers.models.auto import modeling_auto as auto

    kind, architectures = config.model_type, config.architectures or ()
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return None  # the model's own code declares a causal language model
    for ending, what in NOT_CAUSAL:
        if any(architecture.endswith(ending) for architecture in architectures):
            return what, USE_IMAGE_TASK if "Image" in ending else USE_OWN_TRAINER
    is_causal = kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder model", "with_loops(Seq2SeqTrainer) trains it, in Python (see docs/any_trainer.md)"
    is_decoder = any(architecture.endswith(("LMHeadModel", "ForCausalLM")) for architecture in architectures)
    if kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not (is_decoder and getattr(config, "is_decoder", False)):
        return "an encoder, trained to fill in masked words", USE_OWN_TRAINER
    reads_images = (
        kind in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES or getattr(config, "vision_config", None) is not None
    )
    if not is_causal and reads_images:
        return "an image-text model", f"{USE_OWN_TRAINER}. Its images are not supported"
    if not is_causal and kind in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        return "an image model", USE_IMAGE_TASK
    if not is_causal and kind in auto.CONFIG_MAPPING_NAMES:
        return "not a causal language model in transformers", USE_OWN_TRAINER
    return None
