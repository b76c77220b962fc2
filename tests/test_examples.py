"""Each file of examples/ as a user starts it, on a model and for steps that are a test's."""

from __future__ import annotations

import ast
import json
import runpy
import sys
from pathlib import Path

import pytest

from scu_trainer.cli.main import COMMANDS
from scu_trainer.shipped import recipe
from tests import processes, tiny

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples"
SHORT = ("--max_steps", "4", "--eval_strategy", "no", "--use_cpu", "true", "--predict_memory", "false")
TEXT = ("--sample_prompts", "0", "--dataset_size", "24", "--block_size", "64")
MODEL = "--model_name_or_path"

# Words behind each script ({model}: a folder; {run}: what first_finetune.py has made), and what it prints in the end.
EXAMPLES = {
    "any_trainer": (["{model}"], "split exactly: True"),
    "curriculum": ([], "of 12 rows with a wrong label, 12 are among the hardest 12"),
    "first_finetune": ([MODEL, "{model}", *TEXT, *SHORT], "asked about the duck: "),
    "memory_limit": ([], "largest difference of a loss: "),
    "own_loop": ([], "rate factor in the end: "),
    "own_loss": ([], "split exactly: True"),
    "qlora_cpu": ([MODEL, "{model}", *TEXT, *SHORT], "bits per token before"),
    "resume": (
        [MODEL, "{model}", *TEXT, "--use_cpu", "true", "--predict_memory", "false"],
        "finished at step 12",
    ),
    "retain": ([MODEL, "{model}", *TEXT, *SHORT], "lost on the anchor: "),
    "share": (["{run}", "me/animals"], "nothing was sent"),
    "talk": (["{run}"], "\n"),
    "trl_dpo": (["{model}"], "preference for what was chosen: "),
    "trl_sft": (["{model}"], "the model is in runs/sft"),
    "vision": (["--dataset_size", "40", *SHORT], "accuracy on what was held out: "),
}
SHOW_THEIR_RUN = {"first_finetune": "animals", "qlora_cpu": "qlora_cpu", "retain": "retain", "vision": "vision"}
# TRL says so of its own defaults.
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.saved_llama(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture(scope="module")
def run(model, tmp_path_factory) -> Path:
    """What first_finetune.py leaves."""
    place = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        start(patch, "first_finetune", [MODEL, str(model), *TEXT, *SHORT])
    return place / "runs" / "animals"


def start(patch: pytest.MonkeyPatch, name: str, words: list[str]) -> None:
    patch.setattr(sys, "argv", [f"{name}.py", *words])
    try:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    except SystemExit as end:
        assert end.code == 0


def test_every_example_is_here():
    assert {path.stem for path in FOLDER.glob("*.py")} - {"write_tutorials"} == {*EXAMPLES}
    page = (FOLDER / "README.md").read_text()
    assert all(f"{name}.py" in page for name in EXAMPLES)
    assert all(len((FOLDER / f"{name}.py").read_text().splitlines()) < 60 for name in EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name, model, run, tmp_path, monkeypatch, capfd):
    words, said = EXAMPLES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPS", "6")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    words = [word.format(model=model, run=run) for word in words]
    if name in SHOW_THEIR_RUN:
        (tmp_path / "runs" / SHOW_THEIR_RUN[name]).mkdir(parents=True)
        (tmp_path / "runs" / SHOW_THEIR_RUN[name] / "mine.txt").write_text("in the way, so the run goes beside it")
    if name == "resume":  # it starts Python twice, which forks
        code = f"import os, runpy; os.chdir({str(tmp_path)!r}); runpy.run_path({str(FOLDER / 'resume.py')!r})"
        done = processes.launch(["-c", code, *words])
        assert done.returncode == 0, done.stderr[-3000:]
        assert all(one in done.stdout for one in ("killed; checkpoints: ['checkpoint-", "resuming from ", said))
        return
    start(monkeypatch, name, words)
    assert {path.name for path in tmp_path.iterdir()} <= {"runs"}, (
        "what the page says; nothing of the user's is replaced"
    )
    assert said in capfd.readouterr().out


@pytest.mark.parametrize("name", ["talk", "share"])
def test_an_example_without_the_run_that_it_needs_says_how_to_call_it(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    with pytest.raises(SystemExit, match=f"python examples/{name}.py runs/animals"):
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


def test_a_training_that_was_killed_before_is_not_shown_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "resume" / "checkpoint-4").mkdir(parents=True)
    with pytest.raises(SystemExit, match="remove it"):
        runpy.run_path(str(FOLDER / "resume.py"), run_name="__main__")


@pytest.fixture(scope="module")
def tutorials() -> dict:
    return runpy.run_path(str(FOLDER / "write_tutorials.py"))


def test_pages_and_notebooks_are_what_the_examples_make(tutorials):
    written = tutorials["written"]()
    assert {path for path in written if path.exists() and path.read_text() == written[path]} == {*written}, (
        "type python examples/write_tutorials.py"
    )
    pages = {*(ROOT / "docs" / "tutorials").glob("*.md"), *(FOLDER / "notebooks").glob("*.ipynb")}
    assert pages == {*written}
    with_cells = {path.stem for path in FOLDER.glob("*.py") if "\n# %%" in path.read_text()}
    assert with_cells == {*tutorials["TUTORIALS"]} and len(with_cells) >= 6


@pytest.mark.parametrize("path", sorted((FOLDER / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_has_the_code_of_its_example_and_commands_of_ours(path):
    content = json.loads(path.read_text())
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    cells = ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]
    plain = "\n".join(cell for cell in cells if not cell.startswith(("!", "REPOSITORY")))
    name = {"first_run": "first_finetune"}.get(path.stem, path.stem)
    code = ast.parse((FOLDER / f"{name}.py").read_text()).body[1:]  # without the docstring
    assert ast.dump(ast.parse(plain)) == ast.dump(ast.Module(code, type_ignores=[]))
    commands = [cell.split() for cell in cells if cell.startswith("!scu-trainer")]
    assert all(words[1] in COMMANDS for words in commands)
    assert all(Path(recipe(words[3])).exists() for words in commands if words[1] == "train")
