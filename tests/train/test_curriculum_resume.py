"""A run with a curriculum that was interrupted at any step and resumed is the run that was not."""

from __future__ import annotations

import json
import shutil

import numpy
import pytest

from scu_trainer.errors import CheckpointError
from scu_trainer.run_files import read_rows
from scu_trainer.settings import CurriculumSettings, MemorySettings
from scu_trainer.train.checkpoints.format import MANIFEST
from scu_trainer.train.loops.curriculum import STATE_FILE
from tests.tiny import UnevenRows, gpt2, same, weights_of
from tests.train.curricula import checkpoints, curriculum_run

METHODS = ["none", "token_budget", "noise_guard", "acmds", "infobatch", "token_budget+noise_guard+infobatch"]
LENGTH = {"num_train_epochs": 4, "lr_scheduler_type": "linear"}
SAVED = {**LENGTH, "save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
FILES = ("curriculum.json", "suspects.jsonl")


def settings(name: str) -> CurriculumSettings:
    return CurriculumSettings(name, length_warmup_start=8, noise_guard_readmit_fraction=0.3)


def run(folder, name, seed=0, **changes):
    """Dropout: a resumed run must draw the same random numbers as well. Three steps per full epoch."""
    model = gpt2(seed=seed, resid_pdrop=0.1)
    return curriculum_run(folder, settings(name), model=model, data=UnevenRows(11), **{**SAVED, **changes})


def statistics(folder) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()}


def assert_same_run(resumed, whole) -> None:
    assert same(weights_of(resumed.model), weights_of(whole.model))
    assert resumed.state.global_step == whole.state.global_step == whole.state.max_steps == resumed.state.max_steps
    for name, array in whole.difficulty.state_dict().items():
        numpy.testing.assert_array_equal(resumed.difficulty.state_dict()[name], array, err_msg=name)
    assert resumed.curriculum.figures()["curriculum"] == whole.curriculum.figures()["curriculum"]
    assert resumed.lr_scheduler.get_last_lr() == whole.lr_scheduler.get_last_lr()


@pytest.mark.parametrize("name", [*METHODS, "length_warmup"])
def test_resumed_from_every_step_is_uninterrupted_bit_for_bit(tmp_path, name):
    whole = run(tmp_path, name)
    expected = statistics(tmp_path)
    assert [row["epoch"] for row in read_rows(tmp_path / "curriculum.json")] == [1, 2, 3, 4]
    steps = checkpoints(tmp_path)
    assert len(steps) == whole.state.global_step - 1 >= 6
    for checkpoint in steps:
        resumed = run(tmp_path, name, seed=5, resume=checkpoint, save_strategy="no")
        assert_same_run(resumed, whole)
        assert statistics(tmp_path) == expected, f"{checkpoint.name}: rows are missing, doubled or other ones"


def logged_of_epochs(trainer) -> list[tuple[int, dict[str, float]]]:
    rows = [
        (row["step"], {key: row[key] for key in row if key.startswith("curriculum/")})
        for row in trainer.state.log_history
    ]
    return [(step, found) for step, found in rows if found]


def test_statistics_that_were_not_logged_yet_are_logged_after_a_resume(tmp_path):
    """Epochs end at steps 3, 6, ... and every second step is logged: a checkpoint lies between."""
    whole = run(tmp_path, "noise_guard", logging_steps=2)
    expected = logged_of_epochs(whole)
    assert [step for step, _ in expected][:2] == [4, 8] and len(expected) == 4
    for checkpoint in checkpoints(tmp_path):
        resumed = run(tmp_path, "noise_guard", seed=5, resume=checkpoint, save_strategy="no", logging_steps=2)
        assert logged_of_epochs(resumed) == expected, checkpoint.name


@pytest.mark.parametrize(
    "changes",
    [
        {"memory": MemorySettings()},
        {"memory": MemorySettings(token_cap=16, chunked_loss="always")},
        {"max_steps": 13},
        {"num_train_epochs": 4.5},
        {"dataloader_num_workers": 2},
    ],
    ids=["memory", "chunks", "max_steps", "part of an epoch", "workers"],
)
def test_other_ways_to_train_resume_as_well(tmp_path, changes):
    name = METHODS[-1]
    whole = run(tmp_path, name, **changes)
    expected = statistics(tmp_path)
    for checkpoint in checkpoints(tmp_path)[3::3]:
        assert_same_run(run(tmp_path, name, seed=5, resume=checkpoint, **{**changes, "save_strategy": "no"}), whole)
        assert statistics(tmp_path) == expected


@pytest.mark.parametrize("name", ["none", "infobatch"])
def test_saved_after_an_epoch_its_row_is_there_once(tmp_path, name):
    """``save_strategy: epoch`` saves when the row is written already, ``steps`` when it is not."""
    whole = run(tmp_path, name, save_strategy="epoch")
    expected = statistics(tmp_path)
    for checkpoint in checkpoints(tmp_path):
        assert_same_run(run(tmp_path, name, seed=5, resume=checkpoint, save_strategy="no"), whole)
        assert statistics(tmp_path) == expected


