"""Load a GGUF file in llama.cpp itself (``xllamacpp``), in a separate process that may crash without harm.

``python -m scu_trainer.models.exports.llama_cpp FILE TOKENS`` prints the address of a server on the loopback interface
and runs until its standard input is closed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scu_trainer.errors import ModelError

if TYPE_CHECKING:
    import httpx2

ANSWER_S = 600


@dataclass
class LlamaCpp:
    """A model that runs in llama.cpp's server, which ``client`` asks."""

    client: httpx2.Client

    def log_probabilities(self, token_ids: Sequence[int], vocabulary: int) -> list[float]:
        """Return the log probabilities of the token after ``token_ids``, (vocabulary,); -inf for tokens left out."""
        found = self._request(
            "/completion",
            prompt=list(token_ids), n_predict=1, n_probs=vocabulary, cache_prompt=False, post_sampling_probs=False,
            # Makes it draw a plain token, after the list is made: for half a character it would return no list.
            logit_bias=[[self._plain_token, 1e4]],
        )  # fmt: skip
        result = [float("-inf")] * vocabulary
        for entry in found["completion_probabilities"][0]["top_logprobs"]:
            result[entry["id"]] = entry["logprob"]
        return result

    @cached_property
    def _plain_token(self) -> int:
        return self._request("/tokenize", content="a", add_special=False)["tokens"][-1]

    def tokens(self, text: str) -> list[int]:
        """Return the token ids of a text, with special tokens parsed and with those that every text begins with."""
        return self._request("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]

    def conversation(self, messages: Sequence[dict[str, str]]) -> str:
        """Render ``messages`` by the chat template in the file, with the beginning of an answer."""
        return self._request("/apply-template", messages=list(messages))["prompt"]

    def _request(self, path: str, **content: Any) -> Any:
        """Return the JSON response to a POST request. Raises ModelError if llama.cpp returns an error."""
        answer = self.client.post(path, json=content)
        if answer.status_code != 200:
            raise ModelError(f"llama.cpp answers {path} with {answer.status_code}: {answer.text[:300]}")
        return answer.json()


@contextmanager
def in_llama_cpp(file: Path, tokens: int) -> Iterator[LlamaCpp]:
    """Run llama.cpp with ``file`` in a process for rows of up to ``tokens``. Raises ModelError if it cannot load it."""
    import httpx2

    command = [sys.executable, "-m", __name__, str(file), str(tokens)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            address = process.stdout.readline().strip()
            if not address:
                raise ModelError(f"llama.cpp cannot load the written file: {_reason(log)}")
            with httpx2.Client(base_url=address, trust_env=False, timeout=ANSWER_S) as client:
                yield LlamaCpp(client)
        finally:
            process.kill()
            process.communicate()


def _reason(log: Any) -> str:
    """Return the first line of the log that looks like an error, or else its first line."""
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()]
    errors = [line for line in lines if " E " in line or "error" in line.lower()]
    return (errors or lines or ["it ended without a message"])[0][:300]


def main() -> None:
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.n_ctx, parameters.n_parallel = sys.argv[1], int(sys.argv[2]), 1
    parameters.warmup, parameters.verbosity, parameters.n_gpu_layers = False, 1, 0
    # In float32 like the model that it is compared with, so that only the rounding of the file's weights shows.
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(parameters)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
