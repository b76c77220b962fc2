"""The command that starts vLLM with a model, by vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

KEY_VARIABLE = "VLLM_API_KEY"


def command(
    model: str,
    name: str,
    host: str,
    port: int,
    dtype: str,
    answers: Mapping[str, Any],
    trust_remote_code: bool,
    allow_pickle: bool,
) -> list[str]:
    """``answers``: the fields of AnswerSettings; None where the model's generation config is to say. The key is no
    argument, for the list of processes shows those: it goes by KEY_VARIABLE."""
    words = ["vllm", "serve", model, "--served-model-name", name, "--host", host, "--port", str(port)]
    words += ["--dtype", dtype, "--seed", str(answers["seed"]), "--allowed-origins", "[]"]
    words += ["--override-generation-config", json.dumps(_override(answers))]
    if not allow_pickle:
        words += ["--load-format", "safetensors"]
    return [*words, "--trust-remote-code"] if trust_remote_code else words


def _override(answers: Mapping[str, Any]) -> dict[str, Any]:
    """Without max_new_tokens, which vLLM takes for the most that a question may ask for."""
    names = ("temperature", "top_p", "top_k", "repetition_penalty")
    found = {name: answers[name] for name in names if answers[name] is not None}
    return {**found, "temperature": 0.0} if answers["do_sample"] is False else found
