"""report_to: wandb without a key ends before anything is read, and not when training begins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scu_trainer.train.preflight import surroundings
from scu_trainer.train.preflight.surroundings import missing_wandb_login
from tests.train.test_preflight_checks import ids, job_of

pytest.importorskip("wandb.sdk.lib.wbauth")

KEY = "0123456789" * 4


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """Of somebody who never logged in, and has no terminal to be asked at."""
    from wandb.errors import term

    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(term, "can_use_terminput", lambda: False)
    return tmp_path


def test_without_a_key_it_is_an_error(home):
    found = list(surroundings.before_loading(job_of(report_to="wandb", output_dir=home / "run")))
    assert ids(found) == ["no-wandb-login"]
    assert "no API key for https://" in found[0].what and "WANDB_MODE=offline" in found[0].fix
    assert ids(surroundings.before_loading(job_of(report_to="none", output_dir=home / "run"))) == []


@pytest.mark.parametrize("mode", ["offline", "disabled", "dryrun"])
def test_nothing_is_needed_without_the_network(monkeypatch, mode):
    monkeypatch.setenv("WANDB_MODE", mode)
    assert missing_wandb_login() is None


def test_a_key_of_the_environment_is_enough(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert missing_wandb_login() is None
    monkeypatch.setenv("WANDB_API_KEY", "short")
    assert "its API key is refused: API key must have 40" in str(missing_wandb_login())


def test_a_key_that_was_stored_is_enough_for_its_host(home, monkeypatch):
    (home / ".netrc").write_text(f"machine wandb.example.com\n  login user\n  password {KEY}\n")
    (home / ".netrc").chmod(0o600)
    assert "no API key" in str(missing_wandb_login())
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com")
    assert missing_wandb_login() is None


@pytest.mark.parametrize("place", [".config/wandb", "wandb"])
def test_a_settings_file_may_say_offline(home, capsys, place):
    (home / place).mkdir(parents=True)
    (home / place / "settings").write_text("[default]\nmode = offline\n")
    assert missing_wandb_login() is None
    assert "".join(capsys.readouterr()) == ""


def test_who_can_be_asked_is_not_refused(monkeypatch):
    from wandb.errors import term

    monkeypatch.setattr(term, "can_use_terminput", lambda: True)
    assert missing_wandb_login() is None


def test_a_mode_that_is_none_is_named(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "banana")
    found = str(missing_wandb_login())
    assert "mode Input should be 'online'" in found and "\n" not in found
