"""The launch files for several machines and for FSDP2: accelerate's loader, and what it hands to the processes."""

from __future__ import annotations

import os
import socket
from functools import partial
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed.fsdp import OffloadPolicy, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import TrainingArguments

from scu_trainer.errors import SettingsError
from scu_trainer.train.job.checks import check_launcher
from tests import processes
from tests.tiny import llama

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "accelerate_configs"


def launch(name: str, *flags: str):
    """What ``accelerate launch`` makes of the file and the flags: (arguments, environment of the processes)."""
    arguments = launch_command_parser().parse_args(["--config_file", str(FOLDER / f"{name}.yaml"), *flags, "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    return arguments, prepare_multi_gpu_env(arguments)


# -- several machines --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "per_machine"), [("multi_node_cpu", 1), ("multi_node_gpu", 8)])
@pytest.mark.parametrize("machine", [0, 1])
def test_each_machine_is_told_its_place(name, per_machine, machine):
    flags = ["--machine_rank", str(machine), "--main_process_ip", "192.0.2.7", "--main_process_port", "29611"]
    told, environment = launch(name, *flags)
    assert (told.nnodes, told.node_rank, told.nproc_per_node) == ("2", machine, str(per_machine))
    assert (told.rdzv_backend, told.rdzv_endpoint) == ("static", "192.0.2.7:29611")
    assert environment["ACCELERATE_MIXED_PRECISION"] == ("bf16" if name.endswith("gpu") else "no")


def test_more_machines_are_a_matter_of_flags():
    told, _ = launch("multi_node_gpu", "--num_machines", "4", "--num_processes", "32", "--main_process_port", "29611")
    assert (told.nnodes, told.nproc_per_node) == ("4", "8")


# Each process writes a file of its own: lines of two processes on one pipe can run into each other.
PROCESS = """
import os, sys, torch
from pathlib import Path
from transformers import TrainingArguments
arguments = TrainingArguments(output_dir=sys.argv[1], use_cpu=True)
total = torch.ones(1)
torch.distributed.all_reduce(total)
torch.distributed.destroy_process_group()
answer = f"machine {os.environ['GROUP_RANK']} rank {arguments.process_index} summed {total.item():.0f}"
Path(sys.argv[1], f"{arguments.process_index}.txt").write_text(answer)
"""


def test_two_machines_start_from_the_file(tmp_path):
    script, answers = tmp_path / "process.py", tmp_path / "answers"
    script.write_text(PROCESS)
    answers.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = ["-m", "accelerate.commands.launch", "--config_file", FOLDER / "multi_node_cpu.yaml"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    own = {rank: ["--machine_rank", rank, "--main_process_port", port, script, answers] for rank in "01"}
    started = {
        rank: processes.Started([*words, *more], tmp_path / f"{rank}.log", environment) for rank, more in own.items()
    }
    try:
        for rank, process in started.items():
            assert process.wait(200) == 0, (tmp_path / f"{rank}.log").read_text()[-3000:]
    finally:
        for process in started.values():
            if process.poll() is None:
                process.kill()
    found = [path.read_text() for path in sorted(answers.iterdir())]
    assert found == [f"machine {rank} rank {rank} summed 2" for rank in range(2)]


# -- FSDP2 -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def plugin(monkeypatch) -> FullyShardedDataParallelPlugin:
    """What every process of fsdp2.yaml makes of its environment."""
    told, environment = launch("fsdp2")
    assert told.use_fsdp and (told.num_processes, told.use_cpu) == (2, False)
    for name in [name for name in environment if name.startswith(("FSDP_", "ACCELERATE_"))]:
        monkeypatch.setenv(name, environment[name])
    assert os.environ["ACCELERATE_USE_FSDP"] == "true" and os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    return FullyShardedDataParallelPlugin()


def test_fsdp2_without_a_gpu_says_what_to_take(plugin, tmp_path):
    with pytest.raises(SettingsError, match="or a machine with GPUs and no use_cpu"):
        check_launcher(TrainingArguments(str(tmp_path), use_cpu=True))


def test_fsdp2_says_what_is_written(plugin, caplog):
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert type(plugin.cpu_offload) is OffloadPolicy  # which moves nothing; CPUOffloadPolicy would
    assert plugin.state_dict_type is StateDictType.FULL_STATE_DICT  # else no model is saved at the end
    assert plugin.auto_wrap_policy is transformer_auto_wrap_policy
    assert plugin.cpu_ram_efficient_loading is True
    assert plugin.activation_checkpointing is False and plugin.activation_checkpointing_offload is False
    assert "deprecat" not in caplog.text and "obsolete" not in caplog.text


def test_fsdp2_wraps_the_layers_of_a_model(plugin):
    model = llama(layers=3)
    plugin.set_auto_wrap_policy(model)
    assert isinstance(plugin.auto_wrap_policy, partial)
    wrapped = [m for m in model.modules() if plugin.auto_wrap_policy(module=m, recurse=False, nonwrapped_numel=0)]
    assert wrapped == list(model.model.layers)


def test_fsdp2_has_no_key_that_accelerate_would_drop(tmp_path):
    """A key that is wrong at the top is an error, but one inside fsdp_config is dropped without a word."""
    known = {action.dest for action in launch_command_parser()._actions}
    written = yaml.safe_load((FOLDER / "fsdp2.yaml").read_text())["fsdp_config"]
    assert set(written) <= known
    path = tmp_path / "typo.yaml"
    path.write_text((FOLDER / "fsdp2.yaml").read_text().replace("num_machines:", "nodes:"))
    with pytest.raises(ValueError, match="nodes"):
        load_config_from_file(str(path))
