"""A training program of 0.2 seconds: ``train.py``'s flags, run files and signals, with a checkpoint at every step.

Its recipe says what it does: held-out bits (lift), steps, tokens, ``behave: refuse``, and ``hold_at``, the step at
which the first start of seed 0 waits for a signal.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from scu_trainer.run_files import RunStatus, read_json, write_json

TOKENS = 600


def train(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    for flag in ("--config", "--seed", "--output_dir", "--resume_from_checkpoint"):
        parser.add_argument(flag)
    options = parser.parse_args(words)
    settings, folder = yaml.safe_load(Path(options.config).read_text()), Path(options.output_dir)
    if settings.get("behave") == "refuse":
        print("error: the disk is full", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "training_config.json", _description(settings, int(options.seed)))
    return _steps(folder, settings, int(options.seed))


def _description(settings: dict[str, Any], seed: int) -> dict[str, Any]:
    return {"configuration": {**settings, "seed": seed}, "seed": seed, "data": {"fingerprint": settings["dataset"]}}


def _steps(folder: Path, settings: dict[str, Any], seed: int) -> int:
    wanted: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: wanted.append(number))
    status, checkpoint = RunStatus(folder / "run.json", min_interval_s=0.0), folder / "checkpoint.json"
    done = read_json(checkpoint)["step"] if checkpoint.is_file() else 0
    print(f"begins at {done}", flush=True)
    for step in range(done + 1, settings["steps"] + 1):
        status.update(status="running", pid=os.getpid(), step=step, max_steps=settings["steps"])
        while seed == 0 and done == 0 and step == settings.get("hold_at") and not wanted:
            time.sleep(0.01)
        if wanted:
            write_json(checkpoint, {"step": step, "signals": len(wanted)})
            status.update(status="stopped")
            return 3
    write_json(folder / "scu_metrics.json", _metrics(settings, seed))
    status.update(status="finished")
    return 0


def _metrics(settings: dict[str, Any], seed: int) -> dict[str, Any]:
    return {
        "steps": settings["steps"],
        "train_s": time.time(),  # a figure that never repeats
        "held_out_bpt_before": {"value": 8.0 + seed},
        "held_out_bpt_after": {"value": 6.0 + settings["lift"] * (1 + 0.1 * seed)},
        "curriculum": {"real_tokens": settings.get("tokens", TOKENS)},
    }


if __name__ == "__main__":
    sys.exit(train(sys.argv[1:]))
