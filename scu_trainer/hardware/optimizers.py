"""Check which ``optim`` of transformers runs on which device, and propose the nearest one that does.

Without this check a run would start and then fail in its first step, ask for a package only after the model was loaded,
or (paged optimizers on a CPU) continue with another optimizer and a warning. Nothing here imports torch.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Optional

from scu_trainer.errors import RequirementError
from scu_trainer.hardware.probe import installed_version

OLDEST_TRITON_CAPABILITY = (7, 0)
"""Oldest compute capability of CUDA GPUs for which torch.compile generates code."""


@dataclass(frozen=True)
class OptimizerNeeds:
    """What an optimizer needs, and what to use instead.

    devices: torch device types that it runs on; None means all. packages: distributions that must be installed.
    compiles: whether its update uses torch.compile. in_backward: whether it updates weights during the backward pass.
    instead: alternatives, nearest first; each is checked in turn, ``LAST_RESORT`` comes last.
    """

    devices: Optional[frozenset[str]] = None
    packages: tuple[str, ...] = ()
    compiles: bool = False
    in_backward: bool = False
    instead: tuple[str, ...] = ()


LAST_RESORT = ("adamw_torch_fused", "adamw_torch")
_FUSED = frozenset({"cpu", "cuda", "xpu", "mps", "hpu"})
_CUDA = frozenset({"cuda"})

_TORCH = OptimizerNeeds()
# Devices with kernels for bitsandbytes' optimizers; mps and hpu have only those for 4-bit weights.
_BNB = OptimizerNeeds(frozenset({"cpu", "cuda", "xpu"}), ("bitsandbytes",))
# Paged state is CUDA's (and SYCL's) unified memory. On a CPU bitsandbytes warns and does not page.
_PAGED = OptimizerNeeds(frozenset({"cuda", "xpu"}), ("bitsandbytes",))
_TORCHAO = OptimizerNeeds(frozenset({"cpu", "cuda", "xpu", "mps"}), ("torchao",), compiles=True)
_GALORE = OptimizerNeeds(packages=("galore-torch",))
_APOLLO = OptimizerNeeds(packages=("apollo-torch",))
_SCHEDULE_FREE = OptimizerNeeds(packages=("schedulefree",))

_SMALL_ADAMW = ("adamw_bnb_8bit", "adamw_torch_8bit", "adafactor")
_LOW_RANK = ("galore_adamw", "apollo_adamw", *_SMALL_ADAMW)


def _like(needs: OptimizerNeeds, *instead: str, **changes) -> OptimizerNeeds:
    return replace(needs, instead=instead, **changes)


OPTIMIZERS: dict[str, OptimizerNeeds] = {
    "adamw_torch": _TORCH,
    "adamw_torch_fused": OptimizerNeeds(_FUSED, instead=("adamw_torch",)),
    "adamw_torch_xla": OptimizerNeeds(frozenset({"xla"}), ("torch_xla",)),
    "adamw_torch_npu_fused": OptimizerNeeds(frozenset({"npu"}), ("torch_npu",)),
    "adamw_anyprecision": OptimizerNeeds(packages=("torchdistx",), instead=("adamw_torch_8bit", "adamw_bnb_8bit")),
    "adamw_torch_8bit": _like(_TORCHAO, "adamw_bnb_8bit", "adafactor"),
    "adamw_torch_4bit": _like(_TORCHAO, *_SMALL_ADAMW),
    "adamw_bnb_8bit": _like(_BNB, "adamw_torch_8bit", "adafactor"),
    "adamw_8bit": _like(_BNB, "adamw_torch_8bit", "adafactor"),
    "adafactor": _TORCH,
    "sgd": _TORCH,
    "adagrad": _TORCH,
    "rmsprop": _TORCH,
    "ademamix": _like(_BNB, *LAST_RESORT),
    "ademamix_8bit": _like(_BNB, *_SMALL_ADAMW),
    "lion_8bit": _like(_BNB, *_SMALL_ADAMW),
    "lion_32bit": _like(_BNB, *LAST_RESORT),
    "rmsprop_bnb": _like(_BNB, "rmsprop"),
    "rmsprop_bnb_8bit": _like(_BNB, "rmsprop"),
    "rmsprop_bnb_32bit": _like(_BNB, "rmsprop"),
    "paged_adamw_32bit": _like(_PAGED, *LAST_RESORT),
    "paged_adamw_8bit": _like(_PAGED, *_SMALL_ADAMW),
    "paged_ademamix_32bit": _like(_PAGED, "ademamix"),
    "paged_ademamix_8bit": _like(_PAGED, "ademamix_8bit", *_SMALL_ADAMW),
    "paged_lion_32bit": _like(_PAGED, "lion_32bit"),
    "paged_lion_8bit": _like(_PAGED, "lion_8bit", *_SMALL_ADAMW),
    "galore_adamw": _like(_GALORE, "apollo_adamw", *_SMALL_ADAMW),
    # its projections use older functions of bitsandbytes that need CUDA
    "galore_adamw_8bit": OptimizerNeeds(_CUDA, ("galore-torch", "bitsandbytes"), instead=_LOW_RANK),
    "galore_adafactor": _like(_GALORE, "adafactor"),
    "galore_adamw_layerwise": _like(_GALORE, *_LOW_RANK, in_backward=True),
    "galore_adamw_8bit_layerwise": OptimizerNeeds(
        _CUDA, ("galore-torch", "bitsandbytes"), in_backward=True, instead=("galore_adamw_layerwise", *_LOW_RANK)
    ),
    "galore_adafactor_layerwise": _like(_GALORE, "galore_adafactor", "adafactor", in_backward=True),
    "apollo_adamw": _like(_APOLLO, "galore_adamw", *_SMALL_ADAMW),
    "apollo_adamw_layerwise": _like(_APOLLO, "apollo_adamw", *_LOW_RANK, in_backward=True),
    "lomo": OptimizerNeeds(packages=("lomo-optim",), in_backward=True, instead=("sgd",)),
    "adalomo": OptimizerNeeds(_CUDA, ("lomo-optim",), in_backward=True, instead=("adafactor",)),
    "grokadamw": OptimizerNeeds(packages=("grokadamw",)),
    "stable_adamw": OptimizerNeeds(packages=("torch-optimi",)),
    "schedule_free_radam": _SCHEDULE_FREE,
    "schedule_free_adamw": _SCHEDULE_FREE,
    "schedule_free_sgd": _like(_SCHEDULE_FREE, "sgd"),
}


@dataclass(frozen=True)
class _Place:
    """Where weights are updated, and what is installed; ``has_compiler``: of C++, for torch.compile on a CPU."""

    device: str
    capability: Optional[tuple[int, int]]
    installed: Callable[[str], Optional[str]]
    has_compiler: bool


def check_optimizer(
    optim: str,
    device: str,
    capability: Optional[tuple[int, int]] = None,
    installed: Callable[[str], Optional[str]] = installed_version,
    deepspeed_offload: bool = False,
    find_program: Callable[[str], Optional[str]] = shutil.which,
) -> None:
    """Raise RequirementError, with the nearest optimizer that runs, if ``optim`` cannot run as intended.

    Args:
        optim: a value of transformers' ``OptimizerNames``; other values pass, because transformers lists its choices.
        device: torch device type of the training: "cpu", "cuda", "mps", ...
        capability: compute capability of the CUDA GPU, such as (8, 0); None if there is no CUDA or it is not known.
        installed: returns the version of a distribution, None if it is not installed.
        deepspeed_offload: whether DeepSpeed keeps the optimizer's state in main memory and updates on the CPU.
        find_program: returns the path of a program, None if there is none.
    """
    needs = OPTIMIZERS.get(optim)
    if needs is None:
        return
    where = "cpu" if deepspeed_offload else device
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    place = _Place(where, None if deepspeed_offload else capability, installed, find_program(compiler) is not None)
    obstacle = next(_obstacles(needs, place), None)
    if obstacle is None:
        return
    moved = "; with DeepSpeed's optimizer offload weights are updated on the CPU" if where != device else ""
    others = (*needs.instead, *LAST_RESORT)  # adamw_torch, the last one, always runs
    nearest = next(name for name in others if next(_obstacles(OPTIMIZERS[name], place), None) is None)
    raise RequirementError(f"optim: {optim} {obstacle}{moved}. Nearest that runs here: optim: {nearest}")


FOR_BFLOAT16, STOCHASTIC = "adamw_torch_8bit", "bf16_stochastic_round=True"
"""The default optimizer for weights that are stored in bfloat16, and its ``optim_args``."""


def preserves_small_updates(optim: str, optim_args: Optional[str]) -> bool:
    """Return whether an optimizer keeps updates that are smaller than the rounding of bfloat16 weights: torchao on
    average, by stochastic rounding if ``optim_args`` ask for it; torch-optimi by accumulating lost parts (Kahan
    summation)."""
    if optim == "stable_adamw":
        return True
    pairs = dict(pair.split("=", 1) for pair in (optim_args or "").replace(" ", "").split(",") if "=" in pair)
    rounds_stochastically = pairs.get("bf16_stochastic_round", "").lower() in ("y", "yes", "t", "true", "on", "1")
    return optim in ("adamw_torch_8bit", "adamw_torch_4bit") and rounds_stochastically


def _obstacles(needs: OptimizerNeeds, place: _Place) -> Iterator[str]:
    """Yield why the optimizer cannot run in ``place``; reasons that installing a package cannot fix come first."""
    if needs.devices is not None and place.device not in needs.devices:
        yield f"does not run on {place.device}, only on {', '.join(sorted(needs.devices))}"
    if needs.compiles and place.capability is not None and place.capability < OLDEST_TRITON_CAPABILITY:
        found, wanted = (".".join(map(str, version)) for version in (place.capability, OLDEST_TRITON_CAPABILITY))
        yield f"compiles its update, which needs a CUDA GPU of compute capability {wanted}; this one has {found}"
    missing = [package for package in needs.packages if place.installed(package) is None]
    if missing:
        how = f"pip install {' '.join(missing)}"
        how = "it is no longer maintained: github.com/pytorch/torchdistx" if "torchdistx" in missing else how
        yield f"needs {' and '.join(missing)}, not installed here ({how})"
    if needs.compiles and place.device == "cpu" and not place.has_compiler:
        yield "compiles its update, which needs a C++ compiler, but none was found; install g++, or set CXX to one"
