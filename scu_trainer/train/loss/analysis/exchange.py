"""Whether a loss exchanges something with the other ranks: TRL's trainers gather metrics, others embeddings.

Code of somebody's own is read for the names of exchanges: one may happen in some steps only. What the model and the
modules of the loss do is watched, once, in a forward that every rank runs at the same place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any, Optional

from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer

from scu_trainer.train.loss.rows.model_loss import comes_from
from scu_trainer.train.step.recovery.out_of_memory import forget_traceback

EXCHANGES = frozenset(
    "gather_for_metrics gather_object all_gather all_gather_object all_gather_into_tensor all_reduce all_to_all "
    "reduce_scatter broadcast_object_list".split()
)
BY_ACCELERATOR = frozenset({"gather", "reduce"})
"""Exchanges where the accelerator is at hand; tensors have methods of these names, too."""

NAMESPACES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"})
"""Operators by which torch.distributed, and what is built on it, exchanges."""

PER_MICRO_BATCH = ("training_step", "_prepare_inputs", "compute_loss")


def exchange_in(trainer: Trainer) -> Optional[str]:
    """Why all ranks must run as many micro-batches, as the rest of a sentence; None where nothing is exchanged."""
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
    return None if words is None else _said("the code of its loss", words)


def seen_exchange(loss_of: Callable[[Any], Any], batches: Iterable[Any]) -> Optional[str]:
    """As ``exchange_in``, seen while ``loss_of`` runs on the first of the ``batches`` that it takes."""
    watch = _Watch()
    for batch in batches:
        try:
            with watch:
                loss_of(batch)
        except Exception as error:  # whatever a model says to rows that it does not take: the next ones are tried
            forget_traceback(error)
        else:
            break
        if watch.names:
            break
    return _said("its forward or its loss", watch.names) if watch.names else None


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in NAMESPACES:
            self.names.add(function.overloadpacket.__name__.rstrip("_"))
        return function(*args, **(kwargs or {}))


def _said(who: str, words: set[str]) -> str:
    return f"{who} exchanges with the other ranks ({', '.join(sorted(words))})"


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
