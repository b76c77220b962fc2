"""Models with weights in shards over the ranks (ZeRO-3, FSDP).

A parameter is empty, or only a part, until its layer runs, and every forward pass needs all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Generic, Optional, TypeVar

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.constants import FSDP_MODEL_NAME
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from scu_trainer.errors import CheckpointError
from scu_trainer.models.loading.dispatch import is_fsdp_requested
from scu_trainer.models.loading.offloaded import input_device
from scu_trainer.models.quantize import weight_count_of

T = TypeVar("T")

WHOLE, IN_SHARDS = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
"""Values of ``fsdp_state_dict_type``."""


def weight_count(parameter: nn.Parameter) -> int:
    """Return how many numbers a parameter has, also for a shard, or for two numbers per byte (4 bits)."""
    return getattr(parameter, "ds_numel", weight_count_of(parameter))


def weight_bytes(model: nn.Module, is_trained: bool = True) -> int:
    """Return the bytes of all trained weights, or of all frozen ones, over all shards."""
    return sum(weight_count(p) * p.element_size() for p in model.parameters() if p.requires_grad == is_trained)


def is_sharded(trainer: Trainer) -> bool:
    """Return whether a forward pass needs all ranks, or will once training begins, when FSDP wraps the model."""
    if trainer.is_deepspeed_enabled:
        return trainer.accelerator.state.deepspeed_plugin.zero_stage == 3
    return is_fsdp(trainer)


def needs_all_ranks(trainer: Trainer) -> bool:
    """Return whether a forward pass of only one rank would wait for the others forever."""
    return trainer.accelerator.num_processes > 1 and is_sharded(trainer)


def is_fsdp(trainer: Trainer) -> bool:
    # Not `is_fsdp_enabled`, because FSDP requested on a CPU becomes DDP. A user may also pass a model that is wrapped.
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    named = trainer.accelerator.distributed_type.value == "FSDP" or trainer.is_distributed_loading_by_transformers
    return named or isinstance(trainer.model_wrapped, FSDPModule | FullyShardedDataParallel)


def form_of_fsdp(training: TrainingArguments) -> Optional[str]:
    """Return the ``fsdp_state_dict_type`` of an FSDP launch, or the one that a script has set since. None without FSDP,
    or if accelerate trains data parallel instead (on a CPU, or with one process)."""
    if not is_fsdp_requested(training) or training.distributed_state.distributed_type.value in ("NO", "MULTI_CPU"):
        return None
    made = AcceleratorState._shared_state.get("fsdp_plugin")
    return (made or FullyShardedDataParallelPlugin(**(training.fsdp_plugin_args or {}))).state_dict_type.name


def saved_form(checkpoint: Path) -> Optional[str]:
    """Return the ``fsdp_state_dict_type`` that reads the FSDP files in a checkpoint; None if there are none."""
    own = [*checkpoint.glob(f"{FSDP_MODEL_NAME}*")]
    return (IN_SHARDS if any(path.is_dir() for path in own) else WHOLE) if own else None


def save_whole(trainer: Trainer) -> None:
    """Let FSDP save a full state dict from now on. In shards, its default, the stock Trainer saves no final model."""
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type(WHOLE)


def check_fsdp(checkpoint: Path, form: Optional[str]) -> None:
    """Raise CheckpointError for weights that this launch cannot read, with or without their optimizer state: FSDP has
    its own file formats. ``form``: the ``fsdp_state_dict_type`` of this launch; None without FSDP."""
    if not checkpoint.is_dir():
        return
    own = saved_form(checkpoint)
    if own and form:
        if (own == IN_SHARDS) == (form == IN_SHARDS):
            return
        raise CheckpointError(
            f"{checkpoint} was saved with fsdp_state_dict_type: {own}, and this run has {form}: it cannot read those "
            f"files; set fsdp_state_dict_type: {own}"
        )
    if own == form:  # both without FSDP
        return
    was, now = ("under FSDP", "without") if own else ("without FSDP or with save_only_model", "under")
    raise CheckpointError(
        f"{checkpoint} was saved {was}, and this run is {now} FSDP: it cannot read those files; start it as "
        f"before{advice_to_use_weights(checkpoint)}"
    )


def advice_to_use_weights(checkpoint: Path) -> str:
    """Return advice to start a new run from the weights; empty if they are in shards, which no other launch reads."""
    is_whole = any(checkpoint.glob("*model*.safetensors"))
    return " or begin another run from its weights with model_name_or_path" if is_whole else ""


def reshard(model: nn.Module) -> None:
    """Reshard what FSDP2 keeps gathered after a forward pass without backward: its outermost weights, which are other
    objects while they are gathered. Does nothing to other models."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class BeforeFirstStep(TrainerCallback, Generic[T]):
    """A measurement of the model before its first step: made at once or, if the model cannot run yet as it will in
    training, on all ranks when training begins. A run that resumes has loaded its checkpoint's weights by then."""

    def __init__(self, trainer: Trainer, measure: Callable[[], T]) -> None:
        self.value: Optional[T] = None
        self._measure = measure
        # DeepSpeed and FSDP place a model when training begins, as the stock Trainer does if it evaluates in 16 bits.
        if is_sharded(trainer) or input_device(trainer.model).type != trainer.args.device.type:
            trainer.add_callback(self)
        else:
            self.value = measure()

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.value = self._measure()


def training_precision(trainer: Trainer) -> AbstractContextManager:
    """Return the precision context of training for a forward pass outside of it. That is autocast; but DeepSpeed
    converts the weights themselves, and only when training begins."""
    if not trainer.is_deepspeed_enabled:
        return trainer.accelerator.autocast()
    dtype = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.dtype()
    return torch.autocast(trainer.args.device.type, dtype, enabled=dtype != torch.float32)
