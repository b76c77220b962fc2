"""Does a refactoring change any result? Runs each recipe with the package of a commit and with this one, and compares.

    python benchmarks/studies/same_runs.py --against REF [--recipes a,b] [--max_steps 6] [--keep FOLDER]

REF is checked out into a temporary folder. Each recipe runs twice, one after the other, with the scripts, the recipe
and the package of each tree: with the same seed, one thread, on the CPU, with an evaluation and a checkpoint half way
and at the end, and with few rows if the recipe has many, so that epochs end as well. recipes/deepspeed.yaml is started
by its launcher.

All files of the two run folders are compared: weights and states (safetensors, pt, pth) bit for bit; JSON by value,
with rows in order and notices in any order; and the lines of the log that this package wrote. The values of times,
rates, memory readings of the machine, process ids, paths and the commit are ignored, each by name in SET_ASIDE, but
they must be present. All other files only have to exist on both sides. Exit code 1 for any difference, 2 if a name is
unknown.

``--against HEAD`` on a clean tree shows the differences between two runs of the same package, which should be none.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Optional

import numpy
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.common import ROOT, write_result

SET_ASIDE = {
    "started": "date",
    "updated": "date",
    "eta_s": "seconds that are left, from those that passed",
    "pid": "of the process",
    "git_commit": "of the tree: that it differs is the question",
    "versions": "of packages and system; the tree's own version is not that of its runs",
    "train_s": "duration",
    "seconds": "duration of questions about the loss",
    "seconds_per_step": "duration",
    "*_runtime": "duration",
    "*_per_second": "rate",
    "overhead_fraction": "duration over duration",
    "memory/used_bytes": "read from the machine, which others use as well",
    "memory/peak_bytes": "read from the machine",
    "memory/limit_bytes": "read from the machine",
    "peak_bytes": "read from the machine",
    "before_model_bytes": "read from the machine",
    "measured_peak_bytes": "read from the machine",
    "predicted_parts > overhead": "what the allocator loses, of a step traced in this process; varies from run to run",
    "predicted_peak_bytes": "the sum of the predicted parts, which are compared one by one",
    "cost > observations > * > 2": "bytes that a chunk took, read from the machine",
    "previous_error": "how far the used memory is from its target, read from the machine",
    "proven_room_bytes": "free memory, read from the machine",
    "files > * > bytes": "manifest: the file itself is compared, and its numbers have as many digits as they have",
    "files > * > xxh3_128": "manifest: the file itself is compared",
}
"""Values that may differ, and why: the end of the path of a key, its parts joined by " > ", with ``*`` in any."""

IN_ANY_ORDER = ("notices", "notes")
"""Keys of lists in the order of the loops, which has no meaning."""

STATES, ROWS, TREES = (".safetensors", ".pt", ".pth"), (".jsonl",), (".json",)
ROW_SIZES = {
    "efficientnet": ("--dataset_size", "96"),
    "gru": ("--dataset_size", "200", "--max_eval_documents", "32"),
    "resnet": ("--dataset_size", "96"),
    "sensors": ("--sensor_samples", "160"),
}
"""Flags that make a recipe small, if six steps would be a small part of an epoch."""

CONTENDERS = ("ref", "now")
LONGEST_S = 1800


@dataclass(frozen=True)
class Difference:
    file: str
    key: str
    ref: str
    now: str


@dataclass
class Compared:
    """The result of a comparison. ``files``: how many files were compared by content, not only by name."""

    recipe: str
    weights: int = 0
    files: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def are_weights_equal(self) -> bool:
        return self.weights > 0 and not any(one.file.endswith(STATES) for one in self.differences)


# -- comparison --------------------------------------------------------------------------------------------------------


def is_set_aside(path: Sequence[str]) -> bool:
    patterns = (name.split(" > ") for name in SET_ASIDE)
    return any(len(one) <= len(path) and all(map(fnmatchcase, path[-len(one) :], one)) for one in patterns)


def differing(ref: Any, now: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str, str]]:
    """Yield (key, value in ref, value now) for all values that differ, except those in SET_ASIDE."""
    if isinstance(ref, Mapping) and isinstance(now, Mapping):
        ref, now = ({str(key): value for key, value in one.items()} for one in (ref, now))
        for key in dict.fromkeys((*ref, *now)):
            yield from _of_key(ref, now, key, (*path, key))
    elif isinstance(ref, (list, tuple)) and isinstance(now, (list, tuple)):
        if path and path[-1] in IN_ANY_ORDER:
            ref, now = sorted(ref, key=repr), sorted(now, key=repr)
        if len(ref) != len(now):
            yield _named(path), f"{len(ref)} of them", f"{len(now)} of them"
        for number, (one, other) in enumerate(zip(ref, now, strict=False)):
            yield from differing(one, other, (*path, str(number)))
    elif not is_set_aside(path) and not _same(ref, now):
        yield _named(path), _shown(ref), _shown(now)


def _of_key(
    ref: Mapping[str, Any], now: Mapping[str, Any], key: str, path: tuple[str, ...]
) -> Iterator[tuple[str, str, str]]:
    if key not in ref or key not in now:
        found = ref if key in ref else now
        yield _named(path), *((_shown(found[key]), "absent") if found is ref else ("absent", _shown(found[key])))
    elif not is_set_aside(path):
        yield from differing(ref[key], now[key], path)


def _same(ref: Any, now: Any) -> bool:
    if isinstance(ref, torch.Tensor) and isinstance(now, torch.Tensor):
        return (ref.dtype, ref.shape) == (now.dtype, now.shape) and _bits(ref) == _bits(now)
    if isinstance(ref, numpy.ndarray) and isinstance(now, numpy.ndarray):
        return (ref.dtype, ref.shape) == (now.dtype, now.shape) and ref.tobytes() == now.tobytes()
    if isinstance(ref, bool) or isinstance(now, bool):
        return ref is now
    if isinstance(ref, (int, float, str, bytes)) and isinstance(now, (int, float, str, bytes)):
        return ref == now or repr(ref) == repr(now) == "nan"
    return type(ref).__qualname__ == type(now).__qualname__ and not list(differing(*map(_parts, (ref, now))))


def _parts(value: Any) -> Any:
    """Return the parts of a pickled object."""
    return {name: getattr(value, name) for name in vars(value)} if hasattr(value, "__dict__") else {"": repr(value)}


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _named(path: Sequence[str]) -> str:
    return " > ".join(path) or "all of it"


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor of {'x'.join(map(str, value.shape)) or 1}, sum {value.double().sum().item()!r}"
    return repr(value) if len(repr(value)) <= 100 else f"{repr(value)[:97]}..."


def states_differing(ref: Path, now: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the tensors that differ between two files."""
    if ref.read_bytes() == now.read_bytes():
        return
    if ref.suffix == ".safetensors":
        yield from differing(load_file(ref), load_file(now))
    else:  # the files were just written by our own runs, so unpickling them is safe
        yield from differing(*(torch.load(path, map_location="cpu", weights_only=False) for path in (ref, now)))


