"""The board in a real browser: narrow and wide, light and dark, by keyboard alone, with a run that starts and stops."""

from __future__ import annotations

import contextlib
import json
import signal
from types import SimpleNamespace

import pytest

from scu_trainer.runs.process import System, processes_of_run, send_signal
from scu_trainer.runs.state import report
from scu_trainer.runs.store import Run
from tests.board.conftest import opened
from tests.browser import browser
from tests.report.made_runs import make_run
from tests.runs import stand_in

PAGES = ("/", "/?name=nothing", "/run/one", "/run/one/rows", "/start", "/chat", "/run/absent")
CONTROLS = """() => [...document.querySelectorAll('a, button, input, select, textarea, summary, [tabindex="0"]')]
  .filter((one) => one.checkVisibility() && !one.disabled)"""
FOCUSED = """() => {
  const one = document.activeElement, style = getComputedStyle(one);
  return [one.outerHTML.slice(0, 120), one === document.body,
          style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0, one.id];
}"""


@pytest.fixture(scope="module")
def chromium():
    with browser() as started:
        yield started


@contextlib.contextmanager
def served(folder):
    """The real command over a run that was trained, with a recipe to start another. Nothing of it outlives this."""
    root, recipe = folder / "runs", folder / "short.yaml"
    make_run(root / "one")
    recipe.write_text("output_dir: runs/short\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCU_TRAINER_CACHE", str(folder / "cache"))
        with opened(root, [recipe], stand_in.hands()) as address:
            yield SimpleNamespace(address=address, at=address.split("/?")[0], root=root, recipe=recipe)
    record = Run(root / "short", "short").record()
    for member in processes_of_run(record.process, record.token, System()) if record and record.process else ():
        send_signal(member, signal.SIGKILL, System())


@pytest.fixture
def site(tmp_path):
    with served(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    """One for the tests that start nothing and change nothing: it draws the plots of the run once."""
    with served(tmp_path_factory.mktemp("unchanged")) as found:
        yield found


@contextlib.contextmanager
def window(chromium, site, width_px=1280, scheme="light"):
    """Logged in. Errors, and what it asked for beside the board, fail the test."""
    context = chromium.new_context(viewport={"width": width_px, "height": 900}, color_scheme=scheme)
    page, wrong = context.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if "the server responded" not in said.text else None)
    page.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith((site.at, "data:")) else None)
    page.goto(site.address)
    assert page.url == f"{site.at}/", "the token leaves the address"
    yield page
    context.close()
    assert wrong == []


@pytest.mark.parametrize(("width_px", "scheme"), [(390, "dark"), (1280, "light")])
def test_pages_fit_are_accessible_and_ask_for_nothing_elsewhere(chromium, unchanged, width_px, scheme):
    from axe_playwright_python.sync_playwright import Axe

    with window(chromium, unchanged, width_px, scheme) as page:
        for path in PAGES:
            page.goto(unchanged.at + path)
            found = Axe().run(page).response["violations"]
            assert [one for one in found if one["impact"] in ("serious", "critical")] == [], path
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, path


@pytest.mark.parametrize("width_px", [390, 1280])
def test_the_list_and_a_run_with_its_curves(chromium, unchanged, width_px):
    with window(chromium, unchanged, width_px) as page:
        row = page.get_by_role("row").filter(has_text="one")
        assert row.get_by_text("finished").is_visible() and row.get_by_text("6.781").is_visible()
        page.get_by_role("link", name="one", exact=True).click()
        page.wait_for_url(f"{unchanged.at}/run/one", wait_until="load")  # with its styles, which choose the drawing
        for plot in ("loss", "s", "memory", "throughput"):
            drawn = page.locator(f"#plot-{plot} svg:visible")
            box = drawn.bounding_box()
            assert drawn.count() == 1 and box["width"] > 300 and box["height"] > 150, plot
            assert drawn.locator("path").count() > 10
        page.get_by_role("link", name="report page").click()
        assert page.get_by_role("heading", level=1, name="one").is_visible()


