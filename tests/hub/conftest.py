from __future__ import annotations

from types import SimpleNamespace

import pytest

from scu_trainer.cli.publishing import merge
from tests.hub.runs import train


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> SimpleNamespace:
    """A LoRA run on a tiny model in a folder, and its merged weights in several files. For reading alone."""
    folder = tmp_path_factory.mktemp("finished")
    run = train(folder, "run")
    assert merge.main([str(run), "--max_shard_size", "300KB"]) == 0
    return SimpleNamespace(folder=folder, run=run, merged=folder / "run-merged")
