"""QLoRA: choose which frozen weights are stored in 4 or 8 bits, and prepare a quantized model for training.

bitsandbytes does the arithmetic, on CUDA and on CPUs. The linear layers of the repeated blocks are quantized, so
attention and MLP. Everything else keeps the precision of its file: embeddings, output and classification heads, norms,
convolutions, recurrent cells, routers, stacked experts, and linear layers whose weight a mamba kernel reads directly.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Optional

from scu_trainer.errors import ModelError, RequirementError
from scu_trainer.settings import ModelSettings

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

logger = logging.getLogger("scu_trainer")

QUANTIZED_FROM_WEIGHTS = 1024
"""Least weights of a layer that is quantized: smaller ones save nothing, and bitsandbytes fails on a single output."""

ROUTERS = ("router", "gate", "shared_expert_gate")
"""Names of linear layers that choose experts: they are tiny, and a rounded score sends a token to another expert."""

BITSANDBYTES = "bitsandbytes"


def require_quantization(settings: ModelSettings, device: torch.device) -> None:
    """Raise RequirementError, before anything is loaded, if ``tuning: qlora`` cannot run on ``device``."""
    if settings.tuning != "qlora":
        return
    if importlib.util.find_spec(BITSANDBYTES) is None:
        raise RequirementError(
            "tuning: qlora needs bitsandbytes, which is not installed; pip install 'scu-trainer[qlora]', or use lora"
        )
    if device.type not in ("cuda", "cpu"):
        raise RequirementError(
            f"tuning: qlora runs on CUDA devices and CPUs, but the device here is {device.type}; use tuning: lora, or "
            "use_cpu: true"
        )


def compute_dtype_of(settings: ModelSettings, device: torch.device) -> torch.dtype:
    """Return the dtype in which 4-bit layers compute, which is that of training. With ``mixed_precision: auto`` this is
    bfloat16 if the device has it, else float16 (CUDA) or float32 (CPU)."""
    import torch

    if settings.mixed_precision == "no":
        return torch.float32 if settings.dtype == "auto" else getattr(torch, settings.dtype)
    if settings.mixed_precision != "auto":
        return {"bf16": torch.bfloat16, "fp16": torch.float16}[settings.mixed_precision]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def quantization_config(
    settings: ModelSettings, skeleton: PreTrainedModel, device: torch.device
) -> Optional[BitsAndBytesConfig]:
    """Return the value for ``from_pretrained(quantization_config=...)``; None if the files are already quantized so.

    Args:
        skeleton: the model without weights, see ``meta_model``.
        device: decides the dtype in which 4-bit layers compute; 8-bit layers use the dtype of their input.

    Raises ModelError for a model that is quantized in another way, or has nothing to quantize.
    """
    from transformers import BitsAndBytesConfig

    if is_stored_quantized(settings, skeleton.config):
        return None
    wanted = set(quantizable_layers(skeleton))
    if not wanted:
        raise ModelError(
            f"tuning: qlora would quantize nothing in {type(skeleton).__name__}: none of its repeated blocks has a "
            f"linear layer of {QUANTIZED_FROM_WEIGHTS:,} weights or more; use tuning: lora or full"
        )
    # A list given here replaces the defaults of transformers: only these modules stay unquantized.
    kept = [name for name, _ in _linear_layers(skeleton) if name not in wanted]
    if settings.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=kept)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        llm_int8_skip_modules=kept,
        bnb_4bit_quant_type=settings.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=settings.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=compute_dtype_of(settings, device),
    )


def meta_model(
    config: PretrainedConfig, trust_remote_code: bool = False, auto: Any = None, **options: Any
) -> PreTrainedModel:
    """Build the model of ``config`` on the meta device: it has names and shapes, but takes no memory. ``auto`` is the
    Auto class to build it with; None means a causal language model."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return (auto or AutoModelForCausalLM).from_config(config, trust_remote_code=trust_remote_code, **options)


def stored_quantization(config: PretrainedConfig) -> dict[str, Any]:
    """Return the quantization in the model's configuration, always with ``quant_method``; {} for unquantized files."""
    stored = getattr(config, "quantization_config", None) or {}
    stored = stored if isinstance(stored, dict) else stored.to_dict()
    return {"quant_method": "an unknown method", **stored} if stored else {}


