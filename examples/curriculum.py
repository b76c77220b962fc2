"""Find rows with wrong labels while training, and leave them out: python examples/curriculum.py

You train on data with wrong labels, and see which rows the data loop leaves out. Nothing is downloaded.
"""

import os

import torch
from transformers import TrainingArguments

from scu_trainer import SCUTrainer, wrap
from scu_trainer.settings import CurriculumSettings

# %% [markdown]
# ## Data with wrong labels
#
# The data are 240 points of three classes, and every twentieth point has the label of another class. `wrap` turns any
# torch network into a model with a loss.

# %%
torch.manual_seed(0)
classes = torch.arange(240) % 3
points = 5 * torch.nn.functional.one_hot(classes, 6) + torch.randn(240, 6)
wrong = torch.arange(0, 240, 20)
classes[wrong] = (classes[wrong] + 1) % 3
network = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))

# %% [markdown]
# ## Train with the noise guard
#
# The data loop reads the loss of each row from the forward pass that trains, so it needs no second pass. From the
# fourth epoch on, it leaves out rows whose loss stays above that of a guess. In each epoch it tries a tenth of them
# again. On the command line, type `scu-trainer train --curriculum noise_guard`.

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
# ## See which rows it found
#
# `runs/curriculum/suspects.jsonl` lists the rows, worst first. Look at them before you remove any: the loss of a row
# cannot show whether the row is wrong or only hard.

# %%
hardest = {*trainer.difficulty.scores.argsort()[-len(wrong) :].tolist()}
found = len(hardest & {*wrong.tolist()})
print(f"of {len(wrong)} rows with a wrong label, {found} are among the hardest {len(wrong)}")
