"""Batches of a plain dataset's items: tuples such as (x, y), or dicts, as torch's own loader takes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Optional, Union

import torch

from scu_trainer.data.random_states import states_kept
from scu_trainer.errors import DataError, nearest

TARGET = "labels"
"""What the target is called in a batch, wherever it stood in the items."""

TARGET_KEYS = ("labels", "label")
"""Keys that are the target when none is named."""

PART = "input #{}"
"""What a part of a tuple is called in a batch: no name that a forward could have, nor one that a dict would use."""

Place = Union[int, str]
"""Of a part of an item: a position in a tuple, a key of a dict."""


class ItemCollator:
    """Items -> mapping of tensors with one entry per row, the target under ``labels``.

    Parts of a tuple have names of their own (``PART``), in their order; parts of a dict keep their keys.
    Tensors, arrays, numbers and lists of numbers are stacked as ``torch.utils.data.default_collate`` does, but that
    Python's floats become torch's default type.

    Args:
        targets: where the target stands; None: last in a tuple of two and more, ``labels`` or ``label`` in a dict.
        inputs: what the module takes, in its order; None: the rest of a tuple; of a dict what ``parameters`` names, or
            the one other key.
        parameters: names that the module's forward takes; None: any.

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
            raise DataError(f"items of one batch differ: one has {_listed(parts[0])}, another {_listed(other)}")
        return {name: _stacked(name, [part[name] for part in parts]) for name in parts[0]}

    def check(self, item: Any) -> list[str]:
        """What of a training item is left out. Raises DataError where it has no target or cannot be read."""
        is_keyed = isinstance(item, Mapping)
        if (is_keyed and self._target_key(item) is None) or (not is_keyed and TARGET not in self._parts(item)):
            raise DataError(f"a training item has {_described(item)} and no target; {self._advice(item)}")
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
            return self._of_mapping(item)
        if isinstance(item, (tuple, list)):
            return self._of_tuple(item)
        if torch.is_tensor(item):
            return {PART.format(0): item}
        raise DataError(
            f"the dataset returns a {type(item).__name__} per item; allowed: tuples such as (x, y), or dicts of "
            "tensors, arrays and numbers. Let its __getitem__ return one of them, or give the trainer a data_collator"
        )

    def _of_tuple(self, item: Sequence[Any]) -> dict[str, Any]:
        target = self.targets
        if target is None:
            target = len(item) - 1 if len(item) > 1 else None
        places = [place for place in range(len(item)) if place != target] if self.inputs is None else self.inputs
        for place in (*places, *([] if target is None else [target])):
            if not isinstance(place, int) or not -len(item) <= place < len(item):
                raise DataError(
                    f"items are tuples of {len(item)}; {place!r} is not a position in them, allowed: integers"
                )
        parts = {PART.format(number): item[place] for number, place in enumerate(places)}
        return parts if target is None else {**parts, TARGET: item[target]}

    def _of_mapping(self, item: Mapping[str, Any]) -> dict[str, Any]:
        target = self._target_key(item)
        parts = {key: item[key] for key in self._input_keys(item)}
        return parts if target is None else {**parts, TARGET: item[target]}

    def _target_key(self, item: Mapping[str, Any]) -> Optional[str]:
        if self.targets is None:
            return next((key for key in TARGET_KEYS if key in item), None)
        if self.targets not in item:
            raise DataError(
                f"items have {_listed(item)}; the target {self.targets!r} is none of them"
                f"{nearest(str(self.targets), map(str, item))}"
            )
        return self.targets

    def _input_keys(self, item: Mapping[str, Any]) -> list[str]:
        others = [key for key in item if key != self._target_key(item)]
        if self.inputs is not None:
            missing = [key for key in self.inputs if key not in item]
            if missing:
                raise DataError(f"items have {_listed(item)}; the input {missing[0]!r} is none of them")
            return self.inputs
        taken = others if self.parameters is None else [key for key in others if key in self.parameters]
        if not taken and len(others) == 1:
            return others
        if not taken:
            raise DataError(
                f"items have {_listed(item)}, and the module's forward takes {', '.join(self.parameters or ())}: "
                "name the keys to pass, in its order: wrap(module, loss=..., inputs=['...'])"
            )
        return taken


def is_of_tuple(names: Collection[str]) -> bool:
    """Whether the inputs of a batch have no names but their order."""
    return bool(names) and set(names) == {PART.format(number) for number in range(len(names))}


def _listed(parts: Mapping[str, Any]) -> str:
    return "the keys " + ", ".join(map(str, parts))


def _described(item: Any) -> str:
    if isinstance(item, Mapping):
        return _listed(item)
    return f"{len(item)} part" if isinstance(item, (tuple, list)) else "one tensor"


def _stacked(name: str, values: Sequence[Any]) -> torch.Tensor:
    tensors = [_tensor(name, value) for value in values]
    shapes = sorted({tuple(tensor.shape) for tensor in tensors})
    if len(shapes) > 1:
        raise DataError(
            f"{name} changes its shape from item to item, such as {shapes[0]} and {shapes[-1]}, and cannot be stacked; "
            "pad it in the dataset, or give the trainer a data_collator that does"
        )
    return torch.utils.data.default_collate(tensors)


def _tensor(name: str, value: Any) -> torch.Tensor:
    if torch.is_tensor(value):
        return value
    try:
        # Python's floats take torch's default type here; arrays keep their own.
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        fix = "let the dataset return tensors, arrays or numbers, or leave it out with wrap(..., inputs=[...])"
        if name == TARGET:
            fix = "let the dataset return a number (of the class, from 0; -100: not learned), or one tensor for several"
        raise DataError(f"{name} is a {type(value).__name__} that is not a tensor ({error}); {fix}") from None


def first_item(rows: Any) -> Any:
    """``rows[0]``, with all RNG left as they were: reading it may augment it at random."""
    with states_kept():
        return rows[0]
