"""Held-out rows without logits and padding: the figures of the logits, and the logits wherever somebody needs them.

This file is also the program that two processes execute.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM, Trainer

from scu_trainer.control.splitting import rounded_up_size
from scu_trainer.data import Collator
from scu_trainer.settings import MemorySettings
from scu_trainer.train.evaluation.scoring import bpt_metrics, evaluation_path_of, score_documents
from scu_trainer.train.loss import evaluation_path
from scu_trainer.train.loss.evaluation_path import EvaluationPath
from scu_trainer.train.loss.rows import padding_free
from scu_trainer.train.loss.rows.model_loss import head_of, inner_model
from scu_trainer.train.loss.rows.row_readings import preprocess_logits, row_scores
from scu_trainer.train.trainer import SCUTrainer, with_loops
from tests import processes, tiny
from tests.faults import FakeGauge, fail_above_tokens
from tests.tiny import Examples, UnevenRows, arguments, pad
from tests.train.test_padding_free import Leaky, gemma3, opt

ALWAYS = MemorySettings(chunked_loss="always")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ENDS = {"vocab_size": tiny.VOCAB, "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1}


def scaled_logits() -> CohereForCausalLM:
    """They are multiplied after the head."""
    torch.manual_seed(0)
    return CohereForCausalLM(CohereConfig(logit_scale=0.25, **SIZES, **ENDS))


def capped_logits() -> Gemma2ForCausalLM:
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(head_dim=8, num_key_value_heads=4, **SIZES, **ENDS))


def batch_of(rows: int = 6, prompts: bool = True) -> dict[str, torch.Tensor]:
    batch = pad([UnevenRows(rows)[i] for i in range(rows)])
    batch.pop("sample_index", None)
    if prompts:
        batch["labels"][:, :3] = -100
    return batch


@contextlib.contextmanager
def shapes(model):
    """(what the body got (rows, time), width of what came from the head) of each forward of ``model``."""
    seen = SimpleNamespace(body=[], head=[])
    body = inner_model(model).base_model
    layer = (getattr(body, "layers", None) or getattr(body, "h", None) or body.decoder.layers)[0]
    handles = [
        layer.register_forward_pre_hook(lambda module, given: seen.body.append(tuple(given[0].shape[:2]))),
        head_of(model).register_forward_hook(lambda module, given, output: seen.head.append(output.size(-1))),
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


MODELS = {
    "llama": (tiny.llama, True, True),
    "absolute positions": (tiny.gpt2, True, True),
    "lora": (lambda: tiny.lora(tiny.llama()), True, True),
    "eager attention": (lambda: tiny.llama(attn_implementation="eager"), True, False),
    "layers with a state": (tiny.granite_hybrid, None, False),
    "positions from the mask": (opt, True, False),
    "scaled logits": (scaled_logits, True, True),
    "capped logits": (capped_logits, True, False),
}
"""How it is made, whether it can do without logits (None: either), and without padding."""


@pytest.mark.parametrize("name", MODELS)
def test_rows_have_the_losses_that_the_logits_give(name, caplog):
    caplog.set_level(logging.INFO, logger="scu_trainer")
    make, without_logits, without_padding = MODELS[name]
    model, batch = make().eval(), batch_of()
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    path = EvaluationPath(model, fewest_words=0)
    with torch.no_grad():
        expected = row_scores(model(**inputs).logits, batch["labels"])
        path.scores(inputs, batch["labels"])  # asks the model
        with shapes(model) as seen:
            found = path.scores(inputs, batch["labels"])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
    tokens = int(batch["attention_mask"].sum())
    assert seen.body == [(1, tokens) if without_padding else tuple(batch["labels"].shape)]
    if without_logits is not None:
        assert path.makes_logits is not without_logits
        assert (seen.head == [tiny.VOCAB]) is not without_logits
    # What is known beforehand is not said: it is no finding.
    assert ("padding is kept" in caplog.text) is (name == "positions from the mask")


def test_rows_beyond_a_sliding_window_are_padded():
    model = gemma3(window=8).eval()
    path = EvaluationPath(model)
    for columns, is_padded in ((13, True), (8, False)):
        batch = {name: value[:, :columns] for name, value in batch_of().items()}
        labels = batch.pop("labels")
        with torch.no_grad(), shapes(model) as seen:
            expected = row_scores(model(**batch).logits, labels)
            torch.testing.assert_close(path.scores(batch, labels), expected, rtol=1e-6, atol=1e-5)
        assert (seen.body[-1][0] > 1) is is_padded


@pytest.mark.parametrize("how", ["float32", "autocast", "prepared"])
def test_the_model_is_asked_in_the_precision_that_it_computes_in(monkeypatch, how):
    """Else rounding would look like another loss."""
    asked = []
    monkeypatch.setattr(evaluation_path, "agrees_on_rows", lambda *given: asked.append(given[2]) or (True, None))
    model, batch = tiny.llama().eval(), batch_of()
    if how == "prepared":  # as accelerate does
        forward = model._original_forward = model.forward
        model.forward = torch.autocast("cpu", torch.bfloat16)(forward)
    labels = batch.pop("labels")
    with torch.autocast("cpu", torch.bfloat16) if how == "autocast" else contextlib.nullcontext():
        evaluation_path_of(model).scores(batch, labels)
    assert asked == [how != "float32"]


@pytest.mark.parametrize("is_half", [False, True])
def test_in_half_precision_the_layers_see_few_sizes(is_half):
    """oneDNN compiles kernels for each; in float32 none is."""
    model, batch = tiny.llama().eval(), batch_of()
    tokens, labels = int(batch["attention_mask"].sum()), batch.pop("labels")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_half):
        path = evaluation_path_of(model)
        expected = row_scores(model(**batch).logits, labels)
        path.scores(batch, labels)  # asks the model
        with shapes(model) as seen:
            found = path.scores(batch, labels)
    assert tokens % 8 and seen.body == [(1, rounded_up_size(tokens) if is_half else tokens)]
    torch.testing.assert_close(found, expected, rtol=1e-2 if is_half else 1e-6, atol=1e-5)


@pytest.mark.parametrize("kind", ["few words", "never"])
def test_logits_are_made_of_small_vocabularies_and_where_it_is_said(kind):
    path = EvaluationPath(tiny.llama(), **({} if kind == "few words" else {"fewest_words": None}))
    assert path.makes_logits


def test_rows_without_padding_are_not_asked_about(monkeypatch):
    """What a model does with rows end to end is asked where there are such."""
    asked = []
    monkeypatch.setattr(evaluation_path, "agrees_on_rows", lambda *given: asked.append(given) or (True, None))
    batch = {name: value[:, :4] for name, value in batch_of(prompts=False).items()}
    labels = batch.pop("labels")
    EvaluationPath(tiny.llama()).scores(batch, labels)
    assert not asked


def test_prefixes_are_not_asked_about_where_the_padding_is_kept(monkeypatch):
    asked = []
    monkeypatch.setattr(evaluation_path, "agrees_on_rows", lambda *given: asked.append(given[2:]) or (False, None))
    batch = batch_of()
    batch["input_ids"] = batch["input_ids"][-1:].expand(6, -1).clone()
    rows = padding_free.end_to_end(batch, shares_prefixes=True)
    labels = batch.pop("labels")
    EvaluationPath(tiny.llama()).scores(batch, labels)
    assert rows.prefixes is not None and asked == [(False, True, False)]


def test_a_row_that_changes_the_next_a_little_keeps_the_padding(caplog):
    model = tiny.llama().to(torch.bfloat16)
    model.model.layers[0].mlp = Leaky(model.model.layers[0].mlp)
    batch = batch_of()
    labels = batch.pop("labels")
    with caplog.at_level(logging.INFO, logger="scu_trainer"), torch.no_grad(), shapes(model) as seen:
        EvaluationPath(model).scores(batch, labels)
    assert seen.body[-1] == tuple(labels.shape)
    assert "in evaluation padding is kept: one row changes the states of the next by" in caplog.text


def test_rows_that_see_each_other_keep_the_padding(monkeypatch, caplog):
    given = {padding_free.ROWS: None, "attention_mask": None, "position_ids": None}
    right = padding_free._sdpa_arguments
    monkeypatch.setattr(padding_free, "_sdpa_arguments", lambda rows: {**right(rows), **given})
    model, batch = tiny.llama().eval(), batch_of()
    labels = batch.pop("labels")
    with caplog.at_level(logging.INFO, logger="scu_trainer"), torch.no_grad():
        expected = row_scores(model(**batch).logits, labels)
        assert torch.equal(EvaluationPath(model).scores(batch, labels), expected)
    assert "in evaluation padding is kept: it gives" in caplog.text


def test_documents_are_scored_without_logits(monkeypatch):
    """And more rows at once: there are no logits that would limit them."""
    monkeypatch.setattr("scu_trainer.train.evaluation.scoring.LARGEST_LOGITS", 20 * tiny.VOCAB)
    rows = [{**UnevenRows(12)[i], "document": i // 2} for i in range(12)]

    class Held:
        def __getitem__(self, key):
            if isinstance(key, str):
                return [len(row["input_ids"]) if key == "length" else row[key] for row in rows]
            return {name: value for name, value in rows[key].items() if name in ("input_ids", "labels")}

    model = tiny.llama()
    with shapes(model) as from_logits:
        expected = score_documents(model, Held(), Collator(pad_token_id=2))
    with shapes(model) as seen:
        path = EvaluationPath(model, fewest_words=0)
        found = score_documents(model, Held(), Collator(pad_token_id=2), path=path)
    np.testing.assert_allclose(found.nats, expected.nats, rtol=1e-6)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert len(from_logits.body) > len(seen.body) and seen.body[-1] == (1, sum(len(row["input_ids"]) for row in rows))


# -- the trainer -------------------------------------------------------------------------------------------------------


def trainer_of(folder, memory=None, kind=SCUTrainer, model=None, **parts) -> SCUTrainer:
    changes = parts.pop("changes", {})
    given = {"data_collator": pad, "eval_dataset": UnevenRows(21), "train_dataset": UnevenRows(), **parts}
    gauge = {} if memory is None else {"memory_gauge": FakeGauge(2**40)}
    args = arguments(folder, **{"per_device_eval_batch_size": 8, **changes})
    return kind(model or tiny.llama(), args, memory=memory, **gauge, **given)


BITS = {"compute_metrics": bpt_metrics, "preprocess_logits_for_metrics": preprocess_logits}
FIGURES = ("eval_loss", "eval_bpt", "eval_perplexity")


def figures(metrics: dict) -> list[float]:
    return [metrics[name] for name in FIGURES if name in metrics]


@pytest.mark.parametrize("parts", [{}, BITS], ids=["loss alone", "bits per token"])
@pytest.mark.parametrize("memory", [MemorySettings(), ALWAYS], ids=["small vocabulary", "chunked"])
def test_an_evaluation_gives_the_stock_figures_without_padding(tmp_path, memory, parts):
    expected = trainer_of(tmp_path, **parts).evaluate()
    trainer = trainer_of(tmp_path, memory, **parts)
    trainer.evaluate()
    with shapes(trainer.model) as seen:
        found = trainer.evaluate()
    assert figures(found) == pytest.approx(figures(expected), rel=1e-6) and len(figures(found)) == 1 + len(parts)
    assert all(rows == 1 for rows, _ in seen.body[-3:])  # three batches, after the question
    assert set(seen.head[-3:]) == {32 if memory is ALWAYS else tiny.VOCAB}


def test_while_training_as_well(tmp_path):
    changes = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    runs = [trainer_of(tmp_path / str(i), memory, changes=changes, **BITS) for i, memory in enumerate((None, ALWAYS))]
    for trainer in runs:
        trainer.train()
    expected, found = ([figures(row) for row in run.state.log_history if "eval_loss" in row] for run in runs)
    assert len(found) == 3
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("memory", [MemorySettings(), ALWAYS], ids=["small vocabulary", "chunked"])
def test_in_parts_where_memory_is_short(tmp_path, memory):
    """Some parts have padding and others have none."""
    expected = trainer_of(tmp_path, **BITS).evaluate()
    trainer = trainer_of(tmp_path, memory, **BITS)
    with fail_above_tokens(trainer.model, 40):
        found = trainer.evaluate()
    assert trainer.prediction.halving.out_of_memory > 0
    assert figures(found) == pytest.approx(figures(expected), rel=1e-6)


def mixed_rows() -> Examples:
    """Of which the first of two ranks gets batches with padding, the second batches without."""
    rows = [UnevenRows(14)[i] for i in range(14)]
    cut = [{name: value[:4] for name, value in row.items()} for row in rows]
    return Examples((rows if i // 2 % 2 == 0 else cut)[i] for i in range(14))


def on_ranks(folder: Path) -> None:
    changes = {"per_device_eval_batch_size": 2, "ddp_timeout": 60}
    found = {}
    for name, memory in {"stock": None, "ours": MemorySettings(), "chunked": ALWAYS}.items():
        parts = {"eval_dataset": mixed_rows(), **BITS}
        found[name] = figures(trainer_of(folder / name, memory, changes=changes, **parts).evaluate())
    torch.save(found, folder / f"rank{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


def test_on_two_ranks_of_which_one_has_padding(tmp_path):
    done = processes.run([__file__, tmp_path], ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert first == second and len(first["stock"]) == 3
    for name in ("ours", "chunked"):
        assert first[name] == pytest.approx(first["stock"], rel=1e-6)


def mean_logit(prediction) -> dict[str, float]:
    return {"mean": float(np.abs(prediction.predictions).mean())}


class Predicts(SCUTrainer):
    """Predictions of somebody's own, from the logits."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        with torch.no_grad():
            _, outputs = self.compute_loss(model, inputs, return_outputs=True)
        return outputs.logits.square().mean(), None, None


