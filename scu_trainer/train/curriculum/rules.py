"""Check what a curriculum cannot be combined with, before any work is done."""

from __future__ import annotations

import math
from typing import Optional

from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import has_length

from scu_trainer.control.curriculum_config import CurriculumConfig
from scu_trainer.control.noise import observations_needed
from scu_trainer.errors import ControlError, SettingsError
from scu_trainer.settings import CurriculumSettings, MemorySettings
from scu_trainer.train.loss.rows.model_loss import defined_between
from scu_trainer.train.loss.rows.row_readings import RowLossReading

FEWEST_EPOCHS_TO_PRUNE = 4

NOTHING_TO_READ = "this model returns neither losses of rows nor logits with one prediction per label"

BY_LOSS = ("noise_guard", "acmds", "infobatch")
"""Methods that choose rows by their losses."""

NEEDED = {
    "train_sampling_strategy": ("random", "it would choose the samples as well"),
    "dataloader_drop_last": (False, "it would drop rows without counting them"),
    "auto_find_batch_size": (False, "it starts epochs over; memory_control recovers without that"),
    "ignore_data_skip": (False, "a resumed epoch would show rows twice"),
}
"""Arguments of the stock Trainer: the value that each must have, and why."""


def obstacle(args: TrainingArguments, memory: Optional[MemorySettings]) -> Optional[str]:
    """Return why no curriculum can act with these arguments, as a message; None if one can. ``memory``: None if the
    memory loop is off."""
    for name, (needed, reason) in NEEDED.items():
        found = getattr(args, name)
        if found != needed:
            return f"{name}: {found} with a curriculum: {reason}; set {name}: {str(needed).lower()}"
    for name in ("split_batches", "dispatch_batches"):
        if getattr(args.accelerator_config, name):
            return f"accelerator_config {name} distributes batches itself; drop it with a curriculum"
    if not args.accelerator_config.use_seedable_sampler:
        return (
            "accelerator_config use_seedable_sampler: false with a curriculum: it takes the order of rows from the "
            "generator of the process, but a curriculum takes it from the seed; set use_seedable_sampler: true"
        )
    if args.n_gpu > 1:
        return "a curriculum does not work under DataParallel; start one process per GPU with torchrun"
    if memory is not None and memory.batch_mode == "logical":
        return "batch_mode: logical moves rows between steps that a curriculum plans; use batch_mode: chunk"
    return None


def refuse(trainer: Trainer) -> None:
    """Raise SettingsError for arguments, and ControlError for data, that no curriculum can work with."""
    memory_loop = trainer.micro_batches
    reason = obstacle(trainer.args, None if memory_loop is None else memory_loop.settings)
    if reason is not None:
        raise SettingsError(reason)
    # A subclass's loader may come from super(); but a sampler is never called, whoever defines it.
    sampler_of = next(kind for kind in (trainer, *type(trainer).__mro__) if "_get_train_sampler" in vars(kind))
    owners = {
        "get_train_dataloader": defined_between(trainer, "get_train_dataloader"),
        "_get_train_sampler": type(trainer) if sampler_of is trainer else sampler_of,
    }
    for method, owner in owners.items():
        if owner not in (None, Trainer):
            raise ControlError(
                f"{method} of {owner.__name__} chooses the samples, but a curriculum would choose them instead; "
                f"leave the curriculum out, or {method} of {owner.__name__}"
            )
    rows = trainer.train_dataset
    if rows is not None and (isinstance(rows, IterableDataset) or not has_length(rows)):
        raise ControlError(
            f"a curriculum chooses samples by number, but the training data ({type(rows).__name__}) is a stream; use "
            "a dataset with a length, or leave the curriculum out"
        )


