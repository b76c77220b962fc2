"""``scu-trainer train`` as a user meets it: what it accepts, what it refuses, and what it leaves on disk."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import TrainingArguments
from transformers.utils.import_utils import enable_tf32

from scu_trainer.cli import configuration, configuration_file, train
from scu_trainer.cli import main as cli
from scu_trainer.errors import SettingsError, StorageError
from scu_trainer.hardware import precision
from scu_trainer.models.asking import torch_switches_restored
from scu_trainer.report.files import read_run
from scu_trainer.report.words import key_figures
from scu_trainer.run_files import read_rows
from scu_trainer.train.session import session, training
from scu_trainer.train.tasks.text import TextTask
from tests import processes, tiny

ROOT = Path(__file__).parents[2]
SENTENCES = ["The cat sat on the mat and looked at the door.", "A list is a sequence that can be changed in place."]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny.saved_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def documents(tmp_path) -> Path:
    path = tmp_path / "documents.jsonl"
    rows = [{"text": f"{SENTENCES[i % 2]} Number {i}. " * 6} for i in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def flags(model_dir, documents, tmp_path) -> list[str]:
    """A run of four steps on a tiny model."""
    options = {
        "model_name_or_path": model_dir,
        "dataset": documents,
        "block_size": 64,
        "validation_split_percentage": 25,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "logging_steps": 2,
        "output_dir": tmp_path / "run",
        "cache_dir": tmp_path / "cache",
        "use_cpu": "true",
        "sample_prompts": 0,
        "predict_memory": "false",
    }
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def refused(capsys, arguments: list[str]) -> str:
    """The one line of an error that the user can fix; asserts exit code 2, no traceback, nothing on stdout."""
    assert train.main(arguments) == 2
    printed = capsys.readouterr()
    message = printed.err.strip().splitlines()
    assert len([line for line in message if line.startswith("error: ")]) == 1
    assert "Traceback" not in printed.err
    return message[-1]


# -- configuration -----------------------------------------------------------------------------------------------------


def test_help_needs_no_torch():
    code = "import sys; from scu_trainer.cli.main import main; main(['train', '--help'])"
    code += "; assert 'torch' not in sys.modules"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--scu_target_s" in answer.stdout and "--test_run" in answer.stdout


def test_help_of_what_turns_a_default_off_says_so(capsys):
    assert train.main(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--no_resume, --no-resume the same as --resume false --" in text


def test_help_all_lists_stock_fields(capsys):
    assert train.main(["--help-all"]) == 0
    assert "--gradient_accumulation_steps" in capsys.readouterr().out


def test_commands_are_listed_and_unknown_ones_refused(capsys):
    assert cli.main([]) == 0
    assert "train" in capsys.readouterr().out
    assert cli.main(["trian"]) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err


def test_print_config_can_be_read_back(tmp_path, capsys):
    first = tmp_path / "first.yaml"
    first.write_text(
        '{"block-size": 64, "learning_rate": 1e-4, "lora_target_modules": ["q_proj", "v_proj"], "seed": 7}'
    )
    assert train.main(["--config", str(first), "--lora-r", "2", "--print-config"]) == 0
    printed = capsys.readouterr().out
    resolved = yaml.safe_load(printed)
    assert (resolved["block_size"], resolved["learning_rate"], resolved["lora_r"]) == (64, 1e-4, 2)
    assert resolved["lora_target_modules"] == ["q_proj", "v_proj"]
    second = tmp_path / "second.yaml"
    second.write_text(printed)
    assert train.main(["--config", str(second), "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == resolved


def test_scu_can_be_switched_off(capsys):
    assert train.main(["--no-scu", "--print_config"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert resolved["scu"] is False and "scu_target_s" not in resolved


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("blok_size: 64", "did you mean 'block_size'?"),
        ("learning_rat: 1e-4", "did you mean 'learning_rate'?"),
        ("lora_r: eight", "--lora_r: invalid int value: 'eight'"),
        ("lora_r: 0", "lora_r is 0; it must be 1 or more"),
        ("scu_law: modle", "did you mean 'model'?"),
        ("token_kap: 512", "did you mean 'token_cap'?"),
        ("target_headroom_gb: lots", "target_headroom_gb is 'lots'"),
        ("max_batch_size: 4\nmin_batch_size: 8", "min_batch_size 8 exceeds max_batch_size 4"),
        ("scu_target_s: 1.5", "must lie between 0 and 1"),
        ("seed: 1\nseed: 2", "key 'seed' appears twice"),
        ("- a\n- b", "holds list"),
        ("", "holds nothing"),
        ("a: [", "not valid YAML"),
        (
            "seed: 1\n\tmax_steps: 2",
            "any token, line 2, column 1: max_steps: 2 ^; indent with spaces instead of tabs",
        ),
        ("tuning: LoRA", "did you mean 'lora'?"),
        ("streaming: true", "give max_steps"),
        ("scu_target_s: auto", "set eval_strategy"),
        ("fp16: true\nuse_cpu: true", "fp16"),
        ("scu_hold_steps: 5", "scu_stop_at_target"),
        ("max_steps: 1\nlabel_names: [target]", "but the command line sets the names of its labels"),
        ("max_steps: 1\nprediction_loss_only: true", "would leave out the held-out bits per token"),
        ("max_steps: 1\neval_do_concat_batches: false", "is for your own compute_metrics"),
    ],
)
def test_wrong_files_are_refused(tmp_path, capsys, content, expected):
    config = tmp_path / "job.yaml"
    config.write_text(content)
    message = refused(capsys, ["--config", str(config), "--output_dir", str(tmp_path / "run")])
    assert expected in message and (str(config) in message or content == "streaming: true")  # it names max_steps
    assert not (tmp_path / "run").exists()


def test_an_error_names_the_file_only_for_what_is_set_there(tmp_path, capsys):
    config = tmp_path / "job.yaml"
    config.write_text("max_batch_size: 4\nlearning_rate: 0.1\n")
    words = ["--config", str(config), "--learning_rate", "fast"]
    assert str(config) not in refused(capsys, words)
    words[-1:] = ["1e-4", "--min_batch_size", "8"]
    assert refused(capsys, words).strip().endswith(f"(max_batch_size is set in {config})")


def test_unknown_flag_and_missing_file_are_refused(tmp_path, capsys):
    assert "did you mean '--max_steps'?" in refused(capsys, ["--max_step", "3"])
    assert "cannot read the configuration" in refused(capsys, ["--config", str(tmp_path / "none.yaml")])
    (tmp_path / "training_config.json").write_text("{}")
    assert "(did you mean 'training_config.json'?)" in refused(
        capsys, ["--config", str(tmp_path / "training_confg.json")]
    )
    assert f"; give {tmp_path}/training_config.json, the settings" in refused(capsys, ["--config", str(tmp_path)])
    for name in ("unusable.yaml", "beside.yaml"):  # a look at it is an error, as at a link into a locked folder
        (tmp_path / name).symlink_to("a" * 300)
    for name in ("unusable.yaml", "unusble.yaml"):
        with pytest.raises(SettingsError, match=f"cannot read the configuration {tmp_path}/{name}: .*; give a YAML"):
            configuration_file.read_file(tmp_path / name)


@pytest.mark.parametrize("content", ['[{"text": "a"}]', '{"text": "a"}\n{"text": "b"}\n'])
def test_rows_where_a_configuration_is_read_are_told_how_to_be_data(tmp_path, capsys, content):
    (tmp_path / "rows.json").write_text(content)
    said = refused(capsys, ["--config", str(tmp_path / "rows.json")])
    assert said.endswith(f"; to use it as data, write --dataset {tmp_path}/rows.json")


def test_all_words_for_the_tokens_that_were_seen_are_read(flags):
    read = [configuration.read_job(None, [*flags, "--include_num_input_tokens_seen", word]) for word in ("all", "true")]
    assert [job.training.include_num_input_tokens_seen for job in read] == ["all", "all"]
    one = configuration.read_job(None, [*flags, "--include_num_input_tokens_seen", "non_padding"])
    assert one.training.include_num_input_tokens_seen == "non_padding"


def test_a_launcher_whose_processes_would_train_alone_is_refused(flags, monkeypatch):
    job = configuration.read_job(None, flags)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match="each would train alone"):
        job.check()


@pytest.mark.parametrize(
    "asked, said",
    [
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM, which the Trainer .* MULTI_GPU, FSDP or DEEPSPEED"),
        ({"PARALLELISM_CONFIG_TP_SIZE": "2", "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "has tp_size 2, .*drop it"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "parallelism_config does not work on a CPU"),
    ],
)
def test_what_a_launcher_cannot_have_here_is_refused_before_anything_is_read(flags, monkeypatch, asked, said):
    job = configuration.read_job(None, flags)
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=said):
        job.check()


# -- bad input, before any work ----------------------------------------------------------------------------------------


def with_value(flags: list[str], name: str, value: object) -> list[str]:
    """``flags`` with another value of ``name``: no data is given twice."""
    pairs = zip(flags[::2], flags[1::2], strict=True)
    return [*(word for flag, old in pairs if flag != f"--{name}" for word in (flag, old)), f"--{name}", str(value)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "does not exist"),
        ("", "is empty: it has no rows"),
        ('{"body": "text"}\n' * 4, "text_column"),
        ('{"text": "a"}\n{"text": broken\n', "row 2"),
    ],
)
def test_bad_datasets_are_refused_before_anything_is_written(capsys, flags, tmp_path, content, expected):
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    assert expected in refused(capsys, with_value(flags, "dataset", path))
    assert not (tmp_path / "run").exists()


def test_a_path_that_is_no_model_is_refused(capsys, flags, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "without config.json" in refused(capsys, with_value(flags, "model_name_or_path", tmp_path / "empty"))
    assert "does not exist" in refused(capsys, with_value(flags, "model_name_or_path", "./nowhere"))
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_found_before_training(capsys, flags, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    message = refused(capsys, flags)
    assert "free" in message and "output_dir" in message
    assert not (tmp_path / "run").exists()


def test_an_output_dir_that_is_a_file_is_refused(capsys, flags, tmp_path):
    (tmp_path / "taken").write_text("mine")
    assert "is a file" in refused(capsys, with_value(flags, "output_dir", tmp_path / "taken"))
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_block_longer_than_the_model_is_refused(capsys, flags):
    assert "exceed the 128 positions" in refused(capsys, with_value(flags, "block_size", 256))


# -- runs --------------------------------------------------------------------------------------------------------------

RUN_FILES = [
    "run.json",
    "training_config.json",
    "scu_config.json",
    "scu_history.json",
    "scu_metrics.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "tokenizer.json",
    "logs/train.log",
]


def test_a_run_writes_what_the_contract_promises(capsys, flags, tmp_path):
    steered = ["--scu_target_s", "0.1"]
    assert train.main([*flags, *steered, "--save_steps", "2", "--eval_strategy", "steps", "--eval_steps", "2"]) == 0
    run = tmp_path / "run"
    for name in RUN_FILES:
        assert (run / name).is_file(), name
    status = json.loads((run / "run.json").read_text())
    assert (status["status"], status["step"], status["max_steps"], status["error"]) == ("finished", 4, 4, None)
    assert [row["step"] for row in read_rows(run / "scu_history.json")] == [1, 2, 3, 4]
    described = json.loads((run / "training_config.json").read_text())
    assert described["configuration"]["block_size"] == 64 and described["data"]["documents"] == 18
    metrics = json.loads((run / "scu_metrics.json").read_text())
    before, after = metrics["held_out_bpt_before"], metrics["held_out_bpt_after"]
    assert before["low"] <= before["value"] <= before["high"]
    assert after["value"] != before["value"]
    assert (
        metrics["best_held_out"]["bpt"] == pytest.approx(after["value"], abs=1e-5)
        or metrics["best_held_out"]["step"] < 4
    )
    events = list((run / "logs" / "tensorboard").rglob("events*"))
    assert events and "train/scu/s" in _tags(events[0].parent)
    assert "TENSORBOARD_LOGGING_DIR" not in os.environ  # the next training of this process is another one
    printed = capsys.readouterr().out
    assert "held-out bits per token" in printed and "next: scu-trainer eval" in printed


def test_determinism_is_of_one_run(flags):
    """Later in the same process it would make other trainings slow, or end them for an operation that lacks it."""
    assert train.main([*with_value(flags, "max_steps", 1), "--full_determinism", "true"]) == 0
    assert torch.get_deterministic_debug_mode() == 0 and not torch.backends.cudnn.deterministic
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_tf32_is_of_one_run():
    before = torch.backends.fp32_precision
    for _ in range(2):
        with torch_switches_restored():
            enable_tf32(True)
            assert torch.backends.fp32_precision == "tf32"
        assert torch.backends.fp32_precision == before


def test_what_to_type_next_can_be_pasted_where_a_name_has_spaces_and_brackets(capsys, flags, tmp_path):
    run = tmp_path / "my run [b]"
    assert train.main(with_value(flags, "output_dir", run)) == 0
    said = [line.removeprefix("next:").split("#")[0] for line in capsys.readouterr().out.splitlines()]
    typed = [shlex.split(line) for line in said if line.strip().startswith("scu-trainer")]
    assert [words[:3] for words in typed] == [["scu-trainer", name, str(run)] for name in ("eval", "chat", "report")]


def _tags(folder: Path) -> list[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events.Tags()["scalars"]


def test_a_second_run_never_overwrites_the_first(capsys, flags, tmp_path):
    assert train.main([*flags, "--max_steps", "1"]) == 0
    kept = (tmp_path / "run" / "run.json").read_bytes()
    capsys.readouterr()
    assert train.main([*flags, "--max_steps", "1"]) == 0
    assert "already holds a run; this one goes to" in capsys.readouterr().out
    assert (tmp_path / "run" / "run.json").read_bytes() == kept
    assert (tmp_path / "run-2" / "scu_metrics.json").is_file()


def test_six_steps_are_three_and_resume_and_three(flags, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = [*flags, "--save_steps", "3", "--max_steps", "6"]
    assert train.main([*common, "--output_dir", str(whole)]) == 0
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoint-6")
    for name in ("adapter_model.safetensors", "scu_metrics.json"):
        (parts / name).unlink()
    assert train.main([*common, "--output_dir", str(parts), "--resume_from_checkpoint", "true"]) == 0
    for name in ("adapter_model.safetensors", "scu_history.json", "checkpoint-6/scu_state.json"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes(), name


def test_resuming_from_nothing_is_refused(capsys, flags, tmp_path):
    assert "holds no checkpoint-N" in refused(capsys, with_value(flags, "resume_from_checkpoint", "true"))
    assert "is not a checkpoint" in refused(capsys, with_value(flags, "resume_from_checkpoint", tmp_path))
    assert not (tmp_path / "run").exists()


def test_several_gpus_and_one_process_are_refused_before_anything_is_loaded(capsys, flags, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda arguments: 2))
    monkeypatch.setattr(TextTask, "load", lambda *_: pytest.fail("loaded"))
    said = refused(capsys, flags)
    assert said.startswith(
        "error: 2 GPUs are available, but one process trains on only one of them: start the command with"
    )
    assert "scu-trainer launch accelerate" in said and "CUDA_VISIBLE_DEVICES=0" in said and "device_map: auto" in said


def test_an_interrupted_run_says_so(capsys, flags, tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("scu_trainer.train.trainer.SCUTrainer.training_step", interrupt)
    assert train.main(flags) == 130
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "stopped"


def test_a_failed_run_says_so_in_run_json(flags, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("the loop broke")

    monkeypatch.setattr("scu_trainer.train.trainer.SCUTrainer.training_step", fail)
    with pytest.raises(RuntimeError, match="the loop broke"):
        train.main(flags)
    status = json.loads((tmp_path / "run" / "run.json").read_text())
    assert status["status"] == "failed" and "the loop broke" in status["error"]


def test_test_run_does_everything_and_leaves_nothing(capsys, flags, tmp_path):
    assert train.main([*flags, "--max_steps", "1000", "--test-run"]) == 0
    printed = capsys.readouterr().out
    assert "test run passed" in printed and "1,000 steps" in printed
    assert not (tmp_path / "run").exists()


def test_more_processes_than_cards(capsys, monkeypatch, flags):
    """Said before the process group is made, which would fail with "invalid device ordinal"."""
    facts = precision.DeviceFacts("cuda", True, (9, 0))
    monkeypatch.setattr("scu_trainer.cli.configuration.device_facts", lambda use_cpu: facts)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert train.main(flags) == 2
    assert "this is process 2 on this machine, and it sees 1 GPU; start 1 (--nproc" in capsys.readouterr().err


def test_check_requirements(capsys, flags):
    assert train.main([*flags, "--check_requirements"]) == 0
    assert "torch" in capsys.readouterr().out


@pytest.mark.parametrize("tuning", ["full"])
def test_full_tuning_and_auto_target(capsys, flags, tmp_path, tuning):
    more = ["--tuning", tuning, "--scu_target_s", "auto", "--eval_strategy", "steps", "--eval_steps", "1"]
    assert train.main([*flags, *more]) == 0
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert "target_s" in json.loads((tmp_path / "run" / "scu_config.json").read_text())


# -- the recipe and the launchers, as real processes -------------------------------------------------------------------


def launched(words: list[str], from_nothing: bool) -> str:
    """What ``python WORDS`` prints. ``from_nothing``: a launcher, and every process that it starts imports everything,
    as a user's do."""
    answer = processes.launch(words, from_nothing="scripts/train.py" if from_nothing else None)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return answer.stdout


