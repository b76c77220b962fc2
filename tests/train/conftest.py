"""Every training ends in a full garbage collection, which walks over all that imports have left behind: 0.3 s each."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def _imports_are_not_garbage():
    import peft  # noqa: F401
    import transformers.trainer  # noqa: F401

    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