def check_reading(settings: CurriculumSettings, reading: Optional[RowLossReading], trainer_name: str) -> Optional[str]:
    """Return what to report about how losses of rows are read. Raises ControlError if the curriculum cannot use it."""
    methods = settings.methods
    by_loss = [name for name in BY_LOSS if name in methods]
    advice = 'let its forward return {"loss": ..., "losses": ...} with losses of shape (rows,)'
    if reading is None:
        if by_loss:
            raise ControlError(f"curriculum {by_loss[0]} needs the loss of each row: {NOTHING_TO_READ}; {advice}")
        return f"the losses of single rows cannot be read, so difficulties stay unknown: {NOTHING_TO_READ}; {advice}"
    weighs = "infobatch" in methods or ("token_budget" in methods and reading.counts_rows)
    if weighs and not reading.has_gradient:
        raise ControlError(
            f"curriculum {settings.curriculum} weights rows, but compute_loss of {trainer_name} returns outputs "
            "without a gradient, so their losses cannot be weighted; use one that does not weight rows (noise_guard, "
            "acmds)"
        )
    if reading.exact:
        return None
    if weighs:
        raise ControlError(
            f"curriculum {settings.curriculum} weights rows, but this model's loss is not the sum of its rows' losses "
            f"as far as its logits show (with label smoothing or a custom loss it is not); {advice}"
        )
    return (
        "the difficulty of a row is its plain loss, from the logits; the trained loss has other parts as well (such as "
        "label smoothing)"
    )


def check_loss_path(settings: CurriculumSettings, trainer_name: str) -> str:
    """Return the notice for a subclass that replaces ``compute_loss``. Raises ControlError if any method is used."""
    if settings.methods:
        raise ControlError(
            f"curriculum {settings.curriculum} reads and weights the losses of rows in the trainer's own compute_loss, "
            f"but compute_loss of {trainer_name} does not call it; take the loss from super().compute_loss(...), or "
            "leave the curriculum out"
        )
    return f"compute_loss of {trainer_name} does not call the trainer's own: difficulties stay unknown"


def require_whole_steps(settings: CurriculumSettings, rows_per_step: int) -> None:
    """Raise SettingsError if a window of ``acmds`` is shorter than a step; the user may have meant epochs."""
    if "acmds" in settings.methods and settings.difficulty_window < rows_per_step:
        raise SettingsError(
            f"difficulty_window is {settings.difficulty_window} samples, but an optimizer step takes {rows_per_step}; "
            f"give {rows_per_step} or more. To set the epochs after which a score is stale, use difficulty_stale_epochs"
        )


def require_enough_epochs(settings: CurriculumSettings, epochs: float, max_steps: int = 0) -> None:
    """Raise SettingsError if a run is too short for infobatch. ``max_steps``: ends the run if above 0."""
    if "infobatch" in settings.methods and epochs < FEWEST_EPOCHS_TO_PRUNE:
        enough = math.ceil(max_steps * FEWEST_EPOCHS_TO_PRUNE / epochs)
        longer = f"max_steps to {enough}" if max_steps > 0 else "num_train_epochs"
        raise SettingsError(
            f"curriculum infobatch over {epochs:.3g} epochs: its first epoch learns what is easy and its last ones use "
            f"all rows, so it needs {FEWEST_EPOCHS_TO_PRUNE} or more; raise {longer} or use another curriculum"
        )


def never_cuts(settings: CurriculumSettings, longest: int) -> list[str]:
    """Return a warning if length warm-up starts at a length that no row exceeds; nothing otherwise."""
    if "length_warmup" not in settings.methods or longest > settings.length_warmup_start:
        return []
    return [
        f"curriculum length_warmup cuts nothing: the longest row has {longest:,} tokens, and length_warmup_start is "
        f"{settings.length_warmup_start:,}"
    ]


def never_judges(settings: CurriculumSettings, config: CurriculumConfig, epochs: float) -> list[str]:
    """Return a warning if the run is too short for the noise guard to judge any row; nothing otherwise."""
    needed = observations_needed(config, by_class=(config.classes or 0) > 1)
    if "noise_guard" not in settings.methods or epochs > needed:
        return []
    return [
        f"curriculum noise_guard leaves nothing out and names no row: it judges rows after {needed} epochs, and this "
        f"run has {epochs:.3g}"
    ]
