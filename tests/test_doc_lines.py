"""Lines of README and docs that start with ``scu-trainer`` are executed, in a folder as a reader has it.

Each has its own copy of that folder, with runs that were trained for it, and ends with 0 or what the pages promise.
Trainings on text are among them; those of other tasks are read by tests/test_doc_commands.py, which names what trains
them.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest
import yaml

from scu_trainer.cli.main import INTERRUPTED, main
from scu_trainer.hardware.probe import accelerators
from tests import processes, tiny
from tests.hub.runs import documents
from tests.hub.server import Repo, running
from tests.report.made_runs import drawn_once
from tests.test_doc_blocks import ROOT, blocks, commands
from tests.test_doc_commands import TRAININGS

CHANGES = [
    ("a placeholder", r"\bRUN\b", "runs/mine"),
    ("a placeholder", r"\bFILE\b", "text.jsonl"),
    ("a second run of the same kind", r"runs/animals", "runs/scu_lora"),
    ("a copy of it, which other lines are about", r"^(export|eval|serve|merge) runs/scu_lora\b", r"\1 runs/mine"),
    ("two that are drawn for another line", r"^report runs/scu_lora runs/scu_lora-2", "report runs/mine runs/other"),
    ("one background run is enough", r"^runs (monitor|stop) scu_lora", r"runs \1 digits"),
    ("it looks every 5 s", r"^(runs monitor .*)$", r"\1 --refresh 0.5"),
    ("others may have the port", r"^((?:serve|board)\b.*?)(?: --port \d+)?( --configs .*)?$", r"\1 --port 0\2"),
    ("33 trainings", r"^(compare --config my.yaml)$", r"\1 --arms none,model"),
    ("one step and one seed", r"^(compare .*--arms? .*)$", r"\1 --seeds 0 --max_steps 1 --jobs 1"),
    ("10 or more trainings", r"^(sweep .*)$", r"\1 --trials 1"),
    ("seven trainings of 30 million weights", r"^variants --limit 0.68GiB", "variants --limit 4GB --config my.yaml"),
    ("eight steps", r"^(variants .*)$", r"\1 --steps 2"),
    ("its base takes minutes to make", r"^(modes .*recipes/.*)$", r"\1 --mode tiny --model_name_or_path my/model"),
    ("data of the Hub", r"^(eval .*--tasks) arc_easy,hellaswag", r"\1 returns --include_path tasks"),
    ("a model of the Hub", r"^train --model_name_or_path \S+", "train --config my.yaml"),
    ("a model of the Hub", r"--model_name_or_path path/or/hub-id ", ""),
    ("runs/mine is there already", r"(--seeds 0 1 2)$", r"\1 --output_dir runs/seeds"),
    ("it starts a service of its own", " --report_to wandb", " --report_to tensorboard"),
    (
        "240 steps on long text, of a base that takes minutes",
        r"^(train .*/scu_lora.yaml.*)$",
        r"\1 --model_name_or_path my/model --max_steps 1 --dataset_size 12 --block_size 64 --predict_memory false "
        "--max_eval_documents 1 --sample_prompts 1",
    ),
    ("16 of 24 documents must be held out", r"^(train .*--retain general .*)$", r"\1 --validation_split_percentage 70"),
    ("the base of a reader's run is on the Hub", r"^(push runs/mine .*)$", r"\1 --base_model me/base"),
]
"""Why a line is not run as it stands there, what is taken out of it, and what stands there instead."""

ENDLESS = {
    "serve": ("Ctrl-C ends", INTERRUPTED),
    "board": ("Ctrl-C ends", INTERRUPTED),
    "runs monitor": ("digits: running", 0),
    "runs logs -f": (r"step +1/", 0),
}
"""How lines begin that go on until Ctrl-C, what they have said by then (a pattern), and their exit code after it."""

START_PYTHON = (
    "compare",
    "sweep",
    "variants",
    "modes",
    "export",
    "runs start",
    "runs resume",
    "train --config my.yaml --seeds",
)
"""How lines begin that start Python themselves: it is forked from a process that has imported everything."""

SAY = {
    "chat": "\n", "generate": "1 answer in", "data": r"\d documents?", "import": "4 keys, 3 taken over",
    "eval": "tasks of lm_eval|bits/token", "compare": "none", "sweep": "best: trial", "report": "report: .*html",
    "export": "differ by", "merge": "differ by", "retain": "kept: ", "prune": "weights: .* before",
    "push .*--dry_run": "bytes", "push": "as one commit", "plan": "peak|predicted", "modes": "s/step",
    "variants": "first that fits: lora", "recipes": "scu_lora", "runs stop": r"checkpoint-\d+ is whole",
    "runs resume": "digits resumes from .*checkpoint-", "runs": "digits", "train .*--print_config": "dataset: ",
    "train .*--test_run": "test run passed", "train .*--seeds": "over 3 seeds", "train": "trained . steps?",
}  # fmt: skip
"""How lines begin, and what they print: the first that matches counts. Any other line prints something."""

QUESTION, MENU = "What is a list?\n", "2\n"
"""What is typed in a chat, and in the menu of background runs: the number of the list. Then the input ends."""

KEY = "a-key-of-this-test-alone"
PATIENCE_S = 120.0


def as_run(line: str) -> str:
    for _, found, instead in CHANGES:
        line = re.sub(found, instead, line)
    return line


# docs/runs.md comes first: it shows what to do with a background run in an order in which that can be done.
ALL = sorted(commands("scu-trainer"), key=lambda shown: shown[0] != "docs/runs.md")
BEGIN = next(shlex.join(words) for _, words in ALL if words[:2] == ["runs", "start"] and "digits" in words)
IS_RUN = re.compile(r"train .*(my\.yaml|recipes/scu_lora|SmolLM2)|(?!train|runs start)")
SHOWN = [(page, shlex.join(words)) for page, words in ALL if IS_RUN.match(shlex.join(words))]
PAGES_OF: dict[str, list[str]] = {}
for page, line in SHOWN:
    PAGES_OF.setdefault(as_run(line), []).append(page)
BACKGROUND = [line for line in PAGES_OF if line.split()[0] == "runs"]
OTHERS = [line for line in PAGES_OF if line not in BACKGROUND]
COMPARISON = as_run("compare --config my.yaml")


@pytest.fixture(scope="module", autouse=True)
def _drawn_once():
    """Most lines about reports are about copies of one run."""
    with drawn_once():
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The reader's folder: for reading alone."""
    folder = tmp_path_factory.mktemp("reader")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_files(folder)
        assert main(["train", "--config", "my.yaml"]) == 0
        assert main(["train", "--config", "my.yaml", "--tuning", "full", "--output_dir", "runs/full"]) == 0
        digits = "--task image-classification --image_size 32 --dataset_size 40 --max_steps 2 --save_strategy no"
        digits += " --predict_memory false"
        words = ["train", *digits.split(), "--use_cpu", "true", "--report_to", "none", "--output_dir", "runs/digits"]
        assert main(words) == 0
        for name in ("scu_lora", "scu_lora-2", "other"):
            shutil.copytree("runs/mine", f"runs/{name}")
        shutil.copytree("runs/full", "runs/large")
    return folder


