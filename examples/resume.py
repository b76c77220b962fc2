"""Kill a training, and resume it with the same command: python examples/resume.py

A script starts a training, kills it and starts it again. Nothing is downloaded.
To try your own data, add flags of `scu-trainer train`, such as `--dataset your.jsonl`.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

# %% [markdown]
# ## Kill it
#
# The run saves a checkpoint every four steps. SIGKILL ends it once the first one is complete, so it cannot save
# anything more. `manifest.json` is the last file of a checkpoint, with the sizes and hashes of the others.

# %%
RUN = Path("runs/resume")
if RUN.exists():
    sys.exit(f"{RUN} is there from before, with checkpoints; remove it, or start this in another folder")
command = [sys.executable, "-m", "scu_trainer.cli.main", "train", "--config", "scu_lora", "--output_dir", str(RUN)]
command += ["--max_steps", "12", "--warmup_steps", "2", "--save_steps", "4", "--eval_strategy", "no", *sys.argv[1:]]

first = subprocess.Popen(command)
while first.poll() is None and not (RUN / "checkpoint-4" / "manifest.json").exists():
    time.sleep(0.05)
first.kill()
first.wait()
print("killed; checkpoints:", sorted(path.name for path in RUN.glob("checkpoint-*")), flush=True)

# %% [markdown]
# ## The same command again
#
# The second start finds the newest complete checkpoint and restores weights, optimizer, order of the rows and random
# numbers. On a CPU the result equals that of an uninterrupted run, bit for bit. `--no_resume` starts another run.

# %%
if code := subprocess.run(command).returncode:
    sys.exit(code)
status = json.loads((RUN / "run.json").read_text())
print(f"{status['status']} at step {status['step']} of {status['max_steps']}")

# %% [markdown]
# ## In the background
#
# `scu-trainer runs start --config scu_lora` detaches a run from the terminal. `runs list` shows the state of each run,
# and `runs monitor NAME` shows one live. `runs stop NAME` ends it with a checkpoint; `runs resume NAME` resumes it.
