"""Held-out bits per token against numbers worked out by hand, a float64 reference and the stock Trainer's own loop."""

from __future__ import annotations

import math
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from transformers import Trainer

from scu_trainer.data import Collator
from scu_trainer.train.evaluation.scoring import (
    DocumentScores,
    bootstrap_bpt,
    bootstrap_difference,
    bpt_metrics,
    score_documents,
)
from scu_trainer.train.loss.rows.row_readings import preprocess_logits, row_scores
from tests import tiny

IGNORED = -100
BIT = math.log(2.0)


class Fixed(torch.nn.Module):
    """Gives every next token the same probabilities, whatever came before."""

    def __init__(self, probabilities: list[float]) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(probabilities).log())

    def forward(self, input_ids, attention_mask=None, use_cache=None):
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))


def held_out(*rows: tuple[int, list[int]], unlearned: int = 1) -> datasets.Dataset:
    """Rows of (document, tokens); the first ``unlearned`` tokens of each are predicted by nobody."""
    labels = [[IGNORED] * unlearned + tokens[unlearned:] for _, tokens in rows]
    return datasets.Dataset.from_dict(
        {
            "input_ids": [tokens for _, tokens in rows],
            "labels": labels,
            "length": [len(tokens) for _, tokens in rows],
            "document": [document for document, _ in rows],
        }
    )


@pytest.fixture(scope="module")
def windows() -> datasets.Dataset:
    """Eleven rows of 2 to 40 tokens, of seven documents."""
    generator = np.random.default_rng(0)
    lengths = [2, 40, 17, 3, 28, 28, 9, 33, 5, 12, 21]
    documents = [0, 1, 1, 2, 3, 3, 3, 4, 5, 6, 6]
    tokens = [generator.integers(3, tiny.VOCAB, length).tolist() for length in lengths]
    return held_out(*zip(documents, tokens, strict=True))


def scores_of(documents: int, seed: int = 0) -> DocumentScores:
    generator = np.random.default_rng(seed)
    tokens = generator.integers(20, 400, documents)
    return DocumentScores(tokens * generator.gamma(9.0, 0.3, documents), tokens)


# -- one figure per document -------------------------------------------------------------------------------------------


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary(windows):
    scores = score_documents(Fixed([1 / tiny.VOCAB] * tiny.VOCAB), windows, Collator())
    assert scores.bpt == pytest.approx(math.log2(tiny.VOCAB), rel=1e-6)
    assert scores.perplexity == pytest.approx(tiny.VOCAB, rel=1e-5)


def test_bits_by_hand():
    """Tokens 0, 1, 2, 3 cost 1, 2, 3 and 3 bits; the first token of a row costs nothing."""
    rows = held_out((0, [3, 0, 0, 1]), (4, [0, 2]))
    scores = score_documents(Fixed([1 / 2, 1 / 4, 1 / 8, 1 / 8]), rows, Collator())
    assert (scores.nats / BIT).tolist() == pytest.approx([4.0, 3.0])
    assert scores.tokens.tolist() == [3, 1]
    assert scores.bpt == pytest.approx(7 / 4), "weighted by tokens, not the mean of 4/3 and 3"


def test_windows_of_a_document_add_up():
    model = Fixed([1 / 2, 1 / 4, 1 / 8, 1 / 8])
    whole = score_documents(model, held_out((2, [0, 1, 2, 3, 0])), Collator())
    cut = score_documents(model, held_out((2, [0, 1, 2]), (2, [2, 3, 0])), Collator())
    assert whole.nats / BIT == pytest.approx([9.0])
    assert cut.nats / BIT == pytest.approx([9.0])
    assert cut.tokens.tolist() == whole.tokens.tolist() == [4]


def test_prompts_are_read_but_not_counted():
    scores = score_documents(Fixed([1 / 2, 1 / 2]), held_out((0, [0, 1, 1, 0, 1]), unlearned=3), Collator())
    assert scores.tokens.tolist() == [2]


