"""How long ``scu-trainer data`` takes to show the first rows of a large file, and of a small one with the same rows.

python benchmarks/studies/first_rows.py [--size_mb 1000] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size_mb", type=int, default=1000, help="megabytes of the large file")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for suffix in (".jsonl", ".json"):
            small = _written(Path(folder) / f"small{suffix}", 1)
            large = _written(Path(folder) / f"large{suffix}", options.size_mb)
            seconds = {path: [] for path in (small, large)}
            for path in [small, large] * options.repeats:
                seconds[path].append(_seconds_to_first_row(path))
            one, other = (statistics.median(times) for times in seconds.values())
            print(
                f"{suffix}: first row after {other:.2f} s of {options.size_mb:,} MB, {one:.2f} s of 1 MB: "
                f"ratio {other / one:.2f}"
            )
            large.unlink()


def _written(path: Path, size_mb: int) -> Path:
    is_array = path.suffix == ".json"
    with path.open("w", encoding="utf-8") as file:
        file.write("[" if is_array else "")
        for number, line in enumerate(_lines()):
            if number and file.tell() + len(line) > size_mb * 10**6:
                break
            file.write((",\n" if is_array and number else "") + line + ("" if is_array else "\n"))
        file.write("]" if is_array else "")
    return path


def _lines() -> Iterator[str]:
    for number in count():
        row = {"instruction": f"Say what follows {number}.", "output": f"After {number} comes {number + 1}. " * 20}
        yield json.dumps(row)


def _seconds_to_first_row(path: Path) -> float:
    command = [sys.executable, "-m", "scu_trainer.cli.main", "data", "--dataset", str(path)]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=path.parent) as process:
        for line in process.stdout:
            if f"{path.name} row 1:" in line:
                seconds = time.perf_counter() - began
                break
        else:
            raise SystemExit(f"{' '.join(command)} showed no row")
        process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return seconds


if __name__ == "__main__":
    main()
