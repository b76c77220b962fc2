"""The two types of preflight: a check, and a finding of a check in this run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, Optional

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One finding. ``check``: id of the check. ``what``: what was found. ``where``: settings, files or columns.
    ``fix``: what to do; a note may have none."""

    level: Level
    check: str
    what: str
    where: str = ""
    fix: str = ""

    def line(self) -> str:
        where = f" ({self.where})" if self.where else ""
        fix = f"; {self.fix}" if self.fix else ""
        return f"{self.level} {self.check}: {self.what}{where}{fix}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Check:
    """A kind of mistake. ``says``: what a finding of it means in general. ``fix``: what to do about it.

    Level "error" is for training that is certain to fail or certain to be worthless, "warning" for anything else that
    is probably a mistake, "note" for information.
    """

    id: str
    level: Level
    says: str
    fix: str

    def found(self, what: str, where: str = "", fix: Optional[str] = None) -> Finding:
        """Return a finding of this check. ``fix``: a more specific text than the general one of the check."""
        return Finding(self.level, self.id, what, where, self.fix if fix is None else fix)


def percent(share: float) -> str:
    """Format a share: 0.42 as "42%", 0.0042 as "0.42%", and from 0.995 to below 1 "over 99%"."""
    if 0.995 <= share < 1:
        return "over 99%"
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{100 * share:.2g}%"
