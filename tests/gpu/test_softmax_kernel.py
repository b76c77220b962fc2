"""The loss kernel for a card beside torch's own operations. Without a card it runs where Triton is installed, by its
interpreter: TRITON_INTERPRET=1 pytest tests/gpu/test_softmax_kernel.py"""

from __future__ import annotations

import os

import pytest
import torch

from scu_trainer.train.loss.rows import products, softmax

pytest.importorskip("triton", reason="needs Triton, which a CUDA build of torch brings")

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda", *([] if IS_INTERPRETED else [0]))
needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here")
pytestmark = [
    pytest.mark.skipif(not (torch.cuda.is_available() or IS_INTERPRETED), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),  # the interpreter computes with numpy
]

WORDS = 9_001
"""More than two blocks, and no multiple of anything."""


def logits_of(dtype: torch.dtype) -> torch.Tensor:
    """With words that are ruled out: some, and a whole first block."""
    logits = 3 * torch.randn(7, WORDS, generator=torch.Generator().manual_seed(0))
    logits[3, :5] = logits[4, :5_000] = float("-inf")
    return logits.to(DEVICE, dtype)


@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_losses_and_gradient_are_torchs_own(dtype, bound, with_gradient):
    from scu_trainer.train.loss.rows.triton_softmax import softmax_in_place

    logits, targets = logits_of(dtype), torch.tensor([0, 1, 5_000, 7, WORDS - 1, 4_095, 4_096], device=DEVICE)
    before = logits.clone()
    expected = softmax._softmax_in_place(before.to(torch.float32, copy=True), targets, with_gradient)
    losses, signal = softmax_in_place(logits, targets, with_gradient)
    assert signal is logits and losses.dtype == torch.float32
    assert torch.allclose(losses, expected[0], rtol=1e-6, atol=5e-6)
    if with_gradient:
        assert (signal.float() - expected[1]).abs().max() <= bound
    else:
        assert torch.equal(signal, before)


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_logit_that_is_no_number_spoils_its_row_alone(odd):
    from scu_trainer.train.loss.rows.triton_softmax import softmax_in_place

    logits = logits_of(torch.float32)
    logits[0, 17] = odd
    losses, signal = softmax_in_place(logits, torch.full((7,), WORDS - 1, device=DEVICE), True)
    assert losses[0].isnan() and not losses[1:].isnan().any()
    assert signal[0].isnan().all() and not signal[1:].isnan().any()


def test_rows_of_a_larger_buffer_leave_the_rest_alone():
    from scu_trainer.train.loss.rows.triton_softmax import softmax_in_place

    buffer = torch.zeros(4, WORDS + 8, device=DEVICE)
    softmax_in_place(buffer[1:3, :WORDS], torch.zeros(2, dtype=torch.long, device=DEVICE), True)
    assert buffer[1:3, :WORDS].count_nonzero() == 2 * WORDS
    buffer[1:3, :WORDS] = 0
    assert not buffer.any()


@pytest.mark.parametrize("dtype", list(softmax.TRIAL_BOUNDS))
def test_the_kernel_passes_the_trial(dtype):
    assert softmax.reads_half(softmax._fused(DEVICE, dtype))


@needs_card
def test_the_kernel_is_chosen_on_a_card():
    assert softmax.reads_half(softmax.kernel_for(DEVICE, torch.float32))
    assert not softmax.reads_half(softmax.kernel_for(DEVICE, torch.float64))


@needs_card
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_in_half_precision_is_added_to_a_float32_sum(dtype):
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    factor = torch.randn(64, 1_000, device=DEVICE, generator=generator).to(dtype)
    rows = torch.randn(64, 48, device=DEVICE, generator=generator).to(dtype)
    total = torch.ones(1_000, 48, device=DEVICE)
    products.add_product(total, factor, rows)
    expected = 1 + factor.float().t() @ rows.float()
    bound = 1e-5 if products.adds_to_float32(DEVICE, dtype) else 0.01
    assert (total - expected).norm() <= bound * expected.norm()
