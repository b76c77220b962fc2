"""Sizes of a job on a causal language model."""

from __future__ import annotations

MODES: dict[str, dict[str, object]] = {
    "tiny": {
        "dataset_size": 40,
        "max_eval_documents": 8,
        "block_size": 128,
        "num_train_epochs": 1.0,
        "max_steps": -1,
    },
    "standard": {
        "dataset_size": None,
        "max_eval_documents": None,
        "block_size": 512,
        "num_train_epochs": 3.0,
        "max_steps": -1,
    },
    "extended": {
        "dataset_size": None,
        "max_eval_documents": None,
        "block_size": 1024,
        "num_train_epochs": 6.0,
        "max_steps": -1,
    },
}
"""Groups of values under one name; ``max_steps`` of -1 lets the epochs count, None is everything that there is. The
model and how it is tuned stay."""
