"""Fine-tuning under feedback control, on top of the Hugging Face Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scu_trainer.train.loss.wrap import wrap
    from scu_trainer.train.trainer import SCUTrainer

__version__ = "0.1.0"
__all__ = ["SCUTrainer", "__version__", "wrap"]


def __getattr__(name: str) -> Any:
    # Lazy: commands that only read a run must not wait for torch.
    if name == "SCUTrainer":
        from scu_trainer.train.trainer import SCUTrainer

        return SCUTrainer
    if name == "wrap":
        from scu_trainer.train.loss.wrap import wrap

        return wrap
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
