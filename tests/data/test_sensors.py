"""Recordings of several sensors: generated, read from a folder, refused or counted, and put into batches."""

from __future__ import annotations

import json
import os
import pickle

import numpy
import pytest
import torch

from scu_trainer.data.records import BadSample
from scu_trainer.data.samples import SampleStatistics
from scu_trainer.data.sensors import manifest
from scu_trainer.data.sensors.collate import SensorCollator
from scu_trainer.data.sensors.data import prepare_sensors
from scu_trainer.data.sensors.format import MANIFEST, Recording, read_arrays, write_recordings
from scu_trainer.data.sensors.manifest import CSV_MANIFEST
from scu_trainer.data.sensors.synthetic import ceiling_alone, export_synthetic, synthetic
from scu_trainer.errors import DataError, SettingsError, StorageError
from scu_trainer.settings import DataSettings
from scu_trainer.settings.sensors import BRANCHES, SYNTHETIC, SensorSettings
from scu_trainer.train.step.batches.rows import read_layout, take
from tests.recordings import SHAPES, edit_manifest, folder_of, prepared, rows_of


@pytest.fixture
def folder(tmp_path):
    return folder_of(tmp_path / "recordings")


def change_arrays(path, **changes) -> None:
    """Write a .npz again with other arrays; None removes one."""
    with numpy.load(path) as archive:
        arrays = {**archive, **changes}
    numpy.savez(path, **{name: array for name, array in arrays.items() if array is not None})


# -- generated ---------------------------------------------------------------------------------------------------------


def test_generated_recordings_depend_on_the_seed_alone():
    first, again, other = (next(synthetic(1, 9, seed)) for seed in (0, 0, 1))
    assert all(numpy.array_equal(first.arrays[name], again.arrays[name]) for name in first.arrays)
    assert not numpy.array_equal(first.arrays["infrared"][:1], other.arrays["infrared"][:1])


def test_any_two_branches_tell_the_class_and_none_alone_does():
    side = 3
    shown = [divmod(label, side) for label in range(side**2)]
    shown = [(row, column, (row + column) % side) for row, column in shown]
    for one in range(3):
        groups = [sum(other[one] == level for other in shown) for level in range(side)]
        assert groups == [side] * side  # each level leaves three classes equally likely
        for two in range(one + 1, 3):
            assert len({(levels[one], levels[two]) for levels in shown}) == side**2
    assert ceiling_alone(9) == pytest.approx(1 / 3)


def test_a_share_of_generated_recordings_lacks_one_branch():
    found = [recording.missing for recording in synthetic(300, 4, 0, missing_share=0.3)]
    assert 60 <= sum(map(bool, found)) <= 120 and max(map(len, found)) == 1
    assert {name for missing in found for name in missing} == {"visible", "infrared", "kinematics"}


def test_classes_that_are_no_square_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"num_classes is 10.*set num_classes: 9"):
        prepared(SYNTHETIC, tmp_path, own={"num_classes": 10})


def test_exported_recordings_are_read_as_they_were_generated(tmp_path):
    export_synthetic(tmp_path / "out", samples=24, classes=4, seed=3)
    own = {"branches": list(BRANCHES)}
    data = prepared(tmp_path / "out", tmp_path / "cache", own=own, validation_split_percentage=0)
    expected = rows_of(synthetic(24, 4, 3, missing_share=0.1))
    for number, row in enumerate(expected):
        found = data.train[number]
        assert found.keys() == row.keys() and found["labels"] == row["labels"]
        assert all(numpy.array_equal(found[name], row[name]) for name in row)


# -- the split and the statistics --------------------------------------------------------------------------------------


def test_a_share_of_each_class_is_held_out_and_the_statistics_say_so(tmp_path):
    data = prepared(SYNTHETIC, tmp_path)
    assert (len(data.train), len(data.eval)) == (24, 8)
    assert numpy.bincount(data.eval.labels).tolist() == [2, 2, 2, 2]
    assert data.statistics.per_class == {"0": 6, "1": 6, "2": 6, "3": 6}
    assert not {*data.train.numbers} & {*data.eval.numbers}
    assert any("no single branch" in line for line in data.statistics.lines())


def test_the_cache_is_found_again_and_the_seed_moves_the_split(folder, tmp_path):
    first, again = (prepared(folder, tmp_path / "cache") for _ in range(2))
    assert first.fingerprint == again.fingerprint and first.statistics == again.statistics
    assert len([*(tmp_path / "cache" / "sensors").glob("*/index.npz")]) == 1
    assert prepared(folder, tmp_path / "cache", seed=1).fingerprint != first.fingerprint


def test_a_changed_file_is_read_again(folder, tmp_path):
    before = prepared(folder, tmp_path / "cache", validation_split_percentage=0)
    change_arrays(folder / "000000.npz", kinematics=numpy.full((32, 6), 7, dtype="float32"))
    after = prepared(folder, tmp_path / "cache", validation_split_percentage=0)
    assert before.fingerprint != after.fingerprint and (after.train[0]["kinematics"] == 7).all()


def test_the_manifest_says_what_is_held_out(folder, tmp_path):
    for number in (1, 2, 3, 4):
        edit_manifest(folder, number, split="eval")
    edit_manifest(folder, 5, split="spare")
    for number in range(6, 17):
        edit_manifest(folder, number, split="train")
    data = prepared(folder, tmp_path / "cache")
    assert (len(data.train), len(data.eval)) == (11, 4)
    assert data.statistics.dropped == {"split spare is not used": 1}
    assert data.statistics.examples["split spare is not used"] == ["manifest.jsonl line 5 (000004.npz)"]


