"""Checks and warnings for a trainer that resumes from a checkpoint: what is refused, and what will differ."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import has_length

from scu_trainer.data.numbered import Numbered, is_random_per_read
from scu_trainer.run_files import read_object
from scu_trainer.train.checkpoints.adapters import check_adapter
from scu_trainer.train.checkpoints.compatibility import facts_of, warn_about_changes
from scu_trainer.train.checkpoints.findings import EPOCH_START, STATE, has_optimizer, saved_step
from scu_trainer.train.checkpoints.format import read_manifest
from scu_trainer.train.loop import Loop, name_of_loop
from scu_trainer.train.loss.rows.model_loss import comes_from
from scu_trainer.train.step.distributed.deepspeed_rules import check_checkpoint

logger = logging.getLogger("scu_trainer")

LOOPS_BY_STATE_FILE = {
    "scu_state.json": ("regularization", "regularization=RegularizationSettings(...) (scu: true)"),
    "memory_state.json": ("memory", "memory=MemorySettings(...) (memory_control: true)"),
    "curriculum_state.json": ("curriculum", "curriculum=CurriculumSettings(...) (curriculum: the same as before)"),
    "safety_state.json": ("bad_numbers", "safety=SafetySettings(...)"),
    "early_stopping.json": ("early_stopping", "safety=SafetySettings(early_stopping_patience=...)"),
    "ema.safetensors": ("weight_average", "efficiency=EfficiencySettings(ema_decay=...)"),
    "retain_state.json": ("retention", "the settings of the earlier `scu-trainer retain`"),
}
"""File of a checkpoint -> (name of the loop that wrote it, what to pass so that a trainer has that loop)."""

LOOP_KEEPS_ORDER = "Turn on any loop, for example safety=SafetySettings(), to keep the order"


def check_resume(checkpoint: Path, trainer: Any) -> None:
    """Raise CheckpointError if ``trainer``, an ``SCUTrainer``, cannot read ``checkpoint`` or has another adapter."""
    check_checkpoint(checkpoint, trainer.args, trainer.resumes_weights_only)
    if not trainer.checkpoints.facts:  # the commands compare their settings themselves
        check_adapter(checkpoint, trainer.model, tells=trainer.is_world_process_zero())


def warn_about_resume(checkpoint: Path, trainer: Any, steps_per_epoch: int) -> None:
    """Warn about all that ``checkpoint`` does not hold for ``trainer``, an ``SCUTrainer``, or that has changed."""
    _warn_about_fresh_reference(checkpoint, trainer)
    _warn_about_lost_generations(checkpoint, trainer.args, steps_per_epoch)
    _warn_about_fresh_average(checkpoint, trainer.callback_handler.callbacks)
    if trainer.is_stock and is_evaluation_missing(trainer.state, trainer.args):
        logger.warning(
            "%s was saved before its end-of-epoch evaluation, which the stock Trainer skips when it resumes: its "
            "metrics will be missing and dropout will differ from here on. Turn on any loop, for example "
            "safety=SafetySettings(), to run that evaluation",
            checkpoint,
        )
    if trainer.is_stock and trainer.args.eval_on_start:
        logger.warning(
            "eval_on_start: the stock Trainer evaluates again when it resumes: the log has one row more, and early "
            "stopping counts one evaluation more. Turn on any loop, for example safety=SafetySettings(), so that only "
            "the first start evaluates"
        )
    if not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled):
        _warn_about_fresh_optimizer(checkpoint, trainer.is_stock)
    if not has_optimizer(checkpoint):
        return
    _warn_about_missing_loops(checkpoint, trainer.loops)
    are_rows_chosen = any(type(loop).loader is not Loop.loader for loop in trainer.loops)
    _warn_about_other_order(checkpoint, trainer, are_rows_chosen, steps_per_epoch)
    _warn_about_skipped_pass(checkpoint, trainer)
    if not trainer.checkpoints.facts:  # the commands report changes themselves
        is_stream = isinstance(trainer.train_dataset, torch.utils.data.IterableDataset)
        warn_about_changes(checkpoint, trainer.args, are_rows_chosen, is_stream)


def stream_position(checkpoint: Path, accumulated: int) -> tuple[int, int]:
    """Return (completed passes, completed batches of the next) for data without a length: the stock Trainer takes all
    passes for one epoch, and skips more batches than one has. ``accumulated``: batches per step, if not recorded."""
    state = read_object(checkpoint / STATE)
    passes, part = divmod(state["epoch"], 1)
    accumulated_before = facts_of(checkpoint).get("configuration", {}).get("gradient_accumulation_steps", accumulated)
    return int(passes), round(part * state["max_steps"] * accumulated_before)


def is_at_epoch_end(state: Any) -> bool:
    """Return whether the last step of an epoch, or of the training, is done."""
    return state.epoch % 1 == 0 or state.global_step >= state.max_steps


def is_evaluation_missing(state: Any, args: Any) -> bool:
    """Return whether the run resumes from the end of an epoch that was saved before it was evaluated. The stock Trainer
    skips that evaluation: its log row and best model are missing, and later steps draw other random numbers."""
    is_due = args.eval_strategy == "epoch" and args.eval_delay <= state.epoch
    return is_due and is_at_epoch_end(state) and not is_evaluated(state)


def is_evaluated(state: Any) -> bool:
    """Return whether the log has an evaluation at the current step."""
    rows = (row for row in state.log_history if row["step"] == state.global_step)
    return any(name.startswith("eval_") for row in rows for name in row)


def warn_about_no_step(trainer: Any) -> None:
    """Warn when a run is resumed at its last step, because the user expects training to continue."""
    state, ending_loop = trainer.state, next((loop for loop in trainer.loops if loop.is_over), None)
    why = "which was its last; to continue training, raise max_steps or num_train_epochs"
    if state.global_step < state.max_steps and ending_loop is not None:
        why = f"where {name_of_loop(ending_loop)} had ended it; to continue training, resume without that loop"
    logger.warning("no step is trained: the run resumes from step %d, %s", state.global_step, why)


def advance_order(loader: Any, passes: int) -> None:
    """Let the sampler of ``loader``, if it draws from its own generator, draw what it did in ``passes`` passes."""
    sampler = _sampler_with_generator(loader)
    if sampler is not None:
        for _ in range(passes):
            for _ in sampler:
                pass


def _sampler_with_generator(loader: Any) -> Any:
    """Return the sampler of ``loader`` if its order depends on how often it was iterated: it draws from a generator of
    its own, as TRL's RepeatSampler does, and no epoch seeds that generator. None otherwise."""
    batches = getattr(loader, "batch_sampler", None)
    while hasattr(batches, "batch_sampler"):  # of a rank, or without the batches already trained on
        batches = batches.batch_sampler
    sampler = getattr(batches, "sampler", None)
    has_own = isinstance(getattr(sampler, "generator", None), torch.Generator) and not hasattr(sampler, "set_epoch")
    # With several processes accelerate gives a RandomSampler a generator with a seed that nobody knows.
    is_given = isinstance(sampler, torch.utils.data.RandomSampler) and loader.synchronized_generator is not None
    return sampler if has_own and not is_given else None


