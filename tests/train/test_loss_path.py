"""Losses of rows from the forward that trains, the chunked loss, and weights of rows, against sums made by hand."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import BertForSequenceClassification, Gemma2Config, Gemma2ForCausalLM, GPT2LMHeadModel

from scu_trainer.errors import SettingsError
from scu_trainer.settings import CurriculumSettings, MemorySettings
from scu_trainer.train.loss.rows.model_loss import has_causal_loss, headless
from scu_trainer.train.trainer import SCUTrainer
from tests.faults import fail_in_forward
from tests.tiny import UnevenRows, arguments, bert, gpt2, granite_hybrid, labelled, llama, lora, pad
from tests.train.curricula import SGD, curriculum_run
from tests.train.stepwise import compared, error_of

CHUNKED = MemorySettings(memory_control=False, chunked_loss="always")
"""Stock steps, with the chunked loss."""

WITHOUT_AN_EPOCH_OF_ITS_OWN = {"max_steps": 1, "gradient_accumulation_steps": 2}


def token_sums(model, batch) -> torch.Tensor:
    """Summed loss of each row, with gradient: the textbook's formula on whole logits."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"][:, 1:]
    return cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="none").sum(dim=1)


def class_losses(model, batch) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return cross_entropy(logits, batch["labels"], reduction="none")


def learned(batch) -> torch.Tensor:
    return (batch["labels"][:, 1:] != -100).sum(dim=1)


def batch_of(data, ids):
    return pad([data[int(row)] for row in ids])


def with_weights(model, weights):
    model.load_state_dict(weights, strict=False)
    return model.eval()


# -- difficulty --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [None, CHUNKED, MemorySettings()], ids=["stock", "chunked", "memory"])
def test_scores_are_the_moving_average_of_each_rows_own_loss(tmp_path, memory):
    settings, forwards = CurriculumSettings(difficulty_alpha=0.4), []

    def count_forwards(trainer):
        def count(module, args, given):
            if torch.is_grad_enabled():
                forwards.append(len(given["input_ids"]))

        trainer.model.register_forward_pre_hook(count, with_kwargs=True)

    trainer = curriculum_run(tmp_path, settings, memory=memory, prepare=count_forwards, **SGD)
    assert (trainer.loss_path.kind == "headless") == (memory is CHUNKED)
    scores, weights = numpy.full(12, numpy.nan), [None, *trainer.recorder.weights]
    for (_, batches), before in zip(trainer.planned_steps(), weights, strict=False):
        model = llama(layers=1) if before is None else with_weights(llama(layers=1), before)
        for ids in batches:
            batch = batch_of(UnevenRows(12), ids)
            with torch.no_grad():
                means = (token_sums(model, batch) / learned(batch)).numpy()
            old = scores[ids]
            scores[ids] = numpy.where(numpy.isnan(old), means, old + 0.4 * (means - old))
    numpy.testing.assert_allclose(trainer.difficulty.scores, scores, rtol=1e-5)
    assert trainer.difficulty.observations.tolist() == [3] * 12
    if memory is None or not memory.memory_control:  # memory control asks a model about its batches once
        assert sum(forwards) == 3 * 12 and len(forwards) == 3 * 6


# -- the chunked loss --------------------------------------------------------------------------------------------------


def gemma():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": 64, "pad_token_id": 2}
    return Gemma2ForCausalLM(Gemma2Config(final_logit_softcapping=0.1, initializer_range=0.2, **sizes))


MODELS = {
    "llama": llama,
    "gpt2 with tied embeddings": gpt2,
    "granite hybrid with scaled logits": granite_hybrid,
    "gemma with soft-capped logits": gemma,
    "lora": lambda: lora(llama()),
    "lora on the head": lambda: lora(llama(layers=1), modules_to_save=["lm_head"]),
}


@pytest.mark.parametrize("name", [name for name in MODELS if name != "lora on the head"])
@pytest.mark.parametrize("curriculum", [None, "none"])
def test_the_chunked_loss_gives_the_stock_gradient(tmp_path, name, curriculum):
    stock, expected = compared(MODELS[name](), tmp_path, dataset=UnevenRows(12), **WITHOUT_AN_EPOCH_OF_ITS_OWN)
    ours = curriculum_run(
        tmp_path,
        curriculum,
        model=MODELS[name](),
        memory=CHUNKED,
        logging_steps=1,
        **{**SGD, **WITHOUT_AN_EPOCH_OF_ITS_OWN, "per_device_train_batch_size": 4},
    )
    assert ours.loss_path.kind == "headless"
    assert error_of(ours.recorder.gradients[0], expected.gradients[0]) < 1e-6
    assert ours.state.log_history[0]["loss"] == pytest.approx(stock.state.log_history[0]["loss"], rel=1e-6)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "lora on the head"])