def test_held_out_data_of_their_own(folder, tmp_path):
    other = folder_of(tmp_path / "other", samples=9)
    data = prepared(folder, tmp_path / "cache", eval_dataset=str(other), max_eval_documents=6)
    assert (len(data.train), len(data.eval)) == (16, 6)
    assert data.statistics.heldout_duplicates == 6  # the same seed made both
    assert data.statistics.read == 25


def test_held_out_recordings_of_other_shapes_are_refused(folder, tmp_path):
    other = folder_of(tmp_path / "other", samples=4)
    change_arrays(other / "000002.npz", kinematics=numpy.zeros((9, 5), dtype="float32"))
    with pytest.raises(
        DataError, match=r"line 3 \(000002.npz\): kinematics has 5 channels, and the training data has 6"
    ):
        prepared(folder, tmp_path / "cache", eval_dataset=str(other))


def test_a_cap_keeps_recordings_of_every_class(folder, tmp_path):
    data = prepared(folder, tmp_path / "cache", dataset_size=12, validation_split_percentage=0)
    assert len(data.train) == 12 and set(data.train.labels) == {0, 1, 2, 3}


def test_classes_may_have_names(folder, tmp_path):
    for number in range(16):
        edit_manifest(folder, number + 1, label=["north", "east", "south", "west"][number % 4])
    data = prepared(folder, tmp_path / "cache")
    assert data.label_names == ["east", "north", "south", "west"]
    assert data.statistics.per_class == {"east": 3, "north": 3, "south": 3, "west": 3}


def test_minus_one_is_no_class_beside_names_either(folder, tmp_path):
    for number in range(16):
        edit_manifest(folder, number + 1, label=["north", "south"][number % 2])
    edit_manifest(folder, 3, label=-1)
    with pytest.raises(DataError, match=r"line 3 .*: label -1 is not one of the 2 classes: north, south; fix it"):
        prepared(folder, tmp_path / "cache", own={"num_classes": None})
    data = prepared(folder, tmp_path / "cache", own={"num_classes": None}, skip_bad_rows=True)
    assert data.label_names == ["north", "south"] and data.statistics.dropped == {"label out of range": 1}


def test_what_no_row_of_the_manifest_names_is_said(folder, tmp_path):
    edit_manifest(folder, 1, file=str(folder / "000000.npz"))
    assert not prepared(folder, tmp_path / "cache").statistics.notes
    (folder / "000003.npz").rename(folder / "spare.npz")
    edit_manifest(folder, 4, file="./spare.npz")
    (folder / "more").mkdir()
    for name in ("more/1.npz", "__MACOSX.npz", "more/._1.npz"):
        (folder / name).write_bytes((folder / "spare.npz").read_bytes())
    (folder / CSV_MANIFEST).write_text("file,label\nmore/1.npz,0\n")
    notes = [
        f"{folder / CSV_MANIFEST} was not read, because there is also a {MANIFEST}",
        f"2 .npz files of {folder} are not in {MANIFEST} and not read: __MACOSX.npz, 1.npz",
    ]
    assert prepared(folder, tmp_path / "cache").statistics.notes == notes
    assert prepared(folder_of(tmp_path / "own"), tmp_path / "cache", eval_dataset=str(folder)).statistics.notes == notes


def test_one_recording_is_one():
    found = SampleStatistics("recording", per_class={"a": 1, "b": 1}, heldout_duplicates=1).lines()
    assert found[1:] == ["classes: 2 (a, b), 1 recording each", "1 held-out recording is also in the training data"]


def test_a_recording_in_two_classes_is_named(folder, tmp_path):
    (folder / "000001.npz").write_bytes((folder / "000000.npz").read_bytes())
    (note,) = prepared(folder, tmp_path / "cache").statistics.notes
    assert "1 recording has the same content as one of another class" in note and "000001.npz" in note


def test_a_trained_model_decides_the_order_of_the_classes(folder, tmp_path):
    data = prepared(folder, tmp_path / "cache", label_names=["3", "2", "1", "0"], validation_split_percentage=0)
    assert data.train.labels[:4].tolist() == [3, 2, 1, 0]


def test_a_csv_manifest(folder, tmp_path):
    rows = [json.loads(line) for line in (folder / MANIFEST).read_text().splitlines()]
    rows[0]["missing"] = ["infrared", "visible"]
    lines = [f"{row['file']},{row['label']},{';'.join(row.get('missing', []))}" for row in rows]
    (folder / CSV_MANIFEST).write_text("\n".join(["file,label,missing", *lines]))
    (folder / MANIFEST).unlink()
    data = prepared(folder, tmp_path / "cache", validation_split_percentage=0)
    assert len(data.train) == 16 and data.train[0].keys() == {"kinematics", "labels"}


def test_branches_that_are_not_asked_for_are_not_read(folder, tmp_path):
    change_arrays(folder / "000003.npz", visible=numpy.zeros(3))
    data = prepared(folder, tmp_path / "cache", own={"branches": ["kinematics"]})
    assert data.train[0].keys() == {"kinematics", "labels"}


def test_recordings_without_a_branch_in_use_are_counted(folder, tmp_path):
    edit_manifest(folder, 2, missing=["kinematics"])
    data = prepared(folder, tmp_path / "cache", own={"branches": ["kinematics"]})
    assert data.statistics.dropped == {"without any branch in use": 1}
    assert data.statistics.train + data.statistics.eval == 15


