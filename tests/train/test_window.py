"""A window as pieces: which rows run together, what they weigh, and what the model gets of them."""

from __future__ import annotations

import pytest
import torch

from scu_trainer.train.step.batches.reduction import Reduction
from scu_trainer.train.step.batches.rows import read_layout
from scu_trainer.train.step.batches.window import AccumulationWindow, MicroBatch

SUM = Reduction("num_items")


def text(*lengths: int, width: int | None = None, learned=None, **more) -> dict[str, torch.Tensor]:
    """Rows of these lengths, padded; row r holds token 10 * r + column. ``learned``: labels at the end of each row."""
    width = width or max(lengths)
    column = torch.arange(width)
    own = column < torch.tensor(lengths)[:, None]
    tokens = torch.where(own, 10 * torch.arange(len(lengths))[:, None] + column, 0)
    counts = torch.tensor(lengths if learned is None else learned)[:, None]
    is_learned = own & (column >= torch.tensor(lengths)[:, None] - counts)
    labels = torch.where(is_learned, tokens, -100)
    return {"input_ids": tokens, "attention_mask": own.long(), "labels": labels, **more}


def window(*batches, reduction: Reduction | None = SUM) -> AccumulationWindow:
    return AccumulationWindow([read_layout(batch) for batch in batches], reduction)


def rows_of(pieces) -> list[tuple]:
    return sorted(row for piece in pieces for row in piece.rows)


def test_figures():
    one = window(text(4, 8, width=10), text(6))
    assert (one.real_tokens, one.padded_tokens, one.longest_row, one.largest_batch_tokens) == (18, 26, 8, 20)


def test_few_sizes_leave_the_count_of_real_tokens():
    one = window(text(4, 9, width=10), text(17))
    assert (one.real_tokens, one.longest_row) == (30, 17)
    one.take_few_sizes(20)
    assert one.longest_row == 20 and [batch.needed for batch in one.batches] == [[8, 16], [20]]
    again = AccumulationWindow(one.batches, SUM)  # after an audit that stops splitting
    assert one.real_tokens == again.real_tokens == 30
    again.take_few_sizes(0)
    assert again.longest_row == 20


def test_few_sizes_keep_the_cap_that_a_row_keeps():
    one = window(text(9, 17, 18))
    one.take_few_sizes(64, token_cap=17)
    assert one.batches[0].needed == [16, 17, 24]


@pytest.mark.parametrize(
    ("batches", "uneven"),
    [
        ([text(4, 4)], False),
        ([text(4, 4), text(4)], False),
        ([text(4, 6)], True),
        ([text(4, 4), text(6, 6)], True),
        ([text(4, 4, width=6)], True),
    ],
)
def test_uneven_is_what_sorting_would_help(batches, uneven):
    assert window(*batches).is_uneven == uneven


def test_a_piece_knows_its_size():
    piece = MicroBatch(0, ((0, 1), (1, 2), (1, 0)), 7)
    assert (piece.tokens, piece.quadratic) == (21, 147)
    assert MicroBatch(2, (), 5).tokens == 5, "a batch that cannot be cut counts as one row"


def test_whole_batches_are_the_batches_in_their_order():
    inputs = [text(4, 8), text(6, 3)]
    one = window(*inputs)
    pieces = one.whole_batches()
    assert pieces == [MicroBatch(0, ((0, 0), (0, 1)), 8), MicroBatch(1, ((1, 0), (1, 1)), 6)]
    assert [one.inputs(piece) for piece in pieces] == inputs


def test_rows_of_all_batches_are_sorted_and_cut():
    pieces = window(text(9, 3, 5), text(4, 8, 3)).pooled(12, None, 1)
    assert rows_of(pieces) == [(b, r) for b in range(2) for r in range(3)]
    assert [piece.length for piece in pieces] == sorted(piece.length for piece in pieces)
    assert all(piece.tokens <= 12 for piece in pieces)
    assert pieces[0].rows == ((0, 1), (1, 2)), "two rows of 3 tokens, one of each batch"
    assert all(piece.weight is None for piece in pieces), "a sum needs no weights"


def test_bounds_on_rows():
    one = window(text(3, 3, 3), text(3, 3))
    assert max(len(piece.rows) for piece in one.pooled(100, 2, 1)) == 2
    assert min(len(piece.rows) for piece in one.pooled(1, None, 2)) == 2


