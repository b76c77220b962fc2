"""What a curriculum does: its methods, and their bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional


@dataclass(frozen=True)
class CurriculumConfig:
    methods: tuple[str, ...]
    """Of token_budget, noise_guard, acmds, infobatch, length_warmup. None of them: uniform."""
    rows_per_batch: int
    token_budget: Optional[int] = None
    """Padded tokens per micro-batch. None: what makes as many micro-batches as ``rows_per_batch`` rows each would."""
    fewest_rows: int = 1
    """Of a uniform micro-batch, if there are more in the epoch."""
    window_epochs: int = 3
    """acmds: every sample is seen at least once in this many epochs in a row."""
    classes: Optional[int] = None
    """noise_guard: number of classes. None: not a classification."""
    guard_max_fraction: float = 0.5
    guard_readmit: float = 0.1
    guard_observations: Optional[int] = None
    """noise_guard: losses of a row that must be known before it can be excluded. None: 3 with classes, else 2."""
    prune_ratio: float = 0.5
    """infobatch: probability, below 1, that a well-learned row is left out."""
    final_full_fraction: float = 0.125
    """infobatch: share of the epochs, at the end, that see every row; at least one epoch."""
    acmds_fraction: float = 0.75
    """acmds: share of the rows that an epoch sees."""
    warmup_share: float = 0.3
    """length_warmup: share of the steps over which sequences grow."""
    warmup_start_tokens: int = 64
