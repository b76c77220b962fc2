"""Choose what is trained: the layers that adapters act on, embedding rows of new tokens, or weights by name."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from packaging.version import Version

from scu_trainer.errors import ModelError, did_you_mean
from scu_trainer.figures import first_few
from scu_trainer.models.loading.names import as_model_error, embedding_rows_of_adapter
from scu_trainer.models.quantize import is_mamba
from scu_trainer.settings.model import MUTATING

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from scu_trainer.settings import ModelSettings

logger = logging.getLogger("scu_trainer")

LAYER_NUMBER = re.compile(r".*\.[^.]*\.(\d+)\.")
"""The number of the layer in a module's name, as peft reads it."""

ROWS_IN_WHOLE = "token_adapter.base_layer."
SAVED_WHOLE = ("", "base_layer.", "modules_to_save.", ROWS_IN_WHOLE)
"""What peft may insert before the last part of a weight's name when an adapter file holds the module's own weight."""


def active_configs(model: nn.Module) -> list[PeftConfig]:
    """Return the configurations of active adapters: several in a PeftMixedModel or if ``set_adapter`` got a list."""
    names, configs = getattr(model, "active_adapters", ()), getattr(model, "peft_config", {})
    return [configs[name] for name in names if name in configs] if configs and not callable(names) else []


def active_config(model: nn.Module) -> Optional[PeftConfig]:
    """Return the configuration of the first active adapter; None if there is none."""
    return next(iter(active_configs(model)), None)


def generation_obstacle(model: nn.Module) -> Optional[str]:
    """Return why ``model`` would generate wrong text; None if it would not. peft puts a learned prompt before the text;
    if it is older than transformers needs, it does not find the cache and does so again at every token."""
    if not getattr(active_config(model), "is_prompt_learning", False):
        return None
    from transformers.integrations.peft import MIN_PEFT_VERSION as NEEDED

    if Version(version("peft")) >= Version(NEEDED):
        return None
    return (
        f"peft {version('peft')} would put the learned prompt before every new token, because transformers "
        f'{version("transformers")} needs peft {NEEDED} or later: pip install "peft>={NEEDED}", '
        "or an older transformers if there is no such peft yet"
    )


def changes_base_weights(config: Any) -> bool:
    """Return whether an adapter of this configuration subtracts its initial value from the base weights, as PiSSA does.
    With such an adapter disabled, the weights differ from those of the base model."""
    return str(getattr(config, "init_lora_weights", True)).lower().startswith(MUTATING)


def adapter_targets(model: nn.Module) -> list[str]:
    """Return the names of the linear layers that LoRA can act on. Raises ModelError if there are none. These are all
    linear layers, as with peft's ``all-linear``, except the output head and projections that pass their weight to a
    fused kernel instead of being called: an adapter there would train on a CPU and do nothing on a GPU."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    excluded = {name for name, module in model.named_modules() if module is head} | {*bypassed_projections(model)}
    usable = [name for name in _linear_names(model) if name not in excluded]
    if not usable:
        raise ModelError(f"{type(model).__name__} has no linear layers for LoRA; use tuning: full")
    excluded_leaves = {_leaf(name) for name in excluded}
    # Short names where they are unambiguous keep adapter_config.json readable.
    return sorted({name if _leaf(name) in excluded_leaves else _leaf(name) for name in usable})


def bypassed_projections(model: nn.Module) -> Iterator[str]:
    """Yield the full names of mamba projections whose weights the fused kernels take as arguments. These are the output
    projection, and in Mamba-1 also the projections of the state. peft refuses LoRA on the output projection for the
    families it knows, which do not yet include Granite's hybrid."""
    for name, module in model.named_modules():
        if is_mamba(module):
            yield from (f"{name}.{leaf}" for leaf in ("out_proj", "x_proj", "dt_proj") if hasattr(module, leaf))


def _linear_names(model: nn.Module) -> list[str]:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def checked_targets(model: nn.Module, wanted: Optional[Iterable[str]]) -> Optional[list[str]]:
    """Return ``wanted`` (None if empty; "all-linear" means ``adapter_targets``). Warns about mamba projections, where
    adapters have no effect on a GPU. Raises ModelError with the nearest name for a module that the model does not
    have."""
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
                f"{did_you_mean(target, leaves)}"
            )
    ineffective = [n for n in bypassed_projections(model) if any(n == t or n.endswith(f".{t}") for t in wanted)]
    if ineffective:
        logger.warning(
            "lora_target_modules names %d mamba projections (for instance %s): the fused GPU kernels read that weight "
            "directly and ignore adapters on it",
            len(ineffective),
            ineffective[0],
        )
    return list(wanted)


