"""The types of the values that a report reads from the files of a run. People and other programs may edit these files,
so a value of another type is reported and left out, and all others are shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = dict[str, Any]

NUMBER = (int, float)
EACH = "*"
"""Stands for all names that are not listed."""

INTERVAL = {"value": NUMBER, "low": NUMBER, "high": NUMBER}
CONFIG: Row = {
    "configuration": {"task": str, "logging_steps": NUMBER},
    "changed_from": {},
    "versions": {},
    "git_commit": str,
    "world_size": int,
    "data": {},
    "preflight": [{}],
    "hardware": {"cores": NUMBER, "ram_bytes": NUMBER, "gpus": [{"total_bytes": NUMBER}]},
}
METRICS: Row = {
    **dict.fromkeys(("item", "unit"), str),
    **dict.fromkeys(("steps", "train_s", "held_out_documents", "held_out_tokens"), NUMBER),
    **{f"held_out_{what}_{when}": INTERVAL
       for what in ("bpt", "accuracy", "report_exact", "report_bpt") for when in ("before", "after", "change")},
    "held_out_sources": {EACH: {"bpt_before": INTERVAL, "bpt_after": INTERVAL}},
    "best_held_out": {"step": NUMBER, "bpt": NUMBER, "accuracy": NUMBER},
    "costs": {"peak_bytes": NUMBER},
    "memory": {"peak_bytes": NUMBER, "out_of_memory": NUMBER},
    "bad_numbers": {"skipped_steps": NUMBER, "skipped": [{}]},
    "regularization": {"overhead_fraction": NUMBER, "final_lambda": NUMBER, "verdict": str, "notices": [str]},
    "curriculum": {"notices": [str]},
    "throughput": {"notices": [str]},
}  # fmt: skip
EPOCH: Row = {
    **dict.fromkeys(("repeated", "suspects", "quarantined", "real_tokens", "padded_tokens"), NUMBER),
    "skipped": {EACH: NUMBER},
    "difficulty": {},
}


def drop_wrong_types(found: Row, kinds: Row, file: Any, faults: list[str], within: str = "") -> Row:
    """Return ``found``, the content of ``file``, without the values whose type differs from ``kinds``. Each of those is
    reported in ``faults``. ``within``: prefix of the names in these reports."""
    kept = {}
    for name, value in found.items():
        kind, path = kinds.get(name, kinds.get(EACH, object)), f"{within}{name}"
        if not _is_of_kind(value, kind):
            faults.append(f"{file} holds {_shortened(value)} as its {path}, which no run writes; it is left out")
        elif isinstance(kind, Mapping) and value is not None:
            kept[name] = drop_wrong_types(value, kind, file, faults, f"{path}.")
        elif isinstance(kind, list) and value is not None:
            numbered = drop_wrong_types(dict(enumerate(value)), {EACH: kind[0]}, file, faults, f"{path}.")
            kept[name] = [item for item in numbered.values() if item is not None]
        else:
            kept[name] = value
    return kept


def _is_of_kind(value: Any, kind: Any) -> bool:
    """Whether ``value`` is of type ``kind``. None, which is null in the file, fits every type."""
    if value is None or kind is object:
        return True
    if isinstance(kind, (Mapping, list)):
        return isinstance(value, dict if isinstance(kind, Mapping) else list)
    return isinstance(value, kind) and not isinstance(value, bool)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
