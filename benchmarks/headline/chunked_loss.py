"""Output layer and loss in chunks of rows: how much does that save, what does it cost, and is the gradient the same?

    python benchmarks/headline/chunked_loss.py [--vocab 32000 128000] [--rounds 5] [--rows 16 64 256 1024]

There are 2048 tokens per step, in float32, and one in sixteen targets is ignored. Six subjects: output layer and loss
only, with hidden states of 256 and of 512, and with logits that are soft-capped as in Gemma; a Llama of 4 layers and
hidden size 256 with full tuning; the same with a frozen output layer, as with adapters; and that under bfloat16
autocast. Stock is the loss of the model itself, or what it does with the logits.

- CPU seconds of forward and backward. Both contenders take turns, step by step, in one process. Medians and the median
  of the paired ratios are printed.
- Peak memory of a step, gradients included, above the weights and what a first small step leaves; each contender in a
  process of its own.
- Largest difference of any gradient, relative to that gradient's largest entry: ours from stock, and both from float64
  (output layer alone, hidden 256).

--rows also times the output layer with these numbers of rows per chunk, instead of the automatic one.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks  # noqa: F401 - the first import: it keeps torchao quiet

# isort: split

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.loss.loss_utils import ForCausalLMLoss

from benchmarks.lib.common import write_result
from benchmarks.lib.memory_work import MIB, Shape, Witness, in_fresh_process
from benchmarks.lib.outcome import Grid
from scu_trainer.train.loss.rows.kernels import chunked_linear_cross_entropy, rows_in_chunk

TOKENS, ROWS = 2048, 8
WARM_UP_TOKENS = 8
IGNORED_EVERY = 16
TIME_TARGET, GRADIENT_TARGET = 1.1, 1e-6
PEAK_TARGETS = {32_000: 0.5, 128_000: 0.3}
NOT_LEARNED = -100


@dataclass(frozen=True)
class Subject:
    """What is measured. ``model``: a Llama around the output layer, or only the layer."""

    name: str
    vocab: int
    hidden: int = 256
    model: bool = True
    frozen_head: bool = False
    autocast: bool = False
    rows_per_chunk: Optional[int] = None
    soft_cap: Optional[float] = None

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        module = Shape(self.vocab, self.hidden).model() if self.model else Head(self.vocab, self.hidden)
        if self.frozen_head:
            module.lm_head.weight.requires_grad_(False)
        return module

    def precision(self) -> contextlib.AbstractContextManager:
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext()

    def chunked(self, hidden: Tensor, weight: Tensor, targets: Tensor, items: int) -> Tensor:
        options = {"divisor": items, "rows_per_chunk": self.rows_per_chunk, "soft_cap": self.soft_cap}
        return chunked_linear_cross_entropy(hidden.flatten(0, -2), weight, None, targets.flatten(), **options)[0]


class Head(nn.Module):
    """An output layer on given hidden states that need a gradient."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.02)
        self.hidden = nn.Parameter(torch.randn(TOKENS, hidden))