def test_the_recipe_runs_from_its_file(tmp_path):
    """What forks here starts from nothing elsewhere: this file under torchrun, the child that makes the base model in
    tests/serve/test_serve.py, which has a cache of its own."""
    words = ["scripts/train.py", "--config", "recipes/scu_lora.yaml", "--output_dir", str(tmp_path / "r")]
    small = ["--max_steps", "3", "--eval_steps", "2", "--embedded_base_steps", "2", "--dataset_size", "12"]
    small += ["--block_size", "64", "--sample_prompts", "0", "--predict_memory", "false"]
    printed = launched([*words, *small, "--max_eval_documents", "2"], from_nothing=False)
    assert "training the embedded base model once" in printed
    assert "S against target" in printed
    adapted = json.loads((tmp_path / "r" / "adapter_config.json").read_text())["target_modules"]
    assert "in_proj" in adapted and "out_proj" not in adapted


@pytest.mark.parametrize(
    ("launcher", "count", "from_nothing"),
    [
        (["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"], 1, False),
        (["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu_2_processes.yaml"], 2, False),
        (["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"], 2, True),
    ],
    ids=["accelerate cpu", "accelerate 2 processes", "torchrun"],
)
def test_launchers(flags, tmp_path, launcher, count, from_nothing):
    printed = launched([*launcher, "scripts/train.py", *flags], from_nothing)
    assert printed.count("trained 4 steps") == 1
    described = json.loads((tmp_path / "run" / "training_config.json").read_text())
    assert described["world_size"] == count
    assert [row["step"] for row in read_rows(tmp_path / "run" / "scu_history.json")] == [2, 4], "as it is logged"


