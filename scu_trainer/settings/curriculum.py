"""Settings of the curriculum: which samples a step trains on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from scu_trainer.errors import did_you_mean
from scu_trainer.settings.base import Allowed, check_fields, option, require

METHODS = ("token_budget", "noise_guard", "acmds", "infobatch", "length_warmup")
"""Curriculum methods that can be joined with "+"; "none" cannot be joined."""

ALLOWED = {
    "token_budget": Allowed(least=1),
    "difficulty_alpha": Allowed(above=0, most=1),
    "difficulty_window": Allowed(least=1, unit="samples"),
    "difficulty_stale_epochs": Allowed(least=1, unit="epochs"),
    "noise_guard_max_fraction": Allowed(most=1),
    "noise_guard_readmit_fraction": Allowed(most=1),
    "infobatch_prune_ratio": Allowed(below=1),
    "infobatch_final_fraction": Allowed(most=1),
    "acmds_fraction": Allowed(above=0, most=1),
    "length_warmup_start": Allowed(least=1, unit="tokens"),
}


@dataclass(frozen=True)
class CurriculumSettings:
    """Which samples a step trains on. The loss of each sample is tracked with every curriculum, including none."""

    curriculum: str = option(
        "none",
        "none: uniform sampling; token_budget: batches of equal tokens and similar lengths; noise_guard: leaves out "
        "and lists rows with a loss that suggests that they are wrong; acmds: difficulty follows memory and epoch; "
        "infobatch: unbiased pruning of easy rows; length_warmup: rows are short at first. Join several with '+'",
    )
    token_budget: Optional[int] = option(
        None, "padded tokens per batch and device; default: as many batches as per_device_train_batch_size makes"
    )
    difficulty_alpha: float = option(0.3, "weight of the newest loss in a sample's running average")
    difficulty_window: int = option(
        1000, "acmds: check memory and scores again after this many samples (not epochs), within the epoch"
    )
    difficulty_stale_epochs: int = option(
        3, "epochs after which a score counts as stale; acmds uses every sample at least once in this many epochs"
    )
    noise_guard_max_fraction: float = option(0.5, "noise_guard: largest share of the rows that it leaves out")
    noise_guard_readmit_fraction: float = option(
        0.1, "noise_guard: share of the rows left out that is trained on again each epoch to renew their scores"
    )
    infobatch_prune_ratio: float = option(0.5, "infobatch: probability that a row below the mean loss is left out")
    infobatch_final_fraction: float = option(0.125, "infobatch: share of the epochs, at the end, that use all rows")
    acmds_fraction: float = option(0.75, "acmds: share of the rows that an epoch uses")
    length_warmup_steps: float = option(0.3, "length_warmup: number of steps, or below 1 their share of the run")
    length_warmup_start: int = option(64, "length_warmup: tokens per row in the first step")

    def __post_init__(self) -> None:
        object.__setattr__(self, "curriculum", _joined_methods(self.curriculum))
        check_fields(self, ALLOWED)
        require(
            self.token_budget is None or "token_budget" in self.methods,
            f"token_budget has an effect only with curriculum: token_budget; curriculum is {self.curriculum}",
        )

    @property
    def methods(self) -> tuple[str, ...]:
        """The joined methods; () for none."""
        return () if self.curriculum == "none" else tuple(self.curriculum.split("+"))


def _joined_methods(value) -> str:
    """Return the methods joined with "+". Raises SettingsError for unknown ones and for those that do not combine."""
    from scu_trainer.control.curriculum import check_methods  # imports numpy, which only a curriculum needs

    names = [str(name).strip() for name in (value if isinstance(value, (list, tuple)) else str(value).split("+"))]
    for name in names:
        require(
            name in METHODS or name == "none",
            f"curriculum is {name!r}; allowed: none, {', '.join(METHODS)}, joined with '+'"
            f"{did_you_mean(name, (*METHODS, 'none'))}",
        )
    reason = check_methods(names) if names != ["none"] else None
    require(reason is None, f"curriculum {'+'.join(names)}: {reason}")
    return "+".join(names)
