"""Preferences, by TRL's DPOTrainer with the loops: python examples/trl_dpo.py [MODEL]

A loop is a part of the trainer that measures while the model trains and sets something (docs/glossary.md).
Needs `pip install trl`. MODEL is a Hub id or a folder; without one, a small model is downloaded.
"""

import os
import sys

import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from scu_trainer import with_loops
from scu_trainer.settings import MemorySettings, RegularizationSettings

# %% [markdown]
# ## Model, data and arguments are TRL's
#
# Whatever DPOTrainer takes, it takes here. The same goes for SFTTrainer, KTOTrainer, RewardTrainer, and your subclass.

# %%
HAS_GPU = torch.cuda.is_available()
name = sys.argv[1] if sys.argv[1:] else "HuggingFaceTB/SmolLM2-135M-Instruct"
preferences = {
    "prompt": [f"How many is {i} plus {i}?" for i in range(64)],
    "chosen": [f" {2 * i}." for i in range(64)],
    "rejected": [f" {2 * i + 1}." for i in range(64)],
}
arguments = DPOConfig(
    "runs/dpo",
    max_steps=int(os.environ.get("STEPS", "50")),
    per_device_train_batch_size=4,
    learning_rate=1e-5,
    max_length=256,
    logging_steps=1,
    report_to="none",
    use_cpu=not HAS_GPU,
    bf16=HAS_GPU,  # TRL's default, which it refuses on a CPU
)

# %% [markdown]
# ## The loops come beside them
#
# A sample is a pair of rows here, so batches run whole, and the log says why; after running out of memory, memory is
# freed and the batch runs once more as it is. S, the share of information in the trained weights, is measured; with
# `target_s` it would be steered. TRL does not count the tokens of a preference loss, so their number is given.

# %%
trainer = with_loops(DPOTrainer)(
    model=name,
    args=arguments,
    train_dataset=Dataset.from_dict(preferences),
    memory=MemorySettings(),
    regularization=RegularizationSettings(tokens=1e4),
)
trainer.train()
print("preference for what was chosen:", trainer.state.log_history[-2]["rewards/accuracies"])
