"""Mean losses that the stock loop adds up because the model ignores the ``num_items_in_batch`` it is given."""

from __future__ import annotations

from typing import Any

from transformers import Trainer


def batches_added(trainer: Trainer, num_items: Any) -> int:
    """Return how many losses of a window the stock loop adds up as parts of one mean; 1 if it averages them."""
    is_told = trainer.compute_loss_func is not None or (trainer.model_accepts_loss_kwargs and num_items is not None)
    scaled = trainer.loss_is_scaled_for_ga
    return trainer.current_gradient_accumulation_steps if (is_told if scaled is None else scaled) else 1


def added_means_warning(trainer: Trainer, num_items: Any, ranks: int) -> str:
    """Return a warning about added means. ``ranks``: number of ranks with losses that are added up, too."""
    batches = batches_added(trainer, num_items)
    larger = "gradient_accumulation_steps: 1 with a larger batch (micro-batches keep its memory low)"
    instead = [larger] * (batches > 1) + ["average_tokens_across_devices: false"] * (ranks > 1)
    who = "this model" if trainer.compute_loss_func is None else "compute_loss_func"
    which = f"batches ({batches} on each rank)" if ranks > 1 else "accumulation batches"
    return (
        f"{who} ignores num_items_in_batch, so the stock loop adds up the mean losses of {batches * ranks} {which} "
        "instead of averaging them: gradient and logged loss are that many times as large, here too. "
        f"To avoid it, set {' and '.join(instead)}"
    )
