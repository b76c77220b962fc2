"""Deep models told from shallow ones: layers of one kind each add the same, so a few of each kind are traced."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from transformers import PretrainedConfig

K = TypeVar("K", bound=Hashable)

AT_LEAST = 2
"""Layers of each kind in the shallow model: the first of them may be special at its border."""

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


def shallow(kinds: Sequence[tuple]) -> tuple[list[int], dict[tuple, list[int]]]:
    """Numbers of the layers of a shallow model, and for each kind those of one that has a layer of it more. Empty
    where hardly any layer would be left out."""
    counts = Counter(kinds)
    few = {kind: min(count, AT_LEAST) for kind, count in counts.items()}
    if sum(few.values()) + len(few) >= len(kinds):
        return list(range(len(kinds))), {}
    more = {kind: _first(kinds, {**few, kind: few[kind] + 1}) for kind, count in counts.items() if count > few[kind]}
    return _first(kinds, few), more


def _first(kinds: Sequence[tuple], wanted: dict[tuple, int]) -> list[int]:
    seen: Counter = Counter()
    chosen = []
    for number, kind in enumerate(kinds):
        if seen[kind] < wanted[kind]:
            seen[kind] += 1
            chosen.append(number)
    return chosen


def of_all_layers(kinds: Sequence[tuple], measure: Callable[[Sequence[int]], dict[K, int]]) -> dict[K, int]:
    """What ``measure`` would say of all layers. It is asked of the shallow models only."""
    base, more = shallow(kinds)
    found: dict[K, Any] = measure(base)
    total = dict(found)
    for kind, layers in more.items():
        missing = kinds.count(kind) - sum(kinds[number] == kind for number in base)
        for name, value in measure(layers).items():
            total[name] += (value - found[name]) * missing
    return total
