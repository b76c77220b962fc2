"""What preflight says: a check that is known by its name, and what it found in this run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, Optional

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """``check``: id of the check. ``what`` was found, ``where`` (settings, files, columns), what to do: ``fix``. A note
    may have no fix."""

    level: Level
    check: str
    what: str
    where: str = ""
    fix: str = ""

    def line(self) -> str:
        """All of it in one readable line."""
        where = f" ({self.where})" if self.where else ""
        fix = f"; {self.fix}" if self.fix else ""
        return f"{self.level} {self.check}: {self.what}{where}{fix}"

    def as_dict(self) -> dict[str, Any]:
        """JSON-like."""
        return asdict(self)


@dataclass(frozen=True)
class Check:
    """One thing that is looked for. ``says``: what a finding of it tells, in general. An "error" is training that is
    certain to fail or certain to be worthless; all else that deserves a look is a "warning"."""

    id: str
    level: Level
    says: str
    fix: str

    def found(self, what: str, where: str = "", fix: Optional[str] = None) -> Finding:
        """``fix``: where it can be said more exactly than for all findings of this check."""
        return Finding(self.level, self.id, what, where, self.fix if fix is None else fix)


def percent(share: float) -> str:
    """0.42 as "42%", 0.0042 as "0.42%"; nearly all as "over 99%"."""
    if 0.995 <= share < 1:
        return "over 99%"
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{100 * share:.2g}%"
