"""What changed between a checkpoint and the run that resumes from it, checked before a step is trained.

A manifest records the configuration, data, code and processes of its checkpoint. A change is harmless (where and how
the run is logged), refused (weights or optimizer state would have another shape), or reported with its consequence.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch
from transformers import TrainingArguments

from scu_trainer.data.store import digest_of
from scu_trainer.errors import CheckpointError
from scu_trainer.figures import format_setting
from scu_trainer.run_files import read_object_or_empty
from scu_trainer.train.checkpoints.format import read_manifest

logger = logging.getLogger("scu_trainer")

HARMLESS = frozenset(
    "output_dir run_name resume resume_from_checkpoint weights_only allow_pickle preflight grace_period_s divergence "
    "divergence_factor max_nonfinite_steps report_to disable_tqdm logging_steps logging_strategy logging_first_step "
    "log_level log_level_replica log_on_each_node save_strategy save_steps save_epochs save_total_limit push_to_hub "
    "hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision dataloader_num_workers "
    "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor preprocessing_num_workers "
    "cache_dir use_cpu ddp_timeout throughput peak_tflops predict_memory profile_steps include_num_input_tokens_seen "
    "early_stopping_patience early_stopping_threshold retain_stop sample_prompts sample_max_new_tokens "
    "keep_freed_memory project trackio_space_id trackio_bucket_id trackio_static_space_id".split()
)
"""Settings that do not affect the weights."""

MACHINE_SETTINGS = frozenset(
    "output_dir run_name resume_from_checkpoint cache_dir report_to disable_tqdm log_level log_level_replica "
    "ddp_timeout model_name_or_path adapter_name_or_path teacher dataset eval_dataset retain deepspeed offload_folder "
    "offload_linears_folder mixed_precision attn_implementation use_cpu device_map max_gpu_mem cpu_mem memory_limit_gb "
    "target_headroom_gb gc_threshold_gb ram_threshold_gb keep_freed_memory token_cap min_batch_size max_batch_size "
    "peak_tflops dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
    "dataloader_prefetch_factor preprocessing_num_workers".split()
)
"""Settings that may differ between the machines of one run: paths, and what depends on the devices."""

OTHER_SHAPE = frozenset(
    "task model_name_or_path adapter_name_or_path tuning peft_type lora_r lora_target_modules use_rslora use_dora "
    "init_lora_weights loraplus_lr_ratio modules_to_save exclude_modules layers_to_transform new_tokens "
    "trainable_parameters frozen_parameters optim use_muon embedded_base_steps architecture embedding_size "
    "category_embedding_size gru_hidden_size gru_layers tie_embeddings vocabulary_size sensor_hidden_size "
    "sensor_layers sensor_fusion_layers sensor_heads sensor_channels sensor_patch branches frozen_branches "
    "quantized_branches report_head num_classes image_channels".split()
)
CARRIED = frozenset("learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon".split())
SAME_STATE = ("adamw_torch", "adamw_torch_fused")
"""Values of ``optim`` that read each other's state; the state also says whether one kernel computes the step."""
SCHEDULE = frozenset("max_steps num_train_epochs warmup_steps lr_scheduler_type lr_scheduler_kwargs".split())
ORDER = frozenset(
    "seed data_seed per_device_train_batch_size gradient_accumulation_steps train_sampling_strategy "
    "dataloader_drop_last".split()
)
ROWS_OF_A_STEP = ("per_device_train_batch_size", "gradient_accumulation_steps")
WORKERS = "dataloader_num_workers"
LAUNCHED, SEEDABLE = "accelerator_config", "use_seedable_sampler"
SPLIT = "the seed of the split"
SHARED_STREAM = "where they share a stream, its rows come in another order, so some are seen twice or not at all"
DATA = frozenset(
    "dataset dataset_size dataset_split dataset_config_name eval_dataset validation_split_percentage text_column "
    "prompt_column response_column system_column messages_column stopping_strategy block_size packing synthetic "
    "sensor_samples streaming chat_template completion_only_loss assistant_only_loss isolate_documents lowercase "
    "min_word_count retain retain_documents".split()
)


READ_OF_A_TENSOR = 16

KINDS = {"configuration": dict, "data": dict, "weights": dict, "versions": dict, "world_size": int, "git_commit": str}


@dataclass(frozen=True)
class SettingChange:
    """``name`` was ``before`` and is ``now``. ``is_refused``: resuming would train something else, or fail."""

    name: str
    before: Any
    now: Any
    consequence: str
    is_refused: bool = False

    @property
    def is_carried(self) -> bool:
        """Whether the previous value stays in effect, whatever the settings say."""
        is_same_state = self.name == "optim" and self.before in SAME_STATE and self.now in SAME_STATE
        return is_same_state or self.name in CARRIED

    @property
    def line(self) -> str:
        return f"{self.name} was {_short(self.before)}, now {_short(self.now)}: {self.consequence}"


