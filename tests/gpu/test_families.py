"""What only a GPU shows of the image, word and sensor models: half precision, channels last, memory on the card.

pytest tests/gpu/test_families.py        # about 5 minutes on one card
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from scu_trainer.cli import train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

RECIPES = Path(__file__).parents[2] / "recipes"
STEPS = {"efficientnet": 120}
"""Running means of its many layers take longer than the 40 steps of the others, on a CPU, too."""
LARGE = ("--per_device_train_batch_size", "256")


def run(tmp_path: Path, recipe: str, *flags: str) -> dict:
    out, steps = tmp_path / "run", STEPS.get(recipe, 40)
    words = ["--config", str(RECIPES / f"{recipe}.yaml"), "--max_steps", str(steps), "--output_dir", str(out), *flags]
    assert train.main(words) == 0
    return json.loads((out / "scu_metrics.json").read_text())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("recipe", ["resnet", "efficientnet", "gru", "sensors"])
def test_a_recipe_learns_on_the_card(recipe, tmp_path, capsys):
    figures = run(tmp_path, recipe)
    assert figures["costs"]["device"].startswith("cuda") and figures["costs"]["peak_bytes"] > 0
    assert figures["held_out_bpt_after"]["value"] < figures["held_out_bpt_before"]["value"]
    chooses = "mixed_precision" not in (RECIPES / f"{recipe}.yaml").read_text()
    in_half = "precision: bf16" in capsys.readouterr().out
    assert in_half == (chooses and torch.cuda.is_bf16_supported(including_emulation=False))


@pytest.mark.timeout(900)
def test_the_preset_for_gpus(tmp_path):
    """Compiled, channels last, workers with pinned memory."""
    figures = run(tmp_path, "resnet", "--preset", "gpu")
    assert figures["held_out_bpt_after"]["value"] < figures["held_out_bpt_before"]["value"]


@pytest.mark.timeout(900)
def test_the_preset_that_saves_memory_does(tmp_path):
    peaks = [
        run(tmp_path / preset, "resnet", "--preset", preset, "--per_device_train_batch_size", "256")["costs"][
            "peak_bytes"
        ]
        for preset in ("gpu", "memory_efficient")
    ]
    assert peaks[1] < 0.8 * peaks[0]
