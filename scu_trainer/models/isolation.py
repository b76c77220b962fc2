"""Do packed documents see each other? Asked of the model itself, because no flag of an architecture tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scu_trainer.errors import ModelError
from scu_trainer.models.loading.offloaded import input_device

if TYPE_CHECKING:
    from torch import nn

TOKENS = 12
TOLERANCE = 1e-3
"""Largest relative change of logits that rounding may cause; a leak changes them by a tenth or more."""


def require_isolation(model: nn.Module, vocab_size: int) -> None:
    """Raise ModelError if the logits of a document change when another stands before it in the same row.

    Position ids restart at each document and no attention mask is given, as the collator does for isolated documents.
    Mamba and other recurrent layers carry their state across, and fail here.
    """
    change = leak(model, vocab_size)
    if change > TOLERANCE:
        raise ModelError(
            f"isolate_documents: {type(model).__name__} lets packed documents see each other (logits change by "
            f"{change:.2g} of their size); set packing: false, or isolate_documents: false to accept it"
        )


def leak(model: nn.Module, vocab_size: int) -> float:
    """Largest change of the second document's logits caused by the first one, relative to their largest size."""
    import torch

    device = input_device(model)
    first = torch.arange(TOKENS, device=device) % vocab_size
    second = (torch.arange(TOKENS, device=device) * 5 + 3) % vocab_size
    positions = torch.arange(TOKENS, device=device)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        # With a key-value cache transformers takes restarting positions for no border at all.
        alone = model(input_ids=second[None], position_ids=positions[None], use_cache=False).logits[0]
        packed, restarting = torch.cat([first, second])[None], positions.repeat(2)[None]
        both = model(input_ids=packed, position_ids=restarting, use_cache=False).logits[0, TOKENS:]
    model.train(was_training)
    return float((alone - both).abs().max() / alone.abs().max().clamp_min(1e-12))
