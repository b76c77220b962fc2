"""Refuse a config.json with impossible sizes before a model is built from it: a typo could exhaust the whole machine.

Numbers of layers and experts are checked in the file, because transformers would start to build them one by one. The
size of the weights is computed on the meta device, which needs no memory for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scu_trainer.errors import ModelError
from scu_trainer.run_files import format_bytes, read_regular

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MOST_PARTS = 4096
"""Most layers, experts or blocks of a model; the largest known models have a few hundred."""

MOST = 2**53
"""Largest allowed value of any other number; a float64 cannot represent all integers beyond it."""

MOST_FILE_BYTES = 2**24

_COUNT_NAME = re.compile(r"layer|expert|block|depth|stage|branch")
_NOT_A_COUNT = re.compile(r"_(size|dim|id|index|freq|eps|every|interval|period)s?$")
_NUMBER_OF_LAYERS = re.compile(r"^(num_hidden_layers|num_layers|n_layers?)$")
WEIGHTS_PER_SIZE = 64
"""No layer of a model has more weights than this many times the square of the largest number in its configuration."""


def require_sane_config(config_file: Path, what: str = "model") -> None:
    """Raise ModelError if a config.json is not a JSON object, or holds a number beyond MOST_PARTS or MOST, or a
    negative number of layers. ``what`` is what is loaded, for the message."""
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
        most = MOST_PARTS if _COUNT_NAME.search(name) and not _NOT_A_COUNT.search(name) else MOST
        if abs(value) > most:
            raise ModelError(f"{config_file}: {name} is {_shown(value)}; it must be {most:,} or less, correct it")
        if value < 0 and _NUMBER_OF_LAYERS.search(name):  # transformers would build a model without layers
            raise ModelError(f"{config_file}: {name} is {value}; it must be 0 or more, correct it")


def _numbers(config: Any) -> Iterator[tuple[str, int]]:
    """Yield all integers at any depth, each with the name of its field."""
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
    """Raise ModelError if the weights of ``config`` need more than all memory of this machine, with swap and GPUs."""
    from scu_trainer.models.quantize import meta_model

    available = _memory_bytes()
    if _most_weights(config) * bytes_per_weight <= available:
        return
    weights = sum(weight.numel() for weight in meta_model(config, trust_remote_code).parameters())
    needed = weights * bytes_per_weight
    if needed > available:
        raise ModelError(
            f"{name}: by its config.json it has {weights:,} weights, which take {format_bytes(needed)}, but this "
            f"machine has {format_bytes(available)}; correct the sizes in it, or give "
            "device_map: auto with an offload_folder"
        )


def _most_weights(config: PretrainedConfig) -> float:
    """Return an upper bound of the number of weights; for most models it fits, and the exact count is not needed."""
    numbers = [abs(value) for _, value in _numbers(config.to_dict())]
    parts = [abs(value) for name, value in _numbers(config.to_dict()) if _COUNT_NAME.search(name)]
    return WEIGHTS_PER_SIZE * float(max(numbers, default=0)) ** 2 * max(1, *parts, 1)


def _memory_bytes() -> int:
    """Return the bytes of main memory, swap and GPU memory of this machine, whether free or not."""
    import psutil
    import torch

    gpus = range(torch.cuda.device_count())
    on_gpus = sum(torch.cuda.get_device_properties(number).total_memory for number in gpus)
    return psutil.virtual_memory().total + psutil.swap_memory().total + on_gpus
