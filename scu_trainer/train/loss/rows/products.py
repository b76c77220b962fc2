"""The products of the output layer: two of the three by the faster of torch's two libraries for float32 on a CPU.

torch multiplies with MKL, which takes slower kernels on AMD processors. oneDNN, which is part of torch too and does its
half precision, chooses kernels by instruction set, not by vendor. ``python benchmarks/studies/products.py`` measures
the difference; so far that was done on two cores only. The gradient of the weight stays with MKL, which adds to a sum
and is faster there.

oneDNN compiles kernels for every shape and keeps them (``compiles_shapes``), so it is asked for few.
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
"""Of an output layer for which oneDNN is asked: with few words it is no faster."""

BLOCK_WORDS = 2_000
"""oneDNN returns a tensor of its own: that of 256 rows of so many words is 2 MB, stays in the cache until it is copied,
and leaves no large holes behind. Blocks of 16,000 are 3 % faster and left 20 MiB."""

ALIGNED_ROWS = 32
"""Only multiples of it are asked for. With all sizes up to 256 a process grew by 300 MiB, and by 2 GiB with what malloc
could not use again between them and blocks of 16,000 words."""

PART_BYTES = 32 * 2**20
"""Of a temporary tensor: a product in half precision on its way to a float32 sum, logits that are read in float32."""

SCHEMA = (
    "mkldnn::_linear_pointwise(Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, str? algorithm) -> Tensor Y"
)
"""Of oneDNN's product as torch's own compiler calls it. It is not public: another form than this is left alone."""


def to_words(rows: Tensor, weight: Tensor, bias: Optional[Tensor], out: Tensor) -> None:
    """out (rows, vocab) = rows (rows, size) · weightᵀ + bias."""
    if goes_through_onednn(weight):
        filled = filled_up(rows)
        for start in range(0, len(weight), BLOCK_WORDS):
            words = slice(start, start + BLOCK_WORDS)
            out[:, words] = by_onednn(filled, weight[words], None if bias is None else bias[words])[: len(rows)]
    elif bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


def from_words(signal: Tensor, buffer: Tensor, weight: Tensor) -> Tensor:
    """signal (rows, vocab) · weight (vocab, size).

    buffer: begins with ``signal``, and what lies behind does not matter; for oneDNN it has ``aligned`` rows or more.
    """
    if goes_through_onednn(weight):
        return by_onednn(buffer[: aligned(len(signal))], weight.t())[: len(signal)]
    return torch.mm(signal, weight)


def add_product(total: Tensor, factor: Tensor, rows: Tensor) -> None:
    """total (vocab, size) += factorᵀ (vocab, rows) · rows (rows, size)."""
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
    """Whether a product in half precision can be added to a float32 sum on ``device`` as it is made, not rounded before
    nor written on its own: a card's libraries can, and from some version on torch lets them, which is tried once."""
    if device.type != "cuda":
        return False
    begun, one = 2.0**-12, torch.ones(16, 16, device=device, dtype=dtype)  # half precision has no 16 + 2^-12
    total = torch.full((16, 16), begun, device=device)
    try:
        torch.addmm(total, one.t(), one, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError) as error:  # no such operation in this version, or not for these types
        if is_out_of_memory(error):  # says nothing of the operation: recovered from as everywhere, and tried again
            raise
        return False
    return bool((total == 16 + begun).all())


def compiles_shapes(device: str, dtype: torch.dtype) -> bool:
    """Whether kernels for ``dtype`` on this kind of ``device`` are compiled for every shape: by oneDNN, which does half
    precision on a CPU. For each new number of tokens a layer of 1,024 by 4,096 takes 30 ms and 2 MiB, and leaves a hole
    of 7 MiB in the heap (forward and backward, two cores with AMX)."""
    return device == "cpu" and dtype.is_floating_point and dtype.itemsize == 2 and torch.backends.mkldnn.enabled


def filled_up(rows: Tensor) -> Tensor:
    """``rows`` (rows, size) and zeros up to ``aligned``."""
    return pad(rows, (0, 0, 0, aligned(len(rows)) - len(rows)))


def aligned(rows: int) -> int:
    """``rows`` rounded up to a multiple of ALIGNED_ROWS."""
    return -(-rows // ALIGNED_ROWS) * ALIGNED_ROWS


def goes_through_onednn(weight: Tensor) -> bool:
    """Whether the products of the output layer ``weight`` (vocab, size) are oneDNN's.

    Not those of a weight that is not contiguous, for which oneDNN has slow kernels, and not in a process with a limit
    on its memory: where an allocation fails, oneDNN may crash instead of raising.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not weight.is_contiguous():
        return False
    return len(weight) >= FEWEST_WORDS and is_onednn_faster() and not _may_be_refused_memory()


def is_onednn_faster() -> bool:
    """In float32 on this machine: on an AMD processor, unless ``torch.backends.mkldnn`` is turned off."""
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
def _is_amd(root: Path = cgroup.ROOT) -> bool:
    """False where the system does not say so: MKL is then used as before."""
    return cpuinfo(root).get("vendor_id") == "AuthenticAMD"


def _may_be_refused_memory() -> bool:
    """Not cached: a process may change its soft limit."""
    import resource  # only of systems that have a /proc/cpuinfo

    soft = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
    return _counts_every_page() or any(limit != resource.RLIM_INFINITY for limit in soft)


@functools.cache
def _counts_every_page(root: Path = cgroup.ROOT) -> bool:
    """Whether Linux does not overcommit memory: allocations then fail, instead of a process being killed later."""
    setting = root / "proc" / "sys" / "vm" / "overcommit_memory"
    return setting.is_file() and setting.read_text().strip() == "2"
