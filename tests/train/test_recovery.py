"""Out of memory at any operation of a training changes nothing but the size of micro-batches."""

from __future__ import annotations

import contextlib
import logging
import re
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scu_trainer.errors import OutOfMemory
from scu_trainer.run_files import read_rows
from scu_trainer.settings import MemorySettings
from scu_trainer.train.step.distributed.ranks import Ranks
from scu_trainer.train.step.recovery import snapshot
from scu_trainer.train.step.recovery.snapshot import (
    WindowSnapshot,
    bytes_held,
    plain_attributes,
    restore_attributes,
)
from tests import tiny
from tests.faults import CPU_TEXT, CUDA_TEXT, fail_above_tokens, fail_in_backward, fail_in_forward, is_training, oom
from tests.tiny import Examples, Rows, UnevenRows, same, weights_of
from tests.train.sites import OneFaultPerStep, Sites
from tests.train.stepwise import (
    Recorder,
    assert_every_row_once,
    compared,
    error_of,
    losses_of,
    record_micro_batches,
    replay_micro_batches,
)

WINDOW = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 10_000}

# -- every operation fails once ----------------------------------------------------------------------------------------


def two_lengths(rows) -> Examples:
    """Four rows of two lengths."""
    return Examples({name: value[: 5 + 4 * (i % 2)] for name, value in rows[i].items()} for i in range(4))


@dataclass(frozen=True)
class Subject:
    """``every``: which operations fail, one in so many."""

    make: Callable[[], torch.nn.Module]
    rows: Callable[[], Any]
    every: int
    changes: dict[str, Any]


SUBJECTS = {
    "language model": Subject(tiny.gpt2, lambda: two_lengths(Rows(4)), 1, {"optim": "adamw_torch"}),
    "seq2seq": Subject(tiny.bart, lambda: two_lengths(tiny.pairs(4)), 17, {"optim": "adamw_torch_fused"}),
    "images": Subject(tiny.vit, lambda: tiny.images(4), 4, {"optim": "adamw_torch"}),
}


def run(subject: Subject, folder, prepare, steps: int, **changes):
    changes = {**WINDOW, "max_grad_norm": 0.5, "max_steps": steps, **subject.changes, **changes}
    return compared(subject.make(), folder, MemorySettings(), subject.rows(), prepare=prepare, **changes)


def sites_per_step(subject: Subject, folder) -> int:
    """Operations of one step, the second: the first one also asks how the loss adds up."""
    sites = Sites()
    run(subject, folder, lambda trainer: trainer.add_callback(OneFaultPerStep(trainer, sites, [-1, -1])), steps=2)
    return sites.count


@pytest.mark.parametrize("name", SUBJECTS)
def test_out_of_memory_at_every_operation(tmp_path, name):
    """Step i fails at operation i. The same micro-batches without a fault give the same weights, bit for bit."""
    subject = SUBJECTS[name]
    numbers = [-1, *range(0, sites_per_step(subject, tmp_path / "dry"), subject.every)]
    sites, recorded = Sites(), []

    def fail(trainer) -> None:
        recorded.extend([record_micro_batches(trainer)])
        trainer.add_callback(OneFaultPerStep(trainer, sites, numbers))

    faulty, found = run(subject, tmp_path / "faulty", fail, len(numbers))
    pieces = recorded[0]
    assert len(sites.raised) == len(numbers) - 1, "some operation did not fail"
    assert {"forward", "backward"} <= set(sites.failed_kinds)
    assert_every_row_once(pieces, rows_per_batch=2, batches=2)
    assert faulty.state.global_step == len(found.weights) == len(numbers)

    _, expected = run(subject, tmp_path / "same", lambda trainer: replay_micro_batches(trainer, pieces), len(numbers))
    for step, (weights, wanted) in enumerate(zip(found.weights, expected.weights, strict=True)):
        assert same(weights, wanted), (
            f"operation {numbers[step]}: {sites.raised[step - 1]} in {sites.failed_kinds[step - 1]}"
        )
    rows = read_rows(tmp_path / "faulty" / "memory_history.json")
    in_chunks = [kind for kind in sites.failed_kinds if kind in ("forward", "backward")]
    size = r"\d rows?" if name == "images" else r"\d rows? (x \d+|of \d+ tokens)"
    tried = re.compile(rf"out of memory at {size} \(20\.0 MiB wanted\); retrying as \d x {size}")
    assert len(rows) == len(in_chunks) and all(tried.fullmatch(row["reason"]) for row in rows)


# -- a device that is too small ----------------------------------------------------------------------------------------


