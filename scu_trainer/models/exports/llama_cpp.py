"""A GGUF file read by llama.cpp itself (``xllamacpp``), in a process of its own: a crash of it stays there.

``python -m scu_trainer.models.exports.llama_cpp FILE TOKENS``: prints the address of a server on loopback, and ends
when its standard input does.
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
from typing import Any

from scu_trainer.errors import ModelError

ANSWER_S = 600


@dataclass
class LlamaCpp:
    """A model in llama.cpp. ``address``: of its server."""

    address: str

    def log_probabilities(self, token_ids: Sequence[int], vocabulary: int) -> list[float]:
        """(vocabulary,): natural logarithms, of the token after ``token_ids``; minus infinity where none was given."""
        found = self._asked(
            "/completion",
            prompt=list(token_ids), n_predict=1, n_probs=vocabulary, cache_prompt=False, post_sampling_probs=False,
            logit_bias=[[self._plain_token, 1e4]],  # draws it after the list is made: half a character gives no list
        )  # fmt: skip
        result = [float("-inf")] * vocabulary
        for entry in found["completion_probabilities"][0]["top_logprobs"]:
            result[entry["id"]] = entry["logprob"]
        return result

    @cached_property
    def _plain_token(self) -> int:
        return self._asked("/tokenize", content="a", add_special=False)["tokens"][-1]

    def tokens(self, text: str) -> list[int]:
        """Ids of a text, special tokens in it read as such, with those that every text begins with."""
        return self._asked("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]

    def conversation(self, messages: Sequence[dict[str, str]]) -> str:
        """By the chat template in the file, with the beginning of an answer."""
        return self._asked("/apply-template", messages=list(messages))["prompt"]

    def _asked(self, path: str, **content: Any) -> Any:
        import httpx2

        with httpx2.Client(trust_env=False, timeout=ANSWER_S) as client:
            answer = client.post(self.address + path, json=content)
        if answer.status_code != 200:
            raise ModelError(f"llama.cpp answers {path} with {answer.status_code}: {answer.text[:300]}")
        return answer.json()


@contextmanager
def in_llama_cpp(file: Path, tokens: int) -> Iterator[LlamaCpp]:
    """Raises ModelError where llama.cpp cannot load ``file``. ``tokens``: most of one row."""
    command = [sys.executable, "-m", __name__, str(file), str(tokens)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            address = process.stdout.readline().strip()
            if not address:
                raise ModelError(f"llama.cpp cannot load what was written: {_reason(log)}")
            yield LlamaCpp(address)
        finally:
            process.kill()
            process.communicate()


def _reason(log: Any) -> str:
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()]
    errors = [line for line in lines if " E " in line or "error" in line.lower()]
    return (errors or lines or ["it ended without a message"])[0][:300]


def main() -> None:
    import xllamacpp

    wanted = xllamacpp.CommonParams()
    wanted.model.path, wanted.n_ctx, wanted.n_parallel = sys.argv[1], int(sys.argv[2]), 1
    wanted.warmup, wanted.verbosity, wanted.n_gpu_layers = False, 1, 0
    # In float32, as the model that it is compared with; what was rounded on the way shows, and nothing else.
    wanted.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    wanted.cache_type_k = wanted.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(wanted)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
