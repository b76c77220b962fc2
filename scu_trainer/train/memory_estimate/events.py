"""The allocations and frees of a step, in order, from which those of a step with more rows or layers are derived."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Optional

PARTS = WEIGHTS, GRADIENTS, LOGITS, ACTIVATIONS = "weights", "gradients", "logits", "activations"


@dataclass(frozen=True)
class Events:
    """The allocations and frees of a step.

    ``sizes``: (part, bytes) of each event, negative for a free. Memory that turns out to belong to another part is
    freed from one and allocated to the other. ``taken``: for each event, the number of the event that allocated the
    memory; -1 if it existed before. ``marks``: (number of events before the mark, name).
    """

    sizes: list[tuple[str, int]] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    marks: list[tuple[int, Hashable]] = field(default_factory=list)

    def mark(self, name: Hashable) -> None:
        self.marks.append((len(self.sizes), name))

    def highest(self, gradients_bytes: Optional[int] = None) -> dict[str, int]:
        """Return the bytes by part at the peak of their sum. ``gradients_bytes``: gradients of earlier micro-batches,
        which exist from the start and to which new gradients are added in place."""
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


def extrapolated_to_rows(rows: int, few: tuple[int, Events], more: tuple[int, Events]) -> Optional[Events]:
    """Return the events of a step of ``rows`` rows, extrapolated from those of two other steps, each given with its
    number of rows. Returns None if these two differ in more than sizes."""
    (few_rows, a), (more_rows, b) = few, more
    if [part for part, _ in a.sizes] != [part for part, _ in b.sizes] or a.marks != b.marks:
        return None
    times = (rows - few_rows) / (more_rows - few_rows)
    both = zip(a.sizes, b.sizes, strict=True)
    return Events([(part, round(x + (y - x) * times)) for (part, x), (_, y) in both], a.taken, a.marks)
