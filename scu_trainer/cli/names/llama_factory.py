"""LLaMA-Factory: ``llamafactory-cli train FILE`` (its argument classes of August 2026)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scu_trainer.cli.names.common import (
    FILLED,
    MERGING,
    chat_template,
    held_out,
    isolated_packing,
    mixed,
    several,
    targets,
    with_prompts,
)
from scu_trainer.cli.names.meaning import (
    Alias,
    KeySource,
    Meaning,
    NoAction,
    Switch,
    Table,
    if_on,
    is_on,
    read,
    tuning,
    words,
)
from scu_trainer.cli.names.trl import WITH_LOOPS
from scu_trainer.errors import SettingsError, did_you_mean

TITLE, SECTIONS = "LLaMA-Factory", ()
INFO = "dataset_info.json"
PAIRS = ("dpo", "kto", "rm", "ppo")
FIXED_COLUMNS = ("history", "tools", "images", "videos", "audios", "chosen", "rejected", "kto_tag")
"""Columns of an entry in dataset_info.json that cannot have another name here."""
ATTENTION = {"fa2": "flash_attention_2", "fa3": "flash_attention_3", "disabled": "eager"}


# -- what is trained ---------------------------------------------------------------------------------------------------


def _stage(value: Any, source: KeySource) -> Meaning:
    if value in PAIRS:
        raise SettingsError(f"{value} is another kind of training than next-token prediction; {WITH_LOOPS}")
    if value not in ("sft", "pt"):
        raise SettingsError(f"{value} is not a stage of LLaMA-Factory that is known here; use pt or sft")
    return Meaning(said="it trains on text, and the columns of the data determine what is masked")


def _training(value: Any, source: KeySource) -> Meaning:
    if not is_on(value):
        raise SettingsError("it is false, but this command trains; to evaluate, use scu-trainer eval RUN_OR_MODEL")
    return Meaning(said="scu-trainer train always trains")


def _tuning(value: Any, source: KeySource) -> Meaning:
    if value == "freeze":
        return Meaning(
            {"tuning": "full"}, "all weights are trained unless trainable_parameters names those to train", is_lost=True
        )
    if value not in ("lora", "full"):
        raise SettingsError(f"{value} is not an adapter type here; use lora or full")
    return tuning(source, adapts=value == "lora")


def _quantized(value: Any, source: KeySource) -> Meaning:
    if str(value) not in ("4", "8"):
        raise SettingsError(f"bitsandbytes has no quantization to {value} bits; use 4 or 8")
    return tuning(source, adapts=source.get("finetuning_type", "lora") == "lora")


def _quantizer(value: Any, source: KeySource) -> Meaning:
    if value in ("bnb", "bitsandbytes"):
        return Meaning(said="weights are quantized by bitsandbytes here too")
    raise SettingsError(f"{value} is not a quantization method here; use bnb")


@if_on
def _pissa(value: Any, source: KeySource) -> Meaning:
    return Meaning({"init_lora_weights": "pissa"}, "the decomposition is exact, and pissa_iter is ignored")


def _low_rank(name: str, optimizer: str, arguments: Mapping[str, str]) -> Any:
    """Return the reader of the switch for GaLore or APOLLO: an optimizer with its modules and arguments."""

    @if_on
    def read_switch(value: Any, source: KeySource) -> Meaning:
        modules = words(source.get(f"{name}_target", "all"))
        given = [f"{ours}={source.get(f'{name}_{theirs}')}" for theirs, ours in arguments.items()
                 if source.get(f"{name}_{theirs}") is not None]  # fmt: skip
        layerwise = "_layerwise" if source.has(f"{name}_layerwise") else ""
        settings = {
            "optim": optimizer + layerwise,
            "optim_target_modules": ["attn", "mlp"] if modules == ["all"] else modules,
        }
        return Meaning({**settings, **({"optim_args": ",".join(given)} if given else {})})

    return read_switch


def _option_of(name: str) -> Any:
    """Return the reader of an option that belongs to the switch ``name``."""
    return lambda value, source: Meaning(said=f"read together with {name}" if source.has(name) else f"{name} is off")


# -- data --------------------------------------------------------------------------------------------------------------


def _datasets(value: Any, source: KeySource) -> Meaning:
    """Read the names of entries in dataset_info.json."""
    entries = [_entry(name, source) for name in words(value)]
    shares = words(source.get("interleave_probs", ""))
    if shares:
        entries = [{**entry, "weight": float(share)} for entry, share in zip(entries, shares, strict=False)]
    return Meaning(mixed(entries))


def _held_out_set(value: Any, source: KeySource) -> Meaning:
    names = words(value)
    if len(names) != 1:
        raise SettingsError(f"{value} names {len(names)} datasets, but only one can be held out here; keep one of them")
    entry = _entry(names[0], source)
    return Meaning({"eval_dataset": entry["dataset"]})


def _entry(name: str, source: KeySource) -> dict[str, Any]:
    """Return a dataset as an entry of a mixture."""
    if source.get("dataset_dir") == "ONLINE":
        return {"dataset": name, "name": name.replace("/", "-")}
    path = _info_path(source)
    info = _info(path, name)
    if info.get("ranking"):
        raise SettingsError(f"{name} holds preferences ({path}), but this command trains on text; {WITH_LOOPS}")
    location = _path_or_hub_id(info, path, name)
    result = {
        "dataset": location,
        "name": name,
        "dataset_config_name": info.get("subset"),
        "dataset_size": info.get("num_samples"),
    }
    result["dataset_size"] = result["dataset_size"] or source.get("max_samples")
    result["dataset_split"] = None if info.get("split") in (None, "train") else info["split"]
    result |= _columns(info, name, is_text=source.get("stage") == "pt")
    return {field: value for field, value in result.items() if value is not None}


def _info_path(source: KeySource) -> Path:
    """Find dataset_info.json: below the current folder, as LLaMA-Factory does, below that of the file, or one above."""
    folder = Path(str(source.get("dataset_dir", "data")))
    file_folders = [] if source.folder is None else [source.folder / folder, source.folder.parent / folder]
    info_path = next(
        (path for path in (folder / INFO, *(parent / INFO for parent in file_folders)) if path.is_file()), None
    )
    if info_path is None:
        raise SettingsError(
            f"its entry should be in {folder / INFO}, which does not exist; add --dataset FILE_OR_HUB_ID, or run this "
            "in the folder that holds LLaMA-Factory's data folder"
        )
    return info_path


def _info(path: Path, name: str) -> Mapping[str, Any]:
    try:
        entries = json.loads(path.read_text())
        info = entries.get(name)
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise SettingsError(f"cannot read {path}: {error}; it must be a JSON mapping of datasets") from error
    if not isinstance(info, dict):
        raise SettingsError(f"{name} is not in {path}{did_you_mean(name, entries)}")
    return info


def _path_or_hub_id(info: Mapping[str, Any], path: Path, name: str) -> str:
    if info.get("hf_hub_url"):
        return info["hf_hub_url"]
    if info.get("file_name"):
        return str(path.parent / info["file_name"])
    raise SettingsError(f"{name} has neither file_name nor hf_hub_url in {path}; add --dataset FILE_OR_HUB_ID")


def _columns(info: Mapping[str, Any], name: str, is_text: bool) -> dict[str, Any]:
    columns = dict(info.get("columns") or {})
    renamed = [key for key in FIXED_COLUMNS if columns.get(key) not in (None, key)]
    if renamed:
        raise SettingsError(
            f"{name} has its {renamed[0]} in the column {columns[renamed[0]]}; name it {renamed[0]} in the data"
        )
    if columns.get("query") not in (None, "", "input"):
        raise SettingsError(f"{name} has its query in the column {columns['query']}; name it input in the data")
    if is_text:
        return {"text_column": columns.get("prompt")}
    names = {"prompt": "prompt_column", "response": "response_column", "messages": "messages_column"}
    names["system"] = "system_column"
    return {ours: columns.get(theirs) for theirs, ours in names.items()}


def _mix(value: Any, source: KeySource) -> Meaning:
    known = {"interleave_under": "first_exhausted", "interleave_once": "first_exhausted"}
    known["interleave_over"] = "all_exhausted"
    if value == "concat":
        return Meaning(said="sources are concatenated here too")
    if value not in known:
        raise SettingsError(f"{value} is not a known way to mix datasets{did_you_mean(str(value), known)}")
    return Meaning({"stopping_strategy": known[value]})


def _packing(value: Any, source: KeySource) -> Meaning:
    if not is_on(value):
        return Meaning({"packing": False})
    return Meaning({"packing": True, "isolate_documents": source.has("neat_packing")}, FILLED)


ANSWERS = NoAction("it concerns answers, not training; docs/talk.md")
PLOTS = NoAction("scu-trainer report RUN draws the curves")
BADAM = NoAction("read together with use_badam")
VISION = (
    "image_max_pixels",
    "image_min_pixels",
    "video_max_pixels",
    "video_min_pixels",
    "video_fps",
    "video_maxlen",
    "freeze_vision_tower",
    "freeze_multi_modal_projector",
    "freeze_language_model",
)
GALORE = {"rank": "rank", "update_interval": "update_proj_gap", "scale": "scale", "proj_type": "proj_type"}
APOLLO = {**GALORE, "proj": "proj", "scale_type": "scale_type"}

TABLE: Table = {
    "stage": _stage,
    "do_train": _training,
    "finetuning_type": _tuning,
    "quantization_bit": _quantized,
    "quantization_method": _quantizer,
    "quantization_type": Alias("bnb_4bit_quant_type"),
    "quantization_device_map": Alias("device_map"),
    "lora_target": targets,
    "additional_target": several("modules_to_save"),
    "create_new_adapter": "an adapter is trained further; merge it first for a new one: scu-trainer merge RUN",
    "pissa_init": _pissa,
    "pissa_iter": NoAction("the decomposition of pissa_init is exact here, so it takes no iterations"),
    "pissa_convert": NoAction("saved adapters already fit the original weights"),
    "loraplus_lr_embedding": "embeddings use the same learning rate as all other weights",
    "use_galore": _low_rank("galore", "galore_adamw", GALORE),
    "use_apollo": _low_rank("apollo", "apollo_adamw", APOLLO),
    **{f"galore_{key}": _option_of("use_galore") for key in (*GALORE, "target", "layerwise")},
    **{f"apollo_{key}": _option_of("use_apollo") for key in (*APOLLO, "target", "layerwise", "scale_front")},
    "use_badam": "this program does not have that optimizer; optim: galore_adamw or adamw_8bit save memory as well",
    "use_adam_mini": "this program does not have that optimizer; optim: adamw_8bit saves memory as well",
    "use_llama_pro": "write trainable_parameters with a pattern of the layers to train",
    "freeze_trainable_layers": "write trainable_parameters with a pattern of the layers to train",
    "freeze_trainable_modules": "write trainable_parameters with a pattern of the modules to train",
    "freeze_extra_modules": "write trainable_parameters with a pattern of the modules to train",
    "use_dft_loss": "the loss is that of the next token; SCUTrainer takes a loss of your own: docs/own_model.md",
    "use_eaft_loss": "the loss is that of the next token; SCUTrainer takes a loss of your own: docs/own_model.md",
    "use_asft_loss": "the loss is that of the next token; SCUTrainer takes a loss of your own: docs/own_model.md",
    "pure_bf16": Switch({"dtype": "bfloat16"}),
    "enable_liger_kernel": Switch({"use_liger_kernel": True}),
    "flash_attn": lambda value, source: (
        Meaning(said="the fastest one that is installed is used here too")
        if value == "auto"
        else Meaning({"attn_implementation": ATTENTION.get(value, value)})
    ),
    "disable_gradient_checkpointing": lambda value, source: Meaning({"checkpoint_every_layer": not is_on(value)}),
    "use_reentrant_gc": NoAction("checkpointing gives the same numbers either way"),
    "low_cpu_mem_usage": NoAction("weights are always loaded without a second copy"),
    "use_fast_tokenizer": NoAction("the fast tokenizers are used"),
    "upcast_layernorm": "norms keep the type of the weights: dtype",
    "upcast_lmhead_output": NoAction("the loss is computed in float32"),
    "train_from_scratch": "start from a folder with a config.json and no weights",
    "rope_scaling": "write it into the config.json of the model",
    "shift_attn": "there is no such attention here",
    "mixture_of_depths": "there is no such model here",
    "use_unsloth": NoAction("Unsloth's kernels are not included here"),
    "use_unsloth_gc": NoAction("checkpoint_every_layer gives the same numbers"),
    "moe_aux_loss_coef": "the auxiliary loss of experts is the model's own: output_router_logits of its config.json",
    "resize_vocab": NoAction("the embedding grows when tokens are added"),
    **dict.fromkeys(("add_tokens", "add_special_tokens"), several("new_tokens")),
    "hf_hub_token": "log in with hf auth login, or set the environment variable HF_TOKEN",
    "print_param_status": NoAction("the report names what is trained"),
    "template": chat_template,
    "dataset": _datasets,
    "eval_dataset": _held_out_set,
    "dataset_dir": NoAction("read together with dataset"),
    "media_dir": NoAction("this task does not support images in text"),
    "cutoff_len": Alias("block_size"),
    "train_on_prompt": with_prompts,
    "mask_history": "all answers of a conversation are learned",
    "buffer_size": NoAction("a stream is read in the order of its source, without a shuffle buffer"),
    "mix_strategy": _mix,
    "interleave_probs": NoAction("read together with dataset"),
    "preprocessing_batch_size": NoAction("it changes no result"),
    "max_samples": lambda value, source: (
        Meaning(said="read together with dataset") if source.get("dataset") else Meaning({"dataset_size": value})
    ),
    "ignore_pad_token_for_loss": NoAction("padding is never learned"),
    "val_size": held_out,
    "eval_on_each_dataset": NoAction("a mixture is scored for each of its sources"),
    "packing": _packing,
    "neat_packing": lambda value, source: (
        isolated_packing(value, source) if is_on(value) else Meaning(said="read together with packing")
    ),
    "tool_format": NoAction("tools are written by the chat template"),
    "default_system": "write it into the rows, in a column named system",
    "enable_thinking": NoAction("reasoning in the rows is written by the chat template"),
    "preserve_thinking": NoAction("reasoning in the rows is written by the chat template"),
    "tokenized_path": NoAction("prepared data are kept in cache_dir, keyed by their source and settings"),
    "data_shared_file_system": NoAction("one process prepares the data, the others wait"),
    "plot_loss": PLOTS,
    "include_effective_tokens_per_second": Switch({"throughput": True}),
    "compute_accuracy": "a language model is scored in bits per token; scu-trainer eval also runs tasks of lm-eval",
    "disable_shuffling": Switch({"train_sampling_strategy": "sequential"}),
    "early_stopping_steps": Alias("early_stopping_patience"),
    "enable_torch_profiler": "write profile_steps: N",
    "use_swanlab": "report_to: tensorboard or wandb",
    "ray_num_workers": "Ray is not supported; docs/launch.md lists the launchers that are",
    "fp8": "there is no training in 8 bits here; optim: adamw_8bit and tuning: qlora save memory",
    **dict.fromkeys(VISION, NoAction("only text is trained on here")),
    **dict.fromkeys(("fp8_backend", "fp8_enable_fsdp_float8_all_gather"), NoAction("read together with fp8")),
    **dict.fromkeys(("badam_mode", "badam_switch_mode", "badam_switch_interval", "badam_verbose"), BADAM),
    **dict.fromkeys(
        ("use_kt", "use_megatron_bridge", "use_mca"), "this program does not have that training method; docs/paths.md"
    ),
    **dict.fromkeys(
        ("max_new_tokens", "do_sample", "temperature", "top_p", "top_k", "num_beams", "max_length"), ANSWERS
    ),
    **dict.fromkeys(
        ("infer_backend", "infer_dtype", "use_kv_cache", "predict_with_generate", "eval_num_beams"), ANSWERS
    ),
    **dict.fromkeys(("export_dir", "export_size", "export_device", "export_legacy_format"), MERGING),
    **dict.fromkeys(("pref_beta", "pref_loss", "pref_ftx", "ref_model", "reward_model"), WITH_LOOPS),
}

SIGNS = {"stage", "finetuning_type", "cutoff_len", "template", "lora_target", "dataset_dir", "quantization_bit"}


def defaults(source: KeySource) -> Iterator[tuple[str, Any]]:
    """Yield the defaults of LLaMA-Factory that differ from ours."""
    if source.get("finetuning_type", "lora") == "lora":
        yield from read(TABLE, "finetuning_type", "lora", source).settings.items()
        yield "lora_alpha", 2 * int(source.get("lora_rank", 8))
    else:
        yield "tuning", "full"
    is_text = source.get("stage", "sft") == "pt"
    yield from {"block_size": 2048, "packing": is_text, "checkpoint_every_layer": True}.items()
    if is_text:
        yield "isolate_documents", False
    yield "validation_split_percentage", 0


def differences(source: KeySource) -> Iterator[str]:
    yield "a document longer than block_size continues in further rows; LLaMA-Factory cuts it off at cutoff_len"
