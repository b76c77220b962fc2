"""Axolotl: ``axolotl train FILE`` (its schemas of July 2026)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Optional

from scu_trainer.cli.names.common import (
    FILLED,
    PADDED,
    chat_template,
    checkpointing,
    held_out,
    isolated_packing,
    mixed,
    several,
    targets,
    when_on,
    with_prompts,
)
from scu_trainer.cli.names.meaning import (
    Alias,
    KeySource,
    Meaning,
    NoAction,
    Switch,
    Table,
    boolean,
    if_on,
    is_on,
    quantized,
    tuning,
    words,
)
from scu_trainer.cli.names.trl import WITH_LOOPS
from scu_trainer.errors import SettingsError
from scu_trainer.settings.data import CHAT_TEMPLATES

TITLE, SECTIONS = "Axolotl", ()
ATTENTION = {
    "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
}
TEMPLATES = {"phi_3": "phi3", **{name: name for name in CHAT_TEMPLATES}}
OWN_TEMPLATE = "tokenizer_default"
PROMPTS = {"alpaca": "alpaca", "alpaca_chat.load_qa": "alpaca"}
"""Dataset types with an instruction and an answer, and the template that formats them the same way."""


# -- what is trained ---------------------------------------------------------------------------------------------------


def _adapter(value: Any, source: KeySource) -> Meaning:
    if is_on(value) and value not in ("lora", "qlora"):
        raise SettingsError(f"{value} is not an adapter type here; use lora or qlora")
    return tuning(source, adapts=is_on(value))


def _adapts(source: KeySource) -> bool:
    return source.has("adapter")


def _targets(value: Any, source: KeySource) -> Meaning:
    if source.has("lora_target_linear"):
        return Meaning(said="lora_target_linear adds every linear layer")
    return targets(value, source)


@if_on
def _preferences(value: Any, source: KeySource) -> Meaning:
    raise SettingsError(f"{value} is another kind of training than next-token prediction; {WITH_LOOPS}")


def _number_format(name: str, auto: Meaning) -> Any:
    return lambda value, source: auto if value == "auto" else Meaning({name: is_on(value)})


def _minimum_rate(value: Any, source: KeySource) -> Meaning:
    kwargs = {"min_lr_rate": float(value)}
    return Meaning({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": kwargs})


def _scheduler(value: Any, source: KeySource) -> Meaning:
    if source.get("cosine_min_lr_ratio"):
        return Meaning(said="read together with cosine_min_lr_ratio")
    return Meaning({"lr_scheduler_type": value})


def _optimizer_arguments(value: Any, source: KeySource) -> Meaning:
    if isinstance(value, Mapping):
        value = ",".join(f"{key}={item}" for key, item in value.items())
    return Meaning({"optim_args": value})


def _total_batch(value: Any, source: KeySource) -> Meaning:
    if source.get("gradient_accumulation_steps"):
        return Meaning(said="gradient_accumulation_steps sets it")
    rows = int(source.get("micro_batch_size", 1))
    return Meaning({"gradient_accumulation_steps": max(1, int(value) // rows)})


# -- when --------------------------------------------------------------------------------------------------------------


def _per_epoch(kind: str) -> Any:
    """Return the reader of a number per epoch, which becomes a share of the run."""

    @if_on
    def read_rate(value: Any, source: KeySource) -> Meaning:
        if kind == "eval" and not _has_held_out(source):
            return Meaning(said="nothing is held out")
        epochs = float(source.get("num_epochs", 1))
        times_per_run = float(value) * epochs
        if times_per_run == 1:
            return Meaning({f"{kind}_strategy": "epoch"})
        if times_per_run < 1:
            return Meaning(said=f"{value} per epoch is less than once per run; it happens only at the end")
        return Meaning({f"{kind}_strategy": "steps", f"{kind}_steps": float(f"{1 / times_per_run:.10g}")})

    return read_rate


def _has_held_out(source: KeySource) -> bool:
    return float(source.get("val_set_size", 0)) > 0 or bool(source.get("test_datasets"))


# -- data --------------------------------------------------------------------------------------------------------------


def _datasets(value: Any, source: KeySource) -> Meaning:
    return _read_sets(value, "datasets", TEMPLATES.get(source.get("chat_template"), OWN_TEMPLATE))


def _pretraining(value: Any, source: KeySource) -> Meaning:
    value = value if isinstance(value, list) else [{"path": value} if isinstance(value, str) else value]
    meaning = _read_sets([{**entry, "type": "completion"} for entry in value], "pretraining_dataset")
    return Meaning({**meaning.settings, "streaming": True}, meaning.said)


def _read_sets(value: Any, key: str, chat_default: str = OWN_TEMPLATE) -> Meaning:
    """Read a list of datasets. ``chat_default``: the template of conversations that name none."""
    if not isinstance(value, list) or not value or not all(isinstance(entry, Mapping) for entry in value):
        raise SettingsError(f"it is not a list of datasets; write {key}: with - path: FILE_OR_HUB_ID below it")
    sets = [_entry(entry) for entry in value]
    templates = {chat_default if template == OWN_TEMPLATE else template for _, template in sets if template is not None}
    if len(templates) > 1:
        raise SettingsError(
            f"it asks for the templates {', '.join(sorted(templates))}; only one can be used for all rows: keep the "
            "datasets of one of them, or write chat_template: NAME into the file, with a template that fits all rows"
        )
    templates.discard(OWN_TEMPLATE)
    return Meaning({**mixed([entry for entry, _ in sets]), **({"chat_template": templates.pop()} if templates else {})})


def _entry(entry: Mapping[str, Any]) -> tuple[dict[str, Any], Optional[str]]:
    """Return a dataset as an entry of a mixture, and its chat template if it names one."""
    given = {key: value for key, value in entry.items() if is_on(value)}
    kind = given.pop("type", "")
    files = given.pop("data_files", None)
    path = given.pop("path", "")
    if files:
        names = words(files)
        if len(names) > 1:
            raise SettingsError(f"it has {len(names)} data_files; put them into a folder, or list each as a dataset")
        path = names[0]
    result = {"dataset": path, "dataset_config_name": given.pop("name", None)}
    split = given.pop("split", "train")
    result["dataset_split"] = None if split == "train" else split
    template = _read_row_type(kind, given, result)
    given.pop("ds_type", None)
    for key in ("trust_remote_code", "train_on_eos", "train_on_eot"):
        _require_usual(key, given.pop(key, None))
    result["text_column"] = given.pop("text_column", result.get("text_column"))
    unsupported = sorted(key for key in given if key not in ("roles", "message_property_mappings"))
    if unsupported:
        raise SettingsError(
            f"{path} has {', '.join(unsupported)}, which has no counterpart here; docs/data.md lists what is read"
        )
    return {key: item for key, item in result.items() if item is not None}, template


def _require_usual(key: str, value: Any) -> None:
    if value not in (None, False, "turn", "last"):
        raise SettingsError(f"it has {key}: {value}; here the end of each learned turn is always learned")


def _read_row_type(kind: Any, given: dict[str, Any], result: dict[str, Any]) -> Optional[str]:
    """Set the columns of ``result`` by the type of its rows, and return the chat template that the type implies."""
    if isinstance(kind, Mapping):
        return _custom_columns(kind, result)
    if kind in PROMPTS:
        return PROMPTS[kind]
    if kind == "completion":
        result["text_column"] = given.pop("field", None)
    elif kind in ("chat_template", "sharegpt", "chat_template.default"):
        result["messages_column"] = given.pop("field_messages", None)
        given.pop("template_thinking_key", None)
        for key in ("message_field_role", "message_field_content", "roles_to_train", "conversation", "field_thinking"):
            _require_known(key, given.pop(key, None))
        return _template_of(given.pop("chat_template", None))
    elif kind:
        raise SettingsError(
            f"it has rows of the type {kind}, which is not read here; use alpaca, completion or chat_template "
            "(docs/data.md lists the columns)"
        )
    return None


def _require_known(key: str, value: Any) -> None:
    """Raise SettingsError for names of fields and roles that are not recognized automatically."""
    known = {"role", "content", "from", "value", "chatml"}
    if key == "roles_to_train":
        known = {"assistant", "gpt"}
    if key == "field_thinking":
        known = {"reasoning_content", "reasoning", "thinking"}
    unsupported = [item for item in words(value or "") if item not in known]
    if unsupported:
        raise SettingsError(f"it has {key}: {', '.join(unsupported)}; known here: {', '.join(sorted(known))}")


def _custom_columns(kind: Mapping[str, Any], result: dict[str, Any]) -> None:
    """Set the columns of ``result`` from a ``type`` that is a mapping. A custom format has to be a chat template."""
    names = {"field_instruction": "prompt_column", "field_output": "response_column", "field_system": "system_column"}
    result.update({ours: kind.get(theirs) for theirs, ours in names.items()})
    unsupported = sorted(key for key, value in kind.items() if key not in names and value not in (None, "", "input"))
    if unsupported:
        raise SettingsError(
            f"it has a type with {', '.join(unsupported)}; write the format as a Jinja file: chat_template: FILE"
        )


def _template_of(value: Any) -> str:
    if not value or str(value).startswith("tokenizer_default"):
        return OWN_TEMPLATE
    if value not in TEMPLATES:
        raise SettingsError(
            f"it has the chat_template {value}; known here: {', '.join(TEMPLATES)}, tokenizer_default, or a Jinja file"
        )
    return TEMPLATES[value]


def _chat_template(value: Any, source: KeySource) -> Meaning:
    if value == "jinja":
        return Meaning(said="read together with chat_template_jinja")
    return chat_template(TEMPLATES.get(value), source)


def _jinja(value: Any, source: KeySource) -> Meaning:
    if str(value).endswith((".jinja", ".j2")):
        return Meaning({"chat_template": value})
    return Meaning(said="save it as a file: chat_template: FILE.jinja", is_lost=True)


def _held_out_sets(value: Any, source: KeySource) -> Meaning:
    dataset = _read_sets(value, "test_datasets").settings["dataset"]
    if not isinstance(dataset, str):
        raise SettingsError(f"{len(dataset)} datasets are held out, but only one can be here; keep one of them")
    return Meaning({"eval_dataset": dataset})


def _special_tokens(value: Any, source: KeySource) -> Meaning:
    """Read special tokens, of which only the padding token may differ, because it is masked."""
    unsupported = sorted(key for key, item in (value or {}).items() if item and key != "pad_token")
    if unsupported:
        return Meaning(
            said=f"{', '.join(unsupported)}: change them in the tokenizer, and save it next to the model", is_lost=True
        )
    return Meaning(said="padding is masked, whichever token it is")


def _plugins(value: Any, source: KeySource) -> Meaning:
    unsupported = [name for name in words(value) if "liger" not in name.lower()]
    if unsupported:
        return Meaning(said=f"{', '.join(unsupported)}: plugins of other programs do not run here", is_lost=True)
    return Meaning({"use_liger_kernel": True})


PROGRAM = NoAction("it only controls how Axolotl itself works")
KERNELS = if_on(NoAction("it selects a kernel with the same results; use_liger_kernel: true uses others here"))
WATCH = "a run ends when its loss diverges permanently, not when it is above a fixed value"

TABLE: Table = {
    "base_model": Alias("model_name_or_path"),
    "base_model_config": "the configuration is next to the weights: model_name_or_path",
    "revision_of_model": Alias("model_revision"),
    "tokenizer_config": "the tokenizer is next to the model",
    **dict.fromkeys(("model_type", "type_of_model", "tokenizer_type", "processor_type", "is_llama_derived_model",
                     "is_mistral_derived_model", "is_falcon_derived_model", "is_qwen_derived_model"),
                    NoAction("the class follows from config.json")),
    **dict.fromkeys(("strict", "axolotl_config_path", "is_preprocess", "skip_prepare_dataset", "dataset_keep_in_memory",
                     "shuffle_merged_datasets", "dataset_shard_num", "dataset_shard_idx", "tokenizer_use_fast",
                     "tokenizer_legacy", "gc_steps", "sample_packing_group_size", "sample_packing_bin_size",
                     "sample_packing_eff_est", "multipack_real_batches", "save_first_step"), PROGRAM),
    "adapter": _adapter,
    "load_in_4bit": quantized(_adapts),
    "load_in_8bit": quantized(_adapts, load_in_8bit=True),
    "lora_model_dir": Alias("adapter_name_or_path"),
    "lora_target_modules": _targets,
    "lora_target_linear": when_on(lora_target_modules=["all-linear"]),
    "lora_target_parameters": "adapters go to modules here: lora_target_modules",
    "lora_modules_to_save": several("modules_to_save"),
    "lora_fan_in_fan_out": NoAction("peft detects it"),
    "lora_on_cpu": "an adapter is loaded where it is trained",
    **dict.fromkeys(("use_kernels", "use_scattermoe", "use_sonicmoe", "fused_attn_kernel", "flash_attn_cross_entropy",
                     "flash_attn_fuse_mlp", "flash_attn_rms_norm", "flash_optimum", "cut_cross_entropy", "tiled_mlp",
                     "llama4_linearized_experts", "experts_implementation",
                     "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"), KERNELS),
    "peft_use_dora": boolean("use_dora"),
    "peft_use_rslora": boolean("use_rslora"),
    "peft_init_lora_weights": lambda value, source: Meaning({"init_lora_weights": str(value).lower()}),
    "peft_layers_to_transform": Alias("layers_to_transform"),
    "loraplus_lr_embedding": "embeddings use the same learning rate as all other weights",
    "relora": "adapters are not merged during training here",
    "unfrozen_parameters": several("trainable_parameters"),
    "gptq": "GPTQ weights cannot be trained here; tuning: qlora quantizes unquantized weights when it loads them",
    "reinit_weights": "start from a folder with a config.json and no weights",
    **dict.fromkeys(("rl", "reward_model", "process_reward_model", "diffusion"), _preferences),
    "trl": WITH_LOOPS,
    "num_labels": "texts are not classified here",
    "bf16": _number_format("bf16", Meaning({"mixed_precision": "auto"})),
    "fp16": _number_format("fp16", Meaning({"mixed_precision": "auto"})),
    **{name: Switch({"dtype": name}) for name in ("bfloat16", "float16", "float32")},
    "fp8": "there is no training in 8 bits here; optim: adamw_8bit and tuning: qlora save memory",
    "tf32": _number_format("tf32", Meaning(said="it is on if the GPU supports it")),
    "gradient_checkpointing": checkpointing,
    "gradient_checkpointing_kwargs": NoAction("checkpointing gives the same numbers either way"),
    "activation_offloading": "activations are not offloaded here; checkpoint_every_layer: true keeps fewer of them",
    **dict.fromkeys(
        ("xformers_attention", "sage_attention"),
        "transformers has no such attention; the fastest one that is installed is used",
    ),
    **{name: when_on(attn_implementation=kind) for name, kind in ATTENTION.items()},
    "s2_attention": "there is no such attention here",
    "datasets": _datasets,
    "test_datasets": _held_out_sets,
    "pretraining_dataset": _pretraining,
    "dataset_prepared_path": NoAction("prepared data are kept in cache_dir, keyed by their source and settings"),
    **dict.fromkeys(("dataset_processes", "dataset_num_proc"), Alias("preprocessing_num_workers")),
    "dataset_exact_deduplication": "scu-trainer data lists repeated rows, but they are not removed",
    "push_dataset_to_hub": "prepared data are not uploaded",
    "val_set_size": held_out,
    "sequence_len": Alias("block_size"),
    "eval_sequence_len": "held-out documents are scored in windows of block_size",
    "excess_length_strategy": NoAction("nothing is truncated or dropped: a longer document continues in further rows"),
    "min_sample_len": "short rows are kept",
    "sample_packing": isolated_packing,
    "eval_sample_packing": NoAction("held-out documents are scored one by one, in windows"),
    "sample_packing_sequentially": NoAction(FILLED),
    **dict.fromkeys(("pad_to_sequence_len", "pad_to_multiple_of"), PADDED),
    "batch_flattening": NoAction("rows of uneven length are cut into micro-batches without padding"),
    "curriculum_sampling": "curriculum: length_warmup begins with short rows",
    "group_by_length": Switch({"train_sampling_strategy": "group_by_length"}),
    "train_on_inputs": with_prompts,
    "roles_to_train": "the assistant's turns are learned",
    "chat_template": _chat_template,
    "chat_template_jinja": _jinja,
    "default_system_message": "write it into the rows, in a column named system",
    "special_tokens": _special_tokens,
    "tokens": several("new_tokens"),
    "added_tokens_overrides": "add tokens: new_tokens",
    "eot_tokens": NoAction("the end of a turn follows from the chat template"),
    "resize_token_embeddings_to_32x": NoAction("the embedding grows only by the tokens that are added"),
    "mean_resizing_embeddings": NoAction("new rows of an embedding begin at the mean of the others"),
    "micro_batch_size": Alias("per_device_train_batch_size"),
    "batch_size": _total_batch,
    "eval_batch_size": Alias("per_device_eval_batch_size"),
    "num_epochs": Alias("num_train_epochs"),
    "optimizer": Alias("optim"),
    "optim_args": _optimizer_arguments,
    "adam_eps": Alias("adam_epsilon"),
    "hf_use_auth_token": NoAction("your Hub token is used if you are logged in"),
    "low_cpu_mem_usage": NoAction("weights are always loaded without a second copy"),
    "fsdp_version": "write it into fsdp_config: {version: 2}",
    "qat": "there is no quantization-aware training here",
    "quantize_moe_experts": "tuning: qlora quantizes linear layers; experts that are one tensor keep their type",
    "freeze_mm_modules": NoAction("only text is trained on here"),
    **dict.fromkeys(("model_config", "overrides_of_model_config"), "write it into the config.json of the model"),
    "torchdistx_path": "adamw_anyprecision needs a package that is no longer maintained; dtype: bfloat16 picks another",
    "lr_scheduler": _scheduler,
    "cosine_min_lr_ratio": _minimum_rate,
    **dict.fromkeys(("embedding_lr", "embedding_lr_scale", "lr_groups"), "all weights use the same learning rate"),
    "evals_per_epoch": _per_epoch("eval"),
    "saves_per_epoch": _per_epoch("save"),
    "use_tensorboard": Switch({"report_to": "tensorboard"}),
    **dict.fromkeys(("use_wandb", "wandb_project"), when_on(report_to="wandb")),
    "wandb_name": Alias("run_name"),
    **{f"wandb_{name}": f"set the environment variable of W&B: WANDB_{name.upper()}=... before the command"
       for name in ("entity", "watch", "log_model", "mode", "run_id")},
    "use_mlflow": "report_to: mlflow",
    "use_comet": "report_to: comet_ml",
    "hub_model_id": lambda value, source: Meaning({"hub_model_id": value, "push_to_hub": True}),
    "loss_watchdog_threshold": lambda value, source: Meaning({"divergence": "stop"}, WATCH),
    "loss_watchdog_patience": NoAction("read together with loss_watchdog_threshold"),
    "auto_resume_from_checkpoints": NoAction("an unfinished run of the same configuration resumes automatically"),
    "profiler_steps": Alias("profile_steps"),
    **dict.fromkeys(("include_tokens_per_second", "include_tkps"), Switch({"throughput": True})),
    "max_memory": "write max_gpu_mem, cpu_mem and device_map",
    "gpu_memory_limit": Alias("memory_limit_gb"),
    **dict.fromkeys(("sequence_parallel_degree", "context_parallel_size"), "a row is not split across GPUs here"),
    "tensor_parallel_size": "layers are not split across GPUs here; fsdp and deepspeed shard weights",
    "plugins": _plugins,
    **dict.fromkeys(("liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_fused_linear_cross_entropy",
                     "liger_layer_norm", "liger_cross_entropy", "liger_rms_norm_gated"),
                    NoAction("read together with plugins")),
    "generate_samples": NoAction("it concerns answers, not training"),
}  # fmt: skip

SIGNS = {
    "base_model",
    "adapter",
    "sequence_len",
    "sample_packing",
    "evals_per_epoch",
    "saves_per_epoch",
    "special_tokens",
}


def defaults(source: KeySource) -> Iterator[tuple[str, Any]]:
    """Yield the defaults of Axolotl that differ from ours."""
    if not _adapts(source):
        yield "tuning", "full"
    yield from {"block_size": 512, "packing": False, "num_train_epochs": 1, "per_device_train_batch_size": 1}.items()
    yield from {"lr_scheduler_type": "cosine", "optim": "adamw_torch_fused", "validation_split_percentage": 0}.items()
    yield "per_device_eval_batch_size", source.get("micro_batch_size", 1)
    if _has_held_out(source) and not {"evals_per_epoch", "eval_steps", "eval_strategy"} & source.entries.keys():
        yield "eval_strategy", "epoch"


def differences(source: KeySource) -> Iterator[str]:
    yield "a document longer than block_size continues in further rows; Axolotl drops or truncates it"
    if _adapts(source) and not (source.get("lora_target_modules") or source.has("lora_target_linear")):
        yield "without lora_target_modules, every linear layer is adapted here"
