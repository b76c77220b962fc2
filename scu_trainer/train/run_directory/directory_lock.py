"""The directory of a run: chosen by rank 0, locked, and cleared of what killed runs left half-written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional, TypeVar

from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainingArguments

from scu_trainer.errors import RUN_AGAIN, StorageError, UserError
from scu_trainer.figures import first_few
from scu_trainer.settings.base import require, short
from scu_trainer.train.checkpoints.compatibility import MACHINE_SETTINGS, changed_settings
from scu_trainer.train.checkpoints.findings import examine, saved_step
from scu_trainer.train.checkpoints.format import clear_staging, set_aside
from scu_trainer.train.checkpoints.selection import error_for_damage, whole_checkpoint
from scu_trainer.train.checkpoints.writer import is_write_error
from scu_trainer.train.run_directory.resume import (
    Request,
    Start,
    decide,
    restarted_since_s,
    resume_line,
    wanted_checkpoint,
)
from scu_trainer.train.run_directory.run_lock import DELETED, RunLock
from scu_trainer.train.step.distributed.deepspeed_rules import launched_under

T = TypeVar("T")

MOST_LISTED = 5
"""The number of differences between ranks that a message lists."""


class RunDirectoryLock:
    """The directory of a run, chosen and locked until this is left. Rank 0 decides for all ranks.

    Raises CheckpointError, and StorageError if another process writes there; both on all ranks, because a rank that
    only waited would hang.
    """

    def __init__(
        self,
        training: TrainingArguments,
        configuration: Optional[dict[str, Any]] = None,
        weights_only: bool = False,
    ) -> None:
        self._lock: Optional[RunLock] = None
        ranks, wanted = training.world_size, wanted_checkpoint(training)
        request = Request(
            wanted,
            Path(training.output_dir),
            ranks,
            restarted_since_s(),
            configuration,
            weights_only,
            launched_under(training),
        )
        self.start: Start = from_first_rank(lambda: self._locked_start(request), training)

    def _locked_start(self, request: Request) -> Start:
        start = decide(request)
        if start.is_done:
            return start
        self._lock = RunLock(start.output_dir)
        try:
            # A sealed checkpoint that a killed run had not renamed yet is the newest one now, so decide again.
            named, cleared = clear_staging(start.output_dir)
            start = decide(request) if named else start
            start = _validated_start(start, request) if request.is_explicit else start
            notes = [start.line] if start.line else []
            if cleared:
                notes.append(f"removed files that a killed run had left half-written: {', '.join(cleared)}")
        except BaseException:
            self._lock.release()
            raise
        return replace(start, line="\n".join(notes))

    def put_aside(self) -> list[str]:
        """Rename the checkpoints after the one from which the run resumes (all, for a run that starts over), and return
        their names. Called once it is certain that the run goes ahead."""
        if self._lock is None:
            return []
        if self.start.checkpoint is None:
            return set_aside(self.start.output_dir, 0)
        checkpoint = Path(str(self.start.checkpoint))  # a named checkpoint may have any name
        return set_aside(self.start.output_dir, saved_step(checkpoint), checkpoint)

    def __enter__(self) -> RunDirectoryLock:
        return self

    def __exit__(self, kind: object, error: Optional[BaseException], traceback: object) -> None:
        """Raise StorageError if writing failed because the folder was renamed or deleted."""
        if self._lock is None:
            return
        change = self._lock.lost() if error is not None and is_write_error(error) else None
        self._lock.release()
        if change is not None:
            back = "" if change == DELETED else "move it back, and "
            raise StorageError(
                f"the folder of this run, {self.start.output_dir}, {change}; {back}{RUN_AGAIN}"
            ) from error


def _validated_start(start: Start, request: Request) -> Start:
    """Return ``start`` with the named or newest checkpoint. Raises CheckpointError if it is not complete."""
    if start.checkpoint is True:
        newest, skipped = whole_checkpoint(request.output_dir, request.weights_only)
        return Start(request.output_dir, str(newest), resume_line(newest, skipped))
    checkpoint = Path(str(start.checkpoint))
    found = examine(checkpoint, None, request.weights_only)
    if found.damage is not None:
        raise error_for_damage(checkpoint, found.damage, request.weights_only)
    return start


def from_first_rank(decision: Callable[[], T], training: TrainingArguments) -> T:
    """Return ``decision()`` of rank 0 on all ranks. If it raises a UserError, all ranks raise it."""
    own: Any = None
    if training.process_index == 0:
        try:
            own = decision()
        except UserError as error:
            own = error
    (outcome,) = broadcast_object_list([own])
    if isinstance(outcome, UserError):
        raise outcome
    return outcome


def require_equal_ranks(found: dict[str, Any], training: TrainingArguments) -> None:
    """Raise SettingsError on all ranks if one has other settings or data in ``found`` than rank 0. The user types the
    command on each machine. A rank that differs would train something else, or wait for the others at another step."""
    if training.world_size == 1:
        return
    own = json.loads(json.dumps(found, default=str))
    different = changed_settings(from_first_rank(lambda: own, training), own, MACHINE_SETTINGS)
    rank = training.process_index
    differences = gather_object(
        [f"{name}: {short(now)} on rank {rank}, {short(first)} on rank 0" for name, (first, now) in different.items()]
    )
    require(
        not differences,
        f"the ranks (processes) of this run differ in {first_few(differences, MOST_LISTED, '; ')}. Start the same "
        "command with the same files on every machine",
    )
