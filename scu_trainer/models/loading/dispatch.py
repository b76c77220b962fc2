"""``device_map``: the weights of one process spread over GPUs, main memory and disk, planned before any is loaded.

    refuse_unsound(settings, training)          what cannot be combined with it, known from the settings alone
    check_limits(settings, memory, gpus)
    place(settings, memory, free) -> Placement  the plan, from a model without weights; refused where it is unsound
    from_pretrained(name, **arguments)          accelerate's hooks fetch what is offloaded whenever a layer runs

GPUs are filled first, then main memory, then disk; room for the largest layer stays free where layers are fetched to.
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
from scu_trainer.models.quantize import skeleton_of
from scu_trainer.run_files import require_room, require_writable
from scu_trainer.settings import MemorySettings, ModelSettings
from scu_trainer.settings.base import require

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

Device = Union[int, str]
"""Number of a GPU, "cpu" for main memory, "disk"."""

USED_SHARE = 0.9
"""Share of free memory that weights may take where no limit is given: the rest is for what training itself needs."""

LIMITS = ("max_gpu_mem", "cpu_mem", "offload_folder")
DROP = "drop device_map"


@dataclass(frozen=True)
class Free:
    """Bytes that are free in each CUDA GPU that training may use (none with ``use_cpu``), and in main memory."""

    gpu_bytes: tuple[int, ...]
    main_bytes: int


@dataclass(frozen=True)
class Placement:
    """``device_map``: device by module name. ``weight_bytes``: by device. ``rewritten_bytes``: what loading writes
    into ``offload_folder``; weights that lie in safetensors files as the model needs them are read from there."""

    device_map: dict[str, Device]
    weight_bytes: dict[Device, int]
    rewritten_bytes: int = 0
    offload_folder: Optional[str] = None

    @property
    def is_offloaded(self) -> bool:
        """Whether layers lie elsewhere than they are computed."""
        return "disk" in self.device_map.values() or ("cpu" in self.device_map.values() and bool(self.gpus))

    @property
    def gpus(self) -> set[int]:
        return {device for device in self.device_map.values() if isinstance(device, int)}

    def private_folder(self) -> Optional[OffloadFolder]:
        """Room for what loading writes, for as long as somebody holds it; None where nothing goes to disk."""
        return OffloadFolder(self.offload_folder) if "disk" in self.device_map.values() else None

    def arguments(self, folder: Optional[OffloadFolder]) -> dict[str, Any]:
        """For ``from_pretrained``."""
        return {"device_map": self.device_map, **({} if folder is None else {"offload_folder": str(folder.path)})}

    def line(self, checkpoints: bool) -> str:
        """Where the weights lie, and what is missing for offloading to save memory. ``checkpoints``: whether
        ``checkpoint_every_layer`` is on."""
        sizes = sorted(self.weight_bytes.items(), key=lambda entry: (isinstance(entry[0], str), entry[0]))
        parts = ", ".join(f"{_readable(size)} {_where(device)}" for device, size in sizes if size)
        hint = "; without checkpoint_every_layer: true fetched weights are kept until backward: little memory is saved"
        return f"weights: {parts}{hint if self.is_offloaded and not checkpoints else ''}"


def asks_for_fsdp(training: TrainingArguments) -> bool:
    """Whether a setting or ``accelerate launch`` does."""
    from accelerate.utils import parse_flag_from_env

    return bool(training.fsdp) or parse_flag_from_env("ACCELERATE_USE_FSDP")


def refuse_unsound(settings: ModelSettings, training: TrainingArguments) -> None:
    """Raise SettingsError for launchers and options under which a model with a ``device_map`` cannot be trained."""
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
        f"{name} and DeepSpeed both decide where weights are placed; {DROP}: ZeRO-3 with offload_param is "
        f"DeepSpeed's way",
    )
    require(
        not asks_for_fsdp(training),
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
            f"{option} converts the weights before an evaluation, and those that {name} offloads cannot be; set "
            f"{option}: false (dtype: {'bfloat16' if option[0] == 'b' else 'float16'} loads them so)",
        )
    kind = training.device.type
    require(
        kind in ("cpu", "cuda"),
        f"{name} knows CUDA GPUs, main memory and disk, and training would run on {kind}; set use_cpu: true, or {DROP}",
    )


def check_limits(settings: ModelSettings, memory: MemorySettings, gpus: int) -> None:
    """Raise SettingsError for limits without a ``device_map``, RequirementError for a limit on GPUs where there are
    none that training uses, StorageError for an ``offload_folder`` that cannot be written."""
    given = [name for name in LIMITS if getattr(memory, name) is not None]
    require(
        settings.device_map is not None or not given,
        f"{', '.join(given)}: limits of what device_map may use, and it is not set; add device_map: auto",
    )
    if memory.max_gpu_mem is not None and gpus == 0:
        raise RequirementError(
            f"max_gpu_mem is {memory.max_gpu_mem:g} GiB, and training uses no CUDA GPU (there is none, or use_cpu is "
            "set); drop max_gpu_mem: cpu_mem and offload_folder limit main memory"
        )
    if memory.offload_folder is not None:
        require_writable(memory.offload_folder, "offload_folder")


def place(
    settings: ModelSettings,
    memory: MemorySettings,
    free: Free,
    quantization_config: Any = None,
    auto: Any = None,
    kept: Sequence[str] = (),
) -> Placement:
    """Decide where each layer of ``settings.model_name_or_path``, which is no adapter, goes. Reads its config.json and
    makes the model without memory for weights, by the class ``auto`` of transformers (None: a causal language model).
    ``kept``: modules of the model that are trained as they are, and so lie where they are computed.

    Raises SettingsError where a limit is too small or weights that would be trained or are quantized are offloaded,
    StorageError where the disk has no room.
    """
    skeleton, quantizer = _skeleton(settings, quantization_config, auto)
    sizes = _Sizes.of(skeleton, quantizer)
    limits = _limits(memory, free)
    device_map = _infer(skeleton, quantizer, settings.device_map, limits)
    if set(device_map.values()) == {"disk"}:  # one entry for all: accelerate would take the model for not dispatched
        device_map = {name: "disk" for name, _ in skeleton.named_children()}
    first = next(iter(limits))
    device_map |= {name: first for name in device_map if name.partition(".")[0] in kept}
    weight_bytes: dict[Device, int] = {}
    for name, device in device_map.items():
        weight_bytes[device] = weight_bytes.get(device, 0) + sizes.by_module[name]
    rewritten = weight_bytes.get("disk", 0) if _is_rewritten(skeleton, settings.model_name_or_path) else 0
    placement = Placement(device_map, weight_bytes, rewritten, memory.offload_folder)
    _check_devices(placement, sizes, limits)
    _check_soundness(placement, settings)
    _check_disk(placement, limits)
    return placement


def _skeleton(settings: ModelSettings, quantization_config: Any, auto: Any) -> tuple[PreTrainedModel, Any]:
    """The model on the meta device, its layers quantized as loading will, and the quantizer."""
    from transformers import AutoConfig
    from transformers.quantizers import AutoHfQuantizer

    remote = {"trust_remote_code": settings.trust_remote_code}
    config = AutoConfig.from_pretrained(settings.model_name_or_path, revision=settings.model_revision, **remote)
    model = skeleton_of(config, **remote, auto=auto, dtype=_dtype(settings, config))
    if quantization_config is None:
        return model, None
    quantizer = AutoHfQuantizer.from_config(quantization_config, pre_quantized=False)
    quantizer.preprocess_model(model=model, dtype=model.dtype, device_map=settings.device_map)
    return model, quantizer


def _dtype(settings: ModelSettings, config: Any):
    import torch

    if settings.dtype != "auto":
        return getattr(torch, settings.dtype)
    return torch.float32 if settings.tuning == "full" or config.dtype is None else config.dtype


@dataclass(frozen=True)
class _Sizes:
    """Bytes ``by_module`` name (tied weights once), of the ``largest`` layer, which stays whole, and of the ``first``
    part."""

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


def _limits(memory: MemorySettings, free: Free) -> dict[Device, int]:
    """Bytes for weights by device: what is asked for, and never more than there is."""

    def limit(wanted_gib: Optional[float], free_bytes: int) -> int:
        return int(USED_SHARE * free_bytes) if wanted_gib is None else min(int(wanted_gib * 2**30), free_bytes)

    gpus = {index: limit(memory.max_gpu_mem, free_bytes) for index, free_bytes in enumerate(free.gpu_bytes)}
    return {**gpus, "cpu": limit(memory.cpu_mem, free.main_bytes)}


def _infer(skeleton: PreTrainedModel, quantizer: Any, kind: str, limits: Mapping[Device, int]) -> dict[str, Device]:
    """As ``from_pretrained`` would, with its functions: sizes of quantized and tied weights are theirs."""
    from transformers.integrations.accelerate import get_balanced_memory, infer_auto_device_map

    whole = skeleton._no_split_modules
    room = dict(limits)
    if kind != "sequential":
        room = get_balanced_memory(skeleton, room, whole, quantizer, low_zero=kind == "balanced_low_0")
    if quantizer is not None:
        room = quantizer.adjust_max_memory(room)
    return dict(infer_auto_device_map(skeleton, room, whole, hf_quantizer=quantizer))


def _check_devices(placement: Placement, sizes: _Sizes, limits: Mapping[Device, int]) -> None:
    gpus = [device for device in limits if isinstance(device, int)]
    needed = sizes.largest + sizes.first
    require(
        not gpus or bool(placement.gpus),
        f"max_gpu_mem: a GPU needs {_readable(needed)} for the first weights and a layer that is fetched, and "
        f"{_readable(max(limits[gpu] for gpu in gpus) if gpus else 0)} may be used; raise it to "
        f"{_typed(needed)} or more, or set use_cpu: true",
    )
    require(
        bool(gpus) or limits["cpu"] >= sizes.largest,
        f"cpu_mem: the largest layer takes {_readable(sizes.largest)}, and {_readable(limits['cpu'])} may be used; "
        f"raise it to {_typed(sizes.largest)} or more",
    )
    only = next(iter(placement.gpus)) if len(placement.gpus) == 1 else None
    require(
        len(gpus) < 2 or only is None or (only == 0 and not placement.is_offloaded),
        f"only GPU {only} of {len(gpus)} can hold layers, and training would use them all; set "
        f"CUDA_VISIBLE_DEVICES={only}, or raise max_gpu_mem",
    )


def _check_soundness(placement: Placement, settings: ModelSettings) -> None:
    if not placement.is_offloaded:
        return
    sizes = [(at, placement.weight_bytes.get(at)) for at in (["cpu", "disk"] if placement.gpus else ["disk"])]
    away = " and ".join(f"{_readable(size)} {_where(at)}" for at, size in sizes if size)
    require(
        settings.tuning != "full",
        f"tuning: full trains every weight, and {away} would be stored away from where it is computed, and "
        f"accelerate drops what an optimizer changes there; set tuning: lora, or raise max_gpu_mem or cpu_mem "
        f"until all fits",
    )
    require(
        settings.tuning != "qlora",
        f"tuning: qlora keeps {'8' if settings.load_in_8bit else '4'}-bit weights where they are computed, and {away} "
        "would be elsewhere (bitsandbytes cannot train like that); raise max_gpu_mem or cpu_mem, or set tuning: lora",
    )


def _check_disk(placement: Placement, limits: Mapping[Device, int]) -> None:
    size = placement.weight_bytes.get("disk", 0)
    if not size:
        return
    require(
        placement.offload_folder is not None,
        f"{_readable(size)} of the weights fit neither on a GPU nor in the {_readable(limits['cpu'])} of main memory "
        "that cpu_mem allows or that are free; set offload_folder to a folder on a fast disk, or raise cpu_mem",
    )
    require_room(placement.offload_folder, placement.rewritten_bytes, "offload_folder")


def _is_rewritten(skeleton: PreTrainedModel, name: str) -> bool:
    """Whether loading writes offloaded weights again: other files than safetensors, or experts that are stacked."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    path = Path(name).expanduser()
    other_files = path.is_dir() and not any(path.glob("*.safetensors"))
    return other_files or any(isinstance(step, WeightConverter) for step in get_model_conversion_mapping(skeleton))


def _where(device: Device) -> str:
    return {"cpu": "in main memory", "disk": "on disk"}.get(device, f"on GPU {device}")


def _readable(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 0.1 * 2**30 else f"{size_bytes / 2**20:.2f} MiB"


def _typed(size_bytes: int) -> str:
    """As a limit is given, rounded up."""
    return f"{math.ceil(size_bytes / 2**20)}MiB"
