"""A training that hands over after every epoch: the body of a ``for`` loop stands where a callback would."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from typing import Any

from greenlet import getcurrent, greenlet
from transformers.trainer_pt_utils import nested_gather

from scu_trainer.errors import ControlError


def epochs(trainer: Any, **arguments: Any) -> Iterator[dict[str, float]]:
    """See ``SCUTrainer.epochs``. ``train`` runs on a stack of its own in the same thread: it keeps the thread's device,
    and nothing of it goes on while the caller's code runs."""
    if trainer.after_epoch is not None:
        raise ControlError("epochs() of this trainer is already going on; take its next epoch, or close it first")
    training = greenlet(lambda: trainer.train(**arguments))
    training.gr_context = contextvars.copy_context()
    trainer.after_epoch = lambda metrics: training.parent.switch(metrics)
    try:
        metrics = training.switch()
        while not training.dead:
            yield metrics
            training.parent = getcurrent()  # whoever asks for this epoch
            metrics = training.switch()
        return metrics
    finally:
        trainer.after_epoch = None
        if not training.dead:  # the caller has left its loop: end as after a callback that stops the training
            trainer.control.should_training_stop = True
            training.parent = getcurrent()
            training.switch()


def handed_over(trainer: Any, run_epoch: Callable[[], None]) -> None:
    """An epoch, and its metrics to whoever takes this training epoch by epoch."""
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
    """Sum of the losses of the optimizer steps of this training so far, over all ranks as the logs have it."""
    pending = nested_gather(trainer._tr_loss, trainer.args.parallel_mode)  # not logged yet
    return trainer._total_loss_scalar + pending.mean().item()
