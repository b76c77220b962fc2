"""Run a model without leaving a trace, and without randomness."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any, Optional

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from scu_trainer.data.random_states import restore_rng_states
from scu_trainer.train.loss.analysis.frozen_weights import WrittenWeights, frozen_weights
from scu_trainer.train.loss.rows.model_loss import PUBLIC, comes_from
from scu_trainer.train.step.recovery.snapshot import (
    OF_DATA,
    OF_TORCH,
    PLAIN,
    array_restorer,
    container_restorer,
    generators,
    random_states_of_devices,
    refill,
    replaced,
    restore_attributes,
)

aten = torch.ops.aten

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Hooks that a forward may leave behind. transformers notes in an attribute that it has hooked its layers, and would
hook them twice if only the attribute were restored."""


@contextlib.contextmanager
def restored_on_exit(model: nn.Module, owner: Any = None, training: bool = False) -> Iterator[Optional[WrittenWeights]]:
    """Restore ``model``, its ``owner`` and the losses that either holds, as well as random states, on exit.

    That covers modes, buffers, hooks, attributes with their contents, and frozen weights. Yields an object that knows
    whether frozen weights were written to; None if there are none, or if all code is public. Inside, modules are in
    evaluation mode, or with ``training`` in their current mode. ``owner``, a trainer, logs nothing, because no step has
    computed it.
    """
    holders = _holders(model, owner)
    modules = [holder for holder in holders if isinstance(holder, nn.Module)]
    modes = [(module, module.training) for module in modules]
    buffers = [(module, dict(module._buffers), _copies(module)) for module in modules if module._buffers]
    held_hooks = [vars(module)[name] for module in modules for name in HOOKS if name in vars(module)]
    hooks = [(held, dict(held)) for held in held_hooks]
    # Attributes that are created inside are removed, too: a queue created by the first loss belongs to the first batch.
    attributes = [_attributes_of(holder, OF_DATA if holder is owner else frozenset()) for holder in holders]
    random_states = generators({p.device for p in model.parameters()})
    frozen = frozen_weights(model, owner)
    written = WrittenWeights(frozen) if frozen else None
    if not training:
        model.eval()
    try:
        with written or contextlib.nullcontext(), without_logging(owner):
            yield written
    finally:
        if written is not None:
            written.put_back()
        for module, was_training in modes:
            module.training = was_training
        _restore_buffers(buffers)
        for held, before in hooks:
            if held.keys() != before.keys():
                held.clear()
                held.update(before)
        restore_attributes(attributes)
        restore_rng_states(random_states)


def without_logging(trainer: Any) -> contextlib.AbstractContextManager[None]:
    """Discard what a loss logs on ``trainer``, such as its terms. None: there is no trainer."""
    return contextlib.nullcontext() if trainer is None else replaced(trainer, "log", lambda *_, **__: None)


def _holders(model: nn.Module, owner: Any) -> list[Any]:
    """Return what may keep state from one loss to the next: modules, the trainer, and user code that they call."""
    found: dict[int, Any] = {}
    waiting = [*model.modules(), *([] if owner is None else [owner])]
    while waiting:
        holder = waiting.pop()
        if id(holder) not in found:
            found[id(holder)] = holder
            held = (value.__self__ if isinstance(value, MethodType) else value for value in vars(holder).values())
            for own in filter(_is_user_code, held):
                waiting += own.modules() if isinstance(own, nn.Module) else [own]
    return list(found.values())


def _is_user_code(value: Any) -> bool:
    """Return whether ``value`` is callable user code with attributes."""
    if not callable(value) or isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    return not comes_from(type(value), *PUBLIC)


def _copies(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in module._buffers.items() if buffer is not None}


@torch.no_grad()
def _restore_buffers(buffers: list) -> None:
    for module, registered, copies in buffers:
        module._buffers.clear()
        module._buffers.update(registered)
        for name, value in copies.items():
            refill(registered[name], value)


