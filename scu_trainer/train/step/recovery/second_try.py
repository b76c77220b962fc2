"""Work that runs out of memory: repeated once after memory was freed, or reported in one line.

    CatchOutOfMemory        around code that may fail: every recovery begins with it
    second_try              for work that changes nothing before it succeeds: measuring, copying, counting, joining
    out_of_memory_reported  around a whole training or evaluation: any other out-of-memory error ends with our message

A micro-batch (``attempts.py``) and the optimizer (``optimizer_guard.py``) can try smaller parts; this work cannot.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Optional, TypeVar

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


def memory_advice(instead: str) -> str:
    """Return advice on memory. ``instead``: settings that use less, in words."""
    return (
        "Leave more room: lower max_batch_size or per_device_train_batch_size, raise target_headroom_gb, use "
        f"{instead}; resume_from_checkpoint: true resumes from the newest checkpoint"
    )


MORE_ROOM = memory_advice("tuning: lora or a smaller model")
SMALLER_LOADER = (
    "Lower dataloader_num_workers, dataloader_prefetch_factor or the batch size (per_device_train_batch_size, "
    "per_device_eval_batch_size), or shorten the rows (block_size); where shared memory is short, give /dev/shm more "
    "room (docker run --shm-size 2g) or set dataloader_num_workers: 0; resume_from_checkpoint: true resumes from the "
    "newest checkpoint"
)

TOO_MANY_FILES = ("Too many open files", "received 0 items of ancdata")
"""The second one is the error of a process without room for the file in which a worker sends a batch."""

LOADER_FILES = str(Path("torch", "utils", "data"))
"""Path that occurs in the frames of a data loader that reads in the main process."""


class CatchOutOfMemory:
    """``with CatchOutOfMemory() as caught:`` swallows an out-of-memory error of its block; other errors pass through.

    The block's tensors are not kept alive, so ``free_memory()`` after it (not inside) frees them. ``text``: first line
    of the error, None if there was none. ``wanted_bytes``: of the failed allocation, if the error says it.
    """

    text: Optional[str] = None
    wanted_bytes: Optional[int] = None

    def __enter__(self) -> CatchOutOfMemory:
        return self

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> bool:
        if error is None:  # first, because this is nearly always the case
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
    """Return ``function()``; if it runs out of memory before it writes to any of ``unchanged``, free memory and repeat.

    For gradient clipping, because its norms allocate and ``Tensor._version`` counts its writes. ``is_cured``: whether
    more memory cures the error. Raises the error of ``function`` if it has already written, or fails again.
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
    """Return ``function()``; if it runs out of memory, free memory and call it once more.

    function: must change nothing before it succeeds, except ``unchanged``, which are checked before it is repeated.
    doing: how a message names the work, such as "measuring S".

    Raises OutOfMemory if it fails again, or has already written.
    """
    with CatchOutOfMemory() as caught:
        return retry_unchanged(function, unchanged)
    raise OutOfMemory(
        f"{doing} does not fit in memory, even after memory was freed. {advice}. The failed allocation said: "
        f"{caught.text}"
    )


@contextlib.contextmanager
def out_of_memory_reported(doing: Callable[[], str]) -> Iterator[None]:
    """Inside, an out-of-memory error that cannot be recovered from becomes OutOfMemory: what, where, what to change.

    Too many open files become RequirementError. ``doing``: returns what was running ("step 7 of training"), called only
    when needed.
    """
    try:
        yield
    except OutOfMemory:
        raise
    except Exception as error:  # narrowed by the checks below
        if is_out_of_memory_in_loader(error):
            problem, text = f"{doing()}: a worker of the data loader ran out of memory", _last_line(error)
            is_loading = True
        elif any(words in str(error) for words in TOO_MANY_FILES):
            raise RequirementError(
                f"{doing()} needs more open files than {_advice_on_open_files()}, and {RUN_AGAIN}"
            ) from error
        elif is_out_of_memory(error):
            frames, text = traceback.extract_tb(error.__traceback__), _first_line(error)
            is_loading = any(LOADER_FILES in frame.filename for frame in frames)
            doing_what = "reading its rows" if is_loading else "where nothing can be repeated"
            place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name}"
            problem = f"{doing()} ran out of memory {doing_what} ({place})"
        else:
            raise
        forget_traceback(error)
        advice = SMALLER_LOADER if is_loading else MORE_ROOM
        raise OutOfMemory(f"{problem}. {advice}. The failed allocation said: {text}") from None


def _advice_on_open_files() -> str:
    try:
        import resource  # POSIX only
    except ImportError:
        return "the system allows; lower dataloader_num_workers"
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"the {most} that ulimit -n allows; raise that (ulimit -n {4 * most}) or lower dataloader_num_workers"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _last_line(error: BaseException) -> str:
    """Return the last line, which names the error if a loader worker's error holds the worker's whole traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
