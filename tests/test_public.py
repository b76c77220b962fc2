"""What a public project has beside its code says what is true: container, workflows, citation, templates."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from scu_trainer import __version__
from scu_trainer.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)) | {".venv/.main"}


def makes(text: str) -> list[str]:
    """Targets of the make commands in ``text``."""
    return re.findall(r"(?:^|[\s;&({])make (?!\\|-|;)([a-z./-]+)", text, re.MULTILINE)


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in lines]


def test_the_container_runs_targets_of_the_makefile_as_a_person_without_rights():
    found = instructions()
    names = [name for name, _ in found]
    assert {*names} <= {"ARG", "FROM", "RUN", "USER", "WORKDIR", "COPY", "CMD"} and names.count("FROM") == 1
    assert ("FROM", "${BASE}") in found and ("CMD", '["make", "train"]') in found
    user = names.index("USER")
    assert found[user][1] != "0" and all(i < user for i, (_, text) in enumerate(found) if "apt-get" in text)
    used = [target for name, text in found if name == "RUN" for target in makes(text.replace("gcc g++ git make", ""))]
    assert used == [".venv/.main"] and {*used, "train"} <= TARGETS
    assert ".venv/.main" in shlex.split(found[-3][1])


def test_what_the_container_copies_is_there_and_no_more_than_it_needs():
    copied = [word for name, text in instructions() if name == "COPY" for word in text.split()[1:-1]]
    assert copied[-1] == "." and all((ROOT / word).exists() for word in copied)
    built_from = {"setup.cfg", "pyproject.toml", "constraints.txt", "README.md", "LICENSE", "scu_trainer/__init__.py"}
    assert {"Makefile", *built_from} == {*copied[:-1]}
    left_out = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "runs"} <= {*left_out}


def test_there_are_workflows():
    assert [path.name for path in WORKFLOWS] == ["tests.yml"]
    job = yaml.safe_load(WORKFLOWS[0].read_text())["jobs"]["cpu"]
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert ".ci/run" in [step.get("run") for step in job["steps"]]
    jobs = yaml.safe_load(WORKFLOWS[0].read_text())["jobs"]
    assert {"cpu", "docs", "lint", "wheel"} == {*jobs} and {"run": "make docs"}.items() <= jobs["docs"]["steps"][
        2
    ].items()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_uses_pinned_actions_and_commands_that_exist(path):
    content = yaml.safe_load(path.read_text())
    assert content["permissions"] == {"contents": "read"}
    steps = [step for job in content["jobs"].values() for step in job["steps"]]
    assert all(job["timeout-minutes"] <= 60 for job in content["jobs"].values())
    for step in steps:
        assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]) if "uses" in step else step["run"]
        words = step.get("run", "")
        assert {*makes(words)} <= TARGETS
        assert {*re.findall(r"scu-trainer ([a-z]+)", words)} <= {*COMMANDS}
        assert all((ROOT / file).is_file() for file in re.findall(r"tests/\w+\.py", words))


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["cff-version"], cited["version"], cited["license"]) == ("1.2.0", __version__, "MIT")
    assert cited["title"] and cited["message"] and cited["authors"]


def test_a_commit_is_checked_by_the_tools_of_make_lint():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"  # nothing is downloaded, no second version
    linted = (ROOT / "Makefile").read_text().partition("\nlint: ")[2]
    for hook in repository["hooks"]:
        tool, *words = hook["entry"].replace(" --force-exclude", "").split()
        assert tool == ".venv/bin/ruff" and f"$(BIN)/ruff {words[0]} " in linted


@pytest.mark.parametrize("name", ["bug", "question"])
def test_a_form_asks_for_what_the_project_can_use(name):
    form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
    assert form["name"] and form["description"] and any(item.get("validations") for item in form["body"])
    labels = " ".join(item["attributes"]["label"] for item in form["body"])
    assert {*re.findall(r"`scu-trainer (\w+)", labels)} <= {*COMMANDS}
    assert len({item["id"] for item in form["body"]}) == len(form["body"])


def test_pages_for_those_who_contribute_are_there_and_lead_somewhere():
    for name in ("CODE_OF_CONDUCT.md", "SECURITY.md", "CONTRIBUTING.md", ".github/pull_request_template.md"):
        text = (ROOT / name).read_text()
        assert {*makes(text)} <= TARGETS
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (ROOT / target).exists(), (name, target)


def test_contributing_names_what_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:scu_trainer|tests|recipes|ds_configs|accelerate_configs)/[\w/.]*)`", text)
    tests = [word for line in re.findall(r"pytest ([^`]+)`", text) for word in line.split()]
    assert len(named) > 8 and len(tests) > 6
    assert all((ROOT / path).exists() for path in [*named, *tests])
    for file, word in (
        ("scu_trainer/train/loops/__init__.py", "\nORDER = "),
        ("scu_trainer/train/tasks/__init__.py", "\nCLASSES = "),
        ("scu_trainer/settings/tasks.py", "\nKINDS = "),
        ("scu_trainer/train/job/job.py", "\nclass Task("),
    ):
        assert word in (ROOT / file).read_text(), file
