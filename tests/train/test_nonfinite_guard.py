"""NaN and infinities in a loss, a gradient, a layer, a row, a weight: the step is skipped, reported and counted, and
nothing of it stays anywhere.

The reference of a skipped step is the same training without the guard, in which a callback drops the healthy gradients
of that step before the optimizer sees them.
"""

from __future__ import annotations

import io
import json
import math
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import TrainerCallback

from scu_trainer import SCUTrainer
from scu_trainer.data import Collator
from scu_trainer.errors import Diverged, NonFiniteLoss
from scu_trainer.run_files import read_rows
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings, SafetySettings
from scu_trainer.settings.efficiency import EfficiencySettings
from scu_trainer.train.evaluation.classification import class_metrics
from scu_trainer.train.evaluation.scoring import bpt_metrics, score_documents
from scu_trainer.train.loops.guard.first_nonfinite import (
    has_nonfinite,
    locate_nonfinite,
    nonfinite_weight,
    weights_are_finite,
)
from scu_trainer.train.run_directory.console import ConsoleCallback
from tests.tiny import Examples, Rows, conv_net, images, llama, same, small_llama, trained, weights_of
from tests.train.stepwise import Recorder
from tests.train.test_resume import StopAt

BAD_STEP = 3
SAFETY = SafetySettings()
IN_ORDER = {"train_sampling_strategy": "sequential"}
NAN = math.nan


class DropGradients(TrainerCallback):
    """The update of some steps (from 1) does not happen. ``is_reported``: to the stock loop and to other callbacks
    too."""

    def __init__(self, *steps: int, is_reported: bool = False) -> None:
        self.steps, self.is_reported = steps, is_reported

    def on_pre_optimizer_step(self, args, state, control, model, optimizer, **kwargs):
        if state.global_step + 1 in self.steps:
            for parameter in model.parameters():
                parameter.grad = None
            optimizer._is_overflow = self.is_reported

    def on_step_end(self, args, state, control, optimizer, **kwargs):
        optimizer._is_overflow = False


class AtStep(TrainerCallback):
    """``is_on`` while one of ``steps`` (from 1) is worked on."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.is_on = steps, False

    def on_step_begin(self, args, state, control, **kwargs):
        self.is_on = state.global_step + 1 in self.steps

    def on_step_end(self, args, state, control, **kwargs):
        self.is_on = False


def bad_loss(model, when: AtStep) -> None:
    """The gradient of a healthy loss, and a loss that is none."""

    def spoil(module, inputs, output):
        if when.is_on and module.training:
            output["loss"] = output["loss"] + output["loss"].new_tensor(NAN)

    model.register_forward_hook(spoil)


def bad_gradient(model, when: AtStep) -> None:
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.register_hook(lambda gradient: gradient * math.inf if when.is_on else None)


def bad_layer(model, when: AtStep) -> None:
    model.model.layers[-1].mlp.register_forward_hook(lambda module, _, output: output * NAN if when.is_on else None)


FAULTS = {"loss": bad_loss, "gradient": bad_gradient, "layer": bad_layer}


def run(folder, fault=None, steps=(BAD_STEP,), *, model=None, callbacks=(), safety=SAFETY, **changes):
    when, model = AtStep(*steps), small_llama() if model is None else model
    if fault is not None:
        FAULTS[fault](model, when)
    return trained(model, folder, safety=safety, callbacks=[when, *callbacks], **changes)


def reference(folder, steps=(BAD_STEP,), is_reported=False, **changes):
    return run(folder, safety=None, callbacks=[DropGradients(*steps, is_reported=is_reported)], **changes)


def adam_steps(trainer) -> set[int]:
    return {int(state["step"]) for state in trainer.optimizer.optimizer.state.values()}


def logged(trainer, name: str = "loss") -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


class OwnLoss(SCUTrainer):
    """A queue of earlier losses, a mean that moves, records by name and a counter, as code of one's own has them."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.queue, self.mean, self.steps_seen, self.records = torch.zeros(4), 0.0, 0, {"loss": []}

    def compute_loss(self, model, inputs, **named):
        loss = super().compute_loss(model, inputs, **named)
        self.queue = self.queue.roll(1)
        self.queue[0], self.mean = loss.detach(), 0.5 * self.mean + 0.5 * loss.item()
        self.records["loss"].append(loss.item())
        self.steps_seen += 1
        return loss


