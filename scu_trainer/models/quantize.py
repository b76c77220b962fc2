"""QLoRA: which frozen weights are stored in 4 or 8 bits, which are not, and what a stored model needs before training.

bitsandbytes does the arithmetic, on CUDA and on CPUs. Quantized are the linear layers of the blocks that repeat, so
attention and MLP. Everything else keeps the precision of its file: embeddings, output and classification heads, norms,
convolutions, recurrent cells, routers, stacked experts, and what a mamba kernel reads instead of calling it.
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
"""Smaller layers have nothing to save, and bitsandbytes fails on the smallest (a single output)."""

ROUTERS = ("router", "gate", "shared_expert_gate")
"""Names of linear layers that choose experts: tiny, and a rounded score sends a token elsewhere."""

BITSANDBYTES = "bitsandbytes"


def require_quantization(settings: ModelSettings, device: torch.device) -> None:
    """Raise RequirementError where ``tuning: qlora`` cannot run on ``device``, before anything is loaded."""
    if settings.tuning != "qlora":
        return
    if importlib.util.find_spec(BITSANDBYTES) is None:
        raise RequirementError(
            "tuning: qlora needs bitsandbytes, which is not installed; pip install 'scu-trainer[qlora]', or use lora"
        )
    if device.type not in ("cuda", "cpu"):
        raise RequirementError(
            f"tuning: qlora runs on CUDA devices and CPUs, and the device here is {device.type}; use tuning: lora, or "
            "use_cpu: true"
        )


def compute_dtype_of(settings: ModelSettings, device: torch.device) -> torch.dtype:
    """What 4-bit weights are multiplied in: the arithmetic of training. ``mixed_precision`` auto: bfloat16 where the
    device has it, else float16 (CUDA) or float32 (CPU)."""
    import torch

    if settings.mixed_precision == "no":
        return torch.float32 if settings.dtype == "auto" else getattr(torch, settings.dtype)
    if settings.mixed_precision != "auto":
        return {"bf16": torch.bfloat16, "fp16": torch.float16}[settings.mixed_precision]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def quantization_config(
    settings: ModelSettings, skeleton: PreTrainedModel, compute_dtype: torch.dtype
) -> Optional[BitsAndBytesConfig]:
    """What ``from_pretrained(quantization_config=...)`` takes; None for a model whose files hold the bits asked for.

    Args:
        skeleton: the model without weights, see ``skeleton_of``.
        compute_dtype: arithmetic of the 4-bit layers; 8-bit layers take the type of their input.

    Raises ModelError for a model quantized in another way, or with nothing to quantize.
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
    # With its own list, transformers adds no defaults: the names below are all that stays as it is.
    kept = [name for name, _ in _linear_layers(skeleton) if name not in wanted]
    if settings.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=kept)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        llm_int8_skip_modules=kept,
        bnb_4bit_quant_type=settings.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=settings.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=compute_dtype,
    )


def skeleton_of(
    config: PretrainedConfig, trust_remote_code: bool = False, auto: Any = None, **options: Any
) -> PreTrainedModel:
    """The model of ``config`` on the meta device: names and shapes, no memory. ``auto``: its class of transformers;
    None: a causal language model."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return (auto or AutoModelForCausalLM).from_config(config, trust_remote_code=trust_remote_code, **options)


def stored_quantization(config: PretrainedConfig) -> dict[str, Any]:
    """What the configuration says of it, with ``quant_method``; {} where the files hold whole weights."""
    stored = getattr(config, "quantization_config", None) or {}
    stored = stored if isinstance(stored, dict) else stored.to_dict()
    return {"quant_method": "an unknown method", **stored} if stored else {}


def is_stored_quantized(settings: ModelSettings, config: PretrainedConfig) -> bool:
    """Whether the files hold the bits that ``settings`` ask for. Raises ModelError for any other quantization."""
    stored = stored_quantization(config)
    if not stored:
        return False
    method = stored["quant_method"]
    asked, other = (8, 4) if settings.load_in_8bit else (4, 8)
    if method == BITSANDBYTES and stored.get(f"load_in_{asked}bit"):
        return True
    found = f"{other} bits of {BITSANDBYTES}" if method == BITSANDBYTES else str(method)
    raise ModelError(
        f"the model is stored quantized ({found}), and tuning: qlora makes {asked} bits of {BITSANDBYTES} from full "
        "weights; give the folder or Hub id of the full model"
        + (f", or set load_in_8bit: {str(other == 8).lower()}" if method == BITSANDBYTES else "")
    )


# -- which layers ------------------------------------------------------------------------------------------------------


def quantizable_layers(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers of attention and MLP, of a model or its skeleton."""
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
    """What bitsandbytes' integration would replace: exactly these types, no subclasses."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return ((name, module) for name, module in model.named_modules() if type(module) in (nn.Linear, Conv1D))


def _repeated_blocks(model: PreTrainedModel) -> tuple[str, ...]:
    """Prefixes of the lists of layers in the backbone. What lies outside of the backbone is a head."""
    from torch import nn

    backbone = model.base_model
    return tuple(
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(module is inner for inner in backbone.modules())
    )


def is_mamba(module: nn.Module) -> bool:
    """Whether it is the mixer of a state-space layer, by what all families call their parts."""
    return hasattr(module, "A_log") and hasattr(module, "conv1d")


def _read_by_kernels(model: nn.Module) -> Iterator[str]:
    """Projections of state-space mixers whose weight is handed to a kernel or multiplied by hand: all but the first.
    Packed into 4 or 8 bits they have another shape there."""
    from torch import nn

    for name, mixer in model.named_modules():
        if is_mamba(mixer):
            inner = (child for child, module in mixer.named_modules() if isinstance(module, nn.Linear))
            yield from (f"{name}.{child}" for child in inner if not child.startswith("in_proj"))


def quantized_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers whose weights are stored in 4 or 8 bits, by name."""
    return ((name, module) for name, module in model.named_modules() if stored_bits(module) is not None)


