"""The configuration of a curriculum: its methods and their parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional


@dataclass(frozen=True)
class CurriculumConfig:
    methods: tuple[str, ...]
    """Any of token_budget, noise_guard, acmds, infobatch, length_warmup; empty: uniform sampling."""
    rows_per_batch: int
    token_budget: Optional[int] = None
    """Padded tokens per micro-batch. None: the fewest that make no more of them than ``rows_per_batch`` rows each."""
    fewest_rows: int = 1
    """Smallest number of rows of a uniform micro-batch, if the epoch has more than one micro-batch."""
    window_epochs: int = 3
    """acmds: number of consecutive epochs in which every sample is seen at least once."""
    classes: Optional[int] = None
    """noise_guard: number of classes. None: the task is not a classification."""
    guard_max_fraction: float = 0.5
    guard_readmit: float = 0.1
    guard_observations: Optional[int] = None
    """noise_guard: known losses of a row before it can be excluded. None: 3 with classes, else 2."""
    prune_ratio: float = 0.5
    """infobatch: probability, below 1, that a well-learned row is left out."""
    final_full_fraction: float = 0.125
    """infobatch: share of the epochs, at the end, that include every row; at least one epoch."""
    acmds_fraction: float = 0.75
    """acmds: share of the rows that an epoch includes."""
    warmup_share: float = 0.3
    """length_warmup: share of the steps over which sequences grow."""
    warmup_start_tokens: int = 64
