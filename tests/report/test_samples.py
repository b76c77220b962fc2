"""Answers side by side, in the report and on the card."""

from __future__ import annotations

import json
from pathlib import Path

from scu_trainer.hub.card import body_text
from scu_trainer.hub.facts import RunFacts, read_facts
from scu_trainer.report.files import RunFiles
from scu_trainer.report.pages import sample_sections


def step(number: int, **answers: str) -> dict:
    found = [
        {"row": 0, "prompt": prompt, "answer": text, "reference": f"ref {prompt}"} for prompt, text in answers.items()
    ]
    return {"step": number, "samples": found}


def run(*rows: dict, name: str = "one", is_alive: bool = False) -> RunFiles:
    return RunFiles(name, Path("x"), samples=rows, is_alive=is_alive)


def test_before_and_after_and_the_reference_stand_side_by_side():
    (section,) = sample_sections([run(step(0, p="a", q="b"), step(5, p="c", q="d"), step(9, p="\ne", q="f"))])
    table, fold = section.blocks
    assert table.head == ["prompt", "before", "after, step 9", "reference"] and table.keeps_lines
    assert table.rows == [["p", "a", "e", "ref p"], ["q", "b", "f", "ref q"]]
    assert fold.fold == "during training" and "step 5, 'p'\nc" in fold.text


def test_while_it_goes_on_and_of_several_runs():
    (section,) = sample_sections([run(step(3, p="a"), is_alive=True)])
    assert section.blocks[0].head == ["prompt", "step 3", "step 3", "reference"]
    (section,) = sample_sections([run(step(3, p=" \n\n"))])
    assert section.blocks[0].rows == [["p", "(blank)", "(blank)", "ref p"]]
    (section,) = sample_sections([run(step(3, p="a", q="b")), run(step(4, p="c"), name="two"), run(name="three")])
    assert section.blocks[0].head == ["prompt", "one", "two", "reference"]
    assert section.blocks[0].rows == [["p", "a", "c", "ref p"], ["q", "b", "-", "ref q"]]


def test_none_and_torn_ones():
    assert sample_sections([run()]) == []
    assert sample_sections([run({"step": 1, "samples": "torn"})])[0].blocks[0].rows == []


def test_the_card_has_the_last_answers_as_they_stand(tmp_path):
    (tmp_path / "samples.json").write_text(json.dumps([step(0, p="a"), step(9, p="# no heading\n```\n[x](y)")]))
    facts = read_facts(tmp_path, tmp_path)
    text = body_text(facts, "me/x", "mit", None)
    assert "## Samples" in text and "````text\n# no heading\n```\n[x](y)\n````" in text and "ref p" in text
    assert "## Samples" not in body_text(RunFacts(tmp_path), "me/x", "mit", None)
