from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import BertForMaskedLM, BloomConfig, LlamaConfig

from scu_trainer.errors import ModelError
from scu_trainer.models.checkpointing import checkpoint_every_layer
from scu_trainer.models.kernels import best_attention, kernel_line
from scu_trainer.settings import ModelSettings
from scu_trainer.train.tasks.text import _with_best_attention
from tests import tiny

FLASH_CPU = "attention: sdpa, the flash kernel for CPU"
MATH = "attention: sdpa without a fused kernel (attention matrices are held whole)"
EAGER = "attention: eager (attention matrices are held whole)"
REFERENCE = "mamba: reference path (mamba_ssm and causal_conv1d are not installed)"

TOKENS = tiny.pad([tiny.Rows(2, 8)[i] for i in range(2)])
IMAGES = {"pixel_values": torch.rand(2, 3, 8, 8), "labels": torch.tensor([0, 1])}

# -- what runs ---------------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(tiny.VOCAB, 16)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True), 1)

    def forward(self, input_ids, **_):
        return self.layers(self.embed(input_ids))


class Own(nn.Module):
    """Attention by a kernel of its own: no operation that torch's dispatcher would show."""

    def forward(self, input_ids, **_):
        return input_ids


Own.__name__ = "FancyAttention"

MODELS = {
    "llama": (tiny.llama, FLASH_CPU),
    "llama, lora": (lambda: tiny.lora(tiny.llama()), FLASH_CPU),
    "llama, attention dropout": (lambda: tiny.llama(attention_dropout=0.1), MATH),
    "llama, eager": (lambda: tiny.llama(attn_implementation="eager"), EAGER),
    "gpt2": (tiny.gpt2, FLASH_CPU),
    "bert, dropout beside attention": (lambda: tiny.bert(BertForMaskedLM, hidden_dropout_prob=0.1), FLASH_CPU),
    "bart": (tiny.bart, FLASH_CPU),
    "granite hybrid": (tiny.granite_hybrid, f"{FLASH_CPU}; {REFERENCE}"),
    "torch's encoder": (Encoder, FLASH_CPU),
    "another kernel": (Own, "attention: a kernel that does not go through torch's dispatcher"),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_kernel_that_ran_is_named(name):
    make, expected = MODELS[name]
    assert kernel_line(make().eval(), TOKENS) == expected


def test_two_kernels_in_one_model_are_both_named():
    """T5 learns a bias of its own attention, which no fused kernel of the CPU takes; its cross-attention has none."""
    found = kernel_line(tiny.t5(), TOKENS)
    assert "flash kernel for CPU" in found and "without a fused kernel" in found and found.count("attention:") == 1


def test_a_checkpointed_model_under_autocast():
    model = tiny.granite_hybrid()
    checkpoint_every_layer(model)
    assert kernel_line(model, TOKENS, torch.autocast("cpu", torch.bfloat16)) == f"{FLASH_CPU}; {REFERENCE}"


def test_a_model_without_attention_says_so():
    assert kernel_line(tiny.conv_net(), IMAGES) == "no attention layers"


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({"mamba_ssm"}, "causal_conv1d is not installed"),
        ({"mamba_ssm", "causal_conv1d"}, "although mamba_ssm and causal_conv1d are installed"),
    ],
)
def test_why_mamba_runs_its_reference_path(monkeypatch, installed, expected):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name in installed else find(name))
    assert kernel_line(tiny.granite_hybrid(), TOKENS).endswith(f"mamba: reference path ({expected})")


