"""Checks of a user's loops and trainer classes: when they are passed in, and of values when a loop returns them.

Two loops with the same file, a state without a file, a learning rate that is not finite, a method that has the name of
one of ours: training would run, and what it loses would only be noticed later.
"""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections.abc import Collection, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Optional

from torch import nn
from transformers import Trainer

from scu_trainer.errors import ControlError, SettingsError, did_you_mean
from scu_trainer.settings.base import short
from scu_trainer.train.loop import Loop, name_of_loop

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.getLogger("scu_trainer")

_FILES_OF_RUNS = frozenset(
    {"config.json", "generation_config.json", "adapter_config.json", "tokenizer.json", "tokenizer_config.json"}
    | {"trainer_state.json", "manifest.json", "run.json", "training_config.json", "scu_config.json", "scu_metrics.json"}
    | {"log_history.json"}
)
"""Files in checkpoints and run directories that transformers and the session write."""

_FILE_ATTRIBUTES = ("state_file", "history_file")


def require_no_conflicts(loop: Loop, others: Collection[Loop]) -> None:
    """Raise ControlError if ``loop`` shares a name or file with one of ``others``, or has an invalid hook or file."""
    if any(other is loop for other in others):
        raise ControlError(
            f"{name_of_loop(loop)} was passed twice and would act twice in every step; pass it once, or create a "
            "second instance"
        )
    _require_known_hooks(loop)
    _warn_about_similar_names(loop)
    for file in _FILE_ATTRIBUTES:
        _require_file_name(loop, file)
    kind = type(loop)
    has_state = kind.state_dict is not Loop.state_dict
    if has_state and loop.state_file is None and kind.save_state is Loop.save_state:
        raise ControlError(
            f"{name_of_loop(loop)} has a state_dict but no state_file: checkpoints would not save its state, and a "
            f'resumed run would start it fresh; set state_file = "{loop.name or "own"}_state.json" in its class'
        )
    if has_state and kind.load_state_dict is Loop.load_state_dict and kind.load_state is Loop.load_state:
        raise ControlError(
            f"{name_of_loop(loop)} has a state_dict but no load_state_dict: a resumed run would not read the state "
            "that checkpoints hold; add load_state_dict(self, state)"
        )
    for other in others:
        for attribute in ("name", *_FILE_ATTRIBUTES):
            shared = getattr(loop, attribute)
            if shared and shared == getattr(other, attribute):
                raise ControlError(
                    f"{name_of_loop(loop)} and {name_of_loop(other)} both have {attribute} {shared!r}, so one would "
                    f"overwrite the other; give one of them a different {attribute}"
                )


def _require_known_hooks(loop: Loop) -> None:
    hooks = [name for name in dir(Loop) if name.startswith("on_")]
    own = [name for name in dir(loop) if name.startswith("on_") and name not in hooks]
    unknown = next((name + guess for name in own if (guess := did_you_mean(name, hooks))), None)
    if unknown is not None:
        raise ControlError(
            f"{name_of_loop(loop)} has {unknown}, which nothing calls; use the name of a hook, or a name without on_"
        )


def _warn_about_similar_names(loop: Loop) -> None:
    """Warn about a method such as ``before_saves`` or ``scalar``; only warn, because the name may be intended."""
    hooks = [name for name in dir(Loop) if not name.startswith("_")]
    own = [name for name in dir(type(loop)) if name[0] != "_" and callable(getattr(type(loop), name))]
    for name in sorted(set(own) - set(hooks)):
        if guess := did_you_mean(name, hooks, cutoff=0.9):
            logger.warning("%s has %s%s, which training does not call", name_of_loop(loop), name, guess)


def error_for_late_loop(loop: Loop) -> ControlError:
    """Return the error for a loop added during training: its ``begin`` was not called and its history is not open."""
    return ControlError(
        f"{name_of_loop(loop)} was added during training, too late for its begin hook; add it before train()"
    )


def warn_about_unsaved_weights(model: nn.Module) -> None:
    """Warn about trained weights that peft does not save: all but the adapter's own and those in modules_to_save."""
    if not hasattr(model, "peft_config"):
        return
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        return
    config = model.active_peft_config
    if config.peft_type == "P_TUNING" or getattr(config, "prefix_projection", False):
        logger.warning(
            "peft saves the prompts that the encoder of %s produces, but not the encoder itself: the final model "
            "is complete, but a resumed run starts with a new encoder",
            config.peft_type.value,
        )
    elif not config.is_prompt_learning and (names := _unsaved_weights(model)):
        logger.warning(
            "%d trained weights are not part of the adapter (%s, ...): peft saves them neither in checkpoints nor with "
            "the final model. Name their modules in modules_to_save of the adapter's configuration, or freeze them",
            len(names),
            names[0],
        )


def _unsaved_weights(model: PeftModel) -> list[str]:
    from peft import get_peft_model_state_dict

    added = getattr(model.base_model, "prefix", None)
    unsaved = {
        name: p for name, p in model.named_parameters() if p.requires_grad and (added is None or added not in name)
    }
    for embedding in (False, "auto"):  # "auto" last: for a resized vocabulary peft asks the Hub for the original size
        if not unsaved:
            break
        with warnings.catch_warnings(action="ignore"):  # peft repeats them at each save
            states = [
                get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=embedding)
                for adapter in model.peft_config
            ]
        saved = {tensor.data_ptr() for state in states for tensor in state.values()}
        unsaved = {name: weight for name, weight in unsaved.items() if weight.data_ptr() not in saved}
    return list(unsaved)


