"""Early stop and hold, the target found by held-out data, and what the loop says while it runs."""

from __future__ import annotations

import logging

import pytest
from transformers import TrainerCallback

from scu_trainer.run_files import read_rows
from scu_trainer.settings import RegularizationSettings as Settings
from scu_trainer.train.evaluation.scoring import bpt_metrics
from scu_trainer.train.loss.rows.row_readings import preprocess_logits
from scu_trainer.train.regularization.regularizer import STUCK_DECISIONS
from tests.tiny import Rows, llama, trained

LONG = {"max_steps": 150, "learning_rate": 3e-3}
HELD = {"target_s": 0.1, "sigma": 0.3}  # about 40 of these steps away


class Rates(TrainerCallback):
    """The learning rate with which each optimizer step was taken."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.seen.append(optimizer.param_groups[0]["lr"])


def test_stop_at_target_ends_the_run_with_a_checkpoint(tmp_path):
    run = trained(llama(), tmp_path, Settings(**HELD, stop_at_target=True), **LONG)
    rows = read_rows(tmp_path / "scu_history.json")
    assert run.state.global_step == len(rows) == run.regularizer.state.reached_step < 150
    assert rows[-2]["s_ema"] < 0.1 <= rows[-1]["s_ema"]
    assert {row["shrink"] for row in rows} == {0.0}, "nothing is held back on the way"
    assert (tmp_path / f"checkpoint-{len(rows)}" / "scu_state.json").is_file()


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_hold_decays_the_rate_and_keeps_s(tmp_path, schedule):
    hold, rates = 9, Rates()
    settings = Settings(**HELD, stop_at_target=True, hold_steps=hold)
    run = trained(llama(), tmp_path, settings, callbacks=[rates], lr_scheduler_type=schedule, logging_steps=1, **LONG)
    reached = run.regularizer.state.reached_step
    assert run.state.global_step == len(rates.seen) == reached + hold < 150
    scheduled = [3e-3 * (1.0 - step / 150 if schedule == "linear" else 1.0) for step in range(len(rates.seen))]
    factors = [rate / plain for rate, plain in zip(rates.seen, scheduled, strict=True)]
    assert factors[:reached] == pytest.approx([1.0] * reached)
    assert factors[reached:] == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])
    rows = read_rows(tmp_path / "scu_history.json")
    assert [row["learning_rate"] for row in rows] == pytest.approx(rates.seen)
    assert all(abs(row["s_ema"] / 0.1 - 1.0) < 0.06 for row in rows[reached:])
    assert all(row["lambda"] > 0 for row in rows[reached:])
    logged = [entry["learning_rate"] for entry in run.state.log_history if "loss" in entry]
    assert logged == pytest.approx(rates.seen)


def test_auto_listens_to_evaluations(tmp_path):
    """Four training rows are soon known by heart; on held-out rows the loss turns after a few epochs."""
    evaluation = {"eval_strategy": "steps", "eval_steps": 10, "eval_dataset": Rows(16, seed=1)}
    metrics = {"compute_metrics": bpt_metrics, "preprocess_logits_for_metrics": preprocess_logits}
    settings = Settings(target_s="auto", auto_patience=2)
    run = trained(llama(), tmp_path, settings, Rows(4), **evaluation, **metrics, **LONG)
    held_out = {e["step"]: e["eval_bpt"] for e in run.state.log_history if "eval_bpt" in e}
    rows = {row["step"]: row for row in read_rows(tmp_path / "scu_history.json")}
    state = run.regularizer.state
    assert len(held_out) == 15
    assert state.best_held_out_bpt == min(held_out.values())
    found = next(step for step, row in rows.items() if row["s_target"] is not None)
    best = min((step for step in held_out if step < found), key=held_out.__getitem__)
    assert found == best + 2 * 10 + 1, "two evaluations above the best, then the target holds from the next step on"
    assert state.target_s == rows[best]["s_ema"]
    assert {row["s_target"] for step, row in rows.items() if step >= found} == {state.target_s}
    assert all(row["lambda"] == 0.0 for step, row in rows.items() if step < found)
    assert rows[found - 1]["s_ema"] > state.target_s + 0.01
    assert rows[150]["s_ema"] == pytest.approx(state.target_s, abs=0.003)


# -- notices -----------------------------------------------------------------------------------------------------------


def warnings_in(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "scu_trainer" and r.levelno == logging.WARNING]


def test_an_unreachable_target_is_said_once_also_after_a_resume(tmp_path, caplog):
    settings = Settings(target_s=0.9, sigma=3.0)
    run = trained(llama(), tmp_path, settings, max_steps=80, save_strategy="steps", save_steps=60)
    assert len(warnings_in(caplog)) == 1
    assert warnings_in(caplog)[0].startswith("SCU target out of reach: S is ")
    assert run.regularizer.progress.notices == warnings_in(caplog)
    caplog.clear()
    resumed = trained(llama(), tmp_path, settings, resume=str(tmp_path / "checkpoint-60"), max_steps=80)
    assert resumed.state.global_step == 80
    assert warnings_in(caplog) == []
    assert resumed.regularizer.progress.notices == run.regularizer.progress.notices


def test_lost_control_is_said_once(tmp_path, caplog):
    settings = Settings(target_s=0.01, max_shrink=1e-6)
    trained(llama(), tmp_path, settings, max_steps=3 * STUCK_DECISIONS)
    assert len(warnings_in(caplog)) == 1
    assert warnings_in(caplog)[0].startswith("SCU has lost control: ")


def test_a_run_on_target_says_nothing(tmp_path, caplog):
    trained(llama(), tmp_path, Settings(**HELD), **LONG)
    assert warnings_in(caplog) == []
