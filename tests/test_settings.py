"""Settings are checked when they are made, and messages name the field, what was found and what to do."""

from __future__ import annotations

import math
import re
from dataclasses import FrozenInstanceError, asdict, fields

import numpy
import pytest

from scu_trainer.errors import SettingsError, UserError
from scu_trainer.settings import (
    CurriculumSettings,
    DataSettings,
    EfficiencySettings,
    MemorySettings,
    ModelSettings,
    RegularizationSettings,
    SafetySettings,
)
from scu_trainer.settings.base import check_text

SCU, MODEL, DATA, EFFICIENCY = RegularizationSettings, ModelSettings, DataSettings, EfficiencySettings

REFUSED = [
    # a choice that does not exist, with the nearest one
    (
        SCU,
        {"law": "orginal"},
        r"law is 'orginal'; allowed: model, original, fixed, schedule \(did you mean 'original'\?\)",
    ),
    (SCU, {"measure": "factor"}, r"did you mean 'factors'"),
    (ModelSettings, {"init_lora_weights": [None]}, r"init_lora_weights is \[None\]; it must be text"),
    (DATA, {"dataset": {"a": 1}}, r"dataset is {'a': 1}; it must be text"),
    (ModelSettings, {"new_tokens": ["<a>", 1]}, r"new_tokens has 1, which must be text"),
    (SCU, {"prior": "one"}, r"allowed: init, zero"),
    (SCU, {"schedule": "cosin"}, r"did you mean 'cosine'"),
    (SCU, {"actuator": "decouple"}, r"did you mean 'decoupled'"),
    (MODEL, {"tuning": "lorra"}, r"did you mean 'lora'"),
    (MODEL, {"dtype": "bf16"}, r"allowed: auto, float32, bfloat16, float16"),
    # targets
    (SCU, {"target_s": 0.0}, r"scu_target_s is 0.0; it must lie between 0 and 1"),
    (SCU, {"target_s": 1}, r"scu_target_s is 1.0"),
    (SCU, {"target_s": math.nan}, r"scu_target_s is nan"),
    (SCU, {"target_s": "ten"}, r"scu_target_s is 'ten'; allowed: a number between 0 and 1, auto, or none"),
    # numbers out of range
    (SCU, {"sigma": 0.0}, r"scu_sigma is 0.0; it must be above 0"),
    (SCU, {"sigma": math.inf}, r"scu_sigma is inf; it must be a finite number"),
    (SCU, {"sigma": numpy.float32(-1)}, r"scu_sigma is -1.0; it must be above 0"),
    (SCU, {"time_constant": -1.0}, r"scu_time_constant"),
    (SCU, {"max_shrink": 1.5}, r"scu_max_shrink is 1.5"),
    (SCU, {"max_shrink": math.nan}, r"scu_max_shrink is nan"),
    (SCU, {"growth_alpha": 0.0}, r"scu_growth_alpha is 0.0; it must be above 0, such as 0.2"),
    (SCU, {"ema_alpha": 1.1}, r"scu_ema_alpha is 1.1"),
    (SCU, {"control_frequency": 0}, r"scu_control_frequency is 0; it must be 1 or more"),
    (SCU, {"auto_patience": 0}, r"scu_auto_patience is 0"),
    (SCU, {"integral_leak": 1.01}, r"scu_integral_leak is 1.01; it must be 1 or less"),
    (SCU, {"integral_clamp": -0.1}, r"scu_integral_clamp is -0.1"),
    (SCU, {"tokens": 0}, r"scu_tokens is 0"),
    (SCU, {"hold_steps": -1}, r"scu_hold_steps is -1"),
    (SCU, {"lambda_init": -1.0}, r"scu_lambda_init is -1.0; it must be 0 or more"),
    (SCU, {"lambda_final": math.inf}, r"scu_lambda_final is inf"),
    (SCU, {"deadband": -0.001}, r"scu_deadband is -0.001"),
    (SCU, {"kp": math.nan}, r"scu_kp is nan; it must be 0 or more"),
    (SCU, {"ki": -0.1}, r"scu_ki is -0.1; it must be 0 or more"),
    (MODEL, {"lora_r": 0}, r"lora_r is 0; it must be 1 or more"),
    (MODEL, {"lora_alpha": 0.0}, r"lora_alpha is 0.0"),
    (MODEL, {"lora_dropout": 1.0}, r"lora_dropout is 1.0; it must be below 1"),
    (MODEL, {"embedded_base_steps": 0}, r"embedded_base_steps is 0"),
    (DATA, {"dataset": ""}, r"dataset is empty"),
    (DATA, {"block_size": 7}, r"block_size is 7; it must be 8 or more, such as 512"),
    (DATA, {"dataset_size": 0}, r"dataset_size is 0"),
    (DATA, {"max_eval_documents": 0}, r"max_eval_documents is 0"),
    (DATA, {"preprocessing_num_workers": 0}, r"preprocessing_num_workers"),
    (DATA, {"validation_split_percentage": 100.0}, r"validation_split_percentage is 100.0"),
    (DATA, {"validation_split_percentage": 1e16}, r"validation_split_percentage is 1e\+16; it must be below 100"),
    # texts for switches and numbers, which Python would take
    (SCU, {"stop_at_target": "false"}, r"scu_stop_at_target is 'false'; it must be true or false"),
    (SCU, {"hold_steps": True}, r"scu_hold_steps is True; it must be a whole number"),
    (SCU, {"kp": None}, r"scu_kp is None; it must be a number"),
    (MODEL, {"lora_r": 8.5}, r"lora_r is 8.5; it must be a whole number"),
    (MODEL, {"lora_alpha": "16"}, r"lora_alpha is '16'; it must be a number"),
    (EFFICIENCY, {"lr_milestones": 0.5}, r"lr_milestones is 0.5; it must be a list"),
    (CurriculumSettings, {"curriculum": 5}, r"curriculum is '5'; allowed: none, token_budget"),
    # fields that contradict each other
    (SCU, {"lambda_min": 2.0, "lambda_max": 1.0}, r"scu_lambda_min 2.0 exceeds scu_lambda_max 1.0"),
    (SCU, {"law": "original", "lambda_init": 11.0}, r"scu_lambda_init 11.0 is outside \[0.0001, 10.0\]"),
    (SCU, {"law": "original", "lambda_min": 0.0}, r"scu_lambda_min is 0; the original law multiplies"),
    (SCU, {"law": "original", "target_s": "auto"}, r"auto works only with scu_law: model, but scu_law is original"),
    (SCU, {"law": "model", "actuator": "penalty"}, r"scu_law: model knows the gain of the decoupled actuator only"),
    (SCU, {"stop_at_target": True, "target_s": "auto"}, r"scu_stop_at_target needs a number"),
    (SCU, {"hold_steps": 5}, r"scu_hold_steps has an effect only with scu_stop_at_target"),
    (SCU, {"law": "fixed", "stop_at_target": True, "hold_steps": 5}, r"needs a law that can hold S"),
    (SCU, {"kp": 0.5}, r"scu_kp has an effect only with a target.*add scu_target_s: 0.1 \(or auto\), or drop scu_kp"),
    (SCU, {"stop_at_target": True}, r"scu_stop_at_target has an effect only with a target"),
    (SCU, {"control_frequency": 4}, r"scu_control_frequency has an effect only with a target"),
    (SCU, {"law": "fixed", "stop_at_target": True}, r"scu_stop_at_target has an effect only with a target"),
    (SCU, {"law": "original", "lambda_init": 2.0}, r"scu_lambda_init has an effect only with a target"),
    (DATA, {"isolate_documents": True, "packing": False}, r"isolate_documents has an effect only with packing"),
]


