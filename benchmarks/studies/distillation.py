"""Does a student learn more with a teacher than without, with the same steps and rows?

    python benchmarks/studies/distillation.py [--seeds 0 1 2] [--only digits text]

For each seed a teacher is trained, then the same student twice from the same weights: without the teacher, and with the
teacher at the default weight and temperature, which were fixed before the first run. The seed determines the weights
and the held-out rows, so that no teacher was trained on the rows that its students are scored on.

    digits   a ResNet-18 and a ResNet of four narrow blocks, the embedded digits, held-out accuracy and bits per label
    text     Llamas of four and two layers, Python's documentation, held-out bits per token
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks  # noqa: F401 - the first import: it keeps torchao quiet

# isort: split

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, ResNetConfig, ResNetForImageClassification

from benchmarks.lib.common import write_result
from scu_trainer.cli.configuration import read_job
from scu_trainer.data import default_cache_dir, embedded_tokenizer
from scu_trainer.train.session.session import run

FLAGS = "--use_cpu true --predict_memory false --report_to none --save_strategy no --mixed_precision no --scu false"
DIGITS = "--task image-classification --image_size 32 --tuning full"
TEXT = "--dataset python_docs --tuning full --block_size 128 --per_device_train_batch_size 16 --learning_rate 2e-3"
STEPS = {"digits": {"teacher": 270, "student": 135}, "text": {"teacher": 400, "student": 200}}


def llama(folder: Path, seed: int, hidden: int, layers: int) -> Path:
    """Save a Llama with random weights, for the embedded tokenizer."""
    tokenizer = embedded_tokenizer(default_cache_dir(None))
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def resnet(folder: Path, seed: int, teacher: Path) -> Path:
    """Save a ResNet of four blocks with 8 to 64 channels and random weights, for the classes of ``teacher``."""
    torch.manual_seed(seed)
    known = ResNetConfig.from_pretrained(teacher)
    config = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 32, 64],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        num_channels=known.num_channels,
        id2label=known.id2label,
        label2id=known.label2id,
    )
    ResNetForImageClassification(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_bytes((teacher / "preprocessor_config.json").read_bytes())
    return folder


def trained(flags: str, folder: Path, seed: int, steps: int, *more: Any) -> dict[str, Any]:
    """Train one run, and return its held-out figures."""
    words = [*FLAGS.split(), *flags.split(), "--eval_strategy", "no", "--seed", seed, "--max_steps", steps]
    job = read_job(None, [str(word) for word in [*words, "--output_dir", folder, *more]])
    figures = run(job, Console(quiet=True))
    names = {"bits": "held_out_bpt_after", "accuracy": "held_out_accuracy_after"}
    return {name: figures[key]["value"] for name, key in names.items() if key in figures}


def digits(seed: int, root: Path) -> dict[str, Any]:
    found = {"teacher": trained(DIGITS, root / "teacher", seed, STEPS["digits"]["teacher"])}
    return found | students(DIGITS, resnet(root / "start", seed, root / "teacher"), root, seed, STEPS["digits"])


def text(seed: int, root: Path) -> dict[str, Any]:
    start = llama(root / "large", seed, 128, 4)
    flags = f"{TEXT} --model_name_or_path {start}"
    found = {"teacher": trained(flags, root / "teacher", seed, STEPS["text"]["teacher"])}
    return found | students(TEXT, llama(root / "start", seed, 48, 2), root, seed, STEPS["text"])


def students(flags: str, start: Path, root: Path, seed: int, steps: dict[str, int]) -> dict[str, Any]:
    flags = f"{flags} --model_name_or_path {start}"
    return {
        "alone": trained(flags, root / "alone", seed, steps["student"]),
        "taught": trained(flags, root / "taught", seed, steps["student"], "--teacher", root / "teacher"),
    }


STUDIES = {"digits": digits, "text": text}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return, for each figure, the mean of each model, and that of taught - alone with its standard error."""
    found = {}
    for name in rows[0]["alone"]:
        gains = [row["taught"][name] - row["alone"][name] for row in rows]
        found[name] = {
            **{model: mean(row[model][name] for row in rows) for model in ("teacher", "alone", "taught")},
            "difference": mean(gains),
            "standard_error": stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else None,
        }
    return found


def table(results: dict[str, Any]) -> Table:
    shown = Table("study", "figure", "teacher", "student alone", "taught", "difference", "standard error")
    for study, result in results.items():
        for name, values in result["summary"].items():
            numbers = (values[key] for key in ("teacher", "alone", "taught", "difference", "standard_error"))
            shown.add_row(study, name, *("" if number is None else f"{number:.4f}" for number in numbers))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=sorted(STUDIES), default=sorted(STUDIES))
    options, console, results = parser.parse_args(), Console(), {}
    torch.set_num_threads(1)
    for study in options.only:
        rows = []
        for seed in options.seeds:
            with tempfile.TemporaryDirectory() as folder:
                rows.append({"seed": seed, **STUDIES[study](seed, Path(folder))})
            console.print(study, rows[-1])
        results[study] = {"steps": STEPS[study], "rows": rows, "summary": summary(rows)}
    console.print(table(results))
    write_result("distillation", results)


if __name__ == "__main__":
    main()
