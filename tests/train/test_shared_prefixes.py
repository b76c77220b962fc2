"""Prefixes that rows share, computed once: the stock loss and gradient, and once per row where that would
not hold."""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from scu_trainer.control import microbatch as control
from scu_trainer.settings import CurriculumSettings, MemorySettings
from scu_trainer.train.loops.profile import PartTimes
from scu_trainer.train.loss.evaluation_path import EvaluationPath
from scu_trainer.train.loss.loss_path import LossPath
from scu_trainer.train.loss.rows.model_loss import inner_model, user_loss_above
from scu_trainer.train.loss.rows.row_readings import row_scores
from scu_trainer.train.loss.rows.shared_prefixes import SharedPrefixes, shared_prefixes
from scu_trainer.train.trainer import SCUTrainer
from tests import tiny
from tests.faults import FakeGauge, fail_in_backward
from tests.tiny import Rows, arguments, pad, same, weights_of
from tests.train.curricula import curriculum_run
from tests.train.stepwise import ENDLESS_BYTES, Recorder, compared, error_of
from tests.train.test_padding_free import MODELS, PADDED, WAYS, WINDOW, stock_gradients, trained

TEMPLATES = (torch.tensor([5, 6, 7, 8, 9, 10]), torch.tensor([5, 6, 7, 11, 12]))


class Templates(Rows):
    """Rows of 7 to 16 tokens that begin with one of two templates, which themselves begin alike."""

    is_learned = False

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        template = TEMPLATES[index % 2]
        own = self.tokens[index][: 2 + 5 * index % 9]
        tokens = torch.cat([template, own])
        labels = tokens.clone()
        labels[: 0 if self.is_learned else len(template)] = -100
        return {"input_ids": tokens, "labels": labels}


class LearnedTemplates(Templates):
    is_learned = True


