"""How a loss adds up over rows is asked of the model: the answer, and that asking leaves no trace."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    ConvBertConfig,
    ConvBertForMaskedLM,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NystromformerConfig,
    NystromformerForMaskedLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from scu_trainer.data.random_states import rng_states
from scu_trainer.train.loss.analysis import analyze, asked_rows, measuring, mixing_modules
from scu_trainer.train.step.batches.rows import read_layout
from tests import tiny

ITEMS = torch.tensor(20)


def text(rows: int = 4, width: int = 12, **changes) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, tiny.VOCAB, (rows, width), generator=generator)
    mask = (torch.arange(width) < width - 2 * torch.arange(rows)[:, None]).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.where(mask.bool(), tokens, -100), **changes}


def images(rows: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"pixel_values": torch.rand(rows, 3, 8, 8, generator=generator), "labels": torch.arange(rows) % 3}


def ask(model, *inputs, items=ITEMS, seq2seq=False, name="input_ids"):
    def loss_of(batch, given):
        return model(**batch, **({} if given is None else {"num_items_in_batch": given})).loss

    model.train()
    return analyze(loss_of, model, [read_layout(one, name, seq2seq) for one in inputs], items, pad_token_id=2)


def bert(kind, **changes):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        **changes,
    )
    return kind(config)


def seq2seq_text():
    labels = torch.randint(3, tiny.VOCAB, (4, 7), generator=torch.Generator().manual_seed(1))
    labels[1, 4:], labels[2, 2:] = -100, -100
    return text(labels=labels)


def t5():
    torch.manual_seed(0)
    config = {"vocab_size": tiny.VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**config, decoder_start_token_id=2, pad_token_id=2))


def bart():
    torch.manual_seed(0)
    sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 16))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = BartConfig(vocab_size=tiny.VOCAB, d_model=16, max_position_embeddings=32, **sides, **heads)
    return BartForConditionalGeneration(config)


def vit():
    torch.manual_seed(0)
    config = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return ViTForImageClassification(ViTConfig(**config, image_size=8, patch_size=4, num_labels=3))


def resnet():
    torch.manual_seed(0)
    return ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], num_labels=3))


def test_a_causal_model_honours_the_count():
    assert ask(tiny.llama(), text()).kind == "num_items"
    assert ask(tiny.granite_hybrid(), text()).kind == "num_items"
    assert ask(tiny.lora(tiny.llama()), text()).kind == "num_items"


def test_without_a_count_it_is_a_mean_over_shifted_labels():
    assert ask(tiny.llama(), text(), items=None).kind == "shifted_labels"


def test_models_that_take_the_count_and_ignore_it():
    assert ask(bert(BertForMaskedLM), text()).kind == "labels"
    assert ask(bert(BertForSequenceClassification), text(labels=torch.tensor([0, 1, 0, 1]))).kind in ("labels", "rows")
    assert ask(bert(BertForSequenceClassification, num_labels=1), text(labels=torch.rand(4, 1))).kind == "rows"


@pytest.mark.parametrize("make", [t5, bart])
def test_encoder_decoders_average_over_labels(make):
    answer = ask(make(), seq2seq_text(), items=None, seq2seq=True)
    assert (answer.kind, answer.trims) == ("labels", True)


def test_images():
    assert ask(vit(), images(), name="pixel_values").kind == "num_items"


def test_a_sum_over_rows_is_known_as_such():
    model = nn.Linear(3, 1)
    answer = analyze(
        lambda batch, _: model(batch["x"]).square().sum(), model, [read_layout({"x": torch.rand(4, 3)}, "x")], None, 0
    )
    assert answer.kind == "sum"


def test_numbers_drawn_on_the_models_device_are_the_same_in_every_trial(monkeypatch):
    """A card has a generator of its own. Whole numbers have no mean that could stand for them."""
    model, card = nn.Linear(3, 1), torch.Generator().manual_seed(0)
    monkeypatch.setattr(measuring, "generators", lambda devices: [*rng_states(), (card.set_state, card.get_state())])

    def loss_of(batch, _):
        return model(batch["x"]).square().sum() * torch.randint(1, 99, (), generator=card)

    rows = [read_layout({"x": torch.rand(4, 3)}, "x")]
    answer = analyze(loss_of, model, rows, None, 0, is_public=True)
    assert answer.kind == "sum" and answer.is_exact


def test_batch_norm_mixes_rows_and_is_named():
    answer = ask(resnet(), images(), name="pixel_values")
    assert not answer.is_exact and "normalization" in answer.mixes and "BatchNorm" in answer.mixes
    assert answer.kind == "labels"  # what its statistics leave
    frozen = resnet()
    frozen.eval()
    assert mixing_modules(frozen) is None


def test_router_losses_mix_rows():
    torch.manual_seed(0)
    config = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=tiny.VOCAB, num_hidden_layers=1, output_router_logits=True, **config)
    answer = ask(MixtralForCausalLM(config), text())
    assert not answer.is_exact and "router" in answer.mixes and answer.kind == "num_items"
    of_images_too = SimpleNamespace(config=SimpleNamespace(text_config=config), named_modules=lambda: [])
    assert "config.text_config.router_aux_loss_coef" in mixing_modules(of_images_too)


class InBatchNegatives(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.EmbeddingBag(tiny.VOCAB, 8)
        self.other = nn.EmbeddingBag(tiny.VOCAB, 8)

    def forward(self, input_ids, attention_mask=None, labels=None):
        scores = self.table(input_ids) @ self.other(input_ids).T
        return SimpleNamespace(loss=nn.functional.cross_entropy(scores, torch.arange(len(scores))))


def test_in_batch_negatives_mix_rows():
    assert not ask(InBatchNegatives(), text(), items=None).is_exact


class ReadsPadding(nn.Module):
    """A mean over all columns, whatever the mask says."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(tiny.VOCAB, 8)

    def forward(self, input_ids, attention_mask=None, labels=None):
        return SimpleNamespace(loss=self.table(input_ids).mean(dim=1).square().sum(dim=1).mean())


