"""A trainer that goes on from a checkpoint: what is refused before it begins, and what is not as it was, by name."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import has_length

from scu_trainer.data.numbered import Numbered, draws
from scu_trainer.run_files import read_json
from scu_trainer.train.checkpoints.adapters import check_adapter
from scu_trainer.train.checkpoints.compatibility import facts_of, tell_of_changes
from scu_trainer.train.checkpoints.findings import EPOCH_START, STATE, has_optimizer, step_inside
from scu_trainer.train.checkpoints.format import read_manifest
from scu_trainer.train.loop import Loop, called
from scu_trainer.train.loss.rows.model_loss import comes_from
from scu_trainer.train.step.distributed.deepspeed_rules import check_checkpoint

logger = logging.getLogger("scu_trainer")

GIVEN_BY = {
    "scu_state.json": ("regularization", "regularization=RegularizationSettings(...) (scu: true)"),
    "memory_state.json": ("memory", "memory=MemorySettings(...) (memory_control: true)"),
    "curriculum_state.json": ("curriculum", "curriculum=CurriculumSettings(...) (curriculum: the one of before)"),
    "safety_state.json": ("bad_numbers", "safety=SafetySettings(...)"),
    "early_stopping.json": ("early_stopping", "safety=SafetySettings(early_stopping_patience=...)"),
    "ema.safetensors": ("weight_average", "efficiency=EfficiencySettings(ema_decay=...)"),
    "retain_state.json": ("retention", "the settings of `scu-trainer retain` that it had"),
}
"""Of each file of a checkpoint: the name of the loop that wrote it, and what gives a trainer that loop."""


def check_resume(checkpoint: Path, trainer: Any) -> None:
    """Raises CheckpointError where ``trainer``, an ``SCUTrainer``, could not read ``checkpoint``, or has another
    adapter."""
    check_checkpoint(checkpoint, trainer.args, trainer.resumes_weights_only)
    if not trainer.checkpoints.facts:  # the commands compare their settings
        check_adapter(checkpoint, trainer.model, tells=trainer.is_world_process_zero())


def tell_of_resume(checkpoint: Path, trainer: Any, steps_per_epoch: int) -> None:
    """What ``checkpoint`` does not hold of ``trainer``, an ``SCUTrainer``, or what that has otherwise now."""
    _tell_of_fresh_reference(checkpoint, trainer)
    _tell_of_lost_generations(checkpoint, trainer.args, steps_per_epoch)
    _tell_of_fresh_average(checkpoint, trainer.callback_handler.callbacks)
    if trainer.is_stock and owes_evaluation(trainer.state, trainer.args):
        logger.warning(
            "%s was saved before the evaluation at the end of its epoch, which the stock Trainer leaves out when it "
            "resumes: its figures are missing, and dropout differs from here on. With a loop, such as "
            "safety=SafetySettings(), it is made",
            checkpoint,
        )
    if not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled):
        _tell_of_fresh_optimizer(checkpoint, trainer.is_stock)
    if not has_optimizer(checkpoint):
        return
    _tell_of_left_out(checkpoint, trainer.loops)
    are_rows_chosen = any(type(loop).loader is not Loop.loader for loop in trainer.loops)
    _tell_of_other_order(checkpoint, trainer, are_rows_chosen, steps_per_epoch)
    _tell_of_other_pass(checkpoint, trainer)
    if not trainer.checkpoints.facts:  # the commands say it themselves
        is_stream = isinstance(trainer.train_dataset, torch.utils.data.IterableDataset)
        tell_of_changes(checkpoint, trainer.args, are_rows_chosen, is_stream)


def place_in_stream(checkpoint: Path, accumulated: int) -> tuple[int, int]:
    """(passes that are done, batches of the next one that are) of data without a length: the stock Trainer takes all
    passes for one, and skips more batches than that has. ``accumulated``: batches per step, where the checkpoint does
    not tell."""
    state = read_json(checkpoint / STATE)
    passes, part = divmod(state["epoch"], 1)
    was = facts_of(checkpoint).get("configuration", {}).get("gradient_accumulation_steps", accumulated)
    return int(passes), round(part * state["max_steps"] * was)


def owes_evaluation(state: Any, args: Any) -> bool:
    """Whether the run resumes from the end of an epoch that was saved before it was evaluated, which the stock Trainer
    then leaves out: its row and best model are missing, and later steps draw other random numbers."""
    is_due = args.eval_strategy == "epoch" and args.eval_delay <= state.epoch
    is_end = state.epoch % 1 == 0 or state.global_step >= state.max_steps
    rows = (row for row in state.log_history if row["step"] == state.global_step)
    return is_due and is_end and not any(name.startswith("eval_") for row in rows for name in row)


def tell_of_no_step(trainer: Any) -> None:
    """Of a run that is resumed where it ended: whoever resumes it expects steps, and the stock Trainer may add one."""
    state, ended = trainer.state, next((loop for loop in trainer.loops if loop.is_over), None)
    why = "which was its last; to train on, raise max_steps or num_train_epochs"
    if state.global_step < state.max_steps and ended is not None:
        why = f"where {called(ended)} had ended it; to train on, resume without that loop"
    logger.warning("no step is trained: the run resumes from step %d, %s", state.global_step, why)


def tell_of_loader(loader: Any, skips: bool, is_stock: bool) -> None:
    """What a run that resumes does not get from ``loader`` as before. ``skips``: it resumes within an epoch.
    ``is_stock``: every loop is off, so no row is read that the stock Trainer does not read."""
    if skips:
        _tell_of_other_loader(loader)
    persists = getattr(loader, "persistent_workers", False)
    if not is_stock and (skips or persists):
        _tell_of_draws(loader)
    if persists:
        logger.warning(
            "dataloader_persistent_workers: the workers start again, and take a random number of the process for it, "
            "which in an uninterrupted run they do not: dropout, and what workers draw, may differ from here on. To "
            "resume exactly, train with dataloader_persistent_workers: false"
        )


def _tell_of_other_loader(loader: Any) -> None:
    """Accelerate skips what was trained by making a plain DataLoader from the dataset and batch sampler of ``loader``,
    whatever that does beyond."""
    owner = next((kind for kind in type(loader).__mro__ if "__iter__" in vars(kind)), type(loader))
    if not comes_from(owner, "torch", "accelerate", "scu_trainer"):
        logger.warning(
            "the run resumes within an epoch, for which accelerate replaces %s by a plain DataLoader that skips what "
            "was trained: until this epoch ends its batches are not those that %s gives, and if they are fewer the run "
            "may end before its last step. To continue exactly, resume from a checkpoint at the end of an epoch "
            "(save_strategy: epoch)",
            *[type(loader).__name__] * 2,
        )


def _tell_of_draws(loader: Any) -> None:
    """Random numbers that were drawn for rows, and that no checkpoint holds."""
    rows, draw = getattr(loader, "dataset", None), False
    if isinstance(rows, Numbered) or isinstance(rows, torch.utils.data.IterableDataset) or not has_length(rows):
        return
    try:
        draw = draws(rows, loader.collate_fn)
    except Exception as error:  # of somebody's code: the training reads rows as well, and raises what is to be raised
        logger.debug("whether rows draw at random cannot be told: %r", error)
    if draw:
        logger.warning(
            "the dataset or its collator draws at random (masks, augmentation), and checkpoints do not hold what the "
            "loader had drawn: until this epoch ends, and with dataloader_persistent_workers after it, rows are drawn "
            "otherwise than in an uninterrupted run. With curriculum=CurriculumSettings('none') they depend on seed, "
            "epoch and batch alone, and a run resumes exactly"
        )


def _tell_of_left_out(checkpoint: Path, loops: Collection[Loop]) -> None:
    """A trainer that has no loop for a state in ``checkpoint`` continues without it, which no figure shows."""
    classes = read_manifest(checkpoint).get("loops")
    present = {loop.name for loop in loops} | {loop.state_file for loop in loops}
    for file, kind in (dict.fromkeys(GIVEN_BY) | (classes if isinstance(classes, dict) else {})).items():
        name, way = GIVEN_BY.get(file, (file, f"callbacks=[{kind}(...)]"))
        if name not in present and (checkpoint / file).is_file():
            logger.warning(
                "%s holds %s, the state of a loop (%s) that this trainer does not have: the run continues without the "
                "loop, and the checkpoints from here on do not hold its state. To keep it, resume from %s with %s",
                checkpoint, file, kind or name, checkpoint.name, way,
            )  # fmt: skip


def _tell_of_fresh_optimizer(checkpoint: Path, is_stock: bool) -> None:
    """The stock Trainer reads optimizer and schedule both or, without a word, neither. With ``weights_only`` the
    schedule is made to ``catch_up``."""
    missing = [name for name in ("optimizer.pt", "scheduler.pt") if not (checkpoint / name).is_file()]
    if missing:
        names = " and no ".join(missing)
        goes_on = "optimizer starts over, and its schedule continues from this step"
        over = "optimizer and its schedule start over" if is_stock or has_optimizer(checkpoint) else goes_on
        logger.warning("%s holds no %s: the %s", checkpoint, names, over)


def _tell_of_fresh_reference(checkpoint: Path, trainer: Any) -> None:
    """TRL moves a reference model (DPO, GRPO, ...) or a teacher (SDFT, SDPO) after the trained one, and saves it
    nowhere."""
    args = trainer.args
    if getattr(args, "sync_ref_model", False):
        name, what, setting, steps = "ref_model", "reference model", "sync_ref_model", args.ref_model_sync_steps
    elif getattr(args, "teacher_model_kind", None) == "ema":
        name, what, setting, steps = "teacher_model", "teacher", "teacher_model_kind: ema", args.teacher_sync_steps
    else:
        return
    moved = getattr(trainer, name, None)
    if moved is None or step_inside(checkpoint) < steps:
        return
    advice = (
        f". To continue exactly, save trainer.{name}.state_dict() with each checkpoint (in on_save of a callback), "
        f"and give it to trainer.{name}.load_state_dict before you call train"
    )
    logger.warning(
        "%s does not hold the %s, which had followed the trained one (%s): it starts over from the one that this "
        "trainer began with, so the result is not that of an uninterrupted run%s",
        checkpoint,
        what,
        setting,
        "" if moved is trainer.model else advice,  # an adapter beside the trained one, whose copies a callback holds
    )


def _tell_of_lost_generations(checkpoint: Path, args: Any, steps_per_epoch: int) -> None:
    """TRL generates for several steps at once, and saves nowhere what is still to be trained on."""
    generates_for = getattr(args, "steps_per_generation", None)
    if generates_for is None:
        return
    batches, accumulated = generates_for * getattr(args, "num_iterations", 1), args.gradient_accumulation_steps
    if step_inside(checkpoint) % steps_per_epoch * accumulated % batches:
        logger.warning(
            "%s does not hold what had been generated for this step and the next ones: it is generated again, so "
            "the result is not that of an uninterrupted run. To continue exactly, resume from a checkpoint whose step "
            "is a multiple of %d, which is how many steps one generation takes (set save_steps to such a number)",
            checkpoint,
            math.lcm(batches, accumulated) // accumulated,
        )


def _tell_of_other_pass(checkpoint: Path, trainer: Any) -> None:
    """Of a stream that the stock Trainer does not find its place in."""
    if trainer.args.ignore_data_skip or has_length(trainer.train_dataset) or not trainer.is_stock:
        return
    passes, _ = place_in_stream(checkpoint, 1)
    if passes:
        logger.warning(
            "the data have no length, and this run is in pass %d over them: the stock Trainer skips as many batches as "
            "were trained on, which is more than a pass has, and continues from the start of the next one, so the "
            "result is not that of an uninterrupted run. With a loop, such as safety=SafetySettings(), it continues "
            "within the pass",
            passes + 1,
        )


def _tell_of_other_order(checkpoint: Path, trainer: Any, are_rows_chosen: bool, steps_per_epoch: int) -> None:
    """Of samplers that draw the order of an epoch from the generators of the process."""
    args = trainer.args
    is_seedable = args.accelerator_config.use_seedable_sampler
    if args.train_sampling_strategy == "group_by_length":
        setting = "train_sampling_strategy: group_by_length"
    elif args.train_sampling_strategy == "random" and not is_seedable:
        setting = "accelerator_config use_seedable_sampler: false"
    else:
        return
    has_own = not is_seedable and args.world_size > 1  # accelerate gives the sampler a generator
    is_kept = not trainer.is_stock and not has_own and (checkpoint / EPOCH_START).is_dir()
    if is_kept or are_rows_chosen or args.ignore_data_skip or not has_length(trainer.train_dataset):
        return
    way = "Where a loop is on, such as safety=SafetySettings(), checkpoints hold them"
    if has_own:
        way = "With several processes only accelerator_config use_seedable_sampler: true keeps the order"
    step = step_inside(checkpoint)
    if step > steps_per_epoch and step % steps_per_epoch:  # the first epoch begins as before, with the seed
        logger.warning(
            "%s: the rows of this epoch come in another order than before, so some are seen twice or not at all, "
            "because the random numbers that it began with are not put back. %s",
            setting,
            way,
        )


def _tell_of_fresh_average(checkpoint: Path, callbacks: Collection[Any]) -> None:
    """TRL's ``BEMACallback`` keeps its average, and the weights that it began with, and saves neither."""
    for callback in callbacks:
        if not any(kind.__name__ == "BEMACallback" for kind in type(callback).__mro__):  # without importing TRL
            continue
        if step_inside(checkpoint) > callback.update_after:
            logger.warning(
                "%s does not hold the average of the weights that %s keeps: it starts over from the weights of this "
                "checkpoint, so the averaged model is not that of an uninterrupted run",
                checkpoint, type(callback).__name__,
            )  # fmt: skip


def catch_up(scheduler: Any, checkpoint: Path) -> None:
    """A schedule whose state was not saved goes to where the checkpoint is."""
    steps = step_inside(checkpoint)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")  # no weight was stepped yet
        for _ in range(steps):
            scheduler.step()
