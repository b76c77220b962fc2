"""What is refused together with DeepSpeed before a model is loaded, and what is made ready before it starts."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Optional

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from scu_trainer.errors import CheckpointError, ControlError, RequirementError, SettingsError
from scu_trainer.settings import (
    CurriculumSettings,
    DataSettings,
    MemorySettings,
    ModelSettings,
    RegularizationSettings,
    RetentionSettings,
)
from scu_trainer.train.job.checks import check_retention
from scu_trainer.train.job.job import Job
from scu_trainer.train.preflight import pitfalls
from scu_trainer.train.step.distributed import deepspeed_start
from scu_trainer.train.step.distributed.deepspeed_rules import (
    check_checkpoint,
    check_deepspeed,
    launched_under,
    saved_under,
    uses_deepspeed,
    zero_stage,
)
from scu_trainer.train.step.distributed.sharded import weight_count
from tests import tiny

pytest.importorskip("deepspeed")

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "ds_configs").glob("*.json"))
LAUNCH_FILES = sorted((ROOT / "accelerate_configs").glob("deepspeed_*.yaml"))
OFF = MemorySettings(memory_control=False)


@pytest.fixture(autouse=True)
def _nothing_stays_behind(monkeypatch):
    """Both libraries keep what they were given in the environment and in modules."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    monkeypatch.setattr(os, "environ", os.environ.copy())
    yield
    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)


def read(name: str) -> dict:
    return json.loads((ROOT / "ds_configs" / f"{name}.json").read_text())


def changed(tmp_path, name: str = "zero2", **changes) -> str:
    """A file of ours with other entries; "a.b" sets an entry of a section, None removes it."""
    config = read(name)
    for key, value in changes.items():
        *sections, last = key.split("__")
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
        if value is None:
            del place[last]
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(config))
    return str(path)


def check(tmp_path, deepspeed, model=None, memory=OFF, regularization=None, **training):
    arguments = tiny.arguments(tmp_path, deepspeed=deepspeed, **training)
    check_deepspeed(arguments, model or ModelSettings(), memory, regularization)
    return arguments


# -- the files that come with the project ------------------------------------------------------------------------------


def test_there_are_four_paths():
    names = ["zero2", "zero2_offload", "zero3", "zero3_offload"]
    assert [path.stem for path in CONFIGS] == names
    assert [path.stem for path in LAUNCH_FILES] == [f"deepspeed_{name}" for name in names]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_files_are_filled_from_the_settings(tmp_path, path):
    training = check(
        tmp_path, str(path), per_device_train_batch_size=3, gradient_accumulation_steps=5, max_grad_norm=0.7, bf16=True
    )
    config = training.hf_deepspeed_config.config
    assert zero_stage(training) == config["zero_optimization"]["stage"] == int(path.stem[4])
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (3, 5)
    assert (config["train_batch_size"], config["gradient_clipping"]) == (15, 0.7)
    assert config["bf16"]["enabled"] is True and config["fp16"]["enabled"] is False
    offloaded = [name for name in ("offload_optimizer", "offload_param") if name in config["zero_optimization"]]
    assert len(offloaded) == (int(path.stem[4]) - 1 if "offload" in path.stem else 0)


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda path: path.stem)
def test_launch_files_name_their_configuration(path):
    from accelerate.commands.config.config_args import load_config_from_file

    assert path.read_text().startswith("# When to use: ")
    config = load_config_from_file(str(path))
    assert config.distributed_type == "DEEPSPEED" and config.num_processes == 1
    file = ROOT / config.deepspeed_config["deepspeed_config_file"]
    assert file in CONFIGS and file.stem == path.stem.removeprefix("deepspeed_")
    assert config.deepspeed_config["zero3_init_flag"] is ("zero3" in path.stem)


def test_a_run_without_deepspeed_is_left_alone(tmp_path):
    assert not uses_deepspeed(check(tmp_path, None))
    assert zero_stage(check(tmp_path, None)) is None


def test_the_launchers_configuration_is_filled_as_early(tmp_path):
    """``accelerate launch`` hands the file over in the environment, and transformers fills it only in the Trainer."""
    os.environ.update(
        ACCELERATE_USE_DEEPSPEED="true",
        ACCELERATE_DEEPSPEED_CONFIG_FILE=changed(tmp_path, gradient_accumulation_steps=4),
    )
    with pytest.raises(SettingsError, match=r"gradient_accumulation_steps 4, the configuration says .* 2"):
        check(tmp_path, None, gradient_accumulation_steps=2)
    training = check(tmp_path, None, gradient_accumulation_steps=4, per_device_train_batch_size=3)
    assert training.deepspeed_plugin.deepspeed_config["train_batch_size"] == 12
    assert training.deepspeed_plugin.hf_ds_config is training.hf_deepspeed_config


