"""Micro-batches under real DeepSpeed: ZeRO-1 and ZeRO-2 recover, alone and on two ranks; ZeRO-3 runs them in step.

This file is also the program that the processes execute.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import Trainer

from scu_trainer.errors import ControlError
from tests import processes
from tests.tiny import UnevenRows, arguments, llama, pad, same
from tests.train.windowed import Branches, BranchRows, Fault, Windowed

pytest.importorskip("deepspeed")

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
COMMON = {
    "max_steps": STEPS,
    "gradient_accumulation_steps": 2,
    "optim": "sgd",
    "learning_rate": 0.3,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 0.5,
    "logging_steps": 1,
    "ddp_timeout": 60,
}
UNEVEN = (2, 4)
"""Micro-batches per accumulation batch on rank 0 and 1: 4 and 8 per window; a process alone runs 4."""

STAGE_2, STAGE_3 = {"stage": 2}, {"stage": 3}
OFFLOADED = {"stage": 2, "offload": True}
SINGLE_SUMS = {"bf16": True, "data_types": {"grad_accum_dtype": "fp32"}}
LOW_PRECISION = {"stage": 1, "offload": True, **SINGLE_SUMS}
CASES = {
    1: {"stage 1, offload": {"stage": 1, "offload": True}, "stage 2": STAGE_2},
    2: {"stage 1, bf16": LOW_PRECISION, "stage 2": STAGE_2, "stage 2, offload": OFFLOADED},
}
"""By number of processes. ``LOW_PRECISION`` keeps its sums beside ``.grad``."""

FAULTS = {"first chunk": (0, "forward"), "last chunk": (7, "backward")}
"""Micro-batch and place. The last of the first window on rank 1, of the second in a process alone."""


def configuration(stage: int, offload: bool = False, bf16: bool = False, **changes) -> dict:
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}} if offload else {"stage": stage}
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": bf16},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        **changes,
    }


def run(folder: Path, case: dict, trainer_class=Windowed, resume: bool = False, make_model=None, data=None, **own):
    """A finished training under DeepSpeed, clipped, with a falling rate. ``own``: arguments of ``Windowed``."""
    from accelerate.state import AcceleratorState, GradientState

    # One process trains under several DeepSpeed configurations in turn: accelerate keeps the first one otherwise.
    AcceleratorState._reset_state()
    GradientState._reset_state()
    names = ("splits", "fault", "recover")
    chunking = {name: own.pop(name) for name in names if name in own}
    defaults = {**COMMON, "bf16": case.get("bf16", False)}
    args = arguments(folder, deepspeed=configuration(**case), **{**defaults, **own})
    # Only stage 3 handles one layer after the other.
    model, data, collate = (
        (make_model(), data, None) if make_model else (llama(layers=1 + (case["stage"] == 3)), UnevenRows(64), pad)
    )
    trainer = trainer_class(model, args, train_dataset=data, data_collator=collate, **chunking)
    trainer.train(resume_from_checkpoint=resume or None)
    assert type(trainer.model_wrapped).__name__ == "DeepSpeedEngine"
    assert trainer.model_wrapped.zero_optimization_stage() == case["stage"]
    return trainer


def outcome(trainer) -> dict:
    from deepspeed.runtime.zero import GatheredParameters

    engine = trainer.model_wrapped
    sharded = engine.zero_optimization_stage() == 3
    with GatheredParameters(list(trainer.model.parameters()), enabled=sharded):
        weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return {
        "weights": weights,
        "counters": [engine.micro_steps, engine.global_steps, engine.global_samples, trainer.state.global_step],
        "rates": [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row],
        "norm": float(engine.get_global_grad_norm()),
        "faults_hit": getattr(trainer, "faults_hit", 0),
        "was_last": getattr(trainer, "was_last", None),
        "open_backwards": engine.optimizer._backward_active_depth,
    }


# -- what each process does --------------------------------------------------------------------------------------------


def main(folder: Path) -> None:
    import deepspeed

    # DeepSpeed would compile its shared-memory communication for a minute at the first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    gc.freeze()  # every training ends in a full collection, which walks over all that imports have left behind
    world = int(os.environ["WORLD_SIZE"])
    found = {name: recoveries(folder, case, world) for name, case in CASES[world].items()}
    found |= alone(folder) if world == 1 else together(folder)
    torch.save(found, folder / f"rank{os.environ['RANK']}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def recoveries(folder: Path, case: dict, world: int) -> dict[str, dict]:
    faults = {name: Fault(world - 1, call, place) for name, (call, place) in FAULTS.items()}
    found = {name: outcome(run(folder, case, splits=UNEVEN, fault=fault)) for name, fault in faults.items()}
    return {
        "stock": outcome(run(folder, case, Trainer)),
        "deferred": outcome(run(folder, case)),
        "uneven": outcome(run(folder, case, splits=UNEVEN)),
        **found,
    }


def alone(folder: Path) -> dict:
    """Saving and resuming, and what is refused."""
    saving = {"save_strategy": "steps", "save_steps": 2, "splits": UNEVEN}
    whole = outcome(run(folder / "saved", OFFLOADED, **saving))
    shutil.rmtree(folder / "saved" / f"checkpoint-{STEPS}")
    resumed = outcome(run(folder / "saved", OFFLOADED, resume=True, **saving))
    naive = outcome(run(folder, STAGE_2, splits=UNEVEN, fault=Fault(0, 3), recover=False))
    refused = {
        "stage 0": {"stage": 0},
        "bf16": {"stage": 1, **SINGLE_SUMS},
        "timers": {**STAGE_2, "wall_clock_breakdown": True},
    }
    return {
        "whole": whole,
        "resumed": resumed,
        "naive": naive,
        "refused": {name: refusal(folder, case) for name, case in refused.items()},
    }


def refusal(folder: Path, case: dict) -> str:
    with pytest.raises(ControlError) as raised:
        run(folder, case)
    return str(raised.value)


def together(folder: Path) -> dict:
    """Stage 3, weights that one rank does not use, a rank that fails for good, ZeRO-2 without accumulation."""
    one = {"gradient_accumulation_steps": 1}
    branches = {"make_model": Branches, "data": BranchRows(4), "max_grad_norm": 0}
    branches |= {"train_sampling_strategy": "sequential", "lr_scheduler_type": "constant"}
    found = {
        "stage 3 stock": outcome(run(folder, STAGE_3, Trainer)),
        "stage 3": outcome(run(folder, STAGE_3)),
        "stage 3 split": outcome(run(folder, STAGE_3, splits=(2,))),
        "single stock": outcome(run(folder, STAGE_2, Trainer, **one)),
        "single": outcome(run(folder, STAGE_2, **one)),
        "branches": outcome(run(folder, STAGE_2, **one, **branches)),
        "branches, bf16": outcome(run(folder, LOW_PRECISION, **one, **branches)),
    }
    return {**found, "for good": failure(folder)}


def failure(folder: Path) -> dict:
    begin, trainers = time.monotonic(), []

    class Kept(Windowed):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            trainers.append(self)

    with pytest.raises(RuntimeError, match="failed for good"):
        run(folder, STAGE_2, Kept, splits=UNEVEN, fault=Fault(1, 8, forever=True))
    trainers[0].model_wrapped.save_checkpoint(folder / "after_failure")  # nobody is stuck, and the engine still saves
    return {"seconds": time.monotonic() - begin, "steps": trainers[0].model_wrapped.global_steps}


# -- what they must have found -----------------------------------------------------------------------------------------


def launch(folder: Path, ranks: int) -> list[dict]:
    done = processes.run([__file__, folder], ranks=ranks, environment={"DS_ACCELERATOR": "cpu"})
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("one_rank"), 1)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("two_ranks"), 2)


@pytest.fixture(params=[(world, name) for world, cases in CASES.items() for name in cases], ids=str)
def case(request):
    """Per rank: the outcomes of one case."""
    world, name = request.param
    ranks = request.getfixturevalue("one_rank" if world == 1 else "two_ranks")
    return world, name, [rank[name] for rank in ranks]


def test_deferred_reduction_is_deepspeeds(case):
    world, name, ranks = case
    for rank in ranks:
        stock, deferred = rank["stock"], rank["deferred"]
        assert deferred["counters"] == stock["counters"]
        assert deferred["was_last"] == [False, True] * STEPS
        assert deferred["counters"][0] == deferred["counters"][1] == STEPS
        assert deferred["rates"] == stock["rates"]
        assert stock["norm"] > 0.5  # the engine clips
        if world == 2 and name.startswith("stage 2"):
            # Stock ZeRO-2 averages every accumulation batch over ranks, then adds: another order of the same sum.
            torch.testing.assert_close(deferred["weights"], stock["weights"], rtol=1e-5, atol=1e-7)
        else:
            assert same(deferred["weights"], stock["weights"])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_one_rank_changes_nothing(case, fault):
    _, _, ranks = case
    for number, rank in enumerate(ranks):
        assert rank[fault]["faults_hit"] == (number == len(ranks) - 1)
        assert same(rank[fault]["weights"], rank["uneven"]["weights"])
        assert rank[fault]["counters"] == rank["uneven"]["counters"] == rank["stock"]["counters"]
        assert rank[fault]["open_backwards"] == 0
    assert same(ranks[0][fault]["weights"], ranks[-1][fault]["weights"])


def test_splitting_moves_rounding_only(case):
    _, name, ranks = case
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if "bf16" in name else {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close(ranks[0]["uneven"]["weights"], ranks[0]["stock"]["weights"], **tolerance)


def test_zero_2_without_accumulation_is_bit_for_bit(two_ranks):
    assert same(two_ranks[0]["single"]["weights"], two_ranks[0]["single stock"]["weights"])


def test_a_retry_without_dropping_gradients_is_wrong(one_rank):
    """The faults do leave partial gradients behind, or the tests above would show nothing."""
    assert not same(one_rank[0]["naive"]["weights"], one_rank[0]["stage 2"]["uneven"]["weights"])


def test_saving_and_resuming_between_windows(one_rank):
    whole, resumed = one_rank[0]["whole"], one_rank[0]["resumed"]
    assert same(resumed["weights"], whole["weights"])
    assert resumed["counters"][1:] == whole["counters"][1:]


def test_engines_that_cannot_recover_are_refused(one_rank):
    said = one_rank[0]["refused"]
    assert "zero_optimization.stage 0" in said["stage 0"]
    assert "BF16_Optimizer (zero_optimization.stage 1)" in said["bf16"]
    assert "wall_clock_breakdown" in said["timers"]
    assert all("memory_control: false" in text for text in said.values())


def test_stage_3_runs_its_chunks_in_step(two_ranks):
    stock, whole, split = (two_ranks[0][f"stage 3{name}"] for name in (" stock", "", " split"))
    assert same(whole["weights"], stock["weights"])
    assert whole["counters"] == split["counters"] == stock["counters"]
    torch.testing.assert_close(split["weights"], stock["weights"], rtol=1e-5, atol=1e-7)


def test_weights_that_one_rank_does_not_use(two_ranks):
    expected = branches_by_hand()
    for rank in two_ranks:
        torch.testing.assert_close(rank["branches"]["weights"], expected, rtol=1e-5, atol=1e-7)
        half = {name: weight.bfloat16() for name, weight in expected.items()}
        torch.testing.assert_close(rank["branches, bf16"]["weights"], half, rtol=2e-2, atol=1e-2)


def branches_by_hand() -> dict[str, torch.Tensor]:
    """Two ranks' training in one process: each its own batch and buffers, one average of their gradients."""
    models, rows = [Branches(), Branches()], BranchRows(4)
    for step in range(STEPS):
        for rank, model in enumerate(models):
            first = (2 * step + rank) * 4
            batch = torch.utils.data.default_collate([rows[index] for index in range(first, first + 4)])
            model(**batch)["loss"].backward()
        for weights in zip(*(model.parameters() for model in models), strict=True):
            average = sum(weight.grad for weight in weights if weight.grad is not None) / 2
            for weight in weights:
                weight.data -= 0.3 * average
                weight.grad = None
    return dict(models[0].named_parameters())