def test_in_double_precision_it_is_the_formula(tmp_path, name):
    """The stock loss itself rounds to single precision."""
    changes = {**SGD, **WITHOUT_AN_EPOCH_OF_ITS_OWN}
    trainer = curriculum_run(tmp_path, "none", model=MODELS[name]().double(), memory=CHUNKED, **changes)
    (_, batches), *_ = trainer.planned_steps()
    batches = [batch_of(UnevenRows(12), ids) for ids in batches]
    model = MODELS[name]().double()
    loss = sum(token_sums(model, batch).sum() for batch in batches) / sum(learned(batch).sum() for batch in batches)
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert error_of(trainer.recorder.gradients[0], expected) < 1e-12


def test_small_vocabularies_are_left_alone(tmp_path):
    trainer = curriculum_run(tmp_path, None, memory=MemorySettings(), max_steps=1)
    assert trainer.loss_path.kind != "headless"


def test_large_vocabularies_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr("scu_trainer.train.loss.loss_path.LARGE_VOCABULARY", 64)
    trainer = curriculum_run(tmp_path, None, memory=MemorySettings(), max_steps=1)
    assert trainer.loss_path.kind == "headless"


class Softcapped(GPT2LMHeadModel):
    """Bounds its logits, which shows in large ones only."""

    def forward(self, labels=None, **kwargs):
        outputs = super().forward(**kwargs)
        outputs["logits"] = 30 * torch.tanh(outputs["logits"] / 30)
        if labels is not None:
            outputs["loss"] = self.loss_function(outputs["logits"], labels, self.config.vocab_size)
        return outputs


def softcapped(**changes):
    model = gpt2(initializer_range=0.001)
    model.config.update(changes)
    return Softcapped(model.config)


