"""Errors that a user can fix: one base class, and one subclass per cause.

The command line prints a ``UserError`` as one message on stderr and exits with its ``exit_code``, without a traceback.
A message says what was found, what is allowed, and what to type instead.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from typing import Optional

RUN_AGAIN = "run the same command again: it resumes from the newest checkpoint, or starts over if none was written"
"""Advice after an end that may have come before the first checkpoint."""


class UserError(Exception):
    """Base class of all errors that the user can fix."""

    exit_code = 2
    label = "error: "
    """The text that the command line prints before the message."""


class Stopped(UserError):
    """The run ended on request, after writing a checkpoint."""

    exit_code = 3
    label = ""


class SettingsError(UserError):
    """A configuration value is unknown, has the wrong type, or contradicts another one."""


class DataError(UserError):
    """A dataset is missing, empty, unreadable, or leaves nothing to learn from."""


class ModelError(UserError):
    """A model or adapter cannot be found, loaded or tuned as requested."""


class StorageError(UserError):
    """A file or directory cannot be read or written, or the disk does not have enough space."""


class RequirementError(UserError):
    """The machine lacks something that the configuration needs."""


class ControlError(UserError):
    """A controller does not support this model, optimizer or launcher as configured."""


class CheckpointError(UserError, ValueError):
    """A checkpoint cannot be resumed as requested. It is a ValueError too, because the stock Trainer raises that."""


class PreflightError(UserError):
    """Preflight found a mistake that would make the run fail or be useless."""


class OutOfMemory(UserError):
    """Something does not fit in memory, even split into its smallest parts. ``steps_done``: the steps that the run had
    completed when this ended its training; None outside of training."""

    steps_done: Optional[int] = None


class HubError(UserError):
    """The Hub refused a request, or cannot be reached."""


class NonFiniteLoss(UserError):
    """The loss, gradients or weights are not finite, and single rows are not the cause."""


class Diverged(UserError):
    """The training loss has diverged without recovering, and the settings say to stop in that case."""


NEAR = 0.65
"""The similarity ratio of ``difflib`` from which two words count as near."""


def did_you_mean(name: str, allowed: Iterable[str], cutoff: float = NEAR) -> str:
    """Return a phrase that suggests the allowed word nearest to ``name``, such as " (did you mean 'block_size'?)".
    Returns "" if none is near, because a wrong suggestion would mislead."""
    spelled = {word.lower(): word for word in allowed}  # so that 'LoRA' matches 'lora'
    matches = difflib.get_close_matches(name.lower(), list(spelled), n=1, cutoff=cutoff)
    return f" (did you mean {spelled[matches[0]]!r}?)" if matches else ""


def require_packages(purpose: str, extra: str, modules: Sequence[str], loads: bool = False) -> None:
    """Raise RequirementError, which names the extra that installs them, if one of ``modules`` is missing. ``loads``:
    also import them, and raise RequirementError if one is broken."""
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
