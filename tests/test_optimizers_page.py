"""docs/optimizers.md says of each optimizer what the code does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

WRITER = Path(__file__).parents[1] / "docs" / "write_optimizers.py"


@pytest.mark.filterwarnings("ignore")
def test_the_table_is_that_of_the_code():
    for package in ("bitsandbytes", "torchao", "schedulefree", "galore_torch", "apollo_torch"):
        pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location("write_optimizers", WRITER)
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    page = writer.PAGE.read_text()
    assert writer.written(page, {"optimizers": writer.table()}) == page, "run: python docs/write_optimizers.py"
    assert page.count("\n| `") > 40
