"""Makes the stock ``Trainer._save_checkpoint`` atomic: it writes to a staging folder, which is renamed at the end.

The stock method asks the trainer for the run's folder (``_get_output_dir``); while a checkpoint is written, the trainer
returns the staging folder, so the stock Trainer, DeepSpeed, FSDP and the controllers all write there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

from accelerate.utils import gather_object
from safetensors import SafetensorError
from transformers import Trainer
from transformers.trainer_utils import rotate_checkpoints

from scu_trainer.errors import RUN_AGAIN, StorageError
from scu_trainer.run_files import format_bytes, free_bytes, free_space_hint
from scu_trainer.safe_paths import remove_inside
from scu_trainer.train.checkpoints import format as files
from scu_trainer.train.checkpoints.compatibility import facts_of_arguments
from scu_trainer.train.checkpoints.findings import random_states

logger = logging.getLogger("scu_trainer")

ROOM = 1.05
"""Required free space in sizes of the last checkpoint: optimizer states grow a little in the first steps."""


class CheckpointWriter:
    """Writes the checkpoints of one trainer.

    facts: what every manifest records about its run besides the step; empty if no command has started it.
    before: called before anything is written.
    notices: one line per checkpoint that could not be written.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.facts: dict[str, Any] = {}
        self.before: Callable[[], None] = lambda: None
        self.notices: list[str] = []
        self.newest: Optional[Path] = None
        self.staging: Optional[Path] = None
        self._waiting_push: Optional[Callable[[str], None]] = None
        self._written_bytes = 0

    def save(self, trial: Any, stock_save: Callable[[], None]) -> None:
        """Write a checkpoint. Every rank calls this. Raises StorageError if several ranks write and one of them cannot.
        Without loops and ``safety`` it raises what the stock Trainer raises, which would not continue either."""
        trainer = self.trainer
        run = Path(trainer._get_output_dir(trial))
        final = run / f"checkpoint-{trainer.state.global_step}"
        staging = files.staging_of(run, trainer.state.global_step)
        self.before()
        if trainer.is_stock:
            self._save_or_raise(staging, stock_save, lambda: self._seal(staging / final.name, final))
        else:
            problem = self._save_or_explain(staging, final, stock_save)
            if problem is not None:
                self._continue_without(staging, final, problem)
                return
        self.newest = final
        self._name_best(final)  # also on the ranks that did not write, because they load it in the end
        if self._waiting_push is not None:
            push, self._waiting_push = self._waiting_push, None
            push(str(final))

    def save_as(self, final: Path, stock_save: Callable[[], None]) -> None:
        """Write a checkpoint under another name, not rotated or pushed. Every rank calls it. Raises StorageError."""
        if final.exists():
            raise StorageError(f"{final} already exists, and a checkpoint needs its own folder; give another path")
        step = self.trainer.state.global_step
        staging = files.staging_of(final.parent, step)
        try:
            with write_errors_raised(str(final)):
                self._save_or_raise(staging, stock_save, lambda: self._publish(staging / f"checkpoint-{step}", final))
        finally:
            self._waiting_push = None

    def push_later(self, push: Callable[[str], None]) -> None:
        """Push after the folder has its final name, because uploads run in the background."""
        self._waiting_push = push

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _save_or_raise(self, staging: Path, stock_save: Callable[[], None], name: Callable[[], None]) -> None:
        """Write a checkpoint, or raise. ``name``: renames the finished checkpoint; called on the writing rank only."""
        try:
            if self.trainer.args.should_save:
                _rebuild(staging)
            self._fill(staging, stock_save)
            self._wait()  # a slower rank may still be writing its random state into the staging folder
            if self.trainer.args.should_save:
                name()
            self._wait()
        except Exception:
            self._clear(staging)
            raise

    def _save_or_explain(self, staging: Path, final: Path, stock_save: Callable[[], None]) -> Optional[str]:
        """Write a checkpoint and return what went wrong; None if nothing did."""
        problem, writes = self._lack_of_room(final.parent), self.trainer.args.should_save
        if problem is None and writes:
            problem = self._write_problem(lambda: _rebuild(staging))
        if problem is None:
            problem = self._write_problem(lambda: self._fill(staging, stock_save))
            self._wait()
        if problem is None:
            problem = self._write_problem(lambda: self._seal(staging / final.name, final)) if writes else None
            self._wait()
        return problem

    def _fill(self, staging: Path, stock_save: Callable[[], None]) -> None:
        self._wait()
        self.staging, best = staging, self.trainer.state.best_model_checkpoint
        try:
            stock_save()
        finally:
            self.staging = None
            self.trainer.state.best_model_checkpoint = best  # the stock Trainer looked for it in the staging folder

    def _seal(self, staged: Path, final: Path) -> None:
        trainer = self.trainer
        before = trainer.state.best_model_checkpoint
        self._name_best(final)
        try:
            self._publish(staged, final)
        except BaseException:
            trainer.state.best_model_checkpoint = before  # it may name this checkpoint, which does not exist
            raise
        self._written_bytes = files.size_bytes(final)
        best, limit = trainer.state.best_model_checkpoint, trainer.args.save_total_limit
        if trainer.is_stock:  # the stock order: by modification time
            rotate_checkpoints(str(final.parent), limit, best, use_mtime=True)
        else:
            files.rotate(final.parent, final, limit, None if best is None else Path(best))

    def _publish(self, staged: Path, final: Path) -> None:
        self._warn_about_separate_folders(staged, final)
        self.trainer.state.save_to_json(str(staged / "trainer_state.json"))
        states = {loop.state_file: type(loop).__name__ for loop in self.trainer.loops if loop.state_file is not None}
        facts = self.facts or facts_of_arguments(self.trainer.args)
        files.seal(staged, {"step": self.trainer.state.global_step, "loops": states, **facts})
        files.publish(staged, final)

    def _warn_about_separate_folders(self, staged: Path, final: Path) -> None:
        """Warn if files of other ranks are missing, because a machine has its own folder under the same name."""
        args = self.trainer.args
        if args.world_size == 1 or args.save_only_model or args.save_on_each_node or self.newest is not None:
            return
        missing = [name for name in random_states(args.world_size) if not (staged / name).is_file()]
        if missing:
            logger.warning(
                "%s is without %s, which another process wrote to a folder that is not visible here, so a run that "
                "resumes from it would draw other random numbers: set output_dir to a folder that all machines share",
                *(final.name, ", ".join(missing)),
            )

    def _name_best(self, final: Path) -> None:
        """Set the path of the best checkpoint, which the stock Trainer expects next to this one."""
        state = self.trainer.state
        best = None if not state.best_global_step else final.with_name(f"checkpoint-{state.best_global_step}")
        if best is not None and (best == final or best.exists()):
            state.best_model_checkpoint = str(best)

    def last_is_better(self) -> bool:
        """Return whether the last weights are better than the best checkpoint, because a better one was not written."""
        if not self.notices:
            return False
        state, args = self.trainer.state, self.trainer.args
        name = f"eval_{(args.metric_for_best_model or 'loss').removeprefix('eval_')}"
        seen = {row["step"]: row[name] for row in state.log_history if name in row}
        last, written = seen.get(state.global_step), seen.get(files.step_of(Path(state.best_model_checkpoint)))
        if last is None or written is None:
            return False
        return last > written if args.greater_is_better else last < written

    def _lack_of_room(self, run: Path) -> Optional[str]:
        """Return why the disk has too little room, on any rank; None if there is enough."""
        if not self._written_bytes:
            newest = next(iter(files.checkpoints(run)), None) if run.is_dir() else None
            self._written_bytes = 0 if newest is None else files.size_bytes(newest)
        free, took = free_bytes(run), self._written_bytes
        enough = all(gather_object([free >= ROOM * took]))
        return None if enough else f"the disk has {format_bytes(free)} free, and the last one took {format_bytes(took)}"

    def _continue_without(self, staging: Path, final: Path, problem: str) -> None:
        """Report that the run continues without this checkpoint; ranks cannot know how far each of them got."""
        older = files.checkpoints(final.parent) if final.parent.is_dir() else []
        newest = f"the newest is {older[0].name}" if older else "there is none yet"
        line = f"{final.name} could not be written: {problem}; {newest}"
        self._clear(staging)
        self.notices.append(line)
        advice = free_space_hint().capitalize()
        logger.warning("%s; the run continues without it. %s or set output_dir to another disk", line, advice)

    def _clear(self, staging: Path) -> None:
        if self.trainer.args.should_save:
            with contextlib.suppress(StorageError):  # a folder that cannot be written cannot be cleaned either
                remove_inside(staging.parent, staging.name, files.OURS)

    def _write_problem(self, write: Callable[[], None]) -> Optional[str]:
        """Return why ``write`` failed, in words, or None. Raises StorageError if other ranks wait for this one."""
        try:
            write()
        except Exception as error:  # tokenizers raise nothing more narrow
            if not is_write_error(error):
                raise
            text = _short_text(error)
            if self.trainer.args.world_size > 1:
                raise StorageError(
                    f"a checkpoint could not be written: {text}; the one before it is complete. "
                    f"{free_space_hint().capitalize()} or set output_dir to another disk, and start again: the run "
                    "resumes from there"
                ) from error
            return text
        return None

    def _wait(self) -> None:
        self.trainer.accelerator.wait_for_everyone()


def _rebuild(staging: Path) -> None:
    if staging.exists():
        remove_inside(staging.parent, staging.name, files.OURS)
    staging.mkdir(parents=True)


@contextlib.contextmanager
def write_errors_raised(what: str) -> Iterator[None]:
    """Inside, a failure to write ``what`` raises StorageError, whichever library tried to write."""
    try:
        yield
    except Exception as error:  # tokenizers raise nothing more narrow
        if isinstance(error, StorageError) or not is_write_error(error):
            raise
        raise StorageError(
            f"{what} could not be written: {_short_text(error)}; {free_space_hint()} and {RUN_AGAIN}"
        ) from error


def _short_text(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def is_write_error(error: BaseException) -> bool:
    """Return whether a file could not be written: torch, safetensors and tokenizers wrap or lose the system's error."""
    if isinstance(error, (OSError, SafetensorError, StorageError)):
        return True
    if isinstance(error, RuntimeError):
        return any(part in str(error) for part in ("PytorchStreamWriter", "unexpected pos", "iostream error"))
    return type(error) is Exception and "(os error " in str(error)
