"""What keeps the anchor while training: replay where there is enough of it to train on, else lambda."""

from __future__ import annotations

from collections.abc import Callable

from scu_trainer.errors import DataError
from scu_trainer.settings import RetentionSettings

IN_PARTS = (
    "retain measures and scales whole weights, and under ZeRO-3 and FSDP no process has them; use ZeRO stage 1 or 2, "
    "or scu-trainer retain RUN after training"
)

LEAST_SHARE = 0.1
"""Of the rows of a training: what replay should be able to give."""

MOST_PASSES = 4
"""Over the replayed rows at that share. Up to about four passes, rows that are repeated are worth nearly what new ones
are (Muennighoff et al. 2023, arXiv:2305.16264)."""


def chooser(settings: RetentionSettings, planned_rows: int, has_lambda: bool) -> Callable[[int], tuple[bool, str]]:
    """(whether to replay, why) by the number of rows that may be trained on.

    planned_rows: of the whole training. has_lambda: the regularization loop is there, and steers nothing else.
    The function raises DataError where neither is possible.
    """
    asked = settings.retain_actuator

    def choose(rows: int) -> tuple[bool, str]:
        passes = planned_rows * LEAST_SHARE / (1 - LEAST_SHARE) / rows if rows else float("inf")
        found = f"{rows:,} rows to train on, {passes:.1f} passes over them at a share of {LEAST_SHARE:.0%}"
        if asked == "lambda":
            return False, "as asked for"
        if asked == "replay" and rows:
            return True, f"as asked for; {found}"
        if rows and passes <= MOST_PASSES:
            return True, found
        if asked == "auto" and has_lambda:
            return False, f"{found} are more than {MOST_PASSES}" if rows else "no rows are left to train on"
        wanted = "lambda needs the regularization loop, with scu: true and without scu_target_s" if rows else ""
        raise DataError(
            f"retain: {settings.retain} leaves {found if rows else 'no row to train on'}"
            f"{f', more than {MOST_PASSES}; {wanted}' if rows else ''}; give more of that text, or set "
            f"retain_actuator: {'replay to repeat them so often' if rows else 'lambda'}"
        )

    return choose
