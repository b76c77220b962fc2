"""Deep models predicted from shallow ones: what happens in memory in one layer happens in each of its kind.

A step is a sequence of segments: what comes before the layers, each layer's forward, the loss, each layer's backward,
what comes after. The step of a deep model is put together from the segments of a shallow one, which has the first layer
and the last, and one of each kind that lies between two others.
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
    """Of each layer what the configuration says of it alone, in order."""
    text = config.get_text_config()
    depth = getattr(text, DEPTH)
    lists = [value for value in vars(text).values() if isinstance(value, (list, tuple)) and len(value) == depth]
    return [tuple(str(values[layer]) for values in lists) for layer in range(depth)]


def with_layers(config: PretrainedConfig, layers: Sequence[int]) -> PretrainedConfig:
    """A copy of ``config`` with only these layers, by number."""
    found = copy.deepcopy(config)
    text = found.get_text_config()
    depth = getattr(text, DEPTH)
    for name, values in list(vars(text).items()):
        if isinstance(values, (list, tuple)) and len(values) == depth:
            setattr(text, name, type(values)(values[layer] for layer in layers))
    setattr(text, DEPTH, len(layers))
    return found


def shallow(kinds: Sequence[tuple]) -> list[int]:
    """Numbers of the layers of a shallow model: the first, the last, and of each kind the first between them."""
    between = {kind: number for number, kind in reversed(list(enumerate(kinds[1:-1], start=1)))}
    return sorted({0, len(kinds) - 1, *between.values()})


def as_all_layers(kinds: Sequence[tuple], layers: Sequence[int]) -> list[int]:
    """For each layer of the deep model the place among ``layers``, those of a shallow one, of the layer it is like."""
    of_kind = {kinds[layer]: layer for layer in reversed(layers) if 0 < layer < len(kinds) - 1}
    alike = (number if number in layers else of_kind[kind] for number, kind in enumerate(kinds))
    return [layers.index(layer) for layer in alike]


# -- the step of a shallow model, and that of the deep one -------------------------------------------------------------


def layers_of(model: nn.Module, count: int) -> Optional[nn.ModuleList]:
    """The list of its ``count`` layers, if it has one."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return next((found for found in lists if len(found) == count), None)


def shapes_by_part(model: nn.Module, count: int) -> list[dict[str, torch.Size]]:
    """Shapes of the weights of each of its ``count`` layers by their names, without those of a layer before it, and
    last those of the rest. Empty where there is no list of layers."""
    layers, seen, found = layers_of(model, count), set(), []
    for part in () if layers is None else (*layers, model):
        found.append({name: weight.shape for name, weight in part.named_parameters() if weight not in seen})
        seen.update(part.parameters())
    return found


@contextlib.contextmanager
def marked(layers: Sequence[nn.Module], events: Events) -> Iterator[None]:
    """Inside, ``events`` get a mark where each layer's forward begins, where the last one ends, and where each layer's
    backward begins. What a checkpoint computes again belongs to backward."""
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


def deepened(events: Events, stand_ins: Sequence[int]) -> Optional[Events]:
    """The events of a model that has more layers. ``stand_ins``: for each of these the shallow model's layer that it is
    like, by its place. None where the shallow model did not run layer after layer."""
    count = max(stand_ins) + 1
    names = [*(("forward", i) for i in range(count)), ("loss", 0), *(("backward", i) for i in reversed(range(count)))]
    if [name for _, name in events.marks] != names:
        return None
    borders = [*(place for place, _ in events.marks), len(events.sizes)]
    part = {name: events.sizes[a:b] for name, a, b in zip(names, borders[:-1], borders[1:], strict=True)}
    segments = [
        events.sizes[: borders[0]],
        *(part["forward", i] for i in stand_ins),
        _loss_of_all(events, borders[: count + 2], stand_ins),
        *(part["backward", i] for i in reversed(stand_ins)),
    ]
    return Events(list(itertools.chain.from_iterable(segments)))


def _loss_of_all(events: Events, borders: Sequence[int], stand_ins: Sequence[int]) -> list[tuple[str, int]]:
    """What layers made and the end of the forward frees (keys and values that are cached) is freed once for each.
    ``borders``: where each layer begins, where the loss does, and where that ends."""
    found = []
    for event in range(borders[-2], borders[-1]):
        layer = bisect.bisect_right(borders, events.taken[event]) - 1
        found += [events.sizes[event]] * (stand_ins.count(layer) if 0 <= layer < len(borders) - 2 else 1)
    return found
