"""A stranger with a file in Alpaca's format, who has read nothing but the README, types its commands."""

from __future__ import annotations

import io
import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scu_trainer.cli.main import main
from scu_trainer.train.fixtures import base_model
from tests import processes
from tests.test_doc_blocks import BLOCK

ROOT = Path(__file__).parents[1]
SHORT = ["--embedded_base_steps", "2", "--max_steps", "4", "--block_size", "64", "--eval_strategy", "no"]
SHORT += ["--sample_prompts", "0", "--predict_memory", "false"]
ROWS = [{"instruction": f"What is {i} plus {i}?", "input": "", "output": f"{2 * i}."} for i in range(40)]


@pytest.fixture(scope="module")
def typed() -> list[list[str]]:
    (block,) = [b[3] for b in BLOCK.finditer((ROOT / "README.md").read_text()) if "\nscu-trainer train " in b[3]]
    return [shlex.split(line, comments=True) for line in block.splitlines()]


@pytest.fixture
def base_forks(monkeypatch):
    """The process that makes the embedded base is a fork; tests/serve/test_serve.py starts it from nothing."""

    def run(command, env, check) -> None:
        assert command[0] == sys.executable and check
        done = processes.launch(command[1:], environment=env)
        assert done.returncode == 0, done.stderr

    monkeypatch.setattr(base_model, "subprocess", SimpleNamespace(run=run))


def test_first_fine_tune_and_chat_take_four_commands_at_most(typed):
    words = [command[:2] for command in typed]
    assert words[0] == ["pip", "install"]  # tests/test_wheel.py does it
    assert words.index(["scu-trainer", "chat"]) + 1 <= 4


def test_the_commands_train_answer_and_show_what_would_be_shared(typed, base_forks, tmp_path, monkeypatch, capsys):
    """With the model that is made here, since the one of the README is a download."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 2 plus 2?\n"))
    said = []
    for program, *words in typed[1:]:
        assert program == "scu-trainer"
        if words[0] == "train":
            model = words.index("--model_name_or_path")
            words = [*words[:model], *words[model + 2 :], "--use_cpu", "true", *SHORT]
        words += ["--max_new_tokens", "4"] if words[0] == "chat" else []
        words += ["--merged"] if words[0] == "push" else []  # that model is on no Hub
        assert main(words) == 0
        said.append(capsys.readouterr().out)
    train, chat, push = said
    assert "trained 4 steps" in train and "scu-trainer chat runs/mine --against base" in train
    assert chat.strip()
    assert "nothing was sent" in push and "model.safetensors" in push
