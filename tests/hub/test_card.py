"""The model card says what the files of the run hold, and keeps what a person has written."""

from __future__ import annotations

import ast
import json
import re
import shutil
from dataclasses import replace

import pytest
from huggingface_hub import ModelCard

from scu_trainer.cli.configuration import check_early, read_job
from scu_trainer.cli.main import main
from scu_trainer.errors import StorageError
from scu_trainer.hub.card import CARD, base_license, card_of, is_replaceable_card, loading, write_card
from scu_trainer.hub.facts import facts_of, read_facts
from scu_trainer.hub.local_paths import is_local, without_local_paths
from scu_trainer.report.files import read_run
from scu_trainer.report.words import key_figures
from scu_trainer.run_files import read_json, write_json


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished.run, tmp_path / "run")


def test_it_holds_the_figures_of_the_run(run):
    metrics, card = read_json(run / "scu_metrics.json"), (run / CARD).read_text()
    for when in ("before", "after", "change"):
        assert f"{metrics[f'held_out_bpt_{when}']['value']:.3f} (" in card.replace("+", "")
    statistics = read_json(run / "training_config.json")["data"]
    assert f"{statistics['rows_read']:,} read, {statistics['documents']:,} for training" in card
    assert "- left out: none" in card and "| seed | 42 |" in card and "| learning_rate | 0.05 |" in card
    assert metrics["regularization"]["verdict"] in card and f"{statistics['fingerprint']}" in card
    hardware = read_json(run / "training_config.json")["hardware"]
    assert f"- processor: {hardware['cpu']}, " in card
    data = ModelCard.load(run / CARD).data
    assert data.eval_results[0].metric_value == round(metrics["held_out_bpt_after"]["value"], 4)
    assert data.library_name == "peft" and data.base_model is None and data.license is None


def test_the_best_evaluation_of_a_classifier_is_that_of_its_accuracy(run):
    """On the card and in the report: the one with the most right may have more bits than the end has."""
    metrics = read_json(run / "scu_metrics.json")
    metrics |= {"unit": "label", "best_held_out": {"step": 8, "bpt": 3.2, "accuracy": 0.75}}
    write_json(run / "scu_metrics.json", metrics)
    card = card_of(read_facts(run, run), "me/x")
    assert "Best evaluation during training: accuracy 75.0% at step 8." in card
    assert dict(key_figures(read_run(run, "run")))["best during training"] == "accuracy 75.0% at step 8"


def test_the_command_that_repeats_the_run_reads_its_configuration(run, tmp_path):
    stored = read_json(run / "training_config.json")["configuration"]
    check_early(str(run / "training_config.json"), [])
    job = read_job(str(run / "training_config.json"), ["--output_dir", str(tmp_path / "again")])
    found = {**json.loads(json.dumps(job.as_dict(), default=str)), "output_dir": stored["output_dir"]}
    assert found == stored and stored["report_to"] == []


def test_the_command_that_repeats_a_resumed_run_begins_again(run, tmp_path):
    """The checkpoint is not there where the file was downloaded, and is not where the run began."""
    description = read_json(run / "training_config.json")
    description["configuration"]["resume_from_checkpoint"] = "runs/mine/checkpoint-10"
    write_json(run / "training_config.json", description)
    job = read_job(str(run / "training_config.json"), ["--output_dir", str(tmp_path / "again")])
    assert job.training.resume_from_checkpoint is None


def test_shares_of_a_stream_that_was_not_counted_are_not_claimed(run):
    description = read_json(run / "training_config.json")
    source = {"name": "web", "row_share": 0.0, "token_share": 0.0}
    for blocks in (0, 3):
        description["data"] |= {"streaming": True, "blocks": blocks, "sources": [source]}
        write_json(run / "training_config.json", description)
        assert ("- source web: 0.0%" in card_of(read_facts(run, run), "me/x")) == bool(blocks)


def test_what_was_not_measured_is_not_claimed(run):
    (run / "scu_metrics.json").write_text('{"held_out_documents": 0, "steps": 2, "train_s": 1.0}')
    card = card_of(read_facts(run, run), "me/x")
    assert "Not measured: nothing was held out" in card and "Its quality was not measured" in card
    assert "model-index" not in card and "nan" not in card.lower().replace("nancy", "")
    checkpoint = card_of(facts_of(run / "checkpoint-1")[0], "me/x")
    assert "weights of step 1" in checkpoint and "these weights were not scored" in checkpoint


