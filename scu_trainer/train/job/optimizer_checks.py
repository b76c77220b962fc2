"""Checks of the arguments of optimizers and learning rate schedules. Each raises SettingsError."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping

from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import TrainingArguments
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, GreedyLR

from scu_trainer.errors import did_you_mean
from scu_trainer.settings.base import as_typed, require

ADEMAMIX = ("beta1", "beta2", "beta3", "alpha", "eps", "t_alpha", "t_beta3")
LOW_RANK = ("rank", "update_proj_gap", "scale", "proj_type")
SCHEDULE_FREE = ("weight_lr_power", "r")
TAKES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("galore", LOW_RANK),
    ("apollo", (*LOW_RANK, "proj", "scale_type")),
    ("schedule_free", SCHEDULE_FREE),
    ("ademamix", ADEMAMIX),
    ("anyprecision", ("use_kahan_summation", "momentum_dtype", "variance_dtype", "compensation_buffer_dtype")),
    ("adamw_torch_8bit", ("block_size", "bf16_stochastic_round")),
    ("adamw_torch_4bit", ("block_size", "bf16_stochastic_round")),
    ("grokadamw", ("alpha_init", "lamb", "gamma", "grokking_signal_decay_rate", "gradient_clipping")),
    ("stable_adamw", ("max_lr", "kahan_sum", "decouple_lr")),
    ("adagrad", ("lr_decay", "weight_decay", "eps")),
    ("rmsprop_bnb", ()),
    ("rmsprop", ("momentum", "alpha", "eps", "weight_decay", "centered")),
    ("sgd", ("momentum", "dampening", "nesterov", "weight_decay")),
    ("", ()),
)
"""Part of the name of an optimizer -> names in ``optim_args`` that the stock Trainer passes to it. The first matching
part is used. ``rmsprop_bnb`` takes none, because the Trainer passes them as text and bitsandbytes then fails in the
first step."""
NOT_ACCEPTED = ("block_size", "weight_decay")
"""Names that transformers reads, but as text, or for groups of weights that all have their own decay."""

NUMBERS: tuple[tuple[tuple[str, ...], type, float, float, str], ...] = (
    (("rank", "update_proj_gap", "t_alpha", "t_beta3"), int, 1, math.inf, "a whole number, 1 or more"),
    (("momentum", "alpha", "eps", "lr_decay"), float, 0, math.inf, "a number, 0 or more"),
    (("beta1", "beta2", "beta3"), float, 0, 1, "a number, at least 0 and below 1"),
)
"""Names, type, smallest value, upper limit (exclusive), and a text about them. Other names take any number."""
ANY_NUMBER = (), float, -math.inf, math.inf, "a number"

TRUE, FALSE = ("true", "yes", "1"), ("false", "no", "0")
"""Other words count as true for some optimizers and as false for others."""
WORDS = {
    **dict.fromkeys(("nesterov", "centered", "bf16_stochastic_round", "use_kahan_summation"), (*TRUE, *FALSE)),
    **dict.fromkeys(("kahan_sum", "decouple_lr"), TRUE),  # any text counts as true, even "false"
    **dict.fromkeys(
        ("momentum_dtype", "variance_dtype", "compensation_buffer_dtype"), ("float32", "bfloat16", "float16")
    ),
    "proj": ("random", "svd"),
    "proj_type": ("std", "reverse_std", "right", "left", "full"),
    "scale_type": ("channel", "tensor"),
}
"""Allowed words of arguments that are not numbers. Optimizers reject others in their first step, or never."""

SET_BY_THE_TRAINER = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")
WITHOUT_ARGUMENTS = ("constant", "constant_with_warmup")
CLASSES = {"reduce_lr_on_plateau": ReduceLROnPlateau, "greedy": GreedyLR}
EXAMPLES = {"num_decay_steps": 100}


def argument_names_of(optim: str) -> tuple[str, ...]:
    return next(names for part, names in TAKES if part in optim)


def check_optimizer_arguments(training: TrainingArguments, given: Mapping[str, str]) -> None:
    """Check ``given``, the values in ``optim_args``, of which the stock Trainer silently drops unknown names."""
    optim = as_typed(training.optim)
    takes = argument_names_of(optim)
    unknown = next((name for name in given if name not in takes), None)
    require(
        not (optim.startswith("adamw_torch_") and "block_size" in given),
        f"optim_args names block_size, which transformers passes to optim: {optim} as text, so its first step would "
        "fail; drop it (256 is used)",
    )
    require(
        "weight_decay" not in given or optim.startswith(("galore", "apollo")),  # these do not take it
        f"optim_args names weight_decay, which has no effect there; set weight_decay: {given.get('weight_decay')}",
    )
    takes = tuple(name for name in takes if name not in NOT_ACCEPTED)
    instead = f"it takes {', '.join(takes)}{did_you_mean(str(unknown), takes)}" if takes else "drop it"
    if unknown == "momentum" and not takes:
        instead = "momentum is for optim: sgd or rmsprop"
    require(unknown is None, f"optim_args names {unknown}, which optim: {optim} does not take; {instead}")
    for name, value in given.items():
        _check_value(name, value)
    require(
        given.get("nesterov", "").lower() not in TRUE
        or (float(given.get("momentum", 0)) > 0 and float(given.get("dampening", 0)) == 0),
        "optim_args sets nesterov, which needs momentum without dampening; add momentum=0.9, and drop dampening",
    )
    projected, by_row = given.get("proj_type", "std"), given.get("scale_type") != "tensor"
    require(
        not optim.startswith("apollo") or projected == "std" or (projected != "full" and not by_row),
        f"optim_args has proj_type={projected}; optim: {optim} takes std, and with scale_type=tensor also reverse_std, "
        "right and left",
    )
    require(
        not optim.endswith("layerwise") or training.gradient_accumulation_steps == 1,
        f"optim: {optim} updates weights during backward, so gradients cannot accumulate, but "
        f"gradient_accumulation_steps is {training.gradient_accumulation_steps}; set it to 1, "
        f"or use optim: {optim.removesuffix('_layerwise')}",
    )
    require(
        not optim.startswith(("galore", "apollo")) or bool(training.optim_target_modules),
        f"optim: {optim} works on the layers that optim_target_modules names, but it names none; add "
        "optim_target_modules: all-linear, or a list of names such as [q_proj, v_proj]",
    )


def _check_value(name: str, value: str) -> None:
    """Raise SettingsError for a value with which transformers or the optimizer fails, or that it misreads."""
    if name in WORDS:
        known = (value.lower() if "true" in WORDS[name] else value) in WORDS[name]
        allowed = f"allowed: {', '.join(WORDS[name])}{did_you_mean(value, WORDS[name])}"
        allowed += "; drop it for false" if WORDS[name] == TRUE else ""
    else:
        _, kind, least, below, allowed = next((item for item in NUMBERS if name in item[0]), ANY_NUMBER)
        known, allowed = _is_number(value, kind, least, below), f"it takes {allowed}"
    require(known, f"optim_args has {name}={value}; {allowed}")


def _is_number(text: str, kind: type, least: float, below: float) -> bool:
    try:
        return math.isfinite(kind(text)) and least <= kind(text) < below
    except (ValueError, OverflowError):
        return False


def check_schedule(training: TrainingArguments) -> None:
    """Check the names in ``lr_scheduler_kwargs``; the stock Trainer rejects or drops them after loading the model."""
    kind, given = as_typed(training.lr_scheduler_type), training.lr_scheduler_kwargs or {}
    needs, takes = _scheduler_names(kind)
    unknown = next((name for name in given if name not in takes), None)
    hint = f"it takes {', '.join(takes)}{did_you_mean(str(unknown), takes)}" if takes else "drop it"
    require(
        unknown is None,
        f"lr_scheduler_kwargs names {unknown}, which lr_scheduler_type: {kind} does not take; {hint}",
    )
    missing = next((name for name in needs if name not in given), None)
    require(missing is None, _needs_text(kind, f"{missing}: {EXAMPLES.get(str(missing), 1)}"))
    lowest = [name for name in ("min_lr", "min_lr_rate") if given.get(name) is not None]
    with_lowest = kind.startswith("cosine_") and "min_lr" in takes
    require(not with_lowest or bool(lowest), _needs_text(kind, "min_lr_rate: 0.1"))
    require(len(lowest) < 2 or not with_lowest, "lr_scheduler_kwargs gives min_lr and min_lr_rate; drop one of them")


def _needs_text(kind: str, example: str) -> str:
    name = example.partition(":")[0]
    return f"lr_scheduler_type: {kind} needs {name}; add lr_scheduler_kwargs: {{{example}}}"


def _scheduler_names(kind: str) -> tuple[list[str], list[str]]:
    """Return (parameter names of the schedule without a default, all its parameter names)."""
    if kind in WITHOUT_ARGUMENTS:
        return [], []
    function = CLASSES.get(kind) or TYPE_TO_SCHEDULER_FUNCTION[kind]
    parameters = {
        name: item for name, item in inspect.signature(function).parameters.items() if name not in SET_BY_THE_TRAINER
    }
    return [name for name, item in parameters.items() if item.default is item.empty], list(parameters)
