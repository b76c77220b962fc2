"""Rows of a batch: how long each is, and batches made of any of them."""

from __future__ import annotations

import pytest
import torch

from scu_trainer.train.step.batches.rows import Batch, read_layout, signature, take


def text(*lengths: int, width: int = 0, first: int = 10) -> dict[str, torch.Tensor]:
    """Right-padded causal rows: tokens count up from ``first``, one hundred per row."""
    width = width or max(lengths)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    tokens = first + 100 * torch.arange(len(lengths))[:, None] + torch.arange(width)
    return {
        "input_ids": torch.where(mask.bool(), tokens, 0),
        "attention_mask": mask,
        "labels": torch.where(mask.bool(), tokens, -100),
    }


def lengths_of(batch: Batch) -> list[int]:
    return [batch.length(row) for row in range(batch.rows)]


def test_lengths_come_from_the_mask():
    batch = read_layout(text(3, 5, 1, width=8))
    assert (batch.rows, batch.width, lengths_of(batch)) == (3, 8, [3, 5, 1])
    assert batch.is_padded and batch.trimmable and batch.padded_tokens == 24 and batch.longest == 5


def test_a_label_behind_the_mask_is_never_cut_off():
    inputs = text(3, 5)
    inputs["labels"][0, 3] = 7
    assert lengths_of(read_layout(inputs)) == [4, 5]


def test_left_padding_is_content():
    inputs = {name: value.flip(1) for name, value in text(3, 5).items()}
    assert lengths_of(read_layout(inputs)) == [5, 5]


def test_a_mask_with_a_hole_keeps_what_lies_before_its_last_one():
    inputs = text(6, 6)
    inputs["attention_mask"][0, 1:3] = 0
    inputs["labels"][0] = -100
    inputs["attention_mask"][0, 5:] = 0
    assert lengths_of(read_layout(inputs)) == [5, 6]


def test_without_a_mask_every_column_counts():
    inputs = text(3, 5)
    del inputs["attention_mask"]
    batch = read_layout(inputs)
    assert not batch.trimmable and lengths_of(batch) == [5, 5] and not batch.is_padded


@pytest.mark.parametrize("extra", [torch.zeros(2, 1, 5, 5), torch.zeros(2, 5)])
def test_an_unknown_input_along_the_time_axis_stops_trimming(extra):
    batch = read_layout({**text(3, 5), "bias": extra})
    assert not batch.trimmable and lengths_of(batch) == [5, 5]


def test_an_input_with_other_axes_does_not():
    assert read_layout({**text(3, 5), "image": torch.zeros(2, 3, 4, 4)}).trimmable


def test_targets_of_a_regression_have_no_time_axis():
    batch = read_layout({**text(3, 5), "labels": torch.rand(2, 4)})
    assert batch.trimmable and lengths_of(batch) == [3, 5]
    assert take([batch], [(0, 0)])["labels"].shape == (1, 4)


def test_images_have_length_one():
    batch = read_layout({"pixel_values": torch.rand(4, 3, 8, 8), "labels": torch.arange(4)}, "pixel_values")
    assert (batch.rows, lengths_of(batch), batch.padded_tokens, batch.is_padded) == (4, [1] * 4, 4, False)


def test_an_encoder_decoder_is_trimmed_on_both_sides():
    labels = torch.tensor([[5, 6, 7, -100, -100], [8, 9, -100, -100, -100]])
    batch = read_layout({**text(2, 4, width=6), "labels": labels}, is_encoder_decoder=True)
    assert lengths_of(batch) == [5, 6]
    both = take([batch], [(0, 0), (0, 1)])
    assert both["input_ids"].shape == (2, 4) and both["labels"].shape == (2, 3)
    assert take([batch], [(0, 1)])["labels"].tolist() == [[8, 9]]


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ((torch.zeros(2, 2),), "not a mapping"),
        ({"size": 3}, "no tensor with rows"),
        ({"input_ids": torch.zeros(2, 3), "pixels": torch.zeros(7, 4)}, "pixels has 7 entries for 2 rows"),
        ({"input_ids": torch.zeros(2, 3), "names": ["a"]}, "names has 1 entries for 2 rows"),
        ({"input_ids": torch.zeros(2, 3), "more": {}}, "more is a mapping"),
    ],
)
def test_what_cannot_be_cut_by_rows_says_why(inputs, reason):
    batch = read_layout(inputs)
    assert batch.rows == 0 and reason in batch.obstacle


def test_rows_of_two_batches_share_one():
    batches = [read_layout(text(2, 6)), read_layout(text(3, 4, first=1000))]
    inputs = take(batches, [(0, 0), (1, 1)], pad_token_id=9)
    assert inputs["input_ids"].tolist() == [[10, 11, 0, 0], [1100, 1101, 1102, 1103]]  # its own padding stays
    assert inputs["labels"].tolist() == [[10, 11, -100, -100], [1100, 1101, 1102, 1103]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_a_narrow_batch_is_padded_for_a_wider_one():
    batches = [read_layout(text(2)), read_layout(text(4, first=1000))]
    assert take(batches, [(1, 0), (0, 0)], 9)["input_ids"].tolist() == [[1000, 1001, 1002, 1003], [10, 11, 9, 9]]


def test_a_whole_batch_without_padding_is_the_very_batch():
    inputs = text(4, 4)
    assert take([read_layout(inputs)], [(0, 0), (0, 1)]) is inputs
    padded = text(4, 4, width=6)
    assert take([read_layout(padded)], [(0, 0), (0, 1)])["input_ids"].shape == (2, 4)


def test_lists_and_single_values_go_along():
    batch = read_layout({**text(2, 3), "names": ["a", "b"], "use_cache": False, "sample_index": torch.tensor([7, 8])})
    part = take([batch], [(0, 1)])
    assert part["names"] == ["b"] and part["use_cache"] is False and part["sample_index"].tolist() == [8]


def test_signatures_tell_which_batches_mix():
    plain = signature(read_layout(text(2, 3)))
    assert signature(read_layout(text(4, 9))) == plain
    assert signature(read_layout({**text(2, 3), "use_cache": False})) != plain
    assert signature(read_layout({**text(2, 3), "scale": torch.tensor(1.0)})) != plain
    one, other = text(2, 3), text(2, 4)
    del one["attention_mask"], other["attention_mask"]
    assert signature(read_layout(one)) != signature(read_layout(other))  # widths whose padding is not known