LIMITS = {
    "language model": (tiny.llama, UnevenRows, 20),
    "seq2seq": (tiny.bart, tiny.pairs, 20),
    "images": (tiny.vit, tiny.images, 2),
}


def trained_on_device(make, rows, folder, tokens: int, error=oom, **changes):
    """(trainer, sizes tried) of a training on a device that holds ``tokens``; not those of questions about the loss."""
    tried = []

    def too_small(trainer) -> None:
        sizes, step = stack.enter_context(fail_above_tokens(trainer.model, tokens, error)), trainer.stock_training_step

        def see(*given):
            begin = len(sizes)
            try:
                return step(*given)
            finally:
                tried.extend(sizes[begin:])

        trainer.stock_training_step = see

    with contextlib.ExitStack() as stack:
        trainer, _ = compared(make(), folder, MemorySettings(), rows, prepare=too_small, **changes)
    return trainer, tried


@pytest.mark.parametrize("text", [CUDA_TEXT, CPU_TEXT], ids=["cuda", "cpu"])
@pytest.mark.parametrize("name", LIMITS)
def test_a_device_too_small_for_the_batch_gives_the_stock_training(tmp_path, name, text):
    make, rows, tokens = LIMITS[name]
    changes = {"gradient_accumulation_steps": 2}
    expected, _ = compared(make(), tmp_path / "stock", None, rows(), **changes)
    found, tried = trained_on_device(make, rows(), tmp_path / "small", tokens, error=lambda: oom(text), **changes)
    assert max(tried) > tokens, "everything did fit"
    assert error_of(weights_of(found.model), weights_of(expected.model)) <= 1e-6
    assert losses_of(found) == pytest.approx(losses_of(expected), rel=1e-6)
    assert found.micro_batches.loop.statistics.out_of_memory == sum(size > tokens for size in tried)
    assert found.micro_batches.loop.statistics.out_of_memory <= 4, "what failed once is tried again and again"


def test_sizes_tried_are_halved_until_they_fit(tmp_path, caplog):
    changes = {"per_device_train_batch_size": 12, "max_steps": 2}
    found, tried = trained_on_device(tiny.vit, tiny.images(), tmp_path, 2, **changes)
    assert tried == [12, 6, 3, *[1] * 24]
    first = next(line for line in caplog.messages if "micro-batches of at most" in line)
    assert "micro-batches of at most 6 rows from now on: out of memory at 12 rows" in first
    assert "retrying as 2 x 6 rows; the optimizer still sees 12 rows of this device" in first
    assert "token" not in caplog.text, "images have none"
    memory = found.loop("memory")
    assert "at the end 1 row;" in dict(memory.lines(memory.figures()))["memory"]


def test_short_rows_that_do_not_fit_together_run_one_by_one(tmp_path):
    """Also where together they have no more tokens than the longest row of the step."""

    def one_row_fits(trainer) -> None:
        def check(model, _, batch) -> None:
            places, ids = batch.get("position_ids"), batch["input_ids"]
            rows = len(ids) if places is None else int((places == 0).sum())
            if model.training and rows > 1:
                raise oom()

        trainer.model.register_forward_pre_hook(check, with_kwargs=True)

    changes = {"per_device_train_batch_size": 8, "max_steps": 2}
    expected, _ = compared(tiny.llama(), tmp_path / "stock", None, UnevenRows(), **changes)
    found, _ = compared(tiny.llama(), tmp_path, MemorySettings(), UnevenRows(), prepare=one_row_fits, **changes)
    assert error_of(weights_of(found.model), weights_of(expected.model)) <= 1e-6
    assert losses_of(found) == pytest.approx(losses_of(expected), rel=1e-6)


def test_an_image_that_does_not_fit_has_no_tokens(tmp_path):
    with pytest.raises(OutOfMemory, match=r"does not fit in memory even alone") as raised:
        trained_on_device(tiny.vit, tiny.images(), tmp_path, 0, max_steps=1)
    assert "tokens" not in str(raised.value)


@pytest.mark.parametrize("call", [0, 1, 2])
@pytest.mark.parametrize("make", [tiny.t5, tiny.conv_net])
def test_asking_how_the_loss_adds_up_survives_too(tmp_path, make, call):
    """A wrong answer would give other gradients: the mean losses of T5, the shared statistics of BatchNorm."""
    rows = tiny.pairs() if make is tiny.t5 else tiny.images()
    stack, settings = contextlib.ExitStack(), MemorySettings(token_cap=24)

    def fault(trainer) -> None:
        stack.enter_context(fail_in_forward(trainer.model, call))

    expected, _ = compared(make(), tmp_path / "same", settings, rows, gradient_accumulation_steps=2, max_steps=2)
    with stack:
        found, _ = compared(
            make(), tmp_path / "faulty", settings, rows, prepare=fault, gradient_accumulation_steps=2, max_steps=2
        )
    assert found.micro_batches.reduction == expected.micro_batches.reduction
    assert same(weights_of(found.model), weights_of(expected.model))


