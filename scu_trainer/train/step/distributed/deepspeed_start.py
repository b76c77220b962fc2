"""What must be set up before DeepSpeed starts, and how its processes end."""

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
"""In this variable, ``accelerate launch`` passes the configuration that it was given."""

BY_MPI = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")
"""Set by mpirun of Open MPI, of MPICH and Intel, and of MVAPICH: DeepSpeed then finds rank and address itself."""


def prepare_environment(deepspeed: Optional[str], use_cpu: bool) -> None:
    """Prepare this process for DeepSpeed, if it is used. Call it before ``TrainingArguments`` are created.

    deepspeed: value of ``--deepspeed``; ``accelerate launch`` asks through the environment. use_cpu: no GPU is used.
    Raises RequirementError if DeepSpeed is not installed.
    """
    if not deepspeed and os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        return
    if find_spec("deepspeed") is None:
        raise RequirementError("DeepSpeed is requested but not installed; pip install 'scu-trainer[deepspeed]'")
    _check_file(deepspeed or _file_of_accelerate())
    _be_the_only_process()
    _build_in_environment()
    if use_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed warns that it finds no GPU
        _disable_shared_memory_build()


@contextlib.contextmanager
def builds_reported(say: Callable[[str], None]) -> Iterator[None]:
    """Inside, ``say`` gets a line when DeepSpeed compiles, which takes minutes without output, or waits for another
    build. A killed build leaves a lock file behind, for which torch waits forever."""
    from deepspeed.ops.op_builder.builder import OpBuilder
    from torch.utils.cpp_extension import _get_build_directory

    build = OpBuilder.jit_load

    def reported_build(builder: Any, *args: Any, **kwargs: Any) -> Any:
        folder = Path(_get_build_directory(builder.name, False))
        lock = folder / "lock"
        if lock.exists():
            say(
                f"DeepSpeed waits until another process has compiled {builder.name}; if there is none, because it "
                f"was killed, delete {lock}"
            )
        elif not (folder / f"{builder.name}.so").is_file():
            say(
                f"DeepSpeed compiles {builder.name} into {folder}: this takes minutes, and happens only at the "
                "first start"
            )
        return build(builder, *args, **kwargs)

    OpBuilder.jit_load = reported_build
    try:
        yield
    finally:
        OpBuilder.jit_load = build


def _file_of_accelerate() -> Optional[str]:
    """Return the configuration that the launch file names, and put its full path into the variable for accelerate."""
    file_name = os.environ.get(FILE_VARIABLE)
    if file_name:
        os.environ[FILE_VARIABLE] = shipped.deepspeed(file_name)
    return os.environ.get(FILE_VARIABLE)


def _check_file(deepspeed: Optional[str]) -> None:
    """Raise SettingsError for a path without a configuration. Inline JSON, or nothing, is left to transformers."""
    if not deepspeed or not (deepspeed.endswith(".json") or os.path.isfile(deepspeed)):
        return
    if not os.path.isfile(deepspeed):
        raise SettingsError(
            f"the DeepSpeed configuration {deepspeed!r} was not found from {Path.cwd()}; start in the folder that "
            "holds ds_configs, or give a full path"
        )
    try:
        content = json.loads(Path(deepspeed).read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{deepspeed} is not the JSON of a DeepSpeed configuration: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("zero_optimization"), dict):
        raise SettingsError(
            f'{deepspeed} has no section zero_optimization; add "zero_optimization": {{"stage": 2}}, or use '
            "ds_configs/zero2.json"
        )


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raise ValueError for a repeated key. DeepSpeed would too, but transformers reads the file and keeps the last."""
    names = [name for name, _ in pairs]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ValueError(f"{repeated!r} is given twice, keep one of them")
    return dict(pairs)


def _be_the_only_process() -> None:
    """Without a launcher, set the address of a single process. DeepSpeed would use mpi4py, which few have installed."""
    if "RANK" in os.environ or any(name in os.environ for name in BY_MPI):
        return
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", **address)


def _build_in_environment() -> None:
    """Put what DeepSpeed compiles into the virtual environment, not the home folder, because it fits only one torch.
    DeepSpeed compiles only if its file names an optimizer."""
    if sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))


def _disable_shared_memory_build() -> None:
    """Use gloo instead of DeepSpeed's shared-memory communication, which first compiles for a minute on a CPU. An
    interrupted build would leave a lock for which the next start waits forever. There is no public switch."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def share_process_group() -> None:
    """Tell DeepSpeed about the process group that ``TrainingArguments`` have created on a CPU. It would find out when
    training begins: too late for ZeRO-3, which divides weights among the known ranks while a model is loaded."""
    import deepspeed
    import torch.distributed as dist

    if dist.is_initialized() and not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)


@contextlib.contextmanager
def process_group_kept() -> Iterator[None]:
    """Afterwards, leave a process group that was created inside, as settings with DeepSpeed do."""
    import torch.distributed as dist

    existed = dist.is_available() and dist.is_initialized()
    try:
        yield
    finally:
        if not existed:
            leave_process_group(succeeded=False)


@contextlib.contextmanager
def models_kept_whole(training: Any) -> Iterator[None]:
    """Inside, transformers makes models as without ZeRO-3, which would divide their weights among processes. For models
    that are only inspected. ``training``: TrainingArguments."""
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
    """Leave the process group, the last thing that a launched process does. After success the ranks wait for each
    other: rank 0 holds the store that the others need to close connections. One failing alone would wait forever."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return
    if succeeded:
        dist.barrier()
    dist.destroy_process_group()
