"""Configurations of other programs, each key accounted for: imported, and trained with."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from scu_trainer.cli import main as cli
from scu_trainer.cli.configuration import read_job
from scu_trainer.cli.names.command import read_other
from scu_trainer.cli.names.known import known_names
from scu_trainer.cli.names.tools import TOOLS, tool_of
from scu_trainer.errors import SettingsError
from tests.tiny import saved_llama

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "other_tools"
FILES = sorted(FOLDER.glob("*/*.y*ml"))
LOST = {
    "trl/sft_full.yaml": ["eos_token"],
    "axolotl/full_chat.yml": ["plugins", "special_tokens"],
}
"""Keys without a counterpart."""

INSTRUCTIONS = [
    {"instruction": f"What is {one} and {two}?", "input": "" if one % 2 else "whole numbers", "output": f"{one + two}."}
    for one in range(5)
    for two in range(4)
]
CHATS = [
    {"conversations": [{"from": "human", "value": row["instruction"]}, {"from": "gpt", "value": row["output"]}]}
    for row in INSTRUCTIONS
]
INFO = {
    "identity": {"file_name": "alpaca.json"},
    "alpaca_en_demo": {"file_name": "alpaca.json", "num_samples": 5},
    "c4_demo": {"file_name": "texts.json", "columns": {"prompt": "body"}},
    "glaive_toolcall_en_demo": {
        "file_name": "chats.json", "formatting": "sharegpt", "columns": {"messages": "conversations", "tools": "tools"},
    },
    "pairs": {"file_name": "alpaca.json", "ranking": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return saved_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder as LLaMA-Factory's users have it, and files for those of the others."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(INFO))
    (tmp_path / "data" / "alpaca.json").write_text(json.dumps(INSTRUCTIONS))
    (tmp_path / "data" / "chats.json").write_text(json.dumps(CHATS))
    texts = [{"body": f"{row['instruction']} {row['output']} " * 5} for row in INSTRUCTIONS]
    (tmp_path / "data" / "texts.json").write_text(json.dumps(texts))
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "train.json").write_text(json.dumps(CHATS))
    return tmp_path


def _name(path: Path) -> str:
    return str(path.relative_to(FOLDER))


def _small(path: Path, model: Path) -> list[str]:
    """Flags for a model and data that are here."""
    flags = ["--model_name_or_path", str(model)]
    if path.parent.name != "llama-factory" and path.name != "full_chat.yml":
        flags += ["--dataset", "data/chats.json" if "sft_" in path.name else "data/alpaca.json"]
    return flags


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_every_key_is_accounted_for_and_it_trains(path, model, here, capsys):
    entries = yaml.safe_load(path.read_text())
    assert tool_of(entries, known_names()) == path.parent.name
    assert cli.main(["import", str(path), *_small(path, model), "--output", "job.yaml"]) == 0
    printed, written = capsys.readouterr().out, (here / "job.yaml").read_text()
    found, _own = read_other(path, None, _small(path, model))
    for key in found.keys:
        assert f"{key.name}:" in written, key
        assert bool(key.meaning.settings) + bool(key.meaning.said) >= 1, key
    assert sorted(key.name for key in found.lost) == LOST.get(_name(path), [])
    assert f"{len(found.keys)} keys" in printed and f"{len(found.lost)} without a counterpart" in printed
    flags = ["--max_steps", "2", "--output_dir", "out", "--report_to", "none", "--save_strategy", "no"]
    flags += ["--block_size", "128", "--eval_strategy", "no", "--gradient_accumulation_steps", "1"]
    flags += ["--load_best_model_at_end", "false", "--predict_memory", "false", "--sample_prompts", "0"]
    assert cli.main(["train", "--config", "job.yaml", *flags]) == 0
    assert json.loads((here / "out" / "run.json").read_text())["step"] == 2


@pytest.mark.parametrize(
    ("tool", "key"),
    [
        ("trl", "packing_strategy: bfd"), ("axolotl", "sample_packing: true"), ("llama-factory", "neat_packing: true"),
        ("llama-factory", "packing: true"), ("unsloth", "packing: true"),
    ],
)  # fmt: skip
def test_packing_is_said_to_cut_documents_at_the_end_of_a_row(tool, key, here):
    """Theirs fill rows with whole conversations; here an answer may stand in the next row without its question."""
    (here / "job.yaml").write_text(f"{key}\n")
    found, _own = read_other(here / "job.yaml", tool, [])
    said = [one.meaning.said for one in found.keys if one.name == key.partition(":")[0]]
    assert said == ["rows are filled with documents one after another; one that does not fit continues in the next row"]


def _settings(name: str, *flags: str) -> dict:
    found, own = read_other(FOLDER / name, None, flags)
    return {**found.settings, **own}


def test_llama_factory_reads_its_data_and_its_defaults(here):
    found = _settings("llama-factory/lora_sft.yaml")
    assert found["dataset"] == [
        {"dataset": "data/alpaca.json", "name": "identity", "dataset_size": 1000},
        {"dataset": "data/alpaca.json", "name": "alpaca_en_demo", "dataset_size": 5},
    ]
    assert found["lora_alpha"] == 16 and found["packing"] is False and found["checkpoint_every_layer"] is True
    assert found["validation_split_percentage"] == 10 and found["warmup_steps"] == 0.1
    text = _settings("llama-factory/lora_pretrain.yaml")
    assert (text["text_column"], text["dataset_size"]) == ("body", 30)
    assert (text["packing"], text["isolate_documents"], text["lora_alpha"]) == (True, False, 32)
    assert text["lora_target_modules"] == ["q_proj", "v_proj"]
    chats = _settings("llama-factory/full_sft.yaml")
    assert (chats["messages_column"], chats["tuning"], chats["isolate_documents"]) == ("conversations", "full", True)
    quantized = _settings("llama-factory/qlora_sft.yaml")
    assert quantized["tuning"] == "qlora" and quantized["completion_only_loss"] is False


def test_axolotl_reads_its_data_and_its_defaults():
    found = _settings("axolotl/qlora.yml")
    assert [entry["dataset"] for entry in found["dataset"]] == [
        "tatsu-lab/alpaca", "fozziethebeat/alpaca_messages_2k_test",
    ]  # fmt: skip
    assert (found["tuning"], found["chat_template"], found["lora_target_modules"]) == (
        "qlora",
        "alpaca",
        ["all-linear"],
    )
    assert (found["eval_steps"], found["save_steps"]) == (0.25, 0.5) and found["attn_implementation"] == "sdpa"
    chat = _settings("axolotl/full_chat.yml")
    assert (chat["tuning"], chat["messages_column"], chat["chat_template"]) == ("full", "conversations", "chatml")
    assert chat["lr_scheduler_kwargs"] == {"min_lr_rate": 0.1} and chat["eval_strategy"] == "epoch"


def test_axolotl_reads_chats_beside_alpaca_where_one_template_writes_both(here):
    sets = "datasets: [{path: a, type: alpaca}, {path: b, type: chat_template}, {path: c, type: completion}]\n"
    (here / "a.yml").write_text(f"base_model: m\nsequence_len: 9\nchat_template: alpaca\n{sets}")
    found, _own = read_other(here / "a.yml", None)
    assert found.settings["chat_template"] == "alpaca"
    (here / "b.yml").write_text(
        f"base_model: m\nsequence_len: 9\n{sets.replace('type: alpaca', 'type: chat_template')}"
    )
    found, _own = read_other(here / "b.yml", None)
    assert "chat_template" not in found.settings


def test_trl_and_unsloth_keep_their_defaults():
    from trl import SFTConfig

    first = _settings("trl/sft.yaml")
    assert (first["tuning"], first["block_size"], first["packing"]) == ("full", 1024, False)
    assert first["assistant_only_loss"] is SFTConfig.assistant_only_loss is False  # of chats, all is learned
    assert _settings("trl/sft_lora.yaml")["assistant_only_loss"] is True  # which it sets
    quantized = _settings("trl/sft_qlora.yaml")
    assert (quantized["tuning"], quantized["lora_r"], quantized["learning_rate"]) == ("qlora", 16, 2e-5)
    words = _settings("unsloth/keywords.yaml")
    assert (words["tuning"], words["lora_r"], words["seed"], words["use_rslora"]) == ("lora", 16, 3407, True)
    full = _settings("unsloth/full_finetune.yaml")
    assert full["tuning"] == "full" and "lora_r" not in full and full["save_steps"] == 3


def test_unsloth_in_16_bits_is_plain_lora(here):
    (here / "a.yaml").write_text("model_name: m\nmax_seq_length: 9\nload_in_16bit: true\nr: 8\nrandom_state: 1\n")
    found, _own = read_other(here / "a.yaml", "unsloth")
    assert found.settings["tuning"] == "lora" and not found.lost


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stage: dpo\nfinetuning_type: lora\n", "stage: dpo is another kind of training.*with_loops"),
        ("do_train: false\nfinetuning_type: lora\n", "do_train: it is false, but this command trains"),
        ("base_model: a\nsequence_len: 9\nrl: dpo\n", "rl: dpo is another kind of training"),
        ("dataset_name: a\nuse_peft: true\nbeta: 0.1\n", "beta: it is for training on preferences"),
        (
            "dataset_name: a\ncenter_rewards_coefficient: 0.01\n",
            "center_rewards_coefficient: it is for training on preferences",
        ),
        ("dataset_name: a\nsync_ref_model: true\n", "sync_ref_model: it is for training on preferences"),
        ("stage: sft\ndataset: pairs\n", "dataset: pairs holds preferences"),
        (
            "stage: sft\ndataset: identiti\n",
            "identiti is not in data/dataset_info.json .did you mean 'identity'",
        ),
        ("stage: sft\nbase_model: b\n", "keys belong to several programs.*--from llama-factory or axolotl"),
        ("learning_rate: 1\n", "no key shows whether it is for TRL, LLaMA-Factory, Axolotl or Unsloth"),
        ("tokenizer: {_component_: torchtune.models.qwen2}\n", "Files of other programs are not read: write their"),
        ("stage: sft\nfinetuning_type: oft\n", "finetuning_type: oft is not an adapter type"),
        ("stage: sft\nfinetuning_type: full\nquantization_bit: 4\n", "without adapters nothing would be trained"),
        ("base_model: a\nsequence_len: 9\ndatasets: x\n", "datasets: it is not a list of datasets"),
        (
            "base_model: a\nsequence_len: 9\ndatasets: [{path: a, type: alpaca}, {path: b, type: chat_template}]\n",
            "datasets: it asks for the templates alpaca, tokenizer_default; only one can be used for all rows",
        ),
        ("base_model: a\nsequence_len: 9\nval_set_size: 200\n", "200 is a number of documents"),
        *(
            (f"base_model: a\nsequence_len: 9\nwarmup_ratio: {ratio}\n", "share of the run, at least 0 and below 1")
            for ratio in ("1.0", "10", "-0.1")  # a percentage and the whole run would be steps
        ),
        ("base_model: a\nadapter: lora\nlora_r: x\n", "--lora_r: invalid int value"),
    ],
)
def test_what_cannot_be_imported_is_said(text, message, here):
    (here / "other.yaml").write_text(text)
    with pytest.raises(SettingsError, match=message):
        read_other(here / "other.yaml", None)


def test_a_list_of_datasets_that_nests_too_deeply_is_one_message(here):
    (here / "data" / "dataset_info.json").write_text("[" * 5000)
    (here / "other.yaml").write_text("stage: sft\ndataset: identity\n")
    with pytest.raises(SettingsError, match=r"cannot read data/dataset_info\.json"):
        read_other(here / "other.yaml", None)


def test_a_key_that_nobody_knows_is_listed_with_a_near_one(here):
    (here / "other.yaml").write_text("stage: sft\nlora_rnak: 4\ncutoff_len: 8\n")
    found, _ = read_other(here / "other.yaml", None)
    assert [key.meaning.said for key in found.lost] == ["unknown here (did you mean 'lora_rank'?)"]


def test_a_secret_is_not_copied(here, capsys):
    (here / "other.yaml").write_text(
        "model: a\ntraining:\n  batch_size: 2\nlogging:\n  hf_token: hf_abcdefghijklmnopqrst\n"
    )
    assert cli.main(["import", "other.yaml"]) == 0
    assert "abcdefghij" not in (here / "other.scu.yaml").read_text() + capsys.readouterr().out


def test_no_file_is_overwritten(here, capsys):
    (here / "job.yaml").write_text("mine")
    assert cli.main(["import", str(FOLDER / "trl/sft.yaml"), "--output", "job.yaml"]) == 2
    assert (here / "job.yaml").read_text() == "mine" and "already exists" in capsys.readouterr().err


def test_several_values_for_one_are_refused_before_anything_is_written(here, capsys):
    assert cli.main(["import", str(FOLDER / "trl/sft.yaml"), "--lora_r", "8", "16"]) == 2
    assert "unrecognized arguments: 16" in capsys.readouterr().err and not (here / "sft.scu.yaml").exists()


def test_a_file_of_another_program_trains_as_it_is_where_nothing_is_lost(here):
    job = read_job(str(FOLDER / "axolotl/lora.yml"), ["--dataset", "data/alpaca.json"])
    assert job.model.lora_r == 16 and job.training.per_device_train_batch_size == 2 and job.data.block_size == 128
    assert "a file of Axolotl; base_model as model_name_or_path" in " ".join(job.notes)
    with pytest.raises(SettingsError, match=r"1 of its \d+ keys have no counterpart \(eos_token: .*scu-trainer import"):
        read_job(str(FOLDER / "trl/sft_full.yaml"), [])


def test_signs_are_of_one_program_alone():
    known = known_names()
    for name, tool in TOOLS.items():
        others = [other.TABLE.keys() | {*other.SIGNS} for key, other in TOOLS.items() if key != name]
        shared = {sign for sign in tool.SIGNS if any(sign in keys for keys in others)} | ({*tool.SIGNS} & known)
        assert not shared, (name, shared)


@pytest.mark.parametrize("name", TOOLS)
def test_the_pages_say_what_the_tables_do(name):
    spec = importlib.util.spec_from_file_location("write_coming_from", ROOT / "docs" / "write_coming_from.py")
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    found = (pages.FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert pages.page(name) == found, "run: python docs/write_coming_from.py"