# -- contradictions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "training", "expected"),
    [
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 2.0},
            {"per_device_train_batch_size": 8},
            "says train_micro_batch_size_per_gpu 4, the configuration says per_device_train_batch_size 8; and "
            'gradient_clipping 2.0, the configuration says max_grad_norm 1.0; set "auto" there',
        ),
        ({"train_batch_size": 7}, {}, r"train_batch_size 7, the configuration says train_batch_size \(calculated\) 4"),
        ({"bf16__enabled": True}, {}, r"bf16.enabled True, the configuration says bf16\|bf16_full_eval False"),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}},
            {"lr_scheduler_type": "linear", "max_steps": 6},
            "scheduler.params.total_num_steps 9, the configuration says 6",
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}},
            {"lr_scheduler_type": "linear", "max_steps": -1, "num_train_epochs": 1},
            "scheduler.params.total_num_steps 9, the number of steps follows from the data",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}},
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2},
            "scheduler.params.warmup_num_steps 3, the configuration says 2",
        ),
        (
            {"scheduler": {"type": "WarmupLR"}},
            {"lr_scheduler_type": "cosine"},
            "scheduler WarmupLR, .* lr_scheduler_type cosine; .* lr_scheduler_type: constant_with_warmup",
        ),
        ({"scheduler": {"type": "OneCycle"}}, {}, "for WarmupLR or WarmupDecayLR or WarmupCosineLR"),
        ({"optimizer": {"type": "Lamb"}}, {}, "says optimizer Lamb, the configuration says optim adamw_torch_fused"),
        ({"optimizer": {"type": "AdamW"}}, {"optim": "sgd"}, "optimizer AdamW, the configuration says optim sgd"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}},
            {"learning_rate": 1e-4},
            "optimizer.params.lr 0.0003, the configuration says learning_rate 0.0001",
        ),
    ],
)
def test_contradictions_name_both_sides(tmp_path, changes, training, expected):
    with pytest.raises(SettingsError, match=f"changed.json .*{expected}"):
        check(tmp_path, changed(tmp_path, **changes), **training)


def test_what_agrees_with_the_settings_passes(tmp_path):
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": 6, "warmup_num_steps": 2}}
    file = changed(tmp_path, scheduler=schedule, optimizer={"type": "AdamW"}, train_micro_batch_size_per_gpu=4)
    check(tmp_path, file, lr_scheduler_type="linear", max_steps=6, warmup_steps=2, per_device_train_batch_size=4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gradient_cliping": 1.0}, r"unknown key 'gradient_cliping' \(did you mean 'gradient_clipping'\?\)"),
        ({"zero_optimisation": {}}, r"unknown key 'zero_optimisation' \(did you mean 'zero_optimization'\?\)"),
        ({"zero_optimization__reduce_bucket_sise": 1}, r"'reduce_bucket_sise' \(did you mean 'reduce_bucket_size'\?\)"),
        (
            {"zero_optimization__offload_optimizer": {"device": "cpu", "pin_memry": True}},
            r"'offload_optimizer.pin_memry' \(did you mean 'pin_memory'\?\)",
        ),
        ({"zero_optimization__offload_optimizer": {"device": "gpu"}}, "device is 'gpu': input should be"),
        ({"fp16__los_scale": 1}, r"'los_scale' \(did you mean 'loss_scale'\?\)"),
        ({"zero_optimization__stage": 7}, "zero_optimization.stage is 7; allowed: 0, 1, 2, 3"),
        ({"zero_optimization__stage": None}, "zero_optimization.stage is missing"),
        ({"comms_config": {}, "_comment": "mine"}, r"'comms_config' \(did you .*\), '_comment'.*; .* so remove it"),
        ({"curriculum_learning": {"enabled": True}}, "'curriculum_learning' has been removed"),
    ],
)
def test_unknown_and_wrong_entries_are_errors(tmp_path, changes, expected):
    with pytest.raises(SettingsError, match=expected):
        check(tmp_path, changed(tmp_path, **changes))


def test_sections_that_deepspeed_knows_pass(tmp_path):
    sections = {"wall_clock_breakdown": False, "activation_checkpointing": {}, "flops_profiler": {"enabled": False}}
    check(tmp_path, changed(tmp_path, **sections, aio={}, comms_logger={"enabled": False}, steps_per_print=10))


