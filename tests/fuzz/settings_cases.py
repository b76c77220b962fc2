"""Numbers that are none, in every field that holds a number; and files of settings."""

from __future__ import annotations

import functools
import json
import random
import types
from dataclasses import fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from tests.fuzz.site import Site

NUMBERS = ("nan", "inf", "-inf", "Infinity", "1e400", "-1e400", "1" + "0" * 30, "-1" + "0" * 30, "-1", "0", "-0.0",
        "1e30",
           "-1e30", "0.5", "1e-320", "1e308", "2", "4294967296", "9223372036854775808", "9" * 5000, "", " ", "x",
           "0x10",
           "1_000", "1,5", "1e3", "٣", "true", "None", "null", "[]", "{}", "1 2", "--1", "1.0", "-5", "auto",
           "1e18")  # fmt: skip
IN_FILE = (float("nan"), float("inf"), float("-inf"), 1e308, 10**30, -(10**30), -1, 0, 0.5, True, False, None, "nan",
        "",
           "x", [], [1], [[1]], {}, {"a": 1}, {"a": {"b": []}}, "1e400", "auto", [None], 2**63, 1e18, "-",
           3)  # fmt: skip
BIG_MACHINE = ("dataloader_num_workers", "preprocessing_num_workers")
"""Numbers of processes: what is between a few and the absurd would be started."""


@functools.cache
def number_fields() -> dict[str, str]:
    """Every field of the command line that holds a number -> the task it belongs to, '' for all."""
    from transformers import TrainingArguments

    from scu_trainer.cli import fields
    from scu_trainer.settings import CurriculumSettings, DataSettings, ModelSettings, SafetySettings
    from scu_trainer.settings.efficiency import EfficiencySettings
    from scu_trainer.settings.tasks import KINDS

    kinds = [ModelSettings, DataSettings, CurriculumSettings, EfficiencySettings, SafetySettings, TrainingArguments]
    kinds += [fields.regularization_flags(), fields.memory_flags()]
    found = {name: "" for kind in kinds for name in _numbers_of(kind)}
    own = [(task, kind.settings) for task, kind in KINDS.items() if kind.settings is not None]
    return (
        found
        | {name: task for task, settings in own for name in _numbers_of(settings)}
        | dict.fromkeys(("scu_target_s", "token_cap", "target_headroom_gb", "max_gpu_mem", "cpu_mem"), "")
    )


def _numbers_of(kind: type) -> list[str]:
    hints = get_type_hints(kind)
    return [item.name for item in fields(kind) if item.init and {int, float} & set(_flat(hints[item.name]))]


def _flat(hint: Any) -> list[Any]:
    is_choice = get_origin(hint) in (Union, types.UnionType, list)
    return [one for part in get_args(hint) for one in _flat(part)] if is_choice else [hint]


def numbers(chance: random.Random, folder: Path, site: Site) -> list[str]:
    known = number_fields()
    name = chance.choice(sorted(known))
    changes: dict[str, Any] = {} if not known[name] else {"task": known[name], "model_name_or_path": None}
    if known[name] == "word-generation":
        changes |= {"dataset": "python_doc_sections", "dataset_size": "200"}
    elif known[name]:
        changes |= {"dataset": None, "block_size": None}
        changes |= {"sensor_samples": "40"} if known[name].startswith("sensor") else {"dataset_size": "100"}
    if name == "eval_steps":
        changes["eval_strategy"] = "steps"
    if name == "save_steps":
        changes["save_strategy"] = "steps"
    if chance.random() < 0.7:
        value = chance.choice(
            [text for text in NUMBERS if name not in BIG_MACHINE or text not in ("1_000", "4294967296")]
        )
        return site.train(**{**changes, name: value})
    content: Any = {name: chance.choice(IN_FILE)}
    path = folder / chance.choice(["c.yaml", "c.json"])
    path.write_text(_as_yaml(content) if path.suffix == ".yaml" else json.dumps(content))
    return [*site.train(**{**changes, name: None}), "--config", path.name]