def test_which_branches_are_read_does_not_move_the_split(folder, tmp_path):
    """Some recordings lack one; a file in which another is broken is left out, and moves nothing either."""
    for number in (2, 7, 11):
        edit_manifest(folder, number, missing=["kinematics"])
    change_arrays(folder / "000004.npz", visible=numpy.zeros(3))
    rules = {"skip_bad_rows": True, "max_eval_documents": 6, "validation_split_percentage": 50}
    sides = []
    for branch in ("visible", "infrared", "kinematics"):
        data = prepared(folder, tmp_path / "cache", own={"branches": [branch]}, **rules)
        sides.append(({*data.train.keys()}, {*data.eval.keys()}))
    both = [{*sides[0][side], *sides[1][side], *sides[2][side]} for side in (0, 1)]
    assert not both[0] & both[1] and len(both[0] | both[1]) == 16
    assert len(sides[1][1]) == 6 and sides[1] == (both[0], both[1])  # all have infrared


def test_generated_recordings_are_split_alike_for_all_branches(tmp_path):
    own = {"sensor_missing_share": 0.5}
    whole = prepared(SYNTHETIC, tmp_path, own=own)
    alone = prepared(SYNTHETIC, tmp_path, own={**own, "branches": ["kinematics"]})
    assert {*alone.eval.keys()} <= {*whole.eval.keys()} and {*alone.train.keys()} <= {*whole.train.keys()}
    assert alone.statistics.dropped["without any branch in use"] == 32 - len(alone.train) - len(alone.eval) > 0


def test_held_out_rows_have_the_names_of_their_files(folder, tmp_path):
    edit_manifest(folder, 3, split="eval")
    edit_manifest(folder, 9, split="eval")
    held_out = prepared(folder, tmp_path / "cache").eval
    assert held_out.keys() == ["000002.npz", "000008.npz"]
    assert pickle.loads(pickle.dumps(held_out)).keys() == held_out.keys()


# -- reports -----------------------------------------------------------------------------------------------------------


def test_reports_become_numbers_of_words_that_training_reports_have(folder, tmp_path):
    edit_manifest(folder, 1, report="Class 0, plume dim, WIND strong", split="eval")
    edit_manifest(folder, 2, report=None)
    edit_manifest(folder, 3, report="  ")
    data = prepared(folder, tmp_path / "cache", own={"report_head": True})
    words = list(data.report_words)
    assert words[:4] == ["<pad>", "<unk>", "<bos>", "<eos>"] and "wind" not in words and {"plume", ","} <= {*words}
    assert [words[number] for number in data.eval[0]["report_ids"]] == (
        "<bos> class 0 , plume dim , <unk> <unk> <eos>".split()
    )
    assert data.train[0]["report_ids"].shape == data.train[1]["report_ids"].shape == (0,)
    line = "reports: 13 of 15 training recordings have one, 16 words, 2 words in reports are unknown"
    assert line in data.statistics.lines()
    batch = SensorCollator(data.train.store.shapes)([data.train[number] for number in range(4)])
    assert batch["report_ids"].shape == (4, 10) and (batch["report_ids"][0] == -100).all()
    without = SensorCollator(data.train.store.shapes)([data.train[0], data.train[1]])
    assert without["report_ids"].tolist() == [[-100, -100]] * 2


def test_reports_that_a_trained_model_reads_are_in_its_words(folder, tmp_path):
    words = ["<pad>", "<unk>", "<bos>", "<eos>", "plume"]
    settings = SensorSettings(report_head=True, num_classes=4)
    data = prepare_sensors(
        DataSettings(dataset=str(folder)), settings, seed=0, cache_dir=tmp_path / "cache", report_words=words
    )
    assert data.report_words == words and data.train[0]["report_ids"].tolist() == [2, 1, 1, 1, 4, 1, 1, 1, 1, 3]


def test_rows_hold_no_report_unless_it_is_learned(folder, tmp_path):
    plain, learned = (prepared(folder, tmp_path / "cache", own={"report_head": head}) for head in (False, True))
    assert "report_ids" not in plain.train[0] and not plain.report_words
    assert plain.fingerprint != learned.fingerprint
    edit_manifest(folder, 3, report="something else")
    assert prepared(folder, tmp_path / "cache", own={"report_head": True}).fingerprint != learned.fingerprint


def test_recordings_without_any_report_have_nothing_to_learn_from(folder, tmp_path):
    for number in range(1, 17):
        edit_manifest(folder, number, report=None)
    with pytest.raises(DataError, match=r"no training recording of .* has one; add \"report\""):
        prepared(folder, tmp_path / "cache", own={"report_head": True})


@pytest.mark.parametrize(("report", "message"), [(7, "its report is 7"), ("a " * 300, "has 599 letters; at most 500")])
def test_reports_that_are_no_short_texts_are_refused(folder, tmp_path, report, message):
    edit_manifest(folder, 3, report=report)
    with pytest.raises(DataError, match=rf"manifest.jsonl line 3.*{message}"):
        prepared(folder, tmp_path / "cache")


def test_what_a_branch_reads_may_be_declared_missing_by_itself(folder, tmp_path):
    """A camera without the crop of the plume still has its frames; without the camera there is no crop either."""
    for number in range(2, 17):
        edit_manifest(folder, number, missing=["plume"] if number % 2 else ["infrared"])
    change_arrays(folder / "000004.npz", plume=None)
    own = {"branches": ["infrared", "plume", "geometry"]}
    data = prepared(folder, tmp_path / "cache", own=own, validation_split_percentage=0)
    assert data.train[0].keys() == {"infrared", "cooling_curve", "plume", "geometry", "labels"}
    assert data.train[1].keys() == {"geometry", "labels"}
    assert data.train[4].keys() == {"infrared", "cooling_curve", "geometry", "labels"}
    assert data.train[0]["geometry"].shape == (1, 4) and data.train[0]["plume"].shape[1:] == (24, 24)
    edit_manifest(folder, 5, missing=None)
    with pytest.raises(DataError, match=r"no array 'plume'.*\"missing\": \[\"plume\"\]"):
        prepared(folder, tmp_path / "cache", own=own)


