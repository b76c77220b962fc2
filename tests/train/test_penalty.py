"""ParamBPT against dense float64 references, and what the two actuators do to weights and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from scu_trainer.errors import ControlError
from scu_trainer.train.regularization.distances import BLOCK_VALUES
from scu_trainer.train.regularization.penalty import Prior, decay_stochastically, param_bpt, penalty_coefficient
from tests.tiny import llama, lora


class Layers(nn.Module):
    """One layer of each kind that adapters know."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 12)
        self.linear = nn.Linear(12, 10)
        self.conv = nn.Conv2d(3, 8, kernel_size=(3, 2))


def adapted(seed: int = 0, **changes):
    """``Layers`` with rank-4 adapters on all of them, every adapter weight away from its usual start."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=12, target_modules=["embedding", "linear", "conv"], **changes)
    model = get_peft_model(Layers(), config)
    scatter(model)
    return model


@torch.no_grad()
def scatter(model: nn.Module, size: float = 0.3) -> None:
    for parameter in trainable(model):
        parameter.add_(size * torch.randn_like(parameter))


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def dense_updates(model: nn.Module) -> list[torch.Tensor]:
    """scale * B A of every adapter as PEFT itself would merge it, in float64."""
    layers = [m for m in model.modules() if hasattr(m, "get_delta_weight")]
    return [layer.get_delta_weight("default").detach().double() for layer in layers]


def squared_distance(after: list[torch.Tensor], before: list[torch.Tensor]) -> float:
    return sum(float((a.detach().double() - b.double()).square().sum()) for a, b in zip(after, before, strict=True))


def snapshot(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainable(model)]


# -- measuring ---------------------------------------------------------------------------------------------------------


def test_param_bpt_by_hand():
    """||w - w0||^2 = 3, sigma 0.5, N 100: 3 / (2 * 0.25 * 100 * ln 2)."""
    assert param_bpt(3.0, sigma=0.5, tokens=100.0) == pytest.approx(0.06 / math.log(2.0))
    assert penalty_coefficient(2.0, sigma=0.5, tokens=100.0) == pytest.approx(0.08)


@pytest.mark.parametrize("prior", ["init", "zero"])
def test_distance_of_all_weights_against_float64(prior):
    model = llama()
    start = snapshot(model) if prior == "init" else [torch.zeros_like(p) for p in trainable(model)]
    measured = Prior(model, prior)
    assert float(measured.squared_distance()) == pytest.approx(squared_distance(trainable(model), start), rel=1e-6)
    scatter(model, 1e-3)
    expected = squared_distance(trainable(model), start)
    assert float(measured.squared_distance()) == pytest.approx(expected, rel=1e-6)
    assert expected > 0


def test_distance_of_a_large_tensor_does_not_drown_in_rounding():
    """Four million equal steps: adding them up one by one in float32 loses about 1 %."""
    model = nn.Linear(2000, 2000, bias=False)
    prior = Prior(model)
    with torch.no_grad():
        model.weight.copy_(prior.starts[0] + 0.1)
    expected = squared_distance(trainable(model), prior.starts)
    assert float(prior.squared_distance()) == pytest.approx(expected, rel=1e-6)


class Mixed(nn.Module):
    """Small and large tensors, in layouts and types of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Conv2d(64, 600, 3).to(memory_format=torch.channels_last)
        self.rows = nn.Linear(1000, 700)
        self.table = nn.Parameter(torch.randn(900, 800).t())
        self.precise = nn.Parameter(torch.randn(30, 20, dtype=torch.float64))
        self.large_and_precise = nn.Parameter(torch.randn(600, 500, dtype=torch.float64))
        self.number = nn.Parameter(torch.tensor(0.5))


@pytest.mark.parametrize("prior", ["init", "zero"])
def test_each_value_is_compared_with_its_own_start(prior):
    torch.manual_seed(0)
    model = Mixed()
    start = snapshot(model) if prior == "init" else [torch.zeros_like(p) for p in trainable(model)]
    measured = Prior(model, prior)
    scatter(model)
    for _ in range(2):  # the second one finds the memory of the first
        assert float(measured.squared_distance()) == pytest.approx(squared_distance(trainable(model), start), rel=1e-6)


