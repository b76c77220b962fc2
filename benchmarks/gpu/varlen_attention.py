"""attn_implementation "torch_varlen": torch's own kernel for rows of unequal length, which needs no package.

For contenders that lay rows end to end, where flash attention is not installed: "sdpa" would hold a mask of tokens x
tokens for them, and to win over that is no win. The kernel is the one that ours takes. Importing this registers it.
It wants half precision and a card from Ampere on, ``cu_seq_lens_q`` and ``max_length_q`` among the model's inputs, as
TRL's collator makes them; without them (one whole row) it is plain causal attention.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from scu_trainer.train.loss.rows.padding_free import in_one_type, varlen_kernel

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
    """query (1, heads, tokens, size), key and value (1, their heads, tokens, size) -> (1, tokens, heads, size)."""
    query, key, value = in_one_type(query, key, value)
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
