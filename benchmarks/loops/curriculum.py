"""What does each curriculum gain over uniform sampling? On text of different lengths and on digits, clean and spoiled.

    python benchmarks/loops/curriculum.py [--part text digits] [--seeds 0 1 2] [--methods ...] [--noise 0 0.2]
                                          [--again ...]

Text: 240 docstrings of the standard library, one per row, and 4 epochs of full tuning of a small Llama; in a spoiled
row the tokens are shuffled. Digits: those of scikit-learn, and 20 epochs of a small ResNet; a spoiled row has another
label. Scores are always on clean data: held-out loss in nats per token (lower is better), test accuracy in percent
(higher is better).

Every difference is to uniform sampling with the same seed, rows and initial weights, as mean over seeds with standard
error. "equal work": compared with uniform sampling on a shorter budget, with its own decay, of as many real tokens
(rows for digits) as the method saw, by linear interpolation between budgets. "early stop": compared with the full
uniform run at the epoch that is best on validation rows, which are spoiled like the training rows; "oracle": at its
best epoch. CPU seconds are of training only, on one thread; other programs on the machine change them by a tenth and
more.

--large: only text, with 800 rows, a base that was trained for longer, and fewer methods.

A finished run is a line of results/curriculum_runs.jsonl, and is not run again, except with --again METHOD.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple, Optional

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.common import RESULTS, write_result
from benchmarks.lib.curriculum_work import DIGITS, GROUPED, LARGE_TEXT, TEXT, TRIMMED, UNIFORM, Run, padding, run
from scu_trainer.train.run_directory.logs import run_log

RUNS = RESULTS / "curriculum_runs.jsonl"
BUDGETS = (1.0, 0.8)
"""The budgets of uniform sampling, for comparison with methods that skip rows."""

RECIPES = {"text": TEXT, "digits": DIGITS}
SEEDS = {"text": 3, "digits": 5}
METHODS = {
    "text": {
        0.0: (
            UNIFORM,
            GROUPED,
            "token_budget",
            "length_warmup",
            "token_budget+length_warmup",
            "infobatch",
            "acmds",
            "noise_guard",
            "token_budget+noise_guard",
        ),
        0.2: (UNIFORM, "token_budget", "infobatch", "acmds", "noise_guard", "token_budget+noise_guard", TRIMMED),
    },
    "digits": {
        0.0: (UNIFORM, "infobatch", "acmds", "noise_guard"),
        0.1: (UNIFORM, "noise_guard"),
        0.2: (UNIFORM, "infobatch", "acmds", "noise_guard"),
        0.4: (UNIFORM, "noise_guard"),
    },
}
LARGE_METHODS = {
    "text": {
        0.0: (UNIFORM, GROUPED, "token_budget", "token_budget+noise_guard"),
        0.2: (UNIFORM, "token_budget", "token_budget+noise_guard", TRIMMED),
    }
}
PADDED_LENGTHS = (256, 512, 1024)
"""Tokens to which docstrings are truncated to count padding: the saving depends on the spread of lengths."""

WORK = {"text": "real_tokens", "digits": "rows"}


# -- runs --------------------------------------------------------------------------------------------------------------


def wanted(options: argparse.Namespace) -> Iterator[Run]:
    """Yield the runs, with uniform sampling first, because all others are compared with it."""
    for part in options.part:
        seeds = range(SEEDS[part]) if options.seeds is None else options.seeds
        for seed in seeds:
            for noise, methods in (LARGE_METHODS if options.large else METHODS)[part].items():
                if options.noise is None or noise in options.noise:
                    budgets = (1.0,) if options.large else BUDGETS
                    yield from _of_seed(part, noise, seed, methods, budgets, options.methods)


def _of_seed(
    part: str,
    noise: float,
    seed: int,
    methods: tuple[str, ...],
    budgets: tuple[float, ...],
    only: Optional[list[str]],
) -> Iterator[Run]:
    for method in methods:
        if only is None or method in only:
            for budget in budgets if method == UNIFORM and len(methods) > 2 else (1.0,):
                yield Run(part, noise, method, budget, seed)


def finished() -> dict[Run, dict[str, Any]]:
    """Return the figures of the finished runs that used the current recipe."""
    lines = RUNS.read_text().splitlines() if RUNS.is_file() else []
    records = [json.loads(line) for line in lines]
    return {Run(**record["run"]): record["figures"] for record in records if record["recipe"] == _recipe(record["run"])}


def _recipe(one: dict[str, Any]) -> dict[str, Any]:
    return RECIPES[one["part"]]


def make(runs: Iterable[Run], again: list[str]) -> dict[Run, dict[str, Any]]:
    """Return the figures of all ``runs``. Each run is stored as soon as it is finished."""
    known, runs = finished(), list(runs)
    for one in runs:
        if one not in known or one.method in again:
            with run_log():
                known[one] = run(one)
            record = {"run": asdict(one), "recipe": _recipe(asdict(one)), "figures": known[one]}
            with RUNS.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(*asdict(one).values(), f"{known[one]['score']:.3f} in {known[one]['cpu_seconds']:.0f} s", flush=True)
    return {one: known[one] for one in runs}


# -- comparison --------------------------------------------------------------------------------------------------------


class Spread(NamedTuple):
    """A mean over seeds and its standard error, which is None for one seed."""

    mean: float
    error: Optional[float]

    @classmethod
    def of(cls, values: list[float]) -> Optional[Spread]:
        if not values:
            return None
        return cls(mean(values), stdev(values) / len(values) ** 0.5 if len(values) > 1 else None)


def compared(runs: dict[Run, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per part, noise, method and budget."""
    conditions = dict.fromkeys(replace(one, seed=0) for one in runs)
    rows = []
    for condition in conditions:
        mine = {one: figures for one, figures in runs.items() if replace(one, seed=0) == condition}
        rows.append({**asdict(condition), "seeds": [one.seed for one in mine], **_row(mine, runs)})
        del rows[-1]["seed"]
    return rows


