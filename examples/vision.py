"""An image classifier from scratch on handwritten digits: python examples/vision.py

You train ResNet-18 from random weights and read its accuracy on held-out images. Nothing is downloaded.
To change the training, add flags of `scu-trainer train`, such as `--architecture efficientnet_b0`.
"""

import json
import sys
from pathlib import Path

from scu_trainer.cli.main import main
from scu_trainer.train.run_directory.resume import latest_run

# %% [markdown]
# ## Training
#
# The recipe `resnet` is ResNet-18 on scikit-learn's digits (`scu-trainer recipes resnet` prints it). For your own
# images, set `--dataset` to a folder with one folder per class, or to a data set of the Hub. To start from a trained
# image classifier of transformers instead of random weights, set `--model_name_or_path`.

# %%
if code := main(["train", "--config", "resnet", "--output_dir", "runs/vision", *sys.argv[1:]]):
    sys.exit(code)

# %% [markdown]
# ## What it learned
#
# The run writes the same files as a run on text. `scu-trainer report runs/vision` draws it. With
# `--curriculum noise_guard`, `suspects.jsonl` lists labels that look wrong.

# %%
run = latest_run(Path("runs/vision"))  # runs/vision-2 the second time
metrics = json.loads((run / "scu_metrics.json").read_text())
print("accuracy on what was held out:", metrics["held_out_accuracy_after"]["value"])
