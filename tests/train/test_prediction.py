"""Evaluation and prediction on a device that is too small give the same figures, rows in the same order."""

from __future__ import annotations

import contextlib

import datasets
import numpy as np
import pytest
import torch
from transformers import BertForQuestionAnswering, BertForSequenceClassification, Trainer

from scu_trainer import with_loops
from scu_trainer.data import Collator
from scu_trainer.errors import OutOfMemory
from scu_trainer.settings import MemorySettings
from scu_trainer.train.evaluation.scoring import score_documents
from scu_trainer.train.step.batches.rows import rows_of
from scu_trainer.train.step.recovery.halving import Halving
from scu_trainer.train.trainer import SCUTrainer
from tests import tiny
from tests.faults import CPU_TEXT, FakeGauge, fail_above_tokens, fail_in_forward, oom
from tests.tiny import Examples, Rows, UnevenRows, arguments, images, labelled, pairs, same, weights_of
from tests.train.sites import Sites

BATCH = {"per_device_eval_batch_size": 8, "per_device_train_batch_size": 4}


def token_sum(outputs, labels, num_items_in_batch=None) -> torch.Tensor:
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / num_items_in_batch


def mostly_prompts() -> Examples:
    """Rows of 16 tokens of which between 1 and 15 are learned."""

    def labels(i: int, tokens: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(16) >= 1 + 11 * i % 15, tokens, -100)

    return Examples({"input_ids": row, "labels": labels(i, row)} for i, row in enumerate(Rows(21).tokens))


SUBJECTS = {
    "causal": (tiny.llama, mostly_prompts, 40, {}),
    "causal, padded": (tiny.llama, lambda: UnevenRows(21), 40, {}),
    "loss function": (tiny.gpt2, mostly_prompts, 40, {"compute_loss_func": token_sum}),
    "seq2seq": (tiny.t5, lambda: pairs(21), 40, {}),
    "classes": (lambda: tiny.bert(BertForSequenceClassification), lambda: labelled(21), 40, {}),
    "images": (tiny.vit, lambda: images(21), 3, {}),
    "dropping": (lambda: tiny.llama(layers=1, attention_dropout=0.5), mostly_prompts, 40, {}),
    "batch norm": (tiny.conv_net, lambda: images(21), 3, {}),
}


def make_trainer(name: str, folder, memory=None, **changes) -> SCUTrainer:
    make, rows, _, extra = SUBJECTS[name]
    parts = {"train_dataset": rows(), "eval_dataset": rows(), "data_collator": tiny.pad, **extra}
    for part in ("callbacks", "compute_metrics"):
        if part in changes:
            parts[part] = changes.pop(part)
    gauge = None if memory is None else FakeGauge(2**40)
    arguments_ = arguments(folder, **{**BATCH, **changes})
    return SCUTrainer(make(), arguments_, memory=memory, memory_gauge=gauge, **parts)


@contextlib.contextmanager
def too_small(trainer, name: str):
    with fail_above_tokens(trainer.model, SUBJECTS[name][2]) as tried:
        yield tried


def figures(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if not key.endswith(("runtime", "per_second", "time"))}


def mean_of_logits(prediction) -> dict[str, float]:
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"position_weighted": float((logits.sum(axis=-1).T * np.arange(len(logits))).mean())}


@pytest.mark.parametrize("name", SUBJECTS)
def test_predictions_are_the_same_in_parts(tmp_path, name):
    expected = make_trainer(name, tmp_path).predict(SUBJECTS[name][1]())
    trainer = make_trainer(name, tmp_path, MemorySettings())
    with too_small(trainer, name) as tried:
        found = trainer.predict(SUBJECTS[name][1]())
    assert trainer.prediction.halving.out_of_memory > 0
    assert figures(found.metrics) == pytest.approx(figures(expected.metrics), rel=1e-6)
    assert [leaf.shape for leaf in leaves(found.predictions)] == [leaf.shape for leaf in leaves(expected.predictions)]
    for leaf, wanted in zip(leaves(found.predictions), leaves(expected.predictions), strict=True):
        np.testing.assert_allclose(leaf, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found.label_ids, expected.label_ids)
    assert tried[-1] <= SUBJECTS[name][2]


