"""Where ``device_map`` puts weights, what it refuses before any work, and what it leaves on disk."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import BitsAndBytesConfig

from scu_trainer.errors import ModelError, RequirementError, SettingsError, StorageError
from scu_trainer.models.loading.dispatch import FreeMemory, check_limits, place, require_compatible_training
from scu_trainer.models.loading.load import load_model, prepare_for_tuning
from scu_trainer.models.loading.offload_folder import MARKER, PREFIX, OffloadFolder
from scu_trainer.models.loading.offloaded import (
    has_offloaded_weights,
    input_device,
    load_adapter,
    placeholders_for_offloaded,
)
from scu_trainer.settings import MemorySettings, ModelSettings
from tests import tiny
from tests.offloading import mebibytes, planned, saved, settings_of, size_bytes, with_adapters
from tests.tiny import same, weights_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama of 0.16 MiB: four layers of 0.035 MiB, embedding and head of 0.008 MiB each."""
    return saved(tiny.llama(layers=4), tmp_path_factory.mktemp("llama"))


def placed(folder, gpus=(), main=1.0, memory=None, **changes):
    """``gpus``, ``main``: free memory as shares of the weights."""
    weights = size_bytes(folder)
    free = FreeMemory(tuple(int(weights * share) for share in gpus), int(weights * main))
    return place(settings_of(folder, **changes), memory or MemorySettings(offload_folder=str(folder / "offload")), free)


# -- the plan ----------------------------------------------------------------------------------------------------------


def test_what_fits_in_main_memory_stays_there(folder):
    placement = placed(folder, main=4.0)
    assert placement.device_map == {"": "cpu"}
    assert not placement.is_offloaded
    assert placement.private_folder() is None
    assert placement.arguments(None) == {"device_map": {"": "cpu"}}
    assert placement.line(checkpoints=False) == "weights: 0.16 MiB in main memory"


def test_the_rest_goes_to_disk(folder):
    placement = placed(folder, main=0.8)
    assert placement.device_map["model.embed_tokens"] == "cpu"
    assert placement.device_map["model.layers.3"] == placement.device_map["lm_head"] == "disk"
    assert placement.is_offloaded
    assert sum(placement.weight_bytes.values()) == pytest.approx(tiny_bytes(), abs=64), "buffers count a few bytes"
    assert "checkpoint_every_layer: true" in placement.line(checkpoints=False)
    assert "checkpoint_every_layer" not in placement.line(checkpoints=True)
    assert " in main memory, " in placement.line(checkpoints=True)


def tiny_bytes() -> int:
    return sum(weight.nbytes for weight in tiny.llama(layers=4).parameters())


def test_gpus_come_first_then_main_memory_then_disk(folder):
    placement = placed(folder, gpus=(0.6, 0.35), main=0.5, device_map="sequential")
    order = [placement.device_map[f"model.layers.{i}"] for i in range(4)]
    assert order == [0, 1, "cpu", "disk"]
    assert placement.line(checkpoints=True).startswith("weights: 0.04 MiB on GPU 0, 0.04 MiB on GPU 1, ")


def test_balanced_gives_each_gpu_its_share(folder):
    devices = placed(folder, gpus=(4.0, 4.0), device_map="balanced").weight_bytes
    assert set(devices) == {0, 1}
    assert min(devices.values()) > 0.25 * sum(devices.values())


def test_limits_bound_what_is_free(folder):
    """A limit above what is free changes nothing; one below it does."""
    high = MemorySettings(max_gpu_mem=4.0, cpu_mem=8.0, offload_folder=str(folder / "offload"))
    assert placed(folder, gpus=(4.0,), main=4.0, memory=high).device_map == {"": 0}
    low = MemorySettings(
        max_gpu_mem=mebibytes(0.5 * size_bytes(folder)), cpu_mem="1GB", offload_folder=str(folder / "offload")
    )
    assert set(placed(folder, gpus=(4.0,), main=9.0, memory=low).weight_bytes) == {0, "cpu"}


def test_tied_weights_stay_together(tmp_path):
    folder = saved(tiny.llama(layers=4, tie_word_embeddings=True), tmp_path)
    for main in (0.3, 0.5, 0.7, 0.9):
        device_map = placed(folder, main=main).device_map
        device = {name: device_map.get(name, device_map.get("model")) for name in ("model.embed_tokens", "lm_head")}
        assert device["model.embed_tokens"] == device["lm_head"]


def test_the_plan_is_what_is_loaded(folder):
    placement = placed(folder, main=0.8)
    model = load_model(settings_of(folder), placement=placement)
    assert model.hf_device_map == placement.device_map
    on_disk = sum(weight.nbytes for weight in model.parameters() if weight.is_meta)
    assert on_disk == pytest.approx(placement.weight_bytes["disk"], abs=64)


