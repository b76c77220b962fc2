"""Muon for the hidden matrices of a model and AdamW for everything else, as one optimizer.

Muon is made for hidden matrices, and torch.optim.Muon accepts only 2-D parameters: AdamW updates embeddings, the output
layer, norms and biases. Both share one learning rate: updates of matrices are scaled to the size of AdamW's updates
(``adjust_lr_fn="match_rms_adamw"``, arXiv 2502.16982), so that a rate that suits AdamW suits both.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from scu_trainer.errors import ControlError


class MuonWithAdamW(Optimizer):
    """Muon for ``matrices``, groups of 2-D parameters, and AdamW for ``others``, groups that may be empty.

    Groups are as torch takes them. The update of each parameter is torch's own and depends on no other parameter.
    """

    def __init__(self, matrices: list[dict], others: list[dict], lr: float, **adam: Any) -> None:
        groups = Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw").param_groups
        super().__init__(groups + (AdamW(others, lr=lr, **adam).param_groups if others else []), {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            raise ControlError("MuonWithAdamW takes no closure; compute the gradients before step()")
        for kind in (Muon, AdamW):
            groups = [group for group in self.param_groups if ("ns_steps" in group) == (kind is Muon)]
            if groups:
                part = object.__new__(kind)  # shares our state and groups, so that loading and pickling see one of each
                part.__dict__.update(state=self.state, param_groups=groups, defaults=groups[0])
                kind.step.__wrapped__(part)


def muon_for(model: nn.Module, decayed: Collection[str], lr: float, weight_decay: float, **adam: Any) -> MuonWithAdamW:
    """Return the optimizer for the trainable weights of ``model``; LoRA's factors count as matrices. ``decayed``: names
    of weights with weight decay. ``adam``: betas and eps. Raises ControlError if no weight is left for Muon."""
    outside = {id(p) for layer in outer_layers(model) for p in layer.parameters()}
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            groups.setdefault((p.dim() == 2 and id(p) not in outside, name in decayed), []).append(p)
    matrices: list[dict] = []
    others: list[dict] = []
    for (is_matrix, decays), parameters in groups.items():
        group = {"params": parameters, "weight_decay": weight_decay if decays else 0.0}
        (matrices if is_matrix else others).append(group)
    if not matrices:
        raise ControlError(
            "use_muon is for matrices between the embeddings and the output layer, and none of them is trained; "
            "remove use_muon"
        )
    return MuonWithAdamW(matrices, others, lr, **adam)


def outer_layers(model: nn.Module) -> list[nn.Module]:
    """Return the embeddings and the output layers: AdamW updates their matrices."""
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    heads = [getattr(model, name, None) for name in ("score", "classifier", "qa_outputs")]
    embeddings = [layer for layer in model.modules() if isinstance(layer, nn.Embedding)]
    return [*embeddings, *(layer for layer in (output, *heads) if isinstance(layer, nn.Module))]
