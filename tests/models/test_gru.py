"""CADENCE: padding on either side, generation with and without a state, saving, adapters, activation checkpointing."""

from __future__ import annotations

import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from scu_trainer.models.checkpointing import checkpoint_every_layer
from scu_trainer.models.gru import CadenceConfig, CadenceForCausalLM, CadenceModel
from scu_trainer.models.loading.adapters import AdapterPlan
from scu_trainer.models.loading.load import load_model, prepare_for_tuning
from scu_trainer.settings import ModelSettings
from tests import processes

WORDS = 40


def config(**changes) -> CadenceConfig:
    sizes = {"embedding_size": 12, "category_embedding_size": 6, "hidden_size": 16, "num_hidden_layers": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    names = ["<unknown>", "a", "b"]
    return CadenceConfig(vocab_size=WORDS, category_names=names, **{**sizes, **tokens, "dropout": 0.0, **changes})


def cadence(seed: int = 0, **changes) -> CadenceForCausalLM:
    torch.manual_seed(seed)
    return CadenceForCausalLM(config(**{"initializer_range": 0.5, **changes})).eval()


def words(rows: int = 3, time: int = 7, seed: int = 1) -> torch.Tensor:
    return torch.randint(4, WORDS, (rows, time), generator=torch.Generator().manual_seed(seed))


CATEGORIES = torch.tensor([1, 2, 0])


def padded(rows: list[torch.Tensor], side: str) -> dict[str, torch.Tensor]:
    """Rows of several lengths as one batch."""
    width = max(map(len, rows))
    pads = [(width - len(row), 0) if side == "left" else (0, width - len(row)) for row in rows]
    pad = torch.nn.functional.pad
    return {
        "input_ids": torch.stack([pad(row, amount) for row, amount in zip(rows, pads, strict=True)]),
        "attention_mask": torch.stack([pad(torch.ones_like(r), amount) for r, amount in zip(rows, pads, strict=True)]),
    }


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_on_either_side_changes_nothing(side):
    model, rows = cadence(), [words(1, length, length)[0] for length in (3, 7, 5)]
    together = model(**padded(rows, side), category_ids=CATEGORIES)
    for number, row in enumerate(rows):
        alone = model(row[None], category_ids=CATEGORIES[number : number + 1])
        start = 7 - len(row) if side == "left" else 0
        found = together.logits[number, start : start + len(row)]
        torch.testing.assert_close(found, alone.logits[0])
        torch.testing.assert_close(together.state[:, number], alone.state[:, 0])


@torch.no_grad()
def test_a_row_of_padding_alone_keeps_its_state():
    model, state = cadence(), torch.randn(2, 3, 16)
    ids = words()
    mask = torch.tensor([[1] * 7, [0] * 7, [1] * 3 + [0] * 4])
    assert torch.equal(model(ids, attention_mask=mask, state=state).state[:, 1], state[:, 1])


@torch.no_grad()
def test_words_one_by_one_with_the_state_are_words_at_once():
    model, ids = cadence(), words()
    whole, state, steps = model(ids, category_ids=CATEGORIES), None, []
    for place in range(ids.size(1)):
        step = model(ids[:, place : place + 1], category_ids=CATEGORIES, state=state)
        state = step.state
        steps.append(step.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole.logits)
    torch.testing.assert_close(state, whole.state)


@pytest.mark.parametrize(
    "how",
    [{}, {"do_sample": True, "top_k": 10, "temperature": 2.0}, {"num_beams": 3}],
    ids=["greedy", "sample", "beam"],
)
def test_generation_with_the_state_is_generation_without(how):
    model, batch = cadence(), padded([words(1, n, n)[0] for n in (2, 5, 4)], "left")
    calls = []
    model.model.register_forward_pre_hook(lambda _, arguments: calls.append(arguments[0].shape[1]))

    def generated(use_cache: bool) -> torch.Tensor:
        torch.manual_seed(0)
        return model.generate(**batch, category_ids=CATEGORIES, max_new_tokens=9, use_cache=use_cache, **how)

    with_state = generated(True)
    assert calls[0] == 5 and set(calls[1:]) == {1}
    assert torch.equal(with_state, generated(False))
    assert with_state.shape[1] > 5 and len(torch.unique(with_state[:, 5:])) > 3


def test_generation_follows_the_category():
    model = cadence(embedding_size=WORDS, tie_word_embeddings=False)
    one, other = (
        model.generate(words(1, 2), category_ids=torch.tensor([n]), max_new_tokens=8, do_sample=False) for n in (1, 2)
    )
    assert not torch.equal(one, other)


def test_the_loss_follows_the_count_of_items_and_ignores_what_is_not_learned():
    model, ids = cadence(), words()
    labels = ids.clone()
    labels[0, 3:] = -100
    sums = torch.stack([model(ids, labels=labels, num_items_in_batch=n).loss * n for n in (5, 10)])
    torch.testing.assert_close(sums[0], sums[1])
    shares = model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(sums[0], -(shares * labels[:, 1:].ne(-100)).sum())


def test_a_category_is_hidden_in_training_only():
    torch.manual_seed(0)
    model, ids = cadence(category_dropout=0.5), words(64)
    category = torch.ones(64, dtype=torch.long)
    with torch.no_grad():
        of_one, of_none = (model(ids[:1], category_ids=c).logits[0] for c in (category[:1], category[:1] * 0))
        ids = ids[:1].expand(64, -1)
        found = model.train()(ids, category_ids=category).logits
        is_hidden = [torch.allclose(row, of_none, atol=1e-5) for row in found]
        assert 16 < sum(is_hidden) < 48
        assert all(h or torch.allclose(row, of_one, atol=1e-5) for h, row in zip(is_hidden, found, strict=True))
        assert torch.allclose(model.eval()(ids, category_ids=category).logits, of_one, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_saved_and_loaded_it_is_the_same(tied, tmp_path):
    model = cadence(tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.model.words.weight) is tied
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is CadenceForCausalLM and type(AutoConfig.from_pretrained(tmp_path)) is CadenceConfig
    assert (loaded.lm_head.weight is loaded.model.words.weight) is tied
    assert loaded.config.category_names == ["<unknown>", "a", "b"] and loaded.config.hidden_size == 16
    assert torch.equal(loaded(words(), category_ids=CATEGORIES).logits, model(words(), category_ids=CATEGORIES).logits)
    inner = AutoModel.from_pretrained(tmp_path)
    assert type(inner) is CadenceModel
    assert torch.equal(inner(words()).last_hidden_state, model.model(words()).last_hidden_state)


ELSEWHERE = """
import sys
assert not [name for name in sys.modules if name.startswith("scu_trainer")]
sys.modules["scu_trainer"] = None  # whoever imports it fails
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = torch.tensor([[5, 9, 11]])
print(type(model).__module__.split(".")[0])
print(model.generate(ids, category_ids=torch.tensor([2]), max_new_tokens=6, do_sample=False).tolist())
"""


def test_a_copied_folder_loads_where_this_package_is_not(tmp_path):
    model = cadence()
    model.save_pretrained(tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "copied")
    shutil.rmtree(tmp_path / "here")
    done = processes.run_without_us(["-c", ELSEWHERE, tmp_path / "copied"])
    assert done.returncode == 0, done.stderr
    module, generated = done.stdout.strip().splitlines()
    ids = model.generate(torch.tensor([[5, 9, 11]]), category_ids=torch.tensor([2]), max_new_tokens=6, do_sample=False)
    assert module == "transformers_modules" and generated == str(ids.tolist())


def test_checkpointed_layers_run_again_and_give_the_same_gradients():
    def gradients(checkpointed: bool) -> tuple[dict[str, torch.Tensor], int]:
        model = cadence(dropout=0.3, category_dropout=0.3).train()
        first, calls = model.model.layers[0], []
        inner = first.forward
        first.forward = lambda *given: (calls.append(1), inner(*given))[1]
        assert not checkpointed or checkpoint_every_layer(model) == 2
        torch.manual_seed(4)
        model(words(), category_ids=CATEGORIES, labels=words()).loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}, len(calls)

    (plain, once), (checkpointed, twice) = gradients(False), gradients(True)
    assert (once, twice) == (1, 2)
    for name, gradient in plain.items():
        assert torch.equal(gradient, checkpointed[name]), name


def test_bfloat16_autocast_keeps_the_recurrence_in_float32():
    model = cadence()
    with torch.autocast("cpu", torch.bfloat16):
        half = model(words(), category_ids=CATEGORIES)
    exact = model(words(), category_ids=CATEGORIES)
    assert half.state.dtype == torch.float32 and half.logits.dtype == torch.bfloat16
    torch.testing.assert_close(half.state, exact.state)
    torch.testing.assert_close(half.logits.float(), exact.logits, atol=0.1, rtol=0.05)


def test_adapters_learn_are_saved_and_merged(tmp_path):
    cadence().save_pretrained(tmp_path / "base")
    settings = ModelSettings(model_name_or_path=str(tmp_path / "base"), tuning="lora")
    base = load_model(settings).eval()
    before = base(words(), category_ids=CATEGORIES).logits
    model = prepare_for_tuning(base, settings, AdapterPlan(targets=["projection", "categories"]))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=words(), category_ids=CATEGORIES, labels=words()).loss.backward()
        optimizer.step()
    adapted = model.eval()(input_ids=words(), category_ids=CATEGORIES).logits
    assert not torch.allclose(adapted, before)
    model.save_pretrained(tmp_path / "adapter")
    again = ModelSettings(model_name_or_path=str(tmp_path / "adapter"), tuning="lora")
    loaded = prepare_for_tuning(load_model(again), again).eval()
    torch.testing.assert_close(loaded(input_ids=words(), category_ids=CATEGORIES).logits, adapted)
    merged = loaded.merge_and_unload()
    assert type(merged) is CadenceForCausalLM and merged.lm_head.weight is merged.model.words.weight
    torch.testing.assert_close(merged(words(), category_ids=CATEGORIES).logits, adapted)
