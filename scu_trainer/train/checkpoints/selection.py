"""Which checkpoint can be gone on from, and which is chosen unasked; ``findings.py`` says what one is like."""

from __future__ import annotations

import json
import logging
import math
import os
import warnings
from pathlib import Path
from typing import Any, Optional

from scu_trainer.errors import CheckpointError, StorageError
from scu_trainer.run_files import read_json
from scu_trainer.train.checkpoints.findings import STATE, Findings, examine
from scu_trainer.train.checkpoints.format import named_as_one, step_of

logger = logging.getLogger("scu_trainer")


def newest_checkpoint(
    run: Path, world_size: Optional[int], weights_only: bool = False, tells: bool = True
) -> tuple[Optional[Path], list[str]]:
    """The newest one in ``run`` from which ``world_size`` ranks can go on, or where none is whole, the newest that can
    be read; and why newer ones were skipped, which the log says, too, if it ``tells``."""
    skipped: list[str] = []
    changed: Optional[tuple[Path, Findings]] = None
    for checkpoint in named_as_one(run):
        found = examine(checkpoint, world_size, weights_only)
        fault = found.fault or _past_the_run(checkpoint)
        if fault is None:
            _warn(checkpoint, found, tells)
            return checkpoint, skipped
        if changed is None and found.damage is None and _past_the_run(checkpoint) is None:
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
    """The newest one in ``run``, for any number of ranks, and why newer ones were skipped. Raises CheckpointError."""
    newest, skipped = newest_checkpoint(run, None, weights_only, tells)
    if newest is None:
        raise CheckpointError(
            f"{run} holds no checkpoint to resume from ({'; '.join(skipped) or 'none is there'}); give the path of one "
            "to resume_from_checkpoint, or drop it to start over"
        )
    return newest, skipped


def selected_checkpoint(wanted: Any, output_dir: str, weights_only: bool, is_main: bool) -> Any:
    """The checkpoint of ``train(resume_from_checkpoint=wanted)``; True: the newest whole one in ``output_dir``.

    What is not there at all, or no path, is returned as it is: the stock Trainer says what is wrong with it.
    ``is_main``: the rank that tells what it finds, and also compares the contents of one that is named. Raises
    CheckpointError.
    """
    if wanted is True:
        run = Path(output_dir)
        return str(whole_checkpoint(run, weights_only, is_main)[0]) if run.is_dir() and named_as_one(run) else wanted
    if not isinstance(wanted, (str, os.PathLike)) or not os.path.lexists(wanted):
        return wanted
    found = examine(Path(wanted), None, weights_only, hashes=is_main)
    if found.damage is not None:
        raise CheckpointError(f"{wanted} cannot be resumed from: {found.damage}")
    _warn(Path(wanted), found, is_main)
    return str(wanted)


def _warn(checkpoint: Path, found: Findings, tells: bool) -> None:
    differing = "; ".join((*found.changes, *found.spare))
    if differing and tells:
        logger.warning("%s was changed since it was written, but the run resumes from it: %s", checkpoint, differing)


def _past_the_run(checkpoint: Path) -> Optional[str]:
    """A run that was taken back to an earlier checkpoint leaves later ones of another past behind."""
    step = content_of(checkpoint.parent / "run.json").get("step")
    if not isinstance(step, int) or step_of(checkpoint) <= step:
        return None
    return f"the run was last seen at step {step}, so it is of an earlier start"


def tell_of_fresh_optimizer(checkpoint: Path) -> None:
    """The stock Trainer reads optimizer and schedule both or, without a word, neither."""
    missing = [name for name in ("optimizer.pt", "scheduler.pt") if not (checkpoint / name).is_file()]
    if missing:
        names = " and no ".join(missing)
        logger.warning("%s holds no %s: the optimizer and its schedule start over", checkpoint, names)


def tell_of_fresh_reference(checkpoint: Path, trainer: Any) -> None:
    """TRL moves a reference model (DPO, GRPO, ...) or a teacher (SDFT, SDPO) after the trained one, and saves it
    nowhere."""
    args = trainer.args
    if getattr(args, "sync_ref_model", False):
        name, what, setting, steps = "ref_model", "reference model", "sync_ref_model", args.ref_model_sync_steps
    elif getattr(args, "teacher_model_kind", None) == "ema":
        name, what, setting, steps = "teacher_model", "teacher", "teacher_model_kind: ema", args.teacher_sync_steps
    else:
        return
    moved = getattr(trainer, name, None)
    if moved is None or read_json(checkpoint / STATE)["global_step"] < steps:
        return
    advice = (
        f". To continue exactly, save trainer.{name}.state_dict() with each checkpoint (in on_save of a callback), "
        f"and give it to trainer.{name}.load_state_dict before you call train"
    )
    logger.warning(
        "%s does not hold the %s, which had followed the trained one (%s): it starts over from the one that this "
        "trainer began with, so the result is not that of an uninterrupted run%s",
        checkpoint,
        what,
        setting,
        "" if moved is trainer.model else advice,  # an adapter beside the trained one, whose copies a callback holds
    )


def tell_of_lost_generations(checkpoint: Path, args: Any, steps_per_epoch: int) -> None:
    """TRL generates for several steps at once, and saves nowhere what is still to be trained on."""
    generates_for = getattr(args, "steps_per_generation", None)
    if generates_for is None:
        return
    batches, accumulated = generates_for * getattr(args, "num_iterations", 1), args.gradient_accumulation_steps
    if read_json(checkpoint / STATE)["global_step"] % steps_per_epoch * accumulated % batches:
        logger.warning(
            "%s does not hold what had been generated for this step and the next ones: it is generated again, so "
            "the result is not that of an uninterrupted run. To continue exactly, resume from a checkpoint whose step "
            "is a multiple of %d, which is how many steps one generation takes (set save_steps to such a number)",
            checkpoint,
            math.lcm(batches, accumulated) // accumulated,
        )


def catch_up(scheduler: Any, checkpoint: Path) -> None:
    """A schedule whose state was not saved goes to where the checkpoint is."""
    steps = read_json(checkpoint / STATE)["global_step"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")  # no weight was stepped yet
        for _ in range(steps):
            scheduler.step()


def content_of(path: Path) -> dict[str, Any]:
    """Of a JSON file; {} where there is none. Raises StorageError for what is no object."""
    content = read_json(path) if path.is_file() else {}
    if not isinstance(content, dict):
        raise StorageError(f"{path} holds {json.dumps(content)[:40]} instead of an object; delete it or restore it")
    return content
