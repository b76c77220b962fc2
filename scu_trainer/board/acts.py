"""Start, stop and resume runs as ``scu-trainer runs`` does, with the same errors."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scu_trainer.errors import SettingsError
from scu_trainer.runs import control
from scu_trainer.runs.control import RunBackend
from scu_trainer.runs.state import report
from scu_trainer.runs.store import Run, check_name

STOP_WAITS_S = 1.0
"""The page does not wait for the checkpoint, but shows that the run is stopping."""

Start = Callable[[Path, str, str, Sequence[str]], str]
"""Takes a configuration file, a name ("": use the one in the file), a device and flags; starts the run and returns its
name. The command line provides this function, because it parses the flags."""


@dataclass
class RunActions:
    """Actions on runs. ``configurations``: configuration files, and folders of them, from which runs may be started."""

    configurations: Sequence[Path]
    begin: Start
    backend: RunBackend = field(default_factory=RunBackend)
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock)
    # Needed because the locks of runs exclude other processes, but not other threads of this process.

    def choices(self) -> list[str]:
        paths = [
            path for place in self.configurations for path in (sorted(_files(place)) if place.is_dir() else [place])
        ]
        return [str(path) for path in paths if path.is_file()]

    def start(self, config: str, name: str, device: str, flags: str) -> str:
        """Start a run and return its name. ``flags``: flags as typed on a command line. Raises UserError."""
        if config not in self.choices():
            raise SettingsError(f"{config!r} is not one of the configuration files here; choose one from the list")
        if name:
            check_name(name)
        try:
            words = shlex.split(flags)
        except ValueError as error:
            raise SettingsError(
                f"the settings {flags!r} cannot be read: {error}; type them as --field value"
            ) from error
        with self._one_at_a_time:
            return self.begin(Path(config), name, device, words)

    def stop(self, run: Run) -> None:
        before = report(run, self.backend.machine).state
        if not before.is_alive:
            raise SettingsError(f"{run.name} is not running: {before.status}")
        control.stop(run, self.backend, STOP_WAITS_S)

    def resume(self, run: Run) -> None:
        with self._one_at_a_time:
            control.resume(run, self.backend)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix in (".yaml", ".yml")]
