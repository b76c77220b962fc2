"""Watch loss and gradient norm of every step for spikes: ``control/guard/spikes.py`` decides, this finds the rows.

A row that stands out in an undone step is used again in the next epoch, and checked against the band at that time. A
row that stands out twice is set aside for the rest of the training, if a curriculum numbers the rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any, Optional

import torch
from accelerate.utils import gather_object
from transformers import Trainer

from scu_trainer.control.guard import spikes as control
from scu_trainer.data.numbered import SAMPLE_INDEX
from scu_trainer.settings import SafetySettings
from scu_trainer.settings.base import require
from scu_trainer.train.loops.guard.first_nonfinite import NonFinitePlace
from scu_trainer.train.loops.guard.parts import (
    SHARDED,
    RowSubset,
    describe_rerun_failure,
    loss_of,
    row_names,
    step_parts,
    unchanged,
)
from scu_trainer.train.step.distributed.sharded import is_sharded
from scu_trainer.train.step.recovery.memory import free_memory

logger = logging.getLogger("scu_trainer")

FAR = 3.0
"""Multiple of the median of the step's rows from which a gradient stands out."""

MOST_RUNS = 256
"""Maximum number of parts of a step that run separately; in larger steps a part has several rows, all named."""

NAMES = {"loss": "the loss", "gradient": "the gradient's norm"}


def check_spike_guard(is_deepspeed: bool) -> None:
    require(
        not is_deepspeed,
        "spike_guard: skip has to undo a step before the optimizer runs, but DeepSpeed's engine runs the optimizer "
        "itself; set spike_guard: off, or drop DeepSpeed",
    )


