"""``scripts/push_to_hf.py`` in a process of its own against a Hub on this machine, with connections that break.

Three tests start it from nothing, as a user does: what arrives, what is refused in one line, and what needs no token;
the others fork from a process that has imported everything."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scu_trainer.cli.main import main
from tests import processes
from tests.hub.runs import flags
from tests.hub.server import TOKEN, Faults, Repo, running

ROOT = Path(__file__).parents[2]
REPO = "me/tiny"
RESULTS = {
    *("training_config.json", "scu_config.json", "scu_metrics.json", "scu_history.json", "log_history.json"),
    *("memory_history.json", "curriculum.json"),
}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
ADAPTER = {"adapter_config.json", "adapter_model.safetensors", "README.md", *TOKENIZER, *RESULTS}
MERGED = {"config.json", "generation_config.json", "merge.json", "README.md", "model.safetensors.index.json"}


WITHOUT_WAITING = """
import sys, time
from scu_trainer.cli.publishing.push import main
wait = time.sleep
time.sleep = lambda seconds: wait(seconds / 50)
sys.exit(main(sys.argv[1:]))
"""
"""The same, where a second before the next try takes a fiftieth of it."""


@pytest.fixture(scope="module")
def shared(finished):
    with running() as hub:
        yield SimpleNamespace(**vars(finished), hub=hub)


@pytest.fixture(autouse=True)
def fresh(shared):
    shared.hub.repos.clear()
    shared.hub.blobs.clear()
    shared.hub.requests.clear()
    shared.hub.puts.clear()
    shared.hub.faults = Faults()
    shared.hub.repos["me/base"] = Repo()


def push(shared, *words, token=TOKEN, from_nothing=False, waits=True, **environment):
    program = [str(ROOT / "scripts" / "push_to_hf.py")] if waits else ["-c", WITHOUT_WAITING]
    command = [*program, *map(str, words)]
    around = {**os.environ, **shared.hub.environment(shared.folder / "home", token), **environment}
    if from_nothing:
        return subprocess.run([sys.executable, *command], env=around, capture_output=True, text=True, timeout=60)
    return processes.launch(command, environment=around, timeout=60)


def shards(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("model-*.safetensors")}


def commits(shared, branch: str = "main") -> list:
    return shared.hub.repos[REPO].commits[branch]


# -- what arrives ------------------------------------------------------------------------------------------------------


def test_an_adapter_arrives_byte_for_byte(shared):
    to_hub = ("--repo_id", REPO, "--base_model", "me/base", "--license", "mit")
    done = push(shared, shared.run, *to_hub, from_nothing=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{shared.hub.url}/{REPO}" and "as one commit" in done.stdout
    assert len(commits(shared)) == 1 and "there before" not in done.stdout
    files = shared.hub.repos[REPO].files()
    assert files.keys() == ADAPTER
    changed = {name for name in files if files[name] != (shared.run / name).read_bytes()}
    assert changed == {"README.md", "adapter_config.json", "training_config.json"}
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "me/base"
    configuration = json.loads(files["training_config.json"])["configuration"]
    assert configuration["output_dir"] == "[local]/run" and configuration["dataset"] == "[local]/documents.jsonl"
    together = b"".join(files.values())
    assert str(shared.folder).encode() not in together and b"hf_" not in together
    card = files["README.md"].decode()
    assert "base_model: me/base\n" in card and "license: mit\n" in card and f'from_pretrained("{REPO}")' in card


def test_merged_weights_arrive_and_a_second_call_sends_nothing(shared):
    done = push(shared, shared.run, "--merged", "--repo_id", REPO, "--private")
    assert done.returncode == 0, done.stderr
    files = shared.hub.repos[REPO].files()
    assert len(shards(shared.merged)) > 2
    assert files.keys() == {*MERGED, *TOKENIZER, *RESULTS, *shards(shared.merged)}
    assert all(files[name] == (shared.merged / name).read_bytes() for name in shards(shared.merged))
    assert shared.hub.repos[REPO].private
    sent = len(shared.hub.puts)
    again = push(shared, shared.merged, "--repo_id", REPO, "--json")
    assert again.returncode == 0 and json.loads(again.stdout)["is_changed"] is False
    assert len(shared.hub.puts) == sent and len(commits(shared)) == 1


def test_what_an_earlier_push_left_there_does_not_load_in_its_place(shared):
    """Readers take the base of an adapter_config.json, and model.safetensors before the index of many files."""
    left = {"adapter_config.json", "adapter_model.safetensors", "model.safetensors", "model-00001-of-00009.safetensors"}
    kept = {"notes.md", "eval.py", "pytorch_model.bin", "last-checkpoint/model.safetensors"}
    there = dict.fromkeys(left | kept | {"curriculum.json", "config.json"}, b"old")
    shared.hub.repos[REPO] = Repo(commits={"main": [{"sha": "1" * 40, "message": "earlier", "files": there}]})
    done = push(shared, shared.merged, "--repo_id", REPO)
    assert done.returncode == 0, done.stderr
    assert f"loaded instead of the pushed files: {', '.join(sorted(left))}; revision {'1' * 40} has" in done.stdout
    assert f"2 files were there before under these names: revision {'1' * 40} has them" in done.stdout
    assert shared.hub.repos[REPO].files().keys() == {*MERGED, *TOKENIZER, *RESULTS, *shards(shared.merged), *kept}
    assert commits(shared)[0]["files"] == there, "what was there is in the history"


def test_to_a_branch(shared, tmp_path):
    merged = shutil.copytree(shared.merged, tmp_path / "merged")
    (merged / "README.md").write_text("My own words.\n")
    done = push(shared, merged, "--repo_id", REPO, "--revision", "v2", "--commit_message", "second")
    assert done.returncode == 0 and "README.md was edited, and was sent as it is" in done.stdout, done.stderr
    assert shared.hub.repos[REPO].files("v2")["README.md"] == b"My own words.\n"
    assert [made["message"] for made in commits(shared, "v2")] == ["second"] and commits(shared) == []


def test_a_card_that_was_edited_on_the_hub_stays_until_one_is_edited_here(shared, tmp_path):
    to_hub = ("--repo_id", REPO, "--base_model", "me/base")
    assert push(shared, shared.run, *to_hub).returncode == 0
    commits(shared)[-1]["files"]["README.md"] += b"What I found out.\n"
    run = Path(shutil.copytree(shared.run, tmp_path / "run"))
    done = push(shared, run, *to_hub)
    assert done.returncode == 0 and "card: README.md on the Hub was written or edited by hand" in done.stdout
    assert shared.hub.repos[REPO].files()["README.md"].endswith(b"What I found out.\n")
    (run / "README.md").write_text("My own words.\n")
    assert push(shared, run, *to_hub).returncode == 0
    assert shared.hub.repos[REPO].files()["README.md"] == b"My own words.\n"


# -- what was pushed, by its id ----------------------------------------------------------------------------------------


def test_an_adapter_on_the_hub_is_used_by_its_id(shared, tmp_path, capsys):
    model = {path.name: path.read_bytes() for path in (shared.folder / "model").iterdir()}
    shared.hub.repos["me/base"] = Repo(commits={"main": [{"sha": "2" * 40, "message": "base", "files": model}]})
    assert push(shared, shared.run, "--repo_id", REPO, "--base_model", "me/base").returncode == 0
    documents = str(shared.folder / "documents.jsonl")
    scored = ["--against", "base", "--eval_dataset", documents, "--block_size", "32", "--json"]
    further = flags(shared.folder, "further", output_dir=tmp_path / "further", model_name_or_path=REPO)
    words = [["eval", REPO, *scored], ["merge", REPO, "--json"], ["train", *further]]
    code = f"import os; from scu_trainer.cli.main import main; os.chdir({str(tmp_path)!r}); "
    code += f"assert not any(main(words) for words in {words})"
    around = {**os.environ, **shared.hub.environment(shared.folder / "home")}
    done = processes.launch(["-c", code], environment=around)
    assert done.returncode == 0, done.stderr
    assert main(["eval", str(shared.run), *scored]) == 0
    by_id, by_path = json.loads(done.stdout.splitlines()[0]), json.loads(capsys.readouterr().out)
    assert by_id["model"]["bpt"] == by_path["model"]["bpt"] and by_id["against"][0]["name"] == "me/base"
    assert by_id["against"][0]["difference"]["value"] == by_path["against"][0]["difference"]["value"] != 0
    assert (tmp_path / "tiny-merged/model.safetensors").is_file()
    assert json.loads((tmp_path / "further/adapter_config.json").read_text())["base_model_name_or_path"] == "me/base"


# -- what breaks -------------------------------------------------------------------------------------------------------


def test_an_upload_cut_in_the_middle_is_sent_again(shared):
    shared.hub.faults.drop_put = (2,)
    done = push(shared, shared.merged, "--repo_id", REPO, waits=False)
    assert done.returncode == 0 and "Retrying in 1s" in done.stderr and "signature" not in done.stderr
    files = shared.hub.repos[REPO].files()
    assert all(files[name] == (shared.merged / name).read_bytes() for name in shards(shared.merged))
    assert len(commits(shared)) == 1


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"fail_create": [503], "fail_commit": [0]}, ["the Hub failed (503); again in 1 s", "broke"]),
        ({"fail_commit": [412]}, ["another commit to the repository came first; again in 1 s"]),
        ({"fail_commit": [429]}, ["too many requests; again in 1 s"]),
        ({"lose_answer": True}, ["broke (Server disconnected without sending a response); again in 1 s"]),
    ],
    ids=["cut", "overtaken", "busy", "lost answer"],
)
def test_what_the_library_does_not_repeat_is_repeated_here(shared, faults, said):
    vars(shared.hub.faults).update(faults)
    done = push(shared, shared.merged, "--repo_id", REPO, waits=False)
    assert done.returncode == 0, done.stderr
    assert all(line in done.stderr for line in said) and len(done.stderr.splitlines()) == len(said)
    assert len(commits(shared)) == 1 and shards(shared.merged) <= shared.hub.repos[REPO].files().keys()


def test_a_hub_that_says_nothing_is_given_up_on_and_asked_again(shared):
    shared.hub.faults.stall_s = [30.0]
    code = "from scu_trainer.models.loading import hub_errors; hub_errors.STALL_S = 0.3\n" + WITHOUT_WAITING
    around = {**os.environ, **shared.hub.environment(shared.folder / "home")}
    done = processes.launch(["-c", code, shared.merged, "--repo_id", REPO], environment=around, timeout=120)
    assert done.returncode == 0 and "timed out); again in 1 s" in done.stderr, done.stderr
    assert len(commits(shared)) == 1


def test_a_second_call_sends_only_what_is_missing(shared):
    shared.hub.faults.refuse_put = (3,)
    broken = push(shared, shared.merged, "--repo_id", REPO)
    assert broken.returncode == 2 and commits(shared) == [] and "Traceback" not in broken.stderr
    there = set(shared.hub.blobs)
    assert there
    shared.hub.puts.clear()
    assert push(shared, shared.merged, "--repo_id", REPO).returncode == 0
    large = set(shared.hub.blobs)
    assert len(shared.hub.puts) == len(large - there) < len(large) and len(commits(shared)) == 1


# -- what is refused ---------------------------------------------------------------------------------------------------


def one_line(done, text: str) -> None:
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert re.search(text, done.stderr), done.stderr


def test_a_wrong_token_is_one_line_and_appears_nowhere(shared):
    wrong = "hf_" + "WrongWrongWrong0123456789abcdefg"
    before = {path: path.stat().st_mtime_ns for path in shared.folder.rglob("*")}
    for words in ([], ["--token", wrong]):
        token = None if words else wrong
        done = push(shared, shared.merged, "--repo_id", REPO, *words, token=token, from_nothing=not words)
        one_line(done, "does not accept the token; make one with write access")
        assert wrong not in done.stdout + done.stderr
    written = [
        path for path in shared.folder.rglob("*") if path.is_file() and before.get(path) != path.stat().st_mtime_ns
    ]
    assert not any(wrong in path.read_text(errors="replace") for path in written)
    assert REPO not in shared.hub.repos


def test_refusals_of_the_hub_are_one_line_each(shared):
    shared.hub.faults.create_status = 403
    refused = r"may not write to me/tiny \(You don't have the rights\); use one with write access to me"
    one_line(push(shared, shared.merged, "--repo_id", REPO), refused)
    shared.hub.faults.create_status = None
    shared.hub.repos[REPO] = Repo(private=False)
    one_line(push(shared, shared.merged, "--repo_id", REPO, "--private"), "already exists and is public")
    one_line(
        push(shared, shared.run, "--repo_id", REPO, "--base_model", "me/none"),
        "the base me/none is not on the Hub, .* Add --merged",
    )
    one_line(push(shared, shared.merged, "--repo_id", REPO, HF_HUB_OFFLINE="1"), "HF_HUB_OFFLINE is set")
    assert commits(shared) == [] and shared.hub.puts == []


def test_a_dry_run_asks_nobody_and_needs_no_token(shared):
    words = ("--merged", "--repo_id", REPO, "--dry_run", "--json")
    done = push(shared, shared.run, *words, token=None, from_nothing=True)
    assert done.returncode == 0 and shared.hub.requests == [], done.stderr
    promised = json.loads(done.stdout)["files"]
    assert push(shared, shared.run, "--merged", "--repo_id", REPO).returncode == 0
    assert {name: len(content) for name, content in shared.hub.repos[REPO].files().items()} == promised
