"""One tiny model, one file of documents, and the run that nobody interrupts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import tiny, warm
from tests.faults import campaign

SENTENCES = ["The cat sat on the mat and looked at the door.", "A list is a sequence that can be changed in place."]


@dataclass(frozen=True)
class Site:
    """``whole``: the finished run. ``changes``: for each of its changes on the disk the staging folder in which a
    checkpoint was being written then, or ""."""

    folder: Path
    model: Path
    documents: Path
    whole: Path
    changes: tuple[str, ...]

    @property
    def disk_steps(self) -> int:
        return len(self.changes)

    def inside(self, step: int) -> list[int]:
        """Numbers, from 1, of the changes in the middle of writing checkpoint-``step``: progress that is written by
        the clock moves them a little from run to run."""
        found = [number for number, name in enumerate(self.changes, 1) if name == f"staging-checkpoint-{step}"]
        return found[len(found) // 3 : 2 * len(found) // 3]

    def flags(self, run: Path, **more: object) -> list[str]:
        return campaign.flags(self.model, self.documents, run, self.folder / "cache", **more)


def make_site(folder: Path) -> Site:
    import peft  # noqa: F401
    import rich._emoji_codes  # noqa: F401
    import torch.utils.serialization  # noqa: F401
    import transformers.trainer  # noqa: F401

    import scu_trainer.cli.configuration
    import scu_trainer.cli.publishing.sharing
    import scu_trainer.cli.train
    import scu_trainer.train.retention.sampled
    import scu_trainer.train.session.session
    import scu_trainer.train.session.test_run
    import scu_trainer.train.tasks.text  # noqa: F401

    warm.make_what_is_kept()
    documents = folder / "documents.jsonl"
    rows = [{"text": f"{SENTENCES[i % 2]} Number {i}. " * (2 + i % 5)} for i in range(48)]
    documents.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, whole, count = tiny.saved_llama(folder / "model", layers=1), folder / "whole", folder / "count"
    words = campaign.flags(model, documents, whole, folder / "cache")

    def act() -> int:
        campaign.count_disk_steps(whole, count)
        return campaign.train(words)

    ended = campaign.Child(act, folder / "whole.log").wait()
    assert ended.code == 0, ended.said
    return Site(folder, model, documents, whole, tuple(count.read_text().splitlines()))


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Site:
    return make_site(tmp_path_factory.mktemp("site"))
