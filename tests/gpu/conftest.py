"""What every test on a card finds as the one before found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _products_are_rounded_as_before() -> Iterator[None]:
    """Commands set TF32 for the whole process, and other tests compare with float32."""
    before = torch.backends.fp32_precision
    yield
    torch.backends.fp32_precision = before
