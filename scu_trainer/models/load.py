"""From a name to a model that can be tuned: where it lies, how it is loaded, which of its layers get adapters."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from scu_trainer.errors import ModelError, nearest
from scu_trainer.settings import ModelSettings

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("scu_trainer")


def check_source(name_or_path: str) -> None:
    """Raise ModelError for a path that is no model, without touching the network. Hub ids pass."""
    path = Path(name_or_path).expanduser()
    looks_local = name_or_path.startswith((".", "/", "~")) or path.exists() or name_or_path.count("/") > 1
    if not looks_local:
        return
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise ModelError(f"model_name_or_path {name_or_path!r} {found}; give a folder with a config.json, or a Hub id")
    if not (path / "config.json").is_file() and not is_adapter(path):
        raise ModelError(
            f"model_name_or_path {name_or_path!r} is a folder without config.json or adapter_config.json; give the folder "
            "that save_pretrained wrote"
        )


def is_adapter(path: Path) -> bool:
    return (path / "adapter_config.json").is_file()


def load_tokenizer(settings: ModelSettings) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to ``model_name_or_path``; an end-of-text token doubles as padding where none is defined."""
    from transformers import AutoTokenizer

    name = settings.model_name_or_path
    check_source(name)
    source = name if _has_tokenizer(Path(name).expanduser()) or not Path(name).exists() else base_of(Path(name))
    with _as_model_error(name, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=settings.model_revision, trust_remote_code=settings.trust_remote_code
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer of {name!r} has no end-of-text token; set eos_token in its tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _has_tokenizer(path: Path) -> bool:
    return (path / "tokenizer_config.json").is_file() or (path / "tokenizer.json").is_file()


def base_of(adapter: Path) -> str:
    """Name or path of the base model that an adapter folder was trained on; the folder itself when it is no adapter."""
    if not is_adapter(adapter):
        return str(adapter)
    return json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]


def load_model(settings: ModelSettings) -> PreTrainedModel:
    """Base weights only, on the CPU, in ``settings.dtype``. Full tuning in ``auto`` loads float32: AdamW's small steps vanish
    in bfloat16 weights. Raises ModelError."""
    import torch
    from transformers import AutoModelForCausalLM

    name = settings.model_name_or_path
    check_source(name)
    dtype = settings.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
    if settings.dtype == "auto" and settings.tuning == "full":
        dtype = torch.float32
    with _as_model_error(name, "model"):
        return AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype,
            revision=settings.model_revision,
            trust_remote_code=settings.trust_remote_code,
            attn_implementation=settings.attn_implementation,
        )


class _as_model_error:
    """Context manager: what transformers raises for a name it cannot use becomes one ModelError."""

    def __init__(self, name: str, what: str) -> None:
        self.name, self.what = name, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, trace) -> bool:
        if not isinstance(error, (OSError, ValueError, KeyError)):
            return False
        first = str(error).strip().splitlines()[0] if str(error).strip() else kind.__name__
        hint = "" if Path(self.name).exists() else "; if it is a Hub id, check its spelling and the connection"
        raise ModelError(f"cannot load the {self.what} of {self.name!r}: {first}{hint}") from error


def prepare_for_tuning(model: PreTrainedModel, settings: ModelSettings) -> nn.Module:
    """Full: every weight trainable. LoRA: adapters on ``lora_target_modules`` or on ``adapter_targets``, base frozen."""
    if settings.tuning == "full":
        return model
    from peft import LoraConfig, TaskType, get_peft_model

    targets = _checked_targets(model, settings.lora_target_modules) or adapter_targets(model)
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=targets,
    )
    return get_peft_model(model, config)


def adapter_targets(model: nn.Module) -> list[str]:
    """Names of the linear layers that LoRA can act on: all of them, as peft's ``all-linear``, but for the output head and for
    projections whose weight is handed to a fused kernel instead of being called (an adapter there would train on a CPU and
    do nothing on a GPU)."""
    bypassed = set(bypassed_projections(model))
    head = _output_head_name(model)
    usable = [name for name in _linear_names(model) if name not in bypassed and name != head]
    if not usable:
        raise ModelError(f"{type(model).__name__} has no linear layers for LoRA; use tuning: full")
    excluded_leaves = {_leaf(name) for name in bypassed | {head or ""}}
    # Short names where they are unambiguous: adapter_config.json stays readable.
    return sorted({name if _leaf(name) in excluded_leaves else _leaf(name) for name in usable})


def bypassed_projections(model: nn.Module) -> Iterator[str]:
    """Full names of mamba output projections. The fused mamba kernels take ``out_proj.weight`` as an argument; peft refuses
    LoRA on it for the mamba families it knows, and Granite's hybrid is not yet among them."""
    for name, module in model.named_modules():
        if hasattr(module, "A_log") and hasattr(module, "conv1d") and hasattr(module, "out_proj"):
            yield f"{name}.out_proj"


def _linear_names(model: nn.Module) -> list[str]:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]


def _output_head_name(model: nn.Module) -> Optional[str]:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return next((name for name, module in model.named_modules() if module is head), None) if head is not None else None


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _checked_targets(model: nn.Module, wanted: Optional[Iterable[str]]) -> Optional[list[str]]:
    if not wanted:
        return None
    if list(wanted) == ["all-linear"]:
        return adapter_targets(model)
    names = [name for name, _ in model.named_modules()]
    for target in wanted:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            leaves = sorted({_leaf(name) for name in _linear_names(model)})
            raise ModelError(
                f"lora_target_modules: the model has no module {target!r}; its linear layers: {', '.join(leaves)}"
                f"{nearest(target, leaves)}"
            )
    ineffective = [n for n in bypassed_projections(model) if any(n == t or n.endswith(f".{t}") for t in wanted)]
    if ineffective:
        logger.warning(
            "lora_target_modules names %d mamba output projections (for instance %s): the fused GPU kernels read that weight "
            "directly and ignore adapters on it",
            len(ineffective),
            ineffective[0],
        )
    return list(wanted)


def load_for_evaluation(path_or_id: str, settings: ModelSettings) -> PreTrainedModel:
    """A base model, or a base with the adapter found in ``path_or_id``, frozen and in evaluation mode."""
    import torch
    from peft import PeftModel

    path = Path(path_or_id).expanduser()
    check_source(path_or_id)
    if not is_adapter(path):
        model = load_model(_renamed(settings, path_or_id))
    else:
        base = load_model(_renamed(settings, base_of(path)))
        with _as_model_error(path_or_id, "adapter"):
            model = PeftModel.from_pretrained(base, str(path))
    return model.eval().requires_grad_(False).to("cuda" if torch.cuda.is_available() else "cpu")


def _renamed(settings: ModelSettings, name: str) -> ModelSettings:
    from dataclasses import replace

    return replace(settings, model_name_or_path=name)
