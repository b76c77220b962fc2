"""What a curriculum does not go together with, and what is said about it."""

from __future__ import annotations

import pytest
import torch
import yaml
from datasets import Dataset
from transformers import LlamaForCausalLM

from scu_trainer.cli import train
from scu_trainer.cli.configuration import read_job
from scu_trainer.errors import ControlError, SettingsError
from scu_trainer.settings import CurriculumSettings, MemorySettings
from scu_trainer.train.curriculum.rules import NEEDED, obstacle
from scu_trainer.train.session.test_run import replace_training
from scu_trainer.train.trainer import SCUTrainer
from tests.tiny import UnevenRows, arguments, llama, pad, saved_llama
from tests.train.curricula import EPOCHS, curriculum_run

WRONG = {
    "train_sampling_strategy": ("group_by_length", "random"),
    "dataloader_drop_last": (True, "false"),
    "auto_find_batch_size": (True, "false"),
    "ignore_data_skip": (True, "false"),
}


def made(folder, curriculum="none", data=None, memory=None, **changes) -> SCUTrainer:
    args = arguments(folder, **{**EPOCHS, **changes})
    own = {"train_dataset": UnevenRows(8) if data is None else data, "data_collator": pad, "memory": memory}
    return SCUTrainer(llama(layers=1), args, curriculum=CurriculumSettings(curriculum), **own)


def test_every_rule_is_tested():
    assert WRONG.keys() == NEEDED.keys()


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("curriculum", ["none", "acmds"])
def test_arguments_that_choose_samples_as_well_are_refused(tmp_path, name, curriculum):
    value, needed = WRONG[name]
    with pytest.raises(SettingsError, match=rf"{name}: {value} with a curriculum: .*; set {name}: {needed}$"):
        made(tmp_path, curriculum, **{name: value})


def test_an_order_that_does_not_follow_from_the_seed_is_refused(tmp_path):
    message = r"use_seedable_sampler: false with a curriculum: .*; set use_seedable_sampler: true$"
    with pytest.raises(SettingsError, match=message):
        made(tmp_path, accelerator_config={"use_seedable_sampler": False})


def test_several_gpus_in_one_process_are_refused(tmp_path):
    args = arguments(tmp_path)
    assert obstacle(args, None) is None
    args._n_gpu = 2
    assert "start one process per GPU with torchrun" in obstacle(args, None)


def test_logical_batches_are_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"batch_mode: logical .*; use batch_mode: chunk"):
        made(tmp_path, memory=MemorySettings(batch_mode="logical"))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(UnevenRows(8))


@pytest.mark.parametrize(
    "data", [Stream(), Dataset.from_dict({"input_ids": [[1, 2]]}).to_iterable_dataset()], ids=["torch", "datasets"]
)
def test_streams_are_refused(tmp_path, data):
    with pytest.raises(ControlError, match="is a stream; use a dataset with a length, or leave the curriculum out"):
        made(tmp_path, data=data, max_steps=2)


def test_pruning_needs_epochs(tmp_path):
    with pytest.raises(SettingsError, match=r"infobatch over 3 epochs: .* raise num_train_epochs or use another"):
        curriculum_run(tmp_path, "infobatch", num_train_epochs=3)
    with pytest.raises(SettingsError, match=r"infobatch over 3.67 epochs: .* raise max_steps to 12 or use another"):
        curriculum_run(tmp_path, "infobatch", max_steps=11)
    assert curriculum_run(tmp_path, "infobatch", max_steps=12).state.global_step == 12


def test_a_warmup_that_cuts_nothing_says_so(tmp_path):
    notices = curriculum_run(tmp_path, CurriculumSettings("length_warmup"), max_steps=1).curriculum.notices
    (line,) = [line for line in notices if "length_warmup" in line]
    assert "cuts nothing: the longest row has 16 tokens, and length_warmup_start is 64" in line
    shorter = CurriculumSettings("length_warmup", length_warmup_start=8)
    assert not curriculum_run(tmp_path, shorter, max_steps=1).curriculum.notices


@pytest.mark.parametrize(("epochs", "is_said"), [(2, True), (3, False)])
def test_a_noise_guard_that_ends_before_it_judges_says_so(tmp_path, epochs, is_said):
    notices = curriculum_run(tmp_path, "noise_guard", num_train_epochs=epochs).curriculum.notices
    said = [line for line in notices if "judges rows after 2 epochs, and this run has 2" in line]
    assert bool(said) == is_said


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("nois_guard", "curriculum is 'nois_guard'; allowed: none, .*did you mean 'noise_guard'"),
        ("token_budget+acmd", "did you mean 'acmds'"),
        ("acmds+infobatch", "both choose samples by difficulty: .*; keep one of them"),
        ("none+acmds", "'none' switches the curriculum off, but 'acmds' is set too; remove one"),
        ("acmds+acmds", "'acmds' is named 2 times; name it once"),
    ],
)
def test_names_that_make_no_sense_are_refused(names, expected):
    with pytest.raises(SettingsError, match=expected):
        CurriculumSettings(names)


