"""Count the arithmetic of a training step, and find the peak performance of its device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Trainer

from scu_trainer.hardware.presets import device_name, known_tflops
from scu_trainer.models.loading.offloaded import input_device
from scu_trainer.train.loss.analysis import restored_on_exit
from scu_trainer.train.loss.analysis.measuring import rounds_to_tf32
from scu_trainer.train.loss.rows.products import by_onednn, is_onednn_faster
from scu_trainer.train.step.batches.rows import pick, rows_of
from scu_trainer.train.step.recovery.out_of_memory import forget_traceback

ROWS_TO_COUNT = 2
MATRIX_SIDE = 1024
MEASURE_S = 0.2
"""Long enough for a CPU to leave its idle clock speed."""

COUNTED = (
    "matrix products and convolutions of forward and backward, a multiply-add as 2; not element-wise operations, nor "
    "what runs in kernels of its own (flash-attn, Triton, mamba)"
)


@dataclass(frozen=True)
class FlopCount:
    """Number of operations in forward and backward of ``rows`` rows.

    ``tokens``: their tokens, including padding; None if the input is not tokens, and then padding with its own mask is
    left out.
    """

    flops: float
    rows: int
    tokens: Optional[float]

    def of(self, rows: float, tokens: Optional[float]) -> float:
        """Return the operations of other rows, in proportion to their tokens if known, else to their number."""
        if tokens is not None and self.tokens:
            return self.flops * tokens / self.tokens
        return self.flops * rows / self.rows


@dataclass(frozen=True)
class Peak:
    """Peak performance. ``source``: in words, where the number is from."""

    tflops: float
    source: str


def tokens_of(model: torch.nn.Module, inputs: Any, padding: bool) -> Optional[torch.Tensor | int]:
    """Return the tokens of a batch, with or without its padding; None if the input is not rows of tokens."""
    if not isinstance(inputs, Mapping):
        return None
    ids, mask = inputs.get(getattr(model, "main_input_name", "input_ids")), inputs.get("attention_mask")
    if not (torch.is_tensor(ids) and ids.dim() == 2 and not ids.is_floating_point()):
        return None
    has_mask = torch.is_tensor(mask) and mask.shape == ids.shape
    return mask.ne(0).sum() if has_mask and not padding else ids.numel()


def count_flops(trainer: Trainer, inputs: Any, num_items: Any) -> tuple[Optional[FlopCount], Optional[str]]:
    """Return (count for a few rows of ``inputs``, why there is none). Weights, gradients, statistics and RNG stay as
    they are. Counts in evaluation mode, so that activations recomputed by checkpointing do not count twice."""
    if not isinstance(inputs, Mapping):
        return None, f"a batch is a {type(inputs).__name__}"
    model = trainer.model
    count = rows_of(model, inputs).rows
    rows = min(count, ROWS_TO_COUNT)
    few_rows = _without_padding(pick(inputs, torch.arange(rows), count) if rows < count else inputs)
    if not rows:
        return None, "the batch has no rows to count by"
    try:
        flops = _count_operations(trainer, few_rows, num_items)
    except Exception as error:  # a model may fail in any way while it is counted, but training must continue
        forget_traceback(error)
        return None, f"the operations of this model cannot be counted: {str(error).partition(chr(10))[0]}"
    if not flops:
        return None, "no matrix product or convolution was seen"
    tokens = tokens_of(model, few_rows, padding=True)
    return FlopCount(flops, rows, tokens), None


def _without_padding(inputs: Any) -> Any:
    """Cut ``inputs`` to the length that their masks use: a bool ``NAME_mask`` (rows, length) and values ``NAME...``."""
    widths: dict[str, int] = {}
    for mask_name, mask in inputs.items():
        stem = mask_name.removesuffix("_mask")
        if stem == mask_name or not torch.is_tensor(mask) or mask.dtype != torch.bool or mask.dim() != 2:
            continue
        values = [name for name, value in inputs.items() if name.startswith(stem) and _has_length(value, mask.size(1))]
        if len(values) > 1:  # the mask is one of them
            used = mask.any(dim=0).nonzero()
            widths |= dict.fromkeys(values, int(used[-1]) + 1 if len(used) else 1)
    return type(inputs)({name: v[:, : widths[name]] if name in widths else v for name, v in inputs.items()})


def _has_length(value: Any, length: int) -> bool:
    return torch.is_tensor(value) and value.dim() >= 2 and value.size(1) == length


def _count_operations(trainer: Trainer, inputs: Any, num_items: Any) -> float:
    model = trainer.model
    weights = [p for p in model.parameters() if p.requires_grad]
    inputs = trainer._prepare_inputs(type(inputs)(inputs))
    counter = FlopCounterMode(display=False)
    with restored_on_exit(model, trainer), torch.enable_grad(), _without_fused_kernels(), counter:
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, inputs, num_items_in_batch=num_items)
        torch.autograd.grad(loss, weights, allow_unused=True)
    return float(counter.get_total_flops())


@contextlib.contextmanager
def _without_fused_kernels() -> Iterator[None]:
    """Disable fused recurrent layers and oneDNN's product, each a single operation with unknown cost to the counter."""
    backends = torch.backends.cudnn, torch.backends.mkldnn
    before = [backend.enabled for backend in backends]
    try:
        for backend in backends:
            backend.enabled = False
        yield
    finally:
        for backend, enabled in zip(backends, before, strict=True):
            backend.enabled = enabled


# -- the peak ----------------------------------------------------------------------------------------------------------


def find_peak(trainer: Trainer, stated_tflops: Optional[float]) -> tuple[Optional[Peak], Optional[str]]:
    """Return (the peak of this device in the format that training uses, why there is none)."""
    if stated_tflops is not None:
        return Peak(stated_tflops, "peak_tflops"), None
    device, precision = input_device(trainer.model), precision_of(trainer)
    if device.type == "cpu":
        return Peak(measured_tflops(precision), f"measured matmul peak, {precision}"), None
    name = device_name(device)
    tflops = known_tflops(name, precision)
    if tflops is None:
        return None, f"no peak is known for {name} in {precision}; give peak_tflops"
    return Peak(tflops, f"{name}, {precision}"), None


def precision_of(trainer: Trainer) -> str:
    """Return the format in which training multiplies matrices: bf16, fp16, tf32 or fp32."""
    mixed = trainer.accelerator.mixed_precision
    if mixed in ("bf16", "fp16"):
        return mixed
    dtypes = {p.dtype for p in trainer.model.parameters() if p.dim() > 1}
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        if dtype in dtypes:
            return name
    return "tf32" if rounds_to_tf32(trainer.model, input_device(trainer.model)) else "fp32"


def measured_tflops(precision: str) -> float:
    """Return the best rate of repeated products of two square matrices on this CPU, with torch's number of threads.
    Uses the faster of the two libraries that the output layer may use."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    matrix = torch.ones(MATRIX_SIDE, MATRIX_SIDE, dtype=dtype)
    product = by_onednn if dtype == torch.float32 and is_onednn_faster() else torch.mm
    seconds: list[float] = []
    with torch.no_grad():
        product(matrix, matrix)
        while sum(seconds) < MEASURE_S or len(seconds) < 3:
            started_s = time.perf_counter()
            product(matrix, matrix)
            seconds.append(time.perf_counter() - started_s)
    return 2 * MATRIX_SIDE**3 / min(seconds) / 1e12
