"""What people do in trainers of their own, under ``with_loops``: it acts as in the stock Trainer, or it is refused."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import OSFConfig, get_peft_model
from torch.nn import functional
from torch.utils.data import WeightedRandomSampler
from transformers import LlamaForCausalLM, Trainer, TrainerCallback

from scu_trainer.errors import ControlError, OutOfMemory, UserError
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings, SafetySettings
from scu_trainer.settings.efficiency import EfficiencySettings
from scu_trainer.train.loss.analysis import own_step
from scu_trainer.train.loss.analysis.frozen_weights import WrittenWeights, frozen_weights
from scu_trainer.train.step import micro_batches
from scu_trainer.train.step.distributed.ranks import ShardedRanks
from scu_trainer.train.trainer import SCUTrainer, with_loops
from tests import processes, tiny
from tests.faults import fail_above_tokens
from tests.train.stepwise import FailsOnce, apart
from tests.train.test_curriculum_faults import NormalizedNet

CUT = MemorySettings(token_cap=24)
PARTS = "gets the gradient of each micro-batch"
STEPS, ACCUMULATION = 5, 2


def run(kind: type[Trainer], folder: Path, model=None, rows=None, arguments=None, resume=None, **given: Any) -> Trainer:
    """``kind`` after a training on uneven rows, two batches of four to a step."""
    rows = rows or {"train_dataset": tiny.UnevenRows(32), "data_collator": tiny.pad}
    own = {"max_steps": STEPS, "gradient_accumulation_steps": ACCUMULATION, "logging_steps": 1}
    own["optim"] = "sgd"  # Adam hides factors
    arguments = {**own, **(arguments or {})}
    args = tiny.arguments(folder, **arguments)
    trainer = kind(model=model or tiny.small_llama(), args=args, **rows, **given)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def chunks(trainer: Trainer) -> int:
    return trainer.micro_batches.loop.statistics.chunks


# -- signatures --------------------------------------------------------------------------------------------------------


class TakesTheRest(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)

    def create_scheduler(self, num_training_steps):
        return super().create_scheduler(num_training_steps)

    def train(self, resume_from_checkpoint=None):
        return super().train(resume_from_checkpoint)


class OtherOrder(Trainer):
    def compute_loss(self, model, inputs, num_items_in_batch=None, return_outputs=False):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def evaluation_loop(self, dataloader, description, metric_key_prefix="eval", **kwargs):
        return super().evaluation_loop(dataloader, description, metric_key_prefix=metric_key_prefix, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, *, ignore_keys=None):
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)


class ManyNumbers(Trainer):
    make = staticmethod(lambda loss: loss.expand(3))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return self.make(super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch))


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda loss: loss.expand(3), "of shape (3,)"),
        (lambda loss: loss[None], "of shape (1,)"),
        (lambda loss: {"words": loss, "size": loss}, "a dict"),
    ],
)
def test_a_loss_that_is_not_one_number_is_named_and_nothing_else(tmp_path, caplog, monkeypatch, make, found):
    monkeypatch.setattr(ManyNumbers, "make", staticmethod(make))
    stock, off, on = [], [], []
    for kind, loops, words in (
        (ManyNumbers, {}, stock), (with_loops(ManyNumbers), {}, off), (with_loops(ManyNumbers), {"memory": CUT}, on)
    ):  # fmt: skip
        with pytest.raises((RuntimeError, TypeError, UserError)) as raised:
            run(kind, tmp_path, **loops)
        words.append(str(raised.value))
    assert off == stock
    assert f"the training loss is {found}, but must be one number" in on[0]
    assert not [line for line in caplog.messages if "could not be tested" in line]


@pytest.mark.parametrize("memory", [None, MemorySettings()], ids=["off", "memory"])
@pytest.mark.parametrize("kind", [TakesTheRest, OtherOrder])
def test_overrides_get_their_arguments_as_the_stock_trainer_gives_them(tmp_path, kind, memory):
    expected = run(kind, tmp_path / "stock", eval_dataset=tiny.UnevenRows(8))
    found = run(with_loops(kind), tmp_path / "ours", eval_dataset=tiny.UnevenRows(8), memory=memory)
    assert apart(found, expected) < 1e-5
    assert found.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"], rel=1e-5)


class WritesToItsBatch(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs["input_ids"].copy_((inputs["input_ids"] + 1) % tiny.VOCAB)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class Penalized(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        (gradient,) = torch.autograd.grad(loss, [model.lm_head.weight], create_graph=True)
        return loss + gradient.square().sum()


class NamesItsBatch(Trainer):
    """Its loss takes another batch than the loader gives, in the mode that the model is in."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        inputs = {"input_ids": inputs["tokens"], "labels": inputs["labels"]}
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


class InEvaluationMode(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model.eval()


@pytest.mark.parametrize("kind", [Trainer, WritesToItsBatch, Penalized, NamesItsBatch])
def test_what_is_asked_to_measure_s_leaves_no_trace(tmp_path, caplog, kind):
    """Without memory control: once, on the first batch, whether the loss reads num_items_in_batch."""
    tokens = tiny.Rows().tokens
    rows = [{"tokens" if kind is NamesItsBatch else "input_ids": one, "labels": one.clone()} for one in tokens]
    given = {"rows": {"train_dataset": rows}, "arguments": {"remove_unused_columns": False}}
    expected, found = (
        run(one, tmp_path, tiny.small_llama(attention_dropout=0.5), callbacks=[InEvaluationMode()], **given, **measured)
        for one, measured in ((kind, {}), (with_loops(kind), {"regularization": RegularizationSettings()}))
    )
    assert apart(found, expected) == 0
    assert ("could not be tested" in caplog.text) is (kind is NamesItsBatch)


class BareLoss(torch.nn.Module):
    """Its forward returns a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = tiny.small_llama()

    def forward(self, input_ids, labels, attention_mask=None):
        return self.model(input_ids=input_ids, labels=labels, attention_mask=attention_mask).loss


class OfBareLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = 2 * model(**inputs)
        return (loss, {}) if return_outputs else loss


def twice(outputs: torch.Tensor, labels: torch.Tensor, num_items_in_batch=None) -> torch.Tensor:
    return 2 * outputs


class TakesNoLabels(BareLoss):
    def forward(self, input_ids, attention_mask=None):
        return super().forward(input_ids, input_ids, attention_mask)


@pytest.mark.parametrize(
    ("kind", "module", "given"), [(OfBareLoss, BareLoss, {}), (Trainer, TakesNoLabels, {"compute_loss_func": twice})]
)
def test_the_loss_of_a_plain_module_reaches_ones_own_code_as_it_is(tmp_path, kind, module, given):
    expected = run(kind, tmp_path / "stock", module(), **given)
    off = run(with_loops(kind), tmp_path / "off", module(), **given)
    assert tiny.same(tiny.weights_of(off.model), tiny.weights_of(expected.model))
    on = run(with_loops(kind), tmp_path / "on", module(), memory=MemorySettings(), **given)
    assert apart(on, expected) < 1e-5


# -- names -------------------------------------------------------------------------------------------------------------


class Schedules(Trainer):
    """Does in its constructor what others leave to ``train``."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.create_optimizer_and_scheduler(num_training_steps=STEPS)
        self.log({"made": 1.0})
        self.made = self.evaluate()


def test_a_constructor_may_do_what_the_stock_one_lets_it(tmp_path):
    expected = run(Schedules, tmp_path / "stock", eval_dataset=tiny.UnevenRows(8))
    for memory in (None, MemorySettings()):
        found = run(with_loops(Schedules), tmp_path / "ours", eval_dataset=tiny.UnevenRows(8), memory=memory)
        assert apart(found, expected) < 1e-5 and found.made["eval_loss"] == expected.made["eval_loss"]


class OtherDefaults(Trainer):
    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=True, ignore_keys=None, metric_key_prefix="eval"
    ):
        return super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)

    def train(self, resume_from_checkpoint):
        return super().train(resume_from_checkpoint)


