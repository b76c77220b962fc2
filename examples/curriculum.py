"""Rows with wrong labels, found while training and left out: python examples/curriculum.py"""

import os

import torch
from transformers import TrainingArguments

from scu_trainer import SCUTrainer, wrap
from scu_trainer.settings import CurriculumSettings

# %% [markdown]
# ## Data with wrong labels
#
# 240 points of three classes; every twentieth has the label of another class. `wrap` turns any torch network into a
# model with a loss.

# %%
torch.manual_seed(0)
classes = torch.arange(240) % 3
points = 5 * torch.nn.functional.one_hot(classes, 6) + torch.randn(240, 6)
wrong = torch.arange(0, 240, 20)
classes[wrong] = (classes[wrong] + 1) % 3
network = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))

# %% [markdown]
# ## A guard against them
#
# The loss of each row is read from the forward pass that trains, so no second one is needed. Rows whose loss stays
# above what guessing would give are left out from the fourth epoch on; a tenth of them is tried again in each epoch. On
# the command line: `scu-trainer train --curriculum noise_guard`.

# %%
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

# %% [markdown]
# ## Who they are
#
# `runs/curriculum/suspects.jsonl` lists them, worst first. Read it before you believe it: a rule on losses cannot tell
# a hard row from a wrong one.

# %%
hardest = {*trainer.difficulty.scores.argsort()[-len(wrong) :].tolist()}
found = len(hardest & {*wrong.tolist()})
print(f"of {len(wrong)} rows with a wrong label, {found} are among the hardest {len(wrong)}")
