"""The regularizer driven by hand: one layer, losses and token counts given, no Trainer."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from scu_trainer.control.regularization import Measurement, shrink_fraction
from scu_trainer.errors import CheckpointError, ControlError
from scu_trainer.run_files import read_json, write_json
from scu_trainer.settings import RegularizationSettings
from scu_trainer.train.regularization.penalty import Prior
from scu_trainer.train.regularization.regularizer import STUCK_DECISIONS, Regularizer, prior_class_for, resolve

N = 1000.0


def layer(weight: float = 0.0) -> nn.Linear:
    made = nn.Linear(4, 4, bias=False)
    nn.init.constant_(made.weight, weight)
    return made


def started(module=None, max_steps: int = 100, tokens: float | None = N, **settings) -> Regularizer:
    regularizer = Regularizer(RegularizationSettings(**{"target_s": 0.1, **settings}), module or layer(), tokens)
    regularizer.start(max_steps, steps_per_epoch=10, seed=0)
    return regularizer


@torch.no_grad()
def one_step(regularizer, step: int, losses=(1.0,), items=60.0, move: float = 0.01, rate: float = 1e-3, **ranks):
    """One optimizer step that moves every weight by ``move``; ``losses``: shares of the accumulation batches."""
    for weight in regularizer.prior.weights:
        weight.add_(move)
    for loss in losses:
        regularizer.observe_loss(torch.tensor(loss))
    return regularizer.after_optimizer_step(step, rate, items, **{"mean_over_ranks": lambda tensor: tensor, **ranks})


# -- measuring ---------------------------------------------------------------------------------------------------------


def test_a_run_that_begins_without_a_token_to_learn_is_measured_from_the_first_one_on():
    """Of prompts alone: there is no N yet. The step counts in it later, one of two with tokens."""
    regularizer = started(tokens=None)
    assert one_step(regularizer, 1, losses=(0.0,), items=0.0) is None
    regularizer.share_interval(lambda tensor: tensor)
    row = one_step(regularizer, 2, losses=(1.0,), items=60.0)
    assert row["data_bpt"] == pytest.approx(1 / math.log(2.0)) and regularizer.progress.tokens_n == 60 / 2 * 10


def test_one_window_by_hand():
    """Shares of 0.7 and 0.5 nats; 16 weights moved by 0.1: 0.16 / (2 * 0.1^2 * 1000 * ln 2) bits per token."""
    row = one_step(started(), 1, losses=(0.7, 0.5), move=0.1)
    described = 0.16 / (20.0 * math.log(2.0))
    predicted = 1.2 / math.log(2.0)
    assert row["data_bpt"] == pytest.approx(predicted)
    assert row["loss"] == pytest.approx(1.2)
    assert row["param_bpt"] == pytest.approx(described)
    assert row["s"] == pytest.approx(described / (described + predicted))
    assert row["error"] == pytest.approx(row["s"] - 0.1)
    assert (row["step"], row["tokens"], row["lambda"], row["shrink"], row["learning_rate"]) == (1, 60.0, 0.0, 0.0, 1e-3)


def test_windows_between_two_decisions_are_weighted_by_their_tokens():
    regularizer = started(control_frequency=3)
    assert one_step(regularizer, 1, losses=(1.0,), items=10.0) is None
    assert one_step(regularizer, 2, losses=(2.0,), items=torch.tensor(30)) is None
    row = one_step(regularizer, 3, losses=(0.5, 0.5), items=60.0)
    assert row["loss"] == pytest.approx((1.0 * 10 + 2.0 * 30 + 1.0 * 60) / 100)
    assert row["tokens"] == 100.0
    assert regularizer.state.decisions == 1


def test_the_last_step_is_measured_whatever_the_frequency():
    regularizer = started(control_frequency=50, max_steps=2)
    assert one_step(regularizer, 1) is None
    assert one_step(regularizer, 2)["step"] == 2


@pytest.mark.parametrize("average_tokens_across_devices", [True, False])
def test_two_ranks_see_the_mean_over_all_tokens(average_tokens_across_devices):
    """30 nats over 20 tokens on one rank, 10 nats over 40 on the other. The stock loop divides by all 60 tokens and
    multiplies by the number of ranks, or divides by the rank's own tokens, which the callback then multiplies by it."""
    sums, counts = (30.0, 10.0), (20.0, 40.0)
    if average_tokens_across_devices:
        losses, items = [2 * nats / 60.0 for nats in sums], [60.0, 60.0]
    else:
        losses, items = [nats / count for nats, count in zip(sums, counts, strict=True)], [2 * n for n in counts]
    ranks = [started(tokens=None), started(tokens=None)]
    parts = []

    def collect(tensor):
        parts.append(tensor)
        return tensor

    for rank, loss, count in zip(ranks, losses, items, strict=True):
        one_step(rank, 1, [loss], count, mean_over_ranks=collect)
    mean = sum(parts) / 2
    rows = []
    for loss, count in zip(losses, items, strict=True):
        rank = started(tokens=None)
        rows.append(one_step(rank, 1, [loss], count, mean_over_ranks=lambda tensor: mean))
        assert rank.progress.tokens_n == pytest.approx(60.0 * 10)
    assert rows[0] == rows[1]
    assert rows[0]["loss"] == pytest.approx(40.0 / 60.0)
    assert rows[0]["tokens"] == pytest.approx(60.0)


