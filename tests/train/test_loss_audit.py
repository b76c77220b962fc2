"""What a loss turns into on the way is found while training: audits, new classes, new inputs, and what is said."""

from __future__ import annotations

import errno
import json
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import BertForQuestionAnswering, TrainerCallback, TrainingArguments

from scu_trainer import SCUTrainer
from scu_trainer.settings import MemorySettings
from scu_trainer.train.loss.analysis import analyze
from scu_trainer.train.loss.analysis.audit import Audited, Auditor, with_scaled_gradient
from scu_trainer.train.step.batches.reduction import Reduction
from scu_trainer.train.step.batches.rows import read_layout
from scu_trainer.train.step.batches.window import AccumulationWindow
from tests import tiny
from tests.train.stepwise import compared, error_of
from tests.train.test_loss_kinds import MIXES, WEIGHTS, Net, contrast

STEPS, ROWS, ACCUMULATION = 9, 6, 2


class Pictures(torch.utils.data.Dataset):
    """``labels(row)``: the class; ``length(row)``: tokens."""

    def __init__(self, labels=lambda row: row % 4, count: int = STEPS * ROWS * ACCUMULATION) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(1, 32, (count, 9), generator=generator)
        self.labels = labels

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        mask = (torch.arange(9) < 4 + row % 6).long()
        return {"input_ids": self.ids[row] * mask, "attention_mask": mask, "labels": torch.tensor(self.labels(row))}


