"""One decision at a time: given numbers in, numbers worked out by hand expected."""

from __future__ import annotations

import doctest
import json
import math
import random
from dataclasses import replace

import pytest

from scu_trainer.control import microbatch
from scu_trainer.control.memory_values import MemoryMeasurement, SizerConfig, SizerState, pressure
from scu_trainer.control.microbatch import (
    LONG_PATIENCE,
    UNRESTRICTED,
    after_oom,
    applied_cap,
    cap_to_share,
    decide,
    fitting_tokens,
    with_observation,
    with_shared_cap,
)

LAW = SizerConfig(headroom_share=0.1)
"""Target 0.9 of the limit, band 0.81 to 0.9, aim in its middle at 0.855."""

SEEN = MemoryMeasurement(
    step=7,
    limit_bytes=1000,
    used_bytes=400,
    peak_bytes=700,
    ceiling_tokens=4000,
    floor_tokens=50,
    longest_row=50,
    largest_micro_batch_tokens=1000,
)
QUIET = replace(SEEN, peak_bytes=620)
"""The micro-batch of 1000 tokens takes the 220 of ``learned``."""

RESTRICTED = SizerState(cap_tokens=1000, former_tokens=4000)
CALM = replace(RESTRICTED, calm_steps=2)
"""The next calm step is the third."""


def peak(bytes_: int, **changes) -> MemoryMeasurement:
    return replace(SEEN, peak_bytes=bytes_, **changes)


def learned(state: SizerState, fixed: float = 20.0, per_token: float = 0.2) -> SizerState:
    """A cost model that has seen micro-batches of 200, 400 and 800 tokens in rows of 50."""
    for tokens in (200, 400, 800):
        state = with_observation(state, tokens, 50 * tokens, round(fixed + per_token * tokens))
    return state


# -- pressure ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peak_bytes", "level"),
    [
        (0, "low"),
        (809, "low"),
        (811, "moderate"),
        (900, "moderate"),
        (901, "high"),
        (975, "high"),
        (976, "critical"),  # a quarter of the headroom is 25
        (1200, "critical"),
    ],
)
def test_pressure_levels(peak_bytes, level):
    assert pressure(LAW, 1000, peak_bytes) == level
    assert decide(LAW, SizerState(), peak(peak_bytes)).pressure == level
    assert decide(LAW, SizerState(), peak(peak_bytes)).collect is (level == "critical")


def test_a_gauge_without_a_limit_is_refused():
    with pytest.raises(ValueError, match="limit_bytes is 0"):
        replace(SEEN, limit_bytes=0)


def test_headroom_in_bytes_goes_before_a_share():
    law = SizerConfig(headroom_share=0.5, headroom_bytes=200)
    assert [pressure(law, 1000, p) for p in (719, 800, 801, 951)] == ["low", "moderate", "high", "critical"]


def test_a_threshold_of_collecting_above_the_headroom_is_the_target():
    law = SizerConfig(headroom_bytes=100, gc_threshold_bytes=300)
    assert law.free_bytes_wanted(1000) == 300
    assert [pressure(law, 1000, p) for p in (629, 700, 701)] == ["low", "moderate", "critical"]


# -- no pressure -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fitted", [False, True])
def test_without_pressure_nothing_makes_a_cap(fitted):
    chance, state = random.Random(0), learned(SizerState(), per_token=5.0) if fitted else SizerState()
    for step in range(1000):
        used = chance.randint(0, 500)
        seen = replace(SEEN, step=step, used_bytes=used, peak_bytes=chance.randint(used, 900))
        decision = decide(LAW, state, seen)
        state = decision.state
        assert (state.cap_tokens, decision.reason, decision.collect, state.integral) == (None, None, False, 0.0)


def test_applied_cap():
    assert applied_cap(SizerState(), 4000, 50) == 4000
    assert applied_cap(RESTRICTED, 4000, 50) == 1000
    assert applied_cap(RESTRICTED, 600, 50) == 600, "this step's ceiling is lower"
    assert applied_cap(RESTRICTED, 4000, 1500) == 1500, "the smallest micro-batch of the longest rows"
    assert applied_cap(SizerState(), 400, 500) == 500


# -- shrinking ---------------------------------------------------------------------------------------------------------


