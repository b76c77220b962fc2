"""Training as a generator of epochs, so that the body of a ``for`` loop can do what otherwise needs a callback."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from typing import Any

from greenlet import getcurrent, greenlet
from transformers.trainer_pt_utils import nested_gather

from scu_trainer.errors import ControlError


def epochs(trainer: Any, **arguments: Any) -> Iterator[dict[str, float]]:
    """See ``SCUTrainer.epochs``. ``train`` runs on its own stack in the same thread: it keeps the device of the thread,
    and does not run while the caller's code does."""
    if trainer.after_epoch is not None:
        raise ControlError("epochs() of this trainer is already running; take its next epoch, or close it first")
    training = greenlet(lambda: trainer.train(**arguments))
    training.gr_context = contextvars.copy_context()
    trainer.after_epoch = lambda metrics: training.parent.switch(metrics)
    try:
        metrics = training.switch()
        while not training.dead:
            yield metrics
            training.parent = getcurrent()  # the caller may change from epoch to epoch
            metrics = training.switch()
        return metrics
    finally:
        trainer.after_epoch = None
        if not training.dead:  # the caller has left its loop: stop the training as a callback would
            trainer.control.should_training_stop = True
            training.parent = getcurrent()
            training.switch()


def run_and_report_epoch(trainer: Any, run_epoch: Callable[[], None]) -> None:
    """Run an epoch, and pass its metrics to the code that takes this training epoch by epoch."""
    if trainer.after_epoch is None:
        return run_epoch()
    state, before = trainer.state, _total_loss(trainer)
    first_step, logged = state.global_step, len(state.log_history)
    run_epoch()
    loss = (_total_loss(trainer) - before) / max(1, state.global_step - first_step)
    evaluated = [row for row in state.log_history[logged:] if any(name.startswith("eval_") for name in row)]
    done = {"epoch": state.epoch, "step": state.global_step, "train_loss": loss}
    return trainer.after_epoch({**(evaluated[-1] if evaluated else {}), **done})


def _total_loss(trainer: Any) -> float:
    """Return the sum of the losses of all optimizer steps of this training, over all ranks, as the logs compute it."""
    pending = nested_gather(trainer._tr_loss, trainer.args.parallel_mode)  # not in the logs yet
    return trainer._total_loss_scalar + pending.mean().item()
