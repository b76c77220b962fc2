"""Rows end to end through the layers: the stock loss and gradient, and padding wherever that would not be so."""

from __future__ import annotations

import functools
import logging
import tempfile
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import (
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    FalconConfig,
    FalconForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    OPTConfig,
    OPTForCausalLM,
    Trainer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from scu_trainer.errors import SettingsError
from scu_trainer.settings import CurriculumSettings, MemorySettings
from scu_trainer.train.loss.rows import padding_free
from scu_trainer.train.trainer import SCUTrainer, with_loops
from tests import tiny
from tests.faults import FakeGauge, is_no_question, is_training
from tests.tiny import UnevenRows, arguments, pad, same, weights_of
from tests.train.curricula import curriculum_run
from tests.train.stepwise import ENDLESS_BYTES, compared, error_of
from tests.train.test_micro_batches import at_step_begin

WINDOW = {"gradient_accumulation_steps": 2, "max_steps": 3}
PADDED = MemorySettings(padding_free=False)


def gemma3(window: int = 8) -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["sliding_attention", "full_attention"]}
    ends = {"pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1}
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=tiny.VOCAB, sliding_window=window, max_position_embeddings=64, **sizes, **heads, **ends
        )
    )


def opt() -> OPTForCausalLM:
    """Its positions come from the mask."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "dropout": 0.0}
    return OPTForCausalLM(OPTConfig(vocab_size=tiny.VOCAB, word_embed_proj_dim=16, max_position_embeddings=64, **sizes))


def seen_by(body: torch.nn.Module, seen: list) -> None:
    """Keep the shape of what the first layer gets from ``body`` in the forwards of a training."""

    def see(module, given) -> None:
        if is_training() and module.training and is_no_question():
            seen.append(tuple(given[0].shape[:2]))

    (getattr(body, "layers", None) or body.h)[0].register_forward_pre_hook(see)


def trained(make, folder, memory=None, rows=UnevenRows, **changes):
    """(trainer, its recorder, shapes (rows, time) that the layers saw)"""
    seen: list[tuple[int, int]] = []
    model = make()
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    memory = memory or MemorySettings()
    found = compared(
        model, folder, memory, rows(), prepare=lambda _: seen_by(inner.base_model, seen), **{**WINDOW, **changes}
    )
    return *found, seen


def with_adapted_words(**how) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(tiny.small_llama(), LoraConfig(r=4, **how))


def with_compiled_layers():
    """As ``layer.compile()`` leaves them, without the compiler."""
    model = tiny.small_llama()
    for layer in model.model.layers:
        layer._compiled_call_impl = layer._call_impl
    return model


MODELS = {
    "llama": tiny.llama,
    "absolute positions": tiny.gpt2,
    "lora": lambda: tiny.lora(tiny.small_llama()),
    "lora on the embedding": lambda: with_adapted_words(target_modules=["embed_tokens", "q_proj"]),
    "some words trained": lambda: with_adapted_words(target_modules=["q_proj"], trainable_token_indices=[5, 6]),
    "rows within the window": lambda: gemma3(16),
}
WAYS = {
    "opened": {},
    "chunked": {"memory": MemorySettings(chunked_loss="always")},
    "small micro-batches": {"memory": MemorySettings(token_cap=24)},
    "layers computed again": {"activation_checkpointing": True},
}


@functools.cache
def stock_gradients(name, rows=UnevenRows):
    """Of each step, by weight."""
    with tempfile.TemporaryDirectory() as folder:
        return compared(MODELS[name](), folder, None, rows(), **WINDOW)[1].gradients


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradient_are_the_stock_ones(tmp_path, name, way):
    trainer, found, seen = trained(MODELS[name], tmp_path / "ours", max_steps=2, **WAYS[way])
    statistics = trainer.micro_batches.loop.statistics
    assert statistics.processed_tokens == statistics.real_tokens < statistics.stock_tokens
    assert sum(rows * time for rows, time in seen) == statistics.real_tokens
    for gradient, wanted in zip(found.gradients, stock_gradients(name)[:2], strict=True):
        assert error_of(gradient, wanted) < 2e-6


@pytest.mark.parametrize("is_autocast", [False, True], ids=["bfloat16", "autocast"])
def test_in_half_precision_the_difference_is_rounding(tmp_path, is_autocast):
    def make():
        return tiny.small_llama() if is_autocast else tiny.small_llama().to(torch.bfloat16)

    _, expected = compared(make(), tmp_path / "stock", None, UnevenRows(), bf16=is_autocast, **WINDOW)
    _, found, seen = trained(make, tmp_path / "ours", bf16=is_autocast)
    assert seen and all(rows == 1 for rows, _ in seen)
    assert error_of(found.gradients[0], expected.gradients[0]) < 2e-2


@pytest.mark.parametrize("way", ["end to end", "padded"])
def test_in_half_precision_the_layers_see_few_sizes(tmp_path, monkeypatch, way):
    """oneDNN compiles kernels for each; in float32 none is."""
    lengths, attention, linear = set(), functional.scaled_dot_product_attention, functional.linear
    words = tiny.small_llama().lm_head.out_features

    def attend(query, *others, **how):
        if way != "padded" and is_training() and is_no_question():
            lengths.add(query.size(2))
        return attention(query, *others, **how)

    def multiply(states, weight, *others):
        if len(weight) == words and is_training() and is_no_question():
            lengths.add(states.size(1))
        return linear(states, weight, *others)

    monkeypatch.setattr(functional, "linear", multiply)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", attend)
    memory = MemorySettings(padding_free=way != "padded", token_cap=40)
    trainer, found, seen = trained(tiny.small_llama, tmp_path / "ours", memory, bf16=True)
    _, expected = compared(tiny.small_llama(), tmp_path / "stock", None, UnevenRows(), bf16=True, **WINDOW)
    assert error_of(found.gradients[0], expected.gradients[0]) < 2e-2
    assert {time % 8 for _, time in seen} == {length % 8 for length in lengths} | {0} == {0}
    assert all(rows == 1 for rows, _ in seen) == (way != "padded")
    statistics = trainer.micro_batches.loop.statistics
    assert statistics.real_tokens < statistics.processed_tokens == sum(rows * time for rows, time in seen)


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("most", [13, 44])
def test_few_sizes_keep_a_token_cap(tmp_path, padding_free, most):
    memory = MemorySettings(padding_free=padding_free, token_cap=most)
    _, _, seen = trained(tiny.small_llama, tmp_path, memory, bf16=True)
    longest = max(rows * time for rows, time in seen)
    assert longest <= most if most > 16 else longest == 16, "rows of more than 13 are of few sizes again"


def test_fp16_on_a_cpu_is_float32_and_stays_as_it_is(tmp_path):
    """accelerate has no autocast for it there."""
    seen = {}
    for half in (True, False):
        memory = MemorySettings(padding_free=False, token_cap=40)
        trainer, _, seen[half] = trained(tiny.small_llama, tmp_path / str(half), memory, fp16=half)
        assert trainer.micro_batches.loop.busy_tokens == 768
        seen[half].append(weights_of(trainer.model))
    assert same(seen[True].pop(), seen[False].pop()) and seen[True] == seen[False]


def prompted() -> torch.nn.Module:
    from peft import PromptTuningConfig, get_peft_model

    return get_peft_model(tiny.gpt2(n_positions=16), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5))


def with_short_encoder() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": tiny.VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    ends = BertConfig(**sizes, max_position_embeddings=11), BertConfig(**sizes, max_position_embeddings=64)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(*ends, decoder_start_token_id=0, pad_token_id=2)
    return EncoderDecoderModel(config)


@pytest.mark.filterwarnings("ignore:Version v4.12.0:FutureWarning")
@pytest.mark.parametrize("make", [prompted, with_short_encoder])
def test_no_size_exceeds_the_positions_of_a_model(tmp_path, make):
    """A prompt that is learned takes some, and the parts of a model may have unequal numbers of them."""
    how = {"bf16": True, **WINDOW}
    _, found = compared(make(), tmp_path / "ours", MemorySettings(token_cap=40), ShortRows(), **how)
    _, expected = compared(make(), tmp_path / "stock", None, ShortRows(), **how)
    assert error_of(found.gradients[0], expected.gradients[0]) < 2e-2


class ShortRows(UnevenRows):
    def __getitem__(self, index):
        return {name: tokens[:11] for name, tokens in super().__getitem__(index).items()}


def test_a_row_of_one_token_attends_to_itself_alone():
    states = [torch.randn(1, 2, 6, 8, dtype=torch.bfloat16) for _ in range(3)]
    made = padding_free._attend_by_length(*states, 0.0, None, SimpleNamespace(lengths=(1, 5), wants_few_sizes=True))
    assert torch.equal(made[0, 0], states[2][0, :, 0])


def test_in_single_precision_attention_copies_nothing(monkeypatch):
    seen, attention = [], functional.scaled_dot_product_attention

    def attend(*states, **how):
        seen.extend(states)
        return attention(*states, **how)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attend)
    states = [torch.randn(1, 2, 6, 8) for _ in range(3)]
    padding_free._attend_by_length(*states, 0.0, None, SimpleNamespace(lengths=(1, 5), wants_few_sizes=False))
    kept = {each.untyped_storage().data_ptr() for each in states}
    assert len(seen) == 6 and {each.untyped_storage().data_ptr() for each in seen} == kept


def test_rows_keep_their_own_losses_and_weights(tmp_path):
    """The curriculum reads and weighs the loss of each row."""
    settings, epochs = CurriculumSettings("infobatch"), {"num_train_epochs": 4}
    runs = [
        curriculum_run(
            tmp_path / str(wanted),
            settings,
            memory=MemorySettings(padding_free=wanted),
            memory_gauge=FakeGauge(ENDLESS_BYTES),
            **epochs,
        )
        for wanted in (False, None)
    ]
    assert [bool(run.loss_path.is_padding_free) for run in runs] == [False, True]
    torch.testing.assert_close(*(torch.as_tensor(run.difficulty.scores) for run in runs), rtol=1e-5, atol=1e-6)
    assert error_of(*(weights_of(run.model) for run in runs)) < 1e-5


# -- kernels of a card -------------------------------------------------------------------------------------------------

HALF, FULL = torch.float16, torch.float32


def on_card(heads: int, dtype: torch.dtype, size: int) -> torch.Tensor:
    """(1, heads, 5 tokens, size) without content: a CPU has no other tensors of a card."""
    with FakeTensorMode():
        return torch.empty(1, heads, 5, size, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("capability", "dtype", "size", "expected"),
    [
        ((8, 0), HALF, 64, True),
        ((9, 0), torch.bfloat16, 256, True),
        ((7, 5), HALF, 64, False),
        ((9, 0), FULL, 64, False),
        ((9, 0), HALF, 20, False),
        ((9, 0), HALF, 264, False),
    ],
)
def test_the_kernel_of_a_card_is_asked_for_what_it_takes(monkeypatch, capability, dtype, size, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert padding_free.has_kernel(on_card(1, dtype, size)) == expected
    assert not padding_free.has_kernel(torch.zeros(1, 1, 1, size, dtype=dtype))


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"), [((9, 0), HALF, True), ((9, 0), FULL, False), ((7, 5), HALF, False)]
)
def test_only_flash_attention_takes_fewer_heads_of_keys_on_a_card(monkeypatch, capability, dtype, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert padding_free.supports_grouped_keys(on_card(4, dtype, 8)) == expected
    assert padding_free.supports_grouped_keys(torch.zeros(1, 4, 5, 8, dtype=dtype))


def test_repeated_heads_attend_as_grouped_ones(monkeypatch):
    """And each call has as many of keys as of queries."""
    seen, attend = [], functional.scaled_dot_product_attention

    def attention(query, key, value, enable_gqa, **others):
        seen.append((key.size(1), value.size(1), enable_gqa))
        return attend(query, key, value, enable_gqa=enable_gqa, **others)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 5, 8, generator=generator) for heads in (4, 2, 2))
    found, rows = [], SimpleNamespace(lengths=(3, 2), wants_few_sizes=False)
    for takes in (True, False):
        monkeypatch.setattr(padding_free, "supports_grouped_keys", lambda query, takes=takes: takes)
        found.append(padding_free._attend_by_length(query, key, value, 0.0, None, rows))
    torch.testing.assert_close(*found)
    assert seen == [(2, 2, True)] * 2 + [(4, 4, False)] * 2


# -- where rows stay padded --------------------------------------------------------------------------------------------


class LeftPadded(UnevenRows):
    """Rows of one width that the collator leaves alone."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        missing = 16 - len(row["input_ids"])
        padded = {
            name: functional.pad(value, (missing, 0), value=-100 if name == "labels" else 2)
            for name, value in row.items()
        }
        return {**padded, "attention_mask": (torch.arange(16) >= missing).long()}


