"""Create or load a TRIDENT model from settings, for training or evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from scu_trainer.errors import ModelError
from scu_trainer.models.loading.adapters import AdapterPlan
from scu_trainer.models.loading.dispatch import FreeMemory, Placement, place
from scu_trainer.models.loading.load import class_fields, classes_of, prepare_for_evaluation, read_model
from scu_trainer.models.loading.names import as_model_error, base_of, check_source, is_adapter
from scu_trainer.models.loading.safety import require_safe_weights
from scu_trainer.models.quantize import prepare_quantized, quantization_config
from scu_trainer.models.sensors.configuration_trident import TridentConfig
from scu_trainer.models.sensors.modeling_trident import TridentForSensorClassification
from scu_trainer.run_files import read_object
from scu_trainer.settings import MemorySettings, ModelSettings
from scu_trainer.settings.sensors import BRANCHES, DEFAULT_BRANCHES, SensorSettings

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import BitsAndBytesConfig

HEAD, REPORT = "classifier", "report"
VECTORS = ("kinematics", "geometry")
"""Arrays whose number of channels fixes the size of a layer of the model."""
RUN_FILE = "training_config.json"

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each array of the recordings, without its time axis."""


@dataclass(frozen=True)
class Heads:
    """What the heads of a model predict: classes, and reports of ``report_words`` (none: no report head) with at most
    ``report_length`` words including the end. ``report_weight`` None: that of the trained model, or 1."""

    label_names: Sequence[str]
    report_words: Sequence[str] = ()
    report_length: int = 0
    report_weight: Optional[float] = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of the model's configuration."""
        weight = {} if self.report_weight is None else {"report_weight": self.report_weight}
        report = {"report_words": list(self.report_words), "report_length": self.report_length, **weight}
        return {**class_fields(self.label_names), **(report if self.report_words else {})}


def stored_config(settings: ModelSettings) -> Optional[TridentConfig]:
    """Return the configuration of ``model_name_or_path``, or of the base of an adapter; None for a model from scratch.
    Raises ModelError if it is not a TRIDENT model."""
    if settings.model_name_or_path is None:
        return None
    check_source(settings.model_name_or_path)
    name = base_of(settings.model_name_or_path)
    from transformers import AutoConfig

    with as_model_error(name, "configuration"):
        config = AutoConfig.from_pretrained(name, revision=settings.model_revision, trust_remote_code=False)
    if not isinstance(config, TridentConfig):
        raise ModelError(
            f"{name!r} is a {config.model_type} model; task: sensor-classification takes only models that it trained "
            f"itself (model_type {TridentConfig.model_type})"
        )
    return config


def branches_of(config: Optional[TridentConfig], own: SensorSettings) -> list[str]:
    """Return the branches of a stored model, or those of the settings for a model from scratch (``config`` None).
    Raises ModelError if the settings ask for other branches than the stored model has."""
    if config is None or own.branches == list(config.branches):
        return list(own.branches)
    if own.branches == list(DEFAULT_BRANCHES):  # the default counts as not set
        return list(config.branches)
    raise ModelError(
        f"branches is {', '.join(own.branches)}, but the model has {', '.join(config.branches)}; drop branches, or "
        "train a model with these branches from scratch"
    )


def trained_label_names(settings: ModelSettings) -> Optional[list[str]]:
    """Return the classes of the head that ``model_name_or_path`` was saved with. An adapter does not store them, so
    they are read from its run. None for a model from scratch, and for an adapter outside of a run."""
    if settings.model_name_or_path is None:
        return None
    path = Path(settings.model_name_or_path).expanduser()
    if not is_adapter(path):
        return list(classes_of(stored_config(settings)))
    run = next((folder for folder in (path, path.parent) if (folder / RUN_FILE).is_file()), None)
    if run is None:
        return None
    data = read_object(run / RUN_FILE).get("data")
    if not isinstance(data, dict) or not isinstance(data.get("per_class"), dict):
        raise ModelError(f"{run / RUN_FILE} does not name the classes (per_class in data); restore it from a copy")
    return list(data["per_class"])


