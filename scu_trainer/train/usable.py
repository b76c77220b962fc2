"""Which checkpoint can be gone on from: the newest that is whole, and has what a run needs besides its weights."""

from __future__ import annotations

import json
import logging
import warnings
import zipfile
from pathlib import Path
from typing import Any, Optional

from scu_trainer.errors import CheckpointError
from scu_trainer.run_files import read_json
from scu_trainer.train.checkpoint import checkpoints, fault_of_files, step_of

logger = logging.getLogger("scu_trainer")

OPTIMIZER_STATES = ("optimizer.pt", "optimizer.bin", "optimizer_0", "latest")
"""Of the stock Trainer, of FSDP (whole, in parts), of DeepSpeed."""

WEIGHTS_ONLY_HINT = "--weights_only takes its weights and begins the optimizer anew"


def newest_checkpoint(run: Path, world_size: Optional[int], weights_only: bool = False) -> Optional[Path]:
    """The newest one in ``run`` from which ``world_size`` ranks can go on; each newer one is named in the log."""
    return newest_with_reasons(run, world_size, weights_only)[0]


def newest_with_reasons(run: Path, world_size: Optional[int], weights_only: bool) -> tuple[Optional[Path], list[str]]:
    """Also why newer ones were skipped."""
    skipped: list[str] = []
    for checkpoint in checkpoints(run):
        fault = fault_of(checkpoint, world_size, weights_only) or _past_the_run(checkpoint)
        if fault is None:
            return checkpoint, skipped
        logger.warning("%s is skipped: %s", checkpoint, fault)
        skipped.append(f"{checkpoint.name} is skipped: {fault}")
    return None, skipped


def whole_checkpoint(run: Path, weights_only: bool) -> tuple[Path, list[str]]:
    """The newest one in ``run``, for any number of ranks, and why newer ones were skipped. Raises CheckpointError."""
    newest, skipped = newest_with_reasons(run, None, weights_only)
    if newest is None:
        raise CheckpointError(
            f"{run} holds no checkpoint to go on from ({'; '.join(skipped) or 'none is there'}); give the path of one "
            "to resume_from_checkpoint, or drop it to start anew"
        )
    return newest, skipped


def usable(wanted: str | bool, output_dir: str, weights_only: bool) -> str:
    """The checkpoint of ``train(resume_from_checkpoint=wanted)``; True: the newest whole one in ``output_dir``.

    Contents were compared when the checkpoint was chosen, or are now for True. Raises CheckpointError.
    """
    if wanted is True:
        return str(whole_checkpoint(Path(output_dir), weights_only)[0])
    fault = fault_of(Path(wanted), None, weights_only, hashes=False)
    if fault is not None:
        raise CheckpointError(f"{wanted} cannot be gone on from: {fault}")
    return str(wanted)


def has_optimizer(checkpoint: Path) -> bool:
    return any((checkpoint / name).exists() for name in OPTIMIZER_STATES)


def catch_up(scheduler: Any, checkpoint: Path) -> None:
    """A schedule whose state was not saved goes to where the checkpoint is."""
    steps = read_json(checkpoint / "trainer_state.json")["global_step"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")  # no weight was stepped yet
        for _ in range(steps):
            scheduler.step()


def fault_of(
    checkpoint: Path, world_size: Optional[int], weights_only: bool = False, hashes: bool = True
) -> Optional[str]:
    """What keeps ``world_size`` ranks from going on from here; None if nothing does. None ranks: any number of them.

    Of one that the stock Trainer has written (no manifest): rank 0 writes trainer_state.json last, but the other ranks
    write their random state without waiting for it.
    """
    if not _is_json(checkpoint / "trainer_state.json"):
        return "no whole trainer_state.json, so it was being written when the run ended"
    changed = fault_of_files(checkpoint, hashes=hashes)
    if changed is not None:
        return changed
    if not has_optimizer(checkpoint):
        return None if weights_only else f"it holds no optimizer state ({WEIGHTS_ONLY_HINT})"
    torn = next((name for name in _random_states(world_size) if not _is_zip(checkpoint / name)), None)
    return None if torn is None else f"no whole {torn}"


def _random_states(world_size: Optional[int]) -> list[str]:
    if world_size is None:
        return []
    return ["rng_state.pth"] if world_size == 1 else [f"rng_state_{rank}.pth" for rank in range(world_size)]


def _past_the_run(checkpoint: Path) -> Optional[str]:
    """A run that was taken back to an earlier checkpoint leaves later ones of another past behind."""
    step = content_of(checkpoint.parent / "run.json").get("step")
    if step is None or step_of(checkpoint) <= step:
        return None
    return f"the run was last seen at step {step}, so it is of an earlier start"


def _is_json(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_bytes()), dict)
    except (FileNotFoundError, ValueError):
        return False


def _is_zip(path: Path) -> bool:
    """``torch.save`` writes a zip archive, whose directory comes last."""
    return path.is_file() and zipfile.is_zipfile(path)


def content_of(path: Path) -> dict[str, Any]:
    """Of a JSON file; {} where there is none."""
    return read_json(path) if path.is_file() else {}
