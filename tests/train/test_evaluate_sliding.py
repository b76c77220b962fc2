"""Windows that overlap against a reference that predicts one token at a time, and against rows that do not overlap."""

from __future__ import annotations

import math

import datasets
import numpy as np
import pytest
import torch

from scu_trainer.data import Collator
from scu_trainer.data.text.packing import NumberedDocument, windows
from scu_trainer.train.evaluation.scoring import score_documents
from scu_trainer.train.evaluation.sliding import SlidingRows, Windows
from tests import tiny

LENGTHS = (2, 5, 16, 17, 40, 23, 1, 31)
"""Of documents; a window has 16 tokens."""

LENGTH = 16


@pytest.fixture(scope="module")
def documents() -> datasets.Dataset:
    return whole([list(np.random.default_rng(number).integers(3, tiny.VOCAB, n)) for number, n in enumerate(LENGTHS)])


def whole(documents: list[list[int]], prompts: tuple[int, ...] = ()) -> datasets.Dataset:
    """A row per document, numbered from 10; ``prompts``: tokens of each that are read only, one without."""
    unlearned = [*prompts, *[1] * (len(documents) - len(prompts))]
    labels = [[-100] * n + tokens[n:] for n, tokens in zip(unlearned, documents, strict=True)]
    numbers = list(range(10, 10 + len(documents)))
    return datasets.Dataset.from_dict({"input_ids": documents, "labels": labels, "document": numbers})


def context_start(token: int, stride: int) -> int:
    """Where the window that predicts ``token`` begins, by arithmetic instead of by walking."""
    step = min(stride, LENGTH - 1)
    return max(0, math.ceil((token - LENGTH + 1) / step)) * step


def one_by_one(model, tokens: list[int], stride: int) -> float:
    """Nats of all tokens but the first, each from a forward pass over its own context."""
    nats = 0.0
    for token in range(1, len(tokens)):
        context = torch.tensor([tokens[context_start(token, stride) : token]])
        with torch.no_grad():
            nats -= float(model(context).logits[0, -1].log_softmax(-1)[tokens[token]])
    return nats


@pytest.mark.parametrize("stride", [1, 4, 7, 15, 16])
def test_each_token_is_predicted_once_from_the_context_that_was_promised(documents, stride):
    model = tiny.llama()
    scores = score_documents(model, SlidingRows(documents, Windows(LENGTH, stride)), Collator(), batch_tokens=64)
    expected = [one_by_one(model, tokens, stride) for tokens in documents["input_ids"] if len(tokens) > 1]
    assert scores.tokens.tolist() == [n - 1 for n in LENGTHS if n > 1]
    assert scores.nats == pytest.approx(np.array(expected), rel=1e-5)


@pytest.mark.parametrize("stride", [1, 3, 8, 15, 16])
def test_no_token_has_less_context_than_promised(stride):
    asked = Windows(LENGTH, stride)
    for length in range(1, 70):
        seen = [(token, token - start) for start, first, end in asked.spans(length) for token in range(first, end)]
        assert [token for token, _ in seen] == list(range(1, length))
        assert all(context >= min(token, asked.least_context) for token, context in seen)
        assert all(end - start <= LENGTH for start, _, end in asked.spans(length))
    assert asked.least_context >= LENGTH - stride


def test_without_overlap_they_are_the_rows_of_training(documents):
    numbered = [
        NumberedDocument(row["document"], np.array(row["input_ids"]), np.array(row["labels"])) for row in documents
    ]
    plain = [row for row in windows(numbered, LENGTH) if row.learned_tokens]
    sliding = SlidingRows(documents, Windows(LENGTH, LENGTH))
    assert len(plain) == len(sliding) > len(LENGTHS)
    for number, row in enumerate(plain):
        found = sliding[number]
        assert found["input_ids"].tolist() == row.input_ids.tolist()
        assert found["labels"].tolist() == row.labels.tolist()
        assert [found["document"]] == row.documents


def test_more_context_reaches_long_documents_only(documents):
    model = tiny.llama()
    plain, overlapping = (
        score_documents(model, SlidingRows(documents, Windows(LENGTH, stride)), Collator()) for stride in (LENGTH, 4)
    )
    is_long = np.array([n > LENGTH for n in LENGTHS if n > 1])
    assert overlapping.nats[~is_long] == pytest.approx(plain.nats[~is_long], rel=1e-5)
    assert np.all(np.abs(overlapping.nats - plain.nats)[is_long] > 1e-4)


@pytest.mark.parametrize("stride", [1, 5, 16])
def test_prompts_are_read_and_never_counted(stride):
    """Of 50 tokens 40 are a prompt; windows inside it are not even made."""
    tokens = [list(np.random.default_rng(0).integers(3, tiny.VOCAB, 50)), [5] * 6]
    rows = SlidingRows(whole(tokens, prompts=(40, 6)), Windows(LENGTH, stride))
    assert rows["document"] == [10] * len(rows), "nothing is to be predicted in the other document"
    assert sum(int((rows[number]["labels"] != -100).sum()) for number in range(len(rows))) == 10
    assert all((rows[number]["labels"] != -100).any() for number in range(len(rows)))