@pytest.mark.parametrize("memory", [None, MemorySettings()], ids=["off", "memory"])
def test_none_is_passed_on_where_it_was_given(tmp_path, memory):
    measures = {"eval_dataset": tiny.UnevenRows(8), "compute_metrics": lambda predicted: {"rows": 8.0}}
    assert run(with_loops(OtherDefaults), tmp_path, memory=memory, **measures).evaluate()["eval_rows"] == 8.0


class Behind:
    def save(self, path):
        raise AssertionError("would never be called")


class SavesBehind(Trainer, Behind):
    pass


class SavesItself(Trainer):
    def save(self, path):
        raise AssertionError("would never be called")


class TakesMemory(Trainer):
    def __init__(self, *args, memory="a buffer of old samples", **kwargs):
        super().__init__(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (SavesItself, "SavesItself defines save, which"),
        (SavesBehind, "Behind defines save, which"),
        (TakesMemory, "constructor of TakesMemory takes memory, which"),
    ],
)
def test_a_name_that_is_taken_is_refused(kind, message):
    with pytest.raises(ControlError, match=message):
        with_loops(kind)


class KeepsALoss(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.task_loss = torch.nn.CrossEntropyLoss()


def test_an_attribute_that_would_be_overwritten_is_refused(tmp_path):
    with pytest.raises(ControlError, match="constructor of SCUKeepsALoss sets task_loss, which"):
        run(with_loops(KeepsALoss), tmp_path)


# -- losses ------------------------------------------------------------------------------------------------------------


class DividesItself(Trainer):
    """A mean over rows, divided as the documentation of the stock Trainer says it."""

    loss_is_scaled_for_ga = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1].transpose(1, 2)
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:]) / self.current_gradient_accumulation_steps
        return (loss, {}) if return_outputs else loss


