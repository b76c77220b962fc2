"""A training that is killed, and goes on by the same command: python examples/resume.py

Nothing is downloaded. Flags of `scu-trainer train` can be added, such as `--dataset your.jsonl`.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

# %% [markdown]
# ## Kill it
#
# A checkpoint every four steps, and SIGKILL once the first is complete: no chance to save anything. `manifest.json` is
# the last file of a checkpoint, with the sizes and hashes of the others.

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
# It finds the newest checkpoint that is complete, and restores the weights, the optimizer, the order of the rows
# and the random numbers of a run that was never stopped: bit for bit, on a CPU. `--no_resume` starts another run.

# %%
if code := subprocess.run(command).returncode:
    sys.exit(code)
status = json.loads((RUN / "run.json").read_text())
print(f"{status['status']} at step {status['step']} of {status['max_steps']}")

# %% [markdown]
# ## In the background
#
# `scu-trainer runs start --config scu_lora` detaches a run from the terminal, `runs list` says how each one is doing,
# `runs monitor NAME` shows it live, `runs stop NAME` ends it with a checkpoint and `runs resume NAME` goes on.
