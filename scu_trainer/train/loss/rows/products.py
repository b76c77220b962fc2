"""The two products of the output layer that are made at every chunk, by the faster of torch's two libraries.

In float32 on a CPU torch multiplies with MKL, which takes its slower kernels on processors of AMD. oneDNN, which torch
brings too and multiplies half precision with, takes the same instructions on every processor: there the logits come
1.3 to 1.5 times as fast, the gradient of the hidden states 1.1 to 1.2 times (``python benchmarks/studies/products.py``).
The gradient of the weight stays with MKL, which adds to a sum and is the faster one.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

BLOCK_ROWS, BLOCK_WORDS = 320, 16_000
"""Of one product of logits: with more rows oneDNN is slower, and the tensor that it returns leaves the cache before it is
copied."""

SCHEMA = (
    "mkldnn::_linear_pointwise(Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, str? algorithm) -> Tensor Y"
)
"""Of oneDNN's product as torch's own compiler calls it. It is not public: another form than this is left alone."""


def to_words(rows: Tensor, weight: Tensor, bias: Optional[Tensor], out: Tensor) -> None:
    """out (rows, vocab) = rows (rows, size) · weightᵀ + bias."""
    if is_faster_in_onednn(weight):
        blocks = -(-len(rows) // BLOCK_ROWS)
        for some, target in zip(rows.tensor_split(blocks), out.tensor_split(blocks), strict=True):
            for start in range(0, len(weight), BLOCK_WORDS):
                words = slice(start, start + BLOCK_WORDS)
                target[:, words] = _onednn(some, weight[words], None if bias is None else bias[words])
    elif bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


def from_words(signal: Tensor, weight: Tensor) -> Tensor:
    """signal (rows, vocab) · weight (vocab, size)."""
    return _onednn(signal, weight.t(), None) if is_faster_in_onednn(weight) else torch.mm(signal, weight)


def is_faster_in_onednn(weight: Tensor) -> bool:
    """Of a layer with few words it is not."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or len(weight) < BLOCK_WORDS:
        return False
    if isinstance(weight, FakeTensor) or not torch.backends.mkldnn.enabled:
        return False
    return _operator() is not None and _is_amd()


def _onednn(rows: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
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
