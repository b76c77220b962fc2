"""Unsloth: ``unsloth train --config FILE``, and the names in its Python functions and in its ``unsloth-cli.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scu_trainer.cli.names.common import MERGING, checkpointing, isolated_packing, mixed, targets, when_on
from scu_trainer.cli.names.meaning import (
    Alias,
    KeySource,
    Meaning,
    NoAction,
    Table,
    boolean,
    if_on,
    is_on,
    quantized,
    tuning,
)
from scu_trainer.errors import SettingsError

TITLE = "Unsloth"
SECTIONS = ("data", "training", "lora", "logging", "inference")
GGUF = "scu-trainer export RUN --to gguf writes it, and reads it back to check it"


def _adapts(source: KeySource) -> bool:
    return source.get("training_type", "lora") == "lora" and not source.has("full_finetuning")


def _tuning(value: Any, source: KeySource) -> Meaning:
    return tuning(source, adapts=_adapts(source))


def _if_adapters(reader: Any) -> Any:
    """Return a reader that ignores the key if no adapters are trained: files of full training may hold it as well."""
    return lambda value, source: reader(value, source) if _adapts(source) else Meaning(said="no adapters are trained")


def _zero_is_not_given(name: str) -> Any:
    return lambda value, source: Meaning({name: value}) if is_on(value) else Meaning(said="0 there means not given")


def _save_steps(value: Any, source: KeySource) -> Meaning:
    if not is_on(value):
        return Meaning({"save_strategy": "epoch"}, "0 saves only at the end there; here you can resume from each epoch")
    return Meaning({"save_strategy": "steps", "save_steps": value})


@if_on
def _local(value: Any, source: KeySource) -> Meaning:
    files = value if isinstance(value, list) else [value]
    return Meaning(mixed([{"dataset": file} for file in files]))


@if_on
def _bias(value: Any, source: KeySource) -> Meaning:
    raise SettingsError(f"{value}: biases are not trained with adapters here; leave the key out, or write none")


ANSWERS = NoAction("it concerns answers, not training")
PARTS = NoAction("a text model has only these parts; lora_target_modules names what is adapted")
VISION = NoAction("only text is trained on here")

TABLE: Table = {
    "model": Alias("model_name_or_path"),
    "model_name": Alias("model_name_or_path"),
    "dataset": Alias("dataset"),
    "local_dataset": _local,
    "format_type": NoAction("the columns of the data determine it"),
    "training_type": _tuning,
    "full_finetuning": _tuning,
    "load_in_4bit": quantized(_adapts),
    "load_in_8bit": quantized(_adapts, load_in_8bit=True),
    "load_in_16bit": NoAction("frozen weights keep the type of their file"),
    "max_steps": _zero_is_not_given("max_steps"),
    "num_epochs": _zero_is_not_given("num_train_epochs"),
    "save_steps": _save_steps,
    "packing": isolated_packing,
    "train_on_completions": lambda value, source: Meaning(
        {"completion_only_loss": is_on(value), "assistant_only_loss": is_on(value)}
    ),
    "gradient_checkpointing": checkpointing,
    "use_gradient_checkpointing": checkpointing,
    "lora_r": _if_adapters(Alias("lora_r")),
    "r": _if_adapters(Alias("lora_r")),
    "lora_alpha": _if_adapters(Alias("lora_alpha")),
    "lora_dropout": _if_adapters(Alias("lora_dropout")),
    "target_modules": _if_adapters(targets),
    "use_rslora": _if_adapters(boolean("use_rslora")),
    "use_dora": _if_adapters(boolean("use_dora")),
    "use_loftq": _if_adapters(when_on(init_lora_weights="loftq")),
    "loftq_config": "write init_lora_weights: loftq",
    "bias": _bias,
    "fast_inference": ANSWERS,
    "vision_all_linear": VISION,
    "finetune_vision_layers": VISION,
    "finetune_language_layers": PARTS,
    "finetune_attention_modules": PARTS,
    "finetune_mlp_modules": PARTS,
    "enable_wandb": when_on(report_to="wandb"),
    "wandb_project": NoAction("set the environment variable of W&B: WANDB_PROJECT=... before the command"),
    "wandb_token": "log in with wandb login, or set the environment variable WANDB_API_KEY",
    "hf_token": "log in with hf auth login, or set the environment variable HF_TOKEN",
    "enable_tensorboard": when_on(report_to="tensorboard"),
    "tensorboard_dir": NoAction("TensorBoard's files are in logs/tensorboard of output_dir"),
    "log_frequency": Alias("logging_steps"),
    "save_model": NoAction("the model is always saved"),
    "save_path": Alias("output_dir"),
    "save_method": MERGING,
    "save_gguf": GGUF,
    "quantization": NoAction("it concerns what is saved as GGUF"),
    "push_model": "scu-trainer push RUN --repo_id OWNER/NAME",
    "push_gguf": GGUF,
    "hub_path": "scu-trainer push RUN --repo_id OWNER/NAME",
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p"), ANSWERS),
}

SIGNS = {*SECTIONS[1:4], "training_type", "max_seq_length", "random_state", "use_gradient_checkpointing",
         "train_on_completions", "finetune_mlp_modules"}  # fmt: skip


def defaults(source: KeySource) -> Iterator[tuple[str, Any]]:
    """Yield the defaults of Unsloth that differ from ours."""
    is_in_4_bits = is_on(source.entries.get("load_in_4bit", not is_on(source.entries.get("load_in_16bit"))))
    is_quantized = _adapts(source) and is_in_4_bits
    yield "tuning", "qlora" if is_quantized else ("lora" if _adapts(source) else "full")
    yield from {"block_size": 2048, "packing": False, "checkpoint_every_layer": True}.items()
    yield from {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "warmup_steps": 5}.items()
    yield from {"learning_rate": 2e-4, "weight_decay": 0.01, "seed": 3407, "optim": "adamw_8bit"}.items()
    yield from {"validation_split_percentage": 0, "completion_only_loss": False, "assistant_only_loss": False}.items()


def differences(source: KeySource) -> Iterator[str]:
    yield "a document longer than block_size continues in further rows; Unsloth cuts it off at max_seq_length"
