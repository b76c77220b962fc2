"""Slips in a file or on the command line that would train something else than what was meant, and say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from transformers import TrainingArguments

from scu_trainer.cli import main as cli
from scu_trainer.cli.configuration import as_yaml, check_early, read_data, read_job, read_values
from scu_trainer.cli.configuration_file import FALSE_IS
from scu_trainer.cli.fields import settings_parser
from scu_trainer.cli.names.common import NAMES
from scu_trainer.cli.names.known import known_names, own_names
from scu_trainer.cli.names.tools import COMMON, TOOLS, owner_of, tool_of
from scu_trainer.errors import SettingsError

FOLDER = Path(__file__).parent / "other_tools"


def _written(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def _said(config: str, *flags: str) -> str:
    return " ".join(read_job(config, flags).notes)


@pytest.mark.parametrize(
    ("lines", "owner"),
    [
        ("model_name_or_path: m | dataset: d.jsonl | max_seq_length: 256 | max_steps: 1", None),
        ("model_name_or_path: m | max_seq_length: 256", None),
        ("dataset_name: d.jsonl | model_name_or_path: m", None),
        ("dataset_name: d.jsonl | max_seq_length: 256", None),  # a weak sign of two programs each
        ("max_seq_length: 256 | random_state: 3", "unsloth"),
        ("max_seq_length: 256 | random_state: 3 | model_name_or_path: m", None),
        ("max_seq_length: 256 | random_state: 3 | tuning: lora", None),
        ("lora: true | max_seq_length: 256", None),  # no section
        ("training: {batch_size: 2}", "unsloth"),
        ("use_peft: true", "trl"),
        ("use_peft: true | dataset_name: d | learning_rate: 1.0e-4 | lora_r: 8", "trl"),
        ("use_peft: true | dataset: d", None),
        ("use_peft: true | dataset_name: d | block_size: 64", None),
        ("template: qwen | sample_prompts: 2", None),
        ("stage: sft | finetuning_type: lora | cutoff_len: 9 | scu_target_s: 2", "llama-factory"),
        ("base_model: m | sequence_len: 9 | micro_batch_size: 2", "axolotl"),
    ],
)
def test_whose_a_file_is(lines, owner):
    assert owner_of(yaml.safe_load(lines.replace(" | ", "\n")), known_names()) == owner


def test_files_of_other_programs_stay_theirs():
    for path in sorted(FOLDER.glob("*/*.y*ml")):
        weak = path.name == "sft.yaml"  # nothing but dataset_name
        entries = yaml.safe_load(path.read_text())
        assert owner_of(entries, known_names()) == (None if weak else path.parent.name), path
        assert tool_of(entries, known_names()) == path.parent.name  # for those who import it


def test_names_that_others_have_are_ours():
    assert COMMON <= own_names()
    assert {"max_seq_length", "dataset_name"} <= NAMES.keys() & {sign for tool in TOOLS.values() for sign in tool.SIGNS}


def test_one_name_of_another_program_is_renamed_alone(tmp_path):
    config = _written(tmp_path / "y.yaml", "dataset: d.jsonl", "max_seq_length: 256", "max_steps: 1")
    by_flags = read_job(None, ["--dataset", "d.jsonl", "--max_seq_length", "256", "--max_steps", "1"])
    job = read_job(config, [])
    assert job.data.block_size == 256 and job.as_dict() == by_flags.as_dict()
    apply = "scu-trainer's defaults apply"
    expected = f"max_seq_length as block_size; {apply}; for those of Unsloth: scu-trainer import {config}"
    assert expected in " ".join(job.notes)
    _written(tmp_path / "y.yaml", "dataset_name: d.jsonl", "max_steps: 1")
    assert read_job(config, []).model.tuning == "lora"
    assert f"for those of TRL: scu-trainer import {config} --from trl" in _said(config)


def test_defaults_of_another_program_are_said(tmp_path):
    config = _written(tmp_path / "y.yaml", "training_type: lora", "max_seq_length: 256", "max_steps: 1")
    said = _said(config)
    assert "a file of Unsloth; training_type as tuning" in said
    assert said.endswith(
        "its defaults apply: packing: false, checkpoint_every_layer: true, per_device_train_batch_size: 2, "
        "gradient_accumulation_steps: 4, warmup_steps: 5, learning_rate: 0.0002, weight_decay: 0.01, seed: 3407, "
        "optim: adamw_8bit, validation_split_percentage: 0, completion_only_loss: false, assistant_only_loss: false"
    )
    said = _said(config, "--seed", "1", "--packing", "true", "--optim", "sgd")
    assert "seed: 3407" not in said and "packing: false" not in said and "adamw_8bit" not in said


def test_a_file_of_another_program_is_read_for_its_data():
    _, model, data = read_data(str(FOLDER / "axolotl" / "lora.yml"), ["--dataset", "d.jsonl"])
    assert (model.lora_r, data.dataset) == (16, "d.jsonl")


@pytest.mark.parametrize("read", [check_early, read_values, read_data])
def test_data_given_twice_is_refused(read):
    both = r"""--dataset '\[\{"dataset": "a"\}, \{"dataset": "b"\}\]'"""
    with pytest.raises(SettingsError, match=f"--dataset is given twice; give it once, or both as a list: {both}"):
        read(None, "--dataset a --dataset b".split())


@pytest.mark.parametrize("read", [check_early, read_values, read_data])
@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("--dataset a.jsonl b.jsonl", """--dataset has 2 values.*as a list: --dataset '\\["a.jsonl", "b.jsonl"\\]'"""),
        ("--dataset_name a b", """--dataset has 2 values.*as a list: --dataset '\\["a", "b"\\]'"""),
        (
            "--dataset a b c --seed 1",
            """has 3 values; give one file, or the folder of all files, .* '\\["a", "b", ...\\]'""",
        ),
        ("--dataset d --eval_dataset a b", "--eval_dataset has 2 values; give one file, or the folder of all files$"),
    ],
)
def test_several_files_as_a_shell_writes_them_say_how_a_list_is_given(read, typed, told):
    with pytest.raises(SettingsError, match=told):
        read(None, typed.split())


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--packing true --no_packing", "--packing is given twice: false counts, not true"),
        ("--learning-rate 1 --learning_rate=2", "--learning_rate is given twice: 2 counts, not 1"),
        ("--lr_milestones 1 2 --lr_milestones 4", "--lr_milestones is given twice: 4 counts, not 1 2"),
    ],
)
def test_a_flag_with_two_values_is_said(typed, message):
    assert message in read_job(None, ["--dataset", "d.jsonl", *typed.split()]).notes


def test_both_datasets_are_taken_as_the_message_says():
    data = read_job(None, ["--dataset", '[{"dataset": "a"}, {"dataset": "b"}]']).data
    assert [source.dataset for source in data.sources] == ["a", "b"]


@pytest.mark.parametrize(
    "typed",
    [
        "--lr_milestones 1 2 --seed 3",
        "--packing false --no-packing",
        "--use_cpu --seed 3 --use_cpu true",
        "--resume_from_checkpoint none --resume_from_checkpoint auto",  # the second by a background run
        "--use_cpu false --use_cpu true",
    ],
)
def test_a_flag_with_one_value_is_taken(typed):
    check_early(None, typed.split())
    read_values(None, typed.split())


def test_programs_of_ours_may_put_a_value_behind():
    assert read_job(None, ["--seed", "1", "--seed", "2"]).training.seed == 2  # as an arm of a comparison does


def test_no_and_off_without_quotes(tmp_path):
    chosen = [f"{name}: {word}" for name, word in FALSE_IS.items() if name != "eval_strategy"]
    job = read_job(_written(tmp_path / "n.yaml", *chosen), [])
    args = job.training
    assert {args.save_strategy.value, args.eval_strategy.value, args.logging_strategy.value} == {"no"}
    assert job.model.mixed_precision == "no"
    assert (job.safety.preflight, job.safety.spike_guard, job.safety.divergence) == ("off", "off", "off")
    _written(tmp_path / "n.yaml", "eval_strategy: no")
    assert read_job(str(tmp_path / "n.yaml"), []).training.eval_strategy.value == "no"


def test_every_choice_of_no_and_off_is_listed():
    actions = settings_parser(TrainingArguments)._actions
    found = {action.dest: word for action in actions for word in ("no", "off") if word in (action.choices or ())}
    assert {**found, "evaluation_strategy": "no"} == FALSE_IS


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--max_steps -5", "max_steps is -5; it must be 1 or more, or -1 to train for num_train_epochs$"),
        ("--local_rank -3", "local_rank is -3; it must be 0 or more, or -1 for not given$"),
        ("--do_train false", "do_train is false, but this command always trains; .* scu-trainer eval RUN_OR_MODEL"),
        (
            "--per_device_train_batch_size auto",
            "invalid int value: 'auto'; give a whole number; scu-trainer plan says which one fits this machine$",
        ),
        ("--lora_r many", "invalid int value: 'many'; give a whole number$"),
        ("--learning_rate high", "invalid float value: 'high'; give a number$"),
        ("--liger_kernel_config rope", "'rope' is not a JSON object such as"),
        ("--lr_scheduler_kwargs num_cycles=2", "--lr_scheduler_kwargs: 'num_cycles=2' is not a JSON object such as"),
        ("--gradient_checkpointing_kwargs use_reentrant=false", "'use_reentrant=false' is not a JSON object such as"),
        (
            "--lr_scheduler_kwargs {num_cycles:2}",
            "--lr_scheduler_kwargs: '{num_cycles:2}' is not a JSON object such as",
        ),
        ("--deepspeed {}}", "--deepspeed: '{}}' is not a JSON object such as"),
    ],
)
def test_what_to_type_instead(typed, message):
    with pytest.raises(SettingsError, match=message):
        read_job(None, typed.split())


@pytest.mark.parametrize("words", [("train", "--output_dir", "-x"), ("push", "--repo_id")])
def test_a_value_that_looks_like_an_option(words, capsys):
    assert cli.main([*words]) == 2
    told = f"{words[1]} needs a value; one that begins with a dash is written {words[1]}=VALUE"
    assert told in capsys.readouterr().err


def test_layers_of_liger_are_chosen_in_a_file_and_on_the_command_line(tmp_path):
    config = _written(tmp_path / "l.yaml", "liger_kernel_config: {rope: true}")
    assert read_job(config, []).training.liger_kernel_config == {"rope": True}
    flags = ["--liger_kernel_config", '{"rope": false}']
    assert read_job(config, flags).training.liger_kernel_config == {"rope": False}


def test_a_file_that_does_not_train_and_one_that_a_run_wrote(tmp_path):
    config = _written(tmp_path / "e.yaml", "do_train: false", "do_eval: true")
    with pytest.raises(SettingsError, match="do_train is false"):
        read_job(config, [])
    resolved = as_yaml(read_job(None, ["--max_steps", "1"]))
    assert "do_train: false" in resolved
    _written(tmp_path / "e.yaml", resolved)
    assert read_job(config, []).training.max_steps == 1
    with pytest.raises(SettingsError, match="do_train is false"):
        read_job(config, ["--do_train", "false"])


@pytest.mark.parametrize("name", ["ok.jsonl", "ok.csv", "ok.tsv", "ok.parquet", "ok.txt", "OK.JSONL"])
@pytest.mark.parametrize("command", [["data"], ["train", "--config"]])
def test_data_in_the_place_of_a_configuration(name, command, tmp_path, capsys):
    path = _written(tmp_path / name, '{"text": "a b"}', '{"text": "c"}')
    assert cli.main([*command, path]) == 2
    assert f"--dataset {path}" in capsys.readouterr().err


def test_a_configuration_may_end_in_txt(tmp_path):
    assert read_job(_written(tmp_path / "job.txt", "seed: 3"), []).training.seed == 3


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--lr_scheduler_type greedy", "greedy requires an eval strategy; set eval_strategy: steps and eval_steps"),
        ("--load_best_model_at_end true", "strategy to match.*; set eval_strategy and save_strategy to the same"),
    ],
)
def test_what_transformers_has_against_strategies_comes_with_what_to_type(typed, message):
    with pytest.raises(SettingsError, match=message):
        read_job(None, [*typed.split(), "--use_cpu", "true"])


@pytest.mark.parametrize("in_file", [False, True])
def test_a_text_or_a_list_of_them_is_what_was_given(in_file, tmp_path):
    """One text is a pattern for transformers, several are names."""
    file = tmp_path / "job.yaml"
    file.write_text("optim_target_modules: [q_proj, v_proj]\nreport_to: [tensorboard, mlflow]\n")
    flags = ["--optim_target_modules", "q_proj", "v_proj", "--report_to", "tensorboard", "mlflow"]
    values = read_values(str(file) if in_file else None, [] if in_file else flags)
    assert values["optim_target_modules"] == ["q_proj", "v_proj"]
    assert values["report_to"] == ["tensorboard", "mlflow"]
    file.write_text("optim_target_modules: [q_proj]\nreport_to: [tensorboard]\n")
    assert read_values(str(file), [])["optim_target_modules"] == ["q_proj"]
    one = read_values(str(file), ["--optim_target_modules", "all-linear", "--report_to", "none"])
    assert (one["optim_target_modules"], one["report_to"]) == ("all-linear", "none")
