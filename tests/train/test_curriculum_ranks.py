"""A curriculum on two ranks: the plan dealt out, the steps of one rank, resume of every step, rows without a loss.

This file is also the program that two processes execute.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import numpy
import pytest
import torch

from scu_trainer.run_files import read_rows
from scu_trainer.settings import CurriculumSettings, MemorySettings
from tests import processes
from tests.tiny import UnevenRows, llama, same, weights_of
from tests.train.curricula import SGD, PoisonedRows, checkpoints, curriculum_run, poisoned
from tests.train.test_loss_path import CHUNKED, by_tokens

ROOT = Path(__file__).resolve().parents[2]

TOGETHER = "token_budget+noise_guard+infobatch"
IN_WINDOWS = CurriculumSettings("acmds", acmds_fraction=0.5, difficulty_window=4)
RESUMED = {
    "none": ("none", {}),
    "acmds": ("acmds", {}),
    "together": (TOGETHER, {}),
    "together, memory, workers": (TOGETHER, {"memory": MemorySettings(), "dataloader_num_workers": 1}),
}
WINDOWS = {"windows": (IN_WINDOWS, {"data": UnevenRows(40), "gradient_accumulation_steps": 1, "num_train_epochs": 2})}
LENGTH = {"num_train_epochs": 4, "ddp_timeout": 60, "per_device_train_batch_size": 2}
SAVED = {**LENGTH, "lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": 1}
EQUAL = {**LENGTH, **SGD, "gradient_accumulation_steps": 1}
# One batch per step: with more, DDP would not speak to the other rank in every forward.
BAD = {**LENGTH, **SGD, "num_train_epochs": 2, "gradient_accumulation_steps": 1}
PATHS = {"stock": None, "memory": MemorySettings(token_cap=16), "chunked": CHUNKED}
BAD_ROWS = [2, 9]


def outcome(trainer) -> dict:
    return {
        "weights": weights_of(trainer.model),
        "difficulty": {name: torch.from_numpy(array) for name, array in trainer.difficulty.state_dict().items()},
        "rows": [trainer.rows_of(epoch) for epoch in trainer.plans],
        "planned": [plan.batches.order.tolist() for plan in trainer.plans.values()],
        "batches": [(plan.weights, list(plan.batches)) for plan in trainer.plans.values()],
        "steps": (trainer.state.global_step, trainer.state.max_steps),
    }


# -- what each of two processes does -----------------------------------------------------------------------------------


def main(folder: Path) -> None:
    gc.freeze()
    found = {}
    for name, (methods, changes) in {**RESUMED, **WINDOWS}.items():
        every = 1 if name == "together" else 3
        found[name] = resume_from(folder / name, methods, every, **changes)
    found["equal"] = outcome(curriculum_run(folder / "equal", "infobatch", **EQUAL))
    for name, memory in PATHS.items():
        data, model = PoisonedRows(12, BAD_ROWS), poisoned(llama(layers=1))
        found[name] = outcome(
            curriculum_run(folder / f"bad {name}", "none", data=data, model=model, memory=memory, **BAD)
        )
    found["one"] = outcome(curriculum_run(folder / "one", "token_budget", data=UnevenRows(1), **LENGTH))
    torch.save(found, folder / f"rank{os.environ['RANK']}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def resume_from(folder: Path, methods: str, every: int, **changes) -> dict:
    whole = outcome(curriculum_run(folder, methods, **{**SAVED, **changes}))
    torch.distributed.barrier()
    again = {}
    for checkpoint in checkpoints(folder)[::every]:
        model, where = llama(seed=5, layers=1), folder / f"from {checkpoint.name}"
        options = {**SAVED, **changes, "save_strategy": "no"}
        again[checkpoint.name] = outcome(curriculum_run(where, methods, model=model, resume=checkpoint, **options))
    return {"whole": whole, "again": again}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two_ranks")


@pytest.fixture(scope="module")
def two_ranks(folder):
    done = processes.run([__file__, folder], ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    (folder / "said.txt").write_text(done.stderr)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]


# -- one plan for both -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RESUMED)
def test_ranks_plan_the_same_epochs_and_share_their_rows(two_ranks, name):
    first, second = (rank[name]["whole"] for rank in two_ranks)
    assert first["planned"] == second["planned"] and len(first["planned"]) == 4
    for epoch, planned in enumerate(first["planned"]):
        seen = [set(rank["rows"][epoch]) for rank in (first, second)]
        assert not seen[0] & seen[1] and sorted(seen[0] | seen[1]) == sorted(planned)
    assert same(first["weights"], second["weights"])
    for key in first["difficulty"]:
        numpy.testing.assert_array_equal(first["difficulty"][key], second["difficulty"][key])


def test_ranks_choose_the_rest_of_an_epoch_together(two_ranks, folder):
    first, second = (rank["windows"]["whole"] for rank in two_ranks)
    seen, other = first["rows"][1], second["rows"][1]
    assert len(seen) == len(other) and len({*seen, *other}) == len(seen) + len(other) == len(first["planned"][1])
    assert {*seen, *other} != set(first["planned"][1]), "nothing was chosen again"
    assert read_rows(folder / "windows" / "curriculum.json")[1]["adjustments"] > 0
    assert same(first["weights"], second["weights"])


@pytest.mark.parametrize("name", [*RESUMED, *WINDOWS])
def test_resumed_from_every_step_is_uninterrupted_bit_for_bit(two_ranks, folder, name):
    rows = read_rows(folder / name / "curriculum.json")
    for rank in two_ranks:
        whole, again = rank[name]["whole"], rank[name]["again"]
        assert len(again) >= (6 if name == "together" else 2)
        for checkpoint, resumed in again.items():
            assert same(resumed["weights"], whole["weights"]), checkpoint
            assert resumed["steps"] == whole["steps"]
            for key, array in whole["difficulty"].items():
                numpy.testing.assert_array_equal(resumed["difficulty"][key], array)
            ours = read_rows(folder / name / f"from {checkpoint}" / "curriculum.json")
            assert ours and ours == rows[-len(ours) :]


def test_two_ranks_take_the_steps_of_one(two_ranks):
    """By hand: plain gradient descent on the weighted sum over both ranks' rows, divided by all their tokens."""
    two, model, most = two_ranks[0]["equal"], llama(layers=1), 0.0
    for weights, batches in two["batches"]:
        factors = torch.ones(12) if weights is None else torch.from_numpy(weights)
        most = max(most, float(factors.max()))
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            model.zero_grad()
            by_tokens(model, UnevenRows(12), [first, second], factors).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= SGD["learning_rate"] * parameter.grad
    assert most > 1, "no row counted more than another"
    torch.testing.assert_close(two["weights"], weights_of(model), rtol=1e-3, atol=1e-5)


