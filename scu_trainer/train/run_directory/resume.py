"""Where a run writes and which checkpoint it resumes from: decided once, by rank 0, before anything is written.

``resume_from_checkpoint`` takes a path, ``true`` (the newest checkpoint in output_dir), or ``auto``: resume the
unfinished run that is there, else start one. Without it, an unfinished run of the same configuration is resumed anyway
(``resume: false`` starts another one next to it). Checkpoints must be as they were written: hashes are compared.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Optional

import psutil
from accelerate.utils import gather_object
from transformers import TrainingArguments

from scu_trainer.errors import CheckpointError
from scu_trainer.figures import first_few, format_setting
from scu_trainer.run_files import read_object_or_empty
from scu_trainer.train.checkpoints.compatibility import SPLIT, changed_settings, changes, valid_facts
from scu_trainer.train.checkpoints.format import checkpoints
from scu_trainer.train.checkpoints.selection import newest_checkpoint
from scu_trainer.train.run_directory.layout import free_name, names_in_use
from scu_trainer.train.run_directory.run_lock import holds_nothing
from scu_trainer.train.step.distributed.deepspeed_rules import needed_launch

AUTO = "auto"
ASKED_FOR = "output_dir_asked_for"
"""Key of training_config.json: the output_dir that was asked for, if the run took another name."""

START_NUMBER = "start_number"
"""Key of training_config.json: the number of this start among those that were given the same output_dir."""

OF_A_RUN = ("run.json", "training_config.json")

RESTARTED = "restarted by the launcher"


@dataclass(frozen=True)
class Start:
    """The decision where to start.

    checkpoint: the value for the stock ``train(resume_from_checkpoint=...)``. line: what the user reads. is_done: an
    earlier start of this same launch has finished the run.
    """

    output_dir: Path
    checkpoint: Optional[str | bool] = None
    line: str = ""
    is_done: bool = False


@dataclass(frozen=True)
class Request:
    """What the user asked for, and what the launcher knows.

    restarted_since_s: when a launch began that has restarted its processes, in seconds since 1970; else None.
    configuration: an unfinished run with the same one is resumed by default; None: it is not.
    weights_only: also resume from a checkpoint without optimizer state.
    launched: as ``launched_under`` returns it; None if unknown.
    """

    wanted: Optional[str | bool]
    output_dir: Path
    world_size: int
    restarted_since_s: Optional[float] = None
    configuration: Optional[dict[str, Any]] = None
    weights_only: bool = False
    launched: Optional[str] = None

    @property
    def is_explicit(self) -> bool:
        return self.wanted not in (None, AUTO)


def wanted_checkpoint(training: TrainingArguments) -> Optional[str | bool]:
    """Return ``resume_from_checkpoint`` as a path, True for the newest, "auto", or None."""
    wanted = str(training.resume_from_checkpoint or "")
    if wanted.lower() in ("", "false"):
        return None
    return True if wanted.lower() == "true" else AUTO if wanted.lower() == AUTO else wanted


def check_resumable(training: TrainingArguments) -> None:
    """Raise CheckpointError for a value of ``resume_from_checkpoint`` that can never work with this configuration."""
    wanted, output_dir = wanted_checkpoint(training), Path(training.output_dir)
    if wanted is None or (wanted != AUTO and restart_count() > 0):  # restarted: it may have been rotated away
        return
    if wanted == AUTO:
        if training.save_only_model:
            raise CheckpointError(
                "resume_from_checkpoint: auto cannot resume from what save_only_model: true writes (no "
                "optimizer state); drop one of them"
            )
    elif wanted is True:
        if not any(output_dir.glob("checkpoint-*")):
            raise CheckpointError(
                f"{output_dir} holds no checkpoint-N; give the path of one to resume_from_checkpoint, or drop it to "
                "start over"
            )
    elif not (Path(str(wanted)) / "trainer_state.json").is_file():
        raise CheckpointError(
            f"resume_from_checkpoint {wanted!r} is not a checkpoint (no trainer_state.json there); give a checkpoint-N "
            "folder, true or auto"
        )


def restart_count() -> int:
    """Return how often torchrun has restarted this process after a failure. A replaced node counts from zero."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def restarted_since_s() -> Optional[float]:
    """Return when this launch began, in seconds since 1970, if it has restarted its processes; else None. Ranks on a
    replaced node know nothing of a restart, so the oldest launcher and the highest count apply."""
    own = (restart_count(), _launcher_began_s()) if "TORCHELASTIC_RESTART_COUNT" in os.environ else (0, 0.0)
    seen = gather_object([own])
    return min(began_s for _, began_s in seen) if any(count > 0 for count, _ in seen) else None


