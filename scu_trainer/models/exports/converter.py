"""Run llama.cpp's own converter in a separate process: ``python -m scu_trainer.models.exports.converter``.

The converter recognizes a byte-level tokenizer by a checksum of its tokens for one text, so it knows only the
tokenizers of published models. Any other tokenizer still declares in tokenizer.json how it splits text into words; if
llama.cpp has a name for that rule, ``--pre`` passes it. The result is compared with the original token by token
afterwards.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Optional

LAYER_NAMES = {"full_attention": "attention", "linear_attention": "mamba"}
"""Names of Granite's layers in configurations written by transformers 5, and their names before version 5."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--converter", help="folder of a llama.cpp checkout; default: the installed package")
    parser.add_argument("--pre")
    typed, words = parser.parse_known_args()
    if typed.converter:
        sys.path[:0] = [typed.converter, f"{typed.converter}/gguf-py"]
    import convert_hf_to_gguf

    if "--knows" in words:
        _require_architecture(words[-1])
        return
    _set_word_rule(typed.pre)
    _translate_names(Path(words[0]) / "config.json")
    sys.argv = ["convert_hf_to_gguf.py", *words]
    convert_hf_to_gguf.main()


def _require_architecture(architecture: str) -> None:
    """Raise the converter's own error if it does not know ``architecture``."""
    from conversion import ModelType, get_model_class
    from conversion.base import ModelBase

    get_model_class(architecture)
    ModelBase.from_model_architecture(architecture, ModelType.TEXT)


def _set_word_rule(name: Optional[str]) -> None:
    """Make the converter use the word rule ``name`` for tokenizers whose checksum it does not know."""
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


def _translate_names(config_file: Path) -> None:
    """Give the converter the older names of configuration fields, both in the file and in what it loads. It loads most
    configurations through transformers, which converts them to new names again, and some from the file."""
    from conversion.base import ModelBase

    config_file.write_text(json.dumps(older_names(json.loads(config_file.read_text(encoding="utf-8")))))
    loaded = ModelBase.load_hparams
    ModelBase.load_hparams = staticmethod(lambda *arguments, **named: older_names(loaded(*arguments, **named)))


def older_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of transformers 5 with the names of earlier versions, which the converter expects."""
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