# -- one bad step ------------------------------------------------------------------------------------------------------

SETTINGS = {
    "plain": {},
    "no clipping": {"max_grad_norm": 0.0},
    "accumulation": {"gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("case", SETTINGS)
def test_the_update_of_a_bad_step_does_not_happen(tmp_path, fault, case):
    expected = reference(tmp_path / "reference", **SETTINGS[case])
    found = run(tmp_path / "found", fault, **SETTINGS[case])
    assert same(weights_of(found.model), weights_of(expected.model))
    assert adam_steps(found) == {5}, "the bad step moved Adam's counters"
    assert found.nonfinite_guard.skipped_steps == 1
    assert found.state.global_step == 6


class ActsWithoutGradients(torch.optim.SGD):
    """Moves weights in each call, as an average of its own does, and takes for granted that there are gradients."""

    calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for weight in self.param_groups[0]["params"]:
            weight.add_(weight.grad.sign(), alpha=-1e-3).mul_(0.9)


@pytest.mark.parametrize("is_scaled", [False, True])
def test_an_optimizer_is_not_called_in_a_bad_step(tmp_path, is_scaled):
    """Nor by the loss scaler of fp16, whose next step begins as if there had been none."""

    def with_scaler(trainer) -> None:
        trainer.accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        trainer.accelerator.unscale_gradients = lambda: scaler.unscale_(trainer.optimizer.optimizer)

    steps, model = Recorder(), small_llama()
    own = ActsWithoutGradients(model.parameters(), lr=1e-3)
    prepare = with_scaler if is_scaled else None
    found = run(tmp_path, "loss", model=model, optimizers=(own, None), callbacks=[steps], prepare=prepare)
    assert same(steps.weights[BAD_STEP - 1], steps.weights[BAD_STEP - 2])
    assert not same(steps.weights[BAD_STEP], steps.weights[BAD_STEP - 1])
    assert (own.calls, found.nonfinite_guard.skipped_steps) == (5, 1)


@pytest.mark.parametrize("optim", ["schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"])
def test_a_schedule_free_average_does_not_count_a_bad_step(tmp_path, optim):
    pytest.importorskip("schedulefree", reason="schedulefree is not installed")
    rows = Rows(24)
    others = torch.utils.data.Subset(rows, [*range(8), *range(12, 24)])  # without those of the bad step
    settings = {"optim": optim, "model": small_llama(), **IN_ORDER}
    expected = run(tmp_path / "reference", dataset=others, max_steps=5, **settings)
    found = run(tmp_path / "found", "loss", dataset=rows, **{**settings, "model": small_llama()})
    assert same(weights_of(found.model), weights_of(expected.model))


def test_a_first_step_that_is_taken_back_has_no_line(tmp_path):
    """All of its rows may have been set aside, and a loss of 0 is what is left then."""
    text = io.StringIO()
    run(tmp_path, "loss", (1,), callbacks=[ConsoleCallback(Console(file=text))], max_steps=4, logging_steps=2)
    assert "step 1/4" not in text.getvalue() and "step 2/4" in text.getvalue()


def test_without_faults_it_is_the_stock_trainer_bit_for_bit(tmp_path):
    changes = {"gradient_accumulation_steps": 2, "logging_steps": 2, "lr_scheduler_type": "linear"}
    expected = run(tmp_path / "off", safety=None, model=small_llama(attention_dropout=0.2), **changes)
    found = run(tmp_path / "on", model=small_llama(attention_dropout=0.2), **changes)
    assert same(weights_of(found.model), weights_of(expected.model))
    assert logged(found) == logged(expected) and logged(found, "grad_norm") == logged(expected, "grad_norm")
    assert set(logged(found, "skipped_steps")) == {0}


def test_looking_for_the_place_leaves_the_random_state_alone(tmp_path):
    expected = reference(tmp_path / "reference", model=small_llama(attention_dropout=0.2))
    found = run(tmp_path / "found", "gradient", model=small_llama(attention_dropout=0.2))
    assert same(weights_of(found.model), weights_of(expected.model))


def test_the_schedule_waits_for_a_skipped_step(tmp_path):
    found = run(tmp_path, "loss", lr_scheduler_type="linear", logging_steps=1)
    rates = logged(found, "learning_rate")
    assert rates == pytest.approx([1e-2 * (6 - step) / 6 for step in range(5)])


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_the_logged_mean_is_that_of_the_steps_that_counted(tmp_path, fault, filtered):
    changes = {"gradient_accumulation_steps": 2, "logging_nan_inf_filter": filtered}
    each = logged(reference(tmp_path / "reference", logging_steps=1, **changes))
    del each[BAD_STEP - 1]
    found = run(tmp_path / "found", fault, logging_steps=3, **changes)
    assert logged(found) == pytest.approx([sum(each[:2]) / 2, sum(each[2:]) / 3], rel=1e-6)
    assert logged(found, "skipped_steps") == [1, 1]
    assert logged(found, "train_loss") == pytest.approx([sum(each) / 5], rel=1e-6)
    assert all(math.isfinite(norm) for norm in logged(found, "grad_norm"))


@pytest.mark.parametrize("memory", [None, MemorySettings()])
def test_what_own_code_keeps_is_not_spoilt_by_a_bad_step(tmp_path, memory):
    found = run(tmp_path, "loss", kind=OwnLoss, memory=memory)
    assert torch.isfinite(found.queue).all() and found.queue.all(), "a row of the queue came from no healthy step"
    assert math.isfinite(found.mean) and len(found.records["loss"]) == 5
    assert found.steps_seen == 6, "a counter goes on, as the number of the step does"


def test_a_container_may_hold_itself():
    records = {"loss": [1.0]}
    records["all"] = records
    assert not has_nonfinite(records)
    records["loss"].append(torch.tensor(math.nan))
    assert has_nonfinite(records)


def test_statistics_of_a_bad_step_are_put_back(tmp_path):
    class Spoilt(Examples):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            return {**row, "pixel_values": row["pixel_values"] * (NAN if index == 9 else 1.0)}

    data = Spoilt(images().rows)
    found = run(tmp_path, model=conv_net(), dataset=data, **IN_ORDER)
    assert found.nonfinite_guard.figures()["bad_numbers"]["skipped"] == [
        {"step": 3, "fault": "loss", "place": "pixel_values of the data is not finite",
         "rows": ["row 1 of accumulation batch 0"]}
    ]  # fmt: skip
    assert torch.isfinite(found.model.norm.running_mean).all()
    assert int(found.model.norm.num_batches_tracked) == 5


# -- where it began ----------------------------------------------------------------------------------------------------


class BadRow:
    """Spoils one row of the data, in whatever batch it comes: the output of a layer, or the gradient behind it."""

    def __init__(self, model, tokens: torch.Tensor, layer: torch.nn.Module, backward: bool = False) -> None:
        self.tokens, self.backward = tokens, backward
        model.model.embed_tokens.register_forward_pre_hook(self._look)
        layer.register_forward_hook(self._spoil)

    def _look(self, module, inputs):
        length = min(inputs[0].shape[1], len(self.tokens))
        self.rows = (inputs[0][:, :length] == self.tokens[:length]).all(dim=1)

    def _spoil(self, module, inputs, output):
        factor = torch.where(self.rows, NAN, 1.0)[:, None, None]
        if not self.backward:
            return output * factor
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * factor)
        return None


def one_bad_row(folder, sample: int, backward: bool = False, **changes):
    model, data = llama(), Rows()
    BadRow(model, data[sample]["input_ids"], model.model.layers[1].mlp, backward)
    return run(folder, model=model, dataset=data, **changes)


def test_the_first_module_and_the_row_are_named(tmp_path, caplog):
    found = one_bad_row(tmp_path, sample=13, gradient_accumulation_steps=2, max_steps=3, **IN_ORDER)
    (record,) = found.nonfinite_guard.figures()["bad_numbers"]["skipped"]
    assert record["place"] == "the first non-finite output is that of model.layers.1.mlp (LlamaMLP)"
    assert record["rows"] == ["row 1 of accumulation batch 1"] and record["step"] == 2
    (line,) = [text for text in caplog.messages if "skipped" in text]
    assert line.startswith("step 2: the loss is not a finite number; the first non-finite output is that of model.")
    assert "1 of at most 3 in a row" in line and "lower learning_rate" in line
    assert found.nonfinite_guard.notices == ["optimizer steps skipped because loss or gradient was not finite: 1 (2)"]


def test_a_step_without_a_label_is_said_to_be_one(tmp_path, caplog):
    rows = [dict(row) for row in Rows(16)]
    for row in rows[8:12]:
        row["labels"] = torch.full_like(row["labels"], -100)
    run(tmp_path, dataset=Examples(rows), max_steps=4, **IN_ORDER)
    assert "step 3: the loss is not a finite number; no label of the step is learned (all are -100)" in caplog.text


def test_labels_that_weigh_little_are_labels():
    trainer = SimpleNamespace(model=torch.nn.Linear(2, 2))
    rows = {"pixel_values": torch.tensor([[float("nan"), 1.0]])}
    for count in (torch.tensor(0.4), torch.tensor([3, 3])):  # weights of classes, and a count for each GPU
        assert locate_nonfinite(trainer, [rows], count).place == "pixel_values of the data is not finite"


def test_a_step_without_a_label_is_found_under_data_parallel():
    """Each of several cards of one process is given the number of labels."""
    counts = torch.zeros(2, 1, dtype=torch.long)
    assert "no label of the step" in locate_nonfinite(SimpleNamespace(model=small_llama()), [], counts).place


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_gradient_is_traced_to_its_weight_and_row(tmp_path, is_checkpointed):
    found = one_bad_row(tmp_path, 13, backward=True, activation_checkpointing=is_checkpointed, **IN_ORDER)
    (record,) = found.nonfinite_guard.figures()["bad_numbers"]["skipped"]
    assert record["place"].endswith("is that of model.layers.1.mlp.down_proj.weight")
    assert record["rows"] == ["row 1 of accumulation batch 0"] and record["step"] == 4


def test_with_a_curriculum_the_sample_is_named(tmp_path):
    found = one_bad_row(tmp_path, 13, backward=True, max_steps=8, curriculum=CurriculumSettings())
    (record,) = found.nonfinite_guard.figures()["bad_numbers"]["skipped"]
    assert record["rows"] == ["sample 13"]


def test_code_between_modules_is_named_by_the_module_around_it(tmp_path, monkeypatch):
    model, when = llama(), AtStep(BAD_STEP)
    layer = model.model.layers[1]
    layer.register_forward_pre_hook(lambda module, given: (given[0] * (NAN if when.is_on else 1.0), *given[1:]))
    found = trained(model, tmp_path, safety=SAFETY, callbacks=[when])
    (record,) = found.nonfinite_guard.figures()["bad_numbers"]["skipped"]
    place = "the first non-finite value comes from model.layers.1, before it calls model.layers.1."
    assert record["place"].startswith(place)


def test_a_loss_that_goes_bad_behind_sound_modules_is_named_so(tmp_path):
    found = run(tmp_path, "loss")
    assert found.nonfinite_guard.figures()["bad_numbers"]["skipped"][0]["place"].startswith("the loss itself")


def test_a_fault_that_does_not_come_back_is_said_to_be_one(tmp_path, caplog):
    model, calls = small_llama(), []

    def once(module, inputs, output):
        calls.append(len(calls))
        return output * NAN if len(calls) == BAD_STEP else None

    model.model.layers[0].mlp.register_forward_hook(once)
    found = trained(model, tmp_path, safety=SAFETY)
    assert found.nonfinite_guard.figures()["bad_numbers"]["skipped"][0]["place"] is None
    assert "the source was not found: every value is finite when its rows run again" in caplog.text


def test_a_model_that_fails_on_single_rows_does_not_hide_the_step(tmp_path, caplog):
    model = small_llama()

    def refuse(module, inputs, kwargs):
        if len(kwargs["input_ids"]) == 1:
            raise IndexError("no row alone")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    found = run(tmp_path, "layer", model=model)
    assert found.nonfinite_guard.skipped_steps == 1 and "IndexError: no row alone" in caplog.text


# -- the limit ---------------------------------------------------------------------------------------------------------


def test_past_the_limit_the_run_stops_with_the_last_good_state(tmp_path):
    safety = SafetySettings(max_nonfinite_steps=2)
    good = run(tmp_path / "good", max_steps=2)
    with pytest.raises(NonFiniteLoss) as stopped:
        run(tmp_path / "run", "layer", steps=(3, 4, 5), max_steps=8, safety=safety)
    text = str(stopped.value)
    assert text.startswith("step 5: the loss is not a finite number; the first non-finite output is that of")
    assert "3 steps in a row" in text and "max_nonfinite_steps allows 2" in text
    assert "checkpoint-4 holds the weights after step 2, the last good one" in text

    checkpoint = tmp_path / "run" / "checkpoint-4"
    assert same(load_file(checkpoint / "model.safetensors"), weights_of(good.model))
    moments = torch.load(checkpoint / "optimizer.pt")["state"].values()
    assert {int(state["step"]) for state in moments} == {2}
    went_on = run(tmp_path / "run", max_steps=8, resume=str(checkpoint))
    assert same(weights_of(went_on.model), weights_of(reference(tmp_path / "r", steps=(3, 4), max_steps=8).model))
    assert went_on.nonfinite_guard.skipped_steps == 2


def test_zero_stops_at_the_first_and_a_step_in_between_begins_the_count_again(tmp_path):
    with pytest.raises(NonFiniteLoss, match=r"step 3: .* checkpoint-2 holds the weights after step 2"):
        run(tmp_path / "a", "loss", safety=SafetySettings(max_nonfinite_steps=0))
    found = run(tmp_path / "b", "loss", steps=(1, 3, 5), safety=SafetySettings(max_nonfinite_steps=1))
    assert found.nonfinite_guard.skipped_steps == 3
    with pytest.raises(NonFiniteLoss, match="No step was taken, so nothing is lost"):
        run(tmp_path / "c", "loss", steps=(1,), safety=SafetySettings(max_nonfinite_steps=0))


def test_a_checkpoint_that_is_there_is_not_written_again(tmp_path):
    saved = []

    class Saves(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            saved.append(state.global_step)

    changes = {"save_strategy": "steps", "save_steps": 1, "safety": SafetySettings(max_nonfinite_steps=0)}
    with pytest.raises(NonFiniteLoss, match="checkpoint-2 holds"):
        run(tmp_path, "loss", callbacks=[Saves()], **changes)
    assert saved == [1, 2]


# -- weights -----------------------------------------------------------------------------------------------------------


class BreakWeight(TrainerCallback):
    """An update that leaves a weight which is not finite."""

    def __init__(self, step: int) -> None:
        self.step = step

    @torch.no_grad()
    def on_optimizer_step(self, args, state, control, model, **kwargs):
        if state.global_step + 1 == self.step:
            model.model.layers[0].mlp.down_proj.weight[3, 4] = NAN


@pytest.mark.parametrize("curriculum", [None, CurriculumSettings()], ids=["rows not read", "rows read"])
def test_a_broken_weight_ends_the_run_at_once_and_is_not_saved(tmp_path, curriculum, caplog):
    with pytest.raises(NonFiniteLoss) as stopped:
        run(tmp_path, callbacks=[BreakWeight(3)], save_strategy="steps", save_steps=2, curriculum=curriculum)
    text = str(stopped.value)
    assert text.startswith("step 4: ") and "the weight model.layers.0.mlp.down_proj.weight is not finite itself" in text
    assert "the newest checkpoint is checkpoint-2" in text
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert "set aside" not in caplog.text, "rows are blamed for a weight"


def test_a_checkpoint_of_a_broken_weight_is_not_written(tmp_path):
    def prepare(trainer):
        trainer.checkpoints.before = trainer.nonfinite_guard.before_save

    changes = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "prepare": prepare}
    with pytest.raises(NonFiniteLoss, match=r"after step 3: the weight .* the newest checkpoint is checkpoint-2"):
        run(tmp_path, callbacks=[BreakWeight(3)], **changes)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_weights_are_asked_for_numbers_that_are_none():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3).bfloat16())
    model.append(torch.nn.Linear(3, 3, bias=False).to(torch.float8_e4m3fn))  # as of a model that is stored in FP8
    with torch.no_grad():
        assert weights_are_finite(model) and nonfinite_weight(model) is None
        model[0].weight[0, 0] = 3e38  # its square is none
        assert weights_are_finite(model)
        for tensor in (model[0].bias, model[1].running_var, model[2].weight):
            before = tensor.clone()
            for bad in (NAN, math.inf, -math.inf):
                tensor.view(-1)[1] = bad
                assert not weights_are_finite(model)
            tensor.copy_(before)
        assert weights_are_finite(model)