def _launcher_began_s() -> float:
    return psutil.Process(os.getppid()).create_time()


# -- the decision ------------------------------------------------------------------------------------------------------


def decide(request: Request) -> Start:
    """Return the start, given what is on the disk. Raises CheckpointError if a resume would train something else."""
    if request.is_explicit:
        return _explicit_start(request)
    run = latest_run(request.output_dir)
    ours = run is not None and _is_of_this_launch(run, request)
    if run is None:
        return _new_start(request.output_dir)
    if not ours:
        run = _unfinished_run_alike(request) or run
    if not (ours or request.wanted == AUTO):
        return _default_start(run, request)
    if not _is_finished(run):
        start = _resumed_start(run, request)
        return replace(start, line=f"{RESTARTED}: {start.line}") if ours else start
    if ours:
        return Start(run, line=f"{run} was finished before this restart; nothing is left to do", is_done=True)
    return _new_start(request.output_dir)


def _unfinished_run_alike(request: Request) -> Optional[Path]:
    """Return the last run that this configuration began, if it is unfinished; others may have been started since."""
    alike = [run for run in _runs_of(request.output_dir) if _changed_configuration(run, request) == {}]
    run = max(alike, key=_start_order, default=None)
    return None if run is None or _is_finished(run) else run


def _changed_configuration(run: Path, request: Request) -> Optional[dict[str, tuple[Any, Any]]]:
    """Return what differs from the configuration that began ``run``; None if one of them is unknown."""
    before = _description(run)
    if "configuration" not in before or request.configuration is None:
        return None
    changed = changed_settings(before["configuration"], request.configuration)
    if before.get("world_size", request.world_size) != request.world_size:
        changed["processes"] = (before["world_size"], request.world_size)
    return changed


def _default_start(run: Path, request: Request) -> Start:
    """Resume an unfinished run if it was begun by this configuration, else start a new one."""
    if _is_finished(run) or request.configuration is None:
        return _new_start(request.output_dir)
    changed = _changed_configuration(run, request)
    if changed != {}:
        return _new_start(request.output_dir, _difference_line(run, changed or {}, request))
    start = _resumed_start(run, request)
    if start.checkpoint is not None:
        return replace(start, line=f"{start.line} (--no_resume starts over)")
    if checkpoints(run):
        return _new_start(request.output_dir, f"no checkpoint of {run} can be resumed from, see the log")
    return start


def _difference_line(run: Path, changed: dict[str, tuple[Any, Any]], request: Request) -> str:
    differ = (f"{name} {format_setting(before)}, now {format_setting(now)}" for name, (before, now) in changed.items())
    named = first_few(differ, between="; ")
    what = f"another configuration ({named})" if changed else "an unknown configuration"
    return f"{run} holds an unfinished run of {what}; {_how_to_resume(run, request)}"


def _how_to_resume(run: Path, request: Request) -> str:
    """Return how to resume an unfinished run with other settings, some of which auto refuses."""
    before, settings = _description(run), request.configuration or {}
    seed = settings.get("seed") if settings.get("data_seed") is None else settings["data_seed"]
    now = {"configuration": settings, "split_seed": seed, "data": {}}
    refused = [change for change in changes(before, now) if change.is_refused]
    if any(change.name != SPLIT for change in refused):
        return "only the settings that it was started with would resume it"
    if needed := _launch_for_newest(run, request):
        return f"to resume it, start it {needed}, as before"
    if before.get("world_size", request.world_size) != request.world_size:
        return "to resume it, start as many processes as before, or name its checkpoint in resume_from_checkpoint"
    own = f"data_seed: {refused[0].before} and " if refused else ""
    return f"{own}resume_from_checkpoint: auto would resume it"


def _launch_for_newest(run: Path, request: Request) -> Optional[str]:
    """Return ``needed_launch`` for the newest checkpoint of ``run``."""
    newest = next(iter(checkpoints(run)), None)
    return None if newest is None else needed_launch(newest, request.launched, request.weights_only)


def _explicit_start(request: Request) -> Start:
    """Return the checkpoint that was named or, after a restart, what this launch has written since."""
    run = request.output_dir
    folder = run.resolve() if request.wanted is True else Path(str(request.wanted)).resolve().parent
    own = [path for path in (run, *_runs_of(run)) if path.resolve() == folder]
    run = own[0] if own else latest_run(run) or run
    if _is_of_this_launch(run, request) and _has_resumed_from(run, request.wanted):
        newest, _ = newest_checkpoint(run, request.world_size, request.weights_only)
        if newest is not None:
            return Start(run, str(newest), f"{RESTARTED}: {resume_line(newest)}")
    elif not own and (_is_finished(run) or _changed_configuration(run, request) != {}):
        return replace(_new_start(request.output_dir), checkpoint=request.wanted)
    return Start(run, request.wanted)