def test_n_is_given_or_estimated_from_the_first_window():
    assert started(tokens=None).progress.tokens_n is None
    estimated = started(tokens=None, control_frequency=2)
    one_step(estimated, 1, items=40.0)
    one_step(estimated, 2, items=60.0)
    assert estimated.progress.tokens_n == 50.0 * 10
    assert started(tokens=7.0).progress.tokens_n == 7.0
    assert Regularizer(RegularizationSettings(tokens=5), layer(), 7.0).progress.tokens_n == 5


def test_n_that_nobody_knows_is_an_error():
    with pytest.raises(ControlError, match=r"give regularization_tokens \(scu_tokens"):
        one_step(started(tokens=None), 1, items=None)
    row = one_step(started(), 1, losses=(1.5,), items=None)
    assert row["loss"] == pytest.approx(1.5)


def test_a_skipped_step_is_no_measurement():
    regularizer = started()
    regularizer.observe_loss(torch.tensor(1e9))
    regularizer.discard_step()
    assert one_step(regularizer, 2, losses=(1.0,))["loss"] == pytest.approx(1.0)


def test_a_window_that_is_not_finite_decides_nothing():
    regularizer = started(law="original")
    one_step(regularizer, 1)
    before = regularizer.state
    row = one_step(regularizer, 2, losses=(math.nan,))
    assert regularizer.state == replace(before, skipped=1, skipped_steps=1)
    assert math.isnan(row["loss"])


@pytest.mark.parametrize("loss", [0.0, -0.03])
@pytest.mark.parametrize("target", [None, 0.1])
def test_a_loss_that_is_no_length_gives_no_s_and_is_said_once(loss, target):
    """Of a policy: stock TRL's GRPO logs 0 in its first step, and less later."""
    regularizer = started(target_s=target)
    before = regularizer.state.lam
    rows = [one_step(regularizer, step, losses=(loss,)) for step in (1, 2)]
    assert [row["s"] for row in rows] == [None, None] and regularizer.state.lam == before
    (said,) = regularizer.progress.notices
    assert f"it was {loss:.3g} at step 1" in said and ("Lambda stays" in said) == (target is not None)
    assert 0 < one_step(regularizer, 3)["s"] < 1


def test_a_checkpoint_inside_a_broken_interval_can_be_read_back(tmp_path):
    regularizer = started(control_frequency=5)
    one_step(regularizer, 1, losses=(math.nan,))
    write_json(tmp_path / "state.json", regularizer.state_dict())
    saved = read_json(tmp_path / "state.json")
    resumed = Regularizer(regularizer.settings, layer())
    resumed.load_state_dict(saved, prior=regularizer.prior.state_dict())
    resumed.start(max_steps=10, steps_per_epoch=10, seed=0)
    assert math.isnan(float(resumed._interval[0][0]))


