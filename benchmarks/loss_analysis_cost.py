"""What do the questions about the loss and the audits of it cost in a run of 200 steps?

    python benchmarks/loss_analysis_cost.py [--steps 200]

Their own time against that of the rest of the training, by one clock in one run. Three subjects, whose rows are uneven,
so that batches are cut and audited: the embedded model with LoRA; a Llama with 8,000 words, all of it trained; the same
with a loss of somebody's own, of which the first audit takes a whole batch. Prints the share, and how many steps
questions and audits took the time of.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from common import command_line, embedded_model, quiet, scratch_arguments, write_result
from memory_work import DISTRIBUTIONS, Shape, TokenRows, pad
from rich.console import Console
from rich.table import Table

from scu_trainer import SCUTrainer
from scu_trainer.settings import MemorySettings

AIM = 0.01
BATCH_ROWS, ACCUMULATION, LONGEST_ROW = 4, 2, 256
SMALL = Shape(vocab=8_000, hidden=192, layers=4, longest_row=LONGEST_ROW)


def rows(steps: int, words: int) -> TokenRows:
    return TokenRows(DISTRIBUTIONS["alpaca"].draw(steps * BATCH_ROWS * ACCUMULATION, LONGEST_ROW), words)


def batch(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    made = pad(items)
    del made["sample_index"]
    return made


def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """The mean over sequences of the mean over their tokens."""
    losses = torch.nn.functional.cross_entropy(
        outputs["logits"][:, :-1].transpose(1, 2), labels[:, 1:], reduction="none"
    )
    return (losses.sum(dim=1) / labels[:, 1:].ne(-100).sum(dim=1).clamp(min=1)).mean()


def cost(model: torch.nn.Module, words: int, steps: int, **own: Any) -> dict[str, Any]:
    with scratch_arguments(
        max_steps=steps,
        per_device_train_batch_size=BATCH_ROWS,
        gradient_accumulation_steps=ACCUMULATION,
        remove_unused_columns=False,
    ) as arguments:
        trainer = SCUTrainer(
            model, arguments, train_dataset=rows(steps, words), data_collator=batch, memory=MemorySettings(), **own
        )
        began = time.perf_counter()
        quiet(trainer).train()
        seconds = time.perf_counter() - began
    figures = trainer.chunked.analysis.figures()
    spent = figures.pop("seconds")
    return {
        **figures,
        "train_s": seconds,
        "analysis_s": spent,
        "share": spent / (seconds - spent),
        "in_steps": spent / ((seconds - spent) / steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    subjects = {
        "embedded model, LoRA": lambda: cost(embedded_model(0, tuning="lora"), 2_000, options.steps),
        "Llama, all weights": lambda: cost(SMALL.model(), SMALL.vocab, options.steps),
        "Llama, a loss of one's own": lambda: cost(
            SMALL.model(), SMALL.vocab, options.steps, compute_loss_func=own_loss
        ),
    }
    found = {}
    for name, run in subjects.items():
        found[name] = run()
        Console().print(f"{name}: {found[name]['share']:.2%} of the rest of the run")
    table = Table("subject", "share of the run", "in steps", "audits", "loss known by", title=f"{options.steps} steps")
    for name, one in found.items():
        known = one["known"] or "asking"
        table.add_row(name, f"{one['share']:.2%}", f"{one['in_steps']:.1f}", str(one["audits"]), known)
    Console().print(table)
    verdict = "kept" if all(one["share"] <= AIM for one in found.values()) else "MISSED"
    Console().print(f"aim: at most {AIM:.0%} of the run: {verdict}")
    write_result("loss_analysis_cost", command_line(), {"steps": options.steps, "subjects": found})


if __name__ == "__main__":
    main()
