"""Choose the attention kernel before a model is loaded, and report the kernels that really run afterwards.

The two can differ: a mask, dropout or a missing package silently makes a library use another kernel. So one forward is
run and its operations are recorded.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections import Counter
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from scu_trainer.errors import ModelError, did_you_mean
from scu_trainer.models.asking import in_mode
from scu_trainer.models.checkpointing import PreservedStatistics
from scu_trainer.models.quantize import is_mamba

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

FLASH = "flash_attention"
FLASH_CAPABILITY = (8, 0)
"""Least compute capability of GPUs that the flash attention packages support: Ampere."""
ATTENTION_KERNELS = {
    "_scaled_dot_product_flash_attention_for_cpu": "sdpa, the flash kernel for CPU",
    "_scaled_dot_product_flash_attention": "sdpa, the flash kernel",
    "_scaled_dot_product_efficient_attention": "sdpa, the memory-efficient kernel",
    "_scaled_dot_product_cudnn_attention": "sdpa, the cuDNN kernel",
    "_scaled_dot_product_fused_attention_overrideable": "sdpa, the fused kernel of the device",
    "_safe_softmax": "sdpa without a fused kernel (attention matrices are held whole)",
}
EAGER = "eager (attention matrices are held whole)"
MAMBA_REFERENCE = ("convolution", "cumsum")
"""Operations of the reference path of a mamba layer, which the fused kernels replace."""
MAMBA_PACKAGES = ("mamba_ssm", "causal_conv1d")


# -- before loading ----------------------------------------------------------------------------------------------------


def best_attention(wanted: Optional[str], device: torch.device | str, half_precision: bool) -> Optional[str]:
    """Return the ``attn_implementation`` to load a model with; None leaves it to transformers, which takes sdpa.
    ``wanted`` is the user's choice, if any, and ``half_precision`` whether attention is computed in bf16 or fp16.
    Raises ModelError if ``wanted`` does not exist or cannot run here."""
    from transformers.utils import is_flash_attn_2_available

    on_cuda = torch.device(device).type == "cuda"
    if wanted is None:
        can_run = on_cuda and half_precision and is_flash_attn_2_available() and _is_recent(device)
        return f"{FLASH}_2" if can_run else None
    _require_known(wanted)
    if wanted.startswith(FLASH):
        _require_flash(wanted, device, on_cuda, half_precision)
    return wanted


def _require_known(wanted: str) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    allowed = ["eager", *(name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in name)]
    if wanted not in allowed and "/" not in wanted:  # a name with a slash is a kernel on the Hub
        raise ModelError(
            f"attn_implementation is {wanted!r}; allowed: {', '.join(sorted(allowed))}, or a kernel on the Hub"
            f"{did_you_mean(wanted, allowed)}"
        )


def _require_flash(wanted: str, device: torch.device | str, on_cuda: bool, half_precision: bool) -> None:
    instead = "use attn_implementation: sdpa, whose own flash kernel needs no package"
    if not on_cuda:
        raise ModelError(f"attn_implementation: {wanted} runs on CUDA only, but this run is on {device}; {instead}")
    if not _is_recent(device):
        name = torch.cuda.get_device_name(device)
        raise ModelError(
            f"attn_implementation: {wanted} runs on GPUs of the Ampere generation or newer, but this is a {name}; "
            "use attn_implementation: sdpa, which has other kernels for it"
        )
    if not half_precision:
        raise ModelError(
            f"attn_implementation: {wanted} computes in bf16 or fp16 only, but this run computes in float32; set "
            f"mixed_precision: bf16, or {instead}"
        )
    if not _flash_is_installed(wanted):
        raise ModelError(
            f"attn_implementation: {wanted} needs its package, which is not installed; `pip install flash-attn "
            f"--no-build-isolation` (flash_attention_2), or {instead}"
        )


def _is_recent(device: torch.device | str) -> bool:
    return torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY


def _flash_is_installed(wanted: str) -> bool:
    """Return whether the kernel's package is installed, or the package ``kernels``, which can download the kernel."""
    from transformers import utils

    version = wanted.rpartition("_")[-1]
    return utils.is_kernels_available() or getattr(utils, f"is_flash_attn_{version}_available")()


