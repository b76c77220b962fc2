"""Load tokenizers, configurations and models by name, and prepare a model for training or evaluation."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Union

from scu_trainer.errors import ModelError
from scu_trainer.figures import count_text, first_few
from scu_trainer.json_types import first_misfit, misfit
from scu_trainer.models.loading.adapters import (
    CAUSAL,
    AdapterPlan,
    adapter_config,
    freeze_unselected_weights,
    grow_embeddings_for_adapter,
    has_single_trained_rows,
    save_only_new_rows,
)
from scu_trainer.models.loading.causal import require_causal
from scu_trainer.models.loading.dispatch import FreeMemory, Placement, loading_dtype, place
from scu_trainer.models.loading.mapped_files import release_mapped_files
from scu_trainer.models.loading.names import (
    MOST_TOKENS,
    as_model_error,
    base_of,
    check_source,
    expanded_name,
    is_adapter,
    loading_errors,
)
from scu_trainer.models.loading.offloaded import adapt, adapt_as_saved, has_offloaded_weights
from scu_trainer.models.loading.possible import require_room_for
from scu_trainer.models.loading.safety import (
    PICKLED_WEIGHTS,
    SAFE_WEIGHTS,
    require_safe_adapter,
    require_safe_weights,
    safetensors_only,
    warn_about_code,
)
from scu_trainer.models.quantize import (
    cast_bfloat16_weights,
    meta_model,
    mismatched_packed_weights,
    prepare_quantized,
    prevent_repacking,
    quantization_config,
    require_quantization,
    stored_quantization,
)
from scu_trainer.settings import MemorySettings, ModelSettings

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


logger = logging.getLogger("scu_trainer")

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""Patterns of the files that hold the tokens of a tokenizer."""


