"""Who gets in, and how far: the token, foreign pages, names and links that lead out, text that pretends to be code."""

from __future__ import annotations

import json
import os
import socket

import pytest

from scu_trainer.board.app import Board
from scu_trainer.board.folders import link_out, run_below, runs_below
from scu_trainer.cli.looking import board as command
from scu_trainer.errors import SettingsError
from scu_trainer.run_files import write_json
from tests.board.conftest import COOKIE, HOST, ORIGIN, TOKEN
from tests.report.made_runs import make_run

PAGES = ("/", "/start", "/chat", "/run/one", "/run/one/report", "/run/one/rows", "/static/board.js")
NASTY = "<script>alert(1)</script>"


@pytest.fixture
def one(root):
    return make_run(root / "one")


# -- the token ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("cookie", [None, f"{COOKIE}=wrong", f"other={TOKEN}", f"{COOKIE}="])
def test_nothing_is_shown_without_the_token(site, one, path, cookie):
    answer = site.bare(path, headers={"Host": HOST, **({"Cookie": cookie} if cookie else {})})
    assert answer.status_code == 401 and answer.text.startswith("open the board with the address")


def test_the_token_in_the_address_becomes_a_cookie_that_scripts_and_other_sites_cannot_use(site):
    answer = site.bare(f"/?token={TOKEN}")
    assert answer.status_code == 303 and answer.headers["location"] == "/"
    assert answer.headers["set-cookie"] == f"{COOKIE}={TOKEN}; HttpOnly; Path=/; SameSite=strict"
    assert site.bare("/?token=wrong").status_code == 401
    assert site.bare(f"/start?token={TOKEN}", "POST", {"Host": HOST, "Origin": ORIGIN}).status_code == 401


def test_a_program_may_bring_the_token_in_a_header(site):
    assert site.bare("/", headers={"Host": HOST, "Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert site.bare("/", headers={"Host": HOST, "Authorization": "Bearer wrong"}).status_code == 401


# -- other pages of the same browser -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7860", "127.0.0.1", "127.0.0.1:80", "localhost.evil:7860"]
)
def test_a_foreign_host_is_refused_also_with_the_token(site, host):
    assert site.ask("/", headers={"Host": host}).status_code == 421
    assert site.bare(f"/?token={TOKEN}", headers={"Host": host}).status_code == 421


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:8888", "https://127.0.0.1:7860", ""]
)
@pytest.mark.parametrize("path", ["/start", "/run/one/stop", "/run/one/resume", "/run/one/rows", "/chat/answer"])
def test_a_form_of_a_foreign_page_changes_nothing(site, one, origin, path):
    assert site.ask(path, "POST", headers={"Origin": origin}).status_code == 403


def test_a_change_without_an_origin_is_refused(site, one):
    headers = {"Host": HOST, "Cookie": f"{COOKIE}={TOKEN}"}
    assert site.bare("/run/one/stop", "POST", headers).status_code == 403


@pytest.mark.parametrize("path", ["/run/one/stop", "/run/one/resume", "/chat/answer"])
def test_reading_an_address_changes_nothing(site, one, path):
    assert site.ask(path).status_code == 405


@pytest.mark.parametrize("path", PAGES)
def test_each_answer_forbids_scripts_of_others_frames_and_copies(site, one, path):
    headers = site.ask(path).headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
    assert headers["cache-control"] == "no-store" and "access-control-allow-origin" not in headers


# -- names and links ---------------------------------------------------------------------------------------------------

WAYS_OUT = ("..%2Foutside", "%2e%2e%2foutside", "..%5Coutside", "%2Fetc", "one%2F..%2F..%2Foutside", "one%00", "%2e%2e")


@pytest.mark.parametrize("way", WAYS_OUT)
@pytest.mark.parametrize("end", ["", "/report", "/rows"])
def test_no_name_leads_out(site, one, tmp_path, way, end):
    make_run(tmp_path / "outside")
    answer = site.ask(f"/run/{way}{end}")
    assert answer.status_code in (307, 404) and "Key figures" not in answer.text


@pytest.mark.parametrize("name", ["..", ".", "", "../outside", "one/../../outside", "a\0b", "a\\b", "absent"])
def test_a_name_is_one_folder_below_the_root(root, one, tmp_path, name):
    make_run(tmp_path / "outside")
    with pytest.raises(SettingsError, match="there is no run"):
        run_below(root, name)


def test_a_link_to_a_run_elsewhere_is_no_run_here(site, root, one, tmp_path):
    make_run(tmp_path / "outside")
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "second").symlink_to(one)
    (root / "circle").symlink_to(root / "circle")
    assert sorted(run.name for run in runs_below(root)) == ["one", "second"]
    assert site.ask("/run/link").status_code == 404 and site.ask("/run/second/rows").status_code == 200


@pytest.mark.parametrize("name", ["run.json", "log_history.json", "background", "logs/train.log"])
def test_a_run_with_a_link_to_elsewhere_is_not_read(site, root, one, tmp_path, name):
    elsewhere = tmp_path / "private"
    elsewhere.write_text('{"error": "a private word", "status": "failed"}')
    (one / "logs").mkdir(exist_ok=True)
    (one / name).unlink(missing_ok=True)
    (one / name).symlink_to(tmp_path if name == "background" else elsewhere)
    assert link_out(run_below_unchecked(root)) == name
    answer = site.ask("/run/one")
    assert answer.status_code == 409 and f"{name} is a link that leads out" in answer.text
    assert "private word" not in answer.text + site.ask("/").text and "unreadable" in site.ask("/").text


