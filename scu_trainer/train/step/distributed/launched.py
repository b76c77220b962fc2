"""A rank, its launcher and the other ranks: whether there is a launcher, and that a rank does not outlive it.

Imports nothing heavy, so that a rank can ask for its end before it spends seconds on imports, or waits for the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator

from scu_trainer.errors import RUN_AGAIN, ControlError

logger = logging.getLogger("scu_trainer")


def is_launched() -> bool:
    """Whether torchrun, accelerate or deepspeed started this process."""
    return any(name in os.environ for name in ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"))


def end_with_launcher() -> None:
    """Ask the system (Linux) for a SIGTERM when the launcher dies: a rank must not go on alone, nor lose its work."""
    if not is_launched() or sys.platform != "linux":
        return
    import ctypes

    parent, set_parent_death_signal = os.getppid(), 1  # PR_SET_PDEATHSIG of prctl(2)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(set_parent_death_signal, signal.SIGTERM, 0, 0, 0) != 0:
        logger.warning("the run would outlive its launcher: prctl failed with error %d", ctypes.get_errno())
    elif os.getppid() != parent:  # it died in between
        os.kill(os.getpid(), signal.SIGTERM)


def is_lost_rank(error: BaseException) -> bool:
    """Whether an exchange failed because another rank is gone."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or "gloo/transport/" in str(error)  # gloo has no class of its own


@contextlib.contextmanager
def lost_ranks_said() -> Iterator[None]:
    """Inside, an exchange that fails because another rank is gone raises ControlError: what this rank was doing then
    explains nothing, and its traceback would bury the words of the rank that knows."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        raise ControlError(
            f"another rank (process) ended or does not answer, and its own output says why; {RUN_AGAIN} "
            f"(torch: {str(error).strip().splitlines()[0]})"
        ) from error
