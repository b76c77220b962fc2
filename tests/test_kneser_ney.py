"""The bigram baseline is the model that nltk computes, and a probability distribution."""

from __future__ import annotations

import random

import numpy
import pytest

from benchmarks.studies.kneser_ney import KneserNey, bigrams, kneser_ney_perplexity

WORDS = 12
ROWS = [[2, *(random.Random(seed).choices(range(4, WORDS), k=9)), 3] for seed in range(6)]


def model(**how) -> KneserNey:
    pairs = bigrams({"input_ids": row, "labels": [-100, *row[1:]], "documents": [0]} for row in ROWS)
    return KneserNey(pairs.before, pairs.word, WORDS, **how)


def test_it_is_the_model_of_nltk():
    """nltk takes one fixed discount and leaves the lower order as it is."""
    from nltk.lm import KneserNeyInterpolated, Vocabulary
    from nltk.util import everygrams

    reference = KneserNeyInterpolated(2, discount=0.75)
    text = [list(map(str, row)) for row in ROWS]
    # Orders 1 and 2 of each row; nltk looks each word up in a vocabulary.
    reference.fit([list(everygrams(row, max_len=2)) for row in text], vocabulary_text=[w for row in text for w in row])
    assert isinstance(reference.vocab, Vocabulary)
    ours = model(discounts=(0.75, 0.75), floor=False)
    before, word = numpy.meshgrid([2, *range(4, WORDS)], [3, *range(4, WORDS)])
    before, word = before.ravel(), word.ravel()
    expected = [reference.score(str(w), [str(b)]) for b, w in zip(before, word, strict=True)]
    assert ours.probability(before, word).tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("before", [0, 2, 3, 7])
def test_probabilities_add_up_to_one_and_none_is_zero(before):
    """After a word that nothing follows in the training texts as well."""
    words = numpy.array([1, *range(3, WORDS)])  # all but padding and <bos>
    found = model().probability(numpy.full(len(words), before), words)
    assert found.sum() == pytest.approx(1.0) and found.min() > 0


def test_words_that_are_not_learned_do_not_count():
    row = {"input_ids": [2, 5, 6, 7], "labels": [-100, -100, 6, -100], "document": 4}
    assert [part.tolist() for part in bigrams([row])] == [[5], [6], [4]]


def test_the_perplexity_of_uniform_words_is_their_number(tmp_path):
    import json

    from scu_trainer.data.words.data import prepare_words
    from scu_trainer.settings import DataSettings
    from scu_trainer.settings.words import WordSettings

    chance = random.Random(0)
    rows = [{"text": " ".join(chance.choices("abcdefgh", k=200)), "category": "x"} for _ in range(100)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = DataSettings(dataset=str(path), validation_split_percentage=20)
    data = prepare_words(settings, WordSettings(), seed=0, cache_dir=tmp_path / "cache")
    assert kneser_ney_perplexity(data) == pytest.approx(8.0, rel=0.03)