def test_colours_are_switched_and_kept(chromium, unchanged):
    with window(chromium, unchanged) as page:
        for theme, ground in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(21, 24, 28)")):
            page.get_by_role("button", name="theme").click()
            assert page.evaluate("document.documentElement.dataset.theme") == theme
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
        page.reload()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


@pytest.mark.parametrize("path", ["/", "/run/one", "/start"])
def test_tab_reaches_everything_and_shows_where_it_is(chromium, unchanged, path):
    with window(chromium, unchanged) as page:
        page.goto(unchanged.at + path)
        controls = page.evaluate(f"() => ({CONTROLS})().length")
        reached = []
        for _ in range(controls + 3):
            page.keyboard.press("Tab")
            text, is_over, has_outline, _ = page.evaluate(FOCUSED)
            if is_over:
                break
            assert has_outline, text
            reached.append(text)
        assert len(reached) == controls >= 5, reached


def tab_to(page, name: str) -> None:
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate(FOCUSED)[3] == name:
            return
    pytest.fail(f"Tab does not reach {name}")


def until(page, text: str) -> None:
    """The page finds out by itself."""
    page.locator(".pills .pill", has_text=text).wait_for(timeout=20_000)


def test_a_run_is_started_stopped_and_resumed_by_keyboard(chromium, site):
    """A real process in the background, through the real queue."""
    with window(chromium, site, 390) as page:
        page.goto(f"{site.at}/start")
        tab_to(page, "device")
        page.keyboard.press("ArrowDown")  # auto -> cpu
        tab_to(page, "flags")
        page.keyboard.type("--max_steps 10000")
        page.keyboard.press("Enter")
        page.wait_for_url(f"{site.at}/run/short")
        run = Run(site.root / "short", "short")
        assert run.record().flags == ("--max_steps", "10000") and run.config.read_text() == site.recipe.read_text()
        until(page, "running")
        tab_to(page, "stop")
        page.keyboard.press("Enter")
        until(page, "stopped")
        step = report(run, System()).progress.step
        assert page.get_by_text(f"checkpoint-{step}", exact=True).is_visible()
        tab_to(page, "resume")
        page.keyboard.press("Enter")
        until(page, "running")
        assert run.record().starts == 2 and f"begins at {step}" in run.console.read_text()
        tab_to(page, "stop")
        page.keyboard.press("Enter")
        until(page, "stopped")


def test_what_a_start_refuses_is_said_in_its_words(chromium, unchanged):
    with window(chromium, unchanged) as page:
        page.goto(f"{unchanged.at}/start")
        page.fill("#flags", "--max_stepz 10")
        with page.expect_response(lambda answer: answer.request.method == "POST") as answer:
            page.keyboard.press("Enter")
        assert answer.value.status == 409
        assert "max_stepz" in page.get_by_role("alert").inner_text()
        assert page.input_value("#flags") == "--max_stepz 10"
        assert not (unchanged.root / "short").exists()


def test_a_page_follows_the_run_and_can_be_paused(chromium, site):
    path = site.root / "one" / "run.json"
    content = json.loads(path.read_text())
    with window(chromium, site) as page:
        page.clock.install()
        page.reload()
        path.write_text(json.dumps({**content, "status": "failed"}))
        page.clock.run_for(6_000)
        page.locator(".pill", has_text="failed").wait_for()
        page.get_by_role("button", name="updates").click()
        path.write_text(json.dumps({**content, "status": "stopped"}))
        page.clock.run_for(60_000)
        page.wait_for_load_state("networkidle")
        assert page.locator(".pill", has_text="failed").is_visible()
        page.get_by_role("button", name="updates").click()
        page.clock.run_for(6_000)
        page.locator(".pill", has_text="stopped").wait_for()
