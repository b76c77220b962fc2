"""The highest possible training speed on this machine: the unavoidable operations and bytes, at the measured peak rates
of the device.

Unavoidable is the work without padding and recomputation: every real token through the layers, forward and backward (a
prefix that rows share is counted in each of them), every learned token through the output head, causal attention within
each row, and the optimizer once over the trained weights. A frozen weight has no gradient. Operations and memory
traffic are assumed not to overlap, so the limit is slightly too low for a device that overlaps them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.lib.text_job import SHIFT, Job
from scu_trainer.train.loss.rows.products import by_onednn, is_onednn_faster
from scu_trainer.train.step.costs import wait_for

SIDES = {"cpu": 2048, "cuda": 8192}
"""Side of the square matrices whose product measures the peak rate."""

COPIED_BYTES = {"cpu": 2**28, "cuda": 2**31}
"""Size of a tensor that exceeds all caches."""

MEASURE_S = 1.0
ADAMW_TENSORS_MOVED = 7
"""Weight, gradient and both moments are read; weight and both moments are written."""


@dataclass(frozen=True)
class Work:
    """The work of a whole training. ``tokens``: those with a learned prediction."""

    tokens: int
    flops: float
    bytes: float


@dataclass(frozen=True)
class Peaks:
    flops_per_s: float
    bytes_per_s: float

    def tokens_per_second(self, work: Work) -> float:
        """Return the speed of a training that does nothing but ``work``."""
        return work.tokens / (work.flops / self.flops_per_s + work.bytes / self.bytes_per_s)


def unavoidable(job: Job) -> Work:
    """Count the unavoidable work of ``job`` from its model and rows."""
    model, lengths = job.model(), job.token_rows().lengths
    head, not_learned = model.get_output_embeddings(), max(SHIFT, job.template_tokens)
    tokens, learned = sum(lengths), sum(length - not_learned for length in lengths)
    flops = 0.0
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            seen = learned if module is head else tokens
            flops += 2 * module.weight.numel() * seen * (2 + module.weight.requires_grad)
    config = model.config
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    # Attention scores and values below the diagonal: 2 products of length²/2; the backward pass has 4.
    flops += sum(config.num_hidden_layers * 3 * 2 * 2 * width * length**2 / 2 for length in lengths)
    trained_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return Work(learned, flops, job.steps * ADAMW_TENSORS_MOVED * trained_bytes)


def measured_peaks(job: Job) -> Peaks:
    """Measure the peak rates: the fastest run within a second of matrix products, in the precision of training and with
    each library that torch has for them, and of copies."""
    device = torch.device(job.device)
    dtype = torch.bfloat16 if job.precision == "bf16" else torch.float32
    side, size_bytes = SIDES[device.type], COPIED_BYTES[device.type]
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    product = torch.empty_like(matrix)
    products = [_fastest_s(lambda: torch.mm(matrix, matrix, out=product), device)]
    if device.type == "cpu" and dtype == torch.float32 and is_onednn_faster():
        products.append(_fastest_s(lambda: by_onednn(matrix, matrix), device))
    source = torch.ones(size_bytes // 4, device=device)
    copy = torch.empty_like(source)
    return Peaks(
        2 * side**3 / min(products),
        2 * size_bytes / _fastest_s(lambda: copy.copy_(source), device),
    )


def _fastest_s(work: Callable[[], object], device: torch.device) -> float:
    seconds: list[float] = []
    work()
    while sum(seconds) < MEASURE_S or len(seconds) < 3:
        wait_for(device)
        begun_s = time.perf_counter()
        work()
        wait_for(device)
        seconds.append(time.perf_counter() - begun_s)
    return min(seconds)
