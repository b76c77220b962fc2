"""``scu-trainer import``: converts a configuration of another program to one of ours, and accounts for every key."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from scu_trainer.cli.configuration import check_values_early
from scu_trainer.cli.configuration_file import read_file
from scu_trainer.cli.fields import parse_with_fields
from scu_trainer.cli.main import guarded
from scu_trainer.cli.names.known import known_names
from scu_trainer.cli.names.tools import TOOLS, Imported, import_configuration, tool_of
from scu_trainer.cli.names.translation import entries_of
from scu_trainer.cli.names.written import as_yaml, summary
from scu_trainer.cli.parsing import Parser, require_new_file
from scu_trainer.errors import SettingsError, did_you_mean
from scu_trainer.run_files import write_text

DESCRIPTION = """\
Reads a configuration of TRL, LLaMA-Factory, Axolotl or Unsloth and writes it as one of ours. For each key, the file
shows what it means here, that it needs no action, or that it has no counterpart. Flags of `scu-trainer train` override
the file. Nothing is trained."""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="scu-trainer import", description=DESCRIPTION, usage="%(prog)s OTHER.yaml [--from TOOL] [--output FILE]"
    )
    parser.add_argument("file", type=Path, help="YAML or JSON file of the other program")
    parser.add_argument("--from", dest="tool", metavar="TOOL", help=f"{', '.join(TOOLS)}; default: found from its keys")
    parser.add_argument("--output", type=Path, help="file to write; default: NAME.scu.yaml in this folder")
    return parser


@guarded
def main(argv: list[str]) -> int:
    options, flags = parse_with_fields(_parser(), argv)
    output = options.output or Path(f"{options.file.stem}.scu.yaml")
    require_new_file(output, "--output")
    converted, overrides = read_other(options.file, options.tool, flags)
    write_text(output, as_yaml(converted, overrides, options.file))
    print(summary(converted, overrides, options.file, output))
    return 0


def read_other(path: Path, tool: Optional[str], flags: Sequence[str] = ()) -> tuple[Imported, dict[str, Any]]:
    """Return the converted file, and the settings that flags override. Raises SettingsError."""
    known = known_names()
    if tool is not None and tool not in TOOLS:
        raise SettingsError(f"--from {tool} is unknown{did_you_mean(tool, TOOLS)}; known: {', '.join(TOOLS)}")
    overrides = entries_of(flags, known)
    try:
        entries = read_file(path)
        tool = tool or tool_of(entries, known)
        if tool is None:
            raise SettingsError(
                f"no key shows whether it is for {_tool_titles()}; if it is, name the program with --from "
                f"{'|'.join(TOOLS)}. Files of other programs are not read: write their settings with our names, which "
                "scu-trainer train --print_config lists"
            )
        converted = import_configuration(tool, entries, known, path.parent, typed=overrides)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}" if str(path) not in str(error) else str(error)) from error
    check_values_early({**converted.settings, **overrides})
    return converted, overrides


def _tool_titles() -> str:
    titles = [tool.TITLE for tool in TOOLS.values()]
    return f"{', '.join(titles[:-1])} or {titles[-1]}"
