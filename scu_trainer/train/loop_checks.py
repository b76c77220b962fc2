"""What a loop or a trainer that somebody brings cannot mean, said when it is given, or by name where it shows later.

Two loops with one file, a state without a file, a rate that is not finite, a method under a name that is taken: the
training would go on, and what is lost would be missed later.
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

from scu_trainer.errors import ControlError, SettingsError, nearest
from scu_trainer.settings.base import short
from scu_trainer.train.loop import Loop, called

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.getLogger("scu_trainer")

OTHERS_FILES = frozenset(
    {"config.json", "generation_config.json", "adapter_config.json", "tokenizer.json", "tokenizer_config.json"}
    | {"trainer_state.json", "manifest.json", "run.json", "training_config.json", "scu_config.json", "scu_metrics.json"}
    | {"log_history.json"}
)
"""Of checkpoints and run directories, written by transformers and by the session."""

FILES = ("state_file", "history_file")


def require_apart(loop: Loop, others: Collection[Loop]) -> None:
    """Raises ControlError where ``loop`` and one of ``others`` share a name or a file, or its own files cannot be."""
    if any(other is loop for other in others):
        raise ControlError(
            f"{called(loop)} was passed twice and would act twice in every step; pass it once, or create a second "
            "instance"
        )
    _require_known_hooks(loop)
    _tell_of_near_hooks(loop)
    for file in FILES:
        _require_file_name(loop, file)
    kind = type(loop)
    has_state = kind.state_dict is not Loop.state_dict
    if has_state and loop.state_file is None and kind.save_state is Loop.save_state:
        raise ControlError(
            f"{called(loop)} has a state_dict but no state_file: checkpoints would not save its state, and a "
            f'resumed run would start it fresh; set state_file = "{loop.name or "own"}_state.json" in its class'
        )
    if has_state and kind.load_state_dict is Loop.load_state_dict and kind.load_state is Loop.load_state:
        raise ControlError(
            f"{called(loop)} has a state_dict but no load_state_dict: a resumed run would not read the state that "
            "checkpoints hold; add load_state_dict(self, state)"
        )
    for other in others:
        for what in ("name", *FILES):
            shared = getattr(loop, what)
            if shared and shared == getattr(other, what):
                raise ControlError(
                    f"{called(loop)} and {called(other)} both have {what} {shared!r}, so one would overwrite the "
                    f"other; give one of them a different {what}"
                )


def _require_known_hooks(loop: Loop) -> None:
    hooks = [name for name in dir(Loop) if name.startswith("on_")]
    own = [name for name in dir(loop) if name.startswith("on_") and name not in hooks]
    found = next((name + guess for name in own if (guess := nearest(name, hooks))), None)
    if found is not None:
        raise ControlError(f"{called(loop)} has {found}, which nothing calls; use the name of a hook, or no on_")


def _tell_of_near_hooks(loop: Loop) -> None:
    """Of a method without on_, which may be the loop's own for all that: ``before_saves``, ``scalar``."""
    hooks = [name for name in dir(Loop) if not name.startswith("_")]
    own = [name for name in dir(type(loop)) if name[0] != "_" and callable(getattr(type(loop), name))]
    for name in sorted(set(own) - set(hooks)):
        if guess := nearest(name, hooks, cutoff=0.9):
            logger.warning("%s has %s%s, which training does not call", called(loop), name, guess)


def late(loop: Loop) -> ControlError:
    """Of a loop that is given while a training goes on: its ``begin`` was not called, and its history is not open."""
    return ControlError(f"{called(loop)} was added during training, too late for its begin hook; add it before train()")


def tell_of_unsaved(model: nn.Module) -> None:
    """Of an adapter, peft saves what it has added and what modules_to_save names, whatever else is trained."""
    if not hasattr(model, "peft_config"):
        return
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        return
    config = model.active_peft_config
    if config.peft_type == "P_TUNING" or getattr(config, "prefix_projection", False):
        logger.warning(
            "peft saves the prompts that the encoder of %s gives, and not the encoder: the final model is whole, but a "
            "run that is resumed starts with a new encoder",
            config.peft_type.value,
        )
    elif not config.is_prompt_learning and (unsaved := _unsaved(model)):
        logger.warning(
            "%d trained weights are not part of the adapter (%s, ...): peft saves them neither in checkpoints nor with "
            "the final model. Name their modules in modules_to_save of the adapter's configuration, or freeze them",
            len(unsaved),
            unsaved[0],
        )


def _unsaved(model: PeftModel) -> list[str]:
    from peft import get_peft_model_state_dict

    added = getattr(model.base_model, "prefix", None)
    unsaved = {
        name: p for name, p in model.named_parameters() if p.requires_grad and (added is None or added not in name)
    }
    for embedding in (False, "auto"):  # of a vocabulary that has grown: peft asks the Hub for the one that it was
        if not unsaved:
            break
        with warnings.catch_warnings(action="ignore"):  # peft says them at each save
            states = [
                get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=embedding)
                for adapter in model.peft_config
            ]
        saved = {tensor.data_ptr() for state in states for tensor in state.values()}
        unsaved = {name: weight for name, weight in unsaved.items() if weight.data_ptr() not in saved}
    return list(unsaved)


