"""Train your own network with your own loss, in micro-batches with the same gradient: python examples/own_loss.py

The memory loop is not given the kind of loss. It finds out that this one is a mean over rows, and checks that during
training.
"""

import os

import torch
from transformers import TrainingArguments

from scu_trainer import SCUTrainer, wrap
from scu_trainer.settings import MemorySettings


def focal_loss(logits, classes):
    """Return the cross-entropy with little weight on rows that are already right (Lin et al., 2017)."""
    missed = torch.nn.functional.cross_entropy(logits, classes, reduction="none")
    return ((1 - torch.exp(-missed)) ** 2 * missed).mean()


torch.manual_seed(0)
classes = torch.arange(240) % 3
points = 2 * torch.nn.functional.one_hot(classes, 6) + torch.randn(240, 6)
network = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))

trainer = SCUTrainer(
    wrap(network, loss=focal_loss),
    TrainingArguments(
        "runs/own_loss",
        max_steps=int(os.environ.get("STEPS", "60")),
        per_device_train_batch_size=24,
        learning_rate=0.02,
        report_to="none",
    ),
    train_dataset=list(zip(points, classes, strict=True)),
    memory=MemorySettings(max_batch_size=4),  # as if only four rows fit; the optimizer still sees 24
)
trainer.train()
trainer.save_model()  # runs/own_loss/model.safetensors loads into the bare network
print("split exactly:", trainer.micro_batches.reduction.is_exact)