def leaves(predictions) -> list[np.ndarray]:
    if isinstance(predictions, tuple):
        return [leaf for item in predictions for leaf in leaves(item)]
    return [predictions]


@pytest.mark.parametrize("name", ["causal", "seq2seq"])
def test_metrics_of_evaluate_are_the_same(tmp_path, name):
    """Also where only the loss is asked for, which takes another path."""
    for metrics in (None, mean_of_logits):
        expected = make_trainer(name, tmp_path, compute_metrics=metrics).evaluate()
        trainer = make_trainer(name, tmp_path, MemorySettings(), compute_metrics=metrics)
        with too_small(trainer, name):
            found = trainer.evaluate()
        assert figures(found) == pytest.approx(figures(expected), rel=1e-6)


def test_a_plain_mean_over_parts_would_be_wrong(tmp_path):
    """The rows of the causal subject are so uneven in labels that it would show."""
    trainer = make_trainer("causal", tmp_path)
    rows = [trainer.evaluate(Examples([row]))["eval_loss"] for row in SUBJECTS["causal"][1]().rows[:8]]
    whole = trainer.evaluate(Examples(SUBJECTS["causal"][1]().rows[:8]))["eval_loss"]
    assert abs(float(np.mean(rows)) - whole) > 1e-3


def costs_of_rows(model, inputs) -> torch.Tensor:
    """What a token of each row costs, (rows,)."""
    with torch.no_grad():
        logits, targets = model(**inputs).logits[:, :-1].transpose(1, 2), inputs["labels"][:, 1:]
        tokens = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return tokens.sum(1) / targets.ne(-100).sum(1).clamp(min=1)


class MeanOfRows(Trainer):
    """A score of its own: the mean of what a token of each row costs, asked for with the logits only."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        found = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if prediction_loss_only:
            return found
        return costs_of_rows(model, self._prepare_inputs(inputs)).mean(), *found[1:]


class EachRow(Trainer):
    """One loss for each row: the Trainer takes the mean of all. 21 rows in batches of 8 leave a batch of 5."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        return costs_of_rows(model, self._prepare_inputs(inputs)), None, None


@pytest.mark.parametrize("kind", [MeanOfRows, EachRow])
def test_a_prediction_step_of_ones_own_is_put_together_as_it_says_itself(tmp_path, kind):
    def scores(kind: type[Trainer], memory=None) -> list[float]:
        rows, given = mostly_prompts(), {} if memory is None else {"memory": memory, "memory_gauge": FakeGauge(2**40)}
        trainer = kind(tiny.llama(), arguments(tmp_path, **BATCH), eval_dataset=rows, data_collator=tiny.pad, **given)
        too_many = contextlib.nullcontext() if memory is None else fail_above_tokens(trainer.model, 40)
        with too_many:
            return [trainer.evaluate()["eval_loss"], trainer.predict(rows).metrics["test_loss"]]

    assert scores(with_loops(kind), MemorySettings()) == pytest.approx(scores(kind), rel=1e-6)


