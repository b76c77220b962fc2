"""comparison.json from run directories that are written here: what counts, what is left out, what is said of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scu_trainer.cli.comparison.runs import exit_code
from scu_trainer.errors import StorageError
from scu_trainer.report.ablation import Comparison, result_rows
from scu_trainer.report.comparison import text
from scu_trainer.report.comparison.report import find_wrong_type, metrics_of, record
from scu_trainer.run_files import read_json, write_json

S_VALUES = (0.02, 0.09, 0.11, 0.10)
SEEDS = (0, 1, 2)


def write_run(folder: Path, bits: float, tokens: int = 100, before: float = 8.0, data: str = "d", controlled=False):
    folder.mkdir(parents=True)
    control = {"verdict": "on target", "target_s": 0.1, "settling_step": 2, "overhead_fraction": 0.004, "final_s": 0.1}
    figures = {
        "steps": 4,
        "train_s": 3.0,
        "held_out_bpt_before": {"value": before},
        "held_out_bpt_after": {"value": bits},
        "best_held_out": {"step": 2, "bpt": bits - 0.1},
        "curriculum": {"real_tokens": tokens},
        **({"regularization": control} if controlled else {}),
    }
    write_json(folder / "scu_metrics.json", figures)
    write_json(folder / "training_config.json", {"configuration": {}, "data": {"fingerprint": data}})
    rows = [{"step": step, "s_ema": s} for step, s in enumerate(S_VALUES, start=1)]
    write_json(folder / "scu_history.json", rows)


def described(arms=("none", "model")) -> dict:
    made = [{"name": name, "label": name, "what": f"{name} in words", "settings": {"scu": False}} for name in arms]
    facts = {"command": "scu-trainer compare", "config": "r.yaml", "seeds": list(SEEDS)}
    return {**facts, "reference": "none", "confidence": 0.95, "arms": made}


def state(arm: str, seed: int, status: str = "finished", error: str | None = None) -> dict:
    return {"arm": arm, "seed": seed, "status": status, "folder": f"runs/{arm}-seed{seed}", "error": error}


@pytest.fixture
def folder(tmp_path) -> Path:
    for seed in SEEDS:
        write_run(tmp_path / "runs" / f"none-seed{seed}", 7.0 + seed)
        write_run(tmp_path / "runs" / f"model-seed{seed}", 6.5 + seed, controlled=True)
    return tmp_path


ALL = [state(arm, seed) for seed in SEEDS for arm in ("none", "model")]


def row_of(found: dict, arm: str) -> dict:
    return next(row for row in found["table"] if row["arm"] == arm)


def test_a_whole_comparison(folder):
    found = record(described(), ALL, folder)
    assert found["budget"] == {"steps": 4, "tokens": 100}
    assert row_of(found, "none")["difference"] is None and row_of(found, "none")["verdict"] == "the reference"
    model = row_of(found, "model")
    assert model["difference"] == pytest.approx({"value": -0.5, "low": -0.5, "high": -0.5})
    assert model["verdict"] == "lower than none by 0.500 (0.500 to 0.500)"
    assert (model["settling_step"], model["settled"], model["overhead_fraction"]) == (2, 3, pytest.approx(0.004))
    assert "Found lower than none: model." in found["verdict"] and "Not complete" not in found["verdict"]
    assert "Tokens trained: 100 (seed 0), 100 (seed 1), 100 (seed 2), the same in all" in found["notes"][0]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda found: found.update(verdict=None), "verdict is None"),
        (lambda found: found.pop("notes"), "notes is missing"),
        (lambda found: found["budget"].update(steps="9"), "budget.steps is '9'"),
        (lambda found: found["arms"][1].pop("what"), "arms[1].what is missing"),
        (lambda found: found["table"].append("x"), "table[2] is 'x'"),
        (lambda found: found["table"][0].pop("finished"), "table[0].finished is missing"),
        (lambda found: found["table"][0]["held_out_bpt"].update(value=None), "table[0].held_out_bpt.value is None"),
        (lambda found: found["table"][0].update(held_out_accuracy="x"), "table[0].held_out_accuracy is 'x'"),
        (lambda found: found.update(unit=["label"]), "unit is ['label']"),
        (lambda found: found["runs"][0]["metrics"].update(held_out_bpt="9"), "runs[0].metrics.held_out_bpt is '9'"),
    ],
)
def test_a_file_that_was_changed_by_hand_is_one_line(folder, change, found):
    content = record(described(), ALL, folder)
    assert find_wrong_type(content) is None
    change(content)
    assert find_wrong_type(content) == found


def test_that_seeds_share_their_documents_is_said(folder):
    shared = "All seeds share their documents"
    assert any(note.startswith(shared) for note in record(described(), ALL, folder)["notes"])
    for seed in SEEDS:
        for arm in ("none", "model"):
            description = {"configuration": {}, "data": {"fingerprint": f"of seed {seed}"}}
            write_json(folder / "runs" / f"{arm}-seed{seed}" / "training_config.json", description)
    assert not any(note.startswith(shared) for note in record(described(), ALL, folder)["notes"])


def test_of_classifiers_the_accuracy_is_shown_and_what_they_count(folder):
    """By hand: 60, 70 and 80 % against 50, 65 and 80 % are 10, 5 and 0 points; t(0.975, 2) is 4.303, and the standard
    error of these 5 / sqrt(3)."""
    for arm, shares in (("none", (0.5, 0.65, 0.8)), ("model", (0.6, 0.7, 0.8))):
        for seed, share in zip(SEEDS, shares, strict=True):
            place = folder / "runs" / f"{arm}-seed{seed}" / "scu_metrics.json"
            best = {"step": 2, "bpt": 9.0, "accuracy": 0.9}
            more = {
                "unit": "label",
                "item": "image",
                "held_out_accuracy_after": {"value": share},
                "best_held_out": best,
            }
            write_json(place, {**read_json(place), **more})
    found = record(described(), ALL, folder)
    none, model = text.rows(found)
    assert text.heads(found)[2:6] == ("accuracy in %", "minus none", "held-out bits", "minus none")
    assert none[2:4] == ("65.0 ±37.3", "-") and model[2:4] == ("70.0 ±24.8", "+5.0 ±12.4")
    assert "lowest" not in text.heads(found), "the best was chosen by its accuracy: its 9 bits are not the lowest"
    assert len(text.heads(found)) == len(none) == 8
    assert found["notes"][0].startswith("Images trained: 100 (seed 0)") and "100 images" in text.budget_line(found)
    assert "All seeds share their images, learned and held out" in found["notes"][1]
    assert "the verdict is on bits per label" in text.legend(found) and find_wrong_type(found) is None
    shown = result_rows(Comparison(folder, found, {}))[1][1][2:4]
    assert shown == ["70.0 (45.2 to 94.8)", "+5.0 (-7.4 to +17.4)"], "as the bits beside them"


def test_tracking_error_is_taken_after_settling(folder):
    """Steps 2 to 4: 10, 10 and 0 % off."""
    assert metrics_of(folder / "runs" / "model-seed0")["tracking_error"] == pytest.approx(0.2 / 3)
    plain = metrics_of(folder / "runs" / "none-seed0")
    assert plain["tracking_error"] is None and plain["settling_step"] is None and plain["overhead_fraction"] is None


def test_a_figure_that_is_not_finite_is_named(folder):
    run = folder / "runs" / "model-seed0"
    (run / "scu_metrics.json").write_text('{"steps": 4, "held_out_bpt_after": {"value": NaN}}')
    with pytest.raises(StorageError, match="held_out_bpt is nan"):
        metrics_of(run)


@pytest.mark.parametrize("name", ["scu_metrics.json", "training_config.json"])
@pytest.mark.parametrize("content", ["[]", "null", '"x"', '{"steps": "x"}', '{"data": [1], "curriculum": [1]}'])
def test_files_of_a_run_of_another_shape_are_named(folder, name, content):
    run = folder / "runs" / "model-seed0"
    (run / name).write_text(content)
    if name == "training_config.json" and content == '{"steps": "x"}':
        assert metrics_of(run)["data_fingerprint"] is None
        return
    with pytest.raises(StorageError, match=f"{run}/(scu_metrics|{name[:-5]}).json"):
        metrics_of(run)


def test_failed_and_missing_runs_are_told_in_their_row(folder):
    states = [*ALL[:-1], state("model", 2, "failed", "exit code 2: no room")]
    states += [state("late", seed, "missing", "not started yet") for seed in SEEDS]
    found = record(described(("none", "model", "late")), states, folder)
    assert row_of(found, "model")["verdict"].endswith(
        "too few seeds to judge: 2 of at least 3; seed 2 failed: exit code 2: no room"
    )
    late = row_of(found, "late")
    assert (late["finished"], late["asked"], late["held_out_bpt"]) == (0, 3, None)
    assert "seed 0 not started yet" in late["verdict"]
    assert found["verdict"].startswith("Not complete: 5 of 9 runs are finished, 1 failed, 3 are not done.")
    assert ("late", "0/3", "-", "-", "-", "-", "-") in text.rows(found)
    assert "| late | 0/3 |" in text.document(found)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": 90}, "it trained 90 tokens, none 100"),
        ({"before": 8.1}, "it began at 8.1000 held-out bits, none at 8.0000: other weights"),
        ({"data": "other"}, "its data are not those of none"),
    ],
)
def test_a_run_that_trained_otherwise_does_not_count(folder, changes, reason):
    for seed in SEEDS:
        write_run(folder / "runs" / f"odd-seed{seed}", 1.0, **(changes if seed == 1 else {}))
    states = ALL + [state("odd", seed) for seed in SEEDS]
    found = record(described(("none", "model", "odd")), states, folder)
    odd = row_of(found, "odd")
    assert odd["finished"] == 2 and f"seed 1 left out: {reason}" in odd["verdict"]
    assert "Not judged: odd." in found["verdict"]
    assert next(run for run in found["runs"] if run["arm"] == "odd" and run["seed"] == 1)["error"].endswith(reason)
    assert found["notes"][0].startswith("odd, seed 1: left out: ")


@pytest.mark.parametrize(
    ("documents", "reason"), [(4, "it has no finite held-out figure"), (0, "nothing was held out")]
)
def test_a_run_without_a_figure_fails_a_comparison(folder, documents, reason):
    """Also of one that had none before training, such as a held-out row that the base gives no finite loss."""
    for arm in ("none", "model"):
        place = folder / "runs" / f"{arm}-seed0" / "scu_metrics.json"
        none = {f"held_out_bpt_{when}": {"value": None} for when in ("before", "after")}
        write_json(place, {**read_json(place), **none, "held_out_documents": documents})
    found = record(described(), ALL, folder)
    assert [run["error"] for run in found["runs"]] == [*[f"left out: {reason}"] * 2, *[None] * 4]
    assert exit_code(found) == 1 and exit_code(found, ignored=f"left out: {reason}") == 0


def test_without_the_reference_of_a_seed_the_others_still_agree_among_themselves(folder):
    states = [one if one["arm"] != "none" else state("none", one["seed"], "failed", "x") for one in ALL]
    found = record(described(), states, folder)
    assert row_of(found, "model")["finished"] == 3 and row_of(found, "model")["difference"] is None
    assert "No conclusion yet" in found["verdict"]


def test_the_page_says_everything_and_bars_in_words_do_not_break_its_table(folder):
    states = [*ALL[:-1], state("model", 2, "failed", "exit code 1: a | b\nc")]
    page = text.document(record(described(), states, folder))
    assert "a \\| b c" in page and "## Arms" in page and "`scu: false`" in page
    lines = [line for line in page.splitlines() if line.startswith("| model | 2/3")]
    assert len(lines) == 1 and lines[0].count("|") == 8


def test_the_page_of_one_arm_compares_nothing(folder):
    page = text.document(record(described(("none",)), [state("none", seed) for seed in SEEDS], folder))
    assert "1 arm, seeds" in page and "| arm | verdict |" not in page