def test_both_ranks_raise_together_when_one_fails_for_good(two_ranks):
    for rank in two_ranks:
        assert rank["for good"]["steps"] == 1
        assert rank["for good"]["seconds"] < 20


OUT_OF_MEMORY_ALONE = """
import os, sys
import deepspeed, torch
from scu_trainer import SCUTrainer
from scu_trainer.errors import UserError
from scu_trainer.settings import MemorySettings
from scu_trainer.train.step.distributed.launched import lost_ranks_reported
from tests.tiny import UnevenRows, arguments, llama, pad
from tests.train.test_memory_zero import STAGE_3, configuration
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
rank, folder, failing, model, forwards = int(os.environ["RANK"]), sys.argv[1], int(sys.argv[2]), llama(), []
args = arguments(folder, deepspeed=configuration(**STAGE_3), max_steps=3, optim="sgd", ddp_timeout=60)
def fail(*unused):
    forwards.append(1)
    if rank == 1 and len(forwards) >= failing:
        raise torch.OutOfMemoryError("CUDA out of memory (injected)")
[*model.modules()][-1].register_forward_pre_hook(fail)
rows = {"train_dataset": UnevenRows(16), "data_collator": pad}
try:
    with lost_ranks_reported():
        SCUTrainer(model=model, args=args, memory=MemorySettings(), **rows).train()
except UserError as error:
    print(f"rank {rank}: {error}", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("failing", "said"), [(1, "step 1 ran out of memory with a few"), (11, "ran out of memory with 4")]
)
def test_stage_3_names_the_rank_that_ran_out_of_memory_first(tmp_path, failing, said):
    """When the loss is asked about, and in training: both ranks say something, and none is aborted by gloo."""
    (tmp_path / "alone.py").write_text(OUT_OF_MEMORY_ALONE)
    done = processes.run([tmp_path / "alone.py", tmp_path, failing], ranks=2, environment={"DS_ACCELERATOR": "cpu"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert "rank 0: another rank (process) ended" in done.stdout and "rank 1: step" in done.stdout
    assert said in done.stdout and "could not be tested" not in done.stderr


if __name__ == "__main__":
    main(Path(sys.argv[1]))
