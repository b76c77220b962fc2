"""Settings of memory: micro-batches, limits, and where weights are placed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, Optional, Union

from scu_trainer.errors import SettingsError
from scu_trainer.settings.base import LARGEST_NUMBER, Allowed, check_fields, option, require, short

ALLOWED = {
    "min_batch_size": Allowed(least=1),
    "max_batch_size": Allowed(least=1),
    "memory_limit_gb": Allowed(above=0),
}


@dataclass(frozen=True)
class MemorySettings:
    """How the rows of an optimizer step are divided into micro-batches, and how memory use controls their size.

    A micro-batch is the input of one forward and backward pass. The logical batch, the rows of one optimizer step, is
    always that of ``per_device_train_batch_size`` and ``gradient_accumulation_steps``, except with ``batch_mode:
    logical``.
    """

    memory_control: bool = option(
        True,
        "choose the size of micro-batches from the memory in use, and recover from out-of-memory errors; false without "
        "token_cap: batches of the stock Trainer",
    )
    token_cap: Optional[Union[int, str]] = option(
        None,
        "padded tokens per micro-batch (rows, for inputs without a length); auto: the longest row, or as many as keep "
        "the device busy; default: auto with memory_control, otherwise no splitting",
    )
    min_batch_size: int = option(1, "smallest number of rows per micro-batch, even if memory is short")
    max_batch_size: Optional[int] = option(
        None, "largest number of rows per micro-batch; default: limited only by token_cap"
    )
    target_headroom_gb: Union[float, str] = option(
        "8%", "memory that stays free, in GiB, or as a share of the limit ('8%%')"
    )
    gc_threshold_gb: Optional[float] = option(
        None,
        "collect garbage immediately if less than this many GiB are free at the peak of a step; default: a quarter of "
        "target_headroom_gb",
    )
    ram_threshold_gb: Optional[float] = option(
        None,
        "with a GPU: collect garbage when this many GiB of main memory are in use, checked every 20 steps; default: 92 "
        "%% of it",
    )
    pid_kp: float = option(1.0, "proportional gain: ln(micro-batch size) per unit of used fraction below the target")
    pid_ki: float = option(0.1, "integral gain, per optimizer step")
    pid_kd: float = option(0.2, "derivative gain, optimizer steps")
    batch_mode: Literal["chunk", "logical"] = option(
        "chunk",
        "chunk: memory control changes the micro-batch, and the logical batch stays; logical: it changes the logical "
        "batch, between min_batch_size and max_batch_size rows per device, which changes the optimization",
    )
    batch_size_lr_rule: Literal["sqrt", "linear", "none"] = option(
        "sqrt",
        "batch_mode logical: multiply the learning rate by (rows / nominal rows) to the power 1/2 (sqrt, for adaptive "
        "optimizers), 1 (linear, for SGD) or 0 (none)",
    )
    chunked_loss: Literal["auto", "always", "never"] = option(
        "auto",
        "causal language models: compute the cross-entropy from the hidden states for a part of the tokens at a time, "
        "so that the full logits never exist; same loss and gradient up to rounding. auto: for vocabularies of 16,384 "
        "tokens or more",
    )
    padding_free: Optional[bool] = option(
        None,
        "causal language models: concatenate the rows of a micro-batch instead of padding them, and on a CPU compute a "
        "prefix that rows share only once; same loss and gradient up to rounding; default: if all layers attend to "
        "whole rows, by sdpa or FlashAttention",
    )
    memory_limit_gb: Optional[float] = option(
        None, "largest memory in GiB that each process may use on the training device; default: all"
    )
    max_gpu_mem: Optional[Union[float, str]] = option(
        None,
        "device_map: largest size of the weights on each GPU, in GiB or as '4GB'; default: what accelerate finds free",
    )
    cpu_mem: Optional[Union[float, str]] = option(
        None, "device_map: largest size of the weights in main memory, in GiB or as '16GB'; others go to offload_folder"
    )
    offload_folder: Optional[str] = option(
        None, "device_map: folder for weights that fit neither on a GPU nor in main memory"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_cap", _parsed_token_cap(self.token_cap))
        object.__setattr__(self, "target_headroom_gb", _parsed_headroom(self.target_headroom_gb))
        for name in ("max_gpu_mem", "cpu_mem"):
            object.__setattr__(self, name, size_in_gib(name, getattr(self, name)))
        check_fields(self, ALLOWED)
        require(
            self.memory_limit_gb is None or self.memory_control,
            "memory_limit_gb has an effect only with memory control; set memory_control: true, or drop it",
        )
        highest = self.max_batch_size
        require(
            highest is None or self.min_batch_size <= highest,
            f"min_batch_size {self.min_batch_size} exceeds max_batch_size {highest}; lower min_batch_size",
        )
        require(
            not self.padding_free or self.acts,
            "padding_free: true needs memory_control: true or a token_cap; leave it out for the stock Trainer",
        )
        require(
            self.batch_mode == "chunk" or self.memory_control,
            "batch_mode: logical lets memory control choose the batch; it needs memory_control: true",
        )

    @property
    def resolved_token_cap(self) -> Optional[Union[int, str]]:
        """``token_cap`` with its default filled in: a number, "auto", or None for no splitting by length."""
        return "auto" if self.token_cap is None and self.memory_control else self.token_cap

    @property
    def acts(self) -> bool:
        return self.memory_control or self.token_cap is not None

    @property
    def resolved_chunked_loss(self) -> str:
        """``chunked_loss``, with auto replaced by never if memory control and splitting are off."""
        return "never" if self.chunked_loss == "auto" and not self.acts else self.chunked_loss

    @property
    def resolved_padding_free(self) -> Optional[bool]:
        """``padding_free``, but False if memory control and splitting are off. None: if the model supports it."""
        return self.padding_free if self.acts else False

    def largest_logical_batch(self, nominal_rows: int) -> int:
        """Return the most rows of a device with ``batch_mode: logical`` and batches of ``nominal_rows``. Raises
        SettingsError if ``max_batch_size`` exceeds these."""
        rows = self.max_batch_size or nominal_rows
        require(
            rows <= nominal_rows,
            f"max_batch_size {rows} exceeds per_device_train_batch_size {nominal_rows}, which batch_mode: logical "
            "starts from and never exceeds; raise per_device_train_batch_size",
        )
        return rows

    @property
    def headroom_share(self) -> Optional[float]:
        """Share of the memory limit that stays free; None if ``target_headroom_gb`` is in GiB."""
        return float(self.target_headroom_gb[:-1]) / 100 if isinstance(self.target_headroom_gb, str) else None


def _parsed_token_cap(value) -> Optional[Union[int, str]]:
    if value is None or value == "auto":
        return value
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise SettingsError(f"token_cap is {value!r}; allowed: a number of tokens, or auto") from None
    require(number >= 1, f"token_cap is {number}; it must be 1 token or more, or auto")
    return number


def _parsed_headroom(value) -> Union[float, str]:
    """Return the headroom as a float in GiB, or as a share such as '8%'."""
    text = str(value).strip()
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        raise SettingsError(f"target_headroom_gb is {value!r}; allowed: GiB such as 1.5, or a share '8%'") from None
    if text.endswith("%"):
        require(0 <= number < 100, f"target_headroom_gb is {text}; a share must be from 0% to below 100%")
        return text
    require(math.isfinite(number) and number >= 0, f"target_headroom_gb is {number}; it must be 0 or more")
    return number


BYTES = {"": 2**30, "GIB": 2**30, "MIB": 2**20, "KIB": 2**10, "GB": 10**9, "MB": 10**6, "KB": 10**3}
"""Bytes by unit, as in accelerate's ``max_memory``; a number without a unit is in GiB."""


def size_in_gib(name: str, value) -> Optional[float]:
    """Return GiB from a number of GiB, or from a text such as '4GB' or '900MiB'. Raises SettingsError for others."""
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        size = value
    else:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", str(value).strip().upper())
        if match is None:
            raise SettingsError(f"{name} is {value!r}; allowed: GiB such as 3.5, or a size such as 4GB or 900MiB")
        size = float(match[1]) * BYTES[match[2] or ""] / 2**30
    require(
        0 < size <= LARGEST_NUMBER,
        f"{name} is {short(value)}; it must be above 0 GiB, and {LARGEST_NUMBER:,.0f} or less",
    )
    return float(size)
