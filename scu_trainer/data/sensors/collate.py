"""Collate recordings of different lengths, which may lack branches, into a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy
import torch

from scu_trainer.data.sensors.format import ARRAY_FORMATS
from scu_trainer.settings.sensors import BRANCHES

NOT_LEARNED = -100


@dataclass(frozen=True)
class SensorCollator:
    """Collates rows of ``Recordings`` into a batch of tensors.

    Every array is padded on the right to the longest of the batch, with a bool mask (rows, length): visible (rows,
    frames, 3, height, width) uint8, infrared and plume (rows, frames, height, width) float16 and cooling_curve (rows,
    points) float32 in degrees Celsius, kinematics (rows, time, channels) and geometry (rows, 1, numbers) float32;
    ``branch_mask`` (rows, branches), columns as in ``BRANCHES``, True if a row has an array that the branch reads;
    ``labels`` (rows,) int64; ``report_ids`` (rows, words) int64, padded with -100, if rows have them. Missing arrays
    are 0, and their mask is False.

    ``shapes``: for each array of the model's branches, the shape after its time axis.
    """

    shapes: Mapping[str, tuple[int, ...]]

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        batch: dict[str, torch.Tensor] = {}
        for name, shape in self.shapes.items():
            batch[name], batch[mask_name(name)] = _padded(
                [row.get(name) for row in rows], ARRAY_FORMATS[name].kept_as, shape
            )
        read = [[name for name in arrays if name in self.shapes] for arrays in BRANCHES.values()]
        has = [[any(name in row for name in arrays) for arrays in read] for row in rows]
        batch["branch_mask"] = torch.tensor(has)
        if "labels" in rows[0]:
            batch["labels"] = torch.tensor([row["labels"] for row in rows])
        if "report_ids" in rows[0]:
            batch["report_ids"] = _padded_reports([row["report_ids"] for row in rows])
        return batch


def mask_name(name: str) -> str:
    return "cooling_mask" if name == "cooling_curve" else f"{name}_mask"


def _padded_reports(numbers: Sequence[numpy.ndarray]) -> torch.Tensor:
    longest = max(2, *map(len, numbers))  # <bos> and one word at least, so that the head gets gradients
    padded = [numpy.pad(row, (0, longest - len(row)), constant_values=NOT_LEARNED) for row in numbers]
    return torch.from_numpy(numpy.stack(padded))


def _padded(
    arrays: Sequence[Optional[numpy.ndarray]], dtype: str, shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = numpy.array([0 if array is None else len(array) for array in arrays])
    longest = max(1, int(lengths.max()))  # one masked step at least, so that the branch gets gradients
    values = numpy.zeros((len(arrays), longest, *shape), dtype=dtype)
    for place, array in zip(values, arrays, strict=True):
        if array is not None:
            place[: len(array)] = array
    return torch.from_numpy(values), torch.from_numpy(numpy.arange(longest) < lengths[:, None])
