"""Learn this, and lose at most that on other text: python examples/retain.py

Nothing is downloaded. Flags of `scu-trainer train` can be added, such as `--model_name_or_path your/model`.
"""

import json
import sys
from pathlib import Path

from scu_trainer.cli.main import main
from scu_trainer.train.run_directory.resume import latest_run

# %% [markdown]
# ## What is to be learned, and what is to be kept
#
# Fine-tuning on one kind of text costs a model some of what it knew of another. `retain` names that other text, the
# anchor: a file, a folder or a Hub id; here it is Python's documentation, from which the default model is made.
# `retain_budget_bits` is what the loss on it may rise by, in bits per token.

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
# ## What it cost
#
# Rows of the anchor were replayed, more of them as the budget came near; what was over it in the end was taken off by
# scaling the update. The verdict is from anchor documents that no decision used.

# %%
run = latest_run(Path("runs/retain"))  # runs/retain-2 the second time
retention = json.loads((run / "scu_metrics.json").read_text())["retention"]
print(f"lost on the anchor: {retention['lost_bits']['value']:.3f} of {retention['budget_bits']} bits per token")
