"""The profiler on request: files with the steps that were asked for, and a training that is the same."""

from __future__ import annotations

import json
import logging
import time

import pytest
import torch
from transformers import TrainerCallback

from scu_trainer.errors import SettingsError
from scu_trainer.settings.efficiency import EfficiencySettings, check_efficiency
from scu_trainer.train.trainer import SCUTrainer
from tests.tiny import Rows, arguments, llama, same, trained, weights_of
from tests.train.test_resume import StopAt


def test_it_records_the_steps_that_follow_the_warm_up(tmp_path):
    plain = trained(llama(layers=1), tmp_path / "off")
    trainer = trained(llama(layers=1), tmp_path / "on", efficiency=EfficiencySettings(profile_steps=2))
    assert same(weights_of(trainer.model), weights_of(plain.model))
    assert not (tmp_path / "off" / "logs").exists()
    folder = tmp_path / "on" / "logs" / "profile"
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    steps = {event["name"] for event in events if str(event.get("name", "")).startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#2", "ProfilerStep#3"}
    table = (folder / "top_operators.txt").read_text()
    assert "aten::mm" in table and "Self CPU" in table


@pytest.mark.parametrize(("max_steps", "words"), [(2, "no step after"), (4, "only 2 steps after")])
def test_short_runs_are_said(tmp_path, caplog, max_steps, words):
    with caplog.at_level(logging.WARNING, "scu_trainer"):
        trained(llama(layers=1), tmp_path, efficiency=EfficiencySettings(profile_steps=3), max_steps=max_steps)
    assert words in caplog.text
    assert (tmp_path / "logs" / "profile" / "trace.json").exists() == (max_steps == 4)


@pytest.mark.parametrize(("stop", "recorded"), [(6, 3), (4, 2)])
def test_it_says_how_many_steps_it_has(tmp_path, caplog, stop, recorded):
    settings = EfficiencySettings(profile_steps=3)
    with caplog.at_level(logging.INFO, "scu_trainer"):
        trained(llama(layers=1), tmp_path, efficiency=settings, callbacks=[StopAt(stop)], max_steps=6)
    assert f"profile of {recorded} steps" in caplog.text


class RaiseAt(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            raise RuntimeError("on the way")


def test_a_training_that_raised_leaves_no_profiler_behind(tmp_path):
    parts = {"train_dataset": Rows(), "efficiency": EfficiencySettings(profile_steps=2), "callbacks": [RaiseAt()]}
    trainer = SCUTrainer(llama(layers=1), arguments(tmp_path), **parts)
    with pytest.raises(RuntimeError, match="on the way"):
        trainer.train()
    trainer.loop("profile").end()
    assert not torch.autograd.profiler._is_profiler_enabled


def test_a_run_that_stops_early_is_said(tmp_path, caplog):
    settings = EfficiencySettings(profile_steps=2)
    with caplog.at_level(logging.WARNING, "scu_trainer"):
        trained(llama(layers=1), tmp_path, efficiency=settings, callbacks=[StopAt(1)])
    assert "before the profiler's warm-up" in caplog.text


class SlowRows(Rows):
    def __getitem__(self, index):
        time.sleep(0.05)
        return super().__getitem__(index)


def test_it_says_where_the_time_of_a_step_goes(tmp_path):
    settings = EfficiencySettings(profile_steps=3)
    trainer = trained(llama(layers=1), tmp_path, efficiency=settings, dataset=SlowRows(), max_steps=6)
    found = json.loads((tmp_path / "logs" / "profile" / "bottlenecks.json").read_text())
    shares = {name: part["share"] for name, part in found["parts"].items()}
    assert sorted(shares) == ["backward", "data", "forward", "optimizer", "other"]
    assert sum(shares.values()) == pytest.approx(1.0) and max(shares, key=shares.get) == "data"
    assert all(share > 0 for share in shares.values()) and found["steps"] == 3
    assert found["parts"]["data"]["seconds"] > 0.05
    loop = trainer.loop("profile")
    ((name, line),) = loop.lines(loop.figures())
    assert name == "time of a step" and "under the profiler: data " in line
    assert "compute_loss" not in vars(trainer) and "backward" not in vars(trainer.accelerator)


def test_the_log_has_the_time_of_a_step_and_the_slowest(tmp_path):
    settings = EfficiencySettings(throughput=True)
    trainer = trained(llama(layers=1), tmp_path, efficiency=settings, max_steps=6, logging_steps=3)
    rows = [row for row in trainer.state.log_history if "throughput/seconds_per_step" in row]
    assert rows and all(0 < row["throughput/seconds_per_step"] <= row["throughput/slowest_step_s"] for row in rows)


def test_cudnn_chooses_on_request(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    trained(llama(layers=1), tmp_path, efficiency=EfficiencySettings(), max_steps=1)
    assert not torch.backends.cudnn.benchmark
    trained(llama(layers=1), tmp_path, efficiency=EfficiencySettings(cudnn_benchmark=True), max_steps=1)
    assert torch.backends.cudnn.benchmark
    with pytest.raises(SettingsError, match="full_determinism needs the same choice each time"):
        check_efficiency(EfficiencySettings(cudnn_benchmark=True), arguments(tmp_path, full_determinism=True))
