"""Models that are no text transformers, in our loop, in the stock Trainer and in a hand-written PyTorch loop.

    python benchmarks/families.py [--recipes resnet efficientnet gru sensors] [--steps 150]

For each recipe two runs, each in a process of its own. "equal": all three sides in float32, the same model, optimizer,
schedule, batches of the same size; ours with every loop that the recipe turns on. "recipe": the plain float32 loop
against ours as the recipe has it (bf16 where the CPU has it). Within a run the sides take turns of a few steps, so that
drift of the machine hits all alike; a turn's time includes loading its batches. Prints steps per second as a ratio to
the faster of the other sides, and the held-out score of each side after the same number of steps.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import command_line, write_result
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, get_scheduler

from scu_trainer.cli.configuration import read_job
from scu_trainer.train.logs import run_log
from scu_trainer.train.session import build_trainer

RECIPES = Path(__file__).parents[1] / "recipes"
FAMILIES = ("resnet", "efficientnet", "gru", "sensors")
STEPS_PER_TURN = 5
WARM_UP_TURNS = 2
GROUPS = {"equal": ("plain", "stock", "ours"), "recipe": ("plain", "ours")}


class Turns:
    """Lets threads go on one at a time, ``STEPS_PER_TURN`` optimizer steps each, and notes how long each turn took."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self._order, self._turn = list(names), 0
        self._changed = threading.Condition()
        self._steps, self._begun_s = 0, 0.0

    def begin(self, name: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._order[self._turn] == name)
        self._steps, self._begun_s = 0, time.perf_counter()

    def step(self, name: str) -> None:
        self._steps += 1
        if self._steps == STEPS_PER_TURN:
            self.seconds[name].append(time.perf_counter() - self._begun_s)
            self._pass_on()
            self.begin(name)

    def end(self, name: str) -> None:
        with self._changed:
            now = self._order[self._turn]
            following = self._order[(self._turn + 1) % len(self._order)] if now == name else now
            self._order.remove(name)
            self._turn = self._order.index(following) if following in self._order else 0
            self._changed.notify_all()

    def _pass_on(self) -> None:
        with self._changed:
            self._turn = (self._turn + 1) % len(self._order)
            self._changed.notify_all()


class TakesTurns(TrainerCallback):
    def __init__(self, turns: Turns, name: str) -> None:
        self._turns, self._name = turns, name

    def on_train_begin(self, args, state, control, **kwargs):
        self._turns.begin(self._name)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step < state.max_steps:
            self._turns.step(self._name)


def read(recipe: str, steps: int, folder: str, is_recipe: bool) -> Any:
    flags = ["--config", str(RECIPES / f"{recipe}.yaml")][1:]
    words = ["--output_dir", f"{folder}/run", "--report_to", "none", "--save_strategy", "no", "--eval_strategy", "no"]
    words += ["--max_steps", str(steps), "--logging_steps", "100000", "--use_cpu", "true"]
    return read_job(flags[0], [*words, *([] if is_recipe else ["--mixed_precision", "no"])])


def plain(parts: Any, job: Any, turns: Turns) -> torch.nn.Module:
    """What one would write by hand, with the optimizer and the schedule of the Trainer."""
    args, model = job.training, parts.model.train()
    optimizer = Trainer(model, args).create_optimizer()
    schedule = get_scheduler(
        args.lr_scheduler_type, optimizer, args.get_warmup_steps(args.max_steps), args.max_steps,
        args.lr_scheduler_kwargs,
    )  # fmt: skip
    loader = DataLoader(parts.data.train, args.train_batch_size, shuffle=True, collate_fn=parts.collator)
    turns.begin("plain")
    step = 0
    while step < args.max_steps:
        for batch in loader:
            loss = _loss(model, batch, args)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if step == args.max_steps:
                break
            turns.step("plain")
    return model


def _loss(model: torch.nn.Module, batch: Any, args: Any) -> torch.Tensor:
    if not args.label_smoothing_factor:
        return model(**batch)["loss"]
    labels = batch.pop("labels")
    return torch.nn.functional.cross_entropy(
        model(**batch)["logits"], labels, label_smoothing=args.label_smoothing_factor
    )


