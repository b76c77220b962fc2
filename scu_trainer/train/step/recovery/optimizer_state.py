"""What is known about optimizers, and creating their state early, when nothing can be lost yet.

The state is often the largest allocation of a run (AdamW: twice the weights), and is created at the first
``optimizer.step()``, after the first batch has been processed. ``preallocate`` creates it at the start.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scu_trainer.errors import OutOfMemory
from scu_trainer.train.step.recovery.optimizer_parts import ParameterGroupPart, plain_tensors_of
from scu_trainer.train.step.recovery.second_try import CatchOutOfMemory

logger = logging.getLogger(__name__)

# Modules with a step() that treats each parameter on its own and keeps no other state: steps over parts equal one.
ONE_BY_ONE = frozenset(
    {f"torch.optim.{name}" for name in ("adadelta", "adagrad", "adam", "adamax", "nadam", "radam", "rmsprop", "sgd")}
    | {"torch.optim._adafactor", "torch.optim._muon", "transformers.optimization"}
    | {"bitsandbytes.optim.optimizer", "torchao.optim.adam", "scu_trainer.train.step.muon"}
)

# The same, but their state is created from the first gradient (projections, and averages in their shape), or counts
# only from the first batch on (schedule-free: ``train()`` moves weights that have a state).
FROM_THE_FIRST_GRADIENT = frozenset(
    {"galore_torch.adamw", "galore_torch.adafactor", "apollo_torch.apollo"}
    | {f"schedulefree.{name}_schedulefree" for name in ("adamw", "radam", "sgd")}
)


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that updates the weights, without accelerate's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def step_module(optimizer: Optimizer) -> str:
    """Return the module that defines the step that runs: a subclass with its own step() counts as another optimizer."""
    return type(optimizer).step.__module__


def steps_one_by_one(optimizer: Optimizer) -> bool:
    """Return whether a step over some parameters, then over the others, is known to equal one step over all, if both
    begin with the same values of the parameter groups."""
    return step_module(optimizer) in ONE_BY_ONE | FROM_THE_FIRST_GRADIENT


def step_without_hooks(optimizer: Optimizer) -> None:
    # torch wraps each class's step() once, to run the hooks around it.
    type(optimizer).step.__wrapped__(optimizer)


def preallocate(optimizer: Optimizer) -> int:
    """Create the optimizer's state as the first step would, and change nothing else. Returns its size in bytes.

    Each parameter is stepped alone up to the first operation that would write to a weight or to the state: by then the
    state exists, exactly as the optimizer creates it. Weights, random states and gradients are untouched, so training
    afterwards is bitwise the same. Call it after the learning rate scheduler has been created.

    Returns 0 if there is a state already (a resumed run), and, with a line in the log that says why, for unknown
    optimizers and for those that create their state from the first gradient (SGD with momentum, GaLore). Raises
    OutOfMemory if the state does not fit; the optimizer then has no state again.
    """
    optimizer = inner_optimizer(optimizer)
    name = type(optimizer).__name__
    if step_module(optimizer) in FROM_THE_FIRST_GRADIENT:
        logger.info("%s creates its state from the first gradient; nothing is allocated in advance", name)
        return 0
    if optimizer.state:
        return 0
    if not steps_one_by_one(optimizer):
        logger.info("the state of %s is not allocated in advance: scu-trainer does not know its step", name)
        return 0
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    made = _make_states(optimizer, parameters)
    if len(made) < len(parameters):
        needed_bytes = _estimated_bytes(optimizer, made, parameters)
        optimizer.state.clear()
        raise OutOfMemory(
            f"the state of {name} does not fit in memory: it needs about {needed_bytes / 2**30:.2g} GiB. Use optim: "
            "adamw_8bit (about a quarter) or paged_adamw_8bit (moves to host memory), tuning: lora, or a smaller model"
        )
    if not optimizer.state:
        logger.info("%s keeps no state, or creates it from the first gradient; nothing is allocated in advance", name)
    return _state_bytes(optimizer)


def _make_states(optimizer: Optimizer, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters that have their state now: not all if memory ran out."""
    made: list[torch.Tensor] = []
    whole = ParameterGroupPart(tuple((parameter, parameter.grad) for parameter in parameters))
    whole.hide()
    try:
        for parameter in parameters:
            with CatchOutOfMemory() as caught:
                _make_state(optimizer, parameter)
            if caught.text is not None:
                optimizer.state.pop(parameter, None)
                break
            made.append(parameter)
    finally:
        whole.show()
    return made


def _estimated_bytes(optimizer: Optimizer, made: list[torch.Tensor], parameters: list[torch.Tensor]) -> int:
    """Estimate the bytes of the whole state from the part that was made; without one, AdamW's two values per weight."""
    made_bytes = sum(parameter.nbytes for parameter in made)
    state_bytes_per_byte = _state_bytes(optimizer) / made_bytes if made_bytes else 2.0
    return int(sum(parameter.nbytes for parameter in parameters) * state_bytes_per_byte)


def _make_state(optimizer: Optimizer, parameter: torch.Tensor) -> None:
    parameter.grad = torch.empty_like(parameter)  # its values reach nothing that lasts
    try:
        with contextlib.suppress(_FirstWrite), _StopAtFirstWrite(optimizer, parameter):
            step_without_hooks(optimizer)
    finally:
        parameter.grad = None
    state = optimizer.state[parameter]
    if "step" in state and not isinstance(state["step"], torch.Tensor):
        state["step"] = 0  # the step counts before it writes anything
    if not any(isinstance(value, torch.Tensor) for value in state.values()):
        del optimizer.state[parameter]


class _FirstWrite(Exception):
    """The state is complete; the actual update was about to begin."""


class _StopAtFirstWrite(TorchDispatchMode):
    """Raises _FirstWrite before an operation that would write to ``parameter``, its gradient, or its state."""

    def __init__(self, optimizer: Optimizer, parameter: torch.Tensor) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._parameter = parameter

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        if operation._schema.is_mutable and self._touches(tree_leaves((args, kwargs))):
            raise _FirstWrite
        return operation(*args, **kwargs)

    def _touches(self, values: Iterable[Any]) -> bool:
        state = self._optimizer.state[self._parameter].values()
        lasting = _storages((self._parameter, self._parameter.grad, *state))
        return not lasting.isdisjoint(_storages(values))


def _storages(values: Iterable[Any]) -> set[int]:
    """Return the addresses of the storages, which are equal for views of the same tensor."""
    return {part.untyped_storage().data_ptr() for value in values for part in plain_tensors_of(value)}


def _state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of all tensors in the state; a tensor that several parameters share counts once."""
    tensors = {
        id(v): v for entry in optimizer.state.values() for value in entry.values() for v in plain_tensors_of(value)
    }
    return sum(tensor.nbytes for tensor in tensors.values())
