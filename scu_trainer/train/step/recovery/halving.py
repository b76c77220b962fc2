"""Runs rows that are not trained on in parts that fit: when memory runs out, half as many rows at once.

Imports nothing of the Trainer, so that code that only talks to a model need not wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Optional, TypeVar

from scu_trainer.errors import OutOfMemory
from scu_trainer.train.step.recovery.memory import free_memory
from scu_trainer.train.step.recovery.second_try import CatchOutOfMemory

logger = logging.getLogger("scu_trainer")

Result = TypeVar("Result")


class Halving:
    """Runs rows at once while they fit, else in parts of half the size. ``largest_rows``: the size that fitted after an
    out-of-memory error, with which later calls begin; None before one."""

    def __init__(self) -> None:
        self.largest_rows: Optional[int] = None
        self.out_of_memory = 0

    def run(
        self, count: int, attempt: Callable[[range], Result], obstacle: Callable[[], Optional[str]] = lambda: None
    ) -> list[tuple[range, Result]]:
        """Call ``attempt`` with consecutive ranges from 0 to ``count``; return (range, result) pairs. ``obstacle``: why
        rows may not be cut, called only if they must be. Raises OutOfMemory if one row, or rows that may not be cut,
        fail twice."""
        results: list[tuple[range, Result]] = []
        begin, is_second_try = 0, False
        is_whole = count > (self.largest_rows or count) and obstacle() is not None  # an earlier call was cut
        while begin < count:
            part = range(begin, count if is_whole else min(count, begin + (self.largest_rows or count)))
            with CatchOutOfMemory() as caught:
                results.append((part, attempt(part)))
            if caught.text is None:
                begin, is_second_try = part.stop, False
                continue
            free_memory()
            reason = obstacle() if len(part) > 1 else None
            self._shrink(len(part), caught.text, is_second_try, reason)
            is_second_try = len(part) == 1 or reason is not None
        return results

    def _shrink(self, rows: int, failed: str, is_second_try: bool, obstacle: Optional[str]) -> None:
        self.out_of_memory += 1
        what = "a single row" if rows == 1 else f"{rows} rows, which cannot be cut ({obstacle}),"
        if is_second_try:
            advice = "Shorten the held-out rows (block_size) or use a smaller model"
            if rows > 1:
                advice = f"Lower per_device_eval_batch_size. {advice}"
            raise OutOfMemory(
                f"evaluation of {what} does not fit in memory, even after memory was freed. {advice}. "
                f"The failed allocation said: {failed}"
            )
        if rows == 1 or obstacle is not None:
            logger.warning("evaluation ran out of memory with %s; retrying after freeing memory", what.rstrip(","))
            return
        self.largest_rows = rows // 2
        logger.warning("evaluation ran out of memory with %d rows at once; %d from now on", rows, self.largest_rows)


class AllRowsAtOnce(Halving):
    """Runs all rows at once, for a model with shards on several ranks: if one of them runs out of memory, the others
    wait inside the same forward pass, so none can run it again."""

    def run(
        self, count: int, attempt: Callable[[range], Result], obstacle: Callable[[], Optional[str]] = lambda: None
    ) -> list[tuple[range, Result]]:
        with CatchOutOfMemory() as caught:
            return [(range(count), attempt(range(count)))]
        raise OutOfMemory(
            f"evaluation of {count} rows does not fit in memory, and under FSDP or ZeRO-3 the other ranks wait inside "
            "the same forward pass, so that it cannot run again. Lower per_device_eval_batch_size, shorten the "
            f"held-out rows (block_size) or use more ranks. The failed allocation said: {caught.text}"
        )
