"""Trainings with a curriculum: without one the stock Trainer, with one exactly the planned rows and steps."""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer

from scu_trainer.errors import DataError
from scu_trainer.run_files import RunStatus, read_json
from scu_trainer.settings import CurriculumSettings, MemorySettings
from scu_trainer.train.run_directory.layout import RunStatusCallback
from scu_trainer.train.trainer import SCUTrainer
from tests.tiny import UnevenRows, arguments, gpt2, pad, same, weights_of
from tests.train.curricula import EPOCHS, curriculum_run
from tests.train.stepwise import losses_of

METHODS = ["none", "token_budget", "noise_guard", "acmds", "infobatch", "length_warmup"]
TOGETHER = "token_budget+noise_guard+infobatch"

LENGTHS = {
    "epochs": {"num_train_epochs": 2},
    "part of an epoch": {"num_train_epochs": 2.5},
    "steps": {"max_steps": 7, "num_train_epochs": 1},
    "one batch per step": {"gradient_accumulation_steps": 1, "num_train_epochs": 2},
}
LOGGED = {"logging_steps": 1, "lr_scheduler_type": "linear", "warmup_steps": 2}


def with_dropout():
    return gpt2(resid_pdrop=0.2)


def outcome(trainer) -> tuple:
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    return losses_of(trainer), rates, trainer.state.global_step, trainer.state.epoch


@pytest.mark.parametrize("length", LENGTHS)
def test_without_a_curriculum_training_is_the_stock_trainers_bit_for_bit(tmp_path, length):
    """Dropout shows whether random numbers are drawn elsewhere; 13 rows leave a short last batch and step."""
    changes = {**EPOCHS, **LOGGED, **LENGTHS[length]}

    def trained(kind, **own):
        data = {"train_dataset": UnevenRows(13), "data_collator": pad}
        trainer = kind(with_dropout(), arguments(tmp_path, **changes), **data, **own)
        trainer.train()
        return trainer

    stock = trained(Trainer)
    for curriculum in (None, CurriculumSettings()):
        ours = trained(SCUTrainer, curriculum=curriculum)
        assert outcome(ours) == outcome(stock)
        assert same(weights_of(ours.model), weights_of(stock.model))
    assert ours.state.max_steps == stock.state.max_steps
    assert not ours.difficulty.counts(0)["unseen"]