@dataclass(frozen=True)
class AdapterPlan:
    """How a kind of model is adapted. ``task_type`` is peft's name of the task. ``targets`` are the layers to adapt if
    the user names none (None: those of ``adapter_targets``). ``modules_to_save`` are trained in full next to the
    adapters. ``new_rows`` are the embedding rows of tokens that were added to the tokenizer."""

    task_type: Optional[str] = "CAUSAL_LM"
    targets: Optional[list[str]] = None
    modules_to_save: Optional[list[str]] = None
    new_rows: tuple[int, ...] = ()


CAUSAL = AdapterPlan()


def adapter_config(model: nn.Module, settings: ModelSettings, adapters: AdapterPlan = CAUSAL) -> PeftConfig:
    """Return the configuration of new adapters for ``model``. Raises ModelError for modules that it does not have."""
    from peft import LoftQConfig, LoraConfig, VeraConfig

    shared = {
        "task_type": adapters.task_type,
        "target_modules": _target_modules(model, settings, adapters),
        "modules_to_save": _saved_modules(model, settings, adapters),
        "layers_to_transform": _layers(model, settings),
        "r": settings.lora_r,
    }
    if settings.peft_type == "vera":
        if adapters.new_rows:
            raise ModelError(
                "new_tokens with VeRA need modules_to_save: [embed_tokens, lm_head]; or use peft_type: lora"
            )
        return VeraConfig(**shared, vera_dropout=settings.lora_dropout)
    initial = settings.init_lora_weights
    return LoraConfig(
        **shared,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        exclude_modules=settings.exclude_modules,
        use_rslora=settings.use_rslora,
        use_dora=settings.use_dora,
        init_lora_weights=True if initial == "true" else initial,
        loftq_config=LoftQConfig() if initial == "loftq" else {},
        trainable_token_indices=_trainable_rows(model, settings, adapters.new_rows),
        ensure_weight_tying=_is_tied(model) and bool(settings.modules_to_save or adapters.new_rows),
    )


def _target_modules(model: nn.Module, settings: ModelSettings, adapters: AdapterPlan) -> list[str]:
    found = checked_targets(model, settings.lora_target_modules) or adapters.targets or adapter_targets(model)
    whole = {*(settings.modules_to_save or ())}
    return [name for name in found if name not in whole] if settings.lora_target_modules is None else found


def _saved_modules(model: nn.Module, settings: ModelSettings, adapters: AdapterPlan) -> Optional[list[str]]:
    names = [name for name, _ in model.named_modules() if name]
    for field in ("modules_to_save", "exclude_modules"):
        for wanted in getattr(settings, field) or ():
            if not any(name == wanted or name.endswith(f".{wanted}") for name in names):
                similar = did_you_mean(wanted, sorted({_leaf(name) for name in names}))
                raise ModelError(f"{field}: the model has no module {wanted!r}{similar}")
    return [*(adapters.modules_to_save or ()), *(settings.modules_to_save or ())] or None


def _layers(model: nn.Module, settings: ModelSettings) -> Optional[list[int]]:
    """Return ``layers_to_transform``. Raises ModelError for a layer that the model lacks, which peft leaves out."""
    found = {int(match[1]) for name, _ in model.named_modules() if (match := LAYER_NUMBER.match(name))}
    lacking = next((number for number in settings.layers_to_transform or () if number not in found), None)
    if lacking is not None:
        there = f"its layers: {min(found)} to {max(found)}" if found else "its layers have no numbers"
        raise ModelError(f"layers_to_transform: the model has no layer {lacking}; {there}")
    return settings.layers_to_transform


def _is_tied(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))


def _trainable_rows(model: nn.Module, settings: ModelSettings, rows: Sequence[int]) -> Optional[dict[str, list[int]]]:
    """Return the new rows by module name: of the input embedding, and of the output embedding if they are not tied."""
    embeddings = model.get_input_embeddings() if rows else None
    modules = [embeddings] if _is_tied(model) else [embeddings, model.get_output_embeddings() if rows else None]
    names = {id(module): name for name, module in model.named_modules()}
    found = [_leaf(names[id(module)]) for module in modules if module is not None]
    return {name: [*rows] for name in found if name not in (settings.modules_to_save or ())} or None


