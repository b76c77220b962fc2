"""Can a model be what its config.json says? Asked before anything is built: a slip of the pen takes the whole machine.

Counts of layers and experts are looked at in the file itself, for a library would begin to make them one by one. What
the weights take is counted on the meta device, where they take nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scu_trainer.errors import ModelError
from scu_trainer.run_files import read_regular, readable

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MOST_PARTS = 4096
"""Layers, experts or blocks of a model; the largest that are known have a few hundred."""

MOST = 2**53
"""Of any other number; beyond, libraries compute with something else."""

MOST_FILE_BYTES = 2**24

_PARTS = re.compile(r"layer|expert|block|depth|stage|branch")
_IS_NO_COUNT = re.compile(r"_(size|dim|id|index|freq|eps|every|interval|period)s?$")
WEIGHTS_PER_SIZE = 64
"""No layer of a model has more weights than so many squares of its largest size."""


def require_sane_config(config_file: Path, what: str = "model") -> dict[str, Any]:
    """The content of a config.json. Raises ModelError where it is no JSON object, or counts what nobody counts."""
    cannot = f"cannot load the {what} of {str(config_file.parent)!r}"
    try:
        config = json.loads(read_regular(config_file, MOST_FILE_BYTES))
    except OSError as error:
        raise ModelError(f"{cannot}: config.json: {error.strerror}; check the file") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{cannot}: config.json is not valid JSON: {error}; restore it, or download it again"
        ) from error
    if not isinstance(config, dict):
        found = type(config).__name__
        raise ModelError(f"{cannot}: config.json holds a {found}; it must be what save_pretrained wrote")
    for name, value in _numbers(config):
        most = MOST_PARTS if _PARTS.search(name) and not _IS_NO_COUNT.search(name) else MOST
        if abs(value) > most:
            raise ModelError(f"{config_file}: {name} is {_shown(value)}; it must be {most:,} or less, correct it")
    return config


def _numbers(config: Any) -> Iterator[tuple[str, int]]:
    """Whole numbers by name, at any depth."""
    level = [("", config)]
    while level:
        name, value = level.pop()
        if isinstance(value, dict):
            level += [(str(key), item) for key, item in value.items()]
        elif isinstance(value, list):
            level += [(name, item) for item in value]
        elif isinstance(value, int) and not isinstance(value, bool):
            yield name, value


def _shown(value: int) -> str:
    return f"{value:,}" if abs(value) < 10**18 else f"a number of {len(str(abs(value)))} digits"


def require_room_for(config: PretrainedConfig, name: str, bytes_per_weight: float, trust_remote_code: bool) -> None:
    """Raise ModelError where the weights of ``config`` alone are more than the memory of this machine."""
    from scu_trainer.models.quantize import skeleton_of

    there = _memory_bytes()
    if _highest_weights(config) * bytes_per_weight <= there:
        return
    weights = sum(weight.numel() for weight in skeleton_of(config, trust_remote_code).parameters())
    needed = weights * bytes_per_weight
    if needed > there:
        raise ModelError(
            f"{name}: by its config.json it has {weights:,} weights, which take {readable(needed)}, and this machine "
            f"has {readable(there)}; correct the sizes in it, or give device_map: auto with an offload_folder"
        )


def _highest_weights(config: PretrainedConfig) -> float:
    """More than the model can have; most are far below what the machine has, and need no closer look."""
    numbers = [abs(value) for _, value in _numbers(config.to_dict())]
    parts = [abs(value) for name, value in _numbers(config.to_dict()) if _PARTS.search(name)]
    return WEIGHTS_PER_SIZE * float(max(numbers, default=0)) ** 2 * max(1, *parts, 1)


def _memory_bytes() -> int:
    import psutil
    import torch

    gpus = range(torch.cuda.device_count())
    on_gpus = sum(torch.cuda.get_device_properties(number).total_memory for number in gpus)
    return psutil.virtual_memory().total + psutil.swap_memory().total + on_gpus
