"""How far two measurements of one loss may be apart follows how products are rounded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from scu_trainer.train.loss.analysis import EXACT, ROUGH, tolerance
from scu_trainer.train.loss.analysis.measuring import ROUGH_TF32, with_gradient

PARTS = {"linear": nn.Linear(4, 4), "convolution": nn.Conv1d(4, 4, 2), "cells": nn.GRU(4, 4)}


KINDS = (
    (torch.backends.cuda, "matmul", "ieee"),
    (torch.backends.cudnn, "conv", "tf32"),
    (torch.backends.cudnn, "rnn", "tf32"),
)
"""Products, and how a card rounds their factors where nobody has said it."""


def on_card(part: nn.Module, dtype: torch.dtype) -> nn.Module:
    """With one more weight, without content, on a card."""
    with FakeTensorMode():
        weight = nn.Parameter(torch.empty(4, dtype=dtype, device="cuda"))
    model = nn.ModuleList([part])
    model.register_parameter("weight", weight)
    return model


@pytest.mark.parametrize(
    ("part", "capability", "stated", "expected"),
    [
        ("linear", (9, 0), None, EXACT),
        ("linear", (8, 0), "tf32", ROUGH_TF32),
        ("linear", (7, 5), "tf32", EXACT),
        ("linear", (9, 0), "ieee", EXACT),
        ("convolution", (9, 0), None, ROUGH_TF32),
        ("convolution", (9, 0), "ieee", EXACT),
        ("cells", (9, 0), None, ROUGH_TF32),
    ],
)
def test_a_card_that_rounds_to_tf32_is_known(monkeypatch, part, capability, stated, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for owner, kind, usual in KINDS:  # flags of the process keep what earlier tests have set
        monkeypatch.setattr(owner, kind, SimpleNamespace(fp32_precision=stated or usual))
    assert tolerance(on_card(PARTS[part], torch.float32), low_precision=False) == expected
    assert tolerance(on_card(PARTS[part], torch.float32), low_precision=True) == ROUGH
    assert tolerance(on_card(PARTS[part], torch.bfloat16), low_precision=False) == ROUGH
    assert tolerance(PARTS[part], low_precision=False) == EXACT  # a CPU knows no TF32


class AsMetal(TorchDispatchMode):
    """Apple's GPUs compute with at most 32 bits."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if torch.is_tensor(made) and made.dtype == torch.float64 and made.device.type == "mps":
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return made


def test_losses_are_compared_in_float64_which_not_every_device_has():
    with FakeTensorMode(), AsMetal():
        loss, weight = (torch.empty(shape, device="mps") for shape in ((), (3, 2)))
        found = with_gradient(loss, [weight])
    assert found.dtype == torch.float64 and found.shape == (7,)