def add_tokens(tokenizer: PreTrainedTokenizerBase, settings: ModelSettings) -> tuple[int, ...]:
    """Add ``new_tokens`` and return their ids. Raises ModelError for known tokens and for a list typed as one word."""
    known = [token for token in settings.new_tokens or () if token in tokenizer.get_vocab()]
    if known:
        raise ModelError(f"new_tokens has {known[0]!r}, which the tokenizer already has; take it out")
    listed = [token for token in settings.new_tokens or () if token.startswith(("['", '["')) and token.endswith("]")]
    if listed:  # the flag takes several words; this would become one token with brackets, quotes and commas
        raise ModelError(
            f"new_tokens has {listed[0]}, a list as one word; on a command line, type --new_tokens '<a>' '<b>'"
        )
    tokenizer.add_tokens(list(settings.new_tokens or ()))
    return tuple(tokenizer.convert_tokens_to_ids(token) for token in settings.new_tokens or ())


def grow_embeddings(model: nn.Module, rows: int) -> None:
    """Resize the embeddings to ``rows`` rows if they have fewer; transformers draws new rows around the mean row."""
    if rows > 0 and rows > model.get_input_embeddings().weight.shape[0]:  # an image classifier has no embedding
        model.resize_token_embeddings(rows)


def grow_embeddings_for_adapter(model: nn.Module, adapter: Path) -> None:
    """Resize the embeddings for the new tokens of an adapter, which holds their rows or a whole grown embedding."""
    grow_embeddings(model, max(embedding_rows_of_adapter(adapter), _saved_rows(model, adapter)))


def _saved_rows(model: nn.Module, adapter: Path) -> int:
    """Return the rows of the grown embedding in an adapter's file, by its header; 0 if there is none."""
    from torch import nn

    shapes = _saved_shapes(adapter)
    grown = (
        (module, shapes[key][0])
        for name, module in model.named_modules()
        for key in (f"base_model.model.{name}.{kind}weight" for kind in SAVED_WHOLE)
        if isinstance(module, nn.Embedding) and key in shapes and shapes[key][0] > module.num_embeddings
    )
    # Called last: get_input_embeddings may fail for classifiers, which embed positions or the words of a report.
    return max((rows for module, rows in grown if module is model.get_input_embeddings()), default=0)


def has_single_trained_rows(adapter: Path) -> bool:
    """Return whether an adapter trained single rows of an embedding without saving the whole embedding."""
    return embedding_rows_of_adapter(adapter) > 0 and not any(ROWS_IN_WHOLE in key for key in _saved_shapes(adapter))


def _saved_shapes(adapter: Path) -> dict[str, list[int]]:
    """Return the shapes of an adapter's weights by name, from the header of its file; {} without a file."""
    from safetensors import safe_open

    file = adapter / "adapter_model.safetensors"
    if not file.is_file():
        return {}
    with as_model_error(str(adapter), "adapter"), safe_open(file, framework="pt") as saved:
        return {key: saved.get_slice(key).get_shape() for key in saved.keys()}


def freeze_unselected_weights(model: nn.Module, settings: ModelSettings) -> nn.Module:
    """For ``tuning: full``, freeze weights that no pattern of ``trainable_parameters`` (by default: all) matches, and
    those that one of ``frozen_parameters`` matches. Raises ModelError for a pattern that matches no weight, and if
    nothing is left to train."""
    if not (settings.trainable_parameters or settings.frozen_parameters):
        return model
    names = [name for name, _ in model.named_parameters()]
    for field in ("trainable_parameters", "frozen_parameters"):
        for pattern in getattr(settings, field) or ():
            if not any(re.search(pattern, name) for name in names):
                raise ModelError(f"{field}: {pattern!r} matches no weight; there are {_kinds_of_weights(names)}")
    wanted, frozen = settings.trainable_parameters or [""], settings.frozen_parameters or []
    for name, weight in model.named_parameters():
        is_frozen = any(re.search(pattern, name) for pattern in frozen)
        is_wanted = weight.requires_grad and any(re.search(pattern, name) for pattern in wanted)
        weight.requires_grad_(is_wanted and not is_frozen)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise ModelError("trainable_parameters and frozen_parameters leave nothing to train; take one of them out")
    return model


def _kinds_of_weights(names: list[str]) -> str:
    """List the kinds of weights, with N for the numbers of layers."""
    return first_few(dict.fromkeys(re.sub(r"\.\d+\.", ".N.", name) for name in names), 12)


def save_only_new_rows(model: nn.Module) -> nn.Module:
    """Make ``model.save_pretrained`` save only rows of new tokens; peft would save the whole grown embedding."""

    class WithNewTokens(type(model)):
        def save_pretrained(self, save_directory: str, *args: Any, **options: Any) -> None:
            super().save_pretrained(save_directory, *args, **{"save_embedding_layers": False, **options})

    WithNewTokens.__name__ = type(model).__name__
    model.__class__ = WithNewTokens
    return model
