"""Chunked output layer and loss against the stock formula; losses per token and per row."""

from __future__ import annotations

import errno
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy, embedding, linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers.loss.loss_utils import ForCausalLMLoss, fixed_cross_entropy

from scu_trainer.train.loss.rows import kernels, pages, softmax
from scu_trainer.train.loss.rows.gradient_sums import can_add_rows, embed
from scu_trainer.train.loss.rows.kernels import (
    chunked_linear_cross_entropy,
    rows_in_chunk,
    token_losses_of_logits,
)
from scu_trainer.train.loss.rows.row_readings import RowLossReading, row_losses

TOKENS, SIZE, VOCAB = 37, 12, 83
IGNORED = -100
NUM_ITEMS = 11


class Case:
    """A head, hidden states and targets, some of them ignored; ``parts`` require gradients."""

    def __init__(self, dtype=torch.float32, with_bias=True, seed=0, scale=1.0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).mul(scale).to(dtype).requires_grad_()

        self.hidden, self.weight = draw(TOKENS, SIZE), draw(VOCAB, SIZE)
        self.bias = draw(VOCAB) if with_bias else None
        self.targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
        self.targets[::5] = IGNORED
        self.token_weights = torch.rand(TOKENS, generator=generator) + 0.5

    @property
    def head(self) -> tuple:
        return self.hidden, self.weight, self.bias

    @property
    def parts(self) -> list[torch.Tensor]:
        return [part for part in self.head if part is not None and part.requires_grad]

    def gradients(self, loss: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss, self.parts))

    def stock_loss(self) -> torch.Tensor:
        logits = linear(*self.head)
        if logits.dtype == torch.float64:  # ForCausalLMLoss rounds to float32
            return fixed_cross_entropy(logits, self.targets, NUM_ITEMS)
        return ForCausalLMLoss(logits, None, VOCAB, torch.tensor(NUM_ITEMS), shift_labels=self.targets)

    def chunked_loss(self, rows_per_chunk=8, **options) -> torch.Tensor:
        options = {"divisor": NUM_ITEMS, **options}
        return chunked_linear_cross_entropy(*self.head, self.targets, rows_per_chunk=rows_per_chunk, **options)[0]

    def as_float64(self) -> Case:
        """The same numbers in double precision."""
        other = Case(with_bias=self.bias is not None)
        for name, value in vars(self).items():
            if torch.is_tensor(value) and value.is_floating_point():
                value = value.detach().double().requires_grad_(value.requires_grad)
            setattr(other, name, value)
        return other