def test_zero_3_that_would_save_no_model_is_refused(tmp_path):
    gather = "stage3_gather_16bit_weights_on_model_save"
    with pytest.raises(SettingsError, match=f"set zero_optimization.{gather} to true"):
        check(tmp_path, changed(tmp_path, "zero3", **{f"zero_optimization__{gather}": False}))


def test_either_name_of_deepspeed_for_gathering_counts(tmp_path):
    gather = "zero_optimization__stage3_gather_16bit_weights_on_model_save"
    check(tmp_path, changed(tmp_path, "zero3", **{gather: None, gather.replace("stage3_", ""): True}))


def test_what_a_launch_file_says_is_named_as_it_is_there(tmp_path):
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_ZERO_STAGE="3")
    with pytest.raises(SettingsError, match=r"deepspeed_config of accelerate .*; set zero3_save_16bit_model to true"):
        check(tmp_path, None)


@pytest.mark.parametrize("norm", [0.5, 0.0])
def test_a_norm_that_deepspeed_does_not_hear_of_is_reported(tmp_path, norm):
    """As in files of Axolotl and FastChat; the stock Trainer says nothing, and the engine clips at a default."""
    file = changed(tmp_path, gradient_clipping=None)
    (finding,) = clipping(check(tmp_path, file, max_grad_norm=norm))
    assert finding.check == "setting-without-effect"
    assert f"max_grad_norm is {norm:g}, and" in finding.what
    assert finding.what.endswith("changed.json has no gradient_clipping: DeepSpeed uses 1")
    assert not clipping(check(tmp_path, file, max_grad_norm=1.0))
    assert not clipping(check(tmp_path, changed(tmp_path), max_grad_norm=norm))
    assert not clipping(check(tmp_path, None, max_grad_norm=norm))


def clipping(training) -> list:
    job = Job(ModelSettings(), DataSettings(), None, training, OFF)
    return [finding for finding in pitfalls.before_loading(job) if finding.where == "max_grad_norm"]


def test_fp16_on_a_cpu_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="fp16, which DeepSpeed refuses on a CPU; use bf16"):
        check(tmp_path, str(CONFIGS[0]), fp16=True)


# -- models, optimizers, loops -----------------------------------------------------------------------------------------


def test_device_map_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="device_map: auto and DeepSpeed both decide"):
        check(tmp_path, str(CONFIGS[0]), model=ModelSettings(device_map="auto"))


@pytest.mark.parametrize(
    ("name", "optim", "expected"),
    [
        ("zero2", "adafactor", "one flat vector"),
        ("zero3", "galore_adamw", "one flat vector"),
        ("zero2_offload", "apollo_adamw", "use adamw_torch_fused"),
    ],
)
def test_optimizers_that_zero_would_change_are_refused(tmp_path, name, optim, expected):
    with pytest.raises(SettingsError, match=f"optim {optim} .*{expected}"):
        check(tmp_path, str(ROOT / "ds_configs" / f"{name}.json"), optim=optim, optim_target_modules="all-linear")


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "sgd"])
def test_optimizers_that_work_on_single_numbers_pass(tmp_path, optim):
    check(tmp_path, str(ROOT / "ds_configs" / "zero2.json"), optim=optim)


@pytest.mark.parametrize(("stage", "refused"), [(0, True), (1, False), (2, False), (3, True)])
def test_regularization_needs_whole_weights(tmp_path, stage, refused):
    gather = {"zero_optimization__stage3_gather_16bit_weights_on_model_save": True}
    file = changed(tmp_path, zero_optimization__stage=stage, **gather)
    expected = pytest.raises(ControlError, match=f"this is stage {stage}, .* set scu: false")
    with expected if refused else contextlib.nullcontext():
        check(tmp_path, file, regularization=RegularizationSettings(target_s=0.1))


def test_s_alone_is_no_reason_to_refuse(tmp_path):
    check(tmp_path, str(ROOT / "ds_configs" / "zero3.json"), regularization=RegularizationSettings())
    check(tmp_path, str(CONFIGS[0]), regularization=RegularizationSettings(law="original"))


@pytest.mark.parametrize("fsdp", [False, True])
def test_retention_needs_whole_weights_which_is_found_before_a_model_writes(tmp_path, monkeypatch, fsdp):
    training = launched(None if fsdp else 3, 2)
    settings = RetentionSettings(retain="sampled"), None, OFF, CurriculumSettings()
    if fsdp:
        check_retention(training, *settings)
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(SettingsError, match="under ZeRO-3 and FSDP no process has them; use ZeRO stage 1 or 2"):
        check_retention(training, *settings)


