"""Where a run writes and what it goes on from: decided once, by rank 0, before anything is written.

``resume_from_checkpoint`` takes a path, ``true`` (the newest in output_dir), or ``auto``: go on with the run that is
there and unfinished, else start one. ``auto`` is what a job needs that may be killed and started again by a launcher.
"""

from __future__ import annotations

import json
import logging
import os
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from scu_trainer.errors import CheckpointError, UserError
from scu_trainer.run_files import read_json
from scu_trainer.train.run_directory import free_name, names_in_use

if TYPE_CHECKING:
    from transformers import TrainingArguments

logger = logging.getLogger("scu_trainer")

AUTO = "auto"
OPTIMIZER_STATES = ("optimizer.pt", "optimizer.bin", "optimizer_0", "latest")
"""Of the stock Trainer, of FSDP (whole, in parts), of DeepSpeed."""

ASKED_FOR = "output_dir_asked_for"
"""Key of training_config.json: the name in place of which the run took the one that it has."""

RESTARTED = "restarted by the launcher"


@dataclass(frozen=True)
class Start:
    """``checkpoint``: what the stock ``train(resume_from_checkpoint=...)`` takes. ``line``: what the user is told.

    ``is_done``: an earlier start of this same launch has finished the run.
    """

    output_dir: Path
    checkpoint: Optional[str | bool] = None
    line: str = ""
    is_done: bool = False


@dataclass(frozen=True)
class Request:
    """What was asked for, and what the launcher knows.

    ``restarted_since_s``: when a launch began that has restarted its processes, in seconds since 1970; else None.
    """

    wanted: Optional[str | bool]
    output_dir: Path
    world_size: int
    restarted_since_s: Optional[float] = None

    @property
    def is_explicit(self) -> bool:
        return self.wanted not in (None, AUTO)


def wanted_checkpoint(training: TrainingArguments) -> Optional[str | bool]:
    """``resume_from_checkpoint`` as a path, True for the newest, "auto", or None."""
    wanted = str(training.resume_from_checkpoint or "")
    if wanted.lower() in ("", "false"):
        return None
    return True if wanted.lower() == "true" else AUTO if wanted.lower() == AUTO else wanted


def check_resumable(training: TrainingArguments) -> None:
    """Raise CheckpointError for a wish that no run of this configuration could ever be granted."""
    wanted, output_dir = wanted_checkpoint(training), Path(training.output_dir)
    if wanted is None or (wanted != AUTO and restart_count() > 0):  # an old checkpoint may be rotated away by now
        return
    if wanted == AUTO:
        if training.save_only_model:
            raise CheckpointError(
                "resume_from_checkpoint: auto cannot go on from what save_only_model: true writes (no optimizer "
                "state); drop one of them"
            )
    elif wanted is True:
        if not any(output_dir.glob("checkpoint-*")):
            raise CheckpointError(
                f"{output_dir} holds no checkpoint-N; give the path of one to resume_from_checkpoint, or drop it to "
                "start anew"
            )
    elif not (Path(str(wanted)) / "trainer_state.json").is_file():
        raise CheckpointError(
            f"resume_from_checkpoint {wanted!r} is no checkpoint (no trainer_state.json there); give a checkpoint-N "
            "folder, true or auto"
        )


# -- one decision for all ranks ----------------------------------------------------------------------------------------


def resolve(training: TrainingArguments) -> Start:
    """The start of this run, the same on every rank: rank 0 looks, the others are told.

    Raises CheckpointError, then on all of them: a rank that only waited would hang.
    """
    ranks = training.world_size
    request = Request(wanted_checkpoint(training), Path(training.output_dir), ranks, _restarted_since_s(ranks))
    return _from_first_rank(lambda: decide(request), training.process_index, ranks)


