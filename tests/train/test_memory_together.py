"""The whole memory loop, through the real trainer, under two gloo ranks and under DeepSpeed.

This file is also the program that the processes execute.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from scu_trainer import SCUTrainer
from scu_trainer.errors import OutOfMemory
from scu_trainer.settings import MemorySettings
from tests import processes
from tests.faults import fail_above_tokens
from tests.tiny import Rows, UnevenRows, arguments, llama, pad, same, weights_of

ROOT = Path(__file__).resolve().parents[2]
SMALL_DEVICE_TOKENS = 24
"""Fits one row of 16 tokens, not two."""


def trained(folder: Path, rows, memory, tokens: int | None = None, **changes) -> SCUTrainer:
    """``tokens``: what a micro-batch may have on this process's device; None: anything."""
    changes = {"optim": "sgd", "learning_rate": 0.3, "gradient_accumulation_steps": 2, "max_steps": 3, **changes}
    args = arguments(folder, ddp_timeout=60, **changes)
    trainer = SCUTrainer(llama(), args, train_dataset=rows, data_collator=pad, memory=memory)
    with contextlib.nullcontext() if tokens is None else fail_above_tokens(trainer.model, tokens):
        trainer.train(resume_from_checkpoint=changes.get("resume_from_checkpoint"))
    return trainer


def outcome(trainer: SCUTrainer) -> dict:
    loop = trainer.micro_batches.loop if trainer.micro_batches else None
    return {
        "weights": weights_of(trainer.model),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "step": trainer.state.global_step,
        "cap": loop and loop.state.cap_tokens,
        "out_of_memory": loop and loop.statistics.out_of_memory,
        "failed_tokens": loop and loop.statistics.failed_tokens,
        "wrapped": type(trainer.model_wrapped).__name__,
    }


def close(first: dict, second: dict) -> bool:
    return all(
        (first[name] - weight).abs().max() <= 1e-6 * max(1.0, weight.abs().max()) for name, weight in second.items()
    )


# -- two gloo ranks ----------------------------------------------------------------------------------------------------


def two_ranks(folder: Path) -> None:
    gc.freeze()
    rank = int(os.environ["RANK"])
    control = MemorySettings()
    found = {
        "stock even": outcome(trained(folder / "a", Rows(64), None)),
        "even": outcome(trained(folder / "b", Rows(64), control)),
        "stock uneven": outcome(trained(folder / "c", UnevenRows(64), None)),
        "uneven": outcome(trained(folder / "d", UnevenRows(64), control)),
    }
    own = SMALL_DEVICE_TOKENS if rank == 1 else None
    found["one small device"] = outcome(trained(folder / "e", UnevenRows(64), control, own))
    begin = time.monotonic()
    with pytest.raises(OutOfMemory) as stopped:
        trained(folder / "f", Rows(64), control, 8 if rank == 1 else None)
    found["hopeless"] = {"text": str(stopped.value), "seconds": time.monotonic() - begin}
    torch.save(found, folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("together")
    answer = processes.run([__file__, "two_ranks", folder], ranks=2)
    assert answer.returncode == 0, answer.stderr[-4000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)]


def test_rows_of_one_size_are_stock_ddp_bit_for_bit(ranks):
    for rank in ranks:
        assert rank["even"]["wrapped"] == "DistributedDataParallel"
        assert same(rank["even"]["weights"], rank["stock even"]["weights"])


def test_uneven_rows_give_the_stock_gradient(ranks):
    for rank in ranks:
        assert close(rank["uneven"]["weights"], rank["stock uneven"]["weights"])
        assert not same(rank["uneven"]["weights"], rank["stock even"]["weights"])


def test_out_of_memory_on_one_rank_changes_no_weight_and_all_agree_on_the_chunk(ranks):
    first, second = (rank["one small device"] for rank in ranks)
    assert first["failed_tokens"] == 0 < second["failed_tokens"]
    assert first["out_of_memory"] == second["out_of_memory"] > 0, "the first rank writes the figures of the run"
    assert first["cap"] == second["cap"] <= SMALL_DEVICE_TOKENS
    assert same(first["weights"], second["weights"])
    assert first["step"] == second["step"] == 3
    assert close(first["weights"], ranks[0]["stock uneven"]["weights"])


def test_a_rank_that_cannot_go_on_stops_all(ranks):
    first, second = (rank["hopeless"] for rank in ranks)
    assert "rank 1 ran out of memory" in first["text"]
    assert "does not fit in memory even alone" in second["text"] and "20.0 MiB wanted" in second["text"]
    assert max(first["seconds"], second["seconds"]) < 30


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------


def deepspeed(folder: Path, stage: str) -> None:
    import deepspeed

    # DeepSpeed would compile its shared-memory communication for a minute at the first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    gc.freeze()
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": int(stage), "stage3_gather_16bit_weights_on_model_save": True},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    common = {"deepspeed": config, "logging_steps": 1}
    found = {
        "stock": outcome(trained(folder / "a", UnevenRows(64), None, **common)),
        "ours": outcome(trained(folder / "b", UnevenRows(64), MemorySettings(), **common)),
    }
    (recovered if stage == "2" else stopped)(folder, found, common)
    torch.save(found, folder / "result.pt")


def recovered(folder: Path, found: dict, common: dict) -> None:
    found["small device"] = outcome(
        trained(folder / "c", UnevenRows(64), MemorySettings(), SMALL_DEVICE_TOKENS, **common)
    )


def stopped(folder: Path, found: dict, common: dict) -> None:
    with pytest.raises(OutOfMemory) as error:
        trained(folder / "c", UnevenRows(64), MemorySettings(), 2 * SMALL_DEVICE_TOKENS, **common)
    found["text"] = str(error.value)
    smaller = MemorySettings(max_batch_size=2)
    found["resumed"] = outcome(
        trained(folder / "c", UnevenRows(64), smaller, 2 * SMALL_DEVICE_TOKENS, resume_from_checkpoint=True, **common)
    )


def zero(folder: Path, stage: int) -> dict:
    pytest.importorskip("deepspeed")
    answer = processes.run([__file__, "deepspeed", folder, stage], ranks=1, environment={"DS_ACCELERATOR": "cpu"})
    assert answer.returncode == 0, answer.stderr[-4000:]
    found = torch.load(folder / "result.pt")
    assert found["ours"]["wrapped"] == "DeepSpeedEngine"
    return found


def test_zero_2_recovers(tmp_path):
    found = zero(tmp_path, 2)
    assert close(found["ours"]["weights"], found["stock"]["weights"])
    assert found["small device"]["out_of_memory"] > 0 and found["small device"]["step"] == 3
    assert close(found["small device"]["weights"], found["stock"]["weights"])


def test_zero_3_stops_with_a_checkpoint_and_goes_on_with_the_size_it_named(tmp_path):
    found = zero(tmp_path, 3)
    assert found["ours"]["losses"] == pytest.approx(found["stock"]["losses"], rel=1e-6)
    assert "checkpoint-0 was written" in found["text"] and "set max_batch_size: 2" in found["text"]
    assert found["resumed"]["step"] == 3
    assert found["resumed"]["losses"] == pytest.approx(found["stock"]["losses"], rel=1e-6)


if __name__ == "__main__":
    {"two_ranks": two_ranks, "deepspeed": deepspeed}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