def load_tokenizer(settings: ModelSettings) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``model_name_or_path``, or that of the base model for an adapter folder without tokenizer
    files; the end-of-text token is used for padding if there is no padding token. Raises ModelError if it cannot be
    loaded or has no end-of-text token."""
    from transformers import AutoTokenizer

    name = settings.model_name_or_path
    check_source(name, "tokenizer")
    source = expanded_name(name)
    if Path(source).is_dir() and not any((Path(source) / file).is_file() for file in TOKENIZER):
        source = base_of(source)
    with as_model_error(source, "tokenizer", settings.model_revision, name):
        warn_about_code(source, settings)
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                source, revision=settings.model_revision, trust_remote_code=settings.trust_remote_code
            )
        except loading_errors():
            _require_vocabulary(source, settings)
            raise
        if tokenizer.eos_token_id is None:
            raise ModelError(
                f"the tokenizer of {name!r} has no end-of-text token; set eos_token in its tokenizer_config.json"
            )
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer("a"), tokenizer.all_special_ids  # transformers loads some files that fail only at this
    return tokenizer


def _require_vocabulary(source: str, settings: ModelSettings) -> None:
    """Raise ModelError if a folder has no tokenizer files; transformers would only report that it cannot read them. An
    image model has no tokenizer because it is not a language model, so that is checked first."""
    folder = Path(source)
    if not folder.is_dir() or any(path for pattern in VOCABULARIES for path in folder.glob(pattern)):
        return
    require_causal(read_config(source, settings), source)
    missing = [name for name in TOKENIZER if not (folder / name).is_file()]
    raise ModelError(
        f"cannot load the tokenizer of {source!r}: there is no {' and no '.join(missing)} in that folder; copy the "
        "tokenizer files there from the base model, or write them with tokenizer.save_pretrained"
    )


def load_model(
    settings: ModelSettings, *, device: Optional[torch.device] = None, placement: Optional[Placement] = None
) -> PreTrainedModel:
    """Load the base model of ``settings``, without adapters, on the CPU in the dtype of ``loading_dtype``.

    If ``model_name_or_path`` is an adapter, the base model that it was trained on is loaded. With ``tuning: qlora`` the
    weights are packed into 4 or 8 bits on ``device`` (default: the CPU) while the files are read, and frozen.
    ``placement`` spreads the weights over several devices (see ``plan_placement``). Raises ModelError, and
    RequirementError if this machine cannot quantize.
    """
    import torch
    from transformers import AutoModelForCausalLM

    device = device or torch.device("cpu")
    name = base_of(settings.model_name_or_path)
    check_source(settings.model_name_or_path)
    require_quantization(settings, device)
    dtype = loading_dtype(settings)
    with as_model_error(name, "model", settings.model_revision, settings.model_name_or_path):
        warn_about_code(name, settings)
        require_safe_weights(name, settings)
        config = read_config(name, settings)
        require_causal(config, name)
        packing = _packing_config(config, settings, device)
        if placement is None:
            require_room_for(config, name, _bytes_per_weight(config, dtype, settings), settings.trust_remote_code)
        extra = {"trust_remote_code": settings.trust_remote_code, "attn_implementation": settings.attn_implementation}
        model, random = read_model(
            AutoModelForCausalLM, name, config, settings, dtype, device, packing, placement, **extra
        )
    if random:
        raise ModelError(
            f"the weights of {name!r} are not those of the causal language model in its config.json: "
            f"{first_few(random, 1)} missing or of another shape; give the folder of a complete causal language model"
        )
    _require_generation_config(model, name)
    if settings.tuning != "qlora":
        return model
    release_mapped_files()  # the packed weights are copies, so the files are not needed any more
    return prepare_quantized(model)


TOKEN = Union[int, list[int], None]
OF_GENERATION = {
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"), TOKEN),
    **dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty"), Optional[float]),
    "do_sample": Optional[bool],
}
"""Types of the fields of a generation_config.json that transformers uses without a check."""


def _require_generation_config(model: PreTrainedModel, name: str) -> None:
    """Raise ModelError for values of another type, with which the first generated answer would fail."""
    values = {field: getattr(model.generation_config, field, None) for field in OF_GENERATION}
    wrong = first_misfit(misfit(value, OF_GENERATION[field], field) for field, value in values.items())
    if wrong is None:
        tokens = {field: value for field, value in values.items() if OF_GENERATION[field] is TOKEN}
        named = ((field, token) for field, ids in tokens.items() for token in (ids if isinstance(ids, list) else [ids]))
        wrong = next((f"{field} has {token}" for field, token in named if token and abs(token) >= MOST_TOKENS), None)
    if wrong is not None:
        raise ModelError(
            f"the generation_config.json of {name!r}: {wrong}, which cannot be used to generate; correct it"
        )


def read_model(
    kind: Any,
    name: str,
    config: PretrainedConfig,
    settings: ModelSettings,
    dtype: Union[str, torch.dtype],
    device: Optional[torch.device] = None,
    packing: Optional[BitsAndBytesConfig] = None,
    placement: Optional[Placement] = None,
    **more: Any,
) -> tuple[PreTrainedModel, list[str]]:
    """Return the model, and the names of the weights that are missing from its files or have another shape there.
    transformers initializes those weights at random. Warns about weights in the files that the model does not have.
    ``kind`` is the model class or Auto class, ``packing`` says how to pack weights into 4 or 8 bits on ``device``, and
    ``more`` holds further arguments of ``from_pretrained``."""
    folder = None if placement is None else placement.private_folder()
    given = {} if packing is None else {"quantization_config": packing}
    if device is not None and settings.tuning == "qlora":
        given["device_map"] = {"": device}
    if placement is not None:
        given |= placement.arguments(folder)
    model, report = kind.from_pretrained(
        name,
        dtype=dtype,
        revision=settings.model_revision,
        use_safetensors=safetensors_only(settings),
        ignore_mismatched_sizes=True,  # the report names them, and the caller decides
        output_loading_info=True,
        **given,
        **more,
    )
    model.offload_folder = folder  # keeps the folder until the model is freed
    unused = sorted(report["unexpected_keys"])
    if unused and not stored_quantization(config):
        logger.warning(
            "%s: %s left out (%s), because the model that its config.json describes does not have them; if it should, "
            "correct config.json",
            name, count_text(len(unused), "weight in its files is", "weights in its files are"), first_few(unused),
        )  # fmt: skip
    is_unpacked = stored_quantization(config) and not getattr(model, "is_quantized", False)
    if settings.tuning != "qlora" and is_unpacked and not isinstance(dtype, str):
        cast_bfloat16_weights(model, dtype)
    prevent_repacking(model)  # even without packing here, because its files may hold 4-bit weights
    mismatched = [*(entry[0] for entry in report["mismatched_keys"]), *mismatched_packed_weights(model)]
    return model, sorted({*report["missing_keys"], *mismatched})


def causal_config(settings: ModelSettings) -> PretrainedConfig:
    """Return the configuration of the model to load. Raises ModelError if it is not a causal language model."""
    config = config_of(settings)
    require_causal(config, base_of(settings.model_name_or_path))
    return config


def config_of(settings: ModelSettings) -> PretrainedConfig:
    """Read the configuration of a model, or of the base of an adapter. Raises ModelError if it cannot be read."""
    check_source(settings.model_name_or_path)
    name = base_of(settings.model_name_or_path)
    with as_model_error(name, "configuration", settings.model_revision, settings.model_name_or_path):
        warn_about_code(name, settings)
        return read_config(name, settings)


def supports_flash_attention(settings: ModelSettings) -> bool:
    """Return whether transformers runs flash attention in models of this family: not where it has no suitable mask."""
    config, name = causal_config(settings), base_of(settings.model_name_or_path)
    with as_model_error(name, "model", settings.model_revision, settings.model_name_or_path):
        return meta_model(config, settings.trust_remote_code)._supports_flash_attn


def has_loadable_weights(settings: ModelSettings) -> bool:
    """Return whether the folder that ``load_model`` would read holds weights. Reads only the headers of the files.
    Raises ModelError if a file is missing or damaged, as ``load_model`` would."""
    from safetensors import safe_open

    name = base_of(settings.model_name_or_path)
    folder = Path(name)
    with as_model_error(name, "model", settings.model_revision, settings.model_name_or_path):
        require_safe_weights(str(folder), settings)
        whole, index = (folder / file for file in SAFE_WEIGHTS)
        parts = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else ()
        files = [whole] if whole.is_file() else [folder / part for part in sorted(parts)]
        for file in files:
            with safe_open(file, framework="pt"):
                pass
    return bool(files) or any((folder / file).is_file() for file in PICKLED_WEIGHTS)


def _packing_config(
    config: PretrainedConfig, settings: ModelSettings, device: torch.device
) -> Optional[BitsAndBytesConfig]:
    """Return how to pack weights into 4 or 8 bits while loading; None without qlora, or if the files are packed."""
    if settings.tuning != "qlora":
        return None
    return quantization_config(settings, meta_model(config, settings.trust_remote_code), device)


def classes_of(config: PretrainedConfig) -> tuple[str, ...]:
    """Return the class names of a classifier in the order of their labels."""
    names = config.id2label or {}  # PvtConfig has only the number of labels
    return tuple(names.get(number, f"LABEL_{number}") for number in range(config.num_labels))


def class_fields(names: Sequence[str]) -> dict[str, Any]:
    """Return the configuration fields that store the class ``names``; ``classes_of`` reads them back."""
    numbers = {name: number for number, name in enumerate(names)}
    return {"num_labels": len(names), "id2label": dict(enumerate(names)), "label2id": numbers}


def read_config(name: str, settings: ModelSettings) -> PretrainedConfig:
    """Read a configuration. Raises ModelError for invalid ``architectures``, which transformers does not check."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        name, revision=settings.model_revision, trust_remote_code=settings.trust_remote_code
    )
    classes = config.architectures or []
    if not isinstance(classes, list) or not all(isinstance(name_of_class, str) for name_of_class in classes):
        raise ModelError(
            f"the configuration of {name!r} has {classes!r} as architectures; it must be a list of class names, "
            'such as ["LlamaForCausalLM"], or be left out'
        )
    return config