def test_pid_by_hand():
    """e = .855 - .95 = -.095, before .005; ln factor = 1*-.095 + .1*(-.02 - .095) + .2*(-.095 - .005) = -.1265."""
    decision = decide(LAW, replace(RESTRICTED, integral=-0.02, previous_error=0.005), peak(950))
    assert decision.state.cap_tokens == int(1000 * math.exp(-0.1265)) == 881
    assert decision.state.integral == pytest.approx(-0.115)
    assert decision.state.previous_error == pytest.approx(-0.095)
    assert decision.reason == "used 95 % of 1000 B, target 90 %"


def test_each_gain_counts_alone():
    def cap(**gains) -> int:
        law = replace(LAW, **{"kp": 0.0, "ki": 0.0, "kd": 0.0, **gains})
        state = replace(RESTRICTED, integral=-0.205, previous_error=0.105)
        return decide(law, state, peak(950)).state.cap_tokens

    assert cap(kp=3.0) == int(1000 * math.exp(-0.285))
    assert cap(ki=2.0) == int(1000 * math.exp(-0.6))
    assert cap(kd=1.0) == int(1000 * math.exp(-0.2))


def test_the_first_error_has_no_derivative():
    assert decide(replace(LAW, kp=0.0, ki=0.0, kd=9.0), RESTRICTED, peak(950)).state.cap_tokens == 900


def test_a_shrink_is_never_smaller_than_the_deadband():
    assert decide(LAW, RESTRICTED, peak(901)).state.cap_tokens == 900


def test_a_clipped_output_is_not_integrated():
    decision = decide(replace(LAW, kp=20.0), replace(RESTRICTED, integral=-0.02), peak(950))
    assert (decision.state.cap_tokens, decision.state.integral) == (500, -0.02)


def test_the_integral_is_bounded():
    decision = decide(replace(LAW, integral_clamp=0.05), replace(RESTRICTED, integral=-0.03), peak(950))
    assert decision.state.integral == -0.05


def test_the_integral_starts_again_when_the_error_changes_its_sign():
    decision = decide(LAW, replace(RESTRICTED, integral=0.5), peak(950))
    assert decision.state.integral == pytest.approx(-0.095)


def test_in_the_band_nothing_moves_and_the_integral_is_forgotten():
    state = replace(RESTRICTED, integral=-0.3, calm_steps=100)
    decision = decide(LAW, state, peak(850))
    assert (decision.state.cap_tokens, decision.reason) == (1000, None)
    assert (decision.state.integral, decision.state.calm_steps) == (0.0, 0)
    half_full = learned(replace(state, cap_tokens=500))  # 687 tokens would still meet the target
    assert decide(LAW, half_full, peak(850, largest_micro_batch_tokens=500)).state.cap_tokens == 500


def test_the_chunk_that_ran_shrinks_not_a_cap_far_above_it():
    assert decide(LAW, RESTRICTED, peak(901, largest_micro_batch_tokens=300)).state.cap_tokens == 270


def test_the_first_shrink_starts_from_the_ceiling():
    decision = decide(LAW, SizerState(), peak(901, largest_micro_batch_tokens=4000))
    assert (decision.state.cap_tokens, decision.state.former_tokens) == (3600, 4000)


def test_the_cost_model_shrinks_at_once_and_further():
    """Room to the target 900 - 700 = 200; (200 / 1.08 - 20) / .2 = 825.9 tokens, where PID would leave 886."""
    state = learned(RESTRICTED)
    assert decide(LAW, state, peak(920, used_bytes=700)).state.cap_tokens == 825
    # Use between steps has risen to 860: (40 / 1.08 - 20) / .2 = 85.2, far below half of 1000.
    assert decide(LAW, state, peak(1080, used_bytes=860)).state.cap_tokens == 85


def test_what_the_cost_model_does_not_explain_counts_as_base():
    """The largest micro-batch takes 220: 950 - 220 = 730 were there beside it; (170 / 1.08 - 20) / .2 = 687."""
    assert decide(LAW, learned(RESTRICTED), peak(950, used_bytes=400)).state.cap_tokens == 687