def warn_about_loader(loader: Any, passes: int, skips: bool, is_stock: bool) -> None:
    """Warn about what a resumed run does not get from ``loader`` as before. ``passes``: completed before. ``skips``: it
    resumes within an epoch. ``is_stock``: every loop is off, so no row is read that the stock Trainer would not read.
    """
    if skips:
        _warn_about_replaced_loader(loader)
    sampler = _sampler_with_generator(loader)
    if is_stock and passes and sampler is not None:
        _warn_about_order(type(sampler).__name__, "the generator that draws it starts over", LOOP_KEEPS_ORDER)
    persists = getattr(loader, "persistent_workers", False)
    if not is_stock and (skips or persists):
        _warn_about_random_rows(loader)
    if persists:
        logger.warning(
            "dataloader_persistent_workers: the workers start again and draw a random number of the process for "
            "it, which does not happen in an uninterrupted run: dropout, and what the workers draw, may differ "
            "from here on. To resume exactly, train with dataloader_persistent_workers: false"
        )


def _warn_about_replaced_loader(loader: Any) -> None:
    """Warn if ``loader`` iterates in its own way: to skip batches that were trained on, accelerate replaces it by a
    plain DataLoader with the same dataset and batch sampler."""
    owner = next((kind for kind in type(loader).__mro__ if "__iter__" in vars(kind)), type(loader))
    if not comes_from(owner, "torch", "accelerate", "scu_trainer"):
        logger.warning(
            "the run resumes within an epoch, so accelerate replaces %s by a plain DataLoader that skips the "
            "batches already trained on: until this epoch ends, its batches are not those of %s, and if they are "
            "fewer, the run may end before its last step. To continue exactly, resume from a checkpoint at the end "
            "of an epoch (save_strategy: epoch)",
            *[type(loader).__name__] * 2,
        )


