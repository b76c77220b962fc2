"""Optimizers that the stock Trainer cannot make from its arguments alone."""

from __future__ import annotations

from typing import Optional

from torch import nn
from torch.optim import Optimizer
from transformers import Trainer

from scu_trainer.train.job.job import Job


def own_optimizer(job: Job, model: nn.Module) -> Optional[Optimizer]:
    """LoRA+: two learning rates (Hayou et al. 2024, https://arxiv.org/abs/2402.12354), in the groups of peft; None
    where the stock Trainer makes the optimizer."""
    ratio = job.model.loraplus_lr_ratio
    if ratio is None:
        return None
    from peft.optimizers import create_loraplus_optimizer

    kind, arguments = Trainer.get_optimizer_cls_and_kwargs(job.training, model)
    arguments["loraplus_weight_decay"] = job.training.weight_decay
    return create_loraplus_optimizer(model, kind, loraplus_lr_ratio=ratio, **arguments)
