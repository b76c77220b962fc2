"""--max_length and --stride -> windows that every model of a comparison can read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from scu_trainer.cli.evaluation.options import EvalOptions
from scu_trainer.cli.subjects import Subject
from scu_trainer.errors import SettingsError
from scu_trainer.models.loading.load import config_of
from scu_trainer.models.loading.names import prompt_of_adapter
from scu_trainer.settings import DataSettings
from scu_trainer.settings.base import require
from scu_trainer.settings.tasks import TEXT

if TYPE_CHECKING:
    from scu_trainer.train.evaluation.sliding import Windows


def windows_of(
    options: EvalOptions, settings: DataSettings, subjects: list[Subject], is_block_size_given: bool
) -> Optional[Windows]:
    """None where neither was typed: the rows that training evaluates. ``is_block_size_given``: by a run or a flag.

    Raises SettingsError for windows that do not exist or that exceed the positions of a model.
    """
    if options.max_length is None and options.stride is None:
        return None
    from scu_trainer.train.evaluation.sliding import Windows

    limits = {subject.name: positions_of(subject) for subject in subjects}
    known = [] if is_block_size_given else [positions for positions in limits.values() if positions is not None]
    max_length = options.max_length or min([settings.block_size, *known])
    stride = options.stride or max_length
    _require_readable(max_length, limits)
    require(
        stride <= max_length,
        f"stride {stride} exceeds max_length {max_length}, so tokens would be left out; use --stride {max_length} or "
        "less",
    )
    return Windows(max_length, stride)


def _require_readable(max_length: int, limits: dict[str, Optional[int]]) -> None:
    """limits: positions by name of the model."""
    for name, positions in limits.items():
        require(
            positions is None or max_length <= positions,
            f"windows of {max_length} tokens exceed the {positions} positions of {name}; use --max_length {positions} "
            "or less",
        )


def refuse_windows(options: EvalOptions, task_name: str, typed: dict[str, Any]) -> None:
    """Raise SettingsError where windows have no effect, or are given twice."""
    given = [name for name in ("max_length", "stride") if getattr(options, name) is not None]
    if given and task_name != TEXT:
        raise SettingsError(f"{given[0]} has an effect on task: {TEXT} only, and task is {task_name}; drop it")
    if options.max_length is not None and "block_size" in typed:
        raise SettingsError("max_length and block_size both say how long a row is; drop --block_size")


def positions_of(subject: Subject) -> Optional[int]:
    """As of the model (``models/fit.py``), but reads no weights."""
    positions = getattr(config_of(subject.model).get_text_config(), "max_position_embeddings", None)
    return None if positions is None else positions - prompt_of_adapter(subject.model.model_name_or_path)
