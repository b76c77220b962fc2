"""A share of a trained update: what lies between a base and what was tuned from it."""

from __future__ import annotations

import pytest
import torch
from peft import LoHaConfig, LoraConfig, get_peft_model

from scu_trainer.errors import ModelError
from scu_trainer.models.scaling import ScaledUpdate
from tests.tiny import llama, lora, same, weights_of

IDS = torch.arange(3, 19)[None]


def loha(model):
    return get_peft_model(model, LoHaConfig(target_modules=["up_proj"], modules_to_save=["lm_head"]))


def moved(model, seed: int = 5):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def mixed(*more):
    """Adapters of several kinds at once."""
    model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]), adapter_name="0", mixed=True)
    for name, config in enumerate(more, start=1):
        model.add_adapter(str(name), config)
    model.set_adapter([str(name) for name in range(len(more) + 1)])
    return model


def test_each_adapter_of_a_mixed_model_has_to_be_one_that_can_be_scaled():
    model = moved(mixed(LoraConfig(target_modules=["v_proj"])))
    with ScaledUpdate(model).at(0.0):
        assert torch.allclose(logits(model), logits(llama().eval()), atol=1e-6)
    with pytest.raises(ModelError, match="is of peft_type LOHA, whose update is not a product"):
        ScaledUpdate(mixed(LoHaConfig(target_modules=["up_proj"])))


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}, {"modules_to_save": ["lm_head"]}])
def test_an_adapter_ends_at_its_base_and_at_itself(changes):
    base = llama().eval()
    before = logits(base)
    model = moved(lora(llama(), **changes))
    after, weights = logits(model), weights_of(model)
    update = ScaledUpdate(model)
    with update.at(0.0):
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), after) and same(weights_of(model), weights)
    with update.at(0.5):
        middle = logits(model)
    assert not torch.allclose(middle, after) and not torch.allclose(middle, before)


def test_the_bias_of_an_adapter_is_scaled_with_it():
    base, adapter = llama(attention_bias=True).eval(), LoraConfig(r=4, target_modules=["q_proj"], lora_bias=True)
    model = moved(get_peft_model(llama(attention_bias=True), adapter))
    with ScaledUpdate(model).at(0.0):
        assert torch.equal(logits(model), logits(base))


def test_weights_that_lie_on_disk_were_not_trained():
    model, start = moved(lora(llama())), lora(llama())
    embedding = model.get_input_embeddings()
    embedding.weight = torch.nn.Parameter(embedding.weight.to("meta"), requires_grad=False)
    factors = [weight for weight in model.parameters() if weight.requires_grad]
    assert ScaledUpdate(model, start).size_bytes == sum(weight.nbytes for weight in factors)


def test_half_of_a_lora_update_is_half_of_its_product():
    model = moved(lora(llama(layers=1)))
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    whole = layer.get_delta_weight("default").clone()
    with ScaledUpdate(model).at(0.5):
        assert torch.allclose(layer.get_delta_weight("default"), 0.5 * whole, atol=1e-7)


def test_all_weights_lie_between_those_of_base_and_tuned():
    base, tuned = llama(), moved(llama())
    expected = {n: 0.25 * t + 0.75 * b for (n, t), b in zip(tuned.named_parameters(), base.parameters(), strict=True)}
    weights = weights_of(tuned)
    update = ScaledUpdate(tuned, base)
    with update.at(0.25):
        assert all(torch.allclose(p, expected[n], atol=1e-6) for n, p in tuned.named_parameters())
    assert same(weights_of(tuned), weights)


def test_saved_is_what_was_scaled(tmp_path):
    base, tuned = llama(), moved(llama())
    update = ScaledUpdate(tuned, base)
    update.save(0.5, tmp_path)
    with update.at(0.5):
        assert same(weights_of(llama(seed=9).from_pretrained(tmp_path)), weights_of(tuned))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: (lora(llama(), use_dora=True),), "is of DoRA"),
        (lambda: (lora(llama(), bias="all"),), "biases were trained"),
        (lambda: (lora(llama(), init_lora_weights="pissa"),), "init_lora_weights: pissa"),
        (lambda: (lora(llama(), init_lora_weights="olora"),), "init_lora_weights: olora"),
        (lambda: (loha(llama()),), "peft_type LOHA"),
        (lambda: (lora(llama(), trainable_token_indices={"embed_tokens": [3]}),), "rows of new tokens"),
        (lambda: (llama(),), "no update that could be scaled"),
        (lambda: (llama(), llama()), "no update that could be scaled"),
        (lambda: (moved(llama()), llama(hidden=64)), "is not the base of this model"),
        (lambda: (moved(llama(layers=2)), llama(layers=1)), "the base lacks it"),
    ],
)
def test_what_cannot_be_scaled_is_named(make, message):
    with pytest.raises(ModelError, match=message):
        ScaledUpdate(*make())
