"""Bad input ends in one message and exit code 2, before anything is written: some cases of benchmarks/loops/fuzz.py."""

from __future__ import annotations

import json
import math

import pytest
import yaml

from scu_trainer.cli import configuration
from scu_trainer.errors import SettingsError
from tests.fuzz.cases import KINDS, make_case
from tests.fuzz.settings_cases import number_fields
from tests.fuzz.site import make_site
from tests.fuzz.verdict import ACCEPTED, HALF_WRITTEN, HANG, REFUSED, SILENT, TORN, TRACEBACK, run_case

CASES_PER_KIND = 2
WITH_WORDS = {"scu_target_s", "token_cap", "target_headroom_gb", "max_gpu_mem", "cpu_mem"}
"""Numbers that may also be a word: the settings tell them apart, see tests/test_settings.py."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return make_site(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("kind", KINDS)
def test_bad_input_is_refused_in_words(site, tmp_path, kind):
    for number in range(CASES_PER_KIND):
        folder = tmp_path / str(number)
        folder.mkdir()
        words = make_case(kind, f"test.{number}", folder, site)
        verdict = run_case(words, folder)
        assert not verdict.is_offence, (words, verdict.what, verdict.said[-3000:])


@pytest.mark.parametrize("name", [".", "..", "", "kept/.."])
def test_a_run_needs_a_folder_of_its_own(site, tmp_path, name):
    folder = tmp_path / "here"
    (folder / "kept").mkdir(parents=True)
    verdict = run_case(site.train(output_dir=name), folder)
    assert verdict.what == REFUSED and "give a run a folder of its own" in verdict.message


def test_the_verdict_knows_every_way_to_be_wrong(site, tmp_path, monkeypatch):
    """A check of the checker: each offence is made and seen."""
    from scu_trainer.cli import main as command

    def torn() -> int:
        (folder / "run.json").write_text("")
        return 0

    def half_written() -> int:
        (folder / "left").touch()
        print("error: no")
        return 2

    acts = {
        TRACEBACK: lambda: 1 // 0,
        HANG: lambda: __import__("time").sleep(60),
        HALF_WRITTEN: half_written,
        SILENT: lambda: 2,
        TORN: torn,
        ACCEPTED: lambda: 0,
        REFUSED: lambda: print("error: no") or 2,
    }
    for name, act in acts.items():
        folder = tmp_path / name.replace(" ", "_")
        folder.mkdir()
        monkeypatch.setattr(command, "main", lambda _, act=act: act())
        assert run_case(["x"], folder, patience_s=0.5 if name == HANG else 60).what == name


@pytest.mark.parametrize("value", ["nan", "1e400", "1" + "0" * 30])
def test_a_number_that_is_none_is_refused_in_every_field(value):
    """Flags of all stock and own fields, by what the fields declare."""
    for name, task in number_fields().items():
        if name in WITH_WORDS:
            continue
        with pytest.raises(SettingsError, match=name):
            configuration.read_values(None, [f"--{name}={value}", *([f"--task={task}"] if task else [])])


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**30])
def test_a_file_meets_the_same_checks_as_flags(tmp_path, value):
    path = tmp_path / "settings.yaml"
    for name in ("learning_rate", "seed", "block_size", "scu_kp", "lr_milestones", "warmup_steps"):
        path.write_text(yaml.safe_dump({name: value}))
        with pytest.raises(SettingsError, match=name):
            configuration.read_values(str(path), [])


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LAUGHS, "aliases expand to more than"),
        ("dataset: &a [*a]\n", "an alias refers to a value that contains it"),
        ("a: " + "[" * 5000, "nests too deeply"),
        ("[1, 2]: 3\n", "a key is not a word, line 1"),
        ("max_steps: 1\nmax-steps: 2\n", "appears twice"),
        ("max_steps: {a: 1}\n", "max_steps is a mapping; it takes one value"),
        ("text_column: [a, b]\n", "text_column is a list of 2; it takes one value"),
        ("dataset: !!set {a}\n", "dataset is a set; it takes text"),
        ("max_steps: !!int x\n", "not valid YAML"),
        ('dataset: "a\\0b"\n', "with a NUL character"),
        ('dataset: "\\udfff"\n', "which is not valid UTF-8|not valid YAML"),
        ("lr_scheduler_kwargs: {num_cycles: .nan}\n", "finite numbers"),
        (json.dumps({"output_dir": "x" * 300}), "each name in it at most 255"),
    ],
    ids=str,
)
def test_a_configuration_that_is_none_is_one_message(tmp_path, content, message):
    path = tmp_path / "settings.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(SettingsError, match=message):
        configuration.read_values(str(path), [])
