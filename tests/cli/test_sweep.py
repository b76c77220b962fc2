"""A small search: what is moved, what is kept after a kill, what is said in the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
import yaml

from scu_trainer.cli.comparison import sweep
from scu_trainer.cli.comparison.sweep_plan import JOURNAL, Axis, parse_axes
from scu_trainer.cli.main import main as cli
from scu_trainer.errors import SettingsError, Stopped, StorageError
from scu_trainer.runs.process import System
from scu_trainer.runs.queue import DeviceQueue
from scu_trainer.runs.studies.comparison import ComparisonBackend
from tests.cli.test_seeds import job, kill_while_it_trains, start_again  # noqa: F401 - a fixture

KNOWN = {"learning_rate", "lora_r", "weight_decay", "optim", "seed", "data_seed"}


def test_axes_are_ranges_and_choices():
    assert parse_axes(["learning_rate=1e-5:1e-3:log", "lora_r=4:64", "optim=sgd,adafactor"], KNOWN) == [
        Axis("learning_rate", 1e-5, 1e-3, is_log=True),
        Axis("lora_r", 4, 64),
        Axis("optim", values=["sgd", "adafactor"]),
    ]
    trial = optuna.trial.FixedTrial({"learning_rate": 1e-4, "lora_r": 8, "optim": "sgd"})
    found = [
        axis.suggest(trial) for axis in parse_axes(["learning_rate=1e-5:1e-3", "lora_r=4:64", "optim=sgd,x"], KNOWN)
    ]
    assert found == [1e-4, 8, "sgd"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--search is missing"),
        (["learning_rat=1:2"], "which is not a field .did you mean 'learning_rate'"),
        (["lora_r"], "is not a search axis; write NAME=LOW:HIGH"),
        (["lora_r=4"], "needs two or more different values"),
        (["lora_r=4,4"], "needs two or more different values"),
        (["lora_r=8:4"], "8 is not below 4"),
        (["weight_decay=0:1:log"], "must begin above 0"),
        (["weight_decay=0:x"], "is not a range"),
        (["weight_decay=0:1:lin"], "is not a range"),
        (["seed=0,1"], "cannot vary seed"),
        (["data_seed=0,1"], "cannot vary data_seed"),
        (["lora_r=4,8", "lora_r=2,3"], "varies lora_r twice"),
    ],
)
def test_what_is_no_axis_is_refused(words, message):
    with pytest.raises(SettingsError, match=message):
        parse_axes(words, KNOWN)


def test_a_value_that_the_field_cannot_have_is_refused_at_once(job, capsys, tmp_path):  # noqa: F811
    words = ["sweep", "--config", str(job), "--search", "lora_r=4,many", "--output_dir", str(tmp_path / "out")]
    assert cli(words) == 2
    assert "--lora_r: invalid int value: 'many'" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_an_axis_under_the_name_of_another_program(job, capsys, tmp_path):  # noqa: F811
    words = ["sweep", "--config", str(job), "--search", "lr=1e-4:fast", "--output_dir", str(tmp_path / "out")]
    assert cli(words) == 2
    said = capsys.readouterr()
    assert "read --search lr as learning_rate" in said.out and "--search learning_rate=1e-4:fast is not a" in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--search", "lr=1e-5:1e-3", "=1:2"], "error: --search varies"),
        (["--search", "lr=1e-5:1e-3", "--lr", "1e-4"], "error: learning_rate is both set and searched"),
        (["--search", "learning_rate=1e-5:1e-3", "--learning-rate=1e-4"], "learning_rate is both set and searched"),
    ],
)
def test_no_axis_is_dropped_and_none_is_set_beside_its_search(job, capsys, monkeypatch, tmp_path, words, message):  # noqa: F811
    monkeypatch.setattr(sweep.Sweep, "run", lambda self: 0)
    assert cli(["sweep", "--config", str(job), *words, "--output_dir", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


def test_its_folder_under_the_name_of_other_commands(job, monkeypatch, tmp_path):  # noqa: F811
    """As a field of the job it would be set by each trial, and dropped without a word."""
    folders = []
    monkeypatch.setattr(sweep.Sweep, "run", lambda self: folders.append(self.plan.folder) or 0)
    words = ["--config", str(job), "--search", "lr=1e-5:1e-3"]
    assert cli(["sweep", *words, "--output", str(tmp_path / "out")]) == 0 and folders == [tmp_path / "out"]


@pytest.mark.parametrize("flag", ["--seed", "--random_seed", "--random-seed"])
def test_its_seed_under_the_name_of_another_program(job, monkeypatch, tmp_path, flag):  # noqa: F811
    seeds = []
    monkeypatch.setattr(sweep.Sweep, "run", lambda self: seeds.append(self.plan.settings["seed"]) or 0)
    words = ["--config", str(job), "--search", "lr=1e-5:1e-3", "--output_dir", str(tmp_path / "out")]
    assert cli(["sweep", *words, flag, "3"]) == 0 and seeds == [3]


def test_a_broken_package_is_one_line_before_anything_runs(job, monkeypatch, tmp_path, capsys):  # noqa: F811
    (tmp_path / "broken/optuna").mkdir(parents=True)
    (tmp_path / "broken/optuna/__init__.py").write_text("raise ImportError('libodd.so: no such file')")
    monkeypatch.syspath_prepend(tmp_path / "broken")
    monkeypatch.delitem(sys.modules, "optuna")
    monkeypatch.setattr(sweep.Sweep, "run", lambda self: pytest.fail("it ran"))
    assert cli(["sweep", "--config", str(job), "--search", "lr=1e-5:1e-3"]) == 2
    assert "sweep needs optuna, which does not load (libodd.so: no such file)" in capsys.readouterr().err


def test_killed_in_the_middle_no_trial_counts_twice(job, tmp_path, capsys):  # noqa: F811
    out = tmp_path / "out"
    words = ["sweep", "--config", str(job), "--search", "learning_rate=1e-4:1e-1:log", "--trials", "2"]
    words += ["--output_dir", str(out)]
    left = kill_while_it_trains(words, out / "runs" / "trial-0", tmp_path / "first.log")
    base = (out / "runs" / "base" / "run.json").read_bytes()
    printed = start_again(words, left, tmp_path / "again.log")
    assert "trial 0 resumes: an earlier start" in printed and "best: trial" in printed
    assert "it was chosen as the best of 2 on these documents" in printed
    assert (out / "runs" / "base" / "run.json").read_bytes() == base
    rows = json.loads((out / sweep.TABLE).read_text())
    assert [(row["trial"], row["state"]) for row in rows] == [(0, "complete"), (1, "complete")]
    best = min(rows, key=lambda row: row["held_out_bpt"])
    assert yaml.safe_load((out / sweep.BEST).read_text())["learning_rate"] == pytest.approx(
        best["values"]["learning_rate"]
    )

    assert cli([*words[:-1], str(out), "--seed", "5"]) == 2
    assert "holds another sweep: seed was 0, now 5" in capsys.readouterr().err


@pytest.fixture
def waiting(tmp_path, monkeypatch):
    """A sweep that has nothing to train, and the line of its device with somebody in it."""
    monkeypatch.setenv("SCU_TRAINER_CACHE", str(tmp_path / "cache"))
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    first = DeviceQueue("cpu", machine=System())
    first.join(System().identity(other.pid), tmp_path / "other")
    found = sweep.Sweep.__new__(sweep.Sweep)
    found.plan, found.device, found.asked = type("plan", (), {"folder": tmp_path}), "cpu", 0
    said: list[str] = []
    found.say = said.append
    yield found, other, said
    other.kill()
    other.stdin.close()
    other.wait()


def test_a_sweep_waits_for_its_turn_and_gives_it_on(waiting):
    found, other, said = waiting

    def end_the_other(seconds):
        assert len(DeviceQueue("cpu").waiting()) == 2
        other.kill()
        other.wait()

    found.backend = ComparisonBackend(sleep=end_the_other)
    with found._place_in_queue():
        assert said == ["waiting for cpu: a background run has it; scu-trainer runs list shows which"]
        assert len(DeviceQueue("cpu").waiting()) == 1
    assert DeviceQueue("cpu").waiting() == []


def test_who_leaves_the_line_is_out_of_it(waiting):
    found, other, _ = waiting

    def interrupt(seconds):
        found.asked = 1

    found.backend = ComparisonBackend(sleep=interrupt)
    with pytest.raises(Stopped, match="stopped while waiting"), found._place_in_queue():
        pytest.fail("it was not its turn")
    assert [place.process.pid for place in DeviceQueue("cpu").waiting()] == [other.pid]


def tried(folder: Path, trials: int, say=lambda line: None) -> list[dict]:
    """What a sweep of 2 x 3 choices in ``folder`` tries of itself, up to so many ``trials``; nothing is trained."""
    folder.mkdir(exist_ok=True)
    axes = parse_axes(["learning_rate=1e-4,1e-2", "lora_r=4,8,16"], {"learning_rate", "lora_r"})
    found, values = sweep.Sweep.__new__(sweep.Sweep), []
    found.plan = sweep.SweepPlan(folder, "", None, (), axes, 0, {}, "")
    found.options, found.say = type("options", (), {"trials": trials}), say
    found._train_base = lambda: None

    def tell(study, trial):
        values.append({axis.name: axis.suggest(trial) for axis in axes})
        study.tell(trial, float(trial.number))

    found._run_trial, found._end = tell, lambda study: None
    found._search()
    return values


def test_no_combination_of_choices_is_tried_twice(tmp_path):
    every = tried(tmp_path / "one", 12)
    assert len(every) == 6 and len({tuple(one.items()) for one in every}) == 6
    assert tried(tmp_path / "parts", 2) + tried(tmp_path / "parts", 12) == every


@pytest.mark.parametrize("cut", [1, 30])
def test_half_a_line_in_the_journal_is_taken_out_and_its_trial_resumes(tmp_path, cut):
    """As a start leaves it that is killed while it writes; Optuna would write on in the same line."""
    every = tried(tmp_path / "whole", 4)
    tried(tmp_path / "cut", 2)
    journal = tmp_path / "cut" / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-cut])
    said: list[str] = []
    assert tried(tmp_path / "cut", 4, said.append) == every[1:] and tried(tmp_path / "cut", 4) == []
    assert "study.journal ended in half a line" in said[0] and "trial 1 resumes" in said[1]


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"values":[0.0]', b'"values":null'), (b'"values":[0.0]', b'"values":["x"]'), (b'"op_code":5', b'"op_code":99'),
     (b'"op_code":5', b"\xff"), (b'"op_code":5,', b"")],
)  # fmt: skip
def test_a_damaged_journal_is_one_line(tmp_path, old, new):
    tried(tmp_path, 2)
    journal = tmp_path / JOURNAL
    assert old in journal.read_bytes()
    journal.write_bytes(journal.read_bytes().replace(old, new, 1))
    with pytest.raises(StorageError, match=r"study\.journal is not as it was written .*; restore it from a copy, or"):
        tried(tmp_path, 3)


def test_a_plan_that_was_damaged_or_lost_is_one_line_and_its_job_is_kept(tmp_path):
    made = sweep.SweepPlan(tmp_path, "scu-trainer sweep", None, (), (), 0, {"seed": 0}, "seed: 0\n")
    made.take()
    (tmp_path / "base.yaml").write_text("")
    made.take()
    assert (tmp_path / "base.yaml").read_text() == "seed: 0\n"
    for damage in ({"resolved": [1]}, {"command": None}):
        (tmp_path / "sweep.json").write_text(json.dumps({**made.as_dict(), **damage}))
        with pytest.raises(StorageError, match=r"sweep\.json holds what no sweep writes: (resolved|command) is"):
            made.take()
    (tmp_path / "sweep.json").unlink()
    (tmp_path / JOURNAL).touch()
    with pytest.raises(StorageError, match=r"holds study\.journal, but not the plan of its trials, sweep\.json"):
        made.take()


@pytest.mark.parametrize(
    "damage",
    [{"held_out_bpt_after": [1]}, {"held_out_bpt_after": {"value": "x"}}, {"held_out_documents": "x"}, {"item": [1]}],
)
def test_figures_of_another_type_are_one_line(tmp_path, damage):
    folder = tmp_path / "runs" / "base"
    folder.mkdir(parents=True)
    (folder / "scu_metrics.json").write_text(json.dumps(damage))
    found = sweep.Sweep.__new__(sweep.Sweep)
    found.plan = type("plan", (), {"folder": tmp_path})
    with pytest.raises(StorageError, match=r"scu_metrics\.json holds what no run writes: (held_out|item).* is "):
        found._held_out_bits("base")


def test_more_combinations_than_can_be_listed_are_left_to_optuna(tmp_path):
    axes = parse_axes([f"{name}={','.join(map(str, range(1, 30)))}" for name in "abcdefgh"], set("abcdefgh"))
    assert sweep.SweepPlan(tmp_path, "", None, (), axes, 0, {}, "").combinations == []


def test_a_trial_that_is_behind_is_ended(tmp_path):
    """By the evaluations in the log of its run; the study is Optuna's own."""
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=2))
    for _ in range(3):
        trial = study.ask()
        trial.report(5.0, 2)
        study.tell(trial, 5.0)
    found = sweep.Sweep.__new__(sweep.Sweep)
    found.plan = type("plan", (), {"folder": tmp_path})
    folder = tmp_path / "runs" / "late"
    folder.mkdir(parents=True)
    trial = study.ask()
    assert not found._is_hopeless(trial, "late")
    (folder / "log_history.json").write_text('[\n{"step": 2, "eval_bpt": 9.0}\n]')
    assert found._is_hopeless(trial, "late") and study.trials[trial.number].intermediate_values == {2: 9.0}


