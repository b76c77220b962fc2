"""A few of the random trainings of the campaign: no gradient is wrong without a word."""

from __future__ import annotations

import pytest

from benchmarks.lib import architectures
from benchmarks.lib.exactness_cases import FAMILIES, STEPS, case_of
from benchmarks.loops import exactness

SEEDS = [0, 3, 7, 11, 19, 23, 31, 42]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_gradient_is_wrong_without_a_word(seed):
    found = exactness.outcome(case_of(seed))
    assert found["steps"] == STEPS
    assert found["warned"] or not found["wrong_steps"], found


def test_a_wrong_gradient_is_seen(monkeypatch):
    """The campaign itself: with questions and audits taken out it finds what they find."""
    from scu_trainer.train.loss.analysis import analysis
    from scu_trainer.train.step.batches.reduction import Reduction

    seed = next(
        s for s in range(1000) if "contrastive in training" in case_of(s).loss and "max_batch_size" in case_of(s).cut
    )
    monkeypatch.setattr(analysis, "analyze", lambda *given, **how: Reduction("rows", trims=False))
    monkeypatch.setattr(analysis.LossAnalysis, "holds", lambda *given: True)
    found = exactness.outcome(case_of(seed))
    assert found["wrong_steps"] == list(range(1, STEPS + 1)) and not found["warned"]


def test_a_case_is_a_function_of_its_seed():
    cases = [case_of(seed) for seed in range(400)]
    assert {case.family for case in cases} == set(FAMILIES)
    again = case_of(17)
    assert (again.name, again.batch, again.cut) == (cases[17].name, cases[17].batch, cases[17].cut)


@pytest.mark.parametrize(
    ("head", "architecture"),
    [("causal", "gemma2"), ("causal", "mamba2"), ("token", "llama"), ("images", "llava"), ("images", "qwen2_5_vl")],
)
def test_an_architecture_is_split_exactly(head, architecture):
    found = list(architectures.results_of(exactness.outcome, head, [architecture]))
    assert [one["way"] for one in found] == ([""] if head == "token" else ["", "chunked"])
    assert all(one["worst"] < 1e-5 and one["is_split"] and not one["warned"] for one in found), found
    assert not architectures.summary(found)["silently_wrong"]


def test_architectures_that_are_left_out_are_listed():
    (large,) = architectures.results_of(exactness.outcome, "causal", ["blt"])
    (_, capped) = architectures.results_of(exactness.outcome, "causal", ["recurrent_gemma"])
    assert large["not_tried"].startswith("ValueError: ") and "soft-capped" in capped["refused"]
    figures = architectures.summary([large, capped])
    assert (figures["not_tried"], figures["refused"], figures["trained"]) == (1, 1, 0)


def test_a_choice_that_rounding_changes_is_decided_in_float64():
    """Apertus's activation jumps just below 0, where this training has a value."""
    (_, found) = architectures.results_of(exactness.outcome, "causal", ["apertus"])
    assert found["worst"] < 1e-5 and found["is_split"] and not found["warned"]


def test_an_architecture_that_draws_in_training_is_not_compared():
    (found,) = architectures.results_of(exactness.outcome, "causal", ["phimoe"])
    assert found["not_tried"] == "ValueError: its forward draws random numbers, also without dropout"


def test_a_wrong_architecture_is_seen():
    one = {"head": "causal", "architecture": "llama", "way": "", "worst": 2e-4, "is_split": True}
    figures = architectures.summary([{**one, "warned": []}, {**one, "warned": ["batches run whole"]}])
    assert figures["silently_wrong"] == ["causal llama"] and figures["wrong_and_reported"] == 1
