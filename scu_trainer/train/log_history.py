"""``log_history.json``: every row that training logs, readable at any moment and after any end.

The stock Trainer keeps these rows in memory and writes them with a checkpoint, so a run that is killed takes the newest
ones with it. TensorBoard and every other reporter get the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Optional

from transformers import TrainerCallback

from scu_trainer.run_files import History
from scu_trainer.train.callbacks import opened

if TYPE_CHECKING:
    from scu_trainer.train.trainer import SCUTrainer

LOG_FILE = "log_history.json"


class LogHistoryCallback(TrainerCallback):
    """Appends each logged row with its step while ``train`` runs; only in the process that leads.

    A resumed run drops the rows after its checkpoint and writes them anew.
    """

    def __init__(self) -> None:
        self.history: Optional[History] = None

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.history = opened(args.output_dir, LOG_FILE, state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.history is not None and state.log_history:
            row = state.log_history[-1]  # ``logs`` may lack what a callback before this one has taken out
            self.history.append({"step": row["step"], **{name: plain(value) for name, value in row.items()}})

    def on_train_end(self, args, state, control, **kwargs):
        if self.history is not None:
            self.history.close()
            self.history = None


def plain(value: Any) -> Any:
    """A logged value as JSON has it: numbers of numpy and torch as numbers, what is no number as text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if getattr(value, "size", None) == 1 or (callable(getattr(value, "numel", None)) and value.numel() == 1):
        return value.item()
    return str(value)


def loop_scalars(trainer: SCUTrainer, logs: Mapping[str, Any]) -> dict[str, float]:
    """What this project adds to a row before anybody sees it: scu/*, memory/*, throughput/* to rows of training steps,
    curriculum/* to the first row after an epoch was booked."""
    found: dict[str, float] = {}
    if "loss" in logs:
        if trainer.regularizer is not None:
            found |= trainer.regularization_callback.scalars()
        if trainer.chunked is not None:
            found |= trainer.chunked.loop.scalars()
        found |= trainer.efficiency.scalars()
        found |= {} if trainer.bad_numbers is None else trainer.bad_numbers.scalars()
    if trainer.curriculum is not None and ("loss" in logs or "train_runtime" in logs):
        found |= trainer.curriculum_callback.scalars()
    return found
