"""Learning something new at equal forgetting: how does controlled replay compare with the usual methods?

    python benchmarks/studies/retention.py [--pairs "docs > source"] [--seeds 0] [--size small] [--budgets 0.02 0.1]
                                           [--only none ours] [--tuning full]

A small Llama is pre-trained on one text (the anchor). With LoRA or full tuning it learns another (PAIRS), once per seed
and contender, with the same number of steps and of rows of the new text; replayed rows are added to these. Then it is
scored on documents that no decision used:

    forgotten   bits per token more than the base on unseen documents of the anchor
    learned     bits per token less than the base on held-out documents of the new text

Every update is also scaled by SCALES (WiSE-FT, Wortsman et al. 2022). A contender without control is represented by its
best point at equal forgetting, interpolated between the scales with monotone cubics. It thus gets the scale that the
unseen documents would choose, which is not known in practice. Ours is one point per budget, with the scale that it
chose itself on other documents.

A cell is a pair, a size, a seed and a contender. Cells in results/retention.json are not computed again, so that a
stopped run continues.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import numpy
import torch
from rich.console import Console
from rich.table import Table
from scipy.interpolate import PchipInterpolator

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.common import (
    collator,
    command_line,
    earlier,
    embedded_tokenizer,
    quiet,
    scratch_arguments,
    write_result,
)
from benchmarks.lib.retention_work import (
    LOSSES,
    MOST_JUDGED,
    PAIRS,
    SIZES,
    Ewc,
    FixedReplay,
    Points,
    anchor_of,
    fisher,
    some,
    text_settings,
    tuned,
    untuned,
)
from scu_trainer import SCUTrainer
from scu_trainer.data import default_cache_dir, prepare
from scu_trainer.data.text.anchor import Anchor
from scu_trainer.models.scaling import ScaledUpdate
from scu_trainer.report.comparison.statistics import t_interval
from scu_trainer.settings import RegularizationSettings, RetentionSettings
from scu_trainer.train.evaluation.scoring import bootstrap_difference, score_documents
from scu_trainer.train.loop import Loop
from scu_trainer.train.retention.loop import Retention

KEYS = ("pair", "size", "seed", "contender", "steps")
SCALES = (0.1, 0.2, 0.35, 0.6, 1.0)
STOPPED = (5, 10, 15, 25, 40)
"""The steps after which early stopping is considered."""

FULL = ", full"
"""Suffix of a size with full tuning instead of adapters."""

RATE = 1e-3
BATCH = 4
EVERY = 10
"""Optimizer steps between two measurements of ours. The default spends 2 % of the training time on them, which in runs
as short as these would allow one or two after the first steps. Long runs have as many as here at that cost."""

FIXED: dict[str, dict[str, Any]] = {
    "none": {},
    "replay 10 %": {"replay": 0.1},
    "replay 30 %": {"replay": 0.3},
    "replay 50 %": {"replay": 0.5},
    "lambda 2": {"lambda": 2.0},
    "lambda 10": {"lambda": 10.0},
    "EWC 10": {"ewc": 10.0},
    "EWC 100": {"ewc": 100.0},
    "EAFT": {"loss": "eaft"},
    "DFT": {"loss": "dft"},
    "a quarter of the rate": {"rate": RATE / 4},
    "rank 1": {"rank": 1},
    "twice the steps": {"times": 2},
    "sampled 50 %": {"replay": 0.5, "sampled": True},
    "sampled, budget 0.1": {"budget": 0.1, "sampled": True},
}
"""``none`` also gives the points of early stopping. lambda: decay toward the initial weights (L2-SP, decoupled).
``twice the steps`` takes as long as the largest replay. ``sampled``: the anchor is text that the base generates, and
the real text is used for scoring only."""


class Scene:
    """The texts of a pair and a seed, and the scores of the base on them."""

    def __init__(self, pair: str, size: str, seed: int) -> None:
        """``size``: one of SIZES, with the suffix FULL for full tuning."""
        self.pair, self.size, self.seed = pair, size, seed
        self.shape, self.is_full = size.removesuffix(FULL), size.endswith(FULL)
        self.known, self.new = PAIRS[pair]
        cache = default_cache_dir(None)
        how = {"seed": seed, "cache_dir": cache, "model_name": self.known}
        self.data = prepare(text_settings(self.new), embedded_tokenizer(cache), **how)
        self.anchor: Anchor = anchor_of(self.known, self.new, seed)
        self.rows = {"forgotten": self.anchor.unseen, "learned": some(self.data.eval, MOST_JUDGED)}
        self.base = self._scores(self.model())

    def model(self, rank: int = 8) -> torch.nn.Module:
        return tuned(self.known, self.shape, self.seed, None if self.is_full else rank)

    def untuned(self) -> Optional[torch.nn.Module]:
        """Return the base, to scale an update of all weights; None with adapters, which contain the update."""
        return untuned(self.known, self.shape) if self.is_full else None

    @functools.cached_property
    def fisher(self) -> dict[str, torch.Tensor]:
        return fisher(self.known, self.shape, some(self.anchor.measured, MOST_JUDGED))

    @functools.cached_property
    def sampled(self) -> Anchor:
        return anchor_of(self.known, self.new, self.seed, sampled=self.model())

    def _scores(self, model: torch.nn.Module) -> dict[str, Any]:
        return {side: score_documents(model, rows, collator()) for side, rows in self.rows.items()}

    def point(self, model: torch.nn.Module) -> dict[str, float]:
        found = self._scores(model)
        change = {side: bootstrap_difference(self.base[side], found[side], resamples=2).value for side in found}
        return {"forgotten": change["forgotten"], "learned": -change["learned"]}


def cell(scene: Scene, contender: str, what: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train a cell. ``points`` in the result: at every scale, of ``none`` also by step. ``ours``: that of the loop."""
    model = scene.model(what.get("rank", 8))
    loop, on_the_way = _loop(scene, what), Points(scene.point, STOPPED)
    given: dict[str, Any] = {"callbacks": [*([loop] if loop else []), *([on_the_way] if contender == "none" else [])]}
    if "lambda" in what:
        given["regularization"] = RegularizationSettings(law="fixed", lambda_init=what["lambda"])
    if "loss" in what:
        given["compute_loss_func"] = LOSSES[what["loss"]]
    changes = {"max_steps": steps * what.get("times", 1), "learning_rate": what.get("rate", RATE), "seed": scene.seed}
    changes["per_device_train_batch_size"] = BATCH
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    with scratch_arguments(**changes) as arguments:
        trainer = quiet(SCUTrainer(model, arguments, train_dataset=scene.data.train, data_collator=collator(), **given))
        trainer.train()
    found = {
        **dict(zip(KEYS, (scene.pair, scene.size, scene.seed, contender, steps), strict=True)),
        "seconds": time.perf_counter() - begun_s,
        "cpu_seconds": time.process_time() - begun_cpu_s,
    }
    if isinstance(loop, Retention):
        return {**found, "ours": scene.point(trainer.model), **_figures(loop)}
    update, points = ScaledUpdate(trainer.model, scene.untuned()), []
    for scale in SCALES:
        with update.at(scale) as scaled:
            points.append({"scale": scale, **scene.point(scaled)})
    replayed = loop.replay.used if isinstance(loop, FixedReplay) else 0
    return {**found, "points": points, "on_the_way": on_the_way.found, "replayed_rows": replayed}


