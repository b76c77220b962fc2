"""What is built from the files in git, installed into a fresh environment, and run from an empty folder.

The environment has a Python of its own and only this package; what that needs is read from the packages of the tests.
"""

from __future__ import annotations

import ast
import configparser
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scu_trainer import __version__
from tests.test_import_arrows import at_import_time, imported_names, module_name, package_of, sources
from tests.test_project import DISTRIBUTIONS

ROOT = Path(__file__).parents[1]
NOT_FOR_USERS = {"dev", "benchmarks", "all"}
FOLDERS = {"recipes", "ds_configs", "accelerate_configs"}
WITHOUT_EXTRAS = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {missing} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
from scu_trainer.cli.main import main
for words in {commands}:
    print(main(words), file=sys.stderr)
"""
MISSING = {"deepspeed", "bitsandbytes", "matplotlib", "starlette", "uvicorn", "optuna", "lm_eval", "sklearn", "kornia"}
ABSENT = {
    "report": ["report", "runs/a"],
    "board": ["board", "--port", "0"],
    "sweep": ["sweep", "--search", "learning_rate=1e-5:1e-3:log"],
    "deepspeed": ["train", "--deepspeed", "zero2", "--print_config"],
    "qlora": ["train", "--tuning", "qlora", "--preflight_only"],
    "images": ["train", "--config", "resnet", "--preflight_only"],
}
"""Commands that need an extra, by its name."""


def clean_environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | more


def ran(*words: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, env=clean_environment(**environment), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def files_in_git() -> list[str]:
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = ran(*words, cwd=ROOT).stdout.split("\0")
    return [name for name in listed if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """What a clone holds of what building looks at."""
    folder = tmp_path_factory.mktemp("clone")
    for name in files_in_git():
        if name.split("/")[0] in FOLDERS | {"scu_trainer", "scripts"} or "/" not in name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def built(tree, tmp_path_factory) -> tuple[Path, Path]:
    """A source archive, and a wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    build = "from setuptools import build_meta; build_meta.build_{}({!r})"
    ran(sys.executable, "-c", build.format("sdist", str(folder)), cwd=tree)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    ran(sys.executable, "-c", build.format("wheel", str(folder)), cwd=folder / archive.name.removesuffix(".tar.gz"))
    (wheel,) = folder.glob("*.whl")
    return archive, wheel


