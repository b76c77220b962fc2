"""The products of the output layer, by either library."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode

from scu_trainer.train.loops import flops
from scu_trainer.train.loss.rows import products
from scu_trainer.train.loss.rows.kernels import chunked_linear_cross_entropy

SIZE, VOCAB, TOKENS = 24, 101, 37


def weight(words: int = VOCAB, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(words, SIZE, dtype=dtype)


@pytest.fixture
def onednn(monkeypatch) -> list[tuple]:
    """As on a processor of AMD without a limit of memory, with small blocks: what oneDNN was given, call by call."""
    called = []
    multiplied = products.by_onednn
    monkeypatch.setattr(products, "_is_amd", lambda: True)
    monkeypatch.setattr(products, "_allocations_may_fail", lambda: False)
    monkeypatch.setattr(products, "FEWEST_WORDS", 40)
    monkeypatch.setattr(products, "BLOCK_WORDS", 40)
    monkeypatch.setattr(products, "by_onednn", lambda *given: called.append(given) or multiplied(*given))
    assert products.goes_through_onednn(weight())
    return called


@pytest.fixture(params=["oneDNN", "MKL"])
def either(request, onednn, monkeypatch) -> str:
    if request.param == "MKL":
        monkeypatch.setattr(products, "_is_amd", lambda: False)
    return request.param


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def is_near(found: torch.Tensor, exact: torch.Tensor) -> bool:
    return bool((found.double() - exact.double()).abs().max() <= 1e-6 * exact.abs().max())


# -- the same products -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 16, 50])
@pytest.mark.parametrize("with_bias", [True, False])
def test_products_are_those_of_the_layer(either, onednn, rows, with_bias):
    hidden, layer, bias = drawn(rows, SIZE), drawn(VOCAB, SIZE), drawn(VOCAB) if with_bias else None
    buffer = torch.full((rows + products.ALIGNED_ROWS, VOCAB), float("nan"))
    products.to_words(hidden, layer, bias, buffer[:rows])
    assert is_near(buffer[:rows], linear(hidden.double(), layer.double(), bias.double() if with_bias else None))
    assert buffer[rows:].isnan().all()
    signal = buffer[:rows].copy_(drawn(rows, VOCAB))
    assert is_near(products.from_words(signal, buffer, layer), signal.double() @ layer.double())
    assert len(onednn) == (3 + 1 if either == "oneDNN" else 0)  # logits in three blocks, then all words at once


@pytest.mark.parametrize("with_weights", [True, False])
def test_loss_and_gradients_are_those_in_double_precision(onednn, with_weights):
    parts = [drawn(TOKENS, SIZE), drawn(VOCAB, SIZE), drawn(VOCAB)]
    targets, weights = torch.arange(TOKENS), drawn(TOKENS).abs() if with_weights else None
    exact = [part.double().requires_grad_() for part in parts]
    logits = linear(*exact)
    losses = cross_entropy(logits, targets, reduction="none") * (1 if weights is None else weights)
    expected = torch.autograd.grad(losses.sum() / 7, exact)
    ours = [part.requires_grad_() for part in parts]
    loss, _ = chunked_linear_cross_entropy(*ours, targets, token_weights=weights, divisor=7, rows_per_chunk=16)
    for _ in range(2):  # the second backward computes all again
        found = torch.autograd.grad(loss, ours, retain_graph=True)
        assert all(is_near(one, other) for one, other in zip(found, expected, strict=True))
    assert len(onednn) == 2 * 3 * (3 + 1)


def test_a_bad_row_stays_in_its_row(onednn):
    hidden = drawn(TOKENS, SIZE)
    hidden[5] = float("nan")
    _, losses = chunked_linear_cross_entropy(hidden, drawn(VOCAB, SIZE), None, torch.arange(TOKENS))
    assert onednn and losses.isnan().nonzero().flatten().tolist() == [5]


def test_shapes_alone_go_the_same_way(onednn):
    """So that memory is predicted from what the loss allocates."""
    with FakeTensorMode():
        hidden, layer, out = torch.zeros(50, SIZE), torch.zeros(VOCAB, SIZE), torch.zeros(50, VOCAB)
        products.to_words(hidden, layer, None, out)
        assert products.from_words(out, torch.zeros(64, VOCAB), layer).shape == hidden.shape
    assert len(onednn) == 3 + 1


def test_few_shapes_are_asked_for(onednn):
    """oneDNN keeps a kernel for each."""
    layer = drawn(VOCAB, SIZE).requires_grad_()
    for tokens in range(1, 300, 7):
        hidden = drawn(tokens, SIZE).requires_grad_()
        chunked_linear_cross_entropy(hidden, layer, None, torch.arange(tokens) % VOCAB)[0].backward()
    assert {len(rows) for rows, *_ in onednn} == set(range(32, 257, 32))


class Multiplied(TorchDispatchMode):
    """Shapes of all products inside."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.shapes.append((*args[-2].shape, args[-1].size(1)))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("with_weights", [True, False])
def test_few_shapes_are_asked_for_in_half_precision(with_weights):
    """There every product is oneDNN's, that of the weight's gradient, too."""
    layer = drawn(VOCAB, SIZE).to(torch.bfloat16).requires_grad_()
    with Multiplied() as multiplied:
        for tokens in range(1, 300, 7):
            hidden = drawn(tokens, SIZE).to(torch.bfloat16).requires_grad_()
            targets, weights = torch.arange(tokens) % VOCAB, torch.ones(tokens) if with_weights else None
            chunked_linear_cross_entropy(hidden, layer, None, targets, token_weights=weights)[0].backward()
    rows = {size for shape in multiplied.shapes for size in shape} - {SIZE, VOCAB}
    assert rows == set(range(32, 257, 32))