def test_a_piece_of_two_batches_is_trimmed_to_its_longest_row():
    one = window(text(9, 3), text(4, 8))
    piece = next(piece for piece in one.pooled(8, None, 1) if len(piece.rows) == 2)
    inputs = one.inputs(piece)
    assert inputs["input_ids"].tolist() == [[10, 11, 12, 0], [0, 1, 2, 3]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert all(tensor.is_contiguous() for tensor in inputs.values()), "models flatten labels with view"


# -- means -------------------------------------------------------------------------------------------------------------


def test_a_mean_over_labels_weighs_by_labels():
    one = window(text(4, 8, 6, learned=[1, 5, 2]), reduction=Reduction("labels"))
    weights = {piece.rows: piece.weight for piece in one.pooled(8, None, 1)}
    assert weights == {((0, 0),): 1 / 8, ((0, 2),): 2 / 8, ((0, 1),): 5 / 8}


def test_a_mean_over_shifted_labels_does_not_count_the_first():
    one = window(text(4, 8), reduction=Reduction("shifted_labels"))
    assert {piece.length: piece.weight for piece in one.pooled(8, None, 1)} == {4: 3 / 10, 8: 7 / 10}


def test_a_mean_over_rows_weighs_by_rows():
    one = window(text(4, 4, 8), reduction=Reduction("rows"))
    assert {len(piece.rows): piece.weight for piece in one.pooled(8, None, 1)} == {2: 2 / 3, 1: 1 / 3}


def test_the_whole_batch_needs_no_weight():
    pieces = window(text(4, 4), text(6, 6), reduction=Reduction("rows")).pooled(12, None, 2)
    assert [piece.weight for piece in pieces] == [None, None]


def test_batches_of_other_counts_do_not_share_a_piece():
    """A row of a batch with few labels weighs more than one of a batch with many."""
    one = window(text(4, 4), text(4, 4, 4), reduction=Reduction("rows"))
    assert all(len({batch for batch, _ in piece.rows}) == 1 for piece in one.pooled(100, None, 1))
    alike = window(text(4, 4), text(4, 4), reduction=Reduction("rows"))
    (piece,) = alike.pooled(100, None, 1)
    assert len(piece.rows) == 4 and piece.weight == 2.0, "two means of weight one each"


def test_pieces_in_which_nothing_is_learned_do_not_run():
    """The mean over no label is not finite."""
    one = window(text(4, 8, learned=[0, 5]), reduction=Reduction("labels"))
    assert rows_of(one.pooled(8, None, 1)) == [(0, 1)]
    both = next(iter(one.whole_batches()))
    assert rows_of(one.split(both, 8, None, 1)) == [(0, 1)]


def test_a_batch_in_which_nothing_is_learned_says_so_by_its_loss():
    one = window(text(4, 8, learned=[0, 0]), reduction=Reduction("labels"))
    assert [piece.weight for piece in one.pooled(8, None, 1)] == [1.0, 1.0]


# -- cutting again -----------------------------------------------------------------------------------------------------


def test_a_split_holds_the_same_rows():
    one = window(text(9, 3, 5), text(4, 8, 3))
    (piece,) = one.pooled(None, None, 1)
    parts = one.split(piece, 18, None, 1)
    assert len(parts) > 1 and rows_of(parts) == rows_of([piece])
    assert all(part.tokens <= 18 for part in parts)


def test_a_split_of_a_mean_shares_its_weight():
    one = window(text(4, 8, 6, 5), reduction=Reduction("labels"))
    (piece,) = one.whole_batches()
    parts = one.split(piece, 10, None, 1)
    assert sum(part.weight for part in parts) == pytest.approx(1.0)


def test_what_cannot_be_split():
    one = window(text(9, 3, 5))
    (piece,) = one.whole_batches()
    assert one.split(piece, 1, None, 2) == [piece], "each half needs two rows"
    single = MicroBatch(0, ((0, 0),), 9)
    assert one.split(single, 1, None, 1) == [single]


def test_a_batch_with_an_obstacle_stays_whole():
    inputs = text(4, 8, names=["only one"])
    one = window(inputs, text(4, 8))
    whole, *rest = one.pooled(8, None, 1)
    assert whole == MicroBatch(0, (), 1) and one.inputs(whole) is inputs
    assert one.split(whole, 1, None, 1) == [whole]
    assert rows_of(rest) == [(1, 0), (1, 1)]


def test_before_the_loss_is_known_nothing_is_cut():
    inputs = text(4, 8, width=10)
    one = window(inputs, reduction=None)
    assert not one.can_pool
    (piece,) = one.whole_batches()
    assert one.inputs(piece) is inputs


def test_a_loss_that_mixes_rows_is_not_pooled():
    assert not window(text(4, 8), reduction=Reduction("rows", mixes="BatchNorm")).can_pool


def test_padding_that_counts_is_kept():
    one = window(text(4, 8, width=10), reduction=Reduction("rows", trims=False))
    assert not one.is_uneven and one.real_tokens == 20
    (piece,) = one.pooled(None, None, 1)
    assert one.inputs(piece)["input_ids"].shape == (2, 10)


# -- even parts --------------------------------------------------------------------------------------------------------


def test_even_parts_cover_every_batch_in_order():
    one = window(text(4, 8, 6, 5, 3), text(4, 4))
    pieces = one.in_parts(2)
    assert [piece.rows for piece in pieces] == [
        ((0, 0), (0, 1)),
        ((0, 2), (0, 3), (0, 4)),
        ((1, 0),),
        ((1, 1),),
    ]
    assert [piece.length for piece in pieces] == [8, 6, 4, 4]
    assert one.in_parts(1) == one.whole_batches()


def test_a_row_is_named_by_its_sample():
    assert window(text(4), text(4)).name_of((1, 0)) == "row 0 of accumulation batch 1"
    named = window(text(4, 5, sample_index=torch.tensor([70, 71])))
    assert named.name_of((0, 1)) == "sample 71 (row 1 of accumulation batch 0)"
