"""The weights of the embedded base model: pre-trained once on the embedded Python documentation, then kept.

They are made in a process of their own: inside a launched run the stock Trainer would wait for the other ranks, and a
run must give the same result with and without the cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scu_trainer.data import Collator, embedded_tokenizer, prepare
from scu_trainer.data.store import built_once, digest_of
from scu_trainer.models.embedded import base_config
from scu_trainer.settings import DataSettings

BLOCK_TOKENS = 256
BATCH_ROWS = 8
LEARNING_RATE = 4e-3
SEED = 0
FORMAT = 1
"""Raised when anything here changes the weights: cached models of an older format are not used again."""

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def embedded_base(cache_dir: Path, steps: int) -> Path:
    """Folder of the embedded base with its tokenizer, made at the first call by ``steps`` optimizer steps, then
    re-used."""
    return built_once(_folder(cache_dir, steps), lambda new: _build_in_child(new, cache_dir, steps))


def is_cached(cache_dir: Path, steps: int) -> bool:
    return _folder(cache_dir, steps).exists()


def _folder(cache_dir: Path, steps: int) -> Path:
    import torch
    import transformers

    config = base_config(2048, 0, 1, 2).to_diff_dict()
    recipe = [FORMAT, BLOCK_TOKENS, BATCH_ROWS, LEARNING_RATE, SEED, transformers.__version__, torch.__version__]
    return (
        cache_dir
        / "base"
        / f"granite-hybrid-{steps}-{digest_of(recipe, json.loads(json.dumps(config, default=str)))[:12]}"
    )


def _build_in_child(new: Path, cache_dir: Path, steps: int) -> None:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(("ACCELERATE_", "TORCHELASTIC_", "FSDP_"))
    }
    command = [sys.executable, "-m", "scu_trainer.train.base_model", str(new), str(cache_dir), str(steps)]
    subprocess.run(command, env=environment, check=True)


def build(new: Path, cache_dir: Path, steps: int) -> None:
    """Train the base for ``steps`` optimizer steps and write model and tokenizer to ``new``."""
    from scu_trainer.train.logs import run_log

    with run_log():
        tokenizer = embedded_tokenizer(cache_dir)
        model = _pretrain(tokenizer, cache_dir, steps)
        model.cpu().save_pretrained(new)
        tokenizer.save_pretrained(new)


def _pretrain(tokenizer, cache_dir: Path, steps: int):
    import torch
    from transformers import GraniteMoeHybridForCausalLM, PrinterCallback, Trainer

    from scu_trainer.train.console import ConsoleCallback

    torch.manual_seed(SEED)
    config = base_config(len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    data = prepare(
        DataSettings(dataset="python_docs", block_size=BLOCK_TOKENS, validation_split_percentage=0.0),
        tokenizer,
        seed=SEED,
        cache_dir=cache_dir,
        model_name="embedded base",
    )
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(
            GraniteMoeHybridForCausalLM(config),
            _arguments(scratch, steps, not torch.cuda.is_available()),
            data_collator=Collator.of(tokenizer),
            train_dataset=data.train,
            callbacks=[ConsoleCallback()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return trainer.model


def _arguments(scratch: str, steps: int, use_cpu: bool):
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=scratch,
        max_steps=steps,
        per_device_train_batch_size=BATCH_ROWS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="cosine",
        warmup_steps=min(20, steps // 4),
        weight_decay=0.1,
        logging_steps=max(1, steps // 6),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=use_cpu,
        seed=SEED,
    )


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