# -- acting ------------------------------------------------------------------------------------------------------------


def test_the_pull_uses_the_lambda_decided_before():
    regularizer = started(law="schedule", lambda_init=20.0, lambda_final=0.0, max_steps=2)
    one_step(regularizer, 1, move=1.0)
    assert regularizer.prior.weights[0].detach() == pytest.approx(0.98 * torch.ones(4, 4).numpy(), rel=1e-6)
    assert regularizer.state.lam == 10.0
    row = one_step(regularizer, 2, move=0.0)
    assert regularizer.prior.weights[0].detach() == pytest.approx(0.98 * 0.99 * torch.ones(4, 4).numpy(), rel=1e-6)
    assert row["shrink"] == 0.01


def test_the_pull_is_part_of_the_next_estimate_of_growth():
    """The distance gains 10 % by learning and loses 5 % by the pull: growth is 2 ln 1.1, not the net change."""
    regularizer = started(law="fixed", lambda_init=50.0)
    one_step(regularizer, 1, move=1.0)
    for step in range(2, 6):
        one_step(regularizer, step, move=0.1 * 0.95 * (1.1 * 0.95) ** (step - 2))
        assert regularizer.state.growth == pytest.approx(2 * math.log(1.1), rel=1e-4)


def test_penalty_is_the_published_one_per_token():
    """lambda / (sigma^2 N) * (w - w0) = 2 / (0.01 * 1000) * 0.5, times the scale of a GradScaler."""
    module = layer()
    regularizer = started(module, law="original", lambda_init=2.0)
    with torch.no_grad():
        module.weight.add_(0.5)
    module.weight.grad = torch.ones(4, 4)
    regularizer.add_penalty(loss_scale=8.0)
    torch.testing.assert_close(module.weight.grad, torch.full((4, 4), 1.0 + 8.0 * 0.1))


@pytest.mark.parametrize("settings", [{"law": "model"}, {"law": "original", "actuator": "decoupled"}], ids=str)
def test_decoupled_laws_leave_gradients_alone(settings):
    module = layer()
    regularizer = started(module, **settings)
    with torch.no_grad():
        module.weight.add_(0.5)
    module.weight.grad = torch.ones(4, 4)
    regularizer.add_penalty()
    assert torch.equal(module.weight.grad, torch.ones(4, 4))


def test_no_penalty_before_n_is_known():
    module = layer()
    regularizer = started(module, law="original", tokens=None)
    with torch.no_grad():
        module.weight.add_(0.5)
    module.weight.grad = torch.ones(4, 4)
    regularizer.add_penalty()
    assert torch.equal(module.weight.grad, torch.ones(4, 4))


def test_bfloat16_weights_round_differently_at_every_step_and_the_same_in_every_run():
    outcomes = []
    torch.manual_seed(0)
    before = nn.Linear(32, 32, bias=False).bfloat16().weight.detach()
    for _ in range(2):
        module = nn.Linear(32, 32, bias=False).bfloat16()
        regularizer = started(module, law="fixed", lambda_init=0.5, prior="zero")
        for step in (1, 2):
            with torch.no_grad():
                module.weight.copy_(before)
            one_step(regularizer, step, move=0.0)
            outcomes.append(module.weight.detach().clone())
    first, second, *again = outcomes
    assert not torch.equal(first, before)
    assert not torch.equal(first, second)
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])


# -- notices -----------------------------------------------------------------------------------------------------------


def notices_of(regularizer, steps: int, move=lambda step: 0.01, **step_changes) -> list[str]:
    for step in range(1, steps + 1):
        one_step(regularizer, step, move=move(step), **step_changes)
    return regularizer.progress.notices


