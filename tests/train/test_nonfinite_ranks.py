"""Two ranks, and one of them has the bad numbers: both skip the same step, under DDP and under ZeRO-2.

This file is also the program that the two processes execute.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from scu_trainer import wrap
from scu_trainer.control.guard import spikes
from scu_trainer.errors import NonFiniteLoss
from scu_trainer.settings import MemorySettings, RegularizationSettings, SafetySettings
from tests import processes
from tests.tiny import llama, same, trained, weights_of
from tests.train.test_nonfinite_guard import FAULTS, AtStep, DropGradients
from tests.train.test_spike_guard import large_loss
from tests.train.test_wrap_ranks import ZERO_3, Net, rows

pytest.importorskip("deepspeed")

ROOT = Path(__file__).resolve().parents[2]
STEPS, BAD_STEP = 4, 3
SAFETY = SafetySettings()

# SGD: Adam would blow the last bits of tiny gradients up to whole steps.
COMMON = {"optim": "sgd", "learning_rate": 0.3, "max_steps": STEPS, "per_device_train_batch_size": 2, "ddp_timeout": 60}
LOOPS = {"memory": MemorySettings(), "regularization": RegularizationSettings(law="fixed", lambda_init=0.1)}
DDP = {
    "layer": {},
    "loss": {},
    "layer, loops": {**LOOPS, "gradient_accumulation_steps": 2},
}
ZERO = {"layer, zero": {}, "layer, zero, loops": {**LOOPS, "gradient_accumulation_steps": 2}}


def configuration() -> dict:
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }


def run(folder: Path, name: str, changes: dict, steps=(BAD_STEP,), safety=SAFETY, callbacks=()):
    when, model = AtStep(*steps), llama()
    if os.environ["RANK"] == "1" and safety is not None:
        {**FAULTS, "spike": large_loss}[name.partition(",")[0]](model, when)
    return trained(model, folder / name, safety=safety, callbacks=[when, *callbacks], **{**COMMON, **changes})


class SpoilPadding(TrainerCallback):
    """Not a number behind the last weight of each part, where ZeRO-3 leaves what memory held."""

    count = 0

    def on_step_end(self, args, state, control, model, **kwargs):
        for weight in model.parameters():
            own = weight.ds_tensor.numel()
            behind = weight.ds_tensor[max(0, weight.ds_numel - own * args.process_index) :]
            behind.fill_(float("nan"))
            self.count += behind.numel()


def saved_with_padding(folder: Path) -> dict:
    """Three biases on two ranks: a part of each has room for two."""
    spoil, told = SpoilPadding(), ""
    changes = {**COMMON, "deepspeed": ZERO_3, "save_strategy": "steps", "save_steps": STEPS}
    try:
        model, data = wrap(Net(), loss=torch.nn.CrossEntropyLoss()), rows(lambda i: i % 3)
        trained(model, folder, dataset=data, safety=SAFETY, callbacks=[spoil], **changes)
    except NonFiniteLoss as error:
        told = str(error)
    return {"spoiled": spoil.count, "told": told, "is_saved": (folder / f"checkpoint-{STEPS}").is_dir()}


def outcome(trainer) -> dict:
    guard = trainer.nonfinite_guard
    skipped = [] if guard is None else guard.figures()["bad_numbers"]["skipped"]
    lam = None if trainer.regularizer is None else trainer.regularizer.progress.tokens_seen
    return {"weights": weights_of(trainer.model), "skipped": skipped, "tokens_seen": lam}


def main(folder: Path) -> None:
    import deepspeed
    from accelerate.state import AcceleratorState, GradientState

    logging.basicConfig(level=logging.WARNING)
    # DeepSpeed would compile its shared-memory communication for a minute at the first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    gc.freeze()  # every training ends in a full collection, which walks over all that imports have left behind
    found = {name: outcome(run(folder, name, changes)) for name, changes in DDP.items()}
    for name in ("layer", "layer, loops"):
        reference = DropGradients(BAD_STEP, is_reported=True)
        found[f"{name}, reference"] = outcome(run(folder / "r", name, DDP[name], safety=None, callbacks=[reference]))
    found["loss, reference"] = found["layer, reference"]
    spikes.FEWEST = BAD_STEP - 1
    found["spike"] = outcome(run(folder, "spike", {}, safety=SafetySettings(spike_guard="skip")))
    try:
        run(folder / "limit", "layer", {}, steps=(3, 4), safety=SafetySettings(max_nonfinite_steps=1))
    except NonFiniteLoss as error:
        found["limit"] = str(error)
    for name, changes in ZERO.items():
        # One process trains under several configurations in turn: accelerate keeps the first one otherwise.
        AcceleratorState._reset_state()
        GradientState._reset_state()
        found[name] = outcome(run(folder, name, {**changes, "deepspeed": configuration()}))
    AcceleratorState._reset_state()
    GradientState._reset_state()
    found["padding"] = saved_with_padding(folder / "padding")
    torch.save(found, folder / f"rank{os.environ['RANK']}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    done = processes.run([__file__, folder], ranks=2, environment={"DS_ACCELERATOR": "cpu"})
    assert done.returncode == 0, done.stderr[-6000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)], folder, done.stderr


@pytest.mark.parametrize("name", DDP)
def test_a_bad_rank_makes_all_of_them_skip(ranks, name):
    (first, second), _, _ = ranks
    assert same(first[name]["weights"], second[name]["weights"])
    assert same(first[name]["weights"], first[f"{name}, reference"]["weights"])
    assert first[name]["tokens_seen"] == first[f"{name}, reference"]["tokens_seen"]
    assert [record["step"] for record in first[name]["skipped"]] == [BAD_STEP]
    assert first[name]["skipped"] == second[name]["skipped"]


def test_the_rank_that_has_the_rows_is_named(ranks):
    (first, _), _, stderr = ranks
    (record,) = first["layer"]["skipped"]
    assert record["place"].endswith("is that of model.layers.1.mlp (LlamaMLP)")
    assert record["rows"] == ["every row of rank 1"]
    assert stderr.count(f"WARNING:scu_trainer:step {BAD_STEP}: the loss is not") == len(DDP) + len(ZERO) + 1


def test_a_spike_of_one_rank_is_taken_back_by_all(ranks):
    (first, second), _, _ = ranks
    assert same(first["spike"]["weights"], second["spike"]["weights"])
    assert same(first["spike"]["weights"], first["layer, reference"]["weights"])
    assert first["spike"]["skipped"] == second["spike"]["skipped"]
    (record,) = first["spike"]["skipped"]
    assert (record["step"], record["fault"]) == (BAD_STEP, "spike")
    assert sorted(record["rows"]) == [f"row {row} of accumulation batch 0 of rank 1" for row in (0, 1)]


def test_past_the_limit_all_ranks_stop_with_one_checkpoint(ranks):
    (first, second), folder, _ = ranks
    assert first["limit"] == second["limit"]
    assert "checkpoint-3 holds the weights after step 2" in first["limit"]
    assert {path.name for path in (folder / "limit" / "layer" / "checkpoint-3").glob("rng_state_*")} == {
        "rng_state_0.pth",
        "rng_state_1.pth",
    }


@pytest.mark.parametrize("name", ZERO)
def test_zero_2_skips_in_its_engine(ranks, name):
    (first, second), _, _ = ranks
    assert [record["step"] for record in first[name]["skipped"]] == [BAD_STEP]
    assert same(first[name]["weights"], second[name]["weights"])
    reference = first[f"{name.replace(', zero', '')}, reference"]["weights"]
    for weight, expected in reference.items():
        torch.testing.assert_close(first[name]["weights"][weight], expected, rtol=1e-4, atol=1e-6)


def test_what_zero_3_leaves_behind_the_last_weight_of_a_part_is_no_weight(ranks):
    """It ended a run at its first checkpoint, which was then not written, where that memory held no number."""
    (first, second), _, _ = ranks
    assert first["padding"] == {"spoiled": 0, "told": "", "is_saved": True}
    assert second["padding"] == {"spoiled": STEPS, "told": "", "is_saved": True}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
