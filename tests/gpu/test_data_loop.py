"""The data loop on a CUDA device: the same losses and gradients as the stock path, and less memory."""

from __future__ import annotations

import numpy
import pytest
import torch

from scu_trainer.settings import CurriculumSettings, MemorySettings
from scu_trainer.train.loss.rows.kernels import chunked_linear_cross_entropy
from scu_trainer.train.trainer import SCUTrainer
from tests.tiny import UnevenRows, arguments, llama, pad, weights_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here")

WORDS, SIZE, TOKENS = 128_000, 512, 2048


def head(dtype=torch.float32):
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, SIZE, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(WORDS, SIZE, device="cuda", dtype=dtype) / SIZE**0.5).requires_grad_()
    return hidden, weight, torch.randint(0, WORDS, (TOKENS,), device="cuda")


def measured(loss_of) -> tuple[float, torch.Tensor, int]:
    """(loss, gradient of hidden, peak bytes above the start)"""
    hidden, weight, targets = head()
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    loss = loss_of(hidden, weight, targets)
    loss.backward()
    return float(loss.detach()), hidden.grad, torch.cuda.max_memory_allocated() - before_bytes


def test_the_chunked_loss_is_the_stock_one_for_a_fraction_of_its_memory():
    stock = measured(lambda h, w, t: torch.nn.functional.cross_entropy((h @ w.T).float(), t))
    ours = measured(lambda h, w, t: chunked_linear_cross_entropy(h, w, None, t)[0])
    assert ours[0] == pytest.approx(stock[0], rel=1e-5)
    assert (ours[1] - stock[1]).abs().max() <= 1e-4 * stock[1].abs().max()
    assert ours[2] <= 0.5 * stock[2]


def test_the_chunked_loss_gives_the_losses_of_each_token():
    hidden, weight, targets = head()
    _, tokens = chunked_linear_cross_entropy(hidden, weight, None, targets)
    expected = torch.nn.functional.cross_entropy((hidden @ weight.T).float(), targets, reduction="none")
    assert torch.allclose(tokens, expected, atol=1e-3)


@pytest.mark.parametrize("chunked_loss", ["never", "always"])
def test_a_curriculum_learns_the_same_losses_as_on_the_cpu(tmp_path, chunked_loss):
    scores = {}
    for place in ("cpu", "cuda"):
        trainer = SCUTrainer(
            llama(),
            arguments(tmp_path / place, use_cpu=place == "cpu", max_steps=-1, num_train_epochs=2, optim="sgd"),
            train_dataset=UnevenRows(),
            data_collator=pad,
            memory=MemorySettings(chunked_loss=chunked_loss),
            curriculum=CurriculumSettings("token_budget"),
        )
        trainer.train()
        scores[place] = trainer.difficulty.scores
        assert all(torch.isfinite(weight).all() for weight in weights_of(trainer.model).values())
    assert numpy.allclose(scores["cpu"], scores["cuda"], rtol=1e-3)
