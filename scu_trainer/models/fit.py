"""Check that a model fits its tokenizer and its rows, before the first forward pass fails with an obscure error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

from scu_trainer.errors import ModelError, SettingsError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def require_fit(model: PreTrainedModel, name: str, token_count: int, longest_row: int) -> None:
    """Raise ModelError if ``model`` embeds fewer than ``token_count`` tokens, and as ``require_positions`` does."""
    rows = embedding_rows(model)
    if rows is not None and token_count > rows:
        raise ModelError(
            f"the tokenizer has {token_count} tokens, but the embedding of {name} has {rows} rows; use the "
            f"tokenizer that belongs to the model"
        )
    require_positions(model, name, longest_row)


def require_positions(model: nn.Module, name: str, longest_row: int) -> None:
    """Raise SettingsError if ``model`` cannot read ``longest_row`` tokens at once."""
    positions = max_positions_of(model)
    if positions is not None and longest_row > positions:
        raise SettingsError(
            f"rows of {longest_row} tokens exceed the {positions} positions of {name}; use --block_size {positions} "
            "or less"
        )


def max_positions_of(model: nn.Module) -> Optional[int]:
    """Return how many tokens ``model`` can read at once, less those of a learned prompt; None without a limit."""
    config = getattr(model.config, "text_config", model.config)
    positions = getattr(config, "max_position_embeddings", None)
    prompt = getattr(getattr(model, "active_peft_config", None), "num_virtual_tokens", None) or 0
    return None if positions is None else positions - prompt


def embedding_rows(model: PreTrainedModel) -> Optional[int]:
    """Return how many tokens ``model`` embeds; None without a token embedding, or if it is sharded."""
    embedding = model.get_input_embeddings()
    embedding = getattr(embedding, "original_module", embedding)  # inside peft's wrapper, if it is trained
    return getattr(embedding, "num_embeddings", None)
