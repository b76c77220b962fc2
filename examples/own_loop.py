"""Write your own loop, which halves the learning rate at each spike of the gradient: python examples/own_loop.py

docs/loops.md describes the hooks. The state of a loop is saved in checkpoints, and its scalars are in every log row.
"""

import os

import torch
from transformers import TrainingArguments

from scu_trainer import Loop, SCUTrainer, wrap
from scu_trainer.settings import MemorySettings


class Calm(Loop):
    name = "calm"
    state_file = "calm_state.json"  # in every checkpoint
    history_file = "calm.json"  # in the run directory, with a row per spike

    def begin(self):
        self.rate_factor, self.usual = 1.0, None

    def on_grad_norm(self, norm):
        norm = float(norm)
        if self.usual is not None and norm > 1.5 * self.usual:
            self.rate_factor /= 2
            self.record({"step": self.trainer.state.global_step + 1, "norm": norm, "rate_factor": self.rate_factor})
        self.usual = norm if self.usual is None else 0.9 * self.usual + 0.1 * norm

    def scalars(self):
        return {"calm/rate_factor": self.rate_factor}

    def state_dict(self):
        return {"rate_factor": self.rate_factor, "usual": self.usual}

    def load_state_dict(self, state):
        vars(self).update(state)


torch.manual_seed(0)
inputs = torch.randn(256, 4)
targets = inputs @ torch.randn(4, 1) + 0.1 * torch.randn(256, 1)
steps = int(os.environ.get("STEPS", "60"))
trainer = SCUTrainer(
    wrap(torch.nn.Linear(4, 1), loss=torch.nn.MSELoss()),
    TrainingArguments("runs/own_loop", max_steps=steps, learning_rate=0.1, logging_steps=5, report_to="none"),
    train_dataset=list(zip(inputs, targets, strict=True)),
    memory=MemorySettings(),
    callbacks=[Calm()],
)
trainer.train()
print("rate factor in the end:", trainer.state.log_history[-2]["calm/rate_factor"])