# -- after loading -----------------------------------------------------------------------------------------------------


def kernel_line(model: nn.Module, inputs: dict[str, Any], autocast: Optional[AbstractContextManager] = None) -> str:
    """Run one forward of ``inputs`` and return the kernels that attention and mamba layers ran.

    For example "attention: sdpa, the flash kernel for CPU; mamba: reference path (...)". The forward runs in training
    mode with gradients enabled, because dropout and gradients decide which kernel runs. ``inputs`` are a few tokens on
    the device of ``model``, and ``autocast`` is the context of the forward in training. Mode, RNG and running
    statistics of ``model`` are restored. ``model`` must not be compiled.
    """
    with (
        in_mode(model, True),
        _rng_kept(model),
        PreservedStatistics(model),
        _Tracer(model) as log,
        torch.enable_grad(),
    ):
        with autocast or contextlib.nullcontext():
            model(**inputs)
    attention = f"attention: {log.attention()}" if log.attention() else "no attention layers"
    return f"{attention}; mamba: {log.mamba()}" if log.calls["mamba"] else attention


def _rng_kept(model: nn.Module) -> AbstractContextManager:
    devices = sorted({str(p.device) for p in model.parameters() if p.device.type not in ("cpu", "meta")})
    kind = torch.device(devices[0]).type if devices else "cuda"
    return torch.random.fork_rng(devices=devices, device_type=kind)


class _Tracer(TorchDispatchMode):
    """Counts the kernels that run inside attention and mamba layers; ``calls`` counts the layers that ran, by kind."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.inside: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.attention_kernels: Counter[str] = Counter()
        self.mamba_operations: Counter[str] = Counter()
        self._hooks: list = []

    def __enter__(self) -> _Tracer:
        for module in self.model.modules():
            if kind := _layer_kind(module):
                self._hooks.append(module.register_forward_pre_hook(functools.partial(self._enter_layer, kind)))
                self._hooks.append(
                    module.register_forward_hook(functools.partial(self._exit_layer, kind), always_call=True)
                )
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def _enter_layer(self, kind: str, *_: Any) -> None:
        self.inside[kind] += 1
        self.calls[kind] += 1

    def _exit_layer(self, kind: str, *_: Any) -> None:
        self.inside[kind] -= 1

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self._count_operation(str(function))
        return function(*arguments, **(keywords or {}))

    def _count_operation(self, full_name: str) -> None:
        """Count the operation ``full_name``, such as "aten._softmax.default", if it shows which kernel runs."""
        space, _, rest = full_name.partition(".")
        name = rest.partition(".")[0]
        if space == "aten" and name in ATTENTION_KERNELS:
            self.attention_kernels[ATTENTION_KERNELS[name]] += 1
        elif space.startswith("flash_attn"):
            self.attention_kernels["flash-attn, the package's own kernel"] += 1
        elif self.inside["attention"] and name == "_softmax":
            self.attention_kernels[EAGER] += 1
        elif self.inside["mamba"] and name in MAMBA_REFERENCE:
            self.mamba_operations[name] += 1

    def attention(self) -> str:
        if not self.attention_kernels and self.calls["attention"]:
            return "a kernel that does not go through torch's dispatcher"
        return " and ".join(name for name, _ in self.attention_kernels.most_common())

    def mamba(self) -> str:
        if not self.mamba_operations:
            return "fused kernels"
        missing = [name for name in MAMBA_PACKAGES if importlib.util.find_spec(name) is None]
        if not missing:
            return f"reference path (although {' and '.join(MAMBA_PACKAGES)} are installed)"
        return f"reference path ({' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed)"


def _layer_kind(module: nn.Module) -> str:
    if is_mamba(module):
        return "mamba"
    return "attention" if "attention" in type(module).__name__.lower() else ""
