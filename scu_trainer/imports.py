"""Import large libraries faster, with the cyclic garbage collector turned off."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator

_is_ours = False


def claim_process() -> None:
    """Mark this process as one that runs a single command, so that ``without_collector`` may freeze its objects."""
    global _is_ours
    _is_ours = True


@contextlib.contextmanager
def without_collector(freeze: bool = False) -> Iterator[None]:
    """Turn off the garbage collector in this context. Imports and traces create millions of objects and hardly any
    garbage, and searching it would take a fifth of the time.

    ``freeze``: exclude all current objects from later collections too, but only in a process that was claimed. An
    interactive session would otherwise never free the memory of models that it no longer uses.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if freeze and _is_ours:
            gc.freeze()
            atexit.register(_unfreeze_what_is_counted)
        if was_enabled:
            gc.enable()


def _unfreeze_what_is_counted() -> None:
    """Let the interpreter collect everything at its end if Triton is loaded, which from 3.9 on prints what is left of
    it then as leaks. Otherwise it ends a second sooner."""
    if "triton._C.libtriton" in sys.modules:
        gc.unfreeze()