def is_stored_quantized(settings: ModelSettings, config: PretrainedConfig) -> bool:
    """Return whether the files are quantized as ``settings`` ask. Raises ModelError for any other quantization."""
    stored = stored_quantization(config)
    if not stored:
        return False
    method = stored["quant_method"]
    asked, other = (8, 4) if settings.load_in_8bit else (4, 8)
    if method == BITSANDBYTES and stored.get(f"load_in_{asked}bit"):
        return True
    found = f"{other} bits of {BITSANDBYTES}" if method == BITSANDBYTES else str(method)
    raise ModelError(
        f"the model is stored quantized ({found}), but tuning: qlora makes {asked} bits of {BITSANDBYTES} from full "
        "weights; give the folder or Hub id of the full model"
        + (f", or set load_in_8bit: {str(other == 8).lower()}" if method == BITSANDBYTES else "")
    )


# -- which layers ------------------------------------------------------------------------------------------------------


def quantizable_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers to quantize (attention and MLP), of a model or its skeleton."""
    kept = set(_read_by_kernels(model))
    blocks = _repeated_blocks(model)
    return [
        name
        for name, module in _linear_layers(model)
        if name.startswith(blocks)
        and name not in kept
        and not {*name.split(".")} & {*ROUTERS}
        and module.weight.numel() >= QUANTIZED_FROM_WEIGHTS
    ]


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return the layers that transformers' bitsandbytes integration replaces: exactly these types, no subclasses."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return ((name, module) for name, module in model.named_modules() if type(module) in (nn.Linear, Conv1D))


def _repeated_blocks(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the name prefixes of the lists of layers in the backbone; modules outside of the backbone are heads."""
    from torch import nn

    backbone = model.base_model
    return tuple(
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(module is inner for inner in backbone.modules())
    )


def is_mamba(module: nn.Module) -> bool:
    """Return whether ``module`` is the mixer of a state-space layer, by attributes that all families share."""
    return hasattr(module, "A_log") and hasattr(module, "conv1d")


def _read_by_kernels(model: nn.Module) -> Iterator[str]:
    """Yield the names of projections in state-space mixers whose weight is read directly instead of called. These are
    all projections but the first. The code that reads them would not understand the shape of packed weights."""
    from torch import nn

    for name, mixer in model.named_modules():
        if is_mamba(mixer):
            inner = (child for child, module in mixer.named_modules() if isinstance(module, nn.Linear))
            yield from (f"{name}.{child}" for child in inner if not child.startswith("in_proj"))


def quantized_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return (name, module) of the layers whose weights are stored in 4 or 8 bits."""
    return ((name, module) for name, module in model.named_modules() if stored_bits(module) is not None)


def stored_bits(module: nn.Module) -> Optional[int]:
    """Return 4 or 8 for a layer with packed weights; None for full precision and for the wrappers of adapters."""
    kind = type(getattr(module, "weight", None)).__name__
    is_layer = "weight" in getattr(module, "_parameters", {})  # a wrapper's attribute is the weight of its layer
    return {"Params4bit": 4, "Int8Params": 8}.get(kind) if is_layer else None


def is_of_torchao(weight: torch.Tensor) -> bool:
    """Return whether torchao has packed ``weight``; it keeps its dtype, and most functions of torch reject it."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(weight) and not hasattr(weight, "to_local")  # DTensors of FSDP have to_local


def dequantized_by_torchao(weight: torch.Tensor) -> torch.Tensor:
    """Return ``weight`` as a plain tensor, dequantized if torchao has packed it."""
    return weight.dequantize() if is_of_torchao(weight) else weight


# -- preparing for training --------------------------------------------------------------------------------------------


def prepare_quantized(model: PreTrainedModel) -> PreTrainedModel:
    """Freeze a quantized model, and keep forward passes from changing its weights.

    Unquantized weights keep the dtype in which they were loaded: the rounding error of 4 bits is many times that of
    bfloat16, and float32 embeddings and heads would cost as much memory as quantization saves. Only float16 becomes
    float32, because small gradients that pass through a float16 weight would vanish. Raises ModelError if the files
    hold a quantized weight that a mamba kernel reads directly.
    """
    import torch

    modules = dict(quantized_modules(model))
    unusable = sorted(set(_read_by_kernels(model)) & set(modules))
    if unusable:
        raise ModelError(
            f"the model is stored with {unusable[0]} quantized, a weight that mamba kernels read directly; give the "
            "folder or Hub id of the full model"
        )
    packed = {id(module.weight) for module in modules.values()}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.dtype == torch.float16 and id(parameter) not in packed:
            parameter.data = parameter.data.float()
    prevent_repacking(model)
    return model


