"""Fine-tuning under feedback control, on top of the Hugging Face Trainer."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from scu_trainer.imports import without_collector

if TYPE_CHECKING:
    from scu_trainer.train.loop import Loop
    from scu_trainer.train.loss.wrap import wrap
    from scu_trainer.train.trainer import SCUTrainer, with_loops

__version__ = "0.1.0"
__all__ = ["Loop", "SCUTrainer", "__version__", "with_loops", "wrap"]

HOMES = {"Loop": "train.loop", "SCUTrainer": "train.trainer", "with_loops": "train.trainer", "wrap": "train.loss.wrap"}


def __getattr__(name: str) -> Any:
    # Imported lazily, so that commands which only read a run do not wait for torch.
    if name in HOMES:
        with without_collector():
            return getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
