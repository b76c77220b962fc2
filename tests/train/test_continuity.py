"""What changed since a checkpoint: each kind of change has its verdict, and every name in the lists is a setting."""

from __future__ import annotations

import copy
import json

import pytest
from transformers import TrainingArguments

from scu_trainer.cli import fields
from scu_trainer.errors import CheckpointError
from scu_trainer.run_files import write_json
from scu_trainer.train.checkpoints import compatibility as subject
from scu_trainer.train.checkpoints.compatibility import (
    SettingChange,
    changed_settings,
    changes,
    check_compatibility,
    facts_of,
)
from scu_trainer.train.checkpoints.format import seal

LISTS = ("HARMLESS", "OTHER_SHAPE", "CARRIED", "SCHEDULE", "ORDER", "DATA")

NOW = {
    "configuration": {
        "learning_rate": 0.01,
        "lora_r": 8,
        "logging_steps": 10,
        "max_steps": 100,
        "seed": 1,
        "dataset": "a",
        "scu_target_s": 0.02,
        "warmup_steps": None,
    },
    "world_size": 2,
    "data": {"fingerprint": "abc", "documents": 7},
    "weights": {"base": "def", "teacher": None},
    "versions": {"torch": "2.0", "platform": "here", "peft": None},
    "git_commit": "1234",
}


def before(**settings) -> dict:
    return {**copy.deepcopy(NOW), "configuration": {**NOW["configuration"], **settings}}


# -- the lists ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LISTS)
def test_every_name_is_a_setting(name):
    known = {action.dest for action in fields.settings_parser(TrainingArguments)._actions}
    assert getattr(subject, name) - known == set()


def test_a_name_has_one_verdict():
    names = [name for each in LISTS for name in getattr(subject, each)]
    assert len(names) == len(set(names))


# -- verdicts ----------------------------------------------------------------------------------------------------------


def test_nothing_changed():
    assert changes(NOW, copy.deepcopy(NOW)) == []


@pytest.mark.parametrize("name", sorted(subject.HARMLESS))
def test_what_changes_no_weight_is_not_named(name):
    now = before(**{name: "other"})
    assert changes(before(**{name: "one"}), now) == []


@pytest.mark.parametrize(
    ("name", "value", "consequence"),
    [
        ("learning_rate", 0.02, "no effect"),
        ("max_steps", 50, "the new schedule"),
        ("seed", 2, "another order"),
        ("dataset", "b", "the data may not be those"),
        ("scu_target_s", 0.03, "acts from here on"),
    ],
)
def test_a_setting_and_its_consequence(name, value, consequence):
    (change,) = changes(before(**{name: value}), NOW)
    assert (change.name, change.before, change.now) == (name, value, NOW["configuration"][name])
    assert consequence in change.consequence and not change.is_refused
    assert change.line.startswith(f"{name} was {value}, now {NOW['configuration'][name]}: ")


def test_an_optimizer_that_reads_the_state_of_another_goes_on_as_that_one():
    (change,) = changes(before(optim="adamw_torch_fused"), before(optim="adamw_torch"))
    assert change.is_carried and not change.is_refused and "no effect" in change.line
    (change,) = changes(before(optim="adamw_torch_fused"), before(optim="sgd"))
    assert change.is_refused and not change.is_carried


def test_with_a_data_seed_another_seed_leaves_the_rows_as_they_are():
    (change,) = changes(before(seed=1, data_seed=5), before(seed=2, data_seed=5))
    assert "rows come as before, by data_seed" in change.consequence
    (change,) = changes(before(data_seed=4), before(data_seed=5))
    assert "another order" in change.consequence


@pytest.mark.parametrize(
    "other", [{"accelerator_config": {"use_seedable_sampler": False}}, {"train_sampling_strategy": "group_by_length"}]
)
def test_a_sampler_that_does_not_follow_data_seed_follows_seed(other):
    (change,) = changes(before(seed=1, data_seed=5, **other), before(seed=2, data_seed=5, **other))
    assert change.name == "seed" and "another order" in change.consequence


