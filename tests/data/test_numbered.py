"""Rows that know their number."""

from __future__ import annotations

import random

import datasets
import numpy
import pytest
import torch
from transformers.trainer_utils import RemoveColumnsCollator

from scu_trainer.data.numbered import SAMPLE_INDEX, Numbered, NumberedCollator, content_crc32, lengths_of
from scu_trainer.data.random_states import preserve_rng_states
from scu_trainer.errors import DataError
from tests.tiny import Rows, UnevenRows, images, pad

TOKENS = [[5, 6, 7], [8], [], [9, 10]]


class Once(torch.utils.data.Dataset):
    """Reads many rows at once, as ``datasets`` does; alone a row cannot be had."""

    def __len__(self) -> int:
        return 5

    def __getitems__(self, indices):
        return [f"row {index}" for index in indices]


def test_rows_come_with_their_numbers_in_any_order():
    rows = Numbered(UnevenRows(8))
    assert len(rows) == 8
    number, row = rows[5]
    assert number == 5 and torch.equal(row["input_ids"], UnevenRows(8)[5]["input_ids"])
    assert [number for number, _ in rows.__getitems__([6, 1, 1])] == [6, 1, 1]


def test_many_rows_are_read_at_once_where_the_dataset_can():
    assert Numbered(Once()).__getitems__([4, 2]) == [(4, "row 4"), (2, "row 2")]


def forked(index):
    with torch.random.fork_rng(devices=[]):
        return int(torch.randint(10**6, ()))


@pytest.mark.parametrize(
    "drawn",
    [
        lambda index: random.random() + numpy.random.rand() + float(torch.rand(())),
        lambda index: int(numpy.random.default_rng(torch.initial_seed() + index).integers(10**6)),
        forked,
    ],
    ids=["the generators", "one of its own from torch's seed", "torch's, put back"],
)
def test_what_rows_draw_depends_on_seed_epoch_and_batch_alone(drawn):
    class Drawing(Once):
        def __getitems__(self, indices):
            return [drawn(index) for index in indices]

    def batch(of_process, seed, epoch, indices=(2, 3)):
        torch.manual_seed(of_process), random.seed(of_process), numpy.random.seed(of_process)
        rows = Numbered(Drawing(), seed)
        rows.set_epoch(epoch)
        return rows.__getitems__(list(indices))

    with preserve_rng_states():
        first = batch(1, 3, 0)
        assert first == batch(2, 3, 0)
        assert first != batch(1, 3, 1) != batch(1, 4, 1)


def test_a_batch_gains_the_numbers_and_keeps_all_else():
    rows = UnevenRows(8)
    batch = NumberedCollator(pad, Numbered(rows))([(number, rows[number]) for number in (7, 0, 3)])
    numbers = batch.pop(SAMPLE_INDEX)
    assert numbers.dtype == torch.int64 and numbers.tolist() == [7, 0, 3]
    expected = pad([rows[7], rows[0], rows[3]])
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[name], expected[name]) for name in expected)


def merged(rows):
    return {"input_ids": torch.cat([row["input_ids"] for row in rows]).unsqueeze(0)}


@pytest.mark.parametrize(
    ("collator", "expected"),
    [
        (merged, "makes 1 rows of 3 samples, but a curriculum needs one row per sample: use a collator that pads"),
        (lambda rows: tuple(rows), "returns a tuple; a curriculum needs a mapping of tensors"),
        (lambda rows: {"n": 3, "text": ["a", "b", "c"]}, "makes no tensor with rows of 3 samples"),
        (lambda rows: {"n": torch.tensor(3)}, "makes no tensor with rows of 3 samples"),
    ],
)
def test_batches_without_a_row_per_sample_are_refused(collator, expected):
    rows = Rows(4)
    with pytest.raises(DataError, match=expected):
        NumberedCollator(collator, Numbered(rows))([(number, rows[number]) for number in (0, 1, 2)])