@pytest.mark.parametrize("rows", [Templates, LearnedTemplates], ids=["masked", "learned"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradient_are_the_stock_ones(tmp_path, name, way, rows):
    trainer, found, seen = trained(MODELS[name], tmp_path / "ours", rows=rows, max_steps=2, **WAYS[way])
    statistics = trainer.micro_batches.loop.statistics
    assert sum(rows * time for rows, time in seen) == statistics.processed_tokens < statistics.real_tokens
    for gradient, wanted in zip(found.gradients, stock_gradients(name, rows)[:2], strict=True):
        assert error_of(gradient, wanted) < 4e-6


def test_in_half_precision_the_layers_see_few_sizes(tmp_path):
    _, found, seen = trained(tiny.small_llama, tmp_path / "ours", rows=Templates, bf16=True)
    _, expected = compared(tiny.small_llama(), tmp_path / "stock", None, Templates(), bf16=True, **WINDOW)
    assert seen and all(time % 8 == 0 for _, time in seen)
    for gradient, wanted in zip(found.gradients, expected.gradients, strict=True):
        assert error_of(gradient, wanted) < 2e-2


def test_in_half_precision_gradients_add_up_in_float32():
    """1,024 copies of one token: in bfloat16 a sum of ones stops at 256."""
    states = torch.ones(1, 2, 1, dtype=torch.bfloat16, requires_grad=True)
    shared = SharedPrefixes(kept=torch.arange(2), source=torch.tensor([0] * 1024 + [1]))
    copies = shared.copied(states, 1)
    assert copies.shape == (1, 1025, 1)
    copies.sum().backward()
    assert states.grad.flatten().tolist() == [1024.0, 1.0]


def test_rows_keep_their_own_losses_and_weights(tmp_path):
    runs = [
        curriculum_run(
            tmp_path / str(wanted),
            CurriculumSettings("infobatch"),
            memory=MemorySettings(padding_free=wanted),
            memory_gauge=FakeGauge(ENDLESS_BYTES),
            data=LearnedTemplates(),
            num_train_epochs=4,
        )
        for wanted in (False, None)
    ]
    assert runs[1].micro_batches.loop.statistics.processed_tokens < runs[1].micro_batches.loop.statistics.real_tokens
    torch.testing.assert_close(*(torch.as_tensor(run.difficulty.scores) for run in runs), rtol=1e-5, atol=1e-6)
    assert error_of(*(weights_of(run.model) for run in runs)) < 1e-5


@pytest.mark.parametrize("fewest_words", [None, 0], ids=["opened", "chunked"])
@pytest.mark.parametrize("name", MODELS)
def test_held_out_rows_have_the_losses_that_the_logits_give(name, fewest_words):
    model, rows = MODELS[name]().eval(), LearnedTemplates()
    batch = pad([rows[index] for index in range(8)])
    seen, body = [], inner_model(model).base_model
    (getattr(body, "layers", None) or body.h)[0].register_forward_pre_hook(
        lambda module, given: seen.append(tuple(given[0].shape[:2]))
    )
    labels = batch.pop("labels")
    path = EvaluationPath(model, fewest_words=fewest_words)
    with torch.no_grad():
        expected = row_scores(model(**batch).logits, labels)
        torch.testing.assert_close(path.scores(batch, labels), expected, rtol=1e-5, atol=1e-5)
    assert seen[-1][1] < batch["attention_mask"].sum()


def test_held_out_rows_that_cannot_share_are_whole(monkeypatch, caplog):
    monkeypatch.setattr(SharedPrefixes, "of_rows", lambda self, output: {"last_hidden_state": output[0]})
    model, rows = tiny.small_llama().eval(), Templates()
    batch = pad([rows[index] for index in range(8)])
    labels = batch.pop("labels")
    with torch.no_grad(), caplog.at_level(logging.INFO, logger="scu_trainer"):
        expected = row_scores(model(**batch).logits, labels)
        torch.testing.assert_close(EvaluationPath(model).scores(batch, labels), expected, rtol=1e-5, atol=1e-5)
    assert "in evaluation prefixes that rows share are computed once per row: the model fails" in caplog.text


# -- which tokens ------------------------------------------------------------------------------------------------------


def laid_out(rows: list[list[int]]):
    """(kept tokens, for each token the one whose states it takes), as [row][token] in ``rows``; None for all."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=2)
    places = (torch.arange(ids.size(1)) < lengths.unsqueeze(1)).flatten().nonzero().flatten()
    found = shared_prefixes(ids, lengths, places)
    if found is None:
        return None
    tokens = [(row, token) for row, length in enumerate(lengths.tolist()) for token in range(length)]
    kept = [tokens[place] for place in found.kept.tolist()]
    return kept, [kept[place] for place in found.source.tolist()]


def test_each_row_has_its_beginning_from_one_other():
    kept, source = laid_out([[1, 2, 3, 4, 5], [9, 9], [1, 2, 3, 4, 6, 7]])
    assert kept == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1), (2, 4), (2, 5)]
    assert source[7:] == [(0, 0), (0, 1), (0, 2), (0, 3), (2, 4), (2, 5)]


def test_beginnings_of_different_length_are_shared_at_once():
    """Four rows of two kinds, which begin alike themselves: a tree."""
    kept, source = laid_out([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8], [1, 2, 3, 4, 5, 9], [1, 2, 3, 4, 7, 5]])
    assert len(kept) == 4 + 2 + 4
    assert source[12:14] == source[0:2] and source[16] == source[4] and source[22] == source[10]


def test_padding_is_nothing_alike():
    """The padding token may well be a word."""
    kept, source = laid_out([[1, 2, 3, 4], [1, 2, 3, 4, 2, 2], [1, 2, 3, 4]])
    assert len(kept) == 6 and source[8:10] == [(1, 4), (1, 5)]


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 2, 3, 4, 5], [1, 2, 3, 5, 5]],
        [[1, 2, 3, 4] + [5] * 40, [1, 2, 3, 4] + [6] * 40],
    ],
    ids=["few tokens alike", "a small share alike"],
)
def test_what_is_not_worth_it_is_left_alone(rows):
    assert laid_out(rows) is None


# -- where each row has its own ----------------------------------------------------------------------------------------


def with_attention_dropout() -> LlamaForCausalLM:
    model = tiny.small_llama()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    return model


def with_adapter_dropout() -> nn.Module:
    return tiny.lora(tiny.small_llama(), lora_dropout=0.1)


@pytest.mark.parametrize("make", [with_attention_dropout, with_adapter_dropout])
def test_rows_have_random_numbers_of_their_own(tmp_path, caplog, make):
    with caplog.at_level(logging.INFO, logger="scu_trainer"):
        trainer, _, seen = trained(make, tmp_path, rows=Templates)
    statistics = trainer.micro_batches.loop.statistics
    assert sum(rows * time for rows, time in seen) == statistics.real_tokens == statistics.processed_tokens
    assert "once per row: the model draws random numbers (dropout)" in caplog.text


def test_rows_have_them_where_an_audit_is_the_first_to_see_a_shared_prefix(tmp_path):
    """Audits take the noise out of the model, so there it must not look as if it had none."""
    changes = {"train_sampling_strategy": "sequential", "max_steps": 4}
    trainer, _, _ = trained(with_attention_dropout, tmp_path, rows=TemplatesLater, **changes)
    statistics = trainer.micro_batches.loop.statistics
    assert statistics.processed_tokens == statistics.real_tokens


class AddsFromLayers(SCUTrainer):
    """Sums up over the tokens that a layer sees, which are those of all rows only where each row has its own."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.seen, self.mask = [], inputs["attention_mask"].bool()
        loss = SCUTrainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
        return loss + 10 * sum(self.seen) / num_items_in_batch


def replaced_on_one_trainer(*args, **kwargs) -> SCUTrainer:
    trainer = SCUTrainer(*args, **kwargs)
    trainer.compute_loss = functools.partial(AddsFromLayers.compute_loss, trainer)
    return trainer


@pytest.mark.parametrize(
    ("make", "owner"), [(AddsFromLayers, "AddsFromLayers"), (replaced_on_one_trainer, "this trainer")]
)
def test_a_loss_that_looks_into_the_layers_sees_every_row(tmp_path, caplog, make, owner):
    gradients = []
    for memory in (PADDED, MemorySettings()):
        recorder, model, changes = Recorder(), tiny.small_llama(), {"optim": "sgd", "max_grad_norm": 0.0, **WINDOW}
        parts = {"data_collator": pad, "callbacks": [recorder], "memory_gauge": FakeGauge(ENDLESS_BYTES)}
        trainer = make(model, arguments(tmp_path, **changes), train_dataset=LearnedTemplates(), memory=memory, **parts)

        def see(module, given, trainer=trainer):
            states, rows = given[0], trainer.mask
            trainer.seen.append((states[rows] if states.shape[:2] == rows.shape else states).square().sum())

        model.model.layers[0].mlp.register_forward_pre_hook(see)
        with caplog.at_level(logging.INFO, logger="scu_trainer"):
            trainer.train()
        gradients.append(recorder.gradients)
    assert trainer.loss_path.is_padding_free
    said = f"once per row: compute_loss of {owner} may use what the layers compute; set padding_free: true if not"
    assert said in caplog.text
    for gradient, wanted in zip(*gradients, strict=True):
        assert error_of(gradient, wanted) < 4e-6


def test_measuring_its_time_changes_no_loss(tmp_path):
    trainer = SCUTrainer(tiny.small_llama(), arguments(tmp_path), train_dataset=Templates(), memory=MemorySettings())
    times = PartTimes(trainer)
    times.start()
    assert user_loss_above(trainer) is None
    times.stop()
    assert "compute_loss" not in vars(trainer) and "backward" not in vars(trainer.accelerator)


def test_a_loss_that_was_set_on_the_trainer_outlives_the_measuring_of_its_time(tmp_path):
    trainer = SCUTrainer(tiny.small_llama(), arguments(tmp_path), train_dataset=Templates(), memory=MemorySettings())
    trainer.compute_loss = own = functools.partial(trainer.compute_loss)
    times = PartTimes(trainer)
    times.start()
    assert user_loss_above(trainer) == "this trainer"
    times.stop()
    assert trainer.compute_loss is own


def test_it_is_tried_before_it_is_done(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(SharedPrefixes, "of_rows", lambda self, output: {"last_hidden_state": output[0]})
    with caplog.at_level(logging.INFO, logger="scu_trainer"):
        trainer, _, _ = trained(tiny.small_llama, tmp_path, rows=Templates)
    statistics = trainer.micro_batches.loop.statistics
    assert statistics.processed_tokens == statistics.real_tokens
    assert caplog.text.count("go through the layers once per row: the model fails on two short rows") == 1


@pytest.mark.parametrize(("kind", "may_share"), [("cpu", True), ("cuda", False)])
def test_on_a_card_every_row_keeps_its_prefix(kind, may_share):
    args, accelerator = (
        SimpleNamespace(device=torch.device(kind)),
        SimpleNamespace(mixed_precision="no", native_amp=False),
    )
    trainer = SimpleNamespace(args=args, accelerator=accelerator, model=tiny.small_llama(), curriculum=None)
    path, batch = LossPath(trainer, "never"), pad([Templates()[index] for index in range(8)])
    path._shares_prefixes = path._shares_prefixes is None  # as if it had been tried
    path.is_planned = True
    assert (path._end_to_end(batch).prefixes is not None) is may_share


def test_padding_free_false_keeps_every_row_whole(tmp_path):
    trainer, _, seen = trained(tiny.small_llama, tmp_path, PADDED, rows=Templates)
    assert sum(rows * time for rows, time in seen) == trainer.micro_batches.loop.statistics.processed_tokens
    assert trainer.micro_batches.loop.statistics.processed_tokens >= trainer.micro_batches.loop.statistics.real_tokens


# -- in a run ----------------------------------------------------------------------------------------------------------


class TemplatesLater(Templates):
    """The first eight rows begin with nothing alike."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        return {name: value[6:] if index < 8 else value for name, value in row.items()}


class OneLengthLater(LearnedTemplates):
    """Of 12 tokens all, but for the first eight rows."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.cat([TEMPLATES[0], self.tokens[index][:6]])
        return super().__getitem__(index) if index < 8 else {"input_ids": tokens, "labels": tokens.clone()}


@pytest.mark.parametrize(("rows", "step"), [(TemplatesLater, 2), (OneLengthLater, 1)])
def test_a_run_that_goes_on_does_the_same(tmp_path, rows, step):
    changes = {"train_sampling_strategy": "sequential", "save_strategy": "steps", "save_steps": 1}
    trainer, whole, _ = trained(tiny.small_llama, tmp_path, rows=rows, **changes)
    resume = f"{tmp_path}/checkpoint-{step}"
    resumed, found = compared(
        tiny.small_llama(seed=5), tmp_path, MemorySettings(), rows(), resume=resume, **{**WINDOW, **changes}
    )
    assert same(found.weights[-1], whole.weights[-1])
    assert resumed.micro_batches.loop.statistics == trainer.micro_batches.loop.statistics


def test_what_runs_again_is_counted_once(tmp_path):
    """And its gradient is the stock one, whatever failed on the way."""
    model = MODELS["llama"]()
    with fail_in_backward(model.model.layers[0].mlp.up_proj.weight, call=1):
        trainer, found = compared(model, tmp_path / "ours", MemorySettings(), Templates(), **WINDOW)
    statistics = trainer.micro_batches.loop.statistics
    assert statistics.out_of_memory == 1
    assert 0.5 * statistics.real_tokens < statistics.processed_tokens < statistics.real_tokens
    for gradient, wanted in zip(found.gradients, stock_gradients("llama", Templates), strict=True):
        assert error_of(gradient, wanted) < 4e-6


class TemplatesAtFirst(Templates):
    """The first eight rows alone have templates."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index % 8)
        if index >= 8:
            row["input_ids"] = 3 + (row["input_ids"] + 7 * index) % (tiny.VOCAB - 3)
        return row


def test_each_step_counts_for_itself(tmp_path):
    changes = {"train_sampling_strategy": "sequential", "gradient_accumulation_steps": 2}
    trainer, _, seen = trained(tiny.small_llama, tmp_path, rows=TemplatesAtFirst, **changes)
    statistics = trainer.micro_batches.loop.statistics
    assert sum(rows * time for rows, time in seen) == statistics.processed_tokens < statistics.real_tokens


def test_the_memory_of_a_micro_batch_is_that_of_the_tokens_that_ran(tmp_path, monkeypatch):
    observed, observe = [], control.with_observation
    monkeypatch.setattr(
        control,
        "with_observation",
        lambda state, tokens, *rest: observed.append(tokens) or observe(state, tokens, *rest),
    )
    _, _, seen = trained(tiny.small_llama, tmp_path, rows=Templates, **WAYS["small micro-batches"])
    assert observed and set(observed) <= {rows * time for rows, time in seen}


def test_the_summary_shows_what_was_spared(tmp_path):
    trainer, _, _ = trained(tiny.small_llama, tmp_path, rows=Templates)
    loop = trainer.loop("memory")
    figures = loop.figures()
    assert figures["memory"]["processed_per_real"] < 1
    shown = dict(loop.lines(figures))["tokens processed per real token"]
    assert shown.startswith(f"{figures['memory']['processed_per_real']:.2f}")
