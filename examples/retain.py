"""Learn new text, and lose little on other text: python examples/retain.py

You train on one kind of text and set how much worse the model may become on another. Nothing is downloaded.
To try your own model, add flags of `scu-trainer train`, such as `--model_name_or_path your/model`.
"""

import json
import sys
from pathlib import Path

from scu_trainer.cli.main import main
from scu_trainer.train.run_directory.resume import latest_run

# %% [markdown]
# ## Text to learn, and text to keep
#
# Fine-tuning on one kind of text makes a model worse on another. `retain` names that other text, the anchor: a file, a
# folder or a Hub id. Here it is Python's documentation, on which the default model was trained. `retain_budget_bits`
# is how much the loss on the anchor may rise, in bits per token.

# %%
sums = [{"text": f"{a} plus {b} is {a + b}. " * 8} for a in range(12) for b in range(12)]
Path("runs").mkdir(exist_ok=True)
Path("runs/sums.jsonl").write_text("\n".join(json.dumps(row) for row in sums))
job = {
    "dataset": "runs/sums.jsonl",
    "block_size": 128,
    "retain": "python_docs",
    "retain_documents": 60,
    "retain_budget_bits": 0.1,
    "max_steps": 40,
    "learning_rate": 1e-3,
    "output_dir": "runs/retain",
}
if code := main(["train", *(f"--{name}={value}" for name, value in job.items()), *sys.argv[1:]]):
    sys.exit(code)

# %% [markdown]
# ## What the model lost
#
# The run replayed rows of the anchor, and more of them as the loss came near the budget. If the loss is above it in
# the end, the run scales the update down. The verdict is from anchor documents that no decision used.

# %%
run = latest_run(Path("runs/retain"))  # runs/retain-2 the second time
retention = json.loads((run / "scu_metrics.json").read_text())["retention"]
print(f"lost on the anchor: {retention['lost_bits']['value']:.3f} of {retention['budget_bits']} bits per token")
