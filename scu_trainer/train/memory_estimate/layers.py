"""Prediction of deep models from shallow ones, because all layers of a kind use memory in the same way.

A step is a sequence of segments: everything before the layers, each layer's forward, the loss, each layer's backward,
and everything after. The step of a deep model is assembled from the segments of a shallow model, which has the first
layer, the last layer, and one layer of each kind that occurs between them.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from scu_trainer.train.memory_estimate.events import Events

DEPTH = "num_hidden_layers"


def kinds_of(config: PretrainedConfig) -> list[tuple]:
    """Return the kind of each layer, in order: its entries in the lists of ``config`` with one entry per layer."""
    text = config.get_text_config()
    depth = getattr(text, DEPTH)
    lists = [value for value in vars(text).values() if isinstance(value, (list, tuple)) and len(value) == depth]
    return [tuple(str(values[layer]) for values in lists) for layer in range(depth)]


def with_layers(config: PretrainedConfig, layers: Sequence[int]) -> PretrainedConfig:
    """Return a copy of ``config`` with only the layers of these numbers."""
    found = copy.deepcopy(config)
    text = found.get_text_config()
    depth = getattr(text, DEPTH)
    for name, values in list(vars(text).items()):
        if isinstance(values, (list, tuple)) and len(values) == depth:
            setattr(text, name, type(values)(values[layer] for layer in layers))
    setattr(text, DEPTH, len(layers))
    return found


def shallow(kinds: Sequence[tuple]) -> list[int]:
    """Return the layer numbers of a shallow model: the first, the last, and the first of each kind between them."""
    between = {kind: number for number, kind in reversed(list(enumerate(kinds[1:-1], start=1)))}
    return sorted({0, len(kinds) - 1, *between.values()})


def stand_in_layers(kinds: Sequence[tuple], layers: Sequence[int]) -> list[int]:
    """Return the index in ``layers``, those of the shallow model, of the stand-in for each layer of the deep model."""
    of_kind = {kinds[layer]: layer for layer in reversed(layers) if 0 < layer < len(kinds) - 1}
    alike = (number if number in layers else of_kind[kind] for number, kind in enumerate(kinds))
    return [layers.index(layer) for layer in alike]


# -- the step of a shallow model, and that of the deep one -------------------------------------------------------------


def layers_of(model: nn.Module, count: int) -> Optional[nn.ModuleList]:
    """Return the module list with ``count`` layers, or None if there is none."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return next((found for found in lists if len(found) == count), None)


def shapes_by_part(model: nn.Module, count: int) -> list[dict[str, torch.Size]]:
    """Return {name: shape} of the weights of each of the ``count`` layers, and last of the rest of the model. Shared
    weights are only in their first layer. The result is empty if there is no list of layers."""
    layers, seen, found = layers_of(model, count), set(), []
    for part in () if layers is None else (*layers, model):
        found.append({name: weight.shape for name, weight in part.named_parameters() if weight not in seen})
        seen.update(part.parameters())
    return found


@contextlib.contextmanager
def marked(layers: Sequence[nn.Module], events: Events) -> Iterator[None]:
    """Add marks to ``events`` in this context: where each layer's forward begins, where the last one ends, and where
    each layer's backward begins. Recomputation by activation checkpointing belongs to backward."""
    begun: set[int] = set()
    ended: set[int] = set()

    def begin(number: int) -> None:
        if number not in begun:
            begun.add(number)
            events.mark(("forward", number))

    def end(number: int, output: Any) -> None:
        hidden = next((value for value in tree_leaves(output) if torch.is_tensor(value)), None)
        if number in ended or hidden is None or not hidden.requires_grad:
            return
        ended.add(number)
        if number == len(layers) - 1:
            events.mark(("loss", 0))
        hidden.register_hook(lambda _: events.mark(("backward", number)))

    with contextlib.ExitStack() as hooks:
        for number, layer in enumerate(layers):
            hooks.enter_context(layer.register_forward_pre_hook(lambda *_, number=number: begin(number)))
            hooks.enter_context(layer.register_forward_hook(lambda _, __, output, number=number: end(number, output)))
        yield


def deep_events(events: Events, stand_ins: Sequence[int]) -> Optional[Events]:
    """Return the events of the deep model from those of the shallow one; None if that did not run its layers one after
    another. ``stand_ins``: for each layer of the deep model, the index of the shallow model's layer that represents
    it."""
    count = max(stand_ins) + 1
    names = [*(("forward", i) for i in range(count)), ("loss", 0), *(("backward", i) for i in reversed(range(count)))]
    if [name for _, name in events.marks] != names:
        return None
    borders = [*(place for place, _ in events.marks), len(events.sizes)]
    part = {name: events.sizes[a:b] for name, a, b in zip(names, borders[:-1], borders[1:], strict=True)}
    segments = [
        events.sizes[: borders[0]],
        *(part["forward", i] for i in stand_ins),
        _loss_events(events, borders[: count + 2], stand_ins),
        *(part["backward", i] for i in reversed(stand_ins)),
    ]
    return Events(list(itertools.chain.from_iterable(segments)))


def _loss_events(events: Events, borders: Sequence[int], stand_ins: Sequence[int]) -> list[tuple[str, int]]:
    """Return the events of the loss in the deep model. Memory that a layer allocated and that is freed at the end of
    the forward pass (cached keys and values) is freed once for each represented layer. ``borders``: the starts of all
    layers, and start and end of the loss."""
    found = []
    for event in range(borders[-2], borders[-1]):
        layer = bisect.bisect_right(borders, events.taken[event]) - 1
        found += [events.sizes[event]] * (stand_ins.count(layer) if 0 <= layer < len(borders) - 2 else 1)
    return found
