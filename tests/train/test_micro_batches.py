"""A window in micro-batches gives the gradient of the stock Trainer: for every kind of loss, and bit for bit when
uncut."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    TrainerCallback,
)

from scu_trainer.run_files import read_rows
from scu_trainer.settings import MemorySettings, RegularizationSettings
from scu_trainer.train.trainer import SCUTrainer
from tests import tiny
from tests.tiny import Examples, Rows, UnevenRows, images, labelled, pairs, same, weights_of
from tests.train.stepwise import compared, error_of, losses_of, record_micro_batches

SPLIT = MemorySettings(token_cap=24)


# -- models of one's own -----------------------------------------------------------------------------------------------


class Scorer(nn.Module):
    """A model that knows nothing of transformers: mean embedding of the attended tokens against one label per row."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.reduction = nn.Embedding(tiny.VOCAB, 8), nn.Linear(8, 2), reduction

    def forward(self, input_ids, attention_mask, labels):
        mask = attention_mask[:, :, None].to(self.head.weight.dtype)
        logits = self.head((self.table(input_ids) * mask).sum(dim=1) / mask.sum(dim=1))
        return {"loss": nn.functional.cross_entropy(logits, labels, reduction=self.reduction)}


class ReadsPadding(Scorer):
    """The mean runs over all columns, whatever the mask says."""

    def forward(self, input_ids, attention_mask, labels):
        return super().forward(input_ids, torch.ones_like(attention_mask), labels)


class Untold(nn.Module):
    """A causal model whose forward takes no count of items: a mean over the labels of each batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, labels):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


def token_sum(outputs, labels, num_items_in_batch=None) -> torch.Tensor:
    """A ``compute_loss_func`` in the precision of the model (the stock causal loss is computed in float32)."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / num_items_in_batch


# -- chunked is whole --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """``kind``: how the loss adds up, as it must be found out. ``double``: the model computes in float64 throughout."""

    make: Callable[[], nn.Module]
    rows: Callable[[], Any]
    kind: str
    settings: MemorySettings = SPLIT
    changes: dict[str, Any] = field(default_factory=dict)
    double: bool = False


def learned_from_the_first() -> Examples:
    """Also the first position has a label: only then labels and shifted labels are different numbers."""
    rows = uneven()
    return Examples({**rows[i], "labels": rows[i]["input_ids"].clone()} for i in range(len(rows)))


def uneven(count: int = 30) -> UnevenRows:
    """30 rows in batches of 4: the last batch of an epoch has 2."""
    return UnevenRows(count)


def epoch(accumulation: int) -> dict[str, Any]:
    """8 batches in windows of ``accumulation``: with 3 the last window has 2."""
    return {"gradient_accumulation_steps": accumulation, "max_steps": -1, "num_train_epochs": 1}


def packed() -> Examples:
    tokens = Rows(32).tokens
    position_ids = torch.cat([torch.arange(10), torch.arange(6)])
    return Examples({"input_ids": row, "labels": row, "position_ids": position_ids} for row in tokens)


