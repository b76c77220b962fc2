"""Structured pruning: cut the units out of a trained model that contribute least, instead of masking them.

A unit is something that a configuration counts: a neuron of a gated MLP, a group of attention heads with its key and
value head (Llama and similar models), or a channel of a ResNet. Every layer, or every layer of a stage, loses the same
number of units, because the configuration has a single number for all; the result is a stock model of its family.

The contribution of a unit is the mean square of its output times the squared norm of the weights that read it, over
some rows of the training data. This is Wanda's |weight| · ‖activation‖ (Sun et al. 2023, arXiv:2306.11695), squared and
summed over a unit as FLAP does it for structured pruning (An et al. 2023, arXiv:2312.11983).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from scu_trainer.errors import ModelError
from scu_trainer.models.asking import evaluating

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

NEURONS, HEADS, CHANNELS = "neurons", "heads", "channels"
MLP, ATTENTION = ("gate_proj", "up_proj", "down_proj"), ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Units:
    """``count`` units of one ``kind``; ``kept`` of them stay. ``written`` maps the names of the modules that compute
    the units to how many of their outputs belong to one unit, and ``read`` the modules that use them to how many of
    their inputs do. Those of a unit are adjacent."""

    kind: str
    count: int
    kept: int
    written: Mapping[str, int]
    read: Mapping[str, int]


@dataclass(frozen=True)
class PruningPlan:
    """The units to prune, and the ``changes`` of the configuration: its fields with the values of the smaller model."""

    units: Sequence[Units]
    changes: Mapping[str, Any]

    @property
    def sizes(self) -> dict[str, list[tuple[int, int]]]:
        """Return the distinct (count, kept) of each kind of units."""
        kinds = dict.fromkeys(units.kind for units in self.units)
        return {kind: sorted({(u.count, u.kept) for u in self.units if u.kind == kind}) for kind in kinds}


def kept_of(count: int, amount: float) -> int:
    """Return how many of ``count`` units stay: at least the share ``1 - amount``, and at least one."""
    return max(1, count - int(amount * count + 1e-9))


def plan_pruning(model: PreTrainedModel, amount: float, kinds: Sequence[str] = ()) -> PruningPlan:
    """Plan the pruning of the share ``amount`` of the units of each kind. ``kinds`` are NEURONS, HEADS or both (the
    default) for a language model, and CHANNELS for a ResNet. Raises ModelError for a model whose configuration cannot
    describe the result, and if nothing would be removed."""
    is_resnet = getattr(model.config, "model_type", None) == "resnet"
    allowed = (CHANNELS,) if is_resnet else (NEURONS, HEADS)
    other = next((kind for kind in kinds if kind not in allowed), None)
    if other is not None:
        raise ModelError(f"{type(model).__name__} has no {other} to prune; it has {' and '.join(allowed)}")
    plan = _plan_resnet(model, amount) if is_resnet else _plan_llama(model, amount, kinds or allowed)
    if all(units.kept == units.count for units in plan.units):
        sizes = ", ".join(f"{kind} {counts[0][0]}" for kind, counts in plan.sizes.items())
        raise ModelError(
            f"amount {amount:g} removes nothing ({sizes}): it is less than one unit, or the model's config restricts "
            "the number of heads; give a larger amount"
        )
    return plan


# -- families ----------------------------------------------------------------------------------------------------------


def _plan_llama(model: PreTrainedModel, amount: float, kinds: Sequence[str]) -> PruningPlan:
    config, units, changes = model.config, [], {}
    if NEURONS in kinds:
        names = _modules_with_linears(model, MLP, "intermediate_size")
        for name in names:
            count = model.get_submodule(f"{name}.down_proj").in_features
            written = dict.fromkeys([f"{name}.gate_proj", f"{name}.up_proj"], 1)
            units.append(Units(NEURONS, count, kept_of(count, amount), written, {f"{name}.down_proj": 1}))
        changes["intermediate_size"] = units[0].kept
    if HEADS in kinds:
        names, groups = _modules_with_linears(model, ATTENTION, "num_key_value_heads"), config.num_key_value_heads
        size = model.get_submodule(f"{names[0]}.k_proj").out_features // groups
        heads_per_group = config.num_attention_heads // groups
        query_size = heads_per_group * size
        kept = next(
            n
            for n in range(kept_of(groups, amount), groups + 1)
            if _accepts(config, _head_fields(n, heads_per_group, size))
        )
        for name in names:
            written = {f"{name}.q_proj": query_size, f"{name}.k_proj": size, f"{name}.v_proj": size}
            units.append(Units(HEADS, groups, kept, written, {f"{name}.o_proj": query_size}))
        changes |= _head_fields(kept, heads_per_group, size)
    if len({(group.kind, group.count) for group in units}) != len({group.kind for group in units}):
        raise ModelError(f"the layers of {type(model).__name__} have different sizes, but its config has one for all")
    return PruningPlan(units, changes)


def _head_fields(groups: int, heads_per_group: int, size: int) -> dict[str, int]:
    return {"num_key_value_heads": groups, "num_attention_heads": groups * heads_per_group, "head_dim": size}


def _accepts(config: PretrainedConfig, changes: Mapping[str, Any]) -> bool:
    """Return whether the config accepts ``changes``; some require a hidden size that is a multiple of the heads."""
    from huggingface_hub.errors import StrictDataclassError

    if changes["num_key_value_heads"] == config.num_key_value_heads:
        return True
    try:
        _changed(config, changes).validate()
    except (StrictDataclassError, ValueError):
        return False
    return True


def _changed(config: PretrainedConfig, changes: Mapping[str, Any]) -> PretrainedConfig:
    changed = copy.deepcopy(config)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def _modules_with_linears(model: PreTrainedModel, parts: Sequence[str], field: str) -> list[str]:
    """Return the names of the modules that have ``parts`` as linear layers, one in each layer of the model. Raises
    ModelError if some layers have none, or if the config has no number ``field`` for them."""
    from torch import nn

    names = [
        name
        for name, module in model.named_modules()
        if all(type(getattr(module, part, None)) is nn.Linear for part in parts)
    ]
    layers = getattr(model.config, "num_hidden_layers", None)
    if len(names) != layers or not isinstance(getattr(model.config, field, None), int):
        raise ModelError(
            f"{type(model).__name__} cannot be pruned: {len(names)} of its {layers} layers have {', '.join(parts)} as "
            f"linear layers that {field} in its config counts. Language models built like Llama can be pruned, and "
            "ResNets"
        )
    return names


def _plan_resnet(model: PreTrainedModel, amount: float) -> PruningPlan:
    """Plan the pruning of a ResNet. The channels between blocks are shared by all blocks of a stage, because its
    shortcuts add them; the channels inside a block belong to that block only."""
    config, modules = model.config, dict(model.named_modules())
    is_bottleneck = config.layer_type == "bottleneck"
    stem, stages = "resnet.embedder.embedder", "resnet.encoder.stages"
    widths = [4 * kept_of(n // 4, amount) if is_bottleneck else kept_of(n, amount) for n in config.hidden_sizes]
    written: list[dict[str, int]] = [_layer(stem)]
    read: list[dict[str, int]] = [{}]
    inner: list[Units] = []
    for stage, depth in enumerate(config.depths):
        for number in range(depth):
            block = f"{stages}.{stage}.layers.{number}"
            has_shortcut = f"{block}.shortcut.convolution" in modules
            convolutions = [f"{block}.layer.{i}" for i in range(3 if is_bottleneck else 2)]
            read[-1] |= {f"{convolutions[0]}.convolution": 1}
            if has_shortcut:  # its convolution separates the channels before it from those behind it
                read[-1] |= {f"{block}.shortcut.convolution": 1}
                written.append(_layer(f"{block}.shortcut"))
                read.append({})
            written[-1] |= _layer(convolutions[-1])
            for before, after in pairwise(convolutions):
                count = modules[f"{before}.convolution"].out_channels
                kept = widths[stage] // 4 if is_bottleneck else widths[stage]
                inner.append(Units(CHANNELS, count, kept, _layer(before), {f"{after}.convolution": 1}))
    read[-1] |= {
        name: 1 for name, module in modules.items() if name.startswith("classifier.") and hasattr(module, "weight")
    }
    stem_is_free = len(written) == len(widths) + 1
    stem_kept = kept_of(config.embedding_size, amount) if stem_is_free else widths[0]
    kept = [stem_kept, *widths] if stem_is_free else widths
    counts = [config.embedding_size, *config.hidden_sizes] if stem_is_free else config.hidden_sizes
    if len(kept) != len(written):
        raise ModelError(f"{type(model).__name__} cannot be pruned: not each of its stages begins with a shortcut")
    between = [Units(CHANNELS, *each) for each in zip(counts, kept, written, read, strict=True)]
    return PruningPlan([*between, *inner], {"hidden_sizes": widths, "embedding_size": stem_kept})


def _layer(name: str) -> dict[str, int]:
    return {f"{name}.convolution": 1, f"{name}.normalization": 1}


# -- choosing and cutting units ----------------------------------------------------------------------------------------


def pruned(model: PreTrainedModel, plan: PruningPlan, batches: Iterable[Mapping[str, Tensor]]) -> PreTrainedModel:
    """Return a new, smaller model on the CPU; ``model`` does not change. The contributions of units are measured on
    ``batches`` of inputs. Raises ModelError if the smaller configuration does not fit the smaller weights."""
    import torch

    squares = _mean_squares(model, {name for units in plan.units for name in units.read}, batches)
    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for units in plan.units:
            kept_indices = _strongest(model, units, squares)
            for name, width in units.written.items():
                _cut(weights, name, 0, kept_indices, width)
            for name, width in units.read.items():
                _cut(weights, name, 1, kept_indices, width)
    return _rebuilt(model, plan, weights)


def _mean_squares(model: nn.Module, names: set[str], batches: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean squares of each input, summed over batches, by module name; float64 (inputs,)."""
    sums: dict[str, Tensor] = {}

    def hook_for(name: str, module: nn.Module):
        channels = 1 if hasattr(module, "kernel_size") else -1

        def add_squares(_: nn.Module, inputs: tuple) -> None:
            squares = inputs[0].detach().double().square().transpose(channels, -1).flatten(0, -2).mean(0)
            sums[name] = sums.get(name, 0.0) + squares

        return add_squares

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(hook_for(name, model.get_submodule(name))) for name in names
    ]
    try:
        with evaluating(model):
            for batch in batches:
                model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    return sums


