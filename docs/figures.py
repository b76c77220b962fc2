"""The figures in sentences of README and docs: which result each of them is.

A page keeps its plain text. A sentence below has a place in braces for each of its figures, with the style of Python's
``format``; wherever the sentence stands in one of ``PAGES``, its figures are those of benchmarks/results/. Written by
``python docs/write_tables.py``, held by ``pytest tests/test_figures_in_pages.py``.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = tuple(ROOT / name for name in ("README.md", "docs/measured.md", "docs/faq.md", "docs/guide.md"))
NUMBER = r"[+−-]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"


class Results:
    """The results files of a folder, by name."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self.folder = folder
        self.read: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in self.read:
            self.read[name] = json.loads((self.folder / f"{name}.json").read_text())
        return self.read[name]

    def figure(self, benchmark: str, name: str) -> float:
        return getattr(self, benchmark)["figures"][name]["value"]

    @cached_property
    def split(self) -> dict[str, Any]:
        (job,) = [job for job in self.splitting["work"] if job["lengths"] == "alpaca"]
        return job["summary"]

    def guard(self, what: str, *noises: float) -> list[float]:
        """Of the noise guard on digits with such shares of wrong labels."""
        rows = {row["noise"]: row for row in self.curriculum["table"] if row["part"] == "digits" and _is_guard(row)}
        return [rows[noise][what]["mean"] if what.startswith("to") else rows[noise][what] for noise in noises]

    def text(self, method: str, noise: float, size: str) -> dict[str, Any]:
        table = (self.curriculum if size == "small" else self.curriculum_large)["table"]
        (row,) = [r for r in table if (r["part"], r["method"], r["noise"], r["budget"]) == ("text", method, noise, 1.0)]
        return row

    def chunked(self, words: int, what: str) -> float:
        rows = [row for row in self.chunked_loss["subjects"] if row["subject"] == "Llama, all trained"]
        return next(row[what] for row in rows if row["vocab"] == words)

    def on_a_card(self) -> list[float]:
        """Ours against stock and the fastest other: tokens per second, peaks, and full tuning against stock."""

        def point(contender: str, tuning: str = "lora") -> tuple[float, int]:
            (one,) = [
                one
                for one in self.gpu["results"]
                if (one["shape"], one["tuning"], one["contender"]) == ("1b", tuning, contender)
            ]
            return one["tokens"] / one["seconds"], one["peak_bytes"]

        ours, others = point("ours"), [point("stock"), point("trl, padding-free, liger")]
        ratios = [[own / other[i] for other in others] for i, own in enumerate(ours)]
        return [*ratios[0], *ratios[1], point("ours", "full")[0] / point("stock", "full")[0]]

    def tracked(self, what: str) -> list[float]:
        return [row[what] for row in self.tracking["results"] if row["case"] == "recipe"]

    def stopped(self, how: str) -> list[float]:
        excesses = [row["excess"][how] for row in self.early_stop["results"]]
        return [excess for excess in excesses if excess is not None]

    def under_memory(self, contender: str) -> dict[str, Any]:
        return next(row for row in self.real_memory["results"] if row["contender"] == contender)

    def race(self, contender: str) -> float:
        """Tokens per second over stock's, as the table of docs/benchmarks.md has it."""
        rows = self.variable_length["table"]["rows"]
        return next(float(row[1].split()[0]) for row in rows if row[0] == contender)

    def limit(self, share: int, who: str) -> float:
        return self.figure("under_a_limit", f"{share}% of the memory: time to finish, {who} / ours")

    def peak(self, against: str, words: str) -> float:
        return self.figure("peak_memory", f"peak, ours / {against}, {words} words")

    def held_out(self, words: str) -> list[float]:
        """Time and peak of an evaluation for its loss, over stock's."""
        return [self.figure("evaluation", f"{what}, ours / stock, loss, {words} words") for what in ("time", "peak")]

    def by_hand(self, words: str) -> float:
        """Stock with one row at a time, over stock."""
        return self.peak("stock", words) / self.peak("stock by hand, 1 row at a time", words)

    @property
    def kept(self) -> list[float]:
        """Of the picture: lost with and without a budget, and what is learned with it as a percentage of without."""
        with_budget, without = (self.retention_run[key]["end"] for key in ("with", "without"))
        share = 100 * with_budget["learned"] / without["learned"]
        return [with_budget["forgotten"], without["forgotten"], share]

    def recipe(self, name: str, what: str) -> list[float]:
        rows = [row for row in self.recipes["results"] if row["recipe"] == name and not row["branch"]]
        return [row[what] for row in sorted(rows, key=lambda row: row["seed"])]

    def speeds(self, against: str) -> list[float]:
        """Steps per second of families of fixed size over a contender's in the same arithmetic: lowest, highest."""
        rows = [row for row in self.families["results"] if row["group"] == "equal" and row["recipe"] != "gru"]
        found = [row["speed_against"][against] for row in rows]
        return [min(found), max(found)]


