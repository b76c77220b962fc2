"""The command of evaluation as its tests type it."""

from __future__ import annotations

import json

import pytest

from scu_trainer.cli.evaluation import eval as command


@pytest.fixture
def evaluate(capsys):
    """``evaluate(words...)`` -> the JSON object; asserts that nothing else was printed."""

    def run(*words) -> dict:
        capsys.readouterr()
        assert command.main([*map(str, words), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def refused(capsys):
    """``refused(words...)`` -> the one line of an error that the user can fix."""

    def run(*words) -> str:
        capsys.readouterr()
        assert command.main(list(map(str, words))) == 2
        printed = capsys.readouterr()
        lines = printed.err.strip().splitlines()
        assert printed.out == "" and "Traceback" not in printed.err
        assert len([line for line in lines if line.startswith("error: ")]) == 1 and lines[-1].startswith("error: ")
        return lines[-1].removeprefix("error: ")

    return run
