"""The memory that recipes/granite.yaml needs on common GPUs, by ``scu-trainer plan``, from shapes and without weights.

python benchmarks/studies/granite_plan.py [CARD ...]
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks  # noqa: F401 - the first import: it keeps torchao quiet

# isort: split

from transformers import GraniteMoeHybridConfig

from scu_trainer.cli import main as cli
from scu_trainer.run_files import format_bytes

CARDS = ("RTX 4090", "A100 40GB", "RTX 3080", "T4")
RECIPE = Path(__file__).parents[2] / "recipes" / "granite.yaml"
ATTENTION = (5, 15, 25, 35)
"""Indices of the attention layers; the other 36 layers are mamba2."""


def granite_h_1b(divisor: int = 1, **changes) -> GraniteMoeHybridConfig:
    """Return a configuration with the sizes of ibm-granite/granite-4.0-h-1b (its model card and config.json in November
    2026): 1.46 billion weights. ``divisor``: divides the width, but not the numbers of layers, heads and groups."""
    options = {
        "vocab_size": 100352,
        "hidden_size": 1536 // divisor,
        "intermediate_size": 4096 // divisor,
        "shared_intermediate_size": 4096 // divisor,
        "num_hidden_layers": 40,
        "layer_types": ["attention" if layer in ATTENTION else "mamba" for layer in range(40)],
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": 48,
        "mamba_d_head": 64 // divisor,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 256,
        "position_embedding_type": "nope",
        "tie_word_embeddings": True,
        "embedding_multiplier": 12,
        "logits_scaling": 6,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0078125,
        "max_position_embeddings": 131072,
        "bos_token_id": 100257,
        "eos_token_id": 100257,
        "pad_token_id": 100256,
        "dtype": "bfloat16",
        "architectures": ["GraniteMoeHybridForCausalLM"],
    }
    return GraniteMoeHybridConfig(**{**options, **changes})


def planned(model: Path, card: str) -> dict:
    """Return the report of ``plan`` for one GPU."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        cli.main(["plan", "--config", str(RECIPE), "--model_name_or_path", str(model), "--gpu", card, "--json"])
    return json.loads(output.getvalue())


def line(report: dict) -> str:
    """Return a row of the table in docs/granite.md."""
    settings, fits = report["recommended"], next((one for one in report["choices"] if one["fits"]), None)
    if fits is None:
        return f"| {report['machine']} | nothing fits | | |"
    changes = " ".join(f"`--{name} {str(value).lower()}`" for name, value in settings.items()) or "nothing"
    rows = f"{fits['rows_per_chunk']} x {fits['tokens_per_row']}"
    return f"| {report['machine']} | {changes} | {rows} | {format_bytes(fits['peak_bytes'])} |"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        granite_h_1b().save_pretrained(folder)
        print("| card | to change | tokens at once | predicted peak |\n|---|---|---|---|")
        for card in sys.argv[1:] or CARDS:
            print(line(planned(Path(folder), card)), flush=True)


if __name__ == "__main__":
    main()
