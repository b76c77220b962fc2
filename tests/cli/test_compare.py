"""``scu-trainer compare`` as a person calls it: real trainings of a tiny model, forked from this process."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Optional

import pytest
import yaml
from rich.console import Console

from scu_trainer.cli import train
from scu_trainer.cli.comparison import compare
from scu_trainer.cli.comparison import plan as compare_plan
from scu_trainer.cli.comparison import screen as compare_screen
from scu_trainer.errors import SettingsError
from scu_trainer.run_files import read_rows
from scu_trainer.runs.studies.comparison import ComparisonBackend
from tests import tiny
from tests.forked import act_as_child
from tests.runs.comparison_stand_in import plan

STEPS = 3


class Forked:
    """As a Popen: a training that is this process's child."""

    def __init__(self, words: Sequence[str], variables: Mapping[str, str], console: Path) -> None:
        gc.freeze()
        self._code: Optional[int] = None
        self.pid = os.fork()
        if self.pid == 0:
            _train(words, variables, console)

    def poll(self) -> Optional[int]:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


def _train(words: Sequence[str], variables: Mapping[str, str], console: Path) -> NoReturn:
    """``words``: interpreter, scripts/train.py, and its flags."""

    def act() -> int:
        os.environ.clear()
        os.environ.update(variables)
        return train.main(list(words[2:]))

    act_as_child(act, console)


def nothing_starts(words: Sequence[str], variables: Mapping[str, str], console: Path) -> NoReturn:
    raise AssertionError(f"{console.stem} was started")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    rows = [{"text": f"A list is a sequence that can be changed in place. Number {i}. " * 6} for i in range(24)]
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model_name_or_path": str(tiny.saved_llama(folder / "model")),
        "dataset": str(folder / "documents.jsonl"),
        "block_size": 64,
        "validation_split_percentage": 25,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "report_to": "none",
        "cache_dir": str(folder / "cache"),
        "use_cpu": True,
        "sample_prompts": 0,
        "predict_memory": False,
        "preflight": "off",
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def words(config: Path, folder: Path, *more: str) -> list[str]:
    return ["--config", str(config), "--arms", "none,fixed:3", "--jobs", "1", "--output_dir", str(folder), *more]


@pytest.fixture(scope="module")
def compared(config, tmp_path_factory):
    """Folder of a comparison of two arms over three seeds that is done."""
    folder = tmp_path_factory.mktemp("compared") / "out"
    code = compare.main(words(config, folder), ComparisonBackend(spawn=Forked))
    assert code == 0, [path.read_text()[-2000:] for path in (folder / "console").iterdir()]
    return folder


def test_every_arm_and_seed_trained_the_same_tokens(compared):
    found = json.loads((compared / "comparison.json").read_text())
    assert [(run["arm"], run["seed"]) for run in found["runs"]] == [
        (arm, seed) for seed in (0, 1, 2) for arm in ("none", "fixed_3")
    ]
    assert {run["status"] for run in found["runs"]} == {"finished"} and found["budget"]["steps"] == STEPS
    for seed in (0, 1, 2):
        pair = [run["metrics"] for run in found["runs"] if run["seed"] == seed]
        for key in ("tokens", "data_fingerprint", "held_out_bpt_before"):
            assert pair[0][key] == pair[1][key] is not None
        assert pair[0]["held_out_bpt"] != pair[1]["held_out_bpt"]
    assert [row["finished"] for row in found["table"]] == [3, 3]


def test_arms_trained_as_they_say(compared):
    runs = compared / "runs"
    assert not (runs / "none-seed1" / "scu_history.json").exists()
    assert {row["lambda"] for row in read_rows(runs / "fixed_3-seed1" / "scu_history.json")} == {3.0}
    described = json.loads((runs / "fixed_3-seed1" / "training_config.json").read_text())
    assert (described["seed"], described["configuration"]["scu_law"]) == (1, "fixed")


def test_the_same_command_and_the_table_alone_say_the_same(compared, config, capsys):
    before = (compared / "comparison.json").read_bytes()
    capsys.readouterr()
    assert compare.main(words(config, compared), ComparisonBackend(spawn=nothing_starts)) == 0
    shown = capsys.readouterr().out
    assert "finished runs kept: 6" in shown
    assert compare.main(["--table", str(compared)]) == 0
    table = capsys.readouterr().out
    assert table.strip() and table in shown
    assert (compared / "comparison.json").read_bytes() == before
    assert max(map(len, table.splitlines())) <= 80


def test_another_reference_is_judged_without_a_run(compared, config, capsys):
    arguments = words(config, compared, "--reference", "fixed:3", "--confidence", "0.9")
    try:
        assert compare.main(arguments, ComparisonBackend(spawn=nothing_starts)) == 0
        shown = capsys.readouterr().out
        assert "minus fixed_3" in shown and "90 % t interval" in shown
    finally:
        compare.main(words(config, compared), ComparisonBackend(spawn=nothing_starts))


def test_a_changed_job_is_refused_by_the_name_of_its_setting(compared, config, capsys):
    capsys.readouterr()
    assert compare.main(words(config, compared, "--max_steps", "5"), ComparisonBackend(spawn=nothing_starts)) == 2
    said = capsys.readouterr().err
    assert "holds another comparison: max_steps was 3, now 5" in said and "type its command" in said


