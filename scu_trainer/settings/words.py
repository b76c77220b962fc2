"""Settings of the recurrent language model over words: categories, vocabulary and sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from scu_trainer.settings.base import Allowed, check_fields, option

EMBEDDED_WORD_DATASET = "python_doc_sections"
SPECIAL_WORDS = 4  # padding, unknown, begin, end

ALLOWED = {
    "vocabulary_size": Allowed(above=SPECIAL_WORDS),
    **dict.fromkeys(
        ("min_word_count", "embedding_size", "category_embedding_size", "gru_hidden_size", "gru_layers"),
        Allowed(least=1),
    ),
    "gru_dropout": Allowed(below=1),
    "category_dropout": Allowed(below=1),
}


@dataclass(frozen=True)
class WordSettings:
    """The words, the vocabulary, and the size of the model."""

    category_column: Optional[str] = option("category", "column with the category of a text; empty: no categories")
    lowercase: bool = option(True, "convert texts to lowercase")
    vocabulary_size: int = option(10_000, "largest number of words in the vocabulary; rarer words become <unk>")
    min_word_count: int = option(2, "how often a word must occur in the training texts to be in the vocabulary")
    embedding_size: int = option(128, "size of the word embedding")
    category_embedding_size: int = option(64, "size of the category embedding")
    gru_hidden_size: int = option(256, "size of the recurrent state")
    gru_layers: int = option(1, "number of stacked recurrent layers")
    gru_dropout: float = option(0.2, "dropout before, between and after the recurrent layers")
    category_dropout: float = option(0.1, "share of the training rows whose category is hidden from the model")
    tie_embeddings: bool = option(True, "use the word embedding also as the output matrix")

    def __post_init__(self) -> None:
        check_fields(self, ALLOWED)


DEFAULTS: dict[str, object] = {
    "dataset": EMBEDDED_WORD_DATASET,
    "tuning": "full",
    "scu": False,  # lambda would decay back to random weights
    "block_size": 128,
    "per_device_train_batch_size": 12,
    "learning_rate": 5e-3,
    "num_train_epochs": 2,
    "max_steps": -1,
    "keep_freed_memory": True,
}
"""Defaults that differ from those of text models: a small model from scratch, one text per row."""

MODES: dict[str, dict[str, object]] = {
    "tiny": {
        "vocabulary_size": 2000,
        "embedding_size": 32,
        "category_embedding_size": 16,
        "gru_hidden_size": 64,
        "gru_dropout": 0.0,
        "block_size": 64,
        "dataset_size": 2000,
        "num_train_epochs": 1,
        "max_steps": -1,
    },
    "standard": {
        "vocabulary_size": 10_000,
        "embedding_size": 128,
        "category_embedding_size": 64,
        "gru_hidden_size": 256,
        "gru_layers": 1,
        "gru_dropout": 0.2,
        "block_size": 128,
        "dataset_size": None,
        "num_train_epochs": 2,
        "max_steps": -1,
    },
    "extended": {
        "vocabulary_size": 30_000,
        "min_word_count": 1,
        "embedding_size": 256,
        "category_embedding_size": 128,
        "gru_hidden_size": 512,
        "gru_layers": 2,
        "gru_dropout": 0.4,
        "block_size": 256,
        "dataset_size": None,
        "num_train_epochs": 8,
        "max_steps": -1,
    },
}
"""Named groups of values, from seconds to an hour on two CPU cores. ``max_steps`` of -1 trains for the epochs, and
``dataset_size`` None uses all texts."""
