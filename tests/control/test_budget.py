"""The largest share within a budget."""

from __future__ import annotations

import numpy
import pytest
from scipy.stats import norm

from scu_trainer.control.retention import HALVINGS, SOLVED_AT, largest_share


@pytest.mark.parametrize("edge", [0.0, 0.01, 0.3, 0.5, 0.77, 0.999])
def test_it_is_within_the_budget_and_next_to_its_edge(edge):
    found = largest_share(lambda share: share, edge)
    assert found <= edge < found + 2.0**-HALVINGS


def test_all_of_it_where_all_of_it_fits():
    tried = []
    assert largest_share(lambda share: tried.append(share) or -1.0, 0.0) == 1.0 and tried == [1.0]


def test_none_where_every_share_costs_too_much():
    assert largest_share(lambda share: 5.0, 0.1) == 0.0


def test_a_cost_that_dips_first_is_still_kept():
    def cost(share: float) -> float:
        return share * share - 0.2 * share  # below 0 up to 0.2

    found = largest_share(cost, 0.05)
    assert 0.3 < found < 0.35 and cost(found) <= 0.05


@pytest.mark.parametrize("budget", [-0.1, float("nan")])
def test_a_budget_that_is_none(budget):
    with pytest.raises(ValueError, match="it must be 0 or more"):
        largest_share(lambda share: share, budget)


def test_nine_of_ten_verdicts_on_other_documents_keep_the_budget():
    """Both halves are drawn from the same documents; the share is solved on one and judged on the other."""
    draw, margin, kept = numpy.random.default_rng(0), norm.ppf((1 + SOLVED_AT) / 2), 0
    for _ in range(2000):
        deciding, judging = draw.normal(0.2, 0.3, (2, 100))  # bits that all of the update costs on each document
        high = deciding.mean() + margin * deciding.std(ddof=1) / 10
        kept += largest_share(lambda share, high=high: share * high, 0.05) * judging.mean() <= 0.05
    assert 0.88 < kept / 2000 < 0.94
