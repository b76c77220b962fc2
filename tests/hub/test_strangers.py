"""What is shared works for somebody who does not have this package: stock libraries, the code of the card."""

from __future__ import annotations

import os
import re

import pytest
import torch
from safetensors.torch import load_file

from scu_trainer.cli.subjects import subject_of
from scu_trainer.models.loading.load import load_for_evaluation
from tests import processes
from tests.hub.server import running

IDS = torch.randint(3, 200, (2, 12), generator=torch.Generator().manual_seed(0))

STRANGER = """
import sys, torch, safetensors.torch
ids = torch.randint(3, 200, (2, 12), generator=torch.Generator().manual_seed(0))
logits = {}
for name, code in %r.items():
    there = {}
    exec(code, there)
    assert there["tokenizer"]("the file of a list")["input_ids"], name
    with torch.no_grad():
        logits[name] = there["model"].eval()(input_ids=ids).logits.float().contiguous()
assert not [name for name in sys.modules if name.startswith("scu_trainer")]
safetensors.torch.save_file(logits, sys.argv[1])
"""


def code_of(card: str) -> str:
    return re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]


@pytest.fixture(scope="module")
def logits(finished):
    """Of an adapter, of its merged weights, and of those as they are pulled from a Hub, each by its own card."""
    folder, run = finished.folder, finished.run
    with running() as hub:
        environment = {**os.environ, **hub.environment(folder / "home")}
        words = ["-m", "scu_trainer.cli.main", "push", run, "--merged", "--repo_id", "me/model"]
        done = processes.launch(words, environment=environment)
        assert done.returncode == 0, done.stderr
        cards = {
            "adapter": (run / "README.md").read_text(),
            "merged": (finished.merged / "README.md").read_text(),
            "pulled": hub.repos["me/model"].files()["README.md"].decode(),
        }
        blocks = {name: code_of(card) for name, card in cards.items()}
        done = processes.run_without_us(["-c", STRANGER % blocks, folder / "logits"], environment=environment)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = load_for_evaluation(str(run), subject_of(str(run)).model)(input_ids=IDS).logits
    return blocks, expected, load_file(folder / "logits")


def test_the_code_of_the_cards_gives_the_same_model(logits):
    _, expected, found = logits
    largest = expected.abs().max()
    assert torch.equal(found["adapter"], expected)
    assert (found["merged"] - expected).abs().max() / largest < 1e-5
    assert torch.equal(found["pulled"], found["merged"])


def test_two_lines_load_the_weights(logits):
    blocks = logits[0]
    assert blocks["adapter"].splitlines()[:2] == [
        "from peft import AutoPeftModelForCausalLM",
        next(line for line in blocks["adapter"].splitlines() if line.startswith("model = ")),
    ]
    assert 'AutoModelForCausalLM.from_pretrained("me/model")' in blocks["pulled"]
