"""Find out from the values of a recipe what it needs from a machine beyond what every training needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from scu_trainer.hardware.optimizers import OPTIMIZERS

EXTRA_OF = {"bitsandbytes": "qlora", "torchao": "optimizers"}
"""Packages that are installed with one of our extras."""

REPORTERS = {
    "azure_ml": "azureml-core",
    "clearml": "clearml",
    "codecarbon": "codecarbon",
    "comet_ml": "comet-ml",
    "dagshub": "dagshub",
    "dvclive": "dvclive",
    "flyte": "flytekit",
    "kubeflow": None,
    "mlflow": "mlflow",
    "neptune": "neptune",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}
"""Distribution that each value of ``report_to`` needs; None without one. That of tensorboard is always installed."""

FLASH = "flash_attention"


@dataclass(frozen=True)
class RecipeNeeds:
    """What a recipe needs, with the setting that asks for it as a user would write it ("tuning: qlora").

    Fields:
        extras: our extras, with the setting. packages: distributions that are in none of them, with the setting.
        cuda: settings that need a CUDA GPU. gpu: settings that need any GPU. use_cpu: whether the recipe uses no GPU.
        folders: folders that are written besides output_dir and cache_dir, by setting.
        optim: the optimizer if it must run on this machine, else None.
    """

    extras: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    cuda: tuple[str, ...] = ()
    gpu: tuple[str, ...] = ()
    use_cpu: bool = False
    folders: dict[str, Path] = field(default_factory=dict)
    optim: Optional[str] = None


def needs_of(values: Mapping[str, Any]) -> RecipeNeeds:
    """Return the needs of a recipe with these ``values`` of command line fields; an absent field needs nothing."""
    packages = dict(_packages(values))
    return RecipeNeeds(
        extras={EXTRA_OF.get(name, name): setting for name, setting in packages.items() if _is_extra(name)},
        packages={name: setting for name, setting in packages.items() if not _is_extra(name)},
        cuda=tuple(_settings_for_cuda(values)),
        gpu=tuple(_settings_for_gpu(values)),
        use_cpu=bool(values.get("use_cpu")),
        folders={
            name: Path(values[name]).expanduser()
            for name in ("offload_folder", "offload_linears_folder")
            if values.get(name)
        },
        # DeepSpeed may update the weights on another device, and has its own optimizers
        optim=None if values.get("deepspeed") else values.get("optim"),
    )


def _is_extra(name: str) -> bool:
    return name in EXTRA_OF or name in ("deepspeed", "images")


def _packages(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (distribution or extra, the setting that asks for it)."""
    optim = str(values.get("optim"))
    yield from ((name, f"optim: {optim}") for name in (OPTIMIZERS[optim].packages if optim in OPTIMIZERS else ()))
    if values.get("tuning") == "qlora":
        yield "bitsandbytes", "tuning: qlora"
    if values.get("deepspeed"):
        yield "deepspeed", "deepspeed"
    if values.get("task") == "image-classification":
        yield "images", "task: image-classification"
    if str(values.get("attn_implementation")) == f"{FLASH}_2":
        yield "flash-attn", f"attn_implementation: {FLASH}_2"
    if values.get("use_liger_kernel"):
        yield "liger-kernel", "use_liger_kernel: true"
    for name in reporters_of(values):
        if REPORTERS.get(name) not in (None, "tensorboard"):
            yield REPORTERS[name], f"report_to: {name}"


def reporters_of(values: Mapping[str, Any]) -> list[str]:
    """Return the services of ``report_to``, including unknown ones, but not "none" and "all" (those installed)."""
    found = values.get("report_to") or ()
    return [name for name in ([found] if isinstance(found, str) else found) if name not in ("none", "all")]


def _settings_for_cuda(values: Mapping[str, Any]) -> Iterator[str]:
    if str(values.get("attn_implementation")).startswith(FLASH):
        yield f"attn_implementation: {values['attn_implementation']}"
    if values.get("tf32"):
        yield "tf32: true"
    if values.get("max_gpu_mem"):
        yield f"max_gpu_mem: {values['max_gpu_mem']}"


def _settings_for_gpu(values: Mapping[str, Any]) -> Iterator[str]:
    if values.get("fp16"):
        yield "fp16: true"
    if values.get("mixed_precision") == "fp16":
        yield "mixed_precision: fp16"
    if values.get("use_liger_kernel"):
        yield "use_liger_kernel: true"
    if values.get("preset") == "gpu":
        yield "preset: gpu"
