"""What is trained of a model: which layers adapters act on and what they are, rows of new tokens, weights by name."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from packaging.version import Version

from scu_trainer.errors import ModelError, nearest
from scu_trainer.models.loading.names import as_model_error, rows_of_adapter
from scu_trainer.models.quantize import is_mamba
from scu_trainer.settings.model import MUTATING

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from scu_trainer.settings import ModelSettings

logger = logging.getLogger("scu_trainer")

ROWS_IN_WHOLE = "token_adapter.base_layer."
SAVED_WHOLE = ("", "base_layer.", "modules_to_save.", ROWS_IN_WHOLE)
"""What stands before the last part in peft's names of a module's own weight, in the file of an adapter."""


def active_configs(model: nn.Module) -> list[PeftConfig]:
    """Of the adapters that act; several at once do in a PeftMixedModel, or where ``set_adapter`` was given a list."""
    names, held = getattr(model, "active_adapters", ()), getattr(model, "peft_config", {})
    return [held[name] for name in names if name in held] if held and not callable(names) else []


def active_config(model: nn.Module) -> Optional[PeftConfig]:
    """Of the first adapter that acts; None where the model has none."""
    return next(iter(active_configs(model)), None)


def cannot_write(model: nn.Module) -> Optional[str]:
    """Why ``model`` would write other words than it learned; None where it does not. peft puts a learned prompt before
    the text. One older than transformers asks for does not find the cache and puts it there again at every word."""
    if not getattr(active_config(model), "is_prompt_learning", False):
        return None
    from transformers.integrations.peft import MIN_PEFT_VERSION as NEEDED

    if Version(version("peft")) >= Version(NEEDED):
        return None
    return (
        f"peft {version('peft')} would put the learned prompt before every new word, since transformers "
        f'{version("transformers")} needs peft {NEEDED} or later: pip install "peft>={NEEDED}", '
        "or an older transformers while there is none"
    )


def takes_from_base(config: Any) -> bool:
    """Whether an adapter of this configuration takes what it begins with out of the base weights, as PiSSA does: they
    are not those of the base while it is off."""
    return str(getattr(config, "init_lora_weights", True)).lower().startswith(MUTATING)


def adapter_targets(model: nn.Module) -> list[str]:
    """Names of the linear layers that LoRA can act on: all of them, as peft's ``all-linear``, but for the output head
    and for projections whose weight is handed to a fused kernel instead of being called (an adapter there would train
    on a CPU and do nothing on a GPU)."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    excluded = {name for name, module in model.named_modules() if module is head} | {*bypassed_projections(model)}
    usable = [name for name in _linear_names(model) if name not in excluded]
    if not usable:
        raise ModelError(f"{type(model).__name__} has no linear layers for LoRA; use tuning: full")
    excluded_leaves = {_leaf(name) for name in excluded}
    # Short names where they are unambiguous: adapter_config.json stays readable.
    return sorted({name if _leaf(name) in excluded_leaves else _leaf(name) for name in usable})


def bypassed_projections(model: nn.Module) -> Iterator[str]:
    """Full names of mamba projections whose weights the fused kernels take as arguments: the output projection, and in
    the first mamba those of the state. peft refuses LoRA on the former for the families it knows, and Granite's hybrid
    is not yet among them."""
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
    """``wanted`` if the model has them all, None if nothing is wanted. Raises ModelError with the nearest name."""
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
            "lora_target_modules names %d mamba projections (for instance %s): the fused GPU kernels read that weight "
            "directly and ignore adapters on it",
            len(ineffective),
            ineffective[0],
        )
    return list(wanted)


@dataclass(frozen=True)
class AdapterPlan:
    """What LoRA means for a kind of model. ``task_type``: peft's name of it. ``targets``: the layers to adapt where
    nobody names any; None: those of ``adapter_targets``. ``modules_to_save``: trained as they are, beside adapters.
    ``new_rows``: of the embeddings, of tokens that the tokenizer got."""

    task_type: Optional[str] = "CAUSAL_LM"
    targets: Optional[list[str]] = None
    modules_to_save: Optional[list[str]] = None
    new_rows: tuple[int, ...] = ()


CAUSAL = AdapterPlan()


def adapter_config(model: nn.Module, settings: ModelSettings, adapters: AdapterPlan = CAUSAL) -> PeftConfig:
    """New adapters for ``model``. Raises ModelError for modules that it does not have."""
    from peft import LoftQConfig, LoraConfig, VeraConfig

    shared = {
        "task_type": adapters.task_type,
        "target_modules": _targets(model, settings, adapters),
        "modules_to_save": _saved_modules(model, settings, adapters),
        "layers_to_transform": settings.layers_to_transform,
        "r": settings.lora_r,
    }
    if settings.peft_type == "vera":
        if adapters.new_rows:
            raise ModelError(
                "new_tokens beside VeRA need modules_to_save: [embed_tokens, lm_head]; or use peft_type: lora"
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
        trainable_token_indices=_new_rows(model, settings, adapters.new_rows),
        ensure_weight_tying=_is_tied(model) and bool(settings.modules_to_save or adapters.new_rows),
    )


def _targets(model: nn.Module, settings: ModelSettings, adapters: AdapterPlan) -> list[str]:
    found = checked_targets(model, settings.lora_target_modules) or adapters.targets or adapter_targets(model)
    whole = {*(settings.modules_to_save or ())}
    return [name for name in found if name not in whole] if settings.lora_target_modules is None else found