def _attributes_of(holder: Any, of_data: frozenset[str]) -> tuple:
    """Return the attributes of an object with their contents, for ``restore_attributes``. ``of_data``: names of
    attributes with contents that nothing changes."""
    is_ours = isinstance(holder, nn.Module) and comes_from(type(holder), "scu_trainer")  # they keep what trials found
    seen: set[int] = set()
    known = {
        name: (value, None if name in of_data else container_restorer(value, array_restorer, seen))
        for name, value in vars(holder).items()
        if name not in OF_TORCH and (isinstance(value, PLAIN) or not is_ours)
    }
    names = None if is_ours else {*known, *OF_TORCH}
    return holder, known, names, lambda value: True


def rng_state(model: nn.Module) -> list[torch.Tensor]:
    """Return random states that change if a forward draws random numbers."""
    return [
        torch.get_rng_state(),
        *(state for _, state in random_states_of_devices({p.device for p in model.parameters()})),
    ]


def has_drawn(model: nn.Module, before: list[torch.Tensor]) -> bool:
    """Whether random numbers were drawn since ``rng_state`` gave ``before``."""
    return not all(map(torch.equal, before, rng_state(model)))


def host_states() -> tuple:
    """Return the states of Python's and numpy's generators; equal if nothing was drawn."""
    of_numpy = pickle.dumps(np.random.get_state(legacy=False))  # the user may have installed another kind of generator
    return random.getstate(), of_numpy


class WithoutNoise(TorchDispatchMode):
    """Replace every random draw by its mean, so that dropout is the identity and results do not depend on row counts.

    It works below autograd, where all forms of dropout arrive: torch's modules and functions, attention's
    ``dropout_p``, recurrent layers. Permutations move every entry, so that mixing rows always shows. Random integers
    stay random.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        packet = func.overloadpacket
        if packet in MEANS_OF_DRAWS:
            return MEANS_OF_DRAWS[packet](func, args, kwargs)
        names = [argument.name for argument in func._schema.arguments]
        for name in ("p",) if packet is aten.native_dropout else ("dropout_p", "dropout"):
            if name in names:
                args, kwargs = _with_zero(names, args, kwargs, name)
        return func(*args, **kwargs)


def _with_zero(names: list[str], args: tuple, kwargs: dict[str, Any], name: str) -> tuple[tuple, dict]:
    position = names.index(name)
    if position < len(args):
        return (*args[:position], 0.0, *args[position + 1 :]), kwargs
    return args, {**kwargs, name: 0.0} if name in kwargs else kwargs


def _argument(schema_name: str, func, args: tuple, kwargs: dict[str, Any], default: float) -> float:
    names = [argument.name for argument in func._schema.arguments]
    if schema_name in kwargs:
        return kwargs[schema_name]
    position = names.index(schema_name) if schema_name in names else len(args)
    return args[position] if position < len(args) else default


def _fill(value: float, func, args, kwargs):
    return func(*args, **kwargs).fill_(value)


def _bernoulli_in_place(func, args, kwargs):
    probability = _argument("p", func, args, kwargs, 0.5)
    return args[0].copy_(probability) if torch.is_tensor(probability) else args[0].fill_(probability)


def _bernoulli(func, args, kwargs):
    probability = _argument("p", func, args, kwargs, None)
    return args[0].clone() if probability is None else torch.full_like(args[0], probability)


def _permutation(func, args, kwargs):
    made = func(*args, **kwargs)
    return made.copy_(made.sort().values.roll(1))


MEANS_OF_DRAWS = {
    aten.bernoulli_: _bernoulli_in_place,
    aten.bernoulli: _bernoulli,
    aten.uniform_: lambda func, args, kwargs: args[0].fill_(
        (_argument("from", func, args, kwargs, 0.0) + _argument("to", func, args, kwargs, 1.0)) / 2
    ),
    aten.normal_: lambda func, args, kwargs: args[0].fill_(_argument("mean", func, args, kwargs, 0.0)),
    aten.exponential_: lambda func, args, kwargs: args[0].fill_(1.0 / _argument("lambd", func, args, kwargs, 1.0)),
    aten.rand: partial(_fill, 0.5),
    aten.rand_like: partial(_fill, 0.5),
    aten.randn: partial(_fill, 0.0),
    aten.randn_like: partial(_fill, 0.0),
    aten.randperm: _permutation,
}
"""Random operation -> function that returns the mean of its draws; a fixed one for permutations."""
