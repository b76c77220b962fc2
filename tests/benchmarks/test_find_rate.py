"""The rules of benchmarks/studies/find_rate.py, on losses made by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from benchmarks.studies import find_rate
from benchmarks.studies.find_rate import Condition, Points
from scu_trainer.train.evaluation.scoring import DocumentScores

STEPS = 64


def points(quarter: float, half: float, whole: float) -> Points:
    """Parabolas over the rates with their valleys there; the highest rate of all breaks."""
    found = Points(Condition("by hand", "development", "sums", 10, STEPS, 1e-4))
    for share, valley in ((1 / 4, quarter), (1 / 2, half), (1.0, whole)):
        for rate in range(find_rate.RATES):
            nats = 4 + (rate - valley) ** 2 + np.array([0.0, 0.25, -0.25])
            is_broken = rate == find_rate.RATES - 1
            scores = None if is_broken else DocumentScores(10 * nats, np.array([10, 10, 10]))
            found.found[rate, round(share * STEPS)] = scores
    return found


def test_each_rule_names_the_rate_that_it_stands_for():
    made = points(quarter=4.2, half=3.3, whole=2.0)
    named = {name: rule(made) for name, rule in find_rate.RULES.items()}
    assert (named["quarter"], named["quarter, one lower"]) == (4, 3)
    assert (named["half"], named["half, one lower"], named["projected"]) == (3, 2, 2)
    assert find_rate.excess(made, "quarter") == pytest.approx(4.0)
    assert find_rate.excess(made, "projected") == 0


def test_a_rate_that_was_not_trained_is_no_good_choice():
    made = points(quarter=0.0, half=0.0, whole=0.0)
    assert find_rate.excess(made, "quarter, one lower") == math.inf


def test_a_rule_is_not_judged_by_trainings_that_were_not_done():
    made = points(quarter=4.0, half=3.0, whole=2.0)
    del made.found[4, STEPS // 2]
    assert find_rate.excess(made, "half") is None and find_rate.excess(made, "quarter") == pytest.approx(4.0)
    assert made.is_judged
    del made.found[1, STEPS]
    assert not made.is_judged


def test_trainings_in_the_file_are_not_trained_again():
    made = points(quarter=3.0, half=3.0, whole=3.0)
    again = Points(made.condition, json.loads(json.dumps(made.rows())))
    assert again.losses(1.0) == pytest.approx(made.losses(1.0)) and list(find_rate.missing(again)) == []
    del again.found[5, STEPS]
    assert list(find_rate.missing(again)) == [(5, STEPS)]
