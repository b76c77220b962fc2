"""``push_to_hub`` with the real command against a Hub on this machine: whole checkpoints, the card at the end, and a
run that goes on when the Hub does not."""

from __future__ import annotations

import json
import os
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
from transformers.trainer_utils import HubStrategy

from scu_trainer.cli.publishing import sharing
from scu_trainer.cli.train import main
from scu_trainer.errors import HubError
from scu_trainer.hub.push import CARD_KEPT
from scu_trainer.models.loading.hub_errors import hub_line
from scu_trainer.run_files import read_json
from scu_trainer.train.checkpoints.pushing import Pushes
from tests import processes, tiny
from tests.hub.runs import documents, flags
from tests.hub.server import Repo, running

MODEL = {"config.json", "generation_config.json", "model.safetensors"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
TRAIN_ALL = """
import json, sys
from scu_trainer.cli.publishing import sharing
from scu_trainer.cli.train import main
from scu_trainer.errors import HubError
print(json.dumps([main(words) for words in json.loads(sys.argv[1])]))
"""
RUNS = {
    "kept": {
        "hub_strategy": "checkpoint",
        "hub_always_push": "true",
        "save_total_limit": 1,
        "hub_revision": "new",  # a branch that is not there yet
    },
    "end": {"hub_strategy": "end", "hub_private_repo": "true"},
    "every": {"hub_strategy": "every_save", "hub_always_push": "true"},
}


WRONG = "hf_" + "WrongWrongWrong0123456789abcdefg"
REFUSED = {
    "public": {"hub_private_repo": "true"},
    "wrong": {"hub_token": WRONG},
    "torn": {"hub_token": "hf_ torn"},
}


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    """Full-tuning runs in one process, which has the address of the Hub from its start; one of them is refused what it
    sends first."""
    folder = tmp_path_factory.mktemp("pushed")
    tiny.saved_llama(folder / "model")
    documents(folder / "documents.jsonl")
    common = {"tuning": "full", "push_to_hub": "true", "max_steps": 3}
    calls = [flags(folder, name, hub_model_id=f"me/{name}", **common, **own) for name, own in (RUNS | REFUSED).items()]
    with running() as hub:
        hub.repos["me/public"] = Repo()
        hub.faults.refuse_repo = ("me/every", 1)
        environment = {**os.environ, **hub.environment(folder / "home")}
        done = processes.launch(["-c", TRAIN_ALL, json.dumps(calls)], environment=environment, timeout=120)
        assert done.returncode == 0, done.stderr
        yield SimpleNamespace(folder=folder, hub=hub, done=done)


def commits(pushed, name: str) -> list[dict]:
    return pushed.hub.repos[f"me/{name}"].commits[RUNS[name].get("hub_revision", "main")]


def test_every_save_sends_the_model_of_each_whole_checkpoint(pushed):
    """The first push is refused."""
    *saves, last = commits(pushed, "every")
    assert [made["message"] for made in saves] == [f"Training in progress, step {step}" for step in (2, 3)]
    for step, made in enumerate(saves, 2):
        assert made["files"].keys() == MODEL | TOKENIZER
        checkpoint = pushed.folder / "every" / f"checkpoint-{step}"
        assert all(made["files"][name] == (checkpoint / name).read_bytes() for name in MODEL)
    assert len({made["files"]["model.safetensors"] for made in saves}) == 2
    assert last["message"] == "End of training"


def test_the_last_push_holds_the_card_and_nothing_that_stays_here(pushed):
    for name in ("every", "end"):
        files = commits(pushed, name)[-1]["files"]
        card = files["README.md"].decode()
        assert "held out from training" in card and f'from_pretrained("me/{name}")' in card
        assert not [file for file in files if file.startswith(("_", "logs", "checkpoint")) or file.endswith(".bin")]
        assert str(pushed.folder).encode() not in b"".join(files.values())
    assert len(commits(pushed, "end")) == 1 and pushed.hub.repos["me/end"].private


def test_a_checkpoint_that_is_rotated_away_arrives_whole(pushed):
    *saves, _ = commits(pushed, "kept")
    assert len(saves) == 3 and not (pushed.folder / "kept" / "checkpoint-1").exists()
    for step, made in enumerate(saves, 1):
        inside = {
            name.removeprefix("last-checkpoint/") for name in made["files"] if name.startswith("last-checkpoint/")
        }
        assert {"manifest.json", "optimizer.pt", "trainer_state.json", *MODEL} <= inside
        assert json.loads(made["files"]["last-checkpoint/trainer_state.json"])["global_step"] == step
    assert not list((pushed.folder / "kept").glob("_pushing*"))


def test_a_push_that_fails_is_told_and_costs_the_run_nothing(pushed):
    run = pushed.folder / "every"
    status = read_json(run / "run.json")
    assert status["status"] == "finished" and status["step"] == 3
    assert len(status["notices"]) == 1 and "checkpoint-1 was not pushed to the Hub: " in status["notices"][0]
    assert "checkpoint-1 was not pushed" in pushed.done.stderr and "Traceback" not in pushed.done.stderr
    assert (run / "checkpoint-1" / "manifest.json").is_file()


def test_what_the_hub_will_not_take_is_told_before_anything_is_loaded(pushed):
    assert json.loads(pushed.done.stdout.splitlines()[-1]) == [0] * len(RUNS) + [2] * len(REFUSED)
    refusals = [
        line for line in pushed.done.stderr.splitlines() if "push_to_hub would fail, so nothing was trained" in line
    ]
    told = ("me/public already exists and is public", "does not accept the token", "the token holds a space")
    assert len(refusals) == len(told) and all(text in line for text, line in zip(told, refusals, strict=True))
    assert WRONG not in pushed.done.stderr + pushed.done.stdout and "hf_ torn" not in pushed.done.stderr
    assert pushed.hub.repos["me/public"].commits["main"] == []
    assert not any((pushed.folder / name).exists() for name in REFUSED) and "me/wrong" not in pushed.hub.repos


def test_a_machine_without_a_hub_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", WRONG)
    assert main(["--push_to_hub", "true", "--tuning", "full", "--output_dir", str(tmp_path / "run")]) == 2
    assert "nothing was trained: HF_HUB_OFFLINE is set" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_an_adapter_of_a_local_base_is_refused_before_anything_is_loaded(tmp_path, capsys):
    assert main(["--push_to_hub", "true", "--tuning", "lora", "--output_dir", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert "push_to_hub would send an adapter of the embedded base" in told and "--merged" in told
    assert not (tmp_path / "run").exists()


def test_the_base_of_an_adapter_that_is_continued_with_is_the_one_that_counts(tmp_path, capsys):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "base")}))
    words = ["--push_to_hub", "true", "--adapter_name_or_path", str(tmp_path), "--output_dir", str(tmp_path / "run")]
    assert main(words) == 2
    assert f"push_to_hub would send an adapter of {tmp_path / 'base'}, but" in capsys.readouterr().err


