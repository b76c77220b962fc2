"""Fine-tune with TRL's SFTTrainer and the loops: python examples/trl_sft.py [MODEL]   (pip install trl)"""

import os
import sys

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from scu_trainer import with_loops
from scu_trainer.settings import CurriculumSettings, MemorySettings

HAS_GPU = torch.cuda.is_available()
name = sys.argv[1] if sys.argv[1:] else "HuggingFaceTB/SmolLM2-135M"
pairs = {
    "prompt": [f"{i} plus {i} is" for i in range(64)],
    "completion": [f" {2 * i}, as anybody can see" + " who counts" * (i % 5) for i in range(64)],
}

trainer = with_loops(SFTTrainer)(
    model=name,
    args=SFTConfig(
        "runs/sft",
        max_steps=int(os.environ.get("STEPS", "50")),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_length=256,
        report_to="none",
        use_cpu=not HAS_GPU,
        bf16=HAS_GPU,  # true is TRL's default, which it refuses on a CPU
    ),
    train_dataset=Dataset.from_dict(pairs),
    memory=MemorySettings(),
    curriculum=CurriculumSettings("token_budget"),  # batches with about the same number of tokens
)
trainer.train()
trainer.save_model()
print("the model is in", trainer.args.output_dir)
