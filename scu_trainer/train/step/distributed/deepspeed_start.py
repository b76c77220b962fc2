"""What must hold before DeepSpeed starts, and how its processes part."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Optional

from scu_trainer import shipped
from scu_trainer.errors import RequirementError, SettingsError
from scu_trainer.hardware.probe import free_port

FILE_VARIABLE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
"""Where ``accelerate launch`` says which configuration it was given."""

BY_MPI = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")
"""Set by mpirun of Open MPI, of MPICH and Intel, of MVAPICH: there DeepSpeed finds rank and address itself."""


def prepare_environment(deepspeed: Optional[str], use_cpu: bool) -> None:
    """Make the process ready for DeepSpeed; does nothing without it. Call it before ``TrainingArguments`` are made.

    deepspeed: value of ``--deepspeed``; ``accelerate launch`` asks through the environment. use_cpu: no GPU is used.
    Raises RequirementError where DeepSpeed is not installed.
    """
    if not deepspeed and os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        return
    if find_spec("deepspeed") is None:
        raise RequirementError("DeepSpeed is requested but not installed; pip install 'scu-trainer[deepspeed]'")
    _check_file(deepspeed or _found_by_accelerate())
    _stand_alone()
    _keep_builds_with_the_environment()
    if use_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed looks for a GPU and warns that there is none
        _build_nothing_for_communication()


@contextlib.contextmanager
def builds_are_said(say: Callable[[str], None]) -> Iterator[None]:
    """Inside, ``say`` gets a line where DeepSpeed compiles, which takes minutes silently, or waits for another build.
    A killed build leaves a lock file behind, for which torch waits forever."""
    from deepspeed.ops.op_builder.builder import OpBuilder
    from torch.utils.cpp_extension import _get_build_directory

    build = OpBuilder.jit_load

    def said(builder: Any, *args: Any, **kwargs: Any) -> Any:
        folder = Path(_get_build_directory(builder.name, False))
        lock = folder / "lock"
        if lock.exists():
            say(
                f"DeepSpeed waits until another process has compiled {builder.name}; if there is none, because it was "
                f"killed, delete {lock}"
            )
        elif not (folder / f"{builder.name}.so").is_file():
            say(f"DeepSpeed compiles {builder.name} into {folder}: a matter of minutes, at the first start only")
        return build(builder, *args, **kwargs)

    OpBuilder.jit_load = said
    try:
        yield
    finally:
        OpBuilder.jit_load = build


def _found_by_accelerate() -> Optional[str]:
    """The configuration that its launch file names, where that lies: its processes read the variable, too."""
    named = os.environ.get(FILE_VARIABLE)
    if named:
        os.environ[FILE_VARIABLE] = shipped.deepspeed(named)
    return os.environ.get(FILE_VARIABLE)


def _check_file(deepspeed: Optional[str]) -> None:
    """Raise SettingsError for a path without a configuration. The JSON itself, or nothing, is left to transformers."""
    if not deepspeed or not (deepspeed.endswith(".json") or os.path.isfile(deepspeed)):
        return
    if not os.path.isfile(deepspeed):
        raise SettingsError(
            f"the DeepSpeed configuration {deepspeed!r} was not found from {Path.cwd()}; start in the folder that "
            "holds ds_configs, or give a full path"
        )
    try:
        content = json.loads(Path(deepspeed).read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
    except ValueError as error:
        raise SettingsError(f"{deepspeed} is not the JSON of a DeepSpeed configuration: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("zero_optimization"), dict):
        raise SettingsError(
            f'{deepspeed} has no section zero_optimization; add "zero_optimization": {{"stage": 2}}, or take '
            "ds_configs/zero2.json"
        )


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """DeepSpeed refuses a key that is given twice, but gets the file from transformers, which keeps the last."""
    names = [name for name, _ in pairs]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ValueError(f"{repeated!r} is given twice, keep one of them")
    return dict(pairs)


def _stand_alone() -> None:
    """Without a launcher: be the only process. DeepSpeed would ask mpi4py, which few have."""
    if "RANK" in os.environ or any(name in os.environ for name in BY_MPI):
        return
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", **address)


def _keep_builds_with_the_environment() -> None:
    """What DeepSpeed compiles (only where its file names an optimizer) belongs to one torch: not into the home."""
    if sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))


def _build_nothing_for_communication() -> None:
    """DeepSpeed compiles its shared-memory communication for a minute at the first start on a CPU, and an interrupted
    build leaves a lock that the next start waits for forever. Without it gloo is used. There is no public switch."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def share_process_group() -> None:
    """Let DeepSpeed know the processes that ``TrainingArguments`` have connected on a CPU. It would find out when
    training begins: too late for ZeRO-3, which cuts weights for as many ranks as it knows while a model is loaded."""
    import deepspeed
    import torch.distributed as dist

    if dist.is_initialized() and not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)


@contextlib.contextmanager
def process_group_kept() -> Iterator[None]:
    """Afterwards this process is in no group in which it was not before: settings with DeepSpeed begin one."""
    import torch.distributed as dist

    was_there = dist.is_available() and dist.is_initialized()
    try:
        yield
    finally:
        if not was_there:
            leave_process_group(succeeded=False)


@contextlib.contextmanager
def models_kept_whole(training: Any) -> Iterator[None]:
    """Inside, transformers makes models as it does without ZeRO-3, which would divide their weights among processes:
    for models that are only looked at. ``training``: TrainingArguments."""
    zero = getattr(training, "hf_deepspeed_config", None)
    if zero is None:
        yield
        return
    from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        set_hf_deepspeed_config(zero)


def leave_process_group(succeeded: bool) -> None:
    """The last thing that a launched process does. After success the ranks wait for each other: the first holds the
    store that the others talk to while they close their connections. One that failed alone would wait forever."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return
    if succeeded:
        dist.barrier()
    dist.destroy_process_group()
