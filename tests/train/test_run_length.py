"""How long a run is, and where its learning rate stands, when its epochs are not equally long."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import get_linear_schedule_with_warmup

from scu_trainer.train.curriculum.run_length import RunLength


def length(epochs: float = 4, max_steps: int = -1, batches: int = 20, accumulation: int = 2) -> RunLength:
    args = SimpleNamespace(num_train_epochs=epochs, max_steps=max_steps, gradient_accumulation_steps=accumulation)
    return RunLength(args, batches)


def told(one: RunLength):
    state = SimpleNamespace(max_steps=0, num_train_epochs=0)
    one.update_trainer_state(state)
    return state.max_steps


def schedule():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    found = get_linear_schedule_with_warmup(optimizer, 0, 40)
    optimizer.step()
    return found


def test_steps_are_those_done_and_those_to_come_at_the_present_pace():
    one = length()
    assert (one.nominal_steps, one.total_steps) == (10, 40)
    one.begin(1, 10, 12, 1.0)
    assert told(one) == 10 + 6 + 2 * 6
    one.begin(3, 22, 20, 3.0)
    assert told(one) == 32


def test_part_of_an_epoch_is_part_of_its_steps():
    one = length(epochs=2.5)
    one.begin(2, 20, 12, 2.0)
    assert told(one) == 20 + 3


def test_given_steps_stay():
    one = length(max_steps=33)
    one.begin(5, 20, 6, 5.0)
    assert told(one) == 0, "the stock number is not touched"
    assert one.epochs == pytest.approx(3.3)


def test_the_rate_stands_where_the_epochs_stand():
    one, rates = length(), schedule()
    one.begin(2, 14, 10, 2.0)  # 5 steps instead of 10
    for step, expected in ((15, 22), (17, 26), (19, 30)):
        one.set_scheduler(step, rates)
        rates.step()
        assert rates.last_epoch == expected
    assert rates.get_last_lr() == [pytest.approx(0.25)]


def test_whole_numbers_stay_whole_where_nothing_is_shorter():
    one, rates = length(epochs=3, batches=6, accumulation=2), schedule()
    for epoch in range(3):
        one.begin(epoch, 3 * epoch, 6, float(epoch))
        for step in range(3 * epoch + 1, 3 * epoch + 4):
            one.set_scheduler(step, rates)
            rates.step()
            assert rates.last_epoch == step and isinstance(rates.last_epoch, int)


def test_the_rest_of_an_epoch_goes_from_where_it_was_to_its_end():
    one, rates = length(), schedule()
    one.begin(1, 15, 6, 1.5)  # 3 steps for the second half
    one.set_scheduler(18, rates)
    rates.step()
    assert rates.last_epoch == 20
    assert one.done(18) == 2.0 and one.done(15) == 1.5


def test_a_schedule_that_counts_steps_is_said_once(caplog):
    weight = torch.nn.Parameter(torch.zeros(1))
    counting = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([weight], lr=1.0), 5)
    one = length()
    one.begin(1, 10, 12, 1.0)
    one.set_scheduler(11, counting)
    one.set_scheduler(12, counting)
    assert caplog.text.count("StepLR counts steps") == 1
    assert counting.last_epoch == 0
