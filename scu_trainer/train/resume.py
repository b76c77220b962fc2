"""Where a run writes and what it goes on from: decided once, by rank 0, before anything is written.

``resume_from_checkpoint`` takes a path, ``true`` (the newest in output_dir), or ``auto``: go on with the run that is
there and unfinished, else start one. Without it, an unfinished run of the same configuration goes on all the same
(``resume: false`` starts another one beside it). Checkpoints are taken only as they were written: hashes are compared.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, TypeVar

from scu_trainer.errors import CheckpointError, UserError
from scu_trainer.run_files import read_json
from scu_trainer.train.checkpoint import checkpoints, clear_staging, fault_of_files, set_aside, step_of
from scu_trainer.train.continuity import changed_settings
from scu_trainer.train.run_directory import free_name, names_in_use
from scu_trainer.train.run_lock import RunLock

if TYPE_CHECKING:
    from transformers import TrainingArguments

logger = logging.getLogger("scu_trainer")
T = TypeVar("T")

AUTO = "auto"
OPTIMIZER_STATES = ("optimizer.pt", "optimizer.bin", "optimizer_0", "latest")
"""Of the stock Trainer, of FSDP (whole, in parts), of DeepSpeed."""

ASKED_FOR = "output_dir_asked_for"
"""Key of training_config.json: the name in place of which the run took the one that it has."""

RESTARTED = "restarted by the launcher"
WEIGHTS_ONLY_HINT = "--weights_only takes its weights and begins the optimizer anew"


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
    ``configuration``: an unfinished run of the same one goes on unasked; None: it does not. ``weights_only``: also from
    a checkpoint without optimizer state.
    """

    wanted: Optional[str | bool]
    output_dir: Path
    world_size: int
    restarted_since_s: Optional[float] = None
    configuration: Optional[dict[str, Any]] = field(default=None, hash=False)
    weights_only: bool = False

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


