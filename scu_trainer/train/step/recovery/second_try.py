"""Work that runs out of memory: done once more after memory was freed, or reported in one line.

    CatchOutOfMemory   around what can fail: how every recovery begins
    second_try         something that changes nothing before it succeeds: measuring, copying, counting, joining
    last_word          around all of a training or an evaluation: whatever else runs out of memory ends with our message

A micro-batch has smaller parts to try (``attempts.py``), the optimizer too (``optimizer_guard.py``); these have none.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, Optional, TypeVar

import torch

from scu_trainer.errors import RUN_AGAIN, OutOfMemory, RequirementError
from scu_trainer.train.step.recovery.memory import free_memory
from scu_trainer.train.step.recovery.out_of_memory import (
    forget_traceback,
    is_out_of_memory,
    is_out_of_memory_in_loader,
    wanted_bytes,
)

Result = TypeVar("Result")


def more_room(instead: str) -> str:
    """What to do about memory. ``instead``: settings that take less, in words."""
    return (
        "Leave more room: lower max_batch_size or per_device_train_batch_size, raise target_headroom_gb, use "
        f"{instead}; resume_from_checkpoint: true resumes from the newest checkpoint"
    )


MORE_ROOM = more_room("tuning: lora or a smaller model")
SMALLER_LOADER = (
    "Lower dataloader_num_workers, dataloader_prefetch_factor or the batch size (per_device_train_batch_size, "
    "per_device_eval_batch_size), or shorten the rows (block_size); where shared memory is short, give /dev/shm more "
    "room (docker run --shm-size 2g) or set dataloader_num_workers: 0; resume_from_checkpoint: true resumes from the "
    "newest checkpoint"
)

TOO_MANY_FILES = ("Too many open files", "received 0 items of ancdata")
"""The second is what a process says that has no room for the file in which a worker sends a batch."""

LOADER_FILES = str(Path("torch", "utils", "data"))
"""Where the frames of a data loader that reads in the main process lie."""


class CatchOutOfMemory:
    """``with CatchOutOfMemory() as caught:`` ends where its block runs out of memory; other errors pass through.

    Nothing of the block is kept alive then, so ``free_memory()`` after it (not inside) frees its tensors.
    ``text``: first line of the error, None where the block ran through. ``wanted_bytes``: of the allocation that
    failed, where the error says it.
    """

    text: Optional[str] = None
    wanted_bytes: Optional[int] = None

    def __enter__(self) -> CatchOutOfMemory:
        return self

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> bool:
        if error is None:  # first, as it is nearly always
            return False
        if not isinstance(error, RuntimeError | MemoryError | OSError) or not is_out_of_memory(error):
            return False
        self.text, self.wanted_bytes = _first_line(error), wanted_bytes(error)
        forget_traceback(error)
        return True


def retry_unchanged(
    function: Callable[[], Result],
    unchanged: Iterable[torch.Tensor] = (),
    is_cured: Callable[[BaseException], bool] = is_out_of_memory,
) -> Result:
    """``function()``; if it runs out of memory before it has written to any of ``unchanged``, once more after freeing.

    For gradient clipping, whose norms allocate and whose writes are counted by ``Tensor._version``. ``is_cured``: by
    more memory. Raises the error of ``function`` if it has written already, or fails again.
    """
    versions = [(tensor, tensor._version) for tensor in unchanged]
    try:
        return function()
    except (RuntimeError, MemoryError, OSError, OutOfMemory) as error:
        if not is_cured(error) or any(tensor._version != version for tensor, version in versions):
            raise
        forget_traceback(error)
    free_memory()
    return function()


def second_try(
    function: Callable[[], Result], doing: str, advice: str = MORE_ROOM, unchanged: Iterable[torch.Tensor] = ()
) -> Result:
    """``function()``; if it runs out of memory, once more after freeing.

    function: changes nothing before it succeeds, or nothing but ``unchanged``, which are looked at before it is
    repeated. doing: what a message calls it, such as "measuring S".

    Raises OutOfMemory where it fails again, or has written already.
    """
    with CatchOutOfMemory() as caught:
        return retry_unchanged(function, unchanged)
    raise OutOfMemory(f"{doing} does not fit in memory, even after memory was freed. {advice}. {_said(caught.text)}")


@contextlib.contextmanager
def last_word(doing: Callable[[], str]) -> Iterator[None]:
    """Out of memory in here, where nothing could be repeated, ends with OutOfMemory: what, where, what to change. Too
    many open files end with RequirementError.

    doing: what was going on, asked when it is needed ("step 7 of training").
    """
    try:
        yield
    except OutOfMemory:
        raise
    except Exception as error:  # narrowed by the two questions below
        if is_out_of_memory_in_loader(error):
            _end(f"{doing()}: a worker of the data loader ran out of memory", SMALLER_LOADER, _last_line(error), error)
        if any(words in str(error) for words in TOO_MANY_FILES):
            raise RequirementError(f"{doing()} needs more open files than {_more_files()}, and {RUN_AGAIN}") from error
        if not is_out_of_memory(error):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name}"
        is_loading = any(LOADER_FILES in frame.filename for frame in frames)
        found = f"{doing()} ran out of memory {'reading its rows' if is_loading else 'where nothing can be repeated'}"
        _end(f"{found} ({place})", SMALLER_LOADER if is_loading else MORE_ROOM, _first_line(error), error)


def _more_files() -> str:
    try:
        import resource  # POSIX only
    except ImportError:
        return "the system lets it have; lower dataloader_num_workers"
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"the {most} that ulimit -n lets it have; raise that (ulimit -n {4 * most}) or lower dataloader_num_workers"


def _end(found: str, advice: str, text: str, error: BaseException) -> NoReturn:
    forget_traceback(error)
    raise OutOfMemory(f"{found}. {advice}. {_said(text)}") from None


def _said(text: str) -> str:
    return f"The failed allocation said: {text}"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _last_line(error: BaseException) -> str:
    """A loader worker's error is the whole traceback of the worker, whose last line says what it was."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