def test_the_penalty_is_refused(tmp_path):
    with pytest.raises(ControlError, match="gradients inside its engine"):
        check(tmp_path, str(CONFIGS[0]), regularization=RegularizationSettings(law="original", target_s=0.1))


def test_memory_control_needs_a_stage(tmp_path):
    file = changed(tmp_path, zero_optimization__stage=0)
    check(tmp_path, file)
    with pytest.raises(ControlError, match=r"this is stage 0; .* set memory_control: false"):
        check(tmp_path, file, memory=MemorySettings())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"flops_profiler": {"enabled": True}}, "flops_profiler"),
        ({"wall_clock_breakdown": True}, "wall_clock_breakdown"),
    ],
)
def test_timers_are_refused_before_anything_is_loaded(tmp_path, changes, named):
    file = changed(tmp_path, **changes)
    check(tmp_path, file)
    with pytest.raises(ControlError, match=f"disable {named} in .*changed.json, or set memory_control: false"):
        check(tmp_path, file, memory=MemorySettings())


def test_shards_are_counted_as_what_they_are_part_of():
    whole, shard = torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.empty(0))
    shard.ds_numel = 12
    assert weight_count(whole) == weight_count(shard) == 12


# -- before it starts --------------------------------------------------------------------------------------------------

LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def without_launcher() -> None:
    for name in (*LAUNCH, "DS_ACCELERATOR", "TORCH_EXTENSIONS_DIR", "ACCELERATE_USE_DEEPSPEED"):
        os.environ.pop(name, None)


def test_a_plain_start_is_one_process_that_builds_nothing():
    import deepspeed

    without_launcher()
    deepspeed_start.prepare_environment(str(CONFIGS[0]), use_cpu=True)
    assert [os.environ[name] for name in LAUNCH[:4]] == ["0", "0", "1", "127.0.0.1"]
    with socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))):
        pass
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is False


def test_a_launchers_word_counts():
    without_launcher()
    os.environ.update(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", MASTER_ADDR="10.0.0.1", MASTER_PORT="29500")
    before = {name: os.environ[name] for name in LAUNCH}
    deepspeed_start.prepare_environment(str(CONFIGS[0]), use_cpu=False)
    assert {name: os.environ[name] for name in LAUNCH} == before
    assert "DS_ACCELERATOR" not in os.environ


def test_mpirun_is_left_to_deepspeed():
    without_launcher()
    os.environ["PMI_RANK"] = "1"
    deepspeed_start.prepare_environment(str(CONFIGS[0]), use_cpu=False)
    assert "RANK" not in os.environ


def test_without_deepspeed_nothing_is_set():
    without_launcher()
    before = dict(os.environ)
    deepspeed_start.prepare_environment(None, use_cpu=True)
    assert dict(os.environ) == before


@pytest.mark.parametrize("by_launcher", [False, True])
def test_a_missing_file_is_one_message(by_launcher):
    without_launcher()
    if by_launcher:
        os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_CONFIG_FILE="ds_configs/zero9.json")
    with pytest.raises(SettingsError, match=r"ds_configs/zero9.json' was not found from .*; start in the folder"):
        deepspeed_start.prepare_environment(None if by_launcher else "ds_configs/zero9.json", use_cpu=True)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"zero_optimization": {"stage": 2,},}', "is not the JSON of a DeepSpeed .*: line 1 column 3[45]"),
        ('{"bf16": {"enabled": true, "enabled": false}}', "'enabled' is given twice"),
        ('{"train_batch_size": "auto"}', "has no section zero_optimization; add"),
        ("[1]", "has no section zero_optimization; add"),
        ("[" * 5000, "is not the JSON of a DeepSpeed .*: (maximum recursion|.* line 1 column 5001)"),
    ],
)
def test_a_file_that_is_no_configuration_is_one_message(tmp_path, content, expected):
    without_launcher()
    file = tmp_path / "mine.conf"
    file.write_text(content)
    with pytest.raises(SettingsError, match=f"mine.conf.*{expected}"):
        deepspeed_start.prepare_environment(str(file), use_cpu=True)


def test_a_configuration_as_text_is_left_to_transformers():
    without_launcher()
    deepspeed_start.prepare_environment(json.dumps({"zero_optimization": {"stage": 2}, "x": "y" * 300}), use_cpu=True)


