"""Rows end to end on a card: torch's kernel for rows of unequal length, and row by row where it does not take them."""

from __future__ import annotations

import pytest
import torch

from scu_trainer.hardware.precision import AMPERE
from scu_trainer.settings import MemorySettings
from scu_trainer.train.loss.rows import padding_free
from scu_trainer.train.step.batches.rows import placed
from scu_trainer.train.trainer import SCUTrainer
from tests.tiny import UnevenRows, arguments, llama, pad
from tests.train.stepwise import compared, error_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here")


def hidden_states(dtype: torch.dtype, is_padding_free: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(states of all tokens, gradients)"""
    body = llama(hidden=64).to("cuda", dtype).model
    inputs = placed(pad([UnevenRows()[i] for i in range(8)]), torch.device("cuda"))
    rows = padding_free.end_to_end(inputs)
    with padding_free.on_rows(body, rows if is_padding_free else None):
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        found = body(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state.flatten(0, 1)
    found = found if is_padding_free else found[rows.places]
    found.float().square().mean().backward()
    return found.detach().float(), {name: p.grad.float() for name, p in body.named_parameters()}


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-4), (torch.bfloat16, 4e-2), (torch.float16, 1e-2)])
def test_states_and_gradients_are_those_of_padded_rows(dtype, bound):
    has_kernel = dtype != torch.float32 and torch.cuda.get_device_capability() >= AMPERE
    assert padding_free.has_kernel(torch.zeros(1, 1, 1, 16, device="cuda", dtype=dtype)) == has_kernel
    states, gradients = hidden_states(dtype, True)
    wanted, wanted_gradients = hidden_states(dtype, False)
    assert float(torch.dist(states, wanted) / wanted.norm()) <= bound
    assert error_of(gradients, wanted_gradients) <= 5 * bound


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_the_host_does_not_wait_for_the_rows():
    inputs = placed(pad([UnevenRows()[i] for i in range(8)]), torch.device("cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows = padding_free.end_to_end(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert rows.places.is_cuda and sum(rows.lengths) == len(rows.known_places)


@pytest.mark.parametrize("changes", [{}, {"bf16": True}], ids=["float32", "autocast"])
def test_a_training_goes_without_padding(tmp_path, changes):
    changes = {"max_steps": 3, "use_cpu": False, **changes}
    trainer, found = compared(
        llama(hidden=64), tmp_path / "ours", MemorySettings(padding_free=True), UnevenRows(), **changes
    )
    _, expected = compared(llama(hidden=64), tmp_path / "stock", None, UnevenRows(), **changes)
    statistics = trainer.micro_batches.loop.statistics
    assert statistics.processed_tokens == statistics.real_tokens < statistics.stock_tokens
    assert error_of(found.gradients[0], expected.gradients[0]) <= (0.1 if "bf16" in changes else 1e-3)


def test_an_evaluation_goes_without_padding(tmp_path):
    shapes = []
    losses = []
    for memory in (None, MemorySettings(chunked_loss="always")):
        model = llama(hidden=64)
        model.model.layers[0].register_forward_pre_hook(lambda module, given: shapes.append(given[0].size(0)))
        args = arguments(tmp_path, use_cpu=False, per_device_eval_batch_size=8)
        trainer = SCUTrainer(model, args, memory=memory, data_collator=pad, eval_dataset=UnevenRows(24))
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert shapes[:3] == [8, 8, 8] and shapes[-3:] == [1, 1, 1]