def test_a_word_that_is_never_right_spoils_no_gradient_of_filled_rows():
    """Its bias is minus infinity, which a row of zeros keeps."""
    hidden, layer = drawn(TOKENS, SIZE).to(torch.bfloat16), drawn(VOCAB, SIZE).to(torch.bfloat16).requires_grad_()
    bias = torch.zeros(VOCAB, dtype=torch.bfloat16)
    bias[VOCAB - 1] = -torch.inf
    chunked_linear_cross_entropy(hidden, layer, bias, torch.arange(TOKENS))[0].backward()
    exact = layer.detach().double().requires_grad_()
    cross_entropy(linear(hidden.double(), exact, bias.double()), torch.arange(TOKENS)).backward()
    assert (layer.grad.double() - exact.grad).norm() < 1e-2 * exact.grad.norm()


# -- who gets them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_another_precision_stays_where_it_is(onednn, dtype):
    assert not products.goes_through_onednn(weight(dtype=dtype))


def test_few_words_stay_where_they_are(onednn):
    assert products.goes_through_onednn(weight(40)) and not products.goes_through_onednn(weight(39))


def test_a_turned_weight_and_one_with_gaps_stay_with_what_is_fast(onednn):
    hidden, out = drawn(20, SIZE), torch.empty(20, VOCAB)
    for layer in (drawn(SIZE, VOCAB).t(), drawn(VOCAB, 2 * SIZE)[:, ::2]):
        products.to_words(hidden, layer, None, out)
        assert is_near(out, hidden.double() @ layer.double().t())
        assert is_near(products.from_words(out, out, layer), out.double() @ layer.double())
    assert not onednn


def test_who_turns_onednn_off_gets_none_of_it(onednn, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not products.goes_through_onednn(weight())


def test_another_form_of_the_operator_is_left_alone(onednn, monkeypatch):
    monkeypatch.setattr(products, "SCHEMA", products.SCHEMA.replace("Tensor W", "Tensor W, int groups"))
    products._operator.cache_clear()
    try:
        assert not products.goes_through_onednn(weight())
    finally:
        products._operator.cache_clear()


REFUSED = products._allocations_may_fail
"""As it is outside of the fixture."""


@pytest.mark.parametrize("kind", ["RLIMIT_DATA", "RLIMIT_AS", None])
def test_a_process_with_a_limit_stays_with_what_raises(onednn, monkeypatch, kind):
    monkeypatch.setattr(products, "_allocations_may_fail", REFUSED)
    monkeypatch.setattr(products, "_counts_every_page", lambda: False)
    limits = {getattr(resource, kind): (2**40, resource.RLIM_INFINITY)} if kind else {}
    free = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda asked: limits.get(asked, free))
    assert products.goes_through_onednn(weight()) == (kind is None)
    monkeypatch.setattr(products, "_counts_every_page", lambda: True)
    assert not products.goes_through_onednn(weight())


@pytest.mark.parametrize(
    ("content", "is_amd"),
    [("vendor_id\t: AuthenticAMD\n", True), ("vendor_id\t: GenuineIntel\n", False), (None, False)],
)
def test_the_maker_of_the_processor_is_read(tmp_path: Path, content, is_amd):
    path = tmp_path / "proc" / "cpuinfo"
    path.parent.mkdir()
    if content is not None:
        path.write_text(content)
    assert products._is_amd.__wrapped__(tmp_path) == is_amd


@pytest.mark.parametrize(("content", "counts"), [("2\n", True), ("0\n", False), (None, False)])
def test_the_way_linux_gives_memory_is_read(tmp_path: Path, content, counts):
    path = tmp_path / "proc" / "sys" / "vm" / "overcommit_memory"
    path.parent.mkdir(parents=True)
    if content is not None:
        path.write_text(content)
    assert products._counts_every_page.__wrapped__(tmp_path) == counts


# -- what is counted ---------------------------------------------------------------------------------------------------


def test_the_peak_of_this_cpu_is_measured_by_the_faster_library(either, monkeypatch):
    asked = []
    monkeypatch.setattr(flops, "MATRIX_SIDE", 64)
    monkeypatch.setattr(flops, "MEASURE_S", 0.0)
    monkeypatch.setattr(flops, "by_onednn", lambda *given: asked.append("oneDNN"))
    monkeypatch.setattr(torch, "mm", lambda *given: asked.append("MKL"))
    assert flops.measured_tflops("fp32") > 0 and set(asked) == {either}
    asked.clear()
    assert flops.measured_tflops("bf16") > 0 and set(asked) == {"MKL"}


def test_operations_are_counted_where_the_counter_knows_the_product(onednn):
    with flops._without_fused_kernels():
        assert not products.goes_through_onednn(weight())
    assert products.goes_through_onednn(weight())


# -- a product that is added to a float32 sum, as on a card ------------------------------------------------------------


def test_a_full_card_does_not_say_that_products_cannot_be_added(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def on_cpu(make):
        return lambda *given, device, **options: make(*given, **options)

    stand_in = SimpleNamespace(addmm=full, ones=on_cpu(torch.ones), full=on_cpu(torch.full))
    monkeypatch.setattr(products, "torch", stand_in)
    with pytest.raises(torch.OutOfMemoryError):
        products.adds_to_float32.__wrapped__(torch.device("cuda", 0), torch.bfloat16)
