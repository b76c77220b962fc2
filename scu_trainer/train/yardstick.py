"""A Llama of 30 million weights for comparing paths: large enough that weights, not Python, fill the memory.

Untrained, because nothing is claimed of what it learns; the same for everyone, because it is made from a seed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from scu_trainer.data import default_cache_dir, embedded_tokenizer
from scu_trainer.data.store import built_once

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
SEED = 0
SHARD = "16MB"


def yardstick(cache_dir: Path) -> Path:
    """Folder with weights in several files and the embedded tokenizer, made at the first call."""
    return built_once(cache_dir / "base" / "yardstick-llama-30m", lambda new: _build(new, cache_dir))


def _build(new: Path, cache_dir: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = embedded_tokenizer(cache_dir)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    torch.manual_seed(SEED)
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=2048, **SIZES, **HEADS, **ids)
    LlamaForCausalLM(config).save_pretrained(new, max_shard_size=SHARD)
    tokenizer.save_pretrained(new)


if __name__ == "__main__":
    from scu_trainer.train.logs import run_log

    with run_log():
        folder = yardstick(default_cache_dir(sys.argv[1] if len(sys.argv) > 1 else None))
    print(folder)