def _saved_modules(model: nn.Module, settings: ModelSettings, adapters: AdapterPlan) -> Optional[list[str]]:
    names = [name for name, _ in model.named_modules() if name]
    for wanted in (*(settings.modules_to_save or ()), *(settings.exclude_modules or ())):
        if not any(name == wanted or name.endswith(f".{wanted}") for name in names):
            leaves = sorted({_leaf(name) for name in names})
            raise ModelError(f"the model has no module {wanted!r}{nearest(wanted, leaves)}; check modules_to_save")
    return [*(adapters.modules_to_save or ()), *(settings.modules_to_save or ())] or None


def _is_tied(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))


def _new_rows(model: nn.Module, settings: ModelSettings, rows: Sequence[int]) -> Optional[dict[str, list[int]]]:
    """Rows of the embeddings by the name of the module; of both where they are not tied."""
    embeddings = model.get_input_embeddings() if rows else None
    modules = [embeddings] if _is_tied(model) else [embeddings, model.get_output_embeddings() if rows else None]
    names = {id(module): name for name, module in model.named_modules()}
    found = [_leaf(names[id(module)]) for module in modules if module is not None]
    return {name: [*rows] for name in found if name not in (settings.modules_to_save or ())} or None


def add_tokens(tokenizer: PreTrainedTokenizerBase, settings: ModelSettings) -> tuple[int, ...]:
    """Put ``new_tokens`` into the tokenizer; their ids. Raises ModelError for one that it knows, and for a list."""
    known = [token for token in settings.new_tokens or () if token in tokenizer.get_vocab()]
    if known:
        raise ModelError(f"new_tokens has {known[0]!r}, which the tokenizer knows already; take it out")
    listed = [token for token in settings.new_tokens or () if token.startswith(("['", '["')) and token.endswith("]")]
    if listed:  # one flag takes several words, and this would be one token with brackets, quotes and commas
        raise ModelError(f"new_tokens has {listed[0]}, a list as one word; on a command line: --new_tokens '<a>' '<b>'")
    tokenizer.add_tokens(list(settings.new_tokens or ()))
    return tuple(tokenizer.convert_tokens_to_ids(token) for token in settings.new_tokens or ())


def grow_embeddings(model: nn.Module, rows: int) -> None:
    """Rows for new tokens, by transformers' default around the mean of the others; nothing where there are enough."""
    if rows > 0 and rows > model.get_input_embeddings().weight.shape[0]:  # a classifier of images has no embedding
        model.resize_token_embeddings(rows)


def grow_for_adapter(model: nn.Module, adapter: Path) -> None:
    """Rows for the tokens that an adapter has trained, or whose whole embedding peft has saved with it."""
    grow_embeddings(model, max(rows_of_adapter(adapter), _saved_rows(model, adapter)))


def _saved_rows(model: nn.Module, adapter: Path) -> int:
    """Of the embedding among the weights of an adapter, by the header of their file; 0 where it has not grown."""
    from torch import nn

    shapes = _shapes(adapter)
    grown = (
        (module, shapes[key][0])
        for name, module in model.named_modules()
        for key in (f"base_model.model.{name}.{kind}weight" for kind in SAVED_WHOLE)
        if isinstance(module, nn.Embedding) and key in shapes and shapes[key][0] > module.num_embeddings
    )
    # Asked last: a classifier, whose embeddings are those of places or of the words of a report, may not answer.
    return max((rows for module, rows in grown if module is model.get_input_embeddings()), default=0)


def has_rows_alone(adapter: Path) -> bool:
    """Whether an adapter has trained rows of an embedding that was not saved with it."""
    return rows_of_adapter(adapter) > 0 and not any(ROWS_IN_WHOLE in key for key in _shapes(adapter))


def _shapes(adapter: Path) -> dict[str, list[int]]:
    """Of its weights by name, by the header of their file; none where there is no such file."""
    from safetensors import safe_open

    file = adapter / "adapter_model.safetensors"
    if not file.is_file():
        return {}
    with as_model_error(str(adapter), "adapter"), safe_open(file, framework="pt") as saved:
        return {key: saved.get_slice(key).get_shape() for key in saved.keys()}


def choose_weights(model: nn.Module, settings: ModelSettings) -> nn.Module:
    """tuning: full: trains what ``trainable_parameters`` name and ``frozen_parameters`` do not. Raises ModelError for a
    pattern that names nothing, and where nothing is left."""
    if not (settings.trainable_parameters or settings.frozen_parameters):
        return model
    names = [name for name, _ in model.named_parameters()]
    for field in ("trainable_parameters", "frozen_parameters"):
        for pattern in getattr(settings, field) or ():
            if not any(re.search(pattern, name) for name in names):
                raise ModelError(f"{field}: {pattern!r} names no weight; there are {_examples(names)}")
    wanted, frozen = settings.trainable_parameters or [""], settings.frozen_parameters or []
    for name, weight in model.named_parameters():
        is_frozen = any(re.search(pattern, name) for pattern in frozen)
        is_wanted = weight.requires_grad and any(re.search(pattern, name) for pattern in wanted)
        weight.requires_grad_(is_wanted and not is_frozen)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise ModelError("trainable_parameters and frozen_parameters leave nothing to train; take one of them out")
    return model


def _examples(names: list[str]) -> str:
    """Kinds of weights, without the numbers of layers."""
    kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".N.", name) for name in names))
    return ", ".join(kinds[:12]) + (", ..." if len(kinds) > 12 else "")


def save_rows_alone(model: nn.Module) -> nn.Module:
    """Saved with an adapter are the rows of new tokens; peft would add the whole embedding, since it has grown."""

    class WithNewTokens(type(model)):
        def save_pretrained(self, save_directory: str, *args: Any, **options: Any) -> None:
            super().save_pretrained(save_directory, *args, **{"save_embedding_layers": False, **options})

    WithNewTokens.__name__ = type(model).__name__
    model.__class__ = WithNewTokens
    return model