# -- one kind of state after the other ---------------------------------------------------------------------------------


def replayed(make, rows, folder, pieces, **changes):
    _, recorder = compared(
        make(), folder, MemorySettings(), rows, prepare=lambda trainer: replay_micro_batches(trainer, pieces), **changes
    )
    return recorder


def faulty_and_replayed(make, rows, folder, fault, **changes):
    """Recorders of a run in which ``fault(trainer, stack)`` arranges failures, and of the same micro-batches
    without."""
    pieces = []

    def arrange(trainer) -> None:
        pieces.append(record_micro_batches(trainer))
        fault(trainer, stack)

    changes = {**WINDOW, "max_steps": 3, **changes}
    with contextlib.ExitStack() as stack:
        found_trainer, found = compared(make(), folder / "faulty", MemorySettings(), rows, prepare=arrange, **changes)
    assert found_trainer.micro_batches.loop.statistics.out_of_memory > 0, "nothing failed"
    assert_every_row_once(pieces[0], changes["per_device_train_batch_size"], batches=2)
    return found, replayed(make, rows, folder / "same", pieces[0], **changes)


def mid_backward(call: int):
    """Half of the gradients have been added when backward number ``call`` fails."""

    def fault(trainer, stack) -> None:
        weights = [p for p in trainer.model.parameters() if p.requires_grad]
        stack.enter_context(fail_in_backward(weights[len(weights) // 2], call))

    return fault


def same_steps(found, expected) -> bool:
    assert len(found.weights) == len(expected.weights) == 3
    return all(same(*pair) for pair in zip(found.weights, expected.weights, strict=True))


@pytest.mark.parametrize("call", [0, 1, 3, 4], ids="backward {}".format)
@pytest.mark.parametrize("rows", [Rows, UnevenRows])
def test_dropout_and_gradients_after_a_fault_in_mid_backward(tmp_path, rows, call):
    """In the first and in the second accumulation batch, when those of the first are there; in both steps."""
    found, expected = faulty_and_replayed(dropping, rows(), tmp_path, mid_backward(call), per_device_train_batch_size=4)
    assert same_steps(found, expected)


def dropping():
    return tiny.llama(hidden=8, layers=1, attention_dropout=0.5)


def test_lora_after_a_fault_in_mid_backward(tmp_path):
    def make():
        return tiny.lora(dropping(), lora_dropout=0.5)

    found, expected = faulty_and_replayed(make, UnevenRows(), tmp_path, mid_backward(1))
    assert same_steps(found, expected)


MUTATIONS = {
    "gradients are not looked at": (WindowSnapshot, "gradients_touched", lambda self: False),
    "gradients are not dropped": (Ranks, "drop_gradients", lambda self: None),
    "RNG and buffers are not restored": (WindowSnapshot, "restore_surroundings", lambda self: None),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_part_of_the_recovery_is_needed(tmp_path, monkeypatch, name):
    """Were any of them missing, the tests above would see it."""
    monkeypatch.setattr(*MUTATIONS[name])
    found, expected = faulty_and_replayed(dropping, Rows(), tmp_path, mid_backward(1), per_device_train_batch_size=4)
    assert not same_steps(found, expected)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_statistics_of_batch_norm_are_restored(tmp_path, step):
    """A whole batch fails after its forward has updated them; later steps know which buffers change."""
    backward = 2 * (step - 1) + 1  # the second batch of the step, before anything has been cut

    def fault(trainer, stack) -> None:
        stack.enter_context(fail_in_backward(trainer.model.conv.weight, backward))

    found, expected = faulty_and_replayed(tiny.conv_net, tiny.images(), tmp_path, fault, per_device_train_batch_size=4)
    assert same_steps(found, expected)
    for statistics, wanted in zip(found.buffers, expected.buffers, strict=True):
        assert same(statistics, wanted)


def test_batch_norm_that_does_not_fit_is_split_with_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "scu_trainer"):
        _, tried = trained_on_device(tiny.conv_net, tiny.images(), tmp_path, 3, max_steps=2)
    assert tried == [4, 4, 2, 2, 2, 2]
    texts = [record.getMessage() for record in caplog.records]
    assert sum("BatchNorm" in text and "min_batch_size" in text for text in texts) == 1


def test_nothing_of_the_failed_step_is_alive_when_it_runs_again(tmp_path):
    alive, outputs = [], []

    def fault(trainer, stack) -> None:
        mid_backward(1)(trainer, stack)
        trainer.model.register_forward_pre_hook(
            lambda *_: alive.append(sum(ref() is not None for ref in outputs)) if is_training() else None
        )
        trainer.model.lm_head.register_forward_hook(lambda *call: outputs.append(weakref.ref(call[-1])))

    faulty_and_replayed(tiny.llama, Rows(), tmp_path, fault, per_device_train_batch_size=4)
    assert len(outputs) > 6 and set(alive) == {0}


# -- what is not recovered ---------------------------------------------------------------------------------------------


def test_a_row_that_does_not_fit_alone_is_named(tmp_path):
    rows = Examples({**UnevenRows()[i], "sample_index": torch.tensor(100 + i)} for i in range(32))
    longest = {100 + i for i in range(32) if len(rows[i]["input_ids"]) == 16}
    model, steps = Indexed(), Recorder()
    start = weights_of(model)
    changes = {"remove_unused_columns": False, "callbacks": [steps]}
    with pytest.raises(OutOfMemory) as caught:
        trained_on_device(lambda: model, rows, tmp_path, 15, **changes)
    text = str(caught.value)
    named = re.search(r"step (\d+): sample (\d+) \(row \d of accumulation batch \d\) \(16 tokens\)", text)
    assert named and int(named[2]) in longest
    assert "20.0 MiB wanted" in text and "block_size" in text and "CUDA out of memory" in text
    assert len(steps.weights) == int(named[1]) - 1
    assert same(weights_of(model), [start, *steps.weights][-1]), "the step that failed has changed weights"


class Indexed(torch.nn.Module):
    """A causal model for rows that say which they are."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny.llama(hidden=8, layers=1)

    def forward(self, input_ids, attention_mask, labels, sample_index):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


@pytest.mark.parametrize("error", [KeyboardInterrupt, lambda: RuntimeError("shapes do not match"), ValueError])
def test_other_errors_pass_through(tmp_path, error):
    def fault(trainer, stack) -> None:
        stack.enter_context(fail_in_backward(trainer.model.lm_head.weight, 3, error))

    with pytest.raises((KeyboardInterrupt, RuntimeError, ValueError)) as caught:
        faulty_and_replayed(tiny.llama, Rows(), tmp_path, fault)
    assert type(caught.value) is type(error())


def test_attributes_are_put_back_where_they_are_whatever_stands_there():
    """A list may be held by a callback, too; a number may have become a tensor, of which none tells whether it differs;
    a table may hold itself; a dataset of plain rows is not copied for each micro-batch."""
    rows = [{"input_ids": [1, 2]}]
    trainer = SimpleNamespace(figures=[1.0], newest=0.0, means=[0.0], none=None, train_dataset=rows)
    trainer.table = {"figures": trainer.figures}
    trainer.itself = {"a": trainer.table}
    trainer.itself["b"] = trainer.itself
    figures, table = trainer.figures, trainer.table
    attributes = plain_attributes((), trainer)
    assert "train_dataset" not in attributes[0][1]
    for _ in range(2):
        trainer.figures.append(2.0)
        trainer.table["new"] = 1
        trainer.newest, trainer.means, trainer.begun = torch.ones(2), [torch.ones(2)], 1
        del trainer.none
        restore_attributes(attributes)
        assert trainer.figures is figures == [1.0] and trainer.table is table == {"figures": [1.0]}
        assert trainer.newest == 0.0 and trainer.means == [0.0] and trainer.none is None
        assert not hasattr(trainer, "begun")


def test_a_tensor_that_many_hold_is_copied_once_and_comes_back_from_another_size(monkeypatch):
    copied, refill = [], snapshot.refill
    monkeypatch.setattr(snapshot, "refill", lambda tensor, value: (copied.append(value), refill(tensor, value)))
    mask, modules = torch.arange(6.0), [SimpleNamespace(), SimpleNamespace()]
    for module in modules:
        module.mask = mask
    attributes = plain_attributes(modules, SimpleNamespace(mask=mask))
    mask.data = torch.zeros(2)
    restore_attributes(attributes)
    assert len(copied) == 1 and mask.tolist() == [0, 1, 2, 3, 4, 5]


def test_many_figures_are_put_back_and_endless_ones_not_looked_at():
    assert bytes_held({str(n): [0.5] * 9_000 for n in range(9)}) == 0
    assert bytes_held([[0.5] * 9_000] * 12) is None and bytes_held([0.5] * 10_001) is None
    assert bytes_held({"bank": deque([torch.ones(3), torch.eye(2).to_sparse()])}) == 28
    assert bytes_held([torch.ones(3, requires_grad=True)]) is None, "it would hold on to a graph"
