"""Find out whether a loss communicates with other ranks: TRL's trainers gather metrics, others gather embeddings.

User code is searched for the names of such operations, because it may communicate in some steps only. What the model
and the modules of the loss do is watched once, in a forward that every rank runs at the same place.
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
"""Operations of the accelerator; tensors have methods with the same names."""

NAMESPACES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"})
"""Namespaces of the operators with which torch.distributed, and what is built on it, communicates."""

PER_MICRO_BATCH = ("training_step", "_prepare_inputs", "compute_loss")


def exchange_in(trainer: Trainer) -> Optional[str]:
    """Return why all ranks must run equally many micro-batches, as the end of a sentence; None if none communicates."""
    if trainer.accelerator.num_processes == 1:
        return None
    own = [kind for kind in type(trainer).__mro__ if not comes_from(kind, "transformers", "scu_trainer", "builtins")]
    seen, waiting = set(), list(PER_MICRO_BATCH)
    codes = [_code(trainer.compute_loss_func)]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            found = [_code(vars(holder)[name]) for holder in (trainer, *own) if name in vars(holder)]
            codes += found
            waiting += [word for code in found for word in _names_in(code)]
    words = next((words for code in codes if (words := _exchange_names(_names_in(code)))), None)
    return None if words is None else _describe("the code of its loss", words)


def seen_exchange(loss_of: Callable[[Any], Any], batches: Iterable[Any]) -> Optional[str]:
    """Like ``exchange_in``, but watch ``loss_of`` on the first of the ``batches`` that it accepts."""
    watch = _ExchangeWatch()
    for batch in batches:
        try:
            with watch:
                loss_of(batch)
        except Exception as error:  # a model may fail in any way on such rows; then the next ones are tried
            forget_traceback(error)
        else:
            break
        if watch.names:
            break
    return _describe("its forward or its loss", watch.names) if watch.names else None


class _ExchangeWatch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in NAMESPACES:
            self.names.add(function.overloadpacket.__name__.rstrip("_"))
        return function(*args, **(kwargs or {}))


def _describe(who: str, words: set[str]) -> str:
    return f"{who} communicates with the other ranks ({', '.join(sorted(words))})"


def _exchange_names(names: set[str]) -> set[str]:
    return names & (EXCHANGES | BY_ACCELERATOR if "accelerator" in names else EXCHANGES)


def _names_in(code: Optional[CodeType]) -> set[str]:
    return {name for part in _nested_codes(code) for name in part.co_names} if code is not None else set()


def _nested_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested_codes(constant)


def _code(function: Any) -> Optional[CodeType]:
    function = getattr(function, "__func__", function)
    return getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