def stock(parts: Any, job: Any, turns: Turns) -> torch.nn.Module:
    trainer = Trainer(parts.model, job.training, data_collator=parts.collator, train_dataset=parts.data.train)
    return _trained(trainer, turns, "stock")


def ours(parts: Any, job: Any, turns: Turns) -> torch.nn.Module:
    return _trained(build_trainer(job, parts, None, Console(quiet=True)), turns, "ours")


def _trained(trainer: Trainer, turns: Turns, name: str) -> torch.nn.Module:
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(TakesTurns(turns, name))
    trainer.train()
    return trainer.model


SIDES: dict[str, Callable] = {"plain": plain, "stock": stock, "ours": ours}


def compare(recipe: str, group: str, steps: int) -> dict[str, Any]:
    """In this process: the sides of ``group``, in turns."""
    names = GROUPS[group]
    with run_log(), tempfile.TemporaryDirectory() as folder:
        job = read(recipe, steps, folder, is_recipe=group == "recipe")
        parts = job.kind.load(job, Console(quiet=True))
        turns, scores, errors = Turns(names), {}, []

        def side(name: str) -> None:
            turns.begin(name)  # libraries share state that is not made for being set up by two threads at once
            own = copy.copy(parts)
            own.model = copy.deepcopy(parts.model)
            try:
                model = SIDES[name](own, copy.deepcopy(job), turns)
                scores[name] = job.kind.score(model, own)
            except BaseException as error:
                errors.append(error)
                raise
            finally:
                turns.end(name)

        threads = [threading.Thread(target=side, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return {"recipe": recipe, "group": group, "steps": steps, **_figures(turns, scores, job)}


def _figures(turns: Turns, scores: dict[str, Any], job: Any) -> dict[str, Any]:
    rounds = list(zip(*(turns.seconds[name][WARM_UP_TURNS:] for name in turns.seconds), strict=False))
    by_side = dict(zip(turns.seconds, zip(*rounds, strict=True), strict=True))
    others = [name for name in by_side if name != "ours"]
    ratios = {
        name: median(other / own for own, other in zip(by_side["ours"], by_side[name], strict=True)) for name in others
    }
    return {
        "mixed_precision": job.model.mixed_precision,
        "rows_per_step": job.training.per_device_train_batch_size * job.training.gradient_accumulation_steps,
        "seconds_per_step": {name: median(seconds) / STEPS_PER_TURN for name, seconds in by_side.items()},
        "speed_against": ratios,
        "speed_against_the_better": min(ratios.values()),
        "held_out_bpt": {name: score.bpt for name, score in scores.items()},
        "held_out_accuracy": {
            name: float(score.correct.sum() / score.tokens.sum())
            for name, score in scores.items()
            if score.correct is not None
        },
        "turns": len(rounds),
    }


def show(results: list[dict[str, Any]]) -> None:
    table = Table(title="steps per second of ours against the better of the other sides, and held-out scores")
    for name in ("recipe", "run", "arithmetic", "ms per step", "ratio", "held out"):
        table.add_column(name)
    for r in results:
        scores = r["held_out_accuracy"] or r["held_out_bpt"]
        style = "{:.1%}" if r["held_out_accuracy"] else "{:.3f} bits"
        table.add_row(
            r["recipe"],
            r["group"],
            "float32" if r["mixed_precision"] == "no" else f"{r['mixed_precision']} (plain: float32)",
            ", ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in r["seconds_per_step"].items()),
            f"{r['speed_against_the_better']:.2f}",
            ", ".join(f"{name} {style.format(score)}" for name, score in scores.items()),
        )
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of each side")
    parser.add_argument("--child", choices=list(GROUPS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(compare(options.recipes[0], options.child, options.steps)))
        return
    results = []
    for recipe in options.recipes:
        for group in GROUPS:
            words = ["--recipes", recipe, "--child", group, "--steps", str(options.steps)]
            answer = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True)
            if answer.returncode:
                sys.exit(f"{recipe}, {group}: {answer.stderr[-2000:]}")
            results.append(json.loads(answer.stdout.splitlines()[-1]))
            show(results)
    write_result("families", command_line(), {"results": results})


if __name__ == "__main__":
    main()
