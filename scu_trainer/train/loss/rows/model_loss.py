"""Replace a causal language model's loss while its own forward runs.

    opened     the same operations as the stock loss, but the losses of tokens are kept
    headless   the output head returns the hidden states, and the loss is computed from them some tokens at a time

Neither changes the model's code: its ``loss_function``, and where needed the forward of body, head and embedding, are
replaced for one forward.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, Optional

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.functional import log_softmax, nll_loss, pad
from transformers import Trainer, TrainingArguments
from transformers.loss.loss_utils import LOSS_MAPPING

from scu_trainer.train.loss.rows.gradient_sums import can_add_rows, embed
from scu_trainer.train.loss.rows.kernels import chunked_linear_cross_entropy
from scu_trainer.train.loss.rows.padding_free import FLASH, EndToEnd, fill_up_head_inputs, on_rows
from scu_trainer.train.loss.rows.products import compiles_shapes
from scu_trainer.train.loss.rows.row_readings import RowLosses, row_losses, shifted
from scu_trainer.train.step.batches.rows import NOT_LEARNED, on_host
from scu_trainer.train.step.recovery.snapshot import replaced

Seen = Callable[[RowLosses], None]

HALVES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""``mixed_precision`` -> the dtype in which autocast multiplies."""

SOFT_CAP, FIXED_CAPS = "final_logit_softcapping", ("logits_soft_cap", "output_logit_soft_cap")
"""What models call the cap of cap · tanh(logits / cap). Those that use the first name, as Gemma does, take None for no
cap; those that use the others (RecurrentGemma, xLSTM) always apply it."""

NOISE_BY_LENGTH = "neftune_noise_alpha scales its noise by the length of padded rows"


PUBLIC = tuple("torch transformers accelerate peft trl deepspeed bitsandbytes scu_trainer builtins functools".split())
"""Packages whose modules keep no state from one forward to the next except in buffers."""


def inner_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model itself, without the wrapper of adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def head_of(model: torch.nn.Module) -> Optional[torch.nn.Module]:
    output = getattr(inner_model(model), "get_output_embeddings", None)
    return output() if callable(output) else None


def has_causal_loss(trainer: Trainer) -> bool:
    """Return whether the model computes the stock next-token loss itself and nothing changes it. TRL's trainers compute
    their loss from the model's hidden states or logits."""
    if any("compute_loss" in vars(kind) and kind.__module__.startswith("trl.") for kind in type(trainer).__mro__):
        return False
    is_changed = trainer.compute_loss_func is not None or trainer.label_smoother is not None
    is_fused = trainer.args.torch_compile or liger_replaces_loss(trainer.args)
    return computes_causal_loss(trainer.model) and not is_changed and not is_fused


def liger_replaces_loss(training: TrainingArguments) -> bool:
    """Return whether Liger replaces the model's loss, as it does by default; its layers do not change the loss."""
    kernels = training.liger_kernel_config or {}
    has_own = kernels.get("fused_linear_cross_entropy", True) or kernels.get("cross_entropy", False)
    return training.use_liger_kernel and bool(has_own)


def computes_causal_loss(model: torch.nn.Module) -> bool:
    """Return whether the model's loss is the stock next-token loss, computed by code that can be replaced."""
    inner = inner_model(model)
    # Check for the call first: classes without a loss type (multiple choice) return this loss too, with a warning.
    is_causal = _calls_loss_function(type(inner)) and inner.loss_function is LOSS_MAPPING["ForCausalLM"]
    return is_causal and not is_compiled(inner) and not inner.config.is_encoder_decoder


def _calls_loss_function(kind: type[torch.nn.Module]) -> bool:
    """Return whether a forward of this class or of a base class calls ``self.loss_function``. Not cached, because other
    code (Liger) may replace the forward of a class, even between two trainings."""
    own = [inspect.unwrap(vars(item)["forward"]) for item in kind.__mro__ if "forward" in vars(item)]
    return any("loss_function" in forward.__code__.co_names for forward in own if hasattr(forward, "__code__"))