@pytest.mark.parametrize("memory", [MemorySettings(), MemorySettings(token_cap=16)], ids=["whole", "chunks"])
def test_with_memory_control_too(tmp_path, memory):
    runs = [
        curriculum_run(tmp_path, curriculum, model=with_dropout(), data=UnevenRows(13), memory=memory, **LOGGED)
        for curriculum in (None, "none")
    ]
    assert outcome(runs[0]) == outcome(runs[1])
    assert same(weights_of(runs[0].model), weights_of(runs[1].model))


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of five epochs of every method."""
    folder, found = tmp_path_factory.mktemp("runs"), {}
    for name in [*METHODS, TOGETHER]:
        names: list[set] = []

        def prepare(trainer, names=names):
            trainer.model.register_forward_pre_hook(lambda *call: names.append(set(call[2])), with_kwargs=True)

        settings = CurriculumSettings(name, length_warmup_start=8)
        changes = {"num_train_epochs": 5, "lr_scheduler_type": "linear", "logging_steps": 1}
        trainer = curriculum_run(folder / name, settings, data=UnevenRows(21), prepare=prepare, **changes)
        found[name] = trainer, names
    return found


@pytest.mark.parametrize("name", [*METHODS, TOGETHER])
def test_the_loss_gets_the_planned_rows_in_their_order(runs, name):
    trainer, names = runs[name]
    assert list(trainer.plans) == [0, 1, 2, 3, 4]
    for epoch, plan in trainer.plans.items():
        assert trainer.rows_of(epoch) == plan.batches.order.tolist()
        batches = [rows for number, rows in trainer.delivered if number == epoch]
        assert [len(rows) for rows in batches] == plan.batches.sizes.tolist()
    assert names and not any("sample_index" in given for given in names)


@pytest.mark.parametrize("name", ["acmds", "infobatch", TOGETHER])
def test_later_epochs_see_fewer_rows(runs, name):
    trainer, _ = runs[name]
    assert trainer.plans[0].rows == 21 > trainer.plans[1].rows


def test_memory_control_trains_on_the_planned_rows_too(tmp_path):
    trainer = curriculum_run(tmp_path, "infobatch", num_train_epochs=4, memory=MemorySettings(token_cap=16))
    seen = sum((plan.rows for plan in trainer.plans.values()), 0)
    assert trainer.difficulty.observations.sum() == seen < 4 * 12
    for epoch, plan in list(trainer.plans.items())[1:]:  # in the first steps the model is asked about its batches
        assert sorted(trainer.rows_of(epoch)) == sorted(plan.batches.order.tolist())


@pytest.mark.parametrize(
    ("collator", "expected"),
    [
        (lambda rows: {name: tensor[:1] for name, tensor in pad(rows).items()}, "makes 1 rows of 2 samples"),
        (lambda rows: tuple(pad(rows).values()), "returns a tuple"),
    ],
)
def test_collators_without_a_row_per_sample_are_refused(tmp_path, collator, expected):
    with pytest.raises(DataError, match=expected):
        curriculum_run(tmp_path, "none", data_collator=collator)


# -- how long a run is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*METHODS, TOGETHER])
def test_steps_are_those_that_the_plans_have(runs, name):
    trainer, _ = runs[name]
    state = trainer.state
    assert state.global_step == state.max_steps == len(trainer.planned_steps())
    assert state.global_step < 5 * 6 or trainer.plans[1].rows == 21
    assert state.epoch == 5


@pytest.mark.parametrize("name", [*METHODS, TOGETHER])
def test_the_learning_rate_follows_the_epochs_down_to_zero(runs, name):
    trainer, _ = runs[name]
    logs = [entry for entry in trainer.state.log_history if "learning_rate" in entry]
    start = 1e-2
    assert logs[0]["learning_rate"] == start
    assert trainer.lr_scheduler.get_last_lr() == pytest.approx([0.0, 0.0], abs=1e-12)
    done = 0
    for epoch, plan in trainer.plans.items():
        steps = -(-plan.micro_batches // 2)
        for number in range(steps):
            expected = start * (1 - (epoch + number / steps) / 5)
            assert logs[done + number]["learning_rate"] == pytest.approx(expected, rel=1e-6)
        done += steps


def test_a_part_of_a_short_epoch_is_a_part_of_its_own_steps(tmp_path):
    settings = CurriculumSettings("acmds", acmds_fraction=0.4, difficulty_stale_epochs=9)
    changes = {"num_train_epochs": 2.5, "lr_scheduler_type": "linear", "gradient_accumulation_steps": 1}
    trainer = curriculum_run(tmp_path, settings, data=UnevenRows(24), **changes)
    steps = [plan.micro_batches for plan in trainer.plans.values()]
    assert steps[0] == 12 and steps[1] < 8
    assert trainer.state.global_step == trainer.state.max_steps == steps[0] + steps[1] + -(-steps[2] // 2)


def test_max_steps_go_on_past_the_epochs_that_uniform_would_take(tmp_path):
    settings = CurriculumSettings("acmds", acmds_fraction=0.4, difficulty_stale_epochs=9)
    trainer = curriculum_run(
        tmp_path, settings, data=UnevenRows(24), max_steps=15, lr_scheduler_type="linear", logging_steps=1
    )
    assert trainer.state.global_step == trainer.state.max_steps == 15
    assert len(trainer.plans) > 3, "uniform takes 2.5 epochs of 6 steps"
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([1e-2 * (1 - step / 15) for step in range(15)])


def test_run_json_counts_what_will_run(tmp_path):
    settings = CurriculumSettings("acmds", acmds_fraction=0.5, difficulty_stale_epochs=9)
    status, seen = RunStatus(tmp_path / "run.json"), []
    update = status.update

    def noted(**fields):
        seen.append(fields)
        update(**fields)

    status.update = noted
    trainer = curriculum_run(tmp_path, settings, data=UnevenRows(24), callbacks=[RunStatusCallback(status)])
    steps = [fields for fields in seen if "eta_s" in fields]
    assert [fields["step"] for fields in steps] == list(range(1, trainer.state.global_step + 1))
    assert steps[0]["max_steps"] == 18, "three times the steps of the first epoch"
    assert trainer.state.global_step < 18
    assert steps[-1]["max_steps"] == trainer.state.global_step and steps[-1]["eta_s"] == 0
    assert all(fields["eta_s"] > 0 for fields in steps[:-1])
    assert read_json(tmp_path / "run.json")["max_steps"] in {fields["max_steps"] for fields in steps}


def test_a_second_training_begins_its_statistics_again(tmp_path):
    trainer = curriculum_run(tmp_path, "infobatch", num_train_epochs=4)
    first = trainer.difficulty.observations.copy()
    trainer.train()
    assert trainer.difficulty.observations.sum() <= 4 * 12 and first.sum() <= 4 * 12
    assert torch.isfinite(torch.from_numpy(trainer.difficulty.scores)).all()
    assert [row["epoch"] for row in read_json(tmp_path / "curriculum.json")] == [1, 2, 3, 4]
    assert trainer.curriculum.figures()["curriculum"]["rows"] == trainer.difficulty.observations.sum()