def test_pid_acts_where_the_cost_model_sees_no_need():
    """(500 / 1.08 - 1) / .5 = 923 would fit: less than the deadband, and a shrink that small may be needed again."""
    state = learned(RESTRICTED, fixed=1.0, per_token=0.5)
    assert decide(LAW, state, peak(901, used_bytes=400)).state.cap_tokens == 900


def test_the_floor_holds_and_nothing_winds_up_there():
    state = replace(RESTRICTED, cap_tokens=50, integral=-0.1)
    decision = decide(LAW, state, peak(990, largest_micro_batch_tokens=50))
    assert (decision.state.cap_tokens, decision.reason, decision.pressure) == (50, None, "critical")
    assert decision.state.integral == -0.1
    assert decide(LAW, SizerState(), peak(990, floor_tokens=4000)).state.cap_tokens is None, (
        "nothing smaller is allowed"
    )
    assert decide(LAW, learned(RESTRICTED), peak(1000, used_bytes=999)).state.cap_tokens == 50


# -- growing -----------------------------------------------------------------------------------------------------------


def test_growth_waits_for_calm():
    state = RESTRICTED
    for _ in range(2):
        decision = decide(LAW, state, SEEN)
        assert (decision.state.cap_tokens, decision.reason) == (1000, None)
        state = decision.state
    assert decide(LAW, state, SEEN).state.cap_tokens > 1000
    assert decide(LAW, decide(LAW, state, peak(950)).state, SEEN).state.calm_steps == 1, "pressure ends the calm"


def test_growth_by_pid_by_hand():
    """e = .855 - .7 = .155; ln factor = .155 + .0155 = .1705. Proportionally 1000 * (1 + 155 / 300) would fit."""
    decision = decide(LAW, CALM, SEEN)
    assert decision.state.cap_tokens == int(1000 * math.exp(0.1705)) == 1185
    assert decision.state.integral == pytest.approx(0.155)
    assert decision.reason == "used 70 % of 1000 B, target 90 %: room for more"


def test_growth_by_pid_ends_where_memory_would_be_full_in_proportion():
    fast = replace(LAW, kp=4.0)
    assert decide(fast, CALM, SEEN).state.cap_tokens == 1516


def test_growth_is_at_most_double():
    seen = peak(410, largest_micro_batch_tokens=1000)
    assert decide(replace(LAW, kp=9.0), CALM, seen).state.cap_tokens == 2000
    assert decide(LAW, learned(CALM), seen).state.cap_tokens == 2000


def test_growth_from_one_row_is_a_whole_row():
    state = replace(CALM, cap_tokens=1, former_tokens=64)
    seen = peak(700, ceiling_tokens=64, floor_tokens=1, longest_row=1, largest_micro_batch_tokens=1)
    assert decide(LAW, state, seen).state.cap_tokens == 1, "one more row would need 300 more, and 155 are free"
    assert decide(LAW, state, replace(seen, used_bytes=600)).state.cap_tokens == 2


def test_growth_ends_where_the_cost_model_says():
    """(500 / 1.08 - 20) / .2 = 2214 fit; (500 / 1.08 - 20) / .3 = 1476, too little to be urgent."""
    state = learned(replace(CALM, cap_tokens=1400))
    assert decide(LAW, state, QUIET).state.cap_tokens == 2214
    dearer = learned(replace(CALM, cap_tokens=1300), per_token=0.3)
    assert decide(LAW, dearer, QUIET).state.cap_tokens == 1300
    patient = replace(dearer, calm_steps=LONG_PATIENCE * LAW.patience_steps - 1)
    assert decide(LAW, patient, QUIET).state.cap_tokens == 1476
    assert decide(LAW, replace(patient, cap_tokens=1350), QUIET).state.cap_tokens == 1350, "within the deadband"


def test_a_cap_that_reaches_the_ceiling_is_taken_off():
    state = learned(replace(CALM, cap_tokens=1200, former_tokens=2000, calm_steps=5, integral=0.1))
    decision = decide(LAW, state, replace(QUIET, ceiling_tokens=2000))
    assert (decision.state.cap_tokens, decision.reason) == (None, "pressure is gone")
    assert (decision.state.former_tokens, decision.state.integral, decision.state.calm_steps) == (None, 0.0, 0)


