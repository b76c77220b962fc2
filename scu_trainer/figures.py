"""Format the figures of a run for people: losses in bits, and held-out scores before and after training.

Files that other programs read keep the units of Hugging Face: ``loss`` and ``eval_loss`` are always in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, Optional

UNITS = {
    "text-generation": "token", "word-generation": "word", "image-classification": "label",
    "sensor-classification": "label",
}  # fmt: skip
"""The unit that a loss is averaged over, by task."""

NONE = "-"
"""Shown for a figure that is missing, never a zero."""

LARGEST_BITS = 1023.0
"""The perplexity of more bits would overflow a float."""

NATS_PER_BIT = math.log(2.0)
"""The one definition of the conversion."""


def bits_of(nats: float) -> float:
    """Convert a loss as computed and logged, the mean of -ln p, to bits, the mean of -log2 p."""
    return nats / NATS_PER_BIT


def count_text(count: int, item: str, items: Optional[str] = None) -> str:
    """Format a count: "1 row", "2,000 rows". ``items``: the plural, if it is not ``item`` with an s."""
    return f"{count:,} {item if count == 1 else items or f'{item}s'}"


def format_setting(value: Any) -> str:
    """Format a setting for a message: as it was typed, but a computed value such as 2.727272727272727 is shortened."""
    text = str(value)
    return f"{value:g}" if isinstance(value, float) and len(text) > 12 else text


def clock_text(seconds: Optional[float]) -> str:
    """ "0:42", "2:05:10", "3 d 04:10"."""
    if seconds is None:
        return NONE
    minutes, rest_s = divmod(round(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02}:{rest_minutes:02}"
    return f"{hours}:{rest_minutes:02}:{rest_s:02}" if hours else f"{minutes}:{rest_s:02}"


def first_few(texts: Iterable[str], most: int = 3, between: str = ", ") -> str:
    """Join the first ``most`` texts, and count the others: "a, b, c and 2 more"."""
    named = list(texts)
    left = len(named) - most
    return between.join(named[:most]) + (f" and {left:,} more" if left > 0 else "")


class MetricChange(NamedTuple):
    """A row of the table at the end of a run, as texts. 95 % intervals, if there are any, follow in parentheses."""

    what: str
    before: str
    after: str
    change: str

    @property
    def short(self) -> MetricChange:
        """The row with the interval of the change only."""
        return self._replace(before=self.before.partition(" (")[0], after=self.after.partition(" (")[0])


def before_and_after(metrics: Mapping[str, Any]) -> list[MetricChange]:
    """Return the rows for ``metrics``, the content of scu_metrics.json; [] if nothing was held out."""
    if not metrics.get("held_out_bpt_after"):
        return []
    unit = metrics.get("unit", "token")
    of_classes = "held_out_accuracy_after" in metrics
    rows = [_change_row("held-out accuracy", metrics, "accuracy", ".1%", _in_points)] if of_classes else []
    rows.append(_change_row(f"held-out bits per {unit}", metrics, "bpt", ".3f", partial(interval, style="+.3f")))
    rows += [] if of_classes else [_perplexity_row(metrics)]
    for name, source in metrics.get("held_out_sources", {}).items():
        rows.append(_difference_row(f"  {name}, bits per {unit}", source["bpt_before"], source["bpt_after"], ".3f"))
    if "held_out_report_exact_after" in metrics:
        for what, key, style in (("reports word for word", "exact", ".1%"), ("bits per word of reports", "bpt", ".3f")):
            pair = (metrics[f"held_out_report_{key}_{when}"] for when in ("before", "after"))
            rows.append(_difference_row(what, *pair, style))
    return rows


def held_out_size(metrics: Mapping[str, Any]) -> str:
    """Return how much is held out: "6 documents, 68 tokens", or for classifiers "360 images"."""
    documents, tokens = metrics.get("held_out_documents"), metrics.get("held_out_tokens")
    if not documents:
        return "nothing" if documents == 0 else "-"
    items = count_text(documents, metrics.get("item", "document"))
    if tokens is None or "held_out_accuracy_after" in metrics:
        return items
    return f"{items}, {count_text(tokens, metrics.get('unit', 'token'))}"


def best_evaluation(metrics: Mapping[str, Any]) -> Optional[str]:
    """Return the best evaluation during training, or None. For classifiers it is the one with the highest accuracy."""
    best = metrics.get("best_held_out")
    if not best or best.get("bpt") is None:
        return None
    bits = f"{best['bpt']:.3f} bits per {metrics.get('unit', 'token')}"
    figure = bits if best.get("accuracy") is None else f"accuracy {best['accuracy']:.1%}"
    return f"{figure} at step {best.get('step', '-')}"


def _change_row(
    what: str, metrics: Mapping[str, Any], key: str, style: str, changed: Callable[[Any], str]
) -> MetricChange:
    before, after, change = (metrics.get(f"held_out_{key}_{when}") for when in ("before", "after", "change"))
    return MetricChange(what, interval(before, style), interval(after, style), changed(change))


def _in_points(found: Optional[Mapping[str, Any]]) -> str:
    """Format the difference of two shares, in percentage points."""
    return f"{interval(in_percent(found), '+.1f')} points" if found else "-"


def in_percent(found: Optional[Mapping[str, Any]]) -> Optional[dict[str, Any]]:
    """Convert an interval of shares to percent."""
    if found is None:
        return None
    return {name: None if (share := found.get(name)) is None else 100 * share for name in ("value", "low", "high")}


def interval(found: Optional[Mapping[str, Any]], style: str) -> str:
    """Format a value with its interval, such as "0.5 (0.4 to 0.6)"; "-" without a value. ``style``: a format spec."""
    if not found or "value" not in found:
        return "-"
    value, low, high = (found.get(name) for name in ("value", "low", "high"))
    if value is None or not math.isfinite(value):
        return "not finite"
    bounds = "" if low is None or high is None else f" ({low:{style}} to {high:{style}})"
    return f"{value:{style}}{bounds}"


def _difference_row(what: str, before: Mapping[str, Any], after: Mapping[str, Any], style: str) -> MetricChange:
    """Return the row of two figures whose difference has no interval."""
    values = [found["value"] for found in (before, after)]
    is_known = all(value is not None and math.isfinite(value) for value in values)
    change = "-"
    if is_known:
        difference = {"value": values[1] - values[0]}
        change = _in_points(difference) if style.endswith("%") else interval(difference, f"+{style}")
    return MetricChange(what, interval({"value": values[0]}, style), interval({"value": values[1]}, style), change)


def _perplexity_row(metrics: Mapping[str, Any]) -> MetricChange:
    """Return the row of perplexities, 2 to the power of the bits: a difference of bits is a ratio of perplexities."""
    found = [metrics.get(f"held_out_bpt_{when}") or {"value": None} for when in ("before", "after", "change")]
    before, after = (interval({"value": perplexity(bits.get("value"))}, ",.1f") for bits in found[:2])
    ratios = {name: perplexity(found[2].get(name)) for name in ("value", "low", "high")}
    percent = {name: None if ratio is None else ratio - 1.0 for name, ratio in ratios.items()}
    smallest = min((ratio for ratio in ratios.values() if ratio and ratio < 1.0), default=1.0)
    digits = max(1, math.ceil(-math.log10(100 * smallest)))  # enough digits that no change reads "-100.0%"
    return MetricChange("held-out perplexity", before, after, interval(percent, f"+.{digits}%"))


def perplexity(bits: Optional[float]) -> Optional[float]:
    """Return 2 to the power of ``bits``; None without bits, or if a float would overflow."""
    return None if bits is None or not bits < LARGEST_BITS else 2.0**bits