def _strongest(model: nn.Module, units: Units, squares: Mapping[str, Tensor]) -> Tensor:
    """Return the indices of the units with the largest contributions, which stay, in ascending order."""
    contributions = 0.0
    for name, width in units.read.items():
        weight = model.get_submodule(name).weight.detach().double()
        norms = weight.transpose(0, 1).flatten(1).square().sum(1)
        contributions = contributions + (squares[name] * norms).reshape(units.count, width).sum(1).cpu()
    return contributions.topk(units.kept).indices.sort().values


def _cut(weights: dict[str, Tensor], module: str, dim: int, kept_indices: Tensor, width: int) -> None:
    """Keep only the units ``kept_indices``, of ``width`` entries each, along ``dim`` of the weights of ``module``."""
    import torch

    indices = (kept_indices[:, None] * width + torch.arange(width)).flatten()
    for name in [name for name in weights if name.rpartition(".")[0] == module]:
        if weights[name].dim() > dim:  # a bias has no inputs, and a counter of batches has no dimensions
            weights[name] = weights[name].index_select(dim, indices)


def _rebuilt(model: PreTrainedModel, plan: PruningPlan, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    try:
        smaller = type(model)(_changed(model.config, plan.changes)).to(model.dtype)
        smaller.load_state_dict(weights)
    except (RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[-1].strip()
        raise ModelError(
            f"{type(model).__name__} cannot be pruned: its config does not describe the smaller weights ({first})"
        ) from error
    if getattr(model, "generation_config", None) is not None:
        smaller.generation_config = model.generation_config
    return smaller.eval()


def recompute_batchnorm_statistics(model: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> None:
    """Set the running means and variances of BatchNorm to their averages over ``batches``. The old ones belong to
    inputs from before channels were cut out. ``batches`` are not read for a model without BatchNorm."""
    from torch.optim.swa_utils import update_bn

    update_bn((batch["pixel_values"] for batch in batches), model.eval())
