"""Run a curriculum in a Trainer: plan epochs, collect the losses of rows, and keep statistics of both.

    begin_epoch        plans the epoch from the losses of all ranks, and replaces the nominal number of steps by the
                       real one
    batches            counts delivered batches, and cuts rows while the length warms up
    see                collects each row's loss from the training forward
    on_optimizer_step  moves the learning rate by the share of the epochs that is done
    on_step_end        with acmds, chooses the rows after the next window of samples again
    end_epoch          writes a row of curriculum.json

Nothing here reads the values in a batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Optional

import numpy
import torch
from accelerate.utils import gather_object
from safetensors.numpy import save_file
from transformers import Trainer

from scu_trainer.control import curriculum as control
from scu_trainer.control.difficulty import Difficulty
from scu_trainer.data.numbered import Numbered, NumberedCollator, content_crc32, lengths_of
from scu_trainer.data.samplers import CurriculumSampler
from scu_trainer.data.store import StoredArrays
from scu_trainer.errors import CheckpointError, ControlError
from scu_trainer.run_files import write_json
from scu_trainer.settings import CurriculumSettings
from scu_trainer.settings.stock import effective_data_seed
from scu_trainer.train.checkpoints.saved_state import read_state, reading
from scu_trainer.train.curriculum.deliveries import Deliveries, DeliveryCounts
from scu_trainer.train.curriculum.rules import (
    BY_LOSS,
    check_loss_path,
    check_reading,
    never_cuts,
    never_judges,
    refuse,
    require_enough_epochs,
    require_whole_steps,
)
from scu_trainer.train.curriculum.run_length import RunLength
from scu_trainer.train.curriculum.seen_losses import Losses, SeenLosses
from scu_trainer.train.curriculum.suspects import SUSPECTS_FILE, write_suspects
from scu_trainer.train.loop import Loop, run_folder
from scu_trainer.train.loss.analysis.trials import is_batch_norm
from scu_trainer.train.loss.rows.row_readings import RowLosses, RowLossReading
from scu_trainer.train.loss.rows.row_weights import RowWeights
from scu_trainer.train.step.recovery.second_try import second_try
from scu_trainer.train.step.recovery.snapshot import replaced

logger = logging.getLogger("scu_trainer")

STATE_FILE = "curriculum_state.json"
ARRAYS_FILE = "curriculum_state.safetensors"

REPORTED_COUNTS = tuple(
    "rows real_tokens padded_tokens cut_tokens seen repeated readmitted suspects quarantined unseen".split()
)
"""Entries of a row of curriculum.json that are reported as metrics."""


class CurriculumLoop(Loop):
    """The curriculum of one training run; writes ``curriculum.json``. ``LossPath`` reports losses to it.

    ``notices``: what the user should know at the end of the run. Raises SettingsError for arguments that would also
    choose samples, and ControlError for data whose samples cannot be numbered.
    """

    name = "curriculum"
    history_file = "curriculum.json"

    def __init__(self, trainer: Trainer, settings: CurriculumSettings) -> None:
        self.trainer, self.settings = trainer, settings
        refuse(trainer)
        self.sampler: Optional[CurriculumSampler] = None
        self.newest: Optional[dict[str, Any]] = None
        self.notices: list[str] = []
        self._tracks_difficulty = "acmds" in settings.methods
        self._classes: Optional[int] = None  # known from the first batch of the first call of train

    @property
    def difficulty(self) -> Difficulty:
        """Difficulties as of now; with several ranks, as of the last checkpoint or end of an epoch."""
        if self.sampler is None:
            raise ControlError("difficulties are known once training has begun: call train() first")
        if self.sampler.world == 1:
            self.gather()
        return self.sampler.difficulty

    # -- a run ---------------------------------------------------------------------------------------------------------

    def loader(self) -> Optional[torch.utils.data.DataLoader]:
        """Return the stock loader over this curriculum's batches, and reset everything for a new run."""
        if self.trainer.train_dataset is None:
            return None
        refuse(self.trainer)  # arguments, data and sampler may have changed since the trainer was created
        trainer, args, rows = self.trainer, self.trainer.args, self.trainer.train_dataset
        # Methods that leave rows out may leave a single row for the last batch.
        may_skip_rows = not set(BY_LOSS).isdisjoint(self.settings.methods)
        needs_two = may_skip_rows and any(map(is_batch_norm, trainer.model.modules()))
        self.sampler = CurriculumSampler(
            lengths_of(rows, args.length_column_name),
            self.settings,
            rows_per_batch=trainer._train_batch_size,
            seed=effective_data_seed(args),
            rank=args.process_index,
            world=args.world_size,
            content=content_crc32(rows),
            fewest_rows=2 if needs_two else 1,
        )
        self.length = RunLength(args, self.sampler.nominal_batches)
        self.sampler.epochs = self.length.epochs
        self._set_number_of_classes()
        require_enough_epochs(self.settings, self.length.epochs, args.max_steps)
        require_whole_steps(
            self.settings, self.sampler.world * args.gradient_accumulation_steps * self.sampler.config.rows_per_batch
        )
        self.counts, self.totals, self._totals_before = DeliveryCounts(), DeliveryCounts(), DeliveryCounts()
        self.notices, self.newest = [], None
        self.adjustments = 0  # how often rows were chosen again within this epoch
        self.has_unrecorded_epoch = False  # whether the last epoch was saved before its row was written
        self._resumed_at: Optional[tuple[int, float]] = None
        self._seen, self._deliveries = SeenLosses(), Deliveries(trainer.model)
        self._make_row_weights()
        self._warmup_config, self._longest = self._make_warmup_config(), int(self.sampler.lengths.max())
        self._report_notes(never_cuts(self.settings, self._longest))
        return self._stock_loader(rows)

    def _stock_loader(self, rows: Any) -> torch.utils.data.DataLoader:
        """Return the Trainer's own data loader with this curriculum as its sampler, over numbered rows."""
        trainer = self.trainer
        if hasattr(rows, "column_names"):
            rows = trainer._remove_unused_columns(rows, description="training")
        self._numbered = Numbered(rows, effective_data_seed(trainer.args), trainer.args.dataloader_num_workers > 0)
        collator = trainer._get_collator_with_removed_columns(trainer.data_collator, "training")
        collate = NumberedCollator(collator, self._numbered)
        with replaced(trainer, "data_collator", collate):
            loader = trainer._get_dataloader(
                dataset=self._numbered,
                description="Training",
                batch_size=trainer._train_batch_size,
                sampler_fn=lambda dataset: self.sampler,
                is_training=True,
            )
        # For ``loader.total_batch_size``; set late, or accelerate would treat batches of other sizes as incomplete.
        self.sampler.batch_size = trainer._train_batch_size
        return loader

    def training_values(self, values: tuple) -> tuple:
        """Return the stock Trainer's values with enough epochs to reach ``max_steps`` if epochs get shorter. Raises
        ControlError if other code chooses the samples of this training."""
        if self.sampler is None:
            raise ControlError(
                f"get_train_dataloader of {type(self.trainer).__name__} gives a loader of its own, so a curriculum "
                "cannot choose its samples; take the loader from super().get_train_dataloader(), or leave the "
                "curriculum out"
            )
        return (values[-1], *values[1:]) if self.trainer.args.max_steps > 0 else values

    @property
    def rows_trained(self) -> int:
        return self.totals.rows - self._totals_before.rows

    def rows_stand_until(self, step: int) -> int:
        """Return the step up to which the recorded rows of earlier epochs are final. A stopped run has recorded part of
        an epoch. It resumes with that epoch, and records it again as a whole."""
        if self._resumed_at is not None:
            return self.length.first_step
        return step - self.has_unrecorded_epoch

    # -- events of the stock loop --------------------------------------------------------------------------------------

    def on_train_begin(self, args, state, control, **kwargs):
        if self.has_unrecorded_epoch:
            self.end_epoch()

    def on_loss(self, loss: torch.Tensor, num_items: Any) -> None:
        if not self.trainer.loss_path.was_asked:  # the first step did not use the trainer's own compute_loss
            self._report_notes([check_loss_path(self.settings, type(self.trainer).__name__)])

    def on_optimizer_step(self, args, state, control, **kwargs):
        """Set the schedule's position and collect losses: those of the step are final, and the schedule moves next."""
        self.length.set_scheduler(state.global_step + 1, kwargs["lr_scheduler"])
        if self.sampler.world == 1 and self._seen.is_full:
            self.gather()

    def on_step_end(self, args, state, control, **kwargs):
        if self._tracks_difficulty:
            self._choose_rows_again(state.global_step - self.length.first_step)

    def on_epoch_end(self, args, state, control, **kwargs):
        self.end_epoch()

    # -- an epoch ------------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int, skipped_batches: int) -> dict[str, int]:
        """Plan the epoch. Returns the real ``steps_in_epoch`` and ``num_update_steps_per_epoch`` of the stock loop."""
        self._update_memory_costs()
        self._numbered.set_epoch(epoch)
        plan, state = self.sampler.plan(epoch), self.trainer.state
        batches = plan.micro_batches // self.sampler.world
        first_step = state.global_step - skipped_batches // self.trainer.args.gradient_accumulation_steps
        resumed, self._resumed_at = self._resumed_at, None
        continues_epoch = resumed is not None and resumed[0] == epoch
        progress = resumed[1] if continues_epoch else float(epoch)
        self.adjustments = self.adjustments if continues_epoch else 0
        self.length.begin(epoch, first_step, batches, progress)
        self.length.update_trainer_state(state)
        self._make_row_weights()
        self._report_notes(plan.notes)
        return {"steps_in_epoch": batches, "num_update_steps_per_epoch": self.length.steps}

    def _choose_rows_again(self, steps_done: int) -> None:
        """Choose the rows after the next window again, from losses as of the end of this window. Rows of the next
        window may be loaded already, so they stay the same, however many were loaded."""
        args = self.trainer.args
        per_step = self.sampler.world * args.gradient_accumulation_steps
        window = math.ceil(self.settings.difficulty_window / (per_step * self.sampler.config.rows_per_batch))
        if steps_done % window:
            return
        loaded_ahead = 2 + args.dataloader_num_workers * (args.dataloader_prefetch_factor or 2)  # batches on each rank
        ahead = max(window, math.ceil(loaded_ahead / args.gradient_accumulation_steps))
        done = (steps_done + ahead) * per_step
        if done < self.sampler.current.micro_batches:
            self.gather()
            self._update_memory_costs()
            self.adjustments += self.sampler.replan_rest(done)

    def _make_row_weights(self) -> None:
        per_window = self.sampler.world * self.trainer.args.gradient_accumulation_steps
        equal_rows = "token_budget" in self.settings.methods
        samples, device = len(self.sampler.lengths), self.trainer.args.device
        self._weights = RowWeights(self.sampler.current, samples, per_window, equal_rows, device)

    def _report_notes(self, notes: tuple[str, ...] | list[str]) -> None:
        new = [note for note in notes if note not in self.notices]
        self.notices += new
        for note in new if self.trainer.is_world_process_zero() else ():
            logger.warning(note)

    def _update_memory_costs(self) -> None:
        """Tell the sampler how much memory is free and how much each row takes, the same on all ranks."""
        if not self._tracks_difficulty or self.trainer.micro_batches is None:
            return
        loop, lengths = self.trainer.micro_batches.loop, self.sampler.lengths
        free = 1.0
        if loop.gauge is not None:
            reading = loop.gauge.read()
            free = max(0.0, 1.0 - reading.used_bytes / reading.limit_bytes)
        found = self._gather_from_ranks([(free, loop.state.cost.coefficients)])
        # In steps of an eighth, so that the same run on the same machine plans the same epochs.
        self.sampler.availability = round(8 * min(free for free, _ in found)) / 8
        coefficients = found[0][1]  # those of one rank, because otherwise ranks would plan different epochs
        tokens = lengths.astype(numpy.float64)
        self.sampler.costs = None if coefficients is None else coefficients.bytes_of(tokens, tokens**2)

    def _gather_from_ranks(self, values: list) -> list:
        return values if self.sampler.world == 1 else gather_object(values)

    def batches(self, batches: Iterator[Any], count: int) -> Iterator[Any]:
        for inputs in batches:
            cut_and_count = partial(self._deliveries.cut_and_count, inputs, self._max_row_tokens())
            yield second_try(cut_and_count, "cutting rows while the length warms up")

    def _max_row_tokens(self) -> Optional[int]:
        """Return the maximum number of tokens per row while the length warms up; None otherwise."""
        if self._warmup_config is None:
            return None
        step, total = self.trainer.state.global_step, self.length.total_steps
        return control.warmup_limit(self._warmup_config, step, total, self._longest)

    def _make_warmup_config(self) -> Optional[control.CurriculumConfig]:
        if "length_warmup" not in self.settings.methods:
            return None
        wanted = self.settings.length_warmup_steps
        share = min(1.0, wanted if wanted < 1 else wanted / self.length.total_steps)
        return replace(self.sampler.config, warmup_share=share)

    # -- losses of rows ------------------------------------------------------------------------------------------------

    def set_row_loss_reading(self, reading: Optional[RowLossReading]) -> None:
        """Take note of how the losses of rows are read, which is known from the first batch on."""
        notice = check_reading(self.settings, reading, type(self.trainer).__name__)
        if notice is not None:
            self._report_notes([notice])
        if reading is not None and reading.classes is not None and reading.classes > 1:
            self._classes = reading.classes
            self._set_number_of_classes()
        self._report_notes(never_judges(self.settings, self.sampler.config, self.length.epochs))

    def _set_number_of_classes(self) -> None:
        self.sampler.config = replace(self.sampler.config, classes=self._classes)

    def weights_of(self, ids: torch.Tensor, reading: Optional[RowLossReading]) -> Optional[torch.Tensor]:
        """Return the factor of each row's loss; None if all are 1."""
        return self._weights.of(ids, reading)

    def see(self, ids: torch.Tensor, losses: Optional[RowLosses]) -> None:
        self._seen.record(self.trainer.state.global_step, ids, losses)

    def quarantine(self, ids: torch.Tensor) -> None:
        """Exclude rows without a finite loss from this step and from every later epoch."""
        self._seen.quarantine(self.trainer.state.global_step, ids)

    def exclude_rows(self, ids: Sequence[int]) -> None:
        """Exclude rows from every later epoch. All ranks call it, with the same ``ids``."""
        self.sampler.difficulty.quarantined[list(ids)] = True

    def on_step_taken_back(self) -> None:
        """Forget that the rows of the undone step were seen, but keep those that were set aside."""
        self._seen.forget(self.trainer.state.global_step)

    def gather(self) -> None:
        """Combine the losses and counts of all ranks; every rank calls it at the same place."""
        parts = self._gather_from_ranks([(self._seen.drain(), self._deliveries.drain())])
        self.counts = sum((counts for _, counts in parts), self.counts)
        seen, epoch = Losses.join([losses for losses, _ in parts]), self.sampler.current.epoch
        self.sampler.difficulty.mark_seen(seen.ids, epoch)
        self.counts.real_tokens += int(self.sampler.lengths[seen.ids].sum())
        known = seen.take(seen.known)
        judged = (known.labels >= 0) & (known.predicted >= 0)
        self.counts.classified += int(judged.sum())
        self.counts.correct += int((known.labels == known.predicted)[judged].sum())
        self.sampler.update(known.ids, known.losses, epoch, known.labels)

    # -- statistics ----------------------------------------------------------------------------------------------------

    def end_epoch(self) -> None:
        """Record the epoch, also if training stops within it. Every rank calls it."""
        self.gather()
        step, length = self.trainer.state.global_step, self.length
        self.newest = {
            "epoch": self.sampler.current.epoch + 1,
            "step": step,
            "steps": step - length.first_step,
            "complete": step - length.first_step >= length.steps,
            "curriculum": self.settings.curriculum,
            "adjustments": self.adjustments,
            **asdict(self.counts),
            "train_accuracy": self.counts.correct / self.counts.classified if self.counts.classified else None,
            **self.sampler.report(),
        }
        self.record(self.newest)
        self.totals, self.counts, self.has_unrecorded_epoch = self.totals + self.counts, DeliveryCounts(), False
        if "noise_guard" in self.settings.methods and self.trainer.args.should_save:
            folder, trainer = run_folder(self.trainer), self.trainer
            suspects, difficulty = self.sampler.suspects(), self.sampler.difficulty
            write_suspects(folder, suspects, difficulty, trainer.train_dataset, trainer.processing_class)

    def scalars(self) -> dict[str, float]:
        """Return the statistics of the last epoch once, for one row of the logs; empty until another is recorded."""
        row, self.newest = self.newest or {}, None
        found = {f"curriculum/{name}": row[name] for name in ("epoch", *REPORTED_COUNTS) if row.get(name) is not None}
        found |= {f"curriculum/difficulty_{name}": value for name, value in (row.get("difficulty") or {}).items()}
        found |= {"train_accuracy": row["train_accuracy"]} if row.get("train_accuracy") is not None else {}
        return found | ({"curriculum/skipped": sum(row["skipped"].values())} if row else {})

    final_scalars = scalars

    def figures(self) -> dict[str, Any]:
        """Return the figures of the whole run for its summary."""
        difficulty, methods = self.sampler.difficulty, self.settings.methods
        samples, epochs_done = len(self.sampler.lengths), self.length.done(self.trainer.state.global_step)
        figures = {
            "curriculum": self.settings.curriculum,
            "samples": samples,
            "never_seen": difficulty.counts(self.sampler.current.epoch)["unseen"],
            "quarantined": int(difficulty.quarantined.sum()),
            "suspects": len(self.sampler.suspects()) if "noise_guard" in methods else 0,
            **asdict(self.totals),
            "uniform_rows": round(samples * epochs_done),
            "notices": list(self.notices),
        }
        return {self.name: figures}

    def lines(self, figures: Mapping[str, Any]) -> list[tuple[str, str]]:
        found, lines = figures[self.name], []
        if found["curriculum"] != "none":
            name, rows, uniform = found["curriculum"], found["rows"], max(1, found["uniform_rows"])
            tokens = found["padded_tokens"] / max(1, found["real_tokens"])
            share = f"{rows:,} rows seen ({rows / uniform:.2f} of uniform), {tokens:.2f} tokens per real one"
            lines.append(("curriculum", f"{name}: {share}"))
        if found["suspects"]:
            lines.append(("suspect rows", f"{found['suspects']:,} of {found['samples']:,}: {SUSPECTS_FILE}"))
        if found["quarantined"]:
            lines.append(("quarantined rows", f"{found['quarantined']:,}: their loss was not finite, or it spiked"))
        return lines

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_state(self, folder: str) -> None:
        self.gather()
        if not self.trainer.args.should_save:
            return
        state, arrays = self.sampler.live_state()
        step, length = self.trainer.state.global_step, self.length
        state |= {
            "steps_done": step - length.first_step,
            "steps": length.steps,
            "accumulation": self.trainer.args.gradient_accumulation_steps,
            "progress": length.done(step),
            "progress_before": length.progress_before,
            "counts": asdict(self.counts),
            "totals": asdict(self.totals),
            "adjustments": self.adjustments,
            "notices": self.notices,
            "unlogged": self.newest,
        }
        write_json(Path(folder) / STATE_FILE, state)
        save_file({name: numpy.ascontiguousarray(array) for name, array in arrays.items()}, Path(folder) / ARRAYS_FILE)

    def resume_position(self, checkpoint: str, stock_position: tuple[int, int]) -> tuple[int, int]:
        """Return (epoch, batches to skip). Also loads the state, which tells where the training stopped."""
        path = Path(checkpoint) / STATE_FILE
        if not path.is_file():
            return self._resume_without_state(checkpoint, stock_position)
        state, arrays = read_state(path), Path(checkpoint) / ARRAYS_FILE
        done = min(state["micro_batches"], state["steps_done"] * state["accumulation"] * state["processes"])
        other_steps = state["accumulation"] != self.trainer.args.gradient_accumulation_steps
        with reading(arrays):
            notes = self.sampler.load_state_dict(state, StoredArrays(arrays), done, recut=other_steps)
        self._report_notes(notes)
        self.notices = [*state["notices"], *(note for note in self.notices if note not in state["notices"])]
        self.counts, self.totals = DeliveryCounts(**state["counts"]), DeliveryCounts(**state["totals"])
        self._totals_before = self.totals + self.counts
        self.adjustments, self.newest = state.get("adjustments", 0), state.get("unlogged")
        epoch, steps_done = state["epoch"], state["steps_done"]
        first_step = self.trainer.state.global_step - steps_done
        self.length.begin(epoch, first_step, 1, state["progress_before"])
        self.length.steps = state["steps"]
        self.length.update_trainer_state(self.trainer.state)
        if steps_done >= state["steps"] or self.trainer.is_over:
            self.has_unrecorded_epoch = self.counts.rows > 0
            return epoch + 1, 0
        recut = self.sampler.was_recut
        self._resumed_at = (epoch, state["progress"] if recut else state["progress_before"])
        return epoch, 0 if recut else done // self.sampler.world

    def _resume_without_state(self, checkpoint: str, stock_position: tuple[int, int]) -> tuple[int, int]:
        """Resume from a checkpoint of a run without a curriculum: only the stock order of rows can continue."""
        if self.trainer.resumes_weights_only:
            self._report_notes([f"{checkpoint} holds no {STATE_FILE}: epoch {stock_position[0] + 1} starts over"])
            return stock_position[0], 0
        if self.settings.methods:
            raise CheckpointError(
                f"{checkpoint} holds no {STATE_FILE}: it was written without a curriculum or with save_only_model, "
                "so it is unknown which rows it has seen; resume with curriculum: none, or start over from its "
                "weights with model_name_or_path"
            )
        self._report_notes([f"{checkpoint} holds no {STATE_FILE}: losses of samples are tracked from here on"])
        return stock_position
