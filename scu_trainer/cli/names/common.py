"""Keys that mean the same everywhere: as flags, in our files, and in files of other programs."""

from __future__ import annotations

from typing import Any, Union, get_args, get_type_hints

from scu_trainer.cli.names.meaning import (
    Alias,
    KeySource,
    Meaning,
    NoAction,
    Reader,
    Switch,
    Table,
    boolean,
    if_on,
    is_on,
    quantized,
    tuning,
    words,
)
from scu_trainer.errors import SettingsError
from scu_trainer.settings.data import CHAT_TEMPLATES
from scu_trainer.settings.images import ImageSettings
from scu_trainer.settings.mixture import short_name

ARCHITECTURES = get_args(get_type_hints(ImageSettings)["architecture"])
ZERO = {"2": "ds_configs/zero2_offload.json", "3": "ds_configs/zero3_offload.json"}

MERGING = "scu-trainer merge RUN makes full weights of an adapter"

NEEDED = object()
"""Placeholder for a value that the user has to give as well."""

OPTIMIZERS = {
    "adamw8bit": "adamw_8bit",
    "adamw_hf": "adamw_torch",
    "pagedadamw8bit": "paged_adamw_8bit",
    "paged_adamw": "paged_adamw_32bit",
    "lion": "lion_32bit",
    "paged_lion": "paged_lion_32bit",
    "ao_adamw_8bit": "adamw_torch_8bit",
    "ao_adamw_4bit": "adamw_torch_4bit",
    "optimi_adamw": "stable_adamw",
    "stableadamw": "stable_adamw",
    "schedulefree": "schedule_free_adamw",
}

VALUE_SPELLINGS: dict[str, dict[str, Union[str, dict[str, Any]]]] = {
    "dataset": {
        "cifar10": {"dataset": "uoft-cs/cifar10"},
        "cifar100": {"dataset": "uoft-cs/cifar100"},
        "imagenet": {"dataset": "ILSVRC/imagenet-1k"},
        "custom": "give the path of your own: a folder with a folder per class, a saved dataset, or a Hub id",
    },
    "optim": {
        # Adam and AdamW are the same without weight decay; with it, Adam's is another method.
        "adam": {"optim": "adamw_torch_fused", "weight_decay": 0.0},
        "adamw": {"optim": "adamw_torch_fused"},
        "muon": {"use_muon": True},
        **{word: {"optim": name} for word, name in OPTIMIZERS.items()},
    },
    "lr_scheduler_type": {
        "step": {"lr_scheduler_type": "constant", "lr_step_size": NEEDED},
        "multi_step": {"lr_scheduler_type": "constant", "lr_milestones": NEEDED},
        "one_cycle": "use linear or cosine with a warmup instead: lr_scheduler_type: cosine, warmup_steps: 0.1",
    },
    "attn_implementation": {
        "flash": {"attn_implementation": "flash_attention_2"},
        "sdp": {"attn_implementation": "sdpa"},
        "flex": {"attn_implementation": "flex_attention"},
    },
}
"""Values of our fields that other programs spell differently, with our settings for them, or a text that says what to
do instead. Those of ``dataset`` apply only if no file or folder has that name."""


def with_prompts(value: Any, source: KeySource) -> Meaning:
    """Read a switch that makes prompts part of the loss."""
    if not is_on(value):
        return Meaning(said="only answers are learned here too")
    return Meaning({"completion_only_loss": False, "assistant_only_loss": False})


FILLED = "rows are filled with documents one after another; one that does not fit continues in the next row"


def isolated_packing(value: Any, source: KeySource) -> Meaning:
    if not is_on(value):
        return Meaning({"packing": False})
    return Meaning({"packing": True, "isolate_documents": True}, FILLED)


def targets(value: Any, source: KeySource) -> Meaning:
    """Read the modules to adapt: a list, a text with commas, or a word for all."""
    names = words(value)
    return Meaning({"lora_target_modules": ["all-linear"] if names in (["all"], ["all_linear"]) else names})