def said(log: Path) -> list[str]:
    """Return the lines of a log that this package wrote, without their times."""
    lines = log.read_text().splitlines()
    return sorted(match[1] for line in lines if (match := re.match(r"\S+ \S+ (\w+ scu_trainer\S*: .*)", line)))


def names_of(folder: Path) -> dict[str, Path]:
    """Return the files by their name in the folder, without the date, host and process that some names contain."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {re.sub(r"(tfevents)\..*", r"\1", str(path.relative_to(folder))): path for path in files}


def compare(recipe: str, ref: Path, now: Path, places: Mapping[str, str]) -> Compared:
    """Compare two run folders. ``places``: paths of both sides, each with the word that replaces it."""
    contenders = [names_of(ref), names_of(now)]
    found = Compared(recipe)
    for name in sorted(contenders[0].keys() | contenders[1].keys()):
        if name not in contenders[0] or name not in contenders[1]:
            has = ["there" if name in contender else "absent" for contender in contenders]
            found.differences.append(Difference(name, "the file", *has))
            continue
        one, other = (contender[name] for contender in contenders)
        found.weights += one.suffix in STATES
        found.files += one.suffix in (*STATES, *ROWS, *TREES, ".log")
        found.differences += [Difference(name, *parts) for parts in _of_file(one, other, places)]
    return found


def _of_file(one: Path, other: Path, places: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    if one.suffix in STATES:
        yield from states_differing(one, other)
    elif one.suffix in (*ROWS, *TREES):
        yield from differing(*(_read(path, places) for path in (one, other)))
    elif one.suffix == ".log":
        yield from differing(*([_placed(line, places) for line in said(path)] for path in (one, other)))


def _read(path: Path, places: Mapping[str, str]) -> Any:
    text = _placed(path.read_text(), places)
    return [json.loads(line) for line in text.splitlines()] if path.suffix in ROWS else json.loads(text)


def _placed(text: str, places: Mapping[str, str]) -> str:
    for place, word in places.items():
        text = text.replace(place, word)
    return text


# -- runs --------------------------------------------------------------------------------------------------------------


@contextmanager
def checked_out(ref: str, folder: Path) -> Iterator[Path]:
    """Check out ``ref`` to a temporary tree."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), ref], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=False)