# -- preflight ---------------------------------------------------------------------------------------------------------


def test_preflight_only_looks_and_writes_nothing(capsys, flags, tmp_path):
    assert train.main([*flags, "--preflight_only"]) == 0
    printed = capsys.readouterr().out
    assert "preflight: 0 errors, 1 warning" in printed and "learning-rate-high" in printed
    assert "4 steps of 2 rows" in printed
    assert not (tmp_path / "run").exists()


def test_a_mistake_ends_the_run_before_it_begins(capsys, flags, tmp_path):
    message = refused(capsys, [*flags, "--learning_rate", "-0.1"])
    assert "preflight found 1 error: learning-rate-not-positive" in message
    assert not (tmp_path / "run").exists()


def test_a_mistake_may_be_made_on_purpose(capsys, flags, tmp_path):
    assert train.main([*flags, "--save_steps", "5000", "--preflight", "off"]) == 0
    assert "preflight" not in capsys.readouterr().out
    assert (tmp_path / "run" / "scu_metrics.json").is_file()


def test_a_run_saves_on_its_way_unless_told_otherwise(flags, tmp_path):
    assert train.main([*flags, "--max_steps", "25", "--eval_strategy", "no"]) == 0
    checkpoints = sorted(int(path.name.rpartition("-")[2]) for path in (tmp_path / "run").glob("checkpoint-*"))
    assert checkpoints == [10, 20, 25]
    assert json.loads((tmp_path / "run" / "checkpoint-10" / "trainer_state.json").read_text())["save_steps"] == 10


