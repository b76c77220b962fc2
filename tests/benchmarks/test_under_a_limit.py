"""Under a memory limit: what the contenders really did, and the arithmetic of what is reported about it."""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from benchmarks.headline import splitting
from benchmarks.lib import limit_work
from benchmarks.studies import real_memory, under_a_limit
from benchmarks.studies.under_a_limit import AUTO_FIND, BY_HAND, JOB, OURS, OURS_FULL, QUICK, QUICK_SHARES
from scu_trainer.settings import MemorySettings
from scu_trainer.train.trainer import SCUTrainer
from tests import tiny

SHARE = QUICK_SHARES[0]


@pytest.fixture(scope="module")
def results():
    return under_a_limit.measured(QUICK, QUICK_SHARES, repeats=1)


def one(results, share, contender):
    (found,) = under_a_limit.of(results, share, contender)
    return found


def test_ours_does_the_due_work_under_a_limit_that_kills_the_configured_batch(results):
    assert "can't allocate memory" in one(results, SHARE, "stock")["error"]
    unlimited = one(results, None, "stock")
    for contender in (OURS.name, OURS_FULL.name):
        ours = one(results, SHARE, contender)
        assert ours["error"] is None
        assert ours["rows_trained_once"] == ours["rows_due"] == 16
        assert ours["steps_executed"] == ours["steps_reported"] == ours["steps_due"] == 2
        assert ours["rows_per_step"] == 8
        assert ours["loss_distance"] < 1e-5
        assert ours["held_out_bits"] == pytest.approx(unlimited["held_out_bits"], abs=1e-3)


def test_out_of_memory_is_what_the_memory_loop_counted(tmp_path):
    record = SimpleNamespace(steps=1, rows={}, rows_per_step=[], losses=[], starts=1)
    for memory, found in ((None, 1), (MemorySettings(), 3)):
        trainer = SCUTrainer(tiny.llama(), tiny.arguments(tmp_path), train_dataset=tiny.Rows(), memory=memory)
        if memory is not None:
            statistics = trainer.micro_batches.loop.statistics
            statistics.out_of_memory, statistics.real_tokens = 3, 1
        for counts in (
            limit_work._counted(trainer, record, JOB, "died"),
            real_memory._figures(trainer, record, 0, "died"),
        ):
            assert counts["out_of_memory"] == found
        assert splitting.statistics(trainer).get("out_of_memory") == (None if memory is None else 3)


def test_auto_find_batch_size_trains_something_else(results):
    found = one(results, SHARE, AUTO_FIND.name)
    assert found["out_of_memory"] > 0 and found["rows_per_step"] != 8
    assert found["loss_distance"] is None
    assert found["steps_executed"] > found["steps_due"] and found["rows_repeated"] > 0


def test_search_by_hand_ends_with_the_largest_batch_that_finishes(results):
    found = one(results, SHARE, BY_HAND)
    assert found["error"] is None and found["loss_distance"] < 1e-5 and found["rows_per_step"] == 8
    tries = found["tries"]
    assert [tried["batch_rows"] for tried in tries] == [4, 2, 1][: len(tries)] and len(tries) > 1
    assert all(tried["error"] for tried in tries[:-1])
    assert found["search_s"] == pytest.approx(sum(tried["wall_s"] for tried in tries))


def test_quick_run_prints_every_contender_and_writes_nothing(results, monkeypatch, capsys):
    monkeypatch.setattr(under_a_limit, "measured", lambda *_: results)
    monkeypatch.setattr(under_a_limit, "finish", lambda *_, **__: pytest.fail("written"))
    under_a_limit.main(["--quick"])
    printed = capsys.readouterr().out
    assert "test run: nothing is written" in printed
    assert "ours: rows repeated or never seen: 0, at most 0: met" in printed
    assert "[enforce fail" in printed


def test_grid_has_a_cell_under_every_head(results):
    grid = under_a_limit.grid_of(results, QUICK_SHARES)
    assert {len(row) for row in grid.rows} == {len(grid.heads)}
    assert [row[0] for row in grid.rows] == [
        "stock", "ours", "ours", "ours, no headroom", "stock", AUTO_FIND.name, BY_HAND, "its search", "Composer",
    ]  # fmt: skip


def ended(contender, number, wall_s, error=None, **changes):
    return {
        "contender": contender, "round": number, "share": 0.5, "wall_s": wall_s, "error": error, "rows_due": 32,
        "rows_repeated": 0, "rows_never_seen": 0, **changes,
    }  # fmt: skip