def mixed(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings of one dataset, or of a mixture whose sources have distinct names."""
    if len(entries) == 1:
        return {key: value for key, value in entries[0].items() if key != "name"}
    names = [entry.get("name") or short_name(entry["dataset"]) for entry in entries]
    for number, entry in enumerate(entries):
        if names.count(names[number]) > 1:
            entry["name"] = f"{names[number]}_{number + 1}"
    return {"dataset": entries}


def chat_template(value: Any, source: KeySource) -> Meaning:
    """Read the name of a chat template."""
    if value in CHAT_TEMPLATES:
        return Meaning({"chat_template": value}, "our template of that name, which may differ in details")
    return Meaning(said="the tokenizer's own chat template is used; chat_template: NAME_OR_FILE gives another")


def when_on(**settings: Any) -> Reader:
    """Return the reader of a key that means these settings if its value is on."""
    return if_on(lambda value, source: Meaning(settings))


def several(name: str) -> Any:
    """Return the reader of a list, or of a text with commas, for the field ``name``."""
    return lambda value, source: Meaning({name: words(value)})


def share_of_warmup(value: Any, source: KeySource) -> Meaning:
    """Read a warmup that is a share of the run. transformers 5 has one field for steps and share; older versions
    preferred steps if both were given."""
    if is_on(source.get("warmup_steps", 0)):
        return Meaning(said="warmup_steps overrides it")
    if not 0 <= float(value) < 1:  # warmup_steps reads 1 and more as steps
        raise SettingsError(
            f"{value} is not a share of the run, at least 0 and below 1, such as 0.1; give steps as warmup_steps"
        )
    return Meaning({"warmup_steps": float(value)})


def held_out(value: Any, source: KeySource) -> Meaning:
    """Read the share of documents to hold out. Other programs also take a number of documents."""
    if not is_on(value) or float(value) == 0:
        return Meaning({"validation_split_percentage": 0})
    if float(value) < 1:
        return Meaning({"validation_split_percentage": float(f"{100 * float(value):.10g}")})
    raise SettingsError(
        f"{value} is a number of documents, but a share is needed here: write validation_split_percentage, in percent, "
        "with max_eval_documents as a cap"
    )


def checkpointing(value: Any, source: KeySource) -> Meaning:
    """Read the switch for activation checkpointing. "unsloth" and "offload" are other ways, with the same results."""
    note = "" if str(value).lower() in ("true", "false", "none") else f"{value} is a separate implementation there"
    return Meaning({"checkpoint_every_layer": is_on(value)}, note)


def adapts(value: Any, source: KeySource) -> Meaning:
    return tuning(source, adapts=is_on(value))


PADDED = NoAction("rows are padded to the longest of their micro-batch, which changes no result")
REMOVED_FIELDS = {
    "logging_dir": NoAction("TensorBoard's files are in logs/tensorboard of output_dir"),
    "overwrite_output_dir": NoAction(
        "no run is overwritten: an unfinished one of the same configuration resumes, another one starts next to it"
    ),
    "overwrite_cache": NoAction(
        "prepared data are keyed by their source and settings, and prepared again when these change"
    ),
    "save_safetensors": NoAction("weights are always saved as safetensors"),
    "tf32_mode": "write tf32: true or false",
    "fp16_opt_level": "transformers no longer supports apex; fp16: true is torch's own",
    **dict.fromkeys(("half_precision_backend", "fp16_backend"), NoAction("transformers now has only torch's own")),
    "sharded_ddp": "use fsdp, or deepspeed",
    "tpu_num_cores": "TPUs are not supported here",
    "use_ipex": "torch's own kernels are used on CPUs",
}
"""Former fields of ``transformers.TrainingArguments``."""

ALIASES = {
    "lora_r": ("adapter_rank", "lora_rank"),
    "per_device_train_batch_size": ("batch_size", "micro_batch_size", "per_gpu_train_batch_size", "train_batch_size"),
    "output_dir": ("checkpoint_dir", "output"),
    "dataset": ("data_path", "dataset_name"),
    "dataset_config_name": ("dataset_config",),
    "early_stopping_patience": ("early_stopping_rounds", "patience"),
    "num_train_epochs": ("epochs", "max_epochs", "num_epochs"),
    "per_device_eval_batch_size": ("eval_batch_size", "per_gpu_eval_batch_size"),
    "eval_strategy": ("evaluation_strategy",),
    "gradient_accumulation_steps": ("grad_accum", "grad_accum_steps"),
    "max_grad_norm": ("gradient_clipping",),
    "logging_steps": ("log_interval",),
    "learning_rate": ("lr",),
    "lr_scheduler_type": ("lr_scheduler", "scheduler"),
    "dataset_size": ("max_samples", "max_train_samples"),
    "max_eval_documents": ("max_eval_samples",),
    "block_size": ("max_length", "max_seq_len", "max_seq_length", "model_max_length", "seq_len", "seq_length"),
    "model_name_or_path": ("model_id", "model_name", "pretrained_model_name_or_path"),
    "dataloader_num_workers": ("num_workers",),
    "optim": ("optimizer",),
    "hub_model_id": ("push_to_hub_model_id",),
    "seed": ("random_seed", "random_state"),
    "dtype": ("torch_dtype",),
    "weight_decay": ("wd",),
}
"""Names that other programs use for our fields."""

NAMES: Table = {
    **REMOVED_FIELDS,
    **{alias: Alias(name) for name, aliases in ALIASES.items() for alias in aliases},
    "adafactor": Switch({"optim": "adafactor"}),
    "amp": Switch({"mixed_precision": "auto"}),
    "bnb_4bit_compute_dtype": NoAction("computations with 4-bit weights use the type of mixed_precision"),
    "checkpoint_interval": "write save_strategy: epoch with save_epochs: N, or save_steps: N",
    "double_quantization": boolean("bnb_4bit_use_double_quant"),
    "early_stopping": "write early_stopping_patience: N, evaluations without an improvement",
    "enable_amp": Switch({"mixed_precision": "auto"}),
    "enable_gradient_checkpointing": checkpointing,
    "fused_optimizer": Switch({"optim": "adamw_torch_fused"}),
    "group_by_length": Switch({"train_sampling_strategy": "group_by_length"}),
    "load_in_4bit": quantized(lambda source: True),
    "log_file": "the log of a run is logs/train.log in its output_dir",
    "lora": Switch({"tuning": "lora"}, {"tuning": "full"}),
    "lora_modules_to_save": several("modules_to_save"),
    "model": Alias(lambda value: "architecture" if value in ARCHITECTURES else "model_name_or_path"),
    "momentum": Alias("optim_args", form="momentum={}"),
    "multi_gpu": "start one process per GPU: torchrun --nproc_per_node 2 scripts/train.py ..., or accelerate launch",
    "no_amp": Switch({"mixed_precision": "no"}),
    "no_checkpointing": Switch({"checkpoint_every_layer": False}),
    "no_cuda": Switch({"use_cpu": True}),
    "peft": adapts,
    "push_to_hub_token": "log in with hf auth login, or set the environment variable HF_TOKEN",
    "qlora": Switch({"tuning": "qlora"}),
    "quantize": "write tuning: qlora (4 bits), with load_in_8bit: true for 8",
    "save_interval": "write save_steps: N, or save_strategy: epoch with save_epochs: N",
    "target_modules": targets,
    "use_4bit": quantized(lambda source: True),
    "use_bf16": Switch({"mixed_precision": "bf16"}),
    "use_fp16": Switch({"mixed_precision": "fp16"}),
    "use_gradient_checkpointing": checkpointing,
    "use_lora": Switch({"tuning": "lora"}, {"tuning": "full"}),
    "use_mps_device": NoAction("an Apple GPU is used if there is one"),
    "use_nested_quant": boolean("bnb_4bit_use_double_quant"),
    "use_qlora": Switch({"tuning": "qlora"}),
    "val_size": held_out,
    "val_set_size": held_out,
    "warmup_ratio": share_of_warmup,
    "zero_stage": Alias("deepspeed", ZERO),
    "4bit_quantization": Switch({"tuning": "qlora"}),
}
"""Meaning of each name that means the same everywhere, without dashes in front, and with underscores for hyphens."""
