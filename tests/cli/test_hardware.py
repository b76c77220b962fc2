"""``scu-trainer hardware`` and ``launch``: what a person reads, and the exit codes of what is lacking."""

from __future__ import annotations

import os
import sys

import pytest

from scu_trainer.cli import launch
from scu_trainer.cli.machine import hardware
from scu_trainer.hardware.probe import Accelerator
from scu_trainer.hardware.watching import monitor

CARD = Accelerator("cuda", 0, "Card", 24 * 2**30, 20 * 2**30)


def test_no_gpu_is_one_line_and_2(monkeypatch, capsys):
    monkeypatch.setattr(hardware, "accelerators", lambda: ())
    assert hardware.main(["check", "--gpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no GPU that torch can use: torch ") and line.endswith("train --use_cpu true")


def test_the_monitor_ends_by_itself_with_a_line_per_reading(monkeypatch, capsys):
    monkeypatch.setattr(monitor, "accelerators", lambda: (CARD,))
    assert hardware.main(["monitor", "--duration", "0.02", "--interval", "0.01"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines and all("RAM " in line and "cuda:0 Card 4.00 GiB of 24.00 GiB" in line for line in lines)


@pytest.mark.parametrize(
    "arguments",
    [
        ["monitor", "--interval", "0"],
        ["monitor", "--duration", "-1"],
        ["look"],
        [],
        ["profile", "x"],
        ["monitor", "--cvs", "x"],
        ["optimize", "--dry_run", "--runs", "rnus"],
    ],
)
def test_wrong_words_end_with_2(capsys, arguments):
    assert hardware.main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_launch_prints_the_command_and_becomes_it(monkeypatch, capsys):
    became = []
    monkeypatch.setattr(os, "execve", lambda *words: became.append(words))
    monkeypatch.setattr(launch, "accelerators", lambda: ())
    launch.main(["deepspeed", "--processes", "", "--config", "recipes/deepspeed.yaml"])
    ((program, words, environment),) = became
    assert program == words[0] and program == sys.executable
    assert words[-4:] == ["--config", "recipes/deepspeed.yaml", "--use_cpu", "true"]
    assert environment["DS_ACCELERATOR"] == "cpu"
    shown = capsys.readouterr().out.strip()
    assert shown.startswith("DS_ACCELERATOR=cpu python") and " -m deepspeed.launcher.launch --world_info=" in shown
    assert "scripts/train.py --config" in shown


def test_launch_on_gpus_starts_one_process_each(monkeypatch, capsys):
    became = []
    monkeypatch.setattr(os, "execve", lambda *words: became.append(words))
    monkeypatch.setattr(launch, "accelerators", lambda: (CARD, CARD))
    launch.main(["torchrun", "--config", "recipes/scu_lora.yaml"])
    assert became[0][1][2:4] == ["--nproc_per_node", "2"] and "--use_cpu" not in became[0][1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["deepsped"], "invalid choice: 'deepsped'"),
        (["deepsped"], "(did you mean 'deepspeed'?)"),
        (["deepspeed", "--processes", "0"], "'0' is not a number of processes"),
        (["torchrun", "--config", "x.yaml"], "cannot read the configuration x.yaml"),
        (["accelerate", "--max_stps", "3"], "unknown option --max_stps (did you mean '--max_steps'?)"),
        (["deepspeed", "--processes", "3"], "3 processes were requested, but the number of GPUs is 1"),
    ],
)
def test_launch_mistakes(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(launch, "accelerators", lambda: (CARD,))
    monkeypatch.setattr(os, "execve", lambda *words: None)
    assert launch.main(arguments) == 2
    assert words in capsys.readouterr().err


def test_scripts_are_the_commands():
    from tests.test_project import ROOT

    for name, module in (("hardware", "machine.hardware"), ("variants", "variants")):
        assert f"from scu_trainer.cli.{module} import main" in (ROOT / "scripts" / f"{name}.py").read_text()