def test_a_rhythm_that_is_another_than_that_of_the_checkpoint_is_said(capsys, flags, tmp_path):
    common = [*flags, "--eval_strategy", "no"]
    assert train.main([*common, "--save_steps", "2"]) == 0
    capsys.readouterr()
    again = [*common, "--resume_from_checkpoint", str(tmp_path / "run" / "checkpoint-2"), "--output_dir"]
    assert train.main([*again, str(tmp_path / "other"), "--save_steps", "1"]) == 0
    assert "save_steps stays 2 and does not become 1" in capsys.readouterr().out
    assert not (tmp_path / "other" / "checkpoint-3").exists()
    assert train.main([*again, str(tmp_path / "third"), "--save_steps", "0.5"]) == 0
    assert "stays" not in capsys.readouterr().out


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_says_at_the_end_what_was_read(capsys, flags, workers):
    words = ["--streaming", "true", "--max_eval_documents", "4", "--dataloader_num_workers", str(workers)]
    assert train.main([*flags, *words]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    before, _, after = printed.partition("preflight:")
    assert "read as: text (text)" in before
    run = Path(flags[flags.index("--output_dir") + 1])
    card, rows = (run / "README.md").read_text(), dict(key_figures(read_run(run, "run")))["data"]
    assert ("rows were not counted; 4 held out" in card, "left out: none" in card) == (bool(workers), not workers)
    assert ("rows" in rows, " 0 " in rows) == (not workers, False)
    if workers:
        assert "the loader's workers counted the rows that were read and left out, so the counts are not known" in after
    else:
        assert re.search(r"documents: [1-9]\d* read, [1-9]\d* for training so far, 4 held out", after)
        assert re.search(r"training: [1-9]\d* rows, [\d,]+ tokens, [\d,]+ learned so far", after)


def test_the_last_pass_of_a_stream_does_not_forget_the_format_of_a_later_source(flags, documents, tmp_path):
    """By it chat and serve ask as the run has trained."""
    asked, config = tmp_path / "asked.jsonl", tmp_path / "two.json"
    asked.write_text('{"question": "Tea?", "answer": "Yes."}\n' * 9)
    sources = [{"dataset": str(path), "name": path.stem} for path in (documents, asked)]
    settings = {"dataset": sources, "streaming": True, "max_eval_documents": 4, "max_steps": 30}
    config.write_text(json.dumps(settings))
    at = flags.index("--dataset")
    kept = [*flags[:at], *flags[at + 2 :]]
    at = kept.index("--max_steps")
    assert train.main(["--config", str(config), *kept[:at], *kept[at + 2 :]]) == 0
    data = json.loads((tmp_path / "run" / "training_config.json").read_text())["data"]
    assert data["sources"][1]["rows"] == 0, "the last pass ended before it"
    assert any(name.startswith("question and answer") for name in data["formats"])


def test_counts_of_a_stream_that_find_no_room_cost_no_model(flags, tmp_path, monkeypatch):
    written, write = [], session.write_json

    def once(path, content):
        written.append(path.name)
        if written.count("training_config.json") == 2:
            raise StorageError("no room")
        write(path, content)

    for writer in (session, training):
        monkeypatch.setattr(writer, "write_json", once)
    words = ["--streaming", "true", "--max_eval_documents", "4", "--save_strategy", "no"]
    assert train.main([*flags, *words]) == 2
    assert list((tmp_path / "run").glob("*model.safetensors"))


def test_a_stream_that_was_only_looked_at_is_not_said_to_be_read(capsys, flags, tmp_path):
    """After its last step, when a run resumes to save and score the model alone."""
    words, run = [*flags, "--streaming", "true", "--max_eval_documents", "4"], tmp_path / "run"
    assert train.main(words) == 0
    assert "- a stream: the counts below are of its last pass" in (run / "README.md").read_text()
    assert dict(key_figures(read_run(run, "run")))["data"].endswith("rows of its last pass")
    capsys.readouterr()
    (run / "scu_metrics.json").unlink()
    (run / "run.json").write_text(json.dumps({**json.loads((run / "run.json").read_text()), "status": "failed"}))
    assert train.main(words) == 0
    assert "resuming from" in (printed := capsys.readouterr().out) and printed.count("read as:") == 1
    assert "rows were not counted" in (run / "README.md").read_text()
