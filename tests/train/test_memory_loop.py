"""The memory loop in real trainings on a simulated device: it gives way to pressure, and comes back."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import TrainerCallback

from scu_trainer.run_files import read_json, read_rows
from scu_trainer.settings import MemorySettings
from scu_trainer.train.checkpoints.format import MANIFEST
from scu_trainer.train.step import micro_batch_sizer
from scu_trainer.train.step.batches.reduction import Reduction
from scu_trainer.train.step.batches.rows import CPU, read_layout
from scu_trainer.train.step.batches.window import AccumulationWindow
from scu_trainer.train.step.micro_batch_sizer import MicroBatchSizer
from scu_trainer.train.step.recovery.memory import Gauge, MemoryReading
from tests import tiny
from tests.faults import oom
from tests.tiny import Examples, Rows, UnevenRows, pad, same, weights_of
from tests.train.stepwise import compared, error_of, record_micro_batches

FIELDS = {
    "step",
    "rows_per_chunk",
    "tokens_per_chunk",
    "used_bytes",
    "peak_bytes",
    "limit_bytes",
    "pressure",
    "reason",
}

WINDOW = {"gradient_accumulation_steps": 2, "logging_steps": 10_000}


class Device(Gauge):
    """Memory of 1000 bytes, 100 of them the model's; a micro-batch takes ``per_token`` and ``per_square`` (rows x
    length^2).

    ``neighbour``: bytes that others hold, by optimizer step from 1. A micro-batch that does not fit raises out of
    memory, all others leave their peak in the gauge. ``tried``: bytes of every micro-batch of the training.
    """

    LIMIT_BYTES, MODEL_BYTES = 1000, 100

    def __init__(self, per_token: float, per_square: float = 0.0, neighbour=lambda step: 0) -> None:
        self.per_token, self.per_square, self.neighbour = per_token, per_square, neighbour
        self.step, self.chunk_bytes, self.tried = 1, 0, []

    def reset(self, exact: bool = False) -> None:
        self.chunk_bytes = 0

    def read(self) -> MemoryReading:
        return MemoryReading(self.LIMIT_BYTES, self._used_bytes, self._used_bytes + self.chunk_bytes, "simulated")

    @property
    def _used_bytes(self) -> int:
        return self.MODEL_BYTES + self.neighbour(self.step)

    def attach(self, trainer) -> None:
        trainer.model.register_forward_pre_hook(self._run, with_kwargs=True)
        device = self

        class Clock(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                device.step = state.global_step + 1

        trainer.add_callback(Clock())

    def _run(self, module, arguments, inputs) -> None:
        rows, length = inputs["input_ids"].shape
        needed_bytes = round(rows * length * (self.per_token + self.per_square * length))
        if module.training:
            self.tried.append(needed_bytes)
        if self._used_bytes + needed_bytes > self.LIMIT_BYTES:
            raise oom()
        self.chunk_bytes = max(self.chunk_bytes, needed_bytes)


def train_on(device: Device, folder, rows=None, settings=None, prepare=None, **changes):
    """(trainer, recorder, padded tokens of the largest micro-batch by step)."""
    recorded = []

    def arrange(trainer) -> None:
        device.attach(trainer)
        recorded.append(record_micro_batches(trainer))
        if prepare is not None:
            prepare(trainer)

    model = tiny.llama(hidden=8, layers=1)
    changes, settings = {**WINDOW, **changes}, settings or MemorySettings()
    trainer, recorder = compared(model, folder, settings, rows, prepare=arrange, gauge=device, **changes)
    return trainer, recorder, [max(piece.tokens for piece in pieces) for pieces in recorded[0]]


def squeezed(step: int) -> int:
    """350 bytes from step 5 to step 9: a whole batch of 64 tokens then takes 96 % of the device."""
    return 350 if 5 <= step <= 9 else 0


# -- pressure ----------------------------------------------------------------------------------------------------------


def test_a_squeeze_shrinks_chunks_and_its_end_brings_them_back(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "scu_trainer"):
        trainer, _, sizes = train_on(Device(8, neighbour=squeezed), tmp_path, max_steps=30)
    assert sizes[:5] == [64] * 5, "nothing moves before there is pressure"
    assert all(size < 64 for size in sizes[5:9])
    back = next(step for step in range(9, 30) if sizes[step] == 64)
    assert back <= 9 + 20 and sizes[back:] == [64] * (30 - back)
    assert sizes[5:back] == sorted(sizes[5:back]), "it hunts"
    assert trainer.micro_batches.loop.statistics.out_of_memory == 0

    rows = read_rows(tmp_path / "memory_history.json")
    assert [set(row) for row in rows] == [FIELDS] * len(rows)
    assert rows[0]["step"] == 5 and rows[0]["pressure"] == "high" and rows[0]["reason"].startswith("used 96 % of ")
    assert (rows[0]["used_bytes"], rows[0]["peak_bytes"], rows[0]["limit_bytes"]) == (450, 962, 1000)
    assert rows[0]["tokens_per_chunk"] < 64 and rows[0]["rows_per_chunk"] == rows[0]["tokens_per_chunk"] // 16
    assert rows[-1]["reason"] == "pressure is gone" and rows[-1]["tokens_per_chunk"] == 64
    lines = [record.getMessage() for record in caplog.records if "micro-batches of at most" in record.getMessage()]
    assert len(lines) == len(rows) == trainer.micro_batches.loop.statistics.changes <= 4
    assert all("the optimizer still sees 8 rows" in line for line in lines)


def test_the_squeezed_run_is_the_stock_run(tmp_path):
    found, _, _ = train_on(Device(8, neighbour=squeezed), tmp_path, max_steps=12)
    expected, _ = compared(tiny.llama(hidden=8, layers=1), tmp_path, **WINDOW, max_steps=12)
    assert error_of(weights_of(found.model), weights_of(expected.model)) <= 1e-6


@pytest.fixture
def card(monkeypatch):
    """The CPU counts as a device with memory of its own."""
    monkeypatch.delitem(micro_batch_sizer.BUSY_TOKENS, "cpu")


@pytest.mark.parametrize(("per_token", "most"), [(0.5, 10_000), (6, 136)], ids=["roomy", "small"])
def test_on_a_card_micro_batches_grow_beyond_the_batch_while_they_fit(tmp_path, card, per_token, most):
    """Of eight batches of 4 x 16 tokens each; 136 tokens of 6 bytes leave the headroom free."""
    how = {"gradient_accumulation_steps": 8, "max_steps": 6}
    settings = MemorySettings(padding_free=False)  # the simulated device counts padding
    trainer, found, sizes = train_on(Device(per_token), tmp_path / "ours", UnevenRows(256), settings, **how)
    assert sizes[0] <= 16 < sizes[1] <= 64 < sizes[2] <= 128, "the longest row, the batch, twice as much each step"
    assert max(sizes) <= most and (most < 10_000 or sizes[-1] > 256), "all rows of a step at once where there is room"
    assert trainer.micro_batches.loop.statistics.out_of_memory == 0
    how["logging_steps"] = 10_000
    _, expected = compared(tiny.llama(hidden=8, layers=1), tmp_path / "stock", None, UnevenRows(256), **how)
    assert all(error_of(*pair) <= 1e-6 for pair in zip(found.gradients, expected.gradients, strict=True))


def test_on_a_card_nothing_grows_where_nothing_is_measured(tmp_path, card):
    """Nor does the first step go by the longest row."""
    settings = MemorySettings(memory_control=False, token_cap="auto")
    how = {"gradient_accumulation_steps": 8, "max_steps": 3}
    _, _, sizes = train_on(Device(0.5), tmp_path, UnevenRows(256), settings, **how)
    assert all(16 < size <= 64 for size in sizes)


def test_on_a_card_a_resumed_run_grows_on(tmp_path, card):
    how = {"gradient_accumulation_steps": 8, "max_steps": 4}
    whole, _, sizes = train_on(Device(0.5), tmp_path / "whole", UnevenRows(256), **how)
    _, _, first = train_on(Device(0.5), tmp_path / "parts", UnevenRows(256), **how, callbacks=[StopAt(1)])
    rest, _, others = train_on(Device(0.5), tmp_path / "parts", UnevenRows(256), **how, resume=True)
    assert first + others == sizes and same(weights_of(rest.model), weights_of(whole.model))


def test_on_another_card_a_resumed_run_begins_with_the_batch_again(tmp_path, card, monkeypatch):
    """What fitted there, and what it took, says nothing of this one, which has a twelfth of the room."""
    how = {"gradient_accumulation_steps": 8, "max_steps": 8}
    train_on(Device(0.5), tmp_path, UnevenRows(256), **how, callbacks=[StopAt(4)])
    monkeypatch.setattr(micro_batch_sizer, "device_name", lambda device: "another")
    settings = MemorySettings(padding_free=False)
    trainer, _, sizes = train_on(Device(6), tmp_path, UnevenRows(256), settings, **how, resume=True)
    assert sizes[0] <= 64 < max(sizes) <= 136 and trainer.micro_batches.loop.statistics.out_of_memory == 0
    assert trainer.micro_batches.loop.statistics.windows == 8


EXACT = Reduction("num_items")


def worked_off(
    loop: MicroBatchSizer, *batches: tuple[int, ...], share: float = 1.0, reduction: Reduction = EXACT
) -> int:
    """A step on rows of these lengths, a byte per token: how many micro-batches it took. ``share``: of the tokens that
    the layers see."""
    rows = [[dict.fromkeys(("input_ids", "labels"), torch.full((n,), 3)) for n in lengths] for lengths in batches]
    window, done = AccumulationWindow([read_layout(pad(batch)) for batch in rows], reduction), []
    window.is_padding_free = True
    for part in [part for whole in loop.begin(window, loop.step + 1) for part in loop.fit(whole)]:
        loop.before(part)
        loop.gauge.chunk_bytes = round(share * part.tokens)
        loop.record_processed_tokens(part, loop.gauge.chunk_bytes)
        loop.after(part)
        done.append((part, torch.zeros(())))
    loop.end(done, list)
    return len(done)


@pytest.mark.parametrize("resumed", [False, True], ids=["new", "resumed on another machine"])
@pytest.mark.parametrize(
    ("reduction", "count"),
    [(EXACT, 2), (Reduction("rows", mixes="rows act on each other"), 1)],
    ids=["exact", "a split would change the gradient"],
)
def test_only_what_may_be_split_begins_small(monkeypatch, resumed, reduction, count):
    loop, changes = MicroBatchSizer(MemorySettings(), Device(0), CPU), []
    worked_off(loop, (8, 8, 8, 8), reduction=reduction)
    saved = loop.state_dict()
    loop.first_cap_tokens = 16
    loop.reset()
    loop.on_row = changes.append
    if resumed:
        loop.load_state_dict({**saved, "device": "another"})
    assert worked_off(loop, (8, 8, 8, 8), reduction=reduction) == count
    assert [row["reason"] for row in changes[:1]] == [
        "larger ones were predicted not to fit into main memory" for _ in range(count - 1)
    ]


def test_rows_that_are_longer_than_all_before_are_measured_and_not_said_to_be_too_large():
    loop, changes = MicroBatchSizer(MemorySettings(), Device(0), CPU), []
    loop.on_row = changes.append
    assert [worked_off(loop, lengths) for lengths in ((2, 4, 2), (8, 8, 4), (4, 4, 6))] == [1, 1, 1]
    assert loop.state.cost.fitted
    assert worked_off(loop, (64, 2, 2)) == 1 and not changes, "nine tenths of the memory are free"
    assert loop.state.cost.observations[-1].tokens == 68


def test_rows_that_share_a_prefix_are_not_measured_in_every_step():
    """What was learned is of fewer tokens than a micro-batch of the same rows has before it runs."""
    loop = MicroBatchSizer(MemorySettings(), Device(0), CPU)
    asked, reset = [], loop.gauge.reset
    loop.gauge.reset = lambda exact=False: (asked.append(exact), reset(exact))
    for lengths in ((8, 16, 8), (32, 32, 16), (16, 16, 24)):
        worked_off(loop, lengths, share=0.25)
    assert loop.state.cost.fitted and any(asked)
    asked.clear()
    for _ in range(4):
        worked_off(loop, (32, 32, 16), share=0.25)
    assert not any(asked)


def test_on_a_card_micro_batches_are_measured_until_it_is_known_what_they_take(card):
    loop = MicroBatchSizer(MemorySettings(), Device(0), CPU)
    assert [worked_off(loop, (7,), (8,)) for _ in range(4)] == [2] * 4 and not loop.state.cost.fitted
    for length in (2, 3, 4, 5):
        worked_off(loop, (length,), (2 * length,), (3 * length,))
    assert loop.state.cost.fitted and worked_off(loop, (7,), (8,)) == 1


def test_micro_batches_grow_on_one_card_with_memory_of_its_own(monkeypatch):
    with FakeTensorMode():
        weights = [torch.empty(1, device=device) for device in ("cuda:0", "cuda:1", "cpu")]
    one, is_integrated = torch.device("cuda", 0), [0]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(is_integrated=is_integrated[0]))
    assert micro_batch_sizer.may_grow(one, weights[::2])
    assert not micro_batch_sizer.may_grow(one, weights), "of two cards memory is read of one"
    is_integrated[0] = 1
    assert not micro_batch_sizer.may_grow(one, weights[::2]) and not micro_batch_sizer.may_grow(CPU, weights[2:])


@pytest.mark.parametrize("rows", [Rows, UnevenRows])
def test_without_pressure_nothing_is_written_and_nothing_moves(tmp_path, caplog, rows):
    with caplog.at_level(logging.INFO, "scu_trainer"):
        trainer, _, sizes = train_on(Device(4), tmp_path, rows(), max_steps=12)
    assert read_rows(tmp_path / "memory_history.json") == []
    assert not any("micro-batches of at most" in record.getMessage() for record in caplog.records)
    assert trainer.micro_batches.loop.state.cap_tokens is None
    assert max(sizes) <= 64


@pytest.mark.parametrize("settings", [MemorySettings(), MemorySettings(token_cap=64)])
def test_what_an_evaluation_takes_is_no_peak_of_a_step(tmp_path, settings):
    device = Device(4)

    class Evaluation(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            device.chunk_bytes = 890  # 99 % of the device, between two steps

    trainer, _, sizes = train_on(
        device, tmp_path, settings=settings, prepare=lambda trainer: trainer.add_callback(Evaluation()), max_steps=8
    )
    assert read_rows(tmp_path / "memory_history.json") == []
    assert set(sizes) == {64}
    assert trainer.micro_batches.loop.statistics.peak_bytes == Device.MODEL_BYTES + 64 * 4


def test_the_optimizers_step_is_part_of_a_step(tmp_path):
    device = Device(4)

    class Optimizer(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            device.chunk_bytes = 600

    trainer, _, _ = train_on(device, tmp_path, prepare=lambda trainer: trainer.add_callback(Optimizer()), max_steps=4)
    assert trainer.micro_batches.loop.statistics.peak_bytes == Device.MODEL_BYTES + 600


# -- a reading that stands for a while ---------------------------------------------------------------------------------


class Slow(Device):
    """A device whose readings stand for an hour, and from step ``again`` on for no time; ``looked``: the steps of all
    readings."""

    def __init__(self, *arguments, again: int = 100, **given) -> None:
        super().__init__(*arguments, **given)
        self.again, self.looked = again, []

    @property
    def good_for_s(self) -> float:
        return 3600.0 * (self.step < self.again)

    def read(self) -> MemoryReading:
        self.looked.append(self.step)
        return super().read()


def long_rows_in(step: int) -> Examples:
    """8 rows of 8 tokens in each step, of 40 tokens in ``step``."""
    lengths = [40 if row // 8 == step - 1 else 8 for row in range(8 * 12)]
    return Examples({"input_ids": torch.arange(n) % 50, "labels": torch.arange(n) % 50} for n in lengths)


@pytest.mark.parametrize("logging_steps", [1, 5, 10_000])
def test_what_steps_without_a_reading_take_is_known_all_the_same(tmp_path, logging_steps):
    def prepare(trainer) -> None:
        trainer.get_train_dataloader = lambda: trainer.accelerator.prepare(
            torch.utils.data.DataLoader(trainer.train_dataset, batch_size=4, collate_fn=tiny.pad)
        )

    found = []
    for device in (Slow(0.5), Slow(0.5, again=9), Device(0.5)):
        given = {"max_steps": 12, "logging_steps": logging_steps, "prepare": prepare}
        trainer, _, sizes = train_on(device, tmp_path, long_rows_in(step=8), **given)
        rows = [row for row in trainer.state.log_history if "memory/peak_bytes" in row]
        peaks = [row["memory/peak_bytes"] for row in rows]
        found.append((peaks, sizes, trainer.micro_batches.loop.statistics.peak_bytes))
    assert found[0] == found[1] == found[2]
    assert found[0][2] == Device.MODEL_BYTES + 80


def test_where_nothing_is_short_few_steps_ask_how_much_there_is(tmp_path):
    train_on(device := Slow(4), tmp_path, max_steps=12)
    assert {*device.looked} <= {1, 2, 3, 4, 12}, "the first windows, which learn, and the end"


def test_under_pressure_every_step_asks(tmp_path):
    (slow, _, found), (_, _, expected) = (
        train_on(kind(8, neighbour=lambda step: 350 * (step >= 3)), tmp_path, max_steps=12) for kind in (Slow, Device)
    )
    assert found == expected and min(found) < 64
    assert {*slow.micro_batches.loop.gauge.looked} == {*range(1, 13)}


def test_running_out_of_memory_ends_the_rest(tmp_path):
    """Nobody asked before; from then on every step does, and decides what it would have decided."""
    (slow, _, found), (_, _, expected) = (
        train_on(kind(8, neighbour=lambda step: 600 * (step == 8)), tmp_path, max_steps=24) for kind in (Slow, Device)
    )
    looked = slow.micro_batches.loop.gauge.looked
    assert slow.micro_batches.loop.statistics.out_of_memory >= 1 and found[7] < 64
    assert {5, 6, 7}.isdisjoint(looked) and {*range(8, 25)} <= {*looked}
    assert found == expected


def test_an_evaluation_among_steps_without_a_reading_is_no_peak_of_a_step(tmp_path):
    device = Slow(4)

    class Evaluation(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_evaluate = state.global_step == 6

        def on_evaluate(self, args, state, control, **kwargs):
            device.chunk_bytes = 890

    def prepare(trainer) -> None:
        trainer.eval_dataset = Rows(4)
        trainer.add_callback(Evaluation())

    trainer, _, _ = train_on(device, tmp_path, prepare=prepare, max_steps=12)
    assert trainer.micro_batches.loop.statistics.peak_bytes == Device.MODEL_BYTES + 64 * 4


# -- out of memory, and bounds -----------------------------------------------------------------------------------------


def test_an_out_of_memory_is_one_row_of_the_history(tmp_path):
    """600 bytes at once: a whole batch no longer fits, before any decision could be taken."""

    def taken(step: int) -> int:
        return 600 if step >= 3 else 0

    trainer, _, sizes = train_on(Device(8, neighbour=taken), tmp_path, max_steps=12)
    rows = [row for row in read_rows(tmp_path / "memory_history.json") if row["reason"].startswith("out of memory")]
    assert len(rows) == trainer.micro_batches.loop.statistics.out_of_memory == 1
    assert rows[0]["step"] == 3 and rows[0]["pressure"] == "critical"
    assert re.search(r"at 4 rows x 16 \(20\.0 MiB wanted\); retrying as 2 x 2 rows x 16", rows[0]["reason"])
    assert max(sizes[3:]) <= 32


def test_max_batch_size_bounds_regrowth(tmp_path):
    settings = MemorySettings(max_batch_size=3)
    _, _, sizes = train_on(Device(8, neighbour=squeezed), tmp_path, settings=settings, max_steps=20)
    assert max(sizes) == 3 * 16


def test_min_batch_size_holds_under_pressure(tmp_path):
    settings = MemorySettings(min_batch_size=3)
    _, _, sizes = train_on(Device(8, neighbour=squeezed), tmp_path, settings=settings, max_steps=12)
    assert set(sizes) == {64}, "a batch of four rows has no two parts of three"
    caps = [row["tokens_per_chunk"] for row in read_rows(tmp_path / "memory_history.json")]
    assert caps and min(caps) == 3 * 16


# -- prediction --------------------------------------------------------------------------------------------------------


def longer_and_longer() -> Examples:
    """Short rows for six steps, then four times as long: a whole batch of them does not fit."""

    def length(i: int) -> int:
        return 4 + i % 5 if i < 48 else 32 - i % 3

    tokens = Rows(96, 32).tokens
    return Examples({"input_ids": tokens[i, : length(i)], "labels": tokens[i, : length(i)]} for i in range(96))


STEPS = {"max_steps": 12, "train_sampling_strategy": "sequential"}
QUADRATIC = {"per_token": 2.0, "per_square": 0.25}  # 4 rows x 32: 1280 bytes; 2 rows x 32: 640


def test_a_long_row_is_split_before_it_fails(tmp_path):
    device = Device(**QUADRATIC)
    trainer, _, sizes = train_on(device, tmp_path, longer_and_longer(), **STEPS)
    assert trainer.micro_batches.loop.statistics.out_of_memory == 0
    assert max(device.tried) <= Device.LIMIT_BYTES - Device.MODEL_BYTES
    assert max(sizes) >= 32, "the longest row itself has to run"
    expected, _ = compared(tiny.llama(hidden=8, layers=1), tmp_path, None, longer_and_longer(), **WINDOW, **STEPS)
    assert error_of(weights_of(trainer.model), weights_of(expected.model)) <= 1e-6


def test_without_the_prediction_it_fails_first(tmp_path, monkeypatch):
    monkeypatch.setattr(MicroBatchSizer, "_predicted_limit", lambda self, piece: None)
    trainer, _, _ = train_on(Device(**QUADRATIC), tmp_path, longer_and_longer(), **STEPS)
    assert trainer.micro_batches.loop.statistics.out_of_memory > 0


# -- checkpoints -------------------------------------------------------------------------------------------------------


class StopAt(TrainerCallback):
    """An interruption with a checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


