"""The cost of the loss analysis and of its audits in a run of 200 steps.

    python benchmarks/loops/loss_analysis_cost.py [--steps 200]

Their time is compared with that of the rest of the training, in the same run. Three subjects have 32 rows of different
lengths per step, as in the other memory benchmarks, so that batches are split and audited: the embedded model with
LoRA; a Llama with 8,000 words and full tuning; and the same with a user's own loss, for which the first audit takes a
whole window. The target applies to these. The last subject is repeated with 8 rows, with steps of 0.2 seconds, which
are very short: an analysis takes about ten short forwards, however long a step is. Prints the share of the time, and
how many steps would take as long.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.common import embedded_model, quiet, scratch_arguments, write_result
from benchmarks.lib.memory_work import DISTRIBUTIONS, Shape, TokenRows
from benchmarks.lib.text_job import padded
from scu_trainer import SCUTrainer
from scu_trainer.settings import MemorySettings

AIM = 0.01
BATCH_ROWS, LONGEST_ROW = 8, 256
ACCUMULATION, SHORT = 4, 1
SMALL = Shape(vocab=8_000, hidden=192, layers=4, longest_row=LONGEST_ROW)


def rows(count: int, words: int) -> TokenRows:
    return TokenRows(DISTRIBUTIONS["alpaca"].draw(count, LONGEST_ROW), words)


def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return the mean over sequences of the mean over their tokens."""
    losses = torch.nn.functional.cross_entropy(
        outputs["logits"][:, :-1].transpose(1, 2), labels[:, 1:], reduction="none"
    )
    return (losses.sum(dim=1) / labels[:, 1:].ne(-100).sum(dim=1).clamp(min=1)).mean()


def cost(
    model: torch.nn.Module, words: int, steps: int, accumulation: int = ACCUMULATION, **own: Any
) -> dict[str, Any]:
    with scratch_arguments(
        max_steps=steps,
        per_device_train_batch_size=BATCH_ROWS,
        gradient_accumulation_steps=accumulation,
        remove_unused_columns=False,
    ) as arguments:
        data = rows(steps * BATCH_ROWS * accumulation, words)
        trainer = SCUTrainer(model, arguments, train_dataset=data, data_collator=padded, memory=MemorySettings(), **own)
        began = time.perf_counter()
        quiet(trainer).train()
        seconds = time.perf_counter() - began
    figures = trainer.micro_batches.analysis.figures()
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
    steps, llama = options.steps, lambda: (SMALL.model(), SMALL.vocab)
    subjects = {
        "embedded model, LoRA": lambda: cost(embedded_model(0, tuning="lora"), 2_000, steps),
        "Llama, all weights": lambda: cost(*llama(), steps),
        "Llama, a loss of one's own": lambda: cost(*llama(), steps, compute_loss_func=own_loss),
        "the same, 8 rows a step": lambda: cost(*llama(), steps, SHORT, compute_loss_func=own_loss),
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
    *counted, _ = found.values()
    verdict = "kept" if all(one["share"] < AIM for one in counted) else "MISSED"
    Console().print(f"aim: less than {AIM:.0%} of the run with 32 rows a step: {verdict}")
    write_result("loss_analysis_cost", {"steps": options.steps, "subjects": found})


if __name__ == "__main__":
    main()