def run_below_unchecked(root):
    return next(run for run in runs_below(root) if run.name == "one")


# -- text that pretends to be code, and secrets ------------------------------------------------------------------------


def test_names_and_words_of_a_run_are_shown_as_text(site, root):
    name = NASTY.replace("/", "") + '"onload=x'
    folder = make_run(root / name, status="failed")
    status = json.loads((folder / "run.json").read_text())
    write_json(folder / "run.json", {**status, "error": NASTY, "notices": [NASTY]})
    (folder / "logs").mkdir()
    (folder / "logs" / "train.log").write_text(f"{NASTY}\n<img src=x onerror=alert(2)>\n")
    address = "/run/" + "".join(f"%{byte:02x}" for byte in name.encode())
    for path in ("/", address, f"{address}/report", f"{address}/rows", "/?name=" + NASTY, "/?state=" + NASTY):
        answer = site.ask(path)
        assert answer.status_code == 200, path
        assert (
            "<script>alert" not in answer.text and "<img src=x" not in answer.text and "&lt;script&gt;" in answer.text
        )


def test_secrets_in_a_log_are_hidden(site, one):
    token = "hf_" + "aB3" * 11
    (one / "logs").mkdir()
    (one / "logs" / "train.log").write_text(f"logging in with {token}\n")
    text = site.ask("/run/one").text
    assert "logging in with ***" in text and token not in text


# -- starting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"config": "/etc/passwd"},
        {"config": "../recipe.yaml"},
        {"name": "../out"},
        {"name": "--root=/tmp"},
        {"flags": "--output_dir /tmp/out"},
        {"flags": "--root /tmp/out"},
        {"flags": "--no_such_field 1"},
        {"flags": "'open quote"},
        {"device": "--root"},
    ],
)
def test_a_start_takes_files_of_the_list_and_writes_below_the_root(site, root, tmp_path, given):
    form = {"config": str(tmp_path / "recipe.yaml"), "name": "", "device": "cpu", "flags": "", **given}
    answer = site.ask("/start", "POST", data=form)
    assert answer.status_code == 409 and 'role="alert"' in answer.text
    assert list(root.iterdir()) == [] and not (tmp_path / "out").exists()


def test_a_configuration_beside_the_list_is_not_read(site, root, tmp_path):
    (tmp_path / "other.yaml").write_text("output_dir: runs/other\n")
    for config in (tmp_path / "other.yaml", tmp_path / "runs" / ".." / "recipe.yaml"):
        answer = site.ask("/start", "POST", data={"config": str(config), "device": "cpu", "flags": "--max_stepz 1"})
        assert answer.status_code == 409 and "is not one of the configuration files here" in answer.text
    assert list(root.iterdir()) == []


def test_a_large_form_is_refused(site):
    assert site.ask("/start", "POST", data={"flags": "x" * (1 << 21)}).status_code == 413


# -- the command -------------------------------------------------------------------------------------------------------


def refused(capsys, *words) -> str:
    assert command.main(list(words), serve=lambda *_: pytest.fail("it must not listen")) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1
    return printed.err


def test_a_port_in_use_is_one_line(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is in use; give another --port" in refused(capsys, "--port", str(port))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--host", "192.0.2.1"), "add --allow_network"),
        (("--host", "0.0.0.0", "--allow_network"), "give one address to listen on"),
        (("--host", "::"), "give one address to listen on"),
        (("--host", "example.org"), "give an address of this machine"),
        (("--port", "70000"), "give 1 to 65535"),
    ],
)
def test_other_machines_are_let_in_only_on_purpose(capsys, words, said):
    assert said in refused(capsys, *words)


def test_it_listens_on_loopback_with_a_new_token_each_time(tmp_path, capsys):
    places, addresses = [], []
    for _ in range(2):
        serve = lambda app, listening: (places.append(listening.getsockname()[0]), listening.close())  # noqa: E731
        assert command.main(["--runs_dir", str(tmp_path), "--port", "0"], serve=serve) == 0
        addresses.append(capsys.readouterr().out.split("token=")[1].split()[0])
    assert places == ["127.0.0.1"] * 2 and addresses[0] != addresses[1] and min(map(len, addresses)) >= 40


@pytest.mark.parametrize("typed", [[], ["--trust_remote_code"]])
def test_the_chat_has_the_consent_of_the_command_line(tmp_path, monkeypatch, typed):
    boards, asked = [], []
    monkeypatch.setattr("scu_trainer.board.app.Board", lambda *given: boards.append(Board(*given)) or boards[-1])
    monkeypatch.setattr(command, "stream_answer", lambda *_, **consent: asked.append(consent))
    serve = lambda app, listening: listening.close()  # noqa: E731
    assert command.main(["--runs_dir", str(tmp_path), "--port", "0", *typed], serve=serve) == 0
    boards[0].answer("run", [])
    assert asked == [{"trust_remote_code": bool(typed), "allow_pickle": False}]


def test_a_directory_that_does_not_exist_is_named(tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    serve = lambda app, listening: listening.close()  # noqa: E731
    assert command.main(["--runs_dir", str(tmp_path / "rnus"), "--port", "0"], serve=serve) == 0
    said = capsys.readouterr().out
    assert "rnus does not exist yet" in said and f"did you mean '{tmp_path / 'runs'}'" in said


def test_a_file_is_no_directory_of_runs(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert "is a file" in refused(capsys, "--runs_dir", os.fspath(tmp_path / "file"))
