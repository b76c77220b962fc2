"""Errors that a user can fix. One base class, one subclass per cause.

The command line turns every ``UserError`` into one message on stderr and exit code 2, without a traceback.
A message says what was found, what is allowed, and what to type instead.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from typing import Optional

RUN_AGAIN = "run the same command again: it resumes from the newest checkpoint, or starts over where none was written"
"""What to type after an end that may have come before the first checkpoint."""


class UserError(Exception):
    """Base of everything that the person at the keyboard can put right."""

    exit_code = 2
    label = "error: "
    """What the command line prints before the message."""


class Stopped(UserError):
    """Somebody asked the run to end, and it has, with a checkpoint."""

    exit_code = 3
    label = ""


class SettingsError(UserError):
    """A configuration value is unknown, of the wrong type, or contradicts another one."""


class DataError(UserError):
    """A dataset is missing, empty, unreadable, or leaves nothing to learn from."""


class ModelError(UserError):
    """A model or adapter cannot be found, loaded or tuned as asked."""


class StorageError(UserError):
    """A directory cannot be written, or the disk has not enough room."""


class RequirementError(UserError):
    """The machine lacks something that the configuration needs."""


class ControlError(UserError):
    """A controller cannot do what it was asked with this model, optimizer or launcher."""


class CheckpointError(UserError, ValueError):
    """A checkpoint cannot be resumed as asked. The stock Trainer raises ValueError where it notices."""


class PreflightError(UserError):
    """Preflight found a mistake that would cost the run."""


class OutOfMemory(UserError):
    """Something does not fit in memory even in its smallest part. ``steps_done``: of the run whose training it ended;
    None outside of a training."""

    steps_done: Optional[int] = None


class HubError(UserError):
    """The Hub refuses what was asked of it, or cannot be reached."""


class NonFiniteLoss(UserError):
    """Loss, gradient or weights are no finite numbers, and not because of single rows."""


class Diverged(UserError):
    """The training loss has left its own course for good, and the settings say to stop then."""


NEAR = 0.65
"""Share of equal letters, in their order, from which on two words are near."""


def nearest(name: str, allowed: Iterable[str], cutoff: float = NEAR) -> str:
    """Phrase that names the allowed word nearest to ``name``: " (did you mean 'block_size'?)"; nothing if none is near,
    for a far one sends people the wrong way."""
    spelled = {word.lower(): word for word in allowed}  # 'LoRA' is as near to 'lora' as can be
    matches = difflib.get_close_matches(name.lower(), list(spelled), n=1, cutoff=cutoff)
    return f" (did you mean {spelled[matches[0]]!r}?)" if matches else ""


def require_packages(purpose: str, extra: str, modules: Sequence[str], loads: bool = False) -> None:
    """Raise RequirementError, with the extra of ours that installs them, where one of ``modules`` is missing.
    ``loads``: import them, and raise it also for one that is broken."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        raise RequirementError(
            f"{purpose} needs {' and '.join(absent)}, not installed here; pip install 'scu-trainer[{extra}]'"
        )
    for name in modules if loads else ():
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise RequirementError(
                f"{purpose} needs {name}, which does not load ({error}); pip install --force-reinstall {name}"
            ) from error