def test_the_last_bit_of_the_way_is_not_lost_in_the_deadband():
    state = learned(replace(CALM, cap_tokens=1900, former_tokens=2000))
    assert decide(LAW, state, replace(QUIET, ceiling_tokens=2000)).reason == "pressure is gone"


def test_a_step_of_short_rows_does_not_take_the_cap_off():
    """Its ceiling of 900 is reached, the 4000 of other steps are not."""
    decision = decide(LAW, learned(CALM), replace(QUIET, ceiling_tokens=900))
    assert decision.state.cap_tokens == 2000
    assert decide(LAW, SizerState(cap_tokens=800), replace(QUIET, ceiling_tokens=900)).state.former_tokens == 900


# -- what was proven ---------------------------------------------------------------------------------------------------

FULL = peak(880, largest_micro_batch_tokens=3900)
"""4000 tokens run at 880 of 900 in a room of 600: no pressure, though no prediction with a margin would allow it."""


def test_a_size_that_ran_comes_back_when_its_room_does():
    state = decide(LAW, SizerState(), FULL).state
    assert (state.proven_tokens, state.proven_room_bytes) == (4000, 600)
    state = decide(LAW, state, peak(1100, used_bytes=600, largest_micro_batch_tokens=4000)).state
    assert state.cap_tokens < 4000
    for _ in range(2):
        decision = decide(LAW, state, replace(FULL, peak_bytes=850))
        state = decision.state
        assert state.cap_tokens is not None
    assert decide(LAW, state, replace(FULL, peak_bytes=850, used_bytes=401)).state.cap_tokens is not None
    decision = decide(LAW, state, replace(FULL, peak_bytes=850))
    assert (decision.state.cap_tokens, decision.reason) == (None, "pressure is gone")


def test_the_smallest_room_counts_as_proof():
    state = SizerState()
    for used in (400, 450, 420):
        state = decide(LAW, state, replace(FULL, used_bytes=used)).state
    assert state.proven_room_bytes == 550


def test_chunks_that_do_not_fill_the_ceiling_prove_nothing():
    assert decide(LAW, SizerState(), peak(800, largest_micro_batch_tokens=3599)).state.proven_tokens == 0
    assert decide(LAW, SizerState(), peak(950, largest_micro_batch_tokens=4000)).state.proven_tokens == 0


def test_trouble_in_the_same_room_ends_the_proof():
    state = decide(LAW, SizerState(), FULL).state
    assert decide(LAW, state, peak(901, used_bytes=459)).state.proven_tokens == 0
    assert decide(LAW, state, peak(901, used_bytes=461)).state.proven_tokens == 4000
    assert after_oom(LAW, state, 4000, 50, 1000, 459, 50).proven_tokens == 0
    assert after_oom(LAW, state, 4000, 50, 1000, 461, 50).proven_tokens == 4000


# -- out of memory -----------------------------------------------------------------------------------------------------


def test_out_of_memory_halves():
    state = after_oom(LAW, SizerState(integral=-0.4, calm_steps=9), 3000, 50, 1000, 400, 50)
    assert (state.cap_tokens, state.oom_count) == (1500, 1)
    assert (state.failed_tokens, state.failed_room_bytes) == (3000, 600)
    assert (state.integral, state.calm_steps) == (0.0, 0)
    assert after_oom(LAW, SizerState(), 3000, 2000, 1000, 400, 50).cap_tokens == 2000, "not below the floor"
    assert after_oom(LAW, SizerState(cap_tokens=100), 3000, 50, 1000, 400, 50).cap_tokens == 100, "never up"
    assert after_oom(LAW, SizerState(), 1, 1, 1000, 400, 1).cap_tokens == 1


def test_out_of_memory_goes_where_the_cost_model_says_if_that_is_less():
    """Room to the target 900 - 700 = 200; (200 / 1.08 - 20) / .2 = 825."""
    assert after_oom(LAW, learned(SizerState()), 3000, 50, 1000, 700, 50).cap_tokens == 825
    assert after_oom(LAW, learned(SizerState()), 1000, 50, 1000, 700, 50).cap_tokens == 500


