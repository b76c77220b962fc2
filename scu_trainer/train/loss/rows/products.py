"""Two of the three products of the output layer, by the faster of torch's two libraries for float32 on a CPU.

torch multiplies with MKL, which takes slower kernels on processors of AMD. oneDNN, which torch brings too and uses for
half precision, chooses by what a processor can do, not by who made it. ``python benchmarks/studies/products.py`` says
what that gives, measured on two cores so far. The gradient of the weight stays with MKL, which adds to a sum and is
faster there.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.functional import pad

FEWEST_WORDS = 16_000
"""Of an output layer for which oneDNN is asked: with few words it is no faster."""

BLOCK_WORDS = 2_000
"""oneDNN returns a tensor of its own: that of 256 rows of so many words is 2 MB, stays in the cache until it is copied,
and leaves no large holes behind. Blocks of 16,000 are 3 % faster and left 20 MiB."""

ALIGNED_ROWS = 32
"""oneDNN compiles a kernel for every shape and keeps it: only multiples of it are asked for. With all sizes up to 256
a process grew by 300 MiB, and by 2 GiB with what malloc could not use again between them and blocks of 16,000 words."""

SCHEMA = (
    "mkldnn::_linear_pointwise(Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, str? algorithm) -> Tensor Y"
)
"""Of oneDNN's product as torch's own compiler calls it. It is not public: another form than this is left alone."""


def to_words(rows: Tensor, weight: Tensor, bias: Optional[Tensor], out: Tensor) -> None:
    """out (rows, vocab) = rows (rows, size) · weightᵀ + bias."""
    if goes_through_onednn(weight):
        filled = pad(rows, (0, 0, 0, rows_with_room(len(rows), weight) - len(rows)))
        for start in range(0, len(weight), BLOCK_WORDS):
            words = slice(start, start + BLOCK_WORDS)
            out[:, words] = by_onednn(filled, weight[words], None if bias is None else bias[words])[: len(rows)]
    elif bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


def from_words(signal: Tensor, buffer: Tensor, weight: Tensor) -> Tensor:
    """signal (rows, vocab) · weight (vocab, size).

    buffer (``rows_with_room`` or more, vocab): begins with ``signal``, and what lies behind does not matter.
    """
    if goes_through_onednn(weight):
        return by_onednn(buffer[: rows_with_room(len(signal), weight)], weight.t())[: len(signal)]
    return torch.mm(signal, weight)


def rows_with_room(rows: int, weight: Tensor) -> int:
    """How many rows a buffer of ``rows`` logits is to have."""
    return -(-rows // ALIGNED_ROWS) * ALIGNED_ROWS if goes_through_onednn(weight) else rows


def goes_through_onednn(weight: Tensor) -> bool:
    """Whether the products of the output layer ``weight`` (vocab, size) are oneDNN's.

    Not those of a weight with gaps or a turned one, for which oneDNN has slow kernels, and not in a process whose
    memory has a limit: oneDNN may crash, instead of raising, where it is refused memory.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not weight.is_contiguous():
        return False
    return len(weight) >= FEWEST_WORDS and is_onednn_faster() and not _may_be_refused_memory()


def is_onednn_faster() -> bool:
    """In float32 on this machine, as far as we know. Who turns ``torch.backends.mkldnn`` off gets none of it."""
    return torch.backends.mkldnn.enabled and torch.backends.mkl.is_available() and _is_amd() and _operator() is not None


def by_onednn(rows: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """rows (rows, inner) · weightᵀ (inner, outer) + bias, where ``is_onednn_faster``."""
    return _operator()(rows, weight, bias, "none", [], "")


@functools.cache
def _operator() -> Optional[Any]:
    operator = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)
    is_known = operator is not None and str(operator._schema) == SCHEMA
    return operator if is_known and torch.backends.mkldnn.is_available() else None


@functools.cache
def _is_amd(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """False where the system has no such file: MKL then stays what it is."""
    return cpuinfo.is_file() and "AuthenticAMD" in cpuinfo.read_text()


def _may_be_refused_memory() -> bool:
    """Asked every time: a process may change its soft limit."""
    import resource  # only of systems that have a /proc/cpuinfo

    soft = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
    return _counts_every_page() or any(limit != resource.RLIM_INFINITY for limit in soft)


@functools.cache
def _counts_every_page(setting: Path = Path("/proc/sys/vm/overcommit_memory")) -> bool:
    """Whether Linux refuses what it could not hold, instead of ending a process later."""
    return setting.is_file() and setting.read_text().strip() == "2"