class OwnFormula(Trainer):
    """A loss whose parts nobody knows, and a prediction_step that gives it as training does."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs, targets = model(input_ids=inputs["input_ids"]), inputs["labels"][:, 1:]
        costs = -outputs.logits[:, :-1].log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        loss = (costs * targets.ne(-100)).sum() / targets.ne(-100).sum()
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None


def test_where_all_rows_cost_the_same_the_gradient_tells_how_a_loss_of_ones_own_adds_up(tmp_path):
    def scores(kind: type[Trainer], memory=None) -> list[float]:
        rows, given = mostly_prompts(), {} if memory is None else {"memory": memory, "memory_gauge": FakeGauge(2**40)}
        trainer = kind(tiny.llama(), arguments(tmp_path, **BATCH), data_collator=tiny.pad, **given)
        head = trainer.model.lm_head.weight.data
        learned = head.clone()
        with contextlib.nullcontext() if memory is None else fail_above_tokens(trainer.model, 40):
            head.zero_()
            first = trainer.evaluate(rows)["eval_loss"]
            head.copy_(learned)
            return [first, trainer.evaluate(rows)["eval_loss"]]

    assert scores(with_loops(OwnFormula), MemorySettings()) == pytest.approx(scores(OwnFormula), rel=1e-6)


def test_the_size_that_fitted_is_kept(tmp_path):
    trainer = make_trainer("causal", tmp_path, MemorySettings())
    with too_small(trainer, "causal") as tried:
        trainer.evaluate()
        trainer.evaluate()
    assert [size for size in tried if size > 40] == [8 * 16, 4 * 16]
    assert trainer.prediction.halving.largest_rows == 2


def test_evaluation_does_not_change_the_chunks_of_training(tmp_path):
    changes = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4, "gradient_accumulation_steps": 2}
    expected = make_trainer("causal, padded", tmp_path / "plenty", MemorySettings(), **changes)
    expected.train()
    found = make_trainer("causal, padded", tmp_path / "small", MemorySettings(), **changes)
    with fail_above_tokens(found.model, 100) as tried:  # more than any micro-batch of 4 rows, less than 8 rows
        found.train()
    assert max(tried) > 100 and found.prediction.halving.out_of_memory == 1
    assert same(weights_of(found.model), weights_of(expected.model))
    assert found.micro_batches.loop.statistics == expected.micro_batches.loop.statistics
    assert found.micro_batches.loop.state == expected.micro_batches.loop.state
    losses = [
        [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        for trainer in (found, expected)
    ]
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_row_that_does_not_fit_alone_ends_the_evaluation(tmp_path):
    trainer = make_trainer("causal", tmp_path, MemorySettings())
    with fail_above_tokens(trainer.model, 15) as tried:
        with pytest.raises(OutOfMemory, match=r"single row does not fit in memory.*block_size.*CUDA out of memory"):
            trainer.evaluate()
    assert tried == [128, 64, 32, 16, 16], "a single row is tried once more"


def test_a_device_that_holds_one_row(tmp_path):
    """How the loss adds up over rows cannot be asked then: it is taken as its signature promises."""
    expected = make_trainer("images", tmp_path).evaluate()
    trainer = make_trainer("images", tmp_path, MemorySettings())
    with fail_above_tokens(trainer.model, 1):
        found = trainer.evaluate()
    assert figures(found) == pytest.approx(figures(expected), rel=1e-6)


def test_other_errors_pass_through(tmp_path):
    trainer = make_trainer("causal", tmp_path, MemorySettings())
    with fail_in_forward(trainer.model, 1, lambda: RuntimeError("shapes do not match")):
        with pytest.raises(RuntimeError, match="shapes"):
            trainer.evaluate()


def test_without_memory_settings_it_fails_as_the_stock_trainer_does(tmp_path):
    trainer = make_trainer("causal", tmp_path)
    with too_small(trainer, "causal"), pytest.raises(torch.OutOfMemoryError):
        trainer.evaluate()


def test_logits_leave_the_device_batch_by_batch(tmp_path):
    seen = []
    trainer = make_trainer("causal", tmp_path, MemorySettings())
    step = trainer.prediction_step

    def watch(*args, **kwargs):
        seen.append(trainer.args.eval_accumulation_steps)
        return step(*args, **kwargs)

    trainer.prediction_step = watch
    trainer.predict(mostly_prompts())
    assert seen == [1, 1, 1] and trainer.args.eval_accumulation_steps is None


# -- documents ---------------------------------------------------------------------------------------------------------


def documents() -> datasets.Dataset:
    tokens = [UnevenRows(12)[i]["input_ids"].tolist() for i in range(12)]
    return datasets.Dataset.from_dict(
        {
            "input_ids": tokens,
            "labels": [[-100, *row[1:]] for row in tokens],
            "document": [i // 3 for i in range(12)],
            "length": [len(row) for row in tokens],
        }
    )


def test_documents_are_scored_alike_in_parts():
    model, rows = tiny.llama(), documents()
    expected = score_documents(model, rows, Collator())
    with fail_above_tokens(model, 40, lambda: oom(CPU_TEXT)) as tried:
        found = score_documents(model, rows, Collator())
    assert max(tried) > 40
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.nats == pytest.approx(expected.nats, rel=1e-6)


def test_halving_covers_every_row_once_and_in_order():
    halving, tried = Halving(), []

    def attempt(part: range) -> list[int]:
        tried.append(len(part))
        if len(part) > 3:
            raise oom()
        return list(part)

    results = halving.run(13, attempt)
    assert [row for _, rows in results for row in rows] == list(range(13))
    assert tried == [13, 6, 3, 3, 3, 3, 1] and halving.out_of_memory == 2
    assert [len(part) for part, _ in halving.run(7, attempt)] == [3, 3, 1]


# -- a fault at any place of an evaluation -----------------------------------------------------------------------------


def run_with_faults(folder, sites: Sites, name: str = "causal", rows: int | None = None, **changes):
    """Metrics and predictions. ``rows``: parts of so many, as after an earlier out-of-memory."""
    trainer = make_trainer(name, folder, MemorySettings(), compute_metrics=mean_of_logits, **changes)
    trainer.prediction.halving.largest_rows = rows
    sites.watch_evaluation(trainer)
    found = trainer.predict(SUBJECTS[name][1]())
    return [figures(found.metrics), *leaves(found.predictions), found.label_ids]


def same_results(found, expected) -> bool:
    return found[0] == expected[0] and all(map(np.array_equal, found[1:], expected[1:]))


PLACES = {"join": 4, "between batches": None, "forward": 1}
"""What fails, and in parts of how many rows: of single rows the same ones run again."""


@pytest.mark.parametrize("kind", PLACES)
def test_a_fault_outside_of_a_forward_or_at_a_single_row_changes_nothing(tmp_path, kind):
    dry = Sites(only=kind)
    expected = run_with_faults(tmp_path, dry, rows=PLACES[kind])
    for number in sorted({0, dry.count // 2, dry.count - 1}):
        sites = Sites(number, only=kind)
        found = run_with_faults(tmp_path, sites, rows=PLACES[kind])
        assert sites.failed_kinds == [kind] and same_results(found, expected), f"{number} of {dry.count}"


RECOVERIES = {
    "join": ("scu_trainer.train.step.prediction.second_try", lambda function, *rest: function()),
    "between batches": ("scu_trainer.train.step.prediction.Prediction._can_start_over", lambda self, loader: False),
}


@pytest.mark.parametrize("kind", RECOVERIES)
def test_each_of_these_recoveries_is_needed(tmp_path, monkeypatch, kind):
    dry = Sites(only=kind)
    run_with_faults(tmp_path, dry, rows=PLACES[kind])
    for name in RECOVERIES if kind == "join" else [kind]:  # without its own the whole evaluation begins again
        monkeypatch.setattr(*RECOVERIES[name])
    with pytest.raises(OutOfMemory, match=r"^evaluation ran out of memory where nothing can be repeated \(") as caught:
        run_with_faults(tmp_path, Sites(dry.count - 1, only=kind), rows=PLACES[kind])
    assert "\n" not in str(caught.value) and "max_batch_size" in str(caught.value)


def test_an_evaluation_that_fails_twice_ends_in_one_line(tmp_path):
    with pytest.raises(OutOfMemory, match="evaluation ran out of memory"):
        run_with_faults(tmp_path, Sites(range(1000), only="between batches"))


def test_metrics_that_were_told_of_batches_are_not_told_again(tmp_path):
    told = []

    def by_batch(prediction, compute_result: bool) -> dict[str, float]:
        told.append(len(prediction.label_ids))
        if len(told) == 2:
            raise oom()
        return {}

    changes = {"compute_metrics": by_batch, "batch_eval_metrics": True}
    trainer = make_trainer("causal", tmp_path, MemorySettings(), **changes)
    with pytest.raises(OutOfMemory, match="evaluation ran out of memory"):
        trainer.evaluate()
    assert told == [8, 8]


def test_an_evaluation_that_begins_again_leaves_the_random_numbers_of_training(tmp_path):
    """Its loader draws a seed each time it is read; dropout in training draws from the same generator."""

    def trained(folder, number) -> dict[str, torch.Tensor]:
        sites = Sites(number, only="between batches")
        changes = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 3, "compute_metrics": mean_of_logits}
        trainer = make_trainer("dropping", folder, MemorySettings(), **changes)
        sites.watch_evaluation(trainer)
        trainer.train()
        assert len(sites.raised) == (number == 1)
        return weights_of(trainer.model)

    assert same(trained(tmp_path / "faulty", 1), trained(tmp_path / "plain", ()))


def test_a_batch_that_cannot_be_cut_is_tried_once_more(tmp_path):
    expected = make_trainer("causal", tmp_path).evaluate()
    trainer = make_trainer("causal", tmp_path, MemorySettings())
    trainer.data_collator = lambda rows: {**tiny.pad(rows), "notes": {"not": "rows"}}
    with fail_in_forward(trainer.model, 1) as forwards:
        assert figures(trainer.evaluate()) == figures(expected)
    assert forwards.calls == 4
    told = r"cannot be cut by rows \(notes is a mapping.*per_device_eval_batch_size"
    with fail_above_tokens(trainer.model, 1), pytest.raises(OutOfMemory, match=told):
        trainer.evaluate()


def test_images_of_other_rows_are_not_cut_away_from_them(tmp_path):
    trainer = make_trainer("causal", tmp_path, MemorySettings())
    rows = [trainer.eval_dataset[0] for _ in range(4)]
    trainer.model.config.image_token_id = int(rows[0]["input_ids"][0])
    batch = tiny.pad(rows)
    batch["input_ids"][1] = trainer.model.config.image_token_id + 1
    batch["pixel_values"] = torch.rand(4, 3, 2, 2)
    assert trainer.prediction._obstacle(rows_of(trainer.model, batch), None).endswith("some rows have no image")
    trainer.prediction.halving.largest_rows, parts = 1, []  # an earlier batch was cut
    trainer.prediction.step(
        batch, lambda part: parts.append(len(part["input_ids"])) or (torch.ones(()), None, None), True
    )
    assert parts == [4]


class Decayed(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + 0.01 * sum((p**2).sum() for p in model.parameters())
        return (loss, outputs) if return_outputs else loss


def test_losses_of_parts_that_are_added_up_are_not_called_a_mean(tmp_path, caplog):
    trainer = with_loops(Decayed)(
        tiny.llama(), arguments(tmp_path, **BATCH), memory=MemorySettings(), data_collator=tiny.pad
    )
    with fail_above_tokens(trainer.model, 40):
        trainer.evaluate(mostly_prompts())
    assert "eval_loss is the sum over parts of a batch: the loss of several rows does not follow" in caplog.text


def test_a_mean_that_leaves_a_row_out_is_said_of_an_evaluation_in_parts(tmp_path, caplog):
    def answered(i: int, start: int) -> dict[str, torch.Tensor]:
        return {"input_ids": Rows().tokens[i], "start_positions": torch.tensor(start), "end_positions": torch.tensor(3)}

    trainer = SCUTrainer(
        tiny.bert(BertForQuestionAnswering),
        arguments(tmp_path, **BATCH),
        memory=MemorySettings(),
        data_collator=tiny.pad,
    )
    with fail_above_tokens(trainer.model, 4 * 16):
        trainer.evaluate(Examples(answered(i, i % 3) for i in range(8)))
        assert "a mean over parts" not in caplog.text
        for _ in range(2):
            trainer.evaluate(Examples(answered(i, 40 if i == 6 else i % 3) for i in range(8)))
    assert caplog.text.count("mean over parts of a batch: in some batches start_positions leaves rows out") == 1
