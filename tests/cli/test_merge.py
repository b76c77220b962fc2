"""``scu-trainer merge``: whole or not at all, and only if it is the same model."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from scu_trainer.cli.evaluation import eval as evaluate
from scu_trainer.cli.main import main
from scu_trainer.cli.publishing import merge
from scu_trainer.cli.subjects import Subject, subject_of
from scu_trainer.data import store
from scu_trainer.data.records import AS_PLAIN_TEXT
from scu_trainer.errors import ModelError
from scu_trainer.hardware import probe
from scu_trainer.settings import ModelSettings
from tests import tiny
from tests.hub.runs import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A LoRA, a QLoRA and a full-tuning run."""
    folder = tmp_path_factory.mktemp("merge")
    train(folder, "lora")
    train(folder, "qlora", tuning="qlora")
    train(folder, "full", tuning="full")
    return folder


def refused(capsys, *words) -> str:
    assert main(["merge", *map(str, words)]) == 2
    told = capsys.readouterr()
    assert told.out == "" and "Traceback" not in told.err
    return told.err


def test_averages_beside_a_checkpoint_are_named(folder, tmp_path, capsys):
    checkpoint = shutil.copytree(folder / "lora/checkpoint-1", tmp_path / "lora-1")
    shutil.copy(checkpoint / "adapter_model.safetensors", checkpoint / "ema.safetensors")
    assert main(["merge", str(checkpoint)]) == 0
    assert "its weights are taken, not their moving averages (ema.safetensors)" in capsys.readouterr().err
    assert main(["merge", str(folder / "lora/checkpoint-1"), "--output", str(tmp_path / "other")]) == 0
    assert "averages" not in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