class LearnedPadding(UnevenRows):
    """The padding of every row ``every`` is learned, too."""

    every = 1

    def __getitem__(self, index):
        row = super().__getitem__(index)
        length, missing = len(row["input_ids"]), 17 - len(row["input_ids"])
        padded = {
            name: functional.pad(value, (0, missing), value=-100 if name == "labels" else 2)
            for name, value in row.items()
        }
        if index % self.every == 0:
            padded["labels"][length:] = 2
        return {**padded, "attention_mask": (torch.arange(17) < length).long()}


class RarelyLearnedPadding(LearnedPadding):
    every = 20


class Positioned(UnevenRows):
    def __getitem__(self, index):
        row = super().__getitem__(index)
        return {**row, "position_ids": torch.arange(len(row["input_ids"]))}


def stacked(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


STAYS_PADDED = {
    "padding on the left": (tiny.small_llama, LeftPadded, {"data_collator": stacked}),
    "learned padding": (tiny.small_llama, LearnedPadding, {"data_collator": stacked}),
    "positions of its own": (tiny.small_llama, Positioned, {}),
    "eager attention": (lambda: tiny.small_llama(attn_implementation="eager"), UnevenRows, {}),
    "layers with a state": (tiny.granite_hybrid, UnevenRows, {}),
    "positions from the mask": (opt, UnevenRows, {}),
    "compiled layers": (with_compiled_layers, UnevenRows, {}),
    "label smoothing": (tiny.small_llama, UnevenRows, {"label_smoothing_factor": 0.1}),
}


@pytest.mark.parametrize("name", STAYS_PADDED)
def test_what_cannot_do_without_padding_is_trained_as_before(tmp_path, name):
    make, rows, changes = STAYS_PADDED[name]
    _, expected = compared(make(), tmp_path / "never", PADDED, rows(), **WINDOW, **changes)
    _, found = compared(make(), tmp_path / "auto", MemorySettings(), rows(), **WINDOW, **changes)
    assert all(same(*pair) for pair in zip(found.weights, expected.weights, strict=True))


def test_padding_that_is_learned_in_few_rows_alone_is_kept_there(tmp_path):
    changes = {**WINDOW, "max_steps": 4, "data_collator": stacked}
    _, expected = compared(tiny.small_llama(), tmp_path / "stock", None, RarelyLearnedPadding(), **changes)
    _, found, seen = trained(tiny.small_llama, tmp_path / "ours", rows=RarelyLearnedPadding, **changes)
    assert {rows == 1 for rows, _ in seen} == {True, False}
    for gradient, wanted in zip(found.gradients, expected.gradients, strict=True):
        assert error_of(gradient, wanted) < 2e-6


def test_rows_beyond_a_sliding_window_are_padded(tmp_path):
    """And those within it are not, which makes no difference but rounding."""
    _, expected = compared(gemma3(), tmp_path / "stock", None, UnevenRows(), **WINDOW)
    _, found, seen = trained(gemma3, tmp_path / "ours", MemorySettings(token_cap=16))
    assert any(rows > 1 for rows, _ in seen)
    assert all(rows == 1 or time > 8 or rows * time <= 16 for rows, time in seen)
    for gradient, wanted in zip(found.gradients, expected.gradients, strict=True):
        assert error_of(gradient, wanted) < 2e-6


def test_rows_of_one_length_are_the_stock_run_bit_for_bit(tmp_path):
    _, found, seen = trained(tiny.small_llama, tmp_path / "ours", rows=tiny.Rows)
    _, expected = compared(tiny.small_llama(), tmp_path / "stock", None, tiny.Rows(), **WINDOW)
    assert all(rows > 1 for rows, _ in seen)
    assert all(same(*pair) for pair in zip(found.weights, expected.weights, strict=True))


@pytest.mark.parametrize(
    "make, changes, said",
    [
        (lambda: tiny.small_llama(attn_implementation="eager"), {}, "attn_implementation is eager; it can be sdpa"),
        (tiny.granite_hybrid, {}, "not all layers use attention over the whole row: some use"),
        (tiny.t5, {"rows": tiny.pairs}, "causal language model .encoder-decoders do not, .*; torch_compile"),
        (opt, {}, "the model fails on two short rows without padding"),
        (with_compiled_layers, {}, "layers are compiled, and would be again for every number of tokens"),
    ],
)
def test_always_says_why_not(tmp_path, make, changes, said):
    rows = changes.get("rows", UnevenRows)
    with pytest.raises(SettingsError, match=f"padding_free: true, but .*{said}.*; leave padding_free out, or false"):
        compared(make(), tmp_path, MemorySettings(padding_free=True), rows(), **WINDOW)


# -- nothing is taken on trust -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["rows see each other", "positions go on"])
def test_a_way_that_is_wrong_is_seen_and_not_taken(tmp_path, monkeypatch, caplog, wrong):
    """By two short rows, before anything is trained: whatever a model does with what it is given."""
    right = padding_free._sdpa_arguments

    def given(rows):
        arguments = right(rows)
        if wrong == "positions go on":
            positions = torch.arange(sum(rows.lengths)).square().unsqueeze(0) % 60
            return {**arguments, "position_ids": positions}
        return {**arguments, padding_free.ROWS: None, "attention_mask": None, "position_ids": None}

    monkeypatch.setattr(padding_free, "_sdpa_arguments", given)
    with caplog.at_level(logging.WARNING, logger="scu_trainer"):
        _, found = compared(tiny.small_llama(), tmp_path / "auto", MemorySettings(), UnevenRows(), **WINDOW)
    assert "padding_free is not used: " in caplog.text
    _, expected = compared(tiny.small_llama(), tmp_path / "never", PADDED, UnevenRows(), **WINDOW)
    assert all(same(*pair) for pair in zip(found.weights, expected.weights, strict=True))


def test_attention_that_was_put_back_since_the_last_training_is_no_hindrance(tmp_path, monkeypatch):
    for turn in range(2):
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", sdpa_attention_forward)
        compared(tiny.small_llama(), tmp_path / str(turn), MemorySettings(padding_free=True), UnevenRows(), **WINDOW)


class Leaky(torch.nn.Module):
    """A part that takes a little of the token before, as a short convolution does, whatever row that is of."""

    def __init__(self, part: torch.nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, states):
        return self.part(states) + 0.002 * functional.pad(states, (0, 0, 1, 0))[:, :-1]


def test_a_row_that_changes_the_next_a_little_is_seen_in_half_precision(tmp_path, caplog):
    model = tiny.small_llama().to(torch.bfloat16)
    model.model.layers[0].mlp = Leaky(model.model.layers[0].mlp)
    with caplog.at_level(logging.WARNING, logger="scu_trainer"):
        trainer, _ = compared(model, tmp_path, MemorySettings(), UnevenRows(), **WINDOW)
    assert "padding_free is not used: one row changes the states of the next by" in caplog.text
    assert trainer.loss_path.is_padding_free is False


def test_attention_that_does_not_know_where_rows_end_is_seen_whatever_its_weights(tmp_path, caplog):
    """In half precision, weights near zero hide what rows see of each other."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "new_decoder_architecture": True}
    config = FalconConfig(vocab_size=tiny.VOCAB, initializer_range=0.002, bos_token_id=0, eos_token_id=1, **sizes)
    with caplog.at_level(logging.WARNING, logger="scu_trainer"):
        compared(FalconForCausalLM(config).to(torch.bfloat16), tmp_path, MemorySettings(), UnevenRows(), **WINDOW)
    assert "padding_free is not used: the model has its own attention code" in caplog.text


# -- what is planned is what runs --------------------------------------------------------------------------------------


class AsksForOutputs(SCUTrainer):
    """Gets what stock training gives: padded."""

    from_step = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.state.global_step < self.from_step:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def test_a_model_that_is_asked_for_outputs_is_planned_with_padding(tmp_path, caplog):
    seen: list[tuple[int, int]] = []
    model = tiny.small_llama()
    seen_by(model.model, seen)
    rows = {"data_collator": pad, "train_dataset": UnevenRows()}
    memory = {"memory": MemorySettings(token_cap=24), "memory_gauge": FakeGauge(ENDLESS_BYTES)}
    trainer = AsksForOutputs(
        model, arguments(tmp_path, max_steps=4, save_strategy="steps", save_steps=2), **rows, **memory
    )
    steps: list[int] = []
    trainer.add_callback(at_step_begin(lambda: steps.append(len(seen))))
    with caplog.at_level(logging.WARNING, logger="scu_trainer"):
        trainer.train()
    assert (
        caplog.text.count(
            "padding_free is not used from now on: user code read more of the model's output than its loss"
        )
        == 1
    )
    later = seen[steps[1] :]
    assert later and all(rows * time <= 24 for rows, time in later)

    caplog.clear()
    again = AsksForOutputs(tiny.small_llama(seed=5), arguments(tmp_path, max_steps=4), **rows, **memory)
    again.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-2")
    assert "from here on" not in caplog.text
    assert same(weights_of(again.model), weights_of(trainer.model))


def test_it_is_noticed_whenever_it_begins(tmp_path, caplog):
    rows = {"data_collator": pad, "train_dataset": UnevenRows()}
    memory = {"memory": MemorySettings(token_cap=24), "memory_gauge": FakeGauge(ENDLESS_BYTES)}
    trainer = AsksForOutputs(tiny.small_llama(), arguments(tmp_path, max_steps=4), **rows, **memory)
    trainer.from_step = 2
    with caplog.at_level(logging.WARNING, logger="scu_trainer"):
        trainer.train()
    assert caplog.text.count("padding_free is not used from now on") == 1


def positions_in_few_batches(rows):
    batch = pad(rows)
    if batch["input_ids"][:, 0].sum() % 2:
        batch["position_ids"] = torch.arange(batch["input_ids"].size(1)).expand(len(rows), -1).contiguous()
    return batch


def test_a_batch_with_other_inputs_is_planned_with_padding(tmp_path):
    settings = MemorySettings(token_cap=24)
    changes = {"data_collator": positions_in_few_batches, "gradient_accumulation_steps": 1, "max_steps": 6}
    trainer, _, seen = trained(tiny.small_llama, tmp_path, settings, **changes)
    assert {rows == 1 for rows, _ in seen} == {True, False}
    assert all(rows * time <= 24 for rows, time in seen)
    assert sum(rows * time for rows, time in seen) == trainer.micro_batches.loop.statistics.processed_tokens


class ShortAtFirst(UnevenRows):
    def __getitem__(self, index):
        return {
            name: value[: 2 + index % 2] if index < 8 else value for name, value in super().__getitem__(index).items()
        }


def test_the_answer_is_the_same_for_all_data(tmp_path):
    changes = {"train_sampling_strategy": "sequential", "save_strategy": "steps", "save_steps": 1}
    trainer, whole, _ = trained(tiny.small_llama, tmp_path, rows=ShortAtFirst, **changes)
    assert trainer.loss_path.is_padding_free
    resume = f"{tmp_path}/checkpoint-1"
    resumed, found = compared(
        tiny.small_llama(seed=5), tmp_path, MemorySettings(), ShortAtFirst(), resume=resume, **{**WINDOW, **changes}
    )
    assert resumed.loss_path.is_padding_free
    assert same(found.weights[-1], whole.weights[-1])


@pytest.mark.parametrize("name", ["padding on the left", "learned padding", "positions of its own"])
def test_true_says_where_it_has_no_effect(tmp_path, caplog, name):
    make, rows, changes = STAYS_PADDED[name]
    with caplog.at_level(logging.WARNING, logger="scu_trainer"):
        compared(make(), tmp_path, MemorySettings(padding_free=True), rows(), **WINDOW, **changes)
    assert caplog.text.count("padding_free: true, but rows of this step keep their padding") == 1


def test_true_needs_the_memory_loop():
    with pytest.raises(SettingsError, match="padding_free: true needs memory_control: true or a token_cap"):
        MemorySettings(memory_control=False, padding_free=True)


def test_noise_by_the_length_of_rows_stays_that(tmp_path, caplog):
    trainer, _, seen = trained(tiny.small_llama, tmp_path / "left", neftune_noise_alpha=5.0)
    assert not trainer.loss_path.is_padding_free and any(rows > 1 for rows, _ in seen)
    trained(tiny.small_llama, tmp_path / "asked", MemorySettings(padding_free=True), neftune_noise_alpha=5.0)
    assert "rows of this step keep their padding: neftune_noise_alpha scales its noise by the length" in caplog.text


def test_a_window_that_no_layer_has_is_none(tmp_path):
    def make():
        model = tiny.small_llama()
        model.config.sliding_window, model.config.layer_types = 4, ["full_attention"] * 2
        return model

    trainer, _, seen = trained(make, tmp_path)
    assert all(rows == 1 for rows, _ in seen)
    figures = trainer.loop("memory").figures()["memory"]
    assert figures["padding_free"] is True and figures["processed_per_real"] == 1.0


# -- losses of somebody's own ------------------------------------------------------------------------------------------


class FromLogits(Trainer):
    """A loss of somebody's own, after the first step from what the model gives."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        loss = outputs.loss if self.state.global_step == 0 else functional.cross_entropy(logits, labels)
        return (loss, outputs) if return_outputs else loss


def by_its_own_loss(trainer_class, folder, words=tiny.VOCAB, **memory):
    """Losses of a training."""
    model, changes = tiny.small_llama(), {"optim": "sgd", "max_grad_norm": 0.0, "logging_steps": 1, "max_steps": 3}
    model.resize_token_embeddings(words, mean_resizing=False)
    gauge = {"memory_gauge": FakeGauge(ENDLESS_BYTES)} if memory else {}
    rows = {"data_collator": pad, "train_dataset": UnevenRows()}
    trainer = trainer_class(model, arguments(folder, **changes), **rows, **memory, **gauge)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("words", [tiny.VOCAB, 20_000])
def test_a_trainer_that_reads_the_logits_gets_them(tmp_path, words, caplog):
    """With a large vocabulary the chunked loss would give it hidden states in their place, which look much alike."""
    with caplog.at_level(logging.WARNING, logger="scu_trainer"):
        found = by_its_own_loss(with_loops(FromLogits), tmp_path / "ours", words, memory=MemorySettings())
    assert found == pytest.approx(by_its_own_loss(FromLogits, tmp_path / "stock", words), rel=1e-5)
    said = "chunked_loss is not used: FromLogits computes the loss in its own code"
    assert (said in caplog.text) == (words > tiny.VOCAB)


def test_code_above_ours_takes_no_way_away(tmp_path):
    """It gets the loss, and not what the model gives."""

    class Weighted(SCUTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return 2 * super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    model = tiny.small_llama()
    model.resize_token_embeddings(20_000, mean_resizing=False)
    rows = {"data_collator": pad, "train_dataset": UnevenRows()}
    memory = {"memory": MemorySettings(), "memory_gauge": FakeGauge(ENDLESS_BYTES)}
    trainer = Weighted(model, arguments(tmp_path, max_steps=2), **rows, **memory)
    trainer.train()
    assert trainer.loss_path.kind == "headless" and trainer.loss_path.is_padding_free


def test_always_goes_by_what_that_trainer_does_first(tmp_path):
    with pytest.raises(SettingsError, match=r"chunked_loss: always, but .*use chunked_loss: auto or never"):
        by_its_own_loss(with_loops(ReadsAtOnce), tmp_path, memory=MemorySettings(chunked_loss="always"))


class ReadsAtOnce(FromLogits):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return outputs.loss + 0.01 * outputs.logits.square().mean()
