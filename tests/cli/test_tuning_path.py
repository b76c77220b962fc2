"""``tuning_path: auto``: the way of holding the weights that the planner picks, and the next one."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers.models.llama.modeling_llama import LlamaModel

from scu_trainer.cli import train
from scu_trainer.cli.planning.paths import train_on_a_path
from scu_trainer.errors import RequirementError
from scu_trainer.hardware import precision
from tests import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.saved_llama(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture
def run(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # Whatever this machine is: without bf16 instructions nobody is offered bfloat16 weights.
    monkeypatch.setattr(precision, "cpu_facts", lambda found: precision.DeviceFacts("cpu", True, None, "this CPU"))

    def start(**changes):
        flags = {
            "model_name_or_path": model,
            "dataset_size": 8,
            "block_size": 32,
            "max_steps": 4,
            "save_steps": 2,
            "eval_strategy": "no",
            "validation_split_percentage": 0,
            "sample_prompts": 0,
            "predict_memory": "false",
            "mixed_precision": "no",
            "use_cpu": "true",
            "tuning_path": "auto",
            "output_dir": "runs/x",
            **changes,
        }
        code = train.main([word for name, value in flags.items() for word in (f"--{name}", str(value))])
        return code, " ".join("".join(capsys.readouterr()).split())

    return start


def inject(monkeypatch, fails) -> list[int]:
    """An out-of-memory in each forward of a training for which ``fails(model, forwards before)``."""
    forward, calls = LlamaModel.forward, []

    def watched(self, *given, **named):
        if self.training and not isinstance(next(self.parameters()), FakeTensor):  # the planner's shapes
            calls.append(1)
            if fails(self, len(calls) - 1):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return forward(self, *given, **named)

    monkeypatch.setattr(LlamaModel, "forward", watched)
    return calls


def is_half(model) -> bool:
    return any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())


def test_what_fits_is_trained_as_asked_and_the_reason_said(run, tmp_path):
    code, said = run()
    assert code == 0 and "tuning_path: as asked (predicted " in said
    assert json.loads((tmp_path / "runs/x/training_config.json").read_text())["configuration"]["tuning"] == "lora"


def test_the_next_way_is_taken_where_one_cannot_hold_a_row(run, tmp_path, monkeypatch):
    inject(monkeypatch, lambda model, before: not is_half(model))
    code, said = run()
    assert code == 0 and "as asked could not hold one row: " in said and "tuning_path: dtype: bfloat16" in said
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["x"]
    described = json.loads((tmp_path / "runs/x/training_config.json").read_text())["configuration"]
    assert (described["dtype"], described["tuning_path"]) == ("bfloat16", "auto")
    assert json.loads((tmp_path / "runs/x/run.json").read_text())["status"] == "finished"


def test_weights_go_to_main_memory_and_disk_at_last_and_the_end_is_named(run, monkeypatch):
    inject(monkeypatch, lambda model, before: True)
    code, said = run(output_dir="runs/Mine")
    assert "offload_folder: runs/Mine/offload" in said
    assert code == 2 and "now weights are kept in main memory and, if that is full, on disk" in said
    assert "tuning_path: auto found no way to fit a single row here: device_map: auto" in said


def test_a_run_that_has_begun_is_not_begun_anew(run, tmp_path, monkeypatch):
    inject(monkeypatch, lambda model, before: not is_half(model) or any(tmp_path.glob("runs/x/checkpoint-*")))
    code, said = run()
    assert code == 2 and "found no way" not in said, "its steps would be lost"


def test_the_same_command_goes_on_with_the_way_that_it_had(run, tmp_path, monkeypatch):
    forward = LlamaModel.forward
    inject(monkeypatch, lambda model, before: not is_half(model))

    def stop(*given, **named):
        raise KeyboardInterrupt

    from scu_trainer.train.checkpoints.writer import CheckpointWriter

    save = CheckpointWriter.save
    monkeypatch.setattr(CheckpointWriter, "save", lambda self, *given: (save(self, *given), stop()))
    run()
    monkeypatch.setattr(CheckpointWriter, "save", save)
    monkeypatch.setattr(LlamaModel, "forward", forward)
    code, said = run()
    assert code == 0 and "(as this run was started)" in said and "resuming from " in said


def test_several_processes_are_sent_to_the_planner():
    job = SimpleNamespace(training=SimpleNamespace(world_size=2))
    with pytest.raises(RequirementError, match="run scu-trainer plan"):
        train_on_a_path(None, [], job, train.main)