def _as_yaml(content: Any) -> str:
    import yaml

    return yaml.safe_dump(content)


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
FILES = {
    "list keys": "[1, 2]: 3\n",
    "dict keys": "{a: 1}: 3\n",
    "complex key": "? [a, b]\n: 3\n",
    "null key": "null: 3\n",
    "number keys": "1: 2\n3.5: 4\n.nan: 5\n.nan: 6\n",
    "date key": "2001-01-01: x\n",
    "bool key": "yes: no\n",
    "a cycle": "dataset: &a [*a]\n",
    "a cycle of mappings": "lr_scheduler_kwargs: &a {b: *a}\n",
    "a cycle at the top": "&a {dataset: *a}\n",
    "merge of itself": "&a\n<<: *a\nmax_steps: 1\n",
    "merge of a list": "<<: [1, 2]\n",
    "merge": "<<: {max_steps: 1}\nmax_steps: 1\n",
    "laughs": LAUGHS,
    "laughs in a field": LAUGHS + "lora_target_modules: *a9\n",
    "deep list": "dataset: " + "[" * 5000 + "]" * 5000 + "\n",
    "deep mapping": "a: " + "{b: " * 5000 + "1" + "}" * 5000 + "\n",
    "deep by indent": "".join(" " * n + "a:\n" for n in range(2000)),
    "deep json": '{"a":' * 20000,
    "twice": "max_steps: 1\nmax_steps: 2\n",
    "twice deeper": "lr_scheduler_kwargs: {a: 1, a: 2}\n",
    "twice with hyphen": "max_steps: 1\nmax-steps: 2\n",
    "a list": "- max_steps\n- 1\n",
    "a word": "hello\n",
    "a number": "3\n",
    "null": "null\n",
    "true": "true\n",
    "tabs": "max_steps:\t1\n\tlearning_rate: 2\n",
    "tab only": "\t\n",
    "a BOM": "\ufeffmax_steps: 1\n",
    "NUL": "max_steps: 1\0\n",
    "control": "max_steps: \x07\n",
    "empty": "",
    "comment": "# nothing\n",
    "two documents": "max_steps: 1\n---\nmax_steps: 2\n",
    "an end": "---\n...\n",
    "python tag": "max_steps: !!python/object/apply:os.system ['true']\n",
    "unknown tag": "max_steps: !foo 3\n",
    "binary tag": "dataset: !!binary aGVsbG8=\n",
    "wrong binary": "dataset: !!binary '***'\n",
    "set tag": "dataset: !!set {a, b}\n",
    "omap tag": "dataset: !!omap [a: 1]\n",
    "wrong int tag": "max_steps: !!int x\n",
    "wrong float tag": "learning_rate: !!float x\n",
    "timestamp": "dataset: 2001-12-14t21:59:43.10-05:00\n",
    "wrong date": "dataset: 2001-99-99\n",
    "sexagesimal": "max_steps: 1:30\n",
    "octal": "max_steps: 0777\n",
    "long int": "max_steps: " + "9" * 5000 + "\n",
    "long float": "learning_rate: 1" + "0" * 5000 + ".5\n",
    "unknown alias": "dataset: *nobody\n",
    "percent": "%YAML 9.9\n---\nmax_steps: 1\n",
    "open quote": 'dataset: "\n',
    "block": "dataset: |\n  a\n  b\n",
    "escape": 'dataset: "\\ud800.jsonl"\n',
    "nul escape": 'dataset: "a\\0b.jsonl"\n',
    "escaped nul name": 'output_dir: "a\\0b"\n',
    "escaped nul model": 'model_name_or_path: "a\\0b"\n',
    "lone model": 'model_name_or_path: "\\udfff"\n',
    "lone output": 'output_dir: "\\udfff"\n',
    "json nan": '{"learning_rate": NaN}',
    "json tail": '{"max_steps": 1,}',
    "json comment": '{"max_steps": 1 /* one */}',
    "long key": "x" * 5000 + ": 1\n",
    "long list": "lora_target_modules: [" + ", ".join(f"m{n}" for n in range(3000)) + "]\n",
    "list of mappings": "lora_target_modules: [{a: 1}, null, [b]]\n",
    "mapping for text": "dataset: {a: b}\n",
    "list for text": "dataset: [a, b]\n",
    "empty list for text": "dataset: []\n",
    "mapping for bool": "packing: {a: 1}\n",
    "text for bool": "packing: perhaps\n",
    "number for bool": "packing: 7\n",
    "mapping for choice": "tuning: {lora: 1}\n",
    "list for choice": "tuning: [lora]\n",
    "list for enum": "lr_scheduler_type: [linear]\n",
    "word for enum": "lr_scheduler_type: nonsense\n",
    "word for optim": "optim: nonsense\n",
    "list for dict": "lr_scheduler_kwargs: [1]\n",
    "word for dict": "lr_scheduler_kwargs: x\n",
    "unknown in dict": "lr_scheduler_kwargs: {nobody: 1}\n",
    "nan in dict": "lr_scheduler_type: cosine_with_restarts\nlr_scheduler_kwargs: {num_cycles: .nan}\n",
    "accelerator": "accelerator_config: {nobody: 1}\n",
    "accelerator word": "accelerator_config: nobody.json\n",
    "accelerator list": "accelerator_config: [1]\n",
    "checkpointing kwargs": "gradient_checkpointing: true\ngradient_checkpointing_kwargs: {nobody: 1}\n",
    "deepspeed word": "deepspeed: nobody.json\n",
    "deepspeed mapping": "deepspeed: {zero_optimization: {stage: 99}}\n",
    "deepspeed wrong": "deepspeed: {zero_optimization: [1]}\n",
    "fsdp": "fsdp: nonsense\n",
    "fsdp config": "fsdp: full_shard\nfsdp_config: {nobody: 1}\n",
    "report_to": "report_to: [nobody]\n",
    "report_to number": "report_to: 3\n",
    "optim args": "optim_args: nonsense\n",
    "optim args list": "optim_args: 'a=b,c'\n",
    "resume": "resume_from_checkpoint: nowhere\n",
    "resume bool": "resume_from_checkpoint: true\n",
    "log level": "log_level: nonsense\n",
    "hub strategy": "hub_strategy: nonsense\n",
    "dataloader": "dataloader_prefetch_factor: 2\n",
    "label names": "label_names: [a, b]\n",
    "debug": "debug: nonsense\n",
    "liger": "liger_kernel_config: {a: [1]}\n",
    "parallelism": "parallelism_config: {a: 1}\n",
    "parallelism word": "parallelism_config: x\n",
    "trackio": "trackio_space_id: [1]\n",
    "metric": "load_best_model_at_end: true\nmetric_for_best_model: nobody\n",
    "torch compile": "torch_compile_backend: nonsense\n",
    "ddp backend": "ddp_backend: nonsense\n",
    "half precision": "fp16: true\nbf16: true\n",
    "a run's configuration": '{"configuration": 3, "versions": {}, "data": {}}',
    "a run's list": '{"configuration": [], "versions": {}, "data": {}}',
    "a run's keys": '{"configuration": {"nobody": 1}, "versions": {}, "data": {}}',
}  # fmt: skip
BYTES = (
    b"\xff\xfe",
    b"\xff",
    b"\x80abc: 1",
    "max_steps: 1\n".encode("utf-16"),
    b"\0" * 100,
    b"\x89PNG\r\n\x1a\n",
    b"\x1f\x8b",
)


def config_file(chance: random.Random, folder: Path, site: Site) -> list[str]:
    words = site.train(*(["--print_config"] if chance.random() < 0.1 else []), max_steps=None)
    path = folder / chance.choice(["c.yaml", "c.json", "c"])
    kind = chance.random()
    if kind < 0.06:
        path.mkdir()
    elif kind < 0.12:
        path.write_bytes(chance.choice(BYTES) if chance.random() < 0.8 else chance.randbytes(300))
    elif kind < 0.16:
        return [
            *words,
            "--max_steps=1",
            "--config",
            chance.choice(["/dev/null", "/proc/self/mem", "nowhere", "", ".", "/dev/zero"]),
        ]
    else:
        path.write_text(FILES[chance.choice(sorted(FILES))], encoding="utf-8")
    return [*words, *(["--max_steps=1"] if "max_steps" not in path_text(path) else []), "--config", path.name]


def path_text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""
