"""Words: text is cut at blanks and around each punctuation mark; the most frequent of the training texts are known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from scu_trainer.settings.words import WordSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN, BEGIN, END = "<pad>", "<unk>", "<bos>", "<eos>"


def word_tokenizer(texts: Iterable[list[str]], own: WordSettings) -> PreTrainedTokenizerFast:
    """A tokenizer of at most ``own.vocabulary_size`` words, special ones included. ``texts``: read once, in batches.

    A text that holds the likes of "<eos>" itself is cut like any other. Each text begins with <bos>.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    if own.lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordLevelTrainer(
        vocab_size=own.vocabulary_size,
        min_frequency=own.min_word_count,
        special_tokens=[PAD, UNKNOWN, BEGIN, END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
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
