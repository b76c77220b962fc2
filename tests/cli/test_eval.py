"""``scu-trainer eval`` as a user meets it: on runs, checkpoints, adapters and models, alone and against another."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from scu_trainer.cli import train
from scu_trainer.cli.evaluation import eval as command
from scu_trainer.cli.evaluation.report import verdict
from scu_trainer.cli.evaluation.screen import as_text
from scu_trainer.cli.main import main
from scu_trainer.cli.origin import source_run_of, with_source_run
from scu_trainer.cli.subjects import subject_of
from scu_trainer.data import prepare
from scu_trainer.errors import UserError
from scu_trainer.models.loading.load import load_tokenizer
from scu_trainer.run_files import read_json, write_json
from scu_trainer.train.evaluation.scoring import BootstrapInterval
from scu_trainer.train.tasks import text
from tests import processes, tiny

ROOT = Path(__file__).parents[2]
WORDS = "the file of a list is read by some function that returns values and writes them back".split()
FULL = "--tuning full --scu false --seed 7 --data_seed 5".split()
"""Other weights and order, but the same documents held out."""
DOCUMENTS, HELD_OUT = 48, 12


def write_documents(path: Path, count: int, words_each: int = 30, seed: int = 0) -> Path:
    generator = random.Random(seed)
    texts = [" ".join(generator.choices(WORDS, k=words_each)) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> SimpleNamespace:
    """A model folder, documents, and a LoRA and a full-tuning run on them."""
    folder = tmp_path_factory.mktemp("work")
    documents = write_documents(folder / "documents.jsonl", DOCUMENTS)
    model = tiny.saved_llama(folder / "model")
    options = {
        "model_name_or_path": model,
        "dataset": documents,
        "block_size": 64,
        "validation_split_percentage": 100 * HELD_OUT / DOCUMENTS,
        "max_steps": 3,
        "save_steps": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "report_to": "none",
        "use_cpu": "true",
        "sample_prompts": 0,
        "predict_memory": "false",
        "seed": 5,
        "cache_dir": folder / "cache",
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert train.main([*flags, "--output_dir", str(folder / "lora")]) == 0
    assert train.main([*flags, "--output_dir", str(folder / "full"), *FULL]) == 0
    return SimpleNamespace(folder=folder, documents=documents, model=model, lora=folder / "lora", full=folder / "full")


@pytest.fixture
def broken_run(work, tmp_path):
    """A copy of the LoRA run to break."""
    return Path(shutil.copytree(work.lora, tmp_path / "run"))


def edit_json(path: Path, **changes) -> None:
    write_json(path, {**read_json(path), **changes})


# -- figures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_run_has_the_figures_that_training_reported(evaluate, work, kind):
    run = getattr(work, kind)
    expected = read_json(run / "scu_metrics.json")
    report = evaluate(run, "--against", "base")
    assert (report["documents"], report["tokens"]) == (HELD_OUT, expected["held_out_tokens"])
    assert report["model"]["bpt"] == pytest.approx(expected["held_out_bpt_after"])
    assert report["against"][0]["bpt"] == pytest.approx(expected["held_out_bpt_before"])
    for name in ("value", "low", "high"):
        assert report["model"]["perplexity"][name] == pytest.approx(2.0 ** report["model"]["bpt"][name])
    assert report["against"][0]["name"] == str(work.model)
    difference = report["against"][0]["difference"]
    change = {name: difference[name] for name in ("value", "low", "high", "confidence")}
    assert change == pytest.approx(expected["held_out_bpt_change"], abs=1e-9)
    assert difference["verdict"] == "lower" and change["high"] < 0
    assert report["fingerprint"] == read_json(run / "training_config.json")["data"]["fingerprint"]
    assert report["split_seed"] == 5 and report["notes"] == []


def test_a_checkpoint_is_scored_on_the_documents_of_its_run(evaluate, work):
    report = evaluate(work.lora / "checkpoint-2", "--against", work.lora)
    alone = evaluate(work.lora)
    assert report["fingerprint"] == alone["fingerprint"]
    difference = report["against"][0].pop("difference")
    assert report["against"] == [alone["model"]]
    assert difference["value"] != 0.0


@pytest.mark.parametrize("other", ["lora", "lora/checkpoint-3"])
def test_equal_weights_differ_by_exactly_nothing(evaluate, work, other):
    difference = evaluate(work.lora, "--against", work.folder / other)["against"][0]["difference"]
    assert (difference["value"], difference["low"], difference["high"]) == (0.0, 0.0, 0.0)
    assert difference["verdict"] == "equal to four digits"


def test_a_worse_model_is_said_to_be_higher(evaluate, work):
    report = evaluate(work.model, "--against", work.full)
    (other,) = report["against"]
    assert other["difference"]["verdict"] == "higher" and other["difference"]["low"] > 0
    assert report["documents"] == HELD_OUT, "the run tells the documents, wherever it stands"


def test_an_adapter_without_its_run(evaluate, work, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(work.lora / name, adapter)
    data = ("--dataset", work.documents, "--block-size", 64, "--validation-split-percentage", 25, "--seed", 5)
    alone, in_its_run = (
        evaluate(*words, "--mixed_precision", "no") for words in ((adapter, *data), (work.lora, "--seed", 5))
    )
    assert alone["model"]["bpt"] == in_its_run["model"]["bpt"]
    assert evaluate(adapter, *data, "--against", "base")["against"][0]["name"] == str(work.model)


def test_the_chat_template_of_the_run_makes_the_rows_of_all(evaluate, broken_run, tmp_path):
    """A base has another template or none, and would read the same conversations as other tokens."""
    path = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "the file"}, {"role": "assistant", "content": "of a list is read"}]
    path.write_text((json.dumps({"messages": turns}) + "\n") * 20)
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} is read by it {% endfor %}"
    (broken_run / "chat_template.jinja").write_text(template)
    alone = evaluate(broken_run, "--eval_dataset", path, "--assistant_only_loss", "false")
    beside = evaluate(broken_run, "--eval_dataset", path, "--assistant_only_loss", "false", "--against", "base")
    assert beside["model"] == alone["model"] and beside["tokens"] == alone["tokens"] > 0
    assert beside["fingerprint"] == alone["fingerprint"]
    assert beside["against"][0]["difference"]["value"] != 0.0


def test_more_bits_than_a_perplexity_can_tell(evaluate, work, tmp_path):
    model = Path(shutil.copytree(work.model, tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = 1e3 * torch.randn(weights["lm_head.weight"].shape)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    report = evaluate(model, "--eval_dataset", work.documents, "--block_size", 64)
    assert report["model"]["bpt"]["value"] > 1024 and report["model"]["perplexity"]["value"] is None
    assert "too large" in as_text(report)


def test_a_model_on_a_split_and_on_a_whole_file(evaluate, work, tmp_path):
    fresh = write_documents(tmp_path / "fresh.jsonl", 30, seed=1)
    split = evaluate(work.model, "--dataset", fresh, "--validation_split_percentage", 50)
    assert split["documents"] == 15 and split["notes"] == []
    whole = evaluate(work.model, "--eval_dataset", fresh)
    assert whole["documents"] == 30 and whole["dataset"] == str(fresh)


def test_batches_resamples_and_level(evaluate, work):
    report = evaluate(work.lora, "--batch-tokens", 64, "--resamples", 50, "--confidence", 0.5, "--seed", 9)
    standard = evaluate(work.lora)
    assert report["model"]["bpt"]["value"] == pytest.approx(standard["model"]["bpt"]["value"], rel=1e-6)
    assert (report["resamples"], report["seed"], report["model"]["bpt"]["confidence"]) == (50, 9, 0.5)
    assert report["model"]["bpt"]["high"] < standard["model"]["bpt"]["high"]
    assert report["split_seed"] == 5, "the run tells the split"


# -- which documents ---------------------------------------------------------------------------------------------------


def test_data_seed_decides_what_is_held_out_and_seed_the_rest(evaluate, work):
    configs = [read_json(run / "training_config.json") for run in (work.lora, work.full)]
    assert [(config["seed"], config["split_seed"]) for config in configs] == [(5, 5), (7, 5)]
    assert configs[0]["data"]["fingerprint"] == configs[1]["data"]["fingerprint"]
    assert evaluate(work.lora, "--against", work.full)["notes"] == []


def test_a_run_from_before_split_seeds_was_split_by_its_seed(evaluate, broken_run):
    config = read_json(broken_run / "training_config.json")
    del config["split_seed"]
    write_json(broken_run / "training_config.json", config)
    assert evaluate(broken_run)["split_seed"] == 5


def test_flags_override_the_data_settings_of_a_run(evaluate, work):
    report = evaluate(work.lora, "--validation_split_percentage", 50)
    assert report["documents"] == DOCUMENTS // 2
    assert report["notes"] == [f"{work.lora} was trained on another split: it may have learned some of these documents"]


@pytest.mark.parametrize(
    ("kind", "words"), [("lora", ["merge"]), ("full", ["export", "--to", "safetensors"]), ("full", ["prune"])]
)
def test_what_was_made_of_a_run_is_scored_on_what_that_held_out(evaluate, refused, work, tmp_path, kind, words):
    run, made = shutil.copytree(getattr(work, kind), tmp_path / "run"), tmp_path / "made"
    assert main([*words, str(run), "--output", str(made)]) == 0
    expected, found = evaluate(run, "--against", "base"), evaluate(made, "--dataset", work.documents)
    for key in ("fingerprint", "split_seed", "documents", "mixed_precision", "notes"):
        assert found[key] == expected[key], key
    assert evaluate(made)["model"] == found["model"]
    assert evaluate(made, "--against", "base")["against"][0]["bpt"] == expected["against"][0]["bpt"]
    other = evaluate(made, "--dataset", work.documents, "--validation_split_percentage", 50)
    assert other["notes"] == [f"{made} was trained on another split: it may have learned some of these documents"]
    edit_json(run / "training_config.json", seed=6)
    found = evaluate(made, "--dataset", work.documents)
    assert found["notes"][-1] == (
        f"{made} was made from {run}, and the run is no longer found there: it may have learned some of these documents"
    )
    shutil.rmtree(run)
    assert "so its base is unknown; give it as a path or Hub id: --against PATH_OR_ID" in refused(
        made, "--against", "base"
    )


def test_a_folder_from_before_runs_were_noted_is_known_by_its_adapter(evaluate, refused, work, broken_run, tmp_path):
    merged = tmp_path / "run-merged"
    assert main(["merge", str(broken_run)]) == 0
    facts = read_json(merged / "merge.json")
    write_json(merged / "merge.json", {name: value for name, value in facts.items() if name != "run"})
    assert evaluate(merged, "--dataset", work.documents)["split_seed"] == 5
    (broken_run / "adapter_model.safetensors").write_bytes(b"another")
    assert f"from an adapter that is no longer in {broken_run}, so" in refused(merged, "--against", "base")
    assert f"made from {broken_run}, and the run is no" in evaluate(merged, "--dataset", work.documents)["notes"][-1]


def test_a_run_that_was_resumed_is_still_the_one_that_weights_were_made_from(broken_run):
    before = source_run_of(broken_run)
    described = read_json(broken_run / "training_config.json")
    described["configuration"]["resume_from_checkpoint"] = str(broken_run / "checkpoint-2")
    edit_json(broken_run / "training_config.json", **{**described, "start_number": 2, "changed_from": {}})
    assert source_run_of(broken_run) == before and before["sha256"] is not None
    (broken_run / "training_config.json").write_text("{}")  # of another program
    assert source_run_of(broken_run)["sha256"] is None


@pytest.mark.parametrize("content", [["a"], {"run": "abc"}, {"source": 3}])
def test_a_file_of_another_program_with_one_of_our_names_says_nothing(work, tmp_path, content):
    model = shutil.copytree(work.model, tmp_path / "model")
    write_json(model / "merge.json", content)
    subject = subject_of(str(model))
    assert with_source_run(subject) == subject and not subject.answers_plain_text and source_run_of(model) is None


def test_what_was_pruned_of_merged_weights_has_their_run(evaluate, work, broken_run, tmp_path, capsys):
    assert main(["merge", str(broken_run)]) == 0
    capsys.readouterr()
    assert main(["prune", str(tmp_path / "run-merged"), "--dataset", str(work.documents), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["run"]["folder"] == str(broken_run)
    found = evaluate(broken_run, "--mixed_precision", "no", "--against", tmp_path / "run-merged-pruned")
    assert facts["before"]["bits"] == pytest.approx(found["model"]["bpt"]["value"], rel=1e-5)
    assert found["notes"] == []
    assert main(["prune", str(tmp_path / "run-merged"), "--output", str(tmp_path / "a")]) == 0
    assert f"train --config {broken_run / 'training_config.json'} --model" in capsys.readouterr().out
    assert read_json(tmp_path / "a" / "prune.json")["before"] == facts["before"]
    shutil.rmtree(broken_run)
    words = ["prune", str(tmp_path / "run-merged"), "--dataset", str(work.documents), "--output", str(tmp_path / "b")]
    assert main(words) == 0
    assert f"{tmp_path / 'run-merged'} was made from {broken_run}, and the run" in capsys.readouterr().err


def test_data_beside_a_run_are_found_from_what_was_made_of_it(
    work, broken_run, tmp_path, tmp_path_factory, monkeypatch
):
    made = tmp_path_factory.mktemp("elsewhere") / "made"
    shutil.copy(work.documents, tmp_path / "data.jsonl")
    described = read_json(broken_run / "training_config.json")
    described["configuration"]["dataset"] = "data.jsonl"
    write_json(broken_run / "training_config.json", described)
    shutil.copytree(work.model, made)
    write_json(made / "merge.json", {"format": 1, "adapter": str(broken_run), "run": source_run_of(broken_run)})
    monkeypatch.chdir(work.folder)
    assert with_source_run(subject_of(str(made))).data.dataset == str(tmp_path / "data.jsonl")


def test_the_data_of_a_run_typed_again_are_split_as_it_did(evaluate, work, monkeypatch):
    monkeypatch.chdir(work.folder)
    found = evaluate(work.lora, "--dataset", work.documents.name)
    assert (found["documents"], found["notes"]) == (HELD_OUT, [])


def test_fewer_of_the_documents_that_a_run_held_out_are_not_learned_either(evaluate, work, capsys):
    assert evaluate(work.lora, "--max_eval_documents", HELD_OUT - 2)["notes"] == []
    names = {}
    for count in (4, HELD_OUT):
        settings = replace(subject_of(str(work.lora)).data, max_eval_documents=count)
        tokenizer = load_tokenizer(subject_of(str(work.lora)).model)
        data = prepare(settings, tokenizer, seed=5, cache_dir=work.folder / "cache", model_name="")
        names[count] = {document.name for document in data.eval_documents}
    assert len(names[4]) == 4 and names[4] < names[HELD_OUT]


def test_its_own_training_data_as_held_out_data_is_pointed_out(evaluate, work, monkeypatch):
    monkeypatch.chdir(work.folder)
    report = evaluate(work.lora, "--eval_dataset", work.documents.name)
    assert report["documents"] == DOCUMENTS
    assert "may have learned" in report["notes"][0]


def test_another_dataset_brings_its_own_split(evaluate, work, tmp_path):
    fresh = write_documents(tmp_path / "fresh.jsonl", 200, seed=1)
    report = evaluate(work.lora, "--dataset", fresh)
    assert report["documents"] == 10, "5 %, the default, not the share of the run"
    # The embedded tokenizer comes from Python's documentation: where a row ends depends on the version of Python.
    assert all(note.startswith("left out while reading") for note in report["notes"])


def test_changed_data_are_pointed_out(evaluate, broken_run, tmp_path):
    described = read_json(broken_run / "training_config.json")
    longer = write_documents(tmp_path / "longer.jsonl", DOCUMENTS + 4)
    described["configuration"]["dataset"] = str(longer)
    write_json(broken_run / "training_config.json", described)
    assert "a different fingerprint than when" in evaluate(broken_run)["notes"][0]


def test_a_run_with_relative_names_is_scored_from_another_folder(evaluate, work, broken_run, tmp_path, monkeypatch):
    shutil.copytree(work.model, tmp_path / "model")
    shutil.copy(work.documents, tmp_path / "documents.jsonl")
    described = read_json(broken_run / "training_config.json")
    described["configuration"].update(model_name_or_path="model", dataset="documents.jsonl")
    write_json(broken_run / "training_config.json", described)
    edit_json(broken_run / "adapter_config.json", base_model_name_or_path="model")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found, expected = evaluate(broken_run, "--against", "base"), evaluate(work.lora, "--against", "base")
    assert found["model"]["bpt"] == expected["model"]["bpt"]
    assert found["against"][0]["bpt"] == expected["against"][0]["bpt"]


def test_an_embedded_dataset_is_not_a_folder_of_its_name_above_the_run(broken_run):
    described = read_json(broken_run / "training_config.json")
    described["configuration"]["dataset"] = broken_run.name
    write_json(broken_run / "training_config.json", described)
    assert subject_of(str(broken_run)).data.dataset == broken_run.name


@pytest.mark.parametrize(
    "changes",
    [{"configuration": "x"}, {"data": None}, {"seed": "x"}, {"configuration": {"task": ["x"]}},
     {"configuration": {"text_column": 3, "streaming": "no"}}, {"configuration": {"tuning": ["x"]}}],
    ids=str,
)  # fmt: skip
def test_settings_of_a_run_that_are_none_are_told_with_their_file(broken_run, changes):
    edit_json(broken_run / "training_config.json", **changes)
    with pytest.raises(
        UserError, match=r"training_config\.json.* was not written by|in the training_config\.json of .*run, "
    ):
        _ = subject_of(str(broken_run)).data


def test_a_chat_template_file_is_no_longer_needed(evaluate, broken_run):
    described = read_json(broken_run / "training_config.json")
    described["configuration"]["chat_template"] = "/gone/template.jinja"
    write_json(broken_run / "training_config.json", described)
    assert evaluate(broken_run)["documents"] == HELD_OUT


def test_few_documents_and_dropped_rows_are_pointed_out(evaluate, work, tmp_path):
    path = write_documents(tmp_path / "few.jsonl", 4, seed=1)
    path.write_text(path.read_text() + '{"text": " "}\n')
    report = evaluate(work.model, "--eval_dataset", path)
    assert report["documents"] == 4
    assert report["notes"][0] == "4 documents held out: too few to trust an interval"
    assert report["notes"][1].startswith("left out while reading: ") and "empty text" in report["notes"][1]


def test_one_document_has_no_interval_and_no_verdict(evaluate, work, capsys):
    words = (work.lora, "--against", "base", "--max_eval_documents", 1)
    report = evaluate(*words)
    assert report["documents"] == 1
    difference = report["against"][0]["difference"]
    assert report["model"]["bpt"]["low"] is report["model"]["perplexity"]["low"] is difference["high"] is None
    assert difference["verdict"] == "one document cannot tell"
    assert " none " in as_text(report)


# -- what is printed ---------------------------------------------------------------------------------------------------


def test_text_for_a_person(work, capsys):
    capsys.readouterr()
    assert command.main([str(work.lora), "--against", "base", "--confidence", "0.9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    expected = read_json(work.lora / "scu_metrics.json")
    assert lines[0] == f"held out: {HELD_OUT} documents of {work.documents}"
    assert lines[1] == f"{expected['held_out_tokens']:,} tokens predicted, in windows of 64 with stride 64"
    table = lines[lines.index("") + 1 :]
    assert table[0].split() == ["bits/token", "90", "%", "interval", "perplexity", "90", "%", "interval"]
    for line, figures, label in ((table[1], "after", f"{work.folder.name}/lora"), (table[2], "before", "base")):
        value = expected[f"held_out_bpt_{figures}"]["value"]
        assert line.split()[:2] == [label, f"{value:.4f}"] and f"{2**value:#.5g}" in line
    change = expected["held_out_bpt_change"]["value"]
    assert table[6].split()[:2] == ["base", f"{change:+.4f}"] and table[6].endswith("  lower: better")
    assert f"base: {work.model}" in lines and f"{work.folder.name}/lora: {work.lora}" in lines
    paths = (str(work.documents), str(work.model), str(work.lora))
    assert max(len(line) for line in lines if not line.endswith(paths)) <= 80


@pytest.mark.parametrize(
    ("low", "high", "documents", "expected"),
    [
        (-0.2, -0.1, 20, "lower"),
        (0.1, 0.2, 20, "higher"),
        (-0.1, 0.2, 20, "no difference found"),
        (0.0, 0.0, 20, "equal to four digits"),
        (-0.00004, 0.00004, 20, "equal to four digits"),
        (-0.0002, -0.0001, 20, "lower"),
        (-0.2, 0.0, 20, "no difference found"),
        (-0.2, -0.2, 1, "one document cannot tell"),
    ],
)
def test_the_verdict_follows_from_the_interval(low, high, documents, expected):
    assert verdict(BootstrapInterval((low + high) / 2, low, high, 0.95), documents) == expected


def test_the_script_prints_one_json_object_and_nothing_else(work):
    answer = processes.run_without_us([ROOT / "scripts" / "eval_bpt.py", work.full, "--json"])
    assert answer.returncode == 0, answer.stderr
    expected = read_json(work.full / "scu_metrics.json")["held_out_bpt_after"]["value"]
    assert json.loads(answer.stdout)["model"]["bpt"]["value"] == pytest.approx(expected)


def test_what_a_library_prints_stays_out_of_the_result(evaluate, work, monkeypatch):
    load = text.load_for_evaluation

    def talkative(*arguments):
        print("loading checkpoint shards")
        return load(*arguments)

    monkeypatch.setattr(text, "load_for_evaluation", talkative)
    assert evaluate(work.lora)["documents"] == HELD_OUT


def test_help_needs_no_torch():
    code = (
        "import sys; from scu_trainer.cli.main import main; assert main(['eval', '--help']) == 0; "
        "assert 'torch' not in sys.modules"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for flag in ("RUN_OR_MODEL", "--against", "--json", "--batch_tokens", "--batch-tokens", "--eval_dataset"):
        assert flag in answer.stdout
    assert "the same as --packing false" in answer.stdout
    assert "sample_prompts" not in answer.stdout, "nothing is answered"
    assert "(default: False)" in answer.stdout and "None" not in answer.stdout


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["mine"], ["{full}", "--against", "mine"]])
def test_the_name_of_a_run_is_not_looked_up_on_the_hub(refused, work, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "run.json").write_text("{}")
    said = refused(*(word.format(full=work.full) for word in words))
    assert said == "mine is not a folder here, but runs/mine is a run; give runs/mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required: RUN_OR_MODEL"),
        (["./missing"], "'./missing' does not exist"),
        (["missing"], "missing is not a folder here, and a Hub id has no run"),
        (["{model}"], "{model} belongs to no run"),
        (["{documents}"], "is a file; give a folder"),
        (["{folder}"], "without config.json or adapter_config.json"),
        (["{model}l"], "'{model}l' does not exist (did you mean '{model}'?); give a folder"),
        (["base"], "base is a keyword of --against"),
        (["merged"], "merged is a keyword of --against"),
        (
            ["{model}", "--dataset", "{documents}", "--against", "merged"],
            "{model} is not an adapter, so there is nothing",
        ),
        (["{full}", "--against", "merged"], "{full} is not an adapter, so there is nothing to merge"),
        (["--against", "base", "{lora}"], "required: RUN_OR_MODEL; give it before --against"),
        (["{lora}", "--against", "bsae"], "--against bsae is not a folder here; did you mean the keyword base?"),
        (["{lora}", "--against", "merged", "--merge_dtype", "bf16"], "did you mean 'bfloat16'?"),
        (["{lora}", "--merge_dtype", "float16"], "merge_dtype is for --against merged"),
        (["{lora}", "--against", "merged", "--merge_dtype", "half"], "invalid choice: 'half'"),
        (["{lora}", "--against", "base", "base"], "--against names base twice"),
        (["{lora}", "--stride", "0"], "stride is 0; it must be 1 or more"),
        (["{lora}", "--max_length", "1"], "max_length is 1; it must be 2 or more"),
        (["{lora}", "--stride", "65"], "stride 65 exceeds max_length 64, so tokens would be left out; use --stride 64"),
        (["{lora}", "--max_length", "129"], "windows of 129 tokens exceed the 128 positions of {lora}; use --max_len"),
        (["{lora}", "--max_length", "32", "--block_size", "32"], "max_length and block_size both set"),
        (["{model}", "--against", "base"], "{model} is neither an adapter nor part of a run"),
        (["{lora}", "--against", "./missing"], "'./missing' does not exist"),
        (["{lora}", "--sample_prompts", "3"], "unknown option --sample_prompts"),
        (["{lora}", "--agianst", "base"], "unknown option --agianst (did you mean '--against'?)"),
        (["{lora}", "another"], "unrecognized arguments: another"),
        (["{lora}", "--resamples", "0"], "resamples is 0; it must be 1 or more"),
        (["{lora}", "--resamples", "many"], "invalid int value: 'many'"),
        (["{lora}", "--batch_tokens", "0"], "batch_tokens is 0"),
        (["{lora}", "--num_fewshot", "0"], "num_fewshot is for tasks of lm-evaluation-harness"),
        (["{lora}", "--seed", "-1"], "seed is -1"),
        (["{lora}", "--confidence", "95"], "confidence is 95.0; it must be below 1, such as 0.95"),
        (["{lora}", "--block_size", "1"], "block_size is 1"),
        (["{lora}", "--eval_dataset", "./missing.jsonl"], "./missing.jsonl does not exist"),
        (["{lora}", "--validation_split_percentage", "0"], "is held out; add --eval_dataset"),
        (["nobody/nothing", "--dataset", "{documents}"], "if it is a Hub id, check its spelling"),
    ],
)
def test_one_line_says_what_to_do(refused, work, words, message):
    places = {name: str(place) for name, place in vars(work).items()}
    assert message.format(**places) in refused(*(word.format(**places) for word in words))


def test_a_path_that_was_typed_is_not_called_by_a_setting(refused):
    assert refused("./missing").startswith("'./missing' does not exist; give a folder")


def test_missing_data_settings_are_spelled_out(refused, work):
    message = refused(work.model)
    assert "--dataset NAME_OR_PATH" in message and "--eval_dataset NAME_OR_PATH" in message


@pytest.mark.parametrize("status", ["queued", "running", "stopping", "stopped", "failed"])
def test_an_unfinished_run_points_to_its_newest_checkpoint(refused, broken_run, status):
    (broken_run / "checkpoint-3").rename(broken_run / "checkpoint-10")
    edit_json(broken_run / "run.json", status=status, error="out of disk" if status == "failed" else None)
    message = refused(broken_run)
    assert f"its status is {status}" in message and str(broken_run / "checkpoint-10") in message
    assert ("(out of disk)" in message) == (status == "failed")


def test_a_run_without_model_files(refused, broken_run):
    for path in (broken_run / "adapter_config.json", broken_run / "checkpoint-2", broken_run / "checkpoint-3"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert "its model files are gone; train it to the end first" in refused(broken_run)


def test_a_run_that_died_before_it_was_described(refused, tmp_path):
    write_json(tmp_path / "run.json", {"status": "queued", "error": None})
    assert "its status is killed (none of its processes is known" in refused(tmp_path)


def test_a_killed_run_left_the_status_of_a_running_one(refused, broken_run):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    edit_json(broken_run / "run.json", status="running", pid=child.pid)
    message = refused(broken_run)
    assert "its status is killed (it ended without an error message while it was running" in message
    assert f"name its newest checkpoint, {broken_run / 'checkpoint-3'}" in message


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_torn_description(refused, broken_run, content):
    (broken_run / "training_config.json").write_text(content)
    assert "training_config.json" in refused(broken_run)


def test_an_adapter_whose_base_is_gone(refused, broken_run):
    edit_json(broken_run / "adapter_config.json", base_model_name_or_path="/gone/model")
    for words in ((broken_run,), (broken_run, "--against", "base")):
        assert "'/gone/model' does not exist" in refused(*words)


def test_a_base_that_was_taken_out_of_the_cache(refused, work, tmp_path):
    run = Path(shutil.copytree(work.full, tmp_path / "run"))
    described = read_json(run / "training_config.json")
    described["configuration"].update(model_name_or_path=None, cache_dir=str(tmp_path / "emptied"))
    write_json(run / "training_config.json", described)
    assert f"is no longer in {tmp_path / 'emptied'}" in refused(run, "--against", "base")


def test_models_with_different_tokenizers(refused, work, tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["<s>", "</s>", *WORDS])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<s>")), eos_token="</s>"
    )
    tiny.llama().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    message = refused(work.lora, "--against", tmp_path)
    assert "have different tokenizers" in message and "(2,048 tokens)" in message
    assert f"scu-trainer eval {work.lora}, and scu-trainer eval {tmp_path}" in message


def test_a_model_smaller_than_its_tokenizer(refused, work, tmp_path):
    tiny.llama().save_pretrained(tmp_path)
    for path in work.model.glob("tokenizer*"):
        shutil.copy(path, tmp_path)
    message = refused(tmp_path, "--dataset", work.documents)
    assert "the tokenizer has 2048 tokens" in message and f"{tiny.VOCAB} rows" in message


def test_rows_longer_than_the_positions_of_the_model(refused, work, tmp_path):
    long = write_documents(tmp_path / "long.jsonl", 2, words_each=200)
    assert "exceed the 128 positions" in refused(work.model, "--eval_dataset", long)


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
def test_a_learned_prompt_takes_positions(refused, evaluate, work, tmp_path):
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8)
    get_peft_model(AutoModelForCausalLM.from_pretrained(work.model), config).save_pretrained(tmp_path)
    given = tmp_path, "--eval_dataset", work.documents
    assert "exceed the 120 positions" in refused(*given, "--max_length", 121)
    assert evaluate(*given, "--stride", 32)["windows"]["max_length"] == 120
    long = write_documents(tmp_path / "long.jsonl", 2, words_each=200)
    assert "exceed the 120 positions" in refused(tmp_path, "--eval_dataset", long)


def test_broken_weights(refused, work, tmp_path):
    folder = Path(shutil.copytree(work.model, tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(torch.nan)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert f"no finite loss on {DOCUMENTS} of {DOCUMENTS} documents" in refused(
        folder, "--eval_dataset", work.documents, "--block_size", 64
    )


def test_too_little_gpu_memory(refused, work, monkeypatch):
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(text, "score_documents", full)
    assert "out of GPU memory at batch_tokens 8192; give a smaller --batch_tokens" in refused(work.lora)