def is_compiled(module: torch.nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def user_loss_below(trainer: Trainer) -> Optional[str]:
    """Return the class that computes the loss from the model's outputs; None if that is the stock Trainer. A
    ``compute_loss`` that overrides ours only gets the loss from it and does not see the model's outputs."""
    owner = defined_between(trainer, "compute_loss")
    return None if owner is None else owner.__name__


class ReplacedFunction:
    """Call ``measured`` instead of ``function``, but remember ``function``, so that its owner can still be found."""

    def __init__(self, function: Callable, measured: Callable) -> None:
        self.function, self._measured = function, measured

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._measured(*given, **named)


def user_loss_above(trainer: Trainer) -> Optional[str]:
    """Return the owner of a ``compute_loss`` that calls ours: a class name, "this trainer" or None."""
    item, kinds = vars(trainer).get("compute_loss"), type(trainer).__mro__
    while isinstance(item, ReplacedFunction):
        item = item.function
    if item not in (None, MethodType(type(trainer).compute_loss, trainer)):
        return "this trainer"
    above = kinds[: kinds.index(_our_trainer_class(trainer))]
    return next((kind.__name__ for kind in above if "compute_loss" in vars(kind)), None)


def trainer_that_counts(trainer: Trainer) -> Optional[Trainer]:
    """Return ``trainer`` if its own ``compute_loss`` or ``training_step`` may count in attributes, as TRL's do."""
    is_own = user_loss_below(trainer) or user_loss_above(trainer) or defined_between(trainer, "training_step")
    return trainer if is_own else None


def changing_objects_of(trainer: Trainer) -> Callable[[], tuple[list[Any], Optional[Trainer]]]:
    """Return a function that lists the objects whose attributes may change during a step, and the counting trainer.

    The objects are the user's own modules, TRL's reward functions, tools and environments, and the trainer's state, in
    which TRL counts generated tokens. It is a function because environments may be created during training.
    """
    own = [module for module in trainer.model.modules() if not comes_from(type(module), *PUBLIC)]
    owner = trainer_that_counts(trainer)
    return lambda: ([*own, *reward_objects_of(trainer), trainer.state], owner)


def reward_objects_of(trainer: Trainer) -> list[Any]:
    """Return TRL's reward functions and objects, tools and environments; a repeated step calls them again. Models among
    them are left out."""
    pools = getattr(trainer, "_environment_pool", None)
    many = [getattr(trainer, name, None) for name in ("reward_funcs", "tools")]
    many += pools.values() if isinstance(pools, dict) else ()
    asked = [item for group in many if isinstance(group, (list, tuple)) for item in group]  # others use these names too
    functions = [item for item in asked if not isinstance(item, torch.nn.Module)]
    owners = [item.__self__ if isinstance(item, MethodType) else item for item in functions]
    # Not classes (of classmethods): their attributes cannot be restored through their __dict__.
    return [item for item in owners if hasattr(item, "__dict__") and not isinstance(item, type)]


def wants_few_sizes(trainer: Trainer) -> bool:
    """Return whether micro-batches should have few different numbers of tokens, because each compiles new kernels."""
    accelerator = trainer.accelerator
    # Without native_amp (fp16 on a CPU) accelerate does not use autocast.
    mixed = accelerator.mixed_precision if accelerator.native_amp else "no"
    return compiles_shapes(trainer.args.device.type, HALVES.get(mixed) or weights_dtype(trainer.model))


def weights_dtype(model: torch.nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def user_forward_of(model: torch.nn.Module) -> Optional[str]:
    """Name the model's forward if it is neither transformers' nor ours, because it may use more than the loss."""
    kind = next(kind for kind in type(inner_model(model)).__mro__ if "forward" in vars(kind))
    return None if comes_from(kind, "transformers", "scu_trainer") else f"forward of {kind.__name__}"


def defined_between(trainer: Trainer, method: str) -> Optional[type]:
    """Return the class whose ``method`` ours calls by ``super()``; None if that is the stock Trainer."""
    kinds = type(trainer).__mro__
    owner = next(kind for kind in kinds[kinds.index(_our_trainer_class(trainer)) + 1 :] if method in vars(kind))
    return None if owner is Trainer else owner


def trl_step_per_batch(trainer: Trainer) -> Optional[str]:
    """Return TRL's class whose ``training_step`` generates from each batch, or trains on the next part of what was
    generated; None for those that only pass the batch on."""
    kinds = [kind for kind in type(trainer).__mro__ if "training_step" in vars(kind) and comes_from(kind, "trl")]
    owner = kinds[0] if kinds else None
    takes_batch = owner is not None and "inputs" in inspect.signature(vars(owner)["training_step"]).parameters
    return owner.__name__ if takes_batch else None


def is_public(kind: type) -> bool:
    """Return whether the class belongs to transformers or TRL, so that its code is the same for all users."""
    return comes_from(kind, "transformers", "trl")


def comes_from(kind: type, *packages: str) -> bool:
    """Return whether the class belongs to one of ``packages`` or subpackages ("transformers.models")."""
    return f"{kind.__module__}.".startswith(tuple(f"{package}." for package in packages))


def is_read_by_stock_alone(trainer: Trainer) -> bool:
    """Return whether only the stock Trainer's code sees what the model returns in an evaluation."""
    names, stock = ("compute_loss", "prediction_step"), (Trainer, _our_trainer_class(trainer))
    others = [trainer, *(kind for kind in type(trainer).__mro__ if kind not in stock)]
    return not any(name in vars(other) for other in others for name in names)


def _our_trainer_class(trainer: Trainer) -> type:
    return next(kind for kind in type(trainer).__mro__ if "_stock_loss" in vars(kind))


def _without_causal_loss(trainer: Trainer) -> str:
    return (
        f"{type(inner_model(trainer.model)).__name__} does not compute the stock loss of a causal language model "
        "(encoder-decoders do not, nor TRL's trainers; torch_compile, use_liger_kernel, compute_loss_func and "
        "label_smoothing_factor change it; liger_kernel_config: {fused_linear_cross_entropy: false} leaves it)"
    )


def obstacle_to_headless(trainer: Trainer) -> Optional[str]:
    """Return why the output head must run; None if it can be skipped."""
    if not has_causal_loss(trainer):
        return _without_causal_loss(trainer)
    return "FSDP shards the output head" if trainer.is_fsdp_enabled else obstacle_in_head(trainer.model)


def obstacle_in_head(model: torch.nn.Module) -> Optional[str]:
    """Return why the model's logits must be materialized; None if they need not be."""
    head, config = head_of(model), inner_model(model).config
    settings = {**vars(config), **vars(config.get_text_config())}
    if type(head) is not torch.nn.Linear or hasattr(head, "_hf_hook") or hasattr(head.weight, "ds_id"):
        return f"the output head is a {type(head).__name__} that adapters, offloading or ZeRO-3 change"
    if any(map(settings.get, FIXED_CAPS)):
        return "the logits are soft-capped in a way that cannot be switched off"
    return None


def obstacle_to_padding_free(trainer: Trainer) -> Optional[str]:
    """Return why the layers must see padded rows; None if they need not."""
    if not has_causal_loss(trainer):
        return _without_causal_loss(trainer)
    if not hasattr(head_of(trainer.model), "out_features"):
        return f"{type(inner_model(trainer.model)).__name__} does not compute its loss from an output head"
    if trainer.args.neftune_noise_alpha:
        return NOISE_BY_LENGTH
    if trainer.is_fsdp_enabled or has_sharded_weights(trainer.model):
        return "FSDP and ZeRO-3 shard the model"
    return obstacle_in_layers(trainer.model)


def has_sharded_weights(model: torch.nn.Module) -> bool:
    """Return whether weights are sharded over ranks (FSDP, ZeRO-3), so that they are unusable outside of a forward."""
    wrapped = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    return wrapped or any(hasattr(p, "ds_id") or isinstance(p, DTensor) for p in model.parameters())


def obstacle_in_layers(model: torch.nn.Module) -> Optional[str]:
    """Return what the layers do across the borders of rows, so that they must see padded rows; None if nothing."""
    config = inner_model(model).config
    attention, text = config._attn_implementation, config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    if learns_prompts(model):
        return "prompt learning puts states before the rows"
    if attention not in ("sdpa", *FLASH):
        return f"attn_implementation is {attention}; it can be sdpa, {' or '.join(FLASH)}"
    others = sorted(kinds - {"full_attention", "sliding_attention"})
    if others:
        return f"not all layers use attention over the whole row: some use {', '.join(others)}"
    by_length = sorted({"dynamic", "longrope"} & _rope_types(text))
    if by_length:
        return f"positions are scaled by the length of the padded rows ({', '.join(by_length)})"
    if any(map(is_compiled, model.modules())):
        return "layers are compiled, and would be again for every number of tokens"
    return None


def learns_prompts(model: torch.nn.Module) -> bool:
    """Return whether learned tokens are prepended to every row."""
    return any(adapter.is_prompt_learning for adapter in getattr(model, "peft_config", {}).values())


def _rope_types(config: Any) -> set[str]:
    """Return the types of position scaling, of all layers or by layer type."""
    given = getattr(config, "rope_parameters", None) or {}
    return {item.get("rope_type") for item in (given, *given.values()) if isinstance(item, dict)}


def sliding_window_of(model: torch.nn.Module) -> Optional[int]:
    """Return the window, in tokens, of layers with sliding-window attention; None if all layers see whole rows."""
    config = inner_model(model).config.get_text_config()
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    return window if window and (not kinds or "sliding_attention" in kinds) else None


@contextlib.contextmanager
def opened(
    model: torch.nn.Module, weights: Optional[torch.Tensor], seen: Seen, rows: Optional[EndToEnd] = None
) -> Iterator[None]:
    """Let the forward report its rows' losses; with weights of 1 the loss equals the stock loss bit for bit.

    ``weights``: factor of each row's loss, (rows,). ``rows``: the batch end to end, to run it without padding.
    """

    def loss_of(
        logits: torch.Tensor, targets: torch.Tensor, num_items: Any, known: Optional[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_shares, flat = log_softmax(logits.float().flatten(0, -2), dim=-1), targets.flatten()
        with torch.set_grad_enabled(weights is not None and torch.is_grad_enabled()):
            tokens = nll_loss(log_shares, flat, ignore_index=NOT_LEARNED, reduction="none")
        if weights is None:
            reduction = "mean" if num_items is None else "sum"
            loss = nll_loss(log_shares, flat, ignore_index=NOT_LEARNED, reduction=reduction)
        else:
            token_weights = _token_weights(weights, targets, rows)
            loss = (tokens[: len(token_weights)] * token_weights).sum()
            num_items = (flat != NOT_LEARNED).sum() if num_items is None else num_items
        if num_items is not None:
            loss = loss / (num_items.to(loss.device) if torch.is_tensor(num_items) else num_items)
        return loss, tokens

    filled = contextlib.nullcontext() if rows is None else fill_up_head_inputs(head_of(model), rows)
    with filled, _loss_function(model, loss_of, seen, rows):
        yield


@contextlib.contextmanager
def headless(
    model: torch.nn.Module, weights: Optional[torch.Tensor], seen: Seen, rows: Optional[EndToEnd] = None
) -> Iterator[None]:
    """Let the forward compute its loss from the hidden states, without logits (``kernels.py``)."""
    head, embedding, config = head_of(model), embedding_of(model), inner_model(model).config
    soft_caps = {id(one): one for one in (config, config.get_text_config()) if vars(one).get(SOFT_CAP)}
    soft_cap = next((getattr(one, SOFT_CAP) for one in soft_caps.values()), None)

    def loss_of(
        hidden: torch.Tensor, targets: torch.Tensor, num_items: Any, known: Optional[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return chunked_linear_cross_entropy(
            hidden.flatten(0, -2),
            head.weight,
            head.bias,
            targets.flatten(),
            token_weights=None if weights is None else _token_weights(weights, targets, rows),
            divisor=num_items,
            host_targets=None if known is None else known.flatten(),
            soft_cap=soft_cap,
        )

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(head, "forward", lambda hidden: hidden))
        for one in soft_caps.values():
            stack.enter_context(replaced(one, SOFT_CAP, None))
        stack.enter_context(_loss_function(model, loss_of, seen, rows))
        if can_add_rows(embedding):
            stack.enter_context(replaced(embedding, "forward", functools.partial(embed, embedding)))
        yield


def embedding_of(model: torch.nn.Module) -> Optional[torch.nn.Module]:
    try:
        return inner_model(model).get_input_embeddings()
    except (AttributeError, NotImplementedError):  # the model keeps its embedding elsewhere
        return None


def _token_weights(weights: torch.Tensor, targets: torch.Tensor, rows: Optional[EndToEnd]) -> torch.Tensor:
    weights = weights.to(targets.device)  # with several GPUs, the output head is on the last one
    if rows is None:
        return weights.repeat_interleave(targets.size(1))
    return rows.of(weights.unsqueeze(1).expand(rows.shape)).flatten()


@contextlib.contextmanager
def _loss_function(model: torch.nn.Module, loss_of: Callable, seen: Seen, rows: Optional[EndToEnd]) -> Iterator[None]:
    """Replace the model's loss function by ``loss_of(logits, targets, num_items, known) -> (loss, token losses)``. The
    layers run on ``rows``, if given. ``known``: the targets on the host, if they are there."""
    inner = inner_model(model)

    def loss_function(logits, labels, vocab_size=None, num_items_in_batch=None, shift_labels=None, **kwargs):
        given = shifted(labels) if shift_labels is None else shift_labels
        targets = given.to(logits.device)
        known = on_host(labels) if shift_labels is None else None
        known = None if known is None else shifted(known)
        if rows is None:
            loss, tokens = loss_of(logits, targets, num_items_in_batch, known)
        else:
            known = None if known is None else rows.of(known)
            own = rows.of(targets)
            tail = logits.size(1) - own.size(1)  # filler tokens
            loss, tokens = loss_of(logits, pad(own, (0, tail), value=NOT_LEARNED), num_items_in_batch, known)
            tokens = rows.padded(tokens.detach()[: own.size(1)])
        seen(RowLosses(*(each.to(given.device) for each in row_losses(tokens.detach(), targets))))
        return loss

    with on_rows(inner.base_model, rows), replaced(inner, "_loss_function", loss_function):
        yield
