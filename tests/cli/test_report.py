"""The command ``scu-trainer report``: what it writes and refuses, how it watches, and the page in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import time

import pytest
import yaml

from scu_trainer.cli import configuration
from scu_trainer.cli.publishing import report as command
from scu_trainer.report.files import read_run
from scu_trainer.report.page import Drawing, drawing, html
from scu_trainer.report.pages import page_of, plots_of
from scu_trainer.run_files import write_json
from tests.browser import browser, visit
from tests.report.made_runs import make_comparison, make_run, make_two_and_a_study

KEYS = ("loss", "s", "memory", "throughput", "curriculum", "rate")
COMPARED = ("arms", "differences", "s-arms", "curves")
PLOTS = [f"{key}-{theme}.{kind}" for key in KEYS for theme in ("light", "dark") for kind in ("png", "svg")]


@pytest.fixture
def quick(monkeypatch):
    """Pictures take a second per report; what is written where does not depend on them."""
    monkeypatch.setattr(command, "png", lambda plot, theme: b"picture")
    monkeypatch.setattr(
        command, "drawing", lambda plot: Drawing(plot, "<svg></svg>", "") if plot.panels else Drawing(plot)
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two runs and a comparison, each reported once; one of the reports with its pictures, which take long."""
    folder = tmp_path_factory.mktemp("made")
    make_two_and_a_study(folder)
    assert command.main([str(folder / "one")]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "png", lambda plot, theme: b"picture")
        assert command.main([str(folder / "one"), str(folder / "off"), "--output", str(folder / "both")]) == 0
        assert command.main([str(folder / "study")]) == 0
    return folder


