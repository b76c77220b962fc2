"""The model card says what the files of the run hold, and keeps what a person has written."""

from __future__ import annotations

import json
import shutil

import pytest
from huggingface_hub import ModelCard

from scu_trainer.cli.configuration import read_job
from scu_trainer.hub.card import CARD, base_license, card_of, is_ours, write_card
from scu_trainer.hub.facts import facts_of, read_facts
from scu_trainer.hub.local_paths import is_local, without_local_paths
from scu_trainer.run_files import read_json, write_json


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished.run, tmp_path / "run")


def test_it_holds_the_figures_of_the_run(run):
    metrics, card = read_json(run / "scu_metrics.json"), (run / CARD).read_text()
    for when in ("before", "after", "change"):
        assert f"{metrics[f'held_out_bpt_{when}']['value']:.3f} (" in card.replace("+", "")
    books = read_json(run / "training_config.json")["data"]
    assert f"{books['rows_read']:,} read, {books['documents']:,} for training" in card
    assert "- left out: nothing" in card and "| seed | 42 |" in card and "| learning_rate | 0.05 |" in card
    assert metrics["regularization"]["verdict"] in card and f"{books['fingerprint']}" in card
    hardware = read_json(run / "training_config.json")["hardware"]
    assert f"- processor: {hardware['cpu']}, " in card
    data = ModelCard.load(run / CARD).data
    assert data.eval_results[0].metric_value == round(metrics["held_out_bpt_after"]["value"], 4)
    assert data.library_name == "peft" and data.base_model is None and data.license is None


def test_the_command_that_repeats_the_run_reads_its_configuration(run, tmp_path):
    stored = read_json(run / "training_config.json")["configuration"]
    job = read_job(str(run / "training_config.json"), ["--output_dir", str(tmp_path / "again")])
    found = {**json.loads(json.dumps(job.as_dict(), default=str)), "output_dir": stored["output_dir"]}
    assert found == stored and stored["report_to"] == []


def test_what_was_not_measured_is_not_claimed(run):
    (run / "scu_metrics.json").write_text('{"held_out_documents": 0, "steps": 2, "train_s": 1.0}')
    card = card_of(read_facts(run, run), "me/x")
    assert "Not measured: nothing was held out" in card and "How good it is was not measured" in card
    assert "model-index" not in card and "nan" not in card.lower().replace("nancy", "")
    checkpoint = card_of(facts_of(run / "checkpoint-1")[0], "me/x")
    assert "weights of step 1" in checkpoint and "these weights were not scored" in checkpoint


def test_drops_are_counted(run):
    description = read_json(run / "training_config.json")
    description["data"]["rows_dropped"] = {"empty text": 1234}
    write_json(run / "training_config.json", description)
    card = card_of(read_facts(run, run), "me/x")
    assert "- left out: 1,234 (empty text)" in card and "left out: nothing" not in card


def test_licence_as_given_as_the_base_states_it_or_not_stated(run, tmp_path):
    facts = read_facts(run, run)
    assert "Not stated: none was given" in card_of(facts, "me/x")
    given = card_of(facts, "me/x", "apache-2.0")
    assert "license: apache-2.0" in given and "## Licence\n\napache-2.0" in given
    base = tmp_path / "base"
    base.mkdir()
    assert base_license(str(base)) is None
    (base / CARD).write_text("---\nlicense: mit\n---\nA model.\n")
    assert base_license(str(base)) == "mit"
    assert base_license("me/never-fetched") is None


def test_a_card_that_was_edited_is_kept(run):
    assert is_ours(run / CARD) and write_card(run)
    text = (run / CARD).read_text()
    (run / CARD).write_text(text.replace("## Use", "## How I use it"))
    assert not is_ours(run / CARD) and not write_card(run)
    assert "How I use it" in (run / CARD).read_text()


def test_what_libraries_write_there_is_replaced(run):
    """peft saves an empty form, and adds a section to whatever card it finds."""
    from huggingface_hub import ModelCardData

    text = (run / CARD).read_text()
    (run / CARD).write_text(text + "\n### Framework versions\n\n- PEFT 0.21.2")
    assert is_ours(run / CARD)
    form = ModelCard.from_template(ModelCardData())
    form.data.base_model = "/x/y"
    form.save(run / CARD)
    assert is_ours(run / CARD) and write_card(run) and "## Results" in (run / CARD).read_text()


@pytest.mark.parametrize(
    ("text", "published"),
    [
        ("/home/ann/runs/x", "[local]/x"),
        ("~/runs/x/", "[local]/x"),
        ("wrote /tmp/a/b.json, then /mnt/c/d", "wrote [local]/b.json, then [local]/d"),
        ("https://hub.example/me/model", "https://hub.example/me/model"),
        ("me/model", "me/model"),
        ("1/2 and/or 3/4", "1/2 and/or 3/4"),
        ({"a": ["/x/y", 3, None]}, {"a": ["[local]/y", 3, None]}),
    ],
)
def test_paths_of_this_machine(text, published):
    assert without_local_paths(text) == published
    assert without_local_paths(published) == published


def test_which_names_are_local(tmp_path):
    assert all(map(is_local, [str(tmp_path), "./x", "~/x", "a/b/c", "[local]/x"]))
    assert not any(map(is_local, ["me/model", "gpt2", None, ""]))
