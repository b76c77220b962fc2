"""Is the adapter of a checkpoint the one that is trained? peft puts its weights into whatever adapter there is, drops
those that find no place, and leaves the others as they were made."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from scu_trainer.errors import CheckpointError
from scu_trainer.settings.base import short
from scu_trainer.train.checkpoints.selection import content_of

logger = logging.getLogger("scu_trainer")

NOT_COMPARED = frozenset("inference_mode peft_version base_model_name_or_path revision auto_mapping task_type".split())
"""Of adapter_config.json: what says nothing of the weights."""


def check_adapter(checkpoint: Path, model: nn.Module, tells: bool) -> None:
    """Say in the log, if it ``tells``, what changed in the configuration of each adapter. Raises CheckpointError where
    weights do not fit."""
    for name, config in getattr(model, "peft_config", {}).items():
        folder = checkpoint if name == "default" else checkpoint / name  # as peft saves them
        saved = content_of(folder / "adapter_config.json")
        left_out = NOT_COMPARED | ({"rank_pattern"} if config.peft_type == "ADALORA" else set())  # it changes its own
        now = {key: _plain(value) for key, value in config.to_dict().items() if key in saved.keys() - left_out}
        changed = [key for key in now if now[key] != _plain(saved[key])]
        if not changed:
            continue
        words = ", ".join(f"{key} was {short(saved[key])}, now {short(now[key])}" for key in changed)
        alone = _without_counterpart(folder / "adapter_model.safetensors", model, name)
        if alone:
            raise CheckpointError(
                f"the adapter of {folder} is another one: {words}. {len(alone)} weights are not in both or have "
                f"another shape, such as {alone[0]}; resume with the configuration of {folder / 'adapter_config.json'}"
            )
        if tells:
            logger.warning(
                "the adapter of %s had another configuration: %s. Its weights are continued with under the new one",
                folder.name,
                words,
            )


def _plain(value: Any) -> Any:
    """As JSON has it; sets, and lists of names, in one order and each name once: peft adds to modules_to_save what is
    in it already."""
    if isinstance(value, set) or (isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)):
        value = sorted(set(value))
    return json.loads(json.dumps(value, default=str))


def _without_counterpart(file: Path, model: nn.Module, name: str) -> list[str]:
    """Weights that only the model's adapter has or only ``file``, or each in another shape; none without the file."""
    from peft import get_peft_model_state_dict

    if not file.is_file():
        return []
    with safe_open(file, framework="pt") as saved:
        shapes = {key: tuple(saved.get_slice(key).get_shape()) for key in saved.keys()}
    own = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    places = own.keys() | model.state_dict().keys()  # the file may hold weights of the base too, as of an embedding
    differing = [key for key, weight in own.items() if shapes.get(key) != tuple(weight.shape)]
    return differing + [key for key in shapes if key not in places]
