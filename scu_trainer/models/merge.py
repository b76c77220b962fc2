"""Merge an adapter into the weights of its base: a plain model with the outputs of base and adapter together.

A quantized base is dequantized first and not quantized again, because rounding the sum to 4 bits would lose most of
what the adapter learned. All sums are computed in float32.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from scu_trainer.errors import ModelError
from scu_trainer.models.asking import evaluating, exact_products
from scu_trainer.models.quantize import dequantized_by_torchao, quantized_modules, stored_bits

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel

USE_UNMERGED = "use it as it is: chat, generate, eval and serve take it, and so does peft's AutoPeftModelForCausalLM"

MERGE_TOLERANCE = {"float32": 1e-5, "float16": 0.01, "bfloat16": 0.05, "8-bit": 0.1}
"""Largest allowed difference of logits between adapter and merged model, relative to the largest logit, by the least
precise dtype in either. Measured were 1e-6, 0.002, 0.016 and 0.04, and deeper models add up more. With "8-bit",
bitsandbytes rounds the activations too, which the merged model does not."""


def merge_adapter(model: PeftModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a new model on the CPU, in ``dtype``, with the adapter merged into its weights; ``model`` does not change.

    Needs memory for two float32 copies of the weights. Raises ModelError for several active adapters, for an adapter
    that changes no weights, and for weights that are not finite, that ``device_map`` has offloaded, or that
    bitsandbytes repacked during an evaluation outside of this project.
    """
    import torch
    from peft import get_peft_model_state_dict

    name = _only_adapter(model)
    _require_loaded(model)
    base = model.get_base_model()
    full = _loaded_from_state(base, dict(_full_state(base)), torch.float32)
    adapter = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    merged = _merged(full, model.peft_config[name], adapter)
    merged = merged if dtype == torch.float32 else _loaded_from_state(merged, merged.state_dict(), dtype)
    merged.generation_config = copy.deepcopy(getattr(base, "generation_config", None))
    return merged.train(model.training)


def full_weights(model: nn.Module, dtype: torch.dtype) -> PreTrainedModel:
    """Return ``model`` in ``dtype`` with any adapter merged (see ``merge_adapter``); ``model`` itself if it already is.
    Raises ModelError for a model without adapter that is packed into 4 or 8 bits."""
    if hasattr(model, "peft_config"):
        return merge_adapter(model, dtype)
    if any(stored_bits(module) is not None for module in model.modules()):
        raise ModelError(
            "the weights of this model are packed into 4 or 8 bits; give the model that it was packed from"
        )
    return model if model.dtype == dtype else _loaded_from_state(model, model.state_dict(), dtype)


def _only_adapter(model: PeftModel) -> str:
    active = list(model.active_adapters)
    if len(active) != 1:
        raise ModelError(f"merging takes one adapter, but {len(active)} are active: {', '.join(active)}; activate one")
    config = model.peft_config[active[0]]
    if config.is_prompt_learning or not hasattr(model.base_model, "merge_and_unload"):
        raise ModelError(
            f"an adapter of {config.peft_type.value} puts learned states before the input and changes no weight, so it "
            f"cannot be merged or exported; {USE_UNMERGED}"
        )
    return active[0]


def _require_loaded(model: PeftModel) -> None:
    offloaded = [weight for weight in model.parameters() if weight.is_meta]
    if offloaded:
        raise ModelError(
            f"merging reads all weights, but {len(offloaded)} of this model are offloaded by device_map; load base and "
            "adapter without device_map and merge them"
        )


def _merged(full: PreTrainedModel, config, adapter: dict[str, torch.Tensor]) -> PreTrainedModel:
    from peft import PeftModel, set_peft_model_state_dict

    with warnings.catch_warnings():
        # Some full weights are transposed and the packed ones were not; peft corrects fan_in_fan_out and warns.
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
        config = copy.deepcopy(config)
        # This base already has the changes of init_lora_weights and the repeated layers.
        for name, done in (("init_lora_weights", True), ("layer_replication", None)):
            if hasattr(config, name):
                setattr(config, name, done)
        wrapped = PeftModel(full, config)
    report = set_peft_model_state_dict(wrapped, adapter)
    if report.unexpected_keys:
        raise ModelError(f"the adapter does not fit its base: {report.unexpected_keys[0]} is not in it")
    _untie(full)
    try:
        return wrapped.merge_and_unload(safe_merge=True)
    except ValueError as error:  # NaN or infinite
        raise ModelError(f"the adapter cannot be merged: {error}; use an earlier checkpoint") from error
    except RuntimeError as error:
        # For kinds that cannot be merged, peft's message has "merg" in it, or it raises a bare NotImplementedError.
        if "merg" not in str(error) and not isinstance(error, NotImplementedError):
            raise
        reason = str(error).rstrip(".") or "peft does not merge this kind"
        kind = config.peft_type.value
        raise ModelError(f"an adapter of {kind} cannot be merged or exported: {reason}; {USE_UNMERGED}") from error


