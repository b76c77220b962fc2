"""What ``scu-trainer serve`` says before it loads anything, and the command of vLLM."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket

import pytest
import torch

from scu_trainer.cli.main import main
from scu_trainer.cli.subjects import subject_of
from scu_trainer.cli.talking import serve
from scu_trainer.cli.talking.serve import VLLM_KEY_VARIABLE, vllm_command
from tests import tiny
from tests.hub.runs import train

KEY = "a-key-of-this-test"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.saved_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)

    def loaded(*_):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(serve, "talker", loaded)


def refused(capsys, *words: object) -> str:
    assert main(["serve", *map(str, words)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err
    return said.err


def without(monkeypatch, *names: str) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in names else found(name, *rest))


def with_vllm(monkeypatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name == "vllm" or found(name, *rest))


def test_packages_that_are_missing(folder, capsys, monkeypatch):
    without(monkeypatch, "fastapi", "openai")
    said = refused(capsys, folder, "--engine", "transformers")
    assert "the server needs fastapi and openai, not installed here; pip install 'scu-trainer[serve]'" in said


def test_a_port_that_is_taken(folder, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is in use; give another --port" in refused(capsys, folder, "--port", port)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7"])
def test_where_other_machines_may_ask_there_must_be_a_key(folder, capsys, host):
    said = refused(capsys, folder, "--host", host)
    assert f"--host {host} can be reached from other machines, so a key is needed" in said
    assert "export SCU_TRAINER_API_KEY=$(openssl rand -hex 24)" in said


@pytest.mark.parametrize("given", [["--api_key", KEY], [f"--api-key={KEY}"], ["--api_key"]])
def test_a_key_is_no_argument(folder, capsys, given):
    said = refused(capsys, folder, *given)
    assert "every user of this machine; put it into SCU_TRAINER_API_KEY" in said and KEY not in said


@pytest.mark.parametrize(
    "key", ["", "sesame", "a key with some spaces", "ключ, который никто не знает"], ids=str.__len__
)
def test_a_key_that_is_none(folder, capsys, tmp_path, key):
    (tmp_path / "key").write_text(key + "\n")
    said = refused(capsys, folder, "--host", "0.0.0.0", "--api_key_file", tmp_path / "key")
    assert "must have 16 characters or more" in said and (not key or key not in said)


def test_a_key_file_that_is_not_there(folder, capsys, tmp_path):
    assert "cannot be read" in refused(capsys, folder, "--api_key_file", tmp_path / "none")


@pytest.mark.parametrize(
    "words, said",
    [
        (["--port", "70000"], "--port is 70000"),
        (["--host", "gpu-7"], "--host is 'gpu-7'; give an address of this machine"),
        (["--temperature", "-1", "--port", "0"], "temperature is -1.0; it must be above 0, or 0 for greedy answers"),
        (["--engine", "vllm"], "vllm is not installed; pip install vllm, or --engine transformers"),
    ],
)
def test_what_else_is_refused(folder, capsys, words, said):
    assert said in refused(capsys, folder, *words)


def test_a_model_that_is_none(tmp_path, capsys):
    assert "error: " in refused(capsys, tmp_path)


# -- vLLM --------------------------------------------------------------------------------------------------------------

ANSWERS = {"max_new_tokens": 512, "do_sample": None, "temperature": None, "top_p": None, "top_k": None,
           "repetition_penalty": None, "seed": 3}  # fmt: skip


def test_the_command_of_vllm():
    words = vllm_command("runs/x-merged", "x", "127.0.0.1", 8000, "bfloat16", ANSWERS, False, False)
    assert words == [
        *("vllm", "serve", "runs/x-merged", "--served-model-name", "x", "--host", "127.0.0.1", "--port", "8000"),
        *("--dtype", "bfloat16", "--seed", "3", "--allowed-origins", "[]", "--override-generation-config", "{}"),
        *("--load-format", "safetensors"),
    ]


def test_what_was_asked_for_goes_to_vllm():
    drawn = {**ANSWERS, "temperature": 0.7, "top_k": 20}
    words = vllm_command("m", "x", "::1", 1, "auto", drawn, True, True)
    assert json.loads(words[words.index("--override-generation-config") + 1]) == {"temperature": 0.7, "top_k": 20}
    assert "--trust-remote-code" in words and "--load-format" not in words
    greedy = vllm_command("m", "x", "::1", 1, "auto", {**ANSWERS, "do_sample": False}, False, False)
    assert json.loads(greedy[greedy.index("--override-generation-config") + 1]) == {"temperature": 0.0}


def test_vllm_needs_a_key_and_a_gpu(folder, capsys, monkeypatch):
    with_vllm(monkeypatch)
    assert "a key is needed" in refused(capsys, folder, "--engine", "vllm")
    assert "--use_cpu is for --engine transformers" in refused(capsys, folder, "--engine", "vllm", "--use_cpu")
    for kinds, engine in (((), "transformers"), (("mps",), "transformers"), (("cuda",), "vllm")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda kinds=kinds: "cuda" in kinds)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda kinds=kinds: "mps" in kinds)
        assert serve._chosen_engine(serve._parser().parse_args([str(folder)])) == engine


@pytest.fixture
def started(monkeypatch):
    """vLLM as if it were here: the commands that would start it, with the key that they would have."""
    with_vllm(monkeypatch)
    monkeypatch.setenv(serve.KEY_VARIABLE, KEY)
    monkeypatch.setenv(VLLM_KEY_VARIABLE, "")
    commands = []
    monkeypatch.setattr(os, "execvp", lambda file, words: commands.append((words, os.environ[VLLM_KEY_VARIABLE])))
    return commands


def test_vllm_gets_an_adapter_merged_and_the_key_by_its_environment(tmp_path, capsys, started):
    run = train(tmp_path, "mine")
    for said in ("merged into its base", "which was merged from this adapter"):
        main(["serve", str(run), "--engine", "vllm", "--port", "0"])
        assert said in capsys.readouterr().out
        words, key = started.pop()
        assert words[2:5] == [str(tmp_path / "mine-merged"), "--served-model-name", "mine"] and key == KEY
        assert KEY not in words and int(words[words.index("--port") + 1]) > 0
    assert serve.default_name(subject_of(str(run / "checkpoint-1"))) == "mine-checkpoint-1"
    assert serve.default_name(subject_of(str(tmp_path / "mine-merged"))) == "mine-merged"
    assert (tmp_path / "mine-merged" / "model.safetensors").is_file()
    other = train(tmp_path, "other", seed=7)
    capsys.readouterr()
    shutil.copytree(tmp_path / "mine-merged", tmp_path / "other-merged")
    assert "was not merged from this adapter; remove it, or serve it" in refused(capsys, other, "--engine", "vllm")


def test_vllm_gets_a_whole_model_as_it_is(folder, started):
    main(["serve", str(folder), "--engine", "vllm", "--port", "0", "--served_model_name", "mine"])
    words, _ = started.pop()
    assert words[2:5] == [str(folder), "--served-model-name", "mine"]
