"""``scu-trainer export``: in the program that it is for, what was written is the model that was trained."""

from __future__ import annotations

import copy
import json
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scu_trainer import run_files
from scu_trainer.cli.main import main
from scu_trainer.cli.publishing import merge
from scu_trainer.cli.subjects import subject_of
from scu_trainer.data.records import AS_PLAIN_TEXT
from scu_trainer.models.exports import gguf
from scu_trainer.models.exports.llama_cpp import in_llama_cpp
from scu_trainer.models.exports.onnx import onnx_logits
from tests import processes, tiny
from tests.hub.runs import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A LoRA run of two layers, and a full-tuning run of one, because tracing takes twice as long for two."""
    folder = tmp_path_factory.mktemp("export")
    one_layer = tiny.saved_llama(folder / "one_layer", layers=1)
    train(folder, "lora", sample_prompts=0, predict_memory="false")
    train(folder, "full", model_name_or_path=one_layer, tuning="full", sample_prompts=0, predict_memory="false")
    return folder


@pytest.fixture
def converter_forks(monkeypatch):
    """The converter of llama.cpp, from a process that has imported what it takes."""
    monkeypatch.setattr(gguf, "subprocess", SimpleNamespace(run=forked))


def forked(command, **_) -> processes.Done:
    assert command[0] == sys.executable
    return processes.launch(command[1:])


def from_nothing_to_convert(command, **named):
    return subprocess.run(command, **named) if "--outfile" in command else forked(command)


def exported(capsys, *words) -> dict:
    assert main(["export", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *words) -> str:
    assert main(["export", *map(str, words)]) == 2
    told = capsys.readouterr()
    assert told.out == "" and "Traceback" not in told.err
    return told.err


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(("run", "outtype", "most"), [("lora", "f32", 1e-4), ("full", "q8_0", 0.05)])
def test_llama_cpp_gives_the_logits_of_the_run(
    folder, tmp_path, capsys, monkeypatch, converter_forks, run, outtype, most
):
    if run == "lora":  # the converter that writes starts from nothing, as a user's does
        monkeypatch.setattr(gguf.subprocess, "run", from_nothing_to_convert)
    facts = exported(capsys, folder / run, "--to", "gguf", "--outtype", outtype, "--output", tmp_path / "out")
    assert 0 < facts["difference"] <= facts["tolerance"] == most
    assert facts["positions"] == 8 and facts["outtype"] == outtype and facts["checked_on"].endswith("(held out)")
    assert names(tmp_path / "out") == {f"out-{outtype}.gguf", "scu_export.json"} and names(tmp_path) == {"out"}
    assert json.loads((tmp_path / "out" / "scu_export.json").read_text()) == facts
    assert any("renders the chat template to the same text" in note for note in facts["notes"])


def test_ollama_gets_template_and_stops(folder, capsys, converter_forks):
    assert main(["export", str(folder / "lora/checkpoint-1"), "--to", "ollama"]) == 0
    output = folder / "lora-checkpoint-1-ollama"
    assert "next: ollama create lora-checkpoint-1 -f " in capsys.readouterr().out
    assert names(output) == {"Modelfile", "lora-checkpoint-1-f16.gguf", "scu_export.json"}
    text = (output / "Modelfile").read_text()
    assert text.startswith('FROM ./lora-checkpoint-1-f16.gguf\nTEMPLATE """')
    assert 'PARAMETER stop "<|im_end|>"\n' in text and "PARAMETER num_ctx 128\n" in text


def test_what_to_type_next_of_a_folder_that_looks_like_an_option(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder / "full", "-full")
    facts = exported(capsys, "./-full", "--to", "safetensors")
    assert facts["next"] == "scu-trainer push ./-full-safetensors --repo_id OWNER/NAME --dry_run"
    assert main(shlex.split(facts["next"])[1:]) == 0


