"""The stock ``Trainer._save_checkpoint``, whole or not at all: into a folder beside, which gets its name last.

The stock method asks the trainer where the run is (``_get_output_dir``); while a checkpoint is being written the answer
is the staging folder, so everything that the stock Trainer, DeepSpeed, FSDP and the controllers write goes there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

from safetensors import SafetensorError
from transformers import Trainer
from transformers.trainer_utils import rotate_checkpoints

from scu_trainer.errors import RUN_AGAIN, StorageError
from scu_trainer.run_files import free_bytes, make_room, readable
from scu_trainer.safe_paths import remove_inside
from scu_trainer.train.checkpoints import format as files
from scu_trainer.train.checkpoints.compatibility import facts_of_arguments
from scu_trainer.train.checkpoints.findings import random_states

logger = logging.getLogger("scu_trainer")

ROOM = 1.05
"""Free bytes that must be there, in sizes of the last checkpoint: optimizer states grow a little in the first steps."""


class CheckpointWriter:
    """Writes the checkpoints of one trainer.

    facts: what every manifest says of its run beside the step; empty where no command has started it. before: called
    before anything is written. notices: one line per checkpoint that could not be written.
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
        """Every rank calls it. Raises StorageError where several ranks write and one of them cannot; without any loop
        and ``safety`` what the stock Trainer raises, for it would not go on either."""
        trainer = self.trainer
        run = Path(trainer._get_output_dir(trial))
        final = run / f"checkpoint-{trainer.state.global_step}"
        staging = files.staging_of(run, trainer.state.global_step)
        self.before()
        if trainer.is_stock:
            self._save_or_raise(staging, stock_save, lambda: self._seal(staging / final.name, final))
        else:
            problem = self._written(staging, final, stock_save)
            if problem is not None:
                self._give_up(staging, final, problem)
                return
        self.newest = final
        self._name_best(final)  # on the ranks that did not write, too: they load it in the end
        if self._waiting_push is not None:
            push, self._waiting_push = self._waiting_push, None
            push(str(final))

    def save_as(self, final: Path, stock_save: Callable[[], None]) -> None:
        """The same under a name of its own, beside those that are rotated and pushed. Every rank calls it. Raises
        StorageError."""
        if final.exists():
            raise StorageError(f"{final} is there already, and a checkpoint needs its own folder; give another path")
        step = self.trainer.state.global_step
        staging = files.staging_of(final.parent, step)
        try:
            with written_or_refused(str(final)):
                self._save_or_raise(staging, stock_save, lambda: self._publish(staging / f"checkpoint-{step}", final))
        finally:
            self._waiting_push = None

    def push_later(self, push: Callable[[str], None]) -> None:
        """Uploads go on in the background, so they begin when the folder has the name that it keeps."""
        self._waiting_push = push

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _save_or_raise(self, staging: Path, stock_save: Callable[[], None], name: Callable[[], None]) -> None:
        """``name`` gives the finished checkpoint its name; the rank that writes calls it."""
        try:
            if self.trainer.args.should_save:
                _rebuild(staging)
            self._fill(staging, stock_save)
            self._wait()  # a slower rank still writes its random state under the name that goes
            if self.trainer.args.should_save:
                name()
            self._wait()
        except Exception:
            self._clear(staging)
            raise

    def _written(self, staging: Path, final: Path, stock_save: Callable[[], None]) -> Optional[str]:
        """What went wrong, None if nothing did."""
        problem, writes = self._lack_of_room(final.parent), self.trainer.args.should_save
        if problem is None and writes:
            problem = self._problem(lambda: _rebuild(staging))
        if problem is None:
            problem = self._problem(lambda: self._fill(staging, stock_save))
            self._wait()
        if problem is None:
            problem = self._problem(lambda: self._seal(staging / final.name, final)) if writes else None
            self._wait()
        return problem

    def _fill(self, staging: Path, stock_save: Callable[[], None]) -> None:
        self._wait()
        self.staging, best = staging, self.trainer.state.best_model_checkpoint
        try:
            stock_save()
        finally:
            self.staging = None
            self.trainer.state.best_model_checkpoint = best  # it was looked for in staging, where nothing stays

    def _seal(self, staged: Path, final: Path) -> None:
        trainer = self.trainer
        before = trainer.state.best_model_checkpoint
        self._name_best(final)
        try:
            self._publish(staged, final)
        except BaseException:
            trainer.state.best_model_checkpoint = before  # this one may have been named, and is not there
            raise
        self._written_bytes = files.size_bytes(final)
        best, limit = trainer.state.best_model_checkpoint, trainer.args.save_total_limit
        if trainer.is_stock:  # the oldest are those that were written first, whoever wrote them
            rotate_checkpoints(str(final.parent), limit, best, use_mtime=True)
        else:
            files.rotate(final.parent, final, limit, None if best is None else Path(best))

    def _publish(self, staged: Path, final: Path) -> None:
        self._tell_of_other_folders(staged, final)
        self.trainer.state.save_to_json(str(staged / "trainer_state.json"))
        states = {loop.state_file: type(loop).__name__ for loop in self.trainer.loops if loop.state_file is not None}
        facts = self.facts or facts_of_arguments(self.trainer.args)
        files.seal(staged, {"step": self.trainer.state.global_step, "loops": states, **facts})
        files.publish(staged, final)

    def _tell_of_other_folders(self, staged: Path, final: Path) -> None:
        """What other ranks wrote is elsewhere where a machine has a folder of its own under the same name."""
        args = self.trainer.args
        if args.world_size == 1 or args.save_only_model or args.save_on_each_node or self.newest is not None:
            return
        missing = [name for name in random_states(args.world_size) if not (staged / name).is_file()]
        if missing:
            logger.warning(
                "%s is without %s, which another process wrote to a folder that is not seen here, so a run that "
                "resumes from it would draw other random numbers: set output_dir to a folder that all machines share",
                *(final.name, ", ".join(missing)),
            )

    def _name_best(self, final: Path) -> None:
        """The stock Trainer looks for the best checkpoint beside this one."""
        state = self.trainer.state
        best = None if not state.best_global_step else final.with_name(f"checkpoint-{state.best_global_step}")
        if best is not None and (best == final or best.exists()):
            state.best_model_checkpoint = str(best)

    def last_is_better(self) -> bool:
        """Whether the weights of the last step are better than the best that could be written; the best of all could
        not."""
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
        if not self._written_bytes:
            newest = next(iter(files.checkpoints(run)), None) if run.is_dir() else None
            self._written_bytes = 0 if newest is None else files.size_bytes(newest)
        free, took = free_bytes(run), self._written_bytes
        enough = free >= ROOM * took
        if self.trainer.args.world_size > 1:
            from accelerate.utils import gather_object

            enough = all(gather_object([enough]))
        return None if enough else f"the disk has {readable(free)} free, and the last one took {readable(took)}"

    def _give_up(self, staging: Path, final: Path, problem: str) -> None:
        """The run goes on without this checkpoint, and says so; ranks cannot know how far each of them came."""
        older = files.checkpoints(final.parent) if final.parent.is_dir() else []
        newest = f"the newest is {older[0].name}" if older else "there is none yet"
        line = f"{final.name} could not be written: {problem}; {newest}"
        self._clear(staging)
        self.notices.append(line)
        advice = make_room().capitalize()
        logger.warning("%s; the run continues without it. %s or set output_dir to another disk", line, advice)

    def _clear(self, staging: Path) -> None:
        if self.trainer.args.should_save:
            with contextlib.suppress(StorageError):  # a folder that cannot be written cannot be cleaned either
                remove_inside(staging.parent, staging.name, files.OURS)

    def _problem(self, write: Callable[[], None]) -> Optional[str]:
        """Why ``write`` could not write, in words; None if it could. Where other ranks wait for this one it ends the
        run."""
        try:
            write()
        except Exception as error:  # tokenizers raise nothing more narrow
            if not is_write_error(error):
                raise
            text = _in_short(error)
            if self.trainer.args.world_size > 1:
                raise StorageError(
                    f"a checkpoint could not be written: {text}; the one before it is complete. "
                    f"{make_room().capitalize()} or set output_dir to another disk, and start again: the run resumes "
                    "from there"
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
def written_or_refused(what: str) -> Iterator[None]:
    """Raises StorageError where ``what`` cannot be written, whichever library tried."""
    try:
        yield
    except Exception as error:  # tokenizers raise nothing more narrow
        if isinstance(error, StorageError) or not is_write_error(error):
            raise
        raise StorageError(f"{what} could not be written: {_in_short(error)}; {make_room()} and {RUN_AGAIN}") from error


def _in_short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def is_write_error(error: BaseException) -> bool:
    """Whether a file could not be written: torch, safetensors and tokenizers wrap what the system said, or lose it."""
    if isinstance(error, (OSError, SafetensorError, StorageError)):
        return True
    if isinstance(error, RuntimeError):
        return any(part in str(error) for part in ("PytorchStreamWriter", "unexpected pos", "iostream error"))
    return type(error) is Exception and "(os error " in str(error)
