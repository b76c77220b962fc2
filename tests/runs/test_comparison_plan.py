"""Arms as a person names them, the plan that is written down, and what cannot be compared."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from rich.console import Console

from scu_trainer.cli.comparison.runs import ComparisonSession
from scu_trainer.cli.comparison.sweep import Sweep
from scu_trainer.errors import SettingsError, StorageError
from scu_trainer.run_files import read_json, write_json
from scu_trainer.runs.process import TOKEN_VARIABLE
from scu_trainer.runs.studies.comparison import ComparisonBackend, Runner, spawn, state_after_exit, variables, words
from scu_trainer.runs.studies.comparison_arms import chosen_arms
from scu_trainer.runs.studies.comparison_plan import (
    check_comparable,
    check_equal_budget,
    check_steers,
    differences,
    fingerprint,
    read_plan,
    require_same,
    write_plan,
)
from scu_trainer.runs.studies.comparison_state import ArmState, failure_reason, progress_line, read_states
from scu_trainer.settings import RegularizationSettings
from scu_trainer.stop_signals import HANGUP
from tests.runs.comparison_stand_in import plan

RECIPE = 4e-3 * 240


def chosen(*arms: str, own=(), pull=RECIPE):
    return chosen_arms(arms, own, lambda: pull)


def test_default_grids_follow_learning_rate_and_steps():
    """On the recipe 0.96: weights would shrink by a factor of e with lambda 1.04, which is rounded to 1."""
    names = [arm.name for arm in chosen("none", "fixed", "weight_decay", "schedule")]
    assert names == [
        "none", "fixed_1", "fixed_3", "fixed_10", "weight_decay_1", "weight_decay_5", "weight_decay_20",
        "schedule_linear", "schedule_cosine",
    ]  # fmt: skip
    small = chosen("fixed", pull=1e-4 * 1000)
    assert [arm.settings["scu_lambda_init"] for arm in small] == [10.0, 30.0, 100.0]


def test_values_and_own_arms():
    found = chosen(
        "fixed:0.5", "weight_decay:10", "schedule:cosine", "model:0.05", own=["mine:scu=true,scu_kp=0.4,optim=sgd"]
    )
    by_name = {arm.name: arm.settings for arm in found}
    assert by_name["fixed_0.5"] == {"scu": True, "scu_law": "fixed", "scu_lambda_init": 0.5}
    assert by_name["weight_decay_10"] == {"scu": False, "weight_decay": 10.0}
    assert by_name["schedule_cosine"]["scu_lambda_final"] == 6.0
    assert by_name["model_0.05"]["scu_target_s"] == 0.05
    assert by_name["mine"] == {"scu": True, "scu_kp": 0.4, "optim": "sgd"}
    assert found[-1].flags == ["--scu=true", "--scu_kp=0.4", "--optim=sgd"]


def test_an_arm_that_follows_s_needs_a_target():
    none, model, named = chosen("none", "model", "model:0.05")
    said = r"arm model would measure S but not control it, because the job has no scu_target_s; add --scu_target_s 0.1"
    with pytest.raises(SettingsError, match=said):
        check_steers(model, {"scu": True, "scu_target_s": None})
    check_steers(model, {"scu": True, "scu_target_s": 0.2})
    check_steers(named, {"scu": True, "scu_target_s": 0.05})
    check_steers(none, {"scu": False})


def test_the_original_law_acts_with_its_penalty():
    (_, original) = chosen("none", "original")
    fields = {name.removeprefix("scu_"): value for name, value in original.settings.items() if name != "scu"}
    settings = RegularizationSettings(**fields)
    assert settings.resolved_actuator == "penalty" and settings.lambda_bounds == (1e-4, 10.0)
    assert (settings.sigma, settings.target_s, settings.kp, settings.ki) == (0.01, 0.01, 0.8, 0.15)
    assert {"sigma", "target_s", "kp", "ki", "actuator"} <= {*fields}, "whatever the job says"


@pytest.mark.parametrize(
    ("arms", "own", "said"),
    [
        (["fixd:3", "none"], [], "unknown arm 'fixd:3' (did you mean 'fixed'?)"),
        (["none:3", "model"], [], "none takes no value"),
        (["fixed:-1", "none"], [], "'-1' is not a number above 0, such as fixed:3"),
        (["fixed:nan", "none"], [], "'nan' is not a number above 0"),
        (["schedule:cosin", "none"], [], "unknown shape 'cosin' (did you mean 'cosine'?)"),
        (["none", "none"], [], "arm none is named twice"),
        (["fixed", "fixed:3"], [], "arm fixed_3 is named twice"),
        (["model"], [], "there is 1 arm (model); a comparison needs 2 or more"),
        (["none"], ["mine"], "must read NAME:field=value"),
        (["none"], ["a/b:scu=true"], "with a name of letters"),
        (["none"], ["mine:scu"], "'scu' is not field=value"),
        (["none"], ["mine:scu_kp="], "'' is not a number, word, true or false"),
        (["none"], ["mine:scu_kp=[1"], "'[1' is not a number, word, true or false"),
    ],
)
def test_arms_that_a_person_can_put_right(arms, own, said):
    with pytest.raises(SettingsError) as error:
        chosen(*arms, own=own)
    assert said in str(error.value)


def test_a_grid_without_known_steps_is_asked_for():
    with pytest.raises(SettingsError, match="give max_steps, or your own values"):
        chosen("none", "fixed", pull=None)
    assert len(chosen("none", "fixed:3", "model", pull=None)) == 3


def test_runs_are_not_pushed_over_each_other():
    said = "arm a has push_to_hub: true, so all runs would overwrite each other in one repository"
    with pytest.raises(SettingsError, match=said):
        check_comparable("a", {"push_to_hub": True})


def test_a_word_that_yaml_takes_for_false_stays_a_word():
    arm = chosen("none", own=["mine:mixed_precision=no,scu=false"])[-1]
    assert arm.settings == {"mixed_precision": "no", "scu": False}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"scu_stop_at_target": True}, "ends the run early; set scu_stop_at_target: false"),
        ({"scu": True, "scu_target_s": "auto"}, "chooses by the held-out loss that is compared here"),
        ({"curriculum": "token_budget+noise_guard"}, "noise_guard leaves out rows by their loss"),
        ({"batch_mode": "logical"}, "lets memory choose the batch"),
        ({"auto_find_batch_size": True}, "repeats rows"),
        ({"load_best_model_at_end": True}, "chooses by the held-out loss"),
        ({"early_stopping_patience": 2, "load_best_model_at_end": True}, "early_stopping_patience ends runs by"),
        ({"validation_split_percentage": 0.0, "eval_dataset": None}, "nothing is held out"),
    ],
)
def test_what_cannot_be_compared(settings, said):
    with pytest.raises(SettingsError, match="arm a cannot be compared at equal tokens: ") as error:
        check_comparable("a", settings)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"scu": False, "scu_target_s": "auto", "curriculum": "token_budget", "batch_mode": "chunk"},
        {"validation_split_percentage": 0.0, "eval_dataset": "other.jsonl"},
        {"validation_split_percentage": 10.0, "scu_stop_at_target": False, "curriculum": "none"},
        {},
    ],
)
def test_what_can_be_compared(settings):
    check_comparable("a", settings)


def test_arms_of_other_tokens_are_refused():
    settings = {"max_steps": 9, "dataset": "a.jsonl", "learning_rate": 1e-3}
    check_equal_budget({"none": settings, "mine": {**settings, "learning_rate": 2e-3}})
    with pytest.raises(SettingsError, match=r"arm mine .* its max_steps is 5, but that of none is 9; give --max_steps"):
        check_equal_budget({"none": settings, "mine": {**settings, "max_steps": 5}})


# -- written down ------------------------------------------------------------------------------------------------------


def test_fingerprints_leave_out_the_place_and_nothing_else():
    settings = {"output_dir": "a", "seed": 0, "learning_rate": 1e-3}
    assert fingerprint(settings) == fingerprint({"seed": 5, "learning_rate": 1e-3, "output_dir": "b"})
    assert fingerprint(settings) != fingerprint({**settings, "learning_rate": 2e-3})
    assert differences(settings, {"output_dir": "b", "learning_rate": 2e-3, "new": 1}) == [
        "learning_rate was 0.001, now 0.002", "new was not there, now 1",
    ]  # fmt: skip


def test_a_plan_comes_back_as_it_was_and_accepts_only_itself(tmp_path):
    made = plan(tmp_path)
    assert read_plan(tmp_path) is None
    write_plan(made)
    assert read_plan(tmp_path) == made
    require_same(read_plan(tmp_path), made)
    with pytest.raises(SettingsError, match=r"seeds were 0 1 2, now 5; type its command \(scu-trainer compare"):
        require_same(read_plan(tmp_path), plan(tmp_path, seeds=(5,)))


def test_a_file_that_is_no_plan_is_refused(tmp_path):
    (tmp_path / "plan.json").write_text("[]")
    with pytest.raises(StorageError, match="is not a comparison plan"):
        read_plan(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [{"arms": [{}]}, {"arms": 3}, {"resolved": {}}, {"resolved": -1}, {"seeds": None}, "bytes", {"threads": "x"},
     {"threads": 0}, {"command": None}, {"config": [1]}, {"seeds": ["0", 1, 2]}, {"arms": {}}],
)  # fmt: skip
def test_a_damaged_plan_is_refused(tmp_path, damage):
    write_plan(plan(tmp_path))
    if damage == "bytes":
        next((tmp_path / "arms").iterdir()).write_bytes(b"\xff")
    else:
        write_json(tmp_path / "plan.json", {**read_json(tmp_path / "plan.json"), **damage})
    with pytest.raises(StorageError, match=r"plan\.json, or a file in .*arms, is not as it was written"):
        read_plan(tmp_path)


def test_a_run_trains_the_recipe_of_its_arm_with_its_seed_and_threads(tmp_path):
    made = plan(tmp_path)
    command = words(made, ("model", 2))
    assert command[2:] == [
        "--config", str(tmp_path / "arms" / "model.yaml"), "--seed", "2",
        "--output_dir", str(tmp_path / "runs" / "model-seed2"), "--resume_from_checkpoint", "auto",
    ]  # fmt: skip
    found = variables(made, "gpu-3")
    assert (found["CUDA_VISIBLE_DEVICES"], found["OMP_NUM_THREADS"]) == ("3", "1")
    assert str(tmp_path) in found[TOKEN_VARIABLE]


def test_recipes_that_were_changed_since_are_written_again(tmp_path):
    made = plan(tmp_path)
    write_plan(made)
    made.recipe("model").write_text("lift: 9")
    session = ComparisonSession(made, "none", ["cpu"], Console(), ComparisonBackend())
    session._take_plan()
    assert made.recipe("model").read_text() == made.texts["model"] and session.plan == made


def test_seeds_come_before_arms():
    assert plan(None, seeds=(4, 7)).runs == [("none", 4), ("model", 4), ("none", 7), ("model", 7)]


# -- how a run ended ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "was_asked", "status", "said"),
    [
        (0, False, "failed", "ended with exit code 0, but"),
        (3, False, "missing", "stopped"),
        (-15, True, "missing", "stopped"),
        (-15, False, "failed", "killed by signal 15"),
        (130, True, "missing", "stopped"),
        (2, True, "failed", "exit code 2: no room"),
        (1, False, "failed", "exit code 1: no room"),
    ],
)
def test_what_an_end_means(tmp_path, code, was_asked, status, said):
    made = plan(tmp_path)
    write_plan(made)
    made.console("none", 0).write_text("loading\nerror: no room\nmore of a trace\n")
    found = state_after_exit(made, ("none", 0), code, was_asked)
    assert found.status == status and said in found.error


def test_last_words_without_an_error_line(tmp_path):
    console = tmp_path / "x.log"
    assert failure_reason(console, 1) == "exit code 1: it printed nothing"
    console.write_text("Traceback\n  File x\nValueError:   bad\n\n")
    assert failure_reason(console, 1) == "exit code 1: ValueError: bad"


def test_last_words_are_those_of_the_newest_start(tmp_path):
    """The log keeps what earlier starts said."""
    console = tmp_path / "x.log"
    for code in ("print('error: no room')", "raise ValueError('bad')", "pass"):
        spawn([sys.executable, "-S", "-c", code], os.environ, console).wait()
        said = {"p": "no room", "r": "ValueError: bad"}
        expected = "it printed nothing" if code == "pass" else said[code[0]]
        assert failure_reason(console, 1) == f"exit code 1: {expected}"


def test_failures_are_remembered_where_they_left_no_directory(tmp_path):
    made = plan(tmp_path, seeds=(0,))
    before = [{"arm": "none", "seed": 0, "status": "failed", "error": "exit code 2: x"}]
    assert read_states(made, before, retry_failed=False)["none", 0] == ArmState("failed", "exit code 2: x")
    assert read_states(made, before, retry_failed=True)["none", 0] == ArmState("missing", "not started yet")


def test_progress_in_a_line(tmp_path):
    made = plan(tmp_path, seeds=(0,))
    states = {("none", 0): ArmState("finished"), ("model", 0): ArmState("running")}
    assert progress_line(made, states) == "1 of 2 runs done; model-seed0 starts"
    folder = made.run_folder("model", 0)
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"status": "running", "step": 3, "max_steps": 9}')
    assert progress_line(made, states) == "1 of 2 runs done; model-seed0 3/9"


# -- the order of things -----------------------------------------------------------------------------------------------


class Fake:
    """A process that ends with ``code`` at ``ends_at`` looks; ``heard``: when it was asked to stop."""

    def __init__(self, ends_at: int, code: int, looks: list[int]) -> None:
        self.ends_at, self.code, self.looks = ends_at, code, looks
        self.heard: list[str] = []

    def poll(self):
        return self.code if self.looks[0] >= self.ends_at else None

    def terminate(self) -> None:
        self.heard.append("terminate")

    def kill(self) -> None:
        self.heard.append("kill")


def raced(made, ends: list[tuple[int, int]], asked_at: tuple[int, ...] = ()):
    """A runner of two places whose processes end as ``ends`` says (look, exit code). Returns it and its processes."""
    write_plan(made)
    looks, started = [0], []

    def spawn(command, environment, console):
        started.append(Fake(*ends[len(started)], looks))
        return started[-1]

    def sleep(seconds):
        looks[0] += 1
        runner.asked += looks[0] in asked_at

    states = {key: ArmState("missing", "not started yet") for key in made.runs}
    hands = ComparisonBackend(spawn=spawn, sleep=sleep)
    runner = Runner(made, states, ["cpu", "cpu"], lambda states: None, lambda states: None, hands)
    runner.run()
    return runner, started


def test_a_place_is_taken_again_when_a_run_ends(tmp_path):
    runner, started = raced(plan(tmp_path, seeds=(0, 1)), [(5, 1), (2, 1), (9, 1), (7, 1)])
    assert len(started) == 4 and {state.status for state in runner.states.values()} == {"failed"}
    assert all(one.heard == [] for one in started)


def test_places_that_are_free_at_once_share_the_last_run(tmp_path):
    arms = {name: {} for name in ("none", "model", "fixed_3")}
    runner, started = raced(plan(tmp_path, arms, seeds=(0,)), [(2, 1), (2, 1), (4, 1)])
    assert len(started) == 3 and {state.status for state in runner.states.values()} == {"failed"}


def test_once_asked_to_stop_nothing_starts_any_more(tmp_path):
    runner, started = raced(plan(tmp_path, seeds=(0, 1)), [(4, 3), (8, 3)], asked_at=(2,))
    assert [one.heard for one in started] == [["terminate"], ["terminate"]]
    assert [state.error for state in runner.states.values()] == ["stopped; run the same command to continue"] * 2 + [
        "not started yet"
    ] * 2


def test_asked_a_third_time_it_kills(tmp_path):
    _, started = raced(plan(tmp_path, seeds=(0,)), [(9, -9), (9, -9)], asked_at=(2, 4, 6))
    assert [one.heard for one in started] == [["terminate", "terminate", "kill"]] * 2


@pytest.mark.parametrize("kind", [Runner, Sweep])
def test_a_terminal_that_is_closed_asks_once(kind, monkeypatch):
    """It sends SIGHUP, its shell does again, and what is printed in between fails: a second wish would mean "now"."""
    monkeypatch.setattr("scu_trainer.stop_signals.outlives_terminal", lambda: False)
    one, heard = kind.__new__(kind), []
    one.asked = 0
    for ask in (lambda: one._receive(HANGUP, None), one._closed, lambda: one._receive(HANGUP, None)):
        ask()
        heard.append(one.asked)
    one._receive(signal.SIGINT, None)
    assert heard == [1, 1, 1] and one.asked == 2
