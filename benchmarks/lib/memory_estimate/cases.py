"""The trainings of memory_estimate.py: flags of ``scu-trainer train``, and models made from configurations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
EMBEDDED_WORDS = 2048
Model = tuple[str, dict[str, Any]]
"""A model family of transformers, and the sizes in its configuration."""


@dataclass(frozen=True)
class Case:
    """One training. ``model``: a name in MODELS; None uses the model of the task, or the embedded base."""

    name: str
    model: Optional[str]
    flags: str


# -- models ------------------------------------------------------------------------------------------------------------


def _llama(family: str = "Llama", hidden_size: int = 256, **changes: Any) -> Model:
    sizes = {
        "vocab_size": 8192,
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": 6,
        "num_attention_heads": hidden_size // 64,
        "num_key_value_heads": hidden_size // 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    return family, {**sizes, **TOKENS, **changes}


def _gpt2(vocab_size: int, width: int, layers: int) -> Model:
    sizes = {"n_embd": width, "n_layer": layers, "n_head": width // 64, "n_positions": 1024}
    return "GPT2", {"vocab_size": vocab_size, **sizes, **TOKENS}


MODELS: dict[str, Model] = {
    "llama-0": _llama(vocab_size=EMBEDDED_WORDS, hidden_size=64, num_hidden_layers=1),
    "gpt2-0": _gpt2(EMBEDDED_WORDS, 64, 1),
    "llama-8k": _llama(),
    "llama-8k-tied": _llama(tie_word_embeddings=True, num_key_value_heads=2),
    "llama-32k": _llama(vocab_size=32_000, hidden_size=384),
    "llama-64k-tied": _llama(vocab_size=65_536, num_hidden_layers=4, tie_word_embeddings=True),
    "llama-wide": _llama(hidden_size=1024, num_hidden_layers=8, intermediate_size=2816),
    "gpt2": _gpt2(8192, 384, 6),
    "qwen2-48k": _llama("Qwen2", vocab_size=49_152, num_hidden_layers=4, tie_word_embeddings=True),
    "qwen3": _llama("Qwen3", hidden_size=384, head_dim=64, num_key_value_heads=2),
    "llama-1b": _llama(
        vocab_size=128_256,
        hidden_size=2048,
        num_hidden_layers=16,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
    "qwen2-0.5b": _llama(
        "Qwen2",
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "gpt2-medium": _gpt2(50_257, 1024, 24),
}


def make_model(name: str, folder: Path, device: str) -> None:
    """Save a model with random weights, and the embedded tokenizer, in ``folder``. Weights are bfloat16 for a GPU,
    where the models are large."""
    import torch
    import transformers

    from scu_trainer.data import default_cache_dir, embedded_tokenizer

    family, sizes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32 if device == "cpu" else torch.bfloat16
        )
    model.save_pretrained(folder)
    embedded_tokenizer(default_cache_dir(None)).save_pretrained(folder)


# -- trainings ---------------------------------------------------------------------------------------------------------

COMMON = (
    "--max_steps 4 --eval_strategy no --validation_split_percentage 0 --save_strategy no --report_to none "
    "--logging_steps 1000"
)
TEXT = "--dataset_size 300"
"""Flags for packed rows of the documents, which all have ``block_size`` tokens."""

ALONE = "--memory_control false --scu false"
CAPPED = "--memory_control false --token_cap"
FULL, LORA, QLORA = "--tuning full", "--tuning lora", "--tuning qlora"
FLOAT32, BF16 = "--mixed_precision no", "--mixed_precision bf16"
CHECKPOINTED = "--checkpoint_every_layer true"
IMAGES = "--task image-classification"
WORDS = "--task word-generation --curriculum none"
SENSORS = "--task sensor-classification --synthetic true"


def _rows(length: int, rows: int, accumulated: int = 1) -> str:
    return f"--block_size {length} {_batch(rows)} --gradient_accumulation_steps {accumulated}"


def _batch(rows: int) -> str:
    return f"--per_device_train_batch_size {rows}"


def _cases(*rows: tuple[str, Optional[str], str]) -> list[Case]:
    return [Case(*row) for row in rows]


CPU_CASES = _cases(
    ("llama full", "llama-8k", f"{FULL} {FLOAT32} {ALONE} {_rows(512, 4)}"),
    ("llama 32k full", "llama-32k", f"{FULL} {FLOAT32} {ALONE} {_rows(512, 2)}"),
    ("llama 32k full control", "llama-32k", f"{FULL} {FLOAT32} {_rows(512, 4)}"),
    ("llama 32k lora bf16 control", "llama-32k", f"{LORA} {BF16} {_rows(512, 4)}"),
    ("llama wide lora", "llama-wide", f"{LORA} {FLOAT32} {ALONE} {_rows(256, 4)}"),
    ("llama wide qlora bf16", "llama-wide", f"{QLORA} {BF16} {ALONE} {_rows(256, 4)}"),
    ("resnet18 full", None, f"{IMAGES} --image_size 128 {FLOAT32} {ALONE} {_batch(32)}"),
    ("gru full", None, f"{WORDS} {FLOAT32} {ALONE} {_batch(64)}"),
    ("llama full checkpointed", "llama-8k", f"{FULL} {FLOAT32} {ALONE} {_rows(1024, 8)} {CHECKPOINTED}"),
    ("gpt2 full", "gpt2", f"{FULL} {FLOAT32} {ALONE} {_rows(256, 8)}"),
    ("gpt2 lora bf16 capped checkpointed", "gpt2", f"{LORA} {BF16} {CAPPED} 4096 {_rows(1024, 8)} {CHECKPOINTED}"),
    ("granite lora control", None, f"{LORA} {_rows(512, 8)}"),
    ("granite full", None, f"{FULL} {FLOAT32} {ALONE} {_rows(256, 4)}"),
    ("qwen2 full adafactor", "qwen2-48k", f"{FULL} {FLOAT32} {ALONE} --optim adafactor {_rows(256, 4)}"),
    ("qwen2 lora capped", "qwen2-48k", f"{LORA} {FLOAT32} {CAPPED} 2048 {_rows(1024, 4)}"),
    ("qwen3 full bf16 8-bit accumulated", "qwen3", f"{FULL} {BF16} {ALONE} --optim adamw_bnb_8bit {_rows(256, 4, 4)}"),
    (
        "efficientnet full",
        None,
        f"{IMAGES} --architecture efficientnet_b0 --image_size 96 {FLOAT32} {ALONE} {_batch(32)}",
    ),
    (
        "sensors full",
        None,
        f"{SENSORS} --sensor_samples 1000 --sensor_hidden_size 256 --sensor_layers 4 {FLOAT32} {ALONE} {_batch(128)}",
    ),
    (
        "llama 64k tied full sgd lambda",
        "llama-64k-tied",
        f"{FULL} {FLOAT32} --memory_control false --scu true --optim sgd {_rows(256, 4)}",
    ),
    ("llama 64k tied lora whole logits", "llama-64k-tied", f"{LORA} {FLOAT32} {ALONE} {_rows(512, 2)}"),
    ("llama tied full capped lambda", "llama-8k-tied", f"{FULL} {FLOAT32} {CAPPED} 1024 {_rows(128, 16, 4)}"),
    ("llama lora bf16", "llama-8k", f"{LORA} {BF16} {ALONE} {_rows(1024, 4)}"),
    ("resnet18 bf16 checkpointed", None, f"{IMAGES} --image_size 128 {BF16} {ALONE} {_batch(64)} {CHECKPOINTED}"),
    ("gru control", None, f"{WORDS} {FLOAT32} {_batch(128)}"),
    ("llama wide full", "llama-wide", f"{FULL} {FLOAT32} {ALONE} {_rows(256, 1)}"),
    ("llama wide lora control accumulated", "llama-wide", f"{LORA} {FLOAT32} {_rows(512, 2, 4)}"),
)

CUDA_CASES = _cases(
    ("1b lora control", "llama-1b", f"{LORA} {BF16} {_rows(1024, 8)}"),
    ("1b lora checkpointed", "llama-1b", f"{LORA} {BF16} {ALONE} {_rows(2048, 8)} {CHECKPOINTED}"),
    ("1b lora", "llama-1b", f"{LORA} {BF16} {ALONE} {_rows(512, 8)}"),
    ("1b lora capped", "llama-1b", f"{LORA} {BF16} {CAPPED} 4096 {_rows(2048, 8)}"),
    ("1b qlora checkpointed", "llama-1b", f"{QLORA} {BF16} {ALONE} {_rows(2048, 8)} {CHECKPOINTED}"),
    ("1b qlora control", "llama-1b", f"{QLORA} {BF16} {_rows(1024, 8)}"),
    ("1b full", "llama-1b", f"{FULL} {BF16} {ALONE} {_rows(512, 4)}"),
    ("1b full control", "llama-1b", f"{FULL} {BF16} {_rows(1024, 8)}"),
    (
        "1b full 8-bit checkpointed",
        "llama-1b",
        f"{FULL} {BF16} {ALONE} --optim adamw_bnb_8bit {_rows(1024, 8)} {CHECKPOINTED}",
    ),
    ("1b full adafactor accumulated", "llama-1b", f"{FULL} {BF16} {ALONE} --optim adafactor {_rows(512, 4, 4)}"),
    ("qwen2 full", "qwen2-0.5b", f"{FULL} {BF16} {ALONE} {_rows(512, 8)}"),
    ("gpt2 full float32", "gpt2-medium", f"{FULL} {FLOAT32} {ALONE} {_rows(1024, 4)}"),
    ("resnet50 full", None, f"{IMAGES} --architecture resnet50 --image_size 224 {BF16} {ALONE} {_batch(128)}"),
    (
        "efficientnet full",
        None,
        f"{IMAGES} --architecture efficientnet_b0 --image_size 224 {FLOAT32} {ALONE} {_batch(64)}",
    ),
    ("gru full", None, f"{WORDS} --mode extended {BF16} {ALONE} {_batch(256)}"),
)

SMALL = f"{FLOAT32} {ALONE} {_rows(64, 1)}"
OVERHEAD_CASES = _cases(
    ("llama adamw", "llama-0", f"{FULL} {SMALL}"),
    ("llama sgd", "llama-0", f"{FULL} {SMALL} --optim sgd"),
    ("llama adafactor", "llama-0", f"{FULL} {SMALL} --optim adafactor"),
    ("llama 8-bit", "llama-0", f"{FULL} {SMALL} --optim adamw_bnb_8bit"),
    ("llama lora", "llama-0", f"{LORA} {SMALL}"),
    ("llama lora bf16", "llama-0", f"{LORA} {SMALL} {BF16}"),
    ("llama qlora bf16", "llama-0", f"{QLORA} {SMALL} {BF16}"),
    ("llama lambda", "llama-0", f"{FULL} {SMALL} --scu true"),
    ("llama control", "llama-0", f"{FULL} {SMALL} --memory_control true"),
    ("llama checkpointed", "llama-0", f"{FULL} {SMALL} {CHECKPOINTED}"),
    ("gpt2", "gpt2-0", f"{FULL} {SMALL}"),
    ("granite lora", None, f"{LORA} {SMALL}"),
    ("resnet18", None, f"{IMAGES} --image_size 32 {FLOAT32} {ALONE} {_batch(2)}"),
    ("efficientnet", None, f"{IMAGES} --architecture efficientnet_b0 --image_size 32 {FLOAT32} {ALONE} {_batch(2)}"),
    ("gru", None, f"{WORDS} --mode tiny {FLOAT32} {ALONE} {_batch(2)}"),
    ("sensors", None, f"{SENSORS} --sensor_samples 100 {FLOAT32} {ALONE} {_batch(2)}"),
)
"""Trainings of very small models, which show the memory of the process itself."""

CASES = {"cpu": CPU_CASES, "cuda": CUDA_CASES, "overhead": OVERHEAD_CASES}

TINY_TEXT = f"--block_size 64 {_batch(2)}"
TINY_IMAGES = f"--image_size 32 {_batch(2)}"
TINY_WORDS = f"--mode tiny {_batch(2)}"


def tiny(case: Case) -> Case:
    """Return the case with very little work, to test that it runs."""
    kind = TINY_IMAGES if IMAGES in case.flags else TINY_WORDS if WORDS in case.flags else TINY_TEXT
    family = None if case.model is None else "gpt2-0" if case.model.startswith("gpt2") else "llama-0"
    return Case(case.name, family, f"{case.flags} {kind}")


def flags_of(case: Case, model: Optional[Path]) -> list[str]:
    """Return the flags for ``scu-trainer train`` or ``plan``."""
    name = [] if model is None else ["--model_name_or_path", str(model)]
    is_text = not any(task in case.flags for task in (IMAGES, WORDS, SENSORS))
    return [*name, *COMMON.split(), *(TEXT.split() if is_text else ()), *case.flags.split()]


def named(cases: Iterable[Case], wanted: list[str]) -> list[Case]:
    """Return the cases with a name that contains one of ``wanted``, or all if that is empty."""
    return [case for case in cases if not wanted or any(part in case.name for part in wanted)]
