"""The small base model that needs no download: a Granite hybrid with one attention layer among mamba2 layers, built
like Granite-4.0-H; ``train/fixtures/base_model.py`` makes its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import GraniteMoeHybridConfig

HIDDEN = 128
MAMBA_HEAD = 32
ATTENTION_HEADS = 4
EXPAND = 2
LAYERS = ("mamba", "mamba", "attention", "mamba")


def base_config(vocab_size: int, bos: int, eos: int, pad: int) -> GraniteMoeHybridConfig:
    """Return its configuration, for about 1.2 million weights; special tokens are given by id."""
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        shared_intermediate_size=3 * HIDDEN,
        num_hidden_layers=len(LAYERS),
        layer_types=list(LAYERS),
        num_attention_heads=ATTENTION_HEADS,
        num_key_value_heads=2,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=EXPAND * HIDDEN // MAMBA_HEAD,
        mamba_d_head=MAMBA_HEAD,
        mamba_expand=EXPAND,
        mamba_d_state=32,
        mamba_chunk_size=64,
        mamba_n_groups=1,
        position_embedding_type=None,
        tie_word_embeddings=True,
        # Granite's multipliers are tuned for its own widths; 1 and 1/sqrt(head) are the plain transformer's.
        embedding_multiplier=1.0,
        logits_scaling=1.0,
        residual_multiplier=1.0,
        attention_multiplier=(HIDDEN // ATTENTION_HEADS) ** -0.5,
        max_position_embeddings=4096,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    )