@pytest.mark.parametrize("is_command", [True, False])
def test_another_kind_of_sampler_draws_another_order(is_command):
    kinds = [{"use_seedable_sampler": is_seeded} for is_seeded in (True, False)]
    (change,) = changes(*[before(**({"accelerator_config": kind} if is_command else kind)) for kind in kinds])
    assert "the rows of this epoch come in another order" in change.line
    assert changes(before(accelerator_config=None), before(use_seedable_sampler=True)) == []


def test_what_a_trainer_tells_of_its_sampler_is_short(tmp_path):
    told = subject.facts_of_arguments(TrainingArguments(str(tmp_path), use_cpu=True))["configuration"]
    assert told["use_seedable_sampler"] is True and "accelerator_config" not in told


def test_as_many_rows_in_a_step_are_the_same_rows():
    was = before(per_device_train_batch_size=2, gradient_accumulation_steps=2)
    for now, text in (((4, 1), "the same rows"), ((2, 4), "another order")):
        now = before(per_device_train_batch_size=now[0], gradient_accumulation_steps=now[1])
        assert {text in change.consequence for change in changes(was, now)} == {True}
        stream = {"streaming": True, "dataloader_num_workers": 2}  # its workers give whole batches by turns
        for other in ({"dataloader_drop_last": True}, {"train_sampling_strategy": "group_by_length"}, stream):
            sides = [{**side, "configuration": side["configuration"] | other} for side in (was, now)]
            assert {"another order" in change.consequence for change in changes(*sides)} == {True}


def test_an_epoch_that_is_planned_loses_no_row_to_another_order():
    assert changes(before(seed=2), NOW)[0].consequence.endswith("so some are seen twice or not at all")
    assert changes(before(seed=2), NOW, has_plan=True)[0].consequence.startswith("this epoch ends with the rows that")
    (change,) = changes({**NOW, "data": {"fingerprint": "other"}}, NOW, has_plan=True)
    assert "if as many rows of the same lengths are left, the position" in change.consequence


def test_a_run_of_the_old_default_does_not_stop_steering_in_silence():
    (change,) = changes(before(scu_target_s=0.1), before(scu_target_s=None))
    assert change.line == (
        "scu_target_s was 0.1, now not set: S is measured from here on and no longer steered; give scu_target_s: 0.1 "
        "to hold it as before"
    )


@pytest.mark.parametrize("name", sorted(subject.OTHER_SHAPE))
def test_another_shape_is_refused(name):
    (change,) = changes(before(**{name: 1}), before(**{name: 2}))
    assert change.is_refused and "would not fit" in change.line


def test_a_setting_that_one_side_does_not_know_does_not_count():
    assert changed_settings({"gone": 1, "both": 1}, {"new": 2, "both": 1}) == {}


def test_values_are_compared_as_they_are_written():
    """A tuple is a list in JSON, a path a string; what json cannot write is compared as text."""
    assert changed_settings({"a": [1, 2], "b": "0.5"}, {"a": (1, 2), "b": 0.5}) == {"b": ("0.5", 0.5)}


@pytest.mark.parametrize(
    ("change", "name", "consequence"),
    [
        ({"world_size": 1}, "world_size", "ranks get other rows"),
        ({"data": {"fingerprint": "other"}}, "data", "seen twice or not at all"),
        (
            {"weights": {"base": "other", "teacher": "none now"}},
            "fingerprint of the base",
            "its weights differ from those",
        ),
        ({"versions": {"torch": "1.9", "platform": "there", "peft": None}}, "torch", "another version"),
        ({"git_commit": "4321"}, "git_commit", "the code has changed"),
    ],
)
def test_what_is_no_setting(change, name, consequence):
    (found,) = changes({**NOW, **change}, NOW)
    assert found.name == name and consequence in found.line and not found.is_refused