def test_a_model_that_reads_its_padding_keeps_it():
    answer = ask(ReadsPadding(), text(labels=torch.arange(4)), items=None)
    assert (answer.kind, answer.trims) == ("rows", False) or (answer.kind, answer.trims) == (
        "labels",
        False,
    )


def convbert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "embedding_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "num_labels": 2}
    sizes |= {"intermediate_size": 16, "vocab_size": tiny.VOCAB, "pad_token_id": 2}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ConvBertForMaskedLM(ConvBertConfig(**sizes, **no_dropout))


def nystromformer():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return NystromformerForMaskedLM(NystromformerConfig(vocab_size=tiny.VOCAB, **sizes, **no_dropout))


@pytest.mark.parametrize("make", [convbert, nystromformer])
def test_padding_that_hardly_shows_in_the_loss_is_found(make):
    """Convolutions read the padding beside them, which changes these untrained models' losses by less than rounding."""
    answer = ask(make(), text())
    assert answer.trims is False and answer.reads_padding == "cutting it changes the loss"


def gpt2_classifier():
    torch.manual_seed(0)
    return GPT2ForSequenceClassification(tiny.gpt2(pad_token_id=2, num_labels=2).config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("make", "labels"),
    [
        (tiny.llama, None),
        (partial(bert, BertForMaskedLM), None),
        (gpt2_classifier, torch.tensor([0, 1, 0, 1])),  # it finds the end of a row by its padding
        (tiny.granite_hybrid, None),
    ],
)
def test_padding_that_nothing_reads_may_be_cut(make, labels, dtype):
    batch = text() if labels is None else text(labels=labels)
    batch["input_ids"] = batch["input_ids"].where(batch["attention_mask"].bool(), 2)
    assert ask(make().to(dtype), batch).trims is True


def test_rows_of_two_batches_of_one_row_can_be_compared():
    batch = text()
    single = [{name: value[row : row + 1] for name, value in batch.items()} for row in (0, 3)]
    assert ask(tiny.llama(), *single).kind == "num_items"


def test_two_rows_that_are_a_whole_batch_keep_its_order():
    """The shorter row stands second: it, not the first, must be compared with and without its padding."""
    batch = {name: value[:2] for name, value in text().items()}
    assert ask(tiny.llama(), batch).trims is True


