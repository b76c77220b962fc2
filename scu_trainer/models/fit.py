"""Do a model, its tokenizer and the rows belong together? Asked before the first forward pass, which would fail
obscurely."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

from scu_trainer.errors import ModelError, SettingsError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def require_fit(model: PreTrainedModel, name: str, token_count: int, longest_row: int) -> None:
    """Raise ModelError or SettingsError unless ``model`` embeds ``token_count`` tokens and ``longest_row``
    positions."""
    rows = embedding_rows(model)
    if rows is not None and token_count > rows:
        raise ModelError(
            f"the tokenizer has {token_count} tokens, the embedding of {name} has {rows} rows; use the "
            f"tokenizer that belongs to the model"
        )
    require_positions(model, name, longest_row)


def require_positions(model: nn.Module, name: str, longest_row: int) -> None:
    """Raise SettingsError where ``model`` reads no ``longest_row`` tokens at once."""
    positions = positions_of(model)
    if positions is not None and longest_row > positions:
        raise SettingsError(
            f"rows of {longest_row} tokens exceed the {positions} positions of {name}; use --block_size {positions} "
            "or less"
        )


def positions_of(model: nn.Module) -> Optional[int]:
    """Tokens that it can read at once; None where its config has no limit. Learned prompts take positions too."""
    config = getattr(model.config, "text_config", model.config)
    positions = getattr(config, "max_position_embeddings", None)
    prompt = getattr(getattr(model, "active_peft_config", None), "num_virtual_tokens", None) or 0
    return None if positions is None else positions - prompt


def embedding_rows(model: PreTrainedModel) -> Optional[int]:
    """Tokens that it embeds; None for a model without an embedding of tokens, or where it is cut into shards."""
    embedding = model.get_input_embeddings()
    embedding = getattr(embedding, "original_module", embedding)  # peft's wrapper of rows or copies that are trained
    return getattr(embedding, "num_embeddings", None)