def test_a_missing_deepspeed_is_one_message(monkeypatch):
    monkeypatch.setattr(deepspeed_start, "find_spec", lambda name: None)
    with pytest.raises(RequirementError, match="pip install 'scu-trainer"):
        deepspeed_start.prepare_environment(str(CONFIGS[0]), use_cpu=True)


@pytest.mark.parametrize("succeeded", [True, False])
def test_ranks_wait_for_each_other_only_after_success(monkeypatch, succeeded):
    import torch.distributed as dist

    waited = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "barrier", lambda: waited.append(dist.is_initialized()))
    deepspeed_start.leave_process_group(succeeded)
    assert waited == ([True] if succeeded else [])
    assert not dist.is_initialized()
    deepspeed_start.leave_process_group(succeeded)  # nothing to leave


def test_what_deepspeed_compiles_or_waits_for_is_said(tmp_path, monkeypatch):
    """Compiling takes minutes; the lines about it take none."""
    from deepspeed.ops.op_builder import CPUAdamBuilder
    from deepspeed.ops.op_builder.builder import OpBuilder

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(OpBuilder, "jit_load", lambda builder, verbose=True: builder.name)
    before, folder = OpBuilder.jit_load, tmp_path / "cpu_adam"
    said: list[str] = []
    with deepspeed_start.builds_reported(said.append):
        assert CPUAdamBuilder().jit_load(verbose=False) == "cpu_adam"
        assert f"compiles cpu_adam into {folder}" in said.pop()
        (folder / "lock").touch()
        CPUAdamBuilder().jit_load()
        assert said.pop().endswith(f"if there is none, because it was killed, delete {folder / 'lock'}")
        (folder / "lock").unlink()
        (folder / "cpu_adam.so").touch()
        CPUAdamBuilder().jit_load()
    assert not said and OpBuilder.jit_load is before


# -- what a checkpoint was saved under ---------------------------------------------------------------------------------


def saved(checkpoint: Path, stage: Optional[int], ranks: int) -> Path:
    """The names of DeepSpeed's files."""
    folder = checkpoint / "global_step4"
    folder.mkdir(parents=True)
    (checkpoint / "model.safetensors").touch()
    if stage is not None:
        (checkpoint / "latest").write_text("global_step4")
    for rank in range(ranks if stage else 0):
        (folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
        own = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
        (folder / f"{own}_model_states.pt").touch()
    return checkpoint


def launched(stage: Optional[int], ranks: int, **sections) -> SimpleNamespace:
    config = {"zero_optimization": {"stage": stage}, **sections}
    plugin = None if stage is None else SimpleNamespace(zero_stage=stage, deepspeed_config=config)
    gpus = SimpleNamespace(distributed_type=DistributedType.MULTI_GPU)
    none = {"fsdp": None, "fsdp_plugin_args": None}
    return SimpleNamespace(deepspeed_plugin=plugin, world_size=ranks, distributed_state=gpus, **none)


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ((2, 2), (3, 2), "saved under ZeRO stage 1 or 2 with 2 processes, and this run is under ZeRO stage 3 with 2"),
        ((3, 2), (2, 2), "saved under ZeRO stage 3 with 2 processes, and this run is under ZeRO stage 1 or 2 with 2"),
        (
            (2, 2),
            (2, 1),
            "saved under ZeRO stage 1 or 2 with 2 processes, and this run is under ZeRO stage 1 or 2 with 1",
        ),
        ((None, 2), (2, 2), "saved without DeepSpeed and FSDP, and this run is under ZeRO stage 1 or 2 with 2 "),
        ((2, 2), (None, 2), "start it as before, resume with --weights_only (the optimizer starts over), or begin"),
    ],
    ids=["2 to 3", "3 to 2", "fewer ranks", "plain to 2", "2 to plain"],
)
def test_an_optimizer_state_that_this_launch_cannot_read_is_refused(tmp_path, before, now, told):
    with pytest.raises(CheckpointError, match="cannot read that optimizer state") as raised:
        check_checkpoint(saved(tmp_path, *before), launched(*now), weights_only=False)
    assert told in str(raised.value)


def test_weights_in_shards_are_not_offered_for_another_run(tmp_path):
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    (tmp_path / "pytorch_model_fsdp_0" / ".metadata").touch()
    with pytest.raises(CheckpointError, match=r"cannot read that optimizer state; start it as before$"):
        check_checkpoint(tmp_path, launched(2, 2), weights_only=False)