def test_a_target_out_of_reach_is_said_once():
    notices = notices_of(started(sigma=10.0), 80)
    assert len(notices) == 1
    assert notices[0].startswith("SCU target out of reach: S is ")
    assert "lower scu_target_s" in notices[0]


def test_a_target_in_reach_is_not_talked_about():
    assert notices_of(started(sigma=0.5, max_steps=4000), 80) == []


def test_a_run_that_ends_while_s_is_still_let_up_says_so():
    slow, quick = ({"max_steps": 24, "sigma": 0.05, "time_constant": steps} for steps in (10.0, 2.0))
    (notice,) = notices_of(started(**slow), 24)
    assert notice.startswith("SCU slowed S before its target: S is ")
    assert "(10 steps); lower scu_time_constant, or train longer" in notice
    assert notices_of(started(**quick), 24) == []


def test_lost_control_is_said_once_with_the_way_out():
    notices = notices_of(started(max_shrink=1e-6), 3 * STUCK_DECISIONS, move=lambda step: 0.05)
    assert len(notices) == 1
    assert notices[0].startswith("SCU has lost control: lambda has been at its upper bound")
    assert "raise scu_max_shrink" in notices[0]


def test_lost_control_is_said_when_s_leaves_late():
    """Stuck at the bound just above target first, far above only after the 20th decision."""
    regularizer = started()
    high = dict(asdict(regularizer.state), saturated="high", decisions=50)
    for step in range(1, 2 * STUCK_DECISIONS):
        s_ema = 0.105 if step <= STUCK_DECISIONS else 0.2
        regularizer.state = type(regularizer.state)(**{**high, "s_ema": s_ema, "reached_step": 1})
        regularizer._check_progress(Measurement(step, 1, 1.0, 0.1, 1e-3))
        assert len(regularizer.progress.notices) == (step > STUCK_DECISIONS)


def test_weights_that_cannot_follow_are_noticed_once():
    """Large weights, one float32 step per optimizer step: the pull rounds to nothing at every probe."""
    regularizer = started(layer(1e6), law="fixed", lambda_init=0.0)
    with torch.no_grad():
        for step in range(1, 20):
            weight = regularizer.prior.weights[0]
            weight.copy_(torch.nextafter(weight, torch.tensor(math.inf)))
            one_step(regularizer, step, move=0.0)
    assert len(regularizer.progress.notices) == 1
    assert regularizer.progress.notices[0].startswith("SCU cannot act: decaying the weights by 1 %")
    assert regularizer.progress.gain == 2.0


def test_the_measured_gain_reaches_the_law():
    from tests.tiny import llama, lora

    regularizer = started(lora(llama()), prior="zero")
    for step in (1, 2, 3):
        one_step(regularizer, step)
    assert regularizer.progress.gain == pytest.approx(4.0, abs=0.01)


def test_a_penalty_without_effect_is_noticed_once():
    module = layer()
    regularizer = started(module, law="original", sigma=1000.0, control_frequency=4)
    for step in range(1, 20):
        module.weight.grad = torch.full((4, 4), float(step))
        regularizer.add_penalty()
        one_step(regularizer, step)
    cannot = [text for text in regularizer.progress.notices if text.startswith("SCU cannot act: even at lambda 10")]
    assert len(cannot) == 1
    assert len(regularizer.progress.notices) == 1


# -- checkpoints -------------------------------------------------------------------------------------------------------


def saved_after(steps: int, **settings):
    regularizer = started(**settings)
    for step in range(1, steps + 1):
        one_step(regularizer, step, move=0.1)
    return regularizer, json.loads(json.dumps(regularizer.state_dict()))


@pytest.mark.parametrize("law", ["model", "original"])
def test_state_goes_through_json_and_continues(law):
    regularizer, saved = saved_after(5, law=law)
    assert regularizer.state.lam > 0
    other = Regularizer(RegularizationSettings(law=law, target_s=0.1), layer(), tokens=123.0)
    other.load_state_dict(saved, prior=None)
    other.start(100, steps_per_epoch=10, seed=0)
    assert other.state == regularizer.state
    assert other.progress == regularizer.progress