def test_row_scores_against_a_float64_reference():
    torch.manual_seed(0)
    logits, labels = 4 * torch.randn(3, 9, 11), torch.randint(0, 11, (3, 9))
    labels[0, 5:] = labels[1, :4] = labels[2, 3] = IGNORED
    log_probabilities = logits.double().log_softmax(dim=-1)
    for row, (nats, tokens) in enumerate(row_scores(logits, labels).tolist()):
        predicted = [(i, int(labels[row, i])) for i in range(1, 9) if labels[row, i] != IGNORED]
        assert tokens == len(predicted)
        expected = -sum(float(log_probabilities[row, i - 1, token]) for i, token in predicted)
        assert nats == pytest.approx(expected, rel=1e-6)


def test_half_precision_logits_are_summed_in_float32():
    torch.manual_seed(0)
    logits, labels = torch.randn(1, 400, 16).bfloat16(), torch.randint(0, 16, (1, 400))
    scores = row_scores(logits, labels)
    assert scores.dtype == torch.float32
    assert scores[0, 0].item() == pytest.approx(row_scores(logits.float(), labels)[0, 0].item(), rel=1e-6)


def test_padding_counts_for_nothing(windows):
    model = tiny.llama()
    expected = np.zeros(7)
    with torch.no_grad():
        for row in windows:
            tokens, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
            expected[row["document"]] += row_scores(model(tokens).logits, labels)[0, 0].item()
    assert score_documents(model, windows, Collator()).nats == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("batch_tokens", [1, 60, 150])
def test_the_size_of_batches_changes_no_document(windows, batch_tokens):
    model = tiny.llama()
    whole, parts = (score_documents(model, windows, Collator(), size) for size in (8192, batch_tokens))
    assert parts.nats == pytest.approx(whole.nats, rel=1e-5)
    assert parts.tokens.tolist() == whole.tokens.tolist()


def test_batches_keep_to_their_size_and_start_with_the_longest_row(windows):
    shapes = []
    collate = Collator()

    def watched(rows):
        batch = collate(rows)
        shapes.append(tuple(batch["input_ids"].shape))
        return batch

    score_documents(tiny.llama(), windows, watched, batch_tokens=60)
    assert shapes[0][1] == 40 and [width for _, width in shapes] == sorted((w for _, w in shapes), reverse=True)
    assert all(count * width <= 60 for count, width in shapes)
    assert sum(count for count, _ in shapes) == len(windows)


def test_mode_and_random_state_stay(windows):
    model = tiny.llama(attention_dropout=0.5).train()
    before = torch.get_rng_state()
    first, second = (score_documents(model, windows, Collator()).nats for _ in range(2))
    assert model.training and torch.equal(torch.get_rng_state(), before)
    assert first.tolist() == second.tolist(), "dropout was on"


def test_the_trainer_reports_the_same_figure(windows, tmp_path):
    model = tiny.llama()
    trainer = Trainer(
        model,
        tiny.arguments(tmp_path, per_device_eval_batch_size=3),
        data_collator=Collator(),
        eval_dataset=windows,
        compute_metrics=bpt_metrics,
        preprocess_logits_for_metrics=preprocess_logits,
    )
    metrics = trainer.evaluate()
    scores = score_documents(model, windows, Collator())
    assert metrics["eval_bpt"] == pytest.approx(scores.bpt, abs=1e-5)
    assert metrics["eval_perplexity"] == pytest.approx(scores.perplexity, rel=1e-5)


def test_metrics_are_weighted_by_tokens():
    rows = np.array([[3 * BIT, 3.0], [5 * BIT, 1.0]], dtype=np.float32)
    assert bpt_metrics(SimpleNamespace(predictions=rows)) == pytest.approx({"bpt": 2.0, "perplexity": 4.0})


def test_logits_may_come_with_other_outputs():
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    assert torch.equal(preprocess_logits((logits, "cache"), labels), row_scores(logits, labels))


# -- intervals ---------------------------------------------------------------------------------------------------------