def _row(mine: dict[Run, dict[str, Any]], runs: dict[Run, dict[str, Any]]) -> dict[str, Any]:
    """Return the means of ``mine``, one run per seed, and their differences to uniform runs of the same seeds."""
    pairs = [(figures, Reference.of(one, runs)) for one, figures in mine.items()]
    pairs = [(figures, reference) for figures, reference in pairs if reference is not None]

    def difference(to) -> Optional[Spread]:
        others = [(figures["score"], to(figures, reference)) for figures, reference in pairs]
        return Spread.of([score - other for score, other in others if other is not None])

    def ratio(name: str) -> Optional[float]:
        values = [figures[name] / reference.full[name] for figures, reference in pairs if reference.full[name]]
        return mean(values) if values else None

    return {
        "score": Spread.of([figures["score"] for figures in mine.values()]),
        "to_uniform": difference(lambda figures, reference: reference.full["score"]),
        "at_equal_work": difference(lambda figures, reference: reference.at(figures)),
        "to_early_stop": difference(lambda figures, reference: reference.early_stop),
        "to_oracle": difference(lambda figures, reference: reference.oracle),
        **{name: mean(figures[name] for figures in mine.values()) for name in ("rows", "real_tokens", "padded_tokens")},
        "rows_ratio": ratio("rows"),
        "real_ratio": ratio("real_tokens"),
        "padded_ratio": ratio("padded_tokens"),
        "cpu_ratio": ratio("cpu_seconds"),
        **{name: _known_mean(mine.values(), name) for name in ("suspects", "precision", "recall")},
    }


def _known_mean(runs: Iterable[dict[str, Any]], name: str) -> Optional[float]:
    known = [figures[name] for figures in runs if figures.get(name) is not None]
    return mean(known) if known else None