# -- with the loops ----------------------------------------------------------------------------------------------------

LOOPS = {
    "regularization": RegularizationSettings(target_s=0.001, sigma=0.03),
    "memory": MemorySettings(),
    "curriculum": CurriculumSettings(),
    "efficiency": EfficiencySettings(ema_decay=0.9),
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_loop_takes_a_bad_step_in(tmp_path, fault):
    """A bad layer comes to the curriculum as rows that are not finite: none is left to learn from."""
    expected = reference(tmp_path / "reference", is_reported=True, **LOOPS)
    found = run(tmp_path / "found", fault, **LOOPS)
    assert found.nonfinite_guard.skipped_steps == 1
    assert same(weights_of(found.model), weights_of(expected.model))
    assert found.regularizer.state == expected.regularizer.state and found.regularizer.state.decisions == 3
    assert found.loop("weight_average")._count == 3
    rows = read_rows(tmp_path / "found" / "scu_history.json")
    assert [row["step"] for row in rows] == [1, 2, 4]
    assert all(math.isfinite(row["s"]) for row in rows)


def test_difficulties_do_not_take_a_bad_step_in(tmp_path):
    changes = {"curriculum": CurriculumSettings(), "max_steps": 8}  # one epoch of 8 steps with 4 rows
    found, expected = run(tmp_path / "a", "gradient", **changes), run(tmp_path / "b", **changes)
    seen, all_seen = found.difficulty.observations, expected.difficulty.observations
    assert (all_seen == 1).all()
    assert (seen == 0).sum() == 4 and (seen == 1).sum() == 28
    assert not found.difficulty.quarantined.any()


def test_a_step_whose_rows_are_all_set_aside_moves_nothing(tmp_path):
    model, data = llama(), Rows()
    for sample in range(8, 12):
        BadRow(model, data[sample]["input_ids"], model.model.layers[1].mlp)
    changes = {"curriculum": CurriculumSettings(), "max_steps": 8}
    found = run(tmp_path, model=model, dataset=data, **changes)
    together = found.difficulty.quarantined.nonzero()[0].tolist() == [8, 9, 10, 11]
    assert together and found.nonfinite_guard.skipped_steps == 0, "rows in several batches make no step bad"

    model, when = llama(), AtStep(BAD_STEP)
    bad_layer(model, when)
    found = run(tmp_path / "all", model=model, callbacks=[when], **changes)
    assert found.nonfinite_guard.figures()["bad_numbers"]["skipped"][0]["fault"] == "rows"
    assert int(found.difficulty.quarantined.sum()) == 4 and adam_steps(found) == {7}


def test_many_bad_rows_stop_the_run_with_a_checkpoint_and_stay_in_the_data(tmp_path):
    changes = {"curriculum": CurriculumSettings(), "max_steps": 8}
    with pytest.raises(NonFiniteLoss, match=r"16 rows in a row .* checkpoint-5 .* after step 2"):
        run(tmp_path, "layer", steps=(3, 4, 5, 6), safety=SafetySettings(max_nonfinite_steps=9), **changes)
    went_on = run(tmp_path, resume=str(tmp_path / "checkpoint-5"), **changes)
    assert int(went_on.difficulty.quarantined.sum()) == 0


# -- loss scaling under fp16 -------------------------------------------------------------------------------------------


def with_scaler(scale: float):
    def prepare(trainer):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, backoff_factor=2.0**-40)
        trainer.accelerator.scaler = scaler
        # What accelerate does before a norm where it runs float16 by itself, which is on a GPU only.
        trainer.accelerator.unscale_gradients = lambda: scaler.unscale_(trainer.optimizer.optimizer)

    return prepare


