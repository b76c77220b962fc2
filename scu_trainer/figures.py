"""The figures of a run as people read them: losses in bits, and what was held out before and after training.

Files that other programs read keep the units of Hugging Face: ``loss`` and ``eval_loss`` are nats everywhere.
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
"""What a loss is the mean over, by task."""

LARGEST_BITS = 1023.0
"""More have a perplexity that no float holds."""


NATS_PER_BIT = math.log(2.0)
"""The one definition of the conversion."""


def bits_of(nats: float) -> float:
    """A loss as it is computed and logged, mean of -ln p, in bits: the mean of -log2 p."""
    return nats / NATS_PER_BIT


def counted(count: int, item: str, items: Optional[str] = None) -> str:
    """ "1 row", "2,000 rows". ``items``: where more than one are not just ``item`` and an s."""
    return f"{count:,} {item if count == 1 else items or f'{item}s'}"


def shown(value: Any) -> str:
    """A setting in a message: as it was typed, but what was computed, as 2.727272727272727, without its long tail."""
    text = str(value)
    return f"{value:g}" if isinstance(value, float) and len(text) > 12 else text


def first_few(texts: Iterable[str], most: int = 3, between: str = ", ") -> str:
    """ "a, b, c and 2 more"."""
    named = list(texts)
    left = len(named) - most
    return between.join(named[:most]) + (f" and {left:,} more" if left > 0 else "")


class Change(NamedTuple):
    """A line of the table at the end of a run; texts, with 95 % intervals in brackets where they were taken."""

    what: str
    before: str
    after: str
    change: str

    @property
    def short(self) -> Change:
        """With the interval of the change alone."""
        return self._replace(before=self.before.partition(" (")[0], after=self.after.partition(" (")[0])


def before_and_after(metrics: Mapping[str, Any]) -> list[Change]:
    """Rows for ``metrics``, the content of scu_metrics.json; none where nothing was held out."""
    if not metrics.get("held_out_bpt_after"):
        return []
    unit = metrics.get("unit", "token")
    of_classes = "held_out_accuracy_after" in metrics
    rows = [_row("held-out accuracy", metrics, "accuracy", ".1%", _points)] if of_classes else []
    rows.append(_row(f"held-out bits per {unit}", metrics, "bpt", ".3f", partial(interval, style="+.3f")))
    rows += [] if of_classes else [_perplexity(metrics)]
    for name, source in metrics.get("held_out_sources", {}).items():
        rows.append(_difference(f"  {name}, bits per {unit}", source["bpt_before"], source["bpt_after"], ".3f"))
    if "held_out_report_exact_after" in metrics:
        for what, key, style in (("reports word for word", "exact", ".1%"), ("bits per word of reports", "bpt", ".3f")):
            pair = (metrics[f"held_out_report_{key}_{when}"] for when in ("before", "after"))
            rows.append(_difference(what, *pair, style))
    return rows


def scored_on(metrics: Mapping[str, Any]) -> str:
    """How much is held out: "6 documents, 68 tokens"; of classifiers "360 images"."""
    documents, tokens = metrics.get("held_out_documents"), metrics.get("held_out_tokens")
    if not documents:
        return "nothing" if documents == 0 else "-"
    items = counted(documents, metrics.get("item", "document"))
    if tokens is None or "held_out_accuracy_after" in metrics:
        return items
    return f"{items}, {counted(tokens, metrics.get('unit', 'token'))}"


def best_on_the_way(metrics: Mapping[str, Any]) -> Optional[str]:
    """The best evaluation during training: of classifiers the one with the highest accuracy."""
    best = metrics.get("best_held_out")
    if not best or best.get("bpt") is None:
        return None
    bits = f"{best['bpt']:.3f} bits per {metrics.get('unit', 'token')}"
    figure = bits if best.get("accuracy") is None else f"accuracy {best['accuracy']:.1%}"
    return f"{figure} at step {best.get('step', '-')}"


def _row(what: str, metrics: Mapping[str, Any], key: str, style: str, changed: Callable[[Any], str]) -> Change:
    before, after, change = (metrics.get(f"held_out_{key}_{when}") for when in ("before", "after", "change"))
    return Change(what, interval(before, style), interval(after, style), changed(change))


def _points(found: Optional[Mapping[str, Any]]) -> str:
    """The difference of two shares is in percentage points."""
    return f"{interval(in_percent(found), '+.1f')} points" if found else "-"


def in_percent(found: Optional[Mapping[str, Any]]) -> Optional[dict[str, Any]]:
    """An interval of shares."""
    if found is None:
        return None
    return {name: None if (share := found.get(name)) is None else 100 * share for name in ("value", "low", "high")}


def interval(found: Optional[Mapping[str, Any]], style: str) -> str:
    if not found or "value" not in found:
        return "-"
    value, low, high = (found.get(name) for name in ("value", "low", "high"))
    if value is None or not math.isfinite(value):
        return "not finite"
    bounds = "" if low is None or high is None else f" ({low:{style}} to {high:{style}})"
    return f"{value:{style}}{bounds}"


def _difference(what: str, before: Mapping[str, Any], after: Mapping[str, Any], style: str) -> Change:
    """Of two figures whose difference has no interval of its own."""
    values = [found["value"] for found in (before, after)]
    is_known = all(value is not None and math.isfinite(value) for value in values)
    change = "-"
    if is_known:
        difference = {"value": values[1] - values[0]}
        change = _points(difference) if style.endswith("%") else interval(difference, f"+{style}")
    return Change(what, interval({"value": values[0]}, style), interval({"value": values[1]}, style), change)


def _perplexity(metrics: Mapping[str, Any]) -> Change:
    """2 to the power of the bits. Bits that differ are perplexities with a ratio, so that is what has the interval."""
    found = [metrics.get(f"held_out_bpt_{when}") or {"value": None} for when in ("before", "after", "change")]
    before, after = (interval({"value": perplexity(bits.get("value"))}, ",.1f") for bits in found[:2])
    ratios = {name: perplexity(found[2].get(name)) for name in ("value", "low", "high")}
    percent = {name: None if ratio is None else ratio - 1.0 for name, ratio in ratios.items()}
    smallest = min((ratio for ratio in ratios.values() if ratio and ratio < 1.0), default=1.0)
    digits = max(1, math.ceil(-math.log10(100 * smallest)))  # so many that nothing falls by "100.0%"
    return Change("held-out perplexity", before, after, interval(percent, f"+.{digits}%"))


def perplexity(bits: Optional[float]) -> Optional[float]:
    """None without bits, and where no float holds it."""
    return None if bits is None or not bits < LARGEST_BITS else 2.0**bits
