"""Find out whether documents that are packed into one row see each other: by the configuration, and by a trial run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

from scu_trainer.models.asking import evaluating
from scu_trainer.models.loading.offloaded import input_device

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

TOKENS = 12
TOLERANCE, HALF_TOLERANCE = 1e-5, 2e-2
"""Largest relative change of logits that rounding may cause, in float32 and in 16 bits. Random weights leak by 4e-4 or
more, trained ones by a tenth. In 16 bits not every leak can be measured, so the configuration is checked as well."""

CARRYING = tuple("mamba recurrent linear_attention rwkv ssm conv lstm retention delta jamba lfm2".split())
"""Parts of the names of layers and models that carry a state from one token to the next."""

ALIBI = ("bloom", "mpt")
MEASURED = frozenset(
    "llama mistral mixtral qwen2 qwen3 gemma gemma2 phi3 olmo2 granite stablelm starcoder2 gpt_neox gpt2 "
    "gpt_bigcode".split()
)
"""Model types for which tests/models/test_isolation.py measures that a small model isolates documents. They are used
for models that cannot be run here because their weights are split over ranks."""


def declared_leak(config: PretrainedConfig) -> Optional[str]:
    """Return why packed documents would see each other according to ``config``; None if nothing in it says so."""
    names = [config.model_type, *(getattr(config, "architectures", None) or ())]
    for field in ("layer_types", "layers_block_type", "block_types", "hybrid_override_pattern"):
        value = getattr(config, field, None)
        names += value if isinstance(value, (list, tuple)) else [value]
    if any(isinstance(name, str) and any(part in name.lower() for part in CARRYING) for name in names):
        return "has layers that carry their state along the row"
    if config.model_type in ALIBI or getattr(config, "alibi", False) is True:
        return "uses distances (ALiBi) instead of positions, so documents cannot be separated"
    return None


def isolates(model: nn.Module, vocab_size: int) -> bool:
    """Return whether the logits of a document stay the same when another document precedes it in the row. Position ids
    restart at each document and no attention mask is given, as the collator does for isolated documents."""
    change, is_half = leak(model, vocab_size)
    return change <= (HALF_TOLERANCE if is_half else TOLERANCE)


def has_all_weights(model: nn.Module) -> bool:
    """Return whether this process holds all weights; weights that are split over ranks or on meta give no logits."""
    from transformers.integrations.fsdp import is_fsdp_enabled

    return not is_fsdp_enabled() and not any(
        parameter.is_meta or hasattr(parameter, "ds_id") for parameter in model.parameters()
    )


def leak(model: nn.Module, vocab_size: int) -> tuple[float, bool]:
    """Return the largest change of a second document's logits by the first one, relative to the largest logit, and
    whether the model has 16-bit weights."""
    import torch

    device = input_device(model)
    first = torch.arange(TOKENS, device=device) % vocab_size
    second = (torch.arange(TOKENS, device=device) * 5 + 3) % vocab_size
    positions = torch.arange(TOKENS, device=device)
    with evaluating(model):
        # With a key-value cache, transformers does not take restarting positions for a document boundary.
        alone = model(input_ids=second[None], position_ids=positions[None], use_cache=False).logits[0]
        packed, restarting = torch.cat([first, second])[None], positions.repeat(2)[None]
        both = model(input_ids=packed, position_ids=restarting, use_cache=False).logits[0, TOKENS:]
    is_half = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in model.parameters())
    return float((alone - both).abs().max() / alone.abs().max().clamp_min(1e-12)), is_half
