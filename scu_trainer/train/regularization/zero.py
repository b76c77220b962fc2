"""Decay weights under DeepSpeed ZeRO-1 and ZeRO-2, where training keeps partitioned fp32 master weights."""

from __future__ import annotations

from collections.abc import Callable

import torch

from scu_trainer.errors import ControlError
from scu_trainer.train.regularization.penalty import Prior, Result


class ZeroPrior(Prior):
    """A ``Prior`` that decays the fp32 master weights through DeepSpeed's own API.

    The engine overwrites the model's weights with its masters at every step, so a decay of the model's weights would be
    lost. Costs one all-reduce per trainable tensor and step. Every rank must call it at the same time.
    """

    def _with_retry(self, function: Callable[[], Result], doing: str) -> Result:
        return function()  # no repetition, because it communicates with other ranks, which would not repeat it

    def _value(self, index: int) -> torch.Tensor:
        """Return the fp32 master if the model's weight is rounded, because rounding would look like a distance."""
        from deepspeed.utils import safe_get_full_fp32_param

        weight = self.weights[index]
        if weight.dtype == torch.float32:
            return weight
        master = safe_get_full_fp32_param(weight)
        return weight if master is None else master  # None before the engine is created

    @torch.no_grad()
    def decay(self, shrink: float, seed: int = 0) -> None:
        from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

        self._move_starts_to_weights()
        for i, weight in enumerate(self.weights):
            master = safe_get_full_fp32_param(weight)
            if master is None:
                raise ControlError(
                    f"DeepSpeed keeps no fp32 master of {self.names[i]}; use ZeRO stage 1 or 2, or set scu: false"
                )
            master.lerp_(self._start_of_weight(i).float().expand_as(master), shrink)
            safe_set_full_fp32_param(weight, master)
            weight.copy_(master)


def check_zero_stage(stage: int, actuator: str) -> None:
    """Raise ControlError if weights cannot be regularized under DeepSpeed: ZeRO-3 shards them, and the penalty needs
    gradients that are inside the engine."""
    if not 1 <= stage <= 2:
        raise ControlError(
            f"the regularization loop works under ZeRO stage 1 and 2, but this is stage {stage}, where lambda cannot "
            "reach the trained weights; change zero_optimization.stage, or set scu: false"
        )
    if actuator == "penalty":
        raise ControlError(
            "DeepSpeed keeps gradients inside its engine, where the penalty of scu_law: original cannot be added; use "
            "scu_law: model or scu_actuator: decoupled, or set scu: false"
        )
