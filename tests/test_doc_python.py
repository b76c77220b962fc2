"""The Python of README and docs runs as it stands there, on what a page takes for the reader's own: a model, rows, ...

Three of its places have their own tests: tutorials are made from the examples (tests/test_examples.py), the client of
docs/serve.md asks a server (tests/serve/test_serve.py), and what the loop of docs/loops.md does is looked at in
tests/train/test_own_loop.py.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny
from tests.models import test_gru, test_sensors
from tests.test_doc_blocks import ROOT, blocks

# TRL's own use of transformers warns.
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

EPOCHS = 6
"""As many as ``noise_guard`` takes at least, and some more."""

ELSEWHERE = ("docs/tutorials/", "docs/serve.md")
BLOCKS = [(page, text) for page, text in blocks("python") if not page.startswith(ELSEWHERE)]


@pytest.fixture
def yours(tmp_path, monkeypatch) -> dict[str, Any]:
    """What the pages take for given, under their names. Arguments that a page writes itself get those of a machine
    without a GPU."""
    import transformers
    import trl
    from trl import SFTConfig, SFTTrainer  # noqa: F401 - its file is imported before anything is put in its place

    monkeypatch.chdir(tmp_path)
    small = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}
    monkeypatch.setattr(trl, "SFTConfig", functools.partial(SFTConfig, max_steps=2, bf16=False, **small))
    monkeypatch.setattr(transformers, "TrainingArguments", functools.partial(transformers.TrainingArguments, **small))
    args = tiny.arguments(tmp_path / "run", max_steps=-1, num_train_epochs=EPOCHS)
    points = torch.randn(24, 6)
    return {
        "model": tiny.llama(),
        "module": tiny.llama(),
        "args": args,
        "training_arguments": args,
        "rows": tiny.Rows(16),
        "collator": tiny.pad,
        "supervised_tokens_in_rows": 16 * 15,
        "Net": lambda: torch.nn.Linear(6, 3),
        "pairs": list(zip(points, torch.arange(24) % 3, strict=True)),
    }


def with_trl(yours: dict[str, Any], folder: Path) -> None:
    """TRL asks a model for the place of its tokenizer."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    yours["model"] = AutoModelForCausalLM.from_pretrained(tiny.saved_llama(folder / "model"))
    yours["rows"] = Dataset.from_dict({"text": [f"Shelf {i} holds {3 * i} books." for i in range(32)]})


def with_cadence(yours: dict[str, Any]) -> None:
    from scu_trainer.data import default_cache_dir, embedded_tokenizer

    tokenizer = embedded_tokenizer(default_cache_dir(None))
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = test_gru.config(max_new_tokens=4, **ends)
    config.vocab_size, config.category_names = len(tokenizer), ["<unknown>", "asyncio"]
    yours["tokenizer"], yours["model"] = tokenizer, test_gru.CadenceForCausalLM(config).eval()


def test_there_are_blocks_to_run():
    assert len(BLOCKS) >= 11 and {"README.md", "docs/guide.md"} <= {page for page, _ in BLOCKS}
    assert sum(".train()" in text for _, text in BLOCKS) == 8


@pytest.mark.parametrize(("page", "text"), BLOCKS, ids=[f"{page}-{number}" for number, (page, _) in enumerate(BLOCKS)])
def test_a_block_runs(page, text, yours, tmp_path):
    if "from trl" in text:
        with_trl(yours, tmp_path)
    if "category_ids" in text:
        with_cadence(yours)
    if "generate_report" in text:
        yours |= {"model": test_sensors.trident(**test_sensors.HEAD).eval(), "batch": test_sensors.batch_of()}
    if page == "docs/loops.md" and "class Cooldown" not in text:
        exec(compile(_cooldown(), page, "exec"), yours)
    space = yours | {"__name__": "yours"}
    exec(compile(text, str(ROOT / page), "exec"), space)
    assert "trainer" not in space or space["trainer"].state.global_step >= 2


def _cooldown() -> str:
    return next(text for page, text in BLOCKS if page == "docs/loops.md" and re.search(r"^class Cooldown", text, re.M))