def apart(one, other) -> float:
    """Largest difference relative to the largest entry of ``other``, over all pairs."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(one, other, strict=True)]
    return float(max((a - b).abs().max() / b.abs().max() for a, b in pairs))


# -- against the stock formula -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("rows_per_chunk", [1, 2, 7, TOKENS, 1000, None])
def test_value_and_gradient_are_the_stock_ones_whatever_the_chunk(with_bias, dtype, tolerance, rows_per_chunk):
    case = Case(dtype, with_bias)
    stock, loss = case.stock_loss(), case.chunked_loss(rows_per_chunk)
    assert loss.dtype == stock.dtype
    assert apart([loss], [stock]) < tolerance
    assert apart(case.gradients(loss), case.gradients(stock)) < tolerance


@pytest.mark.parametrize("divisor", [7, 7.0, torch.tensor(7), torch.tensor(7.0)])
def test_any_kind_of_number_divides(divisor):
    case = Case()
    seven = cross_entropy(linear(*case.head), case.targets, reduction="sum") / 7
    loss = case.chunked_loss(divisor=divisor)
    assert apart([loss, *case.gradients(loss)], [seven, *case.gradients(seven)]) < 1e-6


def test_without_a_divisor_it_is_the_mean_over_valid_targets():
    case = Case()
    mean, loss = cross_entropy(linear(*case.head), case.targets), case.chunked_loss(divisor=None)
    assert apart([loss, *case.gradients(loss)], [mean, *case.gradients(mean)]) < 1e-6


def test_large_logits_do_not_overflow():
    case = Case(scale=10.0)
    loss, stock = case.chunked_loss(), case.stock_loss()
    assert linear(*case.head).max() > 100
    assert apart([loss, *case.gradients(loss)], [stock, *case.gradients(stock)]) < 1e-6


def test_a_token_of_weight_zero_counts_in_the_mean():
    case = Case()
    weights = (torch.arange(TOKENS) % 3 > 0).float()
    valid = int((case.targets != IGNORED).sum())
    mean, total = (case.chunked_loss(token_weights=weights, divisor=divisor) for divisor in (None, valid))
    assert torch.equal(mean, total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_weights_weigh_tokens(dtype):
    case, tolerance = Case(dtype), {torch.float32: 1e-6, torch.bfloat16: 0.02}[dtype]
    losses = cross_entropy(linear(*case.head).float(), case.targets, reduction="none")
    weighted = (losses * case.token_weights).sum() / NUM_ITEMS
    loss = case.chunked_loss(token_weights=case.token_weights)
    assert apart([loss, *case.gradients(loss)], [weighted, *case.gradients(weighted)]) < tolerance


def test_the_derivative_is_that_of_finite_differences():
    generator = torch.Generator().manual_seed(0)
    shapes = (6, 4), (9, 4), (9,)
    head = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    targets, weights = torch.tensor([1, 2, IGNORED, 8, 0, 3]), torch.tensor([1.0, 0.5, 1.0, 0.0, 2.0, 3.0])

    def loss(*head):
        options = {"token_weights": weights, "rows_per_chunk": 2}
        return chunked_linear_cross_entropy(*head, targets, **options)[0]

    assert torch.autograd.gradcheck(loss, head)


def test_tied_weights_add_the_gradients_of_both_uses():
    case, words = Case(with_bias=False), torch.arange(TOKENS)

    def gradient(loss_of) -> list[torch.Tensor]:
        case.hidden = torch.tanh(embedding(words, case.weight))
        return list(torch.autograd.grad(loss_of(), [case.weight]))

    assert apart(gradient(case.chunked_loss), gradient(case.stock_loss)) < 1e-6


def test_hidden_states_may_come_from_a_larger_graph():
    case = Case()
    inner, case.hidden = case.hidden, case.hidden.exp().sin()
    ours, stock = (
        torch.autograd.grad(loss, [inner], retain_graph=True) for loss in (case.chunked_loss(), case.stock_loss())
    )
    assert apart(ours, stock) < 1e-6


def test_a_scaled_loss_scales_the_gradient():
    case = Case()
    assert apart(case.gradients(case.chunked_loss() * 1024.0), case.gradients(case.stock_loss() * 1024.0)) < 1e-6


def test_half_precision_is_no_further_from_the_truth_than_the_stock_loss():
    for seed in range(5):
        for dtype in (torch.bfloat16, torch.float16):
            case = Case(dtype, seed=seed)
            truth = case.as_float64()
            exact = truth.gradients(truth.stock_loss())
            ours, stock = case.gradients(case.chunked_loss()), case.gradients(case.stock_loss())
            assert [gradient.dtype for gradient in ours] == [dtype] * 3
            for mine, its, true in zip(ours, stock, exact, strict=True):
                assert apart([mine], [true]) < 1.5 * apart([its], [true])


def test_autocast_multiplies_in_its_dtype_and_keeps_float32_gradients():
    for seed in range(5):
        case = Case(seed=seed)
        truth = case.as_float64()
        exact = truth.gradients(truth.stock_loss())
        with torch.autocast("cpu", torch.bfloat16):
            loss, stock = case.chunked_loss(), case.stock_loss()
        assert torch.equal(loss, stock) or apart([loss], [stock]) < 1e-6  # the logits are the same bfloat16 numbers
        assert loss.dtype == torch.float32
        for mine, its, true in zip(case.gradients(loss), case.gradients(stock), exact, strict=True):
            assert mine.dtype == torch.float32
            assert apart([mine], [true]) < 1.5 * apart([its], [true])


def test_autocast_leaves_double_precision_alone():
    case = Case(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        loss = case.chunked_loss()
    assert torch.equal(loss, case.chunked_loss())


def test_a_large_divisor_does_not_drown_a_half_precision_gradient():
    """With a loss scale, as float16 is trained: 65536 / a million tokens."""
    case = Case(torch.float16)
    truth = case.as_float64()
    ours = case.gradients(case.chunked_loss(divisor=1_000_000) * 65536.0)
    exact = truth.gradients(truth.chunked_loss(divisor=1_000_000) * 65536.0)
    assert apart(ours, exact) < 0.01


# -- what takes part ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [("weight", "bias"), ("weight",), ("hidden",), ("hidden", "weight")])
def test_frozen_parts_get_no_gradient_and_cost_none(frozen):
    case = Case()
    for name in frozen:
        getattr(case, name).requires_grad_(False)
    loss = case.chunked_loss()
    held = [gradient is not None for gradient in loss.grad_fn.gradients]
    assert held == [part.requires_grad for part in case.head]
    assert apart(case.gradients(loss), case.gradients(case.stock_loss())) < 1e-6


def test_without_gradients_there_are_losses_alone():
    case = Case()
    with torch.no_grad(), Allocations() as seen:
        loss, token_losses = chunked_linear_cross_entropy(*case.head, case.targets, divisor=NUM_ITEMS)
    assert not loss.requires_grad
    assert (VOCAB, SIZE) not in seen.shapes  # no gradient of the weight
    assert apart([loss], [case.stock_loss()]) < 1e-6
    assert apart([token_losses.sum() / NUM_ITEMS], [loss]) < 1e-6


def test_token_losses_are_those_of_the_stock_formula_and_are_detached():
    case = Case()
    _, token_losses = chunked_linear_cross_entropy(*case.head, case.targets, rows_per_chunk=8)
    expected = cross_entropy(linear(*case.head), case.targets, reduction="none")
    assert not token_losses.requires_grad
    assert token_losses.dtype == torch.float32
    assert apart([token_losses], [expected]) < 1e-6
    assert (token_losses[case.targets == IGNORED] == 0).all()


@pytest.mark.parametrize("divisor", [NUM_ITEMS, None, 0])
def test_no_valid_target_gives_zero_gradients(divisor):
    case = Case()
    case.targets.fill_(IGNORED)
    loss = case.chunked_loss(divisor=divisor)
    assert loss.item() == 0.0 if divisor else math.isnan(loss.item())  # as the stock sum and the stock mean
    assert all((gradient == 0).all() for gradient in case.gradients(loss))


def test_one_token():
    case = Case()
    case.hidden, case.targets = case.hidden[:1].detach().requires_grad_(), torch.tensor([3])
    loss, stock = case.chunked_loss(), case.stock_loss()
    assert apart([loss, *case.gradients(loss)], [stock, *case.gradients(stock)]) < 1e-6


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_token_of_weight_zero_takes_no_part_whatever_its_loss(poison):
    case, bad = Case(torch.float64), 4
    with torch.no_grad():
        case.hidden[bad] = poison
    weights = torch.ones(TOKENS).index_fill(0, torch.tensor([bad]), 0.0)
    options = {"token_weights": weights, "divisor": NUM_ITEMS, "rows_per_chunk": 8}
    loss, token_losses = chunked_linear_cross_entropy(*case.head, case.targets, **options)
    ours = case.gradients(loss)
    with torch.no_grad():
        case.hidden[bad] = 0.0
    case.targets[bad] = IGNORED
    assert not token_losses[bad].isfinite()
    assert token_losses.isfinite().sum() == TOKENS - 1
    assert (ours[0][bad] == 0).all()
    stock = case.stock_loss()
    assert apart([loss, *ours], [stock, *case.gradients(stock)]) < 1e-12


def test_a_token_of_weight_one_shows_its_nan():
    case = Case()
    with torch.no_grad():
        case.hidden[4] = math.nan
    assert case.chunked_loss().isnan()


@pytest.mark.parametrize("target", [VOCAB, -1, 10**6])
def test_targets_outside_the_vocabulary_are_refused(target):
    case = Case()
    case.targets[3] = target
    with pytest.raises(IndexError, match=f"1 targets, the first of them {target}, .* 0 to {VOCAB - 1}, and -100"):
        case.chunked_loss()


def test_shapes_that_do_not_fit_are_refused():
    case = Case()
    case.targets = case.targets[:-1]
    with pytest.raises(ValueError, match=r"hidden \(37, 12\), targets \(36,\) found"):
        case.chunked_loss()


# -- as part of a graph ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_under_activation_checkpointing(use_reentrant):
    case = Case()

    def run(hidden):
        return chunked_linear_cross_entropy(hidden, case.weight, case.bias, case.targets, divisor=NUM_ITEMS)

    loss, token_losses = checkpoint(run, case.hidden, use_reentrant=use_reentrant)
    loss.backward()
    assert torch.equal(token_losses, run(case.hidden)[1])
    assert apart([part.grad for part in case.parts], case.gradients(case.stock_loss())) < 1e-6


def test_a_second_backward_through_a_kept_graph_gives_the_same():
    case = Case()
    loss = case.chunked_loss(token_weights=case.token_weights)
    first, second = (torch.autograd.grad(loss * 3, case.parts, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_of_several_calls_accumulate():
    case = Case()
    for _ in range(2):
        case.chunked_loss().backward()
    doubled = [2 * gradient for gradient in case.gradients(case.stock_loss())]
    assert apart([part.grad for part in case.parts], doubled) < 1e-6


def test_a_second_derivative_is_refused():
    case = Case()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(case.chunked_loss(), [case.hidden], create_graph=True)


def test_a_weight_changed_before_a_second_backward_is_noticed():
    case = Case()
    loss = case.chunked_loss()
    with torch.no_grad():
        case.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- gradients that are added to those that are there ------------------------------------------------------------------


@pytest.fixture
def case() -> Case:
    return Case(torch.float64)


@pytest.mark.parametrize("rows_per_chunk", [8, None])
def test_the_gradient_of_the_weight_is_added_in_place(case, rows_per_chunk):
    case.chunked_loss(rows_per_chunk).backward()
    before, version = case.weight.grad, case.weight.grad._version
    case.chunked_loss(rows_per_chunk).backward()
    assert case.weight.grad is before and before._version > version  # what recovery looks at after an out-of-memory
    doubled = [2 * gradient for gradient in case.gradients(case.stock_loss())]
    assert apart([part.grad for part in case.parts], doubled) < 1e-12


@pytest.mark.parametrize("rows_per_chunk", [8, None])
def test_who_asks_for_the_gradient_gets_it_and_nothing_is_added(case, rows_per_chunk):
    case.chunked_loss(rows_per_chunk).backward()
    before = case.weight.grad.clone()
    asked = case.gradients(case.chunked_loss(rows_per_chunk))
    assert apart(asked, case.gradients(case.stock_loss())) < 1e-12
    assert torch.equal(case.weight.grad, before)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_the_weight_sees_every_gradient(case, register):
    seen = []
    getattr(case.weight, register)(lambda tensor: seen.append(tensor.shape))
    for _ in range(2):
        case.chunked_loss(None).backward()
    assert len(seen) == 2


def test_a_gradient_of_another_kind_is_left_to_torch(case):
    case.weight.grad = torch.zeros_like(case.weight).to_sparse()
    case.chunked_loss(None).backward()
    assert apart([case.weight.grad], case.gradients(case.stock_loss())[1:2]) < 1e-12


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_rows_of_the_embedding_are_added_in_place(padding_idx):
    words = torch.tensor([[5, 3, 5], [1, 0, 3]])
    ours, stock = (torch.nn.Embedding(VOCAB, SIZE, padding_idx, dtype=torch.float64) for _ in range(2))
    torch.nn.init.ones_(ours.weight)  # the padding's row too, else it has no gradient anyway
    stock.load_state_dict(ours.state_dict())
    made = []
    for _ in range(2):
        embed(ours, words).square().sum().backward()
        stock(words).square().sum().backward()
        made.append(ours.weight.grad.data_ptr())
        assert apart([ours.weight.grad], [stock.weight.grad]) < 1e-12
    assert made[0] == made[1]
    assert can_add_rows(ours) and not can_add_rows(torch.nn.Embedding(VOCAB, SIZE, sparse=True))


# -- memory ------------------------------------------------------------------------------------------------------------


def test_buffers_on_huge_pages_change_nothing(case, monkeypatch):
    stock = case.chunked_loss(None)
    expected = [stock, *case.gradients(stock)]
    monkeypatch.setattr(pages, "SMALLEST_BYTES", 0)
    for rows_per_chunk in (8, None):
        loss = case.chunked_loss(rows_per_chunk)
        assert apart([loss, *case.gradients(loss)], expected) < 1e-12
    assert not pages.new_zeros(case.weight, (3, 5), torch.float32).any()


class Allocations(TorchDispatchMode):
    """Shape of every tensor that an operation gives or writes, and elements of the largest storage among them."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()
        self.largest_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            self.shapes.add(tuple(tensor.shape))
            elements = tensor.untyped_storage().nbytes() // tensor.element_size()
            self.largest_elements = max(self.largest_elements, elements)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_tensor_is_one_chunk_of_logits(dtype):
    tokens, size, vocab, rows = 512, 8, 1000, 16
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, size, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, size, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    with Allocations() as seen:
        chunked_linear_cross_entropy(hidden, weight, None, targets, rows_per_chunk=rows)[0].backward()
    assert seen.largest_elements == rows * vocab
    with Allocations() as stock:
        cross_entropy(linear(hidden, weight).float(), targets).backward()
    assert stock.largest_elements == tokens * vocab