def test_a_run_without_a_finite_loss(run):
    """Infinity is null in the files of a run."""
    metrics = read_json(run / "scu_metrics.json")
    for when in ("after", "change"):
        metrics[f"held_out_bpt_{when}"] = {"value": None, "low": None, "high": None, "confidence": 0.95}
    write_json(run / "scu_metrics.json", metrics)
    card = card_of(read_facts(run, run), "me/x")
    assert "| not finite | not finite |" in card and "model-index" not in card


def test_drops_are_counted(run):
    description = read_json(run / "training_config.json")
    description["data"]["rows_dropped"] = {"empty text": 1234}
    write_json(run / "training_config.json", description)
    card = card_of(read_facts(run, run), "me/x")
    assert "- left out: 1,234 (empty text)" in card and "left out: none" not in card


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
    (base / CARD).write_text("---\nlicense: [mit, cc0-1.0]\n---\n")
    assert base_license(str(base)) == "mit, cc0-1.0"
    for torn in (b"---\nlicense: [\n---\n", b"---\n- license\n---\n", b"\xff\xfe"):
        (base / CARD).write_bytes(torn)
        assert base_license(str(base)) is None


def changed(run, **settings):
    """Facts of ``run`` as if it had been given these settings."""
    description = read_json(run / "training_config.json")
    description["configuration"] |= settings
    write_json(run / "training_config.json", description)
    return read_facts(run, run)


def test_a_model_that_started_from_nothing_has_no_base_to_ask(run):
    facts = replace(changed(run, model_name_or_path=None, task="image-classification"), adapter={})
    card = card_of(facts, "me/x")
    assert "the model started from random weights" in card and "Not stated: none was given." in card
    assert "published the base" not in card


def test_an_adapter_that_was_continued_with_has_its_own_base(run):
    facts = changed(run, model_name_or_path=None, adapter_name_or_path="me/adapter")
    facts = replace(facts, adapter={**facts.adapter, "base_model_name_or_path": "me/base"})
    assert facts.base_id == "me/base" and not facts.is_embedded_base
    assert ("model", "me/adapter") in key_figures(read_run(run, "run"))


def test_the_dataset_that_was_scored_is_the_one_that_is_named(run):
    card = card_of(changed(run, eval_dataset="/data/other: docs.jsonl"), "me/x")
    assert "documents of other: docs.jsonl, a dataset used only for scoring" in card
    assert "only on the held-out dataset (other: docs.jsonl)" in card and "- dataset: documents.jsonl" in card
    data = ModelCard(card).data
    assert data.eval_results[0].dataset_name == "other: docs.jsonl" and data.eval_results[0].dataset_split is None


def test_only_what_was_timed_is_given_a_time(run):
    metrics = read_json(run / "scu_metrics.json")
    assert "\n2 optimizer steps in " in card_of(read_facts(run, run), "me/x")
    write_json(run / "scu_metrics.json", {**metrics, "steps_of_this_start": 1, "train_s": 7.0})
    assert "\n2 optimizer steps; 1 of them, since the last resume, took 7 s." in card_of(read_facts(run, run), "me/x")


def test_code_of_a_name_with_quotes_is_python(run):
    code = loading(read_facts(run, run), 'runs/"mine" é\\x')
    names = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    assert names == ['runs/"mine" é\\x'] * 2


# -- of merged weights -------------------------------------------------------------------------------------------------


@pytest.fixture
def merged(finished, run, tmp_path):
    """Merged weights of ``run``, in a folder of their own."""
    folder = shutil.copytree(finished.merged, tmp_path / "merged")
    write_json(folder / "merge.json", {**read_json(folder / "merge.json"), "adapter": str(run)})
    return folder


def dry_run(folder) -> int:
    return main(["push", str(folder), "--repo_id", "me/x", "--dry_run"])


def test_an_edited_card_of_merged_weights_is_kept_too(merged, capsys):
    assert dry_run(merged) == 0 and "was edited" not in capsys.readouterr().out
    (merged / CARD).write_text("My own words.\n")
    assert dry_run(merged) == 0
    told = capsys.readouterr().out
    assert "README.md was edited, and is sent as it is" in told and " 14 bytes" in told


