"""SIGKILL at any moment: the same command goes on, and ends with the weights of the run that nobody interrupted."""

from __future__ import annotations

import random

import pytest

from scu_trainer.run_files import read_json, read_rows
from tests.faults import campaign

HISTORIES = ("scu_history.json", "curriculum.json")


def same_result(site, run) -> None:
    """Weights, histories of lambda and of the curriculum, and figures, in every digit."""
    assert campaign.weights(run) == campaign.weights(site.whole)
    for name in HISTORIES:
        assert read_rows(run / name) == read_rows(site.whole / name)
    after = [read_json(folder / "scu_metrics.json")["held_out_bpt_after"] for folder in (run, site.whole)]
    assert after[0] == after[1]
    assert read_json(run / "run.json")["status"] == "finished"
    assert not list(run.glob("staging-*"))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_that_is_killed_again_and_again(site, tmp_path, seed):
    """Three kills at random steps on the disk, one at a random time, then it may finish."""
    chance, run = random.Random(seed), tmp_path / "run"
    plan = [("disk", chance.randint(1, site.disk_steps)) for _ in range(3)]
    plan += [("time", chance.uniform(0, 1.0)), ("none", 0)]
    done = campaign.killed_until_done(site.flags(run), run, tmp_path / "log", plan.__getitem__)
    assert sum(done.kills.values()) >= 2, "nearly every start has finished: nothing was shown"
    same_result(site, run)