@pytest.mark.parametrize(("settings", "changes", "message"), REFUSED, ids=lambda value: str(value))
def test_bad_values_are_refused_with_a_way_out(settings, changes, message):
    with pytest.raises(SettingsError, match=message) as caught:
        settings(**changes)
    assert isinstance(caught.value, UserError)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("settings", [SCU, MODEL, DATA, EFFICIENCY, CurriculumSettings, MemorySettings, SafetySettings])
def test_no_number_is_negative_or_not_finite_of_whatever_type(settings):
    numbers = [item.name for item in fields(settings) if type(item.default) in (int, float)]
    assert numbers
    for name in numbers:
        for value in (-1, -0.5, math.nan, math.inf, numpy.float32(-1), numpy.float32("inf"), numpy.int64(-1)):
            with pytest.raises(SettingsError, match=rf"{name} is .*; (it must be|allowed: )"):
                settings(**{name: value})


def test_a_whole_number_may_be_written_as_a_float():
    assert SCU(tokens=1e3).tokens == 1000


@pytest.mark.parametrize("settings", [SCU, MODEL, DATA])
def test_defaults_are_valid_frozen_and_explained(settings):
    made = settings()
    with pytest.raises(FrozenInstanceError):
        setattr(made, fields(made)[0].name, None)
    assert settings(**asdict(made)) == made
    assert [item.name for item in fields(made) if not item.metadata["help"]] == []


@pytest.mark.parametrize(
    ("given", "kept"),
    [("auto", "auto"), ("0.25", 0.25), (0.25, 0.25), (5e-4, 5e-4), ("1e-3", 1e-3), (None, None), ("none", None)],
)
def test_target_is_a_number_or_auto_or_none(given, kept):
    assert SCU(target_s=given).target_s == kept


@pytest.mark.parametrize(
    ("law", "actuator", "bounds", "ema_alpha", "deadband"),
    [
        ("model", "decoupled", (0.0, math.inf), 0.05, 0.0),
        ("original", "penalty", (1e-4, 10.0), 0.1, 0.002),
        ("fixed", "decoupled", (0.0, math.inf), 0.05, 0.0),
        ("schedule", "decoupled", (0.0, math.inf), 0.05, 0.0),
    ],
)
def test_defaults_depend_on_the_law(law, actuator, bounds, ema_alpha, deadband):
    settings = SCU(law=law)
    assert settings.resolved_actuator == actuator
    assert settings.lambda_bounds == bounds
    assert settings.resolved_ema_alpha == ema_alpha
    assert settings.resolved_deadband == deadband


