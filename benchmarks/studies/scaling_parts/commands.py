"""``scu-trainer train --streaming true`` on a file of any number of documents: see studies/scaling.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Union

from scu_trainer.data import default_cache_dir
from scu_trainer.train.fixtures.base_model import embedded_base

FORMATS = ("jsonl", "parquet")
BASE_STEPS = 240
"""The same as in the other benchmarks, so that the embedded base is trained only once."""

DISTINCT = 10_000
"""Number of different documents. A larger file repeats them."""

ROW_GROUP = 100_000
"""Number of rows in a row group of a parquet file."""

READ_EVERY_S = 0.01
LONGEST_S = 300


def texts() -> list[str]:
    """Return short, different documents."""
    return [f"document {number}: {number * 7919 % 10007} is a part of it" for number in range(DISTINCT)]


def write_texts(path: Path, count: int) -> None:
    """Write ``count`` documents, repeating the distinct ones."""
    if path.suffix == ".jsonl":
        lines = [json.dumps({"text": text}) + "\n" for text in texts()]
        with path.open("w") as file:
            for start in range(0, count, DISTINCT):
                file.write("".join(lines[: count - start]))
        return
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"text": texts() * (ROW_GROUP // DISTINCT)})
    with parquet.ParquetWriter(path, table.schema) as writer:
        for start in range(0, count, ROW_GROUP):
            writer.write_table(table[: count - start])


def command(path: Path, output_dir: Path) -> list[str]:
    base = str(embedded_base(default_cache_dir(None), BASE_STEPS))
    flags = {
        "model_name_or_path": base,
        "dataset": path,
        "streaming": "true",
        "block_size": 64,
        "validation_split_percentage": 0,
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "use_cpu": "true",
        "mixed_precision": "no",
        "output_dir": output_dir,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "scu_trainer.cli.main", "train", *words]


def streamed(kind: str, count: int, folder: Path) -> dict[str, Any]:
    """Return the seconds from the start of the command to its first logged step, and its peak anonymous memory.

    Raises RuntimeError if the command fails or logs no step.
    """
    path = folder / f"documents.{kind}"
    write_texts(path, count)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as output_dir, tempfile.TemporaryFile("w+") as log:
        words, begun_s = command(path, Path(output_dir) / "run"), time.perf_counter()
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, text=True, env=environment)
        first_step_s, peak_bytes = None, 0
        while process.poll() is None and time.perf_counter() - begun_s < LONGEST_S:
            peak_bytes = max(peak_bytes, anonymous_bytes_of(process.pid))
            if first_step_s is None and "step 1/2" in _so_far(log):
                first_step_s = time.perf_counter() - begun_s
            time.sleep(READ_EVERY_S)
        process.kill()
        path.unlink()
        if process.wait() or first_step_s is None:
            raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}: {_so_far(log)[-2000:]}")
    return {"first_step_s": first_step_s, "peak_bytes": peak_bytes}


def _so_far(log: Any) -> str:
    """Return the text of the log without moving its file position, because the process appends to the same file."""
    return os.pread(log.fileno(), 2**20, 0).decode(errors="replace")


def anonymous_bytes_of(process: Union[int, str]) -> int:
    """Return the anonymous memory of a process (heap and private maps, without pages of mapped files), or 0 after its
    end. ``process``: its number, or "self"."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)
