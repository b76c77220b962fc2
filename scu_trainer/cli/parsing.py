"""An argument parser whose mistakes are one line and exit code 2, as everywhere in this project."""

from __future__ import annotations

import argparse
from typing import NoReturn

from scu_trainer.errors import SettingsError


class Parser(argparse.ArgumentParser):
    """No abbreviations; raises SettingsError instead of printing its usage and leaving."""

    def __init__(self, **options) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)
