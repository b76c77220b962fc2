"""Train adapters on 4-bit weights without a GPU (QLoRA): python examples/qlora_cpu.py (pip install bitsandbytes)

You can add flags of `scu-trainer train`: --model_name_or_path your/model --dataset your.jsonl --max_steps 50
"""

import json
import sys
from pathlib import Path

from scu_trainer.cli.main import main
from scu_trainer.train.run_directory.resume import latest_run

code = main(["train", "--config", "qlora", "--use_cpu", "true", "--output_dir", "runs/qlora_cpu", *sys.argv[1:]])
if code == 0:
    run = latest_run(Path("runs/qlora_cpu"))  # runs/qlora_cpu-2 the second time
    metrics = json.loads((run / "scu_metrics.json").read_text())
    before, after = metrics["held_out_bpt_before"]["value"], metrics["held_out_bpt_after"]["value"]
    print(f"held out: {before:.3f} bits per token before, {after:.3f} after")
sys.exit(code)