def stacked(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A collator that makes no mask."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def masked_words() -> Examples:
    """A label at every third token, none in some short rows."""
    return Examples(
        {**row, "labels": torch.where(torch.arange(len(row["input_ids"])) % 3 == 2, row["input_ids"], -100)}
        for row in (UnevenRows(30)[i] for i in range(30))
    )


def several_labels(i: int) -> torch.Tensor:
    return torch.tensor([i % 2, i % 3 == 0, 1.0])


def tagged() -> Examples:
    return Examples({**row, "labels": row["input_ids"] % 3} for row in (UnevenRows(30)[i] for i in range(30)))


CLASSIFIER = {"changes": {"gradient_accumulation_steps": 3, "max_steps": 4}}

CASES = {
    "causal": Case(tiny.llama, uneven, "num_items", changes=epoch(1)),
    "causal, accumulation 2": Case(tiny.small_llama, uneven, "num_items", changes=epoch(2)),
    "causal, accumulation 3": Case(tiny.small_llama, uneven, "num_items", changes=epoch(3)),
    "causal, automatic cap": Case(tiny.small_llama, uneven, "num_items", MemorySettings(), epoch(3)),
    "causal, not told the count": Case(
        lambda: Untold(tiny.small_llama()), learned_from_the_first, "shifted_labels", changes=epoch(3)
    ),
    "label smoothing": Case(tiny.small_llama, uneven, "num_items", changes={**epoch(3), "label_smoothing_factor": 0.1}),
    "packed rows without mask": Case(
        tiny.small_llama, packed, "num_items", MemorySettings(token_cap=32), {**epoch(3), "data_collator": stacked}
    ),
    "lora": Case(lambda: tiny.lora(tiny.small_llama()), uneven, "num_items", changes=epoch(3)),
    "gradient checkpointing": Case(
        tiny.small_llama, uneven, "num_items", changes={**epoch(2), "activation_checkpointing": True}
    ),
    "t5": Case(tiny.t5, pairs, "labels", changes={"gradient_accumulation_steps": 2, "max_steps": 4}),
    "bart": Case(tiny.bart, pairs, "labels", changes={"gradient_accumulation_steps": 2, "max_steps": 4}, double=True),
    "masked words": Case(lambda: tiny.bert(BertForMaskedLM), masked_words, "labels", changes=epoch(3), double=True),
    "one label per token": Case(
        lambda: tiny.bert(BertForTokenClassification, num_labels=3), tagged, "labels", changes=epoch(3), double=True
    ),
    "classes": Case(
        lambda: tiny.bert(BertForSequenceClassification), lambda: labelled(30), "labels", double=True, changes=epoch(3)
    ),
    "regression": Case(
        lambda: tiny.bert(BertForSequenceClassification, num_labels=1),
        lambda: labelled(30, lambda i: torch.tensor(i / 30)),
        "rows",
        changes=epoch(3),
    ),
    "several labels": Case(
        lambda: tiny.bert(BertForSequenceClassification, num_labels=3, problem_type="multi_label_classification"),
        lambda: labelled(30, several_labels),
        "rows",
        changes=epoch(3),
    ),
    "images": Case(tiny.vit, images, "num_items", MemorySettings(token_cap=3), epoch(3), double=True),
    "loss function": Case(
        tiny.gpt2, uneven, "num_items", changes={**epoch(3), "compute_loss_func": token_sum}, double=True
    ),
    "own module, mean": Case(Scorer, lambda: labelled(30), "labels", changes=epoch(3), double=True),
    "own module, sum": Case(lambda: Scorer("sum"), lambda: labelled(30), "sum", changes=epoch(3), double=True),
}

PRECISIONS = [(name, torch.float32, 1e-6) for name in CASES]
PRECISIONS += [(name, torch.float64, 1e-12) for name, case in CASES.items() if case.double]


@pytest.mark.parametrize(("name", "dtype", "bound"), PRECISIONS, ids=lambda value: str(value).replace("torch.", ""))
def test_chunked_gives_the_stock_gradient(tmp_path, name, dtype, bound):
    case, pieces = CASES[name], []
    _, expected = compared(case.make().to(dtype), tmp_path, dataset=as_dtype(case.rows(), dtype), **case.changes)
    found_trainer, found = compared(
        case.make().to(dtype),
        tmp_path,
        case.settings,
        as_dtype(case.rows(), dtype),
        prepare=lambda trainer: pieces.append(record_micro_batches(trainer)),
        **case.changes,
    )
    accumulation = case.changes["gradient_accumulation_steps"]
    assert found_trainer.micro_batches.reduction.kind == case.kind
    assert any(len(step) > accumulation or is_pooled(step) for step in pieces[0]), "nothing was cut"
    assert len(found.gradients) == len(expected.gradients) >= 3
    for step, (gradients, stock) in enumerate(zip(found.gradients, expected.gradients, strict=True), start=1):
        assert error_of(gradients, stock) <= bound, f"step {step}"


# -- bit for bit -------------------------------------------------------------------------------------------------------

UNCUT = {
    "causal": (tiny.llama, Rows, {}),
    "dropout": (lambda: tiny.small_llama(attention_dropout=0.3), Rows, {}),
    "bf16 autocast": (tiny.small_llama, Rows, {"bf16": True}),
    "bfloat16 weights": (lambda: tiny.small_llama().bfloat16(), Rows, {}),
    "lora with dropout": (lambda: tiny.lora(tiny.small_llama(), lora_dropout=0.3), Rows, {}),
    "a mean over two batches": (lambda: tiny.bert(BertForSequenceClassification), lambda: even_labelled(), {}),
    "images": (tiny.vit, images, {}),
    "batch norm": (tiny.conv_net, images, {}),
    "a loss over all rows": (lambda: Contrast(), lambda: even_labelled(), {}),
}


def even_labelled() -> Examples:
    return Examples({"input_ids": Rows().tokens[i], "labels": torch.tensor(i % 2)} for i in range(32))


class Contrast(Scorer):
    """In-batch negatives: every row's loss depends on all the others."""

    def forward(self, input_ids, attention_mask, labels):
        vectors = self.table(input_ids).mean(dim=1)
        return {
            "loss": nn.functional.cross_entropy(self.head(vectors) @ self.head(vectors).T, torch.arange(len(labels)))
        }


@pytest.mark.parametrize("name", UNCUT)
def test_without_pressure_rows_of_one_size_give_the_stock_run_bit_for_bit(tmp_path, name):
    """With AdamW, fused as it is by default, clipping and accumulation."""
    make, rows, changes = UNCUT[name]
    changes = {"gradient_accumulation_steps": 2, "optim": "adamw_torch_fused", "max_grad_norm": 0.05, **changes}
    expected, _ = compared(make(), tmp_path, dataset=rows(), **changes)
    end_of_stock = torch.get_rng_state()
    found, _ = compared(make(), tmp_path, MemorySettings(), rows(), **changes)
    assert torch.equal(torch.get_rng_state(), end_of_stock)
    assert same(weights_of(found.model), weights_of(expected.model))
    assert same(dict(found.model.named_buffers()), dict(expected.model.named_buffers()))
    assert not same(weights_of(found.model), weights_of(make())), "nothing was trained"
    assert losses_of(found) == losses_of(expected)
    assert [entry.get("grad_norm") for entry in found.state.log_history] == [
        entry.get("grad_norm") for entry in expected.state.log_history
    ]


@pytest.mark.parametrize("settings", [None, MemorySettings(memory_control=False)], ids=["none", "off"])
@pytest.mark.parametrize("rows", [Rows, UnevenRows])
def test_off_is_the_stock_run_bit_for_bit(tmp_path, settings, rows):
    changes = {"gradient_accumulation_steps": 2, "optim": "adamw_torch_fused"}
    expected, _ = compared(tiny.small_llama(attention_dropout=0.3), tmp_path, dataset=rows(), **changes)
    end_of_stock = torch.get_rng_state()
    arguments = tiny.arguments(tmp_path, logging_steps=1, max_grad_norm=0.0, **changes)
    model = tiny.small_llama(attention_dropout=0.3)
    found = SCUTrainer(model, arguments, train_dataset=rows(), data_collator=tiny.pad, memory=settings)
    found.train()
    assert found.micro_batches is None and found.prediction is None
    assert same(weights_of(found.model), weights_of(expected.model))
    assert losses_of(found) == losses_of(expected)
    assert torch.equal(torch.get_rng_state(), end_of_stock)


def test_a_token_cap_works_without_memory_control(tmp_path):
    settings = MemorySettings(memory_control=False, token_cap=24)
    expected, _ = compared(tiny.small_llama(), tmp_path, dataset=uneven(), **epoch(3))
    found, _ = compared(tiny.small_llama(), tmp_path, settings, uneven(), **epoch(3))
    assert error_of(weights_of(found.model), weights_of(expected.model)) <= 1e-6
    assert found.micro_batches.loop.statistics.processed_tokens < found.micro_batches.loop.statistics.stock_tokens
    assert found.micro_batches.loop.gauge is None


def test_logged_losses_are_those_of_the_stock_run(tmp_path):
    expected, _ = compared(tiny.small_llama(), tmp_path, dataset=uneven(), **epoch(3))
    found, _ = compared(tiny.small_llama(), tmp_path, SPLIT, uneven(), **epoch(3))
    assert losses_of(found) == pytest.approx(losses_of(expected), rel=1e-6)


# -- sizes -------------------------------------------------------------------------------------------------------------


def shapes_in(tmp_path, settings: MemorySettings, rows=UnevenRows, make=tiny.small_llama, **changes):
    """(rows, tokens) of every batch that the model was trained on, by window."""
    windows: list[list[tuple[int, ...]]] = []

    def watch(trainer) -> None:
        step = trainer.stock_training_step

        def see(model, inputs, num_items):
            first = inputs.get("input_ids", inputs.get("pixel_values"))
            windows[-1].append(tuple(first.shape[:2]) if "input_ids" in inputs else (len(first),))
            return step(model, inputs, num_items)

        trainer.stock_training_step = see
        trainer.add_callback(at_step_begin(lambda: windows.append([])))

    changes = {"gradient_accumulation_steps": 2, "max_steps": 4, **changes}
    trainer, _ = compared(make(), tmp_path, settings, rows(), prepare=watch, **changes)
    assert len(windows) == 4
    return windows, trainer


def at_step_begin(function: Callable[[], None]) -> TrainerCallback:
    class Begin(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            function()

    return Begin()


def test_no_chunk_exceeds_the_token_cap(tmp_path):
    windows, trainer = shapes_in(tmp_path, MemorySettings(token_cap=20, padding_free=False))
    assert all(rows * length <= 20 for window in windows for rows, length in window)
    assert all(sum(rows for rows, _ in window) == 8 for window in windows)
    processed = sum(rows * length for window in windows for rows, length in window)
    assert trainer.micro_batches.loop.statistics.processed_tokens == processed


def test_a_row_longer_than_the_cap_runs_alone(tmp_path):
    windows, _ = shapes_in(tmp_path, MemorySettings(token_cap=9))
    above = [(rows, length) for window in windows for rows, length in window if rows * length > 9]
    assert above and all(rows == 1 for rows, _ in above)


def test_the_automatic_cap_is_the_batch_that_was_asked_for(tmp_path):
    windows, trainer = shapes_in(tmp_path, MemorySettings(padding_free=False))
    largest = 4 * 16
    assert all(rows * length <= largest for window in windows for rows, length in window)
    assert trainer.micro_batches.loop.state.cap_tokens is None
    statistics = trainer.micro_batches.loop.statistics
    assert statistics.real_tokens <= statistics.processed_tokens < statistics.stock_tokens


@pytest.mark.parametrize("rows", [Rows, UnevenRows])
def test_max_batch_size_bounds_the_rows_of_a_chunk(tmp_path, rows):
    windows, _ = shapes_in(tmp_path, MemorySettings(max_batch_size=3), rows)
    assert {count for window in windows for count, _ in window} <= {1, 2, 3}
    assert all(sum(count for count, _ in window) == 8 for window in windows)


def test_min_batch_size_wins_over_the_token_cap(tmp_path):
    windows, _ = shapes_in(tmp_path, MemorySettings(token_cap=8, min_batch_size=4))
    assert all(count >= 4 for window in windows for count, _ in window)
    assert all(len(window) == 2 for window in windows)


def test_a_cap_on_images_counts_rows(tmp_path):
    windows, _ = shapes_in(tmp_path, MemorySettings(token_cap=3), images, tiny.vit)
    assert all(count <= 3 for window in windows for (count,) in window)
    assert [sum(count for (count,) in window) for window in windows] == [8] * 4


def test_chunks_carry_no_padding_that_nobody_needs(tmp_path):
    """One row per micro-batch: its own tokens and no more."""
    windows, trainer = shapes_in(tmp_path, MemorySettings(token_cap=1))
    assert all(rows == 1 for window in windows for rows, _ in window)
    statistics = trainer.micro_batches.loop.statistics
    assert (
        statistics.processed_tokens
        == statistics.real_tokens
        == sum(length for window in windows for _, length in window)
    )


# -- where equality cannot hold ----------------------------------------------------------------------------------------


def test_batch_norm_runs_whole_batches_and_is_named(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "scu_trainer"):
        windows, trainer = shapes_in(tmp_path, MemorySettings(token_cap=2), images, tiny.conv_net)
    expected, _ = compared(tiny.conv_net(), tmp_path, dataset=images(), gradient_accumulation_steps=2, max_steps=4)
    assert windows == [[(4,), (4,)]] * 4
    assert same(trainer.model.state_dict(), expected.model.state_dict()), "weights or statistics differ"
    warnings = [record.getMessage() for record in caplog.records if "norm" in record.getMessage()]
    assert len(warnings) == 1 and "BatchNorm" in warnings[0] and "min_batch_size" in warnings[0]


def test_what_is_found_once_more_is_said_once_in_a_training(tmp_path, caplog):
    trainer = SCUTrainer(tiny.conv_net(), tiny.arguments(tmp_path), train_dataset=images(), memory=MemorySettings())
    with caplog.at_level(logging.WARNING, "scu_trainer"):
        for _ in range(2):
            trainer.train()
            trainer.micro_batches._warn_about_limits([], 4)
    assert sum("BatchNorm" in record.getMessage() for record in caplog.records) == 2


def test_a_batch_that_cannot_be_cut_runs_whole(tmp_path, caplog):
    def with_table(rows):
        return {**tiny.pad(rows), "class_weights": torch.ones(2)}

    class Weighted(Scorer):
        def forward(self, input_ids, attention_mask, labels, class_weights):
            return super().forward(input_ids, attention_mask, labels)

    changes = {"data_collator": with_table, "remove_unused_columns": False, "gradient_accumulation_steps": 2}
    expected, _ = compared(Weighted(), tmp_path, dataset=labelled(), **changes)
    with caplog.at_level(logging.WARNING, "scu_trainer"):
        found, _ = compared(Weighted(), tmp_path, SPLIT, labelled(), **changes)
    assert same(weights_of(found.model), weights_of(expected.model))
    warnings = [record.getMessage() for record in caplog.records if "cannot be cut" in record.getMessage()]
    assert len(warnings) == 1 and "class_weights has 2 entries for 4 rows" in warnings[0]
    # Its rows and tokens are not known: no figure is better than 0 rows and 1 token.
    assert {"memory/tokens_per_chunk", "memory/rows_per_chunk"}.isdisjoint(found.state.log_history[0])
    statistics = found.micro_batches.loop.statistics
    assert statistics.chunks > 0 and statistics.processed_tokens == 0


def test_what_cannot_be_cut_in_a_later_step_is_said_once(tmp_path, caplog):
    entries = iter([4, 5, 6, 7])

    def with_others(rows):
        return {**tiny.pad(rows), "others": torch.ones(next(entries))}

    class Other(Scorer):
        def forward(self, input_ids, attention_mask, labels, others):
            return super().forward(input_ids, attention_mask, labels)

    changes = {"data_collator": with_others, "remove_unused_columns": False, "max_steps": 4}
    with caplog.at_level(logging.WARNING, "scu_trainer"):
        compared(Other(), tmp_path, SPLIT, labelled(), **changes)
    (warning,) = [record.getMessage() for record in caplog.records if "cannot be cut" in record.getMessage()]
    assert "others has 5 entries for 4 rows" in warning


def test_inputs_that_are_no_tensors_go_along(tmp_path):
    """Names and numbers that a collator adds belong to the rows or to the whole batch."""
    seen = []

    class Named(Scorer):
        def forward(self, input_ids, attention_mask, labels, names, sample_index, scale):
            seen.extend(zip(names, sample_index.tolist(), strict=True))
            assert len(names) == len(input_ids) and scale == 1.0
            return super().forward(input_ids, attention_mask, labels)

    def collate(rows):
        batch = tiny.pad(rows)
        return {**batch, "names": [f"row {int(i)}" for i in batch["sample_index"]], "scale": 1.0}

    rows = Examples({**labelled()[i], "sample_index": torch.tensor(i)} for i in range(32))
    changes = {"data_collator": collate, "remove_unused_columns": False, "gradient_accumulation_steps": 2}
    expected, _ = compared(Named(), tmp_path, dataset=rows, **changes)
    seen.clear()
    found, _ = compared(Named(), tmp_path, SPLIT, rows, **changes)
    assert error_of(weights_of(found.model), weights_of(expected.model)) <= 1e-6
    assert seen and all(name == f"row {index}" for name, index in seen)


@pytest.mark.parametrize("memory", [MemorySettings(), None], ids=["micro-batches", "stock batches"])
@pytest.mark.parametrize("whose", ["this model", "compute_loss_func"])
def test_means_that_are_added_up_are_named_with_whose_they_are(tmp_path, caplog, whose, memory):
    def mean(outputs, labels, num_items_in_batch=None):
        return nn.functional.cross_entropy(outputs["logits"], labels)

    named = {"compute_loss_func": mean} if whose == "compute_loss_func" else {}
    model = tiny.bert(BertForSequenceClassification)
    changes = {"memory": memory, "gradient_accumulation_steps": 2, "max_steps": 1, **named}
    with caplog.at_level(logging.WARNING, "scu_trainer"):
        tiny.trained(model, tmp_path, RegularizationSettings(), labelled(16), data_collator=tiny.pad, **changes)
    assert f"{whose} ignores num_items_in_batch, so the stock loop adds up the mean losses of 2" in caplog.text
    (row,) = read_rows(tmp_path / "scu_history.json")
    assert row["data_bpt"] == pytest.approx(1, rel=0.1)  # of two classes, by chance


def test_a_model_that_reads_its_padding_keeps_it(tmp_path, caplog):
    changes = {"gradient_accumulation_steps": 2, "max_steps": 4}
    expected, _ = compared(ReadsPadding(), tmp_path, dataset=labelled(), **changes)
    with caplog.at_level(logging.WARNING, "scu_trainer"):
        found, _ = compared(ReadsPadding(), tmp_path, MemorySettings(token_cap=32), labelled(), **changes)
    assert error_of(weights_of(found.model), weights_of(expected.model)) <= 1e-6
    assert any("loss depends on it" in record.getMessage() for record in caplog.records)
    assert not found.micro_batches.reduction.trims


def as_dtype(rows: Any, dtype: torch.dtype) -> Any:
    """Numbers (pixels, targets of a regression) in the precision of the model."""
    if dtype == torch.float32:
        return rows
    return Examples(
        {name: value.to(dtype) if value.is_floating_point() else value for name, value in rows[i].items()}
        for i in range(len(rows))
    )


def is_pooled(pieces) -> bool:
    return any(len({batch for batch, _ in piece.rows}) > 1 for piece in pieces)