def test_an_overflow_of_the_scale_is_the_scalers_own_matter(tmp_path):
    found = trained(
        small_llama(), tmp_path, safety=SAFETY, prepare=with_scaler(2.0**127), max_grad_norm=0.0, max_steps=4
    )
    assert found.nonfinite_guard.skipped_steps == 0
    skipped = 127 - math.log2(found.accelerator.scaler.get_scale())
    assert skipped >= 40 and adam_steps(found) == {4 - skipped / 40}


def test_a_loss_that_is_not_finite_counts_under_a_scaler_too(tmp_path):
    when, model = AtStep(2), small_llama()
    bad_loss(model, when)
    changes = {"prepare": with_scaler(2.0**10), "max_grad_norm": 0.0, "max_steps": 4}
    found = trained(model, tmp_path, safety=SAFETY, callbacks=[when], **changes)
    assert found.nonfinite_guard.skipped_steps == 1 and adam_steps(found) == {3}


# -- divergence --------------------------------------------------------------------------------------------------------

HEALTHY = {"max_steps": 70, "logging_steps": 5, "learning_rate": 3e-3}
DIVERGING = {"max_steps": 60, "logging_steps": 1}


class HugeRate(TrainerCallback):
    """A learning rate that is far too large from step 20 on."""

    def on_step_begin(self, args, state, control, optimizer, **kwargs):
        for group in optimizer.param_groups:
            group["lr"] = 1.0 if state.global_step >= 20 else 3e-3


