"""Imports of large libraries, with the collector of cyclic garbage at rest."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_is_ours = False


def claim_process() -> None:
    """For a process that was started for one command, and ends with it: nothing in it before was anybody's work."""
    global _is_ours
    _is_ours = True


@contextlib.contextmanager
def without_collector(freeze: bool = False) -> Iterator[None]:
    """Imports and traces make millions of objects and next to no garbage: looking for it takes a fifth of the time.

    ``freeze``: no later collection walks over what there is now either, in a process that was claimed. In a session in
    which one thing is done after another, models that are done with would keep their memory for ever.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if freeze and _is_ours:
            gc.freeze()
        if was_enabled:
            gc.enable()
