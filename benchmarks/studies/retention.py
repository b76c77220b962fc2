"""Learning something new at equal forgetting: what does a controlled replay buy against what people do without it?

    python benchmarks/studies/retention.py [--pairs source] [--seeds 0] [--budgets 0.02 0.1] [--only none ours]

The embedded base knows Python's documentation (the anchor). By LoRA it learns something else (PAIRS), for each seed
once per contender, in as many steps with as many rows of the new text; replayed rows come on top. Then, on documents
that nothing was decided by:

    forgotten   bits per token more than the base on the anchor's unseen documents
    learned     bits per token less than the base on held-out documents of the new text

Every update is also scaled by 0.1, 0.2, ... (WiSE-FT, Wortsman et al. 2022), and a contender without control stands for
the best of its points at equal forgetting: it is granted the scale that the unseen documents would choose, which nobody
has in practice. Ours is one point per budget, with the scale that it chose itself on other documents.

A cell is a pair, a seed and a contender, about a minute on one core. Cells that results/retention.json has are not
computed again: a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Optional

import torch
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.common import (
    RESULTS,
    collator,
    command_line,
    embedded_data,
    embedded_model,
    quiet,
    scratch_arguments,
    shown,
    write_result,
)
from scu_trainer import SCUTrainer
from scu_trainer.data import default_cache_dir, embedded_tokenizer
from scu_trainer.data.text.anchor import Anchor, read_anchor
from scu_trainer.models.scaling import ScaledUpdate
from scu_trainer.settings import DataSettings, RegularizationSettings, RetentionSettings
from scu_trainer.train.evaluation.scoring import bootstrap_difference, score_documents
from scu_trainer.train.loop import Loop
from scu_trainer.train.retention.loop import Retention
from scu_trainer.train.retention.replay import Replay

KEYS = ("pair", "seed", "contender", "steps")
SCALES = [number / 10 for number in range(1, 11)]
ROWS = {"block_size": 128, "validation_split_percentage": 20.0, "packing": False}
MOST_SCORED = 96
"""Rows of each side that a point is scored on."""

PAIRS = {
    "source": {"dataset": "stdlib_source", "dataset_size": 40},
    "docstrings": {"dataset": "stdlib_docstrings", "dataset_size": 200},
    "sums": {"dataset": "sums", "dataset_size": 400},
}
"""New texts, from code near to the anchor to lines that are made here and have nothing of it."""

RATE = 1e-3
FIXED = {
    "none": {},
    "replay 10 %": {"replay": 0.1},
    "replay 30 %": {"replay": 0.3},
    "replay 50 %": {"replay": 0.5},
    "lambda 2": {"lambda": 2.0},
    "lambda 10": {"lambda": 10.0},
    "a quarter of the rate": {"rate": RATE / 4},
    "rank 1": {"rank": 1},
    "twice the steps": {"times": 2},
}
"""``none`` also gives the points of stopping early. lambda: decay toward the initial weights (L2-SP, decoupled).
``twice the steps`` takes the time that replay takes at its most."""


class FixedReplay(Loop):
    """So many rows of the anchor in every batch, and nothing measured."""

    name = "fixed_replay"

    def __init__(self, rows: Any, share: float, seed: int) -> None:
        self.share, self.replay = share, Replay(rows, collator(), seed)

    def batches(self, batches: Iterator[Any], count: int) -> Iterator[Any]:
        return (self.replay.beside(inputs, self.trainer._train_batch_size, self.share) for inputs in batches)


class Points(TrainerCallback):
    """What is forgotten and learned while training, as one who stops early would find it."""

    def __init__(self, point: Any, every: int) -> None:
        self.point, self.every, self.found = point, every, []

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step % self.every == 0 and state.global_step < state.max_steps:
            self.found.append({"step": state.global_step, **self.point(kwargs["model"])})


def sums(folder: Path, count: int) -> Path:
    """Documents of sums that are right."""
    chance, path = random.Random(0), folder / "sums.jsonl"
    pairs = [[(chance.randint(1, 99), chance.randint(1, 99)) for _ in range(12)] for _ in range(count)]
    texts = [" ".join(f"{a} plus {b} is {a + b}." for a, b in lines) for lines in pairs]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


class Scene:
    """The texts of a pair and a seed, and what the base makes of them."""

    def __init__(self, pair: str, seed: int) -> None:
        self.pair, self.seed = pair, seed
        cache, tokenizer = default_cache_dir(None), embedded_tokenizer(default_cache_dir(None))
        named = dict(PAIRS[pair])
        if named["dataset"] == "sums":
            named["dataset"] = str(sums(Path(tempfile.mkdtemp()), named["dataset_size"]))
        self.data = embedded_data(seed, **ROWS, **named)
        how = {"tokenizer": tokenizer, "seed": seed, "cache_dir": cache, "model_name": "embedded base"}
        self.anchor: Anchor = read_anchor(
            DataSettings(**ROWS), "python_docs", 300, choose=lambda rows: (True, f"{rows} rows"), **how
        )
        self.rows = {"forgotten": _some(self.anchor.unseen), "learned": _some(self.data.eval)}
        self.base = self._scores(embedded_model(seed, tuning="lora"))

    def _scores(self, model: torch.nn.Module) -> dict[str, Any]:
        return {side: score_documents(model, rows, collator()) for side, rows in self.rows.items()}

    def point(self, model: torch.nn.Module) -> dict[str, float]:
        found = self._scores(model)
        change = {side: bootstrap_difference(self.base[side], found[side], resamples=2).value for side in found}
        return {"forgotten": change["forgotten"], "learned": -change["learned"]}


def _some(rows: Any) -> Any:
    return rows.select(range(min(MOST_SCORED, len(rows))))


def cell(scene: Scene, contender: str, what: dict[str, Any], steps: int) -> dict[str, Any]:
    """``points``: at every scale, and of one without control also on the way. ``ours``: the one that the loop left."""
    model = embedded_model(scene.seed, tuning="lora", lora_r=what.get("rank", 8), lora_alpha=2 * what.get("rank", 8))
    loop = _loop(scene, what)
    on_the_way = Points(scene.point, max(1, steps // 6))
    callbacks = [found for found in (loop, on_the_way if contender == "none" else None) if found is not None]
    law = {} if "lambda" not in what else {
        "regularization": RegularizationSettings(law="fixed", lambda_init=what["lambda"])
    }  # fmt: skip
    begun_s = time.perf_counter()
    changes = {"max_steps": steps * what.get("times", 1), "learning_rate": what.get("rate", RATE), "seed": scene.seed}
    with scratch_arguments(**changes) as arguments:
        given = {"train_dataset": scene.data.train, "data_collator": collator(), "callbacks": callbacks, **law}
        trainer = quiet(SCUTrainer(model, arguments, **given))
        trainer.train()
        seconds = time.perf_counter() - begun_s
        found = {"seconds": seconds, "steps": steps, "pair": scene.pair, "seed": scene.seed, "contender": contender}
        if isinstance(loop, Retention):
            figures = loop.figures()["retention"]
            kept = (
                "scale",
                "replayed_rows",
                "lost_bits",
                "is_within_budget",
                "held_while_training",
                "overhead_fraction",
            )
            return {**found, "ours": scene.point(trainer.model), **{name: figures[name] for name in kept}}
    update = ScaledUpdate(trainer.model)
    points = []
    for scale in SCALES:
        with update.at(scale) as scaled:
            points.append({"scale": scale, **scene.point(scaled)})
    replayed = loop.replay.used if isinstance(loop, FixedReplay) else 0
    return {**found, "points": points, "on_the_way": on_the_way.found, "replayed_rows": replayed}


def _loop(scene: Scene, what: dict[str, Any]) -> Optional[Loop]:
    if "budget" in what:
        settings = RetentionSettings("python_docs", retain_budget_bits=what["budget"])
        return Retention(scene.anchor, settings, collator())
    return FixedReplay(scene.anchor.replayed, what["replay"], scene.seed) if "replay" in what else None


def learned_at(points: list[dict[str, float]], forgotten: float) -> float:
    """The most that a mixture of two neighbouring points learns for that much forgotten; nothing is for nothing."""
    front, best = sorted([(0.0, 0.0), *((p["forgotten"], p["learned"]) for p in points)]), 0.0
    for (low, at_low), (high, at_high) in pairwise(front):
        best = max(best, at_low if low <= forgotten else best)
        if low <= forgotten < high:
            return max(best, at_low + (at_high - at_low) * (forgotten - low) / (high - low))
    return max([best, *(learned for lost, learned in front if lost <= forgotten)])


def table(results: list[dict[str, Any]], console: Console) -> None:
    """Each of ours beside what the others learn at what it has forgotten, in the same pair, seed and steps."""
    for ours in (result for result in results if "ours" in result):
        others = [r for r in results if "points" in r and all(r[key] == ours[key] for key in ("pair", "seed", "steps"))]
        forgotten, learned = ours["ours"]["forgotten"], ours["ours"]["learned"]
        titled = (
            f"{ours['pair']}, seed {ours['seed']}, {ours['steps']} steps: {ours['contender']} forgets {forgotten:.4f}"
        )
        shown_table = Table(
            "at that, bits per token", "learned", "replayed rows", "s", title=titled, title_justify="left"
        )
        shown_table.add_row(f"ours, scale {ours['scale']:.2f}", *_cells(learned, ours))
        for other in others:
            shown_table.add_row(other["contender"], *_cells(learned_at(other["points"], forgotten), other))
            if other["on_the_way"]:
                stopped = [*other["on_the_way"], other["points"][-1]]
                shown_table.add_row("stopping early", *_cells(learned_at(stopped, forgotten), other))
        console.print(shown_table)


def _cells(learned: float, result: dict[str, Any]) -> tuple[str, str, str]:
    return shown(learned), str(result["replayed_rows"]), shown(result["seconds"], 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS), choices=PAIRS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.01, 0.02, 0.05, 0.1])
    parser.add_argument("--only", nargs="+", help="contenders; the word ours: those of --budgets")
    parser.add_argument("--steps", type=int, default=240)
    asked, console = parser.parse_args(), Console()
    contenders = {**FIXED, **{f"ours, budget {budget:g}": {"budget": budget} for budget in asked.budgets}}
    only = asked.only or [*FIXED, "ours"]
    contenders = {
        name: what for name, what in contenders.items() if name in only or ("ours" in only and "budget" in what)
    }
    path = RESULTS / "retention.json"
    results = json.loads(path.read_text())["results"] if path.is_file() else []
    done = {tuple(result[key] for key in KEYS) for result in results}
    for pair in asked.pairs:
        for seed in asked.seeds:
            todo = {name: what for name, what in contenders.items() if (pair, seed, name, asked.steps) not in done}
            scene = Scene(pair, seed) if todo else None
            for number, (name, what) in enumerate(todo.items(), start=1):
                console.print(f"{pair}, seed {seed}: {name} ({number} of {len(todo)})", soft_wrap=True)
                results.append(cell(scene, name, what, asked.steps))
                write_result("retention", command_line(), {"rate": RATE, "results": results})
    table(results, console)


if __name__ == "__main__":
    main()
