"""``scu-trainer eval`` on classifiers: alone, beside another, and a word on rows that a model may have learned."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from scu_trainer.cli import train
from scu_trainer.cli.evaluation import eval as command
from scu_trainer.run_files import read_json

SMALL = "--sensor_hidden_size 16 --sensor_heads 2 --sensor_layers 1 --sensor_fusion_layers 1 --sensor_channels 4"
SHORT = "--max_steps 2 --eval_strategy no --save_strategy no --report_to none --use_cpu true --ema_decay 0.5"
SHORT += " --predict_memory false"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> SimpleNamespace:
    """Classifiers of 90 recordings, of the same again, and of 120; a checkpoint of a fourth."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name: str, *flags: str) -> str:
        words = ["--task", "sensor-classification", "--synthetic", "true", "--cache_dir", str(folder / "cache")]
        words += ["--output_dir", str(folder / name), *SMALL.split(), *SHORT.split(), *flags]
        assert train.main(words) == 0
        return str(folder / name)

    few = ("--sensor_samples", "90")
    return SimpleNamespace(
        first=run("first", *few),
        other=run("other", *few, "--learning_rate", "0.1"),
        more=run("more", "--sensor_samples", "120"),
        checkpoint=run("kept", *few, "--save_strategy", "steps", "--save_steps", "1") + "/checkpoint-1",
    )


def evaluate(capsys, *words: str) -> dict:
    capsys.readouterr()
    assert command.main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_has_the_figures_that_training_reported(runs, capsys):
    found = evaluate(capsys, runs.first)
    trained = read_json(f"{runs.first}/scu_metrics.json")
    assert found["model"]["accuracy"]["value"] == trained["held_out_accuracy_after"]["value"]
    assert found["model"]["bpt"]["value"] == pytest.approx(trained["held_out_bpt_after"]["value"], rel=1e-5)
    assert (found["item"], found["unit"], found["documents"]) == ("recording", "label", trained["held_out_documents"])
    assert found["notes"] == []


def test_two_models_are_compared_by_accuracy(runs, capsys):
    found = evaluate(capsys, runs.first, "--against", runs.other)
    (other,) = found["against"]
    values = [model["accuracy"]["value"] for model in (found["model"], other)]
    assert other["difference"]["value"] == pytest.approx(values[0] - values[1]) and found["notes"] == []
    assert found["windows"] is None and "perplexity" not in other


def test_another_number_of_recordings_is_another_split(runs, capsys):
    found = evaluate(capsys, runs.first, "--against", runs.more)
    assert found["notes"] == [f"{runs.more} was trained on another split: it may have learned some of these documents"]


def test_averages_beside_a_checkpoint_are_named(runs, capsys):
    (note,) = evaluate(capsys, runs.checkpoint)["notes"]
    assert "its weights are scored, not their moving averages (ema.safetensors)" in note


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--against", "base"], "was trained from scratch, so it has no base; drop base from --against"),
        (["--against", "merged"], "has task sensor-classification, but merged needs text-generation"),
        (["--stride", "8"], "stride only has an effect on task: text-generation"),
        (["--tasks", "arc_easy"], "tasks of lm-evaluation-harness need task: text-generation"),
        (["--batch_tokens", "64"], "batch_tokens has no effect on task: sensor-classification"),
        (["--block_size", "64"], "block_size has no effect on task: sensor-classification"),
        (["--task", "image-clasification"], "did you mean 'image-classification'?"),
    ],
)
def test_what_cannot_be_asked_is_refused(runs, capsys, words, message):
    assert command.main([runs.first, *words]) == 2
    assert message in capsys.readouterr().err
