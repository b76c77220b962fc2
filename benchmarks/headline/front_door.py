"""The cost of the first two commands of the README: installation, and the main job.

    python benchmarks/headline/front_door.py [--parts install job] [--picture docs/images/run.png]

``install``: fresh environments, made by the pip of this Python: once with the packages that `make train` installs, once
with all packages. Reports wall-clock seconds, CPU seconds, and MiB on disk. ``job``: the command `scu-trainer train
--config scu_lora`, the table that it prints, and with ``--picture`` a picture of its run. A part that was not asked for
keeps its earlier results. Wall-clock times include downloads, and on a busy machine they are much longer than CPU
seconds, so compare the CPU seconds first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.common import earlier
from benchmarks.lib.outcome import Figure, Grid, figure, finish
from docs.draw_run import draw

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("install", "job")
SETS = {"main": "report,board", "all": "all"}
"""The extras that the targets of the Makefile install, by name."""

TARGETS = {"main": "`make train`", "all": "`make test`"}


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def ran(*words: object, **more: Any) -> tuple[subprocess.CompletedProcess, float, float]:
    """Run a command, and return the completed process, its wall-clock seconds, and its CPU seconds."""
    begun_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, **{"env": clean(), "cwd": ROOT} | more)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stdout[-1000:]}{done.stderr[-3000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done, time.monotonic() - begun_s, used_s


def environment(folder: Path, extras: str) -> dict[str, Any]:
    """Create an environment, as INSTALL of the Makefile does."""
    _, made_s, made_cpu_s = ran(sys.executable, "-m", "venv", folder)
    pip = (folder / "bin" / "python", "-m", "pip")
    install = (*pip, "install", "-q", "-e", f"{ROOT}[{extras}]", "-c", "constraints.txt")
    _, wall_s, cpu_s = ran(*install, env={**clean(), "DS_BUILD_OPS": "0"})
    packages = json.loads(ran(*pip, "list", "--format", "json")[0].stdout)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {
        "extras": extras,
        "wall_s": made_s + wall_s,
        "cpu_s": made_cpu_s + cpu_s,
        "packages": len(packages),
        "mib": size / 2**20,
    }


def installed(folder: Path, times: int) -> list[dict[str, Any]]:
    return [
        {"set": name, **environment(folder / f"{name}-{time_}", extras)}
        for time_ in range(times)
        for name, extras in SETS.items()
    ]


def job(folder: Path, picture: Path | None) -> dict[str, Any]:
    words = ("-m", "scu_trainer.cli.main", "train", "--config", "scu_lora", "--output_dir", "runs/scu_lora")
    done, *_ = ran(sys.executable, *words, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return recorded(folder / "runs" / "scu_lora", done.stdout, picture)


def recorded(run: Path, output: str, picture: Path | None) -> dict[str, Any]:
    if picture:
        draw(run, picture)
    metrics = json.loads((run / "scu_metrics.json").read_text())
    held_out = {name: metrics[f"held_out_bpt_{name}"]["value"] for name in ("before", "after")}
    return {"steps": metrics["steps"], **held_out, "said": said(output)}


def said(output: str) -> list[str]:
    """Return the lines from "trained N steps" to the end of the table that follows."""
    found = re.search(r"^trained \d+ steps *\n.*?^└[^\n]*", output, re.MULTILINE | re.DOTALL)
    if found is None:
        raise RuntimeError(f"no table of what was held out in: {output[-2000:]}")
    return [line.rstrip() for line in found[0].splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--times", type=int, default=2, help="installations of each set")
    parser.add_argument("--picture", type=Path, help="draw the run of the main job there")
    options = parser.parse_args()
    record = measured(options)
    finish("front_door", "what is installed", grid(record), figures(record), repeats=options.times, **record)
    return 0


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Return the results by part. Parts that were not asked for come from the last results file."""
    before = earlier("front_door")
    record = {part: before[part] for part in PARTS if part in before}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if "install" in options.parts:
            record["install"] = installed(folder, options.times)
        if "job" in options.parts:
            record["job"] = job(folder, options.picture)
            print(*record["job"]["said"], sep="\n")
    return record


def grid(record: dict[str, Any]) -> Grid:
    heads = ("installed by", "packages", "MiB", "s of the processor", "s of the clock")
    rows = []
    for name, target in TARGETS.items():
        of_set = [one for one in record.get("install", []) if one["set"] == name]
        if of_set:
            middle = {key: median(one[key] for one in of_set) for key in ("packages", "mib", "cpu_s", "wall_s")}
            rows.append((target, *(f"{value:,.0f}" for value in middle.values())))
    return Grid(heads, rows)


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    by_set = {name: [one for one in record.get("install", []) if one["set"] == name] for name in SETS}
    return {
        f"{what}, main job / all packages": figure(
            [main[key] / whole[key] for main, whole in zip(by_set["main"], by_set["all"], strict=True)], "lower"
        )
        for what, key in (("packages", "packages"), ("MiB", "mib"), ("seconds of the processor", "cpu_s"))
        if by_set["main"]
    }


if __name__ == "__main__":
    sys.exit(main())
