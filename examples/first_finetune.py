"""A first fine-tune on a file in Alpaca's format, and its answers: python examples/first_finetune.py

You write a file, train an adapter on it and ask the tuned model. For another model, add `--model_name_or_path MODEL`.
"""

import json
import sys
from pathlib import Path

from scu_trainer.cli.main import main
from scu_trainer.settings import ModelSettings
from scu_trainer.talk.answers import AnswerSettings, stream
from scu_trainer.talk.model import load_talker
from scu_trainer.train.run_directory.resume import latest_run

# %% [markdown]
# ## The file
#
# The file is a JSON list (or JSON lines) of rows with `instruction`, `input` and `output`. Other formats work as well;
# `scu-trainer data --dataset runs/animals.json` shows how a file is read, and which tokens are learned.

# %%
SOUNDS = {"duck": "quack", "cow": "moo", "cat": "meow", "dog": "woof", "sheep": "baa", "owl": "hoo"}
ASKED = ["What does the {} say?", "Which sound does a {} make?", "Tell me how a {} sounds.", "The sound of a {}?"]
pairs = [(asked.format(animal), f"The {animal} says {sound}.") for asked in ASKED for animal, sound in SOUNDS.items()]
Path("runs").mkdir(exist_ok=True)
Path("runs/animals.json").write_text(json.dumps([{"instruction": q, "input": "", "output": a} for q, a in pairs]))

# %% [markdown]
# ## The training
#
# Each setting is a flag of `scu-trainer train` and a key of its YAML file; so is every field of `TrainingArguments`.
# LoRA is the default. Without `--model_name_or_path`, a small model is made from Python's documentation first.

# %%
job = {
    "dataset": "runs/animals.json",
    "packing": False,  # a conversation a row
    "validation_split_percentage": 20,
    "num_train_epochs": 30,
    "per_device_train_batch_size": 4,
    "learning_rate": 5e-3,
    "save_steps": 50,  # what a kill costs at most
    "output_dir": "runs/animals",
}
if code := main(["train", *(f"--{name}={value}" for name, value in job.items()), *sys.argv[1:]]):
    sys.exit(code)

# %% [markdown]
# ## The answers
#
# `runs/animals` (`runs/animals-2` the second time) has the adapter, the tokenizer, logs and a model card. To talk to
# the tuned model and its base side by side, type `scu-trainer chat runs/animals --against base`.

# %%
run = str(latest_run(Path("runs/animals")))
talker = load_talker(run, ModelSettings(model_name_or_path=run))
prompt = talker.encoded([{"role": "user", "content": "What does the duck say?"}])
print("asked about the duck:", "".join(stream(talker, prompt, AnswerSettings(max_new_tokens=40))))
