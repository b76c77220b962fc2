"""The loop under real DeepSpeed: ZeRO-2 pulls the masters that training keeps, ZeRO-3 is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scu_trainer.run_files import read_rows
from tests import processes

pytest.importorskip("deepspeed")

SCRIPT = """
import os
import sys
import deepspeed
import torch
from scu_trainer import SCUTrainer
from scu_trainer.settings import RegularizationSettings
from scu_trainer.train.step.distributed.deepspeed_start import leave_process_group
from tests import tiny

# DeepSpeed would compile its shared-memory communication for a minute at the first start.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
stage, law, folder, resume = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]
config = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": "auto"},
}
if "SCHEDULE" in os.environ:
    rates = {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"}
    config["scheduler"] = {"type": "WarmupLR", "params": rates}
changes = {"deepspeed": config} if stage else {}
changes |= {"warmup_steps": 4} if "SCHEDULE" in os.environ else {}
changes |= {"lr_scheduler_type": os.environ.get("KIND", "constant")}
changes |= {"save_strategy": "steps", "save_steps": 4, "bf16": "BF16" in os.environ}
arguments = tiny.arguments(folder, max_steps=8, gradient_accumulation_steps=2, logging_steps=1, **changes)
trainer = SCUTrainer(
    model=tiny.llama() if arguments.bf16 else tiny.lora(tiny.llama()),
    args=arguments,
    train_dataset=tiny.Rows(),
    regularization=RegularizationSettings(law=law, lambda_init=3.0, target_s=0.01),
)
trainer.train(resume_from_checkpoint=resume[0] if resume else None)
assert not stage or type(trainer.model_wrapped).__name__ == "DeepSpeedEngine"
trained = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
outcome = {"weights": trained, "lambda": trainer.regularizer.state.lam}
outcome["logged"] = [row["learning_rate"] for row in trainer.state.log_history if "loss" in row]
if arguments.bf16:
    from deepspeed.utils import safe_get_full_fp32_param

    prior = trainer.regularizer.prior
    moved = [safe_get_full_fp32_param(w) - start for w, start in zip(prior.weights, prior.starts, strict=True)]
    outcome["distance"] = float(prior.squared_distance())
    outcome["expected"] = float(sum(difference.double().square().sum() for difference in moved))
torch.save(outcome, f"{folder}/result.pt")
leave_process_group(succeeded=True)  # a process that exits without leaving aborts now and then
"""


def train(tmp_path: Path, name: str, stage: int, law: str, *resume: str) -> processes.Done:
    script = tmp_path / "zero.py"
    script.write_text(SCRIPT)
    # DeepSpeed asks for mpi where a process does not know that it is the only one.
    ranks = 1 if stage else None
    return processes.run(
        [script, stage, law, tmp_path / name, *resume], ranks=ranks, environment={"DS_ACCELERATOR": "cpu"}
    )


def result(tmp_path: Path, name: str, *arguments) -> dict:
    answer = train(tmp_path, name, *arguments)
    assert answer.returncode == 0, answer.stderr[-2000:]
    return torch.load(tmp_path / name / "result.pt")


def test_zero_2_ends_with_the_weights_of_one_plain_process(tmp_path, monkeypatch):
    """With the one schedule that reads its rate from the optimizer: there stock training ends with a traceback."""
    monkeypatch.setenv("KIND", "polynomial")
    plain, zero = result(tmp_path, "plain", 0, "fixed"), result(tmp_path, "zero", 2, "fixed")
    for name, weight in plain["weights"].items():
        torch.testing.assert_close(zero["weights"][name], weight, rtol=1e-5, atol=1e-7)


def test_the_distance_is_measured_where_a_pull_acts(tmp_path, monkeypatch):
    """In bf16 the model holds rounded copies: what rounding moved is no distance that anybody trained."""
    monkeypatch.setenv("BF16", "1")
    outcome = result(tmp_path, "bf16", 2, "fixed")
    assert {weight.dtype for weight in outcome["weights"].values()} == {torch.bfloat16}
    assert outcome["distance"] == pytest.approx(outcome["expected"], rel=1e-5)


def test_the_rate_is_that_of_the_step_where_the_engine_moves_the_schedule(tmp_path, monkeypatch):
    """DeepSpeed's own schedule begins with two steps of its lowest rate, which move no weight here."""
    monkeypatch.setenv("SCHEDULE", "1")
    taken = [1e-2 * share for share in (0, 0, 0.25, 0.5, 0.75, 1, 1, 1)]
    logged = result(tmp_path, "zero", 2, "fixed")["logged"]
    rows = read_rows(tmp_path / "zero" / "scu_history.json")
    assert logged == [row["learning_rate"] for row in rows] == pytest.approx(taken)
    assert [row["shrink"] for row in rows] == pytest.approx([3.0 * rate for rate in taken])
    assert rows[1]["s"] == 0 < rows[2]["s"]


def test_zero_2_resumes_bit_for_bit(tmp_path):
    whole = result(tmp_path, "whole", 2, "model")
    resumed = result(tmp_path, "whole", 2, "model", str(tmp_path / "whole" / "checkpoint-4"))
    assert resumed["lambda"] == whole["lambda"] > 0
    for name, weight in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], weight), name


def test_without_zero_its_checkpoint_is_refused(tmp_path):
    result(tmp_path, "zero", 2, "model")
    answer = train(tmp_path, "plain", 0, "model", str(tmp_path / "zero" / "checkpoint-4"))
    assert answer.returncode != 0 and "and this run is without DeepSpeed and FSDP: it cannot read" in answer.stderr


def test_zero_3_is_refused(tmp_path):
    answer = train(tmp_path, "refused", 3, "model")
    assert "this is stage 3" in answer.stderr
