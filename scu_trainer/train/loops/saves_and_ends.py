"""When a run saves and when it ends: ``save_epochs``, ``early_stopping_patience``, ``early_stopping_threshold``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import EarlyStoppingCallback

from scu_trainer.figures import count_text
from scu_trainer.train.loop import Loop


class SaveEpochs(Loop):
    """With ``save_strategy: epoch``, saves only after every ``every``-th epoch and after the last one."""

    name = "save_epochs"

    def __init__(self, every: int) -> None:
        self.every = every

    def on_epoch_end(self, args, state, control, **kwargs):
        is_last = control.should_training_stop or state.global_step >= state.max_steps
        if not is_last and round(state.epoch) % self.every:
            control.should_save = False


class EarlyStopping(Loop):
    """``transformers.EarlyStoppingCallback`` with a counter that survives a resume, and a notice why the run ended."""

    name = "early_stopping"
    state_file = "early_stopping.json"

    def __init__(self, patience: int, threshold: float) -> None:
        self._callback = EarlyStoppingCallback(patience, threshold)
        self._figures: dict[str, Any] = {}
        self.notices: list[str] = []

    def begin(self) -> None:
        self._callback.early_stopping_patience_counter = 0
        self._figures, self.notices = {}, []

    def on_train_begin(self, args, state, control, **kwargs):
        self._callback.on_train_begin(args, state, control, **kwargs)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self._callback.on_evaluate(args, state, control, metrics=metrics or {}, **kwargs)

    def resume_position(self, checkpoint, position):
        """Load the counter: this loop is the first to see a checkpoint, and others ask whether training is over."""
        super().load_state(checkpoint)
        return position

    def load_state(self, checkpoint):
        """Nothing is left to load, see ``resume_position``."""

    @property
    def is_over(self) -> bool:
        return self._callback.early_stopping_patience_counter >= self._callback.early_stopping_patience

    def on_train_end(self, args, state, control, **kwargs):
        """Write the notice. Not in ``on_evaluate``: a gain below the threshold becomes the best metric after it."""
        if not self.is_over or state.global_step >= state.max_steps:
            return
        name = f"eval_{(args.metric_for_best_model or 'loss').removeprefix('eval_')}"
        self._figures = {
            "step": state.global_step, "metric": name, "best": state.best_metric, "best_step": state.best_global_step,
        }  # fmt: skip
        kept = (state.best_model_checkpoint or f"-{state.global_step}").rpartition("-")[2]
        if kept != str(state.best_global_step):
            kept += ", because the best has no checkpoint"
        lacking = f"on {state.best_metric:.4g} of step {state.best_global_step}"
        if self._callback.early_stopping_threshold:  # the best may be a gain below it, even that of the last evaluation
            lacking = f"by more than {self._callback.early_stopping_threshold:g}"
        self.notices.append(
            f"early stopping: {name} did not improve {lacking} for "
            f"{count_text(self._callback.early_stopping_patience, 'evaluation')}; the run ended at step "
            f"{state.global_step} with the model of step {kept}"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"evaluations_without_gain": self._callback.early_stopping_patience_counter}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._callback.early_stopping_patience_counter = int(state["evaluations_without_gain"])

    def figures(self) -> dict[str, Any]:
        return {self.name: self._figures} if self._figures else {}

    def lines(self, figures: Mapping[str, Any]) -> list[tuple[str, str]]:
        return [("early stopping", text.partition(": ")[2]) for text in self.notices]
