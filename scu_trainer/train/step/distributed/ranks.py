"""What the memory loop needs from the launcher: micro-batches that may fail on one rank, and one reduction over ranks.

    with ranks.window():                          # nothing in here communicates, so a micro-batch may run again
        for i, micro_batch in enumerate(micro_batches):
            with ranks.micro_batch(last=i == len(micro_batches) - 1):
                ...                               # forward and backward; gradients add up on this rank
        # out of memory: ranks.drop_gradients(), then run the micro-batches of the window again
        shared = ranks.all_reduce_max([...])      # every rank learns what happened on any of them
    # Left without an exception: gradients are what stock training has before its optimizer step.
    ranks.finish()                                # at the last accumulation batch: DeepSpeed's optimizer step

Synchronizing in the last backward, as stock training does, cannot be undone: a rank that fails there leaves the others
waiting. Here all local work is done before any rank waits for another, and an exception leaves ``window`` without
communication: ranks that agreed to stop may all raise inside it.

Not detected, and fatal with several ranks: a model that communicates in its own forward, because ranks run different
numbers of micro-batches. ``loss/analysis/exchange.py`` detects a loss that communicates, and batches then stay whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Optional, TypeVar

import torch
import torch.distributed as dist
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scu_trainer.errors import ControlError
from scu_trainer.train.step.recovery.optimizer_parts import by_device_and_dtype
from scu_trainer.train.step.recovery.snapshot import replaced

T = TypeVar("T")

BUCKET_BYTES = 25 * 2**20
"""Small gradients are reduced together in buckets of this size, the memory that a reduction needs. DDP's default."""

ALONE_BYTES = 2**20
"""Gradients of this size are reduced in place: copying them twice would cost more than a separate message."""

OFF = "set memory_control: false"


