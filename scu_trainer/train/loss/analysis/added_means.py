"""Mean losses that the stock loop adds up: of a model that does not read the ``num_items_in_batch`` it is given."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from scu_trainer.train.loss.rows.model_loss import own_loss_between


def means_if_ignored(trainer: Trainer, num_items: Any) -> int:
    """How many losses, of the window's batches and of all ranks, the stock loop adds up where it takes them for parts
    of one mean; 1 where there is no more than one, or they are averaged."""
    has_func = trainer.compute_loss_func is not None
    is_told = trainer.model_accepts_loss_kwargs and num_items is not None
    scaled, steps = trainer.loss_is_scaled_for_ga, trainer.current_gradient_accumulation_steps
    count = steps if (is_told or has_func if scaled is None else scaled) else 1
    # Of tokens counted over all ranks each has a part, so the stock compute_loss multiplies what DDP will average.
    is_multiplied = trainer.args.average_tokens_across_devices and num_items is not None and (is_told or has_func)
    return count * trainer.accelerator.num_processes if is_multiplied and own_loss_between(trainer) is None else count


def in_words(trainer: Trainer, count: int, batches: int) -> str:
    """``batches``: of the window on this rank, a part of the ``count`` whose means are added up."""
    is_over_ranks = count > batches
    larger = "gradient_accumulation_steps: 1 with a larger batch, whose memory micro-batches keep low,"
    instead = [larger] * (batches > 1) + ["average_tokens_across_devices: false"] * is_over_ranks
    who = "this model" if trainer.compute_loss_func is None else "compute_loss_func"
    which = f"batches ({batches} on each rank)" if is_over_ranks else "accumulation batches"
    return (
        f"{who} ignores num_items_in_batch, so the stock loop adds up the mean losses of {count} {which} instead of "
        f"averaging them: gradient and logged loss are that many times as large, here too. {' and '.join(instead)} "
        "avoids it"
    )
