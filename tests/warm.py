"""What libraries find out again in every process, found out once: before it forks, or before its tests begin."""

from __future__ import annotations

import sys
from typing import Any, Optional

ALWAYS_THERE_OR_NEVER = ("deepspeed", "lomo_optim", "peft", "torchdata")
"""Packages that no test takes away from Accelerate, or gives to it."""


def look_up_packages_once() -> None:
    """Accelerate reads the metadata of DeepSpeed whenever it unwraps a model and looks through all folders for LOMO at
    every step, which was a fiftieth of the time of trainings in tests."""
    imports = sys.modules.get("accelerate.utils.imports")
    if imports is None or hasattr(imports._is_package_available, "found"):
        return
    look_up = imports._is_package_available
    found: dict[str, Any] = {}

    def look_up_once(name: str, metadata_name: Optional[str] = None) -> Any:
        if name not in ALWAYS_THERE_OR_NEVER:
            return look_up(name, metadata_name)
        if name not in found:
            found[name] = look_up(name, metadata_name)
        return found[name]

    look_up_once.found = found
    imports._is_package_available = look_up_once


def make_what_is_kept() -> None:
    """What the first model that is loaded and the first command line that is read make, and the next ones find."""
    from transformers import TrainingArguments
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from scu_trainer.cli.configuration import our_parser
    from scu_trainer.cli.names.known import known_names, stock_names

    get_checkpoint_conversion_mapping("llama")
    known_names(), stock_names()
    our_parser(TrainingArguments)
    look_up_packages_once()