@pytest.mark.parametrize("run", ["lora", "qlora", "lora/checkpoint-1"])
def test_merged_and_checked(folder, tmp_path, capsys, run, dtype):
    output = tmp_path / "merged"
    assert merge.main([str(folder / run), "--output", str(output), "--dtype", dtype, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    expected = "float32" if dtype == "auto" else dtype
    assert facts["dtype"] == expected and facts["checked_on"] == "documents.jsonl (held out)" and facts["rows"] == 4
    assert (
        0 < facts["difference"] <= facts["tolerance"] == {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.01}[expected]
    )
    assert json.loads((output / "merge.json").read_text()) == facts
    there = {path.name for path in output.iterdir()}
    wanted = {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "README.md"}
    assert wanted <= there and [path.name for path in tmp_path.iterdir()] == ["merged"]
    for place in (folder / run, output):
        modes = {path.stat().st_mode for path in place.iterdir() if path.is_file()}
        assert len(modes) == 1, "whoever reads one file may read all"
    assert f"merged into {expected}" in (output / "README.md").read_text()
    assert ("weights of step 1" in (output / "README.md").read_text()) == ("checkpoint" in run)


def test_beside_the_run_and_scored_like_the_adapter(folder, capsys):
    assert main(["merge", str(folder / "lora"), "--max_shard_size", "300KB"]) == 0
    told = capsys.readouterr().out
    assert f"merged: {folder / 'lora-merged'}" in told and "logits differ by" in told
    assert len(list((folder / "lora-merged").glob("model-*.safetensors"))) > 1
    data = [
        "--eval_dataset",
        str(folder / "documents.jsonl"),
        "--block_size",
        "32",
        "--json",
        "--mixed_precision",
        "no",
    ]
    bits = []
    for name in ("lora", "lora-merged"):
        assert evaluate.main([str(folder / name), *data]) == 0
        bits.append(json.loads(capsys.readouterr().out)["model"]["bpt"]["value"])
    assert bits[0] == pytest.approx(bits[1], abs=1e-5)
    assert "already exists; remove it, or give another folder with --output" in refused(capsys, folder / "lora")


# -- nothing is written ------------------------------------------------------------------------------------------------


def test_another_model_than_the_adapter(folder, tmp_path, capsys, monkeypatch):
    """As if a weight had been lost on its way to the disk."""
    write = merge.write_model

    def torn(merged, processor, target, size):
        write(merged, processor, target, size)
        weights = load_file(target / "model.safetensors")
        weights["model.layers.0.mlp.up_proj.weight"].mul_(1.01)
        save_file(weights, target / "model.safetensors", {"format": "pt"})

    monkeypatch.setattr(merge, "write_model", torn)
    told = refused(capsys, folder / "lora", "--output", tmp_path / "merged")
    assert "the merged model is not equal to base and adapter" in told and "1e-05 is allowed for float32" in told
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_meanwhile(folder, tmp_path, capsys, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merge, "write_model", full)
    assert "No space left on device" in refused(capsys, folder / "lora", "--output", tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []


def test_another_process_was_faster(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(store, "build_once", lambda output, build: output)
    told = refused(capsys, folder / "lora", "--output", tmp_path / "merged")
    assert "another process has written" in told and list(tmp_path.iterdir()) == []


def test_too_little_memory_is_told_before_anything_is_loaded(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(probe, "ram_bytes", lambda: (2**30, 2**20))
    monkeypatch.setattr(merge, "load_with_rows", lambda *arguments: pytest.fail("began to merge"))
    told = refused(capsys, folder / "lora", "--output", tmp_path / "merged")
    assert "of main memory (two float32 copies and the model), but only 1.0 MiB are free" in told
    assert list(tmp_path.iterdir()) == []


def test_too_little_disk_is_told_before_anything_is_loaded(folder, tmp_path, capsys, monkeypatch):
    from scu_trainer import run_files

    monkeypatch.setattr(run_files, "free_bytes", lambda path: 1000)
    monkeypatch.setattr(merge, "load_with_rows", lambda *arguments: pytest.fail("began to merge"))
    assert "set --output to a directory on a larger disk" in refused(
        capsys, folder / "lora", "--output", tmp_path / "m"
    )


def test_the_data_of_the_run_are_gone(folder, tmp_path, capsys):
    shutil.copytree(folder / "lora", tmp_path / "run")
    content = (tmp_path / "run" / "training_config.json").read_text()
    (tmp_path / "run" / "training_config.json").write_text(content.replace("documents.jsonl", "gone.jsonl"))
    assert merge.main([str(tmp_path / "run"), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["checked_on"] == "python_docs (comes with Python)"
    assert "the data of the run cannot be read" in told.err


def test_an_adapter_of_a_model_that_reads_fewer_tokens_than_are_checked(tmp_path, capsys):
    base = tiny.saved_llama(tmp_path / "model")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"max_position_embeddings": merge.CHECKED_TOKENS - 32}))
    tiny.lora(LlamaForCausalLM.from_pretrained(base)).save_pretrained(tmp_path / "adapter")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, tmp_path / "adapter")
    assert main(["merge", str(tmp_path / "adapter"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == merge.CHECKED_ROWS * (merge.CHECKED_TOKENS - 32)


def test_a_merged_model_is_asked_as_its_run_is(folder, tmp_path):
    shutil.copytree(folder / "lora", tmp_path / "run")
    described = json.loads((tmp_path / "run" / "training_config.json").read_text())
    described["data"]["formats"] = {f"question and answer (question, answer){AS_PLAIN_TEXT}": 9}
    (tmp_path / "run" / "training_config.json").write_text(json.dumps(described))
    assert main(["merge", str(tmp_path / "run")]) == 0
    assert subject_of(str(tmp_path / "run-merged")).answers_plain_text
    shutil.rmtree(tmp_path / "run")
    assert subject_of(str(tmp_path / "run-merged")).answers_plain_text


def test_adapters_of_models_that_are_ours(folder):
    settings = ModelSettings(model_name_or_path=str(folder / "lora"))
    subject = Subject("runs/gru", settings, {"configuration": {"task": "word-generation"}})
    with pytest.raises(
        ModelError, match="an adapter of task: word-generation; merge is for text-generation and image-"
    ):
        merge._require_adapter(subject)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["full"], "holds full weights and no adapter, so there is nothing to merge"),
        (["nothing"], "nothing"),
        (["lora", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["lora", "--max_shard_size", "5"], "give a size with its unit, for instance 5GB or 500MB"),
        (["lora", "--max_shard_size", "5GiB"], "give a size with its unit, for instance 5GB or 500MB"),
        (["lora", "--max_shard_size", "5G"], "give a size with its unit, for instance 5GB or 500MB"),
        (["lora", "--format", "x"], "unknown option --format; --help lists the options"),
        (["lora", "--outputt", "x"], "unknown option --outputt (did you mean '--output'?)"),
    ],
)
def test_mistakes_at_the_keyboard(folder, capsys, words, told):
    assert told in refused(capsys, folder / words[0], *words[1:])
