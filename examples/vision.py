"""An image classifier from scratch on scikit-learn's digits, without a download: python examples/vision.py

Flags of `scu-trainer train` may follow: --architecture efficientnet_b0 --dataset a/folder/with/a/folder/per/class
"""

import json
import sys
from pathlib import Path

from scu_trainer.cli.main import main

code = main(["train", "--config", "resnet", "--output_dir", "runs/vision", *sys.argv[1:]])
if code == 0:
    metrics = json.loads(Path("runs/vision/scu_metrics.json").read_text())
    print("accuracy on what was held out:", metrics["held_out_accuracy_after"]["value"])
sys.exit(code)
