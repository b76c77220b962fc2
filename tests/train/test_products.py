"""The products of the output layer, by either library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from scu_trainer.train.loss.rows import products
from scu_trainer.train.loss.rows.kernels import chunked_linear_cross_entropy

SIZE, VOCAB = 24, 101


@pytest.fixture(params=[True, False], ids=["oneDNN", "MKL"])
def through_onednn(request, monkeypatch) -> bool:
    monkeypatch.setattr(products, "_is_amd", lambda: request.param)
    monkeypatch.setattr(products, "BLOCK_ROWS", 16)
    monkeypatch.setattr(products, "BLOCK_WORDS", 40)
    assert products.is_faster_in_onednn(torch.zeros(VOCAB, SIZE)) == request.param
    return request.param


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def is_near(found: torch.Tensor, exact: torch.Tensor) -> bool:
    return bool((found.double() - exact).abs().max() <= 1e-6 * exact.abs().max())


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 50])
@pytest.mark.parametrize("with_bias", [True, False])
def test_products_are_those_of_the_layer(through_onednn, rows, with_bias):
    hidden, weight, bias = drawn(rows, SIZE), drawn(VOCAB, SIZE), drawn(VOCAB) if with_bias else None
    buffer = torch.full((rows + 3, VOCAB), float("nan"))
    products.to_words(hidden, weight, bias, buffer[:rows])
    exact = hidden.double() @ weight.double().t() + (bias.double() if with_bias else 0)
    assert is_near(buffer[:rows], exact)
    assert buffer[rows:].isnan().all()
    signal = drawn(rows, VOCAB)
    assert is_near(products.from_words(signal, weight), signal.double() @ weight.double())


def test_weights_and_rows_need_not_lie_in_one_piece(through_onednn):
    hidden, weight = drawn(2 * SIZE, 20).t()[:, ::2], drawn(SIZE, VOCAB).t()
    out = torch.empty(20, VOCAB)
    products.to_words(hidden, weight, None, out)
    assert is_near(out, hidden.double() @ weight.double().t())
    assert is_near(products.from_words(out, weight), out.double() @ weight.double())


def test_the_loss_goes_through_them(through_onednn, monkeypatch):
    called = []
    onednn = products._onednn
    monkeypatch.setattr(products, "_onednn", lambda *given: called.append(given) or onednn(*given))
    hidden, weight = drawn(9, SIZE).requires_grad_(), drawn(VOCAB, SIZE).requires_grad_()
    chunked_linear_cross_entropy(hidden, weight, None, torch.arange(9))[0].backward()
    assert len(called) == (3 + 1) * through_onednn  # logits in three blocks, then the gradient of the hidden states


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_another_precision_stays_where_it_is(through_onednn, dtype):
    assert not products.is_faster_in_onednn(torch.zeros(VOCAB, SIZE, dtype=dtype))


def test_who_turns_onednn_off_gets_none_of_it(through_onednn, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not products.is_faster_in_onednn(torch.zeros(VOCAB, SIZE))


def test_few_words_stay_where_they_are(through_onednn):
    assert not products.is_faster_in_onednn(torch.zeros(39, SIZE))


def test_shapes_alone_are_not_multiplied(through_onednn):
    with FakeTensorMode():
        assert not products.is_faster_in_onednn(torch.zeros(VOCAB, SIZE))


def test_another_form_of_the_operator_is_left_alone(monkeypatch):
    monkeypatch.setattr(products, "_is_amd", lambda: True)
    monkeypatch.setattr(products, "SCHEMA", products.SCHEMA.replace("Tensor W", "Tensor W, int groups"))
    products._operator.cache_clear()
    try:
        assert not products.is_faster_in_onednn(torch.zeros(VOCAB, SIZE))
    finally:
        products._operator.cache_clear()


@pytest.mark.parametrize(
    ("content", "is_amd"),
    [("vendor_id\t: AuthenticAMD\n", True), ("vendor_id\t: GenuineIntel\n", False), (None, False)],
)
def test_the_maker_of_the_processor_is_read(tmp_path: Path, content, is_amd):
    path = tmp_path / "cpuinfo"
    if content is not None:
        path.write_text(content)
    assert products._is_amd.__wrapped__(path) == is_amd