class Steps(TrainerCallback):
    """Tells the model which step it is; keeps the gradients of each."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model.step = torch.tensor(state.global_step + 1)

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})


def train(loss, folder, memory, rows=None, steps: int = STEPS, base=SCUTrainer, **changes):
    seen = Steps()
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        optim="sgd",
        learning_rate=1e-3,
        max_grad_norm=0.0,
        max_steps=steps,
        per_device_train_batch_size=ROWS,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        **{"gradient_accumulation_steps": ACCUMULATION, **changes},
    )
    trainer = base(Net(loss), arguments, train_dataset=rows or Pictures(), memory=memory, callbacks=[seen])
    trainer.train()
    return trainer, seen.gradients


def wrong_steps(found, expected) -> list[int]:
    def apart(step: int) -> float:
        largest = max(float(g.abs().max()) for g in expected[step].values())
        return max(float((found[step][name] - g).abs().max()) for name, g in expected[step].items()) / largest

    return [step + 1 for step in range(len(expected)) if apart(step) > 1e-5]


CUT = MemorySettings(max_batch_size=2)


def plain(net, pooled, logits, mask, labels):
    return functional.cross_entropy(logits, labels)


def late(begin: int):
    def loss(net, pooled, logits, mask, labels):
        return plain(net, pooled, logits, mask, labels) + (0.2 * contrast(pooled) if net.step >= begin else 0.0)

    return loss


def test_a_loss_that_stays_what_it_is_passes_every_audit(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "scu_trainer"):
        trainer, found = train(plain, tmp_path, CUT)
    _, expected = train(plain, tmp_path, None)
    analysis = trainer.micro_batches.analysis
    assert wrong_steps(found, expected) == []
    assert (analysis.audits, analysis.last_good_step) == (5, 9)  # steps 1, 2, 4 and 8, and the last one
    assert analysis.largest_difference < 1e-6 and not analysis.notices
    assert trainer.micro_batches.loop.statistics.chunks == STEPS * ACCUMULATION * 3


@pytest.mark.parametrize(("begin", "found_at"), [(2, 2), (3, 4), (6, 8), (9, 9)])
def test_a_term_that_comes_later_ends_splitting_at_the_next_audit_and_is_said(tmp_path, caplog, begin, found_at):
    with caplog.at_level(logging.WARNING, "scu_trainer"):
        trainer, found = train(late(begin), tmp_path, CUT)
    _, expected = train(late(begin), tmp_path, None)
    assert wrong_steps(found, expected) == list(range(begin, found_at))
    (notice,) = trainer.micro_batches.analysis.notices
    assert notice in caplog.text and notice.startswith(f"from step {found_at} on, batches run whole")
    before = {
        2: "the step before was audited",
        4: "the gradient of step 3 may be",
        8: "gradients of steps 5 to 7 may be",
        9: "the step before was audited",
    }
    assert before[found_at] in notice and "a relative difference of" in notice
    figures = trainer.micro_batches.analysis.figures()
    assert figures["is_exact"] is False and figures["last_good_step"] in (found_at // 2, found_at - 1)
    assert json.dumps(figures)


def test_a_term_that_grows_from_zero_is_found_by_its_gradient(tmp_path):
    """The distance from where training began, added once per batch: quadratic in the value, linear in the gradient."""
    begin = [p.detach().clone() for p in Net(plain).parameters()]

    def loss(net, pooled, logits, mask, labels):
        apart = sum((p - start).square().sum() for p, start in zip(net.parameters(), begin, strict=True))
        return functional.cross_entropy(logits, labels, reduction="sum") + apart

    trainer, found = train(loss, tmp_path, CUT, steps=4)
    _, expected = train(loss, tmp_path, None, steps=4)
    assert wrong_steps(found, expected) == []
    (notice,) = trainer.micro_batches.analysis.notices
    assert notice.startswith("from step 2 on, batches run whole, because the gradient of 2 rows together is not that")


def test_a_gradient_that_is_no_number_for_a_row_alone_is_a_difference(tmp_path, caplog):
    """The value is the same to eight digits; a spread of one row is 0, whose root has no slope."""

    def loss(net, pooled, logits, mask, labels):
        return plain(net, pooled, logits, mask, labels) + 1e-9 * pooled.var(dim=0, unbiased=False).sqrt().sum()

    with caplog.at_level(logging.WARNING, "scu_trainer"):
        trainer, found = train(loss, tmp_path, MemorySettings(max_batch_size=1), steps=3)
    _, expected = train(loss, tmp_path, None, steps=3)
    assert wrong_steps(found, expected) == []
    assert not trainer.micro_batches.analysis.reduction.is_exact
    assert "Batches run whole" in caplog.text


def test_a_part_that_is_no_number_differs_without_end():
    assert Audited(rows=2, whole=1.5, parts=float("nan")).of_value == float("inf")


@pytest.mark.parametrize("row", [9, 10])
def test_an_answer_beyond_the_last_column_keeps_its_batch_whole(tmp_path, caplog, row):
    """BertForQuestionAnswering adds a mean over the rows with a start to one over those with an end."""

    def answered(i: int) -> dict[str, torch.Tensor]:
        start, end = (40, 41) if i == row else (i % 4, i % 4 + 2)
        places = {"start_positions": torch.tensor(start), "end_positions": torch.tensor(end)}
        return {"input_ids": tiny.Rows().tokens[i], **places}

    rows = tiny.Examples(map(answered, range(28)))
    changes = {"dataset": rows, "train_sampling_strategy": "sequential", "max_steps": 7}
    expected, _ = compared(tiny.bert(BertForQuestionAnswering), tmp_path, **changes)
    with caplog.at_level(logging.WARNING, "scu_trainer"):
        found, _ = compared(tiny.bert(BertForQuestionAnswering), tmp_path, CUT, **changes)
    assert error_of(tiny.weights_of(found.model), tiny.weights_of(expected.model)) <= 1e-5
    assert found.micro_batches.reduction.is_exact and "start_positions leaves rows out" in caplog.text
    figures = found.micro_batches.analysis.figures()
    assert figures["is_exact"] is False and "in some batches start_positions" in figures["mixes"]


def test_a_term_of_many_rows_only_is_found_before_the_first_step(tmp_path):
    """The few rows that are asked about do not show it; the first audit takes the whole window of a stranger's loss."""

    def loss(net, pooled, logits, mask, labels):
        return plain(net, pooled, logits, mask, labels) + (0.2 * contrast(pooled) if len(pooled) > 5 else 0.0)

    trainer, found = train(loss, tmp_path, CUT)
    _, expected = train(loss, tmp_path, None)
    assert wrong_steps(found, expected) == []
    assert "from step 1 on, batches run whole" in trainer.micro_batches.analysis.notices[0]


def test_a_term_of_more_rows_than_a_batch_has_is_found_before_the_first_step(tmp_path):
    """Micro-batches hold rows of several batches of a window, and may have more rows than any of these."""

    def loss(net, pooled, logits, mask, labels):
        return plain(net, pooled, logits, mask, labels) + (0.2 * contrast(pooled) if len(pooled) > ROWS else 0.0)

    pools = MemorySettings(token_cap=4000)
    trainer, found = train(loss, tmp_path, pools)
    _, expected = train(loss, tmp_path, None)
    assert wrong_steps(found, expected) == []
    assert "from step 1 on, batches run whole" in trainer.micro_batches.analysis.notices[0]


def test_rows_of_one_length_are_audited_as_they_are_cut(tmp_path):
    """Nothing is sorted then: batches are planned whole, and cut only when their turn comes."""

    class OfOneLength(Pictures):
        def __getitem__(self, row: int):
            return {**super().__getitem__(row), "attention_mask": torch.ones(9, dtype=torch.int64)}

    trainer, found = train(late(3), tmp_path, CUT, OfOneLength())
    _, expected = train(late(3), tmp_path, None, OfOneLength())
    assert wrong_steps(found, expected) == [3]
    assert "the gradient of step 3 may be off" in trainer.micro_batches.analysis.notices[0]