def test_difficulties_are_not_known_before_training(tmp_path):
    with pytest.raises(ControlError, match="call train"):
        _ = made(tmp_path).difficulty
    assert SCUTrainer(llama(layers=1), arguments(tmp_path), train_dataset=UnevenRows(4)).difficulty is None


class OwnForward(LlamaForCausalLM):
    """Its own forward takes another loss than that of the class below it."""

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        logits = super().forward(input_ids, attention_mask, use_cache=False).logits
        found = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": found, "logits": logits}


def test_a_forward_of_somebodys_own_is_read_by_its_logits(tmp_path):
    trainer = curriculum_run(tmp_path, "noise_guard", model=OwnForward(llama().config))
    assert trainer.loss_path.kind == "returned" and trainer.loss_path.reading.kind == "shifted"
    assert trainer.curriculum.figures()["curriculum"]["never_seen"] == 0


def test_batches_of_another_loader_are_refused(tmp_path):
    trainer = made(tmp_path)
    with pytest.raises(ControlError, match="a batch has no sample_index"):
        trainer.compute_loss(trainer.model.train(), pad([UnevenRows(4)[0]]))


# -- command line ------------------------------------------------------------------------------------------------------

FLAGS = {
    "curriculum": "noise_guard+token_budget",
    "token_budget": 256,
    "difficulty_alpha": 0.5,
    "difficulty_window": 7,
    "difficulty_stale_epochs": 2,
    "noise_guard_max_fraction": 0.25,
    "length_warmup_start": 32,
}


def test_flags_are_read_and_printed_and_read_back(tmp_path, capsys):
    flags = [part for name, value in FLAGS.items() for part in (f"--{name}", str(value))]
    assert train.main([*flags, "--print_config"]) == 0
    printed = capsys.readouterr().out
    resolved = yaml.safe_load(printed)
    assert {name: resolved[name] for name in FLAGS} == FLAGS
    (tmp_path / "again.yaml").write_text(printed)
    assert train.main(["--config", str(tmp_path / "again.yaml"), "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == resolved
    job = read_job(str(tmp_path / "again.yaml"), [])
    assert job.acting_curriculum == job.curriculum == CurriculumSettings(**FLAGS)


CPU = ["--use_cpu", "true"]


def test_losses_are_tracked_without_being_asked():
    assert read_job(None, CPU).acting_curriculum == CurriculumSettings()


@pytest.mark.parametrize(
    "flags",
    [
        ["--train_sampling_strategy", "group_by_length"],
        ["--streaming", "--max_steps", "5"],
        ["--batch_mode", "logical"],
        ["--auto_find_batch_size", "--memory_control", "false"],
    ],
)
def test_none_steps_aside_and_methods_are_refused(flags):
    job = read_job(None, [*CPU, *flags])
    job.check()
    assert job.acting_curriculum is None
    with pytest.raises(SettingsError, match="curriculum"):
        read_job(None, [*CPU, *flags, "--curriculum", "token_budget"]).check()


def test_too_few_epochs_are_found_before_anything_is_loaded():
    flags = [*CPU, "--curriculum", "infobatch", "--num_train_epochs"]
    with pytest.raises(SettingsError, match=r"infobatch over 3 epochs"):
        read_job(None, [*flags, "3"]).check()
    read_job(None, [*flags, "4"]).check()


def test_too_few_steps_are_found_before_the_run_has_a_folder(tmp_path, capsys):
    (tmp_path / "my.jsonl").write_text("".join(f'{{"text": "Line {i} of a text."}}\n' for i in range(60)))
    flags = ["--model_name_or_path", saved_llama(tmp_path / "model"), "--dataset", tmp_path / "my.jsonl"]
    flags += [*CPU, "--curriculum", "infobatch", "--block_size", 64, "--max_steps", 2, "--output_dir", tmp_path / "run"]
    for more in ([], ["--preflight_only", "true"]):
        assert train.main([str(word) for word in (*flags, *more)]) == 2
        assert "curriculum infobatch over" in capsys.readouterr().err
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize(
    ("asked", "tried_out"),
    [("infobatch", "none"), ("token_budget+infobatch", "token_budget"), ("none", "none"), ("acmds", "acmds")],
)
def test_a_test_run_is_too_short_to_prune(tmp_path, asked, tried_out):
    job = read_job(None, [*CPU, "--curriculum", asked, "--num_train_epochs", "8"])
    assert replace_training(job, str(tmp_path)).curriculum.curriculum == tried_out