def test_ratios_are_taken_within_a_round_and_of_those_that_finished():
    found = [
        ended("ours", 1, 4.0), ended("ours", 0, 2.0), ended("ours, no headroom", 0, 2.0, rows_repeated=3),
        ended(BY_HAND, 0, 3.0, search_s=5.0), ended(BY_HAND, 1, 8.0, search_s=10.0),
        ended(AUTO_FIND.name, 0, 9.0, error="none found", rows_never_seen=7), ended(AUTO_FIND.name, 1, 6.0),
    ]  # fmt: skip
    figures = under_a_limit.figures_of(found, [0.5])
    assert {name.partition("time to finish, ")[2]: one.value for name, one in figures.items() if "time" in name} == {
        "best fixed batch by hand / ours": 1.75,
        "search by hand included / ours": 2.5,
        "auto_find_batch_size / ours": 1.5,
    }
    assert under_a_limit.time_cell(found, 0.5, AUTO_FIND.name) == "1.50, died 1 of 2 times"
    assert figures["50% of the memory: rows that auto_find_batch_size repeated or never saw"].value == 3.5
    lost = figures["ours: rows repeated or never seen"]
    assert lost.value == 3 and not lost.is_met


def test_a_killed_contender_has_lost_its_rows_and_has_no_counts():
    killed = {"contender": "ours", "round": 0, "share": 0.5, "wall_s": 1.0, "error": "the process was killed"}
    killed |= {"rows_due": 32, "batch_rows": 8, "checkpointing": False}
    found = [{**killed, "contender": contender} for contender in ("ours", BY_HAND, AUTO_FIND.name)]
    (lost,) = under_a_limit.figures_of(found, [0.5]).values()
    assert lost.value == 32 and not lost.is_met
    cells = under_a_limit.row([killed], 0.5, "ours", need_mib=1.0)
    assert cells == ["ours", "0.50", "died", "8", *["-"] * (len(under_a_limit.HEADS) - 4)]


class Deadly:
    """Ends the process that unpickles it."""

    def __reduce__(self):
        return os._exit, (9,)


def test_a_process_that_is_killed_ends_only_its_own_contender():
    killed = limit_work.attempt(QUICK, OURS, Deadly())
    assert (killed["error"], killed["rows_due"], killed["losses"]) == (limit_work.KILLED, 16, [])


def test_every_round_has_every_contender_once_and_the_same_limit(monkeypatch):
    def attempt(job, contender, room_bytes):
        said = {"contender": contender.name, "batch_rows": 8, "checkpointing": False, "error": None, "wall_s": 1.0}
        return {**said, "losses": [2.0], "peak_over_first_step_mib": 10.0}

    monkeypatch.setattr(under_a_limit, "attempt", attempt)
    found = under_a_limit.measured(JOB, [0.5, 0.25], repeats=3)
    assert len({(one["round"], one["share"], one["contender"]) for one in found}) == len(found) == 3 * (2 + 2 * 5)
    rooms = {(one["share"], one["room_bytes"]) for one in found if one["share"] is not None}
    assert rooms == {(0.5, 5 * 2**20), (0.25, int(2.5 * 2**20))}
    assert all(one["loss_distance"] == 0.0 for one in found)


@pytest.mark.parametrize(
    ("fits", "tried"),
    [((8, False), [8]), ((2, False), [8, 4, 2]), ((1, True), [8, 4, 2, 1, 1]), (None, [8, 4, 2, 1, 1])],
)
def test_search_stops_at_what_fits(monkeypatch, fits, tried):
    def attempt(job, contender, room_bytes):
        made = contender.job(job)
        assert made.step_rows == job.step_rows
        error = None if (made.batch_rows, made.checkpointing) == fits else "does not fit"
        said = {"contender": contender.name, "batch_rows": made.batch_rows, "checkpointing": made.checkpointing}
        return {**said, "error": error, "wall_s": 2.0}

    monkeypatch.setattr(under_a_limit, "attempt", attempt)
    as_configured, best = under_a_limit.by_hand(JOB, 10)
    assert as_configured["contender"] == "stock" and as_configured["batch_rows"] == 8
    assert [one["batch_rows"] for one in best["tries"]] == tried
    assert best["search_s"] == 2.0 * len(tried)
    assert (best["error"] is None) == (fits is not None)


def test_composer_says_what_is_missing(monkeypatch):
    found = ModuleType("composer")
    monkeypatch.setattr(limit_work.importlib.util, "find_spec", lambda name: None)
    assert limit_work.composer() == "not installed"
    monkeypatch.setattr(limit_work.importlib.util, "find_spec", lambda name: found)
    monkeypatch.setitem(sys.modules, "composer", found)
    found.Trainer = type("Trainer", (), {"__init__": lambda self, model: None})
    assert limit_work.composer() == "installed, without device_train_microbatch_size"
    found.Trainer = type("Trainer", (), {"__init__": lambda self, model, device_train_microbatch_size: None})
    assert limit_work.composer() == "installed, not driven by this benchmark"