def command_of(recipe: str, tree: Path, run_dir: Path, max_steps: int) -> list[str]:
    """Return the command that trains a recipe, as in the Makefile."""
    half = str(max(1, max_steps // 2))
    start = [sys.executable, str(tree / "scripts" / "train.py")]
    if recipe == "deepspeed":
        start = [sys.executable, "-m", "scu_trainer.cli.main", "launch", "deepspeed", "--processes", ""]
    flags = ["--config", str(tree / "recipes" / f"{recipe}.yaml"), "--output_dir", str(run_dir), "--seed", "0"]
    flags += ["--max_steps", str(max_steps), "--logging_steps", "1", "--use_cpu", "true"]
    flags += ["--eval_strategy", "steps", "--eval_steps", half]
    flags += ["--save_strategy", "steps", "--save_steps", half, "--save_total_limit", "2"]
    if recipe == "device_map":
        flags += ["--offload_folder", str(run_dir.with_name(f"{run_dir.name}-offload"))]
    return [*start, *flags, *ROW_SIZES.get(recipe, ())]


def trained(recipe: str, tree: Path, run_dir: Path, max_steps: int) -> str:
    """Train a recipe. Returns the end of its output if it failed, else ""."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    given = {"PYTHONPATH": str(tree), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    given |= {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
    command = command_of(recipe, tree, run_dir, max_steps)
    ended = subprocess.run(
        command, cwd=tree, env={**os.environ, **given}, capture_output=True, text=True, timeout=LONGEST_S
    )
    return "" if ended.returncode == 0 else f"ended with {ended.returncode}: {(ended.stdout + ended.stderr)[-1500:]}"


def both(recipe: str, tree: Path, folder: Path, max_steps: int) -> Compared:
    trees = dict(zip(CONTENDERS, (tree, ROOT), strict=True))
    runs = {contender: folder / contender / recipe for contender in trees}
    failed = {contender: trained(recipe, trees[contender], runs[contender], max_steps) for contender in trees}
    if any(failed.values()):
        words = (failed[contender] or "ended well" for contender in trees)
        return Compared(recipe, differences=[Difference("the run itself", "exit code", *words)])
    places = {str(runs[contender]): "RUN" for contender in trees} | {
        str(trees[contender]): "TREE" for contender in trees
    }
    return compare(recipe, *runs.values(), places)


def show(console: Console, compared: Sequence[Compared]) -> None:
    table = Table(title="one package against the other")
    for head in ("recipe", "weights equal", "files compared", "differing files and keys"):
        table.add_column(head, overflow="fold")
    for one in compared:
        by_file: dict[str, list[str]] = {}
        for difference in one.differences:
            by_file.setdefault(difference.file, []).append(difference.key)
        lines = [f"{name}: {', '.join(keys[:6])}{', ...' * (len(keys) > 6)}" for name, keys in by_file.items()]
        table.add_row(one.recipe, "yes" if one.are_weights_equal else "NO", str(one.files), "\n".join(lines) or "none")
    console.print(table)
    for one in compared:
        for difference in one.differences:
            words = f"{one.recipe}/{difference.file}: {difference.key}: {difference.ref} -> {difference.now}"
            console.print(words, highlight=False, markup=False, soft_wrap=True)


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    parser.add_argument("--against", required=True, metavar="REF", help="commit that this tree is held against")
    parser.add_argument("--recipes", default=",".join(known), help=f"of {', '.join(known)}; all")
    parser.add_argument("--max_steps", type=int, default=6)
    parser.add_argument("--keep", type=Path, help="folder for the runs; default: a scratch folder")
    given = parser.parse_args(argv)
    recipes = given.recipes.split(",")
    if unknown := sorted(set(recipes) - set(known)):
        parser.error(f"no recipe {', '.join(unknown)}; there are {', '.join(known)}")
    kept = [given.keep / contender / recipe for contender in CONTENDERS for recipe in recipes] if given.keep else []
    if there := [str(path) for path in kept if path.exists()]:
        parser.error(f"an earlier run is in {', '.join(there)}")
    console, compared = Console(width=140), []
    with tempfile.TemporaryDirectory() as scratch, checked_out(given.against, Path(scratch) / "tree") as tree:
        git = ["git", "-C", str(tree), "rev-parse", "HEAD"]
        against = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
        for recipe in recipes:
            compared.append(both(recipe, tree, (given.keep or Path(scratch)).absolute(), given.max_steps))
            console.print(f"{recipe}: {len(compared[-1].differences)} differences")
    show(console, compared)
    results = [asdict(one) | {"are_weights_equal": one.are_weights_equal} for one in compared]
    record = {"against": against, "max_steps": given.max_steps, "set_aside": SET_ASIDE, "results": results}
    write_result("same_runs", record)
    return 1 if any(one.differences for one in compared) else 0


if __name__ == "__main__":
    sys.exit(main())
