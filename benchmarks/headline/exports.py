"""Which model families ``scu-trainer export`` converts to GGUF and ONNX, and how much their logits change.

python benchmarks/headline/exports.py [FAMILY ...] [--to gguf onnx] [--outtype f16]

Each model has two layers with random weights and the embedded tokenizer. Prints a line per case, and at the end the
table of docs/take_along.md. results/exports.json is written if all families were asked for.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks  # noqa: F401 - the first import: it keeps torchao quiet

# isort: split

import torch
import transformers

from scu_trainer.cli.publishing.export import ExportOptions, export
from scu_trainer.cli.subjects import subject_of
from scu_trainer.data import default_cache_dir, embedded_tokenizer
from scu_trainer.errors import UserError

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256}
OLD = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA_3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 128}
FAMILIES = {
    "llama": {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "llama 3 (its positions)": {"model_type": "llama", "rope_parameters": LLAMA_3},
    "llama (tied)": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64},
    "phi3": {"original_max_position_embeddings": 256},
    "olmo2": {},
    "smollm3": {},
    "granite": {"attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_expand": 2,
        "mamba_d_state": 32, "mamba_n_groups": 1, "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": 96, "position_embedding_type": None,
    },
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "stablelm": {},
    "starcoder2": {},
    "gpt_neox": {},
    "gpt2": OLD,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "bloom": {"n_layer": 2, "n_head": 4, "hidden_size": 192},
    "falcon": {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "bias": False},
    "mamba": {"intermediate_size": 128, "state_size": 16},
    "mamba2": {"intermediate_size": 128, "head_dim": 32, "num_heads": 4, "n_groups": 1, "state_size": 32},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "ernie4_5": {},
}  # fmt: skip
RESULT = Path(__file__).parents[1] / "results" / "exports.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--to", nargs="+", default=["gguf", "onnx"], choices=["gguf", "onnx"])
    parser.add_argument("--outtype", default="f16")
    typed = parser.parse_args()
    found = {name: _case(name, typed) for name in typed.families or FAMILIES}
    print("\n".join(table(found)))
    if not typed.families and len(typed.to) == 2:
        RESULT.write_text(json.dumps({"outtype": typed.outtype, "families": found}, indent=2) + "\n")


def _case(name: str, typed: argparse.Namespace) -> dict[str, dict]:
    with tempfile.TemporaryDirectory() as folder:
        source = model_folder(name, Path(folder) / name.split()[0])
        found = {format: _exported(source, format, typed.outtype) for format in typed.to}
    for format, facts in found.items():
        told = facts.get("refused") or f"differs by {facts['difference']:.1e}, {facts['tolerance']:g} allowed"
        print(f"{name}, {format}: {told}", flush=True)
    return found


def model_folder(name: str, folder: Path) -> Path:
    """Save a model of the family, with random weights so large that mistakes show, and the embedded tokenizer."""
    torch.manual_seed(0)
    tokenizer = embedded_tokenizer(default_cache_dir(None))
    special = {word: getattr(tokenizer, word) for word in ("pad_token_id", "bos_token_id", "eos_token_id")}
    changes = dict(FAMILIES[name])
    family = changes.pop("model_type", name)
    config = transformers.AutoConfig.for_model(family, **{"vocab_size": len(tokenizer), **SIZES, **special, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _exported(source: Path, format: str, outtype: str) -> dict:
    options = ExportOptions(format=format, outtype=outtype if format == "gguf" else "auto")
    try:
        facts = export(subject_of(str(source)), source.with_name(f"out-{format}"), options)
    except UserError as error:
        return {"refused": str(error)}
    return {name: facts[name] for name in ("difference", "tolerance")}


def table(found: dict[str, dict[str, dict]]) -> list[str]:
    lines = ["| family | GGUF | ONNX |", "| --- | --- | --- |"]
    for name, formats in found.items():
        cells = [_cell(formats[format]) if format in formats else "not asked" for format in ("gguf", "onnx")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _cell(facts: dict) -> str:
    return "refused" if "refused" in facts else f"{facts['difference']:.0e}"


if __name__ == "__main__":
    main()