def test_fsdp_is_not_offered_weights_alone_which_it_cannot_read_either(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(CheckpointError, match="start it as before or begin another run from its weights"):
        check_checkpoint(saved(tmp_path, 2, 2), launched(None, 2), weights_only=False)
    with pytest.raises(CheckpointError, match="saved without FSDP or with save_only_model, and this run is under FSDP"):
        check_checkpoint(saved(tmp_path / "stage 0", 0, 2), launched(None, 2), weights_only=False)


@pytest.mark.parametrize(
    ("version", "form", "told"),
    [
        ("1", None, "FULL_STATE_DICT"),
        ("2", None, "SHARDED_STATE_DICT"),
        ("1", "SHARDED_STATE_DICT", "SHARDED_STATE_DICT"),
        ("2", "FULL_STATE_DICT", "FULL_STATE_DICT"),
    ],
)
def test_what_fsdp_cannot_read_is_refused_before_anything_is_computed(tmp_path, monkeypatch, version, form, told):
    """By what accelerate launch gives to its processes."""
    files = tmp_path / "whole", tmp_path / "in shards", tmp_path / "plain"
    for folder, name in zip(files, ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_0/.metadata", "m"), strict=True):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    whole, in_shards, plain = files
    assert launched_under(launched(None, 2)) == saved_under(plain) == "without DeepSpeed and FSDP"
    for folder in (whole, in_shards):
        with pytest.raises(CheckpointError, match="saved under FSDP, and this run is without FSDP"):
            check_checkpoint(folder, launched(None, 2), weights_only=True)
    for name, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": version, "FSDP_STATE_DICT_TYPE": form}.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    own, other = (whole, in_shards) if told == "FULL_STATE_DICT" else (in_shards, whole)
    here = launched(None, 2)
    assert launched_under(here) == saved_under(own) == f"under FSDP with fsdp_state_dict_type: {told}"
    check_checkpoint(own, here, weights_only=False)
    for folder, said in ((other, f"this run has {told}"), (plain, "saved without FSDP .* this run is under FSDP")):
        with pytest.raises(CheckpointError, match=said):
            check_checkpoint(folder, here, weights_only=False)
    here.distributed_state.distributed_type = DistributedType.MULTI_CPU  # accelerate trains data parallel there
    assert launched_under(here) == "without DeepSpeed and FSDP"


def test_what_a_script_has_set_in_its_trainer_counts(tmp_path, monkeypatch):
    """``trainer.accelerator.state.fsdp_plugin.set_state_dict_type``: its checkpoints are of that form."""
    (tmp_path / "pytorch_model_fsdp.bin").touch()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)  # in shards, where nobody says otherwise
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setitem(AcceleratorState._shared_state, "fsdp_plugin", plugin)
    with pytest.raises(CheckpointError, match="this run has SHARDED_STATE_DICT"):
        check_checkpoint(tmp_path, launched(None, 2), weights_only=False)
    plugin.set_state_dict_type("FULL_STATE_DICT")
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT")
    check_checkpoint(tmp_path, launched(None, 2), weights_only=False)


def test_an_optimizer_state_that_this_launch_can_read_is_taken(tmp_path):
    for before, now in (((1, 2), (2, 2)), ((3, 1), (3, 1)), ((0, 2), (0, 2)), ((None, 2), (None, 1))):
        check_checkpoint(saved(tmp_path / str(before), *before), launched(*now), weights_only=False)
    zero_2 = tmp_path / "(1, 2)"
    check_checkpoint(zero_2, launched(None, 2), weights_only=True)
    check_checkpoint(zero_2, launched(2, 4, checkpoint={"load_universal": True}), weights_only=False)


@pytest.mark.parametrize(
    ("words", "accepted"), [([], True), (["--scu_law", "original", "--scu_target_s", "0.3"], False)]
)
def test_asking_whether_deepspeed_would_be_accepted_leaves_the_process_without_it(words, accepted):
    """``plan`` and ``tuning_path: auto`` ask, and what they read next, and train, is a job of one process."""
    from scu_trainer.cli.configuration import read_job
    from scu_trainer.cli.planning.plan import is_accepted

    words = ["--use_cpu", "true", "--tuning", "full", *words]
    assert is_accepted(None, words, {"deepspeed": "ds_configs/zero2_offload.json"}) is accepted
    assert "RANK" not in os.environ and not torch.distributed.is_initialized()
    assert read_job(None, words).training.distributed_state.distributed_type == "NO"
