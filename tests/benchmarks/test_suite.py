"""The suite's arithmetic, and that its contenders do the same work. Nothing here looks at a time."""

import json
import multiprocessing
from types import SimpleNamespace

import pytest
import torch

from benchmarks.headline import memory_estimate, regressions, splitting, variable_length
from benchmarks.lib import text_job
from benchmarks.lib.memory_estimate.cases import CASES
from benchmarks.lib.memory_estimate.run import Watch
from benchmarks.lib.memory_work import DISTRIBUTIONS, Shape
from benchmarks.lib.outcome import Figure, Grid, figure, finish
from benchmarks.lib.text_race import Raced, _record_round
from benchmarks.lib.turns import Contender, Ended, in_turns
from benchmarks.loops import curriculum_cost, nonfinite_cost

JOB = text_job.Job(Shape(vocab=64, hidden=16, layers=1, longest_row=64), DISTRIBUTIONS["alpaca"], 3, 4, 2)


class NoTurns:
    """A contender that runs alone."""

    steps = 0

    def begin(self):
        pass

    def step(self):
        self.steps += 1


@pytest.fixture(scope="module")
def done():
    return {name: text_job.run(NoTurns(), name, JOB) for name in text_job.WORKERS}


def test_plain_loop_and_stock_trainer_end_with_the_same_weights(done):
    assert done["plain"] == done["stock"]
    assert len(done["stock"]["step_tokens"]) == JOB.steps


def test_contenders_train_on_the_same_tokens_to_the_same_loss(done):
    stock = done["stock"]
    for name in ("ours", "ours, no loop", "trl", "trl, padding-free"):
        assert done[name]["step_tokens"] == stock["step_tokens"], name
        assert done[name]["held_out_bits"] == pytest.approx(stock["held_out_bits"], abs=1e-4), name


def test_packing_leaves_no_token_out(done):
    assert sum(done["trl, packing"]["step_tokens"]) == sum(done["stock"]["step_tokens"])


def test_training_is_seen_in_the_held_out_loss(done):
    untrained = text_job.held_out_bits(JOB.model(), JOB)
    assert untrained - done["stock"]["held_out_bits"] > 0.001


def test_a_ratio_counts_tokens_and_leaves_the_first_steps_out():
    raced = {name: Raced(name) for name in ("stock", "ours")}
    said = {"held_out_bits": 1.0, "step_tokens": [100, 100, 300, 100]}
    found = {"stock": Ended([9.0, 1.0, 3.0], said), "ours": Ended([27.0, 0.5, 1.0], said)}
    _record_round(raced, found, steps_per_turn=1, warm_up_turns=1)
    assert raced["ours"].ratios == [pytest.approx((400 / 1.5) / (400 / 4.0))]
    assert raced["ours"].whole_ratios == [pytest.approx(13.0 / 28.5)]
    assert raced["ours"].paired_ratios == [pytest.approx(2.5)]
    assert (raced["ours"].tokens, raced["ours"].optimizer_steps) == (600, 4)


@pytest.mark.parametrize("timed", [curriculum_cost.TRACKING, nonfinite_cost.INSIDE], ids=["tracking", "guard"])
def test_what_is_timed_by_name_exists(timed):
    assert [name for owner, name in timed if not hasattr(owner, name)] == []


def test_the_guard_is_on_in_every_second_step(monkeypatch):
    monkeypatch.setattr(nonfinite_cost, "embedded_model", lambda seed, tuning: Shape(2048, 32, 1, 256).model())
    monkeypatch.setattr(nonfinite_cost, "WARM_UP_STEPS", 0)
    found = nonfinite_cost.measure("full", 4)
    assert found["pairs"] == 2 and found["direct_fraction"] > 0


def _three_steps(turns, factor):
    turns.begin()
    for _ in range(2):
        turns.step()
    return {"factor": factor}


def _dies(turns):
    turns.begin()
    raise ValueError("of the contender")


