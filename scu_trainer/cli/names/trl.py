"""TRL: ``trl sft`` and its configuration (SFTConfig, ModelConfig, ScriptArguments of TRL 1.16)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scu_trainer.cli.names.common import FILLED, PADDED, adapts, checkpointing, mixed, several, targets
from scu_trainer.cli.names.meaning import Alias, KeySource, Meaning, NoAction, Table, boolean, is_on, quantized
from scu_trainer.errors import SettingsError

TITLE, SECTIONS = "TRL", ()
OTHER_TRAINERS = (
    "beta",
    "loss_weights",
    "precompute_ref_log_probs",
    "reward_funcs",
    "num_generations",
    "max_completion_length",
    "max_prompt_length",
    "desirable_weight",
    "undesirable_weight",
    "ref_model_sync_steps",
    "sync_ref_model",
    "f_divergence_type",
    "center_rewards_coefficient",
    "cpo_alpha",
    "simpo_gamma",
    "reward_model_name_or_path",
    "reward_model_path",
    "reward_weights",
    "scale_rewards",
    "steps_per_generation",
)
WITH_LOOPS = "with_loops(TRAINER) gives TRL's own trainer our loops, in five lines of Python: docs/any_trainer.md"


def _other_trainer(value: Any, source: KeySource) -> Meaning:
    raise SettingsError(f"it is for training on preferences or rewards, but this command trains on text; {WITH_LOOPS}")


def _mixture_entry(entry: Any) -> dict[str, Any]:
    """Return one of the ``datasets`` of a configuration as an entry of a mixture."""
    names = {"path": "dataset", "name": "dataset_config_name", "split": "dataset_split"}
    unsupported = [key for key in entry if key not in names and is_on(entry[key])]
    if unsupported:
        raise SettingsError(
            f"it has {', '.join(unsupported)}, which entries of a mixture do not take here; see docs/data.md"
        )
    return {names[key]: entry[key] for key in names if entry.get(key) is not None}


def _test_split(value: Any, source: KeySource) -> Meaning:
    if source.get("eval_strategy", "no") == "no":
        return Meaning(said="nothing is evaluated")
    return Meaning(said="a split named validation or test is held out automatically; eval_dataset sets another one")


def _packing_strategy(value: Any, source: KeySource) -> Meaning:
    if value == "wrapped":
        return Meaning({"isolate_documents": False}, "documents are cut where a row is full, as in TRL")
    return Meaning(said=FILLED)


def _padding_free(value: Any, source: KeySource) -> Meaning:
    if is_on(value):
        return Meaning(said="rows are padding-free here if the model supports it")
    return Meaning({"padding_free": False})


def _loss(value: Any, source: KeySource) -> Meaning:
    if value in ("nll", "chunked_nll"):
        return Meaning(said="it is the loss of the next token, computed in parts if that saves memory")
    raise SettingsError(f"{value} is another loss than that of the next token; {WITH_LOOPS}")


def _adapts(source: KeySource) -> bool:
    return source.has("use_peft")


TABLE: Table = {
    "activation_offloading": "activations are not offloaded here; checkpoint_every_layer: true keeps fewer of them",
    "chat_template_path": Alias("chat_template"),
    "dataset_kwargs": "this command prepares the rows; see docs/data.md for the columns that it reads",
    "dataset_num_proc": Alias("preprocessing_num_workers"),
    "dataset_streaming": boolean("streaming"),
    "dataset_test_split": _test_split,
    "dataset_text_field": Alias("text_column"),
    "dataset_train_split": Alias("dataset_split"),
    "datasets": lambda value, source: Meaning(mixed([_mixture_entry(entry) for entry in value])),
    "env": "set environment variables before the command: CUDA_VISIBLE_DEVICES=0 scu-trainer train ...",
    "eos_token": "the tokenizer's own end of text is used; change it there",
    "eval_packing": NoAction("held-out documents are scored one by one, in windows"),
    "gradient_checkpointing": checkpointing,
    "ignore_bias_buffers": NoAction("buffers need no setting here"),
    "load_in_4bit": quantized(_adapts),
    "load_in_8bit": quantized(_adapts, load_in_8bit=True),
    "lora_modules_to_save": several("modules_to_save"),
    "lora_target_modules": targets,
    "lora_target_parameters": "adapters go to modules here: lora_target_modules",
    "lora_task_type": NoAction("the task determines it"),
    "loss_type": _loss,
    "max_length": Alias("block_size"),
    "model_init_kwargs": "give them by name: dtype, attn_implementation, model_revision, trust_remote_code",
    "packing_strategy": _packing_strategy,
    "pad_to_multiple_of": PADDED,
    "pad_token": NoAction("padding is masked, whichever token it is"),
    "padding_free": _padding_free,
    "router_aux_loss_coef": "the auxiliary loss of experts is the model's own: output_router_logits of its config.json",
    "shuffle_dataset": NoAction("rows are drawn in a new order in each epoch"),
    "truncation_mode": NoAction("nothing is truncated: a longer document continues in further rows"),
    "use_bnb_nested_quant": boolean("bnb_4bit_use_double_quant"),
    "use_peft": adapts,
    "bnb_4bit_quant_storage": NoAction("it is for FSDP with 4-bit weights, which scu-trainer does not support"),
    **dict.fromkeys(OTHER_TRAINERS, _other_trainer),
}

SIGNS = {
    "dataset_name",
    "use_peft",
    "dataset_text_field",
    "dataset_train_split",
    "lora_task_type",
    "chat_template_path",
}


def defaults(source: KeySource) -> Iterator[tuple[str, Any]]:
    """Yield the defaults of ``trl sft`` that differ from ours."""
    yield "tuning", "full"
    yield from {"learning_rate": 2e-5, "block_size": 1024, "packing": False, "checkpoint_every_layer": True}.items()
    yield from {"validation_split_percentage": 0, "assistant_only_loss": False}.items()
    if _adapts(source):
        yield from {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}.items()


def differences(source: KeySource) -> Iterator[str]:
    yield "a document longer than block_size continues in further rows; TRL cuts it off at max_length"
    if _adapts(source) and not source.get("lora_target_modules"):
        yield (
            "without lora_target_modules, TRL adapts what peft picks for the family, q_proj and v_proj for most; here "
            "every linear layer is adapted: give lora_target_modules: [q_proj, v_proj] for the same"
        )
