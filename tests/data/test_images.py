"""Images: sources, what is refused or counted, the split, and the pixels that are kept."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import zlib
from dataclasses import fields
from pathlib import Path

import datasets
import numpy
import PIL.features
import PIL.Image
import pytest
import torch
from transformers import ViTImageProcessorPil

from scu_trainer.data.images import tables
from scu_trainer.data.images.data import evenly_by_class, find_images, natural_size, prepare_images
from scu_trainer.data.images.decode import in_channels, open_image
from scu_trainer.data.images.embedded import generated
from scu_trainer.data.images.folders import folder_source
from scu_trainer.data.images.records import LABEL_COLUMNS
from scu_trainer.data.images.store import ImageRows, PixelFormat, collate_images, pixel_statistics
from scu_trainer.errors import DataError, StorageError
from scu_trainer.settings import DataSettings
from scu_trainer.settings.images import ImageSettings


def kind(size: int = 16, channels: int = 3) -> PixelFormat:
    processor = ViTImageProcessorPil(size={"height": size, "width": size}, do_convert_rgb=channels == 3)
    return PixelFormat(processor, channels, (size, size))


def prepared(dataset, cache: Path, *, seed: int = 0, own: ImageSettings | None = None, channels: int = 3, **changes):
    data = DataSettings(dataset=str(dataset), **{"validation_split_percentage": 25.0, **changes})
    source = find_images(data, own or ImageSettings(), cache)
    return prepare_images(source, kind(channels=channels), data, seed=seed, cache_dir=cache)


def picture(path: Path, seed: int, mode: str = "RGB", size: tuple[int, int] = (12, 10)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = numpy.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=numpy.uint8)
    PIL.Image.fromarray(pixels).convert(mode).save(path)
    return path


@pytest.fixture
def pets(tmp_path) -> Path:
    """Two classes, eight images each."""
    folder = tmp_path / "pets"
    for number, name in enumerate(("cat", "dog")):
        for k in range(8):
            picture(folder / name / f"{k}.png", seed=100 * number + k)
    return folder


def truncate(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-40])
    return path


# -- what can be read --------------------------------------------------------------------------------------------------


def test_digits_are_enlarged_once_and_mapped(tmp_path):
    pytest.importorskip("sklearn")
    data = prepared("digits", tmp_path)
    assert (data.statistics.read, data.statistics.train, data.statistics.eval) == (1797, 1348, 449)
    assert data.label_names == tuple("0123456789") and data.statistics.dropped == {}
    row = data.train[0]
    assert row["pixel_values"].shape == (3, 16, 16) and row["pixel_values"].dtype == numpy.uint8
    assert isinstance(data.train.pixels.base, numpy.memmap) or isinstance(data.train.pixels, numpy.memmap)
    said = " ".join(data.statistics.lines())
    assert "8 x 8 pixels became 16 x 16 x 3" in said and "1,797 × gray" in said


def test_without_scikit_learn_digits_name_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install .scu-trainer\[images\]"):
        prepared("digits", tmp_path)


def test_generated_images_do_not_depend_on_how_many_there_are(tmp_path):
    few, many = prepared("generated", tmp_path, dataset_size=20), generated(40)
    assert few.statistics.read == 20
    first = [record.content for record in generated(20).read(range(20))]
    assert all(numpy.array_equal(a, b.content) for a, b in zip(first, many.read(range(20)), strict=True))


def test_generated_classes_differ_in_colour():
    source = generated(200)
    colours = numpy.array([record.content.reshape(-1, 3).mean(axis=0) for record in source.read(range(200))])
    centres = numpy.array([colours[source.labels == label].mean(axis=0) for label in range(10)])
    nearest = ((colours[:, None] - centres) ** 2).sum(axis=-1).argmin(axis=1)
    assert (nearest == source.labels).mean() > 0.5


def test_class_folders(pets, tmp_path):
    (pets / "cat" / "notes.txt").write_text("no image")
    data = prepared(pets, tmp_path)
    assert data.label_names == ("cat", "dog") and data.statistics.per_class == {"cat": 6, "dog": 6}
    assert data.statistics.eval == 4 and "1 file of other kinds" in " ".join(data.statistics.notes)
    assert "not read: .txt" in " ".join(data.statistics.notes)
    assert "classes: 2 (cat, dog), 6 images each" in data.statistics.lines()


def test_folders_within_a_class_are_named(pets, tmp_path):
    (pets / "cat" / "tabby").mkdir()
    picture(pets / "cat" / "tabby" / "a.png", 77)
    data = prepared(pets, tmp_path)
    assert data.statistics.per_class == {"cat": 7, "dog": 6}
    said = "1 image in folders within the folder of a class: taken for that class (cat/tabby: cat)"
    assert said in data.statistics.notes


def test_of_a_file_of_several_images_the_first_is_read_and_a_line_says_so(pets, tmp_path):
    frames = [PIL.Image.new("RGB", (8, 8), (80 * k, 0, 0)) for k in range(3)]
    for name in ("dog/a.gif", "dog/b.tiff"):
        frames[0].save(pets / name, save_all=True, append_images=frames[1:])
    frames[0].save(pets / "dog" / "c.gif")
    (pets / "dog" / "d.gif").write_bytes((pets / "dog" / "c.gif").read_bytes()[:-1] + b",")  # torn behind the first
    data = prepared(pets, tmp_path)
    assert any("3 files hold several images (frames or pages)" in note for note in data.statistics.notes)


def test_links_in_class_folders_that_are_not_followed_are_named(pets, tmp_path):
    picture(tmp_path / "other" / "9.png", seed=9)
    (pets / "cat" / "more").symlink_to(tmp_path / "other")
    (pets / "dog" / "gone.png").symlink_to(tmp_path / "nowhere")
    (pets / "lost.png").symlink_to(tmp_path / "nowhere")
    (pets / "fox").symlink_to(tmp_path / "other")  # a class folder itself may be a link
    data = prepared(pets, tmp_path)
    [line] = [note for note in data.statistics.notes if "links in" in note]
    assert "3 links in" in line and all(f"{name} (a link to" in line for name in ("more", "gone.png", "lost.png"))
    assert data.label_names == ("cat", "dog", "fox")


def test_what_is_not_read_of_held_out_folders_is_named_as_well(pets, tmp_path):
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            picture(tmp_path / "both" / split / name / "0.png", seed=len(split + name))
    (tmp_path / "both" / "test" / "cat" / "more").symlink_to(pets)
    (tmp_path / "both" / "test" / "cat" / "a.heic").write_bytes(b"x")
    for data in (
        prepared(tmp_path / "both", tmp_path),
        prepared(pets, tmp_path, eval_dataset=str(tmp_path / "both" / "test")),
    ):
        notes = "\n".join(data.statistics.notes)
        assert notes.count("1 link in") == notes.count("1 file of other kinds") == 1


def test_names_that_are_no_text(pets, tmp_path):
    (pets / "cat" / "0.png").rename(pets / "cat" / os.fsdecode(b"caf\xe9.png"))
    picture(pets / "cat" / os.fsdecode(b"ch\xe2ts") / "1.png", seed=1)
    assert prepared(pets, tmp_path).statistics.read == 17
    (pets / "cat").rename(pets / os.fsdecode(b"ch\xe2t"))
    with pytest.raises(DataError, match=r"the class folder ch\ufffdt in .* is not UTF-8; rename it"):
        prepared(pets, tmp_path)


def test_class_called_train_is_no_split(pets, tmp_path):
    (pets / "cat").rename(pets / "train")
    assert prepared(pets, tmp_path).label_names == ("dog", "train")


def test_split_folders(tmp_path):
    folder = tmp_path / "birds"
    for split, count in (("train", 4), ("val", 2)):
        for name in ("owl", "wren"):
            for k in range(count):
                picture(folder / split / name / f"{k}.png", seed=zlib.crc32(f"{split}{name}{k}".encode()))
    data = prepared(folder, tmp_path)
    assert (data.statistics.train, data.statistics.eval) == (8, 4) and any(
        "birds/val" in note for note in data.statistics.notes
    )
    with pytest.raises(DataError, match="dataset_split"):
        prepared(folder, tmp_path, dataset_split="test")


NAMES_OF_SPLITS = {
    "Training/": ("Training", "Testing"),
    "train and eval": ("train", "eval"),
    "capitals": ("Train", "Dev"),
    "words inside, twice": ("seg_train/seg_train", "seg_test/seg_test"),
    "in a folder of their own": ("archive/train", "archive/valid"),
}


@pytest.mark.parametrize("case", NAMES_OF_SPLITS)
def test_folders_of_splits_are_known_as_those_of_texts_are(tmp_path, case):
    """None of them is taken for a class."""
    train, held_out = (tmp_path / "birds" / name for name in NAMES_OF_SPLITS[case])
    for k, (split, name) in enumerate((split, name) for split in (train, train, held_out) for name in ("owl", "wren")):
        picture(split / name / f"{k}.png", seed=k)
    data = prepared(tmp_path / "birds", tmp_path)
    assert data.label_names == ("owl", "wren") and (data.statistics.train, data.statistics.eval) == (4, 2)
    assert any(f"held-out images come from {held_out}" in note for note in data.statistics.notes)
    again = prepared(tmp_path / "birds", tmp_path, dataset_split=held_out.name)
    assert again.statistics.read == 2


def test_a_second_held_out_split_is_named(tmp_path):
    import datasets

    for k, split in enumerate(("train", "valid", "test")):
        for name in ("owl", "wren"):
            picture(tmp_path / "birds" / split / name / f"{k}.png", seed=k)
    assert f"{tmp_path / 'birds' / 'test'} was not read" in prepared(tmp_path / "birds", tmp_path).statistics.notes
    saved = tmp_path / "saved"
    rows = datasets.load_from_disk(str(table(tmp_path / "one", [0, 1] * 4)))
    datasets.DatasetDict(train=rows, test=rows, unsupervised=rows).save_to_disk(saved)
    notes = prepared(saved, tmp_path).statistics.notes
    assert f"splits of {saved} that were not read: unsupervised" in notes
    notes = prepared(saved, tmp_path, eval_dataset=str(saved)).statistics.notes
    assert f"splits of {saved} that were not read: test, unsupervised" in notes


def test_folders_beside_splits_are_named_and_splits_without_classes_refused(birds, tmp_path):
    (birds / "to_predict").mkdir()
    assert any("not read: to_predict" in note for note in prepared(birds, tmp_path).statistics.notes)
    for name in ("train", "val"):
        picture(tmp_path / "flat" / name / "0.png", seed=len(name))
    with pytest.raises(DataError, match="flat/train has no class folder with images"):
        prepared(tmp_path / "flat", tmp_path)
    for name in ("val", "test"):
        picture(tmp_path / "held_out" / name / "owl" / "0.png", seed=len(name))
    with pytest.raises(DataError, match="has the splits val, test, but none of the requested: train"):
        prepared(tmp_path / "held_out", tmp_path)


def test_the_only_folder_is_read_in_the_place_of_the_one_around_it(pets, tmp_path):
    (tmp_path / "unpacked" / "__MACOSX" / "pets").mkdir(parents=True)
    pets.rename(tmp_path / "unpacked" / "pets")
    data = prepared(tmp_path / "unpacked", tmp_path)
    assert data.label_names == ("cat", "dog")
    assert any("pets is the only folder in" in note for note in data.statistics.notes)


def table(tmp_path: Path, labels, names=None, column: str = "img", label_column: str = "fine_label"):
    import datasets

    paths = [str(picture(tmp_path / "raw" / f"{k}.png", seed=k)) for k in range(len(labels))]
    kinds = {
        column: datasets.Image(),
        label_column: datasets.ClassLabel(names=names) if names else datasets.Value("int64"),
    }
    rows = {column: paths, label_column: labels}
    features = datasets.Features(kinds)
    saved = datasets.Dataset.from_dict(rows, features=features)
    saved.save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def test_saved_tables_with_other_names_of_columns(tmp_path):
    data = prepared(table(tmp_path, [0, 1] * 6, ["no", "yes"]), tmp_path)
    assert data.label_names == ("no", "yes") and (data.statistics.train, data.statistics.eval) == (9, 3)


def test_columns_can_be_named_and_wrong_names_are_answered(tmp_path):
    saved = table(tmp_path, [0, 1] * 6, ["no", "yes"], column="picture", label_column="kind")
    assert prepared(saved, tmp_path).statistics.train == 9  # the only ones of their type
    with pytest.raises(DataError, match=r"image_column_name is 'pictures'.*did you mean 'picture'"):
        prepared(saved, tmp_path, own=ImageSettings(image_column_name="pictures"))
    with pytest.raises(DataError, match=r"label_column_name is 'kinds'.*did you mean 'kind'"):
        prepared(saved, tmp_path, own=ImageSettings(label_column_name="kinds"))


def test_paths_that_are_none(tmp_path, pets):
    with pytest.raises(DataError, match=r"does not exist.*did you mean 'pets'"):
        prepared(tmp_path / "pet", tmp_path)
    with pytest.raises(DataError, match="is a file"):
        prepared(pets / "cat" / "0.png", tmp_path)


def test_rows_are_known_by_the_places_of_their_images(pets, tmp_path):
    data = prepared(pets, tmp_path)
    keys = data.train.keys()
    assert len(keys) == 12 and keys[0] == str(pets / "cat" / Path(keys[0]).name)
    assert sorted(keys + data.eval.keys()) == sorted(str(path) for path in pets.rglob("*.png"))


def test_hidden_folders_inside_a_class_are_not_read(pets, tmp_path):
    picture(pets / "cat" / ".ipynb_checkpoints" / "0.png", seed=3)
    assert prepared(pets, tmp_path).statistics.read == 16


def test_each_source_of_images_says_its_own_sizes(pets, tmp_path):
    for name in ("cat", "dog"):
        picture(tmp_path / "more" / name / "0.png", seed=zlib.crc32(name.encode()), mode="L")
    notes = prepared(pets, tmp_path, eval_dataset=str(tmp_path / "more")).statistics.notes
    assert [note.split(": ")[0] for note in notes if "decoded once" in note] == [str(pets), str(tmp_path / "more")]
    assert [note.split(", ")[0] for note in notes if "turned into" in note] == [str(tmp_path / "more")]


@pytest.fixture
def birds(tmp_path) -> Path:
    """A split for training with two classes, and one for tests whose images lie in no folder of a class."""
    for name in ("owl", "wren"):
        for k in range(4):
            picture(tmp_path / "birds" / "train" / name / f"{k}.png", seed=zlib.crc32(f"{name}{k}".encode()))
    picture(tmp_path / "birds" / "test" / "0.png", seed=5)
    return tmp_path / "birds"


def test_split_without_classes_is_left_and_noted(birds, tmp_path):
    data = prepared(birds, tmp_path)
    assert (data.statistics.train, data.statistics.eval) == (6, 2)
    assert any("birds/test has no class folders and was not read: 1 image" in note for note in data.statistics.notes)


def test_split_beside_training_is_not_looked_at_where_eval_dataset_is_given(birds, tmp_path):
    for name in ("owl", "wren"):
        picture(birds / "val" / name / "0.png", seed=zlib.crc32(name.encode()))
        picture(tmp_path / "more" / name / "0.png", seed=1 + zlib.crc32(name.encode()))
    notes = " ".join(prepared(birds, tmp_path, eval_dataset=str(tmp_path / "more")).statistics.notes)
    assert "birds/val" not in notes and "birds/test" not in notes


@pytest.mark.parametrize("setting", ["dataset_split", "dataset_config_name"])
@pytest.mark.parametrize("kind_of_source", ["embedded", "folder", "saved"])
def test_settings_of_the_hub_are_refused_for_other_data(pets, tmp_path, setting, kind_of_source):
    makers = {
        "embedded": lambda: "generated",
        "folder": lambda: pets,
        "saved": lambda: table(tmp_path, [0, 1] * 4, ["no", "yes"]),
    }
    with pytest.raises(DataError, match=f"{setting} is 'test'.*leave"):
        prepared(makers[kind_of_source](), tmp_path, **{setting: "test"})


def test_data_of_some_of_the_classes_that_a_model_knows(pets, tmp_path):
    data = DataSettings(dataset=str(pets), validation_split_percentage=25.0)
    source = find_images(data, ImageSettings(), tmp_path, ("ant", "dog", "cat"))
    rows = prepare_images(source, kind(), data, seed=0, cache_dir=tmp_path)
    assert rows.label_names == ("ant", "dog", "cat") and rows.statistics.per_class == {"ant": 0, "dog": 6, "cat": 6}
    places = dict(zip(rows.train.keys(), rows.train.labels.tolist(), strict=True))
    assert all(label == (1 if "/dog/" in place else 2) for place, label in places.items())
    assert find_images(data, ImageSettings(), tmp_path, ("ant", "dog")).label_names == ("cat", "dog")  # not its data


# -- what is bad -------------------------------------------------------------------------------------------------------


def refused_then_counted(dataset, tmp_path, place: str, reason: str, **changes):
    """The first bad image is named; with skip_bad_rows it is counted. Returns the second preparation."""
    with pytest.raises(DataError, match=f"{place}.*{reason}.*skip_bad_rows"):
        prepared(dataset, tmp_path, **changes)
    data = prepared(dataset, tmp_path, skip_bad_rows=True, **changes)
    assert sum(data.statistics.dropped.values()) == 1
    (found, examples), *_ = data.statistics.examples.items()
    assert reason in found and place.replace("\\", "") in examples[0]
    return data


@pytest.mark.parametrize(
    "spoil", [truncate, lambda path: path.write_bytes(b"no image at all"), lambda path: path.write_bytes(b"")]
)
def test_unreadable_image(pets, tmp_path, spoil):
    spoil(pets / "dog" / "3.png")
    data = refused_then_counted(pets, tmp_path, "dog/3.png", "cannot be read")
    assert data.statistics.train + data.statistics.eval == 15 and data.statistics.read == 16


@pytest.mark.parametrize("suffix", [".JPG", ".jfif"])
def test_other_suffixes_of_jpeg(pets, tmp_path, suffix):
    picture(pets / "cat" / "9.jpg", seed=9).rename(pets / "cat" / f"9{suffix}")
    assert prepared(pets, tmp_path).statistics.read == 17


def test_truncated_jpeg(pets, tmp_path):
    truncate(picture(pets / "dog" / "8.jpg", seed=1, size=(60, 60)))
    refused_then_counted(pets, tmp_path, "dog/8.jpg", "cannot be read")


def test_damaged_avif(pets, tmp_path):
    if not PIL.features.check("avif"):
        pytest.skip("this Pillow does not read AVIF")
    path = picture(pets / "dog" / "8.avif", seed=1, size=(60, 60))
    path.write_bytes(path.read_bytes().replace(b"av1C", b"none"))
    refused_then_counted(pets, tmp_path, "dog/8.avif", "cannot be read")


def test_deep_pixels(pets, tmp_path):
    pixels = numpy.full((8, 8), 40_000, dtype=numpy.uint16)
    PIL.Image.fromarray(pixels).save(pets / "cat" / "deep.png")
    refused_then_counted(pets, tmp_path, "cat/deep.png", "unusable channels")


@pytest.mark.parametrize(
    ("mode", "suffix", "called"),
    [
        ("L", "png", "gray"),
        ("RGBA", "png", "RGB with transparency"),
        ("LA", "png", "gray with transparency"),
        ("P", "png", "palette"),
        ("CMYK", "jpg", "CMYK"),
    ],
)
def test_other_channels_are_converted_as_stock_processors_do_it_and_counted(pets, tmp_path, mode, suffix, called):
    path = picture(pets / "cat" / f"9.{suffix}", seed=9, mode=mode)
    data = prepared(pets, tmp_path, validation_split_percentage=0.0)
    assert any(f"1 × {called}" in note for note in data.statistics.notes)
    with PIL.Image.open(path) as image:
        wanted = kind().processor(image, do_rescale=False, do_normalize=False)["pixel_values"][0]
    assert any(numpy.array_equal(data.train[k]["pixel_values"], wanted) for k in range(len(data.train)))


def test_transparent_palette_warns_nobody(pets, tmp_path):
    image = PIL.Image.fromarray(numpy.zeros((8, 8), dtype=numpy.uint8)).convert("P")
    image.save(pets / "cat" / "9.png", transparency=bytes([0, 128, 255]))
    assert prepared(pets, tmp_path).statistics.read == 17


def test_gray_models_get_gray_images(pets, tmp_path):
    data = prepared(pets, tmp_path, channels=1)
    assert data.train[0]["pixel_values"].shape == (1, 16, 16)
    assert any("turned into gray: 16 × RGB" in note for note in data.statistics.notes)


def test_lab_becomes_gray():
    found = in_channels(PIL.Image.new("LAB", (4, 4), (128, 0, 0)), 1)
    assert found.mode == "L" and found.getextrema()[0] > 0


def test_arrays_with_too_many_channels_are_refused():
    from scu_trainer.data.records import BadSample

    with pytest.raises(BadSample, match="1, 3 or 4 channels"):
        open_image(numpy.zeros((4, 4, 5), dtype=numpy.uint8))


def test_missing_label(tmp_path):
    refused_then_counted(table(tmp_path, [0, 1, -1, 1, 0, 1, 0, 1], ["no", "yes"]), tmp_path, "row 3", "usable label")


def test_label_without_a_name_that_leaves_a_gap_is_out_of_range(tmp_path):
    with pytest.raises(DataError, match="row 5: label 7 is out of range"):
        prepared(table(tmp_path, [0, 1, 0, 1, 7, 1]), tmp_path)


def test_held_out_labels_without_names_may_have_gaps(tmp_path):
    saved, other = table(tmp_path / "a", [0, 1, 2] * 3), table(tmp_path / "b", [2, 0])
    data = prepared(saved, tmp_path, eval_dataset=str(other))
    assert data.eval.labels.tolist() == [2, 0]


def test_labels_that_are_all_missing(tmp_path):
    with pytest.raises(DataError, match="no image with a usable label"):
        prepared(table(tmp_path, [None] * 4), tmp_path)


@pytest.mark.parametrize("label", [[0, 1], {"number": 0}])
def test_labels_that_are_lists_or_structs(tmp_path, label):
    import datasets

    rows = {"img": [str(picture(tmp_path / "0.png", seed=0))], "label": [label]}
    datasets.Dataset.from_dict(rows).cast_column("img", datasets.Image()).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"column 'label' .* is of type .*numbers from 0, or names"):
        prepared(tmp_path / "saved", tmp_path)


def test_one_class_among_named_ones_is_refused(tmp_path):
    with pytest.raises(DataError, match="one class, 'no'"):
        prepared(table(tmp_path, [0] * 4, ["no", "yes"]), tmp_path)


def test_image_that_the_processor_refuses(pets, tmp_path, monkeypatch):
    picture(pets / "dog" / "thin.png", seed=1, size=(1, 99))

    def refuses_thin(self, image, **options):
        if image.width == 1:
            raise ValueError("too thin")
        return stock(self, image, **options)

    stock = ViTImageProcessorPil.__call__
    monkeypatch.setattr(ViTImageProcessorPil, "__call__", refuses_thin)
    refused_then_counted(pets, tmp_path, "dog/thin.png", "image processor does not take")


def test_label_above_the_named_classes(tmp_path):
    import datasets

    from scu_trainer.data.images.tables import _label_numbers

    found = _label_numbers([0, 5, None], datasets.ClassLabel(names=["a", "b"]), ("a", "b"), ("a", "b"))
    assert found.tolist() == [0, -1, -1]


def test_image_outside_of_all_classes(pets, tmp_path):
    picture(pets / "loose.png", seed=5)
    refused_then_counted(pets, tmp_path, "loose.png", "usable label")


def test_empty_class(pets, tmp_path):
    (pets / "fox").mkdir()
    with pytest.raises(DataError, match=r"pets/fox holds no image.*skip_bad_rows"):
        prepared(pets, tmp_path)
    data = prepared(pets, tmp_path, skip_bad_rows=True)
    assert data.statistics.dropped == {"class folder without an image": 1} and data.label_names == ("cat", "dog")


def test_one_class_is_refused(tmp_path):
    picture(tmp_path / "one" / "cat" / "0.png", seed=0)
    with pytest.raises(DataError, match="one class, 'cat'"):
        prepared(tmp_path / "one", tmp_path)


def test_folder_without_classes(tmp_path):
    picture(tmp_path / "flat" / "0.png", seed=0)
    with pytest.raises(DataError, match=r"no class folder with images.*\.webp$"):
        prepared(tmp_path / "flat", tmp_path)
    (tmp_path / "flat" / "metadata.csv").write_text("file_name,breed\n0.png,cat\n")
    with pytest.raises(
        DataError, match=r"has the columns file_name, breed, .*needs file_name and label .*give label_column_name"
    ):
        prepared(tmp_path / "flat", tmp_path)
    (tmp_path / "flat" / "metadata.csv").write_text("file_name,label\n0.png,\n")
    with pytest.raises(DataError, match=r"No row of metadata.csv has a label; fill in"):
        prepared(tmp_path / "flat", tmp_path)


def with_metadata(folder: Path, column: str = "label", count: int = 12, inner: str = "") -> Path:
    """Pictures in one folder, whose classes stand in a table beside them."""
    rows = [f"file_name,{column}"]
    for number in range(count):
        picture(folder / inner / f"{number}.png", seed=number + zlib.crc32(folder.name.encode()))
        rows.append(f"{inner}{number}.png,{('cat', 'dog')[number % 2]}")
    (folder / "metadata.csv").write_text("\n".join(rows) + "\n")
    return folder


@pytest.mark.parametrize(("column", "inner"), [("label", ""), ("label", "images/"), ("breed", "")])
def test_a_folder_with_metadata_as_the_datasets_library_takes_it(tmp_path, column, inner):
    own = ImageSettings() if column == "label" else ImageSettings(label_column_name=column)
    folder = with_metadata(tmp_path / "pets", column, inner=inner)
    data = prepared(folder.parent / "pets" / ".." / "pets", tmp_path, own=own)
    assert data.label_names == ("cat", "dog") and data.statistics.per_class == {"cat": 5, "dog": 4}
    row = data.train[0]
    assert row["labels"] == 0 and not data.statistics.dropped
    assert not any("not read" in note for note in data.statistics.notes)


def test_metadata_above_the_folders_of_splits_are_read_for_each(tmp_path):
    """As the datasets library takes them; rows of another split are not of this one."""
    folder, rows = tmp_path / "pets", ["file_name,label"]
    for split, count in (("train", 12), ("test", 4)):
        table = with_metadata(folder, count=count, inner=f"{split}/") / "metadata.csv"
        rows += table.read_text().splitlines()[1:]
    table.write_text("\n".join(rows) + "\n")
    source = folder_source(folder, ["train"], skip_bad=False)
    assert source.labels.tolist() == [0, 1] * 6 and source.held_out.labels.tolist() == [0, 1] * 2
    assert not any("not read" in note for note in (*source.notes, *source.held_out.notes))
    table.write_text("\n".join([*rows, "train/gone.png,cat"]) + "\n")
    with pytest.raises(DataError, match=r"names .*train/gone\.png, which does not exist"):
        folder_source(folder, ["train"], skip_bad=False)
    table.write_text("\n".join(rows[:13]) + "\n")
    source = folder_source(folder, ["train"], skip_bad=False)
    assert source.held_out is None and "was not read: 4 images" in source.notes[-1]


def test_nothing_and_spaces_in_the_metadata_make_no_class_of_their_own(tmp_path):
    for number in range(6):
        picture(tmp_path / "pets" / f"{number}.png", seed=number)
    labels = ["cat", "dog", "cat ", " dog", "NaN", "cat"]
    rows = [{"file_name": f"{number}.png", "label": label} for number, label in enumerate(labels)]
    lines = "\n".join(json.dumps(row).replace('"NaN"', "NaN") for row in rows)
    (tmp_path / "pets" / "metadata.jsonl").write_text(lines)
    with pytest.raises(DataError, match=r"4.png: image without a usable label: it has no label"):
        prepared(tmp_path / "pets", tmp_path)
    data = prepared(tmp_path / "pets", tmp_path, skip_bad_rows=True)
    assert data.label_names == ("cat", "dog") and sum(data.statistics.dropped.values()) == 1


def test_numbers_are_in_order_in_a_table_and_as_other_libraries_sort_them_in_folders(tmp_path):
    """A model that was trained before must find its classes where they were."""
    for name in ("0", "2", "10"):
        for number in range(3):
            picture(tmp_path / "folders" / name / f"{number}.png", seed=int(name) * 10 + number)
    assert prepared(tmp_path / "folders", tmp_path).label_names == ("0", "10", "2")
    rows = [f"{name}/{number}.png,{name}" for name in ("0", "2", "10") for number in range(3)]
    (tmp_path / "folders" / "metadata.csv").write_text("\n".join(["file_name,label", *rows]) + "\n")
    assert prepared(tmp_path / "folders", tmp_path).label_names == ("0", "2", "10")


@pytest.mark.parametrize("missing", ["", "-1", "-1.0", "nan"])
def test_numbers_of_a_table_with_gaps_are_classes_as_without(tmp_path, missing):
    """pandas writes 10.0 for 10 where another row has nothing; others write -1 for nothing."""
    folder = with_metadata(tmp_path / "pets")
    labels = ["10.0", "2", "2.0", missing, *["0.0", "10.0", "2.0"] * 2]
    rows = [f"{number}.png,{label}" for number, label in enumerate(labels)]
    (folder / "metadata.csv").write_text("\n".join(["file_name,label", *rows]) + "\n")
    data = prepared(folder, tmp_path, skip_bad_rows=True)
    assert data.label_names == ("0", "2", "10") and data.statistics.dropped == {"image without a usable label": 1}
    (folder / "metadata.csv").write_text("\n".join(["file_name,label", *rows, "10.png,v1.0", "11.png,2.5"]) + "\n")
    data = prepared(folder, tmp_path, skip_bad_rows=True)
    assert {"10.0", "v1.0", "2.5"} < {*data.label_names} and "-1" not in data.label_names


def test_a_held_out_table_of_numbers_alone_has_the_classes_of_the_training_table(tmp_path):
    """Beside "beta" 1.0 is a version; where only versions are held out, it is the same one."""
    for split, labels in {"train": ["1.0", "2.0", "beta"] * 2, "test": ["1.0", "2.0"]}.items():
        for number in range(len(labels)):
            picture(tmp_path / "own" / split / f"{number}.png", seed=len(labels) * 10 + number)
        rows = [f"{number}.png,{label}" for number, label in enumerate(labels)]
        (tmp_path / "own" / split / "metadata.csv").write_text("\n".join(["file_name,label", *rows]) + "\n")
    data = prepared(tmp_path / "own", tmp_path)
    assert data.label_names == ("1.0", "2.0", "beta") and data.eval.labels.tolist() == [0, 1]


def test_minus_one_in_a_table_is_said_to_be_no_label(tmp_path):
    folder = with_metadata(tmp_path / "pets")
    rows = [f"{number}.png,{(-1, 1)[number % 2]}" for number in range(10)]
    (folder / "metadata.csv").write_text("\n".join(["file_name,label", *rows]) + "\n")
    with pytest.raises(DataError, match=r"one class, '1'.*5 rows of metadata.csv have -1, which stands for no label"):
        prepared(folder, tmp_path)


def test_one_row_and_one_image_are_said_as_one(tmp_path):
    folder = with_metadata(tmp_path / "pets")
    table = folder / "metadata.csv"
    table.write_text("\n".join([*table.read_text().splitlines()[:-2], "10.png,-1", "0.png,cat"]) + "\n")
    notes = prepared(folder, tmp_path, skip_bad_rows=True).statistics.notes
    assert "1 row of metadata.csv has -1, which stands for no label" in notes
    assert "1 row of metadata.csv repeats an image, which is read once" in notes
    assert f"1 image of {folder} is not in metadata.csv and not read" in notes


def test_metadata_without_a_known_column_of_classes_are_named_beside_folders(tmp_path):
    folder = with_metadata(tmp_path / "pets", "breed", inner="images/")
    line = (
        "metadata.csv has the columns file_name, breed, .*; if another column has the classes, give label_column_name"
    )
    with pytest.raises(DataError, match=f"one class, 'images'; .*{line}"):
        prepared(folder, tmp_path)
    picture(folder / "more" / "0.png", seed=5)
    assert any(re.match(line, note) for note in prepared(folder, tmp_path).statistics.notes)


def test_parquet_files_of_images_are_answered_with_how_to_save_them(tmp_path, monkeypatch):
    import datasets

    rows = datasets.load_from_disk(str(table(tmp_path, [0, 1] * 4)))
    for name in ("flat/train.parquet", "hub/plain/train-0.parquet"):
        (tmp_path / name).parent.mkdir(parents=True)
        rows.to_parquet(tmp_path / name)
    for given in ("flat", "hub", "flat/train.parquet"):
        with pytest.raises(DataError, match=r'python -c ".*", then give ') as caught:
            prepared(tmp_path / given, tmp_path)
        command, saved = re.search(r'python -c "(.*)", then give (.*)', str(caught.value)).groups()
        exec(command.replace("load_dataset(", f"load_dataset(cache_dir={str(tmp_path / 'hub_cache')!r}, path="))
        assert prepared(saved, tmp_path).statistics.read == 8
    monkeypatch.chdir(tmp_path / "hub" / "plain")
    with pytest.raises(DataError, match=rf"then give {tmp_path}/hub/plain-saved"):
        prepared(".", tmp_path)


def test_an_image_in_two_classes_is_named(pets, tmp_path):
    assert not [note for note in prepared(pets, tmp_path).statistics.notes if "same content" in note]
    (pets / "dog" / "copy.png").write_bytes((pets / "cat" / "3.png").read_bytes())
    for eval_dataset in (None, str(pets)):
        data = prepared(pets, tmp_path, eval_dataset=eval_dataset)
        (note,) = [note for note in data.statistics.notes if "same content" in note]
        assert "cat/3.png" in note and "dog/copy.png" in note


def test_classes_that_are_corrected_in_the_metadata_are_those_of_the_next_run(tmp_path):
    """Its cache knows files by their names and times, which have not changed."""
    folder = with_metadata(tmp_path / "pets" / "train").parent
    with_metadata(folder / "test", count=4)
    before = prepared(folder, tmp_path)
    table = folder / "train" / "metadata.csv"
    swapped = {"cat": "dog", "dog": "cat"}
    head, *rows = table.read_text().splitlines()
    rows = [f"{name},{swapped[kind]}" for name, kind in (row.split(",") for row in rows)]
    table.write_text("\n".join([head, *rows]) + "\n")
    after = prepared(folder, tmp_path)
    labels = [[data.train[row]["labels"] for row in range(len(data.train))] for data in (before, after)]
    assert labels[1] == [1 - label for label in labels[0]]


def test_splits_with_metadata_and_a_file_that_is_gone(tmp_path):
    with_metadata(tmp_path / "pets" / "train"), with_metadata(tmp_path / "pets" / "test", count=4)
    data = prepared(tmp_path / "pets", tmp_path)
    assert (data.statistics.train, data.statistics.eval) == (12, 4)
    (tmp_path / "pets" / "train" / "3.png").unlink()
    with pytest.raises(DataError, match=r"metadata of .*train names .*3\.png, which does not exist; .*skip_bad_rows"):
        prepared(tmp_path / "pets", tmp_path)
    data = prepared(tmp_path / "pets", tmp_path, skip_bad_rows=True)
    assert data.statistics.dropped == {"file of the metadata that is not there": 1} and data.statistics.train == 11
    (tmp_path / "pets" / "train" / "metadata.csv").write_text("file_name,label\n../x.png,cat\n")
    with pytest.raises(DataError, match=r"row 1: it does not name an image inside .*train; fix its file_name"):
        prepared(tmp_path / "pets", tmp_path)


def test_an_image_in_several_rows_of_the_metadata_is_read_once_and_has_one_class(tmp_path):
    """One row per bounding box, or several labels: no image is of two classes, or both trained and held out."""
    folder = with_metadata(tmp_path / "pets")
    picture(folder / "__MACOSX" / "._0.png", seed=0)
    table = folder / "metadata.csv"
    whole = table.read_text()
    table.write_text(whole + "0.png,cat\n./2.png,cat\n")
    data = prepared(folder, tmp_path)
    assert data.statistics.train + data.statistics.eval == 12
    assert [note for note in data.statistics.notes if "read" in note] == [
        "2 rows of metadata.csv repeat an image, which is read once"
    ]
    table.write_text(whole + "0.png,dog\n")
    with pytest.raises(
        DataError, match=r"metadata.csv row 13: label is 'dog', and 'cat' in another row; an image has one"
    ):
        prepared(folder, tmp_path)
    table.unlink()
    (folder / "metadata.jsonl").write_text('{"file_name": "0.png", "label": ["cat", "dog"]}\n')
    with pytest.raises(DataError, match=r"metadata.jsonl row 1: label is \['cat', 'dog'\]; an image has one class"):
        prepared(folder, tmp_path)


def test_a_column_of_labels_where_folders_are_the_classes(pets, tmp_path):
    own = ImageSettings(label_column_name="breed")
    assert any("label_column_name has no effect" in note for note in prepared(pets, tmp_path, own=own).statistics.notes)


def test_a_class_that_nothing_is_held_out_of_is_named(pets, tmp_path):
    picture(tmp_path / "more" / "cat" / "0.png", seed=1)
    notes = prepared(pets, tmp_path, eval_dataset=str(tmp_path / "more")).statistics.notes
    assert "no held-out image of 1 class: dog" in notes
    assert not any("held-out image of" in note for note in prepared(pets, tmp_path).statistics.notes)


def test_held_out_class_that_training_lacks(pets, tmp_path):
    for name in ("cat", "dog", "fox"):
        picture(tmp_path / "more" / name / "0.png", seed=zlib.crc32(name.encode()))
    changes = {"eval_dataset": str(tmp_path / "more")}
    with pytest.raises(DataError, match=r"fox/0.png.*training data have no class 'fox'"):
        prepared(pets, tmp_path, **changes)
    data = prepared(pets, tmp_path, skip_bad_rows=True, **changes)
    assert data.statistics.eval == 2 and sum(data.statistics.dropped.values()) == 1


def test_named_class_without_training_images_is_refused_in_held_out_ones(tmp_path):
    saved = table(tmp_path / "a", [0, 1] * 4, ["no", "yes", "maybe"])
    other = table(tmp_path / "b", [0, 1, 2], ["no", "yes", "maybe"])
    assert any("no training image of 1 class: maybe" in note for note in prepared(saved, tmp_path).statistics.notes)
    with pytest.raises(DataError, match=r"row 3: held-out image of a class that training lacks.*'maybe'"):
        prepared(saved, tmp_path, eval_dataset=str(other))
    data = prepared(saved, tmp_path, eval_dataset=str(other), skip_bad_rows=True)
    assert data.statistics.eval == 2 and data.statistics.dropped == {"held-out image of a class that training lacks": 1}


def test_nothing_left(pets, tmp_path):
    for path in pets.rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match="no image to learn from; dropped: 16"):
        prepared(pets, tmp_path, skip_bad_rows=True)


def test_cache_that_cannot_be_written_is_named(pets, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("scu_trainer.data.images.store._digest", full)
    with pytest.raises(StorageError, match="cache_dir"):
        prepared(pets, tmp_path)
    assert not list((tmp_path / "images").glob("*.part"))


# -- the split ---------------------------------------------------------------------------------------------------------


def numbers(data) -> tuple[list[int], list[int]]:
    return data.train.numbers.tolist(), data.eval.numbers.tolist()


def test_split_is_fixed_by_the_seed_and_keeps_shares_of_classes(tmp_path):
    first = prepared("generated", tmp_path, dataset_size=200)
    assert numbers(first) == numbers(prepared("generated", tmp_path, dataset_size=200))
    other = prepared("generated", tmp_path, dataset_size=200, seed=1)
    assert numbers(first) != numbers(other) and first.fingerprint != other.fingerprint
    train, held_out = map(set, numbers(first))
    assert not train & held_out and len(train | held_out) == 200
    assert numpy.bincount(first.eval.labels).tolist() == [5] * 10


def test_each_class_keeps_an_image_for_training(pets, tmp_path):
    picture(pets / "ant" / "0.png", seed=77)
    for seed in range(5):
        data = prepared(pets, tmp_path, seed=seed, validation_split_percentage=90.0)
        assert min(data.statistics.per_class.values()) >= 1


def test_cap_takes_of_every_class(pets, tmp_path):
    data = prepared(pets, tmp_path, dataset_size=6, validation_split_percentage=0.0)
    assert data.statistics.per_class == {"cat": 3, "dog": 3} and data.eval is None
    assert prepared(pets, tmp_path, max_eval_documents=2).statistics.eval == 2
    assert evenly_by_class(numpy.array([0] * 90 + [1] * 10), 20, seed=0).searchsorted(90) == 18


def test_another_seed_decodes_nothing(pets, tmp_path, monkeypatch):
    prepared(pets, tmp_path)
    monkeypatch.setattr("scu_trainer.data.images.store.decode_all", None)
    assert prepared(pets, tmp_path, seed=3).statistics.train == 12


def test_changed_file_is_decoded_again(pets, tmp_path):
    before = prepared(pets, tmp_path)
    picture(pets / "cat" / "0.png", seed=999, size=(13, 13))
    assert prepared(pets, tmp_path).fingerprint != before.fingerprint


def test_duplicates_of_held_out_images_are_counted(pets, tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "same" / name).mkdir(parents=True)
        (tmp_path / "same" / name / "a.png").write_bytes((pets / name / "0.png").read_bytes())
    data = prepared(pets, tmp_path, eval_dataset=str(tmp_path / "same"))
    assert data.statistics.heldout_duplicates == 2
    assert prepared(pets, tmp_path).statistics.heldout_duplicates == 0


# -- rows --------------------------------------------------------------------------------------------------------------


def test_rows_and_batches(pets, tmp_path):
    rows = prepared(pets, tmp_path).train
    batch = collate_images([rows[0], rows[11]])
    assert batch["pixel_values"].dtype == torch.uint8 and batch["pixel_values"].shape == (2, 3, 16, 16)
    assert batch["labels"].tolist() == [0, 1] and batch["labels"].dtype == torch.int64


def test_pixels_are_not_sent_to_workers(pets, tmp_path):
    rows = prepared(pets, tmp_path).train
    first = rows[0]["pixel_values"].copy()
    sent = pickle.dumps(rows)
    assert len(sent) < rows.pixels.nbytes and numpy.array_equal(pickle.loads(sent)[0]["pixel_values"], first)


def test_statistics_are_those_of_the_pixels(pets, tmp_path):
    rows = prepared(pets, tmp_path).train
    stack = numpy.stack([rows[k]["pixel_values"] for k in range(len(rows))]).transpose(1, 0, 2, 3).reshape(3, -1) / 255
    means, deviations = pixel_statistics(rows)
    assert means == pytest.approx(stack.mean(axis=1), abs=1e-4) and deviations == pytest.approx(
        stack.std(axis=1), abs=1e-4
    )


def test_one_colour_has_a_deviation_that_divides(tmp_path):
    numpy.zeros((2, 3, 4, 4), dtype=numpy.uint8).tofile(tmp_path / "pixels.u8")
    rows = ImageRows(tmp_path, (3, 4, 4), numpy.zeros(2, dtype=numpy.int64), numpy.arange(2))
    assert min(pixel_statistics(rows)[1]) > 0


def test_natural_size_skips_what_cannot_be_read(pets, tmp_path):
    truncate(pets / "cat" / "0.png")
    assert natural_size(find_images(DataSettings(dataset=str(pets)), ImageSettings(), tmp_path)) == 10


@pytest.mark.parametrize("name", ["cifar100", "uoft-cs/cifar100"])
def test_a_known_dataset_that_cannot_be_reached_is_not_called_unknown(name, tmp_path, monkeypatch):
    def unreachable(*given, **named):
        raise OSError("no connection")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match=f"dataset '{name}' could not be loaded from the Hub: no connection"):
        tables._load_from_hub(name, "train", DataSettings(dataset=name), tmp_path)


def test_the_name_of_a_column_is_refused_where_there_are_no_columns(pets, tmp_path):
    own = ImageSettings(image_column_name="picture")
    for name in (str(pets), "digits"):
        with pytest.raises(DataError, match=f"images of {name} are not in a table; drop image_column_name"):
            find_images(DataSettings(dataset=name), own, tmp_path)
    own = ImageSettings(image_column_name="picture")  # of a model that was trained on a table
    source = find_images(DataSettings(dataset=str(pets)), own, tmp_path, classes=("cat", "dog", "owl"))
    assert source.label_names == ("cat", "dog", "owl")


def test_the_help_names_every_column_that_is_read_as_classes():
    [help_of] = [one.metadata["help"] for one in fields(ImageSettings) if one.name == "label_column_name"]
    assert f"default: {', '.join(LABEL_COLUMNS)}, or" in help_of
