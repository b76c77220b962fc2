"""Recovering micro-batches under DeepSpeed's ZeRO-1 and ZeRO-2, through the engine's own delayed reduction.

Full local gradients are kept until the window ends, so ZeRO-2 needs the gradient memory of ZeRO-1 here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from scu_trainer.errors import ControlError
from scu_trainer.train.step.distributed.ranks import OFF, Ranks, ShardedRanks
from scu_trainer.train.step.recovery.snapshot import replaced


class ZeroRanks(Ranks):
    """ZeRO-1 and ZeRO-2, with or without optimizer offload."""

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
