"""Tasks on the command line: their defaults, presets and modes, and fields that belong to another task."""

from __future__ import annotations

import pytest
import yaml

from scu_trainer.cli import configuration, fields, train
from scu_trainer.errors import SettingsError
from scu_trainer.settings.tasks import KINDS, TEXT

TASKS = [name for name in KINDS if name != TEXT]
GROUPS = [
    (task, flag, name)
    for task, kind in KINDS.items()
    for flag, groups in (("preset", kind.presets), ("mode", kind.modes))
    for name in groups
]


def job_of(*words, config=None):
    return configuration.read_job(config, [*map(str, words), "--use_cpu", "true"])


@pytest.mark.parametrize("task", TASKS)
def test_a_task_brings_its_own_defaults(task):
    job = job_of("--task", task)
    found = job.as_dict()
    assert type(job.own) is KINDS[task].settings and KINDS[task].defaults
    for name, value in KINDS[task].defaults.items():
        assert found.get(name, value) == value or getattr(job.training, name, None) == value, name


@pytest.mark.parametrize("task", TASKS)
def test_the_resolved_configuration_of_a_task_can_be_read_back(task, tmp_path, capsys):
    assert train.main(["--task", task, "--learning_rate", "0.01", "--print_config"]) == 0
    first = capsys.readouterr().out
    path = tmp_path / "resolved.yaml"
    path.write_text(first)
    assert train.main(["--config", str(path), "--print_config"]) == 0
    shown = yaml.safe_load(first)
    assert yaml.safe_load(capsys.readouterr().out) == shown
    assert shown["task"] == task and shown["learning_rate"] == 0.01
    assert not set(shown) & set(KINDS[task].unused)


def test_text_has_no_fields_of_others():
    shown = job_of().as_dict()
    assert not {name for kind in KINDS.values() for name in kind.own_names} & set(shown)
    assert job_of().own is None


def test_every_field_is_one_of_the_command_line_and_has_one_owner():
    from transformers import TrainingArguments

    names = fields.field_names(fields.settings_parser(TrainingArguments))
    for task, kind in KINDS.items():
        for group in (kind.defaults, *kind.presets.values(), *kind.modes.values()):
            assert set(group) <= names, task
        assert set(kind.unused) <= names, task


@pytest.mark.parametrize(("task", "flag", "name"), GROUPS)
def test_a_group_stands_over_defaults_and_under_file_and_flags(task, flag, name, tmp_path):
    group = getattr(KINDS[task], f"{flag}s")[name]
    kept = {key: value for key, value in group.items() if isinstance(value, int) and not isinstance(value, bool)}
    key, value = next(iter(kept.items()))
    assert value_of(job_of("--task", task, f"--{flag}", name), key) == value
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({"task": task, flag: name, key: value + 1}))
    assert value_of(job_of(config=str(path)), key) == value + 1
    assert value_of(job_of(f"--{key}", value + 2, config=str(path)), key) == value + 2


def value_of(job, name):
    return job.as_dict().get(name, getattr(job.training, name, None))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "image-clasification"], "did you mean 'image-classification'?"),
        (["--preset", "gpu"], "preset is 'gpu'; drop it: text-generation has none"),
        (["--mode", "tinny"], "mode is 'tinny'; allowed: tiny, standard, extended (did you mean 'tiny'?)"),
        (["--task", "image-classification", "--preset", "cpus"], "did you mean 'cpu'?"),
        (["--task", "image-classification", "--packing", "false"], "packing has no effect on task: image-class"),
        (["--task", "image-classification", "--no_packing"], "packing has no effect on task: image-class"),
        (["--task", "image-classification", "--block-size", "64"], "block_size has no effect on task: image-class"),
        (["--image_size", "32"], "image_size has an effect only on task: image-classification, but task is text-gen"),
        (["--task", "word-generation", "--synthetic", "true"], "synthetic has an effect only on task: sensor-class"),
    ],
)
def test_what_does_not_go_together_is_refused(words, message):
    with pytest.raises(SettingsError) as error:
        job_of(*words)
    assert message in str(error.value)


def test_a_value_of_a_preset_is_no_value_that_was_typed():
    """Defaults of a task may name fields that a user may not; what counts is what was given."""
    assert job_of("--task", "image-classification", "--preset", "cpu").task.preset == "cpu"
