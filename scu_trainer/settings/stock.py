"""Limits for numbers that ``transformers.TrainingArguments`` accepts but cannot train with, and the data seed."""

from __future__ import annotations

from typing import Any

from scu_trainer.settings.base import LARGEST_NUMBER, Allowed

MOST_SEED = 2**32 - 1
"""The largest seed of numpy."""

MOST_WORKERS = 2**16
"""More worker processes than any machine can start. Preflight warns at far smaller numbers."""

CHECKED_BY_PREFLIGHT = {
    "learning_rate": Allowed(),
    "weight_decay": Allowed(),
    "num_train_epochs": Allowed(),
    "per_device_train_batch_size": Allowed(least=1),
    "per_device_eval_batch_size": Allowed(least=1),
    "gradient_accumulation_steps": Allowed(least=1),
    "adam_beta1": Allowed(below=1),
    "adam_beta2": Allowed(below=1),
    "label_smoothing_factor": Allowed(most=1),
}
"""Limits that apply only if preflight does not stop the run, because it has its own messages for these fields."""

ALLOWED = {
    **dict.fromkeys(CHECKED_BY_PREFLIGHT, Allowed(least=-LARGEST_NUMBER)),
    "eval_accumulation_steps": Allowed(least=1),
    "save_steps": Allowed(above=0),
    "torch_empty_cache_steps": Allowed(least=1),
    "seed": Allowed(most=MOST_SEED),
    "data_seed": Allowed(most=MOST_SEED),
    "dataloader_num_workers": Allowed(most=MOST_WORKERS),
    "dataloader_prefetch_factor": Allowed(least=1),
    "ddp_bucket_cap_mb": Allowed(least=1),
    "ddp_timeout": Allowed(least=1),
}
"""Limits that differ from "0 or more", which applies to all other numbers; see ``settings/base.py``."""


def effective_data_seed(args: Any) -> int:
    """Return the seed for the held-out split, the selection and the order of rows: ``data_seed``, else ``seed``."""
    seed: int = args.seed if args.data_seed is None else args.data_seed
    return seed
