"""What can be combined with DeepSpeed and what cannot, checked before any work is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

from transformers import TrainingArguments

from scu_trainer.errors import CheckpointError, ControlError, SettingsError
from scu_trainer.models.loading.dispatch import is_fsdp_requested
from scu_trainer.settings import MemorySettings, ModelSettings, RegularizationSettings
from scu_trainer.settings.base import as_typed
from scu_trainer.train.regularization.zero import check_zero_stage
from scu_trainer.train.step.distributed.deepspeed_config import (
    BY_LAUNCHER,
    check_keys,
    check_schedule,
    fill_auto_values,
    source_of,
)
from scu_trainer.train.step.distributed.deepspeed_start import share_process_group
from scu_trainer.train.step.distributed.ranks import refuse_timers
from scu_trainer.train.step.distributed.sharded import (
    IN_SHARDS,
    WHOLE,
    advice_to_use_weights,
    check_fsdp,
    form_of_fsdp,
    saved_form,
)

WITHOUT = "without DeepSpeed and FSDP"
LATEST = "latest"
"""The file in which DeepSpeed writes the name of the folder with everything else."""
WANT_SHAPES = ("adafactor", "galore", "apollo", "lomo", "adalomo", "stable_adamw")
GATHER = "stage3_gather_16bit_weights_on_model_save"


def uses_deepspeed(training: TrainingArguments) -> bool:
    """Return whether ``--deepspeed`` or ``accelerate launch`` asked for DeepSpeed."""
    return training.deepspeed_plugin is not None


def zero_stage(training: TrainingArguments) -> Optional[int]:
    """Return the ZeRO stage, 0 to 3; None without DeepSpeed."""
    return training.deepspeed_plugin.zero_stage if uses_deepspeed(training) else None


def check_deepspeed(
    training: TrainingArguments,
    model: ModelSettings,
    memory: MemorySettings,
    regularization: Optional[RegularizationSettings],
) -> None:
    """Fill the DeepSpeed configuration, if there is one, from the settings. Raises SettingsError if it contradicts them
    or itself, ControlError for a loop that cannot work with it."""
    if not uses_deepspeed(training):
        return
    share_process_group()
    source = source_of(training)
    config = fill_auto_values(training)
    check_keys(config, source)
    check_schedule(config, training, source)
    if config.get("fp16", {}).get("enabled") is True and training.device.type == "cpu":
        raise SettingsError(f"{source} enables fp16, which DeepSpeed refuses on a CPU; use bf16: true, or drop fp16")
    _check_saving(config, training, source)
    _check_model(model, training)
    _check_optimizer(config, training)
    _check_loops(training, memory, regularization)
    if memory.acts:  # before a model is loaded; your own script gets the same error when training begins
        refuse_timers(source, config.get("flops_profiler", {}).get("enabled"), config.get("wall_clock_breakdown"))


def check_checkpoint(checkpoint: Path, training: TrainingArguments, weights_only: bool) -> None:
    """Raise CheckpointError for what this launch cannot read: FSDP has its own file formats, DeepSpeed reads what as
    many ranks wrote in the same stage. The stock Trainer would start the optimizer over, as with ``weights_only``."""
    here = launched_under(training)
    saved = needed_launch(checkpoint, here, weights_only)
    if not uses_deepspeed(training) and (saved is None or not (checkpoint / LATEST).is_file()):
        return check_fsdp(checkpoint, form_of_fsdp(training))
    if saved is None:
        return
    needs_own_files = uses_deepspeed(training) or is_fsdp_requested(training)
    fresh = "" if needs_own_files else ", resume with --weights_only (the optimizer starts over),"
    raise CheckpointError(
        f"{checkpoint} was saved {saved}, and this run is {here}: it cannot read that optimizer state; start it as "
        f"before{fresh}{advice_to_use_weights(checkpoint)}"
    )


def _under(stage: int, ranks: int) -> str:
    return f"under ZeRO stage {'3' if stage == 3 else '1 or 2'} with {ranks} process{'' if ranks == 1 else 'es'}"


def _under_fsdp(form: Optional[str]) -> str:
    """Return the launch in words; FSDP reads a full state dict under either of its two names."""
    return f"under FSDP with fsdp_state_dict_type: {form if form == IN_SHARDS else WHOLE}" if form else WITHOUT


def needed_launch(checkpoint: Path, here: Optional[str], weights_only: bool) -> Optional[str]:
    """Return the only launch that reads the optimizer state of ``checkpoint``. None if ``here`` (of ``launched_under``)
    reads it or starts it over, or if only DeepSpeed can tell."""
    saved = saved_under(checkpoint)
    starts_over = weights_only and here == WITHOUT and saved_form(checkpoint) is None
    return None if starts_over or here in (None, saved) else saved


def saved_under(checkpoint: Path) -> Optional[str]:
    """Return the launch that reads the optimizer state of ``checkpoint``; None if only DeepSpeed can tell."""
    latest = checkpoint / LATEST
    if not latest.is_file():
        return _under_fsdp(saved_form(checkpoint)) if checkpoint.is_dir() else None
    folder = checkpoint / latest.read_text().strip()
    ranks = len(list(folder.glob("*zero_pp_rank_*_optim_states.pt")))
    return _under(3 if any(folder.glob("zero_pp_rank_*_model_states.pt")) else 2, ranks) if ranks else None


def launched_under(training: TrainingArguments) -> Optional[str]:
    """Return the launch of this process, in the words of ``saved_under``."""
    if not uses_deepspeed(training):
        return _under_fsdp(form_of_fsdp(training))
    config, stage = training.deepspeed_plugin.deepspeed_config, zero_stage(training)
    converts = config.get("checkpoint", {}).get("load_universal") or config["zero_optimization"].get(
        "elastic_checkpoint"
    )
    return _under(stage, training.world_size) if stage and not converts else None


def _check_saving(config: dict[str, Any], training: TrainingArguments, source: str) -> None:
    zero = config["zero_optimization"]
    gathers = zero.get(GATHER) or zero.get(GATHER.removeprefix("stage3_"))  # DeepSpeed reads both names
    if zero_stage(training) == 3 and not gathers:
        name = "zero3_save_16bit_model" if source == BY_LAUNCHER else f"zero_optimization.{GATHER}"
        raise SettingsError(
            f"{source}: ZeRO-3 keeps a part of the weights on each rank and would save no model; set {name} to true"
        )


def _check_model(model: ModelSettings, training: TrainingArguments) -> None:
    if model.device_map is not None:
        raise SettingsError(
            f"device_map: {model.device_map} and DeepSpeed both decide where weights are placed; drop DeepSpeed, or "
            "drop device_map: ds_configs/zero3_offload.json puts weights into main memory, too"
        )
    if model.tuning == "qlora" and zero_stage(training) == 3:
        raise SettingsError(
            "tuning: qlora quantizes weights while they load and ZeRO-3 shards them while they load, so the two "
            "cannot be combined; use ds_configs/zero2.json or zero2_offload.json, or tuning: lora"
        )


def _check_optimizer(config: dict[str, Any], training: TrainingArguments) -> None:
    """Raise SettingsError for an optimizer that needs shapes: ZeRO passes it one flat vector per group of weights, and
    each rank a slice of it."""
    if "optimizer" in config or zero_stage(training) == 0:
        return
    name = as_typed(training.optim)
    if name.startswith(WANT_SHAPES):
        raise SettingsError(
            f"optim {name} needs the rows and columns of each weight, but ZeRO gives it one flat vector of all "
            "weights: it would work differently and save no memory; use adamw_torch_fused, or adamw_bnb_8bit for "
            "small states"
        )


def _check_loops(
    training: TrainingArguments, memory: MemorySettings, regularization: Optional[RegularizationSettings]
) -> None:
    stage = zero_stage(training)
    # without steering, S is simply not reported if it cannot be measured
    if regularization is not None and regularization.steers:
        check_zero_stage(stage, regularization.resolved_actuator)
    if memory.acts and stage == 0:
        raise ControlError(
            "memory control works under ZeRO stage 1, 2 and 3, this is stage 0; change zero_optimization.stage to 2, "
            "or set memory_control: false"
        )
