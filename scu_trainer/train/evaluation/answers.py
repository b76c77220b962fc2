"""Prompts of held-out rows, and what a model answers to them, each token its most likely one."""

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
"""Against a generation config that asks for several answers, or searches among them: one token follows the other."""


@dataclass(frozen=True)
class Prompt:
    """``row``: of the held-out rows. ``token_ids``: what the model reads. ``reference_ids``: what follows there."""

    row: int
    token_ids: tuple[int, ...]
    reference_ids: tuple[int, ...]


def prompts_of(rows: Any, count: int, most_tokens: int) -> list[Prompt]:
    """Up to ``count`` prompts from ``rows`` (a sequence of mappings with ``input_ids`` and perhaps ``labels``), spread
    over them evenly: what stands before the first learned token, or of a text that is learned whole its first half, 32
    tokens at most. A row is left out where prompt and answer have more than ``most_tokens`` tokens, or nothing is
    learned."""
    found: dict[int, Prompt] = {}
    for number in range(4 * count):  # some are too long, some begin in the middle of the same text
        row = _begin_of_text(rows, number * len(rows) // (4 * count))
        prompt = None if row in found else _prompt_of(rows[row], row)
        if prompt is not None and len(prompt.token_ids) <= most_tokens:
            found[row] = prompt
    kept = list(found.values())
    return [kept[index * len(kept) // count] for index in range(count)] if len(kept) > count else kept


def _begin_of_text(rows: Any, row: int) -> int:
    """A text that is longer than a row goes on in the next one."""
    while row and "document" in rows[row] and rows[row]["document"] == rows[row - 1]["document"]:
        row -= 1
    return row


def _prompt_of(row: Mapping[str, Any], number: int) -> Optional[Prompt]:
    token_ids = [int(token) for token in row["input_ids"]]
    labels = [int(label) for label in row.get("labels", token_ids)]
    learned = [place for place, label in enumerate(labels) if label != NOT_LEARNED]
    if not learned or len(token_ids) < 2:
        return None
    begin = learned[0]
    end = next((place for place in range(begin, len(labels)) if labels[place] == NOT_LEARNED), len(labels))
    if begin < 2:  # of a text that is learned whole the first token follows nothing
        begin = max(1, min(TEXT_PROMPT_TOKENS, len(token_ids) // 2))
    return Prompt(number, tuple(token_ids[:begin]), tuple(token_ids[begin:end]))


def stop_tokens(model: nn.Module, tokenizer: Any, reference_ids: Sequence[int]) -> list[int]:
    """Tokens that end an answer: those of the model and the tokenizer, and the special token with which the learned
    part of the reference ends, such as the end of a turn."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    found |= special_ids(tokenizer).intersection(reference_ids[-2:])  # a line feed may follow it
    return sorted(token for token in found if token is not None)


def answered(
    model: nn.Module, tokenizer: Any, token_ids: Sequence[int], stops: Sequence[int], max_new_tokens: int
) -> list[int]:
    """What the model writes after ``token_ids``, each token its most likely one, up to and without a stop token."""
    inputs = torch.tensor([list(token_ids)], device=input_device(model))
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=list(stops) or None,
        pad_token_id=stops[0] if stops else 0,
        **ONE_ANSWER,
    )
    made = model.generate(
        input_ids=inputs, attention_mask=torch.ones_like(inputs), generation_config=settings, tokenizer=tokenizer
    )
    answer = made[0, inputs.shape[1] :].tolist()
    return answer[: next((place for place, token in enumerate(answer) if token in stops), len(answer))]
