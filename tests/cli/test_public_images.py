"""Recipes for CIFAR and ImageNet on generated images of the same layout: columns, splits, folders, sizes."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import numpy
import pytest
from PIL import Image

from scu_trainer.cli import train

RECIPES = Path(__file__).parents[2] / "recipes"
LABELS = {"cifar10": {"label": 10}, "cifar100": {"fine_label": 100, "coarse_label": 20}}


def picture(number: int, width: int, height: int) -> Image.Image:
    return Image.fromarray(numpy.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=numpy.uint8))


@pytest.fixture
def cifar(tmp_path):
    """As the Hub has it: pictures of 32 x 32 in ``img``, splits train and test."""

    def made(name: str, rows: int = 100) -> Path:
        def split(first: int, count: int) -> datasets.Dataset:
            columns = {"img": [picture(first + row, 32, 32) for row in range(count)]}
            columns |= {label: [row % classes for row in range(count)] for label, classes in LABELS[name].items()}
            features = {
                "img": datasets.Image(),
                **{one: datasets.ClassLabel(many) for one, many in LABELS[name].items()},
            }
            return datasets.Dataset.from_dict(columns, features=datasets.Features(features))

        both = datasets.DatasetDict({"train": split(0, rows), "test": split(rows, 20)})
        both.save_to_disk(tmp_path / name)
        return tmp_path / name

    return made


@pytest.fixture
def imagenet(tmp_path):
    """Folders of JPEG files of several sizes, a grey one among them."""
    for split, count in (("train", 8), ("val", 4)):
        for wnid in ("n01440764", "n01443537", "n01484850"):
            folder = tmp_path / "imagenet" / split / wnid
            folder.mkdir(parents=True)
            for row in range(count):
                shown = picture(row, 60 + 11 * row, 90)
                (shown.convert("L") if row == 3 else shown).save(folder / f"{wnid}_{row}.JPEG")
    return tmp_path / "imagenet"


def run(recipe: str, dataset: Path, folder: Path, **changes) -> dict:
    flags = {
        "dataset": dataset,
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "predict_memory": "false",
        "use_cpu": "true",
        "output_dir": folder,
    }
    words = [word for name, value in {**flags, **changes}.items() for word in (f"--{name}", str(value))]
    assert train.main(["--config", str(RECIPES / recipe), *words]) == 0
    assert json.loads((folder / "run.json").read_text())["step"] == 2
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(("name", "architecture"), [("cifar10", "resnet50"), ("cifar100", "efficientnet_b0")])
def test_cifar(cifar, tmp_path, name, architecture):
    config = run("cifar10.yaml", cifar(name), tmp_path / "run", architecture=architecture)
    assert len(config["id2label"]) == LABELS[name].get("label", 100), "of cifar100 the fine classes"


def test_a_folder_in_the_layout_of_imagenet(imagenet, tmp_path):
    config = run("imagenet.yaml", imagenet, tmp_path / "run", image_size=64)
    assert list(config["id2label"].values()) == ["n01440764", "n01443537", "n01484850"]