def _warn_about_random_rows(loader: Any) -> None:
    """Warn if reading rows draws random numbers, because no checkpoint holds those that the loader had drawn."""
    rows, is_random = getattr(loader, "dataset", None), False
    if isinstance(rows, Numbered) or isinstance(rows, torch.utils.data.IterableDataset) or not has_length(rows):
        return
    try:
        is_random = is_random_per_read(rows, loader.collate_fn)
    except Exception as error:  # user code failed; training reads the same rows and will raise this error if it matters
        logger.debug("could not find out whether rows draw random numbers: %r", error)
    if is_random:
        logger.warning(
            "the dataset or its collator draws at random (masks, augmentation), and checkpoints do not hold what "
            "the loader had drawn: until this epoch ends (and with dataloader_persistent_workers also after it), "
            "rows differ from those of an uninterrupted run. With curriculum=CurriculumSettings('none') they "
            "depend only on seed, epoch and batch, and a run resumes exactly"
        )


def _warn_about_missing_loops(checkpoint: Path, loops: Collection[Loop]) -> None:
    """Warn if ``checkpoint`` holds the state of a loop that this trainer does not have: no metric would show it."""
    classes = read_manifest(checkpoint).get("loops")
    present = {loop.name for loop in loops} | {loop.state_file for loop in loops}
    for file, kind in (dict.fromkeys(LOOPS_BY_STATE_FILE) | (classes if isinstance(classes, dict) else {})).items():
        name, remedy = LOOPS_BY_STATE_FILE.get(file, (file, f"callbacks=[{kind}(...)]"))
        if name not in present and (checkpoint / file).is_file():
            logger.warning(
                "%s holds %s, the state of a loop (%s) that this trainer does not have: the run continues without the "
                "loop, and the checkpoints from here on do not hold its state. To keep it, resume from %s with %s",
                checkpoint, file, kind or name, checkpoint.name, remedy,
            )  # fmt: skip


def _warn_about_fresh_optimizer(checkpoint: Path, is_stock: bool) -> None:
    """Warn if optimizer or schedule are missing: the stock Trainer reads both or, silently, neither. With
    ``weights_only``, ``advance_schedule`` advances the schedule."""
    missing = [name for name in ("optimizer.pt", "scheduler.pt") if not (checkpoint / name).is_file()]
    if missing:
        names = " and no ".join(missing)
        continues = "optimizer starts over, and its schedule continues from this step"
        consequence = "optimizer and its schedule start over" if is_stock or has_optimizer(checkpoint) else continues
        logger.warning("%s holds no %s: the %s", checkpoint, names, consequence)


def _warn_about_fresh_reference(checkpoint: Path, trainer: Any) -> None:
    """Warn if TRL updates a reference model (DPO, GRPO, ...) or teacher (SDFT, SDPO) in training: it never saves it."""
    args = trainer.args
    if getattr(args, "sync_ref_model", False):
        name, what, setting, steps = "ref_model", "reference model", "sync_ref_model", args.ref_model_sync_steps
    elif getattr(args, "teacher_model_kind", None) == "ema":
        name, what, setting, steps = "teacher_model", "teacher", "teacher_model_kind: ema", args.teacher_sync_steps
    else:
        return
    followed = getattr(trainer, name, None)
    if followed is None or saved_step(checkpoint) < steps:
        return
    advice = (
        f". To continue exactly, save trainer.{name}.state_dict() with each checkpoint (in on_save of a callback), "
        f"and pass it to trainer.{name}.load_state_dict before you call train"
    )
    logger.warning(
        "%s does not hold the %s, which had followed the trained model (%s): it starts over from the one that this "
        "trainer began with, so the result differs from that of an uninterrupted run%s",
        checkpoint,
        what,
        setting,
        "" if followed is trainer.model else advice,  # then it is a second adapter, and a callback holds its weights
    )