def _has_resumed_from(run: Path, wanted: Optional[str | bool]) -> bool:
    """Return whether the run has already resumed from ``wanted``. Its description is rewritten when its training
    begins; until then its checkpoints are those of an earlier start."""
    return wanted in (True, _description(run).get("configuration", {}).get("resume_from_checkpoint", wanted))


def _new_start(output_dir: Path, reason: str = "") -> Start:
    free = free_name(output_dir)
    reason = reason or f"{output_dir} {_content_in_words(output_dir)}"
    return Start(free, line="" if free == output_dir else f"{reason}; this one goes to {free}")


def _content_in_words(folder: Path) -> str:
    """Return what prevents a run in ``folder``. A folder with only other files is not called a run."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if not names or any(name in OF_A_RUN or name.startswith("checkpoint-") for name in names):
        return "already holds a run"
    return f"holds no run, but other files ({first_few(names)})"


def _resumed_start(run: Path, request: Request) -> Start:
    if checkpoints(run):
        _require_same_ranks(run, request)
    newest, skipped = newest_checkpoint(run, request.world_size, request.weights_only)
    if newest is None:
        line = f"{run} holds a run without a usable checkpoint; it starts over there"
        return Start(run, line=line + _hint_at_earlier_run(run, request))
    return Start(run, str(newest), resume_line(newest, skipped))


def _hint_at_earlier_run(run: Path, request: Request) -> str:
    """Return a hint at an earlier unfinished run with a checkpoint, if the latest run has not saved any."""
    for other in sorted(_runs_of(request.output_dir), key=_start_order, reverse=True):
        if other == run or _is_finished(other):
            continue
        newest, _ = newest_checkpoint(other, request.world_size, request.weights_only)
        if newest is not None:
            return f" ({other} is unfinished, too: --resume_from_checkpoint {newest} resumes that one)"
    return ""


def resume_line(checkpoint: Path, skipped: Sequence[str] = ()) -> str:
    """Return what the user reads."""
    return f"resuming from {checkpoint}" + (f", the newest that can be used ({'; '.join(skipped)})" if skipped else "")


def _require_same_ranks(run: Path, request: Request) -> None:
    before, now = _description(run).get("world_size", request.world_size), request.world_size
    if before != now:
        anyway = ", or name the checkpoint in resume_from_checkpoint to resume anyway"
        raise CheckpointError(
            f"{run} was trained by {before} processes, this launch has {now}: the optimizer would see other batches "
            f"from here; start {before} processes{'' if _launch_for_newest(run, request) else anyway}"
        )


# -- what is on the disk -----------------------------------------------------------------------------------------------


def latest_run(output_dir: Path) -> Optional[Path]:
    """Return the run that was started last, in ``output_dir`` or in an output_dir-2, ... that was used instead of it.
    None if there is no such run."""
    return max(_runs_of(output_dir), key=_start_order, default=None)


def next_start_number(output_dir: Path) -> int:
    """Return the number of the next start in ``output_dir``. Clocks may be set back; numbers are not."""
    return 1 + max((_start_number(run) for run in _runs_of(output_dir)), default=0)


def _start_order(run: Path) -> tuple[int, float]:
    return _start_number(run), _updated_s(run)


def _start_number(run: Path) -> int:
    number = _description(run).get(START_NUMBER)
    return number if isinstance(number, int) else 0


def _runs_of(output_dir: Path) -> list[Path]:
    return [
        run
        for run in names_in_use(output_dir)  # output_dir-2 may also be the output_dir of another job
        if (run == output_dir or _description(run).get(ASKED_FOR) == output_dir.name)
        and (run / "run.json").is_file()
        and not holds_nothing(run)
    ]


def _status(run: Path) -> dict[str, Any]:
    return read_object_or_empty(run / "run.json")


def _description(run: Path) -> dict[str, Any]:
    return valid_facts(read_object_or_empty(run / "training_config.json"))


def _is_finished(run: Path) -> bool:
    return _status(run).get("status") == "finished"


def _updated_s(run: Path) -> float:
    """Return when run.json was last updated, in seconds since 1970."""
    try:
        return datetime.fromisoformat(_status(run)["updated"]).timestamp()
    except (KeyError, TypeError, ValueError):  # not written yet, or by another program
        return 0.0


def _is_of_this_launch(run: Path, request: Request) -> bool:
    """Return whether this launch wrote the run before it restarted its processes."""
    return request.restarted_since_s is not None and _updated_s(run) >= request.restarted_since_s
