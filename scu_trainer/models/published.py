"""The files of a folder that are needed to use the model in it, and so are published or copied with it."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from pathlib import Path

from scu_trainer.run_files import read_object

ADAPTER = ("adapter_config.json", "adapter_model*.safetensors", "adapter_model.safetensors.index.json")
MODEL = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json")
WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")
PROCESSOR = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja"),
    *("preprocessor_config.json", "processor_config.json"),
)


def model_files(folder: Path) -> tuple[str, ...]:
    """Return the patterns of the files of a full model. Python files count only if the model's configuration refers to
    code: other Python files in the folder of a run belong to the user."""
    config = folder / "config.json"
    has_code = config.is_file() and "auto_map" in read_object(config)
    return (*MODEL, "*.py") if has_code else MODEL


def names_like(folder: Path, patterns: Iterable[str]) -> list[str]:
    """Return the sorted names of the regular files directly in ``folder`` that match one of ``patterns``."""
    found = sorted(path.name for path in folder.iterdir() if path.is_file())
    return [name for name in found if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