def write_files(folder: Path) -> None:
    for name in ("recipes", "ds_configs", "accelerate_configs"):
        (folder / name).symlink_to(ROOT / name)
    config = tiny.saved_llama(folder / "my" / "model", layers=1) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 1024}))
    (folder / "model").symlink_to("my/model")
    (folder / "my" / "small").symlink_to("model")
    rows = [json.loads(line)["text"] for line in documents(folder / "my.jsonl").read_text().splitlines()]
    for name in ("text", "general"):
        other = [{"text": " ".join(reversed(row.split()))} for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in other))
    job = {
        "model_name_or_path": "my/model", "dataset": "my.jsonl", "output_dir": "runs/mine", "block_size": 128,
        "validation_split_percentage": 25, "sample_prompts": 0, "max_steps": 2, "save_strategy": "no",
        "per_device_train_batch_size": 2, "learning_rate": 0.001, "scu_target_s": 0.1, "report_to": "none",
        "use_cpu": True, "mixed_precision": "no", "predict_memory": False,
    }  # fmt: skip
    for name in ("my", "job"):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(job))
    (folder / "questions.jsonl").write_text('{"question": "What is a list?"}\n')
    (folder / "data").mkdir()
    (folder / "data" / "dataset_info.json").write_text('{"mine": {"file_name": "../my.jsonl"}}')
    other = {"stage": "pt", "model_name_or_path": "my/model", "dataset": "mine", "finetuning_type": "lora"}
    (folder / "llama_factory.yaml").write_text(yaml.safe_dump(other))
    write_task(folder / "tasks")


