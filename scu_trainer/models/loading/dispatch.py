"""``device_map``: spread the weights of one process over GPUs, main memory and disk, planned before any is loaded.

    require_compatible_training(settings, training)  refuse settings that cannot be combined with device_map
    check_limits(settings, memory, gpus)             check the limits that the user gave
    place(settings, memory, free) -> Placement       plan from a model without weights, and refuse an untrainable plan
    from_pretrained(name, **arguments)               accelerate's hooks then fetch offloaded weights when a layer runs

GPUs are filled first, then main memory, then disk. Where layers are fetched to, room for the largest one stays free.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Union

from scu_trainer.errors import RequirementError
from scu_trainer.models.loading.offload_folder import OffloadFolder
from scu_trainer.models.quantize import meta_model
from scu_trainer.run_files import require_room, require_writable
from scu_trainer.settings import MemorySettings, ModelSettings
from scu_trainer.settings.base import require

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, TrainingArguments

Device = Union[int, str]
"""The number of a GPU, "cpu" for main memory, or "disk"."""

USED_SHARE = 0.9
"""Share of the free memory that weights may take if no limit is set; the rest is for training itself."""

LIMITS = ("max_gpu_mem", "cpu_mem", "offload_folder")
DROP = "drop device_map"


@dataclass(frozen=True)
class FreeMemory:
    """Free bytes of each CUDA GPU that training may use (no GPU with ``use_cpu``), and of main memory."""

    gpu_bytes: tuple[int, ...]
    main_bytes: int


@dataclass(frozen=True)
class Placement:
    """Where the weights of a model go. ``device_map`` maps module names to devices, and ``weight_bytes`` devices to the
    bytes they hold. ``rewritten_bytes`` is what loading writes into ``offload_folder``; weights that safetensors files
    already hold in the model's layout are not written, but read from those files."""

    device_map: dict[str, Device]
    weight_bytes: dict[Device, int]
    rewritten_bytes: int = 0
    offload_folder: Optional[str] = None

    @property
    def is_offloaded(self) -> bool:
        """Whether some layers are stored on another device than the one that computes them."""
        return "disk" in self.device_map.values() or ("cpu" in self.device_map.values() and bool(self.gpus))

    @property
    def gpus(self) -> set[int]:
        return {device for device in self.device_map.values() if isinstance(device, int)}

    def private_folder(self) -> Optional[OffloadFolder]:
        """Create the folder that loading writes to, deleted with the returned object; None if nothing goes to disk."""
        return OffloadFolder(self.offload_folder) if "disk" in self.device_map.values() else None

    def arguments(self, folder: Optional[OffloadFolder]) -> dict[str, Any]:
        """Return the arguments of ``from_pretrained`` that apply this placement."""
        return {"device_map": self.device_map, **({} if folder is None else {"offload_folder": str(folder.path)})}

    def line(self, checkpoints: bool) -> str:
        """Return the log line that says where the weights are. ``checkpoints`` is whether ``checkpoint_every_layer`` is
        on: without it offloading saves little memory, and the line says so."""
        sizes = sorted(self.weight_bytes.items(), key=lambda entry: (isinstance(entry[0], str), entry[0]))
        parts = ", ".join(f"{_readable(size)} {_where(device)}" for device, size in sizes if size)
        hint = "; without checkpoint_every_layer: true fetched weights stay until backward, which saves little memory"
        return f"weights: {parts}{hint if self.is_offloaded and not checkpoints else ''}"


def is_fsdp_requested(training: TrainingArguments) -> bool:
    """Return whether the settings or ``accelerate launch`` turn FSDP on."""
    from accelerate.utils import parse_flag_from_env

    return bool(training.fsdp) or parse_flag_from_env("ACCELERATE_USE_FSDP")


