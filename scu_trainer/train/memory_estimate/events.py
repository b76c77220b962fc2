"""What a step takes and frees, in order: kept to tell what it would be with more rows, or with more layers."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Optional

PARTS = WEIGHTS, GRADIENTS, LOGITS, ACTIVATIONS = "weights", "gradients", "logits", "activations"


@dataclass(frozen=True)
class Events:
    """``sizes``: (part, bytes) of all that is taken, or freed if they are negative; what turns out to be for something
    else is both. ``taken``: for each of them the number of the event that took it, -1 if it was there before.
    ``marks``: (number of events before it, name)."""

    sizes: list[tuple[str, int]] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    marks: list[tuple[int, Hashable]] = field(default_factory=list)

    def mark(self, name: Hashable) -> None:
        self.marks.append((len(self.sizes), name))

    def highest(self, gradients_bytes: Optional[int] = None) -> dict[str, int]:
        """Bytes by part when their sum is highest. ``gradients_bytes``: those of earlier micro-batches, which are
        there from the beginning, and to which new ones are added."""
        live = dict.fromkeys(PARTS, 0)
        live[GRADIENTS] = gradients_bytes or 0
        highest, most_bytes, now_bytes = dict(live), live[GRADIENTS], live[GRADIENTS]
        for part, size_bytes in self.sizes:
            if gradients_bytes is not None and part == GRADIENTS:
                continue
            live[part] += size_bytes
            now_bytes += size_bytes
            if now_bytes > most_bytes:
                highest, most_bytes = dict(live), now_bytes
        return highest


def at_rows(rows: int, few: tuple[int, Events], more: tuple[int, Events]) -> Optional[Events]:
    """The events of a step of ``rows`` rows, from those of two steps, each with its number of rows. None where these
    are not the same but for sizes."""
    (few_rows, a), (more_rows, b) = few, more
    if [part for part, _ in a.sizes] != [part for part, _ in b.sizes] or a.marks != b.marks:
        return None
    times = (rows - few_rows) / (more_rows - few_rows)
    both = zip(a.sizes, b.sizes, strict=True)
    return Events([(part, round(x + (y - x) * times)) for (part, x), (_, y) in both], a.taken, a.marks)