@pytest.mark.parametrize("target", [0.4, "auto"])
def test_a_changed_target_replaces_the_saved_one(target):
    _, saved = saved_after(5, target_s=0.02)
    assert saved["state"]["reached_step"] is not None
    other = Regularizer(RegularizationSettings(target_s=target), layer())
    other.load_state_dict(saved, prior=None)
    other.start(100, steps_per_epoch=10, seed=0)
    assert other.state.target_s == (None if target == "auto" else 0.4)
    assert other.state.reached_step is None
    assert not other.progress.outlook_done
    assert other.state.growth == saved["state"]["growth"]


@pytest.mark.parametrize("law", ["model", "original"])
def test_without_a_target_s_is_measured_as_it_is_logged_and_lambda_stays_0(law):
    regularizer = started(layer(), max_steps=7, target_s=None, law=law)
    regularizer.start(7, steps_per_epoch=10, seed=0, logging_steps=3)
    rows = [one_step(regularizer, step, move=0.1) for step in range(1, 8)]
    assert [row["step"] for row in rows if row is not None] == [3, 6, 7]
    assert {(row["lambda"], row["shrink"], row["s_target"], row["saturated"]) for row in rows if row} == {
        (0.0, 0.0, None, "")
    }
    assert rows[6]["s"] > rows[2]["s"] > 0 and regularizer.progress.notices == []
    assert torch.allclose(regularizer.prior.weights[0], torch.full((4, 4), 0.7))


@pytest.mark.parametrize("law", ["model", "original"])
@pytest.mark.parametrize("before, after", [(0.02, None), (None, 0.02)])
def test_steering_that_is_switched_on_or_off_at_a_resume_starts_where_a_new_run_does(law, before, after):
    _, saved = saved_after(5, law=law, target_s=before)
    assert (saved["state"]["lam"] > 0) == (before is not None)
    other = Regularizer(RegularizationSettings(law=law, target_s=after), layer())
    other.load_state_dict(saved, prior=None)
    other.start(100, steps_per_epoch=10, seed=0)
    assert other.state.lam == (1.0 if law == "original" and after else 0.0)
    assert (other.state.target_s, other.state.s_ema) == (after, saved["state"]["s_ema"])


def test_a_changed_fixed_lambda_replaces_the_saved_one():
    _, saved = saved_after(2, law="fixed", lambda_init=3.0)
    other = Regularizer(RegularizationSettings(law="fixed", lambda_init=7.0), layer())
    other.load_state_dict(saved, prior=None)
    other.start(100, steps_per_epoch=10, seed=0)
    assert other.state.lam == 7.0


def test_windows_since_the_last_decision_are_part_of_a_checkpoint():
    settings = {"control_frequency": 3, "law": "fixed"}
    whole = started(**settings)
    one_step(whole, 1, losses=(1.0,), items=10.0)
    one_step(whole, 2, losses=(2.0,), items=torch.tensor(30))
    resumed = Regularizer(RegularizationSettings(target_s=0.1, **settings), layer())
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())), prior=None)
    resumed.start(100, steps_per_epoch=10, seed=0)
    rows = [one_step(regularizer, 3, losses=(0.5,), items=60.0) for regularizer in (whole, resumed)]
    assert rows[0]["loss"] == rows[1]["loss"] == pytest.approx((1.0 * 10 + 2.0 * 30 + 0.5 * 60) / 100)
    assert rows[0]["tokens"] == rows[1]["tokens"] == 100.0