def test_geometry_of_another_length_is_refused(folder, tmp_path):
    change_arrays(folder / "000002.npz", geometry=numpy.zeros(5, dtype="float32"))
    with pytest.raises(DataError, match=r"line 3 .*geometry has 5 numbers, and .* has 4 numbers"):
        prepared(folder, tmp_path / "cache", own={"branches": ["geometry"]})


def test_two_cameras_side_by_side_need_both(folder, tmp_path):
    for number in range(1, 17):
        edit_manifest(folder, number, missing=["infrared"])
    with pytest.raises(DataError, match=r"has the branch dual_vision; set branches: \[visible\]"):
        prepared(folder, tmp_path / "cache", own={"branches": ["dual_vision"]})


def test_a_branch_that_no_recording_has_is_refused(folder, tmp_path):
    for number in range(1, 17):
        edit_manifest(folder, number, missing=["infrared"])
    with pytest.raises(DataError, match=r"no recording of .* has the branch infrared; set branches: \[visible, kin"):
        prepared(folder, tmp_path / "cache")


def test_splits_are_read_in_any_case_and_unused_ones_are_named(folder, tmp_path):
    for number, split in ((1, " Eval"), (2, "EVAL "), (3, "Train"), (4, "test")):
        edit_manifest(folder, number, split=split)
    data = prepared(folder, tmp_path / "cache")
    assert data.eval.keys() == ["000000.npz", "000001.npz"] and data.statistics.train == 13
    assert any("eval (2), test (1), train (1); trained on: train" in line for line in data.statistics.lines())


def test_what_is_trained_on_is_found_by_another_word_for_it(folder, tmp_path):
    for number in range(1, 17):
        edit_manifest(folder, number, split="Testing" if number < 3 else "Training")
    data = prepared(folder, tmp_path / "cache")
    assert data.eval.keys() == ["000000.npz", "000001.npz"] and data.statistics.train == 14


@pytest.mark.parametrize("words", [("val", "test"), ("Test", "spare"), ("dev", "test")])
def test_other_words_for_what_is_held_out(folder, tmp_path, words):
    """The first of them that there is; ``test_the_manifest_says_what_is_held_out`` has the usual one."""
    for number in range(1, 17):
        edit_manifest(folder, number, split="train" if number < 12 else words[number > 13])
    data = prepared(folder, tmp_path / "cache")
    assert data.eval.keys() == ["000011.npz", "000012.npz"] and data.statistics.train == 11
    assert data.statistics.dropped == {f"split {words[1]} is not used": 3}


def test_labels_from_one_are_told(folder, tmp_path):
    for number in range(1, 17):
        edit_manifest(folder, number, label=1 + number % 3)
    with pytest.raises(DataError, match=r"1 of 4 classes have no training recording: 0; count labels from 0 "):
        prepared(folder, tmp_path / "cache", own={"num_classes": None})


def test_arrays_of_other_names_are_named(folder, tmp_path):
    change_arrays(folder / "000000.npz", kinematics=None, acc=numpy.zeros((4, 3), "float32"))
    with pytest.raises(DataError, match=r"no array 'kinematics' \(its arrays: .*acc\), and"):
        prepared(folder, tmp_path / "cache")


def test_a_split_that_nothing_trains_on_is_named(folder, tmp_path):
    for number in range(1, 17):
        edit_manifest(folder, number, split="fit" if number < 13 else "eval")
    with pytest.raises(DataError, match=r"no recording of the split train; splits found: eval \(4\), fit \(12\)"):
        prepared(folder, tmp_path / "cache")
    data = prepared(folder, tmp_path / "cache", dataset_split="fit")
    assert (data.statistics.train, data.statistics.eval) == (12, 4)


def test_recordings_of_one_class_are_refused(folder, tmp_path):
    for number in range(1, 17):
        edit_manifest(folder, number, label=0)
    for own in ({"num_classes": None}, {"num_classes": 4}):
        with pytest.raises(DataError, match="are of the class 0; a classifier needs two or more classes"):
            prepared(folder, tmp_path / "cache", own=own, skip_bad_rows=True)


def test_an_odd_first_recording_does_not_cost_all_others(folder, tmp_path):
    change_arrays(folder / "000000.npz", visible=numpy.zeros((4, 5, 5, 3), dtype="uint8"))
    with pytest.raises(DataError, match=r"15 of 16 .* another shape .*line 1 \(000000.npz\) has frames of 5 x 5"):
        prepared(folder, tmp_path / "cache", own={"branches": ["visible"]}, skip_bad_rows=True)


def test_lines_are_counted_as_in_the_file(folder, tmp_path):
    lines = (folder / MANIFEST).read_text().splitlines()
    (folder / MANIFEST).write_text("\n".join(["", *lines[:3], "", "{bad", *lines[3:]]))
    with pytest.raises(DataError, match=r"manifest.jsonl line 6: not JSON"):
        prepared(folder, tmp_path / "cache")


def test_a_key_that_stands_twice_in_the_manifest_is_refused(folder, tmp_path):
    (folder / MANIFEST).write_text('{"file": "000000.npz", "label": 0, "label": 1}\n')
    with pytest.raises(DataError, match="line 1: not JSON: an object has the key 'label' twice"):
        prepared(folder, tmp_path / "cache")


def test_a_recording_with_two_labels_is_refused(folder, tmp_path):
    edit_manifest(folder, 3, file="000000.npz")
    with pytest.raises(DataError, match=r"line 3: its label is 2, but 0 in manifest.jsonl line 1 \(000000.npz\)"):
        prepared(folder, tmp_path / "cache")
    statistics = prepared(folder, tmp_path / "cache", skip_bad_rows=True).statistics
    assert statistics.dropped == {"two labels": 1} and statistics.read == 16


