"""Collate items of a plain dataset: tuples such as (x, y), or dicts, as torch's DataLoader accepts them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Optional, Union

import torch

from scu_trainer.data.random_states import preserve_rng_states
from scu_trainer.errors import DataError, did_you_mean

TARGET = "labels"
"""Name of the target in a batch, whatever its place in the items."""

TARGET_KEYS = ("labels", "label")
"""Keys that are the target if none is named."""

PART = "input #{}"
"""Name of a part of a tuple in a batch. No parameter of a forward, and hardly any key of a dict, can have this name."""

Place = Union[int, str]
"""Where a part of an item is: a position in a tuple, or a key of a dict."""


class ItemCollator:
    """Collates items into a mapping of tensors with one entry per row. The target is under ``labels``.

    Parts of a tuple are named ``PART``, in order; parts of a dict keep their keys. Tensors, arrays, numbers and lists
    of numbers are stacked as by ``torch.utils.data.default_collate``, but Python floats become torch's default type.

    Args:
        targets: place of the target; None: last in a tuple of two or more, ``labels`` or ``label`` of a dict.
        inputs: places of the module's inputs, in its order; None: the rest of a tuple; of a dict, the keys in
            ``parameters``, or the only other key.
        parameters: names of the parameters of the module's forward; None: any.

    Raises DataError for items that it cannot read or stack.
    """

    def __init__(
        self,
        targets: Optional[Place] = None,
        inputs: Optional[Sequence[Place]] = None,
        parameters: Optional[Sequence[str]] = None,
    ) -> None:
        self.targets = targets
        self.inputs = None if inputs is None else list(inputs)
        self.parameters = None if parameters is None else list(parameters)

    def __call__(self, items: Sequence[Any]) -> dict[str, torch.Tensor]:
        parts = [self._parts(item) for item in items]
        if any(part.keys() != parts[0].keys() for part in parts):
            other = next(part for part in parts if part.keys() != parts[0].keys())
            raise DataError(f"items of one batch differ: one has {_keys_of(parts[0])}, another {_keys_of(other)}")
        return {name: _stack(name, [part[name] for part in parts]) for name in parts[0]}

    def check(self, item: Any) -> list[str]:
        """Return the unused keys of a training item. Raises DataError if it has no target or cannot be read."""
        is_keyed = isinstance(item, Mapping)
        if (is_keyed and self._target_key(item) is None) or (not is_keyed and TARGET not in self._parts(item)):
            raise DataError(f"a training item has {_describe(item)} and no target; {self._advice(item)}")
        self([item])
        if not is_keyed:
            return []
        used = {self._target_key(item), *(self._input_keys(item))}
        return [str(key) for key in item if key not in used]

    def _advice(self, item: Any) -> str:
        if isinstance(item, Mapping):
            return "name its key: wrap(module, loss=..., targets='...')"
        return "let the dataset return (x, y)"

    # -- one item ------------------------------------------------------------------------------------------------------

    def _parts(self, item: Any) -> dict[str, Any]:
        if isinstance(item, Mapping):
            return self._parts_of_mapping(item)
        if isinstance(item, (tuple, list)):
            return self._parts_of_tuple(item)
        if torch.is_tensor(item):
            return {PART.format(0): item}
        raise DataError(
            f"the dataset returns a {type(item).__name__} per item; allowed: tuples such as (x, y), or dicts of "
            "tensors, arrays and numbers. Let its __getitem__ return one of these, or give the trainer a data_collator"
        )

    def _parts_of_tuple(self, item: Sequence[Any]) -> dict[str, Any]:
        target = self.targets
        if target is None:
            target = len(item) - 1 if len(item) > 1 else None
        places = [place for place in range(len(item)) if place != target] if self.inputs is None else self.inputs
        for place in (*places, *([] if target is None else [target])):
            if not isinstance(place, int) or not -len(item) <= place < len(item):
                raise DataError(
                    f"items are tuples of {len(item)}; {place!r} is not a position in them; allowed: integers"
                )
        parts = {PART.format(number): item[place] for number, place in enumerate(places)}
        return parts if target is None else {**parts, TARGET: item[target]}

    def _parts_of_mapping(self, item: Mapping[str, Any]) -> dict[str, Any]:
        target = self._target_key(item)
        parts = {key: item[key] for key in self._input_keys(item)}
        return parts if target is None else {**parts, TARGET: item[target]}

    def _target_key(self, item: Mapping[str, Any]) -> Optional[str]:
        if self.targets is None:
            return next((key for key in TARGET_KEYS if key in item), None)
        if self.targets not in item:
            raise DataError(
                f"items have {_keys_of(item)}; the target {self.targets!r} is not one of them"
                f"{did_you_mean(str(self.targets), map(str, item))}"
            )
        return self.targets

    def _input_keys(self, item: Mapping[str, Any]) -> list[str]:
        others = [key for key in item if key != self._target_key(item)]
        if self.inputs is not None:
            missing = [key for key in self.inputs if key not in item]
            if missing:
                raise DataError(f"items have {_keys_of(item)}; the input {missing[0]!r} is not one of them")
            return self.inputs
        matching = others if self.parameters is None else [key for key in others if key in self.parameters]
        if not matching and len(others) == 1:
            return others
        if not matching:
            raise DataError(
                f"items have {_keys_of(item)}, but the module's forward takes {', '.join(self.parameters or ())}; "
                "name the keys to pass, in the order of forward: wrap(module, loss=..., inputs=['...'])"
            )
        return matching


def is_tuple_batch(names: Collection[str]) -> bool:
    """Whether the inputs of a batch are parts of a tuple, known only by their order."""
    return bool(names) and set(names) == {PART.format(number) for number in range(len(names))}


def _keys_of(parts: Mapping[str, Any]) -> str:
    return "the keys " + ", ".join(map(str, parts))


def _describe(item: Any) -> str:
    if isinstance(item, Mapping):
        return _keys_of(item)
    return f"{len(item)} part" if isinstance(item, (tuple, list)) else "one tensor"


def _stack(name: str, values: Sequence[Any]) -> torch.Tensor:
    tensors = [_as_tensor(name, value) for value in values]
    shapes = sorted({tuple(tensor.shape) for tensor in tensors})
    if len(shapes) > 1:
        raise DataError(
            f"the shape of {name} differs between items, for instance {shapes[0]} and {shapes[-1]}, so they cannot be "
            "stacked; pad them in the dataset, or give the trainer a data_collator that does"
        )
    return torch.utils.data.default_collate(tensors)


def _as_tensor(name: str, value: Any) -> torch.Tensor:
    if torch.is_tensor(value):
        return value
    try:
        # Python floats get torch's default type here; arrays keep their type.
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        fix = "let the dataset return tensors, arrays or numbers, or leave it out with wrap(..., inputs=[...])"
        if name == TARGET:
            fix = "let the dataset return the number of the class (from 0; -100: not learned), or a tensor for several"
        raise DataError(f"{name} is a {type(value).__name__} that cannot become a tensor ({error}); {fix}") from None


def first_item(rows: Any) -> Any:
    """Return ``rows[0]`` and restore all RNG states, because reading a row may augment it at random."""
    with preserve_rng_states():
        return rows[0]
