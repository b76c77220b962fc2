"""How the loss of each row is read from what a model returns."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import BertForMultipleChoice

from scu_trainer.errors import ControlError
from scu_trainer.train.loss.rows.model_loss import computes_causal_loss
from scu_trainer.train.loss.rows.row_readings import RowLossReading, find_reading
from tests.tiny import Examples, Rows, bert, conv_net, images, llama
from tests.train.curricula import curriculum_run

ROWS, TIME, WORDS = 4, 6, 9


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


LOGITS = drawn(ROWS, TIME, WORDS)
LABELS = torch.randint(0, WORDS, (ROWS, TIME), generator=torch.Generator().manual_seed(1))
LABELS[:, 0] = -100
LABELS[2, 3:] = -100


def shifted_sums() -> torch.Tensor:
    return cross_entropy(LOGITS[:, :-1].transpose(1, 2), LABELS[:, 1:], reduction="none").sum(1)


def own_sums() -> torch.Tensor:
    return cross_entropy(LOGITS.transpose(1, 2), LABELS, reduction="none").sum(1)


CLASSES = torch.tensor([1, 0, 2, 2])
CLASS_SUMS = cross_entropy(drawn(ROWS, 3), CLASSES, reduction="none")
WANTED = drawn(ROWS, 5) * 2
YES_NO = (drawn(ROWS, 5) > 0).float()
TOKENS = float((LABELS[:, 1:] != -100).sum())

CASES = {
    "shifted": (LOGITS, LABELS, shifted_sums(), TOKENS),
    "tokens": (LOGITS, LABELS, own_sums(), TOKENS),
    "classes": (drawn(ROWS, 3), CLASSES, CLASS_SUMS, ROWS),
    "numbers": (drawn(ROWS, 5), WANTED, (drawn(ROWS, 5) - WANTED).square().sum(1), 5 * ROWS),
    "several": (
        drawn(ROWS, 5),
        YES_NO,
        binary_cross_entropy_with_logits(drawn(ROWS, 5), YES_NO, reduction="none").sum(1),
        5 * ROWS,
    ),
}


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("divided", ["mean", "num_items", "num_items per rank"])
def test_the_reading_whose_sum_is_the_loss_is_found(kind, divided):
    logits, labels, sums, count = CASES[kind]
    items, processes = {"mean": (None, 1), "num_items": (torch.tensor(37), 1), "num_items per rank": (37, 4)}[divided]
    loss = float(sums.sum()) / (count if items is None else 37 / processes)
    reading = find_reading({"logits": logits}, labels, loss, items, processes)
    assert (reading.kind, reading.exact) == (kind, True)
    assert reading.classes == (3 if kind == "classes" else None)
    found = reading.rows({"logits": logits}, labels)
    assert close(found.sums, sums) and not found.sums.requires_grad
    assert float(found.counts.sum()) == count
    assert close(reading.sums_with_gradient({"logits": logits}, labels), sums)


@pytest.mark.parametrize("divides_by", ["counts", "nothing"])
@pytest.mark.parametrize("processes", [2, ROWS])
def test_a_loss_that_takes_no_items_is_found_though_ranks_multiply_it(divides_by, processes):
    """As many ranks as rows make the mean of the rows as large as their sum."""
    divisor = {"counts": ROWS, "nothing": 1}[divides_by]
    loss = processes * float(CLASS_SUMS.sum()) / divisor
    reading = find_reading({"logits": drawn(ROWS, 3)}, CLASSES, loss, 37, processes)
    assert (reading.exact, reading.divides_by) == (True, divides_by)


@pytest.mark.parametrize("kind", CASES)
def test_its_sums_have_the_losses_gradient(kind):
    logits, labels, sums, _ = CASES[kind]
    leaf = logits.clone().requires_grad_()
    weights = torch.tensor([1.0, 0.0, 2.5, 0.5])
    (weights * RowLossReading(kind, True).sums_with_gradient({"logits": leaf}, labels)).sum().backward()
    nudge = 1e-3 * torch.sign(leaf.grad)
    moved = RowLossReading(kind, True).rows({"logits": logits + nudge}, labels).sums
    expected = float((leaf.grad * nudge).sum())
    assert float((weights * (moved - sums)).sum()) == pytest.approx(expected, rel=2e-2)


def test_losses_of_its_own_go_first():
    outputs = {"losses": torch.arange(4.0), "logits": LOGITS}
    reading = find_reading(outputs, LABELS, 6.0 / 4, None, 1)
    assert (reading.kind, reading.exact) == ("own", True)
    assert reading.rows(outputs, LABELS).sums.tolist() == [0, 1, 2, 3]


def test_a_tuple_has_its_logits_second():
    logits, labels, sums, _ = CASES["classes"]
    assert find_reading((float(sums.mean()), logits), labels, float(sums.mean()), None, 1).exact


def test_a_loss_with_other_parts_is_said_to_be_inexact():
    loss = float(shifted_sums().sum()) / TOKENS
    reading = find_reading({"logits": LOGITS}, LABELS, loss * 1.01, None, 1, shifts=True)
    assert (reading.kind, reading.exact) == ("shifted", False)


def test_a_loss_that_is_not_finite_leaves_the_likeliest_reading():
    reading = find_reading({"logits": LOGITS}, LABELS, math.nan, None, 1, shifts=True)
    assert (reading.kind, reading.exact) == ("shifted", False)


@pytest.mark.parametrize(
    ("outputs", "labels"),
    [({"loss": 1.0}, LABELS), ({"logits": LOGITS}, None), ({"logits": LOGITS[:, :2]}, LABELS), (LOGITS, LABELS)],
)
def test_without_anything_to_read_there_is_no_reading(outputs, labels):
    assert find_reading(outputs, labels, 1.0, None, 1) is None


def test_a_model_that_tells_nothing_of_rows_trains_on_and_says_so(tmp_path, caplog):
    trainer = curriculum_run(tmp_path, "token_budget", model=conv_net(), data=images(12), data_collator=None)
    assert "the losses of single rows cannot be read, so difficulties stay unknown" in caplog.text
    assert not trainer.difficulty.observations.any() and trainer.state.global_step == 9


def test_a_model_of_multiple_choice_is_no_language_model(tmp_path):
    """Its class has no kind of loss, and transformers gives every such class that of next tokens."""
    questions = Examples({"input_ids": Rows(3, 8, seed=i).tokens, "labels": torch.tensor(i % 3)} for i in range(12))
    model = bert(BertForMultipleChoice)
    trainer = curriculum_run(tmp_path, "acmds", model=model, data=questions, data_collator=None)
    assert not computes_causal_loss(model) and trainer.difficulty.observations.all()


def test_a_forward_that_was_put_into_a_known_class_is_seen(monkeypatch):
    """As Liger does, in a process that has trained this class before."""
    model = llama()
    assert computes_causal_loss(model)
    monkeypatch.setattr(type(model), "forward", lambda self, input_ids, labels: {"loss": labels.float().mean()})
    assert not computes_causal_loss(model)


@pytest.mark.parametrize("name", ["noise_guard", "acmds", "infobatch"])
def test_methods_that_need_losses_refuse_it(tmp_path, name):
    changes = {"model": conv_net(), "data": images(12), "data_collator": None, "num_train_epochs": 4}
    with pytest.raises(ControlError, match=r'let its forward return \{"loss": ..., "losses": ...\}'):
        curriculum_run(tmp_path, name, **changes)