def refused(capsys, *words) -> str:
    assert command.main([str(word) for word in words]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1
    return printed.err


# -- what it writes ----------------------------------------------------------------------------------------------------


def test_a_report_is_one_page_and_every_plot_as_a_file(made):
    folder = made / "one" / "report"
    assert {path.name for path in folder.iterdir()} == {"index.html", "repeat.yaml", "report.json", *PLOTS}
    text = (folder / "index.html").read_text()
    assert not re.search(r'(src|href)="(?!#|data:)', text), "nothing is loaded from elsewhere"
    for words in ("7.480 (7.380 to 7.580)", "few-steps", "A CPU", "what differs from the defaults", "repeat.yaml"):
        assert words in text
    assert all(f'id="plot-{key}"' in text for key in KEYS) and "data-reload-s" not in text


def test_the_command_it_prints_repeats_the_run(tmp_path, quick):
    """The settings that it writes are read back as the settings of the run."""
    settings = {
        "learning_rate": 0.004,
        "scu_target_s": 0.05,
        "max_steps": 3,
        "use_cpu": True,
        "seed": 7,
        "report_to": "none",
    }
    job = configuration.read_job(None, [word for name, value in settings.items() for word in (f"--{name}", str(value))])
    run = make_run(tmp_path / "run")
    plain = json.loads(json.dumps(job.as_dict(), default=str))
    described = json.loads((run / "training_config.json").read_text()) | {"configuration": plain}
    write_json(run / "training_config.json", described)
    assert command.main([str(run)]) == 0
    again = configuration.read_job(str(run / "report" / "repeat.yaml"), [])
    assert json.loads(json.dumps(again.as_dict(), default=str)) == plain
    assert {"learning_rate", "seed"} <= set(job.changed_from) and "model_name_or_path" not in job.changed_from
    assert job.changed_from["learning_rate"] == 5e-5
    assert {"bf16", "fp16"}.isdisjoint(job.changed_from), "what the device decides nobody has changed"


def test_words_of_a_run_are_no_markup(tmp_path, quick):
    run = make_run(tmp_path / "<b>run</b>")
    status = json.loads((run / "run.json").read_text()) | {"notices": ["<script>alert(1)</script>"]}
    write_json(run / "run.json", status)
    assert command.main([str(run)]) == 0
    text = (run / "report" / "index.html").read_text()
    assert text.count("<script") == 1 and "&lt;script&gt;alert" in text and "<b>run" not in text


def test_half_a_character_in_a_sample_is_shown_as_its_number(tmp_path, quick):
    run = make_run(tmp_path / "run")
    write_json(run / "samples.json", [{"step": 0, "samples": [{"prompt": "half \ud83d", "output": "a"}]}])
    assert command.main([str(run)]) == 0
    assert r"half \ud83d" in (run / "report" / "index.html").read_text()


def test_a_second_report_replaces_the_first_and_drops_what_it_has_no_more(tmp_path, quick):
    run = make_run(tmp_path / "run")
    assert command.main([str(run)]) == 0
    (run / "report" / "mine.png").write_text("mine")
    (run / "scu_history.json").unlink()
    assert command.main([str(run)]) == 0
    names = {path.name for path in (run / "report").iterdir()}
    assert "s-light.png" not in names and "loss-light.png" in names
    assert (run / "report" / "mine.png").read_text() == "mine"


def test_foreign_files_are_never_overwritten(capsys, tmp_path):
    run, folder = make_run(tmp_path / "run"), tmp_path / "out"
    folder.mkdir()
    (folder / "index.html").write_text("mine")
    message = refused(capsys, run, "--output", folder)
    assert "index.html exists and was not written by scu-trainer report" in message and "--output" in message
    (folder / "index.html").rename(folder / "report.json")
    assert "not valid JSON" in refused(capsys, run, "--output", folder)
    assert [path.name for path in folder.iterdir()] == ["report.json"]
    assert (folder / "report.json").read_text() == "mine"


# -- what it refuses ---------------------------------------------------------------------------------------------------


def test_what_is_no_run_is_refused_with_what_is_allowed(capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    make_run(tmp_path / "runs" / "first")
    assert "holds none of run.json" in refused(capsys, tmp_path / "empty")
    assert "it holds runs: first; give one of them" in refused(capsys, tmp_path / "runs")
    assert f"as {tmp_path / 'runs' / 'first'}" in refused(capsys, tmp_path), "the folder of a sweep"
    assert "did you mean 'first'" in refused(capsys, "frist", "--root", tmp_path / "runs")
    assert "is given twice" in refused(capsys, tmp_path / "runs/first", tmp_path / "runs" / ".." / "runs" / "first")
    assert "not a number of seconds" in refused(capsys, tmp_path / "runs/first", "--watch", "0")
    assert "give the runs before --watch" in refused(capsys, "--watch", tmp_path / "runs/first")
    message = refused(capsys, tmp_path / "runs/first", "--output", tmp_path / "page.html")
    assert "names the folder of the report, not its page" in message and str(tmp_path / "page") in message
    assert "did you mean '--output'" in refused(capsys, tmp_path / "runs/first", "--otput", "x")
    assert "required: RUN" in refused(capsys)
    study = make_comparison(tmp_path / "study")
    assert "a comparison cannot be combined with others" in refused(capsys, study, tmp_path / "runs/first")
    write_json(study / "comparison.json", {"format": 7, "arms": [], "runs": [], "table": [], "seeds": []})
    assert "format 7" in refused(capsys, study)


def test_a_name_below_the_root_is_enough(capsys, tmp_path, quick):
    make_run(tmp_path / "runs" / "first")
    assert command.main(["first", "--root", str(tmp_path / "runs"), "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "index.html" in printed and all(len(line) <= 80 or "/" in line for line in printed.splitlines())


def test_runs_of_one_name_are_told_apart(tmp_path, quick):
    for place in ("a", "b"):
        make_run(tmp_path / place / "run")
    words = [str(tmp_path / place / "run") for place in ("a", "b")]
    assert command.main([*words, "--output", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "index.html").read_text()
    assert "a/run" in text and "b/run" in text


def test_a_report_knows_its_files_again_whatever_the_runs_are_called(capsys, tmp_path, quick):
    runs = [make_run(tmp_path / name) for name in ("my run é", "实验")]
    for _ in range(2):
        assert command.main([*map(str, runs), "--output", str(tmp_path / "out")]) == 0
        (tmp_path / "out" / "not-ours.png").write_text("mine")
    assert {path.name for path in (tmp_path / "out").glob("*.yaml")} == {"repeat-1-my-run.yaml", "repeat-2-run.yaml"}
    *_, count, letters = capsys.readouterr().out.splitlines()
    assert f"{len(PLOTS)} plot files" in count, "of the report's own"
    assert letters.startswith("not drawn: 实验 are missing from the font of the PNG files")


def waiting(folder):
    """A run that has been started in the background and waits for its turn."""
    (folder / "background").mkdir(parents=True)
    write_json(folder / "run.json", {"status": "queued"})
    return folder


def test_a_report_never_takes_the_place_of_a_run_that_waits(capsys, tmp_path, quick):
    run = waiting(tmp_path / "run")
    for more in ((), ("--output", run), ("--output", run / "report")):
        assert "has not started to train" in refused(capsys, run, *more)
    assert command.main([str(run), "--output", str(tmp_path / "out")]) == 0
    assert {path.name for path in run.iterdir()} == {"run.json", "background"}


@pytest.mark.parametrize(("status", "state"), [("failed", "failed"), ("running", "rebooted"), ("stopped", "stopped")])
def test_runs_that_ended_badly_are_readable_and_called_so(tmp_path, status, state, quick):
    run = make_run(tmp_path / "run", steps=30, status=status)
    assert command.main([str(run)]) == 0
    text = (run / "report" / "index.html").read_text()
    assert re.search(rf'class="pill \w+">{state}<', text)


# -- watching ----------------------------------------------------------------------------------------------------------


def test_watching_follows_a_run_from_nothing_to_its_end(capsys, tmp_path, quick):
    run, page, seen = tmp_path / "runs" / "new", tmp_path / "runs" / "new" / "report" / "index.html", []

    def live(seconds: float) -> None:
        seen.append(page.read_text() if page.exists() else None)
        if len(seen) == 1:
            run.mkdir(parents=True)
            (run / "_run.lock").write_text("1")
        elif len(seen) == 2:
            shutil.rmtree(run)
            waiting(run)
        elif len(seen) == 3:
            shutil.rmtree(run)
            make_run(run, steps=20, status="running")
            be_alive(run)
        elif len(seen) == 4:
            shutil.rmtree(run)
            make_run(run)

    assert command.main([str(run), "--watch", "5"], sleep=live) == 0
    assert seen[:3] == [None] * 3, "nothing is written into a folder that training will claim"
    assert 'data-reload-s="5.0"' in seen[3] and "20 of 60" in seen[3]
    assert len(seen) == 4 and "data-reload-s" not in page.read_text() and "60 of 60" in page.read_text()
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("watching every 5 s") and said[1] == f"{run} does not exist yet: waiting for it"


def be_alive(run) -> None:
    """As if this process were the one that trains, and had written just now."""
    from datetime import UTC, datetime

    status = json.loads((run / "run.json").read_text())
    write_json(run / "run.json", status | {"pid": os.getpid(), "updated": datetime.now(UTC).isoformat()})


def test_a_folder_that_training_has_only_claimed_is_waited_for(capsys, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "_run.lock").write_text("1")
    assert "not the directory of a run" in refused(capsys, run)
    assert command.main([str(run), "--watch"], sleep=interrupt_at_once) == 0
    assert [path.name for path in run.iterdir()] == ["_run.lock"]


def test_a_comparison_is_watched_until_no_run_is_to_come(tmp_path, quick):
    folder = tmp_path / "study"

    def live(seconds: float) -> None:
        if not folder.exists():
            make_comparison(folder)
            return
        content = json.loads((folder / "comparison.json").read_text())
        for run in content["runs"]:
            run["status"] = "failed" if run["status"] == "missing" else run["status"]
        write_json(folder / "comparison.json", content)

    assert command.main([str(folder), "--watch", "5"], sleep=live) == 0
    text = (folder / "report" / "index.html").read_text()
    assert "6 failed" in text and "data-reload-s" not in text


def test_a_comparison_that_was_stopped_is_not_watched_for_ever(tmp_path, quick):
    folder = make_comparison(tmp_path / "study")
    long_ago_s = time.time() - 120
    os.utime(folder / "comparison.json", (long_ago_s, long_ago_s))
    assert command.main([str(folder), "--watch"], sleep=lambda seconds: pytest.fail("it waits")) == 0
    assert "data-reload-s" not in (folder / "report" / "index.html").read_text()


def test_ctrl_c_leaves_a_page_that_stays_as_it_is(tmp_path, capsys, quick):
    run = make_run(tmp_path / "run", steps=20, status="running")
    be_alive(run)

    def interrupt(seconds: float) -> None:
        assert "data-reload-s" in (run / "report" / "index.html").read_text()
        raise KeyboardInterrupt

    assert command.main([str(run), "--watch"], sleep=interrupt) == 0
    assert "data-reload-s" not in (run / "report" / "index.html").read_text()
    assert "report: " in capsys.readouterr().out
    assert command.main([str(tmp_path / "none"), "--watch"], sleep=interrupt_at_once) == 0
    assert "no run has started yet" in capsys.readouterr().out and not (tmp_path / "none").exists()


def interrupt_at_once(seconds: float) -> None:
    raise KeyboardInterrupt


def test_no_torch_is_loaded(made):
    import subprocess
    import sys

    code = (
        "import sys; from scu_trainer.cli.publishing import report; report.png = lambda plot, theme: b''; "
        "report.drawing = report.Drawing; code = report.main(sys.argv[1:]); "
        "heavy = [name for name in ('torch', 'transformers', 'datasets') if name in sys.modules]; sys.exit(str(heavy))"
    )
    words = [str(made / "one"), "--output", str(made / "again")]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "[]" and (made / "again" / "index.html").exists(), done.stderr


# -- in a browser ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium():
    with browser() as started:
        yield started


def shown(page, key: str) -> list[tuple[float, float]]:
    """Width and height of what is seen of a plot."""
    boxes = [part.bounding_box() for part in page.query_selector_all(f"#plot-{key} svg")]
    return [(box["width"], box["height"]) for box in boxes if box and box["width"]]


def test_pages_are_accessible(made, chromium):
    from axe_playwright_python.sync_playwright import Axe

    for place in ("one/report", "both", "study/report"):
        with visit(chromium, made / place / "index.html", 390, "dark") as seen:
            found = Axe().run(seen.page).response["violations"]
            assert [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found] == [], place


def test_the_verdict_of_a_comparison_is_seen_in_a_window_of_half_a_screen(made, chromium):
    with visit(chromium, made / "study/report/index.html", 1000, "light") as seen:
        assert (
            seen.page.evaluate("(table => table.scrollWidth - table.clientWidth)(document.querySelector('.scroll'))")
            == 0
        )


def test_pages_are_whole_quiet_and_fit_every_window(made, chromium):
    pages = {made / "one/report/index.html": KEYS, made / "both/index.html": KEYS,
             made / "study/report/index.html": COMPARED}  # fmt: skip
    for file, keys in pages.items():
        for width_px in (390, 1440):
            with visit(chromium, file, width_px, "light") as seen:
                for scheme in ("light", "dark"):
                    seen.page.emulate_media(color_scheme=scheme)
                    case = f"{file.parent} at {width_px} px, {scheme}"
                    assert seen.errors == [] and seen.foreign == [], case
                    assert seen.overflow_px <= 0, case
                    for key in keys:
                        ((width, height),) = shown(seen.page, key)
                        assert width > 300 and height > 150, f"{key} in {case}"
                    ground = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
                    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 24, 28)"}[scheme], case
                    smallest = seen.page.evaluate(SMALLEST_TEXT_PX)
                    assert smallest >= 9, f"text of {smallest} px in {case}"


SMALLEST_TEXT_PX = """Math.min(...[...document.querySelectorAll("svg text")].filter((t) => t.getClientRects().length)
    .map((t) => parseFloat(getComputedStyle(t).fontSize) * t.ownerSVGElement.getBoundingClientRect().width
        / t.ownerSVGElement.viewBox.baseVal.width))"""


def test_the_theme_can_be_chosen_and_is_kept(made, chromium):
    with visit(chromium, made / "one/report/index.html", 800, "light") as seen:
        ink = "getComputedStyle(document.querySelector('.plot svg text')).fill"
        before = seen.page.evaluate(ink)
        seen.page.click("#theme")
        seen.page.click("#theme")
        assert seen.page.inner_text("#theme") == "theme: dark" and seen.page.evaluate(ink) != before
        seen.page.reload()
        assert seen.page.inner_text("#theme") == "theme: dark" and seen.errors == []


def test_a_sandboxed_frame_that_may_keep_nothing_shows_the_page_too(made, tmp_path, chromium):
    address = (made / "one/report/index.html").as_uri()
    (tmp_path / "frame.html").write_text(f'<iframe sandbox="allow-scripts" src="{address}"></iframe>')
    with visit(chromium, tmp_path / "frame.html", 800, "light") as seen:
        inner = seen.page.frames[1]
        inner.click("#theme")
        assert inner.inner_text("#theme") == "theme: light" and seen.errors == []


def test_an_open_page_follows_and_keeps_its_place(made, tmp_path, chromium):
    run, file = read_run(made / "one", "one", "running", is_alive=True), tmp_path / "page.html"
    drawings = [drawing(plot) for plot in plots_of([run])[:3]]
    page = page_of([run], drawings, "first", [tmp_path / "repeat.yaml"], reload_s=1.5)
    file.write_text(html(page))
    with visit(chromium, file, 390, "dark") as seen:
        seen.page.evaluate("scrollTo(0, 900)")
        file.write_text(html(page).replace("<p>first</p>", "<p>second</p>"))
        seen.page.get_by_text("second", exact=True).wait_for(timeout=10_000)
        assert seen.page.evaluate("scrollY") == 900
        assert seen.errors == [] and seen.foreign == []


def test_the_settings_file_is_yaml(made):
    assert yaml.safe_load((made / "one/report/repeat.yaml").read_text())["learning_rate"] == 0.004
