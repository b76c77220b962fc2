"""Compare the recipes for images, words and sensors with what they must beat, over several seeds.

    python benchmarks/headline/recipes.py [--recipes resnet efficientnet gru sensors] [--seeds 0 1 2] [--together 1]

Each run is the real command in its own process. Digits must reach 97 % on held-out data. The GRU must have a lower
perplexity than a bigram model with Kneser-Ney smoothing on the same split. The sensors must reach 90 %, and each single
branch must stay below that. ``--together``: the number of simultaneous runs, which share the threads, so that their
seconds are not those of a single run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.common import not_repeated, write_result
from benchmarks.studies.kneser_ney import of_run

ROOT = Path(__file__).parents[2]
LEAST_ACCURACY = {"resnet": 0.97, "efficientnet": 0.97, "sensors": 0.90}
BRANCHES = ("visible", "infrared", "kinematics")
RECIPES = (*LEAST_ACCURACY, "gru")


def jobs(recipes: list[str], seeds: list[int], branches: list[str]) -> list[tuple[str, int, str]]:
    """Return (recipe, seed, the only branch that is used, or "" for all) of each run."""
    alone = [("sensors", seed, branch) for branch in branches for seed in seeds if "sensors" in recipes]
    return [(recipe, seed, "") for recipe in recipes for seed in seeds] + alone


def run(recipe: str, seed: int, branch: str, folder: Path, threads: int) -> dict[str, Any]:
    out = folder / f"{recipe}-{branch or 'all'}-{seed}"
    words = [sys.executable, str(ROOT / "scripts" / "train.py"), "--config", str(ROOT / "recipes" / f"{recipe}.yaml")]
    words += ["--seed", str(seed), "--output_dir", str(out), *(["--branches", branch] if branch else [])]
    begun_s = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    answer = subprocess.run(words, env=environment, capture_output=True, text=True)
    if answer.returncode:
        raise RuntimeError(f"{recipe}, seed {seed}: {answer.stderr[-2000:]}")
    whole_s = time.monotonic() - begun_s
    metrics = json.loads((out / "scu_metrics.json").read_text())
    found = {"recipe": recipe, "seed": seed, "branch": branch, "whole_s": whole_s, "steps": metrics["steps"]}
    if "held_out_accuracy_after" in metrics:
        found["accuracy"] = metrics["held_out_accuracy_after"]["value"]
    else:
        figures = of_run(out)
        found |= {"perplexity": figures.gru, "kneser_ney": figures.kneser_ney}
    control = metrics.get("regularization")
    if control is not None:
        found |= {"final_s": control["final_s"], "target_s": control["target_s"], "verdict": control["verdict"]}
    print(json.dumps(found), flush=True)
    return found


def failures(results: list[dict[str, Any]]) -> list[str]:
    """Return the requirements that the results do not meet."""
    broken = []
    for r in results:
        name = f"{r['recipe']} {r['branch']} seed {r['seed']}"
        if "perplexity" in r:
            if r["perplexity"] >= r["kneser_ney"]:
                broken.append(f"{name}: perplexity {r['perplexity']:.1f}, Kneser-Ney {r['kneser_ney']:.1f}")
        elif (r["accuracy"] < LEAST_ACCURACY[r["recipe"]]) != bool(r["branch"]):
            broken.append(f"{name}: accuracy {r['accuracy']:.1%}, against {LEAST_ACCURACY[r['recipe']]:.0%}")
    return broken


def show(results: list[dict[str, Any]]) -> None:
    heads = ("recipe", "seed", "result", "to beat", "S against target", "seconds")
    table = Table(*heads, title="held-out results by seed")
    for r in sorted(results, key=lambda r: (r["recipe"], r["branch"], r["seed"])):
        alone = f" ({r['branch']} alone)" if r["branch"] else ""
        if "accuracy" in r:
            result, beat = f"{r['accuracy']:.1%}", f"{LEAST_ACCURACY[r['recipe']]:.0%}"
            beat = f"stays below {beat}" if r["branch"] else beat
        else:
            result, beat = f"perplexity {r['perplexity']:.1f}", f"{r['kneser_ney']:.1f} (Kneser-Ney)"
        held = f"{r['final_s']:.3f} of {r['target_s']:g}" if "final_s" in r else "off"
        table.add_row(r["recipe"] + alone, str(r["seed"]), result, beat, held, f"{r['whole_s']:.0f}")
    Console(width=110).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--branches", nargs="*", choices=BRANCHES, default=list(BRANCHES), help="alone")
    parser.add_argument("--together", type=int, default=1)
    options = parser.parse_args()
    wanted = jobs(options.recipes, options.seeds, options.branches)
    threads = max(1, psutil.cpu_count() // options.together)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.together) as pool:
        waiting = [pool.submit(run, *job, Path(folder), threads) for job in wanted]
        results = [job.result() for job in waiting]
    show(results)
    kept = not_repeated("recipes", results, ("recipe", "seed", "branch"))
    write_result("recipes", {"together": options.together, "results": [*kept, *results]})
    broken = failures(results)
    print("\n".join(broken) or "all targets met")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