def test_a_start_of_another_layout_than_its_weight():
    """A checkpoint's start is contiguous, whatever the weight has become."""
    torch.manual_seed(0)
    model = nn.Conv2d(64, 600, 3)
    prior = Prior(model)
    model.to(memory_format=torch.channels_last)
    scatter(model)
    assert float(prior.squared_distance()) == pytest.approx(squared_distance(trainable(model), prior.starts), rel=1e-6)


@pytest.mark.parametrize("size", [32, 600])
def test_a_small_step_in_bfloat16_is_measured_in_float32(size):
    """4 becomes 4.03125, its neighbour; a start of 1/3 is not one of the neighbours of either."""
    model = nn.Linear(size, size, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1 / 3)
    prior = Prior(model)
    with torch.no_grad():
        model.weight.fill_(4.03125)
    expected = squared_distance(trainable(model), prior.starts)
    assert float(prior.squared_distance()) == pytest.approx(expected, rel=1e-6)


def test_frozen_weights_do_not_count():
    model = Layers()
    model.embedding.requires_grad_(False)
    prior = Prior(model)
    with torch.no_grad():
        model.embedding.weight.add_(1.0)
        model.linear.bias.add_(0.5)
    assert float(prior.squared_distance()) == pytest.approx(10 * 0.25)


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}], ids=str)
@pytest.mark.parametrize("kind", ["init", "zero"])
def test_effective_distance_is_that_of_the_merged_weights(kind, changes):
    """Embedding, linear and convolutional adapters whose B did not start at zero."""
    model = adapted(**changes)
    start = dense_updates(model) if kind == "init" else [torch.zeros(())] * 3
    prior = Prior(model, kind)
    scatter(model)
    updates = dense_updates(model)
    assert [tuple(update.shape) for update in updates] == [(11, 12), (10, 12), (8, 3, 3, 2)]
    assert float(prior.squared_distance()) == pytest.approx(squared_distance(updates, start), rel=1e-5)


def test_effective_distance_from_the_usual_start():
    """B starts at zero: the distance is the norm of scale * B A, whatever A started from."""
    model = lora(llama(), r=4, alpha=8.0)
    prior = Prior(model)
    assert float(prior.squared_distance()) == 0.0
    assert [group.b_starts_at_zero for group in prior._groups] == [True] * len(prior._groups)
    scatter(model)
    expected = squared_distance(dense_updates(model), [torch.zeros(())] * 14)
    assert float(prior.squared_distance()) == pytest.approx(expected, rel=1e-5)


def test_effective_distance_of_a_small_change_does_not_cancel():
    """B A and B0 A0 agree in five digits; the difference of their float32 norms would be noise."""
    model = adapted()
    start = [update.clone() for update in dense_updates(model.double())]
    prior = Prior(model.float())
    scatter(model, 1e-5)
    expected = squared_distance(dense_updates(model.double()), start)
    model.float()
    assert float(prior.squared_distance()) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("kind", ["init", "zero"])
def test_effective_distance_ignores_how_a_and_b_share_the_scale(kind):
    model = adapted()
    prior = Prior(model, kind)
    scatter(model)
    before = float(prior.squared_distance())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.mul_(8.0 if "lora_A" in name or "lora_embedding_A" in name else 1.0 / 8.0)
    assert float(prior.squared_distance()) == pytest.approx(before, rel=1e-5)


def test_factors_are_measured_as_they_are():
    model = adapted()
    start = snapshot(model)
    prior = Prior(model, measure="factors")
    scatter(model)
    assert float(prior.squared_distance()) == pytest.approx(squared_distance(trainable(model), start), rel=1e-6)


def test_trained_weights_beside_adapters_count_as_they_are():
    model = adapted()
    model.base_model.model.linear.base_layer.bias.requires_grad_(True)
    prior = Prior(model)
    with torch.no_grad():
        model.base_model.model.linear.base_layer.bias.add_(0.5)
    assert float(prior.squared_distance()) == pytest.approx(10 * 0.25)


# -- pulling -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=str)
@pytest.mark.parametrize("kind", ["init", "zero"])
@pytest.mark.parametrize("shrink", [1e-5, 0.02, 0.9])
def test_pull_is_the_analytic_step(kind, shrink, dtype, tolerance):
    model = adapted().to(dtype)
    prior = Prior(model, kind)
    start = [w.double() for w in snapshot(model)] if kind == "init" else [0.0] * len(trainable(model))
    scatter(model, 3.0)
    before = [w.double() for w in snapshot(model)]
    prior.decay(shrink)
    for weight, w, w0 in zip(trainable(model), before, start, strict=True):
        torch.testing.assert_close(weight.double(), w + shrink * (w0 - w), rtol=tolerance, atol=tolerance)
        assert not torch.equal(weight.double(), w)


