"""``--test_run`` under launchers: one scratch folder for all ranks, and DeepSpeed, which starts once in a process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Optional

import pytest

from tests import processes, tiny

ROOT = Path(__file__).resolve().parents[2]
SENTENCES = ["The cat sat on the mat and looked at the door.", "A list is a sequence that can be changed in place."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("test run")
    tiny.saved_llama(folder / "model")
    rows = [{"text": f"{SENTENCES[i % 2]} Number {i}. " * 6} for i in range(24)]
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "scratch").mkdir()
    return folder


def tried_out(folder: Path, ranks: Optional[int], **changes) -> str:
    """What the first rank printed. Nothing is left: neither a run nor a scratch folder."""
    options = {
        "model_name_or_path": folder / "model",
        "dataset": folder / "documents.jsonl",
        "block_size": 64,
        "validation_split_percentage": 25,
        "max_steps": 1000,
        "per_device_train_batch_size": 2,
        "output_dir": folder / "run",
        "cache_dir": folder / "cache",
        "use_cpu": "true",
        **changes,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    environment = {"TMPDIR": str(folder / "scratch")}
    program = [ROOT / "scripts" / "train.py", "--test_run", *words]
    done = processes.run(program, ranks=ranks, environment=environment, timeout=280)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    assert not (folder / "run").exists()
    assert not list((folder / "scratch").glob("scu-test-run-*"))
    assert done.stdout.count("test run passed") == 1 and "1,000 steps" in done.stdout
    return done.stdout


def test_two_ranks_go_on_from_one_checkpoint(folder):
    assert "trained, evaluated, saved and resumed." in tried_out(folder, ranks=2)


def test_deepspeed_resumes_nothing_and_says_so(folder):
    pytest.importorskip("deepspeed")
    printed = tried_out(folder, ranks=None, deepspeed="ds_configs/zero2.json", mixed_precision="no")
    assert "trained, evaluated, saved (resuming was not tried: DeepSpeed" in printed
