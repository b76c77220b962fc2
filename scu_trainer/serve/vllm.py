"""Build the command that serves a model with vLLM."""

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
    """``answers``: the fields of AnswerSettings; None: as in the model's generation config. The key is not among the
    arguments, which other users can see; it is passed in the environment variable KEY_VARIABLE."""
    words = ["vllm", "serve", model, "--served-model-name", name, "--host", host, "--port", str(port)]
    words += ["--dtype", dtype, "--seed", str(answers["seed"]), "--allowed-origins", "[]"]
    words += ["--override-generation-config", json.dumps(_override(answers))]
    if not allow_pickle:
        words += ["--load-format", "safetensors"]
    return [*words, "--trust-remote-code"] if trust_remote_code else words


def _override(answers: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes to the generation config, without max_new_tokens, to which vLLM would limit every request."""
    names = ("temperature", "top_p", "top_k", "repetition_penalty")
    override = {name: answers[name] for name in names if answers[name] is not None}
    return {**override, "temperature": 0.0} if answers["do_sample"] is False else override
