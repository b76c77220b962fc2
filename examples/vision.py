"""An image classifier from scratch on handwritten digits: python examples/vision.py

Nothing is downloaded. Flags of `scu-trainer train` can be added, such as `--architecture efficientnet_b0`.
"""

import json
import sys
from pathlib import Path

from scu_trainer.cli.main import main
from scu_trainer.train.run_directory.resume import latest_run

# %% [markdown]
# ## Training
#
# The recipe `resnet` is ResNet-18 on scikit-learn's digits (`scu-trainer recipes resnet` prints it). For your images,
# `--dataset` is a folder with a folder for each class, or a data set of the Hub. `--model_name_or_path` takes any
# image classifier of transformers instead of weights that are drawn at random.

# %%
if code := main(["train", "--config", "resnet", "--output_dir", "runs/vision", *sys.argv[1:]]):
    sys.exit(code)

# %% [markdown]
# ## What it learned
#
# The files of a run are those of a text run. Labels that look wrong are listed in `suspects.jsonl` with
# `--curriculum noise_guard`; `scu-trainer report runs/vision` draws the run.

# %%
run = latest_run(Path("runs/vision"))  # runs/vision-2 the second time
metrics = json.loads((run / "scu_metrics.json").read_text())
print("accuracy on what was held out:", metrics["held_out_accuracy_after"]["value"])
