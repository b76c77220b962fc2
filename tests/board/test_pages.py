"""What the pages show: the list, one run, and runs whose files are broken, half-written or gone."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from pathlib import Path

import pytest

from scu_trainer.board import listing as module
from scu_trainer.board import one
from scu_trainer.board.listing import Listing
from scu_trainer.errors import ModelError
from scu_trainer.report.page import Drawing
from scu_trainer.report.pages import NOTICES
from scu_trainer.run_files import write_json
from scu_trainer.runs import progress
from scu_trainer.runs.store import Run
from tests.report.made_runs import make_run
from tests.runs import stand_in


def begun_at(folder, moment, **changes):
    status = json.loads((folder / "run.json").read_text())
    write_json(folder / "run.json", {**status, "started": moment, **changes})
    return folder


# -- list --------------------------------------------------------------------------------------------------------------


def test_the_list_is_newest_first_with_what_each_run_does(site, root):
    begun_at(make_run(root / "old"), "2020-01-01T00:00:00+00:00")
    begun_at(make_run(root / "new", status="failed"), "2021-01-01T00:00:00+00:00", loss=2.0794415)
    (root / "no run").mkdir()
    (root / "no run" / "notes.txt").write_text("a folder of mine")
    rows = site.board.listing.rows()
    assert [(row.run.name, row.state.status) for row in rows] == [("new", "failed"), ("old", "finished")]
    text = site.ask("/").text
    figures = 'data-label="step">60/60</td><td class="number" data-label="bits">'
    assert [part[:5] for part in text.split(figures)[1:]] == ["3.000", "6.781"]
    assert text.index(">new<") < text.index(">old<") and "no run" not in text and "2 runs in" in text


def test_a_filter_by_name_and_state(site, root):
    for name, status in (("lora-a", "finished"), ("lora-b", "failed"), ("full", "failed")):
        make_run(root / name, status=status)
    assert [row.run.name for row in site.board.listing.choose("LORA", "failed").rows] == ["lora-b"]
    text = site.ask("/?name=lora&state=failed").text
    assert "lora-b" in text and "lora-a" not in text and "failed (1)" in text
    assert "No run matches the filter" in site.ask("/?name=nothing").text


def test_pages_of_the_list(root, monkeypatch):
    monkeypatch.setattr(module, "ROWS_PER_PAGE", 2)
    for number in range(5):
        begun_at(make_run(root / f"run-{number}"), f"2020-01-0{number + 1}T00:00:00+00:00")
    listing = Listing(root)
    assert [row.run.name for row in listing.choose(page=1).rows] == ["run-4", "run-3"]
    assert [row.run.name for row in listing.choose(page=3).rows] == ["run-0"]
    assert listing.choose(page=99).page == 3 and listing.choose(page=0).page == 1


@pytest.mark.parametrize("page", ["0", "-1", "x", "9" * 50, "²"])
def test_a_page_that_is_no_number(site, root, page):
    make_run(root / "one")
    assert ">one<" in site.ask("/?page=" + page).text


def test_a_run_that_has_ended_is_read_once_and_again_when_it_changes(root, monkeypatch):
    folder = make_run(root / "one")
    listing, looks = Listing(root), []
    report_or_unreadable = module.report_or_unreadable
    monkeypatch.setattr(module, "report_or_unreadable", lambda *words: looks.append(1) or report_or_unreadable(*words))
    assert [row.state.status for row in (listing.rows()[0], listing.rows()[0])] == ["finished"] * 2 and len(looks) == 1
    begun_at(folder, "2020-01-01T00:00:00+00:00", status="failed")
    assert listing.rows()[0].state.status == "failed" and len(looks) == 2


def test_no_history_is_read_whole_for_the_list(root, monkeypatch):
    make_run(root / "one", steps=3000)
    read = []
    tail = progress.tail
    monkeypatch.setattr(progress, "tail", lambda *words: read.append(tail(*words)) or read[-1])
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: pytest.fail(str(path)) if "history" in path.name else whole(path)
    )
    assert Listing(root).rows()[0].state.status == "finished"
    assert 0 < max(map(len, read)) <= progress.TAIL_BYTES < (root / "one" / "scu_history.json").stat().st_size / 10


def whole(path):
    with open(path, "rb") as file:
        return file.read()


# -- one run -----------------------------------------------------------------------------------------------------------


def test_the_page_of_a_run_has_its_curves_memory_and_notices(site, root):
    folder = make_run(root / "one")
    metrics = json.loads((folder / "scu_metrics.json").read_text())
    planned = {"predicted_peak_bytes": 11 * 2**28, "measured_peak_bytes": 10 * 2**28}
    write_json(folder / "scu_metrics.json", {**metrics, "memory_estimate": planned})
    write_json(folder / "samples.json", [{"step": 0, "samples": [{"prompt": "How?", "answer": "\n\n"}]}])
    text = site.ask("/run/one").text
    parts = re.findall(r'<h2 id="head-\d+">([^<]+)', text)
    assert parts[5:9] == ["Learning rate and gradient", "Memory: predicted and measured", NOTICES, "Key figures"]
    assert f"scu-trainer train --config {folder}/training_config.json" in text, "a file that is there"
    for plot in ("loss", "s", "memory", "throughput"):
        assert f'id="plot-{plot}"' in text, plot
    assert text.count("<svg") == 12 and "S was measured late" in text
    assert "predicted peak" in text and "+10.0%" in text
    assert '/run/one/report"' in text and '/run/one/rows"' in text
    assert "<h1>one</h1>" in site.ask("/run/one/report").text


@pytest.mark.parametrize("estimate", [5, {"predicted_peak_bytes": "1 GiB", "measured_peak_bytes": 100}])
def test_a_memory_estimate_that_somebody_has_edited_is_named_and_left_out(site, root, estimate):
    folder = make_run(root / "one")
    metrics = json.loads((folder / "scu_metrics.json").read_text())
    write_json(folder / "scu_metrics.json", {**metrics, "memory_estimate": estimate})
    text = site.ask("/run/one").text
    assert "as its memory_estimate" in text and "which no run writes; it is left out" in text


def test_before_its_end_a_run_shows_the_plan_that_it_said(site, root):
    folder = make_run(root / "one", status="failed")
    (folder / "logs").mkdir()
    (folder / "logs" / "train.log").write_text(
        "12:00 INFO memory: a step should take 2.0 GiB (weights 1.0 GiB)\nnext\n"
    )
    text = site.ask("/run/one").text
    assert "memory: a step should take 2.0 GiB" in text and "Highest so far: 3.1 GiB" in text


def test_a_run_that_was_not_started_here_is_not_stopped_from_here(site, root):
    make_run(root / "one", status="failed")
    assert 'action="/run/one/stop"' not in site.ask("/run/one").text
    answer = site.ask("/run/one/stop", "POST")
    assert answer.status_code == 409 and "one is not running: failed" in answer.text
    answer = site.ask("/run/one/resume", "POST")
    assert answer.status_code == 409 and "was not started by runs start" in answer.text


def test_rows_are_read_once_there_are_settings(site, root):
    (root / "one").mkdir()
    write_json(root / "one" / "run.json", {"status": "queued"})
    assert 'method="post"' in site.ask("/run/one/rows").text
    answer = site.ask("/run/one/rows", "POST")
    assert answer.status_code == 409 and "no training_config.json yet" in answer.text


def test_rows_are_those_of_the_data_command(site, root, tmp_path):
    """Its process for real: the settings of the run are the words of the command."""
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"How many? {n}", "completion": f"Just {n}."}) + "\n" for n in range(9))
    )
    folder = make_run(root / "one", dataset=str(data), curriculum="none")
    content = json.loads((folder / "training_config.json").read_text())
    content["configuration"] = {"task": "text-generation", "dataset": str(data)}
    write_json(folder / "training_config.json", content)
    answer = site.ask("/run/one/rows", "POST")
    assert answer.status_code == 303, answer.text
    page = site.ask("/run/one/rows")
    assert (
        "<mark>" in page.text
        and "Just 0." in page.text
        and page.headers["content-security-policy"].startswith("sandbox")
    )


# -- broken files ------------------------------------------------------------------------------------------------------

FILES = ("run.json", "log_history.json", "scu_history.json", "memory_history.json", "training_config.json",
         "scu_metrics.json", "curriculum.json")  # fmt: skip
BROKEN = {
    "empty": b"",
    "half": b'{"status": "fini',
    "half a row": b'[\n{"step": 1, "loss"',
    "no object": b"7",
    "null": b"null",
    "list of numbers": b"[1, 2]",
    "no text": bytes(range(128, 256)),
    "deep": b"[" * 100_000,
    "types": b'{"status": 7, "step": "x", "max_steps": [], "loss": "a", "started": "soon", "updated": {}, "pid": "p"}',
    "rows of types": b'[\n{"step": "x", "loss": {}, "lambda": "y", "s": []}\n]',
    "objects": b'{"configuration": 7, "preflight": {"a": 1}, "regularization": [], "memory_estimate": "x", "data": 3}',
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_files_of_one_run_hide_nothing_else(site, root, how, monkeypatch):
    """Every file broken in the same way, each in a run of its own. Without pictures, which take a second each."""
    monkeypatch.setattr(one, "drawing", Drawing)
    make_run(root / "good")
    for name in FILES:
        folder = make_run(root / name.removesuffix(".json"))
        (folder / name).write_bytes(BROKEN[how])
    answer = site.ask("/")
    assert answer.status_code == 200 and ">good<" in answer.text
    assert all(f">{name.removesuffix('.json')}<" in answer.text for name in FILES)
    for name in FILES:
        answer = site.ask(f"/run/{name.removesuffix('.json')}")
        assert answer.status_code == 200, answer.text[:500]


def test_a_folder_that_its_owner_alone_may_read_hides_nothing_else(site, root, monkeypatch):
    make_run(root / "good")
    stand_in.kept_for_its_owner(monkeypatch, make_run(root / "theirs"))
    text = site.ask("/").text
    assert ">good<" in text and ">theirs<" in text and text.count(">unreadable<") == 1
    assert "Permission denied" in site.ask("/run/theirs").text
    assert site.ask("/chat").status_code == 200


def test_a_record_of_a_start_that_is_broken(site, root):
    for number, content in enumerate(BROKEN.values()):
        (root / f"run-{number}" / "background").mkdir(parents=True)
        (root / f"run-{number}" / "background" / "start.json").write_bytes(content)
    text = site.ask("/").text
    assert text.count(">unreadable<") == len(BROKEN)
    assert site.ask("/run/run-1").status_code == 200


def test_a_run_that_is_deleted_while_it_is_looked_at(site, root):
    """Reading and deleting at the same time, many times: every answer is a page or says that it is not there."""
    codes, is_done = [], threading.Event()

    def churn() -> None:
        for _ in range(40):
            shutil.copytree(kept, root / "one", dirs_exist_ok=True)
            shutil.rmtree(root / "one")
        is_done.set()

    kept = make_run(root.parent / "kept")
    thread = threading.Thread(target=churn)
    thread.start()
    while not is_done.is_set():
        codes += [site.ask("/").status_code, site.ask("/run/one/stop", "POST").status_code]
    thread.join()
    assert set(codes) <= {200, 404, 409}
    assert site.ask("/run/one").status_code == 404


def test_a_run_that_goes_between_two_looks_is_no_row(root, monkeypatch):
    run = Run(make_run(root / "one"), "one")
    shutil.rmtree(run.path)
    monkeypatch.setattr(module, "runs_below", lambda root: [run])
    assert Listing(root).rows() == []


def test_no_directory_of_runs_yet(site, root):
    root.rmdir()
    assert "No runs yet" in site.ask("/").text and site.ask("/run/one").status_code == 404


def test_a_folder_whose_name_is_no_text(site, root):
    os.rename(make_run(root / "one"), os.fsencode(root) + b"/\xff\xfe")
    make_run(root / "two")
    answer = site.ask("/")
    assert answer.status_code == 200 and ">two<" in answer.text and "\\udcff" in answer.text


# -- chat --------------------------------------------------------------------------------------------------------------


def conversation(*words):
    return json.dumps([{"role": "user", "content": one} for one in words])


def test_an_answer_comes_in_pieces_and_an_error_in_its_words(site, root):
    """What answers is given in: the seam is one function."""
    make_run(root / "one")
    asked = []

    def answer(name, messages):
        asked.append((name, messages))
        yield from ("piece ", "by piece")
        if len(messages) > 1:
            raise ModelError("no memory left for <it>")

    site.board.answer = answer
    found = site.ask("/chat/answer", "POST", data={"name": "one", "messages": conversation("Hello")})
    assert found.status_code == 200 and found.text == "piece by piece"
    assert asked == [(str(root / "one"), [{"role": "user", "content": "Hello"}])]
    found = site.ask("/chat/answer", "POST", data={"name": "one", "messages": conversation("a", "b")})
    assert found.text == "piece by piece\n[error: no memory left for <it>]"
    assert found.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize(
    "form",
    [
        {"name": "absent", "messages": conversation("a")},
        {"name": "../one", "messages": conversation("a")},
        {"name": "one", "messages": "[]"},
        {"name": "one", "messages": "no JSON"},
        {"name": "one", "messages": '[{"role": "root", "content": "a"}]'},
        {"name": "one", "messages": '[{"role": "user", "content": 7}]'},
    ],
)
def test_a_conversation_that_is_none(site, root, form):
    make_run(root / "one")
    site.board.answer = lambda *_: pytest.fail("it must not be asked")
    assert site.ask("/chat/answer", "POST", data=form).status_code == 409


def test_a_run_without_a_model_says_so(site, root):
    make_run(root / "one")
    assert "No run here has saved a model yet" in site.ask("/chat").text
    answer = site.ask("/chat/answer", "POST", data={"name": "one", "messages": conversation("a")})
    assert answer.status_code == 409 and "holds no finished model" in answer.text