def test_the_edited_card_of_the_adapter_does_not_stay_here_unsaid(merged, run, capsys):
    (run / CARD).write_text("My own words.\n")
    assert dry_run(merged) == 0
    assert "stays here: README.md (the edited card of the adapter; that of the" in capsys.readouterr().out


def test_the_licence_in_the_header_of_a_card_is_kept(merged, capsys):
    text = (merged / CARD).read_text()
    (merged / CARD).write_text(text.replace("---\n", "---\nlicense: apache-2.0\n", 1))
    assert dry_run(merged) == 0 and "license: apache-2.0" in capsys.readouterr().out
    assert main(["push", str(merged), "--repo_id", "me/x", "--dry_run", "--license", "mit"]) == 0
    assert "license: mit" in capsys.readouterr().out


def test_scores_of_another_training_in_the_same_folder_are_not_claimed(merged, run, capsys):
    (run / "adapter_model.safetensors").write_bytes(b"trained again")
    assert dry_run(merged) == 2
    assert (
        "the adapter was trained again, and its scores are not those of the merged weights" in capsys.readouterr().err
    )


def test_a_card_that_was_edited_is_kept(run):
    assert is_replaceable_card(run / CARD) and write_card(run)
    text = (run / CARD).read_text()
    (run / CARD).write_text(text.replace("## Use", "## How I use it"))
    assert not is_replaceable_card(run / CARD) and not write_card(run)
    assert "How I use it" in (run / CARD).read_text()


def test_what_libraries_write_there_is_replaced(run):
    """peft saves an empty form, and adds a section to whatever card it finds."""
    from huggingface_hub import ModelCardData

    text = (run / CARD).read_text()
    (run / CARD).write_text(text + "\n### Framework versions\n\n- PEFT 0.21.2")
    assert is_replaceable_card(run / CARD)
    form = ModelCard.from_template(ModelCardData())
    form.data.base_model = "/x/y"
    form.save(run / CARD)
    assert is_replaceable_card(run / CARD) and write_card(run) and "## Results" in (run / CARD).read_text()


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
    (tmp_path / "data" / "docs").mkdir(parents=True)
    run = tmp_path / "runs" / "one"
    assert is_local("data/docs", run) and not is_local("data/docs") and not is_local("me/model", run)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("scu_metrics.json", {"regularization": ["x"]}),
        ("scu_metrics.json", {"held_out_bpt_after": 3}),
        ("scu_metrics.json", {"train_s": "x"}),
        ("training_config.json", {"data": {"rows_read": 1}}),
        ("training_config.json", {"versions": {"torch": "\ud800"}}),
        ("samples.json", [{"step": 1, "samples": [{"prompt": 3}]}]),
        ("samples.json", [{"step": 1, "samples": 3}]),
    ],
    ids=str,
)
def test_values_that_no_run_writes_are_one_message(run, name, changes):
    write_json(run / name, changes if isinstance(changes, list) else {**read_json(run / name), **changes})
    with pytest.raises(StorageError, match=rf"{name.replace('.', '[.]')}.* in {run}, .*holds what no run writes"):
        write_card(run)


@pytest.mark.parametrize(
    "changes", [{"adapter": None}, {"adapter": ["x"]}, {"tolerance": "x"}, {"rows": None}], ids=str
)
def test_a_merge_json_with_values_of_another_type_is_one_message(merged, changes, capsys):
    write_json(merged / "merge.json", {**read_json(merged / "merge.json"), **changes})
    assert dry_run(merged) == 2
    assert re.search("merge.json made from it, holds|merge it again", capsys.readouterr().err)


def test_a_merge_json_of_another_program_is_no_merge_and_is_not_sent(run, capsys):
    write_json(run / "merge.json", {"format": "ties", "models": ["a", "b"]})
    assert main(["push", str(run), "--repo_id", "me/x", "--dry_run", "--base_model", "me/base", "--json"]) == 0
    sent = json.loads(capsys.readouterr().out)
    assert "adapter_model.safetensors" in sent["files"] and "merge.json" in sent["left_out"]
