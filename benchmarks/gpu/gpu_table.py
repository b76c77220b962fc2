"""Turn the points of benchmarks/gpu/gpu.py into its table and figures, and report points that do not agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cache
from statistics import median
from typing import Any, Optional

from rich.console import Console

from benchmarks.gpu.gpu_work import Point, flops_per_token
from benchmarks.lib.common import shown
from benchmarks.lib.outcome import Figure, Grid, figure
from scu_trainer.hardware.presets import known_tflops

GIB = 2**30
HEADS = (
    "model",
    "contender",
    "tokens/s",
    "/ stock",
    "padding",
    "peak GiB",
    "held GiB",
    "MFU",
    "bits",
    "waits",
    "attention",
)
"""Padding: processed tokens per real token. Held: memory reserved by torch's allocator. Bits: per held-out token.
Waits: of the host for the device, per step. Attention: the kernel, or why the point has no results."""
SAME_BITS = 0.01
"""Relative difference up to which held-out losses count as equal: kernels round differently, and bf16 has 8 bits."""
OTHER_ROWS = ("trl, packing",)
"""Contenders with other rows in each step."""

Results = Sequence[dict[str, Any]]
Cell = tuple[str, str]
"""Shape and tuning."""


def cells_of(results: Results) -> Iterator[tuple[Cell, dict[str, list[dict[str, Any]]]]]:
    """Yield each cell with its results by contender, in the order in which they were measured."""
    for cell in dict.fromkeys((one["shape"], one["tuning"]) for one in results):
        own = [one for one in results if (one["shape"], one["tuning"]) == cell]
        yield (
            cell,
            {
                contender: [one for one in own if one["contender"] == contender]
                for contender in dict.fromkeys(o["contender"] for o in own)
            },
        )


def measured(results: Results) -> list[dict[str, Any]]:
    return [one for one in results if one["status"] == "measured"]


def rate(result: dict[str, Any]) -> float:
    """Return the predicted tokens per second."""
    return result["tokens"] / result["seconds"]


# -- the table ---------------------------------------------------------------------------------------------------------


def title_of(results: Results) -> str:
    cards = {one["card"] for one in measured(results)}
    return f"on {', '.join(sorted(cards)) or 'no card'}: {', '.join(sorted({one['work'] for one in results}))}"


def grid_of(results: Results, peak_tflops: Optional[float]) -> Grid:
    rows = []
    for cell, contenders in cells_of(results):
        stock = measured(contenders.get("stock", []))
        for contender, own in contenders.items():
            rows.append([" ".join(cell), contender, *_cells(own, stock, peak_tflops)])
    return Grid(HEADS, rows)


def _cells(own: Results, stock: Results, peak_tflops: Optional[float]) -> list[str]:
    good = measured(own)
    if not good:
        ran = next((one for one in own if one["status"] in ("out of memory", "failed")), own[0])
        return [*["-"] * (len(HEADS) - 3), why_not(ran)]
    speed = median(rate(one) for one in good)
    against = speed / median(rate(one) for one in stock) if stock else None
    bits = median(one["held_out_bits"] for one in good)
    waits = good[-1]["host_syncs"]
    return [
        f"{speed:,.0f}",
        shown(against, 2),
        shown(median(one["processed"] / one["tokens"] for one in good), 2),
        shown(_gib(good, "peak_bytes"), 1),
        shown(_gib(good, "reserved_bytes"), 1),
        _percent(utilization(good[0], speed, peak_tflops)),
        shown(bits, 3),
        "-" if waits is None else str(waits),
        good[0]["attention"],
    ]


def why_not(result: dict[str, Any]) -> str:
    """Return the reason in a word or two. The notes and the file have the full text."""
    return result["reason"].partition(",")[0] if result["status"] == "cannot run" else result["status"]


def _gib(results: Results, key: str) -> Optional[float]:
    """Return the highest value of the repeats in GiB; None without CUDA."""
    found = [one[key] for one in results if one[key] is not None]
    return max(found) / GIB if found else None


def _percent(share: Optional[float]) -> str:
    return "-" if share is None else f"{share:.0%}"


def utilization(result: dict[str, Any], tokens_per_second: float, peak_tflops: Optional[float]) -> Optional[float]:
    """Return the model FLOPs per second divided by the peak of the GPU; None if the peak is not known."""
    peak = peak_tflops or known_tflops(result["card"], "bf16")
    return None if peak is None else _flops_per_token(point_of(result)) * tokens_per_second / (peak * 1e12)


def point_of(result: dict[str, Any]) -> Point:
    """Return the point with the same model and rows, for any contender."""
    given = {one.name: result[one.name] for one in fields(Point)}
    return Point(**{**given, "contender": "stock", "repeat": 1, "device": "cpu"})


_flops_per_token = cache(flops_per_token)


# -- figures -----------------------------------------------------------------------------------------------------------


def figures_of(results: Results) -> dict[str, Figure]:
    """Return two figures per model and tuning for which ours and another contender were measured."""
    found = {}
    for cell, contenders in cells_of(results):
        ours = measured(contenders.get("ours", []))
        others = [
            one for contender, own in contenders.items() if not contender.startswith("ours") for one in measured(own)
        ]
        if not ours or not others:
            continue
        name = " ".join(cell)
        found[f"{name}: tokens per second, ours / fastest other"] = figure(_against_the_fastest(ours, others), "higher")
        if ours[0]["peak_bytes"] is not None:
            leanest = min(one["peak_bytes"] for one in others)
            peak = max(one["peak_bytes"] for one in ours) / leanest
            found[f"{name}: peak memory, ours / leanest other"] = Figure(peak, "lower")
    return found


def _against_the_fastest(ours: Results, others: Results) -> list[float]:
    """Return the speed ratio of each repeat to the contender with the fastest median."""
    by_contender = {
        contender: [one for one in others if one["contender"] == contender]
        for contender in {one["contender"] for one in others}
    }
    fastest = max(by_contender.values(), key=lambda own: median(rate(one) for one in own))
    theirs = {one["repeat"]: rate(one) for one in fastest}
    paired = [rate(one) / theirs[one["repeat"]] for one in ours if one["repeat"] in theirs]
    return paired or [median(rate(one) for one in ours) / median(theirs.values())]


# -- what was not equal, what was not run ------------------------------------------------------------------------------


def differences(results: Results) -> list[str]:
    """Describe the contenders that did other work than the first measured contender of their cell."""
    found = []
    for cell, contenders in cells_of(results):
        good = [one for contender, own in contenders.items() if contender not in OTHER_ROWS for one in measured(own)]
        for one in good[1:]:
            found += [f"{' '.join(cell)}, {one['contender']}: {what}" for what in _unlike(one, good[0])]
    return list(dict.fromkeys(found))


def _unlike(one: dict[str, Any], first: dict[str, Any]) -> Iterator[str]:
    if one["step_tokens"] != first["step_tokens"]:
        yield f"tokens of its steps are not those of {first['contender']}"
    if abs(one["held_out_bits"] / first["held_out_bits"] - 1) > SAME_BITS:
        yield f"held-out loss {one['held_out_bits']:.3f} bits, {first['contender']} {first['held_out_bits']:.3f}"


def notes_of(results: Results) -> list[str]:
    left = [one for one in results if one["status"] == "not run"]
    notes = [f"not equal work: {what}" for what in differences(results)]
    notes += dict.fromkeys(f"{one['contender']}: {one['reason']}" for one in results if one["status"] == "cannot run")
    notes += [line_of(one) for one in results if one["status"] in ("out of memory", "failed")]
    if left:
        notes.append(f"not run for lack of time: {len(left)} points, the first of them {line_of(left[0])}")
    return notes


def line_of(result: dict[str, Any]) -> str:
    name = f"{result['shape']} {result['tuning']}, {result['contender']}, repeat {result['repeat']}"
    if result["status"] != "measured":
        return f"{name}: {result['status']}: {result['reason']}"
    return f"{name}: {rate(result):,.0f} tokens per second"


def show(results: Results, peak_tflops: Optional[float]) -> None:
    """Print what ``finish`` prints, without writing a file."""
    Console(width=140).print(grid_of(results, peak_tflops).table(title_of(results)))
    figures = figures_of(results).items()
    print(*(one.said(name) for name, one in figures), *notes_of(results), sep="\n")