def _bytes_per_weight(config: PretrainedConfig, dtype: Any, settings: ModelSettings) -> float:
    """Return the least bytes that one weight takes in memory."""
    import torch

    if settings.tuning == "qlora" or getattr(config, "quantization_config", None):
        return 0.5
    stored = dtype if isinstance(dtype, torch.dtype) else config.dtype
    return float(stored.itemsize) if isinstance(stored, torch.dtype) else 2.0


def plan_placement(
    settings: ModelSettings, memory: MemorySettings, free: FreeMemory, *, device: torch.device
) -> Optional[Placement]:
    """Plan where ``device_map`` puts the weights, before any is loaded; None if ``device_map`` is not set. Raises a
    UserError if they do not fit or could not be trained there."""
    if settings.device_map is None:
        return None
    check_source(settings.model_name_or_path)
    name = base_of(settings.model_name_or_path)
    with as_model_error(name, "model", settings.model_revision, settings.model_name_or_path):
        warn_about_code(name, settings)
        base_settings = replace(settings, model_name_or_path=name)
        return place(base_settings, memory, free, _packing_config(read_config(name, settings), settings, device))


def prepare_for_tuning(model: PreTrainedModel, settings: ModelSettings, adapters: AdapterPlan = CAUSAL) -> nn.Module:
    """Make the weights trainable that ``tuning`` asks for, and add adapters if it needs them.

    ``tuning: full`` trains the weights that ``freeze_unselected_weights`` selects, by default all of them. LoRA freezes
    the base model and adds adapters on ``lora_target_modules``, or on the layers of the plan ``adapters``. If
    ``model_name_or_path`` is an adapter, training continues from it with its own configuration. Raises ModelError for
    full tuning of an adapter, and for module names that the model does not have.
    """
    adapter = Path(settings.model_name_or_path or "").expanduser()
    if settings.tuning == "full":
        if is_adapter(adapter):
            raise ModelError(
                f"tuning: full cannot start from the adapter {adapter}; give its base model, or use tuning: lora"
            )
        return freeze_unselected_weights(model, settings)
    if is_adapter(adapter):
        grow_embeddings_for_adapter(model, adapter)
        if has_offloaded_weights(model):
            require_safe_adapter(adapter, settings.allow_pickle)
            with as_model_error(str(adapter), "adapter"):
                return adapt_as_saved(model, adapter)
        adapted = load_saved_adapter(model, adapter, is_trainable=True, allow_pickle=settings.allow_pickle)
        return save_only_new_rows(adapted) if has_single_trained_rows(adapter) else adapted
    config = adapter_config(model, settings, adapters)
    with warnings.catch_warnings():
        # peft detects for each layer whether its weight is transposed, and warns every time.
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
        adapted = adapt(model, config)
    return save_only_new_rows(adapted) if adapters.new_rows else adapted


