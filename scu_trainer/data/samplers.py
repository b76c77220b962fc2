"""The torch face of ``control/curriculum.py``: micro-batches of one rank, epoch by epoch.

    sampler = CurriculumSampler(lengths, CurriculumSettings("token_budget"), rows_per_batch=8, epochs=3)
    loader = DataLoader(rows, batch_sampler=sampler, collate_fn=...)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in loader: ...; sampler.update(ids, losses, epoch)

The plan of an epoch is a pure function of (seed, epoch, snapshot of the difficulties when it was first asked for), so
every rank makes the same one, and a resumed run makes it again.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, Optional

import numpy
import torch
from transformers.trainer_pt_utils import BatchRebalanceSampler

from scu_trainer.control import curriculum as control
from scu_trainer.control.batches import Batches
from scu_trainer.control.difficulty import Difficulty, Snapshot
from scu_trainer.control.selection import noise_guard, without_quarantined
from scu_trainer.errors import CheckpointError, DataError
from scu_trainer.settings import CurriculumSettings


class CurriculumSampler(BatchRebalanceSampler):  # the stock Trainer takes this class for a rank-aware batch sampler
    """``lengths``: tokens of every sample. ``rows_per_batch``: of a uniform micro-batch. ``epochs``: of the whole run.

    ``difficulty``: what is known of every sample. ``availability``: free share of memory, for the next plan.
    ``costs``: memory of every sample in any unit; default its length.
    Raises DataError for an empty dataset.
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
    ) -> None:
        self.lengths = numpy.asarray(lengths, dtype=numpy.int64)
        if not len(self.lengths):
            raise DataError("the training dataset is empty: there is nothing to plan; check the path and the filters")
        self.settings, self.epochs, self.seed, self.rank, self.world = settings, epochs, seed, rank, world
        self.law = law_of(settings, rows_per_batch)
        self.difficulty = Difficulty(len(self.lengths), settings.difficulty_alpha, settings.difficulty_window)
        self.availability = 1.0
        self.costs: Optional[numpy.ndarray] = None
        self._plan: Optional[control.Plan] = None
        self._snapshot: Optional[Snapshot] = None
        self._is_rest = False  # of an epoch whose beginning was cut otherwise
        self.nominal_batches = self.plan(0).micro_batches // world

    def set_epochs(self, epochs: float) -> None:
        """Number of epochs of the run, where it was not known from the start."""
        self.epochs, self._plan = epochs, None
        self.plan(0)

    def __len__(self) -> int:
        """Micro-batches of a rank in the first epoch: what the length of a run is estimated from."""
        return self.nominal_batches

    def __iter__(self) -> Iterator[list[int]]:
        for ids in self._plan.batches_of(self.rank, self.world):
            yield ids.tolist()

    def set_epoch(self, epoch: int) -> None:
        self.plan(epoch)

    @property
    def current(self) -> control.Plan:
        return self._plan

    def plan(self, epoch: int) -> control.Plan:
        """The plan of ``epoch``; made from the present difficulties when it is first asked for."""
        if self._plan is None or self._plan.epoch != epoch:
            self._is_rest = False
            self._snapshot = self.difficulty.snapshot(self.availability, self.costs)
            self._plan = self._made(epoch)
        return self._plan

    def _made(self, epoch: int, law: Optional[control.Law] = None, world: Optional[int] = None) -> control.Plan:
        generator = torch.Generator().manual_seed(self.seed + epoch)  # the stock Trainer's order of the epoch
        permutation = torch.randperm(len(self.lengths), generator=generator).numpy()
        law, world = law or self.law, world or self.world
        try:
            return control.plan(law, self._snapshot, epoch, self.epochs, permutation, self.lengths, world, self.seed)
        except ValueError as error:
            raise DataError(f"epoch {epoch} has nothing to train on: {error}") from error

    def update(
        self, ids: numpy.ndarray, losses: numpy.ndarray, epoch: int, labels: Optional[numpy.ndarray] = None
    ) -> None:
        """Losses (nats) and, in a classification, labels of the samples ``ids``, shape (k,) each, as they were seen."""
        self.difficulty.update(ids, losses, epoch, labels)

    def suspects(self) -> numpy.ndarray:
        """Samples that the noise guard would leave out as things stand now, worst first."""
        snapshot = self.difficulty.snapshot()
        ids = without_quarantined(snapshot, numpy.arange(len(self.lengths))).ids
        return noise_guard(snapshot, ids, self.law, self._plan.epoch + 1, numpy.random.default_rng(0)).suspects

    def report(self) -> dict[str, Any]:
        """What the books say of the present plan and of the difficulties now."""
        plan = self._plan
        weights = None if plan.weights is None else plan.weights[plan.batches.order]
        return {
            "samples": len(self.lengths),
            "planned": len(numpy.unique(plan.batches.order)),
            "skipped": {reason: len(ids) for reason, ids in plan.skipped.items()},
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
        """(JSON-safe part, arrays). The same on every rank, if ``update`` was."""
        plan = self._plan
        arrays = {f"difficulty.{name}": array for name, array in self.difficulty.state_dict().items()}
        arrays |= {f"snapshot.{name}": array for name, array in self._snapshot.to_arrays().items()}
        if self._is_rest:
            arrays |= {"rest.order": plan.batches.order, "rest.ends": plan.batches.ends}
        return {
            "settings": asdict(self.settings),
            "epoch": plan.epoch,
            "micro_batches": plan.micro_batches,
            "rows_per_batch": self.law.rows_per_batch,
            "classes": self.law.classes,
            "world": self.world,
            "seed": self.seed,
            "samples": len(self.lengths),
            "lengths_crc32": zlib.crc32(self.lengths.tobytes()),
        }, arrays

    def load_state_dict(self, state: dict[str, Any], arrays: dict[str, numpy.ndarray], done: int) -> list[str]:
        """Go on where ``state_dict`` was taken, ``done`` micro-batches (of all ranks) into its epoch.

        Returns sentences about what is not as it was. With another number of ranks or rows per batch the rows of the
        epoch that were not seen yet are cut anew, and the epoch goes on with them from its first micro-batch.
        Raises CheckpointError where the data are not the same.
        """
        self._require_same_data(state)
        self.difficulty.load_state_dict(_under("difficulty", arrays))
        self._snapshot = Snapshot.from_arrays(_under("snapshot", arrays))
        self.law = replace(self.law, classes=state["classes"])
        old_law = replace(
            law_of(CurriculumSettings(**state["settings"]), state["rows_per_batch"]), classes=state["classes"]
        )
        old = self._made(state["epoch"], old_law, state["world"])
        if "rest.order" in arrays:
            old = replace(old, batches=Batches(arrays["rest.order"], arrays["rest.ends"]))
        self._plan, self._is_rest = old, "rest.order" in arrays
        if (old_law, state["world"]) == (self.law, self.world):
            return []
        if done < old.micro_batches:
            self._plan = control.rest_of(old, done, self.world, self.law, self.lengths, self.seed)
            self._is_rest = True
        return [self._what_changed(state, done, old)]

    def _require_same_data(self, state: dict[str, Any]) -> None:
        same = (len(self.lengths), zlib.crc32(self.lengths.tobytes())) == (state["samples"], state["lengths_crc32"])
        if not same:
            raise CheckpointError(
                f"the checkpoint was written with {state['samples']:,} training rows, now there are "
                f"{len(self.lengths):,}, or of other lengths: its scores, order and weights would go to other rows. "
                "Use the same data, or start anew from its weights with model_name_or_path"
            )

    def _what_changed(self, state: dict[str, Any], done: int, old: control.Plan) -> str:
        rows = len(old.batches.order) - int(old.batches.ends[done - 1] if done else 0)
        return (
            f"the checkpoint was written with {state['world']} processes and {state['rows_per_batch']} rows per batch "
            f"(curriculum {state['settings']['curriculum']}), now it is {self.world} and {self.law.rows_per_batch} "
            f"({self.settings.curriculum}): the {rows:,} rows that epoch {state['epoch']} has not seen yet are cut "
            "anew; no row is lost or repeated, but the run is no longer the one that was begun"
        )


def _under(prefix: str, arrays: dict[str, numpy.ndarray]) -> dict[str, numpy.ndarray]:
    return {name.removeprefix(f"{prefix}."): array for name, array in arrays.items() if name.startswith(f"{prefix}.")}


def law_of(settings: CurriculumSettings, rows_per_batch: int) -> control.Law:
    """The planner's arithmetic form of the settings."""
    return control.Law(
        methods=settings.methods,
        rows_per_batch=rows_per_batch,
        token_budget=settings.token_budget,
        window_epochs=settings.difficulty_window,
        guard_max_fraction=settings.noise_guard_max_fraction,
        guard_readmit=settings.noise_guard_readmit_fraction,
        prune_ratio=settings.infobatch_prune_ratio,
        final_full_fraction=settings.infobatch_final_fraction,
        acmds_fraction=settings.acmds_fraction,
        warmup_start_tokens=settings.length_warmup_start,
    )