def test_a_given_value_beats_the_default_of_the_law():
    settings = SCU(
        law="original",
        target_s=0.1,
        actuator="decoupled",
        lambda_min=0.5,
        lambda_max=2.0,
        ema_alpha=1.0,
        deadband=0.0,
        lambda_init=0.5,
    )
    assert settings.resolved_actuator == "decoupled"
    assert settings.lambda_bounds == (0.5, 2.0)
    assert (settings.resolved_ema_alpha, settings.resolved_deadband) == (1.0, 0.0)


def test_one_bound_may_be_given_alone():
    assert SCU(law="original", target_s=0.1, lambda_max=2.0).lambda_bounds == (1e-4, 2.0)
    assert SCU(target_s=0.1, lambda_min=0.5).lambda_bounds == (0.5, math.inf)


@pytest.mark.parametrize(
    "allowed",
    [
        {"target_s": 0.1, "stop_at_target": True, "hold_steps": 10},
        {"target_s": 0.1, "stop_at_target": True, "law": "original", "hold_steps": 10},
        {"target_s": 0.1, "stop_at_target": True, "law": "fixed"},
        {"law": "fixed", "actuator": "penalty", "lambda_init": 0.0},
        {"law": "schedule", "schedule": "cosine", "lambda_init": 0.0, "lambda_final": 5.0},
        {"target_s": "auto", "max_shrink": 1.0, "growth_alpha": 1.0},
        {"law": "original", "sigma": 0.2, "measure": "factors", "prior": "zero", "tokens": 5, "ema_alpha": 0.3},
    ],
    ids=str,
)
def test_combinations_that_make_sense_are_allowed(allowed):
    SCU(**allowed)


@pytest.mark.parametrize(
    ("settings", "steers"),
    [({}, False), ({"law": "original"}, False), ({"law": "fixed"}, True), ({"law": "schedule"}, True),
     ({"target_s": 0.1}, True), ({"target_s": "auto"}, True)],
)  # fmt: skip
def test_a_target_or_a_law_that_needs_none_turns_steering_on(settings, steers):
    assert SCU(**settings).steers == steers


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"token_cap": "many"}, "token_cap is 'many'; allowed: a number of tokens, or auto"),
        ({"token_cap": 0}, "token_cap is 0"),
        ({"min_batch_size": 0}, "min_batch_size is 0; it must be 1 or more"),
        ({"min_batch_size": 9, "max_batch_size": 8}, "min_batch_size 9 exceeds max_batch_size 8; lower min_batch_size"),
        ({"target_headroom_gb": "much"}, "target_headroom_gb is 'much'; allowed: GiB such as 1.5, or a share '8%'"),
        ({"target_headroom_gb": "100%"}, "from 0% to below 100%"),
        ({"target_headroom_gb": -1}, "0 or more"),
        ({"pid_ki": -0.1}, "pid_ki is -0.1"),
        ({"gc_threshold_gb": math.nan}, "gc_threshold_gb is nan"),
        ({"batch_mode": "logicl"}, "did you mean 'logical'?"),
        ({"memory_control": "false"}, "memory_control is 'false'; it must be true or false"),
        ({"memory_limit_gb": "2"}, "memory_limit_gb is '2'; it must be a number"),
        ({"max_batch_size": "4"}, "max_batch_size is '4'; it must be a whole number"),
        ({"batch_mode": "logical", "memory_control": False}, "needs memory_control: true"),
    ],
    ids=str,
)
def test_memory_settings_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(SettingsError, match=re.escape(message)):
        MemorySettings(**wrong)


@pytest.mark.parametrize(
    ("given", "cap", "acts"),
    [
        ({}, "auto", True),
        ({"token_cap": "512"}, 512, True),
        ({"memory_control": False}, None, False),
        ({"memory_control": False, "token_cap": "auto"}, "auto", True),
    ],
    ids=str,
)
def test_the_cap_is_automatic_where_memory_is_controlled(given, cap, acts):
    settings = MemorySettings(**given)
    assert (settings.resolved_token_cap, settings.acts) == (cap, acts)


@pytest.mark.parametrize(("given", "kept", "share"), [("8%", "8%", 0.08), ("1.5", 1.5, None), (2, 2.0, None)])
def test_headroom_is_a_share_or_gibibytes(given, kept, share):
    settings = MemorySettings(target_headroom_gb=given)
    assert (settings.target_headroom_gb, settings.headroom_share) == (kept, share)


def test_a_name_that_this_locale_does_not_read_is_told_apart(monkeypatch):
    name = "über".encode().decode("ascii", "surrogateescape")
    with pytest.raises(SettingsError, match="not valid UTF-8; give the file or folder a name in UTF-8"):
        check_text("output_dir", name, is_name=True)
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "ascii")
    for given in (name, "über"):  # a flag that was read so, and a line of a file, which is read as UTF-8
        with pytest.raises(SettingsError, match="this process reads names as ascii: set PYTHONUTF8=1"):
            check_text("output_dir", given, is_name=True)
    check_text("instruction_template", "über", is_name=False)
