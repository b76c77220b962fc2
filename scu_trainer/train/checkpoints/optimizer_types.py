"""The types of an optimizer's state, which torch casts to that of the weights as it loads a checkpoint.

Some optimizers keep float32 beside weights in 16 bits (Adafactor; NAdam's product of its momenta; many of one's own):
cast, a resumed run would be another one than the run that was not interrupted.
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
def types_kept(trainer: Any, checkpoint: Optional[str]) -> Iterator[None]:
    """Inside, what the optimizer of ``trainer`` loads keeps the types that it was saved in, where its weight has one of
    those in ``checkpoint``: beside weights that are loaded in another type than they were saved in, it is cast.

    Nothing where no loop is on, and where launchers load it in their own way."""
    optimizer = inner_optimizer(trainer.optimizer)
    is_loaded_by_torch = hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks")  # not where a wrapper lacks them
    is_of_launcher = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    if checkpoint is None or trainer.is_stock or is_of_launcher or not is_loaded_by_torch:
        yield
        return
    saved: dict[str, Any] = {}
    types = _types_of_weights(Path(checkpoint))

    def note(optimizer: Optimizer, state: dict[str, Any]) -> None:
        saved.update(state)

    def put_back(optimizer: Optimizer) -> None:
        numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
        weights = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for number, weight in zip(numbers, weights, strict=True):
            entry = saved["state"].get(number) if weight.dtype in types else None
            state = optimizer.state[weight] if isinstance(entry, dict) else {}
            names = [name for name in state if name in entry and name != "step"]
            state.update({name: tree_map(_as_saved, state[name], entry[name]) for name in names})

    hooks = (optimizer.register_load_state_dict_pre_hook(note), optimizer.register_load_state_dict_post_hook(put_back))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _as_saved(loaded: Any, saved: Any) -> Any:
    """Also of those in lists, as Shampoo and SOAP keep them."""
    return saved.to(loaded.device) if torch.is_tensor(saved) and loaded.dtype != saved.dtype else loaded


def _types_of_weights(checkpoint: Path) -> set[torch.dtype]:
    found: set[str] = set()
    for path in checkpoint.glob("*.safetensors"):
        if WEIGHTS.fullmatch(path.name):
            with safe_open(path, framework="pt") as weights:
                found.update(weights.get_slice(name).get_dtype() for name in weights.keys())
    return {TYPES[name] for name in found if name in TYPES}
