"""Two processes under DDP are one run: same weights and lambda on both, same figures as in one process.

This file is also the program that the two processes execute.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertForSequenceClassification

from scu_trainer.run_files import read_rows
from scu_trainer.settings import MemorySettings
from scu_trainer.settings import RegularizationSettings as Settings
from scu_trainer.settings.efficiency import EfficiencySettings
from scu_trainer.train.trainer import SCUTrainer
from tests import processes
from tests.tiny import Rows, UnevenRows, bert, labelled, llama, pad, same, trained, weights_of
from tests.train.test_resume import StopAt

ROOT = Path(__file__).resolve().parents[2]
ROWS_PER_STEP = 8

# SGD: Adam would blow the last bits of tiny gradients up to whole steps.
COMMON = {"optim": "sgd", "learning_rate": 0.3, "gradient_accumulation_steps": 2, "max_steps": 6, "data_collator": pad}

CASES = {
    "model": (Settings(target_s=0.02, sigma=0.03), {}),
    "sparse": (Settings(target_s=0.02, sigma=0.03, control_frequency=2), {}),
    "original": (Settings(law="original", actuator="penalty", target_s=0.02, sigma=0.1, lambda_init=5.0), {}),
    "local counts": (Settings(target_s=0.02, sigma=0.03), {"average_tokens_across_devices": False}),
}


def run_case(name: str, folder: Path, processes: int, **changes):
    settings, own = CASES[name]
    rows = ROWS_PER_STEP // COMMON["gradient_accumulation_steps"] // processes
    data = UnevenRows(ROWS_PER_STEP * COMMON["max_steps"])
    return trained(llama(), folder, settings, data, per_device_train_batch_size=rows, **COMMON, **own, **changes)


def main(folder: Path) -> None:
    """What each of two processes does: every case, and one of them once more with an interruption."""
    runs = {name: run_case(name, folder / name, processes=2) for name in CASES}
    # Step 3 lies between two decisions: what both ranks measured must be in the checkpoint that one of them wrote.
    run_case("sparse", folder / "resumed", processes=2, callbacks=[StopAt(3)])
    runs["resumed"] = run_case("sparse", folder / "resumed", processes=2, resume=True)
    outcome = {
        name: {
            "weights": weights_of(run.model),
            "state": asdict(run.regularizer.state),
            "tokens_n": run.regularizer.progress.tokens_n,
            "world": run.accelerator.num_processes,
        }
        for name, run in runs.items()
    }
    changes = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    assert trained(llama(), folder / "slow", kind=SlowRank, **changes).is_stock
    trained(llama(), folder / "machines" / os.environ["RANK"], **changes)
    for name, kind in LOSSES.items():
        classes(folder / name, 2, kind)
    drawn = {"max_steps": 12, "accelerator_config": {"use_seedable_sampler": False}}  # an epoch has 8 steps
    for callbacks, resume in (([StopAt(10)], None), ([], True)):
        trained(llama(), folder / "drawn", efficiency=EfficiencySettings(ema_decay=0.9), resume=resume,
                callbacks=callbacks, per_device_train_batch_size=2, **drawn)  # fmt: skip
    blank = trained(llama(), folder / "blank", Settings(), BlankAtFirst(24), kind=Gathers, **{**COMMON, "max_steps": 3})
    outcome["blank"] = blank.state.global_step
    outcome["best"] = {name: best_of(folder / f"best {name}", efficiency) for name, efficiency in BEST.items()}
    torch.save(outcome, folder / f"rank{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


class BlankAtFirst(UnevenRows):
    """Of the first batch that the first rank gets nothing is learned, so that its loss of 0 tells nothing."""

    taken = 0

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        self.taken += 1
        is_blank = os.environ["RANK"] == "0" and self.taken <= 4
        return {**row, "labels": torch.full_like(row["labels"], -100)} if is_blank else row


class Gathers(SCUTrainer):
    """Its ranks wait for each other in each loss, so that all of them must ask for as many."""

    def compute_loss(self, *args, **kwargs):
        self.accelerator.gather_for_metrics(torch.ones(1))
        return super().compute_loss(*args, **kwargs)


class Multiplied(SCUTrainer):
    """Its loss is the stock one."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


class NotMultiplied(SCUTrainer):
    """Its loss never comes to the stock compute_loss, which would multiply it by the ranks."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Averaged(SCUTrainer):
    loss_is_scaled_for_ga = False


LOSSES = {"stock": SCUTrainer, "multiplied": Multiplied, "not multiplied": NotMultiplied, "averaged": Averaged}
SAID = {
    "stock": "adds up the mean losses of 4 batches (2 on each rank)",
    "multiplied": "adds up the mean losses of 4 batches (2 on each rank)",
    "not multiplied": "adds up the mean losses of 2 accumulation batches",
    "averaged": "adds up the mean losses of 2 batches (1 on each rank)",
}


def classes(folder: Path, processes: int, kind: type = SCUTrainer) -> dict:
    """What a step of a model is found to learn whose loss is a mean whatever num_items_in_batch is."""
    changes = {"memory": MemorySettings(), "gradient_accumulation_steps": 2, "data_collator": pad, "max_steps": 1}
    model, rows = bert(BertForSequenceClassification), 4 // processes
    changes |= {"per_device_train_batch_size": rows, "kind": kind}
    trained(model, folder / "classes", Settings(), labelled(8), **changes)
    return read_rows(folder / "classes" / "scu_history.json")[0]


BEST = {"stock": None, "average": EfficiencySettings(ema_decay=0.9)}


def best_of(folder: Path, efficiency: EfficiencySettings | None) -> dict[str, torch.Tensor]:
    """The weights that a training of three steps ends with whose first evaluation was the best."""
    every = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "step", "greater_is_better": False}
    numbers = iter(range(10))
    changes = {"compute_metrics": lambda _: {"step": next(numbers)}, "eval_dataset": Rows(4), **every, **best}
    run = trained(llama(), folder, efficiency=efficiency, learning_rate=0.01, **changes)
    assert Path(run.state.best_model_checkpoint) == folder / "checkpoint-1"
    return weights_of(run.model)


class SlowRank(SCUTrainer):
    """Its last rank writes its random state when the others have written theirs."""

    def _save_rng_state(self, output_dir: str) -> None:
        time.sleep(self.args.process_index)
        super()._save_rng_state(output_dir)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Outcomes of both ranks, and the folder that they wrote to."""
    folder = tmp_path_factory.mktemp("ranks")
    done = processes.run([__file__, folder], ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    (folder / "stderr").write_text(done.stderr)
    return [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)], folder


