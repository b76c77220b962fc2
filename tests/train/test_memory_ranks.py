"""Micro-batches under one process and under DDP: stock gradients when nothing happens, the same weights when memory
runs out.

This file is also the program that two processes execute.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer

from scu_trainer.errors import ControlError
from scu_trainer.train.step.distributed import launchers as distributed
from scu_trainer.train.step.distributed import ranks as subject
from tests import processes
from tests.tiny import Rows, UnevenRows, arguments, llama, pad, same, weights_of
from tests.train.windowed import Branches, BranchRows, Fault, Windowed

ROOT = Path(__file__).resolve().parents[2]

# SGD: Adam would blow the last bits of tiny gradients up to whole steps.
COMMON = {"optim": "sgd", "learning_rate": 0.3, "gradient_accumulation_steps": 2, "max_steps": 3, "ddp_timeout": 60}
# One batch per window: with more, the stock loop itself runs the first of them under no_sync.
UNEVEN = {"splits": (2, 4), "gradient_accumulation_steps": 1}
"""2 micro-batches per window on rank 0, 4 on rank 1."""

FAULTS = {
    "first chunk": Fault(rank=1, call=0, place="forward"),
    "first backward": Fault(rank=1, call=0),
    "mid window": Fault(rank=1, call=4 + 1),
    "last chunk": Fault(rank=1, call=3),
    "other rank": Fault(rank=0, call=2 + 1),
}


def run(kind: str, folder: Path, trainer_class=Windowed, **changes) -> Trainer:
    own = {name: changes.pop(name) for name in ("splits", "fault", "recover") if name in changes}
    rows, common = 4, {**COMMON, **changes}
    if kind == "branches":
        # Decay moves a weight that has a gradient, be it zero: one that nobody uses must have none.
        common |= {"train_sampling_strategy": "sequential", "ddp_find_unused_parameters": True, "weight_decay": 0.1}
        model, data, collate = Branches(), BranchRows(rows), None
    else:
        model, data, collate = llama(), UnevenRows(64), pad
        model.to(torch.bfloat16 if kind == "bf16" else torch.float32)
    args = arguments(folder, per_device_train_batch_size=rows, **common)
    trainer = trainer_class(model, args, train_dataset=data, data_collator=collate, **own)
    trainer.train()
    return trainer


def outcome(trainer: Trainer) -> dict:
    return {
        "weights": weights_of(trainer.model),
        "buffers": {name: buffer.clone() for name, buffer in trainer.model.named_buffers()},
        "faults_hit": getattr(trainer, "faults_hit", 0),
        "step": trainer.state.global_step,
    }


# -- what each of two processes does -----------------------------------------------------------------------------------


def main(folder: Path) -> None:
    gc.freeze()  # every training ends in a full collection, which walks over all that imports have left behind
    found = {}
    for kind in ("fp32", "bf16", "branches"):
        found[f"{kind} stock"] = outcome(run(kind, folder, Trainer))
        found[f"{kind} deferred"] = outcome(last := run(kind, folder))
    assert isinstance(last.model_wrapped, nn.parallel.DistributedDataParallel)
    found["single stock"] = outcome(run("fp32", folder, Trainer, gradient_accumulation_steps=1))
    found["uneven"] = outcome(trained := run("fp32", folder, **UNEVEN))
    for name, fault in FAULTS.items():
        found[name] = outcome(run("fp32", folder, **UNEVEN, fault=fault))
    found["naive"] = outcome(run("fp32", folder, **UNEVEN, fault=FAULTS["mid window"], recover=False))
    found["for good"] = failure(folder)
    found["refused"] = refusals(trained)
    torch.save(found, folder / f"rank{os.environ['RANK']}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def failure(folder: Path) -> dict:
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="failed for good"):
        run("fp32", folder, **UNEVEN, fault=Fault(rank=1, call=4 + 1, forever=True))
    seconds = time.monotonic() - begin
    together = torch.ones(1)
    torch.distributed.all_reduce(together)  # nobody is stuck in an earlier collective
    return {"seconds": seconds, "together": together.item()}


def refusals(trainer: Trainer) -> dict[str, str]:
    """What ``ranks_for`` says to models that cannot work under DDP."""
    ddp, said = trainer.model_wrapped, {}
    for name, module in {"sync": nn.SyncBatchNorm(2), "sparse": nn.Embedding(4, 2, sparse=True)}.items():
        ddp.module.extra = module
        said[name] = refusal(trainer)
        del ddp.module.extra
    ddp.static_graph = True
    said["static"] = refusal(trainer)
    ddp.static_graph = False
    distributed.ranks_for(trainer)
    ddp.register_comm_hook(None, torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook)
    said["hook"] = refusal(trainer)
    return said


def refusal(trainer: Trainer) -> str:
    with pytest.raises(ControlError) as raised:
        distributed.ranks_for(trainer)
    return str(raised.value)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    done = processes.run([__file__, folder], ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)]


# -- DDP ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fp32", "bf16", "branches"])
def test_deferred_reduction_is_ddps_bit_for_bit(two_ranks, kind):
    for rank in two_ranks:
        assert same(rank[f"{kind} deferred"]["weights"], rank[f"{kind} stock"]["weights"])
        assert rank[f"{kind} deferred"]["step"] == COMMON["max_steps"]


def test_ranks_share_buffers_and_rare_weights_as_in_stock_training(two_ranks):
    deferred, start = two_ranks[0]["branches deferred"], Branches().state_dict()
    assert not torch.equal(deferred["weights"]["rare.weight"], start["rare.weight"])
    assert torch.equal(deferred["weights"]["never.weight"], start["never.weight"])
    assert same(deferred["weights"], two_ranks[1]["branches deferred"]["weights"])
    for rank in two_ranks:  # after the last window each rank has moved its own copy
        assert same(rank["branches deferred"]["buffers"], rank["branches stock"]["buffers"])


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_on_one_rank_changes_nothing(two_ranks, name):
    for number, rank in enumerate(two_ranks):
        assert rank[name]["faults_hit"] == (number == FAULTS[name].rank)
        assert same(rank[name]["weights"], rank["uneven"]["weights"])
    assert same(two_ranks[0][name]["weights"], two_ranks[1][name]["weights"])


def test_splitting_unevenly_moves_rounding_only(two_ranks):
    torch.testing.assert_close(
        two_ranks[0]["uneven"]["weights"], two_ranks[0]["single stock"]["weights"], rtol=1e-4, atol=1e-6
    )


def test_a_retry_without_dropping_gradients_is_wrong(two_ranks):
    """The faults do leave partial gradients behind, or the tests above would show nothing."""
    assert not same(two_ranks[0]["naive"]["weights"], two_ranks[0]["uneven"]["weights"])


def test_both_ranks_raise_together_when_one_fails_for_good(two_ranks):
    for rank in two_ranks:
        assert rank["for good"]["together"] == 2
        assert rank["for good"]["seconds"] < 20


def test_ddp_that_communicates_inside_a_chunk_is_refused(two_ranks):
    for rank in two_ranks:
        said = rank["refused"]
        assert "extra is SyncBatchNorm" in said["sync"]
        assert "extra has sparse gradients" in said["sparse"]
        assert "ddp_static_graph: false" in said["static"]
        assert "fp16_compress_hook" in said["hook"]
        assert all("memory_control: false" in text for text in said.values())


# -- one process -------------------------------------------------------------------------------------------------------


def test_one_process_recovers_bit_for_bit(tmp_path):
    stock, deferred = run("fp32", tmp_path, Trainer), run("fp32", tmp_path)
    assert same(weights_of(deferred.model), weights_of(stock.model))
    whole = run("fp32", tmp_path, splits=(4,))
    for fault in (Fault(0, 3), Fault(0, 8, "forward"), Fault(0, 15)):
        faulty = run("fp32", tmp_path, splits=(4,), fault=fault)
        assert faulty.faults_hit == 1
        assert same(weights_of(faulty.model), weights_of(whole.model))
    naive = run("fp32", tmp_path, splits=(4,), fault=Fault(0, 3), recover=False)
    assert not same(weights_of(naive.model), weights_of(whole.model))
    assert (deferred.ranks.world_size, deferred.ranks.rank) == (1, 0)
    assert (deferred.ranks.recoverable, deferred.ranks.even_micro_batches) == (True, False)
    assert deferred.ranks.all_reduce_max([3, -2]) == [3, -2]


def fresh(folder: Path, **changes) -> Trainer:
    return Trainer(llama(), arguments(folder, **changes), train_dataset=Rows())


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("auto_find_batch_size", True, "auto_find_batch_size: false"),
        ("optim", "adalomo", "optim adalomo"),
        ("optim", "galore_adamw_layerwise", "optim galore_adamw_layerwise"),
        ("_n_gpu", 2, "drives 2 GPUs"),
    ],
)
def test_arguments_that_cannot_work_are_refused(tmp_path, name, value, text):
    trainer = fresh(tmp_path)
    distributed.refuse_arguments(trainer)
    setattr(trainer.args, name, value)
    said = refusal(trainer)
    assert text in said and "memory_control: false" in said


def test_models_spread_over_ranks_are_refused(tmp_path):
    trainer = fresh(tmp_path)
    trainer.model._tp_size = 2
    assert "tensor parallelism over 2 ranks" in refusal(trainer)


@pytest.mark.parametrize("kind", ["MEGATRON_LM", "XLA"])
def test_unknown_launchers_are_refused(tmp_path, monkeypatch, kind):
    trainer = fresh(tmp_path)
    monkeypatch.setattr(type(trainer.accelerator), "distributed_type", DistributedType(kind))
    assert f"does not work under {kind}" in refusal(trainer)


@pytest.mark.parametrize(
    "found, text",
    [
        ({"pipeline_parallelism": True}, "pipeline parallelism"),
        ({"has_moe_layers": True}, "expert layers"),
        ({"zenflow": True}, "remove zenflow"),
        ({"flops_profiler_enabled": lambda: True}, "disable flops_profiler"),
    ],
)
def test_deepspeed_features_that_break_with_chunks_are_refused(found, text):
    """Stand-ins: these engines need hardware or a model of their own."""
    calm = {"wall_clock_breakdown": lambda: False, "flops_profiler_enabled": lambda: False}
    engine = {**calm, "pipeline_parallelism": False, "has_moe_layers": False, "zenflow": False, **found}
    with pytest.raises(ControlError, match=text):
        subject.deepspeed_ranks(SimpleNamespace(model_wrapped=SimpleNamespace(**engine)))


def test_sharded_models_keep_even_chunks_and_cannot_recover(tmp_path):
    trainer = fresh(tmp_path, gradient_accumulation_steps=2)
    trainer.is_distributed_loading_by_transformers = True  # as for a model that transformers sharded with FSDP2
    assert "per_device_train_batch_size: 8" in refusal(trainer)
    trainer.args.gradient_accumulation_steps = 1
    ranks = distributed.ranks_for(trainer)
    assert (ranks.recoverable, ranks.even_micro_batches) == (False, True)
    seen = []
    with ranks.window():
        for last in (False, False, True):
            with ranks.micro_batch(last):
                seen.append(trainer.accelerator.sync_gradients)
    assert seen == [False, False, True]
    with pytest.raises(ControlError, match="smaller token_cap"):
        ranks.drop_gradients()


def test_buckets_are_bounded_and_keep_types_apart():
    tensors = [torch.full((n,), float(n)) for n in (3, 3, 3, 20)] + [torch.ones(4, dtype=torch.bfloat16)]
    tensors.append(torch.arange(12.0).view(3, 4).t())  # not contiguous
    expected = [tensor * 2 for tensor in tensors]
    sizes = []
    for flat in subject.in_buckets(tensors, limit_bytes=8 * 4, alone_bytes=16 * 4):
        sizes.append((flat.dtype, flat.numel()))
        flat.mul_(2)
    single, half = torch.float32, torch.bfloat16
    assert sizes == [(single, 6), (single, 20), (single, 3), (single, 12), (half, 4)]
    torch.testing.assert_close(tensors, expected, rtol=0, atol=0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
