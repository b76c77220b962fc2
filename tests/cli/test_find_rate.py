"""``scu-trainer plan --find_lr``: what it advises of a tiny job, that it leaves nothing behind, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from scu_trainer.cli.configuration import read_job
from scu_trainer.cli.planning import plan
from scu_trainer.control import rate_search
from scu_trainer.train.session.find_rate import RateTrials
from tests import tiny

SENTENCES = ["The cat sat on the mat and looked at the door.", "A list is a sequence that can be changed in place."]


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("find_rate")
    rows = [{"text": f"{SENTENCES[i % 2]} Number {i}."} for i in range(40)]
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = {"model_name_or_path": tiny.saved_llama(folder / "model"), "dataset": folder / "documents.jsonl"}
    words |= {"cache_dir": folder / "cache", "output_dir": folder / "run", "use_cpu": "true", "block_size": 32}
    words |= {"per_device_train_batch_size": 2, "packing": "false", "validation_split_percentage": 20}
    words |= {"max_steps": 32, "learning_rate": 1e-3, "tuning": "full", "mixed_precision": "no"}
    return [word for name, value in words.items() for word in (f"--{name}", str(value))]


def test_rates_are_tried_and_one_is_advised_and_nothing_is_left(flags, capsys, monkeypatch):
    monkeypatch.setattr(rate_search, "MOST_TRIALS", 3)
    assert plan.main(["--find_lr", "--json", *flags]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert [row["steps"] for row in report["tried"]] == [8, 8, 8, 16, 16, 16]
    last = {row["learning_rate"]: row["held_out_bits"] for row in report["tried"] if row["steps"] == 16}
    assert report["learning_rate"] == min(last, key=last.get)
    assert report["lowest"] <= report["learning_rate"] <= report["highest"]
    assert (report["steps_of_training"], report["share_of_training"]) == (32, 2.25)
    assert "usually 5 of 8 and 3 of 16 steps" in printed.err and "the whole training takes 32" in printed.err
    assert not Path(flags[flags.index("--output_dir") + 1]).exists()


def test_every_training_begins_with_the_same_weights(flags):
    job = read_job(None, flags)
    parts = job.kind.load(job, Console(quiet=True))
    before = tiny.weights_of(parts.model)
    trials = RateTrials(job, parts)
    first, other, again = trials.trained(1e-3, 4), trials.trained(1e-2, 4), trials.trained(1e-3, 4)
    assert tiny.same(before, tiny.weights_of(parts.model))
    assert all(weight.grad is None for weight in parts.model.parameters())
    assert np.array_equal(first.nats, again.nats) and not np.array_equal(first.nats, other.nats)


def test_a_training_that_breaks_has_no_scores_and_leaves_the_weights(flags):
    job = read_job(None, flags)
    parts = job.kind.load(job, Console(quiet=True))
    before = tiny.weights_of(parts.model)
    assert RateTrials(job, parts).trained(1e30, 4) is None
    assert tiny.same(before, tiny.weights_of(parts.model))
    assert all(torch.isfinite(weight).all() for weight in parts.model.parameters())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max_steps", "20"], "20 are too few; 32 or more"),
        (["--validation_split_percentage", "0"], "and there are 0; give eval_dataset"),
        (["--lr_scheduler_type", "constant", "--lr_step_size", "2"], "counted in epochs"),
        (["--learning_rate", "0"], "learning_rate is 0.0"),
        (["--gpu", "3090"], "--gpu is of a memory plan"),
    ],
)
def test_what_cannot_be_searched_is_refused(flags, capsys, words, said):
    assert plan.main(["--find_lr", *flags, *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_several_processes_and_deepspeed_are_refused(flags, monkeypatch):
    from scu_trainer.errors import RequirementError
    from scu_trainer.train.session import find_rate

    job = read_job(None, flags)
    monkeypatch.setattr(find_rate, "uses_deepspeed", lambda training: True)
    with pytest.raises(RequirementError, match="once in a process"):
        find_rate.refuse(job)
    monkeypatch.setattr(type(job.training), "world_size", property(lambda training: 2))
    with pytest.raises(RequirementError, match="the launcher started 2"):
        find_rate.refuse(job)
