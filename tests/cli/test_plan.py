"""``scu-trainer plan``: what it says of jobs, machines and settings, without weights and without training."""

from __future__ import annotations

import json
import os
import shlex

import psutil
import pytest
import torch
from transformers import BambaConfig, BertConfig, BertForMaskedLM, DiffLlamaConfig, LlamaConfig, T5Config

from scu_trainer.cli import train
from scu_trainer.cli.configuration import read_job
from scu_trainer.cli.planning import plan
from scu_trainer.cli.planning.screen import without
from scu_trainer.hardware.estimate import OVERHEAD
from scu_trainer.hardware.presets import named
from scu_trainer.hardware.recommend import CHANGES, AvailableChanges, SettingChoice, choices
from tests import tiny

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = {**SIZES, "vocab_size": 500, "max_position_embeddings": 512, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("small"), LlamaConfig(**LLAMA))


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Of so many layers that a plan for a card looks at a few of them."""
    return saved(tmp_path_factory.mktemp("deep"), LlamaConfig(**{**LLAMA, "num_hidden_layers": 4}))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """8 billion weights in 40 layers, of which there is only the configuration."""
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(**sizes, vocab_size=32_000, num_hidden_layers=40, dtype="bfloat16")
    return saved(tmp_path_factory.mktemp("large"), config)


def saved(folder, config) -> str:
    config.save_pretrained(folder)
    return str(folder)


def words_of(folder, *words) -> list[str]:
    return ["--model_name_or_path", str(folder), "--block_size", "128", *map(str, words)]


def planned(capsys, *words) -> dict:
    capsys.readouterr()
    code = plan.main([*map(str, words), "--json"])
    shown = capsys.readouterr()
    assert shown.out, shown.err
    report = json.loads(shown.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert code == (2 if report["recommended"] is None else 0)
    return report


def test_a_large_model_is_planned_from_its_configuration_alone(large, capsys):
    report = planned(capsys, *words_of(large, "--gpu", "RTX 3090 24GB", "--tuning", "lora", "--block_size", 512))
    weights = 2 * (2 * 32_000 * 4096 + 40 * (4096 * (4096 + 2 * 1024 + 4096 + 3 * 11008)))
    assert report["predicted"]["parts"]["weights"] == pytest.approx(weights, rel=0.02)
    assert report["choices"][0]["settings"] == {} and report["device"] == "cuda"
    best = next(choice for choice in report["choices"] if choice["fits"])
    assert best["settings"] == report["recommended"]
    assert best["peak_bytes"] * (1 + report["margin"]) <= report["limit_bytes"]


def test_micro_batches_that_may_grow_are_planned_as_large_as_they_fit(large, capsys):
    """On a card rows of several batches run together only where memory is there for them: what was asked for fits."""
    words = words_of(large, "--gpu", "H100", "--tuning", "lora", "--block_size", 512, "--packing", "no")
    words += ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "16"]
    report = planned(capsys, *words, "--limit", "60GB")
    chosen, asked = report["choices"][0], report["predicted"]
    assert chosen["settings"] == {} and chosen["fits"] and report["fits"]
    assert 2 < chosen["rows_per_chunk"] == asked["rows_per_chunk"] < 32 and chosen["peak_bytes"] == asked["peak_bytes"]


def test_more_memory_never_makes_a_plan_change_more(deep, capsys):
    words = words_of(deep, "--gpu", "H200", "--tuning", "full", "--block_size", 512)
    changes = []
    for limit in ("0.64", "0.8"):
        choices = planned(capsys, *words, "--limit", limit)["choices"]
        changes.append(next((CHANGES.index(c["changes"]) for c in choices if c["fits"]), len(CHANGES)))
    assert changes == sorted(changes, reverse=True) and changes[-1] == 0


@pytest.mark.parametrize(("limit", "tuning"), [("1GB", "full"), ("0.63", "lora")])
def test_what_is_recommended_is_accepted_and_fits(small, capsys, limit, tuning):
    words = words_of(small, "--gpu", "3090", "--tuning", tuning, "--per_device_train_batch_size", 64)
    report = planned(capsys, *words, "--limit", limit)
    assert report["recommended"] is not None
    flags = [word for name, value in report["recommended"].items() for word in (f"--{name}", str(value))]
    again = planned(capsys, *without(words, report["recommended"]), *flags, "--limit", limit)
    assert again["fits"] and again["recommended"] == {}
    own = without(words, [*report["recommended"], "gpu"])
    assert read_job(None, [*own, *flags, "--use_cpu", "true", "--mixed_precision", "no"]).model.tuning


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--ram", "16GB", "--tuning", "full", "--use_muon", "true"], {"optim"}),
        (["--ram", "16GB", "--tuning", "full", "--optim", "sgd", "--optim_args", "momentum=0.9"], {"optim"}),
        (["--gpu", "3090", "--tuning", "full", "--trainable_parameters", "layers"], {"tuning"}),
        (["--gpu", "3090", "--tuning", "lora", "--init_lora_weights", "olora"], {"tuning", "load_in_8bit"}),
    ],
)
def test_what_train_refuses_is_not_proposed(small, capsys, words, names):
    # In RAM a limit that the libraries alone leave, but not with the margin: no measurement decides what fits.
    limit = "0.6" if "--gpu" in words else f"{1.05 * OVERHEAD['cpu'].fixed_bytes / 2**30:.4f}"
    report = planned(capsys, *words_of(small, *words, "--limit", limit, "--per_device_train_batch_size", 1))
    assert report["recommended"] is None and len(report["choices"]) > 1, "all of them were looked at"
    assert not any(names & set(choice["settings"]) for choice in report["choices"])


def test_to_ask_about_deepspeed_makes_no_rank_of_a_process(small):
    """With tuning_path: auto it may train without DeepSpeed next."""
    pytest.importorskip("deepspeed")
    before = dict(os.environ)
    assert plan.is_accepted(None, words_of(small, "--use_cpu", "true"), {"deepspeed": "ds_configs/zero2_offload.json"})
    assert os.environ == before and not torch.distributed.is_initialized()


def test_a_job_with_zero3_is_planned_as_one_that_keeps_all_weights(small, capsys):
    """Models without content cannot be divided among processes."""
    pytest.importorskip("deepspeed")
    words = words_of(small, "--use_cpu", "true", "--tuning", "full", "--scu", "false", "--limit", "16")
    zero2, zero3 = (planned(capsys, *words, "--deepspeed", f"ds_configs/{name}.json") for name in ("zero2", "zero3"))
    parts = [report["predicted"]["parts"] for report in (zero2, zero3)]
    assert parts[0]["weights"] == parts[1]["weights"] > 0
    assert zero2["not_counted"] == [] and "ZeRO-3" in zero3["not_counted"][0]


def test_a_job_for_several_processes_is_planned_in_one(small, capsys):
    assert planned(capsys, *words_of(small, "--gpu", "H100", "--fsdp", "full_shard"))["fits"]


def test_without_memory_control_the_chunk_becomes_a_setting(small, capsys):
    words = words_of(small, "--gpu", "3050", "--memory_control", "false", "--per_device_train_batch_size", 256)
    report = planned(capsys, *words, "--limit", "0.8")
    assert not report["fits"] and report["recommended"]["token_cap"] % 128 == 0
    again = planned(capsys, *words, "--token_cap", report["recommended"]["token_cap"], "--limit", "0.8")
    assert again["fits"] and again["recommended"] == {}


def test_a_state_of_unknown_size_is_said_to_be_left_out(small, capsys):
    words = words_of(small, "--optim", "galore_adamw", "--optim_target_modules", "all-linear")
    assert planned(capsys, *words)["not_counted"] == ["the state of optim: galore_adamw, which depends on its rank"]
    assert planned(capsys, *words_of(small))["not_counted"] == []


def test_on_a_cpu_memory_limit_gb_is_for_the_whole_process(small, capsys):
    held_bytes = psutil.Process().memory_info().rss
    words = words_of(small, "--use_cpu", "true", "--memory_limit_gb")
    report = planned(capsys, *words, held_bytes / 2**30 + 1)
    assert report["limit_bytes"] <= 1.01 * 2**30 and report["fits"]
    assert not planned(capsys, *words, 0.99 * held_bytes / 2**30)["fits"]
    assert planned(capsys, *words_of(small, "--gpu", "3090", "--memory_limit_gb", 2))["limit_bytes"] == 2 * 2**30
    assert planned(capsys, *words_of(small, "--gpu", "3090", "--memory_limit_gb", 99))["limit_bytes"] < 24 * 2**30


def test_what_is_proposed_keeps_to_the_limit_that_was_typed(small, capsys):
    card = words_of(small, "--gpu", "3090", "--limit", "8")
    assert planned(capsys, *card)["recommended"] == {"memory_limit_gb": 8}
    plan.main(card)
    said = "Nothing has to be changed; this keeps the run within the limit:\nscu-trainer train "
    assert said in (shown := capsys.readouterr().out) and shown.rstrip().endswith("--memory_limit_gb 8.0")
    plan.main([*card, "--memory_limit_gb", "7"])
    assert "Nothing has to be changed." in capsys.readouterr().out, "less was asked for already"
    assert planned(capsys, *card, "--memory_control", "false")["recommended"] == {}, "nothing takes more than it needs"
    in_ram = planned(capsys, *words_of(small, "--use_cpu", "true", "--limit", "8"))["recommended"]
    assert 8 < in_ram["memory_limit_gb"] < 10, "with what the process holds without a model"


def test_a_limit_that_nothing_fits(small, capsys):
    assert plan.main(words_of(small, "--use_cpu", "true", "--limit", "20MB")) == 2
    assert "None of these fits." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "rtx 3055 4gb"], "did you mean 'RTX 3050 4GB'?"),
        (["--here", "--gpu", "t4"], "--here means this machine"),
        (["--here", "--ram", "8GB"], "--here means this machine"),
        (["--limit", "much"], "limit is 'much'"),
        (["--limit", "0"], "must be above 0"),
        (["--bf16", "true", "--gpu", "t4"], "this GPU has no bf16"),
        (["--blok_size", "3"], "block_size"),
        (["--use_muon", "true", "--optim", "adafactor"], "use_muon replaces optim"),
        (["--bar", "3"], "unknown option --bar; --help lists the options"),  # --bias is not near
        (["--", "x"], "unknown option --; --help lists the options"),
        (["x.yaml"], "unrecognized arguments: x.yaml; to read settings from a file, write --config x.yaml"),
        (["a b.json"], "unrecognized arguments: a b.json; to read settings from a file, write --config 'a b.json'"),
        (["--confg", "x.yaml"], "unknown option --confg (did you mean '--config'?)"),
        (["--lora_target_modules", "nope", "--gpu", "t4"], "the model has no module 'nope'"),
        (["--task", "sensor-classification", "--streaming", "true"], "streaming"),
        (["--accuracy", "/nowhere/at/all"], "is not a folder"),
        (["--accuracy", "/nowhere/at/all", "--limit", "3GB"], "takes no other option than --json"),
        (["--accuracy", "/nowhere/at/all", "--lora_r", "4"], "takes no other option than --json"),
    ],
)
def test_mistakes_end_with_2(words, message, capsys):
    assert plan.main(words) == 2
    assert message in capsys.readouterr().err


REFUSED = {
    "encoder-decoder": (T5Config(d_model=16, num_layers=1, num_heads=2), "cannot load the model"),
    "without attention": (BambaConfig(**LLAMA), "cannot be predicted, because its code"),
    "gptq": (
        LlamaConfig(**LLAMA, quantization_config={"quant_method": "gptq"}),
        "stored quantized (gptq), but a plan reads no weights; scu-trainer train --tuning lora says before",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_planned_say_why(name, tmp_path, capsys):
    config, message = REFUSED[name]
    assert plan.main(words_of(saved(tmp_path, config), "--gpu", "t4", "--tuning", "full")) == 2
    shown = capsys.readouterr()
    assert message in shown.err and "Traceback" not in shown.err and not shown.out


def test_a_model_whose_code_makes_constants_is_planned(tmp_path, capsys):
    made = planned(capsys, *words_of(saved(tmp_path, DiffLlamaConfig(**LLAMA)), "--gpu", "t4", "--tuning", "full"))
    assert made["choices"][0]["fits"]


def test_other_quantizations_are_refused_for_qlora_too(tmp_path, capsys):
    folder = saved(tmp_path, REFUSED["gptq"][0])
    assert plan.main(words_of(folder, "--gpu", "t4", "--tuning", "qlora")) == 2
    assert "the model is stored quantized (gptq)" in capsys.readouterr().err


def test_weights_that_lie_packed_are_planned_packed(small, tmp_path, capsys):
    packed = LlamaConfig(**LLAMA, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    found = [
        planned(capsys, *words_of(folder, "--gpu", "3090", "--tuning", tuning))["predicted"]["parts"]["weights"]
        for folder, tuning in ((saved(tmp_path, packed), "qlora"), (small, "qlora"), (small, "lora"))
    ]
    assert found[0] == found[1] < found[2]


def test_a_model_of_another_kind_with_a_causal_head_is_planned(tmp_path, capsys):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    folder = saved(tmp_path, BertConfig(vocab_size=64, **sizes, max_position_embeddings=128))
    assert planned(capsys, *words_of(folder, "--gpu", "3090", "--tuning", "full"))["fits"]


def test_a_card_without_bf16_gets_fp16():
    target = named("t4", None)
    assert target.half == "fp16"
    asked = SettingChoice("lora", "no", False, "adamw_torch_fused", 512)
    found = choices(asked, AvailableChanges(target.half, False, True, True, False), target.device)
    assert {choice.mixed_precision for choice in found} == {"no", "fp16"}
    assert "bfloat16" not in {choice.dtype for choice in found}


def test_packed_weights_of_bfloat16_files_on_a_card_without_it(tmp_path, capsys):
    folder = saved(tmp_path, LlamaConfig(**LLAMA, dtype="bfloat16"))
    assert planned(capsys, *words_of(folder, "--gpu", "t4", "--tuning", "qlora", "--dtype", "float16"))["fits"]


def test_an_adapter_folder_is_planned_as_it_is(tmp_path, capsys):
    base = tiny.saved_llama(tmp_path / "base")
    adapted = tiny.lora(tiny.llama())
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    report = planned(capsys, *words_of(tmp_path / "adapter", "--gpu", "3090", "--tuning", "lora"))
    ours = sum(weight.nbytes for weight in adapted.parameters() if weight.requires_grad)
    assert report["predicted"]["parts"]["regularization"] == ours
    by_its_name = planned(capsys, "--adapter_name_or_path", tmp_path / "adapter", "--block_size", 128, "--gpu", "3090")
    assert by_its_name["predicted"]["parts"] == report["predicted"]["parts"]


@pytest.mark.parametrize(
    "words",
    [
        ["--task", "image-classification", "--dataset_size", "40"],
        ["--task", "sensor-classification", "--sensor_samples", "90"],
        ["--task", "word-generation", "--dataset", "texts.jsonl", "--block_size", "16"],
    ],
)
def test_other_tasks_are_planned(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts = [{"text": f"text {i} of a few words", "category": "one"} for i in range(100)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    report = planned(capsys, *words, "--use_cpu", "true")
    assert report["fits"] and report["predicted"]["parts"]["weights"] > 0
    assert all("block_size" not in choice["settings"] for choice in report["choices"])


def test_a_job_that_is_loaded_is_planned_with_no_more_rows_than_there_are(capsys):
    words = ["--task", "sensor-classification", "--sensor_samples", "90", "--use_cpu", "true"]
    report = planned(capsys, *words, "--per_device_train_batch_size", 512, "--memory_control", "false")
    assert report["predicted"]["rows_per_chunk"] <= 90


def test_pictures_are_decoded_beside_a_gpu(tmp_path, capsys):
    words = ["--task", "image-classification", "--dataset_size", "40", "--cache_dir", tmp_path]
    found = planned(capsys, *words, "--gpu", "3090")["recommended"]
    assert found == {"dataloader_num_workers": plan.WORKERS_BESIDE_GPU}
    assert planned(capsys, *words, "--use_cpu", "true")["recommended"] == {}


@pytest.mark.parametrize("limit", ["20GB", "0.64"])
def test_the_screen_keeps_to_80_columns_and_names_what_to_type(small, limit, capsys, monkeypatch):
    reports, screen = [], plan.plan_screen.screen
    monkeypatch.setattr(plan.plan_screen, "screen", lambda *given: reports.append(given[0]) or screen(*given))
    words = words_of(small, "--gpu", "3090", "--tuning", "full", "--per_device_train_batch_size", 64)
    plan.main([*words, "--limit", limit])
    shown, (report,) = capsys.readouterr().out, reports
    assert max(map(len, shown.splitlines())) <= 80 or "scu-trainer train" in max(shown.splitlines(), key=len)
    if report["recommended"]:
        assert shown.count("--tuning ") == 1, "no flag stands there twice"


def test_what_is_to_be_typed_is_one_line(small, tmp_path, capsys):
    file = tmp_path / "a job whose name is as long as to be cut where a screen of 80 columns ends.yaml"
    file.write_text("tuning: full\nper_device_train_batch_size: 64\nmemory_control: false\n")
    plan.main(["--config", str(file), *words_of(small, "--gpu", "3090", "--limit", "0.635")])
    command = [line for line in capsys.readouterr().out.splitlines() if line.startswith("scu-trainer train ")]
    assert len(command) == 1 and shlex.split(command[0])[3] == str(file) and "--token_cap" in command[0]


def test_typed_flags_give_way_to_recommended_ones():
    words = ["--tuning", "full", "--block-size=128", "--seed", "3", "--lora_target_modules", "a", "b", "--scu", "true"]
    assert without(words, ["tuning", "block_size"]) == words[3:]
    assert without(words, ["lora_target_modules"]) == [*words[:5], "--scu", "true"]
    assert without(words, []) == words


# -- how far predictions were off --------------------------------------------------------------------------------------


def written(folder, name, estimate) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "scu_metrics.json").write_text(json.dumps({"memory_estimate": estimate}))


def test_accuracy_compares_runs_that_have_both_figures(tmp_path, capsys):
    written(tmp_path, "near", {"predicted_peak_bytes": 110, "measured_peak_bytes": 100})
    written(tmp_path, "far", {"predicted_peak_bytes": 150, "measured_peak_bytes": 200})
    written(tmp_path, "none", {"reason": "a stream", "measured_peak_bytes": 100})
    assert plan.main(["--accuracy", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["runs"], report["without_both"]) == (2, 1)
    assert report["largest_error"] == 0.25 and report["median_error"] == pytest.approx(0.175)
    assert plan.main(["--accuracy", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "+10.0%" in shown and "-25.0%" in shown and shown.index("far") < shown.index("near")


def test_accuracy_finds_the_runs_of_several_seeds(tmp_path, capsys):
    written(tmp_path, "job/runs/job-seed0", {"predicted_peak_bytes": 110, "measured_peak_bytes": 100})
    assert plan.main(["--accuracy", str(tmp_path)]) == 0
    assert "1 run: median error 10.0%" in capsys.readouterr().out


def test_accuracy_of_one_run_names_it(tmp_path, capsys):
    written(tmp_path, "mine", {"predicted_peak_bytes": 110, "measured_peak_bytes": 100})
    assert plan.main(["--accuracy", str(tmp_path / "mine"), "--json"]) == 0
    assert [one["run"] for one in json.loads(capsys.readouterr().out)["compared"]] == ["mine"]


@pytest.mark.parametrize(
    ("estimate", "said"),
    [
        (5, "memory_estimate is 5, which no run writes"),
        ({"predicted_peak_bytes": "1 GiB", "measured_peak_bytes": 100}, 'predicted_peak_bytes is "1 GiB", '),
    ],
)
def test_accuracy_of_a_damaged_run_names_file_and_field(tmp_path, capsys, estimate, said):
    written(tmp_path, "run", estimate)
    assert plan.main(["--accuracy", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert said in told and str(tmp_path / "run" / "scu_metrics.json") in told


def test_accuracy_of_no_runs(tmp_path, capsys):
    assert plan.main(["--accuracy", str(tmp_path)]) == 0
    assert "no run in" in capsys.readouterr().out


@pytest.mark.parametrize("broken", ["tokenizer", "weights", "shards", "encoder", "positions"])
def test_a_model_that_train_refuses_is_refused_in_the_same_words(broken, tmp_path, capsys):
    folder = tiny.saved_llama(tmp_path / "model")
    weights = folder / "model.safetensors"
    if broken == "tokenizer":
        for file in folder.glob("tokenizer*"):
            file.unlink()
    elif broken == "weights":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif broken == "shards":
        weights.rename(folder / "model-00001-of-00002.safetensors")
        parts = {"lm_head.weight": "model-00002-of-00002.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": parts}))
    elif broken == "encoder":
        tiny.bert(BertForMaskedLM).save_pretrained(folder)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"row {i} of a few words"}) + "\n" for i in range(20)))
    capsys.readouterr()
    words = [*words_of(folder), "--use_cpu", "true", "--output_dir", str(tmp_path / "run"), "--dataset", str(rows)]
    words += ["--block_size", "256", "--packing", "false"] if broken == "positions" else []
    said = []
    for command in (train, plan):
        assert command.main(words) == 2
        said.append(capsys.readouterr().err.splitlines()[-1].replace('"', ""))
    assert said[0].startswith("error: ") and said[1] == said[0]


def test_a_configuration_alone_is_planned_and_what_train_needs_is_said(small, capsys):
    assert planned(capsys, *words_of(small, "--gpu", "t4"))["fits"]
    assert plan.main([*words_of(small, "--gpu", "t4"), "--json"]) == 0
    assert "holds no weights: a plan needs none, but train needs them" in capsys.readouterr().err


def test_data_that_are_not_there_are_said(small, tmp_path, capsys):
    (tmp_path / "mine.jsonl").write_text('{"text": "a"}\n')
    said = []
    for name in ("mine.jsonl", "mien.jsonl"):
        assert plan.main([*words_of(small, "--dataset", tmp_path / name), "--json"]) == 0
        said.append(capsys.readouterr().err)
    assert "does not exist" not in said[0]
    assert f"{tmp_path}/mien.jsonl does not exist (did you mean 'mine.jsonl'?)" in said[1]
    assert "a plan needs no data, but train needs them" in said[1]
    (tmp_path / "unusable.jsonl").symlink_to("a" * 300)  # a look at it is an error, as at a link into a locked folder
    both = ["--dataset", tmp_path / "unusable.jsonl", "--eval_dataset", tmp_path / "held_out.jsonl"]
    assert plan.main([*words_of(small, *both), "--json"]) == 0
    said = capsys.readouterr().err
    assert "File name too long" in said and f"{tmp_path}/held_out.jsonl does not exist" in said
