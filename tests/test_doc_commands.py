"""The trainings that README and docs show are read as the command reads them: every field, and what contradicts what.

``--print_config`` is added, which ends before data are loaded. What trains for real: those on text
(tests/test_doc_lines.py), the README's own commands (tests/test_stranger.py), the tutorials (tests/test_examples.py),
recipes (tests/cli/test_recipes.py).
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
import yaml

from scu_trainer.cli import main as command
from tests.test_doc_blocks import ROOT, commands

TRAININGS = [
    (page, words[len(start) :])
    for page, words in commands("scu-trainer")
    for start in (["train"], ["runs", "start"])
    if words[: len(start)] == start
]
DETACHED = {"--name": 2}
"""Flags of ``runs start`` alone, and their words."""

ALONE = {"--check_requirements", "--test_run", "--print_config"}
"""Flags of ``train`` that do something else than training, with or without fields."""


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with the files that the pages take for the reader's."""
    monkeypatch.chdir(tmp_path)
    for folder in ("recipes", "ds_configs", "accelerate_configs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for name in ("my", "text", "general"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": "A row of text."}) + "\n")
    (tmp_path / "my.csv").write_text("text,topic\nA row of text.,one\n")
    (tmp_path / "my.yaml").write_text(yaml.safe_dump({"dataset": "my.jsonl", "output_dir": "runs/mine"}))
    return tmp_path


def test_there_are_trainings_to_read():
    assert len(TRAININGS) >= 30


@pytest.mark.parametrize(("page", "words"), TRAININGS, ids=[f"{page}-{n}" for n, (page, _) in enumerate(TRAININGS)])
def test_a_training_is_read(page, words, place):
    kept = list(words)
    for flag, count in DETACHED.items():
        if flag in kept:
            del kept[kept.index(flag) : kept.index(flag) + count]
    kept = [word for word in kept if word not in ALONE]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = command.main(["train", *kept, "--use_cpu", "true", "--print_config"])
    assert code == 0, printed.getvalue()
    assert yaml.safe_load(printed.getvalue())


def test_a_training_that_contradicts_itself_is_not_read(place, capsys):
    assert command.main(["train", "--config", "my.yaml", "--spike_threshold", "9", "--print_config"]) == 2
    assert "spike_threshold has an effect only with spike_guard: skip" in capsys.readouterr().err