class FusedMamba(nn.Module):
    """A mamba layer whose kernel stays outside of torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log, self.conv1d = nn.Parameter(torch.ones(2)), nn.Conv1d(2, 2, 2)

    def forward(self, input_ids, **_):
        return input_ids * 2


def test_fused_mamba_kernels():
    assert kernel_line(FusedMamba(), TOKENS) == "no attention layers; mamba: fused kernels"


def test_the_model_is_left_as_it_was():
    model = tiny.conv_net()
    model.conv.train(), model.norm.eval()
    modes = [module.training for module in model.modules()]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(7)
    state = torch.get_rng_state()
    kernel_line(model, IMAGES)
    kernel_line(tiny.llama(attention_dropout=0.5).train(), TOKENS)
    torch.manual_seed(7)
    language = tiny.llama(attention_dropout=0.5)
    torch.manual_seed(7)
    kernel_line(language, TOKENS)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert tiny.same(dict(model.named_buffers()), before)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in language.modules())
    assert all(p.grad is None for p in language.parameters())


def test_an_error_in_the_forward_leaves_the_model_as_it_was():
    model = tiny.llama().eval()
    with pytest.raises(ValueError, match="exactly one"):
        kernel_line(model, {**TOKENS, "inputs_embeds": 3})
    assert not any(module.training for module in model.modules())
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


# -- what to ask for ---------------------------------------------------------------------------------------------------


@pytest.fixture
def flash_attn(monkeypatch):
    """As if the package flash-attn were installed."""
    import transformers.utils

    monkeypatch.setattr(transformers.utils, "is_flash_attn_2_available", lambda: True)
    on_card(monkeypatch, (8, 6))


def on_card(monkeypatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")


def test_flash_attention_where_it_is_installed_and_runs(flash_attn):
    assert best_attention(None, "cuda:0", half_precision=True) == "flash_attention_2"
    assert best_attention("flash_attention_2", torch.device("cuda"), half_precision=True) == "flash_attention_2"
    assert best_attention("sdpa", "cuda", half_precision=True) == "sdpa"


@pytest.mark.parametrize(("kind", "chosen"), [(LlamaConfig, "flash_attention_2"), (BloomConfig, None)])
def test_flash_attention_only_for_families_that_support_it(flash_attn, tmp_path, kind, chosen):
    kind(hidden_size=8, n_head=2, num_attention_heads=2, vocab_size=8, n_layer=1).save_pretrained(tmp_path)
    settings = ModelSettings(model_name_or_path=str(tmp_path))
    assert _with_best_attention(settings, torch.device("cuda"), True).attn_implementation == chosen
    wanted = replace(settings, attn_implementation="flash_attention_2")  # the user's choice is not changed
    assert _with_best_attention(wanted, torch.device("cuda"), True) == wanted


@pytest.mark.parametrize(("device", "half_precision"), [("cpu", True), ("cuda", False)])
def test_else_the_choice_of_the_library(flash_attn, device, half_precision):
    assert best_attention(None, device, half_precision) is None
    assert best_attention("eager", device, half_precision) == "eager"


def test_on_a_card_before_ampere_the_choice_of_the_library(flash_attn, monkeypatch):
    """The package is installed there as well, and ends in the first forward."""
    on_card(monkeypatch, (7, 5))
    assert best_attention(None, "cuda", half_precision=True) is None
    with pytest.raises(ModelError, match=r"of the Ampere generation or newer, but this is a Tesla T4; use .* sdpa"):
        best_attention("flash_attention_2", "cuda", half_precision=True)


def test_without_the_package_the_choice_of_the_library():
    assert best_attention(None, "cuda", half_precision=True) is None


@pytest.mark.parametrize(
    ("device", "half_precision", "reason"),
    [
        ("cpu", True, "runs on CUDA only, but this run is on cpu; use attn_implementation: sdpa"),
        ("cuda", False, "set mixed_precision: bf16, or use attn_implementation: sdpa"),
        ("cuda", True, "not installed; `pip install flash-attn"),
    ],
)
def test_flash_attention_that_cannot_run_is_refused(device, half_precision, reason, monkeypatch):
    on_card(monkeypatch, (8, 0))
    with pytest.raises(ModelError) as caught:
        best_attention("flash_attention_2", device, half_precision)
    assert str(caught.value).startswith("attn_implementation: flash_attention_2 ") and reason in str(caught.value)


def test_an_unknown_word_is_refused_with_the_nearest():
    with pytest.raises(ModelError, match=r"'flash_attention2'; allowed: eager, .*did you mean 'flash_attention_2'"):
        best_attention("flash_attention2", "cuda", half_precision=True)


def test_a_kernel_on_the_hub_is_left_to_transformers():
    assert best_attention("kernels-community/flash-attn2", "cuda", True) == "kernels-community/flash-attn2"
