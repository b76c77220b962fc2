"""CADENCE: a recurrent language model over words that is conditioned on the category of its text.

    word embedding ─┐
                    ├─▶ GRU layers ─▶ projection ─▶ word scores (by default through the word embedding itself)
    category ───────┘

This file imports only torch and transformers: it is saved with a pushed model, which then loads without this package.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Optional

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_outputs import ModelOutput
from transformers.utils import can_return_tuple

UNKNOWN_CATEGORY = "<unknown>"
"""Category 0, for text without a category and for categories that were not in the training data."""


CATEGORY_RANGE = 0.5
"""Standard deviation of the initial category embedding."""


class CadenceConfig(PretrainedConfig):
    """Sizes of a CADENCE model.

    ``category_names`` are the names by category id; the first one is that of an unknown category. ``dropout`` acts
    before, between and after the GRU layers. ``category_dropout`` is the share of training rows with their category
    hidden, so that the model can also write without one. ``tie_word_embeddings`` uses the word embedding as the output
    matrix as well (Press and Wolf, 2017, arXiv:1608.05859); ``projection`` maps the hidden to the embedding size.
    """

    model_type = "cadence"
    keys_to_ignore_at_inference = ["state"]  # noqa: RUF012 - read by transformers

    vocab_size: int = 10_000
    category_names: list[str] = field(default_factory=lambda: [UNKNOWN_CATEGORY])
    embedding_size: int = 128
    category_embedding_size: int = 64
    hidden_size: int = 256
    num_hidden_layers: int = 1
    dropout: float = 0.2
    category_dropout: float = 0.1
    initializer_range: float = 0.05
    tie_word_embeddings: bool = True
    bos_token_id: Optional[int] = None
    eos_token_id: Optional[int] = None
    pad_token_id: Optional[int] = None


@dataclass
class CadenceOutput(ModelOutput):
    """``logits`` (rows, time, words), and ``state`` (layers, rows, hidden), the recurrent state of each row.
    ``last_hidden_state`` (rows, time, hidden) is the output of the model without a head."""

    loss: Optional[Tensor] = None
    logits: Optional[Tensor] = None
    state: Optional[Tensor] = None
    last_hidden_state: Optional[Tensor] = None


class CategoryEmbedding(nn.Embedding):
    """The category embedding, a separate class because it is initialized differently. Word embeddings start small,
    because they are also output weights; categories that small would have no effect for many steps."""


class CadencePreTrainedModel(PreTrainedModel):
    config_class = CadenceConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _input_embed_layer = "words"
    _is_stateful = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, CategoryEmbedding):
            init.normal_(module.weight, std=CATEGORY_RANGE)
            return
        super()._init_weights(module)
        if isinstance(module, nn.GRU):
            bound = module.hidden_size**-0.5
            for weight in module.parameters():
                init.uniform_(weight, -bound, bound)


class CadenceModel(CadencePreTrainedModel):
    """The model without a head: it maps words and a category to hidden states."""

    def __init__(self, config: CadenceConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.embedding_size)
        self.categories = CategoryEmbedding(len(config.category_names), config.category_embedding_size)
        sizes = [config.embedding_size + config.category_embedding_size]
        sizes += [config.hidden_size] * config.num_hidden_layers
        # One module per layer, so that each can be checkpointed on its own and gives its state at every word.
        self.layers = nn.ModuleList(nn.GRU(before, after, batch_first=True) for before, after in pairwise(sizes))
        self.dropout = nn.Dropout(config.dropout)
        self.post_init()

    def checkpoint_blocks(self) -> list[nn.Module]:
        """Return the blocks that activation checkpointing may recompute in backward."""
        return list(self.layers)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        category_ids: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        state: Optional[Tensor] = None,
        use_cache: Optional[bool] = None,
        **_: Any,
    ) -> CadenceOutput:
        """Compute the hidden states of each row. Shapes: input_ids and attention_mask (rows, time); category_ids
        (rows,), 0 if None; state (layers, rows, hidden). Padding may be on either side, and padded positions change no
        state. ``use_cache`` returns the state after the last word of each row (default: not in training mode)."""
        order = _words_first(attention_mask)
        hidden = self.dropout(self._embed(input_ids if order is None else input_ids.gather(1, order), category_ids))
        if state is None:
            state = hidden.new_zeros(len(self.layers), len(hidden), self.config.hidden_size)
        keeps_state = not self.training if use_cache is None else use_cache
        states = []
        for layer, before in zip(self.layers, state, strict=True):
            hidden = _run_layer(layer, hidden, before)
            if keeps_state:
                states.append(_state_after(hidden, before, attention_mask))
            hidden = self.dropout(hidden)
        if order is not None:
            hidden = hidden.gather(1, order.argsort(1)[..., None].expand_as(hidden))
        return CadenceOutput(last_hidden_state=hidden, state=torch.stack(states) if keeps_state else None)

    def _embed(self, input_ids: Tensor, category_ids: Optional[Tensor]) -> Tensor:
        """Return the embeddings of words and category, (rows, time, embedding + category embedding)."""
        words = self.words(input_ids)
        if category_ids is None:
            category_ids = input_ids.new_zeros(len(input_ids))
        if self.training and self.config.category_dropout:
            is_hidden = torch.rand(category_ids.shape, device=category_ids.device) < self.config.category_dropout
            category_ids = category_ids.masked_fill(is_hidden, 0)
        categories = self.categories(category_ids)[:, None].expand(-1, words.size(1), -1)
        return torch.cat([words, categories], dim=-1)


def _run_layer(layer: nn.GRU, hidden: Tensor, before: Tensor) -> Tensor:
    """Return the outputs (rows, time, hidden) of one layer that starts in the state ``before`` (rows, hidden)."""
    weight = layer.weight_hh_l0
    # On a CPU, the many small products of a recurrence are slower in 16 bits than in 32.
    on_cpu = hidden.device.type == "cpu"
    with torch.autocast("cpu", enabled=False) if on_cpu else contextlib.nullcontext():
        if on_cpu:
            hidden, before = hidden.to(weight.dtype), before.to(weight.dtype)
        return layer(hidden, before[None].to(hidden.dtype).contiguous())[0]


def _words_first(attention_mask: Optional[Tensor]) -> Optional[Tensor]:
    """Return the order (rows, time) that puts the words of each row before its padding; None if they already are."""
    if attention_mask is None or not bool((attention_mask[:, 1:] > attention_mask[:, :-1]).any()):
        return None
    return attention_mask.ne(0).to(torch.uint8).argsort(dim=1, descending=True, stable=True)


def _state_after(hidden: Tensor, before: Tensor, attention_mask: Optional[Tensor]) -> Tensor:
    """Return the state (rows, hidden) after the last word of each row; for a row without words, the state before."""
    if attention_mask is None:
        return hidden[:, -1]
    lengths = attention_mask.ne(0).sum(dim=1)
    states = torch.cat([before[:, None].to(hidden.dtype), hidden], dim=1)
    return states[torch.arange(len(hidden), device=hidden.device), lengths]


class CadenceForCausalLM(CadencePreTrainedModel, GenerationMixin):
    """The language model, with a head for the logits of the next word."""

    _tied_weights_keys = {"lm_head.weight": "model.words.weight"}  # noqa: RUF012 - read by transformers

    def __init__(self, config: CadenceConfig) -> None:
        super().__init__(config)
        self.model = CadenceModel(config)
        self.projection = nn.Linear(config.hidden_size, config.embedding_size)
        self.lm_head = nn.Linear(config.embedding_size, config.vocab_size)
        if config.tie_word_embeddings:  # otherwise the Trainer warns on every resume that lm_head.weight is missing
            self._keys_to_ignore_on_save = ["lm_head.weight"]
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        category_ids: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        labels: Optional[Tensor] = None,
        state: Optional[Tensor] = None,
        use_cache: Optional[bool] = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CadenceOutput:
        """Compute logits, and the loss if ``labels`` are given; other arguments are those of ``CadenceModel``. labels
        (rows, time) are word ids, -100 for positions that are not learned; each word is predicted from those before it.
        ``logits_to_keep`` limits the logits to that many last positions; 0 keeps all."""
        outputs = self.model(input_ids, category_ids, attention_mask, state, use_cache)
        logits = self.lm_head(self.projection(outputs.last_hidden_state[:, -logits_to_keep:]))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CadenceOutput(loss=loss, logits=logits, state=outputs.state)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        state: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        category_ids: Optional[Tensor] = None,
        use_cache: Optional[bool] = True,
        **_: Any,
    ) -> dict[str, Any]:
        """Return the inputs of the next step; with a state, the model reads only the newest word."""
        if state is not None:
            input_ids = input_ids[:, -1:]
            attention_mask = None if attention_mask is None else attention_mask[:, -1:]
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "category_ids": category_ids,
            "state": state,
            "use_cache": use_cache,
        }

    def _update_model_kwargs_for_generation(
        self, outputs: CadenceOutput, model_kwargs: dict[str, Any], *others: Any, **more: Any
    ) -> dict[str, Any]:
        """Pass the state on, as transformers does only up to 5.23; otherwise each step would read all words again."""
        if "state" in outputs:
            model_kwargs["state"] = outputs.state
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, *others, **more)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the cache is the state

    @staticmethod
    def _reorder_cache(state: Tensor, beams: Tensor) -> Tensor:
        return state.index_select(1, beams.to(state.device))


AutoConfig.register(CadenceConfig.model_type, CadenceConfig, exist_ok=True)
AutoModel.register(CadenceConfig, CadenceModel, exist_ok=True)
AutoModelForCausalLM.register(CadenceConfig, CadenceForCausalLM, exist_ok=True)
CadenceConfig.register_for_auto_class()
CadenceModel.register_for_auto_class("AutoModel")
CadenceForCausalLM.register_for_auto_class("AutoModelForCausalLM")