def test_two_documents_by_hand():
    """Resamples of documents at 1 and 3 bits are (1, 1), (1, 3), (3, 1), (3, 3): means 1, 2, 2, 3."""
    scores = DocumentScores(np.array([10 * BIT, 30 * BIT]), np.array([10, 10]))
    interval = bootstrap_bpt(scores)
    assert (interval.value, interval.low, interval.high) == pytest.approx((2.0, 1.0, 3.0))
    assert interval.confidence == 0.95
    for confidence, bounds in ((0.6, (1.0, 3.0)), (0.4, (2.0, 2.0))):  # a quarter lies at 1, half at 2, a quarter at 3
        interval = bootstrap_bpt(scores, confidence=confidence)
        assert (interval.low, interval.high) == pytest.approx(bounds)


def test_one_document_has_a_value_and_no_bounds():
    one, two = (DocumentScores(np.full(count, 10 * BIT), np.full(count, 10)) for count in (1, 2))
    written = {"value": pytest.approx(1.0), "low": None, "high": None, "confidence": 0.95}
    assert bootstrap_bpt(one).over(one) == written
    assert bootstrap_bpt(two).over(two) == written | {"low": pytest.approx(1.0), "high": pytest.approx(1.0)}


def test_resamples_weigh_documents_by_their_tokens():
    scores = DocumentScores(np.array([90 * BIT, 30 * BIT]), np.array([90, 10]))
    assert bootstrap_bpt(scores).value == pytest.approx(1.2)
    middle = bootstrap_bpt(scores, confidence=0.4)
    assert (middle.low, middle.high) == pytest.approx((1.2, 1.2))


def test_intervals_are_seeded():
    scores = scores_of(30)
    assert bootstrap_bpt(scores, seed=3) == bootstrap_bpt(scores, seed=3)
    assert bootstrap_bpt(scores, seed=3) != bootstrap_bpt(scores, seed=4)


@pytest.mark.parametrize("documents", [5, 30, 300])
def test_intervals_contain_their_value(documents):
    interval = bootstrap_bpt(scores_of(documents))
    assert interval.low < interval.value == scores_of(documents).bpt < interval.high


def test_more_documents_and_less_confidence_make_intervals_narrower():
    def width(interval) -> float:
        return interval.high - interval.low

    few, many = bootstrap_bpt(scores_of(25)), bootstrap_bpt(scores_of(400))
    assert width(many) < 0.5 * width(few), "a sixteenth of the variance is a quarter of the width"
    assert width(bootstrap_bpt(scores_of(25), confidence=0.5)) < 0.5 * width(few)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    """200 samples of 60 documents whose true figure is known; a fair 90 % interval misses it in 8 to 36 of them."""
    truth = 9.0 * 0.3 / BIT
    intervals = [bootstrap_bpt(scores_of(60, seed), resamples=300, confidence=0.9) for seed in range(200)]
    missed = sum(not interval.low <= truth <= interval.high for interval in intervals)
    assert 8 <= missed <= 36


def test_one_document_has_no_width():
    interval = bootstrap_bpt(scores_of(1))
    assert interval.low == interval.value == interval.high


# -- differences -------------------------------------------------------------------------------------------------------


def test_a_model_does_not_differ_from_itself():
    difference = bootstrap_difference(scores_of(40), scores_of(40))
    assert (difference.value, difference.low, difference.high) == (0.0, 0.0, 0.0)


def test_a_constant_shift_is_seen_exactly_however_documents_vary():
    first = scores_of(40)
    second = DocumentScores(first.nats + 0.25 * BIT * first.tokens, first.tokens)
    difference = bootstrap_difference(first, second)
    assert (difference.value, difference.low, difference.high) == pytest.approx((0.25, 0.25, 0.25))
    alone = bootstrap_bpt(first)
    assert alone.high - alone.low > 0.25, "unpaired, the documents alone would have hidden it"


def test_differences_are_second_minus_first():
    first, second = scores_of(40), DocumentScores(2 * scores_of(40).nats, scores_of(40).tokens)
    there, back = bootstrap_difference(first, second), bootstrap_difference(second, first)
    assert there.low > 0 and there.value == pytest.approx(first.bpt)
    assert (back.value, back.low, back.high) == pytest.approx((-there.value, -there.high, -there.low))


def test_differences_need_the_same_documents():
    with pytest.raises(ValueError, match="same documents"):
        bootstrap_difference(scores_of(3, seed=0), scores_of(3, seed=1))