@pytest.mark.parametrize("with_gradient", [True, False])
def test_blocks_of_rows_give_what_all_rows_give(with_gradient, monkeypatch):
    """The pass over the logits, whose blocks are those that fit the caches of all threads."""
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(35, VOCAB, generator=generator), torch.randint(0, VOCAB, (35,), generator=generator)
    expected = softmax._softmax_in_place(logits.clone(), targets, with_gradient)
    monkeypatch.setattr(softmax, "BLOCK_BYTES", 4 * VOCAB * 3 + 1)  # three rows of each thread
    work = softmax.kernel_for(logits.device, logits.dtype)
    with Allocations() as seen:
        losses, signal = work(logits, targets, with_gradient)
    assert torch.equal(losses, expected[0]) and losses.shape == (35,)
    assert signal is logits
    assert not with_gradient or torch.equal(signal, expected[1])
    assert (35, VOCAB) not in seen.shapes and (3 * torch.get_num_threads(), VOCAB) in seen.shapes


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 0.02)]
)
def test_a_soft_cap_bounds_the_logits(dtype, tolerance, monkeypatch):
    """Most of these logits are beyond the cap, where the gradient through it nearly vanishes."""
    case, cap = Case(dtype, scale=2.0), 3.0
    logits = linear(*case.head).to(torch.float64 if dtype == torch.float64 else torch.float32)
    capped = cap * torch.tanh(logits / cap)
    assert (logits.abs() > cap).float().mean() > 0.5
    losses = cross_entropy(capped, case.targets, reduction="none")
    expected = (losses * case.token_weights).sum() / NUM_ITEMS
    monkeypatch.setattr(softmax, "BLOCK_BYTES", 8 * VOCAB * 3 + 1)
    found, found_losses = chunked_linear_cross_entropy(
        *case.head, case.targets, token_weights=case.token_weights, divisor=NUM_ITEMS, rows_per_chunk=16, soft_cap=cap
    )
    assert apart([found, found_losses], [expected, losses]) < tolerance
    assert apart(case.gradients(found), case.gradients(expected)) < tolerance


