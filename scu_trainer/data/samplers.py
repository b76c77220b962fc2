"""A torch batch sampler for ``control/curriculum.py``: the micro-batches of one rank, epoch by epoch.

    sampler = CurriculumSampler(lengths, CurriculumSettings("token_budget"), rows_per_batch=8, epochs=3)
    loader = DataLoader(rows, batch_sampler=sampler, collate_fn=...)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in loader: ...; sampler.update(ids, losses, epoch)

The plan of an epoch is a pure function of (seed, epoch, snapshot of the difficulties when it is first requested), so
every rank computes the same plan. A checkpoint contains the plan of the current epoch.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Optional

import numpy
import torch
from transformers.trainer_pt_utils import BatchRebalanceSampler

from scu_trainer.control import curriculum as control
from scu_trainer.control import noise
from scu_trainer.control.difficulty import Difficulty
from scu_trainer.control.selection import without_quarantined
from scu_trainer.errors import CheckpointError, DataError
from scu_trainer.figures import format_setting
from scu_trainer.settings import CurriculumSettings

LARGEST_INT32 = 2**31 - 1
LENGTHS_PER_BLOCK = 2**16


class CurriculumSampler(BatchRebalanceSampler):  # the stock Trainer treats this class as a rank-aware batch sampler
    """Yields the micro-batches of one rank, as lists of sample numbers.

    ``lengths``: tokens of every sample. ``rows_per_batch``: rows of a uniform micro-batch; the last one has
    ``fewest_rows`` or more. ``epochs``: of the whole run; may be set later, as the first epoch is planned without it.
    ``difficulty``: what is known about every sample. ``availability``: free share of memory, for the next plan.
    ``costs``: memory of every sample in any unit; by default its length. ``content``: a checksum of the data, or None;
    a checkpoint with another checksum is refused. Raises DataError for an empty dataset.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        settings: CurriculumSettings,
        *,
        rows_per_batch: int,
        epochs: Optional[float] = None,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        content: Optional[int] = None,
        fewest_rows: int = 1,
    ) -> None:
        self.lengths = numpy.asarray(lengths, dtype=numpy.int32)
        if not len(self.lengths):
            raise DataError(
                "the training dataset is empty, so there is nothing to plan; check the path and the filters"
            )
        self.settings, self.epochs, self.seed, self.rank, self.world = settings, epochs, seed, rank, world
        self.content = content
        self.config = _config_of(settings, rows_per_batch, fewest_rows)
        self.difficulty = Difficulty(len(self.lengths), settings.difficulty_alpha, settings.difficulty_stale_epochs)
        self.availability = 1.0
        self.costs: Optional[numpy.ndarray] = None
        self.was_recut = False  # whether a resume divided the rest of the epoch into new micro-batches
        self._plan: Optional[control.EpochPlan] = None
        self.nominal_batches = self.plan(0).micro_batches // world

    def __len__(self) -> int:
        """The number of micro-batches of a rank in the first epoch, from which the length of a run is estimated."""
        return self.nominal_batches

    def __iter__(self) -> Iterator[list[int]]:
        for batch in range(self.rank, self._plan.micro_batches, self.world):
            yield self._plan.batches[batch].tolist()  # ``replan_rest`` may have replaced the plan by now

    def set_epoch(self, epoch: int) -> None:
        self.plan(epoch)

    @property
    def current(self) -> control.EpochPlan:
        return self._plan

    def plan(self, epoch: int) -> control.EpochPlan:
        """Return the plan of ``epoch``, which is made from the present difficulties at the first call."""
        if self._plan is None or self._plan.epoch != epoch:
            self._plan = self._make_plan(epoch)
        return self._plan

    def _make_plan(self, epoch: int) -> control.EpochPlan:
        generator = torch.Generator().manual_seed(self.seed + epoch)  # gives the same order as the stock Trainer
        dtype = torch.int32 if len(self.lengths) <= LARGEST_INT32 else torch.int64  # both give the same permutation
        permutation = torch.randperm(len(self.lengths), generator=generator, dtype=dtype).numpy()
        snapshot = self.difficulty.view(self.availability, self.costs)
        try:
            return control.plan(
                self.config, snapshot, epoch, self.epochs, permutation, self.lengths, self.world, self.seed
            )
        except ValueError as error:
            raise DataError(f"epoch {epoch} has nothing to train on: {error}") from error

    def replan_rest(self, done: int) -> bool:
        """Select again what follows the first ``done`` micro-batches (of all ranks) of the epoch, from the present
        difficulties. Returns whether anything changed."""
        before = self._plan
        snapshot = self.difficulty.view(self.availability, self.costs)
        self._plan = control.reselected_plan(before, done, self.config, snapshot, self.epochs, self.lengths, self.seed)
        return self._plan is not before

    def update(
        self, ids: numpy.ndarray, losses: numpy.ndarray, epoch: int, labels: Optional[numpy.ndarray] = None
    ) -> None:
        """Record losses (nats) of the samples ``ids`` and, for classification, their labels; each of shape (k,)."""
        self.difficulty.update(ids, losses, epoch, labels)

    def suspects(self) -> numpy.ndarray:
        """Return the samples that look wrong to the noise guard now, worst first."""
        snapshot = self.difficulty.view()
        ids = without_quarantined(snapshot, numpy.arange(len(self.lengths))).ids
        return noise.suspects(snapshot, ids, self.config)[0]

    def report(self) -> dict[str, Any]:
        """Return statistics of the current plan and of the present difficulties."""
        plan = self._plan
        weights = None if plan.weights is None else plan.weights[plan.batches.order]
        return {
            "samples": len(self.lengths),
            "seen": int((self.difficulty.last_epoch == plan.epoch).sum()),
            "skipped": {reason: len(plan.skipped[reason]) for reason in sorted(plan.skipped)},
            "readmitted": len(plan.readmitted),
            "repeated": len(plan.repeated),
            "suspects": len(plan.suspects),
            "weights": None
            if weights is None
            else {"min": float(weights.min()), "max": float(weights.max()), "mean": float(weights.mean())},
            "difficulty": self.difficulty.quantiles(),
            **self.difficulty.counts(plan.epoch),
            "notes": list(plan.notes),
        }

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Any], dict[str, numpy.ndarray]]:
        """Return (JSON-safe part, arrays). It is the same on every rank if all calls of ``update`` were."""
        state, arrays = self.live_state()
        return state, {name: array.copy() for name, array in arrays.items()}

    def live_state(self) -> tuple[dict[str, Any], dict[str, numpy.ndarray]]:
        """Return ``state_dict`` without copies. Write the arrays before the next ``update``, which changes them."""
        arrays = {f"difficulty.{name}": array for name, array in self.difficulty.arrays().items()}
        arrays |= {f"plan.{name}": array for name, array in self._plan.to_arrays().items()}
        return {
            **self._identity(),
            "epoch": self._plan.epoch,
            "notes": list(self._plan.notes),
            "micro_batches": self._plan.micro_batches,
            "classes": self.config.classes,
            "samples": len(self.lengths),
            "lengths_crc32": _crc32_of(self.lengths),
            "content": self.content,
        }, arrays

    def _identity(self) -> dict[str, Any]:
        """Return everything besides losses that plans depend on."""
        epochs = None if self.epochs is None else float(self.epochs)
        return {
            **asdict(self.settings),
            "rows_per_batch": self.config.rows_per_batch,
            "processes": self.world,
            "seed": self.seed,
            "epochs": epochs,
        }

    def load_state_dict(
        self, state: dict[str, Any], arrays: Mapping[str, numpy.ndarray], done: int, recut: bool = False
    ) -> list[str]:
        """Continue from a ``state_dict`` that was taken ``done`` micro-batches (of all ranks) into its epoch.

        Returns sentences about what has changed. The interrupted epoch ends as it was planned. With another number of
        ranks or rows per batch, or with ``recut``, its remaining rows are divided into new micro-batches, and training
        continues with the first of these. Raises CheckpointError if the data are not the same.
        """
        self._require_same_data(state)
        self.difficulty.load_state_dict(_WithPrefix("difficulty", arrays))
        self.config = replace(self.config, classes=state["classes"])
        self._plan = control.EpochPlan.from_arrays(_WithPrefix("plan", arrays), state["epoch"], state["notes"])
        now = self._identity()
        changes = {name: (state[name], value) for name, value in now.items() if state.get(name, value) != value}
        left = len(self._plan.batches.order) - int(self._plan.batches.ends[done - 1] if done else 0)
        recut = recut or not changes.keys().isdisjoint({"rows_per_batch", "processes"})
        self.was_recut = recut and left > 0
        if self.was_recut:
            self._plan = control.remaining_plan(self._plan, done, self.world, self.config, self.lengths, self.seed)
        return _change_messages(changes, state["epoch"], left if recut else 0)

    def _require_same_data(self, state: dict[str, Any]) -> None:
        same = (len(self.lengths), _crc32_of(self.lengths)) == (state["samples"], state["lengths_crc32"])
        same_content = None in (self.content, state["content"]) or self.content == state["content"]
        if not (same and same_content):
            difference = "with other content" if same else "or their lengths changed"
            raise CheckpointError(
                f"the checkpoint was written with {state['samples']:,} training rows, now there are "
                f"{len(self.lengths):,}, {difference}: its scores, order and weights would apply to wrong rows. Use "
                "the same data, or start over from its weights with model_name_or_path"
            )