def facts_of(checkpoint: Path) -> dict[str, Any]:
    """Return what is known about the run of ``checkpoint``, from its manifest or training_config.json, or {}."""
    manifest = valid_facts(read_manifest(checkpoint))
    if "configuration" in manifest:
        return manifest
    description = checkpoint.parent / "training_config.json"
    return valid_facts(read_object_or_empty(description)) or manifest


def facts_of_arguments(arguments: TrainingArguments) -> dict[str, Any]:
    """Return the part of a description that a trainer without a command knows: what decides the rows of a step, and how
    the optimizer moves."""
    found = {name: getattr(arguments, name) for name in sorted(ORDER | CARRIED | SCHEDULE | {"optim", WORKERS})}
    found[SEEDABLE] = arguments.accelerator_config.use_seedable_sampler
    return {"configuration": found, "world_size": arguments.world_size}


def digest_of_weights(weights: Iterable[torch.Tensor]) -> Optional[str]:
    """Return a digest that differs for another or a retrained model, from a few values of each tensor, in no time. None
    without weights, or if some are not available: sharded, offloaded, or packed by a library."""
    read = []
    for weight in weights:
        values = weight.data
        if type(values) is not torch.Tensor or values.is_meta or not values.numel():
            return None
        read.append(values.reshape(-1)[:: -(-values.numel() // READ_OF_A_TENSOR)].cpu().double().tolist())
    return digest_of(read) if read else None


def warn_about_changes(checkpoint: Path, arguments: TrainingArguments, are_rows_chosen: bool, is_stream: bool) -> None:
    """Warn about what changed since ``checkpoint``.

    The stock Trainer counts the position in an epoch in steps, whatever their size was, and takes learning rate and
    optimizer state from the checkpoint, whatever its arguments say. are_rows_chosen: by a loop, which reports what
    happens to their order itself. is_stream: the rows come from an IterableDataset.
    """
    before, now = facts_of(checkpoint), {**facts_of_arguments(arguments), "data": {}}
    now["configuration"]["streaming"] = is_stream
    found = changes(before, now)
    if is_stream:
        workers = (before.get("configuration", {}).get(WORKERS), now["configuration"].get(WORKERS))
        if {*workers} != {0, 1}:  # one worker reads the whole stream, as zero workers do
            found += _change_of_fact(WORKERS, *workers, SHARED_STREAM)
    for change in found:
        if not (are_rows_chosen and change.name in (*ORDER, "world_size")):
            logger.warning("changed since %s: %s", checkpoint.name, change.line)


def valid_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """Return ``facts`` without entries of the wrong type: the file may have been edited, or be from another program."""
    return {name: fact for name, fact in facts.items() if isinstance(fact, KINDS.get(name, object))}


def changed_settings(
    before: Mapping[str, Any], now: Mapping[str, Any], harmless: frozenset[str] = HARMLESS
) -> dict[str, tuple[Any, Any]]:
    """Return name -> (before, now) for every changed setting that is not in ``harmless``. Settings that only one side
    knows are left out: a newer version may have more settings."""
    plain = json.loads(json.dumps(dict(now), default=str))
    names = [name for name in before if name in plain and name not in harmless]
    return {name: (before[name], plain[name]) for name in names if _differ(before[name], plain[name])}


def _differ(before: Any, now: Any) -> bool:
    """Return whether two values differ; two spellings of one path do not."""
    if before != now and isinstance(before, str) and isinstance(now, str):
        with contextlib.suppress(OSError, ValueError):  # not a path, or it no longer exists
            return not os.path.samefile(before, now)
    return before != now


def changes(before: Mapping[str, Any], now: Mapping[str, Any], has_plan: bool = False) -> list[SettingChange]:
    """Return what changed between two descriptions as in training_config.json (configuration, world_size, data,
    weights, versions, git_commit). ``has_plan``: the curriculum loop plans the rows of an epoch and knows which were
    seen."""
    was, here = before.get("configuration", {}), now["configuration"]
    changed = changed_settings(was, here)
    keeps_order = _seed_of_rows(was) == _seed_of_rows(here)
    if keeps_order:
        changed.pop("data_seed", None)  # it is the seed from before, which SPLIT's message asks for
    keeps = {"seed"} if keeps_order else set()
    if _rows_of_a_step(before) == _rows_of_a_step(now) is not None:
        keeps |= {*ROWS_OF_A_STEP}
    found = [_change_of_setting(name, *values, keeps, has_plan) for name, values in changed.items()]
    found += _change_of_split(before, now)
    text = "ranks get other rows than in the previous run"
    found += _change_of_fact("world_size", before.get("world_size"), now.get("world_size"), text)
    condition = "if as many rows of the same lengths are left, the" if has_plan else "the"
    text = (
        f"the data differ from those of the previous run; {condition} position in the epoch is kept by number, so rows "
        "may be seen twice or not at all"
    )
    found += _change_of_fact("data", before.get("data", {}).get("fingerprint"), now["data"].get("fingerprint"), text)
    text = "its weights differ from those with which the previous run trained"
    for name in ("base", "teacher"):
        was, here = (facts.get("weights", {}).get(name) for facts in (before, now))
        found += _change_of_fact(f"fingerprint of the {name}", was, here, text)
    here = now.get("versions") or {}
    for name, version in (before.get("versions") or {}).items():
        if name in here and name != "platform" and version != here[name]:
            text = "another version; results may differ, by rounding or more"
            found.append(SettingChange(name, version, here[name], text))
    text = "the code has changed; results may differ from those of a single run"
    return found + _change_of_fact("git_commit", before.get("git_commit"), now.get("git_commit"), text)


def check_compatibility(checkpoint: Path, now: Mapping[str, Any], has_plan: bool = False) -> list[SettingChange]:
    """Return what changed since ``checkpoint``. Raises CheckpointError for all changes that prevent a resume."""
    before = facts_of(checkpoint)
    found = changes(before, now, has_plan) if before else []
    refused = [change.line for change in found if change.is_refused]
    if refused:
        raise CheckpointError(
            f"{checkpoint} cannot resume with these settings: {'; '.join(refused)}. Give the previous settings, "
            f"start over with --no_resume, or from its weights with model_name_or_path"
        )
    return found


def _is_plain_sampling(configuration: Mapping[str, Any]) -> bool:
    """Return whether the sampler considers neither lengths nor the batch."""
    return configuration.get("train_sampling_strategy", "random") in ("random", "sequential")


def _is_seeded(configuration: Mapping[str, Any]) -> bool:
    """Return whether the sampler is seedable. A command keeps all of ``accelerator_config``, a trainer only the key."""
    launched = configuration.get(LAUNCHED)
    return (launched if isinstance(launched, dict) else configuration).get(SEEDABLE, True)


def _seed_of_rows(configuration: Mapping[str, Any]) -> Any:
    """Return the seed that decides the order of rows. A sampler that is not seedable draws from the generator of the
    process, whatever data_seed says."""
    seed, data_seed = map(configuration.get, ("seed", "data_seed"))
    follows_seed = data_seed is None or not _is_seeded(configuration) or not _is_plain_sampling(configuration)
    return seed if follows_seed else data_seed


def _rows_of_a_step(facts: Mapping[str, Any]) -> Optional[int]:
    """Return the number of rows of a step, if that number alone decides which rows they are, else None."""
    configuration = facts.get("configuration", {})
    factors = [facts.get("world_size"), *map(configuration.get, ROWS_OF_A_STEP)]
    is_known = all(isinstance(factor, int) for factor in factors) and _is_plain_sampling(configuration)
    alternates = configuration.get("streaming") and (configuration.get(WORKERS) or 0) > 1  # workers, batch by batch
    return None if configuration.get("dataloader_drop_last") or alternates or not is_known else math.prod(factors)


def _change_of_setting(name: str, before: Any, now: Any, keeps: Collection[str], has_plan: bool) -> SettingChange:
    carried = "no effect, the optimizer and schedule state in the checkpoint have the previous value"
    if (change := SettingChange(name, before, now, carried)).is_carried:
        return change
    if name in OTHER_SHAPE:
        text = "weights and optimizer state would not fit"
    elif name in SCHEDULE:
        text = "the learning rate follows the new schedule from this step on, which may be a jump"
    elif name == "seed" and name in keeps:
        text = "rows come as before, by data_seed; other random numbers may differ"
    elif name in ORDER and has_plan:
        text = "this epoch ends with the rows that were planned for it, and later epochs follow the new setting"
    elif name in keeps:
        text = "a step takes the same rows as before, in other batches"
    elif name in ORDER or _is_seeded({name: before}) != _is_seeded({name: now}):
        text = "the rows of this epoch come in another order, so some are seen twice or not at all"
    elif name == "scu_target_s" and now is None:
        text = f"S is measured from here on and no longer steered; give scu_target_s: {before} to hold it as before"
    elif name in DATA:
        text = "the data may not be those of the previous run"
    else:
        text = "acts from here on"
    return SettingChange(name, before, now, text, is_refused=name in OTHER_SHAPE)


def _change_of_fact(name: str, before: Any, now: Any, consequence: str) -> list[SettingChange]:
    """Return a change if both sides know the value and it differs."""
    return [] if before is None or now is None or before == now else [SettingChange(name, before, now, consequence)]


def _change_of_split(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[SettingChange]:
    """Return a change if another share of the data would be held out. Older versions used one seed for everything."""
    was, here, settings = before.get("split_seed", before.get("seed")), now.get("split_seed"), now["configuration"]
    data = [facts.get("data", {}).get("fingerprint") for facts in (before, now)]
    is_same = None not in data and data[0] == data[1]  # for example if a manifest says what is held out
    is_split = settings.get("validation_split_percentage") and settings.get("eval_dataset") is None and not is_same
    if None in (was, here) or was == here or not is_split:
        return []
    text = f"other rows would be held out, and most of them were trained on; set data_seed: {was} to resume"
    return [SettingChange(SPLIT, was, here, text, is_refused=True)]


def _short(value: Any) -> str:
    text = "not set" if value is None else format_setting(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
