"""``scu-trainer runs`` as a person types it: screens of 80 columns, exit codes, the menu, and no torch."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from scu_trainer.cli.background import runs as subject
from scu_trainer.cli.background import screens as runs_screens
from scu_trainer.cli.background import supervisor as runs_supervisor
from scu_trainer.run_files import History, RunStatus
from scu_trainer.runs.menu import ACTIONS, Menu
from scu_trainer.runs.monitor import follow, watch
from scu_trainer.runs.process import System, processes_of_run, send_signal
from scu_trainer.runs.progress import last_lines
from scu_trainer.runs.state import report
from scu_trainer.runs.store import Run, all_runs
from tests.runs import stand_in
from tests.runs.test_process import until

HANDS = stand_in.hands()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with a recipe; no process of a test outlives it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("SCU_TRAINER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "long.yaml").write_text("output_dir: runs/long\nuse_cpu: true\n")
    (tmp_path / "recipes" / "short.yaml").write_text("max_steps: 2\nuse_cpu: true\n")
    (tmp_path / "recipes" / "typo.yaml").write_text("max_stps: 2\n")
    (tmp_path / "recipes" / "word.yaml").write_text("learning_rate: fast\n")
    yield tmp_path
    for run in all_runs(tmp_path / "runs"):
        record = run.record()
        for member in processes_of_run(record.process, record.token, System()) if record and record.process else ():
            send_signal(member, signal.SIGKILL, System())


def typed(*words: object) -> int:
    return subject.main([str(word) for word in words], HANDS)


def reaches(name: str, wanted: str) -> None:
    until(lambda: report(Run(Path("runs") / name, name), System()).state.status == wanted)


def test_from_start_to_resume(place, capsys):
    assert typed("start", "--config", "recipes/long.yaml", "--max_steps", "7", "--max_ram_percent", "100") == 0
    said = capsys.readouterr().out
    assert said.startswith("long has started in the background, process ")
    assert all(f"scu-trainer runs {words} long" in said for words in ("monitor", "logs -f", "stop"))
    record = Run(Path("runs/long")).record()
    assert record.flags == ("--max_steps", "7") and record.options.device == "cpu"
    reaches("long", "running")
    assert typed("start", "--config", "recipes/long.yaml", "--max-ram-percent", "100", "--nice", "0") == 0
    until(lambda: report(Run(Path("runs/long-2")), System()).ahead == 1)
    capsys.readouterr()
    assert typed("list") == 0
    said = capsys.readouterr().out
    assert "running" in said and "queued (1 ahead)" in said and max(map(len, said.splitlines())) <= 80
    assert typed("stop", "long", "long-2") == 0
    said = capsys.readouterr().out
    assert "long: finishing the step and writing a checkpoint ..." in said
    assert "long: stopped; checkpoint-" in said and "long-2: stopped (left the queue before it began)" in said
    assert typed("stop", "long") == 0 and "long is not running: stopped" in capsys.readouterr().out
    assert typed("resume", "long") == 0 and "long resumes from checkpoint-" in capsys.readouterr().out
    reaches("long", "running")
    assert typed("stop", "long", "--now") == 0 and "ended at once" in capsys.readouterr().out
    assert typed("resume", "long-2") == 0
    assert "long-2 starts over: there is no checkpoint" in capsys.readouterr().out


def test_a_project_that_was_moved_goes_on_where_it_is_now(place, monkeypatch, capsys):
    (place / "before").mkdir()
    monkeypatch.chdir(place / "before")
    assert typed("start", "--config", place / "recipes" / "long.yaml", "--max_ram_percent", "100") == 0
    reaches("long", "running")
    assert typed("stop", "long") == 0
    (place / "before").rename(place / "now")
    monkeypatch.chdir(place / "now")
    capsys.readouterr()
    assert typed("resume", "long") == 0
    said = capsys.readouterr().out
    assert f"long was started in {place / 'before'}, which is gone; paths now start from {place / 'now'}" in said
    reaches("long", "running")
    assert typed("stop", "long", "--now") == 0


def test_a_run_that_was_copied_from_another_machine_says_what_resumes_it_here(place, capsys):
    assert typed("start", "--config", "recipes/long.yaml", "--max_steps", "7", "--max_ram_percent", "100") == 0
    reaches("long", "running")
    run = Run(Path("runs/long"), "long")
    assert typed("stop", "long", "--now") == 0
    run.change(process=replace(run.record().process, host="far"))
    RunStatus(run.path / "run.json").update(status="running", error=None)
    capsys.readouterr()
    assert typed("resume", "long") == 2
    said = capsys.readouterr().err
    assert "it was started on far: only that machine can tell whether it is alive" in said
    assert "scu-trainer train --config runs/long/background/config.yaml --output_dir runs/long --max_steps 7" in said


def test_each_seed_is_a_run_of_its_own_and_their_spread_is_told(place, capsys):
    (place / "job.yaml").write_text("max_steps: 2\nuse_cpu: true\nseeds: [0, 1]\n")
    started = ("start", "--config", "job.yaml", "--max_steps", "7", "--max_ram_percent", "100")
    assert typed(*started) == 0
    said = capsys.readouterr().out
    assert "job-seed0 has started" in said and "job-seed1 has started" in said
    assert "scu-trainer runs status job" in said
    for seed in (0, 1):
        run = Run(Path("runs") / f"job-seed{seed}")
        assert run.record().flags == ("--max_steps", "7", "--seed", str(seed))
        assert "seeds" not in run.config.read_text()
        reaches(run.path.name, "finished")
        (run.path / "scu_metrics.json").write_text(json.dumps({"held_out_bpt_after": {"value": 7.0 + seed}}))
    assert typed("status", "job") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "held-out bits over 2 seeds: mean 7.500, standard deviation 0.707" in said
    assert typed("status", "job", "--json") == 0 and len(json.loads(capsys.readouterr().out)) == 2
    assert typed(*started, "--seeds", "5") == 0 and "job-2-seed5 has started" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("entries", "flags", "device"),
    [
        ({}, [], "auto"),
        ({}, ["--use_cpu"], "cpu"),
        ({}, ["--use-cpu=yes"], "cpu"),
        ({"use_cpu": True}, ["--max_steps", "2"], "cpu"),
        ({"use_cpu": True}, ["--use_cpu", "false"], "auto"),
        ({"no_cuda": True}, [], "cpu"),
    ],
)
def test_only_a_run_on_the_cpu_waits_for_no_gpu(tmp_path, entries, flags, device):
    file = tmp_path / "job.json"
    file.write_text(json.dumps(entries))
    assert subject._device(subject.parse_runs_words(["start", "--config", str(file)]), flags) == device


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--seeds", "0", "x"), "--seeds: invalid int value: .x."),
        (("--seeds", "1", "1"), "give different ones"),
        (("--seeds", "0", "1", "--seed", "2"), "seed and seeds are both given"),
    ],
)
def test_seeds_that_are_none(place, capsys, words, said):
    assert typed("start", "--config", "recipes/short.yaml", *words) == 2
    assert re.search(said, capsys.readouterr().err) and not Path("runs").exists()


@pytest.mark.parametrize(
    ("file", "output_dir", "name"),
    [("_my jöb (2)", "", "my-jöb-2"), ("x", "runs/a b", "a-b"), ("x", ".", "run"), ("y" * 99, "", "y" * 48)],
)
def test_a_name_that_no_run_can_have_is_made_one(place, capsys, file, output_dir, name):
    Path(f"{file}.yaml").write_text(f"use_cpu: true\noutput_dir: {output_dir}\n" if output_dir else "use_cpu: true\n")
    assert typed("start", "--config", f"{file}.yaml") == 0
    assert capsys.readouterr().out.startswith(f"{name} has started") and Path("runs", name).is_dir()


def test_a_stop_of_a_suspended_run_says_what_it_waits_for(place, capsys):
    typed("start", "--config", "recipes/long.yaml", "--max_ram_percent", "100")
    reaches("long", "running")
    os.kill(Run(Path("runs/long")).record().process.pid, signal.SIGSTOP)
    until(lambda: "suspended" in report(Run(Path("runs/long")), System()).state.detail)
    assert typed("stop", "long", "--timeout", "0.1") == 2
    assert "a checkpoint (suspended by a signal; kill -CONT lets it continue) ..." in capsys.readouterr().out


def test_a_stop_that_takes_too_long_says_what_to_type(place, capsys):
    typed("start", "--config", "recipes/long.yaml", "--max_ram_percent", "100")
    reaches("long", "running")
    os.kill(Run(Path("runs/long")).record().process.pid, signal.SIGSTOP)
    assert typed("stop", "long", "--timeout", "0.1") == 2
    assert "has not ended after 0.1 s; wait, or runs stop long --now" in capsys.readouterr().out


def test_a_copy_among_those_that_are_ended_at_once_keeps_no_other_running(place, capsys):
    typed("start", "--config", "recipes/long.yaml", "--max_ram_percent", "100")
    reaches("long", "running")
    shutil.copytree("runs/long", "runs/copy")
    capsys.readouterr()
    assert typed("stop", "copy", "long", "--now") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "copy is not running: copied (a copy of" in said and "long: stopped (ended at once" in said


# -- looking -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def by_hand(place) -> Run:
    """A finished run that was started in a terminal."""
    run = Run(place / "runs" / "by_hand", "by_hand")
    (run.path / "logs").mkdir(parents=True)
    (run.path / "logs" / "train.log").write_text(
        "one\n2026-01-01 WARNING x: a long warning " + "word " * 40 + "\nthree\n"
    )
    status = RunStatus(run.path / "run.json")
    status.update(status="finished", pid=1, step=40, max_steps=80, loss=2.5, eta_s=0.0)
    with History(run.path / "scu_history.json") as history:
        history.append({"step": 40, "s_ema": 0.1, "s_target": 0.1, "lambda": 0.5})
    return run


def test_status_of_one_and_all_as_text_and_json(by_hand, capsys):
    assert typed("status", "by_hand") == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    for words in ("status  finished", "step    40/80", "S       0.1000 of 0.1", "lambda  0.5"):
        assert words in said
    assert typed("status", by_hand.path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["lambda"] == 0.5
    for words in (("status", "--json"), ("list", "--json"), ("--root", "runs", "list", "--json")):
        assert typed(*words) == 0
        assert [found["name"] for found in json.loads(capsys.readouterr().out)] == ["by_hand"]
    assert typed("status") == 0 and "40/80" in capsys.readouterr().out


def test_why_a_run_died_stands_below_the_table(by_hand, capsys):
    RunStatus(by_hand.path / "run.json").update(status="failed", error="ValueError: no")
    assert typed("list") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "by_hand: ValueError: no"


def test_a_narrow_screen_cuts_neither_names_nor_figures(by_hand, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert typed("list") == 0
    lines = [line[1:-1].split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    cells = ["".join(part.strip() for part in column) for column in zip(*lines, strict=True)]
    assert cells == ["by_hand", "finished", "-", "40/80", "3.607", "0.1000", "-"]


@pytest.mark.parametrize(
    "content", ['{"step": "x"}', '{"status": 3}', '{"loss": [1]}', '{"pid": "a", "updated": "now"}']
)
def test_what_another_program_calls_run_json_hides_no_other_run(by_hand, capsys, content):
    other = by_hand.path.with_name("other")
    other.mkdir()
    (other / "run.json").write_text(content)
    assert typed("list") == 0
    said = capsys.readouterr().out
    assert (
        "│by_hand │ finished" in said
        and "│other   │ unreadable" in said
        and "which no run writes; move it away" in said
    )


def test_a_folder_that_its_owner_alone_may_read_hides_no_other_run(by_hand, capsys):
    theirs = by_hand.path.with_name("theirs")
    theirs.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        stand_in.kept_for_its_owner(patch, theirs)
        assert typed("list") == 0
        said = capsys.readouterr().out
        assert "│by_hand │ finished" in said and "│theirs  │ unreadable" in said
        assert "theirs: cannot read runs/theirs/" in said and "Permission denied" in said
        assert typed("status", "by_hand") == 0 and "finished" in capsys.readouterr().out
        assert typed("stop", "theirs", "by_hand") == 2
        said = capsys.readouterr().out
        assert "theirs cannot be stopped: cannot read" in said and "by_hand is not running: finished" in said


def test_a_file_that_cannot_be_read_hides_no_other_run(by_hand, capsys):
    other = by_hand.path.with_name("other")
    shutil.copytree(by_hand.path, other)
    (other / "scu_history.json").unlink()
    (other / "scu_history.json").mkdir()
    assert typed("list") == 0
    said = capsys.readouterr().out
    assert "│by_hand │ finished" in said and "other: cannot read runs/other/scu_history.json: Is a directory" in said


def test_a_moment_that_is_none_is_not_known(by_hand, capsys):
    (by_hand.path / "run.json").write_text('{"status": "finished", "updated": "now", "started": 5, "step": 3}')
    assert typed("status", "by_hand") == 0 and "finished" in capsys.readouterr().out


def test_no_runs_yet(place, capsys):
    assert typed("list") == 0
    assert "no runs in runs yet; scu-trainer runs start --config FILE" in capsys.readouterr().out


def test_logs(by_hand, capsys):
    assert typed("logs", "by_hand", "-n", "1") == 0 and capsys.readouterr().out == "three\n"
    assert typed("logs", "by_hand", "-f", "-n", "1") == 0 and capsys.readouterr().out == "three\n"
    (by_hand.path / "logs" / "train.log").unlink()
    assert typed("logs", "by_hand") == 2 and "has no log yet" in capsys.readouterr().err


def test_a_log_is_followed_to_the_last_word(by_hand):
    RunStatus(by_hand.path / "run.json").update(status="running", pid=os.getpid())
    log = by_hand.path / "logs" / "train.log"
    steps = iter(["four\nfi", "ve\n"])

    def sleep(seconds):
        with open(log, "a") as file:
            file.write(next(steps))
        if "five" in log.read_text():
            RunStatus(by_hand.path / "run.json").update(status="finished", pid=99999999)

    assert "".join(follow(by_hand, 1, System(), sleep)) == "three\nfour\nfive\n"


def test_the_last_words_of_a_log_need_no_end_of_line(by_hand):
    """A letter of two bytes is written in two parts."""
    RunStatus(by_hand.path / "run.json").update(status="running", pid=os.getpid())
    parts = iter(["four \xf6".encode()[:-1], "\xf6 last words ".encode()[1:]])

    def sleep(seconds):
        part = next(parts, None)
        if part is None:
            RunStatus(by_hand.path / "run.json").update(status="finished", pid=99999999)
            return
        with open(by_hand.path / "logs" / "train.log", "ab") as file:
            file.write(part)

    whole = "three\nfour \xf6 last words "
    assert "".join(follow(by_hand, 1, System(), sleep)) == whole
    assert "".join(follow(by_hand, 2, System())) == whole


def test_a_line_that_is_printed_while_a_log_is_opened_is_followed(by_hand, monkeypatch):
    log = by_hand.path / "logs" / "train.log"

    def read(path, *given):
        found = last_lines(path, *given)
        with open(log, "a") as file:
            file.write("four\n")
        return found

    monkeypatch.setattr("scu_trainer.runs.monitor.last_lines", read)
    assert "".join(follow(by_hand, 1, System())) == "three\nfour\n"


def test_a_log_that_is_rotated_is_followed_from_its_new_beginning(by_hand):
    RunStatus(by_hand.path / "run.json").update(status="running", pid=os.getpid())
    log = by_hand.path / "logs" / "train.log"
    rotations = iter(
        [lambda: log.write_text("new\n"), lambda: log.rename(f"{log}.1"), lambda: log.write_text("newer\n")]
    )

    def sleep(seconds):
        rotate = next(rotations, None)
        if rotate is None:
            RunStatus(by_hand.path / "run.json").update(status="finished", pid=99999999)
        else:
            rotate()

    assert "".join(follow(by_hand, 1, System(), sleep)) == "three\nnew\nnewer\n"


def test_the_monitor_ends_with_the_run_and_leaves_a_line_for_each_look(by_hand, capsys):
    RunStatus(by_hand.path / "run.json").update(status="running", pid=os.getpid())
    hands = stand_in.hands(sleep=lambda s: RunStatus(by_hand.path / "run.json").update(status="finished", pid=99999999))
    assert subject.main(["monitor", "by_hand", "--refresh", "1"], hands) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("by_hand: running  step 40/80  loss 3.607 bits per token") and second.startswith(
        "by_hand: finished"
    )


def test_leaving_the_monitor_leaves_the_run(by_hand, capsys):
    RunStatus(by_hand.path / "run.json").update(status="running", pid=os.getpid())

    def leave(seconds):
        raise KeyboardInterrupt

    assert subject.main(["monitor", "by_hand"], stand_in.hands(sleep=leave)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "by_hand keeps running in the background"


def test_the_live_screen_fits_80_columns(by_hand):
    RunStatus(by_hand.path / "run.json").update(status="running", pid=os.getpid(), eta_s=125.0)
    target = io.StringIO()
    Console(file=target, width=80, force_terminal=False).print(runs_screens.screen(next(watch(by_hand, 1.0, System()))))
    lines = target.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    text = target.getvalue()
    for words in ("50%", "running", "2:05", "0.1000 of 0.1", "last warning: a long warning", "three"):
        assert words in text


def test_live_on_a_terminal(by_hand, monkeypatch):
    target = io.StringIO()
    monkeypatch.setattr(
        runs_screens, "plain_console", lambda: Console(file=target, width=80, force_terminal=True, highlight=False)
    )
    runs_screens.show_views([next(watch(by_hand, 1.0, System()))])
    assert "finished" in target.getvalue()


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["start"], "--config"),
        (["start", "--config", "none.yaml"], "cannot read the configuration none.yaml"),
        (["start", "--config", "recipes/typo.yaml"], "typo.yaml: unknown key 'max_stps' (did you mean 'max_steps'?)"),
        (["start", "--config", "recipes/word.yaml"], "--learning_rate: invalid float value: 'fast'"),
        (["start", "--config", "recipes/short.yaml", "--output_dir", "x"], "give --root and --name instead"),
        (["start", "--config", "recipes/short.yaml", "--output-dir=x"], "give --root and --name instead"),
        (["start", "--config", "recipes/short.yaml", "--test_run"], "--test_run does not train"),
        (["start", "--config", "recipes/short.yaml", "--name", "a/b"], "cannot be the name of a run"),
        (["start", "--config", "recipes/short.yaml", "--nice", "-5"], "nice is -5; allowed: 0"),
        (["start", "--config", "recipes/short.yaml", "--root", "recipes/short.yaml"], "is a file where a directory"),
        (["list", "--root", "recipes/short.yaml"], "recipes/short.yaml is a file; give the directory that holds"),
        (["--root", "recipes/short.yaml", "list"], "recipes/short.yaml is a file; give the directory that holds"),
        (["status", "by_hnd"], "no run 'by_hnd' in runs (did you mean 'by_hand'?)"),
        (["status", "by_hand", "--lines", "3"], "unknown option --lines"),
        (["logs", "by_hand", "--line=3"], "unknown option --line (did you mean '--lines'?)"),
        (["stop", "by_hand", "another", "--now", "--x"], "unknown option --x"),
        (["start", "--confg", "recipes/short.yaml"], "unknown option --confg (did you mean '--config'?)"),
        (["stop", "by_hand"], None),
        (["resume", "by_hand"], "was not started by runs start"),
        (["monitor", "by_hand", "--refresh", "0"], "not a number of seconds above 0"),
        (["logs", "by_hand", "-n", "-1"], "not a number of lines"),
        (["begin"], "invalid choice: 'begin'"),
        (["statu"], "(did you mean 'status'?)"),
        ([], "give one of these actions: without a terminal there is no menu"),
    ],
)
def test_wrong_words_are_one_message(by_hand, capsys, words, said):
    assert typed(*words) == (2 if said else 0)
    found = capsys.readouterr().err
    assert "Traceback" not in found and (said is None or said in found)


@pytest.mark.parametrize("action", ["", "start", "list", "status", "monitor", "logs", "stop", "resume"])
def test_help_fits(place, capsys, action):
    with pytest.raises(SystemExit) as end:
        typed(*filter(None, [action]), "--help")
    assert end.value.code == 0 and max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_nothing_heavy_is_loaded_and_it_answers_at_once(by_hand):
    """Modules, most of them Python's own, and not seconds: those are also other programs'. torch alone brings 1,500."""
    program = (
        "import sys; from scu_trainer.cli.main import main; code = main(['runs', 'status', 'by_hand']); "
        "heavy = [name for name in ('torch', 'transformers', 'numpy') if name in sys.modules]; "
        "sys.exit(code or (f'{len(sys.modules)} modules, {heavy}' if heavy or len(sys.modules) > 350 else ''))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stderr.strip(), "finished" in done.stdout) == ("", True)


def test_the_supervisor_is_the_training_command(place, monkeypatch):
    from scu_trainer.cli import train

    monkeypatch.setattr(train, "main", lambda words: len(words))
    assert runs_supervisor.train(["--config", "x"]) == 2


# -- the menu ----------------------------------------------------------------------------------------------------------


def menu(place: Path, *answers: str):
    said, acted, given = [], [], iter(answers)

    def ask(question: str) -> str:
        answer = next(given, None)
        if answer is None:
            raise EOFError
        if answer == "ctrl-c":
            raise KeyboardInterrupt
        return answer

    assert Menu(acted.append, ask, said.append, place / "runs", place / "recipes").run() == 0
    return acted, "\n".join(said)


def numbered(name: str) -> str:
    return str([action for _, action in ACTIONS].index(name) + 1)


def test_numbers_choose(by_hand, place):
    acted, said = menu(place, numbered("start"), "2", numbered("list"), numbered("monitor"), "1", numbered("quit"))
    assert acted == [["start", "--config", str(place / "recipes" / "short.yaml")], ["list"], ["monitor", "by_hand"]]
    assert "1  start a recipe" in said and "2  short" in said and "1  by_hand" in said


def test_wrong_numbers_empty_lines_and_ctrl_c(by_hand, place):
    acted, said = menu(place, "9", numbered("stop"), "x", "", "ctrl-c", numbered("logs"), "1")
    assert acted == [["logs", "by_hand"]]
    assert "'9' is not a number from 1 to 7" in said and "'x' is not a number from 1 to 1" in said


def test_nothing_to_choose_and_an_error_come_back_to_the_menu(place, capsys):
    acted, said = menu(place, numbered("stop"), "")
    assert acted == [] and "there is none" in said

    def fail(words):
        raise subject.SettingsError("no such thing")

    given = iter([numbered("list"), numbered("quit")])
    said = []
    Menu(fail, lambda question: next(given), said.append, place / "runs", place).run()
    assert "error: no such thing" in said


def test_on_a_terminal_the_menu_acts(by_hand, monkeypatch, capsys):
    given = iter([numbered("list"), ""])
    monkeypatch.setattr("builtins.input", lambda question: next(given))
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    assert typed() == 0
    assert "by_hand" in capsys.readouterr().out