def require_compatible_training(settings: ModelSettings, training: TrainingArguments) -> None:
    """Raise SettingsError if a model with a ``device_map`` cannot be trained with this launcher or these options."""
    if settings.device_map is None:
        return
    from accelerate.utils import parse_flag_from_env

    name = f"device_map {settings.device_map}"
    require(
        training.world_size == 1,
        f"{name} gives all devices to one process, and {training.world_size} were started: they would fill the same "
        f"memory; start one process, or {DROP} (DDP copies the model, DeepSpeed ZeRO-3 shards it)",
    )
    require(
        not (training.deepspeed or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")),
        f"{name} and DeepSpeed both decide where weights are placed; {DROP}: DeepSpeed offloads weights with ZeRO-3 "
        f"and offload_param",
    )
    require(
        not is_fsdp_requested(training),
        f"{name} and FSDP both decide where weights are placed; {DROP}",
    )
    require(
        not training.torch_compile,
        f"{name} fetches weights in hooks that torch.compile cannot trace, so its graph would break at every layer; "
        f"set torch_compile: false, or {DROP}",
    )
    for option in ("bf16_full_eval", "fp16_full_eval"):
        require(
            not getattr(training, option),
            f"{option} converts the weights before an evaluation, which is impossible for weights that {name} "
            f"offloads; set {option}: false (dtype: {'bfloat16' if option[0] == 'b' else 'float16'} loads them in that "
            f"type)",
        )
    kind = training.device.type
    require(
        kind in ("cpu", "cuda"),
        f"{name} supports CUDA GPUs, main memory and disk, but training would run on {kind}; set use_cpu: true, or "
        f"{DROP}",
    )


def check_limits(settings: ModelSettings, memory: MemorySettings, gpus: int) -> None:
    """Check the limits of ``device_map`` that the user gave; ``gpus`` is the number of GPUs that training uses. Raises
    SettingsError if limits are given without ``device_map``, RequirementError for ``max_gpu_mem`` without a GPU, and
    StorageError if ``offload_folder`` cannot be written."""
    given = [name for name in LIMITS if getattr(memory, name) is not None]
    require(
        settings.device_map is not None or not given,
        f"{', '.join(given)}: these limit what device_map may use, but it is not set; add device_map: auto",
    )
    if memory.max_gpu_mem is not None and gpus == 0:
        raise RequirementError(
            f"max_gpu_mem is {memory.max_gpu_mem:g} GiB, but training uses no CUDA GPU (there is none, or use_cpu is "
            "set); drop max_gpu_mem; to limit main memory, use cpu_mem and offload_folder"
        )
    if memory.offload_folder is not None:
        require_writable(memory.offload_folder, "offload_folder")


def place(
    settings: ModelSettings,
    memory: MemorySettings,
    free: FreeMemory,
    quantization_config: Any = None,
    auto: Any = None,
    kept: Sequence[str] = (),
) -> Placement:
    """Decide where each layer of ``settings.model_name_or_path`` goes, which must not be an adapter.

    Reads config.json and builds the model on the meta device with the Auto class ``auto`` (None: a causal language
    model). ``kept`` names top-level modules that are trained without adapters, and so must be stored on the device that
    computes them. Raises SettingsError if a limit is too small, or if trainable or quantized weights would be
    offloaded; StorageError if the disk is too full.
    """
    skeleton, quantizer = _skeleton(settings, quantization_config, auto)
    sizes = _Sizes.of(skeleton, quantizer)
    limits = _limits(memory, free)
    device_map = _inferred_device_map(skeleton, quantizer, settings.device_map, limits)
    if set(device_map.values()) == {"disk"}:  # accelerate does not dispatch a model with a single entry for all
        device_map = {name: "disk" for name, _ in skeleton.named_children()}
    first = next(iter(limits))
    device_map |= {name: first for name in device_map if name.partition(".")[0] in kept}
    weight_bytes: dict[Device, int] = {}
    for name, device in device_map.items():
        weight_bytes[device] = weight_bytes.get(device, 0) + sizes.by_module[name]
    rewritten = weight_bytes.get("disk", 0) if _is_rewritten(skeleton, settings.model_name_or_path) else 0
    placement = Placement(device_map, weight_bytes, rewritten, memory.offload_folder)
    _require_room_on_devices(placement, sizes, limits)
    _require_trainable(placement, settings)
    _require_room_on_disk(placement, limits)
    return placement


def _skeleton(settings: ModelSettings, quantization_config: Any, auto: Any) -> tuple[PreTrainedModel, Any]:
    """Return the model on the meta device, with its layers quantized as loading will do it, and the quantizer."""
    from transformers import AutoConfig
    from transformers.quantizers import AutoHfQuantizer

    remote = {"trust_remote_code": settings.trust_remote_code}
    config = AutoConfig.from_pretrained(settings.model_name_or_path, revision=settings.model_revision, **remote)
    model = meta_model(config, **remote, auto=auto, dtype=loaded_dtype(settings, config))
    if quantization_config is None:
        return model, None
    quantizer = AutoHfQuantizer.from_config(quantization_config, pre_quantized=False)
    quantizer.preprocess_model(model=model, dtype=model.dtype, device_map=settings.device_map)
    return model, quantizer


def loading_dtype(settings: ModelSettings) -> Union[str, torch.dtype]:
    """Return the dtype in which weights are loaded: ``dtype`` if set, else float32 for full tuning, else "auto". Full
    tuning defaults to float32 because small updates of AdamW are rounded away in bfloat16."""
    import torch

    if settings.dtype != "auto":
        return getattr(torch, settings.dtype)
    return torch.float32 if settings.tuning == "full" else "auto"


def loaded_dtype(settings: ModelSettings, config: PretrainedConfig) -> torch.dtype:
    """Return the dtype that the weights have once they are loaded: ``loading_dtype``, where "auto" is that of the
    files."""
    import torch

    dtype = loading_dtype(settings)
    return dtype if isinstance(dtype, torch.dtype) else config.dtype or torch.float32


@dataclass(frozen=True)
class _Sizes:
    """Bytes of weights: ``by_module`` name (tied weights count once), of the ``largest`` layer, which is never split
    over devices, and of the ``first`` module that has weights."""

    by_module: Mapping[str, int]
    largest: int
    first: int

    @classmethod
    def of(cls, skeleton: PreTrainedModel, quantizer: Any) -> _Sizes:
        from accelerate.utils.modeling import get_max_layer_size
        from transformers.integrations.accelerate import compute_module_sizes

        by_module, _ = compute_module_sizes(skeleton, quantizer)
        by_module = defaultdict(int, {name: int(size) for name, size in by_module.items()})  # a tied layer has none
        largest, _ = get_max_layer_size(list(skeleton.named_children()), by_module, skeleton._no_split_modules or [])
        first_weight, _ = next(skeleton.named_parameters())
        return cls(by_module, largest, by_module[first_weight.rpartition(".")[0]])


def _limits(memory: MemorySettings, free: FreeMemory) -> dict[Device, int]:
    """Return the bytes that weights may take on each device: the user's limit, but never more than is free."""

    def limit(wanted_gib: Optional[float], free_bytes: int) -> int:
        return int(USED_SHARE * free_bytes) if wanted_gib is None else min(int(wanted_gib * 2**30), free_bytes)

    gpus = {index: limit(memory.max_gpu_mem, free_bytes) for index, free_bytes in enumerate(free.gpu_bytes)}
    return {**gpus, "cpu": limit(memory.cpu_mem, free.main_bytes)}


def _inferred_device_map(
    skeleton: PreTrainedModel, quantizer: Any, kind: str, limits: Mapping[Device, int]
) -> dict[str, Device]:
    """Return the device map that ``from_pretrained`` would choose within ``limits``. Uses the functions of
    ``from_pretrained``, so sizes of quantized and tied weights are counted in the same way."""
    from transformers.integrations.accelerate import get_balanced_memory, infer_auto_device_map

    whole = skeleton._no_split_modules
    room = dict(limits)
    if kind != "sequential":
        room = get_balanced_memory(skeleton, room, whole, quantizer, low_zero=kind == "balanced_low_0")
    if quantizer is not None:
        room = quantizer.adjust_max_memory(room)
    return dict(infer_auto_device_map(skeleton, room, whole, hf_quantizer=quantizer))


def _require_room_on_devices(placement: Placement, sizes: _Sizes, limits: Mapping[Device, int]) -> None:
    gpus = [device for device in limits if isinstance(device, int)]
    needed = sizes.largest + sizes.first
    require(
        not gpus or bool(placement.gpus),
        f"max_gpu_mem: a GPU needs {_readable(needed)} for the first weights and a fetched layer, but only "
        f"{_readable(max(limits[gpu] for gpu in gpus) if gpus else 0)} may be used; raise it to "
        f"{_as_setting(needed)} or more, or set use_cpu: true",
    )
    require(
        bool(gpus) or limits["cpu"] >= sizes.largest,
        f"cpu_mem: the largest layer takes {_readable(sizes.largest)}, but only {_readable(limits['cpu'])} may be "
        f"used; raise it to {_as_setting(sizes.largest)} or more",
    )
    only = next(iter(placement.gpus)) if len(placement.gpus) == 1 else None
    require(
        len(gpus) < 2 or only is None or (only == 0 and not placement.is_offloaded),
        f"only GPU {only} of {len(gpus)} can hold layers, but training would use all of them; set "
        f"CUDA_VISIBLE_DEVICES={only}, or raise max_gpu_mem",
    )


def _require_trainable(placement: Placement, settings: ModelSettings) -> None:
    if not placement.is_offloaded:
        return
    sizes = [
        (device, placement.weight_bytes.get(device)) for device in (["cpu", "disk"] if placement.gpus else ["disk"])
    ]
    offloaded = " and ".join(f"{_readable(size)} {_where(device)}" for device, size in sizes if size)
    require(
        settings.tuning != "full",
        f"tuning: full trains every weight, but {offloaded} would be offloaded, and accelerate drops what an optimizer "
        f"changes there; set tuning: lora, or raise max_gpu_mem or cpu_mem until all fits",
    )
    require(
        settings.tuning != "qlora",
        f"tuning: qlora needs {'8' if settings.load_in_8bit else '4'}-bit weights on the device that computes them, "
        f"but {offloaded} would be offloaded (bitsandbytes cannot train such weights); raise max_gpu_mem or cpu_mem, "
        "or set tuning: lora",
    )


def _require_room_on_disk(placement: Placement, limits: Mapping[Device, int]) -> None:
    size = placement.weight_bytes.get("disk", 0)
    if not size:
        return
    require(
        placement.offload_folder is not None,
        f"{_readable(size)} of the weights fit neither on a GPU nor in the {_readable(limits['cpu'])} of main memory "
        "that are free and that cpu_mem allows; set offload_folder to a folder on a fast disk, or raise cpu_mem",
    )
    require_room(placement.offload_folder, placement.rewritten_bytes, "offload_folder")


def _is_rewritten(skeleton: PreTrainedModel, name: str) -> bool:
    """Return whether loading writes offloaded weights to disk again: if their files are not safetensors, or if the
    weights are converted on loading, as for stacked experts."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    path = Path(name).expanduser()
    other_files = path.is_dir() and not any(path.glob("*.safetensors"))
    return other_files or any(isinstance(step, WeightConverter) for step in get_model_conversion_mapping(skeleton))


def _where(device: Device) -> str:
    return {"cpu": "in main memory", "disk": "on disk"}.get(device, f"on GPU {device}")


def _readable(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 0.1 * 2**30 else f"{size_bytes / 2**20:.2f} MiB"


def _as_setting(size_bytes: int) -> str:
    """Format bytes as a limit that can be typed as a setting, rounded up."""
    return f"{math.ceil(size_bytes / 2**20)}MiB"