def write_task(folder: Path) -> None:
    """As docs/evaluate.md shows it."""
    (text,) = [text for _, text in blocks("") if text.startswith("$ cat tasks/returns.yaml")]
    task, rows = re.search(r"yaml\n(.*?)\$ head [^\n]+\n((?:\{[^\n]+\n)+)", text, re.DOTALL).groups()
    folder.mkdir()
    (folder / "returns.yaml").write_text(task)
    (folder / "returns.jsonl").write_text(rows)


@pytest.fixture
def place(trained, tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "here"
    shutil.copytree(trained, folder, symlinks=True, ignore=shutil.ignore_patterns("digits", "compare"))
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def compared(trained) -> tuple[int, str]:
    """What its line ended with and printed. It is run once, and what it wrote is there for the lines that show it."""
    return in_its_own_process(shlex.split(COMPARISON), trained)


@pytest.fixture(scope="module")
def hub():
    with running() as hub:
        hub.repos["me/base"] = Repo()
        yield hub


# -- running a line ----------------------------------------------------------------------------------------------------


def program(place: Path) -> list[str]:
    # Tests that were started in the background ignore Ctrl-C, and what they start would, too.
    code = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); os.chdir({!r}); "
        "from scu_trainer.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    return ["-c", code.format(str(place))]


def in_its_own_process(words: list[str], place: Path, environment: Mapping[str, str] = os.environ) -> tuple[int, str]:
    done = processes.launch([*program(place), *words], environment=environment)
    return done.returncode, done.stdout + done.stderr


def until_ctrl_c(words: list[str], place: Path, until: str) -> tuple[int, str]:
    """Ctrl-C comes once it has said ``until``, and has answered where it names an address."""
    log = place.parent / "said.log"
    log.write_text("")
    key = KEY if "--host" in words else ""
    process = processes.Started([*program(place), *words], log, {**os.environ, "SCU_TRAINER_API_KEY": key})
    try:
        end_s = time.monotonic() + PATIENCE_S
        while not re.search(until, log.read_text()) and process.poll() is None:
            assert time.monotonic() < end_s, log.read_text()
            time.sleep(0.05)
        if process.poll() is None:
            ask(log.read_text())
            process.send_signal(signal.SIGINT)
        return process.wait(PATIENCE_S), log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(PATIENCE_S)


def ask(said: str) -> None:
    for address in re.findall(r"http://\S+", said)[:1]:
        here = address.replace("0.0.0.0", "127.0.0.1").replace("/v1", "/health")
        assert httpx.get(here, follow_redirects=True, timeout=60).status_code == 200, said