KEPT = (
    *("scale", "replayed_rows", "lost_bits", "is_within_budget", "held_while_training", "overhead_fraction"),
    *("budget_bits", "measurements", "lost_bits_of_the_whole_update"),
)


def _figures(loop: Retention) -> dict[str, Any]:
    figures = loop.figures()["retention"]
    return {name: figures[name] for name in KEPT}


def picture(scene: Scene, budget: float, steps: int) -> None:
    """Record what is forgotten and learned during one training with ours and one without, for docs/draw_retain.py."""
    found: dict[str, Any] = {"pair": scene.pair, "size": scene.size, "seed": scene.seed, "budget_bits": budget}
    for name, what in (("with", {"budget": budget}), ("without", {})):
        loop, on_the_way = _loop(scene, what), Points(scene.point, tuple(range(0, steps, max(1, steps // 24))))
        callbacks = [on_the_way, *([loop] if loop else [])]
        changes = {"max_steps": steps, "learning_rate": RATE, "seed": scene.seed, "per_device_train_batch_size": BATCH}
        with scratch_arguments(**changes) as arguments:
            given = {"train_dataset": scene.data.train, "data_collator": collator(), "callbacks": callbacks}
            trainer = quiet(SCUTrainer(scene.model(), arguments, **given))
            trainer.train()
            path = Path(arguments.output_dir) / Retention.history_file
            history = json.loads(path.read_text()) if loop else []
        found[name] = {"points": on_the_way.found, "end": scene.point(trainer.model), "history": history}
        if isinstance(loop, Retention):
            found["with"] |= _figures(loop)
    bpt = {side: scores.bpt for side, scores in scene.base.items()}
    write_result("retention_run", {"rate": RATE, "steps": steps, "base_bits": bpt, **found})


def _loop(scene: Scene, what: dict[str, Any]) -> Optional[Loop]:
    anchor = scene.sampled if "sampled" in what else scene.anchor
    if "budget" in what:
        settings = RetentionSettings(
            scene.known, retain_budget_bits=what["budget"], retain_frequency=what.get("every", EVERY)
        )
        return Retention(anchor, settings, collator(), scene.untuned)
    if "ewc" in what:
        return Ewc(scene.fisher, what["ewc"])
    return FixedReplay(anchor.replayed, what["replay"], scene.seed) if "replay" in what else None


# -- at equal forgetting -----------------------------------------------------------------------------------------------


def learned_at(points: Sequence[dict[str, float]], forgotten: float, along: str = "scale") -> float:
    """Return the most that is learned at that much forgotten, interpolated between the points with monotone cubics over
    ``along``. With nothing forgotten, nothing is learned."""
    places = [0.0, *(point[along] for point in points)]
    dense = numpy.linspace(0.0, places[-1], 2001)
    lost, gained = (
        PchipInterpolator(places, [0.0, *(point[side] for point in points)])(dense) for side in ("forgotten", "learned")
    )
    return max(0.0, float(gained[lost <= forgotten].max(initial=0.0)))


FAMILIES: dict[str, tuple[str, ...]] = {
    "best of three fixed shares": ("replay 10 %", "replay 30 %", "replay 50 %"),
    "replay 50 %": ("replay 50 %",),
    "replay 30 %": ("replay 30 %",),
    "replay 10 %": ("replay 10 %",),
    "replay 50 % of what the base writes": ("sampled 50 %",),
    "scaling alone (WiSE-FT)": ("none",),
    "the same, twice the steps": ("twice the steps",),
    "best of two lambdas (L2-SP)": ("lambda 2", "lambda 10"),
    "best of two EWC": ("EWC 10", "EWC 100"),
    "EAFT": ("EAFT",),
    "DFT": ("DFT",),
    "a quarter of the rate": ("a quarter of the rate",),
    "rank 1": ("rank 1",),
}
"""Competing methods. Each is represented by the best of these cells, which are the runs that a search would need."""

STOPPING = "stopping early, not scaled"


def compared(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each result of ours and each competing method with all its cells in the same scene."""
    scene = KEYS[:3] + KEYS[4:]
    by_scene: dict[tuple, dict[str, Any]] = {}
    for result in results:
        by_scene.setdefault(tuple(result[key] for key in scene), {})[result["contender"]] = result
    rows = []
    for place, cells in by_scene.items():
        for ours in filter(_is_ours, cells.values()):
            forgotten, learned = ours["ours"]["forgotten"], ours["ours"]["learned"]
            row = {**dict(zip(scene, place, strict=True)), "budget": ours["budget_bits"], "ours": learned}
            for rival, names in FAMILIES.items():
                if all(name in cells for name in names):
                    best = max(names, key=lambda name: learned_at(cells[name]["points"], forgotten))
                    figures = {"learned": learned_at(cells[best]["points"], forgotten), "runs": len(names)}
                    more_rows = cells[best]["replayed_rows"] - ours["replayed_rows"]
                    rows.append({**row, "rival": rival, **figures, "more_rows": more_rows})
            if "none" in cells:
                stopped = [*cells["none"]["on_the_way"], {**cells["none"]["points"][-1], "step": ours["steps"]}]
                found = learned_at(stopped, forgotten, "step")
                rows.append({**row, "rival": STOPPING, "learned": found, "runs": 1, "more_rows": 0})
    return rows


def _is_ours(result: dict[str, Any]) -> bool:
    return result["contender"].startswith("ours")


def summary(results: Sequence[dict[str, Any]]) -> dict[str, tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """Return the heads and rows of the tables ``held`` and ``rivals`` as text, also for docs/retain.md."""
    return {"held": _held([*filter(_is_ours, results)]), "rivals": _rivals(compared(results))}


def _held(ours: Sequence[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    heads = (
        *("size", "budget", "runs", "lost on unseen documents: mean, largest", "within the budget"),
        *("within 1.2 of it", "update kept", "rows replayed", "measuring, % of the training time: mean, largest"),
    )
    rows = []
    for size, budget in sorted({(cell["size"], cell["budget_bits"]) for cell in ours}, key=lambda k: (_order(k[0]), k)):
        cells = [cell for cell in ours if (cell["size"], cell["budget_bits"]) == (size, budget)]
        lost = [cell["ours"]["forgotten"] for cell in cells]
        cost = [100 * cell["overhead_fraction"] for cell in cells]
        rows.append(
            (
                *(size, f"{budget:g}", str(len(cells)), f"{numpy.mean(lost):.4f}, {max(lost):.4f}"),
                *(str(sum(one <= factor * budget for one in lost)) for factor in (1.0, 1.2)),
                f"{numpy.mean([cell['scale'] for cell in cells]):.2f}",
                f"{numpy.mean([cell['replayed_rows'] for cell in cells]):.0f}",
                f"{numpy.mean(cost):.2f}, {max(cost):.2f}",
            )
        )
    return heads, rows


def _order(size: str) -> tuple[bool, int]:
    """Return the sort key of a table row, with adapters first."""
    return size.endswith(FULL), [*SIZES].index(size.removesuffix(FULL))


def _over_scenes(rows: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float], digits: int) -> str:
    """Format the mean and its 95 % interval over pairs and seeds. The budgets of each are averaged first, because they
    share texts and steps."""
    scenes: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        scenes.setdefault((row["pair"], row["seed"]), []).append(value(row))
    found = t_interval([float(numpy.mean(values)) for values in scenes.values()], 0.95)
    mean, *ends = (f"{one:+.{digits}f}" for one in (found.value, found.low, found.high) if one is not None)
    return f"{mean} ({' to '.join(ends)})" if ends else mean


def _rivals(rows: Sequence[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    heads = (
        *("rival, at what ours has forgotten", "size", "runs of a search", "cells"),
        *("ours learns more, bits per token", "in % of what ours learns", "ours ahead", "rows replayed more than ours"),
    )
    lines = []
    for size in sorted({row["size"] for row in rows}, key=_order):
        for rival in (*FAMILIES, STOPPING):
            found = [row for row in rows if (row["rival"], row["size"]) == (rival, size)]
            if not found:
                continue
            bits = _over_scenes(found, lambda row: row["ours"] - row["learned"], 3)
            percent = _over_scenes(found, lambda row: 100 * (1 - row["learned"] / row["ours"]), 1)
            ahead = sum(row["ours"] > row["learned"] for row in found)
            more = numpy.mean([row["more_rows"] for row in found])
            lines.append(
                (
                    *(rival, size, str(found[0]["runs"]), str(len(found))),
                    *(bits, percent),
                    *(f"{ahead} of {len(found)}", f"{more:+.0f}"),
                )
            )
    return heads, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS), choices=PAIRS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--tuning", default="lora", choices=("lora", "full"), help="full: without EWC and ranks")
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.01, 0.02, 0.05, 0.1])
    parser.add_argument("--only", nargs="+", help="contenders; the word ours: those of --budgets")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--table", action="store_true", help="compute no cell, only write the tables again")
    parser.add_argument("--picture", action="store_true", help="instead: one run of the first pair, with and without")
    asked, console = parser.parse_args(), Console()
    size = asked.size + (FULL if asked.tuning == "full" else "")
    contenders = {**FIXED, **{f"ours, budget {budget:g}": {"budget": budget} for budget in asked.budgets}}
    if asked.picture:
        picture(Scene(asked.pairs[0], size, asked.seeds[0]), asked.budgets[0], asked.steps)
        return
    if asked.tuning == "full":  # these are of adapters
        contenders = {name: what for name, what in contenders.items() if not {"ewc", "rank"} & {*what}}
    unknown = {*(asked.only or ())} - {*contenders, "ours"}
    if unknown:
        parser.error(f"--only takes {', '.join([*contenders, 'ours'])}; not {', '.join(sorted(unknown))}")
    only = asked.only or [*contenders]
    contenders = {
        name: what for name, what in contenders.items() if name in only or ("ours" in only and name.startswith("ours"))
    }
    before = earlier("retention")
    results, commands = before.get("results", []), before.get("commands", [])
    done = {tuple(result[key] for key in KEYS) for result in results}
    for seed in asked.seeds:
        for pair in asked.pairs:
            cells = [(pair, size, seed, name, asked.steps) for name in contenders]
            todo = {one[3]: contenders[one[3]] for one in cells if one not in done and not asked.table}
            scene = Scene(pair, size, seed) if todo else None
            for number, (name, what) in enumerate(todo.items(), start=1):
                console.print(f"{pair}, {size}, seed {seed}: {name} ({number} of {len(todo)})", soft_wrap=True)
                results.append(cell(scene, name, what, asked.steps))
                commands = [*dict.fromkeys([*commands, command_line()])]
                _write(results, commands)
    _write(results, commands)
    for heads, rows in summary(results).values():
        found = Table(*heads)
        for row in rows:
            found.add_row(*row)
        console.print(found)


def _write(results: list[dict[str, Any]], commands: list[str]) -> None:
    """Write the results. ``commands``: all commands that computed cells."""
    tables = {name: {"heads": heads, "rows": rows} for name, (heads, rows) in summary(results).items()}
    found = {"rate": RATE, "batch": BATCH, "commands": commands, "tables": tables, "results": results}
    write_result("retention", found, commands[0])


if __name__ == "__main__":
    main()
