"""The answer of a real model, and the page where two of them answer side by side."""

from __future__ import annotations

import shutil

import pytest
import torch

from scu_trainer.cli.looking import board
from scu_trainer.errors import ModelError
from scu_trainer.run_files import read_json, write_json
from tests import tiny
from tests.board.conftest import opened
from tests.browser import browser
from tests.report.made_runs import make_run

ASKED = [{"role": "user", "content": "The cat sat"}]


@pytest.fixture
def model(tmp_path):
    return tiny.saved_llama(tmp_path / "model")


TEMPLATE = "{{ bos_token }}{% for one in messages %}{{ one.content }}{% endfor %}{{ eos_token }}"


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_an_answer_comes_in_pieces(model, monkeypatch, template):
    """What the model says to the same tokens at once; of a chat template the special tokens stand there once."""
    monkeypatch.setattr(board, "MAX_NEW_TOKENS", 8)
    talker = board._loaded(str(model))
    loaded, tokenizer = talker.model, talker.tokenizer
    tokenizer.chat_template = template
    prompt = tokenizer(ASKED[0]["content"], return_tensors="pt")["input_ids"]
    if template:
        prompt = torch.cat([prompt, torch.tensor([[tokenizer.eos_token_id]])], 1)
    whole = loaded.generate(prompt, do_sample=False, max_new_tokens=8)[0, prompt.shape[1] :]
    said = "".join(board.stream_answer(str(model), ASKED))
    assert said == tokenizer.decode(whole, skip_special_tokens=True) != ""


def test_what_goes_wrong_inside_the_model_is_an_error_and_no_silence(model, monkeypatch):
    monkeypatch.setattr(board._loaded(str(model)).model, "generate", lambda **_: 1 / 0)
    with pytest.raises(ModelError, match="division by zero"):
        list(board.stream_answer(str(model), ASKED))


def test_a_run_that_was_trained_again_answers_with_its_new_weights(model, tmp_path, monkeypatch):
    monkeypatch.setattr(board, "MAX_NEW_TOKENS", 8)
    run = make_run(tmp_path / "run")
    answers = []
    for seed in (0, 1):
        (run / "model.safetensors").unlink(missing_ok=True)  # a training writes another file
        shutil.copytree(tiny.saved_llama(tmp_path / f"model-{seed}", seed=seed), run, dirs_exist_ok=True)
        write_json(run / "run.json", read_json(run / "run.json"))
        answers.append("".join(board.stream_answer(str(run), ASKED)))
    assert answers[0] != answers[1]


def test_two_models_side_by_side_in_a_browser(root, model):
    for name in ("left-run", "right-run"):
        shutil.copytree(model, make_run(root / name), dirs_exist_ok=True)
    with browser() as chromium, opened(root, [root]) as address:
        page = chromium.new_page(viewport={"width": 390, "height": 900})
        page.goto(address)
        page.get_by_role("link", name="Chat").click()
        page.wait_for_load_state()  # its script hears the key
        assert {page.input_value("#left"), page.input_value("#right")} == {"left-run", "right-run"}
        page.fill("#words", "The <b>cat</b> sat")
        page.keyboard.press("Enter")
        page.locator("#send:not([disabled])").wait_for()
        said = [page.locator(f"#talk-{side} p").all_inner_texts() for side in ("left", "right")]
        assert said[0] == said[1] and said[0][0] == "The <b>cat</b> sat" and said[0][1] not in ("", "…")
        page.get_by_role("button", name="Start over").click()
        assert page.locator(".talk p").count() == 0
        page.close()
