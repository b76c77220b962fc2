"""What only a GPU can show of the memory-efficient paths: that offload frees the card, and the kernels of CUDA.

    pytest tests/gpu/test_paths.py        # about 10 minutes on one card

Each check names what it expects before it runs; ``scu-trainer variants --list`` prints the same.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scu_trainer.runs.studies.variant_table import BY_NAME
from scu_trainer.runs.studies.variants import VariantPlan, find_violations, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

OFFLOADING = ("zero2", "zero2_offload", "zero3_offload")
ON_GPUS_ONLY = ("lora", "lora_checkpointing", "full_8bit_adam", *(n for n, v in BY_NAME.items() if "gpu" in v.needs))


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> VariantPlan:
    command = [sys.executable, "-m", "scu_trainer.train.fixtures.reference_model"]
    folder = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
    return VariantPlan(Path(folder), tmp_path_factory.mktemp("paths"))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("names", [OFFLOADING, ON_GPUS_ONLY], ids=["offload frees the card", "paths of CUDA"])
def test_bounds_of_memory_and_falling_losses(plan, names):
    outcomes = [run(BY_NAME[name], plan, has_gpu=True) for name in names]
    assert [outcome.status for outcome in outcomes] == ["ran"] * len(names)
    assert find_violations(outcomes) == []


def test_a_limit_holds_on_the_card(plan):
    """The allocator is held to ``memory_limit_gb``, and the run ends below it without an out-of-memory that is lost."""
    limited = VariantPlan(plan.model, plan.scratch, extra=("--memory_limit_gb", "1"))
    outcome = run(BY_NAME["lora"], limited, has_gpu=True)
    assert outcome.status == "ran" and outcome.total_bytes <= 2**30


@pytest.mark.parametrize("half", [False, True], ids=["float32", "half precision"])
def test_the_line_about_kernels_names_one_of_cuda(half):
    from scu_trainer.models.kernels import kernel_line
    from tests.tiny import llama

    model = llama().cuda()
    inputs = {"input_ids": torch.arange(16, device="cuda")[None]}
    line = kernel_line(model, inputs, torch.autocast("cuda", torch.bfloat16, enabled=half))
    assert line.startswith("attention: ") and "CPU" not in line
