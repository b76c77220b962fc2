"""Prompts from held-out rows, and a model's greedy answers to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import nn
from transformers import GenerationConfig

from scu_trainer.data.text.chat import special_ids
from scu_trainer.data.text.encode import NOT_LEARNED
from scu_trainer.models.loading.offloaded import input_device

TEXT_PROMPT_TOKENS = 32

ONE_ANSWER = {"num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False, "penalty_alpha": 0.0}
"""Overrides of a generation config that may ask for several answers, beam search or contrastive search."""


@dataclass(frozen=True)
class Prompt:
    """``row``: number of the held-out row. ``token_ids``: the prompt. ``reference_ids``: what follows it in the row."""

    row: int
    token_ids: tuple[int, ...]
    reference_ids: tuple[int, ...]


def spread_prompts(rows: Any, count: int, most_tokens: int) -> list[Prompt]:
    """Return up to ``count`` prompts, evenly spread over ``rows``.

    ``rows``: a sequence of mappings with ``input_ids`` and optionally ``labels``. The prompt of a row ends before its
    first learned token; a text that is learned completely gives its first half, at most 32 tokens. Rows with a prompt
    of more than ``most_tokens`` tokens, and rows without a learned token, are left out.
    """
    prompts: dict[int, Prompt] = {}
    for number in range(4 * count):  # more than needed, because some are too long and some belong to the same text
        row = _first_row_of_text(rows, number * len(rows) // (4 * count))
        prompt = None if row in prompts else _prompt_from_row(rows[row], row)
        if prompt is not None and len(prompt.token_ids) <= most_tokens:
            prompts[row] = prompt
    kept = list(prompts.values())
    return [kept[index * len(kept) // count] for index in range(count)] if len(kept) > count else kept


def _first_row_of_text(rows: Any, row: int) -> int:
    """Return the first row of the text in ``row``, because a text that is longer than a row continues in the next."""
    while row and "document" in rows[row] and rows[row]["document"] == rows[row - 1]["document"]:
        row -= 1
    return row


def _prompt_from_row(row: Mapping[str, Any], number: int) -> Optional[Prompt]:
    token_ids = [int(token) for token in row["input_ids"]]
    labels = [int(label) for label in row.get("labels", token_ids)]
    learned = [place for place, label in enumerate(labels) if label != NOT_LEARNED]
    if not learned or len(token_ids) < 2:
        return None
    begin = learned[0]
    end = next((place for place in range(begin, len(labels)) if labels[place] == NOT_LEARNED), len(labels))
    if begin < 2:  # a text that is learned completely, except for its first token, which nothing precedes
        begin = max(1, min(TEXT_PROMPT_TOKENS, len(token_ids) // 2))
    return Prompt(number, tuple(token_ids[:begin]), tuple(token_ids[begin:end]))


def stop_tokens(model: nn.Module, tokenizer: Any, reference_ids: Sequence[int]) -> list[int]:
    """Return the tokens that end an answer: those of model and tokenizer, and a special token at the end of the
    reference, such as the end of a turn."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    found |= special_ids(tokenizer).intersection(reference_ids[-2:])  # a line feed may follow the special token
    return sorted(token for token in found if token is not None)


def answered(
    model: nn.Module, tokenizer: Any, token_ids: Sequence[int], stops: Sequence[int], max_new_tokens: int
) -> list[int]:
    """Return the tokens that the model generates greedily after ``token_ids``, without the stop token."""
    inputs = torch.tensor([list(token_ids)], device=input_device(model))
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=list(stops) or None,
        pad_token_id=stops[0] if stops else 0,
        **ONE_ANSWER,
    )
    generated = model.generate(
        input_ids=inputs, attention_mask=torch.ones_like(inputs), generation_config=settings, tokenizer=tokenizer
    )
    answer = generated[0, inputs.shape[1] :].tolist()
    return answer[: next((place for place, token in enumerate(answer) if token in stops), len(answer))]
