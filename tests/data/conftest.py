"""The embedded tokenizer, made once, and shortcuts to prepare small files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scu_trainer.data import default_cache_dir, embedded_tokenizer, prepare
from scu_trainer.data.text.encode import Encoder
from scu_trainer.settings import DataSettings


@pytest.fixture(scope="session")
def embedded_cache() -> Path:
    """That of all tests of this process: what another one has extracted is there."""
    return default_cache_dir(None)


@pytest.fixture(scope="session")
def tokenizer(embedded_cache):
    return embedded_tokenizer(embedded_cache)


@pytest.fixture
def prepared(tmp_path, tokenizer):
    """``prepared(path, **settings)`` -> PreparedData, with a cache of the test's own."""

    def run(dataset, seed=0, **settings):
        settings = DataSettings(dataset=str(dataset), **{"block_size": 32, **settings})
        return prepare(settings, tokenizer, seed=seed, cache_dir=tmp_path / "cache", model_name="tiny")

    return run


@pytest.fixture
def jsonl(tmp_path):
    """``jsonl(rows)`` -> path of a file; a row that is a str is written as it is."""

    def write(rows, name="rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def encoder(tokenizer):
    """``encoder(**settings)`` with the embedded tokenizer, or with ``tokenizer=`` another one."""

    def make(tokenizer=tokenizer, **settings) -> Encoder:
        return Encoder(DataSettings(**settings), tokenizer, "tiny")

    return make
