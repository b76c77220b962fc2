"""Prepare documents from files, the Hub or Python itself as training and held-out rows of tokens, with statistics."""

from scu_trainer.data.statistics import DataStatistics
from scu_trainer.data.store import default_cache_dir
from scu_trainer.data.text.collate import Collator
from scu_trainer.data.text.mixture import prepare
from scu_trainer.data.text.plan import HeldOutDocument, PreparedData
from scu_trainer.data.text.tokenizer import embedded_tokenizer

__all__ = [
    "Collator",
    "DataStatistics",
    "HeldOutDocument",
    "PreparedData",
    "default_cache_dir",
    "embedded_tokenizer",
    "prepare",
]
