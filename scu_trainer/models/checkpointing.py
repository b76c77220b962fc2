"""Activation checkpointing: keep only the inputs of each layer, and recompute its activations in backward.

The result is exact: the recomputation draws the same dropout masks (the RNG state is restored), and BatchNorm updates
its running statistics only once. transformers models checkpoint themselves if they support it; for all other models,
the forward of their repeated blocks is wrapped:

    model ── names its blocks in `checkpoint_blocks`                          ──▶ those blocks
          ── a transformers model that supports it                            ──▶ transformers' own, layer by layer
          ── elements of nn.ModuleList and nn.Sequential                      ──▶ one block each
               an element that holds only another such list (a stage)         ──▶ the elements of that list
          ── a plain nn.Sequential of simple modules (a convolutional trunk)  ──▶ cut before each convolution or linear

It is not exact for a layer whose forward changes and reads other state than running statistics, such as the power
iteration of spectral_norm.
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

from scu_trainer.errors import ModelError, did_you_mean

BLOCKS_ATTRIBUTE = "checkpoint_blocks"


def checkpoint_every_layer(model: nn.Module) -> int:
    """Turn activation checkpointing on for ``model``, in place, and return the number of checkpointed blocks.

    It acts only in training mode with gradients enabled; weights, names and saved files do not change, and a second
    call has no effect. A model may name its blocks in ``checkpoint_blocks``, a list of dotted names or a method that
    returns modules. Raises ModelError if there is nothing to checkpoint.
    """
    units = list({id(unit): unit for unit in _blocks_to_enable(model)}.values())
    count = sum(_enable(unit) for unit in units)
    if not count:
        raise ModelError(
            f"checkpoint_every_layer: {type(model).__name__} has no repeated layers (elements of nn.ModuleList or "
            f"nn.Sequential); drop checkpoint_every_layer, or give the model an attribute {BLOCKS_ATTRIBUTE} with "
            'their names, for instance ["encoder.first", "encoder.second"]'
        )
    return count


# -- finding blocks ----------------------------------------------------------------------------------------------------


def _blocks_to_enable(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks to wrap, transformers models that checkpoint their own layers, and trunks to cut."""
    if _names_blocks(module):
        yield from _named_blocks(module)
    elif _checkpoints_itself(module) or _is_trunk(module):
        yield module
    elif isinstance(module, (nn.ModuleList, nn.Sequential)):
        for element in module:
            yield from _blocks_of_element(element)
    else:
        for child in module.children():
            yield from _blocks_to_enable(child)


