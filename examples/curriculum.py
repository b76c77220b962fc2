"""Wrong labels found while training, and left out: python examples/curriculum.py"""

import os

import torch
from transformers import TrainingArguments

from scu_trainer import SCUTrainer, wrap
from scu_trainer.settings import CurriculumSettings

torch.manual_seed(0)
classes = torch.arange(240) % 3
points = 5 * torch.nn.functional.one_hot(classes, 6) + torch.randn(240, 6)
wrong = torch.arange(0, 240, 20)
classes[wrong] = (classes[wrong] + 1) % 3
network = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))

trainer = SCUTrainer(
    wrap(network, loss=torch.nn.CrossEntropyLoss()),
    TrainingArguments(
        "runs/curriculum",
        num_train_epochs=int(os.environ.get("EPOCHS", "8")),
        per_device_train_batch_size=8,
        learning_rate=0.02,
        report_to="none",
    ),
    train_dataset=list(zip(points, classes, strict=True)),
    curriculum=CurriculumSettings("noise_guard"),
)
trainer.train()
hardest = trainer.difficulty.scores.argsort()[-len(wrong) :].tolist()
print(
    f"of {len(wrong)} rows with a wrong label, {len({*hardest} & {*wrong.tolist()})} are among the hardest {len(wrong)}"
)