def test_the_peak_of_a_failed_chunk_does_not_shrink_the_cap_again():
    state = after_oom(LAW, SizerState(), 3000, 50, 1000, 400, 50)
    first = decide(LAW, state, peak(1000, largest_micro_batch_tokens=1500))
    assert (first.state.cap_tokens, first.reason, first.pressure, first.collect) == (1500, None, "critical", True)
    assert first.state.previous_error is None
    second = decide(LAW, first.state, peak(1000, largest_micro_batch_tokens=1500))
    assert second.state.cap_tokens < 1500


def test_no_way_back_to_a_size_that_failed_in_the_same_room():
    state = replace(learned(CALM), failed_tokens=2000, failed_room_bytes=600, steps_since_oom=10)
    assert decide(LAW, state, QUIET).state.cap_tokens == 1500
    there = replace(state, cap_tokens=1500, calm_steps=99)
    assert decide(LAW, there, QUIET).state.cap_tokens == 1500
    more_room = replace(QUIET, used_bytes=300, peak_bytes=500)  # 700 > 1.1 * 600
    assert decide(LAW, there, more_room).state.cap_tokens == 2677  # (600 / 1.08 - 20) / .2
    same_room = replace(QUIET, used_bytes=341, peak_bytes=500)
    assert decide(LAW, there, same_room).state.cap_tokens == 1500


def test_a_failure_is_forgotten_after_many_steps_if_the_cost_model_agrees():
    state = replace(CALM, cap_tokens=1500, calm_steps=99, failed_tokens=2000, failed_room_bytes=600)
    old = replace(state, steps_since_oom=50)
    assert decide(LAW, learned(old), QUIET).state.cap_tokens == 2214
    assert decide(LAW, learned(replace(state, steps_since_oom=49)), QUIET).state.cap_tokens == 1500
    assert decide(LAW, old, replace(QUIET, used_bytes=600, peak_bytes=700)).state.cap_tokens == 1500, (
        "nobody says that it fits"
    )
    dearer = learned(replace(old, cap_tokens=1000), per_token=0.25)
    assert decide(LAW, dearer, QUIET).state.cap_tokens == 1500, "1771 fit by the model, less than what failed"


def test_a_failure_is_forgotten_where_its_size_has_run_in_no_more_room():
    state = replace(CALM, failed_tokens=1000, failed_room_bytes=600, steps_since_oom=3)
    assert decide(LAW, state, QUIET).state.failed_tokens is None
    more_room = replace(QUIET, used_bytes=300, peak_bytes=520)  # 700 > 1.1 * 600
    smaller = replace(QUIET, largest_micro_batch_tokens=999)
    one_row = replace(QUIET, floor_tokens=1000, longest_row=1000)
    for seen in (more_room, smaller, one_row):
        assert decide(LAW, state, seen).state.failed_tokens == 1000, seen


def test_steps_since_out_of_memory_are_counted():
    state = after_oom(LAW, SizerState(), 3000, 50, 1000, 400, 50)
    for _ in range(5):
        state = decide(LAW, state, peak(850)).state
    assert state.steps_since_oom == 5


def test_the_stronger_failure_is_remembered():
    def remembered(*failures: tuple[int, int]) -> tuple[int, int]:
        state = SizerState()
        for tokens, used in failures:
            state = after_oom(LAW, state, tokens, 50, 1000, used, 50)
        return (state.failed_tokens, state.failed_room_bytes)

    assert remembered((3000, 400), (1500, 400)) == (1500, 600)
    assert remembered((1500, 400), (3000, 500)) == (1500, 600), "1500 failed in more room"
    assert remembered((1500, 500), (3000, 400)) == (3000, 600), "news: more room, and still too little"


def test_what_will_fit():
    assert fitting_tokens(LAW, SizerState(), 500.0, 50) is None
    assert fitting_tokens(LAW, learned(SizerState()), 500.0, 50) == 2214
    failed = replace(learned(SizerState()), failed_tokens=2000, failed_room_bytes=500, steps_since_oom=3)
    assert fitting_tokens(LAW, failed, 500.0, 50) == 1500
    assert fitting_tokens(LAW, failed, 560.0, 50) == 2492


# -- the whole ---------------------------------------------------------------------------------------------------------


