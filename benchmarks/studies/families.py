"""Models other than text transformers in our trainer, in the stock Trainer and in a hand-written PyTorch loop.

    python benchmarks/studies/families.py [--recipes resnet efficientnet gru sensors] [--steps 150]

There are two runs per recipe. "equal": all three contenders in float32, with the same model, optimizer, schedule and
batch size; ours with every loop that the recipe turns on. "recipe": the plain float32 loop and ours with the settings
of the recipe (bf16 if the CPU supports it). Each contender is a process, as its user would start it, and they take
turns of a few steps, so that drift of the machine affects all equally; those that wait do nothing. The time of a turn
includes loading its batches. Prints steps per second relative to the faster of the other contenders, and the held-out
score of each contender after the same number of steps.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks  # noqa: F401 - the first import: it keeps torchao quiet

# isort: split

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from transformers import Trainer, get_scheduler

from benchmarks.lib.common import not_repeated, quiet, write_result
from benchmarks.lib.memory_work import Witness
from benchmarks.lib.turns import Contender, Ended, TakesTurns, Turns, rounds, values
from scu_trainer.cli.configuration import read_job
from scu_trainer.train.run_directory.logs import run_log
from scu_trainer.train.session.building import build_trainer

RECIPES = Path(__file__).parents[2] / "recipes"
FAMILIES = ("resnet", "efficientnet", "gru", "sensors")
STEPS_PER_TURN = 5
GROUPS = {"equal": ("plain", "stock", "ours"), "recipe": ("plain", "ours")}
FLOAT32 = ("--mixed_precision", "no")


def read(recipe: str, steps: int, folder: str, flags: Sequence[str] = ()) -> Any:
    """Read the job of a recipe with additional ``flags``. It saves and prints nothing."""
    words = ["--output_dir", f"{folder}/run", "--report_to", "none", "--save_strategy", "no", "--eval_strategy", "no"]
    words += ["--max_steps", str(steps), "--logging_steps", "100000", "--use_cpu", "true", *flags]
    return read_job(str(RECIPES / f"{recipe}.yaml"), words)


def plain(parts: Any, job: Any, turns: Turns) -> torch.nn.Module:
    """Train with a hand-written loop, with the optimizer and the schedule of the Trainer."""
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
            with _precision(args):
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


def _precision(args: Any) -> contextlib.AbstractContextManager:
    return torch.autocast("cpu", torch.bfloat16) if args.bf16 else contextlib.nullcontext()


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


def ours(parts: Any, job: Any, turns: Turns, witness: Optional[Witness] = None) -> torch.nn.Module:
    """Train with our trainer. ``witness``: replaces the gauge of the memory loop, which resets the peak."""
    trainer = build_trainer(job, parts, None, Console(quiet=True))
    if witness is not None and trainer.micro_batches is not None and trainer.micro_batches.loop.gauge is not None:
        trainer.micro_batches.loop.gauge = witness
    return _trained(trainer, turns)


def _trained(trainer: Trainer, turns: Turns) -> torch.nn.Module:
    trainer.add_callback(TakesTurns(turns))
    quiet(trainer).train()
    return trainer.model


CONTENDERS: dict[str, Callable] = {"plain": plain, "stock": stock, "ours": ours}


def run_contender(turns: Turns, name: str, recipe: str, group: str, steps: int) -> dict[str, Any]:
    """Train one contender, in turns, and return its score. Runs in its own process."""
    flags = () if group == "recipe" and name == "ours" else FLOAT32
    with run_log(), tempfile.TemporaryDirectory() as folder:
        job = read(recipe, steps, folder, flags)
        parts = job.kind.load(job, Console(quiet=True))
        score = job.kind.score(CONTENDERS[name](parts, job, turns), parts)
    return {
        "bpt": score.bpt,
        "accuracy": None if score.correct is None else float(score.correct.sum() / score.tokens.sum()),
        "mixed_precision": job.model.mixed_precision,
        "rows_per_step": job.training.per_device_train_batch_size * job.training.gradient_accumulation_steps,
    }


def compare(recipe: str, group: str, steps: int) -> dict[str, Any]:
    """Compare the contenders. Each is once the first to start, because that matters by some percent on two cores."""
    names = GROUPS[group]
    found = rounds(
        [Contender(name, run_contender, (name, recipe, group, steps)) for name in names], STEPS_PER_TURN, len(names)
    )
    ends, accuracies = found[-1]["ours"].said, values(found[-1], "accuracy")
    ratios = {name: [speed(ended, "ours", name) for ended in found] for name in names if name != "ours"}
    return {
        "recipe": recipe,
        "group": group,
        "steps": steps,
        "mixed_precision": ends["mixed_precision"],
        "rows_per_step": ends["rows_per_step"],
        "seconds_per_step": {
            name: median(turn for ended in found for turn in ended[name].seconds) / STEPS_PER_TURN for name in names
        },
        "speed_against": {name: median(by_order) for name, by_order in ratios.items()},
        "speed_against_by_order": ratios,
        "speed_against_the_better": min(median(by_order) for by_order in ratios.values()),
        "held_out_bpt": {name: values(found[-1], "bpt")[name] for name in names},
        "held_out_accuracy": {name: accuracies[name] for name in names if accuracies[name] is not None},
        "turns": sum(len(ended["ours"].seconds) for ended in found),
    }


def speed(ended: Mapping[str, Ended], own: str, other: str) -> float:
    """Return the steps per second of ``own`` relative to ``other``, as the median of the paired turns."""
    pairs = zip(ended[own].seconds, ended[other].seconds, strict=True)
    return median(theirs / mine for mine, theirs in pairs)


def show(results: list[dict[str, Any]]) -> None:
    heads = ("recipe", "run", "arithmetic", "ms per step", "ratio", "held out")
    title = "steps per second of ours against the better of the other contenders, and held-out scores"
    table = Table(*heads, title=title)
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
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of each contender")
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
    write_result("families", {"results": results})


if __name__ == "__main__":
    main()
