"""What same_runs.py takes for a difference between two runs, and what it sets aside."""

import contextlib
import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.studies import same_runs

PLACES = {"/first/run": "RUN", "/second/run": "RUN"}


def write(folder, place):
    (folder / "checkpoint-3").mkdir(parents=True)
    save_file({"one": torch.ones(3), "two": torch.zeros(2)}, folder / "checkpoint-3" / "model.safetensors")
    torch.save({"state": {0: {"step": torch.tensor(3.0)}}, "groups": [{"lr": 0.5}]}, folder / "optimizer.pt")
    files = {
        "run.json": {"pid": len(place), "loss": 0.5, "best": None, "notices": ["a", "b"]},
        "training_config.json": {"output_dir": place, "seed": 0},
        "log_history.json": [{"step": 1, "loss": 2.0, "memory/used_bytes": 7}, {"step": 2, "loss": float("nan")}],
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "suspects.jsonl").write_text('{"row": 1}\n{"row": 2}\n')
    (folder / "README.md").write_text(f"of {place}")
    (folder / f"events.out.tfevents.{len(place)}.vm").write_text("")
    (folder / "train.log").write_text(
        f"2026-01-01 10:00:0{len(place) % 10},1 WARNING scu_trainer: kept in {place}\n2026 10 WARNING other: {place}!\n"
    )


@pytest.fixture
def runs(tmp_path):
    for contender in ("first", "second"):
        write(tmp_path / contender, f"/{contender}/run")
    return tmp_path / "first", tmp_path / "second"


def found(runs):
    compared = same_runs.compare("some", *runs, PLACES)
    return compared, [(one.file, one.key, one.ref, one.now) for one in compared.differences]


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_runs_that_differ_in_pid_path_and_time_are_equal(runs):
    compared, differences = found(runs)
    assert differences == []
    assert compared.are_weights_equal
    assert (compared.weights, compared.files) == (2, 7)


def test_a_weight_that_differs_in_one_bit_is_named(runs):
    weights = {"one": torch.ones(3), "two": torch.tensor([0.0, -0.0])}
    save_file(weights, runs[1] / "checkpoint-3" / "model.safetensors")
    compared, differences = found(runs)
    assert [one[:2] for one in differences] == [("checkpoint-3/model.safetensors", "two")]
    assert not compared.are_weights_equal


def test_a_state_of_the_optimizer_is_named_by_its_place(runs):
    torch.save({"state": {0: {"step": torch.tensor(3.0)}}, "groups": [{"lr": 0.25}]}, runs[1] / "optimizer.pt")
    assert found(runs)[1] == [("optimizer.pt", "groups > 0 > lr", "0.5", "0.25")]


def test_values_rows_and_messages_that_differ_are_named(runs):
    change(runs[1] / "run.json", loss=0.5000001, best=False)
    (runs[1] / "suspects.jsonl").write_text('{"row": 2}\n{"row": 1}\n')
    (runs[1] / "train.log").write_text("")
    assert found(runs)[1] == [
        ("run.json", "loss", "0.5", "0.5000001"),
        ("run.json", "best", "None", "False"),
        ("suspects.jsonl", "0 > row", "1", "2"),
        ("suspects.jsonl", "1 > row", "2", "1"),
        ("train.log", "all of it", "1 of them", "0 of them"),
    ]


def test_a_key_that_is_set_aside_has_to_be_there(runs):
    change(runs[1] / "run.json", pid=99, notices=["b", "a"])
    assert found(runs)[1] == []
    content = json.loads((runs[1] / "run.json").read_text())
    del content["pid"]
    (runs[1] / "run.json").write_text(json.dumps(content | {"eta_s": 1}))
    assert found(runs)[1] == [("run.json", "pid", "10", "absent"), ("run.json", "eta_s", "absent", "1")]


def test_a_file_that_one_contender_lacks_is_named(runs):
    (runs[1] / "README.md").unlink()
    shutil.copy(runs[0] / "run.json", runs[1] / "more.json")
    assert found(runs)[1] == [
        ("README.md", "the file", "there", "absent"),
        ("more.json", "the file", "absent", "there"),
    ]


def test_only_the_end_of_a_path_is_set_aside():
    assert same_runs.is_set_aside(("0", "throughput/tokens_per_second"))
    assert same_runs.is_set_aside(("state", "cost", "observations", "4", "2"))
    assert not same_runs.is_set_aside(("state", "cost", "observations", "4", "1"))
    assert not same_runs.is_set_aside(("divergence", "state", "observations"))
    assert not same_runs.is_set_aside(("bytes",))


def test_two_runs_without_weights_do_not_count_as_equal(tmp_path):
    for contender in ("first", "second"):
        (tmp_path / contender).mkdir()
    assert not found((tmp_path / "first", tmp_path / "second"))[0].are_weights_equal


def test_every_recipe_has_a_command(tmp_path):
    recipes = [path.stem for path in (same_runs.ROOT / "recipes").glob("*.yaml")]
    assert set(same_runs.ROW_SIZES) <= set(recipes)
    for recipe in recipes:
        command = same_runs.command_of(recipe, same_runs.ROOT, tmp_path / recipe, 6)
        assert command[command.index("--save_steps") + 1] == "3"
        assert ("launch" in command) == (recipe == "deepspeed")


@pytest.fixture
def without_training(monkeypatch):
    """Runs that are written at once; what the script would leave in results/."""
    seen = []
    monkeypatch.setattr(same_runs, "trained", lambda recipe, tree, run_dir, steps: write(run_dir, str(run_dir)) or "")
    monkeypatch.setattr(same_runs, "checked_out", lambda ref, folder: contextlib.nullcontext(same_runs.ROOT))
    monkeypatch.setattr(same_runs, "write_result", lambda *written: seen.append(written))
    return seen


def test_equal_runs_end_with_0(without_training, capsys):
    assert same_runs.main(["--against", "HEAD", "--recipes", "gru,resnet"]) == 0
    (name, record), *_ = without_training
    assert name == "same_runs"
    assert [one["recipe"] for one in record["results"]] == ["gru", "resnet"]
    assert all(one["are_weights_equal"] and not one["differences"] for one in record["results"])
    assert "none" in capsys.readouterr().out


def test_a_run_that_fails_is_a_difference(without_training, monkeypatch, capsys):
    monkeypatch.setattr(same_runs, "trained", lambda recipe, tree, run_dir, steps: f"of {run_dir.parent.name}")
    assert same_runs.main(["--against", "HEAD", "--recipes", "gru"]) == 1
    assert "gru/the run itself: exit code: of ref -> of now" in capsys.readouterr().out


def test_runs_that_are_kept_are_not_written_over(without_training, tmp_path, capsys):
    (tmp_path / "now" / "gru").mkdir(parents=True)
    for flags in (["--recipes", "gru", "--keep", str(tmp_path)], ["--recipes", "gru,some"]):
        with pytest.raises(SystemExit):
            same_runs.main(["--against", "HEAD", *flags])
    said = capsys.readouterr().err
    assert "an earlier run is in" in said
    assert "no recipe some" in said


def test_the_other_tree_is_taken_away_again(tmp_path):
    with same_runs.checked_out("HEAD", tmp_path / "tree") as tree:
        assert (tree / "recipes").is_dir()
    assert not tree.exists()
