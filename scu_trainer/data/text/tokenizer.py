"""A small tokenizer that is trained locally: byte-level BPE on the embedded Python documentation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from scu_trainer.data.embedded import embedded_identity, read_embedded
from scu_trainer.data.store import build_once, reading_cache
from scu_trainer.data.text.chat import read_chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCABULARY_SIZE = 2048
TOKENIZER_VERSION = 1  # raise it when anything below changes
BOS, EOS, PAD, UNK = "<|bos|>", "<|eos|>", "<|pad|>", "<|unk|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = "qwen"
"""It renders tools, calls and reasoning, and its end-of-turn marker is learned."""


def embedded_tokenizer(cache_dir: Path) -> PreTrainedTokenizerFast:
    """Return the embedded tokenizer of 2048 tokens. The first call trains it and stores it in ``cache_dir``."""
    from transformers import PreTrainedTokenizerFast

    name = "-".join(["bpe", str(TOKENIZER_VERSION), *embedded_identity("python_docs")[2:]])
    folder = build_once(cache_dir / "tokenizer" / name, lambda new: _train(cache_dir).save_pretrained(new))
    with reading_cache(folder):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = read_chat_template(CHAT_TEMPLATE)  # the cached one may be of an earlier version
    return tokenizer


def _train(cache_dir: Path) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = [BOS, EOS, PAD, UNK, TURN_START, TURN_END]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # every byte has a token, so no text is unknown
        show_progress=False,
    )
    texts = (record.value["text"] for record in read_embedded("python_docs", cache_dir, "text"))
    tokenizer.train_from_iterator(texts, trainer)
    # A document starts with bos, so that its first real token is predicted too.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        additional_special_tokens=[TURN_START, TURN_END],
        clean_up_tokenization_spaces=False,
    )
