"""The architecture of Granite 4.0 H 1B, and the same at less width, without its weights."""

from __future__ import annotations

from transformers import GraniteMoeHybridConfig

ATTENTION = (5, 15, 25, 35)
"""Layers of attention; the 36 others are mamba2."""


def granite_h_1b(divisor: int = 1, **changes) -> GraniteMoeHybridConfig:
    """Sizes as in the model card and config.json of ibm-granite/granite-4.0-h-1b (read in November 2026): 1.46 billion
    weights. ``divisor``: of the width; numbers of layers, heads and groups stay."""
    options = {
        "vocab_size": 100352,
        "hidden_size": 1536 // divisor,
        "intermediate_size": 4096 // divisor,
        "shared_intermediate_size": 4096 // divisor,
        "num_hidden_layers": 40,
        "layer_types": ["attention" if layer in ATTENTION else "mamba" for layer in range(40)],
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": 48,
        "mamba_d_head": 64 // divisor,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 256,
        "position_embedding_type": "nope",
        "tie_word_embeddings": True,
        "embedding_multiplier": 12,
        "logits_scaling": 6,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0078125,
        "max_position_embeddings": 131072,
        "bos_token_id": 100257,
        "eos_token_id": 100257,
        "pad_token_id": 100256,
        "dtype": "bfloat16",
        "architectures": ["GraniteMoeHybridForCausalLM"],
    }
    return GraniteMoeHybridConfig(**{**options, **changes})
