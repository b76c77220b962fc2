"""Whether the code of a loss exchanges something with the other ranks, as TRL's trainers gather their metrics.

Found by reading its names: to ask the loss would be an exchange that the other ranks may not answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any, Optional

from transformers import Trainer

from scu_trainer.train.loss.rows.model_loss import comes_from

EXCHANGES = frozenset(
    "gather_for_metrics gather_object all_gather all_gather_object all_gather_into_tensor all_reduce all_to_all "
    "reduce_scatter broadcast_object_list".split()
)
BY_ACCELERATOR = frozenset({"gather", "reduce"})
"""Exchanges where the accelerator is at hand; tensors have methods of these names, too."""

PER_MICRO_BATCH = ("training_step", "_prepare_inputs", "compute_loss")


def exchange_in(trainer: Trainer) -> Optional[str]:
    """Why all ranks must run as many micro-batches, as the rest of a sentence; None for code that keeps to itself, and
    in one process. What the model does in its forward is not seen."""
    if trainer.accelerator.num_processes == 1:
        return None
    own = [kind for kind in type(trainer).__mro__ if not comes_from(kind, "transformers", "scu_trainer", "builtins")]
    seen, waiting = set(), list(PER_MICRO_BATCH)
    codes = [_code(trainer.compute_loss_func)]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            found = [_code(vars(one)[name]) for one in (trainer, *own) if name in vars(one)]
            codes += found
            waiting += [word for code in found for word in _names(code)]
    words = next((words for code in codes if (words := _exchanges(_names(code)))), None)
    return (
        None if words is None else f"the code of its loss exchanges with the other ranks ({', '.join(sorted(words))})"
    )


def _exchanges(names: set[str]) -> set[str]:
    return names & (EXCHANGES | BY_ACCELERATOR if "accelerator" in names else EXCHANGES)


def _names(code: Optional[CodeType]) -> set[str]:
    return {name for part in _parts(code) for name in part.co_names} if code is not None else set()


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)


def _code(function: Any) -> Optional[CodeType]:
    function = getattr(function, "__func__", function)
    return getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
