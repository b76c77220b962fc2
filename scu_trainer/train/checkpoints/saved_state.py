"""Reads the loops' files in a checkpoint with validation: a file may be cut, edited, or from another program.

``SHAPES`` declares what each state file holds, by the classes that it is read into. A reader gets a valid state or a
CheckpointError; the choice among checkpoints validates them before anything is loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from scu_trainer.control import memory_values, regularization, retention
from scu_trainer.control.guard import divergence, spikes
from scu_trainer.errors import CheckpointError
from scu_trainer.json_types import MALFORMED, first_misfit, misfit
from scu_trainer.run_files import read_object_or_none
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

NOT_A_STATE = (*MALFORMED, SafetensorError)
"""Errors that reading a malformed file raises."""


def read_state(path: Path) -> dict[str, Any]:
    """Return the content of the state file ``path``: a JSON object, validated by ``SHAPES`` if the file is one of ours.
    Raises CheckpointError for anything else."""
    content = read_object_or_none(path)
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


def _misfit_of_keys(content: dict[str, Any], shape: dict[str, Any]) -> Optional[str]:
    missing = next((key for key in shape if key not in content), None)
    if missing is not None:
        return f"{missing} is missing"
    return first_misfit(misfit(content[key], hint, key) for key, hint in shape.items())


def _misfit_inside(content: dict[str, Any]) -> Optional[str]:
    """Return the first misfit in values that have their own ``from_dict``, or that only some runs write."""
    state = content.get("state", {})
    if "cost" in state:
        return misfit(state["cost"]["observations"], list[tuple[int, int, int]], "state.cost.observations")
    watches = [(content[name], shape) for name, shape in WATCHES.items() if content.get(name) is not None]
    return first_misfit(_misfit_of_keys(watch, shape) for watch, shape in watches)
