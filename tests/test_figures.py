"""Figures as people read them: the unit of a loss, and what was held out before and after."""

from __future__ import annotations

import math

import pytest

from scu_trainer.figures import UNITS, before_and_after, best_evaluation, bits_of
from scu_trainer.settings.tasks import KINDS
from tests.report.made_runs import interval

TEXT = {
    "held_out_bpt_before": interval(3.0),
    "held_out_bpt_after": interval(2.0),
    "held_out_bpt_change": interval(-1.0),
}


def test_a_loss_of_ln_2_nats_is_one_bit():
    assert bits_of(math.log(2.0)) == 1.0 and bits_of(math.log(8.0)) == pytest.approx(3.0)


def test_every_task_says_what_its_bits_are_counted_per():
    assert set(UNITS) == set(KINDS)


def test_of_text_bits_and_perplexity():
    """The change of a perplexity is a ratio: 2 ** -1 halves it."""
    assert [tuple(row) for row in before_and_after(TEXT)] == [
        ("held-out bits per token", "3.000 (2.900 to 3.100)", "2.000 (1.900 to 2.100)", "-1.000 (-1.100 to -0.900)"),
        ("held-out perplexity", "8.0", "4.0", "-50.0% (-53.3% to -46.4%)"),
    ]
    assert before_and_after(TEXT)[0].short == ("held-out bits per token", "3.000", "2.000", "-1.000 (-1.100 to -0.900)")


def test_a_perplexity_falls_by_less_than_all_of_it():
    fallen = {**TEXT, "held_out_bpt_change": {"value": -11.175, "low": -11.989, "high": -10.219}}
    assert before_and_after(fallen)[1].change == "-99.96% (-99.98% to -99.92%)"


def test_of_classes_accuracy_in_points_and_no_perplexity():
    accuracy = {
        f"held_out_accuracy_{when}": interval(v) for when, v in (("before", 0.2), ("after", 0.7), ("change", 0.5))
    }
    rows = before_and_after({**TEXT, **accuracy, "unit": "label"})
    assert [row.what for row in rows] == ["held-out accuracy", "held-out bits per label"]
    assert rows[0][1:] == ("20.0% (10.0% to 30.0%)", "70.0% (60.0% to 80.0%)", "+50.0 (+40.0 to +60.0) points")


def test_of_a_mixture_and_of_reports():
    sources = {"a": {"bpt_before": interval(3.0), "bpt_after": interval(2.5)}}
    values = {"before": 0.5, "after": 0.625}
    reports = {f"held_out_report_{k}_{w}": interval(v) for k in ("exact", "bpt") for w, v in values.items()}
    found = {row.what: tuple(row[1:]) for row in before_and_after({**TEXT, "held_out_sources": sources, **reports})}
    assert found["  a, bits per token"] == ("3.000", "2.500", "-0.500")
    assert found["reports word for word"] == ("50.0%", "62.5%", "+12.5 points")
    assert found["bits per word of reports"] == ("0.500", "0.625", "+0.125")


def test_the_best_on_the_way_of_a_classifier_is_its_accuracy():
    """That is what it was chosen by: its bits may be higher than those of the end."""
    best = {"step": 8, "bpt": 3.2}
    assert best_evaluation({"best_held_out": best}) == "3.200 bits per token at step 8"
    assert best_evaluation({"best_held_out": {**best, "accuracy": 0.75}, "unit": "label"}) == "accuracy 75.0% at step 8"
    assert best_evaluation({"best_held_out": None}) is None


@pytest.mark.parametrize("bits", [None, math.inf, math.nan, 5000.0])
def test_what_is_not_finite_is_called_so(bits):
    after = dict.fromkeys(("value", "low", "high"), bits)
    rows = before_and_after({**TEXT, "held_out_bpt_after": after, "held_out_bpt_change": after})
    assert rows[1].after == "not finite" and rows[1].before == "8.0"


def test_nothing_held_out_is_no_row():
    assert before_and_after({"held_out_documents": 0}) == []