def test_pull_leaves_w0_and_frozen_weights_alone():
    model = adapted()
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    prior = Prior(model)
    start = [w.clone() for w in prior.starts]
    scatter(model)
    prior.decay(0.5)
    assert all(torch.equal(a, b) for a, b in zip(prior.starts, start, strict=True))
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if not p.requires_grad)
    prior.decay(1.0)
    assert float(prior.squared_distance()) == 0.0


SMALL_DECAY = 5e-4  # bfloat16 has 8 bits: neighbours of w are 0.4 to 0.8 % away


def bfloat16_layer(size: int = 512) -> nn.Linear:
    torch.manual_seed(3)
    layer = nn.Linear(size, size, bias=False)
    nn.init.normal_(layer.weight)
    return layer.bfloat16()


def test_plain_rounding_would_move_nothing():
    """Why bfloat16 weights are rounded by chance."""
    weight = bfloat16_layer().weight.detach()
    assert torch.equal(weight * (1.0 - SMALL_DECAY), weight)
    assert torch.equal(weight.clone().lerp_(torch.zeros_like(weight), SMALL_DECAY), weight)


@pytest.mark.parametrize("kind", ["init", "zero"])
def test_stochastic_rounding_is_right_in_the_mean(kind):
    """A quarter of a million weights, 8 seeds: the mean move is the pull, within five standard errors."""
    layer = bfloat16_layer()
    prior = Prior(layer, kind)
    if kind == "init":
        with torch.no_grad():
            layer.weight.add_(torch.randn_like(layer.weight))
    before = layer.weight.detach().double()
    start = prior.starts[0].double() if kind == "init" else torch.zeros_like(before)
    wanted = SMALL_DECAY * (start - before)
    errors = []
    for seed in range(8):
        with torch.no_grad():
            layer.weight.copy_(before)
        prior.decay(SMALL_DECAY, seed=seed)
        errors.append(layer.weight.detach().double() - before - wanted)
    error = torch.stack(errors)
    for side in (before > 0, before < 0):
        part = error[:, side]
        standard_error = float(part.std()) / math.sqrt(part.numel())
        assert abs(float(part.mean())) < 5 * standard_error
        assert abs(float(wanted[side].mean())) > 20 * standard_error, "too little data to tell a pull from none"


def test_stochastic_rounding_moves_to_a_neighbour_only():
    weight = torch.tensor([1.0, -1.0, 0.0, 300.0], dtype=torch.bfloat16)
    results = set()
    for seed in range(200):
        moved = weight.clone()
        decay_stochastically(moved, torch.zeros(()), 1e-3, torch.Generator().manual_seed(seed))
        results.update(moved[:2].tolist())
        assert moved[2] == 0.0
        assert moved[3] in (298.0, 300.0)
    assert results == {1.0, 0.99609375, -1.0, -0.99609375}


def test_same_seed_same_weights_and_the_global_generator_is_untouched():
    before = bfloat16_layer().weight.detach().clone()
    outcomes = []
    torch.manual_seed(11)
    expected_draw = torch.rand(4)
    for seed in (5, 5, 6):
        layer = bfloat16_layer()
        torch.manual_seed(11)
        Prior(layer, "zero").decay(SMALL_DECAY, seed=seed)
        assert torch.equal(torch.rand(4), expected_draw)
        outcomes.append(layer.weight.detach().clone())
    assert torch.equal(outcomes[0], outcomes[1])
    assert not torch.equal(outcomes[0], outcomes[2])
    assert not torch.equal(outcomes[0], before)


def test_mixed_precision_of_weights():
    """bfloat16 and float32 weights side by side, as with adapters on some layers only."""
    model = Layers()
    model.linear.bfloat16()
    prior = Prior(model, "zero")
    before = [w.double() for w in snapshot(model)]
    prior.decay(0.5)
    for weight, w in zip(trainable(model), before, strict=True):
        torch.testing.assert_close(
            weight.double(), 0.5 * w, rtol=1e-2 if weight.dtype == torch.bfloat16 else 1e-6, atol=0
        )


