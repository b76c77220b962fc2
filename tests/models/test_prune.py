"""Pruned weights: units that add nothing go without a trace, and the right ones go."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, ResNetConfig, ResNetForImageClassification

from scu_trainer.errors import ModelError
from scu_trainer.models.prune import (
    CHANNELS,
    HEADS,
    NEURONS,
    kept_of,
    plan_pruning,
    pruned,
    recompute_batchnorm_statistics,
)
from tests.tiny import VOCAB, gpt2, granite_hybrid, llama

IDS = {"input_ids": torch.arange(24).reshape(2, 12) % VOCAB}


def qwen():
    """Biases in front of the heads, and heads of a size of their own."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    model = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=VOCAB, num_attention_heads=8, num_key_value_heads=4, pad_token_id=2, **sizes)
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_()
    return model.eval()


def resnet(layer_type: str, first: int):
    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=16,
        hidden_sizes=[first, 32, 48],
        depths=[2, 1, 2],
        layer_type=layer_type,
        num_labels=5,
    )
    model = ResNetForImageClassification(config)
    for module in model.modules():  # not those of a fresh model, which are all alike
        if isinstance(module, torch.nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                torch.nn.init.uniform_(tensor, 0.5, 1.5)
    return model.eval()


PIXELS = {"pixel_values": torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))}
MODELS = {
    "llama": (lambda: llama().eval(), IDS, 0.5),
    "biases": (qwen, IDS, 0.5),
    "basic": (lambda: resnet("basic", 16), PIXELS, 0.25),
    "basic, free stem": (lambda: resnet("basic", 24), PIXELS, 0.25),
    "bottleneck": (lambda: resnet("bottleneck", 32), PIXELS, 0.5),
}


@pytest.mark.parametrize("name", MODELS)
def test_units_that_nobody_reads_go_without_a_trace(name):
    make, inputs, amount = MODELS[name]
    model = make()
    plan = plan_pruning(model, amount)
    dead = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for units in plan.units:
            gone = torch.randperm(units.count, generator=dead)[: units.count - units.kept]
            for reader, width in units.read.items():
                columns = (gone[:, None] * width + torch.arange(width)).flatten()
                model.get_submodule(reader).weight[:, columns] = 0.0
    before = {key: value.clone() for key, value in model.state_dict().items()}
    smaller = pruned(model, plan, [inputs])
    with torch.no_grad():
        torch.testing.assert_close(smaller(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-5)
    assert sum(p.numel() for p in smaller.parameters()) < sum(p.numel() for p in model.parameters())
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())
    for field, value in plan.changes.items():
        assert getattr(smaller.config, field) == value != getattr(model.config, field, None) or field == "head_dim"


def test_the_neurons_that_add_most_stay():
    """By the definition, computed another way: the mean squared norm of what a neuron adds to the stream."""
    model = llama(layers=1).eval()
    mlp, seen = model.model.layers[0].mlp, []
    handle = mlp.down_proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    with torch.no_grad():
        model(**IDS)
    handle.remove()
    neurons = seen[0].flatten(0, 1)
    added = torch.stack(
        [(neurons[:, i : i + 1] * mlp.down_proj.weight[:, i]).square().sum(1).mean() for i in range(neurons.size(1))]
    )
    smaller = pruned(model, plan_pruning(model, 0.25, [NEURONS]), [IDS])
    stay = added.topk(48).indices.sort().values
    assert torch.equal(smaller.model.layers[0].mlp.gate_proj.weight, mlp.gate_proj.weight[stay])
    assert torch.equal(smaller.model.layers[0].mlp.down_proj.weight, mlp.down_proj.weight[:, stay])
    assert torch.equal(smaller.model.layers[0].self_attn.q_proj.weight, model.model.layers[0].self_attn.q_proj.weight)


@pytest.mark.parametrize(("count", "amount", "kept"), [(64, 0.25, 48), (7, 0.25, 6), (2, 0.25, 2), (3, 0.99, 1)])
def test_no_more_goes_than_asked(count, amount, kept):
    assert kept_of(count, amount) == kept


def test_a_number_of_heads_that_the_family_refuses_is_not_taken():
    """Llama's hidden size must be a multiple of its heads: of 4 groups of 2 heads, 2 can stay, and 3 cannot."""
    torch.manual_seed(0)
    model = llama(hidden=64)
    model.config.num_attention_heads, model.config.num_key_value_heads = 8, 4
    model = type(model)(model.config)
    assert plan_pruning(model, 0.5, [HEADS]).changes["num_key_value_heads"] == 2
    with pytest.raises(ModelError, match="restricts the number of heads"):
        plan_pruning(model, 0.25, [HEADS])


@pytest.mark.parametrize(
    ("make", "kinds", "expected"),
    [
        (gpt2, [], "GPT2LMHeadModel cannot be pruned: 0 of its 1 layers have gate_proj"),
        (granite_hybrid, [], "of its 4 layers have gate_proj, up_proj, down_proj as linear layers"),
        (llama, [CHANNELS], "has no channels to prune; it has neurons and heads"),
        (lambda: resnet("basic", 16), [HEADS], "has no heads to prune; it has channels"),
    ],
)
def test_what_a_config_cannot_say_is_refused(make, kinds, expected):
    with pytest.raises(ModelError, match=expected):
        plan_pruning(make(), 0.25, kinds)


def test_statistics_are_those_of_the_rows():
    """Of the first BatchNorm, by the definition; and the momentum stays."""
    model = resnet("basic", 16)
    norm, seen = model.resnet.embedder.embedder.normalization, []
    handle = norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    recompute_batchnorm_statistics(model, [PIXELS, {"pixel_values": PIXELS["pixel_values"].flip(0) * 0.5}])
    handle.remove()
    means = torch.stack([part.mean(dim=(0, 2, 3)) for part in seen])
    torch.testing.assert_close(norm.running_mean, means.mean(0))
    torch.testing.assert_close(norm.running_var, torch.stack([part.var(dim=(0, 2, 3)) for part in seen]).mean(0))
    assert norm.momentum == 0.1 and not model.training
    recompute_batchnorm_statistics(llama(), [IDS])
