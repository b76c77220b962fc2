"""QLoRA on a CUDA device: it fits where float32 does not, learns, is merged, and the mamba kernels do not meet packed
weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scu_trainer.models.loading.load import load_for_evaluation, load_model, prepare_for_tuning
from scu_trainer.models.merge import check_merge, merge_adapter, merge_tolerance
from scu_trainer.models.quantize import compute_dtype_of, quantized_modules, stored_bytes
from scu_trainer.settings import CurriculumSettings, MemorySettings, ModelSettings, RegularizationSettings
from tests import tiny
from tests.tiny import UnevenRows, pad, same, trained

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here")

BITS = {"nf4": {}, "int8": {"load_in_8bit": True}}
FAMILIES = {"llama": lambda: tiny.llama(hidden=64), "granite": tiny.granite_hybrid}
CUDA = torch.device("cuda", 0)


def adapted(folder, make=FAMILIES["llama"], **changes):
    make().save_pretrained(folder)
    settings = ModelSettings(str(folder), tuning="qlora", **changes)
    torch.manual_seed(0)
    return prepare_for_tuning(load_model(settings, device=CUDA), settings), settings


def base_of(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if "lora_" not in name}


def held_out_loss(model) -> float:
    rows = tiny.Rows(seed=5).tokens.cuda()
    with torch.no_grad():
        return float(model.eval()(input_ids=rows, labels=rows).loss)


def test_arithmetic_is_what_the_device_has():
    expected = torch.bfloat16 if torch.cuda.get_device_capability()[0] >= 8 else torch.float16
    assert compute_dtype_of(ModelSettings(tuning="qlora"), CUDA) == expected


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_loops_at_once(tmp_path, family, bits):
    """With the mamba kernels where they are installed: they take the weight of a projection that must not be packed."""
    model, _ = adapted(tmp_path / "base", FAMILIES[family], **BITS[bits])
    assert {module.weight.device for _, module in quantized_modules(model)} == {CUDA}
    before, loss = base_of(model), held_out_loss(model)
    trainer = trained(
        model,
        tmp_path / "run",
        RegularizationSettings(target_s=0.01),
        dataset=UnevenRows(64),
        use_cpu=False,
        bf16=torch.cuda.is_bf16_supported(including_emulation=False),
        max_steps=-1,
        num_train_epochs=6,
        data_collator=pad,
        memory=MemorySettings(),
        curriculum=CurriculumSettings("token_budget"),
    )
    assert held_out_loss(trainer.model) < loss
    assert same(base_of(trainer.model), before)
    assert trainer.regularizer.state is not None and trainer.micro_batches.loop.statistics.windows > 0


@pytest.mark.parametrize("bits", BITS)
def test_merged_gives_what_the_adapter_gave(tmp_path, bits):
    model, settings = adapted(tmp_path / "base", **BITS[bits])
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)
    ids = tiny.Rows(4).tokens
    for dtype in (torch.float32, torch.bfloat16):
        assert check_merge(model, merge_adapter(model, dtype), {"input_ids": ids}) <= merge_tolerance(model, dtype)
    model.save_pretrained(tmp_path / "adapter")
    again = load_for_evaluation(str(tmp_path / "adapter"), settings)
    assert check_merge(model, again, {"input_ids": ids}) == 0.0


@pytest.mark.parametrize(("bits", "share"), [("nf4", 0.2), ("int8", 0.35)])
def test_the_full_weights_are_never_on_the_device(tmp_path, bits, share):
    tiny.llama(hidden=1024, layers=4).save_pretrained(tmp_path)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    model = load_model(ModelSettings(str(tmp_path), tuning="qlora", **BITS[bits]), device=CUDA)
    in_float32 = sum(p.numel() for p in tiny.llama(hidden=1024, layers=4).parameters()) * 4
    assert torch.cuda.memory_allocated() - before_bytes <= 1.05 * stored_bytes(model) <= share * in_float32
    largest_layer_bytes = 2 * 1024 * 1024 * 4
    assert torch.cuda.max_memory_allocated() - before_bytes <= share * in_float32 + 4 * largest_layer_bytes


def test_an_unaligned_layer_only_is_slower(tmp_path):
    """Inputs that are no multiple of a block of 64: bitsandbytes warns and takes another path."""
    model, _ = adapted(tmp_path, lambda: tiny.llama(hidden=96))
    ids = tiny.Rows(4).tokens.cuda()
    with pytest.warns(UserWarning, match="not aligned for fast kernel"):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)
