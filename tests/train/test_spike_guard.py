"""Finite spikes of loss and gradient: the step is taken back, its rows are named, and nothing of it stays anywhere.

The reference of an undone step is the same training without the guard, in which a callback drops the gradients of that
step before the optimizer sees them.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from scu_trainer.control.guard import spikes
from scu_trainer.errors import SettingsError
from scu_trainer.settings import CurriculumSettings, SafetySettings
from scu_trainer.train.loops.guard.spikes import SpikeWatch
from tests.tiny import Rows, llama, same, trained, weights_of
from tests.train.test_nonfinite_guard import IN_ORDER, AtStep, DropGradients, adam_steps, logged, with_scaler

SPIKE_STEP, STEPS = 6, 8
SAFETY = SafetySettings(spike_guard="skip", max_nonfinite_steps=0)
"""Spikes are none of the steps that ``max_nonfinite_steps`` limits."""


@pytest.fixture(autouse=True)
def short_warm_up(monkeypatch):
    monkeypatch.setattr(spikes, "FEWEST", 4)


def large_loss(model, when: AtStep) -> None:
    def enlarge(module, inputs, output):
        if when.is_on and module.training:
            output["loss"] = output["loss"] * 300

    model.register_forward_hook(enlarge)


def run(folder, steps=(SPIKE_STEP,), safety=SAFETY, callbacks=(), **changes):
    when, model = AtStep(*steps), llama()
    large_loss(model, when)
    return trained(model, folder, safety=safety, callbacks=[when, *callbacks], **{"max_steps": STEPS, **changes})


def reference(folder, steps=(SPIKE_STEP,), **changes):
    return run(folder, steps, safety=None, callbacks=[DropGradients(*steps)], **changes)


@pytest.mark.parametrize(
    "changes",
    [{}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0}, {"prepare": with_scaler(2.0**10)}],
    ids=["plain", "accumulation", "scaler"],
)
def test_the_update_of_a_spike_does_not_happen(tmp_path, changes):
    expected = reference(tmp_path / "reference", **changes)
    found = run(tmp_path / "found", **changes)
    assert same(weights_of(found.model), weights_of(expected.model))
    assert adam_steps(found) == {STEPS - 1} and found.state.global_step == STEPS
    (record,) = found.nonfinite_guard.figures()["bad_numbers"]["skipped"]
    assert record["step"] == SPIKE_STEP and record["fault"] == "spike" and record["place"] is None


def test_what_a_spike_leaves_is_a_line_a_count_and_a_notice(tmp_path, caplog):
    found = run(tmp_path, logging_steps=4)
    (line,) = [text for text in caplog.messages if "step is skipped" in text]
    assert line.startswith("step 6: the loss is 1")
    assert "spike_threshold is 12; the source was not found: no row" in line
    assert "1 of at most 3 in a row" in line and "raise spike_threshold" in line
    assert logged(found, "spike_steps") == [0, 1] and logged(found, "skipped_steps") == [0, 1]
    assert max(logged(found)) < 10, "the undone step is no part of the logged mean"
    assert found.nonfinite_guard.notices == [
        "optimizer steps undone as spikes: 1; rows that stood out: 0, set aside: 0"
    ]


def test_without_spikes_it_is_the_stock_trainer_bit_for_bit(tmp_path):
    expected, found = (
        run(tmp_path / name, steps=(), safety=safety, logging_steps=2)
        for name, safety in (("off", None), ("on", SAFETY))
    )
    assert same(weights_of(found.model), weights_of(expected.model)) and logged(found) == logged(expected)
    assert set(logged(found, "skipped_steps")) == {0}


def test_a_new_level_is_said_and_trained_on(tmp_path, caplog):
    steps = tuple(range(SPIKE_STEP, 12))
    found = run(tmp_path / "found", steps, max_steps=11)
    expected = reference(tmp_path / "reference", steps, max_steps=11)
    assert not same(weights_of(found.model), weights_of(expected.model))
    assert found.nonfinite_guard.spikes.figures()["level_shifts"] == 1 and adam_steps(found) == {8}
    (line,) = [text for text in caplog.messages if "counts as a new level" in text]
    assert line.startswith("step 9: the loss is") and "4 steps in a row" in line


class LargeRow:
    """The gradient of one row of the data is 300 times as large, in whatever batch it comes."""

    def __init__(self, model, tokens: torch.Tensor) -> None:
        self.tokens = tokens
        model.model.embed_tokens.register_forward_pre_hook(self._look)
        model.model.layers[1].mlp.register_forward_hook(self._enlarge)

    def _look(self, module, inputs):
        self.rows = (inputs[0] == self.tokens).all(dim=1)

    def _enlarge(self, module, inputs, output):
        factor = torch.where(self.rows, 300.0, 1.0)[:, None, None]
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * factor)


def one_large_row(folder, sample: int, **changes):
    model, data = llama(), Rows()
    LargeRow(model, data[sample]["input_ids"])
    return trained(model, folder, safety=SAFETY, dataset=data, learning_rate=1e-3, **changes)


def test_the_row_is_named(tmp_path):
    found = one_large_row(tmp_path, 21, max_steps=7, **IN_ORDER)
    (record,) = found.nonfinite_guard.figures()["bad_numbers"]["skipped"]
    assert record["step"] == 6 and record["rows"] == ["row 1 of accumulation batch 0"]
    assert record["place"].startswith("the gradient of a single row is up to ")


def test_a_row_that_stands_out_twice_is_set_aside(tmp_path, caplog):
    changes = {"curriculum": CurriculumSettings(), "max_steps": 32, "seed": 3}
    found = one_large_row(tmp_path, 13, **changes)
    figures = found.nonfinite_guard.spikes.figures()
    assert figures == {"skipped_steps": 2, "level_shifts": 0, "rows": [13], "set_aside": [13]}
    assert found.difficulty.quarantined.nonzero()[0].tolist() == [13]
    assert found.difficulty.observations[13] <= 1, "an undone step has taught nothing"
    assert [
        text
        for text in caplog.messages
        if text == "sample 13 stood out a second time: set aside from the next epoch on"
    ]


def test_the_band_survives_a_resume(tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 5}
    whole = run(tmp_path, **changes)
    saved = json.loads((tmp_path / "checkpoint-5" / "safety_state.json").read_text())
    assert len(saved["spikes"]["state"]["norms"]) == 5
    resumed = run(tmp_path, resume=str(tmp_path / "checkpoint-5"), **changes)
    assert resumed.nonfinite_guard.figures() == whole.nonfinite_guard.figures()
    assert same(weights_of(resumed.model), weights_of(whole.model))


def test_where_the_engine_steps_by_itself_it_is_refused():
    with pytest.raises(SettingsError, match="spike_guard: off, or drop DeepSpeed"):
        SpikeWatch(SimpleNamespace(is_deepspeed_enabled=True), SAFETY)