def _is_guard(row: dict[str, Any]) -> bool:
    return row["method"] == "noise_guard"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _percent(*values: float) -> list[float]:
    return [100 * value for value in values]


SENTENCES: tuple[tuple[str, Callable[[Results], list[float]]], ...] = (
    # Retention
    ("In the picture {:.2f} bits instead of {:.2f} are lost, and {:.0f} % as much is learned", lambda r: r.kept),
    # Memory
    (
        "{:.2f} × the CPU time and {:.2f} × the peak memory of stock",
        lambda r: [r.split["cpu_over_stock"], r.split["peak_over_stock"]],
    ),
    (
        "With 128,000 words an evaluation takes {:.2f} × the time and {:.2f} × the peak",
        lambda r: r.held_out("128,000"),
    ),
    (
        "{:.2f} × the time of stock and {:.2f} × its peak with 32,000 words",
        lambda r: r.held_out("32,000"),
    ),
    ("the same gradient ({:.0e} apart). Inputs of one size", lambda r: [r.split["gradient_difference"]]),
    (
        "with the loss curve of the unlimited run ({:.0e} apart): {} steps executed, {} reported",
        lambda r: [
            r.under_memory("ours, limited")[key] for key in ("loss_distance", "steps_executed", "steps_reported")
        ],
    ),
    ("Stock dies in step {}", lambda r: [r.under_memory("stock, limited")["steps_executed"] + 1]),
    (
        "`auto_find_batch_size` executes {} steps, reports {}, repeats {} rows",
        lambda r: [
            r.under_memory("stock, auto_find, limited")[key]
            for key in ("steps_executed", "steps_reported", "rows_repeated")
        ],
    ),
    (
        "Without pressure it costs {:.1f} % of the recipe's step",
        lambda r: _percent(r.memory_cost["results"][0]["own_fraction"]),
    ),
    # Data
    ("With 20 % of them {:+.1f} points of accuracy on digits", lambda r: r.guard("to_uniform", 0.2)),
    ("{:.1f} on clean labels", lambda r: r.guard("to_uniform", 0.0)),
    (
        "{:+.1f}, {:+.1f} and {:+.1f} points over uniform, {:+.1f}, {:+.1f} and {:+.1f} over early stopping",
        lambda r: r.guard("to_uniform", 0.1, 0.2, 0.4) + r.guard("to_early_stop", 0.1, 0.2, 0.4),
    ),
    (
        "suspects at 20 % has a precision of {:.2f} and a recall of {:.2f}",
        lambda r: r.guard("precision", 0.2) + r.guard("recall", 0.2),
    ),
    (
        "On text with 20 % shuffled rows it gains {:.3f} ± {:.3f} nats",
        lambda r: [
            sign * r.text("token_budget+noise_guard", 0.2, "large")["to_uniform"][key]
            for key, sign in (("mean", -1), ("error", 1))
        ],
    ),
    (
        "uniform's held-out loss ({:.3f} ± {:.3f} nats) from {:.2f} × its processed tokens",
        lambda r: [
            *r.text("token_budget", 0.0, "large")["to_uniform"].values(),
            r.text("token_budget", 0.0, "large")["padded_ratio"],
        ],
    ),
    (
        "with {:.2f} ×, stock `group_by_length` needs {:.2f} × and is {:.3f} nats worse",
        lambda r: [
            r.text("token_budget", 0.0, "small")["padded_ratio"],
            r.text("group_by_length", 0.0, "small")["padded_ratio"],
            r.text("group_by_length", 0.0, "small")["to_uniform"]["mean"],
        ],
    ),
    (
        "with 32,000 words {:.2f} × the peak memory of a small Llama's step and {:.2f} × its CPU time, "
        "with 128,000 words {:.2f} × and {:.2f} ×, with the same gradient ({:.0e} and {:.0e} apart)",
        lambda r: [
            *(r.chunked(words, what) for words in (32000, 128000) for what in ("peak_over_stock", "time_over_stock")),
            *(r.chunked(words, "gradient_difference") for words in (32000, 128000)),
        ],
    ),
    # Regularization
    ("within 10 % from step {} of 240 on", lambda r: [max(r.tracked("settling_step"))]),
    (
        "within 10 % from step {} to {} of 240 on, overshoots by {:.1f} % at most, and is off by {:.1f} % on average",
        lambda r: [
            min(r.tracked("settling_step")),
            max(r.tracked("settling_step")),
            *_percent(max(r.tracked("overshoot")), _mean([abs(bias) for bias in r.tracked("bias")])),
        ],
    ),
    (
        "takes {:.1f} % of a LoRA step and {:.1f} % of a full-tuning step",
        lambda r: _percent(*(row["direct_fraction"] for row in r.loop_cost["results"])),
    ),
    (
        "a mean of {:.3f} bits per token over the best stop in {} runs (worst {:.3f}); "
        "a fixed six passes cost {:.3f} ({:.3f})",
        lambda r: [
            *(_mean(r.stopped("effective")), len(r.stopped("effective")), max(r.stopped("effective"))),
            *(_mean(r.stopped("passes")), max(r.stopped("passes"))),
        ],
    ),
    # Against others
    (
        "{:.2f} × stock's tokens per second and {:.1f} × the best setting of TRL",
        lambda r: [r.figure("variable_length", f"tokens per second, ours / {who}") for who in ("stock", "best of TRL")],
    ),
    ("({:.2f} × for stock with batches grouped by length)", lambda r: [r.race("stock, group_by_length")]),
    (
        "{:.2f} × stock above the model's own with 32,000 words and {:.2f} × with 128,000; "
        "{:.2f} × and {:.2f} × the leanest setting of TRL",
        lambda r: [r.peak(who, words) for who in ("stock", "best of TRL") for words in ("32,000", "128,000")],
    ),
    (
        "one row at a time, set by hand, takes {:.2f} × and {:.2f} ×",
        lambda r: [r.by_hand("32,000"), r.by_hand("128,000")],
    ),
    (
        "takes {:.2f} and {:.2f} × our time, and `auto_find_batch_size` {:.2f} and {:.2f} × with rows repeated",
        lambda r: [
            r.limit(share, who) for who in ("best fixed batch by hand", "auto_find_batch_size") for share in (40, 20)
        ],
    ),
    (
        "{:.2f} × (LoRA) and {:.2f} × (full tuning) stock's tokens per second",
        lambda r: [
            r.figure("overhead", f"tokens per second, ours, all loops / stock, {tuning}") for tuning in ("LoRA", "full")
        ],
    ),
    (
        "{:.2f} × stock's tokens per second and {:.2f} × those of TRL's padding-free with Liger, in {:.2f} × and "
        "{:.2f} × of their memory; with all weights trained {:.2f} × stock's",
        lambda r: r.on_a_card(),
    ),
    (
        "feel the fixed cost: {:.2f} × with one row of 64 tokens, {:.2f} × with two of 128, {:.2f} × with LoRA",
        lambda r: [
            r.figure("scaling_sizes", f"ours / stock at the smallest {what}")
            for what in ("rows per batch", "block", "LoRA rank")
        ],
    ),
    (
        "the first step {:.1f} seconds after the file is opened, {:.0f} bytes held per document (stock {:.0f})",
        lambda r: [
            r.figure("scaling_documents", name)
            for name in (
                "seconds to the first step at 10,000,000 documents, ours",
                "held bytes per document, ours",
                "held bytes per document, stock",
            )
        ],
    ),
    (
        "{:.2f} × one, stock {:.2f} ×; that is {:.2f} × stock",
        lambda r: [
            r.figure("scaling_ranks", name)
            for name in ("2 ranks over 1, ours", "2 ranks over 1, stock", "2 ranks, ours / stock")
        ],
    ),
    (
        "the ResNet recipe {:.2f} × a plain loop, {:.2f} × one that has bf16 as well",
        lambda r: [r.figure("images", f"images per second, recipe / plain loop{bf16}") for bf16 in ("", ", bf16")],
    ),
    (
        "is logged after {:.2f} × stock's time",
        lambda r: [r.figure("startup", "seconds until: first step logged, ours / stock")],
    ),
    # Families
    (
        "ResNet-18 {:.1f}, {:.1f} and {:.1f} %, EfficientNet-B0 {:.1f}, {:.1f} and {:.1f} % of digits",
        lambda r: _percent(*r.recipe("resnet", "accuracy"), *r.recipe("efficientnet", "accuracy")),
    ),
    (
        "a perplexity of {:.1f}, {:.1f} and {:.1f} where a bigram model with Kneser-Ney smoothing has "
        "{:.1f}, {:.1f} and {:.1f}",
        lambda r: r.recipe("gru", "perplexity") + r.recipe("gru", "kneser_ney"),
    ),
    ("TRIDENT {:.1f}, {:.1f} and {:.1f} %", lambda r: _percent(*r.recipe("sensors", "accuracy"))),
    (
        "at {:.2f} to {:.2f} times the speed of a bare PyTorch loop "
        "and {:.2f} to {:.2f} times that of the stock Trainer",
        lambda r: r.speeds("plain") + r.speeds("stock"),
    ),
)
"""Sentence, and its figures out of the results."""


