"""``log_history.json``: every row that training logs, readable at any time and after any kind of end.

The stock Trainer keeps these rows in memory and writes them with a checkpoint, so a killed run loses the newest ones.
TensorBoard and every other reporter get the same rows.
"""

from __future__ import annotations

from typing import Any, Optional

from transformers import TrainerCallback

from scu_trainer.run_files import History
from scu_trainer.train.loop import open_history

LOG_FILE = "log_history.json"


class LogHistoryCallback(TrainerCallback):
    """Appends each logged row with its step while ``train`` runs, only in the main process. The last step always has a
    row, whatever ``logging_steps`` is.

    A resumed run drops the rows after its checkpoint and writes them again.
    """

    def __init__(self) -> None:
        self.history: Optional[History] = None

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.history = open_history(args.output_dir, LOG_FILE, state.global_step, begins=state.global_step == 0)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= state.max_steps and args.logging_strategy != "no":
            control.should_log = True  # otherwise no row would include the steps since the last one

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.history is not None and state.log_history:
            row = state.log_history[-1]  # an earlier callback may have removed values from ``logs``
            self.history.append({"step": row["step"], **{name: plain(value) for name, value in row.items()}})

    def on_train_end(self, args, state, control, **kwargs):
        if self.history is not None:
            self.history.close()
            self.history = None


def plain(value: Any) -> Any:
    """Return a logged value as JSON has it: numbers of numpy and torch as numbers, other values as text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if getattr(value, "size", None) == 1 or (callable(getattr(value, "numel", None)) and value.numel() == 1):
        return value.item()
    return str(value)