def test_what_is_held_out_beside_splits_of_other_names_is_said_as_it_is(folder, tmp_path):
    edit_manifest(folder, 5, split="spare")
    said = prepared(folder, tmp_path / "cache").statistics.notes
    assert any("trained on: train, held out: a share of these (validation_split_percentage)" in note for note in said)
    said = prepared(folder, tmp_path / "cache", validation_split_percentage=0).statistics.notes
    assert any("trained on: train, held out: none" in note for note in said)


def as_csv(folder, header: str, row: str) -> None:
    (folder / MANIFEST).unlink()
    lines = [row.format(file=f"{number:06d}.npz", label=number % 4) for number in range(16)]
    (folder / CSV_MANIFEST).write_text("\n".join([header, *lines]) + "\n")


def test_a_csv_with_other_separators_is_refused(folder, tmp_path):
    as_csv(folder, "file;label", "{file};{label}")
    with pytest.raises(DataError, match=r"\['file;label'\]; its first line must name file and label .* commas"):
        prepared(folder, tmp_path / "cache")


def test_a_csv_with_spaces_behind_its_commas_is_read(folder, tmp_path):
    as_csv(folder, "file, label", "{file}, {label}")
    assert prepared(folder, tmp_path / "cache").statistics.read == 16


@pytest.mark.parametrize(
    ("header", "row", "words"),
    [
        ("file,label,label", "{file},{label},0", "names the column 'label' twice"),
        ("file,label", '"{file},{label}', "manifest.csv cannot be read: .*each quote closed"),
    ],
)
def test_a_csv_that_would_lose_something_is_refused(folder, tmp_path, header, row, words):
    as_csv(folder, header, row)
    with pytest.raises(DataError, match=words):
        prepared(folder, tmp_path / "cache", skip_bad_rows=True)


def test_a_csv_with_a_value_too_many_is_refused(folder, tmp_path):
    as_csv(folder, "file,label", "{file},{label},x")
    with pytest.raises(DataError, match=r"manifest.csv line 2: 3 values for 2 columns"):
        prepared(folder, tmp_path / "cache")


def test_a_label_of_too_many_classes_is_a_slip_unless_it_is_said(folder, tmp_path):
    edit_manifest(folder, 5, label=100_000_000)
    own = {"num_classes": None}
    with pytest.raises(
        DataError, match=r"line 5 .*label 100000000 makes 100,000,001 classes of 16 rows; .*num_classes"
    ):
        prepared(folder, tmp_path / "cache", own=own)
    data = prepared(folder, tmp_path / "cache", own=own, skip_bad_rows=True)
    assert data.statistics.dropped == {"label out of range": 1} and data.label_names == ["0", "1", "2", "3"]


# -- bad input ---------------------------------------------------------------------------------------------------------


