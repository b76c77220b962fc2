"""``scu-trainer push`` before it asks the Hub: what would be sent, and what is refused first."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

from scu_trainer.cli.main import main
from scu_trainer.cli.publishing import push
from scu_trainer.run_files import read_json, write_json
from tests.hub.runs import train


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return train(tmp_path_factory.mktemp("push"), "run")


@pytest.fixture
def run(finished, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return shutil.copytree(finished, tmp_path / "run")


def refused(capsys, *words) -> str:
    assert main(["push", *map(str, words)]) == 2
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1
    return told.err


def test_a_dry_run_names_every_file_and_what_stays_here(run, capsys):
    assert push.main([str(run), "--repo_id", "me/x", "--base_model", "me/base", "--dry_run", "--private"]) == 0
    told = capsys.readouterr().out
    assert all(len(line) <= 80 for line in told.splitlines()), told
    assert "to me/x, branch main (private)" in told and "stays here: checkpoint-1, checkpoint-2 (checkpoints)" in told
    assert f"{(run / 'adapter_model.safetensors').stat().st_size:,} bytes" in told
    named = {name for line in told.splitlines() for name in line.replace(",", " ").split()}
    assert {path.name for path in run.iterdir()} <= named, "neither sent nor said to stay"


def test_averages_that_stay_here_are_called_that(run, capsys):
    shutil.copy(run / "checkpoint-1/adapter_model.safetensors", run / "checkpoint-1/ema.safetensors")
    assert push.main([str(run / "checkpoint-1"), "--repo_id", "me/x", "--base_model", "me/base", "--dry_run"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "ema.safetensors (moving averages; the weights themselves are sent)" in told


def test_json_holds_the_same(run, capsys):
    assert push.main([str(run), "--repo_id", "me/x", "--base_model", "me/base", "--dry_run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["size_bytes"] == sum(told["files"].values())
    assert {*told["files"], *told["left_out"]} == {path.name for path in run.iterdir()}


def test_a_card_that_was_edited_is_sent_as_it_is(run, capsys):
    (run / "README.md").write_text("My own words.\n")
    assert push.main([str(run), "--repo_id", "me/x", "--base_model", "me/base", "--dry_run"]) == 0
    told = capsys.readouterr().out
    assert "README.md was edited, and is sent as it is" in told and " 14 bytes" in told


def test_an_adapter_whose_base_nobody_has(run, capsys):
    told = refused(capsys, run, "--repo_id", "me/x", "--dry_run")
    assert "Add --merged to push the full weights, or --base_model OWNER/NAME" in told


def test_a_run_that_is_not_finished(run, capsys):
    write_json(run / "run.json", {**read_json(run / "run.json"), "status": "running"})
    assert "holds no finished model, its status is running" in refused(capsys, run, "--repo_id", "me/x", "--dry_run")
    words = [run / "checkpoint-1", "--repo_id", "me/x", "--base_model", "me/base", "--dry_run"]
    assert main(["push", *map(str, words)]) == 0


@pytest.mark.parametrize(("content", "said"), [({}, "its status is killed"), ([], "does not hold an object")])
def test_a_run_whose_state_says_nothing(run, capsys, content, said):
    write_json(run / "run.json", content)
    assert said in refused(capsys, run, "--repo_id", "me/x", "--dry_run")


def test_an_adapter_that_names_a_number_as_its_base(run, capsys):
    config = run / "adapter_config.json"
    write_json(config, {**read_json(config), "base_model_name_or_path": -1})
    told = refused(capsys, run, "--repo_id", "me/x", "--base_model", "me/base", "--dry_run")
    assert f"{config}: base_model_name_or_path is -1; it must be text" in told


def test_an_adapter_whose_base_has_a_name_that_the_hub_does_not_allow(run, capsys):
    config = run / "adapter_config.json"
    write_json(config, {**read_json(config), "base_model_name_or_path": "my model"})
    assert main(["push", str(run), "--repo_id", "me/x", "--base_model", "me/base", "--dry_run"]) == 0
    assert "license: not stated" in capsys.readouterr().out


MADE = {"format": 1, "adapter": "gone", "run": None}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({**MADE, "adapter": None}, "adapter is null, "),
        ({**MADE, "run": {"folder": 1, "sha256": "x"}}, "run is {"),
        ({**MADE, "run": "gone"}, 'run is "gone", '),
        (MADE, "is no longer in gone; merge it again"),
    ],
)
def test_merged_weights_whose_description_is_damaged(run, capsys, content, said):
    write_json(run / "merge.json", content)
    told = refused(capsys, run, "--repo_id", "me/x", "--dry_run")
    assert said in told and str(run) in told


def test_a_file_of_another_program_that_is_called_as_ours(run, capsys):
    write_json(run / "merge.json", {"format": 1})
    assert main(["push", str(run), "--repo_id", "me/x", "--base_model", "me/base", "--dry_run"]) == 0
    assert "merge.json (not needed to use it)" in capsys.readouterr().out


def test_weights_that_are_cut_off_are_not_sent(run, capsys):
    weights = run / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    told = refused(capsys, run, "--repo_id", "me/x", "--base_model", "me/base", "--dry_run")
    assert f"{weights} is damaged or cut off (" in told


def test_weights_of_which_a_part_is_missing_are_not_sent(run, capsys):
    words = (run, "--repo_id", "me/x", "--base_model", "me/base", "--dry_run")
    parts = [f"adapter_model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = run / "adapter_model.safetensors.index.json"
    write_json(index, {"metadata": {}, "weight_map": {"a": parts[0], "b": parts[1]}})
    assert push.main([*map(str, words)]) == 0 and capsys.readouterr()  # of an earlier run, beside whole weights
    (run / "adapter_model.safetensors").rename(run / parts[0])
    assert f"{run / parts[1]}, which {index.name} names, is missing" in refused(capsys, *words)


def test_secrets_in_a_file_that_would_be_public(run, capsys):
    (run / "README.md").write_text("Use my token hf_" + "A1b2C3d4E5f6G7h8I9j0K1l2\n")
    told = refused(capsys, run, "--repo_id", "me/x", "--base_model", "me/base", "--dry_run")
    assert "README.md holds what looks like a token or password" in told and "A1b2C3" not in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "push needs --repo_id OWNER/NAME"),
        (["--repo_id", "name"], "names no owner; give OWNER/name"),
        (["--repo_id", "https://hub.invalid/me/mine/tree/main"], "is a URL; give OWNER/NAME, such as me/mine"),
        (["--repo_id", "me/a b"], "is not a valid Hub name"),
        (["--repo_id", "me/a/b"], "is not a valid Hub name: it has more than one slash; give OWNER/NAME"),
        (["--repo_id", "me/x", "--revision", ""], "--revision '' is not a valid branch name; give one such as main"),
        (["--repo_id", "me/x", "--revision", "a b"], "--revision 'a b' is not a valid branch name"),
        (["--repo-idd", "me/x"], "unknown option --repo-idd (did you mean '--repo_id'?)"),
        (["--repo_id", "me/x", "--base_model", "me/base"], "there is no token to push with; run `hf auth login`"),
        (["--repo_id", "me/x", "--token", "hf_torn token"], "the token holds a space, a line break or a letter that"),
        (["--repo_id", "me/x", "--token", "hf_töken"], "the token holds a space, a line break or a letter that"),
        (["--repo_id", "me/x", "--merged", "--dtype", "int8", "--dry_run"], "invalid choice: 'int8'"),
    ],
)
def test_mistakes_at_the_keyboard(run, capsys, words, told):
    assert told in refused(capsys, run, *words)


def test_a_comparison_is_not_a_run(tmp_path, capsys):
    (tmp_path / "runs" / "none-seed0").mkdir(parents=True)
    (tmp_path / "comparison.json").write_text("{}")
    told = refused(capsys, tmp_path, "--repo_id", "me/x", "--dry_run")
    assert f"is a comparison of runs; give one of its 1, such as {tmp_path}/runs/none-seed0\n" in told


def test_something_else_than_a_folder(capsys):
    assert "me/model is not a folder here" in refused(capsys, "me/model", "--repo_id", "me/x", "--dry_run")


def test_a_folder_that_is_misspelled(run, capsys):
    told = refused(capsys, f"{run}s", "--repo_id", "me/x", "--dry_run")
    assert f"{run}s is not a folder here (did you mean '{run}'?); give" in told


def test_it_answers_without_torch(run):
    import subprocess

    code = f"""import sys
from scu_trainer.cli.publishing.push import main
main([{str(run)!r}, '--repo_id', 'me/x', '--base_model', 'me/b', '--dry_run'])
sys.exit(str([m for m in ('torch', 'transformers', 'peft') if m in sys.modules] or ''))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "", done.stderr