def _require_file_name(loop: Loop, attribute: str) -> None:
    name = getattr(loop, attribute)
    if name is None:
        return
    if not isinstance(name, str) or PurePath(name).name != name or not name.endswith(".json"):
        raise ControlError(
            f"{name_of_loop(loop)} has {attribute} {name!r}, which is not a file name ending in .json; it is written "
            "into the checkpoint or the run directory, so use a name without folders, such as "
            f'"own_{attribute[:-5]}.json"'
        )
    if name in _FILES_OF_RUNS:
        raise ControlError(
            f"{name_of_loop(loop)} has {attribute} {name!r}, a file that a run already writes; use a different name"
        )


def require_settings(*given: tuple[str, Any, type]) -> None:
    """Raise SettingsError if the value of a (name, value, type) triple is neither None nor of that type."""
    for name, value, kind in given:
        if value is not None and not isinstance(value, kind):
            raise SettingsError(
                f"{name} is {short(value)}; allowed: {kind.__name__}(...) from scu_trainer.settings, or None for off"
            )


def warn_about_unused_argument(name: str, value: Any, loop_argument: str, loop_settings: Any, kind: type) -> None:
    """Warn if the argument ``name`` is given without ``loop_argument``, the settings of the loop that reads it. Not an
    error, because None for ``loop_argument`` is how a loop is switched off."""
    if value is not None and loop_settings is None:
        logger.warning(
            "%s has no effect without %s=%s(...), which turns on the loop that reads it; pass that too, or drop %s",
            name, loop_argument, kind.__name__, name,
        )  # fmt: skip


def require_no_name_clash(kind: type[Trainer], ours: type[Trainer]) -> None:
    """Raise ControlError if ``kind`` or a base of it below the stock Trainer defines a name that ``ours`` would
    override, or takes a constructor argument that ``ours`` takes, and that would never reach it."""
    parameters = inspect.signature(ours.__init__).parameters.values()
    arguments = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for owner in (one for one in kind.__mro__ if one not in Trainer.__mro__):
        _require_free(f"{owner.__name__} defines", vars(owner), _reserved(ours))
        if "__init__" in vars(owner):
            given = inspect.signature(owner.__init__).parameters
            _require_free(f"the constructor of {owner.__name__} takes", given, arguments)


def require_no_attribute_clash(trainer: Trainer, ours: type[Trainer]) -> None:
    """Raise ControlError if another constructor has set an attribute that ``ours`` will overwrite."""
    private = {name for name in vars(trainer) if name.startswith("_")}
    ours_by_then = private | {"is_stock", "after_epoch"}
    ours_by_then |= {name for name, value in vars(trainer).items() if type(value).__module__.startswith("scu_trainer.")}
    given = vars(trainer).keys() - ours_by_then
    _require_free(f"the constructor of {type(trainer).__name__} sets", given, _reserved(ours))


def _reserved(ours: type[Trainer]) -> set[str]:
    """Return the names that ``ours`` adds to the stock Trainer, without dunder names (Python sets some on copies), and
    without the one below, which instances of the stock Trainer have too."""
    names = {name for name in vars(ours) if not (hasattr(Trainer, name) or name.startswith("__"))}
    return names - {"current_gradient_accumulation_steps"}


def _require_free(who: str, names: Collection[str], taken: Collection[str]) -> None:
    clashing = sorted(set(names) & set(taken))
    if clashing:
        raise ControlError(
            f"{who} {', '.join(clashing)}, which SCUTrainer uses for something else and would override; give it "
            "another name"
        )


def checked_rate_factor(loop: Loop) -> float:
    """Return ``rate_factor`` as a float. Raises ControlError if it is not a number, negative or not finite, because it
    would reach the weights."""
    try:
        rate = float(loop.rate_factor)
    except (TypeError, ValueError):
        rate = math.nan
    if 0 <= rate < math.inf:
        return rate
    raise ControlError(
        f"{name_of_loop(loop)} has rate_factor {loop.rate_factor}, which multiplies the learning rate; it must be a "
        "finite number of 0 or more"
    )


def checked_scalars(loop: Loop, hook: str, row: Mapping[str, Any]) -> dict[str, Optional[float]]:
    """Return what ``hook`` of ``loop`` returns as numbers that every reporter accepts; None for a value not known yet.

    row: the log row that they will be added to. Raises ControlError for a value that is not a number, a name that is
    not text, and a name that the row already has.
    """
    scalars = getattr(loop, hook)()
    if not isinstance(scalars, Mapping):
        raise ControlError(
            f"{name_of_loop(loop)} returns a {type(scalars).__name__} from {hook}(); return a dict of numbers"
        )
    numbers: dict[str, Optional[float]] = {}
    for name, value in scalars.items():
        if not isinstance(name, str):
            raise ControlError(
                f"{name_of_loop(loop)} gives a scalar the name {name!r}, which is not text; put it in quotes, as "
                f'in "{loop.name or "own"}/{name}"'
            )
        # A tensor or an array of one number.
        is_one = getattr(value, "size", None) is not None and math.prod(getattr(value, "shape", (0,))) == 1
        number = value.item() if is_one else value
        if number is not None and not isinstance(number, (int, float)):
            raise ControlError(
                f"{name_of_loop(loop)} gives the scalar {name!r} as {type(value).__name__}, but logs only hold "
                "numbers; return a float for it"
            )
        if name in row:
            raise ControlError(
                f"{name_of_loop(loop)} gives a scalar {name!r}, which this row of the logs already has; begin its name "
                f'with the name of the loop: "{loop.name or "own"}/{name}"'
            )
        numbers[name] = number
    return numbers
