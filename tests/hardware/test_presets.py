"""Machines by name: the data files, and how tolerantly they are found."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
from setuptools import find_packages

from scu_trainer.errors import SettingsError
from scu_trainer.hardware import presets as subject
from scu_trainer.hardware.presets import OTHER_CARDS, find, known_tflops, parse_bytes, presets

ROOT = Path(__file__).parents[2]
GIB = 2**30
NAMES = [
    "CPU-only",
    "RTX 3050 4GB",
    "RTX 3080 10GB",
    "T4 16GB",
    "RTX 3090 24GB",
    "RTX 4090 24GB",
    "A100 40GB",
    "A100 80GB",
    "H100 80GB",
    "H200 141GB",
]


def test_every_machine_is_there_and_says_where_its_figures_are_from():
    assert [preset.name for preset in presets()] == NAMES
    assert all(len(preset.source) > 40 for preset in presets())


@pytest.mark.parametrize("preset", presets(), ids=lambda preset: preset.name)
def test_the_figures_agree_with_each_other(preset):
    on_gpu = preset.device == "cuda"
    assert on_gpu == (preset.memory_bytes > 0) == (preset.compute_capability is not None)
    assert on_gpu == (preset.driver_name is not None)
    assert preset.ram_bytes >= 8 * GIB
    formats = {"fp32"} | {name for name in ("bf16", "fp16") if getattr(preset, name)} | ({"tf32"} & {*preset.tflops})
    assert {*preset.tflops} == formats
    assert preset.tflops == dict(sorted(preset.tflops.items(), key=lambda item: -item[1])), "fewer bits are no slower"
    if on_gpu:
        assert f"{preset.memory_bytes // GIB}GB" in preset.name
        assert preset.bf16 == (float(preset.compute_capability) >= 8)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *[(name, name) for name in NAMES],
        ("rtx3050", "RTX 3050 4GB"),
        ("RTX 3050", "RTX 3050 4GB"),
        ("3050", "RTX 3050 4GB"),
        ("rtx_3050_4gb", "RTX 3050 4GB"),
        ("rtx-3080", "RTX 3080 10GB"),
        ("NVIDIA GeForce RTX 3050 Laptop GPU", "RTX 3050 4GB"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090 24GB"),
        ("4090 24 GiB", "RTX 4090 24GB"),
        ("t4", "T4 16GB"),
        ("Tesla T4", "T4 16GB"),
        ("a100-80", "A100 80GB"),
        ("A100 40 GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("h200", "H200 141GB"),
        ("cpu", "CPU-only"),
        ("CPU only", "CPU-only"),
    ],
)
def test_a_machine_is_found_by_what_people_write(text, name):
    assert find(text).name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A100", "machine 'A100' can be A100 40GB or A100 80GB; name one of them"),
        ("80GB", "can be A100 80GB or H100 80GB"),
        ("RTX 3080 Ti", "did you mean 'RTX 3080 10GB'"),
        ("RTX 3050 8GB", "did you mean 'RTX 3050 4GB'"),
        ("NVIDIA GeForce RTX 3050 6GB Laptop GPU", "no machine is called"),
        ("NVIDIA H100 PCIe", "known: CPU-only, RTX 3050 4GB"),
        ("NVIDIA GH200 480GB", "no machine is called"),
        ("", "no machine is called ''"),
        ("rtx", "no machine is called 'rtx'"),
        ("V100 16GB", "for another GPU, name the most similar one, and give the free memory of yours as --limit"),
    ],
)
def test_what_names_no_machine_or_several_is_refused(text, message):
    with pytest.raises(SettingsError, match=message.replace("(", r"\(")):
        find(text)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("16GB", 16e9),
        ("16GiB", 16 * GIB),
        ("16", 16 * GIB),
        (" 1.5 ", 1.5 * GIB),
        ("900MiB", 900 * 2**20),
        (4, 4 * GIB),
    ],
)
def test_sizes_are_read(text, size_bytes):
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "x", "-3", "16TB", "nan"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(SettingsError, match="allowed: GiB such as"):
        parse_bytes(text)


def test_a_peak_stands_in_one_place_only():
    names = ["Tesla T4", "NVIDIA A100-SXM4-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    names += [f"NVIDIA GeForce RTX {card}" for card in ("3050 Laptop GPU", "3080", "3090", "4090")]
    assert [[preset.is_called(name) for preset in presets()].count(True) for name in names] == [1] * 9
    assert not [(pattern, name) for pattern in OTHER_CARDS for name in names if re.search(pattern, name)]
    assert known_tflops("NVIDIA GeForce RTX 4090", "bf16") == find("rtx4090").tflops["bf16"] == 165.2
    assert known_tflops("NVIDIA GeForce RTX 3090 Ti", "bf16") is None
    assert known_tflops("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16") is None


def test_the_files_are_part_of_the_package():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    patterns = setup["options.package_data"]["scu_trainer.hardware"].split()
    packaged = {path for pattern in patterns for path in (ROOT / "scu_trainer" / "hardware").glob(pattern)}
    assert packaged == {path for path in subject.FOLDER.iterdir()}
    assert "scu_trainer.hardware" in find_packages(str(ROOT))
