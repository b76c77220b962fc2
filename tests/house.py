"""How simple the house is, in figures: ``python tests/house.py`` prints them, ``test_house.py`` holds them.

The files of an optimizer step are those whose functions a profiler sees from the end of one step to the end of the
next, with all loops on.
"""

from __future__ import annotations

import ast
import math
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "scu_trainer"
LOOP_WORDS = re.compile(
    r"regulari|lambda_|penalty|memory|chunk|micro_batch|curriculum|difficult|bad_number|nonfinite_guard|diverge"
    r"|average|throughput|profile|overflow",
    re.IGNORECASE,
)
WATCHED_STEP = 6


def imports(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Modules of the package, and which of them each imports, in functions and TYPE_CHECKING blocks as well."""
    files = {_module(path, package): path for path in package.rglob("*.py")}
    return {name: _imported(path, name, files) - {name, package.name} for name, path in files.items()}


def _module(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(path: Path, module: str, files: dict[str, Path]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: len(module.split(".")) + (path.name == "__init__.py") - node.level]
            base = ".".join([*(above if node.level else []), *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            while name and name not in files:
                name = name.rpartition(".")[0]
            found.add(name)
    return found - {""}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, by Tarjan's algorithm (SIAM J. Comput. 1(2), 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in graph.get(module, ()):
            if other not in index:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            found.extend([sorted(group)] if len(group) > 1 else [])

    for module in graph:
        if module not in index:
            visit(module)
    return found


def folders() -> Counter[str]:
    """Python files by folder of the package."""
    return Counter(str(path.parent.relative_to(ROOT)) for path in PACKAGE.rglob("*.py"))


def lines_that_name_a_loop(path: Path = PACKAGE / "train" / "trainer.py") -> list[str]:
    """Of the methods of ``path``, without the constructor."""
    lines, tree = path.read_text(encoding="utf-8").split("\n"), ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
    numbers = {number for node in functions for number in range(node.lineno, node.end_lineno + 1)}
    return [lines[number - 1].strip() for number in sorted(numbers) if LOOP_WORDS.search(lines[number - 1])]


def names_of_several_classes(package: Path = PACKAGE) -> dict[str, list[str]]:
    """Names that more than one class of the package has, with their files; a leading underscore leaves a class out."""
    found: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path.relative_to(package)))
    return {name: files for name, files in found.items() if len(files) > 1}


def package_lines() -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in PACKAGE.rglob("*.py"))


def files_of_a_step() -> tuple[Counter[str], int]:
    """(calls by file of the package in one optimizer step, how often trainer.py was entered from another file)."""
    from transformers import TrainerCallback

    from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings, SafetySettings
    from scu_trainer.train.step.recovery.memory import CpuGauge
    from tests import tiny

    calls: Counter[str] = Counter()
    entered = [0]
    trainer_file = str(PACKAGE / "train" / "trainer.py")

    def see(frame, event, argument) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(str(PACKAGE)):
            return
        calls[str(Path(name).relative_to(PACKAGE))] += 1
        if name == trainer_file and frame.f_back is not None and frame.f_back.f_code.co_filename != name:
            entered[0] += 1

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            sys.setprofile(see if state.global_step == WATCHED_STEP - 1 else None)

    # On a busy machine a step may take longer than a reading of memory is good for, and would read again.
    shares_reading = mock.patch.object(CpuGauge, "good_for_s", math.inf)
    with tempfile.TemporaryDirectory() as folder, shares_reading:
        loops = {
            "memory": MemorySettings(),
            "curriculum": CurriculumSettings("none"),
            "safety": SafetySettings(),
            "data_collator": tiny.pad,
            "dataset": tiny.UnevenRows(count=64),
        }
        scu = RegularizationSettings(target_s=0.1)
        tiny.trained(tiny.llama(layers=1), Path(folder), scu, callbacks=[Watch()], max_steps=WATCHED_STEP, **loops)
    return calls, entered[0]


def rows() -> Iterator[tuple[str, object]]:
    calls, entered = files_of_a_step()
    (largest, count), *_ = folders().most_common(1)
    yield "import circles, TYPE_CHECKING included", len(circles(imports()))
    yield f"files in the largest folder ({largest})", count
    yield "lines of trainer.py that name a loop, construction aside", len(lines_that_name_a_loop())
    yield "files entered by one optimizer step, all loops on", len(calls)
    yield "times that step enters trainer.py", entered
    yield "lines of the package", package_lines()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    for name, figure in rows():
        print(f"{name:60} {figure:>8,}")
    print("\nfiles of a step:", ", ".join(sorted(files_of_a_step()[0])))
