"""Activation checkpointing: of each layer only the inputs are kept, its inside is computed again in backward.

Exact: the second run draws the same dropout masks (the RNG is put back), and layers that count (BatchNorm) count once.
Transformers' models do it themselves where they can; all else gets the forward of its repeated blocks wrapped:

    model ── names them in `checkpoint_blocks`                                ──▶ those
          ── a transformers model that supports it                            ──▶ transformers' own, layer by layer
          ── elements of nn.ModuleList and nn.Sequential                      ──▶ one block each
               an element that holds nothing but another such list (a stage)  ──▶ the elements of that list
          ── nn.Sequential of simple modules, alone (a convolutional trunk)   ──▶ cut before each convolution or linear

Not exact for a layer that changes other state than running statistics in its forward and reads it there (the power
iteration of spectral_norm).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from scu_trainer.errors import ModelError, nearest

NAMES = "checkpoint_blocks"


def checkpoint_every_layer(model: nn.Module) -> int:
    """Turn it on for ``model``, in place; the number of checkpointed blocks. A second call changes nothing.

    Acts in training mode with gradients enabled; weights, names and saved files stay as they are. A model may name its
    blocks: ``checkpoint_blocks``, a list of dotted names or a method that returns modules. Raises ModelError where
    there is nothing to checkpoint.
    """
    units = list({id(unit): unit for unit in _units(model)}.values())
    count = sum(_enable(unit) for unit in units)
    if not count:
        raise ModelError(
            f"checkpoint_every_layer: {type(model).__name__} has no repeated layers (elements of nn.ModuleList or "
            f"nn.Sequential); drop checkpoint_every_layer, or give the model an attribute {NAMES} with their names, "
            'for instance ["encoder.first", "encoder.second"]'
        )
    return count


# -- finding blocks ----------------------------------------------------------------------------------------------------


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """Blocks to wrap, transformers models that checkpoint their own layers, and trunks to cut."""
    if _names_blocks(module):
        yield from _named_blocks(module)
    elif _checkpoints_itself(module) or _is_trunk(module):
        yield module
    elif isinstance(module, (nn.ModuleList, nn.Sequential)):
        for element in module:
            yield from _of_element(element)
    else:
        for child in module.children():
            yield from _units(child)


def _of_element(element: nn.Module) -> Iterator[nn.Module]:
    if _is_leaf(element):
        return
    inner = _only_list(element)
    if _names_blocks(element) or _checkpoints_itself(element):
        yield from _units(element)
    elif inner is not None and not all(map(_is_leaf, inner)):
        yield from _units(inner)
    elif type(element).forward is nn.Module.forward:  # a dictionary of modules: never called itself
        for child in element.children():
            yield from _of_element(child)
    else:
        yield element


def _only_list(element: nn.Module) -> nn.Module | None:
    """The list that ``element`` is, or that is all it holds."""
    lists = (nn.ModuleList, nn.Sequential)
    children = list(element.children())
    inner = children[0] if len(children) == 1 and not isinstance(element, lists) else element
    return inner if isinstance(inner, lists) else None


def _is_leaf(module: nn.Module) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return next(module.children(), None) is None or isinstance(module, BaseTunerLayer)


def _checkpoints_itself(module: nn.Module) -> bool:
    return (
        isinstance(module, PreTrainedModel)
        and module.supports_gradient_checkpointing
        and any(isinstance(layer, GradientCheckpointingLayer) for layer in module.modules())
    )


def _names_blocks(module: nn.Module) -> bool:
    return NAMES in vars(module) or hasattr(type(module), NAMES)  # not hasattr: peft models answer for their base


def _named_blocks(model: nn.Module) -> list[nn.Module]:
    named = getattr(model, NAMES)
    if callable(named):
        return list(named())
    modules = dict(model.named_modules())
    for name in named:
        if name not in modules:
            raise ModelError(
                f"{type(model).__name__}.{NAMES} names {name!r}, which is not one of its "
                f"modules{nearest(name, modules)}"
            )
    return [modules[name] for name in named]


def _is_trunk(module: nn.Module) -> bool:
    plain = type(module).forward is nn.Sequential.forward and all(map(_is_leaf, module))
    return plain and sum(map(_is_heavy, module)) > 1 and bool(_worthwhile(module))


def _worthwhile(trunk: nn.Module) -> list[list[nn.Module]]:
    return [segment for segment in _segments(trunk) if _keeps_something(segment)]


def _segments(trunk: nn.Module) -> list[list[nn.Module]]:
    """The modules of ``trunk`` in order, a new segment at each matrix or filter but the first."""
    segments: list[list[nn.Module]] = [[]]
    for module in trunk:
        if _is_heavy(module) and any(map(_is_heavy, segments[-1])):
            segments.append([])
        segments[-1].append(module)
    return segments


def _is_heavy(module: nn.Module) -> bool:
    return any(weight.dim() > 1 for weight in module.parameters())


def _keeps_something(segment: Sequence[nn.Module]) -> bool:
    """Whether more is kept for backward than the input: a single layer keeps just that."""
    views = (nn.Flatten, nn.Unflatten, nn.Identity)
    return sum(not isinstance(module, views) for module in segment) > 1


# -- acting ------------------------------------------------------------------------------------------------------------


def _enable(unit: nn.Module) -> int:
    if _checkpoints_itself(unit):
        return _enable_library(unit)
    if not isinstance(vars(unit).get("forward"), CheckpointedForward):
        kind = CheckpointedTrunk if _is_trunk(unit) else CheckpointedForward
        unit.forward = kind(unit, unit.forward)
    return unit.forward.count


def _enable_library(model: PreTrainedModel) -> int:
    model.activation_checkpointing_enable({"use_reentrant": False, **_context(model)})
    # For reentrant checkpoints only: under a frozen base it would make backward run down to the embeddings.
    model.disable_input_require_grads()
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and getattr(part.config, "use_cache", False):
            part.config.use_cache = False  # as the Trainer does; the library would drop the cache with a warning
    return sum(isinstance(layer, GradientCheckpointingLayer) for layer in model.modules())


class CheckpointedForward:
    """Stands in for ``block.forward``. An object and no closure: models are pickled and copied."""

    count = 1
    """Blocks that it stands for."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        self.block, self.inner = block, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.block.training and torch.is_grad_enabled()):
            return self.inner(*args, **kwargs)
        return self.run(args, kwargs)

    def run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        # All by position: torch looks there for the devices whose RNG it must put back.
        names, first_named = tuple(kwargs), len(args)

        def forward(*values: Any) -> Any:
            return self.inner(*values[:first_named], **dict(zip(names, values[first_named:], strict=True)))

        return _checkpointed(forward, self.block, *args, *kwargs.values())


