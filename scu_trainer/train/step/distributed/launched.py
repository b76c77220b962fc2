"""A rank, its launcher and the other ranks: whether there is a launcher, and how a rank ends with it.

Imports nothing heavy, so that a rank can set this up before it spends seconds on imports, or waits for the others.
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
    """Return whether torchrun, accelerate or deepspeed started this process."""
    return any(name in os.environ for name in ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"))


def end_with_launcher() -> None:
    """Ask Linux for a SIGTERM when the launcher dies: a rank must neither continue on its own nor lose its work."""
    if not is_launched() or sys.platform != "linux":
        return
    import ctypes

    parent, set_parent_death_signal = os.getppid(), 1  # PR_SET_PDEATHSIG of prctl(2)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(set_parent_death_signal, signal.SIGTERM, 0, 0, 0) != 0:
        logger.warning("the run would outlive its launcher: prctl failed with error %d", ctypes.get_errno())
    elif os.getppid() != parent:  # the launcher died in between
        os.kill(os.getpid(), signal.SIGTERM)


def is_lost_rank(error: BaseException) -> bool:
    """Return whether a collective call failed because another rank is gone."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or "gloo/transport/" in str(error)  # gloo has no error class


@contextlib.contextmanager
def lost_ranks_reported() -> Iterator[None]:
    """Inside, a collective call that fails because another rank is gone raises ControlError. The traceback of this rank
    would explain nothing, and hide the message of the rank that knows the cause."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        raise ControlError(
            f"another rank (process) ended or does not answer, and its own output says why; {RUN_AGAIN} "
            f"(torch: {str(error).strip().splitlines()[0]})"
        ) from error
