"""acmds follows memory within an epoch: a window of samples after which the rest is chosen again."""

from __future__ import annotations

import numpy
import pytest

from scu_trainer.errors import SettingsError
from scu_trainer.run_files import read_rows
from scu_trainer.settings import CurriculumSettings, MemorySettings
from scu_trainer.train.step.recovery.memory import Gauge, MemoryReading
from tests.tiny import UnevenRows, gpt2, same, weights_of
from tests.train.curricula import checkpoints, curriculum_run

ACMDS = CurriculumSettings("acmds", acmds_fraction=0.5, difficulty_window=8, difficulty_stale_epochs=9)
ROWS, EPOCHS = 96, 3


class Neighbour(Gauge):
    """Memory of 2**40 bytes that somebody else fills from step ``from_step`` on."""

    def __init__(self, from_step: int) -> None:
        self.from_step, self.trainer = from_step, None

    def reset(self, exact: bool = False) -> None:
        pass

    def read(self) -> MemoryReading:
        is_full = self.trainer is not None and self.trainer.state.global_step >= self.from_step
        return MemoryReading(2**40, int(2**40 * (0.9 if is_full else 0.01)), 0, "fake")

    def attach(self, trainer) -> None:
        self.trainer = trainer


def run(folder, from_step=10**9, curriculum=ACMDS, seed=0, rows=ROWS, **changes):
    gauge = Neighbour(from_step)
    options = {"num_train_epochs": EPOCHS, "lr_scheduler_type": "linear", "save_strategy": "no"}
    options = {"memory": MemorySettings(), **options, **changes}
    return curriculum_run(
        folder,
        curriculum,
        model=gpt2(seed=seed, resid_pdrop=0.1),
        data=UnevenRows(rows),
        memory_gauge=gauge,
        prepare=gauge.attach,
        **options,
    )


def rows_seen(trainer, epoch: int) -> list[int]:
    rows = trainer.rows_of(epoch)
    assert len(set(rows)) == len(rows) == len(trainer.plans[epoch].batches.order)
    return rows


def test_memory_that_becomes_short_within_an_epoch_moves_its_rest_to_easier_rows(tmp_path):
    begins = 24  # steps of four rows: all rows in the first epoch
    padded = MemorySettings(padding_free=False)  # dropout draws for padding, too: the scores below are of this draw
    free = run(tmp_path / "free", memory=padded)
    short = run(tmp_path / "short", from_step=begins + 1, memory=padded)
    assert rows_seen(free, 0) == rows_seen(short, 0)
    one, other = rows_seen(free, 1), rows_seen(short, 1)
    # A window of two steps is measured at its end, and holds from the end of the next one on.
    assert one[:16] == other[:16] and set(one[16:]) != set(other[16:])
    scores = free.difficulty.scores
    assert scores[other[16:]].mean() < scores[one[16:]].mean()
    row = read_rows(tmp_path / "short" / "curriculum.json")[1]
    assert row["adjustments"] > 0 and row["rows"] == len(other) and row["skipped"]["acmds"] == ROWS - len(other)


def test_a_window_longer_than_the_epoch_leaves_the_plan(tmp_path):
    trainer = run(tmp_path, from_step=25, curriculum=CurriculumSettings("acmds", acmds_fraction=0.5))
    for epoch, plan in trainer.plans.items():  # in a step, rows come in the order in which they fit
        assert sorted(trainer.rows_of(epoch)) == sorted(plan.batches.order.tolist())
    assert [row["adjustments"] for row in read_rows(tmp_path / "curriculum.json")] == [0, 0, 0]


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_anywhere_it_is_the_same_run(tmp_path, workers):
    changes = {"dataloader_num_workers": workers, "save_strategy": "steps", "save_steps": 3, "save_total_limit": None}
    whole = run(tmp_path, 15, rows=ROWS // 2, **changes)
    expected = (tmp_path / "curriculum.json").read_bytes()
    assert any(row["adjustments"] for row in read_rows(tmp_path / "curriculum.json"))
    for checkpoint in checkpoints(tmp_path)[:: 3 if workers else 1]:
        resumed = run(tmp_path, 15, seed=5, rows=ROWS // 2, resume=checkpoint, dataloader_num_workers=workers)
        assert same(weights_of(resumed.model), weights_of(whole.model)), checkpoint.name
        for name, array in whole.difficulty.state_dict().items():
            numpy.testing.assert_array_equal(resumed.difficulty.state_dict()[name], array, err_msg=name)
        assert (tmp_path / "curriculum.json").read_bytes() == expected, checkpoint.name


@pytest.mark.parametrize("name", ["difficulty_window", "difficulty_stale_epochs"])
def test_the_unit_is_named(name):
    with pytest.raises(SettingsError, match="samples" if name == "difficulty_window" else "epochs"):
        CurriculumSettings("acmds", **{name: 0})


def test_a_window_that_is_no_step_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="difficulty_window is 3 samples, but an optimizer step takes 4; give 4 or"):
        run(tmp_path, curriculum=CurriculumSettings("acmds", difficulty_window=3))