def test_onnx_runtime_gives_the_logits_of_the_run(folder, tmp_path, capsys):
    import onnxruntime

    facts = exported(capsys, folder / "full", "--to", "onnx", "--output", tmp_path / "out")
    assert 0 < facts["difference"] <= 1e-4 and facts["dtype"] == "float32"
    tokenizer, model = (kind.from_pretrained(folder / "full") for kind in (AutoTokenizer, AutoModelForCausalLM))
    inputs = tokenizer(["the list is read by some function", "the file"], padding=True, return_tensors="pt")
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    given = {field.name: inputs[field.name].numpy() for field in session.get_inputs()}
    with torch.no_grad():
        expected = model(**inputs).logits[inputs["attention_mask"].bool()]
    found = session.run(["logits"], given)[0][given["attention_mask"].astype(bool)]
    numpy.testing.assert_allclose(found, expected.numpy(), atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == tokenizer.get_vocab()


def test_memory_that_runs_out_is_not_taken_for_a_type_that_onnx_runtime_lacks(tmp_path, monkeypatch):
    from transformers.exporters import ExportedModel

    def load(folder, trust_remote_code):
        assert trust_remote_code
        raise MemoryError

    monkeypatch.setattr(ExportedModel, "from_pretrained", load)
    with pytest.raises(MemoryError):
        onnx_logits(tmp_path, {}, trust_remote_code=True)


def test_safetensors(folder, tmp_path, capsys):
    facts = exported(capsys, folder / "full", "--to", "safetensors", "--dtype", "bfloat16", "--output", tmp_path / "a")
    assert facts["difference"] <= facts["tolerance"] == 0.05
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "a").dtype == torch.bfloat16
    merged = exported(capsys, folder / "lora", "--to", "safetensors", "--output", tmp_path / "b")
    assert "adapter_sha256" in merged and "README.md" in names(tmp_path / "b")


def test_a_run_that_answers_plain_text_is_asked_so_in_every_format(folder, tmp_path, capsys, converter_forks):
    run = tmp_path / "plain"
    shutil.copytree(folder / "full", run)
    (run / "chat_template.jinja").unlink()
    described = json.loads((run / "training_config.json").read_text())
    described["data"]["formats"] = {f"question and answer (question, answer){AS_PLAIN_TEXT}": 9}
    (run / "training_config.json").write_text(json.dumps(described))
    facts = exported(capsys, run, "--to", "ollama")
    template = 'TEMPLATE """{{ range .Messages }}{{ .Content }}\n\n{{ end }}"""\n'
    assert template in (tmp_path / "plain-ollama" / "Modelfile").read_text()
    assert "no chat template: end a question with a blank line" in facts["notes"]
    exported(capsys, run, "--to", "safetensors")
    assert main(["prune", str(run), "--amount", "0.5"]) == 0
    shutil.rmtree(run)
    for name in ("plain-safetensors", "plain-pruned"):
        assert subject_of(str(tmp_path / name)).answers_plain_text


def test_a_hub_id_or_folder_of_another_is_checked_on_text_that_is_always_there(
    folder, tmp_path, capsys, converter_forks
):
    facts = exported(capsys, folder / "model", "--to", "gguf", "--output", tmp_path / "out")
    assert facts["checked_on"].startswith("python_docs") and facts["tolerance"] == 0.01


# -- another model is not written --------------------------------------------------------------------------------------


def test_a_type_that_onnx_runtime_does_not_compute_in_is_refused(folder, tmp_path, capsys):
    told = refused(capsys, folder / "full", "--to", "onnx", "--dtype", "bfloat16", "--output", tmp_path / "out")
    assert "ONNX Runtime cannot run the export" in told and "Try --dtype float32" in told
    assert names(tmp_path) == set()


@pytest.mark.parametrize("format", ["gguf", "onnx", "safetensors"])
def test_another_model_is_not_written(folder, tmp_path, capsys, monkeypatch, converter_forks, format):
    from scu_trainer.models import merge

    original = merge.full_weights

    def shifted(model, dtype):
        written = original(copy.deepcopy(model), dtype)  # the run's own model is what it is compared with
        with torch.no_grad():
            next(written.parameters())[:, 0] += 0.5
        return written

    monkeypatch.setattr("scu_trainer.cli.publishing.export.full_weights", shifted)
    said = refused(capsys, folder / "full", "--to", format, "--output", tmp_path / "out")
    assert "not the same model" in said or "not equal to" in said
    assert "of the largest" in said and names(tmp_path) == set()