def test_a_soft_cap_holds_one_block_more(monkeypatch):
    logits, targets = torch.randn(35, VOCAB), torch.randint(0, VOCAB, (35,))
    monkeypatch.setattr(softmax, "BLOCK_BYTES", 4 * VOCAB * 3 + 1)
    work = softmax.with_soft_cap(softmax.kernel_for(logits.device, logits.dtype), 2.0)
    with Allocations() as seen:
        work(logits, targets, True)
    assert (35, VOCAB) not in seen.shapes


def in_float32(logits, targets, with_gradient):
    """As the kernel for a card: half precision is read and written, the arithmetic is float32."""
    losses, signal = softmax._softmax_in_place(logits.float(), targets, with_gradient)
    return losses, logits.copy_(signal) if with_gradient else logits


def broken(*_):
    raise RuntimeError("Failed to find C compiler")


def without_room(*_):
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def wrong(*given):
    losses, signal = in_float32(*given)
    return losses * 1.01, signal


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (in_float32, ""),
        (broken, "RuntimeError: Failed to find C compiler"),
        (without_room, "Cannot allocate memory"),
        (wrong, "its results are"),
    ],
)
def test_a_kernel_for_a_card_is_tried_before_it_is_used(kernel, said, monkeypatch, caplog):
    module = ModuleType("scu_trainer.train.loss.rows.triton_softmax")
    module.softmax_in_place = kernel
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = softmax._fused.__wrapped__(torch.device("cpu"), torch.bfloat16)
    assert found is (softmax._softmax_in_place if said else in_float32)
    assert softmax.reads_half(found) == (not said)
    assert said in caplog.text and bool(caplog.records) == bool(said)


