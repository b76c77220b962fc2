"""Keeps the dtypes of an optimizer's state, which torch casts to the dtype of the weights when it loads a checkpoint.

Some optimizers keep float32 next to 16-bit weights (Adafactor; NAdam's product of its momenta; many custom ones): after
a cast, a resumed run would differ from an uninterrupted one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Optional

import torch
from safetensors import safe_open
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from scu_trainer.train.checkpoints.findings import WEIGHTS
from scu_trainer.train.step.recovery.optimizer_state import inner_optimizer

TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


@contextlib.contextmanager
def state_dtypes_kept(trainer: Any, checkpoint: Optional[str]) -> Iterator[None]:
    """Inside, the state that the optimizer of ``trainer`` loads keeps its saved dtypes, if the weight has one of the
    dtypes in ``checkpoint``; if weights are loaded in another dtype than they were saved in, their state is cast.

    Does nothing without loops, or if a launcher loads the state in its own way.
    """
    optimizer = inner_optimizer(trainer.optimizer)
    is_loaded_by_torch = hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks")  # some wrappers lack these hooks
    is_of_launcher = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    if checkpoint is None or trainer.is_stock or is_of_launcher or not is_loaded_by_torch:
        yield
        return
    saved: dict[str, Any] = {}
    types = _types_of_weights(Path(checkpoint))

    def remember_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
        saved.update(state)

    def restore_types(optimizer: Optimizer) -> None:
        numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
        weights = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for number, weight in zip(numbers, weights, strict=True):
            entry = saved["state"].get(number) if weight.dtype in types else None
            state = optimizer.state[weight] if isinstance(entry, dict) else {}
            names = [name for name in state if name in entry and name != "step"]
            state.update({name: tree_map(_in_saved_type, state[name], entry[name]) for name in names})

    hooks = (
        optimizer.register_load_state_dict_pre_hook(remember_state),
        optimizer.register_load_state_dict_post_hook(restore_types),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _in_saved_type(loaded: Any, saved: Any) -> Any:
    """Return ``loaded`` in its saved dtype; called for tensors in lists too, as Shampoo and SOAP keep them."""
    return saved.to(loaded.device) if torch.is_tensor(saved) and loaded.dtype != saved.dtype else loaded


def _types_of_weights(checkpoint: Path) -> set[torch.dtype]:
    found: set[str] = set()
    for path in checkpoint.glob("*.safetensors"):
        if WEIGHTS.fullmatch(path.name):
            with safe_open(path, framework="pt") as weights:
                found.update(weights.get_slice(name).get_dtype() for name in weights.keys())
    return {TYPES[name] for name in found if name in TYPES}
