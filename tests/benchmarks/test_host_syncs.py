"""Waits of the host: which calls count, and where."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import host_syncs
from benchmarks.gpu.host_syncs import COPIES, READS, CountsWaits, Waits

DEVICE = torch.device("cpu")
"""It stands for the device."""


def counted(work, *tensors: torch.Tensor) -> dict[str, int]:
    """Waits of ``work`` by kind; the tensors, made before, are the device's."""
    waits = Waits(is_on=True)
    with CountsWaits(waits):
        work(*tensors)
    found = dict.fromkeys((READS, COPIES), 0)
    for (kind, _), count in waits.by_place.items():
        found[kind] += count
    return found


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: float(x.sum()),
        lambda x: bool((x > 0).all()),
        lambda x: x.tolist(),
        lambda x: (x + 1).cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.to("cpu"),
        lambda x: torch.equal(x, x),
        lambda x: torch.zeros(3).copy_(x),
    ],
)
def test_what_needs_a_number_of_the_device_waits(work):
    assert counted(work, torch.ones(3)) == {READS: 1, COPIES: 0}


@pytest.mark.parametrize(
    "work",
    [
        lambda x: torch.tensor([1.0]).to(DEVICE),
        lambda x: torch.tensor(1.0, device=DEVICE),
        lambda x: x[torch.tensor([0, 2])],
        lambda x: x[[0, 2]],
        lambda x: x.copy_(torch.zeros(3)),
    ],
)
def test_what_goes_up_at_once_waits(work):
    assert counted(work, torch.ones(3)) == {READS: 0, COPIES: 1}


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x * 2 + x.sum(),
        lambda x: torch.tensor([1.0, 2.0]).tolist(),
        lambda x: (torch.arange(3) + 1).sum().item(),
        lambda x: x.cpu,
        lambda x: torch.tensor([1.0]).to(DEVICE, non_blocking=True),
        lambda x: torch.zeros(3, device=DEVICE) + x,
        lambda x: x[1:],
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: x.to(torch.float64),
    ],
)
def test_work_of_the_device_alone_and_of_the_host_alone_does_not(work):
    assert counted(work, torch.ones(3)) == {READS: 0, COPIES: 0}


def test_what_has_been_read_once_is_on_the_host():
    assert counted(lambda x: x.cpu().tolist(), torch.ones(3)) == {READS: 1, COPIES: 0}


def test_a_tensor_made_on_the_device_from_one_of_the_host_is_the_devices():
    assert counted(lambda x: torch.tensor([1.0]).to(DEVICE).item(), torch.ones(3)) == {READS: 1, COPIES: 1}


def test_gradients_made_in_the_backward_are_the_devices():
    def work(x: torch.Tensor) -> None:
        (x * 2).sum().backward()
        x.grad.norm().item()

    assert counted(work, torch.ones(3, requires_grad=True)) == {READS: 1, COPIES: 0}


def test_the_table_adds_up():
    places = [(READS, "scu_trainer/kernels.py: _order", 6), (COPIES, "accelerate/operations.py: send_to_device", 12)]
    waits = [{"kind": kind, "place": place, "count": count} for kind, place, count in places]
    results = [
        {"contender": contender, "steps": 2, "forwards": 8, "waits": waits[:shown]}
        for contender, shown in (("stock", 1), ("ours, memory", 2), ("ours, all loops", 2))
    ]

    grid, figures = host_syncs.grid(results), host_syncs.figures(results)

    assert grid.rows[:2] == [["all", "3", "9", "9"], ["forward passes", "4", "4", "4"]]
    assert grid.rows[2] == ["copies: accelerate/operations.py: send_to_device", "", "6", "6"]
    assert figures["waits per step, ours, memory / stock"].value == 3
    assert figures["waits per step in scu_trainer, ours, memory"].value == 3


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * gradient.sum().item()


def test_a_read_in_a_backward_waits_once():
    def work(x: torch.Tensor) -> None:
        ReadsInBackward.apply(x).sum().backward()

    assert counted(work, torch.ones(3, requires_grad=True)) == {READS: 1, COPIES: 0}


def test_a_read_by_autograd_itself_waits():
    def work(x: torch.Tensor) -> None:
        x.register_hook(lambda gradient: torch.ops.aten._local_scalar_dense(gradient.sum()) * gradient)
        x.sum().backward()

    assert counted(work, torch.ones(3, requires_grad=True)) == {READS: 1, COPIES: 0}


def test_all_loops_wait_no_more_often_than_stock():
    stock, ours = (host_syncs.counted(name, 1) for name in ("stock", "ours, all loops"))

    assert host_syncs.total(ours) <= host_syncs.total(stock)
    places = {wait["place"]: wait["count"] for wait in ours["waits"]}
    # No mask is looked at: rows go without padding.
    # Once a step, whatever number of micro-batches: S and the losses, the losses of rows, loss and gradient.
    assert places == {
        "scu_trainer/distances.py: read_together": 1,
        "scu_trainer/loss_path.py: _are_finite": 1,
        "scu_trainer/nonfinite_guard.py: _check_over_ranks": 1,
    }