def stored_bits(module: nn.Module) -> Optional[int]:
    """4 or 8; None for a module of full precision, adapters' wrappers included."""
    kind = type(getattr(module, "weight", None)).__name__
    is_layer = "weight" in getattr(module, "_parameters", {})  # a wrapper passes its layer's weight on as its own
    return {"Params4bit": 4, "Int8Params": 8}.get(kind) if is_layer else None


def is_of_torchao(weight: torch.Tensor) -> bool:
    """Whether torchao has packed it: it names the type of before, and most of torch's functions do not take it."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(weight) and not hasattr(weight, "to_local")  # which those of FSDP have


def without_torchao(weight: torch.Tensor) -> torch.Tensor:
    """The numbers of ``weight``, also where torchao has packed them."""
    return weight.dequantize() if is_of_torchao(weight) else weight


# -- made ready --------------------------------------------------------------------------------------------------------


def prepare_quantized(model: PreTrainedModel) -> PreTrainedModel:
    """Freeze a model as it was loaded, and keep its weights from being changed by forward passes.

    Weights that are not quantized keep the type they were loaded in: what 4 bits lose is many times what bfloat16
    loses, and embedding and head in float32 would cost as much as is saved on them. Only float16 becomes float32: small
    gradients that pass such a weight would vanish.

    Raises ModelError where the files quantize a weight that a mamba kernel reads.
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
    keep_as_loaded(model)
    return model


def packed_of_another_shape(model: nn.Module) -> list[str]:
    """Names of packed weights that do not have the shape of their layer: transformers compares those that it does not
    pack alone."""
    found = []
    for name, module in quantized_modules(model):
        state = getattr(module.weight, "quant_state", None)
        is_known = state is not None or stored_bits(module) == 8
        shape = tuple(module.weight.shape if state is None else state.shape)
        if is_known and shape != (module.out_features, module.in_features):
            found.append(f"{name}.weight")
    return found


def give_type(model: nn.Module, dtype: torch.dtype) -> None:
    """Where the device has no FP8, transformers unpacks what files hold in it to the type that was asked for, and the
    weights beside it stay bfloat16."""
    import torch

    for parameter in model.parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.to(dtype)


def keep_as_loaded(model: nn.Module) -> None:
    """On CPUs with avx512_bf16 the first evaluation would repack 4-bit weights for a kernel without a backward: from
    then on gradients are wrong, without a word, and saved weights are other ones. Where one was before, this is undone,
    but for the scales: they stay rounded."""
    was_repacked = False
    for _, module in quantized_modules(model):
        if stored_bits(module) == 8:
            continue
        if getattr(module.weight.quant_state, "packing_format_for_cpu", False):
            was_repacked = True
            module.state_dict()  # bitsandbytes unpacks what it saves
        module.support_avx512bf16_for_cpu = False
        if module.bias is not None and module.compute_dtype is not None:
            # The first forward does that; here, so that no forward changes a frozen weight.
            module.bias.data = module.bias.data.to(module.compute_dtype)
    if was_repacked:
        logger.warning(
            "the model was evaluated before, and on this CPU bitsandbytes then rounds the scales of 4-bit weights to "
            "bfloat16; to train on the weights of its files, load the model again and evaluate it after training"
        )


# -- what the user sees ------------------------------------------------------------------------------------------------


def numbers_in(parameter: torch.Tensor) -> int:
    """Weights in a parameter: two 4-bit ones share a byte, and ``numel`` counts bytes."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else math.prod(state.shape)


def stored_bytes(model: PreTrainedModel) -> int:
    """Bytes of all weights with the scales of quantized ones, which ``get_memory_footprint`` leaves out."""
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
    """One line: weights in 4 or 8 bits, weights in full precision by kind, megabytes now and in float32."""
    quantized, full = Counter(), Counter()
    for parameter, module in _parameters_once(model):
        if parameter is module._parameters.get("weight") and stored_bits(module):
            quantized[stored_bits(module)] += numbers_in(parameter)
        else:
            full[_kind(module)] += parameter.numel()
    stored = " and ".join(f"{count:,} weights in {bits} bits" for bits, count in sorted(quantized.items()))
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in full.most_common())
    return (
        f"quantized: {stored}; {full.total():,} as they were ({kinds}); {stored_bytes(model) / 2**20:,.1f} MiB instead "
        f"of {4 * (quantized.total() + full.total()) / 2**20:,.1f} in float32"
    )


def _parameters_once(model: nn.Module) -> Iterator[tuple[torch.Tensor, nn.Module]]:
    """Each parameter with the first module that holds it: tied weights count once."""
    seen: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter, module


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