class Shrinking(GPT2LMHeadModel):
    """Its loss is not that of its head's logits, and nothing says so."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        if outputs.get("loss") is not None and outputs["logits"].size(-1) == 64:
            outputs["loss"] = outputs["loss"] * 0.5
        return outputs


def shrinking():
    return Shrinking(gpt2().config)


@pytest.mark.parametrize(
    ("make", "changes", "reason"),
    [
        (softcapped, {"remove_unused_columns": False}, "it gives .* where this model's own loss is"),
        (
            lambda: softcapped(logits_soft_cap=30.0),
            {},
            "the logits are soft-capped in a way that cannot be switched off",
        ),
        (shrinking, {"remove_unused_columns": False}, "it gives .* where this model's own loss is"),
        (llama, {"label_smoothing_factor": 0.1}, "label_smoothing_factor change it"),
        (
            llama,
            {"compute_loss_func": lambda outputs, labels, **kwargs: outputs["loss"]},
            "does not compute the stock loss",
        ),
        (MODELS["lora on the head"], {}, "the output head is a ModulesToSaveWrapper"),
        (
            lambda: bert(BertForSequenceClassification),
            {"data": labelled(12)},
            "BertForSequenceClassification does not compute the stock loss",
        ),
    ],
    ids=[
        "softcapped",
        "says that it is softcapped",
        "another loss",
        "label smoothing",
        "compute_loss_func",
        "adapted head",
        "classification",
    ],
)
def test_chunked_loss_is_refused_where_it_would_not_be_the_models(tmp_path, make, changes, reason):
    with pytest.raises(SettingsError, match=f"chunked_loss: always, but .*{reason}.*; use chunked_loss: auto or never"):
        curriculum_run(tmp_path, None, model=make(), memory=CHUNKED, max_steps=1, **changes)


def test_the_models_own_head_and_loss_are_there_again(tmp_path):
    """After a forward and after one that failed."""
    model = llama(layers=1)
    own_loss, batch = model.loss_function, batch_of(UnevenRows(12), range(3))
    with headless(model, None, lambda losses: None):
        assert model(**batch)["logits"].size(-1) == 32, "hidden states in place of logits"
    with pytest.raises(ZeroDivisionError), fail_in_forward(model.lm_head, 4, ZeroDivisionError) as counter:
        curriculum_run(tmp_path, "none", model=model, memory=CHUNKED)
    assert counter.calls == 5
    assert model.loss_function is own_loss
    assert model(**batch)["logits"].size(-1) == 64
    assert "forward" not in vars(model.lm_head) and "_loss_function" not in vars(model)


def test_a_loss_function_that_somebody_set_stays(tmp_path):
    model = llama(layers=1)
    mine = model.loss_function
    model.loss_function = mine
    with headless(model, None, lambda losses: None):
        pass
    assert vars(model)["_loss_function"] is mine


@pytest.mark.parametrize(("kernels", "is_ours"), [(None, False), ({"fused_linear_cross_entropy": False}, True)])
def test_beside_ligers_layers_the_loss_is_ours_unless_liger_brings_one(tmp_path, kernels, is_ours):
    training = arguments(tmp_path, use_liger_kernel=True, liger_kernel_config=kernels)
    assert has_causal_loss(SCUTrainer(llama(layers=1), training)) == is_ours


def test_evaluation_takes_the_stock_loss(tmp_path):
    trainer = curriculum_run(tmp_path, "none", memory=CHUNKED, max_steps=1)
    metrics = trainer.evaluate(UnevenRows(4))
    model = trainer.model.eval()
    batches = [batch_of(UnevenRows(4), range(4))]
    with torch.no_grad():
        expected = token_sums(model, batches[0]).sum() / learned(batches[0]).sum()
    assert metrics["eval_loss"] == pytest.approx(float(expected), rel=1e-5)


# -- weights -----------------------------------------------------------------------------------------------------------

PATHS = {"stock": None, "chunked": CHUNKED, "memory": MemorySettings(token_cap=16)}


def by_tokens(model, data, batches, weights) -> torch.Tensor:
    batches = [(batch_of(data, ids), weights[ids]) for ids in batches]
    items = sum(learned(batch).sum() for batch, _ in batches)
    return sum((own * token_sums(model, batch)).sum() for batch, own in batches) / items


def by_rows(model, data, batches, weights) -> torch.Tensor:
    (ids,) = batches
    return (weights[ids] * class_losses(model, batch_of(data, ids))).mean()


CASES = [
    *((path, lambda: llama(layers=1), UnevenRows(16), by_tokens, 2) for path in PATHS),
    *((path, lambda: bert(BertForSequenceClassification), labelled(16), by_rows, 1) for path in ("stock", "memory")),
]


@pytest.mark.parametrize(("path", "make", "data", "formula", "accumulation"), CASES)
def test_a_steps_gradient_is_the_weighted_sum_of_its_rows(tmp_path, path, make, data, formula, accumulation):
    trainer = curriculum_run(
        tmp_path,
        CurriculumSettings("infobatch", infobatch_prune_ratio=0.4),
        model=make(),
        data=data,
        memory=PATHS[path],
        **{**SGD, "num_train_epochs": 4, "gradient_accumulation_steps": accumulation, "learning_rate": 0.1},
        per_device_train_batch_size=4 // accumulation,
    )
    weighted = 0
    steps = zip(trainer.planned_steps(), trainer.recorder.weights, strict=True)
    for number, ((plan, batches), _) in enumerate(steps):
        if plan.weights is None:
            continue
        weights = torch.from_numpy(plan.weights)
        weighted += bool((weights[torch.cat(batches)] != 1).any())
        model = with_weights(make(), trainer.recorder.weights[number - 1])
        formula(model, data, batches, weights).backward()
        expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert error_of(trainer.recorder.gradients[number], expected) < 1e-4, f"step {number}"
    assert weighted > 3, "no step had a row that counts more"


def test_rows_without_anything_left_to_learn_do_no_harm(tmp_path):
    """The loss of a batch is exactly 0 there: what it is divided by says nothing of the factor between them."""
    data = labelled(16, lambda row: torch.tensor(int(row % 4 == 0)))

    def sure(trainer):
        with torch.no_grad():
            trainer.model.classifier.bias[0] = 200.0

    model = bert(BertForSequenceClassification)
    changes = {"num_train_epochs": 4, "gradient_accumulation_steps": 1, "learning_rate": 1e-3}
    trainer = curriculum_run(tmp_path, "infobatch", model=model, data=data, prepare=sure, **changes)
    assert (trainer.difficulty.scores == 0).sum() == 12
    assert all(torch.isfinite(weight).all() for weight in trainer.recorder.weights[-1].values())
    assert not trainer.difficulty.quarantined.any()
