"""Compares the adapter of a checkpoint with the one that is trained: peft loads weights into any adapter, drops those
without a counterpart, and leaves the others as they were initialized."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from scu_trainer.errors import CheckpointError
from scu_trainer.run_files import read_object_or_empty
from scu_trainer.settings.base import short

logger = logging.getLogger("scu_trainer")

NOT_COMPARED = frozenset("inference_mode peft_version base_model_name_or_path revision auto_mapping task_type".split())
"""Keys of adapter_config.json that say nothing about the weights."""


def check_adapter(checkpoint: Path, model: nn.Module, tells: bool) -> None:
    """Warn, if ``tells``, about adapters with a changed configuration. Raises CheckpointError if weights do not fit."""
    for name, config in getattr(model, "peft_config", {}).items():
        folder = checkpoint if name == "default" else checkpoint / name  # where peft saves them
        saved = read_object_or_empty(folder / "adapter_config.json")
        left_out = NOT_COMPARED | ({"rank_pattern"} if config.peft_type == "ADALORA" else set())  # changes in training
        now = {key: _plain(value) for key, value in config.to_dict().items() if key in saved.keys() - left_out}
        changed = [key for key in now if now[key] != _plain(saved[key])]
        if not changed:
            continue
        words = ", ".join(f"{key} was {short(saved[key])}, now {short(now[key])}" for key in changed)
        mismatched = _mismatched_weights(folder / "adapter_model.safetensors", model, name)
        if mismatched:
            raise CheckpointError(
                f"the adapter of {folder} is a different one: {words}. {len(mismatched)} weights are not in both or "
                f"have another shape, such as {mismatched[0]}; resume with the configuration of "
                f"{folder / 'adapter_config.json'}"
            )
        if tells:
            logger.warning(
                "the adapter of %s had another configuration: %s. Training continues with its weights under the "
                "new configuration",
                folder.name,
                words,
            )


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON has it. Sets and lists of names become sorted lists without repeats, because peft
    repeats names in modules_to_save."""
    if isinstance(value, set) or (isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)):
        value = sorted(set(value))
    return json.loads(json.dumps(value, default=str))


def _mismatched_weights(file: Path, model: nn.Module, name: str) -> list[str]:
    """Return the weights that only the model or only ``file`` has, or that differ in shape; none without the file."""
    from peft import get_peft_model_state_dict

    if not file.is_file():
        return []
    with safe_open(file, framework="pt") as saved:
        shapes = {key: tuple(saved.get_slice(key).get_shape()) for key in saved.keys()}
    own = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    places = own.keys() | model.state_dict().keys()  # the file may also hold weights of the base, such as an embedding
    differing = [key for key, weight in own.items() if shapes.get(key) != tuple(weight.shape)]
    return differing + [key for key in shapes if key not in places]
