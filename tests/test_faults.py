"""The injected faults hit where they say, once, and change nothing where they do not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scu_trainer.train.step.recovery.out_of_memory import is_out_of_memory
from tests import faults, tiny


def one_step(model, optimizer, batch) -> None:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def parts():
    model = tiny.llama(layers=1)
    rows = tiny.UnevenRows(count=4)
    return model, torch.optim.AdamW(model.parameters()), tiny.pad([rows[index] for index in range(4)])


def test_a_dry_run_counts_and_changes_nothing(parts):
    model, optimizer, batch = parts
    twin = tiny.llama(layers=1)
    with faults.OutOfMemoryAt(()) as places:
        one_step(model, optimizer, batch)
    one_step(twin, torch.optim.AdamW(twin.parameters()), batch)
    assert places.raised == []
    assert tiny.same(tiny.weights_of(model), tiny.weights_of(twin))


def test_places_are_in_forward_backward_and_optimizer(parts):
    model, optimizer, batch = parts
    with faults.OutOfMemoryAt(()) as places:
        loss = model(**batch).loss
        after_forward = places.count
        loss.backward()
        after_backward = places.count
        optimizer.step()
    assert 10 < after_forward
    assert after_forward + 10 < after_backward
    assert after_backward + 2 * len(list(model.parameters())) <= places.count  # the two moments of every parameter


def test_only_new_tensors_are_places():
    tensor = torch.ones(4, 4)
    with faults.OutOfMemoryAt(()) as places:
        tensor.view(16).add_(1)
        tensor.t()[0].mul_(2)
        torch._foreach_add_([tensor], 1.0)
    assert places.count == 0
    with places:
        torch._foreach_add([tensor], 1.0)
        tensor + 1
    assert places.count == 2


def test_every_place_fails_once(parts):
    model, _, batch = parts
    with faults.OutOfMemoryAt(()) as places:
        model(**batch).loss.backward()
    for k in range(places.count):
        model.zero_grad()
        with faults.OutOfMemoryAt(k) as fault:
            with pytest.raises(torch.OutOfMemoryError):
                model(**batch).loss.backward()
            assert fault.count == k + 1
            model(**batch).loss.backward()  # the same place, but a later number
        assert len(fault.raised) == 1


def test_several_places_and_another_error():
    with faults.OutOfMemoryAt({0, 2}, error=lambda: faults.oom(faults.CPU_TEXT)) as fault:
        outcomes = []
        for _ in range(4):
            try:
                torch.zeros(1)
                outcomes.append("fine")
            except RuntimeError as error:
                assert "DefaultCPUAllocator" in str(error)
                outcomes.append("failed")
    assert outcomes == ["failed", "fine", "failed", "fine"]
    assert fault.raised == ["aten.zeros.default"] * 2


def test_nothing_counts_while_paused():
    with faults.OutOfMemoryAt(0) as fault:
        with fault.paused():
            torch.zeros(1)
        assert fault.count == 0
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1)
    torch.zeros(1)
    assert fault.count == 1


def test_fail_in_forward():
    layer, row = nn.Linear(2, 2), torch.ones(1, 2)
    with faults.fail_in_forward(layer, call=1) as counter:
        layer(row)
        with pytest.raises(torch.OutOfMemoryError):
            layer(row)
        layer(row)
    layer(row)
    assert counter.calls == 3


def test_fail_in_backward_leaves_the_gradients_nearer_to_the_loss():
    first, second, row = nn.Linear(2, 2), nn.Linear(2, 2), torch.ones(1, 2)
    with faults.fail_in_backward(first.weight, call=1) as counter:
        second(first(row)).sum().backward()
        once = second.weight.grad.clone(), first.weight.grad.clone()
        with pytest.raises(torch.OutOfMemoryError):
            second(first(row)).sum().backward()
    assert torch.equal(second.weight.grad, 2 * once[0])
    assert torch.equal(first.weight.grad, once[1])
    second(first(row)).sum().backward()
    assert counter.calls == 2


def test_fail_above_tokens():
    model = tiny.llama(layers=1)
    with faults.fail_above_tokens(model, 32) as tried:
        with pytest.raises(torch.OutOfMemoryError):
            model(input_ids=torch.zeros(3, 11, dtype=torch.long))
        model(input_ids=torch.zeros(4, 8, dtype=torch.long))
    model(input_ids=torch.zeros(3, 11, dtype=torch.long))
    assert tried == [33, 32]


def test_images_count_as_rows():
    assert faults.padded_tokens({"pixel_values": torch.zeros(5, 3, 8, 8), "labels": torch.zeros(5)}) == 5


def test_a_gauge_that_follows_a_script():
    gauge = faults.FakeGauge(limit_bytes=[100, 60], used_bytes=10, peak_bytes=lambda resets: 20 + resets)
    seen = []
    for exact in (False, True, False):
        gauge.reset(exact)
        reading = gauge.read()
        seen.append((reading.limit_bytes, reading.used_bytes, reading.peak_bytes))
    assert seen == [(100, 10, 21), (60, 10, 22), (60, 10, 23)]
    assert (gauge.resets, gauge.exact_resets) == (3, 1)
    assert faults.FakeGauge(5, [3]).read().peak_bytes == 3


@pytest.mark.parametrize(
    ("text", "kind"), [(faults.CUDA_TEXT, torch.OutOfMemoryError), (faults.CPU_TEXT, RuntimeError)]
)
def test_errors_look_like_torchs(text, kind):
    error = faults.oom(text)
    assert type(error) is kind
    assert is_out_of_memory(error)
