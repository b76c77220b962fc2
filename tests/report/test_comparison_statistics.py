"""Intervals by hand, and what may be said from them."""

from __future__ import annotations

import math

import pytest

from scu_trainer.report.comparison import statistics
from scu_trainer.report.comparison.statistics import ConfidenceInterval

T_95_2 = 4.302652729911275
"""Student's t for 95 % and 2 degrees of freedom, from a printed table: 4.303."""


def test_t_interval_by_hand():
    """Mean 2, standard deviation 1, so a standard error of 1 / sqrt(3)."""
    found = statistics.t_interval([1.0, 2.0, 3.0], 0.95)
    assert found.value == 2.0
    assert found.high - found.value == pytest.approx(T_95_2 / math.sqrt(3.0), rel=1e-9)
    assert found.value - found.low == pytest.approx(found.high - found.value, rel=1e-12)


@pytest.mark.parametrize(
    ("confidence", "degrees", "printed"), [(0.95, 1, 12.706), (0.95, 4, 2.776), (0.99, 9, 3.250), (0.9, 2, 2.920)]
)
def test_quantiles_are_those_of_printed_tables(confidence, degrees, printed):
    assert statistics.t_quantile(confidence, degrees) == pytest.approx(printed, abs=5e-4)


def test_one_value_has_no_interval_and_none_has_no_mean():
    assert statistics.t_interval([7.0], 0.95) == ConfidenceInterval(7.0, None, None)
    assert statistics.t_interval([], 0.95) is None


def test_differences_are_paired_by_seed():
    """Seeds differ by whole bits; the arm is 0.1 lower in each, so the interval is a point."""
    reference = {0: 5.0, 1: 6.0, 2: 7.0, 3: 99.0}
    found = statistics.paired_difference({0: 4.9, 2: 6.9, 1: 5.9}, reference, 0.95)
    assert (found.value, found.low, found.high) == pytest.approx((-0.1, -0.1, -0.1))
    assert statistics.paired_difference({7: 1.0}, reference, 0.95) is None


@pytest.mark.parametrize(
    ("interval", "pairs", "expected", "words"),
    [
        (ConfidenceInterval(-0.06, -0.1, -0.02), 3, "lower", "lower than none by 0.060 (0.020 to 0.100)"),
        (ConfidenceInterval(0.06, 0.02, 0.1), 3, "higher", "higher than none by 0.060 (0.020 to 0.100)"),
        (ConfidenceInterval(-0.01, -0.05, 0.03), 3, "none", "no difference found: -0.010 (-0.050 to +0.030)"),
        (ConfidenceInterval(0.0, 0.0, 0.0), 3, "none", "no difference found: +0.000 (+0.000 to +0.000)"),
        (ConfidenceInterval(-0.06, -0.06, 0.0), 3, "none", "no difference found"),
        (ConfidenceInterval(-0.06, -0.1, -0.02), 2, "unknown", "too few seeds to judge: 2 of at least 3"),
        (ConfidenceInterval(-0.06, None, None), 1, "unknown", "too few seeds to judge: 1 of at least 3"),
        (None, 0, "unknown", "too few seeds to judge: 0 of at least 3"),
    ],
)
def test_what_an_interval_says(interval, pairs, expected, words):
    assert statistics.direction(interval, pairs) == expected
    assert statistics.sentence(interval, pairs, "none").startswith(words)


def seeds(base: float, *noise: float) -> dict[int, float]:
    return {number: base + value for number, value in enumerate(noise)}


NONE = seeds(7.0, 0.0, 0.3, -0.2)
LOWER = seeds(6.5, 0.0, 0.31, -0.2)
ALIKE = seeds(7.0, 0.1, 0.2, -0.25)
HIGHER = seeds(7.5, 0.0, 0.29, -0.2)


@pytest.mark.parametrize(
    ("arms", "said"),
    [
        ({"none": NONE, "a": ALIKE}, ["No arm was found lower than none.", "No arm was found higher than none."]),
        ({"none": NONE, "a": LOWER}, ["Found lower than none: a.", "a is lower than every other arm that was judged."]),
        ({"none": NONE, "a": HIGHER}, ["No arm was found lower", "Found higher than none: a.", "none is lower than"]),
        (
            {"none": NONE, "a": LOWER, "b": seeds(6.52, 0.05, 0.25, -0.2)},
            ["Found lower than none: a, b.", "a has the lowest mean, and was not found lower than b."],
        ),
        ({"none": NONE, "a": LOWER, "b": {0: 1.0}}, ["Found lower than none: a.", "Not judged: b."]),
        ({"none": NONE, "a": {0: 1.0, 1: 1.0}}, ["No conclusion yet: no arm has 3 finished seeds in common"]),
        ({"none": {}, "a": LOWER}, ["No conclusion yet"]),
        ({"none": NONE, "a": NONE}, ["No arm was found lower", "No best arm is named"]),
    ],
)
def test_overall(arms, said):
    found = statistics.overall(arms, "none", 0.95)
    assert all(words in found for words in said), found


def test_notes_count_the_comparisons_and_say_what_chance_gives():
    """0.4 lower in the mean with a standard error of 0.058: significant alone, not as one of ten."""
    weak = {0: NONE[0] - 0.3, 1: NONE[1] - 0.4, 2: NONE[2] - 0.5}
    alone = " ".join(statistics.notes({"none": NONE, "a": weak}, "none", 0.95, 3))
    assert "1 arm was compared with none at 95 %" in alone and "0.05 of them" in alone
    assert "there remain: a." in alone and "Seeds: 3. That is few" in alone
    crowd = {"none": NONE, "a": weak, **{f"b{number}": ALIKE for number in range(9)}}
    found = " ".join(statistics.notes(crowd, "none", 0.95, 3))
    assert "10 arms were compared" in found and "0.5 of them" in found and "there remain: none." in found
    assert statistics.direction(statistics.paired_difference(weak, NONE, 0.95), 3) == "lower"


def test_notes_on_few_seeds():
    assert "too few to judge" in statistics.notes({"none": {}}, "none", 0.95, 2)[0]
    assert "few" not in statistics.notes({"none": {}}, "none", 0.95, 10)[0]


def test_a_wider_interval_for_more_confidence():
    wide, narrow = (statistics.t_interval([1.0, 2.0, 4.0], share).high for share in (0.99, 0.9))
    assert wide > narrow