class SpikeWatch:
    """Watches one training for spikes. Raises SettingsError if a step could not be undone.

    ``fault``: description of the last spike for messages. ``skipped_steps``: number of steps undone as spikes.
    """

    def __init__(self, trainer: Trainer, settings: SafetySettings) -> None:
        check_spike_guard(trainer.is_deepspeed_enabled)
        self.trainer, self._threshold = trainer, settings.spike_threshold
        self.begin()

    def begin(self) -> None:
        """Reset for a new training."""
        self._state = control.SpikeState()
        self.skipped_steps = 0
        self.fault = ""
        self._seen_once: set[int] = set()
        self._set_aside: set[int] = set()

    def is_spike(self, loss: float, norm: float) -> bool:
        """Return whether the current step is a spike. Both values are finite and the same on all ranks."""
        self._state, verdict = control.observe(self._threshold, self._state, loss=loss, norm=norm)
        if verdict.excess is None:
            return False
        found = verdict.excess
        self.fault = (
            f"{NAMES[found.name]} is {found.value:.4g}, usually about {found.usual:.4g}: {found.deviations:.3g} "
            f"robust standard deviations above that, spike_threshold is {self._threshold:g}"
        )
        if verdict.is_shift:
            self._warn(
                f"step {self.trainer.state.global_step + 1}: {self.fault}. That is {control.MOST_IN_A_ROW + 1} steps "
                "in a row, so this counts as a new level and not as a spike. The step is kept, and the next "
                f"{control.FEWEST} are not checked"
            )
        return verdict.is_spike

    def find(self, batches: Sequence[Any], num_items: Any) -> NonFinitePlace:
        """Return the rows that stand out, the same on all ranks. Every rank calls it with its own ``batches``."""
        place, samples = find_outlier_rows(self.trainer, batches, num_items)
        self.skipped_steps += 1
        twice = sorted((self._seen_once & set(samples)) - self._set_aside)
        self._seen_once |= set(samples)
        if twice and self.trainer.curriculum is not None:
            self.trainer.curriculum.exclude_rows(twice)
            self._set_aside |= set(twice)
            self._warn(f"sample {', '.join(map(str, twice))} stood out a second time: set aside from the next epoch on")
        return place

    @property
    def in_a_row(self) -> str:
        return f"{self._state.in_a_row} of at most {control.MOST_IN_A_ROW} in a row"

    def _warn(self, line: str) -> None:
        if self.trainer.is_world_process_zero():
            logger.warning(line)

    # -- reports and checkpoints ---------------------------------------------------------------------------------------

    @property
    def notices(self) -> list[str]:
        found = []
        if self.skipped_steps:
            found.append(
                f"optimizer steps undone as spikes: {self.skipped_steps}; rows that stood out: "
                f"{len(self._seen_once)}, set aside: {len(self._set_aside)}"
            )
        if self._state.shifts:
            found.append(
                f"levels of loss or gradient that changed so that the spike guard started over: {self._state.shifts}"
            )
        return found

    def figures(self) -> dict[str, Any]:
        return {
            "skipped_steps": self.skipped_steps,
            "level_shifts": self._state.shifts,
            "rows": sorted(self._seen_once),
            "set_aside": sorted(self._set_aside),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._state.to_dict(), **self.figures()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._state = control.SpikeState.from_dict(saved["state"])
        self.skipped_steps = saved["skipped_steps"]
        self._seen_once, self._set_aside = set(saved["rows"]), set(saved["set_aside"])


@dataclass(frozen=True)
class _PartGradient:
    """``norm``: of the gradient of this part. ``samples``: the number of its row; () if it has none, or the part has
    several rows."""

    norm: float
    names: tuple[str, ...]
    samples: tuple[int, ...]


def find_outlier_rows(
    trainer: Trainer, batches: Sequence[Any], num_items: Any
) -> tuple[NonFinitePlace, tuple[int, ...]]:
    """Return (the rows as messages name them, their sample numbers if known), the same on all ranks.

    ``batches``: this rank's accumulation batches. ``num_items``: the divisor of their losses. If the rows cannot run
    again, ``reason`` says why.
    """
    if is_sharded(trainer):
        return NonFinitePlace(reason=SHARDED), ()
    measured, reason = _measure(trainer, batches, num_items)
    if trainer.accelerator.num_processes > 1:
        found = gather_object([(trainer.accelerator.process_index, measured, reason)])
        measured = [
            _PartGradient(part.norm, tuple(f"{name} of rank {rank}" for name in part.names), part.samples)
            for rank, parts, _ in found
            for part in parts
        ]
        reason = next((why for _, _, why in found if why), None)
    if reason is not None or not measured:
        return NonFinitePlace(reason=reason or "the step had no rows"), ()
    return _pick_far_parts(measured)


def _measure(trainer: Trainer, batches: Sequence[Any], num_items: Any) -> tuple[list[_PartGradient], Optional[str]]:
    """Return the gradient norms of all parts on this rank, and why there are none if running them failed."""
    weights = [p for p in trainer.model.parameters() if p.requires_grad]
    measured, reason = [], None
    with unchanged(trainer):
        try:
            for part in step_parts(trainer, batches, MOST_RUNS):
                names = row_names(trainer, part.whole, part.batch, part.rows)
                measured.append(_PartGradient(_gradient_norm(trainer, part, num_items, weights), names, _samples(part)))
        except Exception as error:  # the model may fail in any way on a single row, but only the undone step matters
            reason = describe_rerun_failure(error)
    free_memory(trainer.args.device)
    return measured, reason


def _gradient_norm(trainer: Trainer, part: RowSubset, num_items: Any, weights: Sequence[torch.Tensor]) -> float:
    with torch.enable_grad():
        loss = loss_of(trainer, part, num_items)
        # Not into .grad, which would trigger the reduction of gradients over ranks.
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    return float(torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None]))


def _samples(part: RowSubset) -> tuple[int, ...]:
    numbers = part.whole.get(SAMPLE_INDEX)
    return tuple(int(numbers[row]) for row in part.rows) if numbers is not None and len(part.rows) == 1 else ()


def _pick_far_parts(measured: Sequence[_PartGradient]) -> tuple[NonFinitePlace, tuple[int, ...]]:
    if len(measured) == 1:
        (part,) = measured
        if len(part.names) == 1:
            return NonFinitePlace("it has no other row", part.names), part.samples
        return NonFinitePlace("its rows affect each other, so none can be checked alone", part.names), ()
    usual = median_low(part.norm for part in measured)
    far = sorted((part for part in measured if part.norm > FAR * usual), key=lambda part: -part.norm)
    if not far:
        return NonFinitePlace(reason="no row has a gradient that stands out from the others"), ()
    place = f"the gradient of a single row is up to {far[0].norm / max(usual, 1e-30):.3g} times the usual one"
    names = tuple(name for part in far for name in part.names)
    return NonFinitePlace(place, names), tuple(sample for part in far for sample in part.samples if sample >= 0)