def random_seen(chance: random.Random, step: int) -> MemoryMeasurement:
    longest = chance.randint(10, 200)
    ceiling = chance.randint(longest, 4000)
    used = chance.randint(100, 800)
    peak_bytes = min(1000, used + chance.randint(0, 500))
    return MemoryMeasurement(step, 1000, used, peak_bytes, ceiling, longest, longest, chance.randint(longest, ceiling))


def walk(state: SizerState, seed: int, steps: int, first: int = 0):
    """Decisions over steps of chance; micro-batches are learned from and run out of memory now and then."""
    chance = random.Random(seed)
    for step in range(steps):
        seen = random_seen(chance, step)
        tokens = seen.largest_micro_batch_tokens
        state = with_observation(state, tokens, tokens * seen.longest_row, chance.randint(1, 500))
        if chance.random() < 0.05:
            state = after_oom(LAW, state, tokens, seen.floor_tokens, 1000, seen.used_bytes, seen.longest_row)
        decision = decide(LAW, state, seen)
        if step >= first:
            yield state, seen, decision
        state = decision.state


@pytest.mark.parametrize("seed", range(5))
def test_bounds_and_reasons_whatever_happens(seed):
    moved = 0
    for before, seen, decision in walk(SizerState(), seed, 200):
        after = decision.state
        assert (decision.reason is None) is (after.cap_tokens == before.cap_tokens)
        assert decision.pressure == after.pressure
        assert seen.floor_tokens <= applied_cap(after, seen.ceiling_tokens, seen.floor_tokens) <= seen.ceiling_tokens
        assert abs(after.integral) <= LAW.integral_clamp
        if after.cap_tokens is not None and before.cap_tokens is not None:
            assert after.cap_tokens <= LAW.max_growth * before.cap_tokens
        if decision.reason and decision.pressure in ("high", "critical"):
            ceiling, floor = seen.ceiling_tokens, seen.floor_tokens
            assert applied_cap(after, ceiling, floor) < applied_cap(before, ceiling, floor)
        moved += decision.reason is not None
    assert moved > 20, "a walk that never moves shows nothing"


def test_saved_and_read_back_a_run_goes_on_as_if_nothing_had_happened():
    whole = [decision for _, _, decision in walk(SizerState(), seed=3, steps=120)]
    state = SizerState()
    for before, seen, decision in walk(SizerState(), seed=3, steps=120):
        saved = SizerState.from_dict(json.loads(json.dumps(before.to_dict())))
        assert saved == before
        state = decide(LAW, saved, seen)
        assert state == decision
    assert state == whole[-1]
    assert state.state.oom_count > 0 and state.state.cost.fitted


def test_ranks_that_share_their_caps_always_agree():
    """Rank 1 is squeezed in steps 5 to 14, rank 0 never; caps are the same on both after every step."""
    states = [learned(SizerState()), learned(SizerState(), per_token=0.21)]
    caps = []
    for step in range(30):
        ceiling = 2000
        cap = applied_cap(states[0], ceiling, 50)
        used = [200, 650 if 5 <= step < 15 else 200]
        peaks = [round(used[0] + 20 + 0.2 * cap), round(used[1] + 20 + 0.21 * cap)]
        states = [
            decide(
                LAW,
                state,
                replace(SEEN, used_bytes=u, peak_bytes=p, ceiling_tokens=ceiling, largest_micro_batch_tokens=cap),
            ).state
            for state, u, p in zip(states, used, peaks, strict=True)
        ]
        smallest = min(cap_to_share(state) for state in states)
        states = [with_shared_cap(state, smallest) for state in states]
        assert states[0].cap_tokens == states[1].cap_tokens
        caps.append(states[0].cap_tokens)
    assert caps[:5] == [None] * 5
    assert max(caps[5:14]) < 1100
    assert caps[-10:] == [None] * 10


def test_an_uncapped_rank_shares_more_than_any_cap():
    assert cap_to_share(SizerState()) == UNRESTRICTED > cap_to_share(SizerState(cap_tokens=10**15))
    assert UNRESTRICTED < 2**63
    assert with_shared_cap(SizerState(cap_tokens=5), UNRESTRICTED).cap_tokens is None


def test_the_documented_example_runs():
    result = doctest.testmod(microbatch)
    assert (result.failed, result.attempted > 3) == (0, True)
