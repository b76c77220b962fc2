"""Reads the loops' files in a checkpoint with validation: a file may be cut, edited, or from another program.

``SHAPES`` declares what each state file holds, by the classes that it is read into. A reader gets a valid state or a
CheckpointError; the choice among checkpoints validates them before anything is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from scu_trainer.control import memory_values, regularization, retention
from scu_trainer.control.guard import divergence, spikes
from scu_trainer.errors import CheckpointError
from scu_trainer.train.checkpoints.format import json_object
from scu_trainer.train.curriculum.deliveries import DeliveryCounts
from scu_trainer.train.regularization.regularizer import RegularizerProgress
from scu_trainer.train.step.micro_batch_sizer import MemoryStatistics

SHAPES: dict[str, dict[str, Any]] = {
    "scu_state.json": {
        "settings": dict,
        "state": regularization.ControllerState,
        "progress": RegularizerProgress,
        "interval": list[tuple[float, float]],
        "prior_fingerprint": float,
    },
    "memory_state.json": {"state": memory_values.SizerState, "books": MemoryStatistics, "learning_until": int},
    "retain_state.json": {
        "law": retention.RetentionState,
        **dict.fromkeys(("next_step", "every", "sample_rows", "measured", "replayed"), int),
        "owed": float,
        "fingerprint": str,
        "notices": list[str],
    },
    "safety_state.json": {
        "skipped_steps": int,
        "records": list[dict],
        "divergence": Optional[dict],
    },
    "curriculum_state.json": {
        **dict.fromkeys(("epoch", "micro_batches", "samples", "lengths_crc32", "processes", "rows_per_batch"), int),
        **dict.fromkeys(("steps_done", "steps", "accumulation"), int),
        **dict.fromkeys(("progress", "progress_before"), float),
        **dict.fromkeys(("counts", "totals"), DeliveryCounts),
        **dict.fromkeys(("notes", "notices"), list[str]),
        "classes": Optional[int],
        "content": Optional[int],
    },
}
"""Required keys of each file, with their types. Other keys are allowed."""

WATCHES: dict[str, dict[str, Any]] = {
    "divergence": {"state": divergence.DivergenceState, "notices": list[str]},
    "spikes": {
        "state": spikes.SpikeState,
        **dict.fromkeys(("rows", "set_aside"), list[int]),
        "skipped_steps": int,
    },
}
"""Required keys of the sections of safety_state.json."""

TENSORS = ("scu_prior.safetensors", "curriculum_state.safetensors", "ema.safetensors")
OF_LOOPS = (*SHAPES, *TENSORS)
"""Files of a checkpoint that only the loops read."""

NOT_A_STATE = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, SafetensorError)
"""Errors that reading a malformed file raises."""


def read_state(path: Path) -> dict[str, Any]:
    """Return the content of the state file ``path``: a JSON object, validated by ``SHAPES`` if the file is one of ours.
    Raises CheckpointError for anything else."""
    content = json_object(path)
    if content is None:
        raise CheckpointError(f"{path.name} in {path.parent} is damaged: {_advice(path)}")
    found = _misfit_of_keys(content, SHAPES.get(path.name, {})) or _misfit_inside(content)
    if found is not None:
        raise CheckpointError(f"{path} is not what a run writes there ({found}): {_advice(path)}")
    return content


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file. Raises CheckpointError if it is torn."""
    with reading(path):
        return load_file(path)


@contextlib.contextmanager
def reading(path: Path, reader: str = "") -> Iterator[None]:
    """Inside, errors from reading the content of ``path`` become a CheckpointError. ``reader``: names the code."""
    try:
        yield
    except CheckpointError:
        raise
    except (*NOT_A_STATE, OSError) as error:
        text = " ".join(str(error).split())[:200]
        by = f" by {reader}" if reader else ""
        raise CheckpointError(f"{path} cannot be read{by} ({type(error).__name__}: {text}): {_advice(path)}") from error


def _advice(path: Path) -> str:
    return f"resume from a checkpoint other than {path.parent.name}, or put the file back from a copy"


# -- shapes ------------------------------------------------------------------------------------------------------------


def misfit(value: Any, hint: Any, name: str) -> Optional[str]:
    """Return why ``value``, from JSON, is not a ``hint``; None if it is. An int passes as a float, and a float may be
    None, because JSON has no NaN."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        fits = any(misfit(value, part, name) is None for part in parts)
        return None if fits else _as_line(name, value)
    if origin is typing.Literal:
        return None if value in parts else _as_line(name, value)
    if hint in (int, float):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return None if is_number or (hint is float and value is None) else _as_line(name, value)
    if dataclasses.is_dataclass(hint):
        return _misfit_of_dataclass(value, hint, name)
    if origin is tuple and parts[-1] is Ellipsis:
        return misfit(value, list[parts[0]], name)
    if origin is tuple:  # JSON writes a tuple as a list
        if not isinstance(value, list) or len(value) != len(parts):
            return _as_line(name, value)
        return _first(misfit(item, part, name) for item, part in zip(value, parts, strict=True))
    if not isinstance(value, origin or hint):
        return _as_line(name, value)
    items = enumerate(value) if origin is list else ()
    return _first(misfit(item, parts[0], f"{name}[{i}]") for i, item in items)


def _misfit_of_dataclass(value: Any, kind: type, name: str) -> Optional[str]:
    if not isinstance(value, dict):
        return _as_line(name, value)
    hints = typing.get_type_hints(kind)
    unknown = next((key for key in value if key not in hints), None)
    if unknown is not None:
        return f"{name}.{unknown} is not known"
    required = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING]
    missing = next((key for key in required if key not in value), None)
    if missing is not None:
        return f"{name}.{missing} is missing"
    if hasattr(kind, "from_dict"):  # some of its fields are written in another form
        try:
            kind.from_dict(value)
        except NOT_A_STATE as error:
            return f"{name}: {type(error).__name__} {error}"
    plain = {key: hint for key, hint in hints.items() if key in value and not hasattr(hint, "from_dict")}
    return _first(misfit(value[key], hint, f"{name}.{key}") for key, hint in plain.items())


def _misfit_of_keys(content: dict[str, Any], shape: dict[str, Any]) -> Optional[str]:
    missing = next((key for key in shape if key not in content), None)
    if missing is not None:
        return f"{missing} is missing"
    return _first(misfit(content[key], hint, key) for key, hint in shape.items())


def _misfit_inside(content: dict[str, Any]) -> Optional[str]:
    """Return the first misfit in values that have their own ``from_dict``, or that only some runs write."""
    state = content.get("state", {})
    if "cost" in state:
        return misfit(state["cost"]["observations"], list[tuple[int, int, int]], "state.cost.observations")
    watches = [(content[name], shape) for name, shape in WATCHES.items() if content.get(name) is not None]
    return _first(_misfit_of_keys(watch, shape) for watch, shape in watches)


def _as_line(name: str, value: Any) -> str:
    text = json.dumps(value, default=str)
    return f"{name} is {text if len(text) <= 40 else text[:37] + '...'}"


def _first(found: typing.Iterable[Optional[str]]) -> Optional[str]:
    return next(filter(None, found), None)
