"""Preferences with TRL's DPOTrainer and the loops: python examples/trl_dpo.py [MODEL]

`with_loops` adds the feedback loops to TRL's trainer. Type `pip install trl` first. MODEL is a Hub id or a folder;
without one, a small model is downloaded.
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
# Use everything that DPOTrainer accepts. SFTTrainer, KTOTrainer, RewardTrainer and your own subclass work as well.

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
# ## Add the loops
#
# The memory loop runs batches whole here, because a sample is a pair of rows. If memory runs out, it frees memory and
# runs the batch again. The other loop measures S, the share of information in the trained weights; `target_s` would
# steer it. TRL does not count the tokens of a preference loss, so you set their number.

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
