"""What every command does before its own work."""

import contextlib
import errno
import os
import subprocess
import sys

import pytest

from scu_trainer.cli import train
from scu_trainer.cli.evaluation import eval as evaluate
from scu_trainer.cli.evaluation import retain
from scu_trainer.cli.main import ALLOCATOR, _let_segments_grow, guarded, main
from scu_trainer.cli.publishing import export, merge, push
from scu_trainer.cli.talking import chat, generate, serve
from scu_trainer.errors import SettingsError, UserError


def test_the_allocator_of_a_card_lets_its_segments_grow():
    environment = {}
    _let_segments_grow(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("name", ALLOCATOR)
def test_an_allocator_that_was_set_up_is_left_alone(name):
    environment = {name: "max_split_size_mb:128"}
    _let_segments_grow(environment)
    assert environment == {name: "max_split_size_mb:128"}


@pytest.mark.parametrize("error", [None, UserError("refused"), ZeroDivisionError])
def test_variables_that_a_command_sets_are_gone_after_it(monkeypatch, error):
    """DeepSpeed needs RANK and WORLD_SIZE: with them the next training of a session would be one of several ranks."""
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    before = dict(os.environ)

    @guarded
    def command(argv):
        os.environ.update(WORLD_SIZE="1", CUDA_VISIBLE_DEVICES="")
        if error is not None:
            raise error
        return 0

    with contextlib.suppress(ZeroDivisionError):
        command([])
    assert os.environ == before


def test_help_is_a_word_as_well(capsys):
    assert main(["help"]) == 0 and "usage: scu-trainer COMMAND" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["help", "push"])
    assert "usage: scu-trainer push" in capsys.readouterr().out
    assert main(["help", "pusch"]) == 2 and "did you mean 'push'" in capsys.readouterr().err


def test_an_option_is_known_with_hyphens_too(capsys):
    assert main(["push", "nowhere", "--repo-id", "me/model", "--dry-run", "--max-shard-size=1GB"]) == 2
    assert "nowhere is not a folder here" in capsys.readouterr().err


@pytest.mark.parametrize("command", [merge, push, export, retain, chat, generate, serve])
def test_a_switch_is_typed_as_for_train_or_alone(command):
    """And the name that follows one that stands alone is no value of it."""
    needed = {export: ["--to", "onnx"], retain: ["--anchor", "x", "--budget_bits", "0.1"]}.get(command, [])
    needed += {push: ["--repo_id", "me/model"], generate: ["--prompts", "x", "--output", "y"]}.get(command, [])

    def typed(*words: str) -> tuple[bool, bool]:
        found = command._parser().parse_args([*words, *needed])
        assert found.run == "RUN"
        return found.trust_remote_code, found.allow_pickle

    assert typed("RUN", "--trust_remote_code", "true", "--allow-pickle=False") == (True, False)
    assert typed("--trust-remote-code", "--allow_pickle", "RUN") == (True, True)
    assert typed("--trust-remote-code", "on", "--allow_pickle", "off", "RUN") == (True, False)
    assert typed("--allow_pickle", "false", "RUN", "--trust_remote_code") == (True, False)
    assert typed("--trust_remote_code", "RUN", "--trust_remote_code", "no") == (False, False), "the last one counts"
    with pytest.raises(SettingsError, match="trust_remote_code: 'maybe' is neither true nor false"):
        typed("RUN", "--trust_remote_code=maybe")


def test_a_mode_of_train_is_switched_off_by_each_word_for_it():
    words = ["--preflight_only", "off", "--check_requirements", "--seed", "1", "--print_config"]
    modes, rest = train.mode_parser().parse_known_args(words)
    assert rest == ["--seed", "1"]
    assert (modes.preflight_only, modes.check_requirements, modes.print_config) == (False, True, True)