class PredictsBelow(Trainer):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            loss, outputs = self.compute_loss(model, self._prepare_inputs(inputs), return_outputs=True)
        assert outputs.logits.shape == (*inputs["labels"].shape, tiny.VOCAB)
        return loss, None, None


class Crops(SCUTrainer):
    """Rows as the model gets them are not those of the loader."""

    def _prepare_inputs(self, inputs):
        return {name: value[:, :6] for name, value in super()._prepare_inputs(inputs).items()}


class ReadsLogits(SCUTrainer):
    """A loss of somebody's own, from the logits."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        assert outputs.logits.shape == (*inputs["labels"].shape, tiny.VOCAB)
        loss = loss + outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


def squares(logits, labels=None) -> torch.Tensor:
    return logits.square()


def mean_square(outputs, labels, num_items_in_batch=None) -> torch.Tensor:
    return outputs.logits.square().mean()


NEED_LOGITS = {
    "metrics": {"compute_metrics": mean_logit},
    "squares for metrics": {"preprocess_logits_for_metrics": squares, "compute_metrics": mean_logit},
    "a loss of somebody's own": {"kind": ReadsLogits},
    "predictions of somebody's own": {"kind": Predicts},
    "predictions below": {"kind": with_loops(PredictsBelow)},
    "a loss function": {"compute_loss_func": mean_square},
    "label smoothing": {"changes": {"label_smoothing_factor": 0.1}},
    "never, and padded": {"memory": MemorySettings(chunked_loss="never", padding_free=False)},
}


@pytest.mark.parametrize("name", NEED_LOGITS)
def test_who_needs_logits_gets_them(tmp_path, name):
    parts = {"memory": MemorySettings(), **NEED_LOGITS[name]}
    expected = trainer_of(tmp_path, **{**parts, "memory": None}).evaluate()
    found = trainer_of(tmp_path, **parts).evaluate()
    timed = ("runtime", "per_second", "time")
    assert {k: v for k, v in found.items() if not k.endswith(timed)} == {
        k: v for k, v in expected.items() if not k.endswith(timed)
    }


def test_rows_are_those_that_the_model_gets(tmp_path):
    expected, found = (
        trainer_of(tmp_path, memory, kind=Crops).evaluate()["eval_loss"] for memory in (None, MemorySettings())
    )
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_loss_that_is_put_into_the_trainer_sees_logits(tmp_path):
    trainer = trainer_of(tmp_path, MemorySettings())
    of_class, seen = trainer.compute_loss, []

    def compute_loss(model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = of_class(model, inputs, True, num_items_in_batch)
        seen.append(outputs.logits.shape == (*inputs["labels"].shape, tiny.VOCAB))
        return (loss, outputs) if return_outputs else loss

    trainer.compute_loss = compute_loss
    trainer.evaluate()
    assert seen == [True] * 3


def test_after_an_evaluation_the_model_gives_logits_again(tmp_path):
    trainer, batch = trainer_of(tmp_path, MemorySettings()), batch_of()
    trainer.evaluate()
    _, outputs = trainer.compute_loss(trainer.model.eval(), batch, return_outputs=True)
    assert outputs.logits.shape == (*batch["labels"].shape, tiny.VOCAB)


def test_a_trainer_below_that_computes_the_loss_itself_gets_logits(tmp_path):
    """TRL's, and somebody's own."""

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            loss = outputs.logits.float().logsumexp(-1).mean()
            return (loss, outputs) if return_outputs else loss

    kind = with_loops(Own)
    expected, found = (
        trainer_of(tmp_path, memory, kind=kind).evaluate()["eval_loss"] for memory in (None, MemorySettings())
    )
    assert found == expected


def test_padding_is_kept_where_it_is_said(tmp_path):
    trainer = trainer_of(tmp_path, MemorySettings(padding_free=False))
    with shapes(trainer.model) as seen:
        trainer.evaluate()
    assert all(rows > 1 for rows, _ in seen.body)


def test_predictions_are_logits_and_rows_without_labels_are_predicted(tmp_path):
    stock, ours = trainer_of(tmp_path), trainer_of(tmp_path, MemorySettings())
    np.testing.assert_array_equal(*(t.predict(UnevenRows(9)).predictions for t in (stock, ours)))

    def unlabelled(rows):
        return {name: value for name, value in pad(rows).items() if name != "labels"}

    for trainer in (stock, ours):
        trainer.data_collator = unlabelled
    np.testing.assert_array_equal(*(t.predict(UnevenRows(9)).predictions for t in (stock, ours)))


def test_a_model_that_was_changed_is_asked_again(tmp_path):
    """By what is trained, or by hand."""
    trainer = trainer_of(tmp_path, MemorySettings())
    trainer.evaluate()
    trainer.model.set_attn_implementation("eager")
    assert trainer.evaluate()["eval_loss"] == trainer_of(tmp_path, model=trainer.model).evaluate()["eval_loss"]


def test_adapters_that_transformers_has_added(tmp_path, monkeypatch):
    # transformers may ask for a peft that is newer than the one in constraints.txt, which adds the same
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0")
    model = tiny.llama()
    model.add_adapter(LoraConfig(target_modules=["q_proj"]))
    expected = trainer_of(tmp_path, model=model).evaluate()["eval_loss"]
    trainer = trainer_of(tmp_path, ALWAYS, model=model, changes={"max_steps": 1})
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    trainer.train()


def test_a_compiled_model_is_left_alone(monkeypatch):
    """It has a graph of its own, in which nothing can be replaced batch by batch."""
    asked = []
    monkeypatch.setattr(evaluation_path, "agrees_on_rows", lambda *given: asked.append(given) or (True, None))
    model = tiny.llama()
    model.compile(backend="eager")
    assert EvaluationPath(model, fewest_words=0).makes_logits and not asked


def test_positions_that_depend_on_the_padding_keep_it():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model, batch = tiny.llama(rope_parameters=rope).eval(), batch_of()
    labels = batch.pop("labels")
    with torch.no_grad(), shapes(model) as seen:
        EvaluationPath(model).scores(batch, labels)
    assert seen.body == [tuple(labels.shape)]


@pytest.mark.parametrize("missing", ["attention_mask", "labels"])
def test_a_batch_that_says_none_is_no_batch_of_rows(missing):
    assert padding_free.end_to_end({**batch_of(), missing: None}) is None


def test_another_model_is_asked_anew(tmp_path):
    models = [tiny.llama(), tiny.llama(seed=1, attn_implementation="eager")]
    trainer = trainer_of(tmp_path, MemorySettings(), model=models[0], **BITS)
    trainer.evaluate()
    trainer.model = models[1]
    expected = trainer_of(tmp_path, model=models[1], **BITS).evaluate()
    assert figures(trainer.evaluate()) == figures(expected)


@pytest.mark.parametrize("fewest_words", [1, None])
def test_learned_tokens_before_a_row_are_not_scored(fewest_words):
    """Of prompt tuning: the logits have more rows than the labels."""
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = get_peft_model(tiny.llama(), prompt).eval()
    rows = torch.randint(3, tiny.VOCAB, (2, 10), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
    with torch.no_grad():
        expected = row_scores(model(**inputs).logits[:, 4:], rows)
        found = EvaluationPath(model, fewest_words=fewest_words).scores(inputs, rows)
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=0)


if __name__ == "__main__":
    on_ranks(Path(sys.argv[1]))