def test_a_healthy_run_is_not_said_to_diverge(tmp_path, caplog):
    found = run(tmp_path, **HEALTHY)
    figures = found.nonfinite_guard.figures()["bad_numbers"]["divergence"]
    assert not figures["diverged"] and "diverges" not in caplog.text
    assert figures["mean_loss"] == pytest.approx(figures["best_mean_loss"]) and figures["mean_loss"] < 3


def test_a_real_divergence_is_told_once(tmp_path, caplog):
    found = run(tmp_path, callbacks=[HugeRate()], **DIVERGING)
    (line,) = [text for text in caplog.messages if "training diverges" in text]
    assert "the logged loss was" in line  # nats, where the lines around it show bits
    assert "lower learning_rate" in line and line in found.nonfinite_guard.notices
    assert found.state.global_step == 60


def test_divergence_stop_names_the_newest_checkpoint_from_before(tmp_path):
    changes = {**DIVERGING, "save_strategy": "steps", "save_steps": 10, "safety": SafetySettings(divergence="stop")}
    with pytest.raises(Diverged, match=r"training diverges: .* from before is checkpoint-20: resume_from_checkpoint"):
        run(tmp_path, callbacks=[HugeRate()], **changes)


@pytest.mark.parametrize("stop", [4, 6], ids=["between two", "within the second"])
def test_a_run_that_resumes_within_an_epoch_knows_the_losses_before(tmp_path, stop):
    """With a curriculum each epoch is watched by itself."""

    def figures(folder, **more):
        every = {"max_steps": 8, "logging_steps": 1, "save_strategy": "steps", "save_steps": stop}
        curriculum = CurriculumSettings("noise_guard")
        size = {"dataset": Rows(16), "per_device_train_batch_size": 4}
        found = trained(small_llama(), tmp_path / folder, safety=SAFETY, curriculum=curriculum, **size, **every, **more)
        return found.nonfinite_guard.divergence.state_dict()

    whole = figures("whole")
    figures("cut", callbacks=[StopAt(stop)])
    assert figures("cut", resume=True) == whole


