"""BatchNorm of image classifiers for batches that are too small for batch statistics."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from scu_trainer.models.asking import evaluating
from scu_trainer.models.vision.view import ImageView


class SteadyBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm that uses the running statistics, and does not update them, for a single value per channel. Stock
    BatchNorm raises an error for such a batch in training. The last batch of an epoch can be a single image, and a
    curriculum that leaves rows out makes epochs of any length."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        has_one_value = values.numel() == values.shape[1]
        if not (self.training and has_one_value and self.track_running_stats):
            return super().forward(values)
        statistics = (self.running_mean, self.running_var, self.weight, self.bias)
        return functional.batch_norm(values, *statistics, training=False, eps=self.eps)


def allow_single_images(model: nn.Module) -> int:
    """Make every BatchNorm of ``model`` accept single images and return their number; saved files do not change."""
    found = [module for module in model.modules() if type(module) in (nn.BatchNorm2d, SteadyBatchNorm2d)]
    for module in found:
        module.__class__ = SteadyBatchNorm2d
    return len(found)


def needs_several_rows(model: nn.Module, view: ImageView) -> bool:
    """Return whether a BatchNorm gets feature maps of one position, which for a single image give no statistics."""
    seen: list[bool] = []
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    hooks = [norm.register_forward_pre_hook(lambda _, args: seen.append(args[0][0, 0].numel() == 1)) for norm in norms]
    with evaluating(model):
        model(pixel_values=torch.zeros(1, view.channels, *view.size, dtype=model.dtype))
    for hook in hooks:
        hook.remove()
    return any(seen)
