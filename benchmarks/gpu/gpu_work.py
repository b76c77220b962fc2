"""One point of benchmarks/gpu/gpu.py: one contender trains one model for some steps, in its own process.

All contenders use the same precision: the weights of gpu_shapes.py, bf16 autocast, and fused AdamW with its state in
the type of the trained weights. Rows, their order, the logical batch and activation checkpointing are the same as well.

    stock                     transformers.Trainer, padded batches, sdpa
    trl                       TRL's SFTTrainer with its defaults: padded, its loss in chunks, sdpa
    trl, padding-free         rows of a batch laid end to end, with flash attention if it is installed
    trl, packing              rows packed into rows of the longest length, likewise
    trl, padding-free, liger  with Liger's layers: TRL + Liger + flash attention
    ours                      SCUTrainer as the commands use it, with the attention that the commands choose
    ours, liger               with Liger's layers, and our loss
    unsloth, axolotl          as their documentation describes, see gpu_others.py and gpu_axolotl.py
"""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Optional

import torch

from benchmarks.gpu import varlen_attention
from benchmarks.gpu.gpu_shapes import SHAPES, CardShape, model_flops
from benchmarks.gpu.gpu_window import EXTRA_STEPS, WARM_UP_STEPS, Window
from benchmarks.lib.memory_work import DISTRIBUTIONS, Lengths
from benchmarks.lib.text_job import LOOPS, SHIFT, Job, Trained, held_out_bits, ours, stock, trl
from scu_trainer.errors import OutOfMemory
from scu_trainer.hardware.precision import AMPERE
from scu_trainer.models.kernels import best_attention
from scu_trainer.train.run_directory.logs import run_log
from scu_trainer.train.step.recovery.memory import free_memory
from scu_trainer.train.step.recovery.out_of_memory import is_out_of_memory

RANK = 16
LEARNING_RATES = {"lora": 1e-3, "qlora": 1e-3, "full": 5e-5}
"""Rates so high that a few steps from random weights show in the held-out loss."""
QUICK_RATE = 1e-2
LENGTHS = {
    **{name: DISTRIBUTIONS[name] for name in ("chat", "alpaca")},
    "fixed": Lengths("fixed", 1024, 0.0),
    "tiny": Lengths("tiny", 20, 0.6),
}
PADDING_FREE = {"padding_free": True, "max_length": None}
LIGER = (("use_liger_kernel", True),)
LIGERS_LAYERS = (*LIGER, ("liger_kernel_config", {"fused_linear_cross_entropy": False}))
INSTALL = {
    "liger_kernel": "liger-kernel",
    "trl": "trl",
    "unsloth": "unsloth",
    "axolotl": "axolotl",
    "bitsandbytes": "bitsandbytes",
}
"""The package that provides a module."""


@dataclass(frozen=True)
class Point:
    """One measurement: ``contender`` trains ``shape`` with ``tuning``. ``steps``: the number of measured steps.

    ``flash``: the attention of contenders that lay rows end to end. None means flash attention if it is installed, else
    torch's own kernel for such rows, or sdpa on a GPU that does not support it.
    """

    shape: str
    tuning: str
    contender: str
    repeat: int = 1
    lengths: str = "chat"
    steps: int = 12
    batch_rows: int = 8
    accumulation: int = 2
    device: str = "cuda"
    checkpointing: bool = True
    full_dtype: str = "float32"
    flash: Optional[str] = None

    def work(self) -> str:
        """The settings, besides shape and tuning, that must be equal for two points to be comparable."""
        rows = f"{self.batch_rows} x {self.accumulation} rows of {self.lengths} lengths per optimizer step"
        kept = "checkpointing" if self.checkpointing else "no checkpointing"
        return f"{rows}, {self.steps} steps measured, {kept}, full tuning in {self.full_dtype} weights"

    def model_shape(self, attention: Optional[str] = None) -> CardShape:
        given = {"tuning": self.tuning, "full_dtype": self.full_dtype, "device": self.device}
        return replace(SHAPES[self.shape], **given, attention=attention)


@dataclass(frozen=True)
class CardJob(Job):
    """A job with a ``window`` that counts the tokens of its model."""

    window: Optional[Window] = field(default=None, compare=False)

    def model(self) -> torch.nn.Module:
        return self.window.watch(super().model())


def job_of(point: Point, attention: Optional[str], window: Window) -> CardJob:
    rate = QUICK_RATE if point.shape == "tiny" else LEARNING_RATES[point.tuning]
    return CardJob(
        shape=point.model_shape(attention),
        lengths=LENGTHS[point.lengths],
        steps=WARM_UP_STEPS + point.steps + EXTRA_STEPS,
        batch_rows=point.batch_rows,
        accumulation=point.accumulation,
        lora_rank=None if point.tuning == "full" else RANK,
        precision="bf16",
        checkpointing=point.checkpointing,
        learning_rate=rate,
        device=point.device,
        arguments=CONTENDERS[point.contender].arguments,
        window=window,
    )


# -- contenders --------------------------------------------------------------------------------------------------------


