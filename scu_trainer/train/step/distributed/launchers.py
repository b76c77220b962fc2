"""The rules for micro-batches under each launcher, and what memory control cannot work with."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainingArguments

from scu_trainer.errors import ControlError
from scu_trainer.settings.base import as_typed
from scu_trainer.train.step.distributed.ranks import OFF, DdpRanks, Ranks, ShardedRanks, deepspeed_ranks
from scu_trainer.train.step.distributed.sharded import is_fsdp


def ranks_for(trainer) -> Ranks:
    """Return the launcher's rules for a ``trainer`` with a wrapped model, as it is when training begins. Raises
    ControlError for launchers and models with which micro-batches could hang or train something else."""
    refuse_arguments(trainer)
    if trainer.is_deepspeed_enabled:
        return deepspeed_ranks(trainer)
    if is_fsdp(trainer):
        return ShardedRanks(trainer)
    # torch.compile wraps what accelerate has wrapped.
    wrapped = getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)
    if isinstance(wrapped, DistributedDataParallel):
        _refuse_unusable_ddp(wrapped)
        return DdpRanks(trainer, wrapped)
    if trainer.accelerator.num_processes > 1:
        raise ControlError(
            f"memory control does not know {type(wrapped).__name__} over {trainer.accelerator.num_processes} processes "
            f"({trainer.accelerator.distributed_type.value}); use DDP (torchrun, accelerate launch) or DeepSpeed, "
            f"or {OFF}"
        )
    return Ranks(trainer)


def refuse_arguments(trainer) -> None:
    """Raise ControlError for training arguments that memory control cannot work with. Needs no wrapped model."""
    args = trainer.args
    if args.n_gpu > 1:
        raise ControlError(
            f"one process drives {args.n_gpu} GPUs (DataParallel), which cuts batches itself; start one process per "
            f"GPU with torchrun or accelerate launch, or {OFF}"
        )
    refuse_fields(args)
    _refuse_split_models(trainer)
    if is_fsdp(trainer) and args.gradient_accumulation_steps > 1:
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
        raise ControlError(
            f"gradient_accumulation_steps is {args.gradient_accumulation_steps} under FSDP; memory control cuts "
            f"batches itself: set gradient_accumulation_steps: 1 and per_device_train_batch_size: {rows}, or {OFF}"
        )


def refuse_fields(args: TrainingArguments) -> None:
    """Raise ControlError for those arguments that can be checked without a trainer. The number of GPUs is not among
    them: a model may be spread over several, and a comparison, which also calls this, gives each of its runs one."""
    if args.auto_find_batch_size:
        raise ControlError(
            "auto_find_batch_size restarts training with a smaller batch, but memory control fits the requested "
            f"batch into memory; set auto_find_batch_size: false, or {OFF}"
        )
    optimizer = as_typed(args.optim)
    if "lomo" in optimizer or "layerwise" in optimizer:
        raise ControlError(
            f"optim {optimizer} changes weights during backward, where no micro-batch can be undone; use an "
            f"optimizer with a separate step (adamw_torch, galore_adamw, apollo_adamw, ...), or {OFF}"
        )


def _refuse_split_models(trainer) -> None:
    """Raise ControlError if layers or sequences are spread over ranks, with collective calls in every micro-batch."""
    sizes = {"tensor": trainer.get_tp_size(), "context": trainer.get_cp_size(), "sequence": trainer.get_sp_size()}
    for name, size in sizes.items():
        if size > 1:
            raise ControlError(
                f"{name} parallelism over {size} ranks spreads every micro-batch over them; memory control works with "
                f"whole models per rank (DDP, ZeRO-1/2) and with FSDP and ZeRO-3: set the {name} parallel size to 1, "
                f"or {OFF}"
            )
    kind = trainer.accelerator.distributed_type.value
    if kind in ("MEGATRON_LM", "XLA"):
        raise ControlError(f"memory control does not work under {kind}; use DDP, FSDP or DeepSpeed, or {OFF}")


def _refuse_unusable_ddp(ddp: DistributedDataParallel) -> None:
    if ddp._comm_hooks:
        name = getattr(ddp._comm_hooks[0][0], "__name__", "unknown")
        raise ControlError(
            f"the DDP communication hook {name} works inside backward, where memory control does not communicate; "
            f"remove the hook (accelerate: comm_hook: no), or {OFF}"
        )
    if ddp.static_graph:
        raise ControlError(
            "ddp_static_graph makes the first backward communicate, where memory control must not; set "
            f"ddp_static_graph: false, or {OFF}"
        )
    for name, module in ddp.module.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ControlError(
                f"{name} is SyncBatchNorm, which communicates in every forward, but ranks run different numbers of "
                f"micro-batches; use BatchNorm, or {OFF}"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ControlError(
                f"{name} has sparse gradients; memory control reduces dense ones, set sparse=False, or {OFF}"
            )