@pytest.mark.parametrize("key", ["world_size", "data", "weights", "versions", "git_commit"])
def test_what_was_not_known_then_does_not_count(key):
    known = {name: value for name, value in NOW.items() if name != key}
    assert changes(known, NOW) == []
    assert changes({**NOW, "git_commit": None}, NOW) == changes(NOW, {**NOW, "git_commit": None}) == []


def test_long_and_missing_values_are_short():
    assert SettingChange("a", None, "x" * 50, "so").line == f"a was not set, now {'x' * 37}...: so"


# -- with a checkpoint -------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    (folder / "trainer_state.json").write_text("{}")
    return folder


def test_the_manifest_says_of_which_run_it_is(checkpoint):
    seal(checkpoint, before(learning_rate=0.02))
    write_json(checkpoint.parent / "training_config.json", before(learning_rate=0.03))
    assert facts_of(checkpoint)["configuration"]["learning_rate"] == 0.02
    assert [change.name for change in check_compatibility(checkpoint, NOW)] == ["learning_rate"]


def test_without_one_the_run_beside_it_does(checkpoint):
    write_json(checkpoint.parent / "training_config.json", before(learning_rate=0.03))
    assert [change.before for change in check_compatibility(checkpoint, NOW)] == [0.03]


def test_of_a_stock_checkpoint_nothing_is_known(checkpoint):
    assert check_compatibility(checkpoint, NOW) == []
    seal(checkpoint, {"step": 4})
    assert json.loads((checkpoint / "manifest.json").read_text())["complete"] is True
    assert check_compatibility(checkpoint, NOW) == []


def test_all_that_is_refused_is_named(checkpoint):
    seal(checkpoint, before(lora_r=4, tuning="full", seed=5))
    with pytest.raises(CheckpointError) as refused:
        check_compatibility(checkpoint, before(tuning="lora"))
    said = str(refused.value)
    assert "lora_r was 4, now 8" in said and "tuning was full, now lora" in said and "seed" not in said
    assert "--no_resume" in said


@pytest.mark.parametrize("was", [{"split_seed": 3}, {"seed": 3}], ids=["known", "of a version with one seed"])
def test_another_split_is_refused_and_the_way_on_is_said(was):
    settings = before(validation_split_percentage=10)
    now = {**settings, "seed": 4, "split_seed": 5, "data": {"fingerprint": "of the other rows"}}
    change, of_data = changes({**settings, **was}, now)
    assert change.is_refused and "was 3, now 5" in change.line and "set data_seed: 3" in change.line
    assert of_data.name == "data" and not of_data.is_refused
    assert changes({**settings, **was, "data": {}}, {**now, "data": {}}) == [change]
    assert changes({**settings, **was}, {**settings, "seed": 4, "split_seed": 3}) == []


def test_another_seed_that_holds_out_the_same_rows_resumes():
    """Its fingerprint names the rows of both sides, as where the manifest of recordings has splits."""
    settings = before(validation_split_percentage=10)
    assert changes({**settings, "split_seed": 3}, {**settings, "split_seed": 5}) == []


@pytest.mark.parametrize("held_out", [{"validation_split_percentage": 0}, {"eval_dataset": "other.jsonl"}])
def test_where_no_share_is_held_out_no_seed_splits(held_out):
    settings = before(**{"validation_split_percentage": 10, **held_out})
    assert changes({**settings, "split_seed": 3}, {**settings, "split_seed": 5}) == []


def test_a_data_seed_that_is_the_seed_of_before_changes_no_row():
    """As the refusal of another seed says to type."""
    before, now = {"seed": 42, "data_seed": None}, {"seed": 7, "data_seed": 42}
    (told,) = changes({"configuration": before}, {"configuration": now, "data": {}})
    assert told.name == "seed" and "rows come as before" in told.line
    assert len(changes({"configuration": before}, {"configuration": {**now, "data_seed": 7}, "data": {}})) == 2
