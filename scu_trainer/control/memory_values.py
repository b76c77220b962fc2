"""The values of the memory controller: its configuration, the measurements of a step, its state, and its decision."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Optional

from scu_trainer.control.cost_model import CostModel

Pressure = Literal["low", "moderate", "high", "critical"]


@dataclass(frozen=True)
class SizerConfig:
    """Parameters of the memory controller.

    ``headroom_bytes``: memory that stays free; None means ``headroom_share`` of the limit. ``gc_threshold_bytes``: if
    less is free at the peak, garbage is collected at once; default: a quarter of the headroom. ``kp``, ``ki``, ``kd``:
    gains, ln(cap) per unit of used fraction, per optimizer step. ``integral_clamp``: bound on the summed error.
    ``deadband``: width of the band below the target in which the cap does not change, and smallest relative change of
    the cap. ``patience_steps``: steps without pressure before the cap grows. ``max_growth``, ``max_shrink``: bounds of
    the PID factor in one step; the cost model may shrink the cap further. ``margin``: relative safety margin on
    predictions. ``forget_oom_steps``: steps after which a size that ran out of memory may be tried again with the same
    free memory, if the cost model allows it or if only the smallest size runs, which teaches the model nothing.
    """

    headroom_share: float = 0.08
    headroom_bytes: Optional[int] = None
    gc_threshold_bytes: Optional[int] = None
    kp: float = 1.0
    ki: float = 0.1
    kd: float = 0.2
    integral_clamp: float = 2.0
    deadband: float = 0.1
    patience_steps: int = 3
    max_growth: float = 2.0
    max_shrink: float = 0.5
    margin: float = 0.08
    forget_oom_steps: int = 50

    def free_bytes_wanted(self, limit_bytes: int) -> float:
        """Return the bytes that must stay free at the peak: the larger of headroom and garbage-collection threshold."""
        return max(self.headroom_of(limit_bytes), self.gc_threshold_of(limit_bytes))

    def headroom_of(self, limit_bytes: int) -> float:
        return self.headroom_share * limit_bytes if self.headroom_bytes is None else self.headroom_bytes

    def gc_threshold_of(self, limit_bytes: int) -> float:
        return self.headroom_of(limit_bytes) / 4 if self.gc_threshold_bytes is None else self.gc_threshold_bytes


@dataclass(frozen=True)
class MemoryMeasurement:
    """Memory use of one optimizer step. Bytes include all processes that share the limit.

    ``used_bytes``: in use while no micro-batch runs; measure it at the same point of every step, also for
    ``after_oom``. ``peak_bytes``: the maximum since the step began. ``ceiling_tokens``: padded tokens per micro-batch
    that the configuration allows in this step. ``floor_tokens``: padded tokens of the smallest allowed micro-batch of
    the longest rows. ``longest_row``: in tokens. ``largest_micro_batch_tokens``: padded tokens of the largest
    micro-batch that ran.
    """

    step: int
    limit_bytes: int
    used_bytes: int
    peak_bytes: int
    ceiling_tokens: int
    floor_tokens: int
    longest_row: int
    largest_micro_batch_tokens: int

    def __post_init__(self) -> None:
        if self.limit_bytes <= 0:
            raise ValueError(f"limit_bytes is {self.limit_bytes}; control needs a limit above 0")

    @property
    def peak_fraction(self) -> float:
        return self.peak_bytes / self.limit_bytes

    @property
    def room_bytes(self) -> int:
        return self.limit_bytes - self.used_bytes


@dataclass(frozen=True)
class SizerState:
    """State of the memory controller; JSON-safe, saved in checkpoints.

    ``cap_tokens``: None without pressure. ``former_tokens``: the largest ceiling since the cap was set; when the cap
    reaches it, it is removed. ``calm_steps``: steps in a row with room for a larger cap. ``failed_tokens``: the size
    that ran out of memory, with ``failed_room_bytes`` (limit minus use) free. ``proven_tokens``: the largest ceiling
    that micro-batches reached without cap or pressure, with ``proven_room_bytes`` free.
    """

    cap_tokens: Optional[int] = None
    former_tokens: Optional[int] = None
    integral: float = 0.0
    previous_error: Optional[float] = None
    calm_steps: int = 0
    failed_tokens: Optional[int] = None
    failed_room_bytes: int = 0
    steps_since_oom: int = 0
    oom_count: int = 0
    proven_tokens: int = 0
    proven_room_bytes: int = 0
    pressure: Pressure = "low"
    cost: CostModel = field(default_factory=CostModel)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "cost": self.cost.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SizerState:
        return cls(**{**values, "cost": CostModel.from_dict(values["cost"])})


@dataclass(frozen=True)
class Decision:
    """``reason``: a text for the log, None if and only if the cap stays the same. ``collect``: whether to collect
    garbage now."""

    state: SizerState
    reason: Optional[str]
    collect: bool
    pressure: Pressure


def pressure(config: SizerConfig, limit_bytes: int, peak_bytes: int) -> Pressure:
    """Return how full memory was at the peak. critical: less was free than the collection threshold; high: above the
    target; moderate: in the deadband below the target; low: below the deadband."""
    free_bytes = limit_bytes - peak_bytes
    if free_bytes < config.gc_threshold_of(limit_bytes):
        return "critical"
    target_bytes = limit_bytes - config.free_bytes_wanted(limit_bytes)
    if peak_bytes > target_bytes:
        return "high"
    return "moderate" if peak_bytes >= (1.0 - config.deadband) * target_bytes else "low"
