"""``scu-trainer prune``: what it says of a run, what stock transformers reads, and what it refuses."""

from __future__ import annotations

import json
import shlex

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from scu_trainer.cli import train
from scu_trainer.cli.evaluation import eval as evaluate
from scu_trainer.cli.main import main
from scu_trainer.cli.publishing import prune
from scu_trainer.data import store
from tests.cli.test_train import documents, flags, model_dir

__all__ = ["documents", "flags", "model_dir"]  # fixtures


def refused(capsys, *words) -> str:
    assert main(["prune", *map(str, words)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "Traceback" not in printed.err
    return printed.err


def test_a_run_becomes_smaller(flags, tmp_path, capsys):
    assert train.main([*flags, "--tuning", "full"]) == 0
    capsys.readouterr()
    assert main(["prune", str(tmp_path / "run"), "--amount", "0.5", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    output = tmp_path / "run-pruned"
    assert facts == json.loads((output / "prune.json").read_text()) and not output.with_name("run-pruned.lock").exists()
    assert facts["units"] == {"neurons": [[64, 32]], "heads": [[2, 1]]}
    for name in ("bits", "weights", "size_bytes"):
        assert facts["before"][name] > 0 and facts["after"][name] > 0
    assert facts["after"]["size_bytes"] < facts["before"]["size_bytes"]
    model = AutoModelForCausalLM.from_pretrained(output)
    assert sum(p.numel() for p in model.parameters()) == facts["after"]["weights"]
    assert len(AutoTokenizer.from_pretrained(output)) == model.config.vocab_size
    _is_scored_the_same(tmp_path, facts, capsys)
    student = ["--model_name_or_path", str(output), "--teacher", str(tmp_path / "run"), "--tuning", "full"]
    assert train.main([*flags, *student, "--output_dir", str(tmp_path / "again")]) == 0
    capsys.readouterr()
    assert refused(capsys, tmp_path / "run").endswith("or give another folder with --output\n")


def _is_scored_the_same(tmp_path, facts, capsys) -> None:
    """By ``scu-trainer eval``, on the rows that the run held out."""
    for name, key in (("run", "before"), ("run-pruned", "after")):
        words = [str(tmp_path / "run"), "--against", str(tmp_path / name), "--mixed_precision", "no", "--json"]
        assert evaluate.main(words) == 0
        found = json.loads(capsys.readouterr().out)["against"][0]
        assert found["bpt"]["value"] == pytest.approx(facts[key]["bits"], rel=1e-5)


IMAGES = "--task image-classification --dataset_size 60 --image_size 32 --max_steps 2 --predict_memory false"


def test_a_classifier_says_its_accuracy(tmp_path, capsys):
    words = [*IMAGES.split(), "--use_cpu", "true", "--cache_dir", str(tmp_path / "cache")]
    assert train.main([*words, "--output_dir", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert "its run determines what is held out; drop it" in refused(capsys, tmp_path / "run", "--seed", 3)
    assert main(["prune", str(tmp_path / "run"), "--output", str(tmp_path / "small")]) == 0
    printed = capsys.readouterr().out
    assert "channels 64 to 48, 128 to 96, 256 to 192, 512 to 384" in printed and "held-out accuracy" in printed
    assert "bytes: 42.7 MiB before, 24.0 MiB after" in printed
    following = shlex.split(printed.partition("next: scu-trainer train ")[2])
    assert following[:2] == ["--config", str(tmp_path / "run" / "training_config.json")]
    assert train.main([*following, "--max_steps", "2"]) == 0  # as classifier, on the images of the run


def test_paths_are_printed_as_one_types_them_here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    figures = {"weights": 2, "size_bytes": 8, "bits": 1.0}
    facts = {"output": str(tmp_path / "small"), "source": str(tmp_path / "run"), "unit": "token", "before": figures}
    facts |= {"after": figures, "units": {}, "change": {"value": 0.0, "low": 0.0, "high": 0.0}}
    said = prune.screen(facts, " --dataset my.jsonl")
    assert said.startswith("pruned: small\n")
    command = "--dataset my.jsonl --model_name_or_path small --tuning full --teacher run --output_dir small-trained"
    assert said.endswith(f"next: scu-trainer train {command}")


def test_one_held_out_document_gives_no_interval():
    """It cannot be resampled: bounds that are the value itself would claim a certainty that nobody measured."""
    figures = {"weights": 2, "size_bytes": 8, "bits": 1.0}
    facts = {"output": "small", "source": "run", "unit": "token", "before": figures, "after": figures, "units": {}}
    change = {"value": 0.5, "low": None, "high": None, "confidence": 0.95}
    assert "1.000 before, 1.000 after (+0.500)\n" in prune.screen({**facts, "change": change}, "")


def test_what_cannot_be_pruned_is_refused(model_dir, documents, flags, tmp_path, capsys):
    assert train.main(flags) == 0
    capsys.readouterr()
    said = refused(capsys, tmp_path / "run")
    assert "is an adapter; merge it first" in said and f"scu-trainer prune {tmp_path / 'run-merged'} --dataset" in said
    assert "add --dataset NAME" in refused(capsys, model_dir)
    assert "allowed: above 0 and below 1" in refused(capsys, model_dir, "--amount", "1.5")
    assert "is not a folder here" in refused(capsys, "owner/model")
    cadence = tmp_path / "cadence"
    cadence.mkdir()
    (cadence / "config.json").write_text('{"model_type": "cadence"}')
    assert "is of task: word-generation; prune is for" in refused(capsys, cadence)


def test_nothing_is_left_where_it_fails(model_dir, documents, tmp_path, capsys):
    output = tmp_path / "small"
    words = [model_dir, "--dataset", documents, "--block_size", 64, "--amount", "0.001", "--output", output]
    assert "removes nothing (neurons 64, heads 2)" in refused(capsys, *words)
    assert not output.exists() and not list(tmp_path.glob("small*"))


def test_another_process_was_faster(model_dir, documents, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(store, "build_once", lambda output, build: output)
    words = [model_dir, "--dataset", documents, "--block_size", 64, "--output", tmp_path / "small"]
    assert "another process has written" in refused(capsys, *words)