def packing(job: CardJob, window: Window, **changes: Any) -> Trained:
    """Train with packing. The packed rows of a step hold the tokens of a step of the others, in as many batches."""
    per_step = sum(job.token_rows().lengths) / job.steps / job.shape.longest_row
    rows = max(1, round(per_step / job.accumulation))
    given = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": job.accumulation}
    return trl(job, window, packing=True, max_steps=job.steps, **given, **changes)


def unsloth(job: CardJob, window: Window) -> Trained:
    from benchmarks.gpu import gpu_others

    return gpu_others.unsloth(job, window)


def axolotl(job: CardJob, window: Window) -> Trained:
    from benchmarks.gpu import gpu_axolotl

    return gpu_axolotl.axolotl(job, window)


@dataclass(frozen=True)
class CardContender:
    """A contender. ``needs``: modules that must be installed. ``wants_flash``: it uses flash attention if that is
    installed. ``attends``: its attention otherwise."""

    work: Callable[..., Trained]
    settings: dict[str, Any] = field(default_factory=dict)
    arguments: tuple[tuple[str, Any], ...] = ()
    needs: tuple[str, ...] = ()
    needs_cuda: bool = False
    wants_flash: bool = False
    attends: str = "sdpa"
    is_ours: bool = False


CONTENDERS = {
    "stock": CardContender(stock),
    "ours": CardContender(ours, LOOPS, is_ours=True),
    "trl, padding-free, liger": CardContender(
        trl, PADDING_FREE, LIGER, needs=("trl", "liger_kernel"), needs_cuda=True, wants_flash=True
    ),
    "trl, padding-free": CardContender(trl, PADDING_FREE, needs=("trl",), wants_flash=True),
    "trl": CardContender(trl, needs=("trl",)),
    "trl, packing": CardContender(packing, needs=("trl",), wants_flash=True),
    "ours, liger": CardContender(ours, LOOPS, LIGERS_LAYERS, needs=("liger_kernel",), needs_cuda=True, is_ours=True),
    "unsloth": CardContender(unsloth, needs=("unsloth",), needs_cuda=True, attends="its own"),
    "axolotl": CardContender(axolotl, needs=("axolotl",), needs_cuda=True, wants_flash=True),
}
"""The contenders, in the order of importance."""


def obstacle(point: Point) -> Optional[str]:
    """Return why this point cannot run here, or None if it can."""
    contender = CONTENDERS[point.contender]
    needs = (*contender.needs, *(("bitsandbytes",) if point.tuning == "qlora" else ()))
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        return f"needs {missing[0]}, which is not installed: pip install {INSTALL[missing[0]]}"
    return "needs CUDA" if contender.needs_cuda and point.device == "cpu" else None


def attention_of(point: Point) -> Optional[str]:
    """Return ``attn_implementation`` of a contender; None for sdpa."""
    contender = CONTENDERS[point.contender]
    if contender.wants_flash and point.flash is not None:
        return point.flash
    if point.device == "cpu" or not (contender.wants_flash or contender.is_ours):
        return None
    chosen = best_attention(None, point.device, half_precision=True)
    if chosen is None and contender.wants_flash and torch.cuda.get_device_capability(point.device) >= AMPERE:
        return varlen_attention.NAME
    return chosen


# -- one point ---------------------------------------------------------------------------------------------------------


def result_of(point: Point) -> dict[str, Any]:
    """Train ``point`` in this process, and return its results. An error is a result with a reason."""
    attention = attention_of(point)
    try:
        numbers = _measured(point, attention)
    except Exception as error:  # an error of one contender must not stop the measurement of the others
        status = "out of memory" if isinstance(error, OutOfMemory) or is_out_of_memory(error) else "failed"
        if status == "failed":
            traceback.print_exc()
        numbers = {"status": status, "reason": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"}
    return {"attention": attention or CONTENDERS[point.contender].attends, "card": _card(point.device), **numbers}


def _card(device: str) -> str:
    return "cpu" if device == "cpu" else torch.cuda.get_device_name()


def _measured(point: Point, attention: Optional[str]) -> dict[str, Any]:
    contender = CONTENDERS[point.contender]
    window = Window(point.device, point.steps)
    job = job_of(point, attention, window)
    with run_log(), window.peaks:
        model, step_tokens = contender.work(job, window, **contender.settings)
        window.end()
    free_memory(window.device)  # of trainer and optimizer
    measured = step_tokens[WARM_UP_STEPS : WARM_UP_STEPS + point.steps]
    with torch.autocast(point.device, torch.bfloat16):
        bits = held_out_bits(model, job)
    return {
        "status": "measured",
        "seconds": window.seconds,
        "tokens": sum(measured),
        "step_tokens": step_tokens,
        "processed": window.processed,
        "peak_bytes": window.peaks.allocated,
        "reserved_bytes": window.peaks.reserved,
        "host_syncs": window.syncs,
        "held_out_bits": bits,
    }


def flops_per_token(point: Point) -> float:
    """Return the model FLOPs per predicted token of the rows of ``point``, which are the same for every contender."""
    job = job_of(replace(point, contender="stock"), None, Window("cpu", point.steps))
    lengths = job.token_rows().lengths
    return model_flops(job.shape, job.adapted, lengths) / sum(length - SHIFT for length in lengths)
