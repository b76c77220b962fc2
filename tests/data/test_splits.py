"""Folders whose files, or folders, are named by split: what is held out is never trained on unseen."""

from __future__ import annotations

import json

import pytest

from scu_trainer.data.sources import held_out_source, training_source
from scu_trainer.errors import DataError
from scu_trainer.settings import DataSettings


@pytest.fixture
def folder(tmp_path):
    """``folder(names)`` -> a folder with these files; each has one row, its own name."""

    def make(names):
        for name in names:
            path = tmp_path / "folder" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name if name.endswith(".txt") else json.dumps({"text": name}) + "\n")
        return tmp_path / "folder"

    return make


def source(folder, **settings):
    return training_source(DataSettings(dataset=str(folder), **settings), folder.parent / "cache")


def texts(source):
    return [record.value["text"] for record in source.read()]


SPLIT = {
    "folders": (["train/0.jsonl", "test/0.jsonl"], ["train/0.jsonl"], ["test/0.jsonl"]),
    "folders further down": (
        ["data/en/train/0.jsonl", "data/en/dev/0.jsonl"],
        ["data/en/train/0.jsonl"],
        ["data/en/dev/0.jsonl"],
    ),
    "words inside": (["my_train.jsonl", "my_test.jsonl"], ["my_train.jsonl"], ["my_test.jsonl"]),
    "longer words": (["Training-1.jsonl", "testing.1.jsonl"], ["Training-1.jsonl"], ["testing.1.jsonl"]),
    "numbered": (["train1.jsonl", "test-00000-of-00001.jsonl"], ["train1.jsonl"], ["test-00000-of-00001.jsonl"]),
    "the rest is train": (["data.jsonl", "test.jsonl"], ["data.jsonl"], ["test.jsonl"]),
    "text files": (["notes.txt", "README.txt", "val.txt"], ["notes.txt"], ["val.txt"]),
    "a licence": (["train.jsonl", "test.jsonl", "LICENSE.txt"], ["train.jsonl"], ["test.jsonl"]),
    "a licence beside text": (["train.txt", "test.txt", "licence.txt"], ["train.txt"], ["test.txt"]),
    "both held out": (["train/a.jsonl", "eval/test.jsonl"], ["train/a.jsonl"], ["eval/test.jsonl"]),
}


@pytest.mark.parametrize("case", SPLIT)
def test_splits_are_found_in_names_of_files_and_folders(folder, case):
    names, train, held_out = SPLIT[case]
    found = source(folder(names))
    assert (texts(found), texts(found.held_out)) == (train, held_out)


@pytest.mark.parametrize(
    "names",
    [
        ["a.jsonl", "b.jsonl"],
        ["testimonials.jsonl", "trainer.jsonl"],
        ["contest/a.jsonl", "latest.jsonl"],
        ["train-1.jsonl", "train-2.jsonl"],
    ],
)
def test_a_folder_without_a_held_out_split_is_read_as_a_whole(folder, names):
    found = source(folder(names))
    assert texts(found) == names
    assert found.held_out is None and not found.notes


def test_names_above_the_folder_count_for_nothing(folder):
    found = source(folder(["test/a.jsonl", "test/b.jsonl"]) / "test")
    assert len(texts(found)) == 2 and not found.notes


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (["train.jsonl", "test.jsonl", "words.txt"], "1 file in {} names no split and was not read: words.txt"),
        (["train.jsonl", "test.jsonl", "LICENSE.txt"], "1 file of other kinds in {}, not read: LICENSE.txt"),
        (["data.jsonl", "test.jsonl"], "1 file in {} names no split, next to files for test: read as train"),
        (["train.jsonl", "dev.jsonl", "test.jsonl"], "splits of {} that were not read: test"),
        (["test-1.jsonl", "test-2.jsonl"], "all data files in {} are named 'test'; they are read as training data"),
    ],
)
def test_what_is_done_with_files_is_said(folder, names, line):
    made = folder(names)
    assert line.format(made) in source(made).notes


def test_data_that_name_no_split_beside_those_that_do_are_refused(folder):
    made = folder(["train.jsonl", "test.jsonl", "more.jsonl", "LICENSE.txt"])
    with pytest.raises(DataError, match=r"1 names none \(more\.jsonl\)") as caught:
        source(made)
    assert f"--dataset {made}/train.jsonl --eval_dataset {made}/test.jsonl" in str(caught.value)
    assert "train-more.jsonl" in str(caught.value)


def test_a_name_that_says_train_and_test_is_refused(folder):
    with pytest.raises(DataError, match=r"train/test-1\.jsonl says train and test"):
        source(folder(["train/test-1.jsonl", "train/2.jsonl"]))


def test_two_held_out_splits_alone_are_not_trained_on_unasked(folder):
    made = folder(["validation.jsonl", "test.jsonl"])
    with pytest.raises(DataError, match=r"none of the requested: train.*--dataset_split"):
        source(made)
    assert texts(source(made, dataset_split="test")) == ["test.jsonl"]


def test_an_eval_dataset_of_test_files_is_read_whole(folder):
    made = folder(["test/a.jsonl", "test/b.jsonl"])
    settings = DataSettings(dataset="python_docs", eval_dataset=str(made))
    assert len(texts(held_out_source(settings, made.parent))) == 2


@pytest.mark.parametrize("names", [["train.jsonl", "test.jsonl"], ["a.jsonl"]], ids=["with splits", "without"])
def test_a_configuration_of_the_hub_is_refused(folder, names):
    with pytest.raises(DataError, match=r"dataset_config_name is 'en', but .* is not a Hub id; leave it out"):
        source(folder(names), dataset_config_name="en")
