"""Format the content of comparison.json as text: the cells of its table, and comparison.md. All functions are pure.

Times differ from one execution to the next, so the cost of the loop is not part of the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

from scu_trainer.figures import NONE, count_text, in_percent
from scu_trainer.report.comparison.report import data_unit
from scu_trainer.report.comparison.statistics import percent
from scu_trainer.settings.base import as_typed

Record = Mapping[str, Any]


def heads(record: Record) -> tuple[str, ...]:
    minus = f"minus {record['reference']}"
    accuracy = ("accuracy in %", minus) if has_accuracy(record) else ()
    lowest = () if accuracy else ("lowest",)  # the best evaluation by accuracy may not have the lowest loss
    return ("arm", "runs", *accuracy, "held-out bits", minus, *lowest, "S error", "settled")


def has_accuracy(record: Record) -> bool:
    return any(row.get("held_out_accuracy") for row in record["table"])


def rows(record: Record) -> list[tuple[str, ...]]:
    """Return a row per arm, including arms that failed."""
    return [_table_row(row, has_accuracy(record)) for row in record["table"]]


def _table_row(row: Mapping[str, Any], has_accuracy: bool) -> tuple[str, ...]:
    lowest = row["best_held_out_bpt"]
    share, difference = (in_percent(row.get(key)) for key in ("held_out_accuracy", "accuracy_difference"))
    accuracy = (with_half_width(share, ".1f"), with_half_width(difference, "+.1f"))
    return (
        row["arm"],
        f"{row['finished']}/{row['asked']}",
        *(accuracy if has_accuracy else ()),
        with_half_width(row["held_out_bpt"], ".3f"),
        with_half_width(row["difference"], "+.3f"),
        *(() if has_accuracy else (NONE if lowest is None else f"{lowest:.3f}",)),
        NONE if row["tracking_error"] is None else f"{row['tracking_error']:.1%}",
        settled(row),
    )


def settled(row: Mapping[str, Any]) -> str:
    if row["settled"] is None:
        return NONE
    if row["settling_step"] is None:
        return "never"
    share = "" if row["settled"] == row["finished"] else f" ({row['settled']}/{row['finished']})"
    return f"{row['settling_step']:.0f}{share}"


def with_half_width(interval: Optional[Mapping[str, Any]], style: str) -> str:
    """Format a value with half of its interval: "6.791 ±0.120". A single run has no interval."""
    if interval is None:
        return NONE
    value = f"{interval['value']:{style}}"
    return value if interval["high"] is None else f"{value} ±{interval['high'] - interval['value']:{style.lstrip('+')}}"


def legend(record: Record) -> str:
    own = "lowest: the best evaluation during training"
    if has_accuracy(record):
        own = "accuracy: its difference is in points, above 0 is better; the verdict is on bits per label"
    return (
        f"± is half of the {percent(record['confidence'])} t interval over seeds; minus {record['reference']}: the "
        f"paired difference, below 0 is better; {own}; S error: mean of |S - "
        "target| / target after S has settled; settled: at this step, mean over seeds"
    )


def verdicts(record: Record) -> list[tuple[str, str]]:
    """Return (arm, verdict) of each arm. The reference is left out, unless some of its runs are not counted."""
    return [
        (row["arm"], row["verdict"])
        for row in record["table"]
        if row["arm"] != record["reference"] or row["finished"] < row["asked"]
    ]


def cost_line(record: Record) -> Optional[str]:
    """Return a line with the share of the training time that the loop took in each arm; None if it is not known."""
    costs = [(row["arm"], row["overhead_fraction"]) for row in record["table"]]
    known = [f"{arm} {cost:.1%}" for arm, cost in costs if cost is not None]
    return f"cost of the loop, share of the training time: {', '.join(known)}" if known else None


def budget_line(record: Record) -> str:
    is_known = any(run["status"] == "finished" for run in record["runs"])
    seeds = " ".join(map(str, record["seeds"]))
    parts = [count_text(len(record["arms"]), "arm"), f"seed{'s' if len(record['seeds']) > 1 else ''} {seeds}"]
    for key, what in (("steps", "steps"), ("tokens", f"{data_unit(record)}s")):
        value = record["budget"][key]
        unknown = f"{what} by seed in the notes" if is_known else f"{what} not known yet"
        parts.append(unknown if value is None else f"{value:,} {what}")
    return ", ".join(parts)


def markdown_table(record: Record) -> str:
    return markdown(heads(record), rows(record))


def markdown(names: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    everything = [tuple(names), tuple("---" for _ in names), *lines]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in everything)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def document(record: Record) -> str:
    """Return the text of comparison.md."""
    arms = [(arm["name"], arm["what"], _settings(arm["settings"])) for arm in record["arms"]]
    verdicts_of_arms = verdicts(record)
    parts = [
        "# Controllers compared",
        f"`{record['command']}`",
        budget_line(record),
        record["verdict"],
        markdown_table(record),
        legend(record),
        *([markdown(("arm", "verdict"), verdicts_of_arms)] if verdicts_of_arms else []),
        "\n".join(f"- {note}" for note in record["notes"]),
        "## Arms",
        markdown(("arm", "what", "sets"), arms),
        "## Time",
        cost_line(record) or "No arm ran the loop yet.",
    ]
    return "\n\n".join(parts) + "\n"


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}: {as_typed(value)}`" for name, value in settings.items())