def _require_file_name(loop: Loop, kind: str) -> None:
    name = getattr(loop, kind)
    if name is None:
        return
    if not isinstance(name, str) or PurePath(name).name != name or not name.endswith(".json"):
        raise ControlError(
            f"{called(loop)} has {kind} {name!r}, which is not a file name ending in .json; it is written into "
            f'the checkpoint or the run directory, so use a name without folders, such as "own_{kind[:-5]}.json"'
        )
    if name in OTHERS_FILES:
        raise ControlError(
            f"{called(loop)} has {kind} {name!r}, a file that a run already writes; use a different name"
        )


def require_settings(*given: tuple[str, Any, type]) -> None:
    """Raises SettingsError where an argument, of its name, value and kind, is neither None nor of that kind."""
    for name, value, kind in given:
        if value is not None and not isinstance(value, kind):
            raise SettingsError(
                f"{name} is {short(value)}; allowed: {kind.__name__}(...) from scu_trainer.settings, or None for off"
            )


def tell_of_unused(name: str, value: Any, user: str, used: Any, kind: type) -> None:
    """Of the argument ``name``, where ``user``, the one that reads it, was not given. No error: None for ``user`` is
    how a loop is switched off."""
    if value is not None and used is None:
        logger.warning(
            "%s has no effect without %s=%s(...), which is not given: there is no such loop; give it, or drop %s",
            name, user, kind.__name__, name,
        )  # fmt: skip


def require_own_names(kind: type[Trainer], ours: type[Trainer]) -> None:
    """Raises ControlError where a class below ``ours`` in the order of methods defines what would never be called, or
    takes an argument that would never arrive."""
    parameters = inspect.signature(ours.__init__).parameters.values()
    arguments = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for owner in (one for one in kind.__mro__ if one not in Trainer.__mro__):
        _require_free(f"{owner.__name__} defines", vars(owner), _reserved(ours))
        if "__init__" in vars(owner):
            given = inspect.signature(owner.__init__).parameters
            _require_free(f"the constructor of {owner.__name__} takes", given, arguments)


def require_own_attributes(trainer: Trainer, ours: type[Trainer]) -> None:
    """Raises ControlError where another constructor than that of ``ours`` has set what will be overwritten."""
    private = {name for name in vars(trainer) if name.startswith("_")}
    ours_by_then = private | {"is_stock", "after_epoch"}
    ours_by_then |= {name for name, one in vars(trainer).items() if type(one).__module__.startswith("scu_trainer.")}
    given = vars(trainer).keys() - ours_by_then
    _require_free(f"the constructor of {type(trainer).__name__} sets", given, _reserved(ours))


def _reserved(ours: type[Trainer]) -> set[str]:
    """Names that ``ours`` has beyond the stock Trainer; Python itself sets some where a trainer is copied. The one left
    out is the stock Trainer's, too, but only on its instances."""
    names = {name for name in vars(ours) if not (hasattr(Trainer, name) or name.startswith("__"))}
    return names - {"current_gradient_accumulation_steps"}


def _require_free(who: str, names: Collection[str], taken: Collection[str]) -> None:
    both = sorted(set(names) & set(taken))
    if both:
        raise ControlError(
            f"{who} {', '.join(both)}, which SCUTrainer uses for something else and would override; give it another "
            "name"
        )


def rate_of(loop: Loop) -> float:
    """``rate_factor`` as a number that logs and checkpoints take. Raises ControlError where it is none, negative or not
    finite: it would reach the weights."""
    try:
        rate = float(loop.rate_factor)
    except (TypeError, ValueError):
        rate = math.nan
    if 0 <= rate < math.inf:
        return rate
    raise ControlError(
        f"{called(loop)} has rate_factor {loop.rate_factor}, which multiplies the learning rate; it must be a finite "
        "number of 0 or more"
    )


def row_of(loop: Loop, hook: str, row: Mapping[str, Any]) -> dict[str, Optional[float]]:
    """What ``hook`` gives, as numbers that every reporter takes; None where there is nothing to tell yet. ``row``: of
    the logs, which they are added to.

    Raises ControlError for what is not a number, and for a name that is no text or that the row has already.
    """
    scalars = getattr(loop, hook)()
    if not isinstance(scalars, Mapping):
        raise ControlError(f"{called(loop)} returns a {type(scalars).__name__} from {hook}(); return a dict of numbers")
    numbers: dict[str, Optional[float]] = {}
    for name, value in scalars.items():
        if not isinstance(name, str):
            raise ControlError(
                f"{called(loop)} gives a scalar the name {name!r}, which is not text; put it in quotes, as "
                f'in "{loop.name or "own"}/{name}"'
            )
        # A tensor or an array of one number.
        is_one = getattr(value, "size", None) is not None and math.prod(getattr(value, "shape", (0,))) == 1
        number = value.item() if is_one else value
        if number is not None and not isinstance(number, (int, float)):
            raise ControlError(
                f"{called(loop)} gives the scalar {name!r} as {type(value).__name__}, but logs only hold numbers; "
                "return a float for it"
            )
        if name in row:
            raise ControlError(
                f"{called(loop)} gives a scalar {name!r}, which this row of the logs already has; begin its name with "
                f'that of the loop: "{loop.name or "own"}/{name}"'
            )
        numbers[name] = number
    return numbers
