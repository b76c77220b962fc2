"""Output layer and cross-entropy, forward and backward: which computation is the fastest, and in how much memory?

    python benchmarks/gpu/loss_kernels.py [--tokens 8192] [--words 128256] [--hidden 2048 4096] [--rounds 15] [--quick]

Weights and hidden states are bf16. The output layer is frozen, as with adapters, or trained. Contenders take turns,
step by step, in one process. A contender that is not installed is a row that says so.

    stock              all logits, converted to float32 (transformers)
    ours, by torch     chunks of rows, torch's own operations on float32 copies, each product rounded before it is added
    ours               the same chunks as they are on this device: on a card the Triton kernel, sums in float32
    liger              liger_fused_linear_cross_entropy (use_liger_kernel)
    cut-cross-entropy  Apple's kernel, which keeps no logits at all
    trl                tiles of 4,096 tokens by 32,768 words, as SFTTrainer asks for them

Peak: above weights and hidden states, gradients included; not measured on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Optional
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks  # noqa: F401 - the first import: it keeps torchao quiet

# isort: split

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from benchmarks.lib.outcome import Figure, Grid, finish
from scu_trainer.train.loss.rows import kernels, products, softmax

STOCK, OURS = "stock", "ours"
QUICK = {"tokens": 96, "words": 700, "hidden": [32], "rounds": 1}
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def stock(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(linear(hidden, weight).float(), targets)


def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return kernels.chunked_linear_cross_entropy(hidden, weight, None, targets)[0]


def by_torch(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    own = patch.object(kernels, "kernel_for", lambda device, dtype: softmax._softmax_in_place)
    with own, patch.object(products, "adds_to_float32", lambda device, dtype: False):
        return ours(hidden, weight, targets)


def liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(hidden, weight, targets)


def cut_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(hidden, weight, targets)


def trl(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from trl.kernels import ChunkedLogProbFunction

    outputs = "entropy", "is_top1"  # SFTTrainer logs them
    return -ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 32_768, None, 1.0, outputs)[0].mean()


CONTENDERS: dict[str, Loss] = {
    STOCK: stock,
    "ours, by torch": by_torch,
    OURS: ours,
    "liger": liger,
    "cut-cross-entropy": cut_cross_entropy,
    "trl": trl,
}


class Contest:
    """Runs all contenders on the same output layer."""

    def __init__(self, tokens: int, words: int, size: int, is_trained: bool, device: str) -> None:
        torch.manual_seed(0)
        with torch.device(device):  # drawing these numbers on a slow host would take longer than all measurements
            self.hidden = torch.randn(tokens, size).bfloat16().requires_grad_()
            self.weight = (torch.randn(words, size) / size**0.5).bfloat16().requires_grad_(is_trained)
            self.targets = torch.randint(0, words, (tokens,))
        self.times_ms: dict[str, list[float]] = {}
        self.rows: dict[str, tuple[str, str]] = {}
        self.why_not: dict[str, str] = {}

    def run(self, rounds: int) -> None:
        exact = self._gradient(lambda h, w, t: cross_entropy(linear(h.float(), w.float()), t))
        for name, loss in CONTENDERS.items():
            try:
                distance = float((self._gradient(loss) - exact).norm() / exact.norm())
                self.rows[name] = f"{distance:.1e}", self._peak(loss)
            except Exception as error:  # not installed, no kernel for this device, out of memory: the row shows it
                self.why_not[name] = f"{type(error).__name__}: {error}".splitlines()[0][:60]
        for _ in range(rounds):
            for name in self.rows:
                self.times_ms.setdefault(name, []).append(self._time_ms(CONTENDERS[name]))

    def _step(self, loss: Loss) -> None:
        self.hidden.grad = self.weight.grad = None
        loss(self.hidden, self.weight, self.targets).backward()

    def _gradient(self, loss: Loss) -> Tensor:
        self._step(loss)
        found = [one.grad for one in (self.hidden, self.weight) if one.grad is not None]
        return torch.cat([gradient.float().flatten() for gradient in found])

    def _peak(self, loss: Loss) -> str:
        if not self.hidden.is_cuda:
            return "-"
        self.hidden.grad = self.weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_allocated()
        self._step(loss)
        return f"{(torch.cuda.max_memory_allocated() - before_bytes) / 2**20:,.0f}"

    def _time_ms(self, loss: Loss) -> float:
        with _seconds(self.hidden.is_cuda) as taken:
            self._step(loss)
        return 1000 * taken[0]

    def cells(self, name: str) -> Optional[list[str]]:
        if name not in self.times_ms:
            return None
        distance, peak = self.rows[name]
        times = self.times_ms[name]
        ratio = f"{self.ratio(name):.2f}" if STOCK in self.times_ms else "-"
        return [f"{median(times):.1f}", ratio, peak, distance]

    def ratio(self, name: str) -> float:
        """Return the time of stock divided by that of ``name``, paired by round. Both must have run."""
        return median(base / one for base, one in zip(self.times_ms[STOCK], self.times_ms[name], strict=True))


@contextlib.contextmanager
def _seconds(is_cuda: bool) -> Iterator[list[float]]:
    taken: list[float] = []
    if is_cuda:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    yield taken
    if is_cuda:
        torch.cuda.synchronize()
    taken.append(time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8_192)
    parser.add_argument("--words", type=int, default=128_256)
    parser.add_argument("--hidden", type=int, nargs="+", default=[2_048, 4_096])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="every path on tiny tensors; writes nothing")
    given = parser.parse_args()
    if given.quick:
        vars(given).update(QUICK)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, figures, times_ms = [], {}, {}
    for size in given.hidden:
        for layer in ("frozen", "trained"):
            contest = Contest(given.tokens, given.words, size, layer == "trained", device)
            contest.run(given.rounds)
            for name in CONTENDERS:
                cells = contest.cells(name) or [contest.why_not.get(name, ""), "", "", ""]
                rows.append([name, f"{size:,}", layer, *cells])
                print(" | ".join(rows[-1]), flush=True)
            if {STOCK, OURS} <= contest.times_ms.keys():
                figures[f"stock's time over ours, hidden {size}, {layer}"] = Figure(contest.ratio(OURS), "higher")
            times_ms[f"{size}, {layer}"] = contest.times_ms
    heads = ["contender", "hidden", "output layer", "ms", "speed, ratio to stock", "peak, MiB"]
    grid = Grid([*heads, "gradient from float32"], rows)
    place = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    title = f"{given.tokens:,} tokens, {given.words:,} words, bf16, {place}"
    finish("loss_kernels", title, grid, figures, quick=given.quick, repeats=given.rounds, times_ms=times_ms)


if __name__ == "__main__":
    main()