def test_a_second_training_starts_afresh():
    regularizer, _ = saved_after(5)
    regularizer.start(100, steps_per_epoch=10, seed=0)
    assert regularizer.state.decisions == 0
    assert regularizer.state.lam == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sigma": 0.2}, "scu_sigma is 0.2, the checkpoint was written with 0.1"),
        ({"law": "original"}, "scu_law is 'original', the checkpoint was written with 'model'"),
        ({"measure": "factors"}, "scu_measure"),
        ({"prior": "zero"}, "scu_prior"),
        ({"tokens": 5}, "scu_tokens is 5, the checkpoint was written with None"),
    ],
)
def test_another_ruler_is_refused(changes, message):
    _, saved = saved_after(2)
    with pytest.raises(CheckpointError, match=message):
        Regularizer(RegularizationSettings(**{"target_s": 0.1, **changes}), layer()).load_state_dict(saved, prior=None)


def test_another_start_is_refused():
    _, saved = saved_after(2)
    with pytest.raises(
        CheckpointError,
        match=r"lambda would decay toward a different point.*same model_name_or_path "
        "and seed",
    ):
        Regularizer(RegularizationSettings(target_s=0.1), layer(0.1)).load_state_dict(saved, prior=None)


def test_a_saved_prior_replaces_the_start():
    regularizer, saved = saved_after(2)
    other = Regularizer(RegularizationSettings(target_s=0.1), layer(0.1))
    other.load_state_dict(saved, prior=regularizer.prior.state_dict())
    assert torch.equal(other.prior.starts[0], torch.zeros(4, 4))


# -- settings and launchers --------------------------------------------------------------------------------------------


def test_resolve_fills_in_every_default():
    law = resolve(RegularizationSettings(law="original", target_s=0.1, stop_at_target=True), 50)
    assert (law.name, law.actuator, law.lambda_min, law.lambda_max) == ("original", "penalty", 1e-4, 10.0)
    assert (law.ema_alpha, law.deadband, law.max_steps, law.wait_for_target) == (0.1, 0.002, 50, True)
    assert resolve(RegularizationSettings(target_s="auto"), 50).target_s is None
    assert resolve(RegularizationSettings(target_s=0.3), 50).target_s == 0.3


def test_held_out_results_only_matter_to_auto():
    for target, expected in (("auto", 4.0), (0.1, None)):
        regularizer = started(target_s=target)
        one_step(regularizer, 1)
        regularizer.observe_held_out(4.0)
        assert regularizer.state.best_held_out_bpt == expected


def test_auto_frees_then_holds():
    regularizer = started(target_s="auto", max_steps=1000)
    target = None
    for step in range(1, 200):
        one_step(regularizer, step)
        if step % 10 == 0:
            regularizer.observe_held_out(4.0 if step < 60 else 4.0 + step)
        if regularizer.state.target_s is None:
            assert shrink_fraction(regularizer.config, regularizer.state, 1e-3) == 0.0
        target = target or regularizer.state.target_s
    assert regularizer.state.target_s == target is not None
    assert regularizer.state.lam > 0.0
    assert regularizer.state.s_ema == pytest.approx(target, rel=0.1)


def launched(**changes) -> SimpleNamespace:
    """What ``prior_class_for`` asks a Trainer."""
    flags = {"is_deepspeed_enabled": False, "is_fsdp_enabled": False, "args": SimpleNamespace(n_gpu=1)}
    return SimpleNamespace(**{**flags, **changes})


def test_launchers_that_lambda_cannot_reach_are_refused():
    assert prior_class_for(launched(), RegularizationSettings(target_s=0.1)) is Prior
    with pytest.raises(ControlError, match=r"FSDP keeps the trained weights in shards.*or set scu: false"):
        prior_class_for(launched(is_fsdp_enabled=True), RegularizationSettings(target_s=0.1))
    with pytest.raises(ControlError, match="one process drives 2 GPUs"):
        prior_class_for(launched(args=SimpleNamespace(n_gpu=2)), RegularizationSettings(target_s=0.1))


def test_description_holds_what_defaults_became():
    text = started(law="original", max_steps=70).description()
    assert text["resolved"]["actuator"] == "penalty"
    assert text["resolved"]["max_steps"] == 70
    assert (text["sigma"], text["tokens_n"], text["target_s"]) == (0.1, N, 0.1)
