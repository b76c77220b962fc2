"""Benchmarks stand in rooms, find each other from there, and are named by the paths that they have."""

import ast
import importlib.util
import json
import re
import subprocess
import sys

import pytest

from benchmarks.lib import common

BENCHMARKS = common.ROOT / "benchmarks"
ROOMS = ("headline", "loops", "gpu", "studies", "lib", "lib/memory_estimate", "studies/scaling_parts")
SCRIPTS = sorted(path for room in ROOMS for path in (BENCHMARKS / room).glob("*.py"))
FIRST_ON_THE_PATH = "sys.path.insert(0, str(Path(__file__).resolve().parents[{}]))"
OWN = ("benchmarks", "scu_trainer", "tests")


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node, node.module, alias.name) for alias in node.names)


def defined(path):
    """Names at the top of a module."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        else:
            names |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return names


def read(tree, module):
    """Names that are read from a module, as in ``module.name``."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    return {node.attr for node in found if node.value.id == module}


def test_every_script_has_a_room_and_no_room_is_crowded():
    assert [path.name for path in BENCHMARKS.glob("*.py")] == ["__init__.py"]
    assert all(len(list((BENCHMARKS / room).glob("*.py"))) <= 16 for room in ROOMS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_imports_among_the_benchmarks_are_found(script):
    tree = ast.parse(script.read_text())
    for _, module, name in imported(tree):
        if module.split(".")[0] == "benchmarks" and name is not None:
            path = common.ROOT.joinpath(*module.split("."))
            if path.is_dir():
                assert (path / f"{name}.py").is_file(), f"{module}.{name}"
                assert read(tree, name) <= defined(path / f"{name}.py"), f"{module}.{name}"
            else:
                assert name in defined(path.with_suffix(".py")), f"{module}.{name}"
        elif module.split(".")[0] in OWN:
            assert importlib.util.find_spec(module), module


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_what_is_started_finds_the_repository_first(script):
    text = script.read_text()
    own = [node.lineno for node, module, _ in imported(ast.parse(text)) if module.split(".")[0] in OWN]
    if 'if __name__ == "__main__":' not in text or not own:
        assert "sys.path" not in text
        return
    depth = len(script.relative_to(common.ROOT).parents) - 1
    assert FIRST_ON_THE_PATH.format(depth) in text.splitlines()[: min(own)]


def test_a_script_starts_from_anywhere(tmp_path):
    script = BENCHMARKS / "headline" / "regressions.py"
    done = subprocess.run([sys.executable, str(script), "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "of nonfinite_cost" not in done.stdout  # only files with figures are of the suite
    assert "overhead" in done.stdout


def test_libraries_say_nothing_while_they_are_imported_for_a_benchmark():
    """torchao is the one that looks for kernels of other machines; each library that imports it imports it so."""
    words = [sys.executable, "-c", "import benchmarks, torchao"]
    done = subprocess.run(words, cwd=common.ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("script", [one for one in SCRIPTS if FIRST_ON_THE_PATH.format(2) in one.read_text()], ids=str)
def test_libraries_are_imported_after_what_keeps_them_quiet(script):
    """``benchmarks/__init__.py``, which the first import of the benchmarks runs."""
    at_the_top = [node for node in ast.parse(script.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    modules = [module.split(".")[0] for _, module, _ in imported(ast.Module(at_the_top, []))]
    talkative = [module for module in modules if module in ("benchmarks", "transformers", "peft", "trl", "datasets")]
    assert talkative[:1] in ([], ["benchmarks"])


def test_every_path_that_is_named_is_there():
    """In pages, scripts, results and sources: a benchmark is named by where it stands."""
    names = subprocess.run(["git", "ls-files"], cwd=common.ROOT, capture_output=True, text=True, check=True).stdout
    files = [common.ROOT / name for name in names.splitlines() if not name.startswith("tests/benchmarks/")]
    texts = [path for path in files if path.suffix in (".py", ".md", ".json", ".yaml", ".toml", ".cfg", "")]
    lost = {
        (str(path.relative_to(common.ROOT)), named)
        for path in texts
        if path.is_file()
        for named in re.findall(r"(?<!tests/)\bbenchmarks/[\w/]+\.py\b", path.read_text(errors="ignore"))
        if "NAME" not in named and not (common.ROOT / named).is_file()
    }
    assert not lost


def test_results_are_reproduced_by_a_script_that_is_there():
    for path in (BENCHMARKS / "results").glob("*.json"):
        words = json.loads(path.read_text()).get("command", "").split()
        if words[:1] == ["python"]:
            assert (common.ROOT / words[1]).is_file(), path.name


def test_a_command_names_the_room(monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / "loops" / "tracking.py"), "--steps", "3"])
    assert common.command_line() == "python benchmarks/loops/tracking.py --steps 3"
    monkeypatch.setattr(sys, "argv", ["/elsewhere/some.py"])
    assert common.command_line() == "python some.py"
