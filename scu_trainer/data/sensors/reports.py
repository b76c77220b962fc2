"""Reports beside recordings: a short text each, cut into words as those of the GRU are (``data.words.tokenizer``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from scu_trainer.data.words.tokenizer import END, SPECIAL, UNKNOWN, tokenizer_of, word_tokenizer
from scu_trainer.settings.words import WordSettings

WORDS = WordSettings(min_word_count=1)
"""Reports are few and short: a word that one of them has is known."""

UNKNOWN_NUMBER = SPECIAL.index(UNKNOWN)

MOST_LETTERS = 500
"""Longer texts are no short reports; attention to all of their words would set the memory of a step."""


def learned_words(reports: Sequence[str]) -> list[str]:
    """Words of the training ``reports`` by number, special ones first."""
    known = word_tokenizer([[text for text in reports if text]], WORDS).get_vocab()
    return sorted(known, key=known.__getitem__)


def encoded(reports: Sequence[str], words: Sequence[str]) -> list[numpy.ndarray]:
    """Numbers of the words of each report between those of the begin and of the end, int64 (words + 2,); nothing, (0,),
    for a recording without one."""
    tokenizer = tokenizer_of(words, WORDS)
    end = [words.index(END)]
    found = (tokenizer(text)["input_ids"] + end if text else [] for text in reports)
    return [numpy.array(numbers, dtype="int64") for numbers in found]