def targets_of(vocab: int, tokens: int) -> Tensor:
    """Return targets of shape (rows, time), already shifted."""
    drawn = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(1))
    drawn[::IGNORED_EVERY] = NOT_LEARNED
    return drawn.view(-1, min(tokens, TOKENS // ROWS))


def loss_of(module: nn.Module, subject: Subject, contender: str, tokens: int = TOKENS) -> Tensor:
    targets = targets_of(subject.vocab, tokens)
    items = int((targets != NOT_LEARNED).sum())
    if not subject.model:
        hidden, weight = module.hidden[:tokens], module.lm_head.weight
        if contender == "chunked":
            return subject.chunked(hidden, weight, targets, items)
        logits = linear(hidden, weight)
        if subject.soft_cap is not None:
            logits = torch.tanh(logits / subject.soft_cap) * subject.soft_cap
        return ForCausalLMLoss(logits, None, subject.vocab, items, shift_labels=targets)
    words = targets.clamp(min=0)
    with wired(module, subject) if contender == "chunked" else contextlib.nullcontext():
        return module(input_ids=words, labels=words, shift_labels=targets, num_items_in_batch=items).loss


@contextlib.contextmanager
def wired(model: nn.Module, subject: Subject) -> Iterator[None]:
    """Make the model return hidden states as logits, and its loss compute logits from them chunk by chunk."""
    head, stock_loss = model.lm_head, model.loss_function

    def loss(logits, labels, vocab_size, num_items_in_batch, shift_labels, **kwargs):
        return subject.chunked(logits, head.weight, shift_labels, num_items_in_batch)

    model.lm_head, model.loss_function = nn.Identity(), loss
    try:
        yield
    finally:
        model.lm_head, model.loss_function = head, stock_loss


def step(module: nn.Module, subject: Subject, contender: str, tokens: int = TOKENS) -> float:
    """Run one forward and backward into ``.grad``, and return the CPU seconds."""
    module.zero_grad(set_to_none=True)
    begun_s = time.process_time()
    with subject.precision():
        loss = loss_of(module, subject, contender, tokens)
    loss.backward()
    return time.process_time() - begun_s


# -- time and gradients ------------------------------------------------------------------------------------------------


def gradients(module: nn.Module, subject: Subject, contender: str) -> dict[str, Tensor]:
    step(module, subject, contender)
    return {name: part.grad for name, part in module.named_parameters() if part.grad is not None}


def apart(ours: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """Return the norm of the difference divided by the norm of the gradient, over all parameters."""
    assert ours.keys() == others.keys()
    squares = [
        (float((ours[name] - others[name]).square().sum()), float(others[name].square().sum())) for name in others
    ]
    return math.sqrt(sum(difference for difference, _ in squares) / sum(length for _, length in squares))


def worst_entry(ours: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """Return the largest difference divided by the largest entry, for the worst parameter."""
    return max(float((ours[name] - others[name]).abs().max() / others[name].abs().max()) for name in others)


def times(subjects: list[Subject], rounds: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [times_of(subject, rounds) for subject in subjects]


def times_of(subject: Subject, rounds: int) -> dict[str, Any]:
    module = subject.build()
    made = {contender: gradients(module, subject, contender) for contender in ("stock", "chunked")}
    result = {
        "gradient_difference": apart(made["chunked"], made["stock"]),
        "worst_entry_difference": worst_entry(made["chunked"], made["stock"]),
    }
    if not subject.model and subject.hidden == 256 and subject.soft_cap is None:
        exact = gradients(module.double(), subject, "chunked")
        result |= {f"{contender}_from_float64": apart(made[contender], exact) for contender in made}
        module.float()
    made.clear()
    seconds: dict[str, list[float]] = {"stock": [], "chunked": []}
    for turn in range(rounds):
        for contender in ("stock", "chunked") if turn % 2 else ("chunked", "stock"):
            seconds[contender].append(step(module, subject, contender))
    pairs = zip(seconds["chunked"], seconds["stock"], strict=True)
    return {
        **result,
        "stock_s": median(seconds["stock"]),
        "chunked_s": median(seconds["chunked"]),
        "steps_s": seconds,
        "time_over_stock": median(ours / stock for ours, stock in pairs),
    }


# -- memory ------------------------------------------------------------------------------------------------------------


def peaks_mib(subjects: list[Subject], contender: str) -> list[float]:
    torch.set_num_threads(1)
    return [peak_mib(subject, contender) for subject in subjects]


def peak_mib(subject: Subject, contender: str) -> float:
    module, witness = subject.build(), Witness("cpu")
    step(module, subject, contender, WARM_UP_TOKENS)
    module.zero_grad(set_to_none=True)
    base_bytes = witness.start()
    step(module, subject, contender)
    witness.read()
    return (witness.highest_bytes - base_bytes) / MIB


# -- report ------------------------------------------------------------------------------------------------------------


def subjects(vocab: int) -> list[Subject]:
    return [
        Subject("output layer, hidden 256", vocab, model=False),
        Subject("output layer, hidden 512", vocab, hidden=512, model=False),
        Subject("output layer, soft-capped", vocab, model=False, soft_cap=30.0),
        Subject("Llama, all trained", vocab),
        Subject("Llama, frozen output layer", vocab, frozen_head=True),
        Subject("Llama, frozen, autocast", vocab, frozen_head=True, autocast=True),
    ]


def measured(subjects: list[Subject], rounds: int) -> list[dict[str, Any]]:
    stock, chunked = (in_fresh_process(peaks_mib, subjects, contender) for contender in ("stock", "chunked"))
    return [
        {
            "subject": subject.name,
            "vocab": subject.vocab,
            "rows_per_chunk": subject.rows_per_chunk or rows_in_chunk(subject.vocab),
            **timed,
            "stock_peak_mib": stock_mib,
            "chunked_peak_mib": chunked_mib,
            "peak_over_stock": chunked_mib / stock_mib,
        }
        for subject, timed, stock_mib, chunked_mib in zip(
            subjects, in_fresh_process(times, subjects, rounds, allocator={}), stock, chunked, strict=True
        )
    ]


def table(results: list[dict[str, Any]]) -> Table:
    heads = ("subject", "vocab", "rows", "peak, MiB", "stock", "/ stock", "CPU s", "stock", "/ stock", "gradient apart")
    rows = [
        (
            row["subject"],
            str(row["vocab"]),
            str(row["rows_per_chunk"]),
            *(f"{row[name]:.0f}" for name in ("chunked_peak_mib", "stock_peak_mib")),
            f"{row['peak_over_stock']:.3f}",
            *(f"{row[name]:.2f}" for name in ("chunked_s", "stock_s")),
            f"{row['time_over_stock']:.3f}",
            f"{row['gradient_difference']:.1e}",
        )
        for row in results
    ]
    return Grid(heads, rows).table(f"{TOKENS} tokens per step; chunked / stock")


def verdicts(row: dict[str, Any]) -> list[str]:
    """Return the targets that this row misses."""
    aims = {"time_over_stock": TIME_TARGET, "peak_over_stock": PEAK_TARGETS.get(row["vocab"])}
    if "autocast" not in row["subject"]:  # half precision rounds the product of each chunk
        aims["gradient_difference"] = GRADIENT_TARGET
    return [
        f"MISSED {row['subject']}, {row['vocab']} words: {name} {row[name]:.3g}, at most {aim:g}"
        for name, aim in aims.items()
        if aim is not None and row[name] > aim
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", nargs="*", type=int, default=list(PEAK_TARGETS))
    parser.add_argument("--rounds", type=int, default=5, help="steps of each contender that are timed")
    parser.add_argument("--rows", nargs="*", type=int, default=[], help="rows per chunk, tried on the output layer")
    given = parser.parse_args()
    console = Console(width=140)
    results, missed = [], []
    for vocab in given.vocab:
        wanted = subjects(vocab)
        tried = [replace(one, rows_per_chunk=rows) for one in wanted if not one.model for rows in given.rows]
        found = measured([*wanted, *tried], given.rounds)
        missed += [line for row in found[: len(wanted)] for line in verdicts(row)]
        results += found
        console.print(table(found))
    console.print(*missed or ["all targets met"], sep="\n")
    targets = {"time_over_stock": TIME_TARGET, "gradient_difference": GRADIENT_TARGET, "peak_over_stock": PEAK_TARGETS}
    write_result("chunked_loss", {"targets": targets, "missed": missed, "subjects": results})


if __name__ == "__main__":
    main()