def test_a_dry_run_writes_nothing(config, tmp_path, capsys):
    assert compare.main(words(config, tmp_path / "out", "--dry_run"), ComparisonBackend(spawn=nothing_starts)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 arms x 3 seeds = 6 runs, 1 at a time" in " ".join(" ".join(lines).split())
    command = f"--config {tmp_path}/out/arms/none.yaml --seed 0 --output_dir {tmp_path}/out/runs/none-seed0 "
    assert command in lines[-1] and lines[-1].startswith("such as: "), "on one line, to be copied"
    assert list(tmp_path.iterdir()) == []


def test_seeds_are_separated_as_arms_are(config, tmp_path, capsys):
    more = ["--dry_run", "--seeds", "3,1", "2"]
    assert compare.main(words(config, tmp_path / "out", *more), ComparisonBackend(spawn=nothing_starts)) == 0
    assert "x 3 seeds" in capsys.readouterr().out


def test_the_list_of_arms_follows_the_job(config, capsys):
    assert compare.main(["--config", str(config), "--list", "--max_steps", "100"]) == 0
    shown = capsys.readouterr().out
    assert "fixed_10" in shown and "weight_decay_20" in shown and "scu_law original" in shown


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--seed", "1"], "--seed is set by the comparison: each run has its own: give --seeds"),
        (["--random_seed", "1"], "--seed is set by the comparison: each run has its own: give --seeds"),
        (["--no-scu"], "arms turn the loop on and off"),
        (["--seeds", "1", "1"], "seeds are 1 1; give different whole numbers"),
        (["--seeds", "0,x"], "seeds are 0,x; give different whole numbers"),
        (["--confidence", "95"], "confidence is 95; it must be at least 0.5 and below 1, such as 0.95"),
        (["--jobs", "0"], "jobs is 0; it must be 1 or more"),
        (["--reference", "model"], "reference 'model' is not an arm; arms: none, fixed_3"),
        (["--reference", "fixed"], "(did you mean 'fixed_3'?)"),
        (["--learning_rat", "1"], "unknown option --learning_rat (did you mean '--learning_rate'?)"),
        (["--arm", "mine:scu_kpp=1"], "arm mine: unknown option --scu_kpp (did you mean '--scu_kp'?)"),
        (
            ["--arm", "mine:scu=true,scu_target_s=0.1,scu_stop_at_target=true"],
            "arm mine cannot be compared at equal tokens",
        ),
        (["--arm", "mine:seed=5"], "arm mine: seed is set by the comparison: each run has its own: give --seeds"),
        (["--arm", "mine:output_dir=x"], "arm mine: output_dir is set by the comparison"),
        (["--arm", "mine:max_steps=5"], "at equal tokens: its max_steps is 5, but that of none is 3"),
        (["--curriculum", "noise_guard"], "noise_guard leaves out rows by their loss; set curriculum: none"),
        (["--validation_split_percentage", "0"], "nothing is held out"),
        (["--table", "somewhere"], "--table prints an existing comparison and takes no other option"),
    ],
)
def test_what_a_person_can_fix(config, tmp_path, capsys, more, said):
    assert compare.main(words(config, tmp_path / "out", *more), ComparisonBackend(spawn=nothing_starts)) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_table_of_something_else(tmp_path, capsys):
    path = tmp_path / "comparison.json"
    path.write_text("{}")
    assert compare.main(["--table", str(tmp_path)]) == 2
    assert f"{path} is not a comparison of this version" in capsys.readouterr().err
    assert compare.main([f"--table={tmp_path}", "--list"]) == 2
    assert "takes no other option" in capsys.readouterr().err


def test_names_stay_whole_where_lines_are_wrapped(capsys):
    compare_screen.print_wrapped(Console(width=20), "a line before none-seed0 and after it")
    assert capsys.readouterr().out.splitlines() == ["a line before", "  none-seed0 and", "  after it"]


def test_without_a_configuration_and_under_a_launcher(config, tmp_path, capsys, monkeypatch):
    assert compare.main([]) == 2
    assert "--config is missing" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert compare.main(words(config, tmp_path / "out")) == 2
    assert "starts its runs itself and needs no launcher" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "free_gib", "asked", "devices", "threads"),
    [
        (["cpu"], 100, None, ["cpu"] * 6, 1),  # not more than there are runs
        (["cpu"], 9, None, ["cpu"] * 2, 4),
        (["cpu"], 1, None, ["cpu"], 8),
        (["cpu"], 1, 3, ["cpu"] * 3, 2),
        (["gpu-0", "gpu-3"], 100, None, ["gpu-0", "gpu-3"], 4),
        (["gpu-0", "gpu-3"], 100, 1, ["gpu-0"], 8),
    ],
)
def test_runs_at_a_time_and_their_threads(tmp_path, monkeypatch, gpus, free_gib, asked, devices, threads):
    monkeypatch.setattr(compare_plan.room, "devices", lambda: gpus)
    monkeypatch.setattr(compare_plan, "usable_cores", lambda: 8.0)
    monkeypatch.setattr(compare_plan, "ram_bytes", lambda: (2**40, free_gib * 2**30))
    made, found = compare_plan.with_threads_and_devices(plan(tmp_path), asked)
    assert (found, made.threads) == (devices, threads)


def test_more_runs_at_a_time_than_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(compare_plan.room, "devices", lambda: ["gpu-0", "gpu-1"])
    with pytest.raises(SettingsError, match="jobs is 3, but there are 2 GPUs, one for each run; lower --jobs"):
        compare_plan.with_threads_and_devices(plan(tmp_path), 3)