def test_a_loss_that_divides_by_the_accumulation_steps_is_weighed_once(tmp_path):
    expected = run(DividesItself, tmp_path / "stock")
    found = run(with_loops(DividesItself), tmp_path / "ours", memory=CUT)
    assert apart(found, expected) < 1e-5 and chunks(found) > ACCUMULATION * STEPS
    losses = [[row["loss"] for row in one.state.log_history if "loss" in row] for one in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


class LooksForTheLast(Trainer):
    def compute_loss(self, *args, **kwargs):
        if self.model.training:
            self.was_last.append(self.accelerator.sync_gradients)
        return super().compute_loss(*args, **kwargs)


class GivesOtherBatches(with_loops(LooksForTheLast)):
    """Than the loader gave, so that rows are not pooled over them."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, dict(inputs), num_items_in_batch)


@pytest.mark.parametrize("kind", [with_loops(LooksForTheLast), GivesOtherBatches], ids=["pooled", "by batch"])
@pytest.mark.parametrize("memory", [MemorySettings(memory_control=False), CUT], ids=["whole", "cut"])
def test_the_last_backward_before_a_step_can_be_told(tmp_path, kind, memory):
    kind.was_last = LooksForTheLast.was_last = []
    found = run(kind, tmp_path, memory=memory)
    steps = "".join("x" if last else "." for last in kind.was_last).rstrip(".")
    assert steps.count("x") == STEPS == found.state.global_step and steps.endswith("x")


class CountsRows(BareLoss):
    """As models do whose loss has a term that grows with what they were trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def forward(self, input_ids, labels, attention_mask=None):
        self.rows += len(input_ids) if self.training else 0
        return {"loss": super().forward(input_ids, labels, attention_mask)}


class CountsTokens(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.tokens = getattr(self, "tokens", 0) + int(inputs["attention_mask"].sum())
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def fails_once(module: torch.nn.Module) -> None:
    def fail(*_: Any) -> None:
        handle.remove()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    handle = module.register_forward_hook(fail)


@pytest.mark.parametrize("memory", [CUT, MemorySettings()], ids=["cut", "whole"])
def test_what_a_loss_counts_does_not_count_what_ran_out_of_memory(tmp_path, memory):
    counted = []
    for kind, faults, loops in ((CountsTokens, [], {}), (with_loops(CountsTokens), [FailsOnce()], {"memory": memory})):
        found = run(kind, tmp_path, CountsRows(), eval_dataset=tiny.UnevenRows(8), callbacks=faults, **loops)
        if faults:
            assert faults[0].failed == 1
            fails_once(found.model.model.lm_head)
        in_training = found.tokens
        found.evaluate()
        counted.append([found.model.rows, in_training, found.tokens])
    assert counted[0] == counted[1] and found.prediction.halving.out_of_memory == 1


class Keeps(Trainer):
    """Adds to its loss what earlier ones have left behind."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss * (1 + 0.1 * self.kept(loss.detach()))
        return (loss, outputs) if return_outputs else loss

    def kept(self, loss):
        """In a list that begins with the first loss."""
        self.bank = self.bank if hasattr(self, "bank") else []
        self.bank.append(loss)
        return sum(self.bank)


class KeepsLatest(Keeps):
    bank = None

    def kept(self, loss):
        self.bank = deque(maxlen=4) if self.bank is None else self.bank
        self.bank.append(loss)
        return sum(self.bank)


class KeepsMean(Keeps):
    bank = None

    def kept(self, loss):
        self.bank = {"mean": torch.zeros(())} if self.bank is None else self.bank
        return self.bank["mean"].mul_(0.5).add_(loss).clone()


class KeepsArray(Keeps):
    bank = None

    def kept(self, loss):
        self.bank = np.zeros(2) if self.bank is None else self.bank
        self.bank += loss.item()
        return self.bank[1]


class KeepsPair(Keeps):
    bank = torch.zeros(()), 0

    def kept(self, loss):
        self.bank = self.bank[0] + loss, self.bank[1] + 1
        return self.bank[0]


class KeepsInModel(BareLoss):
    def __init__(self) -> None:
        super().__init__()
        self.bank: list[torch.Tensor] = []

    def forward(self, input_ids, labels, attention_mask=None):
        loss = super().forward(input_ids, labels, attention_mask)
        self.bank.append(loss.detach())
        return {"loss": loss * (1 + 0.1 * sum(self.bank))}


def test_what_a_model_keeps_for_its_next_loss_does_not_hold_what_ran_out_of_memory(tmp_path):
    expected, fault = run(Trainer, tmp_path, KeepsInModel()), FailsOnce()
    found = run(SCUTrainer, tmp_path, KeepsInModel(), memory=MemorySettings(), callbacks=[fault])
    assert fault.failed == 1 and len(found.model.bank) == STEPS * ACCUMULATION
    assert tiny.same(tiny.weights_of(found.model), tiny.weights_of(expected.model))


@pytest.mark.parametrize("backward", [3, 4])
@pytest.mark.parametrize("kind", [Keeps, KeepsLatest, KeepsMean, KeepsArray, KeepsPair])
def test_what_a_loss_keeps_for_the_next_does_not_hold_what_ran_out_of_memory(tmp_path, kind, backward):
    expected, fault = run(kind, tmp_path), FailsOnce(backward)
    found = run(with_loops(kind), tmp_path, memory=MemorySettings(), callbacks=[fault])
    assert fault.failed == 1 and tiny.same(tiny.weights_of(found.model), tiny.weights_of(expected.model))


class LogsTerms(Trainer):
    bad_step, losses = -1, ()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if self.state.global_step == self.bad_step:
            loss = loss * torch.nan
        self.losses = [*self.losses, loss.item()]
        self.log({"term": loss.item()})
        return (loss, outputs) if return_outputs else loss


class LogsNan(LogsTerms):
    bad_step = 1


def terms_of(trainer: Trainer) -> list[float]:
    return [row["term"] for row in trainer.state.log_history if "term" in row]


@pytest.mark.parametrize(
    "kind, loops",
    [
        (LogsTerms, {"memory": MemorySettings()}),
        (LogsTerms, {"memory": CUT}),
        (LogsTerms, {"efficiency": EfficiencySettings(throughput=True)}),
        (LogsNan, {"safety": SafetySettings()}),
    ],
    ids=["asked", "cut", "counted", "searched"],
)
def test_a_loss_that_logs_logs_what_was_trained(tmp_path, kind, loops):
    trainer = run(with_loops(kind), tmp_path, **loops)
    terms = terms_of(trainer)
    assert len(terms) == (chunks(trainer) if "memory" in loops else STEPS * ACCUMULATION)
    assert kind is LogsNan or trainer.losses == terms


def test_the_search_for_rows_that_are_set_aside_logs_nothing(tmp_path):
    images = tiny.images(32)
    images.rows[7]["pixel_values"][0, 0, 0] = torch.nan
    net, curriculum = NormalizedNet(), CurriculumSettings("none")
    trainer = run(with_loops(LogsTerms), tmp_path, net, {"train_dataset": images}, curriculum=curriculum)
    assert trainer.difficulty.quarantined.nonzero()[0].tolist() == [7]
    assert len(terms_of(trainer)) == len(trainer.losses) == STEPS * ACCUMULATION + 1  # once more without the row


class Queued(Trainer):
    """As in MoCo: rows are held against those of batches before, which the first call begins to keep."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        rows = functional.normalize(outputs.logits.mean(1))
        if not hasattr(self, "queue"):
            self.queue = torch.eye(8, rows.size(1))
        loss = loss + torch.logsumexp(rows @ self.queue.clone().T, 1).mean()
        self.keep(rows.detach())
        return (loss, outputs) if return_outputs else loss

    def keep(self, rows: torch.Tensor) -> None:
        self.queue = torch.cat([rows, self.queue])[:8]


class WritesToItsQueue(Queued):
    def keep(self, rows: torch.Tensor) -> None:
        self.queue[: len(rows)] = rows


@pytest.mark.parametrize("kind", [Queued, WritesToItsQueue])
def test_a_queue_of_rows_holds_neither_those_of_a_test_nor_those_that_ran_out_of_memory(tmp_path, kind):
    expected = run(kind, tmp_path / "stock")
    for faults in ([], [FailsOnce()]):
        found = run(with_loops(kind), tmp_path / "ours", memory=CUT, callbacks=faults)
        assert torch.equal(found.queue, expected.queue) and apart(found, expected) == 0.0
        assert found.micro_batches.loop.statistics.out_of_memory == len(faults)


class DrawsItsOwn(Trainer):
    """From generators that it keeps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.of_torch, self.of_python = torch.Generator().manual_seed(0), random.Random(0)
        self.of_numpy, self.of_old_numpy = np.random.default_rng(0), np.random.RandomState(0)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        of_host = self.of_python.random() + self.of_numpy.random() + self.of_old_numpy.normal() ** 2
        factor = of_host + torch.rand([], generator=self.of_torch)
        return factor * super().compute_loss(model, inputs, False, num_items_in_batch)


@pytest.mark.parametrize("faults", [[], [FailsOnce()]], ids=["as it is", "out of memory"])
def test_generators_of_ones_own_give_what_they_give_the_stock_trainer(tmp_path, faults):
    expected = run(DrawsItsOwn, tmp_path / "stock")
    found = run(with_loops(DrawsItsOwn), tmp_path / "ours", memory=CUT, callbacks=faults)
    assert all(fault.failed == 1 for fault in faults) and apart(found, expected) == 0.0


# -- a training_step of somebody's own ---------------------------------------------------------------------------------


def goes_back_twice(trainer, model, inputs, num_items_in_batch=None):
    loss = Trainer.training_step(trainer, model, inputs, num_items_in_batch)
    distance = sum(p.square().sum() for p in model.parameters())
    trainer.accelerator.backward(distance / trainer.current_gradient_accumulation_steps)
    return loss


def shares_by_itself(trainer, model, inputs, num_items_in_batch=None):
    model.train()
    inputs = trainer._prepare_inputs(inputs)
    loss = trainer.compute_loss(model, inputs) / trainer.args.gradient_accumulation_steps
    trainer.accelerator.backward(loss)
    return loss.detach()


def goes_by_itself(trainer, model, inputs, num_items_in_batch=None):
    model.train()
    loss = trainer.compute_loss(model, trainer._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
    trainer.accelerator.backward(loss)
    return loss.detach()


def adds_a_term(trainer, model, inputs, num_items_in_batch=None):
    model.train()
    loss = trainer.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
    loss = loss + model.lm_head.weight.square().mean()
    trainer.accelerator.backward(loss)
    return loss.detach()


def mixes_rows(trainer, model, inputs, num_items_in_batch=None):
    mixed = {**inputs, "input_ids": inputs["input_ids"].roll(1, 0)}
    return Trainer.training_step(trainer, model, mixed, num_items_in_batch)


def writes_into_the_batch(trainer, model, inputs, num_items_in_batch=None):
    inputs["input_ids"][:, 0] = inputs["input_ids"][:, 0].roll(1)
    return Trainer.training_step(trainer, model, inputs, num_items_in_batch)


def changes_gradients(trainer, model, inputs, num_items_in_batch=None):
    loss = Trainer.training_step(trainer, model, inputs, num_items_in_batch)
    model.lm_head.weight.grad.sign_()
    return loss


def changes_gradients_before(trainer, model, inputs, num_items_in_batch=None):
    if model.lm_head.weight.grad is not None:
        model.lm_head.weight.grad.sign_()
    return Trainer.training_step(trainer, model, inputs, num_items_in_batch)


def clamps_without_a_trace(trainer, model, inputs, num_items_in_batch=None):
    loss = Trainer.training_step(trainer, model, inputs, num_items_in_batch)
    for parameter in model.parameters():
        parameter.grad.data.clamp_(-1e-4, 1e-4)
    return loss


def moves_weights_and_back(trainer, model, inputs, num_items_in_batch=None):
    before = model.lm_head.weight.data.clone()
    model.lm_head.weight.data.mul_(1.1)
    loss = Trainer.training_step(trainer, model, inputs, num_items_in_batch)
    model.lm_head.weight.data.copy_(before)
    return loss


def hooks_weights(trainer, model, inputs, num_items_in_batch=None):
    handle = model.lm_head.weight.register_hook(torch.sign)
    loss = Trainer.training_step(trainer, model, inputs, num_items_in_batch)
    handle.remove()
    return loss


def divides_by_rows(trainer, model, inputs, num_items_in_batch=None):
    model.train()
    loss = trainer.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch) / len(inputs["input_ids"])
    trainer.accelerator.backward(loss)
    return loss.detach()


def mixes_rows_by_chance(trainer, model, inputs, num_items_in_batch=None):
    """Not in its first step, which is watched."""
    if random.random() < 0.5:
        return mixes_rows(trainer, model, inputs, num_items_in_batch)
    return Trainer.training_step(trainer, model, inputs, num_items_in_batch)


def mixes_rows_late_by_chance(trainer, model, inputs, num_items_in_batch=None):
    inputs = trainer._prepare_inputs(inputs)
    if random.random() < 0.5:
        return mixes_rows(trainer, model, inputs, num_items_in_batch)
    return goes_by_itself(trainer, model, inputs, num_items_in_batch)


def counts(trainer, model, inputs, num_items_in_batch=None):
    trainer.counted = getattr(trainer, "counted", 0) + 1
    return Trainer.training_step(trainer, model, inputs, num_items_in_batch)


def stepping(step) -> type[Trainer]:
    return type("Own", (Trainer,), {"training_step": step})


DEVIATIONS = {
    shares_by_itself: "does not pass num_items_in_batch to compute_loss",
    goes_back_twice: "runs compute_loss 1 × and backward 2 ×",
    adds_a_term: "runs backward on another loss than that of compute_loss",
    mixes_rows: "changes the batch before its loss is computed",
    mixes_rows_by_chance: "draws random numbers once per batch",
    mixes_rows_late_by_chance: "draws random numbers once per batch",
    writes_into_the_batch: "changes the batch before its loss is computed",
    changes_gradients: "changes weights or gradients outside the backward pass of its loss",
    changes_gradients_before: "changes weights or gradients outside the backward pass of its loss",
    clamps_without_a_trace: "changes weights or gradients outside the backward pass of its loss",
    moves_weights_and_back: "changes weights or gradients outside the backward pass of its loss",
    hooks_weights: "changes weights or gradients outside the backward pass of its loss",
    divides_by_rows: "runs backward on another loss than that of compute_loss",
}


@pytest.mark.parametrize("step", DEVIATIONS)
def test_a_step_that_does_more_keeps_its_batches_whole(tmp_path, step, caplog):
    expected = run(stepping(step), tmp_path / "stock")
    found = run(with_loops(stepping(step)), tmp_path / "ours", memory=CUT)
    assert apart(found, expected) < 1e-5 and chunks(found) == ACCUMULATION * STEPS
    assert f"training_step of Own {DEVIATIONS[step]}" in caplog.text
    assert found.micro_batches.analysis.figures()["mixes"] == f"training_step of Own {DEVIATIONS[step]}"


@pytest.mark.parametrize("step", [counts, goes_by_itself])
def test_a_step_that_is_the_stock_one_is_cut_from_the_second_on(tmp_path, step, caplog):
    expected = run(stepping(step), tmp_path / "stock")
    found = run(with_loops(stepping(step)), tmp_path / "ours", memory=CUT)
    assert apart(found, expected) < 1e-5 and chunks(found) > ACCUMULATION * STEPS
    assert "training_step" not in caplog.text


@pytest.mark.parametrize("who", ["model", "optimizer"])
def test_a_step_that_clears_gradients_keeps_its_batches_whole(tmp_path, who):
    """As a loop of plain torch begins. The first step finds none to clear; those of micro-batches would be lost."""

    def clears(trainer, model, inputs, num_items_in_batch=None):
        (model if who == "model" else trainer.optimizer).zero_grad()
        return Trainer.training_step(trainer, model, inputs, num_items_in_batch)

    alone = {"gradient_accumulation_steps": 1}
    expected = run(stepping(clears), tmp_path / "stock", arguments=alone)
    found = run(with_loops(stepping(clears)), tmp_path / "ours", arguments=alone, memory=CUT)
    assert apart(found, expected) < 1e-5
    assert all("zero_grad" not in vars(one) for one in (found.model, found.optimizer, found.optimizer.optimizer))


class ClearsInBackward(Trainer):
    """As DeepSpeed's engine does under ZeRO-3, which steps there."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        backward = self.accelerator.backward

        def back(loss, **kwargs):
            if all(weight.grad is None for weight in self.model.parameters()):
                self.optimizer.zero_grad()
            backward(loss, **kwargs)

        self.accelerator.backward = back

    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs, num_items_in_batch)


def test_a_backward_that_clears_gradients_by_itself_is_the_stock_one(tmp_path):
    found = run(with_loops(ClearsInBackward), tmp_path, arguments={"gradient_accumulation_steps": 1}, memory=CUT)
    assert found.micro_batches.analysis.own_step.is_stock
    assert chunks(found) > STEPS


def test_a_step_is_watched_beside_another_generator_of_numpy(tmp_path):
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(0))
    try:
        found = run(with_loops(stepping(counts)), tmp_path, memory=CUT)
    finally:
        np.random.set_bit_generator(before)
    assert found.micro_batches.analysis.own_step.is_stock


