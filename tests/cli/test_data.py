"""``scu-trainer data``: what is learned, on the screen, as a page and as a file."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from scu_trainer.cli import configuration
from scu_trainer.cli import main as cli
from scu_trainer.cli.looking.facts import Outlier
from scu_trainer.cli.names.known import stock_fields
from scu_trainer.data import embedded_tokenizer, prepare
from scu_trainer.settings import DataSettings
from tests import browser

ROWS = [{"question": f"What comes after {i}?", "answer": f"After {i} comes {i + 1}.", "score": 1} for i in range(40)]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [
        *ROWS,
        ROWS[0],
        {"question": "Why?", "answer": "=" * 900},
        {"question": "Long?", "answer": "So it is. " * 400},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def look(file, capsys, tmp_path):
    def run(*words) -> str:
        given = ["--dataset", file, "--cache_dir", tmp_path / "cache", "--block_size", 128, *words]
        assert cli.main(["data", *map(str, given)]) == 0
        return capsys.readouterr().out

    return run


def refused(capsys, *words) -> str:
    assert cli.main(["data", *map(str, words)]) == 2
    return capsys.readouterr().err


def test_the_screen_names_formats_columns_and_rows_with_what_is_learned(look):
    printed = look("--rows", "1")
    assert "rows.jsonl row 1: " in printed and "rows.jsonl row 2: " not in printed.partition("all 43")[0]
    assert "assistant\n⟦After 0 comes 1.<|im_end|><|eos|>⟧" in printed
    assert "read as: question and answer (question, answer) by the chat template (43 rows)" in printed
    assert "unused columns: score (41 rows)" in printed
    assert "longer than block_size 128: 1 (2.3%)" in printed and "<- block_size" in printed
    assert (
        "documents that repeat an earlier one, token by token: 1" in printed
        and "rows.jsonl row 1, rows.jsonl row 41" in printed
    )
    strangest = printed.partition("the strangest")[2]
    assert "row 42" in strangest and "row 43" in strangest and "repetition" in strangest


def test_a_sample_says_that_it_is_one(look):
    assert "the first 10 documents of " in look("--sample", "10")
    assert "all 43 documents of " in look("--sample", "all")


def test_one_document_is_not_said_to_be_all(tmp_path, capsys):
    (tmp_path / "one.jsonl").write_text('{"text": "Green tea."}\n')
    assert cli.main(["data", "--dataset", str(tmp_path / "one.jsonl"), "--cache_dir", str(tmp_path / "cache")]) == 0
    assert "\nthe 1 document of " in capsys.readouterr().out


def test_a_configuration_is_read_with_what_only_training_knows(look, tmp_path, file, capsys):
    config = tmp_path / "job.yaml"
    config.write_text(f"dataset: {file}\ncache_dir: {tmp_path / 'cache'}\nmax_steps: 3\ncompletion_only_loss: false\n")
    assert cli.main(["data", str(config), "--rows", "1"]) == 0
    assert "⟦<|bos|><|im_start|>user" in capsys.readouterr().out
    config.write_text(f"dataset: {file}\nmax_stepz: 3\n")
    assert "did you mean 'max_steps'?" in refused(capsys, config)


def test_the_settings_of_a_run_are_read(tmp_path, file, capsys):
    """They hold every field of the stock Trainer, also those that are names of other programs."""
    values = configuration.read_values(None, ["--dataset", str(file), "--cache_dir", str(tmp_path / "cache")])
    names = ("dataset", "cache_dir", *stock_fields())
    settings = {name: values[name] for name in names if isinstance(values.get(name), (bool, int, float, str))}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    assert settings["do_train"] is False and cli.main(["data", str(tmp_path / "run.yaml"), "--rows", "1"]) == 0
    assert "After 0 comes 1." in capsys.readouterr().out


def test_the_export_is_what_training_gets(look, tmp_path, capsys):
    path = tmp_path / "rows.out"
    assert f"rows as trained: {path}" in look("--export", path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    tokenizer = embedded_tokenizer(tmp_path / "cache")
    learned = [text for row in rows for text in row["learned"]]
    assert "After 7 comes 8.<|im_end|><|eos|>" in learned or "After 8 comes 9.<|im_end|><|eos|>" in learned
    assert all(tokenizer.decode(row["input_ids"]) == row["text"] for row in rows)
    assert all(len(row["labels"]) == len(row["input_ids"]) <= 128 for row in rows)
    assert "already exists" in refused(capsys, "--dataset", "x.jsonl", "--export", path)


def test_the_export_holds_out_what_training_with_that_seed_holds_out(look, file, tmp_path):
    columns = DataSettings(
        dataset=str(file), cache_dir=str(tmp_path / "cache"), block_size=128, packing=False, isolate_documents=False,
        validation_split_percentage=20.0,
    )  # fmt: skip
    tokenizer, found = embedded_tokenizer(tmp_path / "cache"), {}
    for seed, flags in ((42, ["--seed", 42]), (7, ["--seed", 42, "--data_seed", 7])):
        path = tmp_path / f"{seed}.out"
        look("--export", path, *flags, "--packing", "false", "--validation_split_percentage", 20)
        found[seed] = [json.loads(line)["input_ids"] for line in path.read_text().splitlines()]
        trained = prepare(columns, tokenizer, seed=seed, cache_dir=tmp_path / "cache", model_name="the embedded base")
        assert found[seed] == [list(row["input_ids"]) for row in trained.train]
    assert found[42] != found[7]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sample", "some"], "--sample is 'some'"),
        (["--rows", "-1"], "--rows is -1"),
        (["--task", "image-classification"], "checks texts, but this job is image-classification"),
        (["--dataset", "/nowhere/x.jsonl"], "does not exist"),
        (["--html", "/nowhere/x.html"], "--html /nowhere/x.html"),
    ],
)
def test_what_cannot_be_is_one_message(capsys, words, message):
    assert message in refused(capsys, *words)


def test_sources_of_a_mixture_are_looked_at_one_by_one(tmp_path, file, capsys):
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "Green tea."}\n{"text": "Black tea."}\n')
    sources = json.dumps([{"dataset": str(file), "weight": 1}, {"dataset": str(other), "weight": 3}])
    assert cli.main(["data", "--dataset", sources, "--cache_dir", str(tmp_path / "cache")]) == 0
    printed = capsys.readouterr().out
    assert f"all 43 documents of {file}" in printed and f"all 2 documents of {other}" in printed


def test_a_slip_is_named_before_any_row_is_shown(file, capsys, tmp_path):
    config = tmp_path / "job.yaml"
    config.write_text(f"datasett: {file}\n")
    for words in (["--datasett", file], ["--config", config]):
        assert cli.main(["data", *map(str, words)]) == 2
        printed = capsys.readouterr()
        assert "did you mean" in printed.err and "dataset'?)" in printed.err and not printed.out


def test_the_first_rows_need_no_torch(file, tmp_path):
    code = (
        "import sys; from scu_trainer.cli import configuration; from scu_trainer.cli.looking import data, screen\n"
        "def first(*given): print('torch' in sys.modules); raise SystemExit\n"
        f"screen.print_row = first; data.main(['--dataset', {str(file)!r}, '--cache_dir', {str(tmp_path / 'cache')!r}])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(("width", "scheme"), [(1100, "light"), (390, "dark")])
def test_the_page_stands_alone(look, tmp_path, width, scheme):
    path = tmp_path / "look.html"
    look("--html", path)
    with browser.browser() as started, browser.visit(started, path, width, scheme) as found:
        assert not found.errors and not found.foreign and found.overflow_px <= 0
        assert found.page.locator("mark").first.inner_text() == "After 0 comes 1.<|im_end|><|eos|>"
        assert found.page.locator("nav a").count() == 6


def test_large_numbers_of_tokens_are_shown_as_counts():
    assert Outlier(0, "tokens", 71.0, 1110.0).values == "71, median 1,110"