def test_without_triton_the_loss_is_torchs_own_and_nobody_is_warned(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "scu_trainer.train.loss.rows.triton_softmax", raising=False)
    assert softmax._fused.__wrapped__(torch.device("cpu"), torch.bfloat16) is softmax._softmax_in_place
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_a_full_card_is_no_broken_kernel(kind, monkeypatch):
    def full(*_):
        raise kind("Triton Error [CUDA]: out of memory")

    module = ModuleType("scu_trainer.train.loss.rows.triton_softmax")
    module.softmax_in_place = full
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(kind):
        softmax._fused.__wrapped__(torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize("with_bias", [True, False])
def test_half_precision_is_not_copied_for_a_kernel_that_reads_it(with_bias, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    rows, vocab, size = 48, 300, 16
    hidden, weight = torch.randn(rows, size, generator=generator), torch.randn(vocab, size, generator=generator)
    bias = torch.randn(vocab, generator=generator) if with_bias else None
    targets, weights = torch.arange(rows), torch.linspace(0.5, 2.0, rows)

    buffers = []

    def new_empty(tensor, shape, dtype):
        buffers.append(dtype)
        return pages.new_empty(tensor, shape, dtype)

    def gradients():
        buffers.clear()
        leaves = [one.clone().requires_grad_() for one in (hidden, weight, bias) if one is not None]
        with torch.autocast("cpu", torch.bfloat16):
            given = [*leaves, *[None] * (3 - len(leaves))]
            loss, losses = chunked_linear_cross_entropy(*given, targets, token_weights=weights, divisor=50.0)
        loss.backward()
        return [losses, *(leaf.grad for leaf in leaves)]

    monkeypatch.setattr(kernels, "new_empty", new_empty)
    expected = gradients()
    assert buffers == [torch.bfloat16, torch.float32]
    monkeypatch.setattr(kernels, "kernel_for", lambda device, dtype: in_float32)
    monkeypatch.setattr(kernels, "compiles_shapes", lambda device, dtype: False)  # as on a card
    found = gradients()
    assert buffers == [torch.bfloat16]
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 0.01 * other.norm()


def test_the_gradient_of_the_weight_is_handed_on_without_a_copy():
    case = Case()
    loss = case.chunked_loss()
    made = loss.grad_fn.gradients[1].data_ptr()
    loss.backward()
    assert case.weight.grad.data_ptr() == made


@pytest.mark.parametrize(
    ("tokens", "of_weight_zero", "sizes"),
    [
        (1, 0, [1]),
        (256, 0, [256]),
        (257, 0, [160, 97]),
        (700, 0, [256, 256, 188]),
        (300, 257, [43, 160, 97]),
        (300, 300, [160, 140]),
    ],
)
def test_chunks_are_of_like_size_and_hold_each_token_once(tokens, of_weight_zero, sizes, monkeypatch):
    seen, buffers = [], set()
    losses = kernels._OutputLayer.losses

    def watched(layer, rows, *given):
        seen.append(rows.clone())
        buffers.add(tuple(layer.product.shape))
        return losses(layer, rows, *given)

    monkeypatch.setattr(kernels._OutputLayer, "losses", watched)
    hidden, weight, weights = torch.randn(tokens, 4), torch.randn(9, 4), torch.ones(tokens)
    weights[:of_weight_zero] = 0
    chunked_linear_cross_entropy(hidden, weight, None, torch.arange(tokens) % 9, token_weights=weights)
    assert [len(rows) for rows in seen] == sizes
    assert torch.equal(torch.cat(seen).sort(dim=0).values, hidden.sort(dim=0).values)
    assert buffers == {(max(sizes), 9)}, "as long as the longest chunk"


@pytest.mark.parametrize(
    ("card_gib", "share", "rows"), [(80, 1.0, 2048), (8, 1.0, 262), (80, 0.1, 262), (2, 1.0, 256), (80, 0.01, 256)]
)
def test_rows_of_a_chunk_follow_what_may_be_used_of_a_card(monkeypatch, card_gib, share, rows):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=card_gib * 2**30)
    )
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: share)
    assert rows_in_chunk(128_000, torch.device("cuda")) == rows
    assert rows_in_chunk(128_000, torch.device("cpu")) == rows_in_chunk(128_000) == 256
    with kernels.chunks_as_on_gpu(kernels.usable_gpu_bytes(torch.device("cuda"))):
        assert rows_in_chunk(128_000, torch.device("cpu")) == rows
    assert rows_in_chunk(128_000) == 256


