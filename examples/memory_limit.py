"""Train under a memory limit, with the same result as without: python examples/memory_limit.py"""

import json
import random
from pathlib import Path

import psutil
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from scu_trainer import SCUTrainer
from scu_trainer.settings import MemorySettings

# %% [markdown]
# ## A model and rows of uneven length
#
# Any model of transformers works; this one has random weights, so nothing is downloaded. All weights are trained.

# %%
SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
random.seed(0)
rows = [torch.arange(start, start + random.randint(16, 256)) % 2000 for start in random.choices(range(2000), k=128)]


def padded(batch):
    tokens = pad_sequence(batch, batch_first=True)
    is_real = torch.arange(tokens.shape[1]) < torch.tensor([[len(row)] for row in batch])
    return {"input_ids": tokens, "attention_mask": is_real.long(), "labels": tokens.where(is_real, torch.tensor(-100))}


# %% [markdown]
# ## The same training twice
#
# The optimizer sees 16 rows in each step. `memory_limit_gb` limits the memory of this process, here to little more
# than it uses already; by default the limit is that of the GPU or machine. It decides how many rows run at once.


# %%
def train(name, memory):
    torch.manual_seed(0)
    arguments = TrainingArguments(f"runs/{name}", max_steps=6, per_device_train_batch_size=16, logging_steps=1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=2000, **SIZES))
    trainer = SCUTrainer(model, arguments, train_dataset=rows, data_collator=padded, memory=memory)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


limit_gb = (psutil.Process().memory_info().rss + 80e6) / 2**30
whole, limited = train("no_limit", MemorySettings()), train("limit", MemorySettings(memory_limit_gb=limit_gb))

# %% [markdown]
# `memory_history.json` has a row for each change of the micro-batch (the rows that run at once), with its reason. The
# losses of the two runs are the same up to rounding.

# %%
for change in json.loads(Path("runs/limit/memory_history.json").read_text()):
    print(f"step {change['step']}: {change['tokens_per_chunk']} tokens at once, since {change['reason']}")
print(f"largest difference of a loss: {max(abs(a - b) for a, b in zip(whole, limited, strict=True)):.0e}")