def _change_messages(changes: dict[str, tuple[Any, Any]], epoch: int, rows_cut_again: int) -> list[str]:
    sentences = []
    if changes:
        was_is = ", ".join(
            f"{name} {format_setting(was)} -> {format_setting(now)}" for name, (was, now) in changes.items()
        )
        sentences.append(
            f"the checkpoint was written with other settings ({was_is}): epoch {epoch + 1} ends as it was planned, "
            "later epochs follow the new settings, so the run differs from one without the interruption"
        )
    if rows_cut_again:
        sentences.append(
            f"the {rows_cut_again:,} rows that epoch {epoch + 1} has not used yet are divided into new micro-batches; "
            "no row is lost or repeated"
        )
    return sentences


def _crc32_of(lengths: numpy.ndarray) -> int:
    """Return the checksum of the lengths as int64, computed block by block."""
    checksum = 0
    for start in range(0, len(lengths), LENGTHS_PER_BLOCK):
        checksum = zlib.crc32(lengths[start : start + LENGTHS_PER_BLOCK].astype(numpy.int64), checksum)
    return checksum


class _WithPrefix(Mapping[str, numpy.ndarray]):
    """A view of the ``arrays`` with names that begin with ``prefix`` and a dot; its keys are the rest of the names."""

    def __init__(self, prefix: str, arrays: Mapping[str, numpy.ndarray]) -> None:
        self._prefix, self._arrays = f"{prefix}.", arrays

    def __getitem__(self, name: str) -> numpy.ndarray:
        return self._arrays[self._prefix + name]

    def __contains__(self, name: object) -> bool:
        return f"{self._prefix}{name}" in self._arrays

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._arrays if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _config_of(settings: CurriculumSettings, rows_per_batch: int, fewest_rows: int) -> control.CurriculumConfig:
    return control.CurriculumConfig(
        methods=settings.methods,
        rows_per_batch=rows_per_batch,
        fewest_rows=fewest_rows,
        token_budget=settings.token_budget,
        window_epochs=settings.difficulty_stale_epochs,
        guard_max_fraction=settings.noise_guard_max_fraction,
        guard_readmit=settings.noise_guard_readmit_fraction,
        prune_ratio=settings.infobatch_prune_ratio,
        final_full_fraction=settings.infobatch_final_fraction,
        acmds_fraction=settings.acmds_fraction,
        warmup_start_tokens=settings.length_warmup_start,
    )