def test_asking_leaves_no_trace():
    model = tiny.llama(attention_dropout=0.5)
    model.train()
    model.model.norm.eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    batch = text()
    copies = {name: value.clone() for name, value in batch.items()}

    def loss_of(inputs, given):
        torch.rand(1)
        inputs.pop("labels_that_are_not_there", None)
        return model(**inputs, num_items_in_batch=given).loss

    analyze(loss_of, model, [read_layout(batch)], ITEMS, 2)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(batch[name], copy) for name, copy in copies.items())
    assert all(p.grad is None for p in model.parameters())


def test_states_of_layers_are_collected_once_after_asking():
    """transformers hooks itself onto layers in the first forward that returns states, and notes that on the model."""
    model, batch = tiny.llama(output_hidden_states=True), text()
    assert ask(model, batch).is_exact
    states = model(**batch).hidden_states
    assert len(states) == 3 and not torch.equal(states[0], states[1])


# -- long rows are asked by their beginnings ---------------------------------------------------------------------------


def long_text(widths, learned_from: int = 0) -> dict[str, torch.Tensor]:
    width = max(widths)
    tokens = torch.randint(3, tiny.VOCAB, (len(widths), width), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(width) < torch.tensor(widths)[:, None]).long()
    learned = mask.bool() & (torch.arange(width) >= learned_from)
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.where(learned, tokens, -100)}


class Spy(nn.Module):
    """``model`` that notes the columns of what it gets; ``refuses_below``: too few for it."""

    def __init__(self, model, refuses_below: int = 0) -> None:
        super().__init__()
        self.model, self.refuses_below, self._notes = model, refuses_below, SimpleNamespace(seen=[])

    @property
    def seen(self) -> list[int]:
        return self._notes.seen  # a list of the module's own would be put back

    def forward(self, input_ids, **inputs):
        self.seen.append(input_ids.size(1))
        if input_ids.size(1) < self.refuses_below:
            raise ValueError("whole rows only")
        return self.model(input_ids=input_ids, **inputs)


def long_llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=tiny.VOCAB, num_hidden_layers=1, **sizes))


LONG = {
    "packed": [long_text([200] * 4)],
    "uneven": [long_text([90, 200, 150, 120])],
    "prompt": [long_text([150, 200, 150], learned_from=30)],
    "single": [long_text([130]), long_text([160])],
}


@pytest.mark.parametrize("rows", LONG)
@pytest.mark.parametrize("items", [ITEMS, None], ids=["counted", "not"])
def test_long_rows_are_asked_by_their_beginnings_and_answer_the_same(rows, items, monkeypatch):
    spy = Spy(long_llama())
    found = ask(spy, *LONG[rows], items=items)
    assert spy.seen and max(spy.seen) <= asked_rows.BEGINNING_TOKENS
    monkeypatch.setattr("scu_trainer.train.loss.analysis.trials.cut_to_beginnings", lambda *given: None)
    whole = ask(Spy(long_llama()), *LONG[rows], items=items)
    assert (found.kind, found.mixes) == (whole.kind, whole.mixes)
    assert whole.trims is None or found.trims == whole.trims


def test_a_late_first_label_takes_as_many_columns_as_it_needs():
    spy = Spy(long_llama())
    assert ask(spy, long_text([150, 200], learned_from=100)).kind == "num_items"
    assert 100 < max(spy.seen) < 115


def test_a_model_that_refuses_short_rows_is_asked_with_whole_ones():
    spy = Spy(long_llama(), refuses_below=100)
    found = ask(spy, long_text([150, 200, 160]))
    assert found.kind == "num_items" and found.is_exact
    assert min(spy.seen) < 100 < max(spy.seen)


def test_short_rows_are_asked_as_they_are():
    batch = read_layout(long_text([30, 40]))
    assert asked_rows.cut_to_beginnings([batch], [(0, 0), (0, 1)], 2) is None


def test_out_of_memory_on_beginnings_is_no_answer():
    """The whole rows are asked then, and say it themselves."""

    class Full(Spy):
        def forward(self, input_ids, **inputs):
            self.seen.append(input_ids.size(1))
            raise torch.OutOfMemoryError("no more")

    spy = Full(long_llama())
    assert "do not fit" in ask(spy, long_text([150, 200])).mixes
    assert max(spy.seen) == 200
