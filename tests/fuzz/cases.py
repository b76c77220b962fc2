"""The kinds of bad input. A kind and a seed make one case, the same every time."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.command_cases import commands
from tests.fuzz.data_cases import data_path, long_names, odd_names, output_dir, rows
from tests.fuzz.field_cases import fields, pictures, recordings
from tests.fuzz.model_cases import model_config
from tests.fuzz.settings_cases import config_file, numbers
from tests.fuzz.site import Site


def mixed(chance: random.Random, folder: Path, site: Site) -> list[str]:
    """The flags of two trainings of other kinds in one command."""
    first = chance.choice([data_path, rows, output_dir])(chance, folder, site)
    return [*first, *chance.choice([numbers, long_names])(chance, folder, site)[1:]]


Make = Callable[[random.Random, Path, Site], list[str]]
KINDS: dict[str, Make] = {
    "data paths": data_path,
    "rows": rows,
    "long names": long_names,
    "odd names": odd_names,
    "output_dir": output_dir,
    "numbers": numbers,
    "configuration files": config_file,
    "models": model_config,
    "words in any field": fields,
    "pictures": pictures,
    "recordings": recordings,
    "other commands": commands,
    "mixed": mixed,
}


def make_case(kind: str, seed: str, folder: Path, site: Site) -> list[str]:
    """Words of a command; its files lie in ``folder``, which must be there and empty."""
    return KINDS[kind](random.Random(f"{seed} {kind}"), folder, site)