def test_weights_in_other_files_are_written_into_the_folder_and_need_room(tmp_path):
    """Mixtral's experts are stacked when they are loaded: they cannot be read from where they lie."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = MixtralConfig(vocab_size=tiny.VOCAB, num_key_value_heads=2, num_local_experts=2, **sizes)
    folder = saved(MixtralForCausalLM(config), tmp_path / "base")
    placement = planned(folder, share=0.8)
    assert placement.rewritten_bytes == placement.weight_bytes["disk"] > 0
    model = load_model(settings_of(folder), placement=placement)
    (inside,) = (folder / "offload").iterdir()
    assert any(inside.glob("*experts*.safetensors"))
    expected = MixtralForCausalLM.from_pretrained(folder)(input_ids=torch.arange(9)[None]).logits
    assert torch.equal(model(input_ids=torch.arange(9)[None]).logits, expected)


# -- refused before any work -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "gpus", "error", "words"),
    [
        ({"cpu_mem": 4.0}, 0, SettingsError, "add device_map: auto"),
        ({"max_gpu_mem": 4.0, "offload_folder": "x"}, 1, SettingsError, "max_gpu_mem, offload_folder: these limit"),
    ],
)
def test_limits_without_a_device_map(limits, gpus, error, words):
    with pytest.raises(error, match=words):
        check_limits(ModelSettings(), MemorySettings(**limits), gpus)
    check_limits(ModelSettings(), MemorySettings(), gpus)


def test_a_limit_on_gpus_where_there_are_none():
    with pytest.raises(RequirementError, match=r"training uses no CUDA GPU .* drop max_gpu_mem"):
        check_limits(ModelSettings(device_map="auto"), MemorySettings(max_gpu_mem=4.0), gpus=0)
    check_limits(ModelSettings(device_map="auto"), MemorySettings(max_gpu_mem=4.0), gpus=1)


def test_an_offload_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    memory = MemorySettings(offload_folder=str(tmp_path / "file" / "inside"))
    with pytest.raises(StorageError, match="set offload_folder to another path"):
        check_limits(ModelSettings(device_map="auto"), memory, gpus=0)


def test_disk_is_used_only_where_a_folder_is_named(folder):
    with pytest.raises(SettingsError, match=r"0\.0. MiB of the weights fit neither .* set offload_folder"):
        placed(folder, main=0.8, memory=MemorySettings(cpu_mem=1.0))


def test_no_room_on_the_disk(tmp_path, monkeypatch, folder):
    model = tiny.llama(layers=4)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")  # cannot be read layer by layer
    monkeypatch.setattr("scu_trainer.run_files.free_bytes", lambda path: 1000)
    settings, free = settings_of(tmp_path), FreeMemory((), int(0.8 * size_bytes(folder)))
    with pytest.raises(StorageError, match="set offload_folder to a directory on a larger disk"):
        place(settings, MemorySettings(offload_folder=str(tmp_path / "offload")), free)
    placed(folder, main=0.8)  # safetensors are read where they are


def test_a_layer_larger_than_main_memory_may_hold(folder):
    with pytest.raises(SettingsError, match=r"cpu_mem: the largest layer takes 0.04 MiB, .* raise it to 1MiB or more"):
        placed(folder, main=0.1)


def test_a_gpu_that_holds_no_layer(folder):
    with pytest.raises(SettingsError, match=r"max_gpu_mem: a GPU needs 0.04 MiB .* raise it to 1MiB or more"):
        placed(folder, gpus=(0.2,), main=4.0)


def test_one_gpu_of_several(folder):
    """The Trainer copies a model that lies on one GPU to all of them; a dispatched one cannot be copied."""
    with pytest.raises(SettingsError, match=r"only GPU 1 of 2 .* CUDA_VISIBLE_DEVICES=1"):
        placed(folder, gpus=(0.1, 4.0), device_map="sequential")
    with pytest.raises(SettingsError, match="CUDA_VISIBLE_DEVICES=0"):
        placed(folder, gpus=(0.6, 0.01), main=4.0, device_map="sequential")
    assert placed(folder, gpus=(4.0, 4.0), device_map="sequential").device_map == {"": 0}


@pytest.mark.parametrize(("gpus", "main", "where"), [((), 0.8, "on disk"), ((0.6,), 4.0, "in main memory")])
def test_trained_weights_are_not_offloaded(folder, gpus, main, where):
    with pytest.raises(SettingsError, match=rf"tuning: full trains every weight, but 0\.\d+ MiB {where}"):
        placed(folder, gpus=gpus, main=main, tuning="full")


def test_full_tuning_where_nothing_is_offloaded(folder):
    assert placed(folder, main=4.0, tuning="full").device_map == {"": "cpu"}
    assert set(placed(folder, gpus=(4.0, 4.0), tuning="full", device_map="balanced").weight_bytes) == {0, 1}


@pytest.mark.parametrize(("bits", "fits"), [(4, 0.5), (8, 0.7)])
def test_quantized_weights_are_not_offloaded(folder, bits, fits):
    """Their size is that of 4 or 8 bits: what fits so is placed."""
    settings = settings_of(folder, tuning="qlora", load_in_8bit=bits == 8)
    config = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    memory = MemorySettings(offload_folder=str(folder / "offload"))
    with pytest.raises(SettingsError, match=f"qlora needs {bits}-bit weights on the device that computes them"):
        place(settings, memory, FreeMemory((), int(0.17 * size_bytes(folder))), config)
    assert place(settings, memory, FreeMemory((), int(fits * size_bytes(folder))), config).device_map == {"": "cpu"}
    assert placed(folder, main=fits, tuning="lora").is_offloaded, "unquantized they would not fit"


def stock(**changes):
    """What is read of TrainingArguments, as they are for one process on a CPU."""
    defaults = {"world_size": 1, "deepspeed": None, "fsdp": None, "torch_compile": False, "device": torch.device("cpu")}
    return SimpleNamespace(**{**defaults, "bf16_full_eval": False, "fp16_full_eval": False, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world_size": 2}, "gives all devices to one process, and 2 were started"),
        ({"deepspeed": "ds_configs/zero3.json"}, "DeepSpeed both decide .* offload_param"),
        ({"fsdp": ["full_shard"]}, "FSDP both decide"),
        ({"torch_compile": True}, "torch_compile: false"),
        ({"bf16_full_eval": True}, "bf16_full_eval: false .dtype: bfloat16"),
        ({"fp16_full_eval": True}, "fp16_full_eval: false .dtype: float16"),
        ({"device": torch.device("mps")}, "would run on mps; set use_cpu: true"),
    ],
)
def test_what_a_device_map_does_not_go_with(changes, words):
    with pytest.raises(SettingsError, match=words):
        require_compatible_training(ModelSettings(device_map="auto"), stock(**changes))
    require_compatible_training(ModelSettings(), stock(**changes))


@pytest.mark.parametrize("launcher", ["DEEPSPEED", "FSDP"])
def test_the_same_from_a_launcher(monkeypatch, launcher):
    monkeypatch.setenv(f"ACCELERATE_USE_{launcher}", "true")
    with pytest.raises(SettingsError, match="both decide where weights are placed"):
        require_compatible_training(ModelSettings(device_map="auto"), stock())


def test_stock_arguments_pass(tmp_path):
    require_compatible_training(ModelSettings(device_map="auto"), tiny.arguments(tmp_path))


# -- the folder --------------------------------------------------------------------------------------------------------


def test_the_folder_is_ours_alone_and_goes_with_its_owner(tmp_path):
    (tmp_path / "theirs.safetensors").write_text("kept")
    first, second = OffloadFolder(str(tmp_path)), OffloadFolder(str(tmp_path))
    assert first.path != second.path
    kept = second.path
    del first
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [kept.name], "the one in use stays"
    assert (tmp_path / "theirs.safetensors").read_text() == "kept"


def test_a_model_keeps_its_folder(folder):
    model = load_model(settings_of(folder), placement=placed(folder, main=0.8))
    model = prepare_for_tuning(model, settings_of(folder))
    inside = model.get_base_model().offload_folder.path
    assert inside.is_dir()
    del model
    gc.collect()
    assert not inside.exists()


KILLED = """
import os, signal, sys
from scu_trainer.models.loading.offload_folder import OffloadFolder
folder = OffloadFolder(sys.argv[1])
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["ended", "killed"])
def test_a_killed_run_leaves_nothing_for_long(tmp_path, end):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), end], check=False, timeout=60)
    assert len(list(tmp_path.glob(f"{PREFIX}*/{MARKER}"))) == (1 if end == "killed" else 0)
    folder = OffloadFolder(str(tmp_path))
    assert list(tmp_path.iterdir()) == [folder.path]


