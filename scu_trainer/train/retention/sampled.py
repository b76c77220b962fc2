"""``retain: sampled``: without a text that must not be forgotten, the model writes one before it is trained.

On text that the model has sampled itself, the mean excess is the Kullback-Leibler divergence of the tuned model from
it, in bits per token. So what is preserved is what the model would say, and each subject only as often as it says it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import nn

from scu_trainer.data.store import build_once, digest_of
from scu_trainer.errors import DataError, ModelError
from scu_trainer.models.asking import evaluating
from scu_trainer.models.loading.adapters import generation_obstacle
from scu_trainer.models.loading.offloaded import input_device
from scu_trainer.models.quantize import dequantized_by_torchao
from scu_trainer.settings.regularization import SAMPLED
from scu_trainer.train.evaluation.answers import ONE_ANSWER

logger = logging.getLogger("scu_trainer")

MOST_DOCUMENTS, MOST_TOKENS = 400, 256
"""Maximum number of documents and of tokens in each, because writing takes a forward pass for each token."""

AT_ONCE = 32
FILE = "text.jsonl"


def sampled_text(model: nn.Module, tokenizer: Any, cache_dir: Path, *, documents: int, tokens: int, seed: int) -> Path:
    """Return a file of ``documents`` texts of up to ``tokens`` tokens each, sampled at temperature 1 with ``seed``.

    It is written once for these arguments and the weights of ``model``, by one process: others wait for it, and a
    resumed run finds it again. The random state is left unchanged.
    Raises DataError if the tokenizer has no token to begin with, and ModelError if the model cannot write.
    """
    if obstacle := generation_obstacle(model):
        raise ModelError(f"retain: {SAMPLED} lets the model write, but {obstacle}, or give a file of text instead")
    documents, tokens = min(documents, MOST_DOCUMENTS), min(tokens, MOST_TOKENS)
    start_token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start_token is None:
        raise DataError(
            f"retain: {SAMPLED} needs a token to start writing from, but the tokenizer has neither bos nor eos; give "
            "a file of text instead"
        )

    def write(folder: Path) -> None:
        logger.info("retain: the model writes %d texts of up to %d tokens to use as the anchor", documents, tokens)
        texts = _sample_texts(model, tokenizer, start_token, documents, tokens, seed)
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / FILE).write_text(lines, encoding="utf-8")

    key = digest_of(_weight_sums(model), documents, tokens, seed, start_token)
    return build_once(cache_dir / "sampled" / key, write) / FILE


def _weight_sums(model: nn.Module) -> list[list[Any]]:
    """Return values that tell these weights from others, even if a device_map has placed them elsewhere."""
    read = []
    for path, module in model.named_modules():
        with align_module_device(module):
            for name, weight in module.named_parameters(recurse=False):
                values = dequantized_by_torchao(weight.detach()).cpu().double()
                read.append([f"{path}.{name}", float(values.abs().sum())])
    return read


def _sample_texts(
    model: nn.Module, tokenizer: Any, start_token: int, documents: int, tokens: int, seed: int
) -> Iterator[str]:
    device = input_device(model)
    pad = start_token if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    options |= {**ONE_ANSWER, "max_new_tokens": tokens, "tokenizer": tokenizer}
    with evaluating(model), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for done in range(0, documents, AT_ONCE):
            start_tokens = torch.full((min(AT_ONCE, documents - done), 1), start_token, device=device)
            given = {"input_ids": start_tokens, "attention_mask": torch.ones_like(start_tokens), "pad_token_id": pad}
            yield from tokenizer.batch_decode(model.generate(**given, **options), skip_special_tokens=True)