def test_the_collator_that_is_named_is_the_users_own():
    rows, wrapped = Rows(4), RemoveColumnsCollator(merged, ["input_ids"])
    with pytest.raises(DataError, match=r"^merged makes 1 rows of 2 samples, .*padding_free=False"):
        NumberedCollator(wrapped, Numbered(rows))([(number, rows[number]) for number in (0, 1)])


@pytest.mark.parametrize("columns", [{"input_ids": TOKENS}, {"input_ids": TOKENS, "length": [3, 1, 0, 2]}])
def test_lengths_of_a_table(columns):
    found = lengths_of(datasets.Dataset.from_dict(columns))
    assert found.dtype == numpy.int32 and found.tolist() == [3, 1, 0, 2]


def test_lengths_of_a_table_whose_rows_were_chosen_and_shown_as_tensors():
    table = datasets.Dataset.from_dict({"input_ids": TOKENS * 5000}).select([0, 19_999, 2]).with_format("torch")
    assert lengths_of(table).tolist() == [3, 2, 0]


def test_the_length_column_has_the_name_that_it_is_given():
    table = datasets.Dataset.from_dict({"input_ids": TOKENS, "length": [9, 9, 9, 9], "tokens": [3, 1, 0, 2]})
    assert lengths_of(table, "tokens").tolist() == [3, 1, 0, 2]


def test_lengths_of_other_rows():
    rows = UnevenRows(9)
    assert lengths_of(rows).tolist() == [len(rows[number]["input_ids"]) for number in range(9)]
    assert lengths_of(images(5)).tolist() == [1] * 5
    assert lengths_of([(1, 2), (3, 4)]).tolist() == [1, 1]
    assert lengths_of([]).shape == (0,)


# -- other data of the same size ---------------------------------------------------------------------------------------


class Augmented(torch.utils.data.Dataset):
    """Rows that are different at every reading."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.rand(3) + random.random() + numpy.random.rand()}


def test_other_rows_of_the_same_size_have_another_checksum():
    assert content_crc32(Rows(40)) == content_crc32(Rows(40)) != content_crc32(Rows(40, seed=1))
    columns = {"input_ids": [[1, 2], [3]], "text": ["a", "b"]}
    first, again = (datasets.Dataset.from_dict(columns) for _ in range(2))
    other = datasets.Dataset.from_dict({**columns, "text": ["a", "c"]})
    assert content_crc32(first) == content_crc32(again) != content_crc32(other)


def test_rows_that_are_never_the_same_have_none_and_random_numbers_stay():
    states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
    assert content_crc32(Augmented()) is None
    assert random.getstate() == states[0] and numpy.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert content_crc32([]) is None


class Opaque:
    """Says nothing but where it lies in memory, which is elsewhere in the next process."""


@pytest.mark.parametrize(
    ("value", "other"),
    [
        ([[1, 2], [3]], [[1, 2], [4]]),
        ([{"role": "user"}], [{"role": "system"}]),
        (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)),
        (numpy.array(["a", [1]], dtype=object), numpy.array(["a", [2]], dtype=object)),
        (None, 1.5),
    ],
    ids=["ragged", "messages", "bfloat16", "objects", "nothing"],
)
def test_rows_of_any_kind_have_a_checksum(value, other):
    assert content_crc32([{"x": value}]) == content_crc32([{"x": value}]) != content_crc32([{"x": other}])


def test_what_an_object_does_not_say_is_left_out():
    assert content_crc32([{"x": Opaque(), "y": 1}]) == content_crc32([{"x": Opaque(), "y": 1}])
    assert content_crc32([{"x": Opaque(), "y": 1}]) != content_crc32([{"x": Opaque(), "y": 2}])


def test_what_a_collator_draws_follows_from_seed_epoch_and_batch():
    def drawn(epoch, collator_draws_before):
        rows = Numbered([{"labels": 0}] * 4, seed=5)
        rows.set_epoch(epoch)
        torch.rand(collator_draws_before)
        collate = NumberedCollator(lambda items: {"noise": torch.rand(len(items))}, rows)
        return collate(rows.__getitems__([1, 2]))["noise"]

    assert torch.equal(drawn(0, 1), drawn(0, 3)) and not torch.equal(drawn(0, 1), drawn(1, 1))
