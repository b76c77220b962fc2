"""Which settings stand in for which, and in what order they are tried."""

from __future__ import annotations

import pytest

from scu_trainer.hardware.recommend import (
    NOTHING,
    OPTIMIZER,
    ROUNDING,
    ROWS,
    WEIGHTS,
    AvailableChanges,
    SettingChoice,
    choices,
)

FULL = SettingChoice("full", "no", False, "adamw_torch_fused", block_size=1024)
LORA = SettingChoice("lora", "bf16", False, "adamw_torch_fused", block_size=1024)
ALL = AvailableChanges(half="bf16", stored_half=False, adapters=True, bitsandbytes=True, offloading=True)
NONE = AvailableChanges(half=None, stored_half=False, adapters=False, bitsandbytes=False, offloading=False)


@pytest.mark.parametrize("asked", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("means", [ALL, NONE], ids=["all", "none"])
def test_what_is_asked_first_then_by_change_and_time_and_nothing_twice(asked, means):
    found = choices(asked, means, "cuda")
    assert found[0] == asked and len(set(found)) == len(found)
    order = [(choice.change(asked), -choice.block_size, choice.time("cuda")) for choice in found[1:]]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("changes", "change"),
    [
        ({}, NOTHING),
        ({"checkpoint_every_layer": True}, NOTHING),
        ({"offload": True}, NOTHING),
        ({"mixed_precision": "bf16"}, ROUNDING),
        ({"optim": "adafactor", "mixed_precision": "bf16"}, OPTIMIZER),
        ({"tuning": "lora"}, WEIGHTS),
        ({"tuning": "lora", "block_size": 512}, ROWS),
    ],
)
def test_how_much_of_the_result_changes(changes, change):
    assert SettingChoice(**{**vars(FULL), **changes}).change(FULL) == change


def test_lora_in_place_of_qlora_rounds_differently():
    assert SettingChoice(**{**vars(LORA), "tuning": "qlora"}).change(LORA) == ROUNDING


def test_without_bitsandbytes_nothing_needs_it():
    without = AvailableChanges(**{**vars(ALL), "bitsandbytes": False})
    found = choices(FULL, without, "cuda")
    assert not [choice for choice in found if choice.tuning == "qlora" or "bnb" in choice.optim]
    assert {choice.optim for choice in found} == {FULL.optim, "adafactor"}


def test_without_means_only_checkpoints_and_shorter_rows_are_left():
    found = choices(LORA, NONE, "cpu")
    assert {(c.checkpoint_every_layer, c.block_size) for c in found} == {
        (False, 1024),
        (True, 1024),
        (True, 512),
        (True, 256),
    }
    assert len(found) == 4


def test_rows_without_length_are_not_cut():
    images = SettingChoice("full", "no", False, "sgd")
    assert {choice.block_size for choice in choices(images, ALL, "cuda")} == {None}


def test_offloading_is_for_full_tuning_where_there_is_a_gpu():
    assert [choice for choice in choices(FULL, ALL, "cuda") if choice.offload]
    assert not [choice for choice in choices(LORA, ALL, "cuda") if choice.offload]
    assert not [choice for choice in choices(FULL, NONE, "cpu") if choice.offload]


def test_trained_weights_in_bfloat16_keep_their_optimizer():
    """The small ones would lose their steps, and are refused with them."""
    asked = SettingChoice("full", "bf16", False, "adamw_torch_8bit", dtype="bfloat16")
    assert {choice.optim for choice in choices(asked, ALL, "cuda") if choice.tuning == "full"} == {asked.optim}


def test_half_precision_that_is_asked_for_stays():
    assert {choice.mixed_precision for choice in choices(LORA, ALL, "cuda")} == {"bf16"}


def test_fp16_gets_packed_weights_beside_which_nothing_is_bfloat16():
    fp16 = SettingChoice("lora", "fp16", False, "adamw_torch_fused")
    found = choices(fp16, AvailableChanges("fp16", True, True, True, False), "cuda")
    assert "float16" in {choice.dtype for choice in found if choice.tuning == "qlora"}
    assert {choice.dtype for choice in found if choice.tuning == "lora"} == {"auto"}


def test_settings_are_what_differs():
    choice = SettingChoice("qlora", "bf16", True, "adamw_torch_fused", 512, load_in_8bit=True)
    assert choice.settings(LORA) == {
        "tuning": "qlora",
        "load_in_8bit": True,
        "checkpoint_every_layer": True,
        "block_size": 512,
    }
    assert LORA.settings(LORA) == {}
    assert SettingChoice(**{**vars(FULL), "offload": True}).settings(FULL) == {"deepspeed": "zero2_offload"}


def test_times_put_choices_in_the_order_that_they_have():
    times = [
        choice.time("cuda") for choice in (LORA, SettingChoice(**{**vars(LORA), "checkpoint_every_layer": True}), FULL)
    ]
    assert times == sorted(times)
