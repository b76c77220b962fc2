"""``device_map`` with a CUDA device: layers in main memory and on disk, computed on the GPU, for less of its memory."""

from __future__ import annotations

import pytest
import torch

from scu_trainer.models.checkpointing import checkpoint_every_layer
from scu_trainer.models.loading.dispatch import FreeMemory
from scu_trainer.models.loading.load import load_model, plan_placement, prepare_for_tuning
from scu_trainer.models.loading.offloaded import input_device
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings
from tests import tiny
from tests.offloading import mebibytes, saved, settings_of, size_bytes
from tests.tiny import UnevenRows, pad, same, trained, weights_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here")

LOOPS = {
    "none": {},
    "regularization": {"regularization": RegularizationSettings(target_s=0.01, sigma=0.01)},
    "memory": {"memory": MemorySettings(token_cap=24)},
    "curriculum": {"curriculum": CurriculumSettings("token_budget")},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tiny.llama(layers=4), tmp_path_factory.mktemp("llama"))


def with_adapters(folder, gpu, main=4.0):
    """``gpu``, ``main``: shares of the weights that may lie on the GPU and in main memory."""
    weights = size_bytes(folder)
    limits = MemorySettings(
        max_gpu_mem=mebibytes(gpu * weights), cpu_mem=mebibytes(main * weights), offload_folder=str(folder / "offload")
    )
    settings = settings_of(folder)
    placement = plan_placement(settings, limits, FreeMemory((2**34,), 2**34), device=torch.device("cuda"))
    model = load_model(settings, placement=placement)
    torch.manual_seed(1)
    return prepare_for_tuning(model, settings)


def run(model, output_dir, **changes):
    given = {"use_cpu": False, "max_steps": 6, "data_collator": pad, "dataset": UnevenRows(24), **changes}
    return trained(model, output_dir, **given)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("main", [4.0, 0.4])
def test_each_loop_trains_the_same_weights(folder, tmp_path, loop, main):
    here = run(with_adapters(folder, 4.0), tmp_path / "here", **LOOPS[loop])
    away = run(with_adapters(folder, 0.6, main), tmp_path / "away", **LOOPS[loop])
    places = set(away.model.hf_device_map.values())
    # Of four layers main memory may hold none beside the room in which one from the disk is computed.
    assert places == {0, "cpu"} if main >= 1 else {0, "disk"} <= places
    assert all(weight.is_cuda for weight in weights_of(away.model).values())
    assert input_device(away.model).type == "cuda"
    assert same(weights_of(here.model), weights_of(away.model))


def test_resumed_is_uninterrupted(folder, tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 3}
    whole = run(with_adapters(folder, 0.6), tmp_path, **saves)
    resumed = run(with_adapters(folder, 0.6), tmp_path / "on", resume=str(tmp_path / "checkpoint-3"), **saves)
    assert same(weights_of(whole.model), weights_of(resumed.model))


def test_the_gpu_holds_less(tmp_path):
    """56 million weights; a fifth of them on the GPU, and each layer computed again in backward."""
    tiny.llama(hidden=768, layers=8).save_pretrained(tmp_path / "base", max_shard_size="30MB")

    def peak_bytes(gpu: float) -> int:
        model = with_adapters(tmp_path / "base", gpu).train()
        if gpu >= 1:
            model.cuda()
        model.enable_input_require_grads()
        checkpoint_every_layer(model)
        tokens = torch.arange(64, device="cuda")[None] % 64
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return torch.cuda.max_memory_allocated()

    whole = peak_bytes(4.0)
    torch.cuda.empty_cache()
    assert peak_bytes(0.4) < 0.7 * whole
