"""8-bit and paged optimizers on a CUDA device: the state is small or paged, the loss falls, faults change no bit."""

from __future__ import annotations

import pytest
import torch

from scu_trainer.hardware.optimizers import check_optimizer
from scu_trainer.hardware.precision import choose_precision, device_facts, tf32_default
from tests.tiny import Rows, llama, same, trained, weights_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here")

OPTIMS = ("adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_32bit", "paged_adamw_8bit", "adamw_torch_8bit")


def runs_here(optim: str) -> None:
    check_optimizer(optim, "cuda", torch.cuda.get_device_capability())


def train(folder, optim: str, **changes):
    rows = Rows(64)
    model = llama(hidden=512, layers=1)
    return trained(
        model,
        folder,
        dataset=rows,
        use_cpu=False,
        optim=optim,
        learning_rate=1e-3,
        max_steps=12,
        logging_steps=4,
        **changes,
    )


@pytest.mark.parametrize("optim", OPTIMS)
@pytest.mark.filterwarnings("ignore:.*_stable_hash_for_caching")  # torchao's tensors are compiled again in each process
def test_the_loss_falls(optim, tmp_path):
    runs_here(optim)
    trainer = train(tmp_path, optim)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.parametrize("optim", ["paged_adamw_32bit", "paged_adamw_8bit"])
def test_large_state_is_really_paged(optim, tmp_path):
    """State of at least 100,000 elements lies in unified memory, outside the caching allocator."""
    runs_here(optim)
    optimizer = train(tmp_path, optim).optimizer.optimizer
    paged = [getattr(entry["state1"], "is_paged", False) for p, entry in optimizer.state.items() if p.numel() >= 1e5]
    assert paged and all(paged)


def test_8_bits_take_a_quarter_of_the_device_memory():
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    # It keeps embeddings in 32 bits, and knows them by their id, which a weight of a later test may have again.
    bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()

    def grown_bytes(kind) -> int:
        weight = torch.nn.Parameter(torch.ones(4096, 4096, device="cuda"))
        weight.grad = torch.ones_like(weight)
        before_bytes = torch.cuda.memory_allocated()
        optimizer = kind([weight])
        optimizer.step()
        return torch.cuda.memory_allocated() - before_bytes

    assert grown_bytes(bitsandbytes.optim.AdamW8bit) <= 0.3 * grown_bytes(torch.optim.AdamW)


def test_resumed_with_8_bit_state_is_uninterrupted(tmp_path):
    runs_here("adamw_bnb_8bit")
    saving = {"save_strategy": "steps", "save_steps": 6}
    whole = train(tmp_path, "adamw_bnb_8bit", **saving)
    resumed = train(tmp_path, "adamw_bnb_8bit", resume=str(tmp_path / "checkpoint-6"), **saving)
    assert same(weights_of(resumed.model), weights_of(whole.model))


def test_the_automatic_precision_is_one_that_this_card_has():
    facts = device_facts(use_cpu=False)
    choice = choose_precision("auto", False, False, None, facts)
    assert facts.kind == "cuda"
    assert choice.name == ("bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else choice.name)
    assert tf32_default(facts) in ((True,) if (facts.capability or (0, 0)) >= (8, 0) else (None,))
