"""All checks by id, for the documentation and for the number of checks in the report."""

from __future__ import annotations

from scu_trainer.train.preflight import (
    classes,
    columns,
    counts,
    length,
    optimization,
    pitfalls,
    plan,
    room,
    rows,
    surroundings,
    weights,
)
from scu_trainer.train.preflight.finding import Check

MODULES = (optimization, pitfalls, length, surroundings, columns, counts, rows, classes, weights, room, plan)
CHECKS = {check.id: check for module in MODULES for check in vars(module).values() if isinstance(check, Check)}
MISTAKE_COUNT = sum(check.level != "note" for check in CHECKS.values())
