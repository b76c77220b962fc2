"""What is hidden, what must stay, and that a run with tokens in reach leaves none of them anywhere."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from transformers import TrainingArguments

from scu_trainer import secrets
from scu_trainer.cli import train
from scu_trainer.cli.main import guarded
from scu_trainer.errors import DataError
from scu_trainer.run_files import History, RunStatus, write_json, write_text
from scu_trainer.secrets import HIDDEN, Secret, find_secret, redact, redact_data, remember, remember_environment
from scu_trainer.train.run_directory.logs import run_log
from scu_trainer.train.trainer import SCUTrainer
from tests import tiny

FROM_FLAG = "hf_" + "FlagToken0123456789abcdefghijkl"
FROM_ENVIRONMENT = "hf_" + "EnvToken0123456789abcdefghijklmn"
HEX_KEY = "0123456789abcdef0123456789abcdef01234567"
PASSWORD = "hunter2-and-more"
ALL = (FROM_FLAG, FROM_ENVIRONMENT, HEX_KEY, PASSWORD)


@pytest.fixture(autouse=True)
def known(monkeypatch, tmp_path_factory):
    """No secret of this machine, and none that another test has made known."""
    monkeypatch.setattr(secrets, "_known", set())
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path_factory.mktemp("login") / "token"))


# -- what is a secret --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"token {FROM_FLAG}, sent", "token ***, sent"),
        ("sk-proj-Ab1" + "c" * 24, "***"),
        ("key=ghp_" + "a1B2" * 9, "key=***"),
        ("github_pat_" + "a1B2" * 9, "***"),
        ("AKIA" + "ABCD1234" * 2, "***"),
        ("AIza" + "a1B2c" * 7, "***"),
        ("xoxb-123456789012-abcdef", "***"),
        ("glpat-" + "a1B2" * 5, "***"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2ln-bmF0_dXJl", "***"),
        ("https://user:hunter2@host/x@y", "https://***@host/x@y"),
        ("postgres://:hunter2@host", "postgres://***@host"),
        ("https://" + "a1B2" * 8 + "@host/x", "https://***@host/x"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("{'authorization': 'Basic dTpw'}", "{'authorization': 'Basic ***'}"),
    ],
)
def test_credentials_are_hidden_by_their_shape(text, left):
    assert redact(text) == left


@pytest.mark.parametrize(
    "text",
    [
        "54f8fe1b0c7d2a9e3f4a5b6c7d8e9f0011223344",  # a commit
        "sha256 e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "fingerprint 5f2b6c1d9e8a7f30; xxh3 9a1b2c3d4e5f6071",
        "https://host:8080/a@b and http://localhost:6006",
        "git@github.com:owner/name.git, user@host, owner@example.com",
        "hf_internal_testing/tiny-random and hf_transfer",
        "task-specific-sequence-to-sequence-model and sk-learn-with-a-long-name-of-words",
        "runs/run-2/checkpoint-500, /home/me/.cache/huggingface, 2026-01-02T03:04:05.678+00:00",
        "<|endoftext|> [PAD] [MASK] tokens 123456789012345678901234567890",
        "the key token of a password",
    ],
)
def test_hashes_paths_and_words_stay(text):
    assert redact(text) == text
    assert (
        redact_data({"pad_token": "<|endoftext|>", "sort_key": "difficulty", "max_tokens": text})["max_tokens"] == text
    )


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        *[
            (name, True)
            for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "MY_PASSPHRASE")
        ],
        *[(name, True) for name in ("hub_token", "GITHUB_TOKEN_2", "OPENAI_APIKEY", "SSH_PRIVATE_KEY")],
        *[(name, False) for name in ("HF_TOKEN_PATH", "TOKENIZERS_PARALLELISM", "KEYMAP", "MAX_TOKENS", "CACHE_KEY")],
        *[(name, False) for name in ("SECRET_NAME", "PATH", "MONKEY", "TOKEN_CAP")],
    ],
)
def test_names_say_what_is_secret(name, is_secret):
    assert secrets.is_secret_name(name) is is_secret


def test_known_values_are_hidden_wherever_they_stand(tmp_path):
    stored = tmp_path / "token"
    stored.write_text("stored-by-a-login-1\n")
    environment = {
        "WANDB_API_KEY": HEX_KEY,
        "DB_PASSWORD": PASSWORD,
        "HF_TOKEN_PATH": str(stored),
        "LANG": "en_US.UTF-8",
    }
    remember_environment(environment)
    text = f"{HEX_KEY} ({PASSWORD}) {environment['HF_TOKEN_PATH']} stored-by-a-login-1 en_US.UTF-8"
    assert redact(text) == f"*** (***) {stored} *** en_US.UTF-8"
    assert redact("54f8fe1b0c7d2a9e3f4a5b6c7d8e9f0011223344") != HIDDEN


def test_the_longer_of_two_known_values_goes_first():
    remember("first-part-1", "first-part-1/second")
    assert redact("first-part-1/second") == HIDDEN


@pytest.mark.parametrize(
    "value", ["", "true", "dummy", "a1B2c3D", "disabled", "12345678", "REPLACEME", "/run/secrets/x"]
)
def test_short_values_words_and_paths_are_not_hidden(value):
    remember_environment({"MY_TOKEN": value, "HF_TOKEN_PATH": "/nowhere"})
    assert redact(f"a {value} b /run/secrets/x") == f"a {value} b /run/secrets/x"


def test_a_key_without_a_purpose_must_look_like_one():
    remember_environment(
        {"CACHE_KEY": "linux-py311-build-1", "ODD_KEY": "a1b2c3d4e5f6a7b8c9", "HF_TOKEN_PATH": "/nowhere"}
    )
    assert redact("linux-py311-build-1 a1b2c3d4e5f6a7b8c9") == "linux-py311-build-1 ***"


def test_nested_data_are_hidden_under_their_names():
    data = {"comet": {"api_key": "whatever", "on": True}, "urls": ["s3://a:b@c", 1.5, None], "steps": (1, 2)}
    assert redact_data(data) == {
        "comet": {"api_key": HIDDEN, "on": True},
        "urls": ["s3://***@c", 1.5, None],
        "steps": [1, 2],
    }
    assert data["comet"]["api_key"] == "whatever"
    assert (find_secret(data), find_secret({"a": (1, 2), "b": {"c": ["d"]}})) == ("comet", None)


def test_a_secret_works_and_is_in_no_copy_on_disk():
    token = secrets.secret(FROM_FLAG)
    assert token == FROM_FLAG and f"Bearer {token}" == f"Bearer {FROM_FLAG}" and isinstance(token, str)
    assert copy.deepcopy(token) == copy.copy(token) == FROM_FLAG
    assert repr([token]) == "['***']"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps([token, 1], protocol)) == [None, 1]
    assert secrets.secret(None) is None


# -- logs, messages, files ---------------------------------------------------------------------------------------------


def test_the_log_of_a_run_hides_arguments_and_tracebacks(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", HEX_KEY)
    with run_log() as log:
        logging.getLogger("scu_trainer").warning("before there is a folder: %s", FROM_FLAG)
        log.open(tmp_path)
        try:
            raise OSError(f"https://user:{PASSWORD}@host said no")
        except OSError:
            logging.getLogger("transformers").exception("with %s", HEX_KEY)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(f"careful with {FROM_FLAG}", UserWarning, stacklevel=1)
    written = (tmp_path / "logs" / "train.log").read_text()
    assert "https://***@host said no" in written and "careful with ***" in written and "with ***" in written
    printed = capsys.readouterr().err
    assert "before there is a folder: ***" in printed
    assert not any(value in written + printed for value in ALL)


def test_strangers_are_heard_without_secrets(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a program that has not set up logging
    before = logging.lastResort
    with run_log():
        logging.getLogger("a stranger").warning("took %s", FROM_FLAG)
    assert capsys.readouterr().err == "took ***\n"
    assert logging.lastResort is before


def test_messages_of_the_command_line_hide_them(capsys, monkeypatch):
    monkeypatch.setenv("DB_PASSWORD", PASSWORD)

    def command(arguments):
        raise DataError(f"cannot read s3://me:{PASSWORD}@host with {PASSWORD}")

    assert guarded(command)([]) == 2
    assert capsys.readouterr().err == "error: cannot read s3://***@host with ***\n"


def test_a_traceback_that_reaches_the_interpreter_hides_them():
    code = (
        "import threading; from scu_trainer.cli.main import guarded\n"
        f"def fail(*_): raise RuntimeError('with {FROM_FLAG}')\n"
        "guarded(lambda _: 0)([])\n"
        "thread = threading.Thread(target=fail); thread.start(); thread.join()\n"
        "guarded(fail)([])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("RuntimeError: with ***") == 2 and FROM_FLAG not in done.stderr


def test_run_files_hide_them(tmp_path):
    write_json(tmp_path / "a.json", {"deep": [{"text": f"x {FROM_FLAG}"}], "commit": HEX_KEY})
    write_text(tmp_path / "b.txt", f"x {FROM_FLAG}")
    RunStatus(tmp_path / "run.json").update(status="failed", error=f"OSError: https://me:{PASSWORD}@host")
    with History(tmp_path / "h.json") as history:
        history.append({"step": 1, "reason": FROM_FLAG})
    assert json.loads((tmp_path / "a.json").read_text()) == {"deep": [{"text": "x ***"}], "commit": HEX_KEY}
    assert (tmp_path / "b.txt").read_text() == "x ***"
    assert json.loads((tmp_path / "run.json").read_text())["error"] == "OSError: https://***@host"
    assert json.loads((tmp_path / "h.json").read_text()) == [{"step": 1, "reason": HIDDEN}]


# -- a whole run -------------------------------------------------------------------------------------------------------


@pytest.fixture
def flags(tmp_path, monkeypatch) -> list[str]:
    """A run of two steps that is given a token, with more of them in its environment."""
    monkeypatch.setenv("HF_TOKEN", FROM_ENVIRONMENT)
    monkeypatch.setenv("WANDB_API_KEY", HEX_KEY)
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": f"The cat sat on mat {i}. " * 6}) + "\n" for i in range(12)))
    options = {
        "model_name_or_path": tiny.saved_llama(tmp_path / "model"),
        "dataset": documents,
        "block_size": 32,
        "max_steps": 2,
        "save_steps": 2,
        "per_device_train_batch_size": 2,
        "output_dir": tmp_path / "run",
        "cache_dir": tmp_path / "cache",
        "use_cpu": "true",
        "hub_token": FROM_FLAG,
    }
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def holding_secrets(folder: Path) -> list[str]:
    """Files below ``folder`` with a secret in them, also inside of what torch.save has packed."""
    return [str(path) for path in folder.rglob("*") if path.is_file() and any(s.encode() in content(path) for s in ALL)]


def content(path: Path) -> bytes:
    if not zipfile.is_zipfile(path):
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        return b"".join(archive.read(name) for name in archive.namelist())


def test_a_run_with_tokens_in_reach_writes_none_of_them(flags, tmp_path, capsys):
    assert train.main(flags) == 0
    printed = capsys.readouterr()
    assert not any(value in printed.out + printed.err for value in ALL)
    run = tmp_path / "run"
    packed = torch.load(run / "checkpoint-2" / "training_args.bin", weights_only=False)
    assert isinstance(packed, TrainingArguments) and packed.hub_token is None and packed.max_steps == 2
    assert (run / "logs" / "train.log").is_file() and list(run.rglob("events.out.tfevents*"))
    assert holding_secrets(run) == []


def test_the_printed_configuration_has_no_token_and_can_be_read_back(flags, tmp_path, capsys):
    assert train.main([*flags, "--print_config"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert "hub_token" not in resolved and resolved["max_steps"] == 2
    config = tmp_path / "again.yaml"
    config.write_text(yaml.safe_dump(resolved))
    assert train.main(["--config", str(config), "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == resolved


def test_the_printed_configuration_hides_what_a_run_would_refuse(flags, capsys):
    assert train.main([*flags, "--run_name", f"https://me:{PASSWORD}@example.com", "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["run_name"] == "https://***@example.com"


@pytest.mark.parametrize("name", ["dataset", "model_name_or_path", "run_name"])
def test_credentials_in_a_name_or_path_are_refused(flags, tmp_path, capsys, name):
    """They would stand in the model card, in adapter_config.json and on TensorBoard."""
    pairs = zip(flags[::2], flags[1::2], strict=True)
    others = [word for flag, value in pairs if flag != f"--{name}" for word in (flag, value)]
    assert train.main([*others, f"--{name}", f"https://me:{PASSWORD}@example.com/x"]) == 2
    message = capsys.readouterr().err
    assert f"{name} contains a password or token (https://***@example.com/x)" in message and PASSWORD not in message
    assert not (tmp_path / "run").exists()


def test_a_wrong_value_is_not_repeated_if_it_is_a_token(flags, capsys):
    assert train.main([*flags, "--max_steps", FROM_FLAG]) == 2
    assert "invalid int value: '***'" in capsys.readouterr().err


def test_the_trainer_alone_keeps_the_token_out_of_its_checkpoints(tmp_path):
    args = TrainingArguments(tmp_path, use_cpu=True, report_to="none", hub_token=FROM_FLAG)
    trainer = SCUTrainer(model=tiny.llama(), args=args, train_dataset=[{"input_ids": [1], "labels": [1]}])
    assert trainer.args.hub_token == FROM_FLAG and isinstance(trainer.args.hub_token, Secret)
    trainer.save_model()
    assert (tmp_path / "training_args.bin").is_file() and holding_secrets(tmp_path) == []