# -- penalty gradient --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["init", "zero"])
def test_penalty_gradient_is_the_derivative_of_the_penalty(kind):
    """Against autograd on lambda ||w - w0||^2 / (2 sigma^2 N), added to a gradient that is there already."""
    lam, sigma, tokens = 3000.0, 0.1, 5000.0
    model = llama()
    start = snapshot(model) if kind == "init" else [torch.zeros_like(p) for p in trainable(model)]
    prior = Prior(model, kind)
    scatter(model)
    earlier = [torch.randn_like(p) for p in trainable(model)]
    distance = sum((p - w0).square().sum() for p, w0 in zip(trainable(model), start, strict=True))
    wanted = torch.autograd.grad(lam * distance / (2 * sigma**2 * tokens), trainable(model))
    for parameter, gradient in zip(trainable(model), earlier, strict=True):
        parameter.grad = gradient.clone()
    prior.add_penalty_gradient(penalty_coefficient(lam, sigma, tokens))
    for parameter, gradient, penalty in zip(trainable(model), earlier, wanted, strict=True):
        torch.testing.assert_close(parameter.grad - gradient, penalty, rtol=1e-6, atol=1e-6)
        assert float(penalty.norm()) > 10.0
    gradient_norm, distance_norm = prior.gradient_norms()
    assert distance_norm == pytest.approx(math.sqrt(float(distance.detach())), rel=1e-5)
    assert gradient_norm == pytest.approx(
        math.sqrt(sum(float(p.grad.square().sum()) for p in trainable(model))), rel=1e-5
    )


def test_weights_without_a_gradient_get_none():
    model = Layers()
    prior = Prior(model)
    scatter(model)
    model.linear.bias.grad = torch.zeros(10)
    prior.add_penalty_gradient(1.0)
    assert model.linear.weight.grad is None
    torch.testing.assert_close(model.linear.bias.grad, model.linear.bias.detach() - prior.starts[2])
    assert prior.gradient_norms()[0] == pytest.approx(float(model.linear.bias.grad.norm()), rel=1e-5)
    assert Prior(Layers()).gradient_norms() == (0.0, 0.0)


# -- gain --------------------------------------------------------------------------------------------------------------


def test_gain_is_unknown_before_the_weights_have_moved():
    assert Prior(llama()).measured_gain() is None


@pytest.mark.parametrize(
    ("kind", "measure", "gain"), [("init", "factors", 2.0), ("zero", "factors", 2.0), ("zero", "effective", 4.0)]
)
def test_gain_follows_from_the_measure(kind, measure, gain):
    """Both factors shrink: their product, the effective update, shrinks twice."""
    model = adapted()
    prior = Prior(model, kind, measure)
    scatter(model)
    before = snapshot(model)
    assert prior.measured_gain() == pytest.approx(gain, abs=2e-3)
    assert all(torch.equal(p, w) for p, w in zip(trainable(model), before, strict=True)), "a probe must not act"


def test_gain_of_full_tuning_is_two():
    model = llama()
    prior = Prior(model)
    scatter(model, 1e-3)
    assert prior.measured_gain() == pytest.approx(2.0, abs=2e-3)