def restart_count() -> int:
    """How often torchrun has started this process anew after a failure. A node that was replaced counts from zero."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _restarted_since_s(world_size: int) -> Optional[float]:
    """Ranks on a replaced node know nothing of a restart, so the oldest launcher and the highest count hold."""
    seen = [(restart_count(), _launcher_began_s())] if "TORCHELASTIC_RESTART_COUNT" in os.environ else [(0, 0.0)]
    if world_size > 1:
        from accelerate.utils import gather_object

        seen = gather_object(seen)
    return min(began_s for _, began_s in seen) if any(count > 0 for count, _ in seen) else None


def _launcher_began_s() -> float:
    import psutil

    return psutil.Process(os.getppid()).create_time()


def _from_first_rank(decision: Callable[[], Start], rank: int, world_size: int) -> Start:
    answer: list[Any] = [_result_or_error(decision) if rank == 0 else None]
    if world_size > 1:
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(answer)
    if isinstance(answer[0], UserError):
        raise answer[0]
    return answer[0]


def _result_or_error(decision: Callable[[], Start]) -> Start | UserError:
    try:
        return decision()
    except UserError as error:
        return error


# -- the decision ------------------------------------------------------------------------------------------------------


def decide(request: Request) -> Start:
    """Looks at the disk only. Raises CheckpointError where going on would silently train something else."""
    if request.is_explicit:
        return _asked_for(request)
    run = latest_run(request.output_dir)
    ours = run is not None and _is_of_this_launch(run, request)
    if run is None or not (ours or request.wanted == AUTO):
        return _beside(request.output_dir)
    if not _is_finished(run):
        start = _go_on(run, request)
        return replace(start, line=f"{RESTARTED}: {start.line}") if ours else start
    if ours:
        return Start(run, line=f"{run} was finished before this restart; nothing is left to do", is_done=True)
    return _beside(request.output_dir)


def _asked_for(request: Request) -> Start:
    """The checkpoint that was named; after a restart what this launch has written since."""
    first = Start(request.output_dir, request.wanted)
    if not _is_of_this_launch(request.output_dir, request):
        return first
    since = newest_checkpoint(request.output_dir, request.world_size)
    return first if since is None else Start(request.output_dir, str(since), f"{RESTARTED}: {_from(since)}")


def _beside(output_dir: Path) -> Start:
    free = free_name(output_dir)
    return Start(free, line="" if free == output_dir else f"{output_dir} already holds a run; this one goes to {free}")


def _go_on(run: Path, request: Request) -> Start:
    if checkpoints(run):
        _require_same_ranks(run, request.world_size)
    newest = newest_checkpoint(run, request.world_size)
    if newest is None:
        return Start(run, line=f"{run} holds a run without a usable checkpoint; it starts anew there")
    return Start(run, str(newest), _from(newest))


def _from(checkpoint: Path) -> str:
    return f"going on from {checkpoint}"


def _require_same_ranks(run: Path, world_size: int) -> None:
    before = _description(run).get("world_size", world_size)
    if before != world_size:
        raise CheckpointError(
            f"{run} was trained by {before} processes, this launch has {world_size}: the optimizer would see other "
            f"batches from here on; start {before} processes, or name the checkpoint in resume_from_checkpoint to go "
            "on all the same"
        )


# -- what is on the disk -----------------------------------------------------------------------------------------------


def latest_run(output_dir: Path) -> Optional[Path]:
    """The run in ``output_dir``, or one that took output_dir-2, ... in its place: that whose run.json is the newest.

    None where no run of ours is.
    """
    runs = [run for run in names_in_use(output_dir) if run == output_dir or _took_place_of(run, output_dir)]
    return max((run for run in runs if (run / "run.json").is_file()), key=_updated_s, default=None)


def _took_place_of(run: Path, output_dir: Path) -> bool:
    """output_dir-2 may as well be what another job was given."""
    return _description(run).get(ASKED_FOR) == output_dir.name


def newest_checkpoint(run: Path, world_size: int) -> Optional[Path]:
    """The newest one in ``run`` from which ``world_size`` ranks can go on; each newer one is named in the log."""
    for checkpoint in checkpoints(run):
        fault = fault_of(checkpoint, world_size) or _past_the_run(checkpoint)
        if fault is None:
            return checkpoint
        logger.warning("%s is skipped: %s", checkpoint, fault)
    return None


def checkpoints(run: Path) -> list[Path]:
    """Every checkpoint-N of ``run``, whole or not, the newest first."""
    return sorted((path for path in run.glob("checkpoint-*") if _step(path) >= 0), key=_step, reverse=True)


def fault_of(checkpoint: Path, world_size: int) -> Optional[str]:
    """What keeps ``world_size`` ranks from going on from here; None if nothing does.

    Rank 0 writes trainer_state.json last, but the other ranks write their random state without waiting for it.
    """
    if not _is_json(checkpoint / "trainer_state.json"):
        return "no whole trainer_state.json, so it was being written when the run ended"
    if not any((checkpoint / name).exists() for name in OPTIMIZER_STATES):
        return "it holds no optimizer state"
    ranks = [f"rng_state_{rank}.pth" for rank in range(world_size)] if world_size > 1 else ["rng_state.pth"]
    torn = next((name for name in ranks if not _is_zip(checkpoint / name)), None)
    return None if torn is None else f"no whole {torn}"


def _past_the_run(checkpoint: Path) -> Optional[str]:
    """A run that was taken back to an earlier checkpoint leaves later ones of another past behind."""
    step = _status(checkpoint.parent).get("step")
    if step is None or _step(checkpoint) <= step:
        return None
    return f"the run was last seen at step {step}, so it is of an earlier start"


def _step(checkpoint: Path) -> int:
    number = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
    return int(number[1]) if number else -1


def _is_json(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_bytes()), dict)
    except (FileNotFoundError, ValueError):
        return False


def _is_zip(path: Path) -> bool:
    """``torch.save`` writes a zip archive, whose directory comes last."""
    return path.is_file() and zipfile.is_zipfile(path)


def _status(run: Path) -> dict[str, Any]:
    return _content(run / "run.json")


def _description(run: Path) -> dict[str, Any]:
    return _content(run / "training_config.json")


def _content(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _is_finished(run: Path) -> bool:
    return _status(run).get("status") == "finished"


def _updated_s(run: Path) -> float:
    """Seconds since 1970."""
    updated = _status(run).get("updated")
    return datetime.fromisoformat(updated).timestamp() if updated else 0.0


def _is_of_this_launch(run: Path, request: Request) -> bool:
    """Whether processes that the launcher has restarted since wrote this run."""
    return request.restarted_since_s is not None and _updated_s(run) >= request.restarted_since_s
