"""Choose what preserves the anchor during training: replay if there is enough text to train on, else lambda."""

from __future__ import annotations

from collections.abc import Callable

from scu_trainer.errors import DataError
from scu_trainer.settings import RetentionSettings

SHARDED_WEIGHTS_MESSAGE = (
    "retain measures and scales whole weights, but under ZeRO-3 and FSDP no process has them; use ZeRO stage 1 or 2, "
    "or scu-trainer retain RUN after training"
)

LEAST_SHARE = 0.1
"""Share of the rows of a training that replay should be able to provide."""

MOST_PASSES = 4
"""Maximum number of passes over the replayed rows at that share. Up to about four passes, repeated rows are worth
nearly as much as new ones (Muennighoff et al. 2023, arXiv:2305.16264)."""


def make_actuator_chooser(
    settings: RetentionSettings, planned_rows: int, has_lambda: bool
) -> Callable[[int], tuple[bool, str]]:
    """Return a function from the number of rows that may be trained on to (whether to replay, why).

    planned_rows: of the whole training. has_lambda: whether the regularization loop is on and has no other target.
    The function raises DataError if neither is possible.
    """
    actuator = settings.retain_actuator

    def choose(rows: int) -> tuple[bool, str]:
        passes = planned_rows * LEAST_SHARE / (1 - LEAST_SHARE) / rows if rows else float("inf")
        found = f"{rows:,} rows to train on, {passes:.1f} passes over them at a share of {LEAST_SHARE:.0%}"
        if actuator == "lambda":
            return False, "as requested"
        if actuator == "replay" and rows:
            return True, f"as requested; {found}"
        if rows and passes <= MOST_PASSES:
            return True, found
        if actuator == "auto" and has_lambda:
            return False, f"{found} are more than {MOST_PASSES}" if rows else "no rows are left to train on"
        wanted = "lambda needs the regularization loop, with scu: true and without scu_target_s" if rows else ""
        raise DataError(
            f"retain: {settings.retain} leaves {found if rows else 'no row to train on'}"
            f"{f', more than {MOST_PASSES}; {wanted}' if rows else ''}; give more of that text, or set "
            f"retain_actuator: {'replay to repeat them so often' if rows else 'lambda'}"
        )

    return choose