@pytest.fixture
def forks(monkeypatch):
    """Contenders that compute nothing need no process of their own from the ground up."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr("benchmarks.lib.turns.multiprocessing.get_context", lambda method: fork)


def test_contenders_take_turns_in_processes_and_say_their_end(forks):
    found = in_turns([Contender("one", _three_steps, (1,)), Contender("two", _three_steps, (2,))], 1, warm_up_turns=1)
    assert {name: ended.said for name, ended in found.items()} == {"one": {"factor": 1}, "two": {"factor": 2}}
    assert [len(ended.seconds) for ended in found.values()] == [1, 1]


def test_a_contender_that_dies_is_named(forks):
    with pytest.raises(RuntimeError, match="the bad one ended without a result"):
        in_turns([Contender("good", _three_steps, (1,)), Contender("the bad one", _dies)], 1)


def test_the_best_of_trl_may_be_one_that_ran_once():
    raced = {
        name: Raced(name, ratios=[1.0, 1.0], whole_ratios=[1.0], held_out_bits=2.0)
        for name in variable_length.CONTENDERS
    }
    raced["ours"].ratios, raced["trl"].ratios = [3.0, 2.0], [1.5]
    figures = variable_length.figures_of(raced)
    assert figures["tokens per second, ours / best of TRL"].value == pytest.approx(2.0)
    assert figures["tokens per second, ours / stock"].value == pytest.approx(2.5)
    assert len(variable_length.grid_of(raced).rows) == len(variable_length.CONTENDERS)


# -- figures -----------------------------------------------------------------------------------------------------------


def test_figures_say_whether_they_reach_their_target():
    found = figure([2.0, 2.5, 2.2], "higher", 2.4)
    assert (found.value, found.is_met) == (2.2, False)
    assert found.said("speed") == "speed: 2.2 (repeats 23% apart), at least 2.4: MISSED"
    assert Figure(0.19, "lower", target=0.2).is_met
    assert not Figure(0.21, "lower", target=0.2).is_met
    assert Figure(7.0, "lower").is_met


def test_results_hold_table_figures_machine_and_versions(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.lib.common.RESULTS", tmp_path)
    grid = Grid(("contender", "ratio"), [("ours", "1.00")])
    path = finish("some", "a title", grid, {"ratio": figure([1.0, 1.1], "higher")}, repeats=2, results=[1])
    record = json.loads(path.read_text())
    assert record["table"] == {"heads": ["contender", "ratio"], "rows": [["ours", "1.00"]]}
    assert record["figures"]["ratio"]["value"] == pytest.approx(1.05)
    assert record["machine"]["cores"] >= 1
    assert {"torch", "transformers", "trl"} <= set(record["versions"])


def test_a_quick_run_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.lib.common.RESULTS", tmp_path)
    assert finish("some", "a title", Grid(("contender",), []), {}, quick=True) is None
    assert not list(tmp_path.iterdir())


# -- what moved --------------------------------------------------------------------------------------------------------


def record(**figures):
    return {
        "benchmark": "some",
        "command": "python benchmarks/some.py",
        "date": "2026-01-01",
        "machine": {"cores": 2},
        "versions": {"torch": "2"},
        "figures": {
            name: {"value": value, "better": better, "spread": spread, "target": None}
            for name, (value, better, spread) in figures.items()
        },
    }


def test_a_figure_moves_when_it_leaves_the_noise():
    before = record(speed=(2.0, "higher", 0.1), peak=(1.0, "lower", None), left=(1.0, "lower", None))
    now = record(speed=(1.85, "higher", 0.05), peak=(1.04, "lower", None), fresh=(1.0, "lower", None))
    verdicts = {one.name: one.verdict for one in regressions.compared(before, now)}
    assert verdicts == {"speed": "as before", "peak": "WORSE", "left": "gone", "fresh": "new"}
    now = record(speed=(1.7, "higher", 0.05), peak=(0.9, "lower", None), left=(1.0, "lower", None))
    verdicts = {one.name: one.verdict for one in regressions.compared(before, now)}
    assert verdicts == {"speed": "WORSE", "peak": "better", "left": "as before"}


def test_figures_near_nothing_and_of_other_contenders_are_no_regression():
    near = {"value": 1e-7, "better": "lower", "spread": None, "target": 1e-3, "tolerance": 1e-3}
    theirs = {"value": 1.0, "better": None, "spread": None, "target": None}
    tight = {"value": 0.985, "better": "higher", "spread": None, "target": 0.98}
    before = record() | {"figures": {"near": near, "theirs": theirs, "tight": tight}}
    now = record() | {
        "figures": {
            "near": near | {"value": 5e-7},
            "theirs": theirs | {"value": 0.5},
            "tight": tight | {"value": 0.975},
        }
    }
    assert [one.verdict for one in regressions.compared(before, now)] == [
        "as before",
        "moved, nobody's aim",
        "as before, target now missed",
    ]


@pytest.fixture
def results(tmp_path, monkeypatch):
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "some.json").write_text(json.dumps(record(speed=(2.0, "higher", None))))
    monkeypatch.setattr(regressions, "RESULTS", folder)
    return folder


@pytest.mark.parametrize(("speed", "code", "said"), [(2.5, 0, "nothing got worse"), (1.5, 1, "worse: some")])
def test_newer_results_are_held_against_the_files(results, tmp_path, capsys, speed, code, said):
    newer = record(speed=(speed, "higher", None)) | {"versions": {"torch": "3"}}
    (tmp_path / "some.json").write_text(json.dumps(newer))
    assert regressions.main(["--found", str(tmp_path)]) == code
    shown = capsys.readouterr().out
    assert said in shown
    assert "torch: 2 before, 3 now" in shown


def test_the_recorded_command_runs_again_elsewhere(results, tmp_path, monkeypatch):
    script = tmp_path / "benchmarks" / "some.py"
    script.parent.mkdir()
    newer = json.dumps(record(speed=(2.0, "higher", None)))
    script.write_text(f"import os\nopen(os.environ['BENCHMARK_RESULTS'] + '/some.json', 'w').write({newer!r})\n")
    monkeypatch.setattr(regressions, "ROOT", tmp_path)
    before = (results / "some.json").read_text()
    assert regressions.main(["some", "--keep", str(tmp_path / "kept")]) == 0
    assert (results / "some.json").read_text() == before
    assert (tmp_path / "kept" / "some.json").is_file()


def test_a_benchmark_that_fails_is_said_and_the_others_go_on(results, tmp_path, monkeypatch, capsys):
    (results / "other.json").write_text(json.dumps(record() | {"command": "python benchmarks/other.py"}))
    scripts = tmp_path / "benchmarks"
    scripts.mkdir()
    (scripts / "other.py").write_text("raise SystemExit(3)\n")
    newer = json.dumps(record(speed=(2.0, "higher", None)))
    (scripts / "some.py").write_text(
        f"import os\nopen(os.environ['BENCHMARK_RESULTS'] + '/some.json', 'w').write({newer!r})\n"
    )
    monkeypatch.setattr(regressions, "ROOT", tmp_path)
    assert regressions.main([]) == 2
    shown = capsys.readouterr().out
    assert "python benchmarks/other.py ended with 3" in shown
    assert "no newer results of other" in shown
    assert "speed" in shown


def test_an_unknown_benchmark_is_named_with_those_that_there_are(results, capsys):
    with pytest.raises(SystemExit) as ended:
        regressions.main(["other"])
    assert ended.value.code == 2
    assert "no results with figures for other; there are some" in capsys.readouterr().err


def test_the_steps_of_a_training_that_was_predicted_are_watched():
    place = SimpleNamespace(device=torch.device("meta"))  # which keeps no peak
    trainer = SimpleNamespace(args=place, micro_batches=None, add_callback=lambda callback: None)
    assert Watch(trainer).peaks.peak_bytes is None


@pytest.mark.parametrize("device", memory_estimate.LIMITED)
def test_trainings_under_a_limit_are_among_those_that_are_predicted(device):
    assert set(memory_estimate.LIMITED[device]) <= {case.name for case in CASES[device]}


def test_what_a_card_would_cut_is_counted_without_one():
    found = splitting.padding(DISTRIBUTIONS["alpaca"], longest_row=64, windows=2)
    assert 1 <= found["cpu"] <= found["cuda"] <= found["stock"]