class Ranks:
    """One process, which has nothing to share. The base class for launchers.

    recoverable: a micro-batch that ran out of memory may run again.
    even_micro_batches: all ranks must run the same number of micro-batches, or their collective calls no longer match.
    weights: the trained weights.
    """

    recoverable = True
    even_micro_batches = False

    def __init__(self, trainer) -> None:
        self._accelerator = trainer.accelerator
        self.world_size: int = trainer.accelerator.num_processes
        self.rank: int = trainer.accelerator.process_index
        self.weights = [weight for weight in trainer.model.parameters() if weight.requires_grad]

    @contextmanager
    def window(self, completes: bool = True) -> Iterator[None]:
        """Context of all forward and backward work of one optimizer step. ``completes``: the step is taken then."""
        self._completes = completes
        with self._sync_gradients(False):
            yield

    def micro_batch(self, last: bool) -> AbstractContextManager:
        """Context of forward and backward of one micro-batch; ``last``: no other follows in this window. Nothing
        communicates here, but a loss may check for the last backward before an optimizer step, as in TRL's GRPO."""
        return self._sync_gradients(True) if last and self._completes else nullcontext()

    def drop_gradients(self) -> None:
        """Drop everything that was accumulated in this window."""
        for weight in self.weights:
            weight.grad = None

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """Return the maximum of each value over all ranks. Every rank must call it at the same place, with as many."""
        if self.world_size == 1:
            return list(values)
        shared = torch.tensor(values, dtype=torch.int64, device=self._accelerator.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return shared.tolist()

    def _fill_unused(self, weights: Iterable[nn.Parameter], used: Sequence[bool]) -> None:
        """Set zero gradients for weights that only other ranks used. ``used``: by this rank, for each weight."""
        for weight, used_here, used_anywhere in zip(weights, used, self.all_reduce_max(used), strict=True):
            if used_anywhere and not used_here:
                weight.grad = torch.zeros_like(weight)

    def finish(self) -> None:
        """Do what the launcher does at the end of an optimizer window, after its gradients are complete."""

    def _sync_gradients(self, value: bool) -> AbstractContextManager[None]:
        """Inside, accelerate reports ``value`` for whether the next backward completes a window."""
        return replaced(self._accelerator.gradient_state, "sync_gradients", value)


class DdpRanks(Ranks):
    """DistributedDataParallel: micro-batches under ``no_sync``, gradients averaged in buckets when the window ends."""

    def __init__(self, trainer, ddp: DistributedDataParallel) -> None:
        super().__init__(trainer)
        self._ddp = ddp
        named = ddp.module.named_parameters()
        self._shared = [w for name, w in named if w.requires_grad and name not in ddp.parameters_to_ignore]

    @contextmanager
    def window(self, completes: bool = True) -> Iterator[None]:
        self._broadcast_buffers()
        with super().window(completes), self._ddp.no_sync():
            yield
        self._average_gradients()

    def _broadcast_buffers(self) -> None:
        """Broadcast rank 0's buffers once per window, as stock training does, but outside of a forward."""
        self._ddp.require_forward_param_sync = False
        if not self._ddp.broadcast_buffers:
            return
        named = self._ddp.module.named_buffers()
        buffers = [buffer.detach() for name, buffer in named if name not in self._ddp.parameters_to_ignore]
        group = self._ddp.process_group
        source = dist.get_global_rank(group, 0)
        for flat in in_buckets(buffers):
            dist.broadcast(flat, source, group=group)

    def _average_gradients(self) -> None:
        self._fill_unused(self._shared, [weight.grad is not None for weight in self._shared])
        gradients = [weight.grad for weight in self._shared if weight.grad is not None]
        for flat in in_buckets(gradients):
            # Before the sum, and as a product, because that is how DDP rounds.
            flat.mul_(1.0 / self.world_size)
            dist.all_reduce(flat, group=self._ddp.process_group)


class ShardedRanks(Ranks):
    """FSDP and ZeRO-3: every forward and backward communicates, so a rank that fails inside one cannot recover."""

    recoverable = False
    even_micro_batches = True

    @contextmanager
    def window(self, completes: bool = True) -> Iterator[None]:
        yield

    def micro_batch(self, last: bool) -> AbstractContextManager:
        # ZeRO-3 ends the window inside the last backward, with its boundary and optimizer step.
        return self._sync_gradients(last)

    def drop_gradients(self) -> None:
        raise ControlError(
            "a rank ran out of memory under FSDP or ZeRO-3, where the others wait inside the same micro-batch: none "
            "can run again. Resume from the last checkpoint with a smaller token_cap or max_batch_size, or use ZeRO-1/2"
        )


def from_most_urgent_rank(found: Optional[T], urgency: int, device: torch.device) -> Optional[T]:
    """Return, on all ranks, ``found`` of the first one with the highest ``urgency``; None if each urgency is 0. Every
    rank must call it at the same place. ``found``: without tensors on a GPU, which would arrive on the sender's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shared = torch.tensor(urgency * size + size - 1 - rank if urgency else 0, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    highest = int(shared)
    return broadcast_object_list([found], from_process=size - 1 - highest % size)[0] if highest else None


@torch.no_grad()
def in_buckets(
    tensors: Iterable[torch.Tensor], limit_bytes: int = BUCKET_BYTES, alone_bytes: int = ALONE_BYTES
) -> Iterator[torch.Tensor]:
    """Yield flat tensors that the caller changes in place: copies of several, copied back, or a large one itself. The
    order depends only on shapes, types and devices, so ranks with equal models see equal buckets."""
    for bucket in _buckets(tensors, limit_bytes, alone_bytes):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            yield bucket[0].view(-1)
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        yield flat
        parts = flat.split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def _buckets(tensors: Iterable[torch.Tensor], limit_bytes: int, alone_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Yield lists of one dtype and device: at most ``limit_bytes``, or one tensor of at least ``alone_bytes``."""
    for same_kind in by_device_and_dtype(tensors):
        bucket, size_bytes = [], 0
        for tensor in same_kind:
            if tensor.nbytes >= alone_bytes:
                yield [tensor]
                continue
            if bucket and size_bytes + tensor.nbytes > limit_bytes:
                yield bucket
                bucket, size_bytes = [], 0
            bucket.append(tensor)
            size_bytes += tensor.nbytes
        if bucket:
            yield bucket


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------


class ZeroRanks(Ranks):
    """ZeRO-1 and ZeRO-2, with or without optimizer offload, through the engine's own delayed reduction. Full local
    gradients are kept until the window ends, so ZeRO-2 needs the gradient memory of ZeRO-1 here."""

    def __init__(self, trainer) -> None:
        super().__init__(trainer)
        self._engine = trainer.model_wrapped

    @contextmanager
    def window(self, completes: bool = True) -> Iterator[None]:
        with super().window(completes), self._engine.coalesce_grad_reduction():
            try:
                yield
            except BaseException:
                # The engine would reduce the gradients even now, and other ranks may never join.
                self.drop_gradients()
                raise
            self._complete()

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        try:
            with super().micro_batch(last), self._without_a_step():
                yield
        except BaseException:
            # After a failed backward the engine believes that it still runs. After a forward this does nothing.
            self._engine.optimizer.exit_backward()
            raise

    def _without_a_step(self) -> AbstractContextManager[None]:
        """Inside, accelerate's backward does not take the engine's step, as it would in the last one of a window."""
        backward = self._accelerator.backward

        def backward_without_step(loss: torch.Tensor, **kwargs: Any) -> None:
            with self._sync_gradients(False):
                backward(loss, **kwargs)

        return replaced(self._accelerator, "backward", backward_without_step)

    def drop_gradients(self) -> None:
        super().drop_gradients()
        self._engine.optimizer.zero_grad(set_to_none=True)  # with low precision under ZeRO-1, the sum is not in .grad

    def finish(self) -> None:
        """Clip, step, clear gradients and count, once per window, as accelerate does in the last backward."""
        self._engine.set_gradient_accumulation_boundary(is_boundary=True)
        self._engine.step()

    def _complete(self) -> None:
        """Give every rank a gradient of each weight that any of them used."""
        optimizer = self._engine.optimizer
        used = [optimizer.get_gradient_for_reduction(weight) is not None for weight in self.weights]
        self._fill_unused(self.weights, used)
        if optimizer.use_grad_accum_attribute:
            optimizer.fill_grad_accum_attribute()


def deepspeed_ranks(trainer) -> Ranks:
    """Return the rules for DeepSpeed. Raises ControlError if it cannot delay its reduction, or survive a failed
    micro-batch."""
    engine = trainer.model_wrapped
    _refuse_unusable(engine)
    stage = int(engine.zero_optimization_stage())
    if stage == 3:
        return ShardedRanks(trainer)
    if stage not in (1, 2) or not hasattr(engine.optimizer, "_coalesce_grad_reduction"):
        raise ControlError(
            f"DeepSpeed's {type(engine.optimizer).__name__} (zero_optimization.stage {stage}) cannot delay its "
            f"reduction; set zero_optimization.stage to 2, or use plain DDP, or {OFF}"
        )
    return ZeroRanks(trainer)


def refuse_timers(source: str, flops_profiler: Any, wall_clock_breakdown: Any) -> None:
    """Raise ControlError for a timer that is on in ``source``."""
    # The profiler first, because the engine then reports wall_clock_breakdown as on, whatever its configuration says.
    for name, is_on in (("flops_profiler", flops_profiler), ("wall_clock_breakdown", wall_clock_breakdown)):
        if is_on:
            raise ControlError(
                f"DeepSpeed's {name} measures forward and backward in pairs, which a failed micro-batch breaks; "
                f"disable {name} in {source}, or {OFF}"
            )


def _refuse_unusable(engine) -> None:
    refuse_timers("the DeepSpeed configuration", engine.flops_profiler_enabled(), engine.wall_clock_breakdown())
    if engine.pipeline_parallelism or engine.has_moe_layers:
        kind = "pipeline parallelism" if engine.pipeline_parallelism else "expert layers (MoE)"
        raise ControlError(
            f"DeepSpeed's {kind} communicates inside every micro-batch, but ranks run different numbers of "
            f"micro-batches; use a model without it, or {OFF}"
        )
    if engine.zenflow:
        raise ControlError(
            f"DeepSpeed's zenflow updates weights outside of the optimizer step; remove zenflow, or {OFF}"
        )