def test_without_audits_the_same_loss_trains_on_another_gradient(tmp_path, monkeypatch):
    """What the audits are for: with them taken out the gradients are wrong and nobody says so."""
    monkeypatch.setattr("scu_trainer.train.loss.analysis.analysis.LossAnalysis.holds", lambda *given: True)
    trainer, found = train(late(3), tmp_path, CUT)
    _, expected = train(late(3), tmp_path, None)
    assert wrong_steps(found, expected) == list(range(3, STEPS + 1)) and not trainer.micro_batches.analysis.notices


def test_a_class_that_comes_later_is_asked_about_at_once(tmp_path):
    """Weights by hand cancel while all rows are of one class; the step with another one is not an audit's."""
    rows = Pictures(lambda row: 3 if row >= 4 * ROWS * ACCUMULATION and row % 2 else 1)
    loss = MIXES["weights of classes by hand"]
    trainer, found = train(loss, tmp_path, CUT, rows)
    _, expected = train(loss, tmp_path, None, rows)
    assert wrong_steps(found, expected) == []
    assert trainer.micro_batches.analysis.notices[0].startswith("from step 5 on, batches run whole")
    assert not trainer.micro_batches.reduction.is_exact


def test_the_usual_override_with_weights_of_classes_is_split_by_its_weights(tmp_path):
    class Weighted(SCUTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            logits = model(**inputs, labels=labels)["logits"]
            return nn.CrossEntropyLoss(weight=WEIGHTS)(logits, labels)

    def logits_alone(net, pooled, logits, mask, labels):
        return {"logits": logits}

    for rows in (Pictures(), Pictures(lambda row: 0), Pictures(lambda row: row // 5 % 4)):
        trainer, found = train(logits_alone, tmp_path, CUT, rows, steps=3, base=Weighted)
        _, expected = train(logits_alone, tmp_path, None, rows, steps=3, base=Weighted)
        assert wrong_steps(found, expected) == []
        assert trainer.micro_batches.reduction.kind == "targets" and trainer.micro_batches.reduction.known
        assert trainer.micro_batches.loop.statistics.chunks > 3 * ACCUMULATION


def test_a_loss_of_pairs_of_rows_is_not_cut_and_said(tmp_path, caplog, monkeypatch):
    """A row alone has none. After a few steps it is asked about in few of them."""
    asked = []
    monkeypatch.setattr(
        "scu_trainer.train.loss.analysis.analysis.analyze",
        lambda *given, **named: asked.append(0) or analyze(*given, **named),
    )

    def loss(net, pooled, logits, mask, labels):
        return -functional.logsigmoid(logits[0::2, 0] - logits[1::2, 0]).mean()

    _, found = train(loss, tmp_path, CUT)
    _, expected = train(loss, tmp_path, None)
    assert wrong_steps(found, expected) == [] and len(asked) == 6  # steps 1 to 5, and 8
    assert caplog.text.count("do not show how the loss adds up over them: batches run whole") == 1


def test_single_rows_do_not_use_up_the_questions(tmp_path):
    """A loader that counts tokens may give one row a time for long: the first batch of more is asked about."""

    class OneThenMany(torch.utils.data.BatchSampler):
        def __init__(self) -> None:
            self.batch_size, self.drop_last, self.sampler = ROWS, False, range(8 + 3 * ROWS)

        def __iter__(self):
            yield from ([row] for row in range(8))
            yield from (list(range(8 + step * ROWS, 8 + (step + 1) * ROWS)) for step in range(3))

        def __len__(self) -> int:
            return 11

    class Loads(SCUTrainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(self.train_dataset, batch_sampler=OneThenMany())

    changes = {"gradient_accumulation_steps": 1, "base": Loads, "steps": 11}
    trainer, found = train(plain, tmp_path, CUT, **changes)
    _, expected = train(plain, tmp_path, None, **changes)
    assert wrong_steps(found, expected) == []
    assert trainer.micro_batches.loop.statistics.chunks == 8 + 3 * ROWS / 2


def test_audits_keep_nothing_for_a_backward_where_no_gradient_can_be_compared(tmp_path, monkeypatch):
    """As of weights that are sharded: an engine that waits for a backward would be asked for the next forward."""
    monkeypatch.setattr("scu_trainer.train.loss.analysis.measuring._smallest_weights", lambda model: [])
    audited, seen = Auditor._compare, []

    def loss(net, pooled, logits, mask, labels):
        seen.append(torch.is_grad_enabled())
        return plain(net, pooled, logits, mask, labels)

    def compared(*given):
        before = len(seen)
        found = audited(*given)
        grad.extend(seen[before:])
        return found

    grad: list[bool] = []
    monkeypatch.setattr(Auditor, "_compare", compared)
    trainer, _ = train(loss, tmp_path, CUT, steps=4)
    assert trainer.micro_batches.analysis.audits == 3 and grad and not any(grad)


def test_an_audit_that_the_kernel_refuses_pages_gets_smaller_and_ends_no_run(monkeypatch):
    asked = []

    def refused(window, groups, num_items, own):
        asked.append(sum(map(len, groups)))
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    auditor = Auditor(Net(contrast), None, None)
    monkeypatch.setattr(auditor, "_compare", refused)
    window = AccumulationWindow([read_layout({"labels": torch.zeros(64, dtype=torch.int64)})], Reduction("rows"))
    assert auditor.audit(window, window.pooled(32, None, 1), None, turn=1, own=False) is None
    assert len(asked) > 1 and asked == sorted(asked, reverse=True)


def test_the_gradient_of_a_small_loss_is_taken_in_float16_as_training_takes_it():
    """Without a scale it is made of the smallest numbers that float16 has, and rounds by a fifth."""
    weight = torch.nn.Parameter(torch.ones(4))
    found = with_scaled_gradient(1e-7 * weight.half().float().sum(), [weight])
    assert found.tolist() == pytest.approx([4e-7] + [1e-7] * 4, rel=1e-3)


def test_inputs_with_other_names_are_asked_about_again(tmp_path):
    class Named(Pictures):
        def __getitem__(self, row: int):
            item = super().__getitem__(row)
            return item if row < 2 * ROWS * ACCUMULATION else {**item, "extra": torch.ones(())}

    def loss(net, pooled, logits, mask, labels, extra=None):
        return plain(net, pooled, logits, mask, labels) + (0.0 if extra is None else 0.2 * contrast(pooled))

    trainer, found = train(loss, tmp_path, CUT, Named(), steps=4)
    _, expected = train(loss, tmp_path, None, Named(), steps=4)
    assert wrong_steps(found, expected) == []
    assert trainer.micro_batches.analysis.notices[0].startswith("from step 3 on, batches run whole")


def test_batches_with_other_inputs_have_an_answer_of_their_own(tmp_path):
    """A mean for some and a sum for the others, in turn: each is split by its own, and asked about once."""

    class InTurn(Pictures):
        def __getitem__(self, row: int):
            item = super().__getitem__(row)
            return {**item, "extra": torch.ones(())} if row // (ROWS * ACCUMULATION) % 2 else item

    def loss(net, pooled, logits, mask, labels, extra=None):
        return functional.cross_entropy(logits, labels, reduction="mean" if extra is None else "sum")

    trainer, found = train(loss, tmp_path, CUT, InTurn(), steps=6)
    _, expected = train(loss, tmp_path, None, InTurn(), steps=6)
    assert wrong_steps(found, expected) == []
    assert trainer.micro_batches.loop.statistics.chunks == 6 * ACCUMULATION * 3
    assert trainer.micro_batches.analysis.figures()["questions"] == 2


def test_dropout_does_not_disturb_an_audit(tmp_path):
    class Dropping(Net):
        def __init__(self, loss) -> None:
            super().__init__(loss, dropout=0.5)

    arguments = TrainingArguments(
        tmp_path, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", max_steps=4,
        per_device_train_batch_size=ROWS, gradient_accumulation_steps=ACCUMULATION, remove_unused_columns=False,
    )  # fmt: skip
    model = Dropping(plain)
    trainer = SCUTrainer(model, arguments, train_dataset=Pictures(), memory=CUT, callbacks=[Steps()])
    trainer.train()
    assert trainer.micro_batches.reduction.is_exact and trainer.micro_batches.analysis.audits == 3


def test_auditing_changes_nothing_of_the_run(tmp_path, monkeypatch):
    """The weights and buffers after a run are, bit for bit, those of one without audits, dropout included."""

    def weights(holds) -> dict[str, torch.Tensor]:
        with monkeypatch.context() as patch:
            if holds is not None:
                patch.setattr("scu_trainer.train.loss.analysis.analysis.LossAnalysis.holds", holds)
            trainer, _ = train(plain, tmp_path, CUT, steps=5)
        return trainer.model.state_dict()

    audited, left_alone = weights(None), weights(lambda *given: True)
    assert all(torch.equal(audited[name], value) for name, value in left_alone.items())