def require_same_classes(settings: ModelSettings, label_names: Sequence[str]) -> None:
    """Raise ModelError if an adapter would be trained on other classes: its head would mistake them for its own."""
    if settings.model_name_or_path is None or not is_adapter(Path(settings.model_name_or_path).expanduser()):
        return
    known = trained_label_names(settings)
    if known not in (None, list(label_names)):
        raise ModelError(
            f"the adapter {settings.model_name_or_path} has a head for the classes {', '.join(known[:5])}, but the "
            f"recordings are of {', '.join(label_names[:5])}; give recordings of its classes, or tune its "
            f"base, {base_of(settings.model_name_or_path)}"
        )


def input_shapes(config: TridentConfig, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all inputs of the model: those of the recordings, or the smallest for arrays they all lack.
    A model reads the inputs of all its branches, each with a mask."""
    smallest = {"visible": (3, 1, 1), "infrared": (1, 1), "cooling_curve": (), "plume": (1, 1)}
    smallest |= {name: (getattr(config, f"{name}_channels"),) for name in VECTORS}
    return {name: shapes.get(name, smallest[name]) for branch in config.branches for name in BRANCHES[branch]}


def make_trident(
    settings: ModelSettings,
    own: SensorSettings,
    heads: Heads,
    shapes: Shapes,
    device: torch.device,
    placement: Optional[Placement] = None,
) -> tuple[TridentForSensorClassification, list[str]]:
    """Create a model from scratch or load one, with ``heads``, and return it with log lines. It is on the CPU, except
    with ``tuning: qlora`` or a ``placement``. Raises ModelError if files hold no TRIDENT, and for recordings of other
    sensors."""
    config = stored_config(settings)
    if config is None:
        return new_trident(settings, own, heads, shapes), ["TRIDENT, from scratch"]
    _require_channels(config, shapes)
    model = _loaded(settings, own, config, heads, device, placement)
    lines = [f"{settings.model_name_or_path}: TRIDENT with {', '.join(config.branches)}"]
    if classes_of(config) != tuple(heads.label_names):
        count = len(heads.label_names)
        lines.append(f"the head is replaced: {count} classes that are not the model's {config.num_labels}")
    if heads.report_words and not config.report_words:
        lines.append(f"the head for reports is new: {len(heads.report_words)} words")
    return model, lines


def plan_trident_placement(
    settings: ModelSettings, own: SensorSettings, memory: MemorySettings, free: FreeMemory, device: torch.device
) -> Optional[Placement]:
    """Plan where ``device_map`` puts the weights of a stored model, before any is loaded; None if it is not set. Heads
    stay on the device that computes them. Raises a UserError if weights do not fit or could not be trained there."""
    from transformers import AutoModelForSequenceClassification

    if settings.device_map is None:
        return None
    config = stored_config(settings)
    base_settings = replace(settings, model_name_or_path=base_of(settings.model_name_or_path))
    packing = _packing_config(settings, own, config, device)
    return place(base_settings, memory, free, packing, AutoModelForSequenceClassification, kept=(HEAD, REPORT))


def load_scored_trident(settings: ModelSettings, own: SensorSettings, heads: Heads, shapes: Shapes) -> nn.Module:
    """Load a trained model, with its adapter if it is one, in evaluation mode. Raises ModelError if the classes of a
    full model are not those of ``heads`` (an adapter stores none), or if it takes recordings of other sensors."""
    import torch

    config, path = stored_config(settings), Path(settings.model_name_or_path).expanduser()
    label_names = heads.label_names
    _require_channels(config, shapes)
    if not is_adapter(path) and classes_of(config) != tuple(label_names):
        raise ModelError(
            f"the classes of {settings.model_name_or_path} ({', '.join(classes_of(config)[:5])}) are not those of "
            f"the recordings ({', '.join(label_names[:5])}); give recordings that it was trained for"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = prepare_for_evaluation(_loaded(settings, own, config, heads, device), settings.model_name_or_path, settings)
    return model if settings.tuning == "qlora" else model.to(device)


def new_trident(
    settings: ModelSettings, own: SensorSettings, heads: Heads, shapes: Shapes
) -> TridentForSensorClassification:
    """Create a model from scratch, on the CPU."""
    config = TridentConfig(
        branches=list(own.branches),
        hidden_size=own.sensor_hidden_size,
        intermediate_size=2 * own.sensor_hidden_size,
        num_hidden_layers=own.sensor_layers,
        num_fusion_layers=own.sensor_fusion_layers,
        num_attention_heads=own.sensor_heads,
        stem_channels=own.sensor_channels,
        patch=own.sensor_patch,
        dropout=own.sensor_dropout,
        **{f"{name}_channels": shapes[name][0] for name in VECTORS if name in shapes},
        **heads.fields(),
    )
    return TridentForSensorClassification(config).to(_weight_dtype(settings))


def adapter_plan(model: TridentForSensorClassification, is_random: bool = False) -> AdapterPlan:
    """Return the plan of adapters: they act on the transformer blocks only, and the heads are trained in full. In a
    randomly initialized model, all other layers are trained in full too. peft has no name for this kind of task."""
    trained = [HEAD, *([REPORT] if model.report is not None else []), *(model.outside_blocks() if is_random else [])]
    return AdapterPlan(task_type=None, targets=model.transformer_linears(), modules_to_save=trained)


def _weight_dtype(settings: ModelSettings) -> torch.dtype:
    import torch

    return torch.float32 if settings.dtype == "auto" else getattr(torch, settings.dtype)


def _require_channels(config: TridentConfig, shapes: Shapes) -> None:
    """Raise ModelError if the recordings have other numbers of channels than the model takes."""
    for name in VECTORS:
        takes = getattr(config, f"{name}_channels")
        found = shapes.get(name, (takes,))[0]
        if found != takes and any(name in BRANCHES[branch] for branch in config.branches):
            raise ModelError(
                f"the recordings have {found} channels of {name}, but the model takes {takes}; give recordings of the "
                "same sensors"
            )


def _loaded(
    settings: ModelSettings,
    own: SensorSettings,
    config: TridentConfig,
    heads: Heads,
    device: torch.device,
    placement: Optional[Placement] = None,
) -> TridentForSensorClassification:
    name = base_of(settings.model_name_or_path)
    packing = _packing_config(settings, own, config, device)
    with as_model_error(name, "model"):
        require_safe_weights(name, settings)
        kind, dtype = TridentForSensorClassification, _weight_dtype(settings)
        model, lacking = read_model(kind, name, config, settings, dtype, device, packing, placement, **heads.fields())
    new = (f"{HEAD}.", *([] if config.report_words else [f"{REPORT}."]))
    missing = [key for key in lacking if not key.startswith(new)]
    if missing:
        raise ModelError(f"{name!r} lacks weights of a TRIDENT: {missing[0]}; give the folder of a complete model")
    is_new_head = any(key.startswith(f"{HEAD}.") for key in lacking)
    if classes_of(config) != tuple(heads.label_names) and not is_new_head:
        model.classifier.reset_parameters()  # the same number of classes, but different ones
    return prepare_quantized(model) if settings.tuning == "qlora" else model


def _packing_config(
    settings: ModelSettings, own: SensorSettings, config: TridentConfig, device: torch.device
) -> Optional[BitsAndBytesConfig]:
    """Return how to pack the linear layers of the transformer blocks into 4 or 8 bits while loading; None if not."""
    import torch

    if settings.tuning != "qlora":
        return None
    with torch.device("meta"):
        skeleton = TridentForSensorClassification(config)
    packing = quantization_config(settings, skeleton, device)
    if packing is not None and own.quantized_branches is not None:
        kept = [module for name, module in skeleton.parts().items() if name not in own.quantized_branches]
        whole = {id(inner) for part in kept for inner in part.modules()}
        packing.llm_int8_skip_modules += [
            name for name in skeleton.transformer_linears() if id(skeleton.get_submodule(name)) in whole
        ]
    return packing