@pytest.mark.parametrize("stop", [6, 11], ids=["under pressure", "while it comes back"])
def test_a_resumed_run_takes_the_same_decisions(tmp_path, stop):
    whole, _, sizes = train_on(Device(8, neighbour=squeezed), tmp_path / "whole", max_steps=20)
    first, _, sizes_first = train_on(
        Device(8, neighbour=squeezed), tmp_path / "parts", max_steps=20, callbacks=[StopAt(stop)]
    )
    saved = read_json(tmp_path / "parts" / f"checkpoint-{stop}" / "memory_state.json")
    assert saved["state"]["cap_tokens"] == first.micro_batches.loop.state.cap_tokens
    assert saved["state"]["cap_tokens"] is not None
    rest, _, sizes_rest = train_on(Device(8, neighbour=squeezed), tmp_path / "parts", max_steps=20, resume=True)
    assert sizes_first + sizes_rest == sizes
    assert rest.micro_batches.loop.state == whole.micro_batches.loop.state
    assert rest.micro_batches.loop.statistics == whole.micro_batches.loop.statistics
    assert same(weights_of(rest.model), weights_of(whole.model))
    files = [(tmp_path / name / "memory_history.json").read_bytes() for name in ("whole", "parts")]
    assert files[0] == files[1]


def test_rows_after_the_checkpoint_are_written_again(tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 6, "max_steps": 18}
    train_on(Device(8, neighbour=squeezed), tmp_path, **changes)
    before = read_rows(tmp_path / "memory_history.json")
    assert max(row["step"] for row in before) > 6
    _, _, sizes = train_on(Device(8, neighbour=squeezed), tmp_path, resume=str(tmp_path / "checkpoint-6"), **changes)
    assert len(sizes) == 12
    assert read_rows(tmp_path / "memory_history.json") == before


def test_a_checkpoint_without_its_state_starts_again(tmp_path):
    train_on(Device(8), tmp_path, callbacks=[StopAt(3)], max_steps=6)
    (tmp_path / "checkpoint-3" / "memory_state.json").unlink()
    (tmp_path / "checkpoint-3" / MANIFEST).unlink()
    trainer, _, _ = train_on(Device(8), tmp_path, resume=True, max_steps=6)
    assert trainer.micro_batches.loop.statistics.windows == 3
    assert torch.isfinite(next(trainer.model.parameters())).all()