class Claim:
    """The directory of a run, decided on and locked until this is closed. Rank 0 looks, the others are told.

    Raises CheckpointError, and StorageError where another process is writing there, then on all ranks: a rank that
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
            wanted, Path(training.output_dir), ranks, _restarted_since_s(ranks), configuration, weights_only
        )
        self.start: Start = from_first_rank(lambda: self._claimed(request), training.process_index, ranks)

    def _claimed(self, request: Request) -> Start:
        start = decide(request)
        if start.is_done:
            return start
        self._lock = RunLock(start.output_dir)
        try:
            # What a killed run was writing is nobody's now; sealed and only without its name, it is the newest.
            named, cleared = clear_staging(start.output_dir)
            start = decide(request) if named else start
            start = _checked(start, request) if request.is_explicit else start
            notes = [start.line] if start.line else []
            if cleared:
                notes.append(f"removed what a killed run had begun to write: {', '.join(cleared)}")
            step = 0 if start.checkpoint is None else max(0, step_of(Path(str(start.checkpoint))))
            aside = set_aside(start.output_dir, step)
            if aside:
                notes.append(f"put aside, being of a past that is not gone on with: {', '.join(aside)}")
        except BaseException:
            self._lock.release()
            raise
        return replace(start, line="\n".join(notes))

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


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


def from_first_rank(decision: Callable[[], T], rank: int, world_size: int) -> T:
    """``decision()``, taken by rank 0 and told to all; a UserError of it is raised on all of them."""
    answer: list[Any] = [_result_or_error(decision) if rank == 0 else None]
    if world_size > 1:
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(answer)
    if isinstance(answer[0], UserError):
        raise answer[0]
    return answer[0]


def _result_or_error(decision: Callable[[], T]) -> T | UserError:
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
    if run is None:
        return _beside(request.output_dir)
    if not (ours or request.wanted == AUTO):
        return _unasked(run, request)
    if not _is_finished(run):
        start = _go_on(run, request)
        return replace(start, line=f"{RESTARTED}: {start.line}") if ours else start
    if ours:
        return Start(run, line=f"{run} was finished before this restart; nothing is left to do", is_done=True)
    return _beside(request.output_dir)


def _unasked(run: Path, request: Request) -> Start:
    """Goes on with an unfinished run if it is the one that this configuration began."""
    if _is_finished(run) or request.configuration is None:
        return _beside(request.output_dir)
    before = _description(run)
    changed = changed_settings(before.get("configuration", {}), request.configuration)
    if before.get("world_size", request.world_size) != request.world_size:
        changed["processes"] = (before["world_size"], request.world_size)
    if "configuration" not in before or changed:
        return _beside(request.output_dir, _differing(run, changed))
    if checkpoints(run) and newest_checkpoint(run, request.world_size, request.weights_only) is None:
        return _beside(request.output_dir, f"no checkpoint of {run} can be gone on from, see the log")
    start = _go_on(run, request)
    return replace(start, line=f"{start.line} (--no_resume starts over)" if start.checkpoint else start.line)


def _differing(run: Path, changed: dict[str, tuple[Any, Any]]) -> str:
    told = "; ".join(f"{name} {before}, now {now}" for name, (before, now) in list(changed.items())[:3])
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    what = f"another configuration ({told}{more})" if changed else "an unknown configuration"
    return f"{run} holds an unfinished run of {what}; resume_from_checkpoint: auto would go on with it"


def _asked_for(request: Request) -> Start:
    """The checkpoint that was named; after a restart what this launch has written since."""
    first = Start(request.output_dir, request.wanted)
    if not _is_of_this_launch(request.output_dir, request):
        return first
    since = newest_checkpoint(request.output_dir, request.world_size)
    return first if since is None else Start(request.output_dir, str(since), f"{RESTARTED}: {_from(since)}")


def _checked(start: Start, request: Request) -> Start:
    """The checkpoint that was asked for by name, or as the newest, if it is whole. Raises CheckpointError."""
    if start.checkpoint is True:
        return _newest_here(request)
    checkpoint = Path(str(start.checkpoint))
    fault = fault_of(checkpoint, None, request.weights_only)
    if fault is not None:
        others = [path for path in checkpoints(checkpoint.parent) if path.name != checkpoint.name]
        whole = next((path for path in others if fault_of(path, None, request.weights_only) is None), None)
        instead = f"resume_from_checkpoint: {whole} is whole" if whole is not None else "none beside it is whole"
        raise CheckpointError(f"{checkpoint} cannot be gone on from: {fault}; {instead}")
    return start


def _newest_here(request: Request) -> Start:
    newest, skipped = _newest(request.output_dir, None, request.weights_only)
    if newest is None:
        raise CheckpointError(
            f"{request.output_dir} holds no checkpoint to go on from ({'; '.join(skipped) or 'none is there'}); give "
            "the path of one to resume_from_checkpoint, or drop it to start anew"
        )
    return Start(request.output_dir, str(newest), _from(newest, skipped))


def _beside(output_dir: Path, reason: str = "") -> Start:
    free = free_name(output_dir)
    reason = reason or f"{output_dir} already holds a run"
    return Start(free, line="" if free == output_dir else f"{reason}; this one goes to {free}")


def _go_on(run: Path, request: Request) -> Start:
    if checkpoints(run):
        _require_same_ranks(run, request.world_size)
    newest, skipped = _newest(run, request.world_size, request.weights_only)
    if newest is None:
        return Start(run, line=f"{run} holds a run without a usable checkpoint; it starts anew there")
    return Start(run, str(newest), _from(newest, skipped))


def _from(checkpoint: Path, skipped: Sequence[str] = ()) -> str:
    return f"going on from {checkpoint}" + (f", the newest that is whole ({'; '.join(skipped)})" if skipped else "")


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


def newest_checkpoint(run: Path, world_size: Optional[int], weights_only: bool = False) -> Optional[Path]:
    """The newest one in ``run`` from which ``world_size`` ranks can go on; each newer one is named in the log."""
    return _newest(run, world_size, weights_only)[0]


def _newest(run: Path, world_size: Optional[int], weights_only: bool) -> tuple[Optional[Path], list[str]]:
    """Also why newer ones were skipped."""
    skipped: list[str] = []
    for checkpoint in checkpoints(run):
        fault = fault_of(checkpoint, world_size, weights_only) or _past_the_run(checkpoint)
        if fault is None:
            return checkpoint, skipped
        logger.warning("%s is skipped: %s", checkpoint, fault)
        skipped.append(f"{checkpoint.name} is skipped: {fault}")
    return None, skipped


def usable(wanted: str | bool, output_dir: str, weights_only: bool) -> str:
    """The checkpoint of ``train(resume_from_checkpoint=wanted)``; True: the newest whole one in ``output_dir``.

    Contents were compared when the checkpoint was chosen, or are now for True. Raises CheckpointError.
    """
    if wanted is True:
        request = Request(True, Path(output_dir), 1, weights_only=weights_only)
        return str(_newest_here(request).checkpoint)
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
    step = _status(checkpoint.parent).get("step")
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