def load_for_evaluation(path_or_id: str, settings: ModelSettings) -> PreTrainedModel:
    """Load a model, or an adapter with its base model, frozen and in evaluation mode, on the GPU if there is one."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(replace(settings, model_name_or_path=path_or_id), device=device)
    model = prepare_for_evaluation(model, path_or_id, settings)
    return model if settings.tuning == "qlora" else model.to(device)  # 8-bit weights cannot be moved


def prepare_for_evaluation(model: PreTrainedModel, name: str, settings: ModelSettings) -> nn.Module:
    """Return ``model`` frozen and in evaluation mode, with the adapter in the folder ``name`` if there is one."""
    path = Path(name).expanduser()
    if is_adapter(path):
        grow_embeddings_for_adapter(model, path)
        model = load_saved_adapter(model, path, is_trainable=False, allow_pickle=settings.allow_pickle)
    return model.eval().requires_grad_(False)


def load_saved_adapter(model: PreTrainedModel, adapter: Path, is_trainable: bool, allow_pickle: bool) -> nn.Module:
    """Add the adapter saved in the folder ``adapter``. Raises ModelError if it cannot be read or lacks weights."""
    from peft import PeftModel

    require_safe_adapter(adapter, allow_pickle)
    with as_model_error(str(adapter), "adapter"), warnings.catch_warnings():
        # peft only warns about missing weights, and the model would behave like its base.
        warnings.filterwarnings("error", "Found missing adapter keys")
        return PeftModel.from_pretrained(model, str(adapter), is_trainable=is_trainable)