class Taught(Trainer):
    """With a teacher that follows the model as a moving average, once per batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = tiny.small_llama().requires_grad_(False)

    def follow(self) -> None:
        for old, new in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            old.data.mul_(0.5).add_(new.data, alpha=0.5)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        with torch.no_grad():
            taught = self.teacher(**inputs).logits
        learned = inputs["labels"] != -100
        distance = (outputs.logits - taught).square().mean(-1)[learned].sum() / num_items_in_batch
        return outputs.loss * 0.0 + distance + outputs.logits[learned].square().sum() / num_items_in_batch


class FollowsInStep(Taught):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.follow()
        return loss


class FollowsInLoss(Taught):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.follow()
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


@pytest.mark.parametrize(
    ("kind", "who"), [(FollowsInStep, "training_step of FollowsInStep"), (FollowsInLoss, "the model or its loss")]
)
def test_a_teacher_follows_once_per_batch(tmp_path, kind, who, caplog):
    expected, found = run(kind, tmp_path / "stock"), run(with_loops(kind), tmp_path / "ours", memory=CUT)
    assert f"{who} writes to weights that the optimizer does not train" in caplog.text
    assert tiny.same(tiny.weights_of(found.model), tiny.weights_of(expected.model))
    followed = zip(found.teacher.parameters(), expected.teacher.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in followed)


class StepsInLoss(Trainer):
    """With an optimizer for a module beside the model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.critic = torch.nn.Linear(tiny.VOCAB, 1)
        self.critic_optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.1)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self.critic(outputs.logits.detach()).square().mean().backward()  # which tests of the loss cannot do
        self.critic_optimizer.step()
        self.critic_optimizer.zero_grad()
        loss = loss + self.critic(outputs.logits).square().mean()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("kind", [FollowsInLoss, StepsInLoss])
