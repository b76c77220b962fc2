"""``scu-trainer launch LAUNCHER ...``: prints the launcher's own command for training on this machine, and runs it."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, Optional

from scu_trainer.cli.configuration import check_early
from scu_trainer.cli.fields import check_known
from scu_trainer.cli.main import guarded
from scu_trainer.cli.parsing import Parser
from scu_trainer.cli.train import mode_parser
from scu_trainer.hardware.probe import accelerators
from scu_trainer.runs.launch import DEEPSPEED, command, environment, processes_here

DESCRIPTION = """\
Prints the command with which accelerate, deepspeed or torchrun trains on this machine, and runs it. Flags of
`scu-trainer train` follow."""

LAUNCHERS = ("accelerate", "deepspeed", "torchrun")


@guarded
def main(argv: list[str]) -> NoReturn:
    parser = Parser(
        prog="scu-trainer launch",
        description=DESCRIPTION,
        usage="scu-trainer launch LAUNCHER [--processes N] [--FIELD VALUE ...]",
    )
    parser.add_argument("launcher", choices=LAUNCHERS)
    parser.add_argument(
        "--processes",
        type=_count,
        metavar="N",
        help="default: one per GPU; without a GPU two for accelerate, otherwise one",
    )
    options, words = parser.parse_known_args(argv)
    train_parser = mode_parser()
    modes, flags = train_parser.parse_known_args(words)
    check_known(flags, [*parser._option_string_actions, *train_parser._option_string_actions])
    check_early(modes.config, flags)  # here, so that not every process reports the same error with a traceback
    gpus = sum(item.kind == "cuda" for item in accelerators())
    processes = processes_here(options.launcher, gpus, options.processes)
    if gpus == 0 and not any(word.split("=")[0] in ("--use_cpu", "--use-cpu") for word in words):
        words = [*words, "--use_cpu", "true"]
    line = command(options.launcher, words, processes, gpus > 0)
    print(_printed_command(line, gpus > 0), flush=True)
    os.execve(line[0], line, environment(processes, gpus > 0))  # it replaces this process and gets its signals


def _count(text: str) -> Optional[int]:
    """Return the number of processes; None for an empty word, which a Makefile passes for an unset variable."""
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes; give 1 or more")
    return int(text)


def _printed_command(line: Sequence[str], has_gpu: bool) -> str:
    current_folder, tools = Path.cwd(), Path(sys.executable).parent
    words = [_short_path(word, tools, current_folder) for word in line]
    return ("" if has_gpu else "DS_ACCELERATOR=cpu " if DEEPSPEED in line else "") + shlex.join(words)


def _short_path(word: str, tools: Path, folder: Path) -> str:
    path = Path(word)
    if path.is_absolute() and path.parent == tools:
        return path.name
    return str(path.relative_to(folder)) if path.is_absolute() and path.is_relative_to(folder) else word
