"""A run on several sources: figures of each, and resumed it is the run that was not interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from safetensors.torch import load_file

from scu_trainer.cli import train
from scu_trainer.cli.evaluation import eval as command
from scu_trainer.cli.publishing import merge, report
from scu_trainer.run_files import read_json
from scu_trainer.train.evaluation.by_source import metrics_by_source, scores_by_source
from scu_trainer.train.evaluation.scoring import DocumentScores, bpt_metrics
from tests import tiny

SENTENCES = {"web": "The cat sat on the mat and looked at the door.", "code": "return the list of values in a file"}
STEPS, STOP = 12, 5


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("mixture")
    entries = []
    for number, (name, sentence) in enumerate(SENTENCES.items()):
        path = folder / f"{name}.jsonl"
        rows = [{"text": f"{sentence} Number {i}. " * 3} for i in range(40 - 25 * number)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        entries.append({"dataset": str(path), "weight": 3 - 2 * number})
    return SimpleNamespace(folder=folder, entries=entries, model=tiny.saved_llama(folder / "model"))


def run(work, name: str, **changes) -> Path:
    options = {
        "model_name_or_path": work.model,
        "dataset": json.dumps(work.entries),
        "block_size": 32,
        "validation_split_percentage": 20,
        "stopping_strategy": "all_exhausted",
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "lora_dropout": 0.1,
        "learning_rate": 0.01,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_steps": STOP,
        "report_to": "none",
        "use_cpu": "true",
        "predict_memory": "false",
        "sample_prompts": 0,
        "preflight": "off",
        "cache_dir": work.folder / "cache",
        "output_dir": work.folder / name,
        **changes,
    }
    assert train.main([word for key, value in options.items() for word in (f"--{key}", str(value))]) == 0
    return work.folder / name


@pytest.fixture(scope="module")
def whole(work) -> Path:
    return run(work, "whole")


KINDS = {"plain": {}, "curriculum": {"curriculum": "token_budget+noise_guard"}, "stream": {"streaming": "true"}}


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_is_uninterrupted_bit_for_bit(work, whole, kind):
    changes = KINDS[kind] | ({"max_eval_documents": 4} if kind == "stream" else {})
    first = whole if kind == "plain" else run(work, kind, **changes)
    resumed = run(work, f"{kind}-resumed", resume_from_checkpoint=first / f"checkpoint-{STOP}", **changes)
    assert tiny.same(*(load_file(folder / "adapter_model.safetensors") for folder in (first, resumed)))
    last = [read_json(folder / "trainer_state.json")["log_history"] for folder in (first, resumed)]
    losses = [[(row["step"], row["eval_bpt_web"]) for row in log if "eval_bpt_web" in row] for log in last]
    assert losses[0] == losses[1] and len(losses[0]) == 3


def test_every_source_has_its_held_out_figures(whole):
    figures, history = read_json(whole / "scu_metrics.json"), read_json(whole / "trainer_state.json")["log_history"]
    sources = figures["held_out_sources"]
    assert {name: source["documents"] for name, source in sources.items()} == {"web": 8, "code": 3}
    assert sum(source["tokens"] for source in sources.values()) == figures["held_out_tokens"]
    bits = sum(source["bpt_after"]["value"] * source["tokens"] for source in sources.values())
    assert bits / figures["held_out_tokens"] == pytest.approx(figures["held_out_bpt_after"]["value"])
    last = [row for row in history if "eval_bpt" in row][-1]
    for name, source in sources.items():
        assert last[f"eval_bpt_{name}"] == pytest.approx(source["bpt_after"]["value"], rel=1e-5)
    assert last["eval_bpt_web"] != last["eval_bpt_code"]
    data = read_json(whole / "training_config.json")["data"]
    assert [source["row_share"] for source in data["sources"]] == pytest.approx([0.75, 0.25], abs=0.01)
    assert data["sources"][1]["passes"] > 1


def test_eval_says_the_same_of_each_source(whole, capsys):
    capsys.readouterr()
    assert command.main([str(whole), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = read_json(whole / "scu_metrics.json")["held_out_sources"]
    assert found["dataset"].count(".jsonl") == 2 and found["notes"] == []
    for name, source in found["model"]["sources"].items():
        assert source["bpt"]["value"] == pytest.approx(expected[name]["bpt_after"]["value"], rel=1e-5)
    assert command.main([str(whole), "--against", "base", "--max_length", "16", "--stride", "8"]) == 0
    printed = capsys.readouterr().out
    assert "whole by source, bits/token:" in printed and "base by source" in printed
    assert "8 documents" in printed and "3 documents" in printed


def test_the_card_and_the_report_name_every_source(whole, monkeypatch):
    monkeypatch.setattr(report, "png", lambda plot, theme: b"picture")  # the page has drawings of its own
    card = (whole / "README.md").read_text()
    assert "- dataset: web.jsonl + code.jsonl" in card and "- source web: 7" in card
    assert f"{whole.parent}/web" not in card
    assert report.main([str(whole)]) == 0
    assert "code.jsonl" in (whole / "report" / "index.html").read_text()
    assert merge.main([str(whole), "--output", str(whole.parent / "merged")]) == 0


def test_another_mixture_may_hold_learned_documents(work, whole, capsys):
    capsys.readouterr()
    assert command.main([str(whole), "--json", "--dataset", work.entries[0]["dataset"]]) == 0
    assert any("may have learned" in note for note in json.loads(capsys.readouterr().out)["notes"])


# -- arithmetic --------------------------------------------------------------------------------------------------------


class Rows:
    """What figures by source need of held-out rows: their documents."""

    def __init__(self, documents: list[int]) -> None:
        self.documents = documents

    def __getitem__(self, name: str) -> list[int]:
        assert name == "document"
        return self.documents


def test_scores_follow_the_numbers_of_documents():
    data = SimpleNamespace(sources=("a", "b"), eval=Rows([4, 4, 0, 3, 1, 3]))
    scores = DocumentScores(numpy.array([1.0, 10.0, 20.0, 2.0]), numpy.array([1, 1, 1, 1]))  # of 0, 1, 3, 4
    found = scores_by_source(scores, data)
    assert {name: part.nats.tolist() for name, part in found.items()} == {"a": [1.0, 2.0], "b": [10.0, 20.0]}
    assert scores_by_source(scores, SimpleNamespace(eval=data.eval)) == {}


def test_rows_in_another_order_give_no_figures_by_source(caplog):
    import datasets

    rows = {"labels": [[-100, 5], [-100, 5, 6]], "document": [0, 1]}
    data = SimpleNamespace(sources=("a", "b"), eval=datasets.Dataset.from_dict(rows))
    metrics = metrics_by_source(bpt_metrics, data)
    stored = SimpleNamespace(predictions=numpy.array([[1.0, 1.0], [4.0, 2.0]]))
    assert metrics(stored)["bpt_b"] == pytest.approx(2 / numpy.log(2))
    with caplog.at_level("WARNING", "scu_trainer"):
        assert set(metrics(SimpleNamespace(predictions=stored.predictions[::-1]))) == {"bpt", "perplexity"}
    assert "no metrics by source" in caplog.text
    assert metrics_by_source(bpt_metrics, SimpleNamespace()) is bpt_metrics