class CheckpointedTrunk(CheckpointedForward):
    """Stands in for the forward of a plain ``nn.Sequential``: recomputed as one, it would save nothing at its peak."""

    @property
    def count(self) -> int:
        return len(_worthwhile(self.block))

    def run(self, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        (value,) = (*args, *kwargs.values())
        for modules in _segments(self.block):
            segment = nn.Sequential(*modules)
            value = _checkpointed(segment, segment, value) if _keeps_something(modules) else segment(value)
        return value


def _checkpointed(function: Callable[..., Any], block: nn.Module, *inputs: Any) -> Any:
    if _context(block):
        return _checkpointed_uncompiled(function, block, *inputs)
    return checkpoint(function, *inputs, use_reentrant=False)


@torch.compiler.disable
def _checkpointed_uncompiled(function: Callable[..., Any], block: nn.Module, *inputs: Any) -> Any:
    """torch.compile knows no contexts that differ between the two runs: such a block stays as it is, in between."""
    return checkpoint(function, *inputs, use_reentrant=False, **_context(block))


def _context(block: nn.Module) -> dict[str, Any]:
    """Arguments of torch's checkpoint: none where nothing counts."""
    has_statistics = any(isinstance(module, _NormBase) for module in block.modules())
    return {"context_fn": functools.partial(_contexts, block)} if has_statistics else {}


def _contexts(block: nn.Module) -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    return contextlib.nullcontext(), StatisticsKept(block)


class StatisticsKept:
    """Context in which BatchNorm and its kin count into copies that are thrown away. May be entered again.

    Copies, and not momentum 0: 0 times an infinite mean would be NaN, and no layer's formula has to be known.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self._kept: list[list[tuple[nn.Module, str, Tensor]]] = []

    def __enter__(self) -> None:
        layers = [module for module in self.block.modules() if isinstance(module, _NormBase)]
        kept = [(layer, name, buffer) for layer in layers for name, buffer in layer._buffers.items()]
        self._kept.append([entry for entry in kept if entry[-1] is not None])
        for layer, name, buffer in self._kept[-1]:
            layer._buffers[name] = buffer.clone()

    def __exit__(self, *_: object) -> None:
        for layer, name, buffer in self._kept.pop():
            layer._buffers[name] = buffer