def test_other_tokens_are_not_written(folder, tmp_path, capsys, monkeypatch, converter_forks):
    monkeypatch.setattr(gguf, "word_rule_name", lambda file: "llama-bpe")
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"row {n}: 1234567 and\n\n  it's 89"}) + "\n" for n in range(20)))
    train(folder, "numbers", dataset=text, max_steps=1, sample_prompts=0, predict_memory="false")
    capsys.readouterr()
    said = refused(capsys, folder / "numbers", "--to", "gguf", "--output", tmp_path / "out")
    assert "a text into other tokens than this model's tokenizer, near" in said and names(tmp_path) == {"text.jsonl"}


def test_what_llama_cpp_cannot_load_is_said(tmp_path):
    from scu_trainer.errors import ModelError

    (tmp_path / "torn.gguf").write_bytes(b"GGUF" + bytes(40))
    with (
        pytest.raises(ModelError, match=r"llama.cpp cannot load the written file: \w"),
        in_llama_cpp(tmp_path / "torn.gguf", 16),
    ):
        pass


@pytest.mark.parametrize("error", ["OSError: 2048 requested and 544 written", "OSError: [Errno 28] No space left"])
def test_a_disk_that_is_full_is_no_fault_of_the_model(folder, tmp_path, capsys, monkeypatch, error):
    def run(command, **_) -> SimpleNamespace:
        return SimpleNamespace(returncode=0 if "--knows" in command else 1, stderr=f"Traceback\n{error}\n")

    monkeypatch.setattr(gguf, "subprocess", SimpleNamespace(run=run))
    said = refused(capsys, folder / "full", "--to", "gguf", "--output", tmp_path / "out")
    assert f"cannot hold the model: {error}; free some space" in said and names(tmp_path) == set()


# -- refusals, before anything is loaded -------------------------------------------------------------------------------


def test_refusals(folder, tmp_path, capsys, monkeypatch, converter_forks):
    run = folder / "full"
    assert "already exists" in refused(capsys, run, "--to", "onnx", "--output", folder)
    assert "--outtype is for GGUF files" in refused(capsys, run, "--to", "onnx", "--outtype", "f16")
    assert "llama-quantize IN.gguf OUT.gguf Q4_K_M" in refused(capsys, run, "--to", "gguf", "--outtype", "q4_k_m")
    assert "has no convert_hf_to_gguf.py" in refused(capsys, run, "--to", "gguf", "--converter", tmp_path)
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "config.json").write_text(json.dumps({"architectures": ["StrangeForCausalLM"], "model_type": "llama"}))
    said = refused(capsys, stranger, "--to", "gguf", "--output", tmp_path / "out")
    reason = "NotImplementedError: Architecture 'StrangeForCausalLM'"
    assert f"StrangeForCausalLM cannot be converted to GGUF: {reason}" in said
    (stranger / "config.json").write_text(json.dumps({"model_type": "trident"}))
    assert "is of task: sensor-classification" in refused(capsys, stranger, "--to", "onnx")
    (stranger / "config.json").write_text(json.dumps({"architectures": ["ViTForImageClassification"]}))
    assert "GGUF holds language models. Try --to onnx" in refused(capsys, stranger, "--to", "ollama")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'scu-trainer[gguf]'" in refused(capsys, run, "--to", "gguf")
    assert "ONNX needs onnx and onnxscript and onnxruntime, not installed here" in refused(capsys, run, "--to", "onnx")
    assert "out" not in names(tmp_path)


def test_the_file_and_the_weights_that_it_is_made_of_need_room_together(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gguf, "_run", lambda *words: None)
    monkeypatch.setattr(merge, "load_with_rows", lambda *arguments: pytest.fail("began to export"))
    weights = (folder / "full" / "model.safetensors").stat().st_size
    for outtype, more in (("f32", 2), ("f16", 1.5)):
        monkeypatch.setattr(run_files, "free_bytes", lambda path, more=more: int(weights * (more - 0.05)))
        said = refused(capsys, folder / "full", "--to", "gguf", "--outtype", outtype, "--output", tmp_path / "out")
        assert "set --output to a directory on a larger disk" in said