def _warn_about_lost_generations(checkpoint: Path, args: Any, steps_per_epoch: int) -> None:
    """Warn about lost generations: TRL generates for several steps at once, and never saves those still to be used."""
    generates_for = getattr(args, "steps_per_generation", None)
    if generates_for is None:
        return
    batches, accumulated = generates_for * getattr(args, "num_iterations", 1), args.gradient_accumulation_steps
    if saved_step(checkpoint) % steps_per_epoch * accumulated % batches:
        logger.warning(
            "%s does not hold the generations for this step and the next ones: they are generated again, so the result "
            "differs from that of an uninterrupted run. To continue exactly, resume from a checkpoint whose step is a "
            "multiple of %d, the number of steps that one generation serves (set save_steps to such a number)",
            checkpoint,
            math.lcm(batches, accumulated) // accumulated,
        )


def _warn_about_skipped_pass(checkpoint: Path, trainer: Any) -> None:
    """Warn if the stock Trainer cannot find its place in a stream."""
    if trainer.args.ignore_data_skip or has_length(trainer.train_dataset) or not trainer.is_stock:
        return
    passes, _ = stream_position(checkpoint, 1)
    if trainer.args.eval_strategy == "epoch" and is_evaluated(trainer.state):  # so a pass ends with this checkpoint
        logger.warning(
            "the data have no length, and a pass over them ended with %s: the stock Trainer evaluates again at the end "
            "of that pass, and later steps draw other random numbers. Turn on any loop, for example "
            "safety=SafetySettings(), to continue with the next pass",
            checkpoint,
        )
    if passes:
        logger.warning(
            "the data have no length, and this run is in pass %d over them: the stock Trainer skips as many "
            "batches as were trained on, which is more than a pass has, and continues from the start of the next "
            "pass, so the result differs from that of an uninterrupted run. Turn on any loop, for example "
            "safety=SafetySettings(), to continue within the pass",
            passes + 1,
        )


def _warn_about_other_order(checkpoint: Path, trainer: Any, are_rows_chosen: bool, steps_per_epoch: int) -> None:
    """Warn if the sampler draws the order of an epoch from random states that are not restored."""
    args = trainer.args
    is_seedable = args.accelerator_config.use_seedable_sampler
    if args.train_sampling_strategy == "group_by_length":
        setting = "train_sampling_strategy: group_by_length"
    elif args.train_sampling_strategy == "random" and not is_seedable:
        setting = "accelerator_config use_seedable_sampler: false"
    else:
        return
    has_own = not is_seedable and args.world_size > 1  # accelerate gives the sampler its own generator
    is_kept = not trainer.is_stock and not has_own and (checkpoint / EPOCH_START).is_dir()
    if is_kept or are_rows_chosen or args.ignore_data_skip or not has_length(trainer.train_dataset):
        return
    remedy = LOOP_KEEPS_ORDER
    if has_own:
        remedy = "With several processes only accelerator_config use_seedable_sampler: true keeps the order"
    step = saved_step(checkpoint)
    if step > steps_per_epoch and step % steps_per_epoch:  # the first epoch draws its order from the seed
        _warn_about_order(setting, "the random state that the epoch began with is not restored", remedy)


def _warn_about_order(what: str, reason: str, remedy: str) -> None:
    logger.warning(
        "%s: the rows of this epoch come in another order than before, so some are seen twice or not at all, because "
        "%s. %s",
        what,
        reason,
        remedy,
    )


def _warn_about_fresh_average(checkpoint: Path, callbacks: Collection[Any]) -> None:
    """Warn about TRL's ``BEMACallback``: it saves neither its average nor the weights that it began with."""
    for callback in callbacks:
        if not any(kind.__name__ == "BEMACallback" for kind in type(callback).__mro__):  # without importing TRL
            continue
        if saved_step(checkpoint) > callback.update_after:
            moves_reference = getattr(callback, "update_ref_model", False)
            also = ", and the trained one, whose reference model follows it," if moves_reference else ""
            logger.warning(
                "%s does not hold the weight average of %s: it starts over from the weights of this checkpoint, so "
                "the averaged model%s differs from that of an uninterrupted run",
                checkpoint, type(callback).__name__, also,
            )  # fmt: skip


def advance_schedule(scheduler: Any, checkpoint: Path) -> None:
    """Advance a schedule without a saved state to the step of the checkpoint."""
    steps = saved_step(checkpoint)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")  # no optimizer step yet
        for _ in range(steps):
            scheduler.step()
