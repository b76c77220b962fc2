"""One decision at a time: given numbers in, numbers worked out by hand expected."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, replace

import pytest

from scu_trainer.control.regularization import (
    DECOUPLED_GAIN,
    ControllerState,
    Measurement,
    decide,
    information_ratio,
    initial_state,
    logit,
    observe_held_out,
    shrink_fraction,
    with_applied_shrink,
)
from tests.control.plant import FIXED, MODEL, ORIGINAL, SCHEDULE

# Far from the start (no 1/count weights), y = ln(0.5 / 4), a pull of 0.01 applied since.
RUNNING = ControllerState(
    data_bpt_ema=4.0, s_ema=1 / 9, log_ratio=math.log(0.125), growth=0.02, decisions=99, pull=0.01, target_s=0.1
)
SEEN = Measurement(step=100, steps=1, data_bpt=5.0, param_bpt=0.52, learning_rate=1e-3)

ORIGINAL_RUNNING = ControllerState(lam=1.0, integral=0.05, data_bpt_ema=4.0, s_ema=0.12, decisions=99, target_s=0.1)
S_OF_A_FIFTH = Measurement(step=100, steps=1, data_bpt=4.0, param_bpt=1.0, learning_rate=1e-3)


def close(number: float):
    return pytest.approx(number, rel=1e-9, abs=1e-12)


def test_information_ratio_and_its_logit():
    assert information_ratio(1.0, 3.0) == 0.25
    assert information_ratio(0.0, 3.0) == 0.0
    assert information_ratio(0.0, 0.0) == 0.0
    assert logit(0.25) == close(-1.098612288668)
    assert logit(information_ratio(0.52, 4.05)) == close(math.log(0.52 / 4.05))


# -- model law ---------------------------------------------------------------------------------------------------------


def test_model_law_starts_without_any_pull():
    state = initial_state(replace(MODEL, lambda_init=7.0))
    assert (state.lam, state.target_s) == (0.0, 0.1)
    state = decide(MODEL, state, SEEN)
    assert (state.lam, state.growth, state.decisions) == (0.0, None, 1)
    assert (state.data_bpt_ema, state.s_ema) == (5.0, close(0.52 / 5.52))


def test_model_law_by_hand():
    state = decide(MODEL, RUNNING, SEEN)
    assert state.data_bpt_ema == close(4.05)  # 4 + 0.05 (5 - 4)
    assert state.s_ema == close(0.1137855579869)  # 0.52 / 4.57
    assert state.log_ratio == close(-2.05264334852511)  # ln(0.52 / 4.05)
    # dy + 2 * 0.01 = 0.02679819315 + 0.02; a fifth of it replaces a fifth of 0.02
    assert state.growth == close(0.0253596386309448)
    # u = 1 - exp(-(growth + (y - logit(0.1)) / 10) / 2), lambda = u / 1e-3
    assert state.lam == close(19.7120076619109)
    assert (state.pull, state.saturated, state.decisions, state.reached_step) == (0.0, "", 100, 100)


def test_model_law_divides_by_the_gain_that_was_measured():
    doubled = decide(MODEL, RUNNING, replace(SEEN, gain=4.0))
    # dy + 4 * 0.01 = 0.06679819315; u = 1 - exp(-(0.02935963863 + 0.01445812288) / 4)
    assert doubled.growth == close(0.0293596386309448)
    assert doubled.lam == close(10.8946589857073)


def test_model_law_without_any_gain_leaves_the_weights_alone():
    state = decide(MODEL, RUNNING, replace(SEEN, gain=0.0))
    assert state.lam == 0.0


def test_model_law_far_below_target_does_not_pull():
    state = decide(MODEL, RUNNING, replace(SEEN, param_bpt=0.1))
    assert (state.lam, state.saturated, state.reached_step) == (0.0, "low", None)


def test_model_law_expects_the_growth_of_a_young_run_to_fall():
    """At step 10 of a straight walk the mean growth of the next 10 steps is ln 2 of the present one."""
    young = replace(RUNNING, growth=0.2, target_s=0.2)
    seen = replace(SEEN, step=10)
    # growth 0.2 + 0.2 (0.04679819315 - 0.2); (y - logit(0.2)) / 10 = -0.06663489875
    assert decide(MODEL, young, seen).lam == close(25.05881086416)
    assert decide(MODEL, replace(young, reached_step=5), seen).lam == close(50.0656195134)


def test_model_law_stays_within_max_shrink_and_says_so():
    state = decide(MODEL, replace(RUNNING, growth=0.5), replace(SEEN, param_bpt=3.0))
    assert state.lam * SEEN.learning_rate == close(MODEL.max_shrink)
    assert state.saturated == "high"


def test_model_law_respects_lambda_bounds():
    low, high = replace(MODEL, lambda_min=25.0), replace(MODEL, lambda_max=5.0)
    assert decide(low, RUNNING, SEEN).lam == 25.0
    assert decide(high, RUNNING, SEEN).lam == 5.0
    assert decide(high, RUNNING, SEEN).saturated == "high"
    assert decide(low, RUNNING, SEEN).saturated == ""


@pytest.mark.parametrize("learning_rate", [1e-2, 3e-4, 2e-5, 7e-6, 0.1])
def test_rounding_is_not_saturation(learning_rate):
    """u / lr * lr often differs from u in the last bit; only a bound that really cuts counts."""
    for thousandth in range(1000):
        seen = replace(SEEN, learning_rate=learning_rate, param_bpt=0.5 + thousandth / 1e4)
        assert decide(MODEL, RUNNING, seen).saturated == "", seen


def test_model_law_deadband_cancels_growth_only():
    wide = replace(MODEL, deadband=0.05)
    state = decide(wide, RUNNING, SEEN)
    assert state.lam == close(1e3 * -math.expm1(-0.0253596386309448 / 2))
    assert state.saturated == ""


def test_no_learning_rate_does_no_harm():
    state = decide(MODEL, replace(RUNNING, lam=12.0), replace(SEEN, learning_rate=0.0))
    assert state.lam == 12.0
    assert shrink_fraction(MODEL, state, 0.0) == 0.0
    assert state.growth == close(0.0253596386309448)


def test_one_estimate_of_growth_is_bounded():
    leap = decide(MODEL, RUNNING, replace(SEEN, param_bpt=500.0))
    assert leap.growth == close(0.02 + 0.2 * (0.5 - 0.02))
    fall = decide(MODEL, RUNNING, replace(SEEN, param_bpt=1e-9))
    assert fall.growth == close(0.02 + 0.2 * (-0.5 - 0.02))


def test_nothing_described_yet():
    state = decide(MODEL, ControllerState(target_s=0.1), replace(SEEN, param_bpt=0.0))
    assert (state.s_ema, state.log_ratio, state.growth, state.lam) == (0.0, None, None, 0.0)


def test_first_averages_are_plain_means():
    state = initial_state(MODEL)
    for bpt, mean in ((8.0, 8.0), (6.0, 7.0), (4.0, 6.0), (2.0, 5.0)):
        state = decide(MODEL, state, replace(SEEN, data_bpt=bpt))
        assert state.data_bpt_ema == close(mean)


def test_several_steps_weigh_as_much_as_one_by_one():
    """Four steps with the same loss leave the average where one decision over four steps leaves it."""
    one_by_one = RUNNING
    for step in range(100, 104):
        one_by_one = decide(MODEL, one_by_one, replace(SEEN, step=step))
    together = decide(MODEL, RUNNING, replace(SEEN, step=103, steps=4))
    assert together.data_bpt_ema == close(one_by_one.data_bpt_ema)
    assert together.data_bpt_ema == close(5.0 - 0.95**4)


def test_growth_is_counted_per_step():
    """y moves by 0.12 in four steps, 0.03 each; the average takes it in as four values of 0.03."""
    flat = replace(RUNNING, pull=0.0)
    seen = replace(SEEN, steps=4, data_bpt=4.0, param_bpt=0.5 * math.exp(0.12))
    state = decide(MODEL, flat, seen)
    assert state.growth == close(0.03 + 0.8**4 * (0.02 - 0.03))
    # An error of which 1 - 0.9^4 is to be gone after four equal pulls.
    per_step = state.growth + (state.log_ratio - logit(0.1)) * (1 - 0.9**4) / 4
    assert state.lam == close(1e3 * -math.expm1(-per_step / 2))


def test_pull_is_booked_as_applied():
    state = with_applied_shrink(with_applied_shrink(ControllerState(), 0.1), 0.2)
    assert state.pull == close(-math.log(0.9 * 0.8))
    assert with_applied_shrink(state, 0.0) is state
    assert math.isfinite(with_applied_shrink(ControllerState(), 1.0).pull)


def test_shrink_is_lambda_times_rate_up_to_its_bound():
    assert shrink_fraction(MODEL, ControllerState(lam=20.0), 1e-3) == 0.02
    assert shrink_fraction(MODEL, ControllerState(lam=1e6), 1e-3) == 0.1
    assert shrink_fraction(ORIGINAL, ControllerState(lam=20.0), 1e-3) == 0.0, "the penalty actuator does not shrink"


def test_stop_at_target_waits_without_pulling():
    waiting = replace(MODEL, wait_for_target=True, target_s=0.2)
    state = replace(RUNNING, target_s=0.2, growth=0.5)
    state = decide(waiting, state, SEEN)
    assert (state.lam, state.reached_step) == (0.0, None)
    assert decide(replace(waiting, wait_for_target=False), replace(RUNNING, target_s=0.2, growth=0.5), SEEN).lam > 0
    state = decide(waiting, state, replace(SEEN, step=117, param_bpt=1.2))
    assert state.reached_step == 117
    assert state.lam > 0
    assert decide(waiting, state, replace(SEEN, step=118)).reached_step == 117, "the first arrival counts"


# -- original law ------------------------------------------------------------------------------------------------------


def test_original_law_by_hand():
    assert initial_state(replace(ORIGINAL, lambda_init=2.5)).lam == 2.5
    state = decide(ORIGINAL, ORIGINAL_RUNNING, S_OF_A_FIFTH)
    assert state.s_ema == close(0.128)  # 0.12 + 0.1 (0.2 - 0.12)
    assert state.integral == close(0.05395)  # 0.995 * 0.05 + 0.15 * 0.028
    assert state.lam == close(1.07934027715241)  # exp(0.8 * 0.028 + 0.05395)
    assert state.saturated == ""


def test_original_law_lowers_lambda_below_the_target():
    state = decide(ORIGINAL, replace(ORIGINAL_RUNNING, s_ema=0.04, integral=0.0), replace(S_OF_A_FIFTH, param_bpt=0.0))
    assert state.s_ema == close(0.036)
    assert state.lam == close(math.exp(0.8 * -0.064 + 0.15 * -0.064))


def test_original_law_inside_the_deadband_only_leaks():
    seen = replace(S_OF_A_FIFTH, param_bpt=4.0 / 9.0)  # S = 0.1
    state = decide(ORIGINAL, replace(ORIGINAL_RUNNING, s_ema=0.102), seen)
    assert state.s_ema == close(0.1018)
    assert state.integral == close(0.995 * 0.05)
    assert state.lam == close(math.exp(0.995 * 0.05))


def test_integral_is_clamped_on_both_sides():
    above = decide(ORIGINAL, replace(ORIGINAL_RUNNING, integral=0.2, s_ema=0.9), S_OF_A_FIFTH)
    assert above.integral == 0.2
    below = decide(
        replace(ORIGINAL, target_s=0.9), replace(ORIGINAL_RUNNING, integral=-0.2, target_s=0.9), S_OF_A_FIFTH
    )
    assert below.integral == -0.2


def test_original_law_averages_s_over_several_steps():
    state = decide(ORIGINAL, ORIGINAL_RUNNING, replace(S_OF_A_FIFTH, steps=3))
    assert state.s_ema == close(0.2 - 0.9**3 * 0.08)


@pytest.mark.parametrize(("lam", "s_ema", "bound", "word"), [(10.0, 0.5, 10.0, "high"), (1e-4, 0.0, 1e-4, "low")])
def test_original_law_turns_back_at_once_after_a_long_time_at_a_bound(lam, s_ema, bound, word):
    state = replace(ORIGINAL_RUNNING, lam=lam, s_ema=s_ema, integral=0.2 if word == "high" else -0.2)
    seen = replace(S_OF_A_FIFTH, param_bpt=4.0 if word == "high" else 0.0)
    for step in range(100, 400):
        state = decide(ORIGINAL, state, replace(seen, step=step))
        assert (state.lam, state.saturated) == (bound, word)
    back = 0.07 if word == "high" else 0.13
    state = decide(ORIGINAL, replace(state, s_ema=back), replace(S_OF_A_FIFTH, param_bpt=4.0 * back / (1 - back)))
    assert state.saturated == ""
    assert state.lam < bound if word == "high" else state.lam > bound


def test_a_huge_gain_ends_at_the_bound():
    seen = replace(S_OF_A_FIFTH, param_bpt=400.0)
    state = decide(replace(ORIGINAL, kp=1e6), ORIGINAL_RUNNING, seen)
    assert (state.lam, state.saturated) == (10.0, "high")


# -- fixed and scheduled lambda ----------------------------------------------------------------------------------------


def test_fixed_law_never_moves():
    state = initial_state(FIXED)
    for param_bpt in (0.01, 1.0, 100.0):
        state = decide(FIXED, state, replace(SEEN, param_bpt=param_bpt))
        assert state.lam == 3.0
    assert shrink_fraction(FIXED, state, 1e-3) == 0.003


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("linear", [6.5, 5.0, 2.0, 2.0]), ("cosine", [7.12132034355964, 5.0, 2.0, 2.0])],
)
def test_schedule_by_hand(schedule, expected):
    """From 8 to 2 over 100 steps; cosine at a quarter: 8 - 6 (1 - cos 45°) / 2."""
    law = replace(SCHEDULE, schedule=schedule)
    state = initial_state(law)
    assert state.lam == 8.0
    seen = [decide(law, state, replace(SEEN, step=step)).lam for step in (25, 50, 100, 130)]
    assert seen == [close(number) for number in expected]


# -- all laws ----------------------------------------------------------------------------------------------------------

LAWS = [MODEL, ORIGINAL, FIXED, SCHEDULE, replace(MODEL, wait_for_target=True), replace(MODEL, target_s=None)]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: f"{law.name}-{law.target_s}-{law.wait_for_target}")
@pytest.mark.parametrize(
    "broken",
    [
        {"data_bpt": math.nan},
        {"data_bpt": math.inf},
        {"param_bpt": math.nan},
        {"param_bpt": math.inf},
        {"data_bpt": 0.0},
        {"data_bpt": -1.0},
    ],
    ids=str,
)
def test_a_broken_measurement_changes_nothing_and_is_counted(law, broken):
    before = replace(RUNNING, lam=2.0, integral=0.1, skipped=4)
    assert decide(law, before, replace(SEEN, **broken)) == replace(before, skipped=5, skipped_steps=SEEN.steps)


def test_growth_after_a_broken_measurement_is_per_step_of_the_whole_gap():
    law = LAWS[0]
    first = decide(law, initial_state(law), replace(SEEN, step=1, steps=1, param_bpt=0.01))
    broken = decide(law, first, replace(SEEN, step=2, steps=1, data_bpt=math.nan))
    seen = replace(SEEN, step=3, steps=1, param_bpt=0.01 * math.exp(0.2))
    state = decide(replace(law, ema_alpha=1e-9), replace(broken, decisions=10**9), seen)
    assert state.growth == pytest.approx(0.1, rel=1e-6)
    assert state.skipped_steps == 0


@pytest.mark.parametrize("law", LAWS, ids=lambda law: f"{law.name}-{law.target_s}-{law.wait_for_target}")
def test_state_survives_json_in_every_bit_and_lambda_its_bounds(law):
    chance, state = random.Random(7), initial_state(law)
    for step in range(1, 300):
        seen = Measurement(
            step, chance.choice([1, 5]), 8 * chance.random(), 10 ** chance.uniform(-9, 3), chance.random()
        )
        state = decide(law, with_applied_shrink(state, shrink_fraction(law, state, seen.learning_rate)), seen)
        state = observe_held_out(law, state, chance.uniform(1, 8)) if step % 10 == 0 else state
        assert math.isfinite(state.lam)
        assert law.lambda_min <= state.lam <= law.lambda_max
        assert 0.0 <= shrink_fraction(law, state, chance.random()) <= law.max_shrink
        assert ControllerState(**json.loads(json.dumps(asdict(state)))) == state
    assert state.decisions == 299


def test_decoupled_gain_is_two():
    """(1 - u)^2 in ParamBPT is 2 in y per unit of -ln(1 - u)."""
    assert math.log(0.99**2) / math.log(0.99) == close(DECOUPLED_GAIN)


# -- target_s: auto ----------------------------------------------------------------------------------------------------

AUTO = replace(MODEL, target_s=None)


def held_out(law, state, pairs):
    for s_ema, bpt in pairs:
        state = observe_held_out(law, replace(state, s_ema=s_ema), bpt)
    return state


def test_auto_holds_the_best_s_after_patience_misses():
    state = held_out(AUTO, initial_state(AUTO), [(0.02, 5.0), (0.04, 4.5), (0.06, 4.4), (0.08, 4.6)])
    assert (state.target_s, state.held_out_misses) == (None, 1)
    state = held_out(AUTO, state, [(0.09, 4.4)])  # equal to the best is no improvement
    assert state.target_s == 0.06
    growing = replace(RUNNING, growth=0.05, target_s=None, reached_step=None)
    assert decide(AUTO, growing, SEEN).lam == 0.0, "S grows freely while the target is unknown"
    assert decide(AUTO, replace(growing, target_s=0.06), SEEN).lam > 0.0


def test_auto_misses_must_be_in_a_row():
    pairs = [(0.02, 5.0), (0.03, 5.1), (0.04, 4.9), (0.05, 5.0), (0.06, 4.8), (0.07, 4.85)]
    state = held_out(AUTO, initial_state(AUTO), pairs)
    assert (state.target_s, state.held_out_misses) == (None, 1)
    assert held_out(AUTO, state, [(0.08, 4.81)]).target_s == 0.06


def test_auto_target_never_moves_again():
    state = held_out(AUTO, initial_state(AUTO), [(0.05, 4.0), (0.06, 4.1), (0.07, 4.2)])
    assert state.target_s == 0.05
    later = held_out(AUTO, state, [(0.052, 3.0), (0.09, 3.5), (0.10, 3.6), (0.11, 3.7)])
    assert (later.target_s, later.best_held_out_bpt) == (0.05, 3.0)


def test_auto_ignores_what_is_not_finite_or_too_early():
    state = initial_state(AUTO)
    assert observe_held_out(AUTO, state, 4.0) == state, "no S has been measured yet"
    state = replace(state, s_ema=0.03)
    assert observe_held_out(AUTO, state, math.nan) == state
    assert observe_held_out(AUTO, state, math.inf) == state