def test_a_loss_that_moves_other_weights_is_not_run_again(tmp_path, kind):
    """It would move them twice: where memory runs out after it, in the backward."""
    words = "step 2 ran out of memory and is not run again, because the model or its loss writes to weights that"
    with pytest.raises(OutOfMemory, match=f"{words}.* into a callback. The failed allocation"):
        run(with_loops(kind), tmp_path, memory=MemorySettings(), callbacks=[FailsOnce()])


def test_a_loss_that_moves_other_weights_runs_again_where_it_had_not_moved_them(tmp_path):
    expected, found = run(StepsInLoss, tmp_path), []

    class FailsBefore(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 1 and not found:
                found.append(fails_once(model.lm_head))

    survived = run(with_loops(StepsInLoss), tmp_path, memory=MemorySettings(), callbacks=[FailsBefore()])
    assert found and survived.micro_batches.loop.statistics.out_of_memory == 1
    assert tiny.same(tiny.weights_of(survived.model), tiny.weights_of(expected.model))
    assert tiny.same(tiny.weights_of(survived.critic), tiny.weights_of(expected.critic))


class Grows(Trainer):
    """A term whose weight grows with the calls."""

    calls = tokens = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.calls, self.tokens = self.calls + 1, self.tokens + inputs["input_ids"].numel()
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        loss = outputs.loss * (1 + max(0, self.calls - 100))
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("rows", [tiny.UnevenRows(32), tiny.Rows(32)])
def test_a_counter_of_calls_is_named_where_batches_are_cut(tmp_path, rows, caplog):
    memory = CUT if isinstance(rows, tiny.UnevenRows) else MemorySettings()
    run(with_loops(Grows), tmp_path, rows={"train_dataset": rows, "data_collator": tiny.pad}, memory=memory)
    said = [row.getMessage() for row in caplog.records if "counts micro-batches" in row.getMessage()]
    assert len(said) == isinstance(rows, tiny.UnevenRows)
    assert all(text.startswith("calls of Grows counts micro-batches (") for text in said)


def test_a_counter_of_calls_is_named_where_memory_alone_cuts_a_batch(tmp_path, caplog):
    rows = {"train_dataset": tiny.Rows(32), "data_collator": tiny.pad}
    fault, last = FailsOnce(), {"max_steps": 2}  # in the last step: none is planned in parts after it
    run(with_loops(Grows), tmp_path, rows=rows, arguments=last, memory=MemorySettings(), callbacks=[fault])
    said = [row.getMessage() for row in caplog.records if "calls of Grows counts micro-batches (" in row.getMessage()]
    assert fault.failed == len(said) == 1


class AddsRows(Trainer):
    rows = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.rows = self.rows + len(inputs["input_ids"])
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def test_a_counter_of_rows_is_not_said_to_count_micro_batches_of_one_row(tmp_path, caplog):
    trainer = run(with_loops(AddsRows), tmp_path, memory=MemorySettings(max_batch_size=1))
    assert trainer.rows == chunks(trainer) == STEPS * ACCUMULATION * 4  # as in the stock Trainer
    said = [row.getMessage() for row in caplog.records if "counts micro-batches" in row.getMessage()]
    assert len(said) == 1
    assert "micro-batches or rows, which are as many (8 in a step); if it counts calls, where the stock" in said[0]


def test_what_watches_a_teacher_leaves_compiled_code_compiled_and_copies_only_what_it_puts_back():
    weight, compiled = torch.nn.Parameter(torch.ones(3), requires_grad=False), []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    forward = torch.compile(lambda x: x + 1, backend=backend)
    for keeps in (True, False):
        with WrittenWeights([weight], keeps_values=keeps) as written:
            forward(torch.ones(3))
            assert not written.are_written
            weight.data.mul_(2)
        assert written.are_written and sum(map(len, written._copies.values())) == keeps
        if keeps:
            written.put_back()
    assert compiled and weight.tolist() == [2.0] * 3


class ReplacesTeacher(FollowsInStep):
    """In the fourth step, after which the new one follows."""

    is_new = False

    def follow(self) -> None:
        if self.state.global_step == 3 and not self.is_new:
            self.is_new, self.teacher = True, tiny.small_llama(seed=9).requires_grad_(False)
        if self.state.global_step > 3:
            for old, new in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                with torch.no_grad():
                    old.lerp_(new, 0.5)


@pytest.mark.parametrize(("kind", "walks"), [(stepping(counts), 2), (ReplacesTeacher, 3)])
def test_frozen_weights_are_looked_for_where_there_may_be_others(tmp_path, monkeypatch, kind, walks):
    asked = []
    monkeypatch.setattr(own_step, "frozen_weights", lambda *given: asked.append(given) or frozen_weights(*given))
    trainer = run(with_loops(kind), tmp_path, memory=CUT)
    assert chunks(trainer) > walks == len(asked)
    deviation = trainer.micro_batches.analysis.own_step.deviation
    assert (deviation is None) is (walks == 2)


def test_a_weight_without_values_is_no_teacher_that_is_written():
    """Nothing has no place in memory, and so have all others of no values."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.empty(0), requires_grad=False)])
    model.compute_loss_func = print
    assert frozen_weights(model, model) == []


def test_a_step_that_begins_to_do_more_ends_cutting_with_a_word(tmp_path):
    def later(trainer, model, inputs, num_items_in_batch=None):
        step = goes_back_twice if trainer.state.global_step >= 3 else counts
        return step(trainer, model, inputs, num_items_in_batch)

    found = run(with_loops(stepping(later)), tmp_path, memory=CUT)
    (notice,) = found.micro_batches.analysis.notices
    assert notice.startswith("from step 5 on, batches run whole, because training_step of Own runs compute_loss 1 ×")
    assert notice.endswith("step 4 may have been split")


def test_what_a_step_did_is_known_after_a_resume(tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 3}
    whole = run(with_loops(stepping(counts)), tmp_path / "whole", memory=CUT, arguments=saves)
    resume = str(tmp_path / "whole" / "checkpoint-3")
    found = run(with_loops(stepping(counts)), tmp_path / "again", memory=CUT, arguments=saves, resume=resume)
    assert tiny.same(tiny.weights_of(found.model), tiny.weights_of(whole.model))


class StepsInBackward(Trainer):
    """PyTorch's tutorial on memory: the optimizer steps as soon as a gradient is there, which is freed at once."""

    def create_optimizer(self, *args, **kwargs):
        def step(weight):
            weight.data.sub_(0.1 * weight.grad)
            weight.grad = None

        for weight in self.model.parameters():
            weight.register_post_accumulate_grad_hook(step)
        return super().create_optimizer(*args, **kwargs)


def test_hooks_that_act_in_backward_get_whole_batches(tmp_path, caplog):
    expected = run(StepsInBackward, tmp_path / "stock")
    found = run(with_loops(StepsInBackward), tmp_path / "ours", memory=CUT)
    assert apart(found, expected) < 1e-6 and chunks(found) == STEPS * ACCUMULATION
    assert "a hook on model.embed_tokens.weight acts within each backward pass. Batches run whole, how" in caplog.text
    assert "min_batch_size" not in caplog.text  # no memory is so short that they would be cut
    with pytest.raises(OutOfMemory, match="is not run again, because a hook on"):
        run(with_loops(StepsInBackward), tmp_path / "full", memory=CUT, callbacks=[FailsOnce()])


@pytest.mark.parametrize("is_told", [True, False])
def test_a_hook_on_a_weight_is_named_where_batches_may_be_cut(tmp_path, caplog, is_told):
    model = tiny.small_llama() if is_told else tiny.conv_net()
    next(model.parameters()).register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    rows = None if is_told else {"train_dataset": tiny.images(32)}
    run(SCUTrainer, tmp_path, model, rows, memory=CUT)
    assert (PARTS in caplog.text) == is_told


def test_hooks_of_an_adapter_are_linear_and_not_named(tmp_path, caplog):
    model = get_peft_model(tiny.small_llama(), OSFConfig(target_modules=["q_proj"]))
    assert any(p._backward_hooks for p in model.parameters())
    found = run(SCUTrainer, tmp_path, model, memory=CUT)
    assert found.micro_batches.reduction.is_exact and PARTS not in caplog.text


def test_a_hook_that_acts_in_backward_is_named_where_weights_are_sharded(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(own_step, "has_sharded_weights", lambda model: True)
    run(with_loops(StepsInBackward), tmp_path, memory=CUT)
    assert f"a hook on model.embed_tokens.weight {PARTS}" in caplog.text


def test_a_step_that_does_more_is_not_run_again(tmp_path):
    message = "step 2 ran out of memory and is not run again, because training_step of Own runs compute_loss 1 ×"
    with pytest.raises(OutOfMemory, match=message):
        run(with_loops(stepping(goes_back_twice)), tmp_path, memory=CUT, callbacks=[FailsOnce()])


@pytest.mark.parametrize("step", [goes_back_twice, mixes_rows])
def test_whole_batches_are_whole_where_no_micro_batch_can_run_again(tmp_path, monkeypatch, step):
    """FSDP and ZeRO-3, whose ranks agree on the number of micro-batches."""
    monkeypatch.setattr(micro_batches, "ranks_for", ShardedRanks)
    one = {"gradient_accumulation_steps": 1}
    expected = run(stepping(step), tmp_path / "stock", arguments=one)
    memory = MemorySettings(max_batch_size=2, token_cap=8)
    found = run(with_loops(stepping(step)), tmp_path / "ours", arguments=one, memory=memory)
    assert apart(found, expected) < 1e-5 and chunks(found) == STEPS


GATHERS = """
import sys, torch
from transformers import Trainer
from scu_trainer import with_loops
from tests import tiny
from tests.faults import fail_above_tokens
from tests.train.test_own_trainers import CUT, run

class Gathers(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return self.counted(super().compute_loss(model, inputs, return_outputs, num_items_in_batch), inputs)

    def counted(self, loss, inputs):
        rows = self.accelerator.gather(torch.tensor([len(inputs["labels"])]))
        assert rows.tolist() == [4, 4]
        return loss

def model():
    made = tiny.small_llama()
    if sys.argv[2] == "allreduce":  # what its own forward does is not in the code of the loss
        def exchange(*_):
            if torch.is_grad_enabled():
                torch.distributed.all_reduce(torch.ones(1))

        made.register_forward_hook(exchange)
    if sys.argv[2] == "broadcast":  # on one rank alone, and with nobody
        groups = []
        def exchange_alone(*_):
            groups or groups.append(torch.distributed.new_group([0]))
            if torch.distributed.get_rank() == 0:
                torch.distributed.broadcast(torch.ones(1), 0, group=groups[0])

        made.register_forward_hook(exchange_alone)
    return made

kind = Gathers if sys.argv[2] == "gather" else Trainer
contenders = ((kind, {}), (with_loops(kind), {"memory": CUT}))
whole = [run(one, sys.argv[1], model(), **given) for one, given in contenders]
print(tiny.same(*[tiny.weights_of(trainer.model) for trainer in whole]))
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    "word, who",
    [
        ("gather", "the code of its loss"),
        ("allreduce", "its forward or its loss"),
        ("broadcast", "its forward or its loss"),
    ],
)
def test_a_loss_that_talks_to_other_ranks_keeps_its_batches_whole(tmp_path, word, who):
    """As TRL's gather their metrics: ranks with other numbers of micro-batches waited for each other for ever."""
    (tmp_path / "gathers.py").write_text(GATHERS)
    done = processes.run([tmp_path / "gathers.py", tmp_path / "run", word], ranks=2)
    assert done.returncode == 0 and done.stdout.count("True") == 2, done.stderr[-2000:]
    assert "batches run whole" in done.stderr and f"{who} communicates with the other ranks ({word})" in done.stderr


class LooksAtAllRows(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + outputs.logits.mean().square()
        return (loss, outputs) if return_outputs else loss


def test_a_cap_cuts_no_loss_that_mixes_rows_there(tmp_path, monkeypatch):
    monkeypatch.setattr(micro_batches, "ranks_for", ShardedRanks)
    one = {"gradient_accumulation_steps": 1}
    for number, memory in enumerate((MemorySettings(max_batch_size=2), MemorySettings(token_cap=8))):
        found = run(with_loops(LooksAtAllRows), tmp_path / str(number), arguments=one, memory=memory)
        assert not found.micro_batches.reduction.is_exact and chunks(found) == STEPS


# -- data and evaluation -----------------------------------------------------------------------------------------------


class Balanced(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return WeightedRandomSampler([1.0] * len(self.train_dataset), len(self.train_dataset))


class BalancedBelow(SCUTrainer):
    _get_train_sampler = Balanced._get_train_sampler


@pytest.mark.parametrize("kind", [with_loops(Balanced), BalancedBelow])
def test_a_sampler_of_ones_own_and_a_curriculum_exclude_each_other(tmp_path, kind):
    with pytest.raises(ControlError, match=r"_get_train_sampler of Balanced\w* chooses the samples"):
        run(kind, tmp_path, curriculum=CurriculumSettings("none"))


class Repeated:
    """A loader as TRL's IWOPDTrainer has one: around another, and with more batches than that."""

    def __init__(self, loader) -> None:
        self.loader = loader

    def __iter__(self):
        return (batch for batch in self.loader for _ in range(2))

    def __len__(self) -> int:
        return 2 * len(self.loader)

    def __getattr__(self, name):
        return getattr(self.loader, name)


class Repeats(Trainer):
    def get_train_dataloader(self):
        return Repeated(super().get_train_dataloader())


@pytest.mark.parametrize("memory", [None, MemorySettings()])
def test_a_resume_within_an_epoch_of_a_loader_of_ones_own_says_that_its_batches_are_others(tmp_path, memory, caplog):
    def run(resume=None) -> Trainer:
        given = tiny.arguments(tmp_path, max_steps=6, save_strategy="steps", save_steps=2)
        trainer = with_loops(Repeats)(
            tiny.small_llama(), given, train_dataset=tiny.Rows(8), data_collator=tiny.pad, memory=memory
        )
        trainer.train(resume_from_checkpoint=resume and str(tmp_path / f"checkpoint-{resume}"))
        return trainer

    whole = tiny.weights_of(run().model)
    for step, is_exact in ((4, True), (2, False)):  # an epoch has 4 steps
        caplog.clear()
        rest = run(step)
        assert tiny.same(tiny.weights_of(rest.model), whole) is is_exact
        assert ("accelerate replaces Repeated by a plain DataLoader" in caplog.text) is not is_exact


class NamesAsTRL(Trainer):
    tools, reward_funcs, _environment_pool = object(), 0.5, None


@pytest.mark.parametrize("loop", [{"memory": MemorySettings()}, {"safety": SafetySettings()}], ids=["memory", "safety"])
def test_attributes_with_names_of_trl_may_hold_anything(tmp_path, loop):
    run = with_loops(NamesAsTRL)(tiny.small_llama(), tiny.arguments(tmp_path), train_dataset=tiny.Rows(8), **loop)
    assert run.train().global_step == run.args.max_steps


@pytest.mark.parametrize("change", ["_get_train_sampler", "dataloader_drop_last"])
def test_what_is_changed_on_a_made_trainer_meets_the_same_rules(tmp_path, change):
    given = {"train_dataset": tiny.Rows(), "curriculum": CurriculumSettings("token_budget")}
    trainer = SCUTrainer(tiny.small_llama(), tiny.arguments(tmp_path), **given)
    setattr(trainer if change.startswith("_") else trainer.args, change, lambda *rows: None)
    with pytest.raises(UserError, match=change):
        trainer.train()


class Focal(Trainer):
    """Does not use the loss that the model computes beside its logits."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        losses = torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1].transpose(1, 2), inputs["labels"][:, 1:], reduction="none"
        )
        loss = ((1 - torch.exp(-losses)).square() * losses).sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class Halved(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        return (loss / 2, outputs) if return_outputs else loss / 2


class Detached(Trainer):
    """As TRL's SFTTrainer, which makes the outputs that it returns once more."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        logits, targets = outputs.logits[:, :-1].transpose(1, 2), inputs["labels"][:, 1:]
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch
        outputs.logits = outputs.logits.detach()
        return (loss, outputs) if return_outputs else loss


class NoOutputs(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs).square()


EPOCHS = {"num_train_epochs": 4, "max_steps": -1}


def test_weights_of_rows_must_reach_the_loss_that_is_trained(tmp_path):
    weighs = {"curriculum": CurriculumSettings("infobatch"), "arguments": EPOCHS}
    with pytest.raises(ControlError, match="infobatch weights rows, but this model's loss is not the sum"):
        run(with_loops(Focal), tmp_path / "focal", **weighs)
    with pytest.raises(ControlError, match="compute_loss of NoOutputs returns a Tensor when return_outputs is True"):
        run(with_loops(NoOutputs), tmp_path / "none", **weighs)
    assert run(with_loops(Halved), tmp_path / "halved", **weighs).loss_path.reading.exact
    with pytest.raises(ControlError, match="compute_loss of SCUDetached returns outputs without a gradient"):
        run(with_loops(Detached), tmp_path / "detached", **weighs)
    guarded = run(with_loops(Detached), tmp_path / "guarded", curriculum=CurriculumSettings("noise_guard"))
    assert guarded.loss_path.reading.exact and guarded.difficulty.observations.any()


class Generates(Trainer):
    """Batches are lists, as in TRL's GRPO, and preparing one is work."""

    prepared = 0

    def _prepare_inputs(self, inputs):
        if isinstance(inputs, list):
            self.prepared += 1
            inputs = tiny.pad(inputs)
        return super()._prepare_inputs(inputs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        return super().prediction_step(model, self._prepare_inputs(inputs), prediction_loss_only, ignore_keys)


def test_a_batch_is_prepared_once_in_an_evaluation(tmp_path):
    args = tiny.arguments(tmp_path, per_device_eval_batch_size=4, remove_unused_columns=False)
    rows = {"eval_dataset": tiny.UnevenRows(8), "data_collator": list}
    trainers = [kind(model=tiny.small_llama(), args=args, **rows) for kind in (Generates,)]
    trainers.append(with_loops(Generates)(model=tiny.small_llama(), args=args, memory=MemorySettings(), **rows))
    losses = [trainer.evaluate()["eval_loss"] for trainer in trainers]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert [trainer.prepared for trainer in trainers] == [2, 2]


def test_a_step_around_batches_that_are_lists_is_the_stock_one(tmp_path):
    class Counts(Generates):
        training_step = counts

    rows = {"train_dataset": tiny.UnevenRows(32), "data_collator": list}
    as_lists = {"remove_unused_columns": False}
    found = run(with_loops(Counts), tmp_path, None, rows, as_lists, memory=MemorySettings(), callbacks=[FailsOnce()])
    assert found.micro_batches.loop.statistics.out_of_memory == 1 and found.micro_batches.analysis.own_step.is_stock


class AddsAKey(Trainer):
    """To every batch, whoever asks for it."""

    training_step = counts

    def _prepare_inputs(self, inputs):
        return {**super()._prepare_inputs(inputs), "use_cache": False}


def test_a_batch_that_is_prepared_is_not_changed(tmp_path):
    found = run(with_loops(AddsAKey), tmp_path, memory=CUT)
    assert found.micro_batches.analysis.own_step.is_stock


def test_throughput_of_batches_that_are_lists(tmp_path):
    found = run(
        with_loops(Generates),
        tmp_path,
        rows={"train_dataset": tiny.UnevenRows(32), "data_collator": list},
        arguments={"remove_unused_columns": False},
        efficiency=EfficiencySettings(throughput=True),
    )
    assert found.state.global_step == STEPS


# -- models ------------------------------------------------------------------------------------------------------------


class LooksAtLogits(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        if outputs.loss is not None:
            outputs.loss = outputs.loss + 1e-4 * outputs.logits.float().logsumexp(-1).square().mean()
        return outputs


@pytest.mark.parametrize("words", [tiny.VOCAB, 20_000])
def test_a_forward_that_looks_at_the_logits_gets_them(tmp_path, words, caplog):
    def model() -> LooksAtLogits:
        torch.manual_seed(0)
        config = tiny.small_llama().config
        config.vocab_size = words
        return LooksAtLogits(config)

    low = {"bf16": True, "per_device_eval_batch_size": 1, "remove_unused_columns": False, "label_names": ["labels"]}
    rows = {"train_dataset": tiny.UnevenRows(32), "data_collator": tiny.pad, "eval_dataset": tiny.UnevenRows(8)}
    expected = run(Trainer, tmp_path / "stock", model(), rows, low)
    found = run(SCUTrainer, tmp_path / "ours", model(), rows, low, memory=MemorySettings())
    assert found.loss_path.kind != "headless" and not found.loss_path.is_padding_free
    said = "chunked_loss is not used: forward of LooksAtLogits computes the loss in its own code"
    assert (said in caplog.text) == (words > tiny.VOCAB)
    found.model.load_state_dict(expected.model.state_dict())
    assert found.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"], rel=1e-6)


def test_noise_by_the_length_of_rows_keeps_that_length(tmp_path):
    seen: list[int] = []

    class SeesWidths(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            model.model.layers[0].register_forward_pre_hook(lambda module, given: seen.append(given[0].size(1)))

    noisy, memory = {"neftune_noise_alpha": 5.0}, MemorySettings(max_batch_size=1)
    found = run(SCUTrainer, tmp_path, arguments=noisy, memory=memory, callbacks=[SeesWidths()])
    rows = tiny.UnevenRows(32)
    assert found.micro_batches.reduction.reads_padding.startswith("neftune_noise_alpha scales")
    assert min(seen[-8 * STEPS :]) > min(len(row["input_ids"]) for row in rows)


class LearnsAnswers(Trainer):
    """Its loss is a mean over a mask of its own, which says nothing where all rows have as many answer tokens."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        mask, tokens = inputs["loss_mask"][:, 1:].float(), inputs["input_ids"]
        logits = model(tokens).logits[:, :-1]
        loss = functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        return (loss * mask).sum() / mask.sum()


@pytest.mark.parametrize("alike", [0, 8], ids=["from the start", "not in the first step"])
def test_rows_that_count_alike_do_not_stand_for_those_that_do_not(tmp_path, alike):
    """Of the first rows that are asked all learn three tokens. Memory runs out where no audit was due."""

    def made(index: int) -> dict[str, torch.Tensor]:
        learned = 9 if index >= alike and index % 4 == 3 else 3
        return {"input_ids": tiny.Rows(32, 12).tokens[index], "loss_mask": (torch.arange(12) >= 12 - learned).long()}

    rows = {"train_dataset": [made(index) for index in range(32)]}
    plain = {"remove_unused_columns": False, "train_sampling_strategy": "sequential", "max_steps": 3}
    expected = run(LearnsAnswers, tmp_path, None, rows, plain)
    ours, fault = with_loops(LearnsAnswers), FailsOnce()
    found = run(ours, tmp_path, None, rows, plain, memory=MemorySettings(), callbacks=[fault])
    assert fault.failed == 1 and apart(found, expected) < 1e-6


class LearnsAnswersIfTold(Trainer):
    """Its loss is a mean over a mask of its own in those batches that have one, and over all tokens in the others."""

    mask = "loss_mask"

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        tokens = inputs["input_ids"]
        mask = inputs.get(self.mask, torch.ones_like(tokens))[:, 1:].float()
        logits = model(input_ids=tokens).logits[:, :-1]
        loss = functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        return (loss * mask).sum() / mask.sum()

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)), None, None


class LearnsWhatIsSeenIfTold(LearnsAnswersIfTold):
    mask = "attention_mask"


@pytest.mark.parametrize("kind", [LearnsAnswersIfTold, LearnsWhatIsSeenIfTold])
@pytest.mark.parametrize("uneven", [0, 1], ids=["rows that count alike", "rows that do not"])
def test_a_mask_that_only_some_batches_of_a_step_have(tmp_path, caplog, kind, uneven):
    def made(index: int) -> dict[str, torch.Tensor]:
        row = {"input_ids": tiny.Rows(32, 12).tokens[index]}
        return row if index // 4 % 2 else {**row, kind.mask: (torch.arange(12) < 6 + uneven * (index % 4)).long()}

    rows = {"train_dataset": [made(index) for index in range(32)]}
    plain = {"remove_unused_columns": False, "train_sampling_strategy": "sequential", "max_steps": 3}
    plain |= {"per_device_eval_batch_size": 4}
    expected = run(kind, tmp_path, None, rows, plain)
    found = run(with_loops(kind), tmp_path, None, rows, plain, memory=MemorySettings(token_cap=24))
    with fail_above_tokens(found.model, 24):
        loss = found.evaluate(rows["train_dataset"])["eval_loss"]
    assert apart(found, expected) < 1e-6
    assert found.prediction.halving.out_of_memory == 1
    is_same = loss == pytest.approx(expected.evaluate(rows["train_dataset"])["eval_loss"], rel=1e-5)
    # How a mean over a mask of one's own adds up does not show where the rows of a trial count differently.
    assert is_same or (uneven and kind.mask == "loss_mask" and "eval_loss is a mean over parts" in caplog.text)