def _untie(full: PreTrainedModel) -> None:
    """Untie embedding and head if an adapter acts on one of them: merged into a shared weight, it would change both."""
    import torch
    from peft.tuners.trainable_tokens import TrainableTokensLayer  # peft changes the rows of both
    from peft.tuners.tuners_utils import BaseTunerLayer

    if full.get_output_embeddings() is None:  # not every classifier has an embedding
        return
    ends = full.get_input_embeddings(), full.get_output_embeddings()
    changes_one = any(isinstance(end, BaseTunerLayer) and not isinstance(end, TrainableTokensLayer) for end in ends)
    embedding, head = (end.get_base_layer() if isinstance(end, BaseTunerLayer) else end for end in ends)
    if changes_one and head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        for config in (full.config, full.config.get_text_config()):
            config.tie_word_embeddings = False


def _loaded_from_state(like: PreTrainedModel, state: dict[str, torch.Tensor], dtype: torch.dtype) -> PreTrainedModel:
    """Return a model of the class and config of ``like`` with these weights, made by ``from_pretrained``. So tied
    weights are tied, and what the architecture keeps in float32 (position buffers, some layers) stays there."""
    config = copy.deepcopy(like.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model, report = type(like).from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
    )
    wrong = sorted({*report["missing_keys"], *report["unexpected_keys"], *map(str, report["mismatched_keys"])})
    if wrong:
        raise ModelError(f"{type(like).__name__} cannot be written as full weights: {wrong[0]} has no counterpart")
    return model


# -- the base without adapters and without packing ---------------------------------------------------------------------


def _full_state(base: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and a float32 copy of every weight of the base, as if it had never been wrapped or quantized."""
    import torch

    with torch.device("meta"):
        names = list(type(base)(copy.deepcopy(base.config)).state_dict())
    for name in names:
        path, _, leaf = name.rpartition(".")
        tensor = _full_tensor(name, _base_module(base, path), leaf)
        yield name, tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)


def _base_module(base: nn.Module, path: str) -> nn.Module:
    """Return the base module at ``path``, inside the wrappers of peft."""
    module = base
    for part in filter(None, path.split(".")):
        module = _unwrapped(getattr(module, part))
    return module


def _unwrapped(module: nn.Module) -> nn.Module:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if isinstance(module, BaseTunerLayer):
        return module.get_base_layer()
    return module.original_module if isinstance(module, AuxiliaryTrainingWrapper) else module


def _full_tensor(name: str, module: nn.Module, leaf: str) -> torch.Tensor:
    bits = stored_bits(module) if leaf == "weight" else None
    if bits is None:
        return dequantized_by_torchao(getattr(module, leaf))
    from transformers.pytorch_utils import Conv1D

    weight = _unpacked_4bit(name, module.weight) if bits == 4 else _unpacked_8bit(module)
    # GPT-2's layers (Conv1D) store the transposed weight.
    return weight.T if getattr(module, "source_cls", None) is Conv1D else weight


def _unpacked_4bit(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return the weight in float32, whatever dtype it had before it was packed."""
    import torch
    from bitsandbytes.functional import dequantize_4bit

    state = copy.copy(weight.quant_state)
    if getattr(state, "packing_format_for_cpu", False):
        raise ModelError(
            f"{name} was repacked by bitsandbytes when the model was evaluated on this CPU, and cannot be read back "
            "exactly; load the model again with load_for_evaluation, which prevents that"
        )
    state.dtype = torch.float32
    return dequantize_4bit(weight.data, state)


def _unpacked_8bit(module: nn.Module) -> torch.Tensor:
    from bitsandbytes.functional import int8_vectorwise_dequant

    scales = module.state.SCB if module.state.SCB is not None else module.weight.SCB
    return int8_vectorwise_dequant(module.weight.data, scales)


# -- comparing logits --------------------------------------------------------------------------------------------------


def merge_tolerance(adapter_model: nn.Module, dtype: torch.dtype) -> float:
    """Return the largest allowed result of ``check_merge`` for a model that is merged into ``dtype``."""
    layers = [layer for _, layer in quantized_modules(adapter_model)]
    if any(stored_bits(layer) == 8 for layer in layers):
        return MERGE_TOLERANCE["8-bit"]
    weights = {parameter.dtype for parameter in adapter_model.parameters()}
    types = {dtype, *weights, *(layer.compute_dtype for layer in layers)}
    names = {str(item).removeprefix("torch.") for item in types}
    return max(MERGE_TOLERANCE[name] for name in names if name in MERGE_TOLERANCE)


def check_merge(adapter_model: nn.Module, merged: nn.Module, inputs: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference of the logits, divided by the largest logit, with both models in evaluation mode.
    ``inputs`` are the models' inputs by name; padding (attention_mask 0) is not compared. Compare the result with
    ``merge_tolerance``; it is NaN, which no tolerance allows, if any logits are not finite."""
    return relative_difference(logits_of(adapter_model, inputs), logits_of(merged, inputs), inputs)


def relative_difference(expected: torch.Tensor, found: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference of logits, divided by the largest ``expected`` one; padding is left out."""
    mask = inputs.get("attention_mask")
    if mask is not None:
        expected, found = expected[mask.cpu().bool()], found[mask.cpu().bool()]
    return float((found - expected).abs().max() / expected.abs().max())


def logits_of(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits of ``model`` in evaluation mode, as float32 on the CPU."""
    device = next(model.parameters()).device
    with evaluating(model), exact_products(model):
        return model(**{name: value.to(device) for name, value in inputs.items()}).logits.float().cpu()
