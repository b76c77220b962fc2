"""A fork of the test process as a program of its own: what it prints goes to a file, how it ends is its exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def act_as_child(act: Callable[[], int], log: Path, *, truncate: bool = False) -> NoReturn:
    """Leave this process with what ``act`` returns, or with 1 and its traceback in ``log``."""
    code = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if truncate else os.O_APPEND), 0o666)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that run under nohup ignore it
        code = act()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
