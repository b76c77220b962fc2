"""Matrix products of the output layer: two of the three use the faster of torch's two CPU libraries for float32.

torch multiplies with MKL, which uses slower kernels on AMD processors. oneDNN, which is also part of torch and handles
half precision, chooses kernels by instruction set and not by vendor. ``python benchmarks/studies/products.py`` measures
the difference; so far it was measured on two cores only. The gradient of the weight stays with MKL, which can add to an
existing sum and is faster there.

oneDNN compiles and keeps kernels for every shape (``compiles_shapes``), so it gets few different shapes.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.functional import pad

from scu_trainer.hardware import cgroup
from scu_trainer.hardware.profile import cpuinfo
from scu_trainer.train.step.recovery.out_of_memory import is_out_of_memory

FEWEST_WORDS = 16_000
"""Minimum vocabulary size for oneDNN; below it, oneDNN is not faster."""

BLOCK_WORDS = 2_000
"""oneDNN allocates its result: for 256 rows and this many words it has 2 MB, stays in the cache until it is copied, and
leaves no large holes in the heap. Blocks of 16,000 words are 3 % faster but left 20 MiB."""

ALIGNED_ROWS = 32
"""oneDNN gets only multiples of this many rows. With all sizes up to 256 a process grew by 300 MiB, and, with blocks of
16,000 words, by 2 GiB including heap holes that malloc could not reuse."""

PART_BYTES = 32 * 2**20
"""Maximum size of a temporary tensor: a half-precision product on its way to a float32 sum, or a float32 copy of
logits."""

SCHEMA = (
    "mkldnn::_linear_pointwise(Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, str? algorithm) -> Tensor Y"
)
"""Schema of oneDNN's product as torch's compiler calls it. It is private, so any other schema is not used."""


def to_words(rows: Tensor, weight: Tensor, bias: Optional[Tensor], out: Tensor) -> None:
    """Compute out (rows, vocab) = rows (rows, size) · weightᵀ + bias."""
    if goes_through_onednn(weight):
        filled = pad_to_aligned(rows)
        for start in range(0, len(weight), BLOCK_WORDS):
            words = slice(start, start + BLOCK_WORDS)
            out[:, words] = by_onednn(filled, weight[words], None if bias is None else bias[words])[: len(rows)]
    elif bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


def from_words(signal: Tensor, buffer: Tensor, weight: Tensor) -> Tensor:
    """Return signal (rows, vocab) · weight (vocab, size).

    buffer: begins with ``signal``, followed by anything; for oneDNN it has at least ``aligned`` rows.
    """
    if goes_through_onednn(weight):
        return by_onednn(buffer[: aligned(len(signal))], weight.t())[: len(signal)]
    return torch.mm(signal, weight)


def add_product(total: Tensor, factor: Tensor, rows: Tensor) -> None:
    """Compute total (vocab, size) += factorᵀ (vocab, rows) · rows (rows, size)."""
    if total.dtype == factor.dtype:
        total.addmm_(factor.t(), rows)
        return
    if adds_to_float32(total.device, factor.dtype):
        torch.addmm(total, factor.t(), rows, out_dtype=total.dtype, out=total)
        return
    step = max(1, PART_BYTES // (4 * total.size(1)))
    for start in range(0, total.size(0), step):
        total[start : start + step] += torch.mm(factor[:, start : start + step].t(), rows)


@functools.cache
def adds_to_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether ``device`` adds a half-precision product to a float32 sum without rounding or storing it first.
    GPU libraries can; whether this version of torch exposes it is tried once."""
    if device.type != "cuda":
        return False
    start, ones = 2.0**-12, torch.ones(16, 16, device=device, dtype=dtype)  # half precision has no 16 + 2^-12
    total = torch.full((16, 16), start, device=device)
    try:
        torch.addmm(total, ones.t(), ones, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError) as error:  # this version has no such operation, or not for these types
        if is_out_of_memory(error):  # shows nothing about the operation: it is handled elsewhere, then tried again
            raise
        return False
    return bool((total == 16 + start).all())


def compiles_shapes(device: str, dtype: torch.dtype) -> bool:
    """Return whether kernels for ``dtype`` are compiled for every shape, as oneDNN does for half precision on a CPU.

    For each new number of tokens, a layer of 1,024 by 4,096 takes 30 ms and 2 MiB, and leaves a hole of 7 MiB in the
    heap (forward and backward, two cores with AMX).
    """
    return device == "cpu" and dtype.is_floating_point and dtype.itemsize == 2 and torch.backends.mkldnn.enabled


def pad_to_aligned(rows: Tensor) -> Tensor:
    """Pad ``rows`` (rows, size) with zeros to ``aligned`` rows."""
    return pad(rows, (0, 0, 0, aligned(len(rows)) - len(rows)))


def aligned(rows: int) -> int:
    """Round ``rows`` up to a multiple of ALIGNED_ROWS."""
    return -(-rows // ALIGNED_ROWS) * ALIGNED_ROWS


def goes_through_onednn(weight: Tensor) -> bool:
    """Return whether oneDNN computes the products of the output layer ``weight`` (vocab, size).

    It is not used for a non-contiguous weight, for which its kernels are slow, nor in a process with a memory limit:
    if an allocation fails, oneDNN may crash instead of raising an error.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not weight.is_contiguous():
        return False
    return len(weight) >= FEWEST_WORDS and is_onednn_faster() and not _allocations_may_fail()


def is_onednn_faster() -> bool:
    """Whether oneDNN is faster in float32 on this machine: on AMD, unless ``torch.backends.mkldnn`` is turned off."""
    return torch.backends.mkldnn.enabled and torch.backends.mkl.is_available() and _is_amd() and _operator() is not None


def by_onednn(rows: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """Return rows (rows, inner) · weightᵀ (inner, outer) + bias. Needs ``is_onednn_faster``."""
    return _operator()(rows, weight, bias, "none", [], "")


@functools.cache
def _operator() -> Optional[Any]:
    operator = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)
    is_known = operator is not None and str(operator._schema) == SCHEMA
    return operator if is_known and torch.backends.mkldnn.is_available() else None


@functools.cache
def _is_amd(root: Path = cgroup.ROOT) -> bool:
    """Return whether the processor is from AMD; False if the system does not tell."""
    return cpuinfo(root).get("vendor_id") == "AuthenticAMD"


def _allocations_may_fail() -> bool:
    """Return whether allocations may fail. Not cached, because a process may change its soft limit."""
    import resource  # exists only on systems with a /proc/cpuinfo

    soft = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
    return _counts_every_page() or any(limit != resource.RLIM_INFINITY for limit in soft)


@functools.cache
def _counts_every_page(root: Path = cgroup.ROOT) -> bool:
    """Return whether Linux does not overcommit memory, so that allocations fail instead of the process being killed."""
    setting = root / "proc" / "sys" / "vm" / "overcommit_memory"
    return setting.is_file() and setting.read_text().strip() == "2"