class Reference:
    """The uniform runs that one run is compared with: the same part, noise and seed, with all budgets."""

    def __init__(self, part: str, by_budget: dict[float, dict[str, Any]]) -> None:
        self.part, self.by_budget, self.full = part, by_budget, by_budget[1.0]

    @classmethod
    def of(cls, one: Run, runs: dict[Run, dict[str, Any]]) -> Optional[Reference]:
        same = {budget: replace(one, method=UNIFORM, budget=budget) for budget in BUDGETS}
        found = {budget: runs[twin] for budget, twin in same.items() if twin in runs}
        return cls(one.part, found) if 1.0 in found else None

    def at(self, figures: dict[str, Any]) -> Optional[float]:
        """Return the score of uniform sampling with as much work as ``figures``, interpolated between its budgets."""
        work = WORK[self.part]
        points = sorted((run[work], run["score"]) for run in self.by_budget.values())
        if len(points) == 1:
            return None
        (low, below), (high, above) = points[0], points[-1]
        return below + (above - below) * (figures[work] - low) / (high - low)

    @property
    def early_stop(self) -> float:
        return self._best("validation")

    @property
    def oracle(self) -> float:
        return self._best("held_out")

    def _best(self, by: str) -> float:
        """Return the held-out score at the first epoch with the best value of ``by``."""
        sign = -1.0 if self.part == "text" else 1.0
        return max(self.full["points"], key=lambda point: sign * point[by])["held_out"]


# -- report ------------------------------------------------------------------------------------------------------------

TITLES = {
    "text": "held-out nats per token, lower is better",
    "digits": "clean test accuracy in percent, higher is better",
}