@pytest.fixture(scope="module")
def python(built, tmp_path_factory) -> Path:
    """The Python of a fresh environment."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    ran(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    own = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "needed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")  # .pth files in there are not followed
    install = ["install", "-q", "--no-index", "--no-deps", "--ignore-installed", "--disable-pip-version-check"]
    ran(sys.executable, "-m", "pip", "--python", own, *install, built[1], cwd=folder)
    return own


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path


def metadata(wheel: Path) -> Distribution:
    (name,) = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA")}
    return PathDistribution(zipfile.Path(wheel, name.removesuffix("METADATA")))


def test_the_wheel_holds_the_package_as_it_is_in_git(built):
    links = {path.name for path in (ROOT / "scu_trainer" / "shipped").iterdir() if path.is_symlink()}
    expected = {name for name in files_in_git() if name.startswith("scu_trainer/") and not (ROOT / name).is_symlink()}
    expected |= {f"scu_trainer/shipped/{name}" for name in files_in_git() if name.split("/")[0] in FOLDERS}
    expected |= {"scu_trainer/shipped/scripts/train.py"}
    assert links == FOLDERS | {"scripts"}
    with zipfile.ZipFile(built[1]) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name and not name.endswith("/")}
        assert found == expected
        for name in found:
            assert wheel.read(name) == (ROOT / name).read_bytes(), name


def test_the_archive_of_sources_holds_files_and_no_links(built):
    with tarfile.open(built[0]) as packed:
        assert all(item.isfile() or item.isdir() for item in packed)
        assert any(item.name.endswith("shipped/ds_configs/zero3.json") for item in packed)


def test_the_metadata_says_what_setup_cfg_says(built):
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    found = metadata(built[1])
    assert (found.metadata["Name"], found.version) == ("scu-trainer", __version__)
    assert found.metadata["License"] == "MIT" and found.metadata["Requires-Python"] == ">=3.11"
    assert {*found.metadata.get_all("Provides-Extra")} == {*setup["options.extras_require"]}
    core = {Requirement(line).name for line in found.requires if "extra ==" not in line}
    assert core == {Requirement(line).name for line in setup["options"]["install_requires"].split("\n")[1:]}
    assert [(entry.name, entry.value) for entry in found.entry_points] == [("scu-trainer", "scu_trainer.cli.main:main")]


ASK_FIRST = ("scu_trainer.board.", "scu_trainer.serve.", "scu_trainer.train.loss.rows.triton_softmax")
"""Rooms loaded by a command of their own, which asks first whether their packages are there, and a kernel for a card,
which is tried first."""

PART_OF_TORCH = {"triton"}
"""A CUDA build of torch pins it to an exact version."""


def test_what_users_import_is_declared_for_users(built):
    """Not only among what tests and benchmarks need. What the package needs to be loaded comes with it."""
    core, extras = set(), set()
    for requirement in map(Requirement, metadata(built[1]).requires):
        wanted = [name for name in metadata(built[1]).metadata.get_all("Provides-Extra") if name not in NOT_FOR_USERS]
        if requirement.marker is None:
            core.add(canonicalize_name(requirement.name))
        elif any(requirement.marker.evaluate({"extra": name}) for name in wanted):
            extras.add(canonicalize_name(requirement.name))
    for path in sources():
        module, text = module_name(path), path.read_text()
        package = package_of(module, path)
        everywhere = foreign(imported_names(ast.parse(text), package))
        early = foreign(imported_names(at_import_time(ast.parse(text)), package))
        assert everywhere - core - extras - PART_OF_TORCH == set(), module
        if not module.startswith(ASK_FIRST):
            assert early - core == set(), module


def foreign(names) -> set[str]:
    top = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"scu_trainer"}
    return {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in top}


def test_the_installed_command_knows_its_recipes(python, elsewhere):
    """From an empty folder; the checkout is not in sight."""
    command = python.parent / "scu-trainer"
    where = ran(python, "-c", "import scu_trainer; print(scu_trainer.__file__)", cwd=elsewhere).stdout
    assert Path(where.strip()).is_relative_to(python.parents[1])
    assert "recipes" in ran(command, "--help", cwd=elsewhere).stdout
    assert ran(command, "recipes", cwd=elsewhere).stdout.count("\n  ") >= 28
    assert ran(command, "recipes", "scu_lora", cwd=elsewhere).stdout == (ROOT / "recipes/scu_lora.yaml").read_text()
    path = Path(ran(command, "recipes", "zero2", "--path", cwd=elsewhere).stdout.strip())
    assert path.is_relative_to(python.parents[1]) and path.is_file()


def test_the_installed_package_trains(python, elsewhere):
    words = ["train", "--config", "resnet", "--mode", "tiny", "--max_steps", "2", "--use_cpu", "true"]
    words += ["--dataset_size", "40", "--predict_memory", "false"]
    ran(python.parent / "scu-trainer", *words, cwd=elsewhere, HOME=str(elsewhere / "home"), OMP_NUM_THREADS="1")
    assert (elsewhere / "runs/resnet/model.safetensors").is_file()


def test_the_installed_package_starts_its_launchers(python, elsewhere):
    said = "from scu_trainer.runs.launch import command; print(*command('accelerate', [], 2, False))"
    words = ran(python, "-c", said, cwd=elsewhere).stdout.split()
    paths = [Path(word) for word in words if word.endswith(("train.py", "cpu_2_processes.yaml"))]
    assert len(paths) == 2 and all(path.is_file() and path.is_relative_to(python.parents[1]) for path in paths)


def test_what_is_not_installed_is_named_with_its_extra(python, elsewhere):
    code = WITHOUT_EXTRAS.format(missing=MISSING, commands=[*ABSENT.values()])
    done = ran(python, "-c", code, cwd=elsewhere, HOME=str(elsewhere / "home"), OMP_NUM_THREADS="1")
    for name in ABSENT:
        assert f"scu-trainer[{name}]" in done.stderr, name
    assert [line for line in done.stderr.splitlines() if line.isdigit()] == ["2"] * len(ABSENT)
