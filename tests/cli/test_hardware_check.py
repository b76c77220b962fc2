"""``hardware check`` and ``train --check_requirements``: the same words and exit code for the same recipe."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest
import torch
from transformers.utils.import_utils import enable_tf32

from scu_trainer.cli import configuration, train
from scu_trainer.cli.machine import hardware
from scu_trainer.hardware import requirements
from tests.test_project import ROOT


def answers(capsys, *words):
    """(exit code, stdout, stderr) of both commands, which must be equal."""
    found = []
    for main, first in ((hardware.main, "check"), (train.main, "--check_requirements")):
        code = main([first, *map(str, words), "--use_cpu", "true"])
        printed = capsys.readouterr()
        free = re.sub(r"[\d.]+ GiB free", "some GiB free", printed.out)  # changes from one moment to the next
        found.append((code, free, printed.err.replace(first, "")))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["--config", ROOT / "recipes" / "qlora.yaml"], 0, "ok [qlora]"),
        (["--config", ROOT / "recipes" / "resnet.yaml"], 0, "needed by task:"),
        (["--config", ROOT / "recipes" / "resnet.yaml", "--preset", "gpu"], 2, "FIX device"),
        (["--report_to", "wandb"], 2, "FIX wandb"),
        (["--report_to", "wnadb"], 2, "FIX report_to wnadb"),
        (["--fp16", "true"], 2, "FIX device"),
        (["--model_name_or_path", "./nowhere"], 2, "FIX model"),
        (["--model_name_or_path", "some/model"], 0, "ok model"),
        (["--optim", "paged_adamw_8bit"], 2, "FIX optim"),
        ([], 0, "ok torch"),
    ],
    ids=str,
)
def test_both_commands_give_one_answer(capsys, words, code, line, monkeypatch):
    real = requirements.installed_version
    monkeypatch.setattr(
        "scu_trainer.hardware.probe.installed_version", lambda name: None if name == "wandb" else real(name)
    )
    found, printed, error = answers(capsys, *words)
    assert (found, error) == (code, "")
    assert any(line in " ".join(row.split()) for row in printed.splitlines()), printed


def test_a_recipe_that_contradicts_itself_is_told_so_after_the_table(capsys):
    code, printed, error = answers(capsys, "--streaming", "true")
    assert code == 2 and "torch" in printed and "give max_steps" in error


def test_an_unknown_name_is_one_line(capsys):
    code, printed, error = answers(capsys, "--lora_rr", "8")
    assert (code, printed) == (2, "") and "did you mean '--lora_r'" in error


def test_what_a_recipe_switches_for_its_training_is_as_before(monkeypatch, capsys):
    before, read = torch.backends.fp32_precision, configuration.read_values
    monkeypatch.setattr(configuration, "read_values", lambda *given: enable_tf32(True) or read(*given))  # as on a card
    assert hardware.main(["check", "--use_cpu", "true"]) == 0 and torch.backends.fp32_precision == before


def test_without_transformers_that_is_what_is_said(capsys, monkeypatch):
    real, version = importlib.util.find_spec, requirements.installed_version
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else real(name))
    hide = lambda name: None if name == "transformers" else version(name)  # noqa: E731
    monkeypatch.setattr("scu_trainer.hardware.probe.installed_version", hide)
    monkeypatch.setattr(configuration, "read_values", None)  # it would import transformers
    monkeypatch.setitem(sys.modules, "transformers.utils", None)  # as where it is not installed
    code, printed, _ = answers(capsys, "--config", ROOT / "recipes" / "qlora.yaml")
    assert code == 2 and "FIX  transformers" in printed