# -- losses from logits, per row ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows_per_chunk", [1, 5, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_token_losses_of_logits(rows_per_chunk, dtype):
    logits = torch.randn(3, 7, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits = logits.to(dtype).requires_grad_()
    targets = torch.arange(21).view(3, 7).index_fill(1, torch.tensor([6]), IGNORED)
    losses = token_losses_of_logits(logits, targets, rows_per_chunk=rows_per_chunk)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = cross_entropy(logits.to(wide).flatten(0, 1), targets.flatten(), reduction="none")
    assert losses.dtype == wide
    assert not losses.requires_grad
    assert torch.equal(losses, expected)


def test_token_losses_of_logits_convert_one_chunk_at_a_time():
    logits = torch.randn(64, 100).bfloat16()
    with Allocations() as seen:
        token_losses_of_logits(logits, torch.arange(64), rows_per_chunk=4)
    assert max(math.prod(shape) for shape in seen.shapes if shape != (64, 100)) == 4 * 100


def test_row_losses_keep_rows_apart():
    targets = torch.tensor([[1, 2, IGNORED], [IGNORED] * 3, [4, 5, 6]])
    token_losses = torch.tensor([1.0, 2.0, 0.0, 0.0, 0.0, 0.0, math.nan, 1.0, 1.0])
    sums, counts = row_losses(token_losses, targets)
    assert counts.tolist() == [2, 0, 3]
    assert sums[:2].tolist() == [3.0, 0.0]
    assert sums[2].isnan()


@pytest.mark.parametrize("shape", [(4, 6, 10), (4, 10)])
def test_row_sums_add_up_to_the_stock_sum(shape):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=generator).requires_grad_()
    targets = torch.randint(0, 10, shape[:-1], generator=generator)
    targets[0] = IGNORED
    reading = RowLossReading("tokens" if len(shape) == 3 else "classes", True)
    sums = reading.sums_with_gradient({"logits": logits}, targets)
    stock = cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
    assert sums.shape == (4,)
    assert sums[0] == 0
    ours, its = (torch.autograd.grad(loss, [logits]) for loss in (sums.sum(), stock))
    assert apart([sums.sum(), *ours], [stock, *its]) < 1e-6
