"""Models with fake weights, which have shapes but no data: copies of a loaded model, or made from a configuration."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Optional

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from transformers import PretrainedConfig

from scu_trainer.models.checkpointing import checkpoint_every_layer
from scu_trainer.models.loading.adapters import adapter_config, freeze_unselected_weights
from scu_trainer.models.loading.dispatch import loaded_dtype
from scu_trainer.models.loading.names import as_model_error, is_adapter
from scu_trainer.models.quantize import quantizable_layers, quantized_modules, stored_bits, weight_count_of
from scu_trainer.settings import ModelSettings

SCALE_BITS = {(4, True): 8 / 64 + 32 / (64 * 256), (4, False): 32 / 64, (8, True): 0.0, (8, False): 0.0}
"""(bits, whether scales are quantized too) -> additional bits per weight. NF4 has one scale for 64 weights (QLoRA,
arXiv 2305.14314, section 3), in 32 bits, or in 8 bits with a second scale for 256 of them. LLM.int8 has one scale per
row, which is negligible."""


class PackedLinear(nn.Linear):
    """A stand-in for a layer that is stored in 4 or 8 bits: it has as many bytes, and unpacks them for each product.

    ``bits``: per weight, including its scale, see ``SCALE_BITS``. ``compute_dtype``: None for that of the input.
    """

    def __init__(
        self, inputs: int, outputs: int, bias: Optional[nn.Parameter], bits: float, compute_dtype: Optional[torch.dtype]
    ) -> None:
        super(nn.Linear, self).__init__()
        self.in_features, self.out_features = inputs, outputs
        self.compute_dtype, self.bias = compute_dtype, bias
        packed_bytes = math.ceil(inputs * outputs * bits / 8)
        self.weight = nn.Parameter(torch.empty(packed_bytes, dtype=torch.uint8), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        product = _UnpackedProduct.apply(
            hidden.to(self.compute_dtype or hidden.dtype), self.weight, (self.out_features, self.in_features)
        )
        if self.bias is not None:
            product = product + self.bias.to(product.dtype)
        return product.to(hidden.dtype)


class _UnpackedProduct(torch.autograd.Function):
    """A product with an unpacked weight that saves only the packed weight and unpacks it again in backward."""

    @staticmethod
    def forward(ctx, hidden, packed, shape):
        ctx.save_for_backward(packed)
        ctx.shape, ctx.dtype = shape, hidden.dtype
        return hidden @ packed.new_empty(shape, dtype=hidden.dtype).t()

    @staticmethod
    def backward(ctx, gradient):
        (packed,) = ctx.saved_tensors
        return gradient @ packed.new_empty(ctx.shape, dtype=ctx.dtype), None, None


def fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a copy of a loaded ``model``, including all its modifications, with fake weights."""
    with mode:
        stand_ins = {id(module): _stand_in(module) for _, module in quantized_modules(model)}
    with FakeCopyMode(mode):
        copied = copy.deepcopy(model, stand_ins)
    with mode:
        _move_to_cpu(copied)  # stand-ins and inputs are there; quantized models are loaded on a GPU
    return copied


def _stand_in(module: nn.Module) -> PackedLinear:
    bits, bias = stored_bits(module), module.bias
    state = getattr(module.weight, "quant_state", None)
    bits += SCALE_BITS[bits, bool(getattr(state, "nested", False))]
    if bias is not None:
        bias = nn.Parameter(torch.empty(bias.shape, dtype=bias.dtype), requires_grad=bias.requires_grad)
    outputs = module.out_features
    return PackedLinear(
        weight_count_of(module.weight) // outputs, outputs, bias, bits, getattr(module, "compute_dtype", None)
    )


def model_from_configuration(
    config: PretrainedConfig,
    settings: ModelSettings,
    mode: FakeTensorMode,
    *,
    compute_dtype: torch.dtype,
    is_checkpointed: bool,
) -> nn.Module:
    """Return the causal language model of ``config`` with fake weights, prepared for the tuning in ``settings``.

    No weights are read. ``compute_dtype``: type in which layers that are stored in 4 bits compute. Raises ModelError if
    ``config`` is not that of a causal language model, or if the model does not support this tuning.
    """
    from transformers import AutoModelForCausalLM

    name = settings.model_name_or_path or "the embedded model"
    with torch.device("meta"):  # not in ``mode``: peft moves adapters, which fake tensors do not allow
        with as_model_error(name, "model"):
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),  # from_config writes the dtype into it
                dtype=loaded_dtype(settings, config),
                trust_remote_code=settings.trust_remote_code,
                attn_implementation=settings.attn_implementation,
            )
        if settings.tuning == "qlora":
            _replace_quantized_layers(model, settings, compute_dtype)
        model = _prepared_for_tuning(model, settings)
    if is_checkpointed:
        checkpoint_every_layer(model)
    with mode:
        _move_to_cpu(model)
    return model


def _move_to_cpu(model: nn.Module) -> None:
    """Replace weights on other devices by fake ones on the CPU, because autocast ignores tensors on the meta device."""
    replacements: dict[torch.Tensor, torch.Tensor] = {}

    def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return tensor
        if tensor not in replacements:  # tied weights stay tied
            copied = torch.empty(tensor.shape, dtype=tensor.dtype)
            is_weight = isinstance(tensor, nn.Parameter)
            replacements[tensor] = nn.Parameter(copied, requires_grad=tensor.requires_grad) if is_weight else copied
        return replacements[tensor]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: on_cpu(tensor) for name, tensor in tensors.items() if tensor is not None})


def _replace_quantized_layers(model: nn.Module, settings: ModelSettings, compute_dtype: torch.dtype) -> None:
    bits = 8 if settings.load_in_8bit else 4
    stored = bits + SCALE_BITS[bits, settings.bnb_4bit_use_double_quant]
    for name in quantizable_layers(model):
        layer = model.get_submodule(name)
        outputs, inputs = layer.weight.shape if isinstance(layer, nn.Linear) else reversed(layer.weight.shape)
        packed = PackedLinear(inputs, outputs, layer.bias, stored, compute_dtype if bits == 4 else None)
        model.set_submodule(name, packed)
    model.requires_grad_(False)
    for parameter in model.parameters():  # as ``prepare_quantized`` does
        if parameter.dtype == torch.float16:
            parameter.data = parameter.data.float()


def _prepared_for_tuning(model: nn.Module, settings: ModelSettings) -> nn.Module:
    if settings.tuning == "full":
        return freeze_unselected_weights(model, settings)
    from peft import PeftConfig, get_peft_model

    adapter = Path(settings.model_name_or_path or "").expanduser()
    if is_adapter(adapter):
        saved = PeftConfig.from_pretrained(str(adapter))  # only its configuration, no weights
        saved.inference_mode = False  # saved adapters are frozen by default
        return get_peft_model(model, saved)
    config = adapter_config(model, replace(settings, init_lora_weights="true"))  # no weights are read
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # as ``prepare_for_tuning`` does
        return get_peft_model(model, config)