def _blocks_of_element(element: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of one element of a list of modules: usually the element itself."""
    if _is_leaf(element):
        return
    inner = _only_list(element)
    if _names_blocks(element) or _checkpoints_itself(element):
        yield from _blocks_to_enable(element)
    elif inner is not None and not all(map(_is_leaf, inner)):
        yield from _blocks_to_enable(inner)
    elif type(element).forward is nn.Module.forward:  # such as a ModuleDict, which is never called itself
        for child in element.children():
            yield from _blocks_of_element(child)
    else:
        yield element


def _only_list(element: nn.Module) -> nn.Module | None:
    """Return ``element`` if it is a list of modules, or its only child if that is one; otherwise None."""
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
    # Not hasattr(module, ...): a peft model passes on the attributes of its base.
    return BLOCKS_ATTRIBUTE in vars(module) or hasattr(type(module), BLOCKS_ATTRIBUTE)


def _named_blocks(model: nn.Module) -> list[nn.Module]:
    named = getattr(model, BLOCKS_ATTRIBUTE)
    if callable(named):
        return list(named())
    modules = dict(model.named_modules())
    for name in named:
        if name not in modules:
            raise ModelError(
                f"{type(model).__name__}.{BLOCKS_ATTRIBUTE} names {name!r}, which is not one of its "
                f"modules{did_you_mean(name, modules)}"
            )
    return [modules[name] for name in named]


def _is_trunk(module: nn.Module) -> bool:
    """Return whether ``module`` is a plain nn.Sequential of simple modules that is worth cutting into segments."""
    plain = type(module).forward is nn.Sequential.forward and all(map(_is_leaf, module))
    return plain and sum(map(_is_heavy, module)) > 1 and bool(_segments_to_checkpoint(module))


def _segments_to_checkpoint(trunk: nn.Module) -> list[list[nn.Module]]:
    return [segment for segment in _segments(trunk) if _keeps_activations(segment)]


def _segments(trunk: nn.Module) -> list[list[nn.Module]]:
    """Split the modules of ``trunk`` in order, before each convolution or linear layer but the first."""
    segments: list[list[nn.Module]] = [[]]
    for module in trunk:
        if _is_heavy(module) and any(map(_is_heavy, segments[-1])):
            segments.append([])
        segments[-1].append(module)
    return segments


def _is_heavy(module: nn.Module) -> bool:
    """Return whether ``module`` has a weight matrix or a filter."""
    return any(weight.dim() > 1 for weight in module.parameters())


def _keeps_activations(segment: Sequence[nn.Module]) -> bool:
    """Return whether a segment keeps more than its input for backward; a single layer keeps only its input."""
    views = (nn.Flatten, nn.Unflatten, nn.Identity)
    return sum(not isinstance(module, views) for module in segment) > 1


# -- wrapping blocks ---------------------------------------------------------------------------------------------------


def _enable(unit: nn.Module) -> int:
    if _checkpoints_itself(unit):
        return _enable_transformers(unit)
    if not isinstance(vars(unit).get("forward"), CheckpointedForward):
        kind = CheckpointedTrunk if _is_trunk(unit) else CheckpointedForward
        unit.forward = kind(unit, unit.forward)
    return unit.forward.count


def _enable_transformers(model: PreTrainedModel) -> int:
    model.activation_checkpointing_enable({"use_reentrant": False, **_context(model)})
    # Only reentrant checkpoints need it: with a frozen base, backward would run all the way down to the embeddings.
    model.disable_input_require_grads()
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and getattr(part.config, "use_cache", False):
            part.config.use_cache = False  # as the Trainer does; otherwise transformers drops the cache and warns
    return sum(isinstance(layer, GradientCheckpointingLayer) for layer in model.modules())


class CheckpointedForward:
    """Replaces ``block.forward``. It is an object and not a closure, because models are pickled and copied."""

    count = 1
    """Number of blocks that it checkpoints."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        self.block, self.inner = block, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.block.training and torch.is_grad_enabled()):
            return self.inner(*args, **kwargs)
        return self.run(args, kwargs)

    def run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        # Pass all inputs by position: torch looks only there for the devices whose RNG state it must restore.
        names, first_named = tuple(kwargs), len(args)

        def forward(*values: Any) -> Any:
            return self.inner(*values[:first_named], **dict(zip(names, values[first_named:], strict=True)))

        return _checkpointed(forward, self.block, *args, *kwargs.values())


class CheckpointedTrunk(CheckpointedForward):
    """Replaces the forward of a plain ``nn.Sequential``, checkpointing it in segments. Recomputed as one block, it
    would need as much memory at the peak as without checkpointing."""

    @property
    def count(self) -> int:
        return len(_segments_to_checkpoint(self.block))

    def run(self, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        (value,) = (*args, *kwargs.values())
        for modules in _segments(self.block):
            segment = nn.Sequential(*modules)
            value = _checkpointed(segment, segment, value) if _keeps_activations(modules) else segment(value)
        return value


def _checkpointed(function: Callable[..., Any], block: nn.Module, *inputs: Any) -> Any:
    if _context(block):
        return _checkpointed_uncompiled(function, block, *inputs)
    return checkpoint(function, *inputs, use_reentrant=False)


@torch.compiler.disable
def _checkpointed_uncompiled(function: Callable[..., Any], block: nn.Module, *inputs: Any) -> Any:
    """Checkpoint a block outside of torch.compile, which does not support different contexts for the two runs."""
    return checkpoint(function, *inputs, use_reentrant=False, **_context(block))


def _context(block: nn.Module) -> dict[str, Any]:
    """Return the arguments of torch's checkpoint for ``block``: {} if it has no running statistics."""
    has_statistics = any(isinstance(module, _NormBase) for module in block.modules())
    return {"context_fn": functools.partial(_contexts, block)} if has_statistics else {}


def _contexts(block: nn.Module) -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    """Return the contexts of the first run and of the recomputation, which must not update the statistics again."""
    return contextlib.nullcontext(), PreservedStatistics(block)


class PreservedStatistics:
    """Context in which BatchNorm and similar layers update copies of their statistics, which are then dropped; may be
    nested. Copies work for any layer; with momentum 0 instead, an infinite mean times 0 would become NaN."""

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
