"""Start, stop and resume, as ``scu-trainer runs`` does them; what it refuses is refused here in the same words."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scu_trainer.errors import SettingsError
from scu_trainer.runs import control
from scu_trainer.runs.control import Hands
from scu_trainer.runs.state import report
from scu_trainer.runs.store import Run, check_name

STOP_WAITS_S = 1.0
"""The page does not wait for the checkpoint: it shows the run stopping."""

Start = Callable[[Path, str, str, Sequence[str]], str]
"""Of a configuration file, a name ("": that of the file), a device and flags; returns the name. Reading them is the
command line's."""


@dataclass
class Acts:
    """``configurations``: files and folders of files that a run may be started from; a request chooses one of them."""

    configurations: Sequence[Path]
    begin: Start
    hands: Hands = field(default_factory=Hands)
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock)
    # The locks of runs tell processes apart, not the threads of this one.

    def choices(self) -> list[str]:
        """Configuration files, as they are shown and chosen."""
        found = [
            path for place in self.configurations for path in (sorted(_files(place)) if place.is_dir() else [place])
        ]
        return [str(path) for path in found if path.is_file()]

    def start(self, config: str, name: str, device: str, flags: str) -> str:
        """Raises a UserError. ``flags``: as one would type them."""
        if config not in self.choices():
            raise SettingsError(f"{config!r} is not one of the configuration files here; choose one of the list")
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
        before = report(run, self.hands.machine).state
        if not before.is_alive:
            raise SettingsError(f"{run.name} is not running: {before.status}")
        control.stop(run, self.hands, STOP_WAITS_S)

    def resume(self, run: Run) -> None:
        with self._one_at_a_time:
            control.resume(run, self.hands)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix in (".yaml", ".yml")]
