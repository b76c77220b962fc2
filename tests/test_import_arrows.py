"""Imports run one way: a room imports only rooms with a lower number, siblings never each other.

The source is parsed, not imported, so an arrow inside a function or a TYPE_CHECKING block counts as well.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "scu_trainer"
LEVELS = {
    "errors": 0,
    "imports": 0,
    "stop_signals": 0,
    "control": 1,
    "secrets": 1,
    "figures": 1,
    "listening": 1,
    "json_types": 1,
    "settings": 2,
    "run_files": 2,
    "safe_paths": 2,
    "shipped": 2,
    "hardware": 3,
    "data": 3,
    "models": 3,
    "train": 4,
    "runs": 4,
    "report": 4,
    "hub": 4,
    "talk": 4.9,
    "board": 5,
    "serve": 5,
    "cli": 6,
}

TRAIN = (
    ("step.recovery",),
    ("step.batches", "regularization"),
    ("step.distributed", "loss.rows"),
    ("curriculum", "loss.analysis"),
    ("step", "loss"),
    ("checkpoints", "evaluation"),
    ("loop",),
    ("loops", "loop_checks", "run_directory", "retention"),
    ("fixtures", "job", "resuming"),
    ("trainer",),
    ("preflight", "tasks"),
    ("memory_estimate",),
    ("session",),
)
"""The rooms inside ``train``, from below; those on one line never import each other."""

LEVELS |= {f"train.{room}": 4 + i / 100 for i, rooms in enumerate(TRAIN) for room in rooms}
ENTRANCES = ("__init__", "__main__")
"""Modules at the top of the package: they may import every room; no room may import them (but for the version)."""

TORCH_FREE = (
    "errors",
    "imports",
    "stop_signals",
    "control",
    "secrets",
    "figures",
    "listening",
    "settings",
    "json_types",
    "run_files",
    "safe_paths",
    "shipped",
)
"""Rooms that never name torch. The rooms of FAST_ROOMS name heavy libraries only inside functions."""

FAST_ROOMS = ("hardware", "runs", "report", "hub", "board", "cli")
HEAVY = ("torch", "transformers", "datasets", "peft", "accelerate", "deepspeed", "bitsandbytes", "matplotlib")


def imported_names(tree: ast.AST, package: str) -> Iterator[str]:
    """Dotted names that ``tree``, in the package ``package``, imports: "a.b.name" for "from a.b import name"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module"):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value)


def at_import_time(tree: ast.AST) -> ast.Module:
    """``tree`` without function bodies and TYPE_CHECKING blocks: what runs when the module is imported."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node):
            return None

        visit_AsyncFunctionDef = visit_FunctionDef
        visit_Lambda = visit_FunctionDef

        def visit_If(self, node):
            return None if ast.unparse(node.test).endswith("TYPE_CHECKING") else self.generic_visit(node)

    return Strip().visit(tree)


def package_of(module: str, path: Path) -> str:
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def violations(source: str, module: str, path: Path) -> list[str]:
    """What is wrong with the imports of ``module`` ("scu_trainer.train.step.attempts")."""
    room = room_of(module)
    tree = ast.parse(source)
    names = list(imported_names(tree, package_of(module, path)))
    found = [f"{module} imports {name}: {reason}" for name in names if (reason := bad_arrow(room, name))]
    if room in TORCH_FREE:
        found += [f"{module} names {name}" for name in names if name.split(".")[0] == "torch"]
    if room in FAST_ROOMS:
        early = imported_names(at_import_time(tree), package_of(module, path))
        found += [f"{module} imports {name} when it is loaded" for name in early if name.split(".")[0] in HEAVY]
    return found


def room_of(name: str) -> str:
    """The innermost room that ``name`` lies in: "train.step.batches" of "scu_trainer.train.step.batches.rows"."""
    parts = name.split(".")[1:]
    known = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((room for room in known if room in LEVELS), (parts or ["__init__"])[0])


def bad_arrow(room: str, name: str) -> str:
    """Why ``room`` may not import ``name``; empty if it may."""
    if name.split(".")[0] != "scu_trainer" or room in ENTRANCES or name == "scu_trainer.__version__":
        return ""
    target = room_of(name)
    if target == room:
        return ""
    if target not in LEVELS or room not in LEVELS:
        return f"{target if room in LEVELS else room} has no number in LEVELS"
    if LEVELS[target] == LEVELS[room]:
        return "siblings never import each other"
    return "the arrow points up" if LEVELS[target] > LEVELS[room] else ""


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_arrow_points_up_or_aside():
    assert len(sources()) > 5
    found = [line for path in sources() for line in violations(path.read_text(), module_name(path), path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        ("scu_trainer.data.x", "from scu_trainer.train.step.attempts import run", "points up"),
        ("scu_trainer.data.x", "import scu_trainer.train", "points up"),
        ("scu_trainer.data.x", "from scu_trainer import train", "points up"),
        ("scu_trainer.data.x", "from ..models import load", "siblings"),
        ("scu_trainer.data.x", "from .. import cli", "points up"),
        ("scu_trainer.settings", "from . import run_files", "siblings"),
        ("scu_trainer.settings", "def f():\n    from scu_trainer.hardware import probe", "points up"),
        ("scu_trainer.runs.x", "import importlib\nimportlib.import_module('scu_trainer.train')", "siblings"),
        ("scu_trainer.runs.x", "from scu_trainer import SCUTrainer", "no number"),
        ("scu_trainer.attic.x", "from scu_trainer import errors", "attic has no number"),
        ("scu_trainer.train.step.x", "from scu_trainer.train.loops import memory", "points up"),
        ("scu_trainer.train.step.recovery.x", "from scu_trainer.train.step import engine", "points up"),
        ("scu_trainer.train.loops.x", "from scu_trainer.train.run_directory.logs import run_log", "siblings"),
        (
            "scu_trainer.train.loop",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import scu_trainer.train.trainer",
            "points up",
        ),
        ("scu_trainer.train.attic.x", "from scu_trainer.train.step import engine", "points"),
        ("scu_trainer.control.x", "def f():\n    import torch.nn", "names torch"),
        ("scu_trainer.run_files", "from torch import Tensor", "names torch"),
        ("scu_trainer.report.x", "import matplotlib.pyplot", "when it is loaded"),
        ("scu_trainer.runs.x", "class A:\n    import torch", "when it is loaded"),
    ],
)
def test_a_bad_import_is_caught(module, source, reason):
    found = violations(source, module, Path("x.py"))
    assert len(found) == 1 and reason in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("scu_trainer", "from scu_trainer.train.trainer import SCUTrainer"),
        (
            "scu_trainer.train.step.attempts",
            "from . import memory\nfrom .losses import mean\nfrom ..errors import UserError",
        ),
        ("scu_trainer.train.step.attempts", "import torch\nfrom scu_trainer.data.sources import load"),
        ("scu_trainer.hub.card", "from scu_trainer import __version__"),
        ("scu_trainer.report.x", "def plot():\n    import matplotlib.pyplot"),
        ("scu_trainer.report.x", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
    ],
)
def test_a_good_import_passes(module, source):
    path = Path("__init__.py" if module == "scu_trainer" else "x.py")
    assert violations(source, module, path) == []


def test_light_rooms_load_without_torch():
    """Also what they load through others: the parsed source cannot see that."""
    light = [module_name(path) for path in sources() if module_name(path).split(".")[1:2] in [[r] for r in TORCH_FREE]]
    code = f"import sys, {', '.join(light)}; sys.exit(str([m for m in {HEAVY!r} if m in sys.modules] or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.stderr.strip() == "", done.stderr
