"""A first fine-tune, on a file in Alpaca's format, without a download: python examples/first_finetune.py

Flags of `scu-trainer train` may follow: --model_name_or_path your/model --max_steps 200
"""

import json
import sys
from pathlib import Path

from scu_trainer.cli.main import main

SOUNDS = {"duck": "quack", "cow": "moo", "cat": "meow", "dog": "woof", "sheep": "baa", "owl": "hoo"}
ASKED = [
    "What does the {} say?",
    "Which sound does a {} make?",
    "Tell me how a {} sounds.",
    "The sound of a {}, please.",
]

rows = [
    {"instruction": question.format(animal), "input": "", "output": f"The {animal} says {sound}."}
    for question in ASKED
    for animal, sound in SOUNDS.items()
]
Path("animals.json").write_text(json.dumps(rows, indent=1))

job = {
    "dataset": "animals.json",
    "validation_split_percentage": 20,
    "packing": "false",  # a conversation a row
    "num_train_epochs": 60,
    "per_device_train_batch_size": 4,
    "learning_rate": 5e-3,
    "output_dir": "runs/animals",
}
flags = [word for name, value in job.items() for word in (f"--{name}", str(value))]
sys.exit(main(["train", *flags, *sys.argv[1:]]))  # next: python examples/talk.py runs/animals