@pytest.mark.parametrize(
    ("item", "figures", "sign", "said"),
    [
        ("document", {"bpt": {}}, -1, "-0.2000 bits against the job as it is (-0.3000 to -0.1000"),
        (
            "image",
            {"bpt": {}, "accuracy": {}},
            1,
            "+20.00 points of accuracy against the job as it is (+10.00 to +30.00",
        ),
    ],
)
def test_the_sign_of_the_verdict(monkeypatch, tmp_path, item, figures, sign, said):
    """The difference is that of the best minus the job as it is: of bits below 0 is better, of accuracy above 0."""
    low, high = sorted((0.1 * sign, 0.3 * sign))
    difference = {"value": 0.2 * sign, "low": low, "high": high, "confidence": 0.95}
    answer = {"item": item, "model": figures, "against": [{"difference": difference}]}
    done = type("done", (), {"returncode": 0, "stdout": json.dumps(answer), "stderr": ""})
    monkeypatch.setattr(sweep.subprocess, "run", lambda *args, **words: done)
    found = sweep.Sweep.__new__(sweep.Sweep)
    found.plan = type("plan", (), {"folder": Path(tmp_path)})
    assert found._verdict(3, 1) == [f"best: trial 3, {said}, 95% over held-out {item}s): better"]


def test_one_held_out_row_gives_no_interval(monkeypatch, tmp_path):
    """A single document cannot be resampled, so its difference has no bounds."""
    difference = {"value": -0.2, "low": None, "high": None, "confidence": 0.95, "verdict": "one document cannot tell"}
    answer = {"item": "document", "model": {"bpt": {}}, "against": [{"difference": difference}]}
    done = type("done", (), {"returncode": 0, "stdout": json.dumps(answer), "stderr": ""})
    monkeypatch.setattr(sweep.subprocess, "run", lambda *args, **words: done)
    found = sweep.Sweep.__new__(sweep.Sweep)
    found.plan = type("plan", (), {"folder": Path(tmp_path)})
    assert found._verdict(3, 2) == ["best: trial 3, -0.2000 bits against the job as it is: one document cannot tell"]


