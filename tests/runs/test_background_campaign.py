"""Real detached runs of a tiny model, stopped, killed and resumed at random: no orphan, no wrong status, nothing lost.

benchmarks/loops/runs_campaign.py does a hundred cycles of the same.
"""

from __future__ import annotations

import random

import pytest

from tests import tiny
from tests.runs import background


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> str:
    import peft  # noqa: F401
    import transformers.trainer  # noqa: F401

    import scu_trainer.train.session.session  # noqa: F401

    folder = tmp_path_factory.mktemp("site")
    documents = background.write_documents(folder / "documents.jsonl")
    model = tiny.saved_llama(folder / "model", layers=1)
    return background.configuration(model, documents, folder / "cache", eval_strategy="no", save_steps=2, max_steps=8)


def test_a_few_cycles(config, tmp_path, monkeypatch):
    monkeypatch.setenv("SCU_TRAINER_CACHE", str(tmp_path / "cache"))
    campaign = background.Campaign(tmp_path / "runs", config, random.Random(4), longest_s=0.8)
    try:
        campaign.kill_at_once()
        for _ in range(2):
            campaign.cycle()
        names = campaign.finish()
    finally:
        campaign.end_all()
    assert campaign.found.wrong == []
    assert names and campaign.found.events["resume"], campaign.found
    assert campaign.found.looks >= 6