class Keyboard(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def execute(place, hub, capsys, monkeypatch):
    """``execute(line)`` -> its exit code and what it printed."""

    def run(line: str) -> tuple[int, str]:
        words = shlex.split(line)
        for begin, (until, _) in ENDLESS.items():
            if line.startswith(begin):
                return until_ctrl_c(words, place, until)
        if words[0] == "push" or "--push_to_hub" in words:
            return in_its_own_process(words, place, {**os.environ, **hub.environment(place / "home")})
        if line.startswith(START_PYTHON):
            return in_its_own_process(words, place)
        monkeypatch.setattr(sys, "stdin", Keyboard(MENU) if line == "runs" else io.StringIO(QUESTION))
        monkeypatch.setattr(sys.stdout, "isatty", sys.stdin.isatty, raising=False)
        capsys.readouterr()
        return main(words), "".join(capsys.readouterr())

    return run


def promised(line: str) -> int:
    """The exit code by the pages."""
    if line == "hardware check --gpu" and not accelerators():
        return 2
    return next((code for begin, (_, code) in ENDLESS.items() if line.startswith(begin)), 0)


# -- the lines ---------------------------------------------------------------------------------------------------------


def check(line: str, code: int, said: str) -> None:
    pattern = next((pattern for begin, pattern in SAY.items() if re.match(begin, line)), r"\S")
    assert code == promised(line) and "Traceback" not in said, f"{line}: {code}\n{said[-3000:]}"
    assert re.search(pattern, said), f"{line} does not print {pattern}\n{said[-3000:]}"


def test_every_line_is_run_here_or_trains():
    read = [words for _, words in TRAININGS]
    others = [words for _, words in ALL if not IS_RUN.match(shlex.join(words))]
    assert all(words[1:] in read or words[2:] in read for words in others)
    assert len(SHOWN) + len(others) == len(ALL) and len(others) < 20
    assert len(SHOWN) >= 85 and len(PAGES_OF) >= 60 and len(BACKGROUND) >= 7


def test_the_tables_name_lines_that_are_shown():
    found = [pattern for _, pattern, _ in CHANGES if not any(re.search(pattern, as_shown) for _, as_shown in SHOWN)]
    begins, lines = (*ENDLESS, *SAY, *START_PYTHON), [*PAGES_OF, BEGIN]
    assert found == [begin for begin in begins if not any(re.match(begin, line) for line in lines)] == []


@pytest.mark.parametrize("line", OTHERS, ids=lambda line: f"{' '.join(dict.fromkeys(PAGES_OF[line]))}: {line}")
def test_a_line(line, execute, place, trained, request):
    if line.startswith("data --dataset"):
        (place / "answers.jsonl").write_text('{"question": "What is a list?", "answer": "A sequence."}\n')
    if line == "prune runs/digits":
        (place / "runs" / "digits").symlink_to(trained / "runs" / "digits")
    if "--merged" in line:  # by the line before it
        assert main(["merge", "runs/scu_lora"]) == 0
    if "full-pruned" in line:
        assert main(["prune", "runs/full"]) == 0
    if "--output_dir runs/large" in line:
        shutil.rmtree("runs/large")
    for folder in re.findall(r"runs/compar\w+", line):
        request.getfixturevalue("compared")
        shutil.copytree(trained / "runs" / "compare", folder)
    check(line, *(request.getfixturevalue("compared") if line == COMPARISON else execute(line)))


def test_lines_about_a_background_run(execute):
    # Few and small images, and more steps than all of these lines give it time for.
    small = "--image_size 32 --dataset_size 40 --predict_memory false"
    code, said = execute(f"{BEGIN} --use_cpu true --max_ram_percent 100 --max_steps 100000 {small}")
    assert code == 0, said
    try:
        for line in BACKGROUND:
            check(line, *execute(line))
    finally:
        assert main(["runs", "stop", "digits", "--now"]) == 0


@pytest.mark.parametrize(
    "line",
    ["chat runs/none", "serve runs/none --port 0", "modes --config none.yaml", "push runs/none --repo_id me/none"],
)
def test_a_line_that_does_not_work_is_seen(line, execute):
    with pytest.raises(AssertionError, match=f"{line}: 2"):
        check(line, *execute(line))
