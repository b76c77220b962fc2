"""The Python blocks of README and docs that train are executed, as they stand, on tiny parts."""

from __future__ import annotations

import functools

import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainingArguments

from scu_trainer import SCUTrainer, settings, wrap
from tests import tiny
from tests.test_doc_blocks import blocks

TRAINING = [(page, text) for page, text in blocks("python") if "SCUTrainer(" in text and "tutorials/" not in page]
"""Those of tutorials are the examples, which tests/test_examples.py runs."""

OF_TRL = [(page, text) for page, text in blocks("python") if "with_loops(SFTTrainer)" in text]
CLASSES = {page: text for page, text in blocks("python") if "class Cooldown(Loop)" in text}


def parts(folder) -> dict[str, object]:
    """What the pages say that the reader has."""
    args = tiny.arguments(folder, max_steps=2)
    model = tiny.lora(tiny.llama())
    quiet = functools.partial(TrainingArguments, use_cpu=True, report_to="none", disable_tqdm=True)
    points = [(torch.rand(6), torch.tensor(i % 3)) for i in range(16)]
    return {
        **{
            name: getattr(settings, name) for name in ("CurriculumSettings", "MemorySettings", "RegularizationSettings")
        },
        **{"SCUTrainer": SCUTrainer, "TrainingArguments": quiet, "torch": torch, "wrap": wrap},
        **{"model": model, "module": model, "args": args, "training_arguments": args},
        **{"rows": tiny.Rows(), "collator": tiny.pad, "pairs": points, "Net": functools.partial(torch.nn.Linear, 6, 3)},
        "supervised_tokens_in_rows": 500,
    }


def test_the_blocks_that_train():
    assert len(TRAINING) == 6 and len(OF_TRL) == 2


@pytest.mark.parametrize(("page", "text"), TRAINING)
def test_training_blocks(page, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space = parts(tmp_path / "run")
    exec(compile(CLASSES.get(page, ""), page, "exec"), space)
    exec(compile(text, page, "exec"), space)
    assert "trainer" not in space or space["trainer"].state.global_step >= 2


# TRL says so of its own defaults.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("page", "text"), OF_TRL)
def test_blocks_with_the_trainer_of_trl(page, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    on_cpu = {"use_cpu": True, "max_steps": 2, "report_to": "none", "disable_tqdm": True}
    monkeypatch.setattr(trl, "SFTConfig", functools.partial(trl.SFTConfig, **on_cpu))
    model = AutoModelForCausalLM.from_pretrained(tiny.saved_llama("model"))
    space = {"model": model, "rows": Dataset.from_list([{"text": "The cow says moo."}] * 32)}
    exec(compile(text, page, "exec"), space)
    assert space["trainer"].state.global_step == 2
