"""Add the loops to a Trainer that you already have: python examples/any_trainer.py [MODEL]"""

import os
import sys

from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from scu_trainer import with_loops
from scu_trainer.settings import MemorySettings, RegularizationSettings

name = sys.argv[1] if sys.argv[1:] else "HuggingFaceTB/SmolLM2-135M"
tokenizer = AutoTokenizer.from_pretrained(name)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
texts = [f"Shelf {i} holds {3 * i + 1} plates" + " and a cup" * (i % 7) + "." for i in range(64)]
rows = Dataset.from_dict({"text": texts}).map(lambda row: tokenizer(row["text"]), remove_columns="text")

arguments = TrainingArguments(
    "runs/any_trainer",
    max_steps=int(os.environ.get("STEPS", "50")),
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=1e-4,
    report_to="none",
)
trainer = with_loops(Trainer)(  # or your own subclass of it
    model=AutoModelForCausalLM.from_pretrained(name),
    args=arguments,
    train_dataset=rows,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    memory=MemorySettings(),  # runs rows without padding; no step is lost when memory runs out
    regularization=RegularizationSettings(target_s=0.05),  # adjusts lambda until S reaches this value
)
trainer.train()
print("split exactly:", trainer.micro_batches.reduction.is_exact)
