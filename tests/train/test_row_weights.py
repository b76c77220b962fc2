"""Batches of equal tokens hold unequal numbers of rows; where rows are what counts, each counts the same."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import BertForSequenceClassification

from scu_trainer.control.batches import Batches
from scu_trainer.control.curriculum import EpochPlan
from scu_trainer.train.loss.loss_path import zero_loss
from scu_trainer.train.loss.rows.model_loss import opened
from scu_trainer.train.loss.rows.padding_free import end_to_end
from scu_trainer.train.loss.rows.row_readings import CAUSAL, RowLossReading
from scu_trainer.train.loss.rows.row_weights import RowWeights
from tests.tiny import bert, labelled, llama
from tests.train.curricula import SGD, curriculum_run
from tests.train.stepwise import error_of
from tests.train.test_loss_path import batch_of, class_losses

CPU = torch.device("cpu")
EMPTY = numpy.zeros(0, dtype=numpy.int64)


def plan_of(*sizes: int, weights=None) -> EpochPlan:
    order = numpy.arange(sum(sizes))
    return EpochPlan(0, Batches(order, numpy.cumsum(sizes)), weights, {}, EMPTY, EMPTY, EMPTY, ())


def weights_of(plan: EpochPlan, reading, per_window: int = 1, equal_rows: bool = True):
    found = RowWeights(plan, plan.rows, per_window, equal_rows, CPU).of(torch.arange(plan.rows), reading)
    return None if found is None else found.tolist()


def test_a_mean_over_rows_is_weighed_by_the_rows_of_its_batch():
    by_counts = RowLossReading("classes", True, divides_by="counts")
    assert weights_of(plan_of(1, 3), by_counts) == [0.5, 1.5, 1.5, 1.5]
    assert weights_of(plan_of(2, 2), by_counts) == [1.0] * 4


def test_a_sum_over_the_windows_rows_is_weighed_by_the_rows_of_its_window():
    by_items = RowLossReading("classes", True, divides_by="items")
    assert weights_of(plan_of(1, 1, 3, 1), by_items, per_window=2) == pytest.approx([2 / 3] * 2 + [4 / 3] * 4)


def test_tokens_and_plain_sums_need_nothing():
    assert weights_of(plan_of(1, 3), CAUSAL) is None
    assert weights_of(plan_of(1, 3), RowLossReading("classes", True, divides_by="nothing")) is None
    assert weights_of(plan_of(1, 3), RowLossReading("classes", True, divides_by="counts"), equal_rows=False) is None
    assert weights_of(plan_of(1, 3), None) is None


def test_the_plans_own_weights_are_kept():
    own = numpy.array([2.0, 1.0, 1.0, 2.0], dtype=numpy.float32)
    assert weights_of(plan_of(1, 3, weights=own), CAUSAL) == own.tolist()
    assert weights_of(plan_of(1, 3, weights=own), RowLossReading("classes", True, divides_by="counts")) == [
        1.0,
        1.5,
        1.5,
        3.0,
    ]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_epoch_of_equal_tokens_weighs_every_row_alike(tmp_path, accumulation):
    """With a rate so small that the model stands still, the gradients of an epoch's steps add up to uniform's."""
    data, steps = labelled(12), {}
    still = {**SGD, "learning_rate": 1e-12, "lr_scheduler_type": "constant"}
    trainer = curriculum_run(
        tmp_path,
        "token_budget",
        model=bert(BertForSequenceClassification),
        data=data,
        num_train_epochs=1,
        gradient_accumulation_steps=accumulation,
        **still,
    )
    sizes = trainer.plans[0].batches.sizes
    assert len(set(sizes.tolist())) > 1
    model = bert(BertForSequenceClassification).eval()
    class_losses(model, batch_of(data, range(12))).mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    # This model ignores num_items_in_batch, and the stock loop takes its means for sums: it adds them up.
    assert trainer.model_accepts_loss_kwargs and len(sizes) % accumulation == 0
    for name in expected:
        steps[name] = sum(gradients[name] for gradients in trainer.recorder.gradients) / len(sizes)
    assert error_of(steps, expected) < 1e-4


# -- several cards -----------------------------------------------------------------------------------------------------

FIRST, LAST = CPU, torch.device("meta")
"""Stand for two cards: tensors without content on either may not meet."""


@pytest.mark.parametrize("is_end_to_end", [False, True])
def test_rows_are_weighed_and_known_where_their_numbers_are(is_end_to_end):
    """``device_map`` puts the output head on the last card, labels and numbers of rows are on the first one."""
    model, ids = llama(), torch.arange(12).reshape(2, 6)
    mask = (ids != 11).long()
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    rows, seen = end_to_end(inputs) if is_end_to_end else None, []
    with FakeTensorMode(allow_non_fake_inputs=True), opened(model, torch.ones(2, device=FIRST), seen.append, rows):
        logits = torch.zeros(*((1, 11) if is_end_to_end else (2, 6)), 64, device=LAST, requires_grad=True)
        loss = model.loss_function(logits=logits, labels=inputs["labels"], num_items_in_batch=torch.tensor(9))
        loss.backward()
    assert logits.grad.device == LAST and seen[0].sums.device == seen[0].counts.device == FIRST


def test_nothing_to_learn_is_a_zero_for_weights_on_all_cards():
    with FakeTensorMode(), torch.no_grad():  # a build for CPUs knows no gradients of cards
        model = torch.nn.Module()
        model.weights = torch.nn.ParameterList(torch.empty(2, device=f"cuda:{number}") for number in range(2))
        assert zero_loss(model, model.weights[0].device).device == model.weights[0].device