# -- adapters ----------------------------------------------------------------------------------------------------------


def test_adapters_start_as_without_offloading(folder):
    here, away = with_adapters(folder, None), with_adapters(folder, 0.7)
    assert has_offloaded_weights(away)
    assert same(weights_of(here), weights_of(away))
    assert not any(weight.is_meta for weight in weights_of(away).values())


def test_placeholders_take_no_memory_and_leave_no_trace(folder):
    model = load_model(settings_of(folder), placement=planned(folder, 0.7))
    before = dict(model.named_parameters())
    with placeholders_for_offloaded(model):
        shown = model.model.layers[3].mlp.up_proj.weight
        assert shown.shape == (64, 32) and shown.device.type == "cpu"
        assert shown.untyped_storage().nbytes() == 4
    after = dict(model.named_parameters())
    assert all(after[name] is weight for name, weight in before.items())


def test_inputs_go_where_the_first_layer_is_computed(folder):
    wholly = load_model(settings_of(folder), placement=planned(folder, 0.24))
    assert next(wholly.parameters()).is_meta
    assert input_device(wholly) == torch.device("cpu")
    assert input_device(tiny.llama()) == torch.device("cpu")


def test_an_adapter_that_lacks_weights(folder, tmp_path):
    small = prepare_for_tuning(
        load_model(settings_of(folder)), dataclasses.replace(settings_of(folder), lora_target_modules=["q_proj"])
    )
    small.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"lacks 48 weights .* of an adapter of the same shape"):
        load_adapter(with_adapters(folder, 0.7), tmp_path)
