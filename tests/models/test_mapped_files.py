"""Pages of weight files are given back, and read again where they are still used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scu_trainer.models.loading.mapped_files import release_mapped_files


def mapped_resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[2]) * 4096


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no such advice")
def test_pages_are_given_back_and_no_weight_changes(tmp_path):
    weights = {"w": torch.arange(8 * 2**20, dtype=torch.float32)}
    save_file(weights, tmp_path / "model.safetensors")
    mapped = load_file(tmp_path / "model.safetensors")
    assert torch.equal(mapped["w"], weights["w"])  # reads every page
    before = mapped_resident_bytes()
    assert release_mapped_files() >= weights["w"].nbytes
    assert before - mapped_resident_bytes() > 0.9 * weights["w"].nbytes
    assert torch.equal(mapped["w"], weights["w"])
