"""FSDP2 on two processes with the fields of accelerate_configs/fsdp2.yaml: which loops train, and which are refused.

This file is also the program that two processes execute. accelerate makes data parallelism of FSDP on a CPU; it is told
here that it is FSDP all the same. All that follows (sharding, collectives, DTensor weights) is the real thing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

from scu_trainer import SCUTrainer
from scu_trainer.errors import ControlError
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings
from tests.tiny import UnevenRows, arguments, llama, pad

ROOT = Path(__file__).resolve().parents[2]
LOOPS = {
    "none": {},
    "memory": {"memory": MemorySettings(token_cap=40)},
    "curriculum": {"curriculum": CurriculumSettings(curriculum="token_budget")},
    "regularization": {"regularization": RegularizationSettings()},
}


# -- what each of two processes does -----------------------------------------------------------------------------------


def shard_on_cpu() -> None:
    begin = Accelerator.__init__

    def begin_sharded(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        shared = AcceleratorState._shared_state
        shared["distributed_type"], shared["fsdp_plugin"] = DistributedType.FSDP, FullyShardedDataParallelPlugin()

    Accelerator.__init__ = begin_sharded


def train(folder: Path, loop: dict) -> SCUTrainer:
    args = arguments(folder, per_device_train_batch_size=4, max_steps=3, optim="sgd", learning_rate=0.3)
    trainer = SCUTrainer(llama(), args, train_dataset=UnevenRows(64), data_collator=pad, **loop)
    trainer.train()
    return trainer


def outcome(trainer: SCUTrainer) -> dict:
    weights = {name: weight.detach() for name, weight in trainer.model.named_parameters()}
    return {
        "sharded": all(isinstance(weight, DTensor) for weight in weights.values()),
        "weights": {name: w.full_tensor() if isinstance(w, DTensor) else w for name, w in weights.items()},
        "steps": trainer.state.global_step,
    }


def main(folder: Path) -> None:
    found = {"data parallel": outcome(train(folder, {}))}
    AcceleratorState._reset_state()
    shard_on_cpu()
    for name, loop in LOOPS.items():
        try:
            found[name] = outcome(train(folder, loop))
        except ControlError as error:
            found[name] = {"refused": str(error)}
    torch.save(found, folder / f"rank{os.environ['RANK']}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


# -- what is asserted about it -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("fsdp2")
    config = yaml.safe_load((ROOT / "accelerate_configs" / "fsdp2.yaml").read_text())["fsdp_config"]
    fields = {name.upper(): str(value) for name, value in config.items()}
    environment = {**os.environ, **fields, "ACCELERATE_USE_FSDP": "true", "PYTHONPATH": str(ROOT)}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launcher, str(Path(__file__).resolve()), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / "rank0.pt", weights_only=True)


@pytest.mark.parametrize("loop", ["none", "memory"])
def test_sharded_training_is_data_parallel_training(found, loop):
    assert found[loop]["sharded"] and not found["data parallel"]["sharded"]
    assert found[loop]["steps"] == 3
    for name, weight in found["data parallel"]["weights"].items():
        torch.testing.assert_close(found[loop]["weights"][name], weight, rtol=1e-5, atol=1e-6)


def test_a_curriculum_trains(found):
    assert found["curriculum"]["sharded"] and found["curriculum"]["steps"] == 3


def test_regularization_is_refused(found):
    assert "FSDP keeps the trained weights in shards" in found["regularization"]["refused"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