def torn(path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 255
    path.write_bytes(bytes(content))


def pickled(path) -> None:
    change_arrays(path, infrared=numpy.array([{"a": 1}], dtype=object))


def single_array(path) -> None:
    with open(path, "wb") as file:
        numpy.save(file, numpy.zeros(3))


def with_nan(path) -> None:
    values = numpy.zeros((20, 6), dtype="float32")
    values[4, 2] = numpy.nan
    change_arrays(path, kinematics=values)


def encrypted(path) -> None:
    """The flag alone: without a password nothing can be read behind it."""
    content = path.read_bytes()
    for mark, flags in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        parts = content.split(mark)
        content = mark.join([parts[0], *(part[: flags - 4] + b"\x01" + part[flags - 3 :] for part in parts[1:])])
    path.write_bytes(content)


BAD_FILES = {
    "encrypted": (encrypted, "unreadable file", "encrypted, password required"),
    "torn": (torn, "unreadable file", "not a readable .npz"),
    "flipped": (flipped, "unreadable file", "not a readable .npz"),
    "pickled": (pickled, "unreadable file", "Object arrays cannot be loaded"),
    "text": (lambda path: path.write_text("hello"), "unreadable file", "not a readable .npz"),
    "table": (
        lambda path: path.write_text("time,x\n0,1\n"),
        "unreadable file",
        r"but a file of another kind; give named arrays, such as a float array kinematics",
    ),
    "empty file": (lambda path: path.write_bytes(b""), "unreadable file", "not a readable .npz"),
    "npy": (single_array, "no .npz file", "single .npy"),
    "gone": (lambda path: path.unlink(), "missing file", "does not exist"),
    "no branch": (
        lambda path: change_arrays(path, infrared=None, cooling_curve=None),
        "missing branch",
        '"missing": \\["infrared"\\]',
    ),
    "half a branch": (lambda path: change_arrays(path, cooling_curve=None), "missing branch", "'cooling_curve'"),
    "nan": (with_nan, "not finite", r"kinematics\[4, 2\] is nan"),
    "too hot": (
        lambda path: change_arrays(path, infrared=numpy.full((2, 12, 12), 1e6)),
        "too large",
        r"infrared\[0, 0, 0\] is 1000000.0, too large for float16.*at most 65504 °C",
    ),
    "too cold": (
        lambda path: change_arrays(path, cooling_curve=numpy.full(4, -300.0)),
        "wrong unit",
        "-300 °C, below absolute zero",
    ),
    "no frames": (
        lambda path: change_arrays(path, visible=numpy.zeros((0, 16, 16, 3), dtype="uint8")),
        "no content",
        r"shape \(0, 16, 16, 3\)",
    ),
    "gray": (
        lambda path: change_arrays(path, visible=numpy.zeros((4, 16, 16), dtype="uint8")),
        "wrong shape",
        r"must be \(frames, height, width, 3\)",
    ),
    "four colours": (
        lambda path: change_arrays(path, visible=numpy.zeros((4, 16, 16, 4), dtype="uint8")),
        "wrong shape",
        r"\(4, 16, 16, 4\)",
    ),
    "real colours": (
        lambda path: change_arrays(path, visible=numpy.zeros((4, 16, 16, 3))),
        "wrong dtype",
        "visible is float64; allowed: uint8",
    ),
    "whole numbers": (
        lambda path: change_arrays(path, kinematics=numpy.zeros((4, 6), dtype="int64")),
        "wrong dtype",
        "kinematics is int64",
    ),
    "seconds since 1970": (
        lambda path: change_arrays(path, kinematics=1.7e9 + numpy.arange(240.0).reshape(40, 6) / 100),
        "lost in rounding",
        r"channel 0 of kinematics has values such as 1700000000, which float32.*in steps of 128, too coarse",
    ),
    "five channels": (
        lambda path: change_arrays(path, kinematics=numpy.zeros((40, 5), dtype="float32")),
        "another shape",
        r"5 channels, and manifest.jsonl line 1 \(000000.npz\) has 6 channels",
    ),
    "larger frames": (
        lambda path: change_arrays(path, visible=numpy.zeros((4, 20, 16, 3), dtype="uint8")),
        "another shape",
        "frames of 20 x 16",
    ),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_named_or_counted(folder, tmp_path, kind):
    spoil, reason, message = BAD_FILES[kind]
    spoil(folder / "000006.npz")
    with pytest.raises(DataError, match=rf"manifest.jsonl line 7 \(000006.npz\): .*{message}") as caught:
        prepared(folder, tmp_path / "cache")
    assert "skip_bad_rows: true" in str(caught.value)
    data = prepared(folder, tmp_path / "cache", skip_bad_rows=True)
    assert data.statistics.dropped == {reason: 1} and data.statistics.train + data.statistics.eval == 15
    assert data.statistics.examples[reason] == ["manifest.jsonl line 7 (000006.npz)"]


def test_a_channel_that_does_not_change_loses_nothing_in_rounding(folder, tmp_path):
    """Of float64, where not even 0.1 is a number of float32: a setting, a sensor that is stuck, a sum of the two."""
    still = numpy.arange(240.0).reshape(40, 6)
    still[:, :4] = 0.1, 9.81, 0.1 + 0.2, 1.7e9 + 0.3
    still[::2, 2] = 0.3  # a unit in the last place less
    change_arrays(folder / "000006.npz", kinematics=still)
    change_arrays(folder / "000007.npz", kinematics=still[:1])
    assert not prepared(folder, tmp_path / "cache").statistics.dropped


BAD_ROWS = {
    "negative": ({"label": -1}, "label out of range", "label -1 is not one of the 4 classes"),
    "too high": ({"label": 4}, "label out of range", "label 4 is not one of the 4 classes"),
    "fraction": ({"label": 1.5}, "no label", "label is 1.5"),
    "truth": ({"label": True}, "no label", "label is True"),
    "no label": ({"label": None}, "no label", "label is None"),
    "nothing, as a table writes it": ({"label": "nan"}, "no label", "label is 'nan'"),
    "no file": ({"file": None}, "no file", "names no file"),
    "outside": ({"file": "../000001.npz"}, "file outside", "is outside of"),
    "absolute": ({"file": "/etc/passwd"}, "file outside", "is outside of"),
    "two signs": ({"label": "--5"}, "no label", "label is '--5'; it must be a whole number .0 or more. or a name"),
    "list of splits": ({"split": ["eval"]}, "no split", r"split is \['eval'\]; it must be a word"),
    "no name": ({"file": "a\0b"}, "unreadable file", r"\('a\\x00b'\): not a readable"),
    "unknown branch": ({"missing": ["radar"]}, "unknown branch", "missing is .*'radar'.*allowed: visible"),
    "unknown column": ({"lable": 3}, "unknown column", "'lable'.*did you mean 'label'"),
    "split by another name": ({"fold": "Test"}, "unknown column", "'fold' with 'Test'.*did you mean 'split'"),
}


def test_other_columns_of_the_manifest_are_named_and_not_read(folder, tmp_path):
    for number in (2, 3):
        edit_manifest(folder, number, subject=f"S{number}", note="")
    statistics = prepared(folder, tmp_path / "cache").statistics
    assert not statistics.dropped and "unused columns: subject (2 rows)" in statistics.lines()


def test_the_names_of_columns_are_looked_at_once(folder, monkeypatch, tmp_path):
    """A manifest has many rows, and to find the nearest name takes longer than to read one."""
    looked_at = []
    monkeypatch.setattr(manifest, "did_you_mean", lambda name, allowed: looked_at.append(name) or "")
    for number in (1, 2, 3):
        edit_manifest(folder, number, humidity="0.5")
    prepared(folder, tmp_path / "cache")
    assert looked_at == ["humidity"]


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_of_the_manifest_is_named_or_counted(folder, tmp_path, kind):
    changes, reason, message = BAD_ROWS[kind]
    edit_manifest(folder, 6, **changes)
    with pytest.raises(DataError, match=rf"manifest.jsonl line 6.*{message}"):
        prepared(folder, tmp_path / "cache")
    data = prepared(folder, tmp_path / "cache", skip_bad_rows=True)
    assert data.statistics.dropped == {reason: 1} and data.statistics.train + data.statistics.eval == 15


def test_a_line_that_is_no_json_is_named(folder, tmp_path):
    lines = (folder / MANIFEST).read_text().splitlines()
    (folder / MANIFEST).write_text("\n".join([*lines[:2], lines[2][:-4], *lines[3:]]))
    with pytest.raises(DataError, match=r"manifest.jsonl line 3: not JSON"):
        prepared(folder, tmp_path / "cache")
    assert prepared(folder, tmp_path / "cache", skip_bad_rows=True).statistics.dropped == {"unreadable row": 1}


def test_statistics_from_the_cache_are_those_of_this_manifest(folder, tmp_path):
    """Two manifests with the same good rows and other bad ones do not share a cache."""
    with open(folder / MANIFEST, "a") as manifest:
        manifest.write("{\n")
    assert prepared(folder, tmp_path / "cache", skip_bad_rows=True).statistics.dropped == {"unreadable row": 1}
    with open(folder / MANIFEST, "a") as manifest:
        manifest.write("{\n")
    assert prepared(folder, tmp_path / "cache", skip_bad_rows=True).statistics.dropped == {"unreadable row": 2}


def test_an_empty_class_is_refused_or_told(folder, tmp_path):
    with pytest.raises(DataError, match=r"1 of 5 classes have no training recording: 4; .*lower num_classes"):
        prepared(folder, tmp_path / "cache", own={"num_classes": 5})
    data = prepared(folder, tmp_path / "cache", own={"num_classes": 5}, skip_bad_rows=True)
    assert data.statistics.per_class["4"] == 0 and "1 of 5 classes" in data.statistics.lines()[-1]


def test_names_that_are_not_num_classes_are_refused(folder, tmp_path):
    edit_manifest(folder, 1, label="north")
    with pytest.raises(DataError, match="num_classes is 4, but the manifest has 5 labels"):
        prepared(folder, tmp_path / "cache")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [("nowhere", "'nowhere' is not a folder"), ("empty", "has no manifest.jsonl or manifest.csv")],
)
def test_what_is_no_folder_of_recordings_is_refused(tmp_path, dataset, message):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        prepared(tmp_path / dataset if dataset == "empty" else dataset, tmp_path / "cache")


def test_a_manifest_without_rows_is_refused(tmp_path):
    (tmp_path / MANIFEST).write_text("\n")
    with pytest.raises(DataError, match="no usable row: 0 read"):
        prepared(tmp_path, tmp_path / "cache")


# -- units and memory --------------------------------------------------------------------------------------------------


def test_hundredths_of_a_kelvin_become_degrees_celsius(tmp_path):
    arrays = {
        "infrared": numpy.full((2, 4, 4), 29315, dtype="uint16"),
        "cooling_curve": numpy.array([30315, 29315], dtype="uint16"),
    }
    write_recordings(tmp_path / "in", (Recording(arrays, label) for label in (0, 1)))
    own = {"branches": ["infrared"], "num_classes": 2}
    row = prepared(tmp_path / "in", tmp_path / "cache", own=own, validation_split_percentage=0).train[0]
    assert row["infrared"].dtype == "float16" and row["infrared"] == pytest.approx(20, abs=0.01)
    assert row["cooling_curve"] == pytest.approx([30, 20], abs=1e-3)


def test_rows_are_views_of_mapped_files_and_survive_a_worker(folder, tmp_path):
    train = prepared(folder, tmp_path / "cache").train
    row = train[0]
    base = row["visible"]
    while isinstance(base, numpy.ndarray) and base.base is not None:
        base = base.base
    assert isinstance(row["visible"], numpy.memmap) and type(base).__name__ == "mmap"
    sent = pickle.dumps(train)
    assert len(sent) < 20_000
    assert numpy.array_equal(pickle.loads(sent)[0]["visible"], row["visible"])


@pytest.mark.parametrize("name", ["kinematics.bin", "index.npz", "shapes.json"])
def test_a_torn_cache_is_named(folder, tmp_path, name):
    prepared(folder, tmp_path / "cache")
    (path,) = (tmp_path / "cache" / "sensors").glob(f"*/{name}")
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(StorageError, match=rf"{path.parent} cannot be read .*; delete that folder"):
        prepared(folder, tmp_path / "cache")


@pytest.mark.parametrize("count, other", [('"read": 16', '"read": "x"'), ('"numbers": [0', '"numbers": ["x"')])
def test_statistics_of_another_type_are_named(folder, tmp_path, count, other):
    prepared(folder, tmp_path / "cache")
    (path,) = (tmp_path / "cache" / "sensors").glob("*/books.json")
    assert count in path.read_text()
    path.write_text(path.read_text().replace(count, other))
    with pytest.raises(StorageError, match=rf"{path.parent} cannot be read .*; delete that folder"):
        prepared(folder, tmp_path / "cache")


# -- batches -----------------------------------------------------------------------------------------------------------


def test_the_collator_pads_on_the_right_and_says_where():
    rows = rows_of(synthetic(6, 4, 0, missing_share=0.9))
    batch = SensorCollator(SHAPES)(rows)
    for name, shape in SHAPES.items():
        values, mask = batch[name], batch["cooling_mask" if name == "cooling_curve" else f"{name}_mask"]
        assert values.shape == (6, mask.shape[1], *shape) and mask.dtype == torch.bool
        for row, value, valid in zip(rows, values, mask, strict=True):
            length = len(row.get(name, ()))
            assert valid.tolist() == [step < length for step in range(len(valid))]
            assert numpy.array_equal(value[:length].numpy(), row.get(name, value[:0]))
            assert not value[length:].any()
    has = [[any(name in row for name in arrays) for arrays in BRANCHES.values()] for row in rows]
    assert batch["branch_mask"].tolist() == has and not all(map(all, has))
    assert batch["labels"].dtype == torch.int64 and batch["visible"].dtype == torch.uint8
    assert batch["infrared"].dtype == torch.float16


def test_a_branch_that_a_whole_batch_lacks_still_takes_part():
    rows = [{name: value for name, value in row.items() if name != "visible"} for row in rows_of(synthetic(2, 4))]
    batch = SensorCollator(SHAPES)(rows)
    assert batch["visible"].shape == (2, 1, 3, 16, 16) and not batch["visible_mask"].any()


def test_batches_can_be_cut_by_rows():
    batch = SensorCollator(SHAPES)(rows_of(synthetic(5, 4, 0, missing_share=0.5)))
    layout = read_layout(batch, "visible")
    assert layout.rows == 5 and layout.obstacle is None
    part = take([layout], [(0, 3), (0, 1)])
    assert all(torch.equal(part[name], batch[name][[3, 1]]) for name in batch)


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"branches": ["radar"]}, "branches has 'radar'; allowed: visible, infrared, kinematics"),
        ({"branches": ["visibel"]}, "did you mean 'visible'"),
        ({"branches": []}, "branches is empty"),
        ({"branches": ["visible", "visible"]}, "names a branch twice"),
        ({"branches": ["visible"], "checkpoint_branches": ["infrared"]}, "checkpoint_branches has 'infrared'"),
        (
            {"branches": ["geometry"], "frozen_branches": ["plume"]},
            "frozen_branches has 'plume', but the model has geom",
        ),
        ({"quantized_branches": ["plume"]}, "quantized_branches has 'plume'; allowed: visible, kinematics, fusion"),
        ({"num_classes": 1}, "num_classes is 1"),
        ({"sensor_hidden_size": 20, "sensor_heads": 4}, "multiple of twice sensor_heads .*for instance 16"),
        ({"sensor_layers": 0}, "sensor_layers is 0"),
        ({"sensor_dropout": 1.0}, "sensor_dropout is 1.0"),
        ({"sensor_missing_share": -0.1}, "sensor_missing_share is -0.1"),
        ({"offload_linears_mb": -1}, "offload_linears_mb is -1"),
        ({"offload_linears_folder": "x"}, "offload_linears_folder is the folder for the layers of offload_linears_mb"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(changes, message):
    with pytest.raises(SettingsError, match=message):
        SensorSettings(**changes)


def test_branches_come_in_one_order():
    assert SensorSettings(branches=["kinematics", "visible"]).branches == ["visible", "kinematics"]
    assert SensorSettings().branches == ["visible", "infrared", "kinematics"]


def test_a_table_in_the_place_of_recordings_is_told_the_format(tmp_path):
    (tmp_path / "har.csv").write_text("t,x,y,z,label\n0,1,2,3,walk\n")
    for name, found in ((tmp_path / "har.csv", "har.csv' is a file"), (tmp_path, "has no manifest.jsonl")):
        with pytest.raises(DataError, match=rf"{found}.*one .npz per recording.*kinematics.*write_recordings in scu_t"):
            prepared(name, tmp_path / "cache")


def test_channels_that_float32_resolves_are_kept(folder, tmp_path):
    values = numpy.random.default_rng(0).normal(101_325.0, 30.0, (40, 6))  # air pressure in Pa
    values[:, 1] = 1.7e9  # does not change
    change_arrays(folder / "000006.npz", kinematics=values)
    assert not prepared(folder, tmp_path / "cache").statistics.dropped


@pytest.mark.parametrize(("offset", "is_said"), [(0.0, False), (9.81, False), (101_325.0, True)])
def test_a_channel_that_drowns_another_is_named(tmp_path, offset, is_said):
    def recording(number: int) -> Recording:
        values = numpy.random.default_rng(number).normal(size=(20, 3)).astype("float32")
        values[:, 1] = offset  # a constant
        return Recording({"kinematics": values}, number % 2)

    write_recordings(tmp_path / "folder", map(recording, range(8)))
    own = {"branches": ["kinematics"], "num_classes": 2}
    notes = prepared(tmp_path / "folder", tmp_path, own=own).statistics.notes
    assert any("channel 1 has a size of about 1.01e+05, but channel " in note for note in notes) is is_said
    assert any(note.startswith("kinematics:") for note in notes) is is_said


def test_a_channel_that_drowns_its_own_changes_is_named(tmp_path):
    """As the pressure alone does: no other one is smaller."""

    def recording(number: int) -> Recording:
        values = 101_325 + numpy.random.default_rng(number).normal(scale=10, size=(20, 1))
        return Recording({"kinematics": values.astype("float32")}, number % 2)

    write_recordings(tmp_path / "folder", map(recording, range(8)))
    notes = prepared(tmp_path / "folder", tmp_path, own={"branches": ["kinematics"], "num_classes": 2}).statistics.notes
    (note,) = (note for note in notes if note.startswith("kinematics:"))
    assert "and hardly learns such small changes; from each channel subtract its mean" in note


def test_a_changed_byte_in_the_header_of_an_array_is_a_bad_recording(tmp_path):
    """numpy parses the header as Python before the archive compares its checksum."""
    path = tmp_path / "a.npz"
    numpy.savez(path, kinematics=numpy.zeros((9000, 6), dtype="float32"))
    assert list(read_arrays(path, ["kinematics"])) == ["kinematics"]
    path.write_bytes(path.read_bytes().replace(b"), }", b"), ("))
    with pytest.raises(BadSample, match="not a readable"):
        read_arrays(path, ["kinematics"])


def test_a_pipe_in_the_place_of_a_recording_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.npz")
    with pytest.raises(BadSample, match="it is a pipe or a device, not a file"):
        read_arrays(tmp_path / "a.npz", ["visible"])