def test_a_switch_of_eval_may_stand_before_the_model():
    found = evaluate._parse(evaluate._parser(), ["--trust_remote_code", "RUN", "--allow-pickle", "--json"])
    assert found[0] == "RUN" and found[2].trust_remote_code and found[2].allow_pickle


@pytest.mark.parametrize("endpoint", ["hf-mirror.com", "", "ftp://host", "http://[::1", "http://host:80a"])
def test_an_endpoint_that_is_not_an_address_is_one_line(endpoint, monkeypatch, capsys):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert main(["recipes"]) == 2
    assert f"error: HF_ENDPOINT is {endpoint!r}, which is not an address" in capsys.readouterr().err


@pytest.mark.parametrize("endpoint", ["https://hf-mirror.com", "http://127.0.0.1:80/hub/"])
def test_another_hub_is_no_error(endpoint, monkeypatch, capsys):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert main(["recipes"]) == 0


def test_a_program_may_be_started_without_its_input():
    """As some schedulers do."""
    program = [sys.executable, "-m", "scu_trainer.cli.main", "runs"]
    words = ["sh", "-c", 'exec "$@" <&-', "sh", *program]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "without a terminal there is no menu" in done.stderr


def test_it_starts_by_the_name_of_the_package_too():
    done = subprocess.run([sys.executable, "-m", "scu_trainer", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("usage: scu-trainer COMMAND")


def test_without_docstrings_what_needs_transformers_says_so_and_the_rest_works():
    def done(*words):
        command = [sys.executable, "-OO", "-m", "scu_trainer", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert done("recipes").returncode == 0
    ended = done("train")
    assert ended.returncode == 2 and "without them transformers does not load" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_a_current_folder_that_was_removed(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["data", "--dataset", "rows.jsonl"]) == 2
    assert "the current folder was removed" in capsys.readouterr().err


def test_another_error_without_a_path_is_not_about_the_current_folder():
    """Such as that of a socket which is gone."""

    @guarded
    def command(argv):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    with pytest.raises(FileNotFoundError):
        command([])


def test_closed_streams_are_open_for_child_processes_and_take_every_name():
    said = "import subprocess, sys; from scu_trainer.cli.main import _open_closed_streams as start; start(); "
    said += "sys.stderr.write('\\udcff'); sys.stdout.flush(); child = 'import os; [os.fstat(n) for n in range(3)]'; "
    said += "sys.exit(subprocess.run([sys.executable, '-c', child], check=False).returncode)"
    program = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", said]
    assert subprocess.run(program, check=False).returncode == 0


@pytest.mark.parametrize(
    ("printing", "code"), [("print('x')", 3), ("plain_console().print('x')", 0)], ids=["plain", "rich"]
)
def test_a_reader_of_a_pipe_that_has_seen_enough_is_no_failure(printing, code):
    """Such as ``head -1``. What is printed last is written when the command has ended, with a code of its own."""
    program = f"""
import sys
from scu_trainer.cli.main import guarded, plain_console
sys.exit(guarded(lambda _: {printing} or 3)([]))
"""
    reading, writing = os.pipe()
    os.close(reading)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open(writing, "wb") as gone:
        words = [sys.executable, "-c", program]
        done = subprocess.run(words, stdout=gone, stderr=subprocess.PIPE, env=environment, check=False)
    assert (done.returncode, done.stderr) == (code, b"")


@pytest.mark.parametrize("words", [["push", "LOOP", "--repo_id", "me/x", "--dry_run"], ["eval", "LOOP"]])
def test_a_link_that_leads_to_itself_is_one_line(words, tmp_path, capsys):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert main([str(loop) if word == "LOOP" else word for word in words]) == 2
    told = capsys.readouterr().err
    # From Python 3.13 on pathlib resolves such a link like a file that is not there.
    wanted = "this link leads to itself; give another path" if sys.version_info < (3, 13) else f"{loop}"
    assert wanted in told and str(loop) in told and "Traceback" not in told