def test_divergence_off_watches_nothing(tmp_path):
    found = run(tmp_path, safety=SafetySettings(divergence="off"), max_steps=1)
    assert (
        found.nonfinite_guard.divergence is None
        and found.nonfinite_guard.figures()["bad_numbers"]["divergence"] is None
    )


def test_counts_and_the_watch_survive_a_resume(tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 4, "logging_steps": 1}
    whole = run(tmp_path, "loss", max_steps=8, **changes)
    saved = json.loads((tmp_path / "checkpoint-4" / "safety_state.json").read_text())
    assert saved["skipped_steps"] == 1 and saved["records"][0]["step"] == BAD_STEP
    resumed = run(tmp_path, max_steps=8, resume=str(tmp_path / "checkpoint-4"), **changes)
    assert resumed.nonfinite_guard.figures() == whole.nonfinite_guard.figures()


# -- held-out scores ---------------------------------------------------------------------------------------------------


def test_held_out_items_without_a_finite_score_are_named(caplog):
    predictions = SimpleNamespace(predictions=np.array([[1.0, 2.0], [NAN, 2.0], [3.0, 2.0], [math.inf, 2.0]]))
    for metrics in (bpt_metrics, class_metrics):
        caplog.clear()
        assert not math.isfinite(metrics(predictions)["bpt"]), "averaged away"
        assert "2 of 4 held-out rows have no finite score" in caplog.text and "row 1, 3" in caplog.text


def test_scored_documents_without_a_finite_score_are_named(caplog):
    data = datasets.Dataset.from_dict(
        {"input_ids": [[3, 4, 5]] * 3, "labels": [[3, 4, 5]] * 3, "document": [0, 1, 1], "length": [3] * 3}
    )
    model = small_llama()
    assert math.isfinite(score_documents(model, data, Collator(pad_token_id=2)).bpt) and not caplog.messages
    with torch.no_grad():
        model.lm_head.weight[:] = NAN
    assert math.isnan(score_documents(model, data, Collator(pad_token_id=2)).bpt)
    assert "2 of 2 held-out documents have no finite score" in caplog.text
