"""A checkpoint after every so many epochs: ``save_epochs``."""

from __future__ import annotations

from scu_trainer.train.loop import Loop


class SaveEpochs(Loop):
    """Drops the stock wish to save at the end of an epoch (``save_strategy: epoch``) in all epochs but every
    ``every``-th and the last."""

    name = "save_epochs"

    def __init__(self, every: int) -> None:
        self.every = every

    def on_epoch_end(self, args, state, control, **kwargs):
        is_last = control.should_training_stop or state.global_step >= state.max_steps
        if not is_last and round(state.epoch) % self.every:
            control.should_save = False