def test_the_second_try_of_the_last_push_is_as_private_as_the_first(finished):
    wanted = {"hub_model_id": "model", "hub_revision": "of today", "hub_private_repo": True, "hub_token": WRONG}
    with pytest.raises(HubError) as failed:
        sharing._push(finished.run, SimpleNamespace(**wanted))
    command = f"scu-trainer push {finished.run} --repo_id OWNER/model --revision 'of today' --private"
    assert str(failed.value).endswith(f"When that is fixed: {command}")


@pytest.mark.parametrize("error", [httpx2.ReadTimeout("timed out"), SimpleNamespace(status_code=503)], ids=str)
def test_a_push_that_fails_never_advises_to_train_again(finished, monkeypatch, error):
    """``run the same command again``, which is the advice to who pushes."""
    if not isinstance(error, Exception):
        answered, error = error, OSError("Service Unavailable")
        error.response = answered
    line = hub_line(error, "me/model")
    assert "run the same command again" in line

    def fail(*arguments, **options):
        raise HubError(line)

    monkeypatch.setattr(sharing, "push", fail)
    wanted = {"hub_model_id": "me/model", "hub_revision": None, "hub_private_repo": None, "hub_token": WRONG}
    with pytest.raises(HubError, match=r"but not pushed: .*When that is fixed: scu-trainer push") as failed:
        sharing._push(finished.run, SimpleNamespace(**wanted))
    pushes, job = Pushes(SimpleNamespace(hub_model_id="me/model")), Future()
    job.set_exception(error)
    pushes._finished(job, finished.folder / "_pushing-checkpoint-1", "checkpoint-1")
    assert "checkpoint-1 was not pushed to the Hub: the" in pushes.notices[0]
    assert "same command" not in str(failed.value) + pushes.notices[0]


def test_the_last_push_says_what_it_replaced_and_removed(monkeypatch, capsys):
    sent = {"url": "URL", "is_changed": True, "is_card_kept": True, "before": "1234"}
    sent |= {"replaced": ["config.json"], "removed": ["adapter_config.json"]}
    monkeypatch.setattr(sharing, "facts_of", lambda run: (SimpleNamespace(base=None, is_adapter=False), None))
    monkeypatch.setattr(sharing, "collect_upload", lambda *arguments: None)
    monkeypatch.setattr(sharing, "push", lambda *arguments, **options: sent)
    wanted = {"hub_model_id": "me/model", "hub_revision": None, "hub_private_repo": None, "hub_token": WRONG}
    sharing._push(Path("run"), SimpleNamespace(**wanted))
    assert capsys.readouterr().out.splitlines() == [
        "pushed: URL",
        CARD_KEPT,
        "1 file was there before under these names: revision 1234 has them as they were",
        "removed, because they would be loaded instead of the pushed files: adapter_config.json; revision 1234 has "
        "them as they were",
    ]


def test_a_full_disk_costs_the_push_alone(tmp_path):
    """Where the checkpoint cannot be held, here because it is gone."""
    control = SimpleNamespace(on_push_begin=lambda *arguments: None)
    arguments = SimpleNamespace(hub_strategy=HubStrategy.EVERY_SAVE, hub_always_push=True, hub_token=None)
    trainer = SimpleNamespace(
        is_world_process_zero=lambda: True, push_in_progress=None, args=arguments, callback_handler=control
    )
    trainer.state = trainer.control = None
    pushes = Pushes(trainer)
    pushes.begin(str(tmp_path / "checkpoint-7"))
    assert len(pushes.notices) == 1 and pushes.notices[0].startswith("checkpoint-7 was not pushed to the Hub: ")
