"""``scu-trainer chat`` and ``generate`` as a person, a pipe and a kill have them."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from scu_trainer.cli.main import main as cli
from scu_trainer.cli.talking.chat import ChatSession, _load_second
from scu_trainer.cli.talking.generate import AnswersFile, _write_all
from scu_trainer.errors import SettingsError
from scu_trainer.settings import ModelSettings
from scu_trainer.talk.answers import AnswerSettings
from scu_trainer.talk.model import load_talker
from scu_trainer.talk.prompts import PromptRow
from tests import processes, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny.saved_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def talker(folder):
    return load_talker("tiny", ModelSettings(model_name_or_path=str(folder), tuning="full", dtype="float32"))


class Screen(io.StringIO):
    """A terminal on which lines are typed."""

    def __init__(self, monkeypatch, *lines: str) -> None:
        super().__init__()
        left = iter(lines)

        def typed(prompt: str) -> str:
            try:
                return next(left)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", typed)


@pytest.mark.parametrize("is_base", [True, False])
def test_a_base_is_asked_as_what_was_tuned_from_it(talker, monkeypatch, is_base):
    monkeypatch.setattr("scu_trainer.cli.talking.chat.talker", lambda who: replace(talker))
    second = _load_second(replace(talker, answers_plain_text=True), SimpleNamespace(word=None, name="other"), is_base)
    assert second.answers_plain_text == is_base


@pytest.mark.parametrize("changes", [{}, {"init_lora_weights": "pissa"}, {"bias": "all"}])
def test_a_base_is_the_adapter_turned_off_where_that_is_the_base(talker, monkeypatch, changes):
    adapter = replace(talker, model=tiny.lora(tiny.llama(), **changes))
    monkeypatch.setattr("scu_trainer.cli.talking.chat.talker", lambda who: replace(talker))
    second = _load_second(adapter, SimpleNamespace(word="base", name="other"), is_base=True)
    assert (second.model is adapter.model) == (not changes)


def chat(talkers, screen, system: str = "") -> ChatSession:
    return ChatSession(talkers, AnswerSettings(max_new_tokens=6), system, io.StringIO(), screen, is_terminal=True)


def test_a_conversation_with_its_commands(talker, monkeypatch, tmp_path):
    place = tmp_path / "said.jsonl"
    screen = Screen(monkeypatch, "hello", "and now?", f"/save {place}", f"/save {place}", "/rest", "/help",
                    "/system be brief", "again", "/reset", "/exit", "never read")  # fmt: skip
    one = chat([talker], screen)
    assert one.run() == 0
    said = screen.getvalue()
    turns = [json.loads(line) for line in place.read_text().splitlines()]
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 2 and turns[2]["content"] == "and now?"
    assert "said.jsonl already exists" in said and "/rest is not a command" in said and "did you mean 'reset'" in said
    assert "greedy: each token is the most likely one" in said and "system message: be brief" in said
    assert "tokens, the first after" in said and "per second" in said
    assert one.conversations == [[{"role": "system", "content": "be brief"}]]


def test_two_models_answer_after_each_other_and_remember_their_own(talker, monkeypatch, tmp_path):
    screen = Screen(monkeypatch, "hello", f"/save {tmp_path / 'x.jsonl'}")
    one = chat([talker, talker], screen)
    one.run()
    assert screen.getvalue().count("[tiny]") == 2
    assert one.conversations[0] == one.conversations[1] and one.conversations[0] is not one.conversations[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x-1.jsonl", "x-2.jsonl"]


def test_ctrl_c_stops_the_answer_and_not_the_chat(talker, monkeypatch):
    screen = Screen(monkeypatch, "hello", "/exit")
    one = chat([talker], screen)
    real, count = one._say, []

    def interrupted(text):
        real(text)
        count.append(text)
        if len(count) == 2:  # the opening lines, and the first piece of the answer
            raise KeyboardInterrupt

    monkeypatch.setattr(one, "_say", interrupted)
    assert one.run() == 0 and "[stopped]" in screen.getvalue()
    assert [turn["role"] for turn in one.conversations[0]] == ["user", "assistant"]


def test_what_does_not_fit_is_said(talker, monkeypatch):
    long = "word " * 40
    screen = Screen(monkeypatch, long, long, long, "x " * 500)
    one = chat([talker], screen)
    one.run()
    said = screen.getvalue()
    assert "the oldest 2 messages no longer fit and are left out" in said
    assert "error: a prompt of" in said and one.conversations[0][-1]["role"] == "assistant"


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def program(*words: object) -> list[str]:
    return ["-m", "scu_trainer.cli.main", *map(str, words)]


def test_from_a_pipe_only_the_answers_are_printed(folder):
    """By a program that starts from nothing, as a user's does; the others here are forks. It does not wait for the
    Trainer, which is a third of the time: peft comes with it."""
    words = program("chat", folder, "--max_new_tokens", "4", "--dtype", "float32")
    words = [sys.executable, "-X", "importtime", *words]
    done = subprocess.run(words, input="hello\nhello\n", capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert "greedy" not in done.stdout and "\033" not in done.stdout and done.stdout.endswith("\n")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "transformers.modeling_utils" in imported and "peft" not in imported


def test_bytes_that_are_no_text_are_refused_by_their_line(folder, tmp_path):
    typed, log = tmp_path / "typed", tmp_path / "said.log"
    typed.write_bytes(b"hello\nne \xff\n")
    words = program("chat", folder, "--max_new_tokens", "1")
    process = processes.Started(words, log, environment(), keyboard=str(typed))
    assert process.wait(120) == 2 and "Traceback" not in log.read_text()
    assert "error: line 2 of what was typed is not UTF-8 text (byte 0xff); convert it" in log.read_text()


def test_in_a_terminal_it_streams_and_ends_with_ctrl_d(folder):
    ours, theirs = pty.openpty()
    words = program("chat", folder, "--max_new_tokens", "4")
    screen = os.ttyname(theirs)
    process = processes.Started(words, Path(screen), environment(), keyboard=screen)
    seen = b""

    def until(text: bytes) -> None:
        nonlocal seen
        end_s = time.monotonic() + 120
        while text not in seen:
            assert time.monotonic() < end_s, seen
            if select.select([ours], [], [], 1)[0]:
                seen += os.read(ours, 4096)

    try:
        until(b"> ")
        os.write(ours, b"hello\n")
        until(b"per second")
        seen = seen.rpartition(b"per second")[2]
        until(b"> ")  # typed before it, the key would reach a terminal that is between two states
        os.write(ours, b"\x04")
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(60)
        os.close(theirs)  # not before: a terminal that nobody has opened yet would hang up
        os.close(ours)


# -- generate ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"word {'and ' * (i % 5)}{i}"}) + "\n" for i in range(12)))
    return path


def generate(folder, prompts, output, *more) -> list[object]:
    return ["generate", folder, "--prompts", prompts, "--output", output, "--max_new_tokens", "5", "--batch_size", "3",
            "--dtype", "float32", *more]  # fmt: skip


def run(*words) -> int:
    return cli([str(word) for word in words])


def test_killed_it_goes_on_after_the_last_whole_line(folder, prompts, tmp_path, capsys):
    assert run(*generate(folder, prompts, tmp_path / "whole.jsonl")) == 0
    whole = (tmp_path / "whole.jsonl").read_bytes()
    rows = [json.loads(line) for line in whole.splitlines()]
    assert [row["index"] for row in rows] == list(range(12)) and {"answer", "tokens", "finish_reason"} <= rows[0].keys()
    output = tmp_path / "parts.jsonl"
    process = processes.Started(program(*generate(folder, prompts, output)), tmp_path / "said.log", environment())
    while not output.exists() or output.stat().st_size == 0:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    assert run(*generate(folder, prompts, output)) == 0
    assert output.read_bytes() == whole


def test_cut_anywhere_it_is_whole_again(folder, prompts, tmp_path, capsys):
    output = tmp_path / "a.jsonl"
    assert run(*generate(folder, prompts, output)) == 0
    whole = output.read_bytes()
    for end in (0, 1, whole.index(b"\n"), whole.index(b"\n") + 1, len(whole) // 2, len(whole) - 1, len(whole)):
        output.write_bytes(whole[:end])
        capsys.readouterr()
        assert run(*generate(folder, prompts, output)) == 0
        assert output.read_bytes() == whole, end
        torn = end > 0 and whole[end - 1 : end] != b"\n"
        assert ("the last line is incomplete and is answered again" in capsys.readouterr().err) == torn


def test_answers_to_something_else_are_kept(folder, prompts, tmp_path, capsys):
    output = tmp_path / "a.jsonl"
    assert run(*generate(folder, prompts, output)) == 0
    before = output.read_bytes()
    assert run(*generate(folder, prompts, output, "--temperature", "2")) == 2
    assert "do_sample" not in (said := capsys.readouterr().err) and "temperature changed since" in said
    prompts.write_text(json.dumps({"prompt": "other"}) + "\n")
    assert run(*generate(folder, prompts, output)) == 2 and "prompts, rows changed since" in capsys.readouterr().err
    assert output.read_bytes() == before
    assert run(*generate(folder, prompts, output, "--overwrite")) == 0 and output.read_bytes().count(b"\n") == 1
    (tmp_path / "mine.jsonl").write_text("mine\n")
    assert run(*generate(folder, prompts, tmp_path / "mine.jsonl")) == 2
    assert (tmp_path / "mine.jsonl").read_text() == "mine\n"


def test_lines_that_are_not_its_answers_are_not_counted_as_answers(folder, prompts, tmp_path, capsys):
    output = tmp_path / "a.jsonl"
    assert run(*generate(folder, prompts, output)) == 0
    lines = output.read_text().splitlines(keepends=True)
    for wrong in ([*lines[:1], "x\n", *lines[2:]], lines[1:], [*lines, "{}\n"], ["[]\n"]):
        output.write_text("".join(wrong))
        capsys.readouterr()
        assert run(*generate(folder, prompts, output)) == 2
        told = capsys.readouterr().err
        assert "is not the answer to prompt" in told and "--overwrite" in told
        assert output.read_text() == "".join(wrong)


def test_a_length_that_nobody_asked_for_gives_way_to_a_short_model(folder, prompts, tmp_path, capsys):
    words = ["generate", folder, "--prompts", prompts, "--output", tmp_path / "a.jsonl", "--dtype", "float32"]
    assert run(*words) == 0
    assert "answers have up to 32 tokens, a quarter of the 128 positions" in capsys.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert len(rows) == 12 and max(row["tokens"] for row in rows) <= 32
    assert run(*words, "--max_new_tokens", "256", "--overwrite") == 2, "what was asked for is refused"
    capsys.readouterr()
    assert run(*words, "--max_new_tokens", "64") == 2 and "max_new_tokens changed since" in capsys.readouterr().err


def test_a_mistake_leaves_no_file_and_costs_no_answers(folder, prompts, tmp_path, capsys):
    output = tmp_path / "a.jsonl"
    too_long = generate(folder, prompts, output, "--max_new_tokens", "1000")
    assert run(*too_long) == 2 and "lower --max_new_tokens" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [prompts]
    assert run(*generate(folder, prompts, output)) == 0
    before = output.read_bytes()
    assert run(*too_long, "--overwrite") == 2 and output.read_bytes() == before
    assert run(*generate(folder, prompts, output)) == 0 and "12 of them from before" in capsys.readouterr().out


def test_a_prompt_that_is_too_long_is_named_before_others_are_answered(folder, prompts, tmp_path, capsys):
    with prompts.open("a") as file:
        file.write(json.dumps({"prompt": "word " * 500}) + "\n")
    assert run(*generate(folder, prompts, tmp_path / "a.jsonl")) == 2
    assert "error: prompts.jsonl row 13: a prompt of" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [prompts]


def test_the_tokens_of_all_prompts_are_not_held_at_once():
    rows = [PromptRow(f"row {number}", [{"role": "user", "content": "a"}]) for number in range(2000)]
    model = SimpleNamespace(trimmed=lambda messages, most: ([1000 + number for number in range(400)], 0))
    answers = [SimpleNamespace(text="", tokens=0, finish_reason="stop")] * 8
    batches = SimpleNamespace(
        batch_rows=8, settings=SimpleNamespace(max_new_tokens=1), answers=lambda token_ids: answers
    )
    tracemalloc.start()
    _write_all(SimpleNamespace(add=lambda row: None), model, batches, rows, 0)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 2e6


def test_answers_that_another_command_wrote_meanwhile_are_kept(tmp_path):
    output, row = tmp_path / "a.jsonl", {"index": 0}
    first, second = (AnswersFile(output, {"rows": 1}, overwrite=False) for _ in range(2))
    assert (first.begin(), second.begin()) == (0, 0)
    first.add(row)
    with pytest.raises(SettingsError, match=r"a\.jsonl was written by another command meanwhile"):
        second.add(row)
    assert output.read_text() == json.dumps(row) + "\n"


def test_a_folder_in_the_place_of_the_answers_is_named_before_there_are_some(tmp_path):
    for overwrite in (True, False):
        with pytest.raises(SettingsError, match="is a folder; give another --output"):
            AnswersFile(tmp_path, {"rows": 1}, overwrite).begin()


def test_the_folder_of_the_answers_is_made_and_temperature_0_is_greedy(folder, prompts, tmp_path):
    assert run(*generate(folder, prompts, tmp_path / "greedy.jsonl", "--do_sample", "false")) == 0
    assert run(*generate(folder, prompts, tmp_path / "new" / "folder" / "a.jsonl", "--temperature", "0")) == 0
    assert (tmp_path / "new" / "folder" / "a.jsonl").read_bytes() == (tmp_path / "greedy.jsonl").read_bytes()


def test_temperature_0_beside_a_share_of_the_tokens_says_what_has_no_effect(folder, prompts, tmp_path, capsys):
    assert run(*generate(folder, prompts, tmp_path / "a.jsonl", "--temperature", "0", "--top_p", "0.9")) == 2
    assert "temperature 0 is greedy, so top_p would have no effect" in capsys.readouterr().err


def test_answers_do_not_take_the_place_of_their_prompts(folder, prompts, capsys):
    before = prompts.read_bytes()
    assert run(*generate(folder, prompts, prompts, "--overwrite")) == 2
    assert "--output is the file of the prompts" in capsys.readouterr().err and prompts.read_bytes() == before


def test_a_file_that_is_not_ours_is_named(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(SettingsError, match="it was not written by this command"):
        AnswersFile(tmp_path / "x", {"a": 1}, overwrite=False).begin()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chat", "nowhere/to/be"], "does not exist"),
        (["chat", "base"], "base is a keyword of --against"),
        (["generate", "{folder}", "--prompts", "{folder}/config.jsn"], "config.jsn"),
        (["generate", "{folder}", "--prompts", "x.jsonl", "--batch_size", "0"], "batch_size is 0"),
    ],
)
def test_mistakes_end_with_2(words, message, folder, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*(word.replace("{folder}", str(folder)) for word in words)) == 2
    assert message in capsys.readouterr().err


def test_a_model_that_writes_no_text_is_named(tmp_path, capsys):
    tiny.vit().save_pretrained(tmp_path)
    assert run("chat", tmp_path) == 2
    assert "image-classification: it writes no text" in capsys.readouterr().err
