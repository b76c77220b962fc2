"""Which checkpoint a run can resume from, and which one it chooses by default, given the findings about each."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Optional

from scu_trainer.errors import CheckpointError
from scu_trainer.run_files import read_object_or_empty
from scu_trainer.train.checkpoints.findings import Findings, examine
from scu_trainer.train.checkpoints.format import checkpoint_paths, checkpoints, step_of

logger = logging.getLogger("scu_trainer")


def newest_checkpoint(
    run: Path, world_size: Optional[int], weights_only: bool = False, tells: bool = True
) -> tuple[Optional[Path], list[str]]:
    """Return the newest checkpoint in ``run`` that ``world_size`` ranks can resume from, and why others were skipped.
    If none is complete, the newest readable one. ``tells``: also log why."""
    skipped: list[str] = []
    changed: Optional[tuple[Path, Findings]] = None
    for checkpoint in checkpoint_paths(run):
        found = examine(checkpoint, world_size, weights_only)
        fault = found.fault or _newer_than_run(checkpoint)
        if fault is None:
            _warn(checkpoint, found, tells)
            return checkpoint, skipped
        if changed is None and found.damage is None and _newer_than_run(checkpoint) is None:
            changed = checkpoint, found
        if tells:
            logger.warning("%s is skipped: %s", checkpoint, fault)
        skipped.append(f"{checkpoint.name} is skipped: {fault}")
    if changed is None:
        return None, skipped
    checkpoint, found = changed
    _warn(checkpoint, found, tells)
    others = [line for line in skipped if not line.startswith(f"{checkpoint.name} ")]
    return checkpoint, [*others, f"{checkpoint.name} itself was changed: {found.fault}"]


def whole_checkpoint(run: Path, weights_only: bool, tells: bool = True) -> tuple[Path, list[str]]:
    """Return the newest checkpoint for any number of ranks, and why newer ones were skipped. Raises CheckpointError."""
    newest, skipped = newest_checkpoint(run, None, weights_only, tells)
    if newest is None:
        raise CheckpointError(
            f"{run} holds no checkpoint to resume from ({'; '.join(skipped) or 'none is there'}); give the path of one "
            "to resume_from_checkpoint, or drop it to start over"
        )
    return newest, skipped


def selected_checkpoint(wanted: Any, output_dir: str, weights_only: bool, is_main: bool) -> Any:
    """Return the checkpoint for ``train(resume_from_checkpoint=wanted)``; True: the newest one in ``output_dir``.

    What does not exist or is not a path is returned unchanged, and the stock Trainer reports what is wrong with it.
    is_main: this rank logs, and also compares the contents of a named checkpoint. Raises CheckpointError.
    """
    if wanted is True:
        run = Path(output_dir)
        return (
            str(whole_checkpoint(run, weights_only, is_main)[0]) if run.is_dir() and checkpoint_paths(run) else wanted
        )
    if not isinstance(wanted, (str, os.PathLike)) or not os.path.lexists(wanted):
        return wanted
    found = examine(Path(wanted), None, weights_only, hashes=is_main)
    if found.damage is not None:
        raise error_for_damage(Path(wanted), found.damage, weights_only)
    _warn(Path(wanted), found, is_main)
    return str(wanted)


def error_for_damage(checkpoint: Path, damage: str, weights_only: bool) -> CheckpointError:
    """Return the error for a damaged checkpoint that was named, with what to use instead."""
    others = [path for path in checkpoints(checkpoint.parent) if path.name != checkpoint.name]
    whole = next((path for path in others if examine(path, None, weights_only).fault is None), None)
    instead = "no other checkpoint next to it is complete; start over without it (--no_resume)"
    if whole is not None:
        instead = f"use resume_from_checkpoint: {whole}, which is complete"
    return CheckpointError(f"{checkpoint} cannot be resumed from: {damage}; {instead}")


def _warn(checkpoint: Path, found: Findings, tells: bool) -> None:
    differing = "; ".join((*found.changes, *found.spare))
    if differing and tells:
        logger.warning("%s was changed since it was written, but the run resumes from it: %s", checkpoint, differing)


def _newer_than_run(checkpoint: Path) -> Optional[str]:
    """Return a reason if the checkpoint is later than its run, which has resumed from an earlier checkpoint since."""
    step = read_object_or_empty(checkpoint.parent / "run.json").get("step")
    if not isinstance(step, int) or step_of(checkpoint) <= step:
        return None
    return f"the run was last seen at step {step}, so this checkpoint is from an earlier start"
