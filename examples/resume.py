"""A training that is killed, and goes on by the same command: python examples/resume.py

Flags of `scu-trainer train` may follow: --model_name_or_path your/model --dataset your.jsonl
"""

import json
import subprocess
import sys
import time
from pathlib import Path

RUN = Path("runs/resume")
command = [sys.executable, "-m", "scu_trainer.cli.main", "train", "--config", "scu_lora", "--output_dir", str(RUN)]
command += ["--max_steps", "12", "--warmup_steps", "2", "--save_steps", "4", "--eval_strategy", "no", *sys.argv[1:]]

first = subprocess.Popen(command)
while first.poll() is None and not (RUN / "checkpoint-4" / "manifest.json").exists():
    time.sleep(0.05)
first.kill()  # no chance to save anything
first.wait()
print("killed; checkpoints:", sorted(path.name for path in RUN.glob("checkpoint-*")), flush=True)

code = subprocess.run(command).returncode
status = json.loads((RUN / "run.json").read_text())
print(f"{status['status']} at step {status['step']} of {status['max_steps']}")
sys.exit(code)