def verdicts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each target, and whether it was reached."""
    found = {(row["part"], row["noise"], row["method"]): row for row in rows if row["budget"] == 1.0}
    aims = (
        ("text", 0.0, "token_budget", "to_uniform", "within", 0.01),
        ("text", 0.0, "token_budget", "padded_ratio", "at most", 0.40),
        ("text", 0.2, "noise_guard", "to_uniform", "at most", -0.08),
        ("text", 0.2, "token_budget+noise_guard", "to_uniform", "at most", -0.08),
        ("text", 0.0, "noise_guard", "to_uniform", "at most", 0.01),
        ("text", 0.0, "token_budget+noise_guard", "to_uniform", "at most", 0.01),
        ("digits", 0.2, "noise_guard", "to_uniform", "at least", 3.0),
        ("digits", 0.0, "noise_guard", "to_uniform", "at least", -0.3),
        *(("digits", noise, "noise_guard", "to_early_stop", "at least", 0.0) for noise in (0.1, 0.2, 0.4)),
        *(("text", 0.2, name, "to_early_stop", "at most", 0.0) for name in ("noise_guard", "token_budget+noise_guard")),
    )
    judged = []
    for part, noise, method, name, relation, aim in aims:
        value = found.get((part, noise, method), {}).get(name)
        value = value.mean if isinstance(value, Spread) else value
        if value is not None:
            is_met = {"within": abs(value) <= aim, "at most": value <= aim, "at least": value >= aim}[relation]
            what = f"{part}, {noise:.0%} spoiled, {method}: {name}"
            judged.append({"what": what, "value": value, "aim": f"{relation} {aim:g}", "met": is_met})
    return judged


def tables(rows: list[dict[str, Any]]) -> Iterator[Table]:
    for part in dict.fromkeys(row["part"] for row in rows):
        for noise in dict.fromkeys(row["noise"] for row in rows if row["part"] == part):
            yield _table(part, noise, [row for row in rows if (row["part"], row["noise"]) == (part, noise)])


def _table(part: str, noise: float, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"{part}, {noise:.0%} spoiled: {TITLES[part]}; {len(rows[0]['seeds'])} seeds")
    work = ("real tokens", "processed") if part == "text" else ("rows",)
    table.add_column("method", no_wrap=True)
    for name in ("score", "to uniform", "equal work", "early stop", "oracle", *work, "CPU", "precision", "recall"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*_cells(part, row))
    return table


def _cells(part: str, row: dict[str, Any]) -> Iterator[str]:
    digits = 3 if part == "text" else 2
    yield row["method"] + ("" if row["budget"] == 1.0 else f", {row['budget']:.0%} budget")
    for name in ("score", "to_uniform", "at_equal_work", "to_early_stop", "to_oracle"):
        yield _shown(row[name], digits, signed=name != "score")
    for name in ("real_ratio", "padded_ratio") if part == "text" else ("rows_ratio",):
        yield "-" if row[name] is None else f"{row[name]:.2f}"
    for name in ("cpu_ratio", "precision", "recall"):
        yield "-" if row[name] is None else f"{row[name]:.2f}"


def _shown(spread: Optional[Spread], digits: int, signed: bool) -> str:
    if spread is None:
        return "-"
    value = f"{spread.mean:{'+' if signed else ''}.{digits}f}"
    return value if spread.error is None else f"{value} ± {spread.error:.{digits}f}"


def text_of(row: dict[str, Any]) -> dict[str, Any]:
    """Convert spreads to dicts, because JSON has no named tuples."""
    return {name: value._asdict() if isinstance(value, Spread) else value for name, value in row.items()}


def padding_table(figures: list[dict[str, Any]]) -> Table:
    table = Table(title=f"processed / real tokens, {figures[0]['rows']:,} docstrings, {TEXT['batch']} rows per batch")
    for name in ("cut to", UNIFORM, GROUPED, "token_budget", "token_budget / uniform"):
        table.add_column(name, justify="right")
    for row in figures:
        ratios = [row[UNIFORM], row[GROUPED], row["token_budget"], row["token_budget"] / row[UNIFORM]]
        table.add_row(str(row["longest"]), *(f"{ratio:.2f}" for ratio in ratios))
    return table


def _without_points(figures: dict[str, Any]) -> dict[str, Any]:
    """Leave out the scores of every epoch, which only the file of finished runs keeps."""
    return {name: value for name, value in figures.items() if name != "points"}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted({name for parts in METHODS.values() for methods in parts.values() for name in methods})
    parser.add_argument("--part", nargs="+", choices=[*METHODS, "all"], default=["all"])
    parser.add_argument("--large", action="store_true", help="text alone: more rows, a better base, fewer methods")
    parser.add_argument("--seeds", nargs="+", type=int, help=f"default: the first of {SEEDS}")
    parser.add_argument("--methods", nargs="+", choices=names, help="default: all; uniform is needed to compare")
    parser.add_argument("--noise", nargs="+", type=float, help="shares of spoiled rows; default: all")
    parser.add_argument(
        "--again", nargs="+", choices=names, default=[], help="methods whose finished runs do not count"
    )
    given = parser.parse_args()
    given.part = list(METHODS) if "all" in given.part else given.part
    return given


def main() -> None:
    torch.set_num_threads(1)
    given = options()
    if given.large:
        given.part = ["text"]
        TEXT.update(LARGE_TEXT)
    runs = make(wanted(given), given.again)
    rows = compared(runs)
    console = Console(width=180)
    for table in tables(rows):
        console.print(table)
    judged = verdicts(rows)
    for one in judged:
        console.print(f"{one['what']} {one['value']:+.3f} ({one['aim']}: {'met' if one['met'] else 'MISSED'})")
    padded = [padding(longest) for longest in PADDED_LENGTHS] if "text" in given.part else []
    if padded:
        console.print(padding_table(padded))
    result = {
        "recipes": {part: RECIPES[part] for part in given.part},
        "padding": padded,
        "verdicts": judged,
        "table": [text_of(row) for row in rows],
        "runs": [{**asdict(one), **_without_points(figures)} for one, figures in runs.items()],
    }
    write_result("curriculum_large" if given.large else "curriculum", result)


if __name__ == "__main__":
    main()