def test_an_evaluation_that_is_not_finite_is_no_figure_of_a_trial(tmp_path):
    """It is null in the log; Optuna takes numbers alone."""
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=0))
    found = sweep.Sweep.__new__(sweep.Sweep)
    found.plan = type("plan", (), {"folder": tmp_path})
    (tmp_path / "runs" / "late").mkdir(parents=True)
    (tmp_path / "runs/late/log_history.json").write_text('[\n{"step": 2, "eval_bpt": null}\n]')
    trial = study.ask()
    assert not found._is_hopeless(trial, "late") and not study.trials[trial.number].intermediate_values


def test_nothing_held_out_is_refused_before_anything_runs(job, capsys, tmp_path):  # noqa: F811
    words = [
        "sweep",
        "--config",
        str(job),
        "--search",
        "learning_rate=1e-4:1e-1",
        "--output_dir",
        str(tmp_path / "out"),
    ]
    assert cli([*words, "--validation_split_percentage", "0"]) == 2
    assert "a sweep judges by held-out rows: nothing is held out; give eval_dataset" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_images_may_come_with_held_out_ones(monkeypatch, tmp_path):
    """In a folder test, whatever the share is; where they do not, the job as it is says so."""
    monkeypatch.setattr(sweep.Sweep, "run", lambda self: 0)
    words = ["--search", "learning_rate=1e-4:1e-1", "--output_dir", str(tmp_path / "out")]
    of_images = ["--task", "image-classification", "--mode", "tiny", "--dataset", "digits"]
    assert sweep.main([*words, *of_images, "--validation_split_percentage", "0"]) == 0


@pytest.mark.parametrize(
    ("own", "fault"),
    [
        ({"value": 3.0}, "it was scored on 2 documents, 60 tokens, the job as it is on 2 documents, 20 tokens"),
        ({"value": None}, "it has no finite held-out figure"),
    ],
)
def test_a_trial_that_cannot_be_compared_fails(tmp_path, own, fault):
    """One that predicts other tokens (completion_only_loss, another tokenizer) may have fewer bits and learn less."""
    for name, tokens, bits in (("base", 20, {"value": 5.0}), ("trial-0", 60, own)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text('{"status": "finished"}')
        figures = {"held_out_documents": 2, "held_out_tokens": tokens, "held_out_bpt_after": bits}
        (folder / "scu_metrics.json").write_text(json.dumps(figures))
    said: list[str] = []
    found = sweep.Sweep.__new__(sweep.Sweep)
    found.plan = type("plan", (), {"folder": tmp_path, "axes": [Axis("lora_r", values=["4", "8"])]})
    found.say = said.append
    study = optuna.create_study()
    found._run_trial(study, study.ask())
    assert [trial.state.name for trial in study.trials] == ["FAIL"]
    assert said[0].startswith("trial 0: lora_r ") and said[0].endswith(f": failed: {fault}")
