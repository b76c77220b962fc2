"""The memory law against a toy device: does the cap come down in time, stay, and go back up?"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace

import pytest

from scu_trainer.control.memory_values import SizerConfig, SizerState
from scu_trainer.control.microbatch import decide
from tests.control.memory_plant import MB, Plant, Run, equal_rows, lognormal_rows

SQUEEZED, RELEASED, STEPS = 20, 60, 100
NOISE = 0.03  # of the measured peak


def squeeze(step: int) -> int:
    """60 MB, 14 MB from step 20 to 59, and 60 MB again."""
    return 14 * MB if SQUEEZED <= step < RELEASED else 60 * MB


def learned_state() -> SizerState:
    """A cost model from steps with rows of all lengths, under no pressure."""
    return Plant(rows=lognormal_rows).run(3).state


def steps_to_former_size(run: Run) -> int:
    """Steps from the release until the cap is gone for good."""
    last = max(step for step, decision in enumerate(run.decisions) if decision.state.cap_tokens is not None)
    return last + 1 - RELEASED


@pytest.mark.parametrize("noise", [0.0, NOISE])
@pytest.mark.parametrize(("rows", "bytes_per_square"), [(equal_rows, 0.0), (equal_rows, 1.0), (lognormal_rows, 1.0)])
def test_squeezed_and_released_the_cap_is_back_within_20_steps(rows, bytes_per_square, noise):
    plant = Plant(squeeze, rows=rows, bytes_per_square=bytes_per_square, noise=noise)
    run = plant.run(STEPS)
    assert run.decisions[SQUEEZED - 1].state.cap_tokens is None, "before the squeeze there is nothing to do"
    assert run.decisions[RELEASED - 1].state.cap_tokens <= 1500, "the squeeze must be felt, or this test shows nothing"
    assert 0 < steps_to_former_size(run) <= 20
    assert run.turns() == 1, "down, and up again"
    assert run.state.cap_tokens is None


@pytest.mark.parametrize("rows", [equal_rows, lognormal_rows])
def test_a_fitted_cost_model_prevents_every_out_of_memory(rows):
    plant = Plant(squeeze, rows=rows)
    with_model = plant.run(STEPS, learned_state())
    without = replace(plant, predicts=False).run(SQUEEZED + 5)
    assert with_model.ooms == []
    assert without.ooms, "without it the squeeze is a surprise, or this test shows nothing"


def test_without_a_model_each_out_of_memory_halves_and_none_comes_twice():
    run = Plant(squeeze, predicts=False).run(STEPS)
    assert run.ooms == [(SQUEEZED, 6400), (SQUEEZED, 3200), (SQUEEZED, 1600)]
    assert run.state.oom_count == 3


class Together(Plant):
    """More than one row at once fails from step SQUEEZED to ``last``, whatever the gauge says."""

    last = SQUEEZED

    def _step(self, step, *given):
        self.fails = SQUEEZED <= step <= self.last
        return super()._step(step, *given)

    def _bytes_of(self, micro_batch):
        return 10**9 if self.fails and len(micro_batch.rows) > 1 else super()._bytes_of(micro_batch)


@pytest.mark.parametrize(("last", "tries"), [(SQUEEZED, 0), (400, 7)], ids=["once", "always"])
def test_rows_that_ran_one_by_one_run_together_again(last, tries):
    """Rows of one length: where one runs at a time, the cost model sees one size and says nothing."""
    plant = Together(predicts=False)
    plant.last = last
    run = plant.run(400)
    assert [tokens for step, tokens in run.ooms if step == SQUEEZED] == [6400, 3200, 1600, 800, 400, 200]
    assert len(run.ooms) - 6 == tries and (run.caps[-1] == 6400) == (tries == 0)


@pytest.mark.parametrize(
    ("rows", "limit_mb", "base_mb"),
    [*itertools.product([equal_rows], [30, 40, 44], [4, 12]), (lognormal_rows, 30, 12), (lognormal_rows, 40, 4)],
)
def test_steady_pressure_is_met_without_hunting(rows, limit_mb, base_mb):
    settled, steps = 40, 160
    plant = Plant(lambda step: limit_mb * MB, rows=rows, base_bytes=base_mb * MB, noise=NOISE)
    run = plant.run(steps)
    assert run.state.cap_tokens is not None
    assert len(run.changes(settled)) <= (steps - settled) / 20
    peaks = [seen.peak_fraction for seen in run.seen[settled:]]
    assert sum(peak > 0.92 for peak in peaks) <= len(peaks) / 20
    if rows is equal_rows:
        assert sorted(peaks)[len(peaks) // 2] >= 0.75, "a cap far too small would be calm as well"


@pytest.mark.parametrize("seed", range(2))
def test_a_size_at_the_edge_of_the_target_does_not_flap(seed):
    """Unrestricted, the peak is at 91.5 % of a target of 92 %: noise alone crosses it."""
    plant = Plant(lambda step: 46_886_000, noise=NOISE, seed=seed)
    run = plant.run(300)
    assert run.changes(), "noise must cross the target once, or this test shows nothing"
    assert len(run.changes()) <= 5


def test_other_tenants_are_made_room_for():
    """Somebody takes 30 MB of the device in steps 30 to 69."""
    run = Plant(tenants_bytes=lambda step: 30 * MB if 30 <= step < 70 else 0).run(110, learned_state())
    assert run.ooms == []
    assert [cap for cap in run.caps[:30] if cap != 6400] == []
    assert max(run.caps[32:70]) < 3600
    assert set(run.caps[85:]) == {6400}


def test_a_slow_leak_is_followed_to_the_floor_and_no_further():
    """What is in use grows by half a megabyte per step until 2 MB are left for a micro-batch."""
    plant = Plant(tenants_bytes=lambda step: min(step * MB // 2, 53 * MB), min_rows=2)
    run = plant.run(140, learned_state())
    assert run.ooms == []
    assert run.turns() == 0
    assert min(run.caps) == run.caps[-1] == 200
    assert run.decisions[-1].reason is None and run.decisions[-1].pressure in ("high", "critical")


def test_peaks_that_chunks_do_not_explain_shrink_them_once_and_end_there():
    """Gradients of 5 MB exist in a step, not between steps, where use is read."""

    class Gradients(Plant):
        def _bytes_of(self, micro_batch):
            return super()._bytes_of(micro_batch) + 5 * MB

        def _observed(self, took: int) -> int:
            return took - 5 * MB

    run = Gradients(lambda step: 50 * MB).run(200, learned_state())
    assert run.ooms == []
    assert run.state.cap_tokens is not None
    assert len(run.changes(10)) <= 2
    assert run.seen[-1].peak_fraction <= 0.92


def test_no_pressure_for_a_thousand_steps_leaves_the_state_alone():
    state, chance = learned_state(), random.Random(0)
    before = Plant(rows=lognormal_rows).run(1, state)
    state = before.state
    for step in range(1000):
        used = chance.randint(4 * MB, 40 * MB)
        seen = replace(before.seen[0], step=step, used_bytes=used, peak_bytes=chance.randint(used, 55 * MB))
        decision = decide(SizerConfig(), state, seen)
        state = decision.state
        assert (decision.reason, state.cap_tokens, state.integral, state.calm_steps) == (None, None, 0.0, 0)


@pytest.mark.parametrize("saved_at", [25, 62])
def test_resumed_runs_take_the_same_decisions(saved_at):
    """In the squeeze, and on the way back up."""
    plant = Plant(squeeze)
    whole = plant.run(STEPS)
    first = plant.run(saved_at)
    saved = SizerState.from_dict(json.loads(json.dumps(first.state.to_dict())))
    rest = replace(plant, limit_bytes=lambda step: squeeze(step + saved_at)).run(STEPS - saved_at, saved)
    assert first.caps + rest.caps == whole.caps
    assert rest.state.cost == whole.state.cost
