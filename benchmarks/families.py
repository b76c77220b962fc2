"""Models that are no text transformers, in our loop, in the stock Trainer and in a hand-written PyTorch loop.

    python benchmarks/families.py [--recipes resnet efficientnet gru sensors] [--steps 150]

For each recipe two runs. "equal": all three sides in float32, the same model, optimizer, schedule, batches of the same
size; ours with every loop that the recipe turns on. "recipe": the plain float32 loop against ours as the recipe has it
(bf16 where the CPU has it). Each side is a process, as its user would start it, and they take turns of a few steps:
drift of the machine hits all alike, and those that wait do nothing. A turn's time includes loading its batches. Prints
steps per second as a ratio to the faster of the other sides, and each side's held-out score after as many steps.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import command_line, not_repeated, write_result
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

Seconds = dict[str, list[float]]
"""Of each side's turns, after the first ones."""
Ends = dict[str, dict[str, Any]]


class Turns:
    """A side's part in taking turns, in a process of its own: ``STEPS_PER_TURN`` optimizer steps when it is asked."""

    def __init__(self, parent: Connection) -> None:
        self._parent = parent
        self._steps, self._begun_s = 0, 0.0

    def begin(self) -> None:
        """Wait to be asked. All is set up by now."""
        self._parent.send(None)
        self._go_on()

    def step(self) -> None:
        self._steps += 1
        if self._steps == STEPS_PER_TURN:
            self._parent.send(time.perf_counter() - self._begun_s)
            self._go_on()

    def _go_on(self) -> None:
        self._parent.recv()
        self._steps, self._begun_s = 0, time.perf_counter()


class TakesTurns(TrainerCallback):
    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_train_begin(self, args, state, control, **kwargs):
        self._turns.begin()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step < state.max_steps:
            self._turns.step()


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
    turns.begin()
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
            turns.step()
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
    return _trained(trainer, turns)


def ours(parts: Any, job: Any, turns: Turns) -> torch.nn.Module:
    return _trained(build_trainer(job, parts, None, Console(quiet=True)), turns)


def _trained(trainer: Trainer, turns: Turns) -> torch.nn.Module:
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(TakesTurns(turns))
    trainer.train()
    return trainer.model


SIDES: dict[str, Callable] = {"plain": plain, "stock": stock, "ours": ours}


def run_side(name: str, recipe: str, group: str, steps: int, parent: Connection) -> None:
    """In a process of its own: one side, a turn whenever ``parent`` asks; at the end its score."""
    with run_log(), tempfile.TemporaryDirectory() as folder:
        job = read(recipe, steps, folder, is_recipe=group == "recipe" and name == "ours")
        parts = job.kind.load(job, Console(quiet=True))
        score = job.kind.score(SIDES[name](parts, job, Turns(parent)), parts)
    parent.send(
        {
            "bpt": score.bpt,
            "accuracy": None if score.correct is None else float(score.correct.sum() / score.tokens.sum()),
            "mixed_precision": job.model.mixed_precision,
            "rows_per_step": job.training.per_device_train_batch_size * job.training.gradient_accumulation_steps,
        }
    )


def in_turns(order: Sequence[str], recipe: str, group: str, steps: int) -> tuple[Seconds, Ends]:
    """Seconds of each side's turns, and what each says at the end. Processes start in ``order``."""
    spawn = multiprocessing.get_context("spawn")
    connections, processes = {}, []
    for name in order:
        connections[name], theirs = spawn.Pipe()
        processes.append(spawn.Process(target=run_side, args=(name, recipe, group, steps, theirs), daemon=True))
        processes[-1].start()
        theirs.close()  # so that the end of the process ends the waiting for it
        connections[name].recv()
    seconds: Seconds = {name: [] for name in order}
    ends: Ends = {}
    while not ends:
        for name, connection in connections.items():
            connection.send(None)
            answer = connection.recv()
            if isinstance(answer, dict):
                ends[name] = answer
            else:
                seconds[name].append(answer)
    for process in processes:
        process.join()
    return {name: turns[WARM_UP_TURNS:] for name, turns in seconds.items()}, ends


def compare(recipe: str, group: str, steps: int) -> dict[str, Any]:
    """Each side is the first to start once: which one starts first matters by some percent on two cores."""
    names = GROUPS[group]
    orders = [names[first:] + names[:first] for first in range(len(names))]
    rounds, ends = [], {}
    for order in orders:
        seconds, ends = in_turns(order, recipe, group, steps)
        rounds.append(seconds)
    ratios = {name: [_ratio(seconds, name) for seconds in rounds] for name in names if name != "ours"}
    return {
        "recipe": recipe,
        "group": group,
        "steps": steps,
        "mixed_precision": ends["ours"]["mixed_precision"],
        "rows_per_step": ends["ours"]["rows_per_step"],
        "seconds_per_step": {
            name: median(turn for seconds in rounds for turn in seconds[name]) / STEPS_PER_TURN for name in names
        },
        "speed_against": {name: median(found) for name, found in ratios.items()},
        "speed_against_by_order": ratios,
        "speed_against_the_better": min(median(found) for found in ratios.values()),
        "held_out_bpt": {name: ends[name]["bpt"] for name in names},
        "held_out_accuracy": {name: ends[name]["accuracy"] for name in names if ends[name]["accuracy"] is not None},
        "turns": sum(len(seconds["ours"]) for seconds in rounds),
    }


def _ratio(seconds: Seconds, other: str) -> float:
    """Steps per second of ours against ``other``'s."""
    return median(theirs / own for own, theirs in zip(seconds["ours"], seconds[other], strict=True))


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
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    options = parser.parse_args()
    results = []
    for recipe in options.recipes:
        for group in options.groups:
            results.append(compare(recipe, group, options.steps))
            show(results)
    results = sorted(
        [*not_repeated("families", results, ("recipe", "group")), *results], key=lambda r: FAMILIES.index(r["recipe"])
    )
    write_result("families", command_line(), {"results": results})


if __name__ == "__main__":
    main()
