"""The attn_implementation "torch_varlen": torch's own kernel for rows of different lengths, which needs no package.

It is for contenders that lay rows end to end when flash attention is not installed. With "sdpa" they would need a mask
of tokens x tokens, which would make the comparison unfair. Ours uses the same kernel. Importing this module registers
it. The kernel needs half precision, a GPU of the Ampere generation or newer, and ``cu_seq_lens_q`` and ``max_length_q``
among the model inputs, as TRL's collator provides them. Without them (one whole row) it is plain causal attention.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from scu_trainer.train.loss.rows.padding_free import cast_to_autocast_type, varlen_kernel

NAME = "torch_varlen"


def _attention(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    cu_seq_lens_q=None,
    max_length_q=None,
    **others,
) -> tuple[torch.Tensor, None]:
    """Compute attention. Shapes: query (1, heads, tokens, size), key and value (1, their heads, tokens, size), result
    (1, tokens, heads, size)."""
    query, key, value = cast_to_autocast_type(query, key, value)
    if cu_seq_lens_q is None:
        made = scaled_dot_product_attention(
            query, key, value, is_causal=query.size(2) > 1, scale=scaling, enable_gqa=query.size(1) != key.size(1)
        )
        return made.transpose(1, 2), None
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    borders, longest = cu_seq_lens_q.to(query.device, torch.int32), int(max_length_q)
    made = varlen_kernel()(query, key, value, borders, borders, longest, longest, scale=scaling)
    return made.unsqueeze(0), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)
