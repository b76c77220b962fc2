"""Early stopping: where transformers' own ends, and a run that was interrupted."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import EarlyStoppingCallback, Trainer

from scu_trainer import SCUTrainer
from scu_trainer.cli import main as cli
from scu_trainer.cli.configuration import as_yaml, read_job
from scu_trainer.errors import SettingsError
from scu_trainer.settings import SafetySettings
from scu_trainer.train.preflight import pitfalls
from tests import tiny

EVALUATIONS = {
    "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 40,
    "load_best_model_at_end": True, "learning_rate": 0.05, "save_total_limit": 2,
}  # fmt: skip


def _trained(kind, folder, resume=None, **more):
    trainer = kind(
        model=tiny.llama(),
        args=tiny.arguments(folder, **EVALUATIONS),
        train_dataset=tiny.Rows(8),
        eval_dataset=tiny.Rows(8, seed=9),
        **more,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def _ours(folder, resume=None):
    return _trained(SCUTrainer, folder, resume, safety=SafetySettings(early_stopping_patience=3))


def test_it_ends_where_transformers_own_does_with_the_best_model(tmp_path):
    stock = _trained(Trainer, tmp_path / "stock", callbacks=[EarlyStoppingCallback(3)])
    ours = _ours(tmp_path / "ours")
    assert ours.state.global_step == stock.state.global_step < 40
    assert ours.state.best_global_step == stock.state.best_global_step < stock.state.global_step
    weights = zip(stock.model.parameters(), ours.model.parameters(), strict=True)
    assert all(torch.equal(first, second) for first, second in weights)
    (notice,) = ours.loop("early_stopping").notices
    assert f"ended at step {ours.state.global_step} with the model of step {ours.state.best_global_step}" in notice


def test_a_gain_below_the_threshold_is_not_said_to_be_none(tmp_path):
    settings = SafetySettings(early_stopping_patience=1, early_stopping_threshold=1e9)
    trainer = _trained(SCUTrainer, tmp_path, safety=settings)
    (notice,) = trainer.loop("early_stopping").notices
    assert "eval_loss did not improve by more than 1e+09 for 1 evaluation; the run ended at step 4 with" in notice


def test_a_run_that_is_resumed_ends_at_the_same_step(tmp_path):
    """Without the count in the checkpoint it would wait for three evaluations again."""
    whole = _ours(tmp_path / "whole")
    last = whole.state.global_step
    newest = tmp_path / "whole" / f"checkpoint-{last - 2}"
    if not newest.is_dir():  # kept are the best and the last: interrupt another run there
        killed = _interrupted(tmp_path / "killed", last - 2)
        newest = tmp_path / "killed" / f"checkpoint-{killed}"
    shutil.copytree(newest.parent, tmp_path / "parts")
    again = _ours(tmp_path / "parts", resume=str(tmp_path / "parts" / newest.name))
    assert (again.state.global_step, again.state.best_global_step) == (last, whole.state.best_global_step)
    weights = zip(whole.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(first, second) for first, second in weights)


def test_a_checkpoint_of_a_run_without_it_is_told_once(tmp_path, caplog):
    """The count is read before those of the other loops, which ask whether the training is over."""
    settings = {**EVALUATIONS, "max_steps": 2}
    rows = {"train_dataset": tiny.Rows(8), "eval_dataset": tiny.Rows(8, seed=9)}
    SCUTrainer(tiny.llama(), tiny.arguments(tmp_path, **settings), **rows, safety=SafetySettings()).train()
    _ours(tmp_path, resume=str(tmp_path / "checkpoint-2"))
    told = "has no early_stopping.json: the loop EarlyStopping starts fresh"
    assert sum(told in line for line in caplog.messages) == 1


def _interrupted(folder, step: int) -> int:
    """The same run, ended by an error in the step after ``step``."""
    from transformers import TrainerCallback

    class Killed(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == step:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        safety = SafetySettings(early_stopping_patience=3)
        _trained(SCUTrainer, folder, safety=safety, callbacks=[Killed()])
    return step


# -- what is chosen beside it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ([], {"eval_strategy": "epoch", "save_strategy": "epoch"}),
        (
            ["--eval_steps", "20"],
            {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 20, "save_steps": 20},
        ),
        (
            ["--save_steps", "30"],
            {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 30, "save_steps": 30},
        ),
        (["--eval_strategy", "epoch"], {"eval_strategy": "epoch", "save_strategy": "epoch"}),
        (["--save_strategy", "best"], {"eval_strategy": "epoch", "save_strategy": "best"}),
        (
            ["--streaming", "true", "--max_steps", "200"],  # whose epoch may never end
            {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 10, "save_steps": 10},
        ),
    ],
)
def test_evaluations_and_checkpoints_are_chosen_and_said(typed, meant):
    job = read_job(None, ["--early_stopping_patience", "3", *typed])
    entries = job.as_dict()
    assert {name: entries[name] for name in meant} == meant and entries["load_best_model_at_end"] is True
    assert any(note.startswith("early stopping: load_best_model_at_end: true") for note in job.notes)


def test_what_contradicts_it_is_refused():
    with pytest.raises(SettingsError, match="early_stopping_threshold needs early_stopping_patience"):
        SafetySettings(early_stopping_threshold=0.1)
    with pytest.raises(SettingsError, match="it must be 1 or more"):
        SafetySettings(early_stopping_patience=0)
    with pytest.raises(SettingsError, match="keeps the best model; set load_best_model_at_end: true"):
        read_job(None, ["--early_stopping_patience", "3", "--load_best_model_at_end", "false"]).check()


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--eval_strategy", "no"], "eval_strategy is no; set eval_strategy: steps or epoch"),
        (["--save_strategy", "no"], "save_strategy is no, and eval_strategy is epoch; set save_strategy: epoch"),
        (["--eval_steps", "20", "--save_strategy", "epoch"], "set save_strategy: steps, or drop save_strategy"),
        (["--eval_steps", "20", "--save_steps", "500"], "20 steps apart, and checkpoints 500; set save_steps: 20"),
        (["--eval_steps", "20", "--save_steps", "40"], "set save_steps: 20, or save_strategy: best"),
    ],
)
def test_an_evaluation_without_a_checkpoint_is_refused(typed, message):
    """The stock Trainer would forget a best model that lies between two checkpoints."""
    with pytest.raises(SettingsError, match=message):
        read_job(None, ["--early_stopping_patience", "3", *typed])


def test_a_trainer_that_cannot_keep_its_best_model_is_refused(tmp_path):
    args = tiny.arguments(tmp_path, **{**EVALUATIONS, "save_steps": 4})
    with pytest.raises(SettingsError, match="2 steps apart, and checkpoints 4"):
        SCUTrainer(tiny.llama(), args, eval_dataset=tiny.Rows(8), safety=SafetySettings(early_stopping_patience=3))


def test_the_command_says_why_the_run_ended(tmp_path, capsys):
    rows = [{"text": f"Row number {i} says {i * 7919 % 1000}. " * 4} for i in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "model_name_or_path": tiny.saved_llama(tmp_path / "base"), "dataset": tmp_path / "rows.jsonl", "block_size": 64,
        "validation_split_percentage": 50, "max_steps": 60, "learning_rate": 0.3, "eval_steps": 1, "tuning": "full",
        "early_stopping_patience": 2, "use_cpu": "true", "predict_memory": "false", "report_to": "none",
        "output_dir": tmp_path / "run", "cache_dir": tmp_path / "cache", "mixed_precision": "no", "preflight": "off",
        "lr_scheduler_type": "constant", "divergence": "off",
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert cli.main(["train", *words]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "early stopping" in printed and "eval_loss did not improve on" in printed
    figures = json.loads((tmp_path / "run" / "scu_metrics.json").read_text())["early_stopping"]
    assert figures["metric"] == "eval_loss" and figures["best_step"] < figures["step"] < 60


def test_the_best_model_alone_is_saved_as_often_as_the_stock_trainer_does():
    words = ["--load_best_model_at_end", "true", "--eval_strategy", "steps", "--eval_steps", "250"]
    job = read_job(None, words)
    assert job.training.save_steps == 500 and "save_steps" not in job.changed_from


@pytest.mark.parametrize(
    "words",
    [
        ["--save_steps", "0.1"],
        ["--early_stopping_patience", "2", "--eval_steps", "0.1"],
        ["--load_best_model_at_end", "true", "--eval_strategy", "steps", "--eval_steps", "0.1", "--save_steps", "0.1"],
    ],
)
def test_a_share_between_saves_that_was_given_stays_one(words):
    job = read_job(None, words)
    assert job.training.save_steps == 0.1 and not job.saves_by_length and job.as_dict()["save_steps"] == 0.1


def test_saves_that_nobody_asked_for_are_still_unasked_for_when_the_configuration_is_read_back(tmp_path):
    job = read_job(None, [])
    (tmp_path / "resolved.yaml").write_text(as_yaml(job))
    assert job.saves_by_length and job.training.save_steps == 0.1
    assert read_job(str(tmp_path / "resolved.yaml"), []).saves_by_length


@pytest.mark.parametrize(
    "words",
    [
        ["--early_stopping_patience", "2", "--eval_steps", "2", "--save_strategy", "best"],
        ["--load_best_model_at_end", "true", "--eval_strategy", "epoch", "--save_strategy", "epoch"],
    ],
)
def test_nothing_is_noted_of_saves_that_nobody_asked_for(words, tmp_path):
    job = read_job(None, words)
    (tmp_path / "resolved.yaml").write_text(as_yaml(job))
    for found in (job, read_job(str(tmp_path / "resolved.yaml"), [])):
        assert not [finding.line() for finding in pitfalls.before_loading(found) if "save_steps" in finding.where]
