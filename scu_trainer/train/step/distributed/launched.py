"""A rank and its launcher: whether there is one, and that a rank does not outlive it.

Imports nothing heavy, so that a rank can ask for its end before it spends seconds on imports, or waits for the others.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

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
