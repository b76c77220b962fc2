"""The register of what was tried, the arithmetic of its table, and that the changes change no result."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from benchmarks.lib import tried_changes, tried_register
from benchmarks.lib.tried_register import Entry
from benchmarks.studies import tried
from scu_trainer.train.step.batches.rows import NOT_LEARNED

EXACT = ("rows of a chunk end to end", "no mask for right padding")


def entry(**changes) -> Entry:
    return Entry("one", "what", "speed 1.1, memory 0.9: because", "kept", "why", **changes)


def measured(ratios, peak_bytes=None, baseline_bytes=None, **changes) -> tried.Measured:
    return tried.Measured(entry(**changes), ratios, 0.0, peak_bytes, baseline_bytes)


def test_a_change_that_is_tried_gains_what_its_turns_are_shorter():
    one = measured([1.2, 1.1, 1.3], peak_bytes=90, baseline_bytes=100)

    assert one.speed == pytest.approx(1.2)
    assert one.memory == pytest.approx(0.9)


def test_of_what_is_used_already_the_side_without_it_is_the_changed_one():
    one = measured([0.5, 0.5], peak_bytes=200, baseline_bytes=100, is_used=True)

    assert one.speed == pytest.approx(2.0)
    assert one.memory == pytest.approx(0.5)


def test_what_is_done_once_in_many_steps_gains_so_much_less():
    assert measured([0.5], is_used=True, per_steps=500).speed == pytest.approx(1 + 1 / 500)


def test_what_was_not_run_has_no_figure():
    cells = tried.grid([tried.Measured(entry(needs="a GPU"))]).rows[0]

    assert cells[2:5] == ["needs a GPU", "-", "-"]


def test_entries_have_names_of_their_own_and_a_prediction_each():
    names = [one.name for one in tried_register.ENTRIES]

    assert len(set(names)) == len(names)
    assert all(one.verdict in ("kept", "not kept", "an option") for one in tried_register.ENTRIES)
    assert all(re.search(r"speed|memory|waits", one.predicted) for one in tried_register.ENTRIES)
    assert set(tried.FIGURES) <= set(names)


def test_a_group_shares_one_baseline_and_holds_every_entry_that_can_run():
    groups = tried.groups(tried_register.ENTRIES)

    assert sorted(one.name for group in groups for one in group) == sorted(
        one.name for one in tried_register.ENTRIES if one.needs is None
    )
    assert all(len({repr((one.both, one.is_slow)) for one in group}) == 1 for group in groups)
    assert max(map(len, groups)) <= tried.AT_A_TIME


def test_rows_end_to_end_keep_every_token_and_learn_no_document_from_another():
    inputs = {
        "input_ids": torch.tensor([[5, 6, 7], [8, 9, 2]]),
        "labels": torch.tensor([[5, 6, 7], [8, 9, NOT_LEARNED]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
    }

    made = tried_changes.end_to_end(inputs)

    assert made["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert made["labels"].tolist() == [[NOT_LEARNED, 6, 7, NOT_LEARNED, 9]]
    assert made["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert set(made) == {"input_ids", "labels", "position_ids"}


def test_changes_of_batches_and_loss_train_the_same_model():
    entries = [replace(one, predicted="speed alone") for one in tried_register.ENTRIES if one.name in EXACT]

    found = tried.rehearsed(entries, tried.rehearsal())

    assert len(found) == len(EXACT)
    for one in found:
        assert abs(one.loss_difference) < 1e-4, one.entry.name
        assert math.isfinite(one.speed)
        assert one.ratios


def test_every_entry_can_become_figures():
    found = [
        tried.Measured(one, [] if one.needs else [1.1], 0.0, 90 if one.has_memory else None, 100)
        for one in tried_register.ENTRIES
    ]
    said = [one.said(name) for name, one in tried.figures(found).items()]

    assert len(said) >= len(tried.FIGURES)
