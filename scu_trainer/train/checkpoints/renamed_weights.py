"""Loads weights that a checkpoint stores in another form than the model has them, such as the experts of a Mixtral.

``save_pretrained`` writes the names and shapes of the published model, and ``from_pretrained`` converts them. The stock
Trainer does not when it resumes or loads the best checkpoint, so such weights stay as they were before.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from scu_trainer.data.random_states import preserve_rng_states
from scu_trainer.figures import first_few
from scu_trainer.train.step.recovery.snapshot import replaced

logger = logging.getLogger("scu_trainer")


@contextlib.contextmanager
def renamed_weights_loaded(trainer: Any, path: str | os.PathLike[str], model: nn.Module) -> Iterator[None]:
    """On exit, load into ``model`` what the stock Trainer has left out when it loaded the checkpoint ``path`` inside.
    With every loop off, warn instead."""
    checkpoint = Path(os.fspath(path))  # the error for a number is that of the stock Trainer, whatever Path says of it
    is_sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled  # these have files of their own
    converted = [] if is_sharded or not isinstance(model, PreTrainedModel) else _converted_names(checkpoint, model)
    if not converted:
        yield
        return
    if trainer.is_stock:
        if trainer.is_world_process_zero():
            logger.warning(
                "%s stores %s in another form than the model has them, which the stock Trainer does not convert: these "
                "weights stay as they were before. Turn on any loop, for example safety=SafetySettings(), to load them",
                checkpoint, first_few(converted),
            )  # fmt: skip
        yield
        return
    load, shapes = model.load_state_dict, {name: value.shape for name, value in model.state_dict().items()}

    def load_what_fits(state: dict[str, torch.Tensor], *given: Any, **named: Any) -> Any:
        return load({name: value for name, value in state.items() if value.shape == shapes.get(name)}, strict=False)

    with (
        replaced(trainer, "_issue_warnings_after_load", lambda result: None),
        replaced(model, "load_state_dict", load_what_fits),
    ):
        yield
    _load_converted(checkpoint, model)


def _load_converted(checkpoint: Path, model: PreTrainedModel) -> None:
    widest = max((p.dtype for p in model.parameters()), key=lambda dtype: dtype.itemsize)
    with preserve_rng_states():
        twin, found = type(model).from_pretrained(checkpoint, dtype=widest, output_loading_info=True)
    missing = set(found["missing_keys"])  # these are random in the twin
    model.load_state_dict({name: value for name, value in twin.state_dict().items() if name not in missing}, False)
    if missing:
        logger.warning("%s does not hold %s: these weights stay as they were", checkpoint, first_few(sorted(missing)))


def _converted_names(checkpoint: Path, model: PreTrainedModel) -> list[str]:
    """Return the names of weights in ``checkpoint`` that ``model`` does not have. If there are none, but transformers
    converts shapes or values of this model, return the patterns of their names."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    stored: set[str] = set()
    if (checkpoint / SAFE_WEIGHTS_NAME).is_file():
        with safe_open(checkpoint / SAFE_WEIGHTS_NAME, "pt") as file:
            stored = set(file.keys())
    elif (checkpoint / SAFE_WEIGHTS_INDEX_NAME).is_file():
        stored = set(json.loads((checkpoint / SAFE_WEIGHTS_INDEX_NAME).read_text(encoding="utf-8"))["weight_map"])
    if not stored:  # adapters, or files of torch, which hold the names of the model
        return []
    steps = get_model_conversion_mapping(model, add_legacy=False)
    patterns = [pattern for step in steps if isinstance(step, WeightConverter) for pattern in step.target_patterns]
    return sorted(stored - set(model.state_dict())) or patterns