def test_into_another_directory_the_statistics_go_on_with_the_epoch_that_was_begun(tmp_path):
    run(tmp_path / "first", "infobatch")
    rows = read_rows(tmp_path / "first" / "curriculum.json")
    middle_of_third = rows[1]["step"] + 1
    checkpoint = tmp_path / "first" / f"checkpoint-{middle_of_third}"
    run(tmp_path / "second", "infobatch", resume=checkpoint, save_strategy="no")
    assert read_rows(tmp_path / "second" / "curriculum.json") == rows[2:]


# -- what is not as it was ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run whose third epoch has a checkpoint after its first step."""
    folder = tmp_path_factory.mktemp("begun")
    trainer = run(folder, "infobatch")
    rows = read_rows(folder / "curriculum.json")
    return trainer, folder / f"checkpoint-{rows[1]['step'] + 1}", rows


def resumed(begun, folder, **changes):
    options = {"seed": 5, "resume": begun[1], "save_strategy": "no", **changes}
    return run(folder, options.pop("name", "infobatch"), **options)


@pytest.mark.parametrize("rows", [1, 3])
def test_other_batches_finish_the_epoch_with_every_row_once(begun, tmp_path, caplog, rows):
    first, _, statistics = begun
    later = resumed(begun, tmp_path, per_device_train_batch_size=rows)
    plan = first.plans[2]
    seen = first.rows_of(2)[:4]
    assert sorted(seen + later.rows_of(2)) == sorted(plan.batches.order.tolist())
    assert later.plans[2].batches.sizes.max() <= rows
    assert f"written with other settings (rows_per_batch 2 -> {rows}): epoch 3 ends as it was planned" in caplog.text
    assert f"the {plan.rows - 4} rows that epoch 3 has not used yet are divided into new micro-batches" in caplog.text
    assert later.difficulty.observations.sum() >= first.difficulty.observations.sum() - 11
    row = read_rows(tmp_path / "curriculum.json")[0]
    assert (row["epoch"], row["rows"], row["seen"]) == (3, plan.rows, plan.rows), "both parts of the epoch count"
    assert row["real_tokens"] == statistics[2]["real_tokens"]
    assert later.lr_scheduler.get_last_lr() == pytest.approx([0.0, 0.0], abs=1e-12)
    assert later.state.global_step == later.state.max_steps


def test_a_number_of_epochs_that_was_computed_is_said_in_short(begun, tmp_path, caplog):
    resumed(begun, tmp_path, name="none", max_steps=20)
    assert "epochs 4.0 -> 6.66667): epoch 3 ends" in caplog.text


def test_another_curriculum_finishes_the_epoch_and_plans_the_next_its_own_way(begun, tmp_path, caplog):
    later = resumed(begun, tmp_path, name="none")
    assert sorted(begun[0].rows_of(2)[:4] + later.rows_of(2)) == sorted(begun[0].plans[2].batches.order.tolist())
    assert later.plans[3].rows == 11 and "other settings (curriculum infobatch -> none): epoch 3 ends" in caplog.text


def test_another_accumulation_finishes_the_epoch(begun, tmp_path, caplog):
    later = resumed(begun, tmp_path, gradient_accumulation_steps=1)
    assert begun[0].rows_of(2)[:4] + later.rows_of(2) == begun[0].plans[2].batches.order.tolist()
    assert "rows that epoch 3 has not used yet are divided into new micro-batches; no row is lost" in caplog.text
    assert later.lr_scheduler.get_last_lr() == pytest.approx([0.0, 0.0], abs=1e-12)


@pytest.mark.parametrize("data", [UnevenRows(12), UnevenRows(11, length=15)], ids=["more rows", "other lengths"])
def test_other_data_are_refused(begun, tmp_path, data):
    options = {**SAVED, "resume": begun[1], "model": gpt2(), "data": data}
    with pytest.raises(CheckpointError, match=f"written with 11 training rows, now there are {len(data)}, or their"):
        curriculum_run(tmp_path, settings("infobatch"), **options)


def test_other_rows_of_the_same_lengths_are_refused(begun, tmp_path):
    options = {**SAVED, "resume": begun[1], "model": gpt2(), "data": UnevenRows(11, seed=3)}
    with pytest.raises(CheckpointError, match="now there are 11, with other content"):
        curriculum_run(tmp_path, settings("infobatch"), **options)


def test_none_goes_on_from_a_checkpoint_without_a_curriculum(begun, tmp_path, caplog):
    bare = tmp_path / begun[1].name
    shutil.copytree(begun[1], bare)
    (bare / STATE_FILE).unlink()
    (bare / MANIFEST).unlink()
    later = run(tmp_path, "none", resume=bare, save_strategy="no")
    assert "losses of samples are tracked from here on" in caplog.text
    assert later.state.global_step == later.state.max_steps == 12


def test_a_checkpoint_without_a_curriculum_is_refused(begun, tmp_path):
    bare = tmp_path / begun[1].name
    shutil.copytree(begun[1], bare)
    (bare / STATE_FILE).unlink()
    (bare / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=f"holds no {STATE_FILE}: it was written without a curriculum"):
        run(tmp_path, "infobatch", resume=bare)


def test_the_state_is_plain_json(begun):
    state = json.loads((begun[1] / STATE_FILE).read_text())
    assert (state["epoch"], state["steps_done"], state["samples"], state["processes"]) == (2, 1, 11, 1)
