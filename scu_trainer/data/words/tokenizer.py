"""Word tokenizers: text is split at white space and punctuation; known are the most frequent words of training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from scu_trainer.settings.words import WordSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL = PAD, UNKNOWN, BEGIN, END = "<pad>", "<unk>", "<bos>", "<eos>"
"""The first words of every vocabulary, in this order."""


def word_tokenizer(texts: Iterable[list[str]], own: WordSettings) -> PreTrainedTokenizerFast:
    """Return a tokenizer trained on ``texts`` (batches, read once), of at most ``own.vocabulary_size`` words, special
    ones included. "<eos>" and the like inside a text are split like any other text. Each text begins with <bos>."""
    from tokenizers import models, trainers

    tokenizer = _splitting_tokenizer(models.WordLevel(unk_token=UNKNOWN), own.lowercase)
    trainer = trainers.WordLevelTrainer(
        vocab_size=own.vocabulary_size,
        min_frequency=own.min_word_count,
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _as_transformers(tokenizer)


def tokenizer_of(words: Sequence[str], own: WordSettings) -> PreTrainedTokenizerFast:
    """Return a tokenizer of these ``words``, ordered by id, special ones first as in ``word_tokenizer``."""
    from tokenizers import models

    vocabulary = {word: number for number, word in enumerate(words)}
    return _as_transformers(_splitting_tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN), own.lowercase))


def _splitting_tokenizer(words: Any, lowercase: bool) -> Any:
    from tokenizers import Tokenizer, normalizers, pre_tokenizers

    tokenizer = Tokenizer(words)
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _as_transformers(tokenizer: Any) -> PreTrainedTokenizerFast:
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        bos_token=BEGIN,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        model_input_names=["input_ids", "attention_mask"],
    )