def mismatched_packed_weights(model: nn.Module) -> list[str]:
    """Return the names of packed weights that do not have the shape of their layer. transformers reports such a
    mismatch only for weights that it does not pack."""
    names = []
    for name, module in quantized_modules(model):
        state = getattr(module.weight, "quant_state", None)
        is_known = state is not None or stored_bits(module) == 8
        shape = tuple(module.weight.shape if state is None else state.shape)
        if is_known and shape != (module.out_features, module.in_features):
            names.append(f"{name}.weight")
    return names


def cast_bfloat16_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert bfloat16 weights to ``dtype``. On a device without FP8, transformers unpacks FP8 weights to the dtype
    that was asked for, but leaves the weights that are stored next to them in bfloat16."""
    import torch

    for parameter in model.parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.to(dtype)


def prevent_repacking(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit weights on CPUs with avx512_bf16, and undo it if it has happened. There,
    the first evaluation repacks them for a kernel without a backward: from then on gradients are silently wrong and
    saved weights differ. Repacked weights are unpacked again, but their scales stay rounded, with a warning."""
    was_repacked = False
    for _, module in quantized_modules(model):
        if stored_bits(module) == 8:
            continue
        if getattr(module.weight.quant_state, "packing_format_for_cpu", False):
            was_repacked = True
            module.state_dict()  # bitsandbytes unpacks what it saves
        module.support_avx512bf16_for_cpu = False
        if module.bias is not None and module.compute_dtype is not None:
            # The first forward would do this; doing it here keeps forwards from changing a frozen weight.
            module.bias.data = module.bias.data.to(module.compute_dtype)
    if was_repacked:
        logger.warning(
            "the model was evaluated before training, and on this CPU bitsandbytes then rounds the scales of 4-bit "
            "weights to bfloat16; to train on the weights of its files, load the model again and evaluate it after "
            "training"
        )


# -- reporting sizes ---------------------------------------------------------------------------------------------------


def weight_count_of(parameter: torch.Tensor) -> int:
    """Return the number of weights in a parameter; for packed 4-bit weights ``numel`` counts bytes, which hold two."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else math.prod(state.shape)


def stored_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of all weights with the scales of quantized ones, which ``get_memory_footprint`` leaves out."""
    scales = {tensor.data_ptr(): tensor.nbytes for _, module in quantized_modules(model) for tensor in _scales(module)}
    return model.get_memory_footprint() + sum(scales.values())


def _scales(module: nn.Module) -> Iterator[torch.Tensor]:
    if stored_bits(module) == 8:
        found = (module.weight.SCB, module.state.SCB)
    else:
        state = module.weight.quant_state
        inner = (state.state2.absmax, state.state2.code, state.offset) if state.nested else ()
        found = (state.absmax, state.code, *inner)
    return (tensor for tensor in found if tensor is not None)


def quantized_line(model: PreTrainedModel) -> str:
    """Return a line with the weights in 4 or 8 bits, those in full precision by kind, and MiB now and in float32."""
    quantized, full = Counter(), Counter()
    for name, parameter in model.named_parameters():  # tied weights once
        module = model.get_submodule(name.rpartition(".")[0])
        if parameter is module._parameters.get("weight") and stored_bits(module):
            quantized[stored_bits(module)] += weight_count_of(parameter)
        else:
            full[_kind(module)] += parameter.numel()
    stored = " and ".join(f"{count:,} weights in {bits} bits" for bits, count in sorted(quantized.items()))
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in full.most_common())
    return (
        f"quantized: {stored}; {full.total():,} unchanged ({kinds}); {stored_bytes(model) / 2**20:,.1f} MiB instead "
        f"of {4 * (quantized.total() + full.total()) / 2**20:,.1f} in float32"
    )


def _kind(module: nn.Module) -> str:
    from torch import nn

    kinds = {
        "embeddings": nn.Embedding,
        "linear": nn.Linear,
        "convolutions": (nn.Conv1d, nn.Conv2d, nn.Conv3d),
        "recurrent": nn.RNNBase,
    }
    named = next((kind for kind, types in kinds.items() if isinstance(module, types)), None)
    if named is None and "norm" in type(module).__name__.lower():
        return "norms"
    return named or "other"