def assert_rows_agree(found: list[dict], expected: list[dict]) -> None:
    assert len(found) == len(expected) == COMMON["max_steps"]
    for one, other in zip(found, expected, strict=True):
        for name in ("data_bpt", "param_bpt", "s", "s_ema", "lambda", "integral", "tokens"):
            assert one[name] == pytest.approx(other[name], rel=1e-5), (one["step"], name)


def test_two_ranks_are_one_run(ranks, tmp_path):
    (first, second), folder = ranks
    assert {first[name]["world"] for name in (*CASES, "resumed")} == {2}
    for name in (*CASES, "resumed"):
        torch.testing.assert_close(first[name]["weights"], second[name]["weights"], rtol=0, atol=0)
        assert first[name]["state"] == second[name]["state"], name
        assert first[name]["tokens_n"] == second[name]["tokens_n"]
    torch.testing.assert_close(first["resumed"]["weights"], first["sparse"]["weights"], rtol=1e-6, atol=1e-8)
    for number in ("lam", "growth", "data_bpt_ema", "s_ema"):
        assert first["resumed"]["state"][number] == pytest.approx(first["sparse"]["state"][number], rel=1e-6), number

    for name in ("model", "original"):
        alone = run_case(name, tmp_path / name, processes=1)
        rows = read_rows(tmp_path / name / "scu_history.json")
        assert rows[-1]["lambda"] > 0
        assert_rows_agree(read_rows(folder / name / "scu_history.json"), rows)
        torch.testing.assert_close(first[name]["weights"], weights_of(alone.model), rtol=1e-4, atol=1e-6)

    # Tokens counted per rank weigh gradients otherwise, but before the first of them the loss is the same.
    one, two = (read_rows(path / "model" / "scu_history.json")[0] for path in (tmp_path, folder))
    local = read_rows(folder / "local counts" / "scu_history.json")[0]
    assert local["data_bpt"] == pytest.approx(one["data_bpt"], rel=1e-6)
    assert local["tokens"] == one["tokens"] == two["tokens"]
    assert first["local counts"]["tokens_n"] == first["model"]["tokens_n"]


def test_means_that_the_stock_loop_adds_up_over_ranks_are_averaged_and_named(ranks, tmp_path):
    expected = classes(tmp_path, processes=1)["data_bpt"]
    said = (ranks[1] / "stderr").read_text()
    for name in LOSSES:
        (found,) = read_rows(ranks[1] / name / "classes" / "scu_history.json")
        assert found["data_bpt"] == pytest.approx(expected, rel=1e-5), name
        assert SAID[name] in said
    assert (
        "To avoid it, set gradient_accumulation_steps: 1 with a larger batch (micro-batches keep its memory low) and "
        "average_tokens_across_devices: false"
    ) in said


def test_ranks_agree_on_what_the_loss_does_with_the_count(ranks):
    """One of them could not tell from its first batch. To ask again alone would wait for the others for good."""
    assert [one["blank"] for one in ranks[0]] == [3, 3]


def test_a_checkpoint_without_any_loop_waits_for_the_slowest_rank(ranks):
    folder = ranks[1] / "slow"
    assert [path.name for path in folder.glob("*checkpoint-*")] == ["checkpoint-1"]
    assert {path.name for path in folder.rglob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}


def test_an_order_that_several_ranks_draw_together_is_said_to_be_another_one_after_a_resume(ranks):
    """accelerate gives their sampler a generator of its own, which no checkpoint holds."""
    (told,) = [line for line in (ranks[1] / "stderr").read_text().splitlines() if "come in another order" in line]
    assert told.startswith("accelerator_config use_seedable_sampler: false: the rows of this epoch come in another")
    assert told.endswith("With several processes only accelerator_config use_seedable_sampler: true keeps the order")


@pytest.mark.parametrize("name", BEST)
def test_every_rank_ends_with_the_best_model(ranks, name):
    """What the ranks score in the end is what the first of them has saved."""
    (first, second), folder = ranks
    assert same(first["best"][name], second["best"][name])
    file = "ema.safetensors" if name == "average" else "model.safetensors"
    saved = load_file(folder / f"best {name}" / "checkpoint-1" / file)
    assert same({key: first["best"][name][key] for key in saved}, saved)


def test_machines_that_do_not_share_the_folder_of_checkpoints_are_told(ranks):
    told = [line for line in (ranks[1] / "stderr").read_text().splitlines() if "is without rng_state" in line]
    assert len(told) == 1 and told[0].startswith("checkpoint-1 is without rng_state_1.pth, which another process wrote")
    assert told[0].endswith("set output_dir to a folder that all machines share")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