def written(page: str, results: Results) -> str:
    """``page`` with the figures of the results in every sentence that it has of ``SENTENCES``."""
    for sentence, figures in SENTENCES:
        found = list(_pattern(sentence).finditer(page))
        for match in reversed(found):
            values = _shown(sentence, figures(results))
            for place, value in reversed([*enumerate(values, start=1)]):
                page = page[: match.start(place)] + value + page[match.end(place) :]
    return page


def found_in(page: str) -> Iterator[tuple[str, re.Match]]:
    """Each sentence of ``SENTENCES`` that ``page`` has, and where."""
    for sentence, _ in SENTENCES:
        for match in _pattern(sentence).finditer(page):
            yield sentence, match


def _pattern(sentence: str) -> re.Pattern:
    """The sentence with any figures, and however its lines are broken. None begins or ends inside of a number."""
    parts = []
    for text, field, *_ in string.Formatter().parse(sentence):
        parts.append(r"\s+".join(re.escape(word) for word in re.split(r"\s+", text)))
        parts += [f"({NUMBER})"] if field is not None else []
    return re.compile(r"(?<![\d.,])" + "".join(parts))


def _shown(sentence: str, values: list[float]) -> list[str]:
    styles = [f"{{:{style}}}" for _, field, style, _ in string.Formatter().parse(sentence) if field is not None]
    shown = [style.format(value) for style, value in zip(styles, values, strict=True)]
    return [re.sub(r"^-", "−", text).replace("e-0", "e-") for text in shown]
