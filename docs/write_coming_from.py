"""Writes the tables of docs/coming_from/: an example of each program beside what ``scu-trainer import`` makes of it,
and what each of its keys means here.

    python docs/write_coming_from.py
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import yaml

from scu_trainer.cli.names.command import read_other
from scu_trainer.cli.names.meaning import Alias, KeySource, Meaning, NoAction, Switch
from scu_trainer.cli.names.tools import TOOLS
from scu_trainer.errors import SettingsError

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "coming_from"
EXAMPLES = ROOT / "tests" / "cli" / "other_tools"
SHOWN = {
    "trl": "sft_lora.yaml",
    "llama-factory": "lora_sft.yaml",
    "axolotl": "lora.yml",
    "unsloth": "lora_text.yaml",
}
"""The example of each page; docs and tests read the same file."""

SETS = [{"path": "rows.jsonl", "type": "alpaca"}]
SAMPLES = {
    "adapter": "qlora",
    "add_special_tokens": "<a>,<b>",
    "add_tokens": "<a>,<b>",
    "additional_target": "embed_tokens,lm_head",
    "batch_size": 4,
    "bf16": "auto",
    "bias": "none",
    "chat_template": "chatml",
    "chat_template_jinja": "chat.jinja",
    "cosine_min_lr_ratio": 0.1,
    "dataset_test_split": "test",
    "datasets": SETS,
    "trl datasets": [{"path": "rows.jsonl"}],
    "evals_per_epoch": 4,
    "finetuning_type": "lora",
    "flash_attn": "fa2",
    "hub_model_id": "me/mine",
    "local_dataset": ["rows.jsonl"],
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_modules_to_save": ["embed_tokens", "lm_head"],
    "lora_r": 16,
    "lora_target": "q_proj,v_proj",
    "lora_target_modules": ["q_proj", "v_proj"],
    "loss_type": "nll",
    "loss_watchdog_threshold": 5.0,
    "lr_scheduler": "cosine",
    "max_samples": 1000,
    "max_steps": 60,
    "mix_strategy": "interleave_under",
    "num_epochs": 3,
    "optim_args": "eps=1e-6",
    "packing_strategy": "wrapped",
    "peft_init_lora_weights": "pissa",
    "plugins": ["axolotl.integrations.liger.LigerPlugin"],
    "pretraining_dataset": "text.jsonl",
    "quantization_bit": 4,
    "quantization_method": "bnb",
    "r": 16,
    "save_steps": 100,
    "saves_per_epoch": 2,
    "special_tokens": {"pad_token": "<pad>"},
    "stage": "sft",
    "target_modules": ["q_proj", "v_proj"],
    "template": "llama3",
    "test_datasets": SETS,
    "tokens": ["<a>", "<b>"],
    "training_type": "lora",
    "unfrozen_parameters": ["lm_head"],
    "use_gradient_checkpointing": "unsloth",
    "val_set_size": 0.1,
    "val_size": 0.1,
    "wandb_project": "mine",
}
"""Values that show what a key becomes whose meaning depends on its value; a switch is on."""

AMONG = {"use_peft": True, "finetuning_type": "lora", "adapter": "lora", "use_galore": True, "use_apollo": True,
         "pissa_init": True, "val_set_size": 0.1}  # fmt: skip
FROM_INFO = "what dataset_info.json says of it: file or Hub id, columns, split, number of samples"


def page(name: str) -> str:
    tables = _tables()
    path = FOLDER / f"{name}.md"
    return tables.written(path.read_text(encoding="utf-8"), {"example": example(name), "keys": keys(name)})


def _tables() -> Any:
    spec = importlib.util.spec_from_file_location("write_tables", ROOT / "docs" / "write_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def example(name: str) -> str:
    """Each key of the other program beside ours."""
    path = EXAMPLES / name / SHOWN[name]
    flags = ["--dataset", "alpaca_en.json"] if name == "llama-factory" else []
    found, own = read_other(path, name, flags)
    rows = [(_code(key.name, key.value), _settings(key.meaning, own), key.meaning.said) for key in found.keys]
    rows += [
        ("", _code(field, value), "the default there") for field, value in found.defaults.items() if field not in own
    ]
    return _tables().markdown((TOOLS[name].TITLE, "here", ""), rows)


def keys(name: str) -> str:
    """The table of the program's keys, as the import reads it."""
    rows = []
    for key, meant in sorted(TOOLS[name].TABLE.items()):
        rows.append((f"`{key}`", *_meaning(name, key, meant)))
    return _tables().markdown(("key", "here", ""), rows)


def _meaning(name: str, key: str, meant: Any) -> tuple[str, str]:
    if isinstance(meant, str):
        return "-", meant
    if isinstance(meant, NoAction):
        return "nothing to do", meant.why
    if isinstance(meant, Alias) and isinstance(meant.name, str):
        return f"`{meant.name}`", ""
    if isinstance(meant, Switch):
        return ", ".join(_code(field, value) for field, value in meant.means.items()), ""
    if key in ("dataset", "eval_dataset") and not isinstance(meant, Alias):
        return f"`{key}`", FROM_INFO
    value = SAMPLES.get(f"{name} {key}", SAMPLES.get(key, True))
    try:
        meaning = meant(value, KeySource({**AMONG, key: value}))
    except SettingsError:
        return "refused", "[any Trainer](../any_trainer.md) has preferences and rewards"
    said = f": {meaning.said}" if meaning.said else ""
    return _settings(meaning, {}) or "nothing to do", (
        f"for {_code('', value)}{said}" if key in SAMPLES else meaning.said
    )


def _settings(meaning: Meaning, own: dict[str, Any]) -> str:
    return ", ".join(_code(field, own.get(field, value)) for field, value in meaning.settings.items())


def _code(name: str, value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).splitlines()[0]
    text = ("" if value is None else text).replace("|", "\\|")
    return f"`{name}: {text}`".replace(": `", ":`") if name else f"`{text}`"


def main() -> None:
    for name in TOOLS:
        text = page(name)
        (FOLDER / f"{name}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
