"""Models of the usual sizes for fine-tuning, with random weights, and their number of operations.

The sizes are those of the public configurations of Llama 3.2 1B and 3B and Llama 3 8B. Nothing is downloaded. The
weights are drawn on the device, in the type that the tuning needs, without a float32 copy.

    lora    weights in bfloat16, frozen; adapters in float32
    qlora   linear layers of the blocks packed into NF4 (scales quantized too), the rest in bfloat16, frozen; adapters
            in float32
    full    weights in float32 under bf16 autocast, or in bfloat16 altogether where ``full_dtype`` says so
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.lib.memory_work import PAD
from scu_trainer.models.quantize import meta_model, prepare_quantized, quantization_config
from scu_trainer.settings import ModelSettings
from scu_trainer.train.loops.flops import count_flops

TUNINGS = ("lora", "qlora", "full")


@dataclass(frozen=True)
class CardShape:
    """The configuration of a Llama. ``attention``: None is the default of the library, sdpa."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    is_tied: bool
    longest_row: int = 2048
    tuning: str = "lora"
    full_dtype: str = "float32"
    device: str = "cuda"
    attention: Optional[str] = None
    weight_std: float = 0.02

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            tie_word_embeddings=self.is_tied,
            max_position_embeddings=self.longest_row,
            rms_norm_eps=1e-5,
            initializer_range=self.weight_std,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=PAD,
        )

    def model(self) -> LlamaForCausalLM:
        """Create the model on the device, with the same weights at each call."""
        torch.manual_seed(0)
        with torch.device(self.device):
            model = LlamaForCausalLM._from_config(
                self.config(), dtype=self.dtype, attn_implementation=self.attention or "sdpa"
            )
        return self._packed(model) if self.tuning == "qlora" else model

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.full_dtype) if self.tuning == "full" else torch.bfloat16

    def _packed(self, model: LlamaForCausalLM) -> LlamaForCausalLM:
        """Quantize the weights to 4 bits, by loading them from a folder, and prepare them as our commands do."""
        settings = ModelSettings(tuning="qlora", mixed_precision="bf16")
        packing = quantization_config(settings, meta_model(self.config()), torch.device(self.device))
        packed = LlamaForCausalLM.from_pretrained(
            None,
            config=self.config(),
            state_dict=model.state_dict(),
            quantization_config=packing,
            dtype=torch.bfloat16,
            attn_implementation=self.attention or "sdpa",
            device_map={"": self.device},
        )
        return prepare_quantized(packed)


SHAPES = {
    "1b": CardShape(128_256, 2048, 8192, layers=16, heads=32, kv_heads=8, is_tied=True),
    "3b": CardShape(128_256, 3072, 8192, layers=28, heads=24, kv_heads=8, is_tied=True),
    "8b": CardShape(128_256, 4096, 14_336, layers=32, heads=32, kv_heads=8, is_tied=False),
    "tiny": CardShape(512, 64, 128, layers=2, heads=4, kv_heads=2, is_tied=True, longest_row=64, weight_std=0.1),
}
"""``tiny`` is for test runs. Its weights are large, so that adapters below a frozen head can learn something."""


# -- arithmetic --------------------------------------------------------------------------------------------------------

COUNTED_LENGTHS = (64, 128)
COUNTED_LAYERS = (2, 3)
"""Numbers of layers that are counted. The backward of the first layer is shorter if the embeddings are frozen; the
second layer is like all that follow."""


def model_flops(shape: CardShape, adapted: Any, lengths: list[int]) -> float:
    """Return the operations of forward and backward of rows of ``lengths``, counted with ``count_flops``.

    They are counted on the meta device, in the same way for all contenders: without padding and recomputation, and
    without the savings of a causal mask. The count of a row is a x length + c x length², and is linear in the number of
    layers from the second on, so four counts determine it. ``adapted`` adds the adapters of the job to a model.
    """
    per_row = [[_counted(shape, adapted, layers, length) for layers in COUNTED_LAYERS] for length in COUNTED_LENGTHS]
    more_layers = shape.layers - COUNTED_LAYERS[0]
    short, long = (few + more_layers * (more - few) for few, more in per_row)
    one, two = COUNTED_LENGTHS
    squared = (long / two - short / one) / (two - one)
    linear = short / one - squared * one
    return sum(linear * length + squared * length**2 for length in lengths)


def _counted(shape: CardShape, adapted: Any, layers: int, length: int) -> float:
    with torch.device("meta"):
        config = replace(shape, layers=layers).config()
        model = adapted(LlamaForCausalLM._from_config(config, dtype=torch.bfloat16))
        ids = torch.zeros(1, length, dtype=torch.long)
    count, reason = count_flops(_OnMeta(model), {"input_ids": ids, "labels": ids}, None)
    if count is None:
        raise RuntimeError(f"the operations of {shape} cannot be counted: {reason}")
    return count.flops


class _OnMeta:
    """The attributes of a trainer that ``count_flops`` uses."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def compute_loss(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return model(**inputs).loss
