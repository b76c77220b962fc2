"""Axolotl, used as its documentation describes, on the same weights, rows and steps.

It cannot be installed without CUDA, so this code has never run on our machines. It follows the documentation and the
signatures of the public functions. An error in it becomes a row of the table with its message.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axolotl.cli.args import TrainerCliArgs
from axolotl.cli.config import load_cfg
from axolotl.common.datasets import load_datasets
from axolotl.integrations.base import BasePlugin
from axolotl.train import train

from benchmarks.gpu.gpu_others import TARGETS, counted, saved
from benchmarks.gpu.gpu_window import Window
from benchmarks.lib.text_job import Trained
from benchmarks.lib.turns import TakesTurns

if TYPE_CHECKING:
    from benchmarks.gpu.gpu_work import CardJob


def axolotl(job: CardJob, window: Window) -> Trained:
    """Train with Axolotl's training function, with a plugin that counts tokens and measures."""
    with saved(job) as folder, tempfile.TemporaryDirectory() as out:
        config = Path(out) / "config.yaml"
        config.write_text(json.dumps(_axolotl_settings(job, folder, out)))  # JSON is YAML
        Watching.window, Watching.tokens = window, []
        cfg = load_cfg(str(config))
        trained = train(cfg=cfg, dataset_meta=load_datasets(cfg=cfg, cli_args=TrainerCliArgs()))
    return trained[0], [int(tokens) for tokens in Watching.tokens]


def _axolotl_settings(job: CardJob, folder: str, out: str) -> dict[str, Any]:
    rows = job.token_rows()
    documents = Path(out) / "rows.jsonl"
    with documents.open("w") as file:
        for ids in (rows[i]["input_ids"].tolist() for i in range(len(rows))):
            file.write(json.dumps({"input_ids": ids, "labels": ids, "attention_mask": [1] * len(ids)}) + "\n")
    adapters = {"lora_r": job.lora_rank, "lora_alpha": 2 * (job.lora_rank or 0), "lora_target_modules": TARGETS}
    tuned = {} if job.lora_rank is None else {"adapter": job.shape.tuning, "lora_dropout": 0.0, **adapters}
    return {
        "base_model": folder,
        "load_in_4bit": job.shape.tuning == "qlora",
        **tuned,
        "datasets": [{"path": str(documents), "ds_type": "json", "type": None}],
        "dataset_prepared_path": f"{out}/prepared",
        "output_dir": f"{out}/trained",
        "sequence_len": job.shape.longest_row,
        "sample_packing": False,  # the same rows in the same steps
        "flash_attention": bool(job.shape.attention),
        "bf16": True,
        "gradient_checkpointing": job.checkpointing,
        "micro_batch_size": job.batch_rows,
        "gradient_accumulation_steps": job.accumulation,
        "max_steps": job.steps,
        "learning_rate": job.learning_rate,
        "lr_scheduler": "constant",
        "optimizer": "adamw_torch_fused",
        "save_strategy": "no",
        "val_set_size": 0,
        "plugins": [f"{__name__}.Watching"],
    }


class Watching(BasePlugin):
    """Counts tokens and drives the window. Axolotl creates it by name, so both are class attributes."""

    window: Window
    tokens: list[Any]

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        Watching.window.watch(trainer.model)
        Watching.tokens = counted(trainer)

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        return [TakesTurns(Watching.window)]