def test_gain_of_adapters_lies_between_and_grows_with_the_way_of_a():
    model = lora(llama())
    prior = Prior(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    assert prior.measured_gain() == pytest.approx(2.0, abs=2e-3), "A is still where it started"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.mul_(100.0)
    assert prior.measured_gain() == pytest.approx(4.0, abs=0.1), "A's start no longer matters"


def test_measured_gain_predicts_the_real_pull():
    model = lora(llama())
    prior = Prior(model)
    scatter(model, 0.1)
    gain, before = prior.measured_gain(), float(prior.squared_distance())
    prior.decay(0.01)
    assert math.log(float(prior.squared_distance()) / before) / math.log(0.99) == pytest.approx(gain, rel=1e-4)
    assert 2.0 < gain < 4.0


def test_gain_of_bfloat16_weights_is_two_thanks_to_rounding_by_chance():
    layer = bfloat16_layer()
    prior = Prior(layer)
    with torch.no_grad():
        layer.weight.add_(0.01 * torch.randn_like(layer.weight))
    assert prior.measured_gain(SMALL_DECAY) == pytest.approx(2.0, abs=0.5)


def test_gain_vanishes_where_the_weights_cannot_follow():
    """One float32 step away from a large w0: a pull of 1 % of that step rounds to nothing."""
    layer = nn.Linear(8, 8, bias=False)
    nn.init.constant_(layer.weight, 1e6)
    prior = Prior(layer)
    with torch.no_grad():
        layer.weight.copy_(torch.nextafter(layer.weight, torch.tensor(math.inf)))
    assert prior.measured_gain() == pytest.approx(0.0, abs=1e-6)


# -- what is refused, and what a checkpoint holds ----------------------------------------------------------------------


def test_float16_weights_are_refused():
    with pytest.raises(ControlError, match=r"linear.weight is float16.*keep trainable weights in float32"):
        model = Layers()
        model.linear.half()
        Prior(model)


def test_float16_weights_that_are_frozen_are_fine():
    model = Layers()
    model.linear.half().requires_grad_(False)
    assert len(Prior(model).weights) == 3


def test_nothing_to_train_is_refused():
    with pytest.raises(ControlError, match="no trainable weights"):
        Prior(Layers().requires_grad_(False))


@pytest.mark.parametrize("where", ["meta", "empty"])
def test_weights_that_are_elsewhere_are_refused(where):
    layer = nn.Linear(4, 4, device="meta") if where == "meta" else nn.Linear(4, 4)
    if where == "empty":
        layer.weight.data = torch.empty(0)  # what sharding leaves behind
    with pytest.raises(ControlError, match=r"weight has no local floating-point values"):
        Prior(layer)


def test_a_weight_that_was_made_empty_has_no_distance():
    model = Layers()
    distance, model.none = float(Prior(model, "zero").squared_distance()), nn.Parameter(torch.empty(0, 1, 4))
    prior = Prior(model, "zero")
    assert "none" not in prior.names and float(prior.squared_distance()) == distance > 0


def test_state_dict_brings_w0_back():
    first, second = adapted(seed=0), adapted(seed=1)
    prior, other = Prior(first), Prior(second)
    assert prior.fingerprint() != other.fingerprint()
    other.load_state_dict(prior.state_dict())
    assert other.fingerprint() == prior.fingerprint()
    scatter(first)
    second.load_state_dict(first.state_dict())
    assert float(other.squared_distance()) == float(prior.squared_distance()) > 0
    assert Prior(first, "zero").state_dict() == {}
    assert Prior(first, "zero").fingerprint() == 0.0


def test_loading_a_w0_whose_b_is_not_zero_switches_the_formula():
    """The adapters of this model start with B = 0, those of the saved run did not."""
    model = lora(llama())
    prior = Prior(model)
    scatter(model)
    other_start = Prior(model).state_dict()
    start = dense_updates(model)
    scatter(model)
    prior.load_state_dict(other_start)
    assert float(prior.squared_distance()) == pytest.approx(squared_distance(dense_updates(model), start), rel=1e-5)


def test_w0_of_other_weights_is_refused():
    prior = Prior(llama())
    state = prior.state_dict()
    with pytest.raises(ControlError, match="1 missing, 0 unknown"):
        prior.load_state_dict(dict(list(state.items())[1:]))
    with pytest.raises(ControlError, match=r"has shape \(2, 2\)"):
        prior.load_state_dict({name: torch.zeros(2, 2) for name in state})


def test_fingerprint_against_float64():
    model = llama()
    expected = sum(float(p.detach().double().square().sum()) for p in model.parameters())
    assert Prior(model).fingerprint() == pytest.approx(expected, rel=1e-12)


class LargestFloat64(TorchDispatchMode):
    values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if torch.is_tensor(made) and made.dtype == torch.float64:
            self.values = max(self.values, made.numel())
        return made


def test_a_fingerprint_takes_little_memory_beside_a_full_card():
    prior = Prior(nn.Linear(1 << 10, 1 << 10))
    with LargestFloat64() as seen:
        prior.fingerprint()
    assert 0 < seen.values <= BLOCK_VALUES["cpu"] < 1 << 20


def test_w0_follows_a_model_that_is_moved():
    """DeepSpeed places a model after the trainer was made."""
    prior = Prior(llama())
    before = prior.starts
    prior._move_starts_to_weights()
    assert prior.starts is before
    prior.weights = [weight.to("meta") for weight in prior.weights]
    prior._move_starts_to_weights()
    assert {start.device.type for start in prior.starts} == {"meta"}