def test_one_rank_finishes_what_two_began(two_ranks, folder, tmp_path, caplog):
    """Every row of the epoch once in total; the change is said."""
    began = two_ranks[0]["none"]["whole"]
    checkpoint = folder / "none" / "checkpoint-3"
    trainer = curriculum_run(
        tmp_path, "none", model=llama(seed=5, layers=1), resume=checkpoint, **{**SAVED, "save_strategy": "no"}
    )
    steps_per_epoch = 2
    seen = [row for rank in two_ranks for row in rank["none"]["whole"]["rows"][1][: 2 * 2]]
    assert len(seen) == 12 - len(trainer.rows_of(1)) == 8 and began["steps"][0] == 4 * steps_per_epoch
    assert sorted(seen + trainer.rows_of(1)) == list(range(12))
    assert (
        "processes 2 -> 1" in caplog.text
        and "the 4 rows that epoch 2 has not used yet are divided into new micro-batches" in caplog.text
    )
    assert trainer.difficulty.observations.tolist() == [4] * 12


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_rows_without_a_finite_loss_are_set_aside_by_both(two_ranks, folder, path):
    for rank in two_ranks:
        assert all(torch.isfinite(weight).all() for weight in rank[path]["weights"].values())
        assert rank[path]["difficulty"]["quarantined"].nonzero().flatten().tolist() == BAD_ROWS
        assert rank[path]["difficulty"]["observations"].tolist() == [2 * (row not in BAD_ROWS) for row in range(12)]
        assert not set(rank[path]["planned"][1]) & set(BAD_ROWS)
    assert same(two_ranks[0][path]["weights"], two_ranks[1][path]["weights"])
    said = (folder / "said.txt").read_text()
    assert all(f"the loss of sample {row} is not a finite number" in said for row in BAD_ROWS)


@pytest.mark.parametrize("path", PATHS)
def test_what_is_left_trains_as_on_one_rank(two_ranks, tmp_path, path):
    data, model = PoisonedRows(12, BAD_ROWS), poisoned(llama(layers=1))
    one = curriculum_run(tmp_path, "none", data=data, model=model, **{**BAD, "gradient_accumulation_steps": 2})
    torch.testing.assert_close(two_ranks[0][path]["weights"], weights_of(one.model), rtol=1e-4, atol=1e-6)


def test_more_ranks_than_samples(two_ranks):
    for rank in two_ranks:
        assert rank["one"]["steps"] == (4, 4)
        assert rank["one"]["rows"] == [[0]] * 4
        assert rank["one"]["difficulty"]["observations"].tolist() == [8], "each of its uses gives a loss"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
